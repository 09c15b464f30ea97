"""Files that are read and written whole, and the names of those that a run leaves."""

import json
import os
import re
from pathlib import Path

import yaml

from errors import SettingError


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses a repeated key and reads 5e-6 as a number (YAML 1.1 wants a point in it)."""


def _mapping(loader, node):
    keys = [loader.construct_object(key) for key, _ in node.value]
    repeated = sorted({str(k) for k in keys if keys.count(k) > 1})
    if repeated:
        raise yaml.YAMLError(f"line {node.start_mark.line + 1}: repeated key {repeated[0]}")
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(path):
    """A YAML mapping as a dict; broken or missing files are a SettingError."""
    try:
        values = yaml.load(
            Path(path).read_text(encoding="utf-8"), _StrictLoader
        )  # a SafeLoader: builds plain data only
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingError("config", str(path), " ".join(str(error).split())) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingError("config", str(path), "must hold `key: value` lines")
    return values


def write_whole(path, text):
    """Write a file so that no reader ever sees half of it."""
    path = Path(path)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


FINISHED = "finished.json"


LOGS = ("metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl")


def check_run(parser, folder):
    """End with a line on a folder that is no run's."""
    if not (Path(folder) / "metrics.jsonl").exists():
        parser.error(
            f"{folder} holds no metrics.jsonl: give a folder that grpo_train.py or sft_train.py wrote"
        )


def read_metrics(folder):
    """The lines of a run's metrics.jsonl; half a line at the end, which is being written, is left out."""
    lines = []
    for line in (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines

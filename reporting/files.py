"""Files that are read and written whole, and the names of those that a run leaves."""

import hashlib
import json
import os
import re
import warnings
from pathlib import Path

import yaml

from errors import ROOT, SettingError, one_line

FINISHED, STRANGERS = "finished.json", "strangers.jsonl"
LOGS = ("metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl")
WEIGHT_FILES = (  # that transformers and peft would load from a folder
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model-*-of-*.bin",
    "pytorch_model.bin.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
LONGEST_VALUE = 60  # characters of a setting's value in a line on what a resumed run changed
DIGESTS = {  # what a run notes of what it reads, and what that is
    "data": "the problems or their prompts",
    "held_out": "the held-out problems or their prompts",
    "rewards": "the rewards",
    "reward_values": "what the rewards hold",
    "start": "the model that it started from",
}
MODEL_FILES = (
    *WEIGHT_FILES,
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def step_of(checkpoint):
    """The step in the name of a checkpoint's folder; None where it has another name."""
    number = re.fullmatch("checkpoint-([0-9]+)", Path(checkpoint).name)
    return int(number[1]) if number else None


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses a repeated key and reads 5e-6 as a number (YAML 1.1 wants a point in it)."""


def _mapping(loader, node):
    keys = [loader.construct_object(key) for key, _ in node.value]
    repeated = sorted({str(key) for key in keys if keys.count(key) > 1})
    if repeated:
        raise yaml.YAMLError(f"line {node.start_mark.line + 1}: repeated key {repeated[0]}")
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


# YAML 1.1 reads 010 as 8, and 1:30 as 90: here they are texts, which no number may be
_INT = r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)"
_FLOAT = r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_NUMBERS = {"int": _INT, "float": _FLOAT}
_StrictLoader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0].rpartition(":")[2] not in _NUMBERS]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _form in _NUMBERS.items():
    _StrictLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(f"^({_form})$"), list("-+.0123456789")
    )
FLOAT_WITHOUT_POINT = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT_WITHOUT_POINT, list("-+.0123456789"))


class _StrictDumper(yaml.SafeDumper):
    """What _StrictLoader reads as it was: a text such as 5e-6 gets quotes."""


_StrictDumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT_WITHOUT_POINT, list("-+.0123456789"))


def yaml_text(values):
    """A dict as YAML that `read_yaml` reads as it was, in its order."""
    return yaml.dump(values, Dumper=_StrictDumper, sort_keys=False)


def here_or_ours(path):
    """A file seen from this folder, or else the project's own of that name, which its recipes name."""
    return ours if not Path(path).exists() and (ours := ROOT / path).exists() else Path(path)


def read_yaml(path):
    """A YAML mapping as a dict of plain data; broken or missing files are a SettingError."""
    try:
        values = yaml.load(here_or_ours(path).read_text(encoding="utf-8"), _StrictLoader)
    except FileNotFoundError as error:
        ours = Path("configs", Path(path).name).with_suffix(".yaml")
        meant = f"; did you mean {ours}?" if (ROOT / ours).exists() else ""
        raise SettingError("config", str(path), f"No such file, seen from {Path.cwd()}{meant}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingError("config", str(path), one_line(error, limit=None)) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingError("config", str(path), "must hold `key: value` lines")
    return values


def read_run_config(model):
    """The settings that a run or an evaluation wrote into its folder, or that its model on the hub carries.

    Empty where there is none.
    """
    path = Path(model) / "run_config.yaml"
    if path.exists():
        return with_precision(read_yaml(path))
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)) and not Path(model).exists()
    path = _on_the_hub(str(model), path.name) if is_hub_id else None
    return with_precision(read_yaml(path)) if path else {}


def with_precision(settings):
    """The settings of a run, which had `bf16` before there was `precision`."""
    return without_switch(settings, "bf16", "precision", ("bf16", "fp32"))


def without_switch(given, switch, name, values):
    """Settings with a switch as the setting that it is another name of: `values` where it is on, and off.

    Refused beside another value of its setting.
    """
    if switch not in given:
        return given
    settings = {key: value for key, value in given.items() if key != switch}
    meant = values[0] if given[switch] else values[1]
    if settings.setdefault(name, meant) != meant:
        what = f"cannot stand beside {name}={settings[name]!r}"
        raise SettingError(switch, given[switch], f"{what}: give one of the two")
    return settings


def changes_of(settings):
    """A line on each time that a resumed run went on with other settings, data or files."""
    lines = []
    for change in settings.get("changes") or ():
        said = ", ".join(_changed(name, *pair) for name, pair in change["changed"].items())
        if said:
            lines.append(f"Changed after step {change['after_step']}: {said}.")
    return lines


def _changed(name, was, now):
    """The two values of a setting, where each fits into a line; of data and files only that they differ."""
    if name in DIGESTS:
        return DIGESTS[name]
    texts = [" ".join(str(value).split()) or "nothing" for value in (was, now)]
    if max(map(len, texts)) > LONGEST_VALUE:
        return f"`{name}` (see run_config.yaml)"
    was, now = (text if re.fullmatch(r"[\w.+-]+", text) else f"`{text.replace('`', ' ')}`" for text in texts)
    return f"`{name}` {was} before, {now} since"


def _on_the_hub(model, name):
    """The path of a file of a model on the hub, or None. Whether there is such a model is seen on loading."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return hf_hub_download(model, name)
    except LocalEntryNotFoundError:
        warnings.warn(f"{model}: the hub cannot be asked for its {name}; defaults are used", stacklevel=2)
    except (HfHubHTTPError, HFValidationError):  # a model without one, or no such model
        pass
    return None


def write_whole(path, text):
    """Write a file so that no reader ever sees half of it."""
    path = Path(path)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_records(path, records, ensure_ascii=True):
    """Write a whole JSON Lines file, an object a line; what JSON cannot hold, such as a date, as its text."""
    lines = [json.dumps(record, ensure_ascii=ensure_ascii, default=str) + "\n" for record in records]
    write_whole(path, "".join(lines))


def record_of(line):
    """The object that a line of JSON holds; NaN and infinities, which are not JSON, become None."""
    return json.loads(line, parse_constant=lambda _: None)


def object_of(line):
    """The object that a line of JSON Lines holds; ValueError where it holds none."""
    record = record_of(line)
    if not isinstance(record, dict):
        raise ValueError("a line holds no JSON object")
    return record


def located_records(path, broken="end"):
    """Yield (offset, size, object) of each line of a JSON Lines file, in bytes; a missing file has no lines.

    A line that is no JSON object `end`s the reading, since it is still being written, or is left out
    (`skip`). With `raise` it is a ValueError, and a missing file an OSError.
    """
    if broken != "raise" and not Path(path).exists():
        return
    offset = 0
    with open(path, "rb") as file:
        for line in file:
            try:
                yield offset, len(line), object_of(line)
            except ValueError:
                if broken == "raise":
                    raise
                if broken == "end":
                    return
            offset += len(line)


def read_records(path, broken="end"):
    """The objects of a JSON Lines file, one by one; see `located_records`."""
    return (record for _, _, record in located_records(path, broken))


def read_metrics(folder):
    """The lines of a run's metrics.jsonl; one that is damaged, or is being written, is left out."""
    lines = read_records(Path(folder) / "metrics.jsonl", broken="skip")
    return [line for line in lines if isinstance(line.get("step"), int)]


def damaged_lines(path):
    """How many lines of a JSON Lines file hold no JSON object; the last counts only if it has an end."""
    if not Path(path).exists():
        return 0
    with open(path, "rb") as file:
        return sum(line.endswith(b"\n") and bool(line.strip()) and not _is_object(line) for line in file)


def _is_object(line):
    try:
        object_of(line)
    except ValueError:
        return False
    return True


def sha256_of(path):
    """The sha256 of a file, as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

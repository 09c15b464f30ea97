"""What the README says is what the result files say, and its commands are commands."""

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_eval
import grpo_train
from running.parsing import parse_config

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for line in block.strip().splitlines()
]


def test_the_readme_s_tables_are_those_of_the_result_files():
    done = subprocess.run(
        [sys.executable, "benchmarks/tables.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda p: p.stem
)
def test_a_result_file_says_where_its_numbers_come_from(path):
    result = json.loads(path.read_text())
    assert {"script", "command", "card", "cpu", "versions", "date", "commit", "rows"} <= set(result)
    assert (ROOT / result["script"]).exists()
    assert all(set(row) == {"case", "metric", "value", "unit"} for row in result["rows"])
    assert not re.search(r"(^|\s)/\w+/", result["command"]), "no folder of one machine"


@pytest.fixture
def bench_gpus(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("bench_gpus")


def test_the_cost_model_by_hand(bench_gpus):
    """A gigabyte of gradients over a ring of a gigabyte a second: 2 (n - 1) / n seconds, behind a step of one second."""
    rows = {}
    bench_gpus.cost_model(
        "case",
        {1: {"step_seconds": 1.0}},
        250_000_000,
        1e9,
        lambda case, metric, value, unit: rows.update({(case, metric): value}),
    )
    assert [rows[f"case on {n}", "all_reduce_seconds_predicted"] for n in (2, 4, 8)] == pytest.approx(
        [1.0, 1.5, 1.75]
    )
    assert [rows[f"case on {n}", "speedup_predicted"] for n in (2, 4, 8)] == pytest.approx(
        [2 / 2, 4 / 2.5, 8 / 2.75]
    )


@pytest.mark.slow
def test_the_collectives_are_timed_on_the_cpu_too(bench_gpus):
    rate, gather = bench_gpus.collectives(3)
    assert 1e6 < rate < 1e12
    assert 0 < gather < 1


@pytest.mark.parametrize("command", [c for c in COMMANDS if "grpo_" in c])
def test_every_command_of_the_readme_has_flags_that_exist(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    for part in command.split("&&"):
        words = shlex.split(part)
        script = next((i for i, word in enumerate(words) if word in ("grpo_train.py", "grpo_eval.py")), None)
        if script is not None:
            parse_config(
                (grpo_train if words[script] == "grpo_train.py" else grpo_eval).Config, words[script + 1 :]
            )

"""What the README says is what the result files say, and its commands are commands."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_eval
import grpo_train
from config import parse_config

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL) for line in block.strip().splitlines()]


def test_the_readme_s_tables_are_those_of_the_result_files():
    done = subprocess.run([sys.executable, "benchmarks/tables.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda p: p.stem)
def test_a_result_file_says_where_its_numbers_come_from(path):
    result = json.loads(path.read_text())
    assert {"script", "command", "card", "cpu", "versions", "date", "commit", "rows"} <= set(result)
    assert (ROOT / result["script"]).exists()
    assert all(set(row) == {"case", "metric", "value", "unit"} for row in result["rows"])
    assert not re.search(r"(^|\s)/\w+/", result["command"]), "no folder of one machine"


@pytest.mark.parametrize("command", [c for c in COMMANDS if "grpo_" in c])
def test_every_command_of_the_readme_has_flags_that_exist(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    for part in command.split("&&"):
        words = shlex.split(part)
        script = next((i for i, word in enumerate(words) if word in ("grpo_train.py", "grpo_eval.py")), None)
        if script is not None:
            parse_config((grpo_train if words[script] == "grpo_train.py" else grpo_eval).Config, words[script + 1 :])

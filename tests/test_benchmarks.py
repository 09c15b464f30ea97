"""What the pages say is what the result files say."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.fixture
def benchmark_module(monkeypatch):
    """Imports a file of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


def check_tables():
    words = [sys.executable, "benchmarks/tables.py", "--check"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_tables_of_all_pages_are_those_of_the_result_files():
    done = check_tables()
    assert done.returncode == 0, done.stderr


def test_a_table_that_was_changed_by_hand_is_named(benchmark_module, tmp_path, monkeypatch):
    tables = benchmark_module("tables")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- kill -->\n31 times kill -9\n<!-- end -->\nafter\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PAGES", [page])
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    with pytest.raises(SystemExit, match=r"page\.md: differs"):
        tables.main()
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    tables.main()
    filled = page.read_text()
    assert filled.startswith("before\n<!-- kill -->\n30 times kill -9")
    assert filled.endswith("<!-- end -->\nafter\n")


def test_every_table_stands_on_some_page(benchmark_module):
    tables = benchmark_module("tables")
    text = "".join(page.read_text() for page in tables.PAGES)
    assert set(re.findall(r"^<!-- (\w+) -->$", text, re.MULTILINE)) - {"end"} == set(tables.TABLES)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_file_says_where_its_numbers_come_from(path):
    result = json.loads(path.read_text())
    assert {"script", "command", "card", "cpu", "versions", "date", "commit", "rows"} <= set(result)
    assert (ROOT / result["script"]).exists()
    assert all(set(row) == {"case", "metric", "value", "unit"} for row in result["rows"])
    assert not re.search(r"(^|\s)/\w+/", result["command"]), "no folder of one machine"


def test_the_cost_model_by_hand(benchmark_module):
    """A gigabyte of gradients over a ring of a gigabyte a second: 2 (n - 1) / n seconds, behind a step of one
    second.
    """
    rows = {}

    def record(case, metric, value, unit):
        rows[case, metric] = value

    bench_gpus = benchmark_module("bench_gpus")
    bench_gpus.cost_model("case", {1: {"step_seconds": 1.0}}, 250_000_000, 1e9, record)
    seconds = [rows[f"case on {n}", "all_reduce_seconds_predicted"] for n in (2, 4, 8)]
    assert seconds == pytest.approx([1.0, 1.5, 1.75])
    speedups = [rows[f"case on {n}", "speedup_predicted"] for n in (2, 4, 8)]
    assert speedups == pytest.approx([2 / 2, 4 / 2.5, 8 / 2.75])


@pytest.mark.slow
def test_the_collectives_are_timed_on_the_cpu_too(benchmark_module):
    rate, gather = benchmark_module("bench_gpus").collectives(3)
    assert 1e6 < rate < 1e12
    assert 0 < gather < 1

"""What the benchmarks share: running the scripts as a user would, the table, and the JSON result (design: one
file a benchmark).
"""

import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = Path(os.environ.get("BENCH_CODE", ROOT))  # an earlier commit's, where a benchmark compares with one
RESULTS = Path(os.environ.get("BENCH_RESULTS", Path(__file__).resolve().parent / "results"))


def run_script(*words, env=None, echo=True, seen=None):
    """Run one of the project's scripts; returns the last line it printed. Its output is passed on; a failure
    ends the benchmark.

    `seen`: a list that gets (moment, line).
    """
    command = [sys.executable, *map(str, words)]
    print("$ python", *words, flush=True)
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, text=True
    )
    last = ""
    for line in process.stdout:
        if echo:
            print("   ", line.rstrip(), flush=True)
        last = line
        if seen is not None:
            seen.append((time.perf_counter(), line))
    if process.wait():
        raise SystemExit(f"failed with status {process.returncode}: python {' '.join(map(str, words))}")
    return last


def evaluate(model, name, folder, *flags):
    """grpo_eval.py on a directory; returns its report. One that is there already is not made again."""
    report = Path(folder) / name / "report.json"
    if not report.exists():
        run_script("grpo_eval.py", "--model", model, "--output_dir", folder, "--name", name, *flags)
    return json.loads(report.read_text())


def card():
    """Name of the GPU, or `none`."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def cpu():
    info = Path("/proc/cpuinfo")
    names = (
        [
            line.split(":")[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        if info.exists()
        else []
    )
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def shown(word):
    """An argument as a result file shows it: a folder of the machine by its last name only."""
    return (
        f"benchmarks/{Path(word).name}"
        if word == sys.argv[0]
        else Path(word).name
        if Path(word).is_absolute()
        else word
    )


def one_line_each(result):
    """JSON with a line a field and a line a row: diffs stay readable."""
    fields = []
    for key, value in result.items():
        items = (
            [f"  {json.dumps(v)}" for v in value]
            if isinstance(value, list)
            else [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()]
            if isinstance(value, dict)
            else None
        )
        ends = "[]" if isinstance(value, list) else "{}"
        text = json.dumps(value) if items is None else f"{ends[0]}\n" + ",\n".join(items) + f"\n {ends[1]}"
        fields.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def commit():
    """The commit of the clone that this is; "unknown" where it is none, or where there is no git."""
    command = ["git", "rev-parse", "--verify", "-q", "HEAD"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def write_results(name, rows, command=None, **more):
    """Print a table and write results/NAME.json; rows: (case, metric, value, unit)."""
    packages = ("torch", "transformers", "accelerate", "trl")
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    command = command or " ".join(["python", *map(shown, sys.argv)])
    result = {"script": f"benchmarks/{Path(sys.argv[0]).name}", "command": command}
    result |= {"card": card(), "cpu": cpu(), "versions": versions, "date": time.strftime("%Y-%m-%d")}
    result |= {"commit": commit(), **more}
    names = ("case", "metric", "value", "unit")
    result["rows"] = [dict(zip(names, row, strict=True)) for row in rows]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(one_line_each(result))
    width = max(len(row[0]) for row in rows)
    for case, metric, value, unit in rows:
        print(f"{case:<{width}}  {metric:<28} {value!s:>24} {unit}")
    print(json.dumps(result["rows"]))

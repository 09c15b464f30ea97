"""A real model on a CPU: configs/smollm2.yaml as it stands, on one seed, from Enter to the end.

    python benchmarks/cpu_example.py --model DIR

DIR holds SmolLM2-135M-Instruct. accuracy: greedy, on problems that were held out.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from common import run_script, write_results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    model = parser.parse_args().model
    with tempfile.TemporaryDirectory() as folder:
        out, started = Path(folder) / "out", time.perf_counter()
        run_script("grpo_train.py", "--config", "configs/smollm2.yaml", "--model", model, "--output_dir", out)
        seconds = time.perf_counter() - started
        steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        asked = (out / "evaluations.jsonl").read_text().splitlines()
    rows = [
        ("seconds", round(seconds), "s"),
        ("steps", len(steps), "steps"),
        ("held_out", len({json.loads(line)["example_id"] for line in asked}), "problems"),
        ("accuracy_before", steps[0]["eval_accuracy_before"], "accuracy"),
        ("accuracy_after", steps[-1]["eval_accuracy"], "accuracy"),
    ]
    write_results("cpu_example", [("smollm2-135m", *row) for row in rows])


if __name__ == "__main__":
    main()

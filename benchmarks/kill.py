"""kill -9 at random moments of a run, and the same command again, until it is through: are the final weights
those of a run that was left alone?

python benchmarks/kill.py [--kills 30] [--cases tiny warm-start]
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TINY = [
    "--config=configs/tiny.yaml",
    "--model=tiny",
    "--batch_size=8",
    "--eval_every=0",
    "--save_every=2",
    "--keep_checkpoints=2",
    "--beta=0.04",
    "--mu=2",
]
WARM_START = "num_steps: 24\nnum_epochs: null\nbatch_size: 16\nlearning_rate: 3e-3\n"
WARM_START += "save_every: 3\nkeep_checkpoints: 2\n"
CASES = {
    "tiny": ["--num_steps=400", "--warm_start=none"],
    "warm-start": ["--num_steps=60", "--warm_start={folder}/warm_start.yaml", "--warm_start_cache=none"],
}


def killed_and_resumed(words, out, kills, seed=0):
    """Run the command, kill it `kills` times at random moments after it has begun to work, then let it end;
    returns what was killed each time.
    """
    draw, killed = random.Random(seed), []
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    while True:
        process = subprocess.Popen(
            words, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if len(killed) < kills:
            before = _size(out)
            while process.poll() is None and _size(out) <= before:  # it works once its log grows
                time.sleep(0.01)
            time.sleep(draw.random() * 0.4)
            if process.poll() is None:
                process.kill()
                killed.append("grpo" if _size(out, ["."]) else "warm start")
        error = process.communicate()[1]
        if process.returncode == 0:
            return killed
        if process.returncode != -9:
            raise RuntimeError(error)


def _size(out, folders=(".", "warm_start")):
    paths = [Path(out) / folder / "metrics.jsonl" for folder in folders]
    return sum(path.stat().st_size for path in paths if path.exists())


def compare(case, folder, kills):
    """Rows of one case."""
    import torch
    from safetensors.torch import load_file

    words = [sys.executable, "grpo_train.py", *TINY, *(word.format(folder=folder) for word in CASES[case])]
    started = time.perf_counter()
    subprocess.run(
        [*words, f"--output_dir={folder}/whole"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    alone = time.perf_counter() - started
    started = time.perf_counter()
    killed = killed_and_resumed(
        [*words, f"--output_dir={folder}/cut", "--resume"], Path(folder) / "cut", kills
    )
    seconds = time.perf_counter() - started
    a, b = (load_file(f"{folder}/{name}/model.safetensors") for name in ("whole", "cut"))
    equal = a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    lines = [
        sum(1 for _ in open(f"{folder}/{name}/metrics.jsonl", encoding="utf-8")) for name in ("whole", "cut")
    ]
    return [
        (case, "kills", len(killed), "kills"),
        (case, "kills_in_warm_start", killed.count("warm start"), "kills"),
        (case, "weights_equal", int(equal), ""),
        (case, "lines", lines[1], f"of {lines[0]}"),
        (case, "seconds_left_alone", round(alone, 1), "s"),
        (case, "seconds_with_kills", round(seconds, 1), "s"),
    ]


def main():
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    from common import write_results

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--name", default="kill", help="of the result file")
    args = parser.parse_args()
    rows = []
    for case in args.cases:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "warm_start.yaml").write_text(WARM_START)
            rows += compare(case, folder, args.kills)
    write_results(args.name, rows)
    assert all(value for _, metric, value, _ in rows if metric == "weights_equal")


if __name__ == "__main__":
    main()

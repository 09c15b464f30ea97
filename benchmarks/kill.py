"""kill -9 at random moments of a run, and the same command again, until it is through: are the final weights those of a run that was left alone?

python benchmarks/kill.py [--kills 30]
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


def killed_and_resumed(words, out, kills, seed=0):
    """Run the command, kill it `kills` times at random moments after it has begun to work, then let it end; returns how often it was killed."""
    draw, done = random.Random(seed), 0
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    while True:
        process = subprocess.Popen(words, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done < kills:
            before = _size(out)
            while process.poll() is None and _size(out) <= before:  # it works once its log grows
                time.sleep(0.01)
            time.sleep(draw.random() * 0.4)
            if process.poll() is None:
                process.kill()
                done += 1
        error = process.communicate()[1]
        if process.returncode == 0:
            return done
        if process.returncode != -9:
            raise RuntimeError(error)


def _size(out):
    path = Path(out) / "metrics.jsonl"
    return path.stat().st_size if path.exists() else 0


def main():
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    import torch
    from safetensors.torch import load_file

    from common import write_results

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "grpo_train.py", "--config=configs/tiny.yaml", "--warm_start=none", "--model=tiny", "--num_steps=400", "--batch_size=8",
                 "--eval_every=0", "--save_every=2", "--keep_checkpoints=2", "--beta=0.04", "--mu=2"]  # fmt: skip
        started = time.perf_counter()
        subprocess.run([*words, f"--output_dir={folder}/whole"], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)
        alone = time.perf_counter() - started
        started = time.perf_counter()
        kills = killed_and_resumed([*words, f"--output_dir={folder}/cut", "--resume"], Path(folder) / "cut", args.kills)
        seconds = time.perf_counter() - started
        a, b = (load_file(f"{folder}/{name}/model.safetensors") for name in ("whole", "cut"))
        equal = a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        lines = [sum(1 for _ in open(f"{folder}/{name}/metrics.jsonl", encoding="utf-8")) for name in ("whole", "cut")]
    rows = [("tiny", "kills", kills, "kills"), ("tiny", "weights_equal", int(equal), ""), ("tiny", "lines", lines[1], f"of {lines[0]}"),
            ("tiny", "seconds_left_alone", round(alone, 1), "s"), ("tiny", "seconds_with_kills", round(seconds, 1), "s")]  # fmt: skip
    for row in rows:
        print(*row)
    write_results("kill", rows)
    assert equal


if __name__ == "__main__":
    main()

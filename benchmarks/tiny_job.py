"""The embedded job from the command to the evaluated directory: three seeds, with M3PO and without, and once
with the loop broken on purpose.

    python benchmarks/tiny_job.py [--work DIR] [--parallel 2]

Accuracy on 500 held-out problems before GRPO (the warm start's directory) and after: greedy, and sampled
(temperature 1, 4 answers each).
"""

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import ROOT, evaluate, run_script, write_results

sys.path.insert(0, str(ROOT))
from running.parsing import parse_config

SAMPLED = ("--num_samples", "4", "--temperature", "1")
CASES = {
    f"tiny-{kind}-seed{seed}": (seed, lam, False)
    for kind, lam in (("m3po", 0.1), ("grpo", 0.0))
    for seed in (0, 1, 2)
}
CASES["tiny-shuffled"] = (0, 0.1, True)


def run_case(case, work):
    """One run; returns its rows. `seconds` is from the command to the greedy evaluation of the trained
    directory.
    """
    seed, lam, shuffled = CASES[case]
    out = work / case
    started = time.perf_counter()
    script = ("benchmarks/tiny_job.py", "--shuffled-train") if shuffled else ("grpo_train.py",)
    run_script(
        *script,
        "--config",
        "configs/tiny.yaml",
        "--warm_start_cache",
        "none",
        "--seed",
        seed,
        "--m3po_lambda",
        lam,
        "--output_dir",
        out,
        echo=False,
    )
    after = evaluate(out, "greedy", out / "eval")
    seconds = time.perf_counter() - started
    before = evaluate(out / "warm_start", "greedy_before", out / "eval")
    sampled_before = evaluate(out / "warm_start", "sampled_before", out / "eval", *SAMPLED)
    sampled = evaluate(out, "sampled", out / "eval", *SAMPLED)
    return [
        (case, "greedy_before", before["accuracy"], "accuracy"),
        (case, "greedy_before_ci95", before["accuracy_ci95"], "accuracy"),
        (case, "greedy_after", after["accuracy"], "accuracy"),
        (case, "greedy_after_ci95", after["accuracy_ci95"], "accuracy"),
        (case, "greedy_gain", round(after["accuracy"] - before["accuracy"], 4), "accuracy"),
        (case, "sampled_before", sampled_before["accuracy"], "accuracy"),
        (case, "sampled_before_ci95", sampled_before["accuracy_ci95"], "accuracy"),
        (case, "sampled_after", sampled["accuracy"], "accuracy"),
        (case, "sampled_after_ci95", sampled["accuracy_ci95"], "accuracy"),
        (case, "sampled_gain", round(sampled["accuracy"] - sampled_before["accuracy"], 4), "accuracy"),
        (case, "problems", after["questions"], "problems"),
        (case, "seconds", round(seconds, 1), "s"),
    ]


def shuffled_train(argv):
    """grpo_train with its advantages shuffled within the batch: everything runs, nothing can be learned."""
    sys.path.insert(0, str(ROOT))
    import torch

    import grpo_train

    honest, generator = grpo_train.group_advantages, torch.Generator().manual_seed(0)

    def shuffled(*args):
        advantages = honest(*args)
        return advantages[torch.randperm(len(advantages), generator=generator)]

    grpo_train.group_advantages = shuffled
    grpo_train.train(parse_config(grpo_train.Config, argv))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "tiny_job")
    parser.add_argument("--parallel", type=int, default=1, help="cases at once, each on one core")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    args = parser.parse_args()
    # threads that wait for each other's cores wait long
    os.environ["OMP_NUM_THREADS"] = str(max(1, os.cpu_count() // args.parallel))
    with ThreadPoolExecutor(args.parallel) as pool:
        rows = [
            row
            for case_rows in pool.map(lambda case: run_case(case, args.work), args.cases)
            for row in case_rows
        ]
    curves = {
        case: [json.loads(line)["correct"] for line in open(args.work / case / "metrics.jsonl")]
        for case in args.cases
    }
    write_results(
        "tiny_job",
        rows,
        parallel=args.parallel,
        curves={case: [round(v, 3) for v in curve] for case, curve in curves.items()},
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--shuffled-train"]:
        shuffled_train(sys.argv[2:])
    else:
        main()

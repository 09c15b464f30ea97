"""bf16 and fp16 beside each other: the speedrun's recipe in both, a study (grpo_study.py) of two arms from
common starts; how much the models learnt, how far the update's log-probs are from the sampler's, how long a
step takes, and how often the loss scale was too large.

    python benchmarks/precision.py --model DIR --data FOLDER [--work FOLDER] [--steps 300]

Accuracy: mean of 8 samples, and greedy, on questions held out from the training split; each model computes as
it was trained. The same command goes on where it was stopped (--stop_after MINUTES stops it).
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import yaml
from learning_rates import hold_out_once
from speedrun import card_id, read_steps, recipe_lines

from common import ROOT, write_results

sys.path.insert(0, str(ROOT))
from reporting.study import result_rows

ARMS = {"bf16": {"precision": "bf16"}, "fp16": {"precision": "fp16"}}
NOT_OF_A_STUDY = ("max_wall_minutes", "warm_start", "eval_problems")
FIRST = 20  # steps in which the scale may still be found
TEXT = "bf16 beside fp16, see benchmarks/precision.py.\n"


def summary(runs):
    """(metric, value, unit) of an arm's runs, each a list of its steps' metrics."""
    metrics = [line for run in runs for line in run]

    def of(name):
        return [line[name] for line in metrics if line.get(name) is not None]

    skipped = [["skipped" in line for line in run] for run in runs]
    return [
        ("logp_diff", round(statistics.fmean(of("logp_diff")), 5), "nats"),
        ("logp_diff_max", round(max(of("logp_diff_max")), 3), "nats"),
        ("update_seconds", round(statistics.median(of("update_seconds")), 3), "s"),
        ("rollout_seconds", round(statistics.median(of("rollout_seconds")), 3), "s"),
        ("completion_length", round(statistics.fmean(of("completion_length")), 1), "tokens"),
        ("skipped_first_20", sum(sum(run[:FIRST]) for run in skipped), "steps"),
        ("skipped_after", sum(sum(run[FIRST:]) for run in skipped), "steps"),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=Path, help="folder with train.jsonl of GSM8K")
    parser.add_argument("--recipe", default="configs/speedrun.yaml")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "precision")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102])
    parser.add_argument("--questions", type=int, default=1024, help="held out, to judge by")
    parser.add_argument("--stop_after", type=float, help="minutes after which to save and stop")
    args = parser.parse_args()
    hold_out_once(args)
    write(args)
    folder = run_study(args)
    rows = []
    for arm in ARMS:
        runs = [read_steps(folder / "runs" / str(seed) / arm) for seed in args.seeds]
        rows += [(arm, *row) for row in summary(runs)]
    rows += result_rows(json.loads((folder / "study.json").read_text()))
    more = dict(seeds=args.seeds, questions=args.questions, steps=args.steps, recipe=recipe_lines(args))
    write_results("precision", rows, card_id=card_id(), **more)


def write(args):
    """The study's file and its text, in args.work."""
    recipe = yaml.safe_load((ROOT / args.recipe).read_text())
    start = recipe.get("warm_start")
    base = {name: value for name, value in recipe.items() if name not in NOT_OF_A_STUDY}
    base |= dict(model=args.model, dataset=str(args.work / "data"), eval_every=0, num_steps=args.steps)
    asked = [
        {"name": "mean8", "steps": [args.steps], "samples": 8, "temperature": 1.0, "split": "test"},
        {"name": "greedy", "steps": [args.steps], "samples": 1, "temperature": 0.0, "split": "test"},
    ]
    study = dict(name=args.work.name, text=str(args.work / "study.md"), base=base, seeds=args.seeds)
    study["arms"] = [{"name": name, "settings": settings} for name, settings in ARMS.items()]
    study |= {"warm_start": {"config": start, "eval_every": 0}} if start else {}
    study |= dict(baseline="bf16", treatment="fp16", evaluations=asked, primary="mean8")
    study["secondary"] = [{"evaluation": "greedy", "measure": "mean"}]
    (args.work / "study.md").write_text(TEXT)
    (args.work / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))


def run_study(args):
    """Run the study, or go on with it, into args.work/study; returns that folder."""
    words = ["grpo_study.py", args.work / "study.yaml", "--output_dir", args.work / "study"]
    words += ["--stop_after", args.stop_after] if args.stop_after else []
    status = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=False).returncode
    if status:
        raise SystemExit(status)
    return args.work / "study"


if __name__ == "__main__":
    main()

"""Problems drawn by their pass rates against uniform passes: seconds until they have learnt as much.

    python benchmarks/problem_sampling.py --model DIR --data FOLDER [--work FOLDER] [--settings NAME=VALUE]

A study (grpo_study.py) of two arms and three seeds, whose arms go from one supervised start each. Accuracy is
the mean of 8 samples at temperature 1 on 512 questions held out from the training split, asked after each
--every steps; that is not counted in the seconds. What the first step of a run takes longer than its second
is set-up, and left out. The bars: seconds until the mean over the seeds first reaches what uniform ends
with, at most 70% of uniform's own; dead groups at most 10%; sampled over trained completions at most 1.15,
the first pass included. The same command goes on where it was stopped (--stop_after MINUTES stops it).
"""

import argparse
import gzip
import json
from pathlib import Path
from statistics import fmean

import yaml
from learning_rates import QUESTIONS
from speedrun import card_id, read_steps, sampled_over_trained
from two_arms import hold_out_once, run_study, write_study

from common import ROOT, write_results

ARMS = ("uniform", "pass_rate")
TEXT = "Problems drawn by their pass rates against uniform passes, see benchmarks/problem_sampling.py.\n"


def arms_of(args):
    """({arm: settings}, settings of both), by --settings."""
    given = {name: yaml.safe_load(value) for name, value in (word.split("=", 1) for word in args.settings)}
    of_pass_rate = {name: value for name, value in given.items() if "pass_rate" in name}
    of_both = {name: value for name, value in given.items() if name not in of_pass_rate}
    return {"uniform": {}, "pass_rate": {"problem_sampling": "pass_rate", **of_pass_rate}}, of_both


def write(args):
    """The study's file; returns the steps at which the arms are asked."""
    arms, of_both = arms_of(args)
    steps = list(range(0, args.steps + 1, args.every))
    asked = {"name": "mean8", "steps": steps, "samples": 8, "temperature": 1.0, "split": "test"}
    write_study(args, arms, [asked], TEXT, num_steps=args.steps, **of_both)
    return steps


def seconds_of(steps):
    """{step: seconds of training until its end}, 0 the first pass, without the set-up of the first step."""
    each = [sum(s[f"{part}_seconds"] for part in ("rollout", "reward", "update")) for s in steps]
    each[0] = min(each[:2])
    seconds = {0: steps[0].get("first_pass_seconds", 0.0)}
    for step, took in enumerate(each, 1):
        seconds[step] = seconds[step - 1] + took
    return seconds


def accuracy(path):
    right = json.loads(gzip.decompress(path.read_bytes()))["right"]
    return fmean(fmean(bool(r) for r in row) for row in right)


def curves(folder, seeds, asked):
    """{arm: {step: (mean seconds, mean accuracy) over the seeds}}."""
    found = {}
    for arm in ARMS:
        runs = [folder / "runs" / str(seed) / arm for seed in seeds]
        seconds = [seconds_of(read_steps(run)) for run in runs]
        of_arm = {}
        for step in asked:
            accuracies = [accuracy(run / "answers" / f"mean8-{step}.json.gz") for run in runs]
            of_arm[step] = fmean(s[step] for s in seconds), fmean(accuracies)
        found[arm] = of_arm
    return found


def first_to_reach(curve, target):
    """Seconds at the first asked step whose accuracy is at least the target; None where there is none."""
    return next((seconds for seconds, value in curve.values() if value >= target), None)


def report(args, asked):
    folder = args.work / "study"
    found = curves(folder, args.seeds, asked)
    target = found["uniform"][asked[-1]][1]
    rows, reached = [], {}
    for arm in ARMS:
        runs = [read_steps(folder / "runs" / str(seed) / arm) for seed in args.seeds]
        settings = yaml.safe_load(
            (folder / "runs" / str(args.seeds[0]) / arm / "run_config.yaml").read_text()
        )
        batch = settings["batch_size"], settings["num_generations"]
        reached[arm] = first_to_reach(found[arm], target)
        shown = None if reached[arm] is None else round(reached[arm], 1)
        rows.append((arm, "seconds_to_uniforms_end", shown, "s"))
        rows.append((arm, "mean8_at_the_start", round(found[arm][0][1], 4), "accuracy"))
        rows.append((arm, "mean8_at_the_end", round(found[arm][asked[-1]][1], 4), "accuracy"))
        rows.append((arm, "seconds", round(found[arm][asked[-1]][0], 1), "s"))
        dead = fmean(step["frac_reward_zero_std"] for run in runs for step in run)
        rows.append((arm, "dead_groups", round(dead, 4), "share"))
        ratio = fmean(sampled_over_trained(run, batch) for run in runs)
        rows.append((arm, "sampled_over_trained", round(ratio, 4), ""))
        first = fmean(run[0].get("first_pass_seconds", 0.0) for run in runs)
        rows.append((arm, "first_pass_seconds", round(first, 1), "s"))
    if None not in reached.values():
        share = reached["pass_rate"] / max(reached["uniform"], 1e-9)
        rows.append(("pass_rate", "share_of_uniforms_seconds", round(share, 3), ""))
    points = {arm: [[round(s, 1), round(a, 4)] for s, a in curve.values()] for arm, curve in found.items()}
    more = dict(
        curves=points, seeds=args.seeds, questions=args.questions, steps=args.steps, settings=args.settings
    )
    write_results(args.name, rows, card_id=card_id(), **more)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=Path, help="folder with train.jsonl of GSM8K")
    parser.add_argument("--recipe", default="configs/speedrun.yaml")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "problem_sampling")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--every", type=int, default=10, help="steps between two evaluations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102])
    both = "settings of both arms, or pass_rate_... of the one"
    parser.add_argument("--settings", nargs="*", default=[], metavar="NAME=VALUE", help=both)
    parser.add_argument("--stop_after", type=float, help="minutes after which to save and stop")
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="held out, to judge by")
    parser.add_argument("--name", default="problem_sampling", help="of the result file")
    args = parser.parse_args()
    if args.steps % args.every:
        parser.error(f"--every {args.every}: must divide --steps {args.steps}")
    hold_out_once(args)
    asked = write(args)
    run_study(args)
    report(args, asked)


if __name__ == "__main__":
    main()

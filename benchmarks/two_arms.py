"""What benchmarks that compare two settings share: a study (grpo_study.py) of two arms from common starts, of
the speedrun's recipe, asked on questions held out from the training split.
"""

import subprocess
import sys

import yaml
from learning_rates import hold_out

from common import ROOT

NOT_OF_A_STUDY = ("max_wall_minutes", "warm_start", "eval_problems")


def write_study(args, arms, asked, text, **base):
    """The study's file and its text, in args.work.

    arms: {name: settings}, the baseline first. asked: evaluations, the primary one first. base: settings of
    both, beside those of args.recipe.
    """
    recipe = yaml.safe_load((ROOT / args.recipe).read_text())
    start = recipe.get("warm_start")
    kept = {name: value for name, value in recipe.items() if name not in NOT_OF_A_STUDY}
    base = kept | dict(model=args.model, dataset=str(args.work / "data"), eval_every=0) | base
    study = dict(name=args.work.name, text=str(args.work / "study.md"), base=base, seeds=args.seeds)
    study["arms"] = [{"name": name, "settings": settings} for name, settings in arms.items()]
    study |= {"warm_start": {"config": start, "eval_every": 0}} if start else {}
    baseline, treatment = arms
    study |= dict(baseline=baseline, treatment=treatment, evaluations=asked, primary=asked[0]["name"])
    study["secondary"] = [{"evaluation": one["name"], "measure": "mean"} for one in asked[1:]]
    (args.work / "study.md").write_text(text)
    (args.work / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))


def run_study(args):
    """Run the study, or go on with it, into args.work/study; returns that folder."""
    words = ["grpo_study.py", args.work / "study.yaml", "--output_dir", args.work / "study"]
    words += ["--stop_after", args.stop_after] if args.stop_after else []
    status = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=False).returncode
    if status:
        raise SystemExit(status)
    return args.work / "study"


def hold_out_once(args):
    """args.work/data: the training split, of which some questions are its test split."""
    args.work = args.work.resolve()
    if not (args.work / "data").exists():
        hold_out(args.data, args.work / "data", args.questions)

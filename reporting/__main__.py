"""The page and the curves of finished or running runs: python -m reporting RUN [RUN ...] [--out FOLDER]"""

import argparse
from pathlib import Path

from reporting.files import read_metrics
from reporting.page import write_report
from reporting.plots import draw


def main():
    parser = argparse.ArgumentParser(prog="python -m reporting", description=__doc__)
    parser.add_argument("runs", nargs="+", help="folders that grpo_train.py or sft_train.py wrote")
    help_text = "draw the curves of all runs in one figure into this folder (default: the first run)"
    parser.add_argument("--out", help=help_text)
    args = parser.parse_args()
    for run in args.runs:
        if not read_metrics(run):
            is_there = (Path(run) / "metrics.jsonl").exists()
            what = "holds no finished step of a run" if is_there else "holds no metrics.jsonl"
            parser.error(f"{run} {what}: give a folder that grpo_train.py or sft_train.py wrote")
    names = [Path(run).resolve().name for run in args.runs]
    if len(set(names)) < len(names):
        names = args.runs
    out = Path(args.out or args.runs[0])
    out.mkdir(parents=True, exist_ok=True)
    draw({name: read_metrics(run) for name, run in zip(names, args.runs, strict=True)}, out)
    print(f"{out / 'curves.svg'}, {out / 'curves.png'}")
    for run in args.runs:
        print(write_report(run))


if __name__ == "__main__":
    main()

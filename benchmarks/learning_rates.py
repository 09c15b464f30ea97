"""Which learning rate GRPO wants, with M3PO and without: short runs on GSM8K from one supervised start a
seed, judged on questions held out from the training split. The test split is never read.

    python benchmarks/learning_rates.py --model DIR --data FOLDER --work FOLDER [--at_once 4]

What is in --work is not made again, so the script goes on where it was stopped. Mean accuracy of 8 samples at
temperature 1 on 512 questions.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

from common import ROOT, write_results

ARMS = {"grpo": 0, "m3po": 0.1}
RECIPE = dict(batch_size=32, num_generations=8, num_steps=80, max_completion_length=256, temperature=1, mu=1)
RECIPE |= dict(beta=0.005, epsilon=0.2, loss_type="dapo", lr_scheduler_type="constant", warmup_ratio=0.1)
RECIPE |= dict(eval_every=0, log_groups=0, inspect_every=0, micro_batch_tokens=16384)
QUESTIONS = 512


def hold_out(data, folder, questions=QUESTIONS):
    """A folder whose train.jsonl leaves out some rows of the training split; they are its test.jsonl."""
    rows = (data / "train.jsonl").read_text().splitlines()
    random.Random(0).shuffle(rows)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test.jsonl").write_text("\n".join(rows[:questions]) + "\n")
    (folder / "train.jsonl").write_text("\n".join(rows[questions:]) + "\n")


def hold_out_once(args):
    """args.work/data: the training split, of which some questions are its test split."""
    args.work = args.work.resolve()
    if not (args.work / "data").exists():
        hold_out(args.data, args.work / "data", args.questions)


def at_once(jobs, count):
    """Run chains of commands, `count` chains beside each other; a chain is (log file, commands)."""
    waiting, running = list(jobs), []
    while waiting or running:
        while waiting and len(running) < count:
            log, commands = waiting.pop(0)
            shell = " && ".join(subprocess.list2cmdline(map(str, command)) for command in commands)
            print(log.stem, flush=True)
            running.append(
                subprocess.Popen(shell, shell=True, cwd=ROOT, stdout=log.open("w"), stderr=subprocess.STDOUT)
            )
        done = running.pop(0)
        if done.wait():
            raise SystemExit(f"failed with status {done.returncode}: {done.args}")


def script(name, settings):
    return [sys.executable, name, *(word for key, value in settings.items() for word in (f"--{key}", value))]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=Path, help="folder with train.jsonl of GSM8K")
    parser.add_argument("--work", required=True, type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-6, 5e-6, 1e-5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101])
    parser.add_argument("--at_once", type=int, default=4, help="runs beside each other on the card")
    args = parser.parse_args()
    data, evals = args.work / "data", args.work / "eval"
    if not data.exists():
        hold_out(args.data, data)

    def evaluation(model, name):
        how = dict(model=model, dataset=data, split="test", answer_format="xml", output_dir=evals, name=name)
        return script("grpo_eval.py", how | dict(num_samples=8, temperature=1, max_completion_length=256))

    starts, runs = [], []
    for seed in args.seeds:
        start = args.work / f"start_{seed}"
        if not (evals / start.name / "report.json").exists():
            how = dict(config="configs/gsm8k_warm_start.yaml", model=args.model, dataset=data, seed=seed)
            how |= dict(output_dir=start, overwrite_output_dir="true", micro_batch_tokens=16384, eval_every=0)
            commands = [script("sft_train.py", how), evaluation(start, start.name)]
            starts.append((args.work / f"{start.name}.log", commands))
        for rate in args.rates:
            for arm, m3po_lambda in ARMS.items():
                out = args.work / f"{arm}_{rate:g}_{seed}"
                if (evals / out.name / "report.json").exists():
                    continue
                how = RECIPE | dict(model=start, dataset=data, seed=seed, learning_rate=rate, output_dir=out)
                how |= dict(m3po_lambda=m3po_lambda, overwrite_output_dir="true")
                commands = [script("grpo_train.py", how), evaluation(out, out.name)]
                runs.append((args.work / f"{out.name}.log", commands))
    at_once(starts, args.at_once)
    at_once(runs, args.at_once)
    report(args)


def report(args):
    def accuracy(name):
        return json.loads((args.work / "eval" / name / "report.json").read_text())["accuracy"]

    def seconds(name):
        last = (args.work / name / "metrics.jsonl").read_text().splitlines()[-1]
        return json.loads(last)["train_seconds"]

    rows = []
    names = ["start", *(f"{arm}_{rate:g}" for rate in args.rates for arm in ARMS)]
    for name in names:
        values = [accuracy(f"{name}_{seed}") for seed in args.seeds]
        rows.append((name, "mean8", round(sum(values) / len(values), 4), "accuracy"))
        rows += [
            (name, f"mean8_{s}", round(v, 4), "accuracy") for s, v in zip(args.seeds, values, strict=True)
        ]
        rows.append((name, "train_seconds", round(max(seconds(f"{name}_{s}") for s in args.seeds), 1), "s"))
    write_results("learning_rates", rows, recipe=RECIPE, at_once=args.at_once, questions=QUESTIONS)


if __name__ == "__main__":
    main()

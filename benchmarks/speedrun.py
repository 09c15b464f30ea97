"""GSM8K by the clock on one card: from an instruct model to a saved one in some minutes, then what it learnt.

    python benchmarks/speedrun.py --model DIR --data FOLDER [--minutes 5] [--seeds 0 1 2] [--work FOLDER]

The clock of a run is that of its process, `grpo_train.py --config configs/speedrun.yaml`: starting, loading,
compiling, the supervised start, GRPO and saving count. It must be over within the minutes. Only then is the
model evaluated, in processes of their own, on the whole test split: greedy, and the mean of 4 samples. The
curve over the minutes costs the clock nothing: it is the share of right answers among the samples of a step.
They are to problems that GRPO has not trained on only until its first pass over them is over, which the
result says (`new_until`, in minutes); later points run ahead of what the model can do with new problems.
What is whole in --work is not made again, so that seeds may run in calls of their own. speedrun_trl.py is the
same for a peer, and speedrun_tune.py looks for the recipe.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import ROOT, evaluate, write_results

NAME = "speedrun"
SAVING = 12.0  # seconds at the end of the clock that no step may begin in
STEP = re.compile(r"step (\d+)  reward ")  # of GRPO, not of the supervised start
STEPS_A_POINT = 5  # of the curve
NOTHING_RIGHT = (
    "no completion of the first step is right: the pass rate after the warm start is 0, and GRPO has nothing "
    "to make more likely; give a longer supervised start, a format that the model knows, or easier problems"
)


def run_by_the_clock(words, log, out):
    """Run a command of this Python; returns its status, its seconds, and those at which each step had ended.

    out: the run's folder. One whose first step has nothing right is stopped, and the benchmark with it. Each
    line of the log begins with the seconds at which it came.
    """
    print("$ python", *words, flush=True)
    moments, started = {}, time.perf_counter()
    command, env = [sys.executable, *map(str, words)], {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with log.open("w") as file:
        for line in process.stdout:
            seconds = time.perf_counter() - started
            file.write(f"{seconds:8.1f} {line}")
            if found := STEP.match(line):
                moments[int(found[1])] = seconds
            if found and found[1] == "1" and read_steps(out)[0]["correct"] == 0:
                process.kill()
                process.wait()
                raise SystemExit(f"{NOTHING_RIGHT}; the run's output is in {log}")
    status = process.wait()
    return status, time.perf_counter() - started, moments


def train(args, seed, out):
    """The timed run of a seed; returns what is noted of it. One that is whole is not made again."""
    how = dict(config=args.recipe, model=args.model, dataset=args.data, seed=seed, output_dir=out)
    how |= dict(overwrite_output_dir="true", max_wall_minutes=args.minutes - args.saving / 60)
    how |= dict(warm_start_cache="none")  # it belongs to the clock
    words = ["grpo_train.py", *flags(how), *args.train_flags]
    return once(words, out, args, recipe_lines(args))


def once(words, out, args, recipe, saved=None):
    """Run a command that writes `out` by the clock, unless that was done; returns seconds, moments and card.

    saved(): the seconds after which the model was saved, where the process does more after that.
    """
    note, log, command = out.with_suffix(".json"), out.with_suffix(".log"), [str(word) for word in words]
    if note.exists():
        made = json.loads(note.read_text())
        if (made["command"], made["recipe"]) != (command, recipe):
            raise SystemExit(f"{out} is of another command or recipe: give another --work, or delete {note}")
        return made
    for earlier in (args.work / "eval").glob(f"{out.name}_*"):  # of another run in this place
        shutil.rmtree(earlier)
    status, seconds, moments = run_by_the_clock(words, log, out)
    if status:
        last = (log.read_text().splitlines() or [f"{seconds:8.1f} it said nothing"])[-1][9:]
        if "max_wall_minutes" in last:
            last += (
                f"\n--minutes {args.minutes:g} is too short: give that, and {args.saving:.0f} s for saving"
            )
        raise SystemExit(f"failed with status {status}: {last}")
    seconds = saved() if saved else seconds
    if seconds > 60 * args.minutes:
        late = f"the run took {seconds:.1f} s of {60 * args.minutes:.0f}"
        raise SystemExit(f"{late}: what comes after the last step takes longer than --saving {args.saving:g}")
    moments = {str(step): seconds for step, seconds in moments.items()}
    made = {"command": command, "recipe": recipe, "seconds": seconds, "moments": moments, "card": card_id()}
    note.write_text(json.dumps(made))
    return made


def recipe_lines(args):
    return (ROOT / args.recipe).read_text().splitlines()


def card_id():
    """The id of the first card in use, by which two results are seen to be of one; none without a card."""
    used = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader", *([f"--id={used}"] if used else [])]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "none"


def flags(settings):
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def read_steps(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def sampled_over_trained(steps, batch):
    """Completions that were sampled, in extra rollouts too, over those that the update computed.

    batch: problems and generations of a step.
    """
    groups = len(steps) * batch[0] + sum(step.get("replaced_groups", 0) for step in steps)
    return groups * batch[1] / max(1, sum(step["scored_completions"] for step in steps))


def new_until(seconds, epochs):
    """The minutes at which the first pass over the problems is over. Both given a step, at its end."""
    new = [second for second, epoch in zip(seconds, epochs, strict=True) if epoch <= 1]
    return round(max(new, default=0.0) / 60, 3)


def curve(seconds, right):
    """[minutes, share of right samples], a point for each STEPS_A_POINT steps; both given a step."""
    points = []
    for i in range(0, len(right), STEPS_A_POINT):
        part = slice(i, i + STEPS_A_POINT)
        points.append([round(seconds[part][-1] / 60, 3), round(statistics.fmean(right[part]), 4)])
    return points


def summary(out, made):
    """(metric, value, unit) of one seed's run."""
    import yaml

    settings = yaml.safe_load((out / "run_config.yaml").read_text())
    steps, batch = read_steps(out), (settings["batch_size"], settings["num_generations"])
    grpo = sum(step["step_seconds"] for step in steps)
    moments = {int(step): seconds for step, seconds in made["moments"].items()}
    warm = out / "warm_start"
    supervised = read_steps(warm)[-1]["train_seconds"] if warm.exists() else 0.0
    return [
        ("seconds", round(made["seconds"], 1), "s"),
        ("warm_start_seconds", round(supervised, 1), "s"),
        ("seconds_to_first_step", round(moments[1] - steps[0]["step_seconds"], 1), "s"),
        ("grpo_seconds", round(grpo, 1), "s"),
        ("after_last_step_seconds", round(made["seconds"] - moments[len(steps)], 1), "s"),
        ("steps", len(steps), "steps"),
        ("completions_per_s", round(len(steps) * batch[0] * batch[1] / grpo, 1), "completions/s"),
        ("dead_groups", round(statistics.fmean(s["frac_reward_zero_std"] for s in steps), 4), "share"),
        ("sampled_over_trained", round(sampled_over_trained(steps, batch), 4), ""),
        ("skipped_steps", sum("skipped" in step for step in steps), "steps"),
    ]


def trained_in(model):
    """The precision that a run of ours was trained in, which --train_flags may set; None of a peer's."""
    import yaml

    saved = model / "run_config.yaml"
    return yaml.safe_load(saved.read_text())["precision"] if saved.exists() else None


def evaluations(model, name, args):
    """{start, greedy, mean4: report} of a saved model, and of its supervised start, on the test split.

    All at once: no clock counts them, and a small model leaves room on a card.
    """
    how = ["--dataset", args.data, "--split", "test", "--max_completion_length", args.answer_tokens]
    how += ["--precision", trained_in(model) or args.precision]
    how += [] if args.questions is None else ["--limit", args.questions]
    sampled = ("--num_samples", 4, "--temperature", 1)
    folder, start = args.work / "eval", model / "warm_start"
    asked = {"start": (start, *how)} if start.exists() else {}
    asked |= {"greedy": (model, *how), "mean4": (model, *how, *sampled)}
    with ThreadPoolExecutor() as pool:
        found = {
            kind: pool.submit(evaluate, model, f"{name}_{kind}", folder, *flags)
            for kind, (model, *flags) in asked.items()
        }
        return {kind: report.result() for kind, report in found.items()}


def result_rows(case, reports, runs):
    """Means over the seeds, and each. reports, runs: {seed: ...}."""
    rows = []
    for kind in next(iter(reports.values())):
        each = {seed: report[kind]["accuracy"] for seed, report in reports.items()}
        rows.append((case, kind, round(statistics.fmean(each.values()), 4), "accuracy"))
        rows += [(case, f"{kind}_{seed}", round(value, 4), "accuracy") for seed, value in each.items()]
    rows.append((case, "seeds", len(reports), "seeds"))
    rows.append((case, "questions", next(iter(reports.values()))["greedy"]["questions"], "questions"))
    for seed, of_run in runs.items():
        rows += [(case, f"{metric}_{seed}", value, unit) for metric, value, unit in of_run]
    for i, (metric, _, unit) in enumerate(next(iter(runs.values()))):
        mean = statistics.fmean(of_run[i][1] for of_run in runs.values())
        rows.append((case, metric, round(mean, 4), unit))
    return rows


def arguments(description, recipe="configs/speedrun.yaml"):
    """The parser of what this script and the peer's have in common."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--recipe", default=recipe)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / NAME, help="what is whole there is kept")
    parser.add_argument("--saving", type=float, default=SAVING, help="seconds at the end that are for saving")
    parser.add_argument("--questions", type=int, help="the first N of the test split (default: all)")
    parser.add_argument(
        "--answer_tokens", type=int, help="default: 300, or the recipe's limit where it is more"
    )
    return parser


def checked(parser, argv=None):
    args = parser.parse_args(argv)
    if not 0 <= args.saving < 60 * args.minutes:
        parser.error(f"--minutes {args.minutes:g}: {args.saving:g} s of them are for saving; give more")
    import yaml

    settings = yaml.safe_load("\n".join(recipe_lines(args)))
    args.precision = settings.get("precision", "bf16")
    if args.answer_tokens is None:
        args.answer_tokens = max(300, settings.get("max_completion_length", 0))
    args.work.mkdir(parents=True, exist_ok=True)
    return args


def main():
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--name", default=NAME, help="of the result file")
    last = "flags for grpo_train.py, last on the line"
    parser.add_argument("--train_flags", nargs=argparse.REMAINDER, default=[], help=last)
    args = checked(parser)
    runs, reports, curves, new, cards = {}, {}, {}, {}, []
    for seed in args.seeds:
        out = args.work / f"seed_{seed}"
        made = train(args, seed, out)
        runs[seed] = summary(out, made)
        cards.append(made["card"])
        ends, steps = list(made["moments"].values()), read_steps(out)
        curves[f"ours, seed {seed}"] = curve(ends, [step["correct"] for step in steps])
        new[f"ours, seed {seed}"] = new_until(ends, [step["epoch"] for step in steps])
        reports[seed] = evaluations(out, f"seed_{seed}", args)
    case = f"speedrun-{args.minutes:g}min"
    more = dict(recipe=recipe_lines(args), curves=curves, new_until=new, cards=cards)
    write_results(args.name, result_rows(case, reports, runs), **more)


if __name__ == "__main__":
    main()

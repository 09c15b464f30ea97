"""Looks for the recipe of speedrun.py: variations of configs/speedrun.yaml, judged on questions held out from
the training split. The test split is never read.

    python benchmarks/speedrun_tune.py --model DIR --data FOLDER [--minutes 5] [--only lr-5e-6 batch-32 ...]
    python benchmarks/speedrun_tune.py --model DIR --data FOLDER --steps 345 --only cosine
    python benchmarks/speedrun_tune.py --model DIR --data FOLDER --queue FILE

One process tries one variation after the other, so that loading and compiling are paid for once. GRPO gets
the seconds that the minutes leave it: less --setup for loading, compiling and saving, less what the
supervised start took, which is made once for each kind of start and kept in --work. What the first step takes
longer than the second is set-up and does not count. With --steps each variation trains for so many steps in
the place of the minutes: for cards that others use too; only variations whose steps take as long as the
recipe's are compared fairly so. A variation that the result file has already is not tried again, so that
calls add up, and processes on several cards too; --stop_after begins no further one after so many minutes.
Accuracy: mean of 8 samples at temperature 1, and greedy, on 512 questions. Entropy: as the run logs it, in
nats a token, mean of the last tenth of the steps. With --averages each run also keeps averages of its weights
with these decays, as --ema_decay would, and each is a variation of its own, NAME-ema-DECAY.

With --queue the variations are the lines of a file, `name` of one below or `name {"setting": value, ...}`; it
is read again before each, so that what was seen may decide what comes next, until a line says `end`.
"""

import argparse
import dataclasses
import gzip
import json
import math
import shutil
import sys
import time
from pathlib import Path
from statistics import fmean

from learning_rates import QUESTIONS, hold_out_once
from speedrun import card_id, read_steps, recipe_lines, sampled_over_trained

from common import RESULTS, ROOT, write_results

sys.path.insert(0, str(ROOT))
import grpo_train
import sft_train
from errors import RunError, SettingError
from learning.averaging import WeightAverage
from running.answering import RunOfStudy, accuracy, load_questions
from running.loaded import Loaded
from running.parsing import combined, settings_from_file
from running.sft_config import warm_start_settings
from running.study_file import Evaluation

NAME = "speedrun_tune"
MOST_STEPS = 100_000
KL = {"beta": 0.005}
BOXED = {"answer_format": "boxed", "warm_start": "none", "max_completion_length": 320}
SETTINGS = {  # that differ from the recipe's; `start`: those of its warm start
    "recipe": {},
    "last-weights": {"ema_decay": 0.0},
    "lr-1e-6": {"learning_rate": 1e-6},
    "lr-5e-6": {"learning_rate": 5e-6},
    "lr-1e-5": {"learning_rate": 1e-5},
    "lr-3e-6": {"learning_rate": 3e-6},
    "lr-5e-6-clip-1": {"learning_rate": 5e-6, "max_grad_norm": 1.0},
    "lora-5e-5": {"learning_rate": 5e-5, "lora_r": 32},
    "lora-5e-5-linear": {"learning_rate": 5e-5, "lora_r": 32, "lr_scheduler_type": "linear"},
    "lora-1e-4": {"learning_rate": 1e-4, "lora_r": 32},
    "batch-32": {"batch_size": 32},
    "batch-128": {"batch_size": 128},
    "batch-32-lr-3e-6": {"batch_size": 32, "learning_rate": 3e-6},
    "g-4": {"batch_size": 128, "num_generations": 4},
    "g-16": {"batch_size": 32, "num_generations": 16},
    "limit-200": {"max_completion_length": 200},
    # the KL keeps the entropy up, and costs a forward of the reference and the groups without a signal
    "kl": KL,
    "kl-lr-3e-6": KL | {"learning_rate": 3e-6},
    "kl-lr-5e-6": KL | {"learning_rate": 5e-6},
    "kl-lr-1e-5": KL | {"learning_rate": 1e-5},
    "kl-0.002": {"beta": 0.002},
    "kl-0.01-lr-3e-6": {"beta": 0.01, "learning_rate": 3e-6},
    "kl-lora-1e-4": KL | {"learning_rate": 1e-4, "lora_r": 32},
    "kl-batch-32": KL | {"batch_size": 32},
    "kl-batch-128-lr-3e-6": KL | {"batch_size": 128, "learning_rate": 3e-6},
    "kl-g-16": KL | {"batch_size": 32, "num_generations": 16},
    "kl-start-2": KL | {"start": {"num_epochs": 2.0}},
    "kl-start-half": KL | {"start": {"num_epochs": 0.5}},
    "kl-dr-grpo": KL | {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "kl-multi-reward": KL | {"reward_set": "multi_reward"},
    "kl-dynamic-1": KL | {"dynamic_sampling": 1},
    "bf16": {"precision": "bf16"},
    "bf16-linear-3e-6": {"precision": "bf16", "lr_scheduler_type": "linear", "learning_rate": 3e-6},
    "cosine": {"lr_scheduler_type": "cosine"},
    "linear-4e-6": {"lr_scheduler_type": "linear", "learning_rate": 4e-6},
    "kl-linear-4e-6": KL | {"lr_scheduler_type": "linear", "learning_rate": 4e-6},
    "cosine-3e-6": {"lr_scheduler_type": "cosine", "learning_rate": 3e-6},
    "cosine-5e-6": {"lr_scheduler_type": "cosine", "learning_rate": 5e-6},
    "temperature-1.2": {"temperature": 1.2},
    "batch-128-lr-4e-6": {"batch_size": 128, "learning_rate": 4e-6},
    "beta2-0.99": {"adam_beta2": 0.99},
    "m3po": {"m3po_lambda": 0.1},
    "mu-2-clip-higher": {"mu": 2, "epsilon": 0.2, "epsilon_high": 0.28},
    "dr-grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "correct-only": {"reward_weights": [1.0, 0.0]},
    "multi-reward": {"reward_set": "multi_reward"},
    "dynamic-1": {"dynamic_sampling": 1},
    # no supervised start: the model's own way of reasoning, in the format that it knows, is longer
    "boxed": BOXED,
    "boxed-256": BOXED | {"max_completion_length": 256},
    "boxed-256-5e-6": BOXED | {"max_completion_length": 256, "learning_rate": 5e-6},
    "start-half": {"start": {"num_epochs": 0.5}},
    "start-2": {"start": {"num_epochs": 2.0}},
    "start-2e-5": {"start": {"learning_rate": 2e-5}},
    "start-quarter-2e-5": {"start": {"num_epochs": 0.25, "learning_rate": 2e-5}},
    "start-half-2e-5": {"start": {"num_epochs": 0.5, "learning_rate": 2e-5}},
}


@dataclasses.dataclass
class Trial(RunOfStudy):
    """A run that is asked after its last step, and whose first step's set-up does not count.

    averages: {decay: the WeightAverage that is kept}, None before the first step.
    """

    averages: dict = dataclasses.field(default_factory=dict)

    def ask(self, run, decoder):
        super().ask(run, decoder)
        for decay, average in self.averages.items():
            if average is None:
                average = self.averages[decay] = WeightAverage(run.learner.policy, decoder.model, decay)
            if run.progress.step > 0:
                average.count_step()
        if run.progress.step == 1:
            self.first = parts(run.metrics)
        if run.progress.step == 2:
            run.progress.train_seconds -= max(0.0, self.first - parts(run.metrics))

    def answers_of(self, decay):
        """{name of an evaluation: its accuracy} of an average that was kept."""
        with self.averages[decay].in_use():
            records = {q.evaluation.name: self._answers(q, self.step, _at_once) for q in self.questions}
        return {name: (round(accuracy(record), 4), "accuracy") for name, record in records.items()}


def _at_once(decoder, action):
    return action()


def parts(metrics):
    return sum(metrics[f"{part}_seconds"] for part in ("rollout", "reward", "update"))


def config_of(args, settings, **given):
    """A variation's Config: the recipe's, with more steps than there is time for and as long a warm-up."""
    in_file = settings_from_file(grpo_train.Config, ROOT / args.recipe)
    steps = args.steps or MOST_STEPS
    warmup = in_file.get("warmup_ratio", 0.0) * in_file["num_steps"] / steps
    where = dict(model=args.model, dataset=str(args.work / "data"), seed=args.seed, eval_every=0)
    where |= dict(max_wall_minutes=None, num_steps=steps, warmup_ratio=warmup)
    return grpo_train.Config(**combined(grpo_train.Config, in_file, {**where, **settings, **given}))


def supervised_start(args, settings):
    """The folder of a start and the seconds its training took; one that is whole is not made again."""
    name = "start" + "".join(f"_{key}_{value}" for key, value in sorted(settings.items()))
    out = args.work / name
    config = config_of(args, {}, output_dir=str(out))
    start = warm_start_settings(config)
    if not (out / "warm_start" / "finished.json").exists():
        given = dict(num_steps=None) if "num_epochs" in settings else {}
        sft_train.train(dataclasses.replace(start, **given, **settings, overwrite_output_dir=True))
    metrics = (out / "warm_start" / "metrics.jsonl").read_text().splitlines()
    return str(out / "warm_start"), json.loads(metrics[-1])["train_seconds"]


def try_out(args, name, loaded, settings):
    """What a variation came to, {name: {metric: (value, unit)}}, with those of its averages; and the settings
    of each.
    """
    given, settings = settings, dict(settings)
    of_start, start, supervised = settings.pop("start", {}), args.model, 0.0
    if config_of(args, settings).warm_start != "none":
        start, supervised = supervised_start(args, of_start)
    left = 60 * args.minutes - args.setup - supervised
    if left <= 0 and not args.steps:
        raise SystemExit(f"--minutes {args.minutes:g}: set-up and supervised start take {-left:.0f} s more")
    out = args.work / name
    where = dict(model=start, warm_start="none", output_dir=str(out), overwrite_output_dir=True)
    config = config_of(args, settings, max_minutes=None if args.steps else left / 60, **where)
    how = dict(dataset=str(args.work / "data"), answer_format=config.answer_format, grading=config.grading)
    limits = config.max_completion_length, config_of(args, {}).max_completion_length
    how |= dict(max_completion_length=max(limits), steps=[config.num_steps])
    asked = [Evaluation("mean8", samples=8, **how), Evaluation("greedy", samples=1, temperature=0.0, **how)]
    questions, averages = [load_questions(e, config) for e in asked], dict.fromkeys(args.averages)
    run = Trial(out, args.seed, loaded, config.interaction, questions, averages=averages)
    grpo_train.train(config, study=run)
    run.ask_for_the_rest()
    found = {}
    for evaluation in asked:
        record = json.loads(gzip.decompress(run.path(evaluation, config.num_steps).read_bytes()))
        found[evaluation.name] = round(accuracy(record), 4), "accuracy"
    steps = read_steps(out)
    batch = config.batch_size, config.num_generations
    found["start_seconds"] = round(supervised, 1), "s"
    found["grpo_seconds"] = round(steps[-1]["train_seconds"], 1), "s"
    found["steps"] = len(steps), "steps"
    found["completions_per_s"] = (
        round(len(steps) * batch[0] * batch[1] / steps[-1]["train_seconds"], 1),
        "1/s",
    )
    last = steps[-max(1, len(steps) // 10) :]
    found["entropy"] = round(fmean(s["entropy"] for s in last), 4), "nats"
    found["dead_groups"] = round(fmean(s["frac_reward_zero_std"] for s in steps), 4), "share"
    found["sampled_over_trained"] = round(sampled_over_trained(steps, batch), 4), ""
    shutil.rmtree(out)
    all_found, all_settings = {name: found}, {name: given}
    for decay in args.averages:
        all_found[f"{name}-ema-{decay:g}"] = found | run.answers_of(decay)
        all_settings[f"{name}-ema-{decay:g}"] = given | {"ema_decay": decay}
    return all_found, all_settings


def tried_before(args):
    """{variation: {metric: (value, unit)}} of the result file, where it is of the same question."""
    path = RESULTS / f"{args.name}.json"
    if not path.exists():
        return {}
    result = json.loads(path.read_text())
    then = [result[key] for key in ("minutes", "steps", "seed", "questions", "recipe")]
    if then != [args.minutes, args.steps, args.seed, args.questions, recipe_lines(args)]:
        raise SystemExit(f"{path.name} is of another recipe, seed or length: give another --name")
    found = {}
    for row in result["rows"]:
        if row["case"] != "all":
            found.setdefault(row["case"], {})[row["metric"]] = row["value"], row["unit"]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=Path, help="folder with train.jsonl of GSM8K")
    parser.add_argument("--minutes", type=float, default=5.0, help="of the speedrun")
    parser.add_argument("--steps", type=int, help="of each variation, in the place of the minutes")
    parser.add_argument(
        "--setup", type=float, default=60.0, help="seconds of it that go on loading and so on"
    )
    parser.add_argument("--recipe", default="configs/speedrun.yaml")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / NAME)
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=SETTINGS, metavar="VARIATION")
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument(
        "--stop_after", type=float, default=math.inf, help="minutes; begin no variation later"
    )
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="held out, to judge by")
    parser.add_argument("--queue", type=Path, help="file of the variations to try, in the place of --only")
    parser.add_argument(
        "--averages", type=float, nargs="+", default=[], metavar="DECAY", help="of weights, to try as well"
    )
    parser.add_argument("--name", help="of the result file (default: one for each length)")
    args = parser.parse_args()
    length = f"{args.steps}steps" if args.steps else f"{args.minutes:g}min"
    args.name = args.name or f"{NAME}_{length}"
    began, loaded = time.monotonic(), Loaded()
    hold_out_once(args)
    refused = set()
    for name, settings in variations(args, refused):
        if time.monotonic() - began >= 60 * args.stop_after:
            print(f"not begun, by --stop_after: {name}")
            break
        print(f"variation {name}: {settings}", flush=True)
        try:
            found = try_out(args, name, loaded, settings)
        except RunError as error:  # what diverges is a result, too
            found = {name: {"failed": (str(error), "")}}, {name: settings}
        except (SettingError, SystemExit) as error:  # settings that cannot be tried; the queue goes on
            if not args.queue:
                raise
            print(f"{name} is left out: {error}", flush=True)
            refused.add(name)
            continue
        write(args, *found)
    print(f"{len(tried_before(args))} configurations tried")


def variations(args, refused):
    """(name, settings) of what has not been tried yet, one at a time; with a queue until a line says `end`.

    refused: names that are left out, here too.
    """
    if not args.queue:
        tried = tried_before(args)
        yield from ((name, SETTINGS[name]) for name in args.only if name not in tried)
        return
    while True:
        done = refused | tried_before(args).keys()
        lines = [line.strip().partition(" ") for line in args.queue.read_text().splitlines() if line.strip()]
        name, _, given = next((line for line in lines if line[0] not in done), ("", "", ""))
        if name == "end":
            return
        if not name:
            time.sleep(1)
            continue
        try:
            settings = json.loads(given) if given else SETTINGS[name]
            unknown = settings.keys() - grpo_train.Config.__dataclass_fields__.keys() - {"start"}
            if unknown:
                raise KeyError(*unknown)
        except (AttributeError, KeyError, ValueError) as error:
            print(f"{name} is left out: its settings are not known, or no JSON object: {error}", flush=True)
            refused.add(name)
            continue
        yield name, settings


def write(args, found, settings):
    """Add variations, {name: {metric: (value, unit)}} and {name: settings}, to the result file."""
    found = tried_before(args) | found  # another process may have written, too
    path = RESULTS / f"{args.name}.json"
    settings = (json.loads(path.read_text())["settings"] if path.exists() else {}) | settings
    best_first = sorted(found, key=lambda name: -found[name].get("mean8", (0.0,))[0])
    rows = [("all", "configurations_tried", len(found), "configurations")]
    for name in best_first:
        rows += [(name, metric, value, unit) for metric, (value, unit) in found[name].items()]
    more = dict(minutes=args.minutes, steps=args.steps, seed=args.seed, questions=args.questions)
    more["recipe"] = recipe_lines(args)
    more["settings"] = {name: settings[name] for name in best_first}
    write_results(args.name, rows, card_id=card_id(), **more)


if __name__ == "__main__":
    main()

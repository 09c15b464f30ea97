"""The log of a run: one JSON object a step, one readable line, completions, curves, trackers."""

import base64
import json
import math
import time
import warnings
import webbrowser
from functools import partial
from pathlib import Path

import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from accelerate.utils import gather_object
from tqdm import tqdm

from answers.formats import extract_answer
from decoding.tokens import token_pieces
from errors import one_line
from reporting.files import read_metrics
from reporting.page import write_report
from reporting.plots import KINDS, draw, or_warn
from running.settings import resolved

SECONDS_BETWEEN_DRAWINGS = 60
DRAWING_SHARE = 50  # of a long run's time, drawing takes at most one part in so many
STEPS_TO_DRAW = 10  # curves of fewer steps show nothing


WIDTH = 100  # of a step's line at most
FEW = 10  # lines of a run of few lines, beside those that say more than a step


class MetricsLog:
    """metrics.jsonl, the line of a step, and a bar with the time left. Only the first process writes."""

    def __init__(self, run):
        self.is_active, self.folder, self.run = run.accelerator.is_main_process, run.folder, run
        if self.is_active:
            self.to_open = run.config.open
            self.drawn_at, self.pause = -math.inf, SECONDS_BETWEEN_DRAWINGS
            self.trackers = Trackers(run.config, run.folder)
            self.file = open(run.folder / "metrics.jsonl", "a", encoding="utf-8")
            finished = run.progress.step - (run.progress.unlogged is not None)
            how = dict(disable=None, dynamic_ncols=True, unit="step", desc=run.bar_name)
            self.bar = tqdm(total=run.total, initial=finished, **how)

    def write(self, metrics):
        """One step. Numbers that are not finite become null: JSON has no NaN."""
        if not self.is_active:
            return
        clean = {name: None if _is_nan(value) else value for name, value in metrics.items()}
        self.file.write(json.dumps(clean) + "\n")
        self.file.flush()
        self.trackers.log({name: value for name, value in clean.items() if value is not None})
        if time.monotonic() - self.drawn_at > self.pause:
            self.draw()
        line = step_line(clean, self.run.shown)
        if self._is_worth_a_line(clean):
            self.run.say(line)
        elif not self.bar.disable:
            self.bar.set_postfix_str(line.split("  ")[1], refresh=False)
        self.bar.update(clean["step"] - self.bar.n)

    def _is_worth_a_line(self, metrics):
        """Every step is, but for a run of few lines: an evaluation, a step that was skipped, and without a
        bar each tenth part of the run.
        """
        if not self.run.few_lines or metrics.keys() & {"eval_accuracy", "skipped"}:
            return True
        step, total = metrics["step"], self.run.total
        return self.bar.disable and FEW * step // total > FEW * (step - 1) // total

    def write_evaluation(self, records):
        """One line a held-out question into evaluations.jsonl."""
        self._append("evaluations.jsonl", records)

    def write_rollouts(self, records):
        """One line a completion into rollouts.jsonl."""
        self._append("rollouts.jsonl", records)

    def _append(self, name, records):
        if self.is_active:
            with open(self.folder / name, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)

    def draw(self, kinds=("svg",)):
        """The curves, from some steps on, and report.html with the SVG. A failed drawing only warns."""
        started, lines = time.monotonic(), read_metrics(self.folder)
        if len(lines) >= STEPS_TO_DRAW:
            or_warn(draw, {self.folder.resolve().name: lines}, self.folder, kinds)
        page = or_warn(write_report, self.folder)
        if self.to_open and page:
            self.to_open = False
            open_page(page, self.run.say)
        self.drawn_at = time.monotonic()
        self.pause = max(SECONDS_BETWEEN_DRAWINGS, DRAWING_SHARE * (self.drawn_at - started))

    def close(self):
        if self.is_active:
            self.draw(KINDS)
        self.let_go()

    def let_go(self, failed=False):
        """Close what is open, if that was not done: to a tracker the next run of this process would be this
        one.
        """
        if self.is_active:
            self.is_active = False
            self.file.close()
            self.trackers.close(failed)
            self.bar.close()


def _is_nan(value):
    return isinstance(value, float) and not math.isfinite(value)


def step_line(metrics, shown):
    """The line of a step, of WIDTH characters at most: what stands last in `shown` is left out first.

    shown: {metric: its format}; what is None, since it was not finite, is shown as nan.
    """
    line = f"step {metrics['step']}"
    for name, form in shown.items():
        if name not in metrics:
            continue
        value = math.nan if metrics[name] is None else metrics[name]
        part = f"  {form.format(value)}"
        if len(line + part) <= WIDTH:
            line += part
    return line


def open_page(page, say):
    """Open a page in the browser, or say that there is none."""
    if not webbrowser.open(Path(page).resolve().as_uri()):
        say(f"open: there is no browser here; look at {page}")


def log_rollouts(run, sampled, right, advantages, inspection=None):
    """One line a completion into rollouts.jsonl; the first log_groups groups carry tokens, log-probs and
    mixing weights.

    inspection: the result of `inspect_group`; tokens that would have been others
    without listening are named in its lines.
    """
    config, records, advantages = run.config, [], advantages.tolist()  # device sync
    G, first_row = config.num_generations, run.local_rows.start
    shown = range(min(len(sampled.problems), max(0, config.log_groups - first_row // G)))
    rollout = sampled.rollout.groups(list(shown)).to("cpu") if shown else None
    for n, (ids, text, ended) in enumerate(sampled.completions):
        problem, reward = sampled.problems[n // G].problem, sampled.rewards[n]
        record = {
            "schema_version": 1,
            "step": run.progress.step + 1,
            "example_id": problem.id,
            "generation": n % G,
            "question": problem.question,
            "prompt": sampled.problems[n // G].prompt,
            "completion": text,
            "answer": problem.answer,
            "extracted": extract_answer(text, config.answer_format),
            "right": bool(right[n]),
            "reward": None if math.isnan(reward) else reward,
            "rewards": {name: values[n] for name, values in sampled.parts.items()},
            "advantage": advantages[n],
            "length": len(ids),
            "stop_condition": "eos" if ended else "length",
        }
        if sampled.logged.rows[n]:
            record["extra"] = sampled.logged.rows[n]
        if n // G in shown:
            record |= _token_record(run.learner.tokenizer, rollout, n, ids)
            if inspection is not None and n < G:
                others = enumerate(zip(ids, inspection.alone[n], strict=True))
                decode = run.learner.tokenizer.decode
                record["alone"] = {t: decode([other]) for t, (token, other) in others if token != other}
                if record["alone"] and inspection.completions:
                    alone = inspection.completions[n].text
                    record["alone_completion"], record["alone_right"] = alone, bool(inspection.right[n])
                    record["alone_extracted"] = extract_answer(alone, config.answer_format)
        records.append(record)
    run.log.write_rollouts(gather_object(records))


def _token_record(tokenizer, rollout, n, ids):
    """Tokens of row n of a rollout on the CPU, their texts, log-probs, and where it hears its peers weights
    (length, G) as base64: in 1/255 a byte each, or float16 where one may be negative or above 1.
    """
    logps = rollout.logp[n, : len(ids)].tolist()
    record = {
        "tokens": ids,
        "pieces": token_pieces(tokenizer, ids),
        "logps": [round(logp, 4) if math.isfinite(logp) else None for logp in logps],  # JSON has no NaN
        "think_end": int(rollout.thinking[n].sum()),
    }
    if rollout.mix is not None and rollout.scale is None:
        group, path = divmod(n, rollout.num_generations)
        weights = rollout.mix[group, : len(ids), path]
        if rollout.control == "none":
            weights = (weights * 255).round().to(torch.uint8)
        else:
            weights, record["mix_dtype"] = weights.half(), "float16"
        record["mix"] = base64.b64encode(weights.numpy().tobytes()).decode()
    return record


class Trackers:
    """Experiment trackers by accelerate's names (tensorboard, wandb, ...).

    Every number of metrics.jsonl is tracked as train/NAME, held-out ones as eval/NAME, over an axis of its
    own, the number of the step. A tracker that fails is warned of once and dropped: no run ends for its sake.
    """

    def __init__(self, config, folder):
        self.started = {}
        for name in config.report_to or ():
            self._try(name, lambda name=name: self._start(name, config, folder))

    def _start(self, name, config, folder):
        kind, run_name = LOGGER_TYPE_TO_CLASS[name], config.run_name or folder.resolve().name
        if name == "wandb":
            tracker = kind(config.project, name=run_name, dir=str(folder))
        elif kind.requires_logging_directory:
            tracker = kind(run_name, str(folder / "trackers"))
        else:
            tracker = kind(config.project)
        tracker.start()
        if name == "wandb":
            tracker.tracker.define_metric("*", step_metric="step")
        tracker.store_init_configuration({key: _plain(value) for key, value in resolved(config).items()})
        self.started[name] = tracker

    def log(self, metrics):
        step, named = metrics["step"], {}
        for key, value in metrics.items():
            if key != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                named[f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}"] = (
                    value
                )
        for name, tracker in list(self.started.items()):
            if name == "wandb":  # its own step never goes back, but the step of a resumed run does
                self._try(name, lambda tracker=tracker: tracker.log({**named, "step": step}))
            else:
                self._try(name, lambda tracker=tracker: tracker.log(named, step=step))

    def close(self, failed=False):
        for name, tracker in list(self.started.items()):
            end = tracker.finish
            if failed and name == "wandb":  # which shows how a run ended
                end = partial(tracker.tracker.finish, exit_code=1)
            self._try(name, end)

    def _try(self, name, action):
        try:
            action()
        except Exception as error:  # a tracker may raise anything: a network, a login, a full disk
            self.started.pop(name, None)
            reason = f"{type(error).__name__}: {one_line(error)}"
            warnings.warn(f"report_to {name}: dropped, it raised {reason}", stacklevel=2)


def _plain(value):
    return value if isinstance(value, int | float | str | bool) else str(value)

"""Metrics of a run: one JSON object a step, one readable line, trackers."""

import json
import math
import time
import warnings

from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from tqdm import tqdm

from reporting.files import read_metrics
from reporting.page import write_report
from reporting.plots import draw, or_warn
from running.settings import resolved

SECONDS_BETWEEN_DRAWINGS, SHARE_OF_TIME, ENOUGH_TO_DRAW = (
    60,
    50,
    10,
)  # drawing takes a fiftieth of a long run's time at the most


class MetricsLog:
    """One JSON object a step into metrics.jsonl, one readable line, and a bar with the time left. Only rank 0 writes."""

    def __init__(self, config, folder, total, shown, accelerator):
        self.active, self.shown = accelerator.is_main_process, shown
        if self.active:
            self.folder, self.drawn, self.pause = folder, -math.inf, SECONDS_BETWEEN_DRAWINGS
            self.trackers = Trackers(config, folder)
            self.file = open(folder / "metrics.jsonl", "a", encoding="utf-8")
            done = sum(1 for _ in open(folder / "metrics.jsonl", encoding="utf-8"))
            self.bar = tqdm(total=total, initial=done, disable=None, dynamic_ncols=True, unit="step")

    def write(self, metrics):
        """Numbers that are not finite become null: JSON has no NaN."""
        if not self.active:
            return
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
        self.file.write(json.dumps(clean) + "\n")
        self.file.flush()
        self.trackers.log({k: v for k, v in clean.items() if v is not None})
        if time.monotonic() - self.drawn > self.pause:
            self.draw()
        tqdm.write(
            "  ".join(
                [f"step {clean['step']}"]
                + [f"{label} {_short(clean[k])}" for k, label in self.shown.items() if k in clean]
            )
        )
        self.bar.update(clean["step"] - self.bar.n)

    def write_evaluation(self, rows):
        """One line a held-out question into evaluations.jsonl."""
        if self.active:
            with open(self.folder / "evaluations.jsonl", "a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)

    def draw(self):
        """The curves, from a few steps on, and report.html; a run does not end for want of a picture."""
        started, lines = time.monotonic(), read_metrics(self.folder)
        if len(lines) >= ENOUGH_TO_DRAW:
            or_warn(draw, {self.folder.resolve().name: lines}, self.folder)
        or_warn(write_report, self.folder)
        self.drawn = time.monotonic()
        self.pause = max(SECONDS_BETWEEN_DRAWINGS, SHARE_OF_TIME * (self.drawn - started))

    def say(self, text):
        if self.active:
            tqdm.write(text)

    def close(self):
        if self.active:
            self.file.close()
            self.draw()
            self.trackers.close()
            self.bar.close()


def _short(value):
    return f"{value:.3g}" if isinstance(value, float) else str(value)


class Trackers:
    """Experiment trackers by accelerate's names (tensorboard, wandb, ...). One that fails is warned of once and dropped: no run ends for its sake.

    Every number of metrics.jsonl is tracked as train/NAME, and held-out ones as eval/NAME, over an axis of its own, the number of the step.
    """

    def __init__(self, config, folder):
        self.started = {}
        settings = {
            k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in resolved(config).items()
        }
        for name in config.report_to or ():
            self._try(name, self._start, LOGGER_TYPE_TO_CLASS[name], config, folder, settings)

    def _start(self, name, kind, config, folder, settings):
        run = config.run_name or folder.resolve().name
        if name == "wandb":
            tracker = kind(config.project, name=run, dir=str(folder))
        else:
            tracker = (
                kind(run, str(folder / "trackers"))
                if kind.requires_logging_directory
                else kind(config.project)
            )
        tracker.start()
        if name == "wandb":
            tracker.tracker.define_metric("*", step_metric="step")
        tracker.store_init_configuration(settings)
        self.started[name] = tracker

    def log(self, metrics):
        step, numbers = (
            metrics["step"],
            {k: v for k, v in metrics.items() if isinstance(v, int | float) and not isinstance(v, bool)},
        )
        named = {
            (f"eval/{k.removeprefix('eval_')}" if k.startswith("eval_") else f"train/{k}"): v
            for k, v in numbers.items()
            if k != "step"
        }
        for name, tracker in list(self.started.items()):
            if name == "wandb":  # its own step never goes back, which that of a resumed run does
                self._try(name, lambda _, tracker=tracker: tracker.log({**named, "step": step}))
            else:
                self._try(name, lambda _, tracker=tracker: tracker.log(named, step=step))

    def close(self):
        for name, tracker in list(self.started.items()):
            self._try(name, lambda _, tracker=tracker: tracker.finish())

    def _try(self, name, action, *arguments):
        try:
            action(name, *arguments)
        except Exception as error:  # whatever a tracker raises: a network, a login, a full disk
            self.started.pop(name, None)
            warnings.warn(
                f"report_to {name}: dropped, it raised {type(error).__name__}: {' '.join(str(error).split())[:200]}",
                stacklevel=2,
            )

"""A study as its folder holds it: the plan, the runs, and the score of each question in each run."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from errors import DataError
from reporting.files import read_metrics
from reporting.study_answers import MEASURES, OVER, fill, read_json, read_run


@dataclass(frozen=True)
class Endpoint:
    """What arms are compared by: a measure of an evaluation, as a mean over its steps.

    steps: for treatment and baseline one step each, where they are compared at different ones.
    """

    evaluation: str
    measure: str
    samples: int
    role: str  # primary or secondary
    steps: tuple | None = None  # (treatment's, baseline's)

    @property
    def name(self):
        measure = "" if self.samples == 1 and self.measure != "length" else f" {MEASURES[self.measure]}"
        steps = "" if self.steps is None else " at steps {} and {}".format(*self.steps)
        return f"{self.evaluation}{measure.format(self.samples)}{steps}"

    @property
    def is_share(self):
        """Whether it is a share of right answers, which the margin is about, and not a number of tokens."""
        return self.measure != "length"


@dataclass
class Study:
    """The plan, and by (seed, arm) each run's record and its scores.

    scores: {(seed, arm): {evaluation: {measure: (steps, questions)}}}, of runs that are over and whole.
    """

    folder: Path
    plan: dict
    look: dict | None
    starts: list
    runs: dict
    scores: dict = field(default_factory=dict)
    missing_files: dict = field(default_factory=dict)  # {(seed, arm): [names]}
    questions: dict = field(default_factory=dict)  # {evaluation: ids}
    lines: dict = field(default_factory=dict)  # {(seed, arm): those of metrics.jsonl}

    @cached_property
    def endpoints(self):
        """The primary one first, then the secondary ones in the order of the plan."""
        samples = {evaluation["name"]: evaluation["samples"] for evaluation in self.plan["evaluations"]}
        primary = self.plan["primary"]["evaluation"]
        endpoints = [Endpoint(primary, "mean", samples[primary], "primary")]
        for entry in self.plan["secondary"]:
            steps = entry.get("steps")
            steps = (steps["treatment"], steps["baseline"]) if steps else None
            name = entry["evaluation"]
            endpoints.append(Endpoint(name, entry["measure"], samples[name], "secondary", steps))
        return endpoints

    @property
    def primary(self):
        return self.endpoints[0]

    @property
    def seeds(self):
        """Those of the study, in the plan's order: all, or the first so many that the look asked for."""
        return self.plan["seeds"][: self.look["seeds"] if self.look else None]

    @cached_property
    def arms(self):
        return {arm["name"]: arm for arm in self.plan["arms"]}

    def seeds_of(self, arm):
        return [seed for seed in self.seeds if seed in self.arms[arm]["seeds"]]

    def is_confirmatory(self, arm):
        return self.arms[arm]["role"] == "confirmatory"

    def by_question(self, arm, seed, endpoint, step=None):
        """Each question's score in a run, (Q,), over all steps or at one; None of a run that is not whole."""
        measures = self.scores.get((seed, arm), {}).get(endpoint.evaluation)
        if measures is None:
            return None
        if step is None:
            return measures[endpoint.measure].mean(0)
        return measures[endpoint.measure][self.steps_of(endpoint.evaluation).index(step)]

    def value(self, arm, seed, endpoint, step=None):
        """The mean of `by_question`; None also where a run without weights has no length."""
        scores = self.by_question(arm, seed, endpoint, step)
        return None if scores is None or np.isnan(scores).any() else float(scores.mean())

    def steps_of(self, evaluation):
        return next(e["steps"] for e in self.plan["evaluations"] if e["name"] == evaluation)

    def by_step(self, arm, seed, endpoint, steps):
        """[(step, value)] of a run, where it is whole."""
        values = [(step, self.value(arm, seed, endpoint, step)) for step in steps]
        return [(step, value) for step, value in values if value is not None]

    def seconds_at(self, arm, step):
        """The mean over seeds of an arm's training seconds up to a step; None where no run has it."""
        lines = [line for seed in self.seeds_of(arm) for line in self.metrics(seed, arm)]
        seconds = [
            line["train_seconds"] for line in lines if line["step"] == step and "train_seconds" in line
        ]
        return float(np.mean(seconds)) if seconds else None

    def paired(self, arm, other, endpoint, seeds=None):
        """{seed: arm's score of each question minus other's, (Q,)} of the seeds that have both."""
        found = {}
        for seed in self.seeds if seeds is None else seeds:
            step, other_step = endpoint.steps or (None, None)
            sides = [
                self.by_question(arm, seed, endpoint, step),
                self.by_question(other, seed, endpoint, other_step),
            ]
            if not any(side is None or np.isnan(side).any() for side in sides):
                found[seed] = sides[0] - sides[1]
        return found

    def missing(self):
        """What the analysis still lacks, in words: of the confirmatory arms, and of the exploratory ones."""
        found = {"confirmatory": [], "exploratory": []}
        if len(self.seeds) < (self.look or {}).get("seeds", 0):
            words = f"the look asks for {self.look['seeds']} seeds, and the plan has {len(self.seeds)}"
            found["confirmatory"].append(words)
        for name, arm in self.arms.items():
            for seed in self.seeds_of(name):
                found[arm["role"]] += self.missing_of(seed, name)
        return found

    def missing_of(self, seed, arm):
        record = self.runs.get((seed, arm))
        if record is None:
            return [f"runs/{seed}/{arm}: no run.json"]
        if record["status"] not in OVER:
            return [f"runs/{seed}/{arm}: {record['status']}, at step {record.get('step')}"]
        return [f"runs/{seed}/{arm}: no {name}" for name in self.missing_files[seed, arm]]

    def notes(self):
        """What a reader must know of the runs beside their numbers."""
        notes = []
        for (seed, arm), record in self.runs.items():
            if record["status"] in ("collapsed", "refused") and arm in self.arms:
                step, reason = record.get("step"), record.get("reason")
                counted = f"with its weights of step {step}" if step else "as 0"
                why = f" ({reason})" if reason else ""
                notes.append(f"{arm}, seed {seed}: {record['status']}{why}; it counts {counted}")
        left_out = [f"{arm}, seed {seed}" for seed, arm in self.runs if not self._is_planned(seed, arm)]
        if left_out:
            notes.append(f"runs that are not of the study, and left out: {'; '.join(left_out)}")
        return notes + self._other_code()

    def _other_code(self):
        """A note that names the runs whose code is not that of most runs."""
        codes = Counter(record["code_hash"] for record in self.runs.values())
        others = [
            f"{arm}, seed {seed} ({record['code_hash'][:12]})"
            for (seed, arm), record in self.runs.items()
            if record["code_hash"] != codes.most_common(1)[0][0]
        ]
        most = codes.most_common(1)[0][0][:12] if others else ""
        return [f"made by other code than most runs ({most}): {'; '.join(others)}"] if others else []

    def _is_planned(self, seed, arm):
        return arm in self.arms and seed in self.seeds_of(arm)

    def metrics(self, seed, arm):
        """The lines of a run's metrics.jsonl, read once."""
        key, folder = (seed, arm), self.folder / "runs" / str(seed) / arm
        if key not in self.lines:
            self.lines[key] = read_json(folder / "metrics.json.xz") or read_metrics(folder)
        return self.lines[key]


def read_study(folder):
    """The study in a folder. What cannot be analysed is a DataError that names the file."""
    folder = Path(folder)
    plan = read_json(folder / "plan.json")
    if plan is None:
        raise DataError(f"{folder / 'plan.json'}: there is none: give a folder that grpo_study.py filled")
    if plan.get("schema") != 1:
        raise DataError(f"{folder / 'plan.json'}: has schema {plan.get('schema')!r}, and this code reads 1")
    starts = [read_json(path) for path in sorted((folder / "starts").glob("*.json"))]
    records = [read_json(path) for path in (folder / "runs").glob("*/*/run.json")]
    runs = {(record["seed"], record["arm"]): record for record in records}
    runs = dict(sorted(runs.items()))
    study = Study(folder, plan, read_json(folder / "look.json"), starts, runs)
    study.questions = read_json(folder / "questions.json.xz") or {}  # of a copy, see `keep_study`
    check_names(study)
    check_verdict(study)
    check_starts(study)
    for (seed, arm), record in runs.items():
        if record["status"] in OVER and arm in study.arms:
            read_run(study, seed, arm, record)
    fill(study)
    return study


def check_names(study):
    """Refuse a plan that names an arm, an evaluation, a step or a measure that it does not have."""
    plan = study.plan
    refuse_unknown(study, "arm", [plan["baseline"], plan["treatment"]], study.arms)
    evaluations = {evaluation["name"]: evaluation["steps"] for evaluation in plan["evaluations"]}
    refuse_unknown(study, "evaluation", [plan["primary"]["evaluation"]], evaluations)
    for entry in plan["secondary"]:
        name = entry["evaluation"]
        refuse_unknown(study, "evaluation", [name], evaluations)
        refuse_unknown(study, "measure", [entry["measure"]], MEASURES)
        refuse_unknown(study, f"step of {name}", (entry.get("steps") or {}).values(), evaluations[name])

    repeated = [name for name, count in Counter(e.name for e in study.endpoints).items() if count > 1]
    if repeated:
        raise DataError(f"{study.folder / 'plan.json'}: has the endpoint {repeated[0]!r} twice")


def check_verdict(study):
    """Refuse a verdict on other arms than the study's treatment and baseline, or on exploratory ones."""
    plan, verdict, path = study.plan, study.plan["verdict"], study.folder / "plan.json"
    if verdict is None:
        return
    for key in ("treatment", "baseline"):
        if verdict[key] != plan[key]:
            raise DataError(f"{path}: the verdict's {key} is {verdict[key]!r}, and the study's {plan[key]!r}")
    arms = [plan["treatment"], plan["baseline"], *peers_of(verdict)]
    refuse_unknown(study, "arm", arms, study.arms)
    exploratory = [arm for arm in arms if not study.is_confirmatory(arm)]
    if exploratory:
        raise DataError(f"{path}: the verdict reads the arm {exploratory[0]!r}, which is exploratory")


def peers_of(verdict):
    """The arms that a verdict compares the treatment with, beside the baseline."""
    averaging = verdict.get("averaging")
    return [*verdict["controls"], *([averaging] if averaging else [])]


def refuse_unknown(study, kind, named, there):
    for name in named:
        if name not in there:
            known = ", ".join(map(str, there))
            raise DataError(f"{study.folder / 'plan.json'}: names the {kind} {name!r}, and has {known}")


def check_starts(study):
    """Refuse runs of one seed that went from different weights: they are no pair."""
    first = {start["seed"]: ("its start", start["start_hash"]) for start in study.starts}
    for (seed, arm), record in study.runs.items():
        name, start_hash = first.setdefault(seed, (arm, record["start_hash"]))
        if record["start_hash"] != start_hash:
            raise DataError(
                f"runs/{seed}/{arm}: start_hash {record['start_hash']}, and {name} of seed {seed} has "
                f"{start_hash}: runs from different weights are not paired; make this seed's runs anew"
            )

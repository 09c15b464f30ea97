"""The questions of a study, asked while its runs go: an answers file for each evaluation and step."""

import gzip
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

from answers.formats import extract_answer
from decoding.rollout import Sampling
from learning.models import check_positions
from problems.prompts import Prompting
from problems.sources import load_problems
from reporting.statistics import votes
from rewards import equal_by_meaning, right_answers
from running.evaluation import complete_interacting
from running.loaded import Loaded


@dataclass
class Questions:
    """The questions of an evaluation, with the prompts that a tokenizer makes of them."""

    evaluation: object
    problems: list
    asked: list = field(default_factory=list)
    skipped: list = field(default_factory=list)  # problems whose prompts are too long
    made_for: tuple = ()  # what the prompts depend on

    def encode(self, tokenizer, config):
        """Make the prompts, as the run's settings have it, unless they are made."""
        settings = vars(config)
        if self.evaluation.answer_format != config.answer_format:  # the format's own words, not the run's
            settings = settings | {"system_prompt": None, "system_prompt_file": None}
        settings = settings | {"answer_format": self.evaluation.answer_format}
        prompting = Prompting.of(SimpleNamespace(**settings))
        made_for = tokenizer, prompting, config.max_prompt_length
        if self.made_for == made_for:
            return
        self.asked, _ = prompting.encode(tokenizer, self.problems, config.max_prompt_length)
        asked = {id(p.problem) for p in self.asked}
        self.skipped = [problem for problem in self.problems if id(problem) not in asked]
        self.made_for = made_for


def load_questions(evaluation, base):
    """The problems of an evaluation; the columns of the base recipe are those of its own data."""
    own = evaluation.dataset == base.dataset
    columns = {part: getattr(base, f"{part}_column") if own else None for part in COLUMN_SETTINGS}
    how = dict(limit=evaluation.limit, seed=base.seed)
    return Questions(evaluation, load_problems(evaluation.dataset, evaluation.split, columns, **how))


COLUMN_SETTINGS = ("question", "answer", "solution")


@dataclass
class RunOfStudy:
    """What a run needs to know of its study: models that are loaded, and what to ask at which step.

    questions: the Questions of each evaluation. first: those that are asked of the start, or None where that
    was done; `start_accuracy` then says how it did.
    """

    folder: Path
    seed: int
    loaded: Loaded
    interaction: object  # of evaluations whose paths interact
    questions: list
    first: Questions | None = None
    start_accuracy: float | None = None
    run: object = None
    decoder: object = None
    asking_seconds: float = 0.0

    @property
    def step(self):
        """The steps that are finished, 0 where the run had no weights yet."""
        return self.run.progress.step if self.run is not None else 0

    def ask(self, run, decoder):
        """Ask what is to be asked after the steps that are finished, unless the answers are there.

        Nothing in it changes the training. Raises Stopped where the run is told to stop in the meantime.
        """
        if self.run is None:
            self.forget_after(run.progress.step)
        self.run, self.decoder = run, decoder
        if run.is_finished:
            return
        if self.first is not None and self.step == 0:
            record = self._answers(self.first, 0, run.interruptible)
            self.start_accuracy = accuracy(record)
            self.first = None
        for questions in self.questions:
            path = self.path(questions.evaluation, self.step)
            if self.step in questions.evaluation.steps and not path.exists():
                with run.learner.as_saved():
                    write_answers(path, self._answers(questions, self.step, run.interruptible))

    def ask_for_the_rest(self):
        """Let the last weights stand for the steps that a run did not reach."""
        for questions in self.questions:
            evaluation, record = questions.evaluation, None
            for step in evaluation.steps:
                if not self.path(evaluation, step).exists():
                    with self.run.learner.as_saved():
                        record = record or self._answers(questions, self.step, lambda _, action: action())
                    write_answers(self.path(evaluation, step), record | {"step": step})

    def missing(self):
        """The answers files that a whole run has and this one has not."""
        wanted = [self.path(q.evaluation, step) for q in self.questions for step in q.evaluation.steps]
        return [path for path in wanted if not path.exists()]

    def path(self, evaluation, step):
        return self.folder / "answers" / f"{evaluation.name}-{step}.json.gz"

    def forget_after(self, step):
        """Delete answers after this step: the run comes there once more."""
        for path in self.folder.glob("answers/*.json.gz"):
            if int(path.name.removesuffix(".json.gz").rpartition("-")[2]) > step:
                path.unlink()

    def _answers(self, questions, step, through):
        """The record of an evaluation after a step. Its draws depend on seed, step and question only."""
        started, evaluation, decoder = time.perf_counter(), questions.evaluation, self.decoder
        config = self.run.config
        questions.encode(decoder.tokenizer, config)
        check_positions(decoder.model, questions.asked, evaluation)
        sampling = Sampling(evaluation.max_completion_length, evaluation.samples, evaluation.temperature)
        how = [p.ids for p in questions.asked], sampling, (self.seed << 20) + step
        if evaluation.interacts:
            decoder.interact_as(self.interaction)
        try:
            completions = through(decoder, lambda: _complete(decoder, how, evaluation.interacts))
        finally:
            decoder.interact_as(config.interaction)
        record = {"evaluation": evaluation.name, "step": step, **graded(questions, completions)}
        self.asking_seconds += time.perf_counter() - started
        return record


def _complete(decoder, how, interacts):
    if not interacts:
        return decoder.complete(*how)
    return [completions for _, completions in complete_interacting(decoder, *how)]


def graded(questions, completions):
    """Which samples are right, their lengths, and what each votes for; a skipped question has no answers."""
    evaluation, samples = questions.evaluation, questions.evaluation.samples
    rows = [
        [p.answered(completion) for completion in row]
        for p, row in zip(questions.asked, completions, strict=True)
    ]
    texts = [completion.text for row in rows for completion in row]
    references = [p.problem.answer for p in questions.asked for _ in range(samples)]
    verdicts = iter(right_answers(texts, references, evaluation.answer_format, evaluation.grading))
    right = [[_number(next(verdicts)) for _ in row] for row in rows]
    equal = equal_by_meaning(evaluation.grading)
    answers = [[extract_answer(c.text, evaluation.answer_format) for c in row] for row in rows]
    voted = [votes(row, [bool(r) for r in of], equal) for row, of in zip(answers, right, strict=True)]
    none = [[None] * samples for _ in questions.skipped]
    return {
        "questions": [p.problem.id for p in questions.asked] + [p.id for p in questions.skipped],
        "right": right + none,
        "lengths": [[len(c.ids) for c in row] for row in rows] + [[0] * samples for _ in questions.skipped],
        "votes": [numbered(row) for row in voted] + none,
    }


def _number(verdict):
    return None if verdict is None else int(verdict)


def numbered(voted):
    """Votes as numbers, in the order in which they appear first; None stays."""
    numbers = {vote: i for i, vote in enumerate(dict.fromkeys(v for v in voted if v is not None))}
    return [None if vote is None else numbers[vote] for vote in voted]


def accuracy(record):
    """The mean over questions of the mean over samples."""
    return fmean(fmean(bool(r) for r in row) for row in record["right"])


def write_answers(path, record):
    """Write an answers file whole; the same answers are the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    temporary.write_bytes(gzip.compress(json.dumps(record, separators=(",", ":")).encode(), mtime=0))
    os.replace(temporary, path)

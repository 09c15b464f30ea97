"""The settings of grpo_eval.py. Loads no torch, so that --help and a mistake are answered at once."""

import dataclasses
import math
import os
import warnings
from pathlib import Path

from answers.formats import ANSWER_FORMATS
from decoding.names import CONTROLS, SIMILARITIES
from errors import SettingError
from problems.prompts import saved_system_prompt, system_prompt_text
from reporting.files import read_run_config
from running.settings import (
    FIRST,
    PRECISIONS,
    check,
    check_one_of,
    check_prompting,
    refuse_missing_data,
    refuse_missing_model,
    setting,
    settings_class,
)


def from_training(default, text, **roles):
    """A setting that is taken, where it is left out, from the run_config.yaml that training wrote."""
    return setting(None, text, from_training=default, **roles)


def changes_no_answer(default, text, **roles):
    """A setting that may be another one when an interrupted evaluation goes on."""
    return setting(default, text, resume="free", **roles)


ASIDE = ("ask", "questions", "compare")  # what is done instead of an evaluation
ELSEWHERE = ("compare", "api")  # where no model is loaded


@settings_class
class Config:
    """Settings of an evaluation; each says on its field what else is done with it."""

    model: str = setting(
        "grpo_finetuned_model", "directory or hub id", idle_beside=("compare",), is_path=True
    )
    dataset: str | None = from_training("gsm8k", "as for grpo_train.py", idle_beside=ASIDE, is_path=True)
    split: str = setting("test", "split to evaluate on", idle_beside=ASIDE)
    limit: int | None = setting(
        None,
        "the first N problems only; all: no limit",
        none_words=("all",),
        instead_of=ASIDE,
    )
    question_column: str | None = from_training(None, "column of the question", idle_beside=ASIDE)
    answer_column: str | None = from_training(None, "column of the answer", idle_beside=ASIDE)
    solution_column: str | None = from_training(None, "column of the worked solution", idle_beside=ASIDE)
    answer_format: str | None = from_training(
        "xml",
        f"how answers are written: {', '.join(ANSWER_FORMATS)}, or FILE.py:name",
        idle_beside=("compare",),
        is_path=True,
    )
    grading: str | None = from_training(
        "number", "what is right: number or math, as for grpo_train.py", idle_beside=ASIDE
    )
    system_prompt_file: str | None = from_training(
        None,
        "a text file to use instead of the format's own system prompt",
        idle_beside=("compare",),
        is_path=True,
    )
    system_prompt: str | None = from_training(
        None, "the same as a text", instead_of=("system_prompt_file",), idle_beside=("compare",)
    )
    prompt_format: str | None = from_training(
        "chat", "chat or raw, as for grpo_train.py", idle_beside=("compare",)
    )
    chat_template_kwargs: str | None = from_training(
        "{}",
        "JSON object handed to the chat template",
        goes_with="prompt_format=chat",
        idle_beside=("compare",),
    )
    by: list[str] | None = setting(
        None, "columns of the data to report accuracy by, beside subject and level", instead_of=ASIDE
    )
    max_prompt_length: int | None = from_training(
        512,
        "longer prompts are skipped and counted; they count as not right in every number",
        idle_beside=(*ASIDE, "api"),
    )
    max_completion_length: int | None = from_training(
        400, "tokens an answer may have", idle_beside=("compare",)
    )
    ask: str | None = setting(None, "answer this one question instead, readably")
    questions: str | None = setting(
        None,
        "answer every question of a file instead: one a line, or data (.jsonl, .json, .csv, .parquet) with a "
        "question or prompt",
        instead_of=("ask",),
        is_path=True,
    )
    save_jsonl: str | None = setting(
        None,
        "with --questions: write prompts and answers there, one JSON object a line, "
        "as sft_train.py reads them",
        goes_with="questions",
        idle_beside=("ask", "compare"),
        is_path=True,
    )
    compare: list[str] | None = setting(
        None,
        "compare evaluations instead: folders of this script, the first against the others; a,b: seeds of "
        "one side, paired with those of the other where they share start, order and draws",
        instead_of=("ask", "questions"),
        is_path=True,
    )
    num_samples: int = setting(
        1,
        "answers a question, with a temperature above 0; reports pass@k, maj@k (votes by meaning where "
        "grading is math; of answers with as many votes the one given first wins) and mean@k",
        goes_with="temperature",
        idle_beside=ASIDE,
    )
    api: str | None = changes_no_answer(
        None,
        "ask an OpenAI-compatible server at this base URL instead of loading a model; "
        "its key from OPENAI_API_KEY",
        instead_of=ASIDE,
    )
    api_model: str | None = setting(
        None, "name of the model there (default: the only one it has)", goes_with="api"
    )
    api_at_once: int = changes_no_answer(32, "requests in flight", goes_with="api")
    api_timeout: float = changes_no_answer(300.0, "seconds one request may take", goes_with="api")
    m3po: bool = setting(
        False,
        "also decode the samples of each question as paths that interact, as in training, "
        "with the same draws",
        instead_of=ASIDE,
        goes_with="temperature",
        idle_beside=("api", "num_samples=1"),
    )
    m3po_lambda: float | None = from_training(0.1, "with m3po: as for grpo_train.py", goes_with="m3po")
    m3po_temperature: float | None = from_training(
        0.1,
        "with m3po: as for grpo_train.py",
        goes_with="m3po",
        idle_beside=("m3po_similarity=mean",),
    )
    m3po_similarity: str | None = from_training(
        "distribution", f"with m3po: as for grpo_train.py ({', '.join(SIMILARITIES)})", goes_with="m3po"
    )
    m3po_control: str | None = from_training(
        "none",
        f"with m3po: as for grpo_train.py ({', '.join(CONTROLS)}); strangers are those of the model's run",
        goes_with="m3po",
    )
    temperature: float = setting(0.0, "0: greedy", idle_beside=("compare",))
    top_p: float = setting(
        1.0,
        "sample from the smallest set of tokens of this probability",
        goes_with="temperature",
        idle_beside=ASIDE,
    )
    top_k: int = setting(
        0,
        "sample from the k likeliest tokens; 0: all",
        goes_with="temperature",
        idle_beside=(*ASIDE, "api"),
    )
    batch_size: int | None = changes_no_answer(
        None,
        "answers decoded at once (default: 32 on the CPU, on CUDA as many as fit, 512 at most)",
        idle_beside=(*ASIDE, "api"),
    )
    seed: int | None = from_training(42, "seeds the draws of sampling", idle_beside=("compare",))
    precision: str | None = from_training(
        "bf16",
        "on CUDA: what the model computes in, bf16, fp16 or fp32 (default: what it was trained in); the CPU "
        "computes in float32. bf16 false is fp32",
        idle_beside=ELSEWHERE,
        switches={"bf16": ("bf16", "fp32")},
    )
    torch_compile: bool = changes_no_answer(
        True,
        "on CUDA: compile the decoder's step (half a minute, then faster); "
        "false pays for a few questions only",
        idle_beside=ELSEWHERE,
    )
    output_dir: str = changes_no_answer(
        "eval_runs",
        "the run goes into a folder of its own in here",
        idle_beside=("ask", "questions"),
        is_path=True,
    )
    name: str | None = changes_no_answer(
        None,
        "name of that folder (default: model, data set, split, time and six more letters), or of a "
        "comparison's files there (default: compare, compare-2, ...); nothing is overwritten",
        idle_beside=("ask", "questions"),
    )
    json: bool = changes_no_answer(
        False,
        "also print the report as one JSON object in the last line; into a pipe or a file it always is",
        idle_beside=("ask", "questions"),
    )
    num_processes: int | None = changes_no_answer(
        None,
        "processes to start on this machine (default: one a visible GPU, one on the CPU)",
        idle_beside=(*ASIDE, "api"),
    )
    trust_remote_code: bool = changes_no_answer(
        False, "run code that comes with a model", idle_beside=ELSEWHERE
    )

    help_groups = (
        (FIRST, "model dataset split limit ask questions compare num_samples temperature output_dir"),
        (
            "data",
            "by question_column answer_column solution_column answer_format grading system_prompt_file "
            "system_prompt prompt_format chat_template_kwargs max_prompt_length save_jsonl",
        ),
        ("rollout", "max_completion_length top_p top_k batch_size seed"),
        ("M3PO", "m3po m3po_lambda m3po_temperature m3po_similarity m3po_control"),
        ("a server", "api api_model api_at_once api_timeout"),
        ("saving", "name json"),
        ("many GPUs", "num_processes precision torch_compile"),
    )
    usage = "%(prog)s [--config FILE.yaml] [--FIELD VALUE ...]"

    @property
    def answers_on_stdout(self):
        return self.ask is not None or self.questions is not None

    @property
    def first_line(self):
        """What the script prints at once, before it loads anything."""
        if self.compare:
            return f"comparing {' with '.join(self.compare)}"
        if self.answers_on_stdout:
            return f"asking {self.model}"
        return f"evaluating {self.api or self.model} on {self.dataset}, split {self.split}"

    def __post_init__(self):
        trained = read_run_config(self.model)
        object.__setattr__(self, "takes_precision", self.precision is None)
        object.__setattr__(self, "system_prompt", system_prompt_text(self))  # what is given here wins
        trained |= saved_system_prompt(trained if self.system_prompt is None else {})
        is_other_data = self.dataset not in (None, trained.get("dataset"))
        takes_lambda = self.m3po_lambda is None
        for field in dataclasses.fields(self):
            if is_other_data and field.name.endswith("_column"):  # see read_problems
                continue
            if "from_training" in field.metadata and getattr(self, field.name) is None:
                value = trained.get(field.name, field.metadata["from_training"])
                object.__setattr__(self, field.name, value)
        if self.m3po and takes_lambda and self.m3po_lambda == 0:
            remedy = (
                "the model was trained with m3po_lambda=0, at which paths hear nothing: give --m3po_lambda"
            )
            raise SettingError("m3po", True, remedy)
        is_evaluation = not any(getattr(self, name) for name in ASIDE)
        in_training = Path(self.dataset).is_file() and not is_other_data
        if is_evaluation and in_training and self.split != trained.get("split"):
            remedy = "give another --dataset, or --split train to mean it"
            raise SettingError(
                "dataset", self.dataset, f"is the one file this model was trained on: {remedy}"
            )
        if is_evaluation and not is_other_data and self.split == trained.get("split") != "train":
            what = "the model was trained on this split, and its accuracy is not that on new problems"
            warnings.warn(f"split={self.split}: {what}", stacklevel=2)
        self._check_ranges()
        self._check_together()
        check_prompting(self)

    def precision_on(self, device):
        """What is computed in on a device: that a model was trained in fp16 is no reason to refuse the CPU,
        that fp16 was asked for is.
        """
        is_refused = self.precision == "fp16" and not self.takes_precision
        return self.precision if device.type == "cuda" or is_refused else "fp32"

    @property
    def sampling(self):
        from decoding.rollout import Sampling  # which loads torch

        how = dict(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        return Sampling(self.max_completion_length, self.num_samples, **how)

    def _check_ranges(self):
        check(self, "seed", lambda v: 0 <= v < 2**31, "must be from 0 to 2147483647")
        counts = "max_prompt_length max_completion_length num_samples api_at_once"
        check(self, counts, lambda v: v >= 1, "must be at least 1")
        check(self, "limit batch_size num_processes", lambda v: v is None or v >= 1, "must be at least 1")
        check(self, "name", _is_within, "is no name of a folder in output_dir")
        check(self, "temperature top_k", lambda v: 0 <= v < math.inf, "must be finite and not negative")
        check(self, "top_p", lambda v: 0 < v <= 1, "must be above 0 and at most 1")
        check(self, "ask", lambda v: v is None or v.strip(), "is empty: give a question")
        day = "must be positive, and a day (86400) at the most"
        check(self, "api_timeout", lambda v: 0 < v <= 86400, day)
        check(self, "m3po_lambda", lambda v: 0 <= v <= 1, "must be between 0 and 1")
        check(self, "m3po_temperature", lambda v: 1e-6 <= v < math.inf, "must be positive")
        check_one_of(self, "m3po_similarity", SIMILARITIES)
        check_one_of(self, "m3po_control", CONTROLS)
        check_one_of(self, "precision", PRECISIONS)

    def _check_together(self):
        """Settings that need, or exclude, others."""
        check(self, "compare", lambda v: v is None or len(v) >= 2, "needs two evaluations at least")
        check(self, "save_jsonl", lambda v: not v or self.questions, "goes with --questions FILE")
        remedy = "must be a file in a folder that is there"
        check(self, "save_jsonl", lambda v: not v or can_be_file(Path(v)), remedy)
        remedy = "paths of a server cannot interact: load the model instead"
        check(self, "m3po", lambda v: not (v and self.api), remedy)
        remedy = "paths need each other: set --num_samples 8 --temperature 1, or the like"
        check(self, "m3po", lambda v: not v or self.num_samples > 1, remedy)
        remedy = "--ask and --questions give one answer from the whole distribution"
        is_asked = self.ask is not None or self.questions is not None
        check(self, "num_samples", lambda v: v == 1 or not is_asked, remedy)
        check(self, "top_p", lambda v: v == 1 or not is_asked, remedy)
        check(self, "top_k", lambda v: v == 0 or not is_asked, remedy)
        remedy = "greedy answers are all the same: set a temperature, such as --temperature 1"
        check(self, "num_samples", lambda v: v == 1 or self.temperature > 0, remedy)


def refuse_at_once(config):
    """Refuse before torch is loaded: a model, a file of questions or of data that is not there."""
    if config.compare:
        return
    if config.api is None:
        refuse_untrained(config, config.model)
        refuse_missing_model(config.model)
    if config.questions is not None and not os.path.exists(config.questions):  # False where it is too long
        raise SettingError("questions", config.questions, "there is no such file")
    if not config.answers_on_stdout:
        refuse_missing_data(config)


def refuse_untrained(config, start):
    """Refuse the model that is evaluated by default where nothing was trained yet."""
    if config.model == Config.model and not Path(start).exists():
        remedy = (
            "is not here yet: train it with python grpo_train.py, or give a folder or a hub id as --model"
        )
        raise SettingError("model", config.model, remedy)


def can_be_file(path):
    return path.absolute().parent.is_dir() and not path.is_dir()


def _is_within(name):
    return name is None or (bool(name.strip(" ./")) and ".." not in Path(name).parts)

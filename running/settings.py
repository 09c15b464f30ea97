"""The settings that both training scripts share; each says on its field what else is done with it."""

import dataclasses
import functools
import math
import os
import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from answers.formats import ANSWER_FORMATS
from errors import SettingError, is_path, too_old
from problems.prompts import Prompting, system_prompt_text
from problems.sources import data_files
from reporting.files import FINISHED, LOGS, read_metrics
from rewards import GRADINGS
from running.parsing import named_and_typed
from running.versions import commit, versions

STEPS = 500  # of a run for which neither num_steps nor num_epochs is given
PRECISIONS = ("bf16", "fp16", "fp32")
TRACKERS = ("tensorboard", "wandb", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio")


# The groups of --help, in their order; a setting that is in none of them stands in the last.
HELP_GROUPS = (
    (
        "data",
        "split limit question_column answer_column solution_column answer_format grading "
        "system_prompt_file system_prompt prompt_format chat_template_kwargs max_prompt_length "
        "unique_train_examples",
    ),
    (
        "rollout",
        "num_epochs outer_iterations max_minutes max_wall_minutes temperature dynamic_sampling "
        "mask_truncated_completions log_groups seed",
    ),
    (
        "loss",
        "reward_set reward_weights reward_timeout warn_after loss_type beta epsilon epsilon_high mu "
        "scale_rewards rollout_is rollout_is_cap",
    ),
    ("M3PO", "m3po_temperature m3po_similarity m3po_control m3po_scoring m3po_credit inspect_every"),
    (
        "optimiser",
        "warm_start warm_start_cache optimizer weight_decay adam_beta1 adam_beta2 max_grad_norm "
        "lr_scheduler_type warmup_ratio ema_decay max_bad_steps lora_r lora_alpha lora_target_modules "
        "load_in_4bit",
    ),
    (
        "saving",
        "resume resume_anyway overwrite_output_dir stop_after save_every keep_checkpoints eval_every "
        "eval_problems keep_best patience save_adapter report_to project run_name push_to_hub hub_model_id "
        "hub_private",
    ),
    (
        "many GPUs",
        "num_processes fsdp micro_batch_tokens gradient_checkpointing precision torch_compile cpu_threads",
    ),
)
FIRST = "the ten settings that people change first"


def setting(default, text, **roles):
    """A field of a Config with its help text, and what else becomes of it:

    resume="free": a resumed run may have it otherwise, since it changes no weight; resume="never": what is
    saved would not fit; neither: only with resume_anyway. inherited=True: a warm start takes it from its GRPO
    run. in_card=True: the model card shows it. instead_of=names: of these and this one only one can be given.
    goes_with=name: it has no effect where that one is off; idle_beside=names: where one of these is on. A
    name may be `name=value`, which is on at this value. both_given="said": beside an off on the same command
    line it is warned of, not refused. belongs_to=names: it is given for these, and goes with them.
    none_words, aliases, short: further words for None, further names of the setting, a letter for it.
    switches={name: (on, off)}: a further name that is true or false, and the two values of the setting that
    it stands for. is_path=True: it may begin with ~, which a shell leaves as it is behind --output_dir= and
    never sees in a file.
    """
    return field(default=default, metadata={"help": text, **roles})


def settings_class(cls):
    """A frozen dataclass whose constructor reads names and values as those of a settings file are read.

    So from Python, too, other trainers' names are taken or refused with a hint, and a misspelt name or a
    value of another type is one line that says what would do.
    """
    cls = dataclass(frozen=True, kw_only=True)(cls)
    make = cls.__init__

    @functools.wraps(make)
    def __init__(self, **given):
        make(self, **named_and_typed(cls, given, "Config"))

    cls.__init__ = __init__
    return cls


def names_with(config_class, role, value=True):
    """Names of the settings whose field has this role, in their order."""
    return [f.name for f in dataclasses.fields(config_class) if f.metadata.get(role) == value]


def free_on_resume(config_class):
    """Names in run_config.yaml that a resumed run may have otherwise: they change no result."""
    return {*names_with(config_class, "resume", "free"), "versions", "commit"}


@settings_class
class TrainConfig:
    """What supervised and GRPO training have in common."""

    model: str = setting(
        "Qwen/Qwen2.5-1.5B-Instruct",
        "directory or hub id of the model to start from; `tiny` builds the embedded 200,000-parameter one",
        resume="never",
        inherited=True,
        is_path=True,
    )
    dataset: str = setting(
        "gsm8k",
        "gsm8k, math, arithmetic, a .jsonl/.json/.csv/.parquet file, a folder of <split>.jsonl (or its "
        "shards), a hub id",
        inherited=True,
        is_path=True,
    )
    split: str = setting(
        "train", "split to train on, less the held-out problems; no other split is read", inherited=True
    )
    question_column: str | None = setting(
        None, "column of the question, where its name is not a usual one", inherited=True
    )
    answer_column: str | None = setting(None, "column of the answer", inherited=True)
    solution_column: str | None = setting(None, "column of the worked solution", inherited=True)
    limit: int | None = setting(
        None,
        "use the first N problems of the data only, held-out ones included; all: no limit",
        inherited=True,
        none_words=("all",),
    )
    answer_format: str = setting(
        "xml",
        f"how answers are written: {', '.join(ANSWER_FORMATS)}, or FILE.py:name of your own",
        inherited=True,
        in_card=True,
        is_path=True,
    )
    grading: str = setting(
        "number",
        "what is right: number, the same characters or number; math, the same mathematical object",
        inherited=True,
    )
    system_prompt_file: str | None = setting(
        None, "a text file to use instead of the format's own system prompt", inherited=True, is_path=True
    )
    system_prompt: str | None = setting(
        None,
        "the same as a text; that of system_prompt_file is kept here, with the run and its model",
        inherited=True,
        instead_of=("system_prompt_file",),
    )
    prompt_format: str = setting(
        "chat",
        "chat: the chat template makes the prompt; raw: the text of a `prompt` column as it stands, or the "
        "system prompt with the question in the place of its {question}; r1 then asks as R1-Zero does",
        inherited=True,
    )
    chat_template_kwargs: str = setting(
        "{}",
        'JSON object handed to the chat template, such as {"enable_thinking": false}',
        inherited=True,
        goes_with="prompt_format=chat",
    )
    output_dir: str = setting(
        "grpo_finetuned_model",
        "where the model, metrics.jsonl and run_config.yaml go",
        resume="free",
        is_path=True,
    )
    overwrite_output_dir: bool = setting(
        False,
        "write into an output_dir that holds a run already; its checkpoints and logs go",
        resume="free",
        instead_of=("resume",),
    )
    resume: bool = setting(
        False,
        "go on from the newest whole checkpoint in output_dir; where there is none, from the start",
        resume="free",
    )
    resume_anyway: bool = setting(
        False,
        "with resume: although settings, data or the number of processes are not those of the checkpoint",
        resume="free",
        goes_with="resume",
    )
    stop_after: float | None = setting(
        None, "minutes after which to save and stop as on SIGTERM, for jobs with a time limit", resume="free"
    )
    batch_size: int = setting(7, "problems a step, over all processes", in_card=True)
    num_steps: int | None = setting(
        None, f"steps (of each outer iteration), instead of num_epochs; {STEPS} where neither is given"
    )
    num_epochs: float | None = setting(
        None, "passes over the problems, instead of num_steps", in_card=True, instead_of=("num_steps",)
    )
    max_minutes: float | None = setting(
        None, "stop after the step that passes this much training time, then save as usual", resume="free"
    )
    max_wall_minutes: float | None = setting(
        None,
        "begin no step that would end later than this after the process began, by the clock: loading, "
        "compiling, a warm start and evaluations count; then save as usual, which takes some seconds more",
        resume="free",
        inherited=True,
    )
    max_prompt_length: int = setting(
        512, "longer prompts (in tokens) are skipped and counted, never cut", inherited=True
    )
    max_completion_length: int = setting(400, "tokens a completion may have", inherited=True, in_card=True)
    micro_batch_tokens: int | None = setting(
        None,
        "tokens at once in the update: changes memory, not gradients (default: what fits)",
        inherited=True,
    )
    learning_rate: float = setting(5e-6, "peak learning rate of AdamW", in_card=True)
    weight_decay: float = setting(0.0, "AdamW's decay, on matrices only")
    adam_beta1: float = setting(0.9, "AdamW's first beta")
    adam_beta2: float = setting(0.999, "AdamW's second beta")
    optimizer: str = setting(
        "adamw",
        "adamw: float32 moments, 8 bytes a weight; adamw_8bit: 2 bytes a weight (needs bitsandbytes)",
        resume="never",
        inherited=True,
        in_card=True,
    )
    max_grad_norm: float = setting(0.1, "gradients are scaled down to this norm; 0 only measures")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = setting(
        "constant",
        "learning rate after the warm-up; linear and cosine fall to 0 at the last step or the end of the "
        "minutes, whichever is nearer",
        in_card=True,
    )
    warmup_ratio: float = setting(
        0.0, "share of the optimiser steps in which the learning rate rises: of n steps 1/n, 2/n, ..., 1"
    )
    torch_compile: bool = setting(
        True,
        "on CUDA: compile the decoder's step and the update's layers (a minute once, then faster)",
        inherited=True,
    )
    gradient_checkpointing: str = setting(
        "auto",
        "on: recompute activations (less memory, a third more time); auto: where memory is short; off: never",
        inherited=True,
    )
    precision: Literal["bf16", "fp16", "fp32"] = setting(
        "bf16",
        "on CUDA: what rollouts and the update (autocast over float32 weights) compute in; the CPU always "
        "computes in float32. fp16 rounds finer than bf16 and has been reported to make the difference "
        "between sampler and update vanish (arXiv 2510.26788), but it ends at 65504: the loss is scaled, and "
        "a step that overflows is skipped. bf16 false is fp32",
        inherited=True,
        switches={"bf16": ("bf16", "fp32")},
    )
    eval_every: int = setting(
        50,
        "evaluate greedily on held-out problems every N steps, at the start and the end; 0: never",
        resume="free",
    )
    eval_problems: int = setting(
        100,
        "held-out problems, cut from the training split by hash; 0, and for GRPO eval_every 0: none",
        inherited=True,
        goes_with="eval_every",
        both_given="said",
    )
    keep_best: bool = setting(
        False, "keep the model with the best held-out accuracy in output_dir/best", goes_with="eval_every"
    )
    patience: int = setting(
        0,
        "stop after N evaluations in a row without a better held-out accuracy; 0: never",
        goes_with="eval_every",
    )
    save_every: int = setting(
        0,
        "a checkpoint every N steps, after each outer iteration and the last step, from which a finished run "
        "goes on with more num_steps; 0: only where a run is stopped",
        resume="free",
    )
    keep_checkpoints: int = setting(2, "the newest N are kept; 0: all", resume="free")
    max_bad_steps: int = setting(
        3,
        "stop after N steps in a row whose loss or gradient is not finite (fp16: from a loss scale of 1 on)",
    )
    cpu_threads: int | None = setting(
        None,
        "threads torch may use on the CPU (default: 1 beside a GPU, else its own choice); "
        "1 is best for a tiny model",
        inherited=True,
    )
    fsdp: bool = setting(
        False,
        "shard float32 weights, gradients and moments over the processes (FSDP2), not the rollout copy",
        inherited=True,
        instead_of=("lora_r", "optimizer=adamw_8bit"),
    )
    num_processes: int | None = setting(
        None,
        "processes to start on this machine (default: one a visible GPU, one on the CPU)",
        resume="free",
        inherited=True,
    )
    seed: int = setting(42, "seeds problem order, draws and new models", inherited=True, in_card=True)
    open: bool = setting(
        False, "open report.html in the browser, when the first step is on it", resume="free"
    )
    report_to: list[str] | None = setting(
        None, "trackers that get all of metrics.jsonl: tensorboard, wandb, ... (default: none)", resume="free"
    )
    project: str = setting(
        "grpo-m3po", "project of the run in a tracker", resume="free", goes_with="report_to"
    )
    run_name: str | None = setting(
        None, "its name there (default: the name of output_dir)", resume="free", goes_with="report_to"
    )
    push_to_hub: bool = setting(False, "upload the finished model with its card", resume="free")
    hub_model_id: str | None = setting(
        None, "repository to push to: user/name", resume="free", goes_with="push_to_hub"
    )
    hub_private: bool = setting(
        True, "make that repository private, where it is new", resume="free", goes_with="push_to_hub"
    )
    trust_remote_code: bool = setting(False, "run code that comes with a model", inherited=True)
    lora_r: int = setting(
        0, "rank of LoRA adapters (peft); 0: full fine-tuning", resume="never", inherited=True, in_card=True
    )
    lora_alpha: int = setting(
        64, "LoRA: adapters count alpha / r", inherited=True, in_card=True, goes_with="lora_r"
    )
    lora_target_modules: list[str] | None = setting(
        None,
        "LoRA: names of the layers that get adapters (default: every linear layer but the head; fused "
        "experts are none and stay frozen unless named, which is said)",
        resume="never",
        inherited=True,
        goes_with="lora_r",
    )
    load_in_4bit: bool = setting(
        False,
        "LoRA: keep the frozen weights of the policy in 4 bits (QLoRA; needs bitsandbytes). What samples and "
        "what is saved are these weights with the adapters, in 16 bits",
        resume="never",
        inherited=True,
        in_card=True,
        goes_with="lora_r",
    )
    save_adapter: bool = setting(
        False,
        "LoRA: also write the adapter alone into output_dir/adapter; output_dir itself holds merged weights",
        resume="free",
        goes_with="lora_r",
    )

    usage = "%(prog)s [--config FILE.yaml] [--FIELD VALUE ...]"
    answers_on_stdout = False

    @property
    def first_line(self):
        """What a script prints at once, before it loads anything."""
        page = Path(self.output_dir) / "report.html"
        return f"training {self.model} on {self.dataset}; from its first step on, watch it in {page}"

    def __post_init__(self):
        words = {"true": "on", "false": "off"}  # as YAML and other trainers have it
        checkpointing = words.get(str(self.gradient_checkpointing).lower(), self.gradient_checkpointing)
        object.__setattr__(self, "gradient_checkpointing", checkpointing)
        if self.report_to == ["none"]:
            object.__setattr__(self, "report_to", None)
        if self.lora_target_modules == ["all-linear"]:  # peft's word for the default
            object.__setattr__(self, "lora_target_modules", None)
        if self.resume and self.overwrite_output_dir:  # one deletes what the other goes on from
            raise SettingError(
                "overwrite_output_dir", True, "cannot stand beside resume=True: give one of the two"
            )
        self._choose_length()
        self._check_numbers()
        self._check_choices()
        self._check_lora()
        check_prompting(self)
        path, _, name = self.answer_format.rpartition(":")
        if path:  # whoever evaluates the model may stand in another folder
            object.__setattr__(self, "answer_format", f"{Path(path).resolve()}:{name}")
        if (self.keep_best or self.patience) and not self.eval_every:
            raise SettingError("eval_every", 0, "keep_best and patience need evaluations")
        if self.eval_every and not self.eval_problems:
            remedy = "evaluation needs held-out problems; set eval_every 0 to do without it"
            raise SettingError("eval_problems", 0, remedy)

    def _choose_length(self):
        """A number of steps that is given takes the place of the default number of epochs."""
        if self.num_steps is None:
            if self.num_epochs is None:
                object.__setattr__(self, "num_steps", STEPS)
        elif self.num_epochs == type(self).num_epochs:
            object.__setattr__(self, "num_epochs", None)
        elif self.num_epochs is not None:
            beside = f"cannot stand beside num_steps={self.num_steps}: give one of the two"
            raise SettingError("num_epochs", self.num_epochs, beside)

    def _check_numbers(self):
        sizes = "batch_size max_prompt_length max_completion_length max_bad_steps lora_alpha"
        optional_sizes = "num_steps limit num_processes micro_batch_tokens"
        counts = "eval_every eval_problems save_every keep_checkpoints patience"
        durations = "num_epochs max_minutes max_wall_minutes stop_after"
        rates = "learning_rate weight_decay max_grad_norm"
        check(self, sizes, lambda v: v >= 1, "must be at least 1")
        check(self, optional_sizes, lambda v: v is None or v >= 1, "must be at least 1")
        check(self, counts, lambda v: v >= 0, "must be 0 or more")
        check(self, durations, lambda v: v is None or 0 < v < math.inf, "must be positive and finite")
        check(self, rates, lambda v: 0 <= v < math.inf, "must be finite, 0 or more")
        moves = "must be at most 1: AdamW moves a weight by about the rate in a step"
        check(self, "learning_rate", lambda v: v <= 1, moves)
        check(self, "adam_beta1 adam_beta2", lambda v: 0 <= v < 1, "must be in [0, 1)")
        check(self, "warmup_ratio", lambda v: 0 <= v <= 1, "must be between 0 and 1")
        check(self, "seed", lambda v: 0 <= v < 2**31, "must be from 0 to 2147483647")
        check(self, "cpu_threads", lambda v: v is None or 1 <= v <= 1024, "must be from 1 to 1024")
        check(self, "lora_r", lambda v: v >= 0, "must be 0 (full fine-tuning) or more")

    def _check_choices(self):
        check_one_of(self, "gradient_checkpointing", ("auto", "on", "off"))
        check_one_of(self, "lr_scheduler_type", ("constant", "linear", "cosine"))
        check_one_of(self, "optimizer", ("adamw", "adamw_8bit"))
        check_one_of(self, "precision", PRECISIONS)
        needs_package(self, "optimizer", self.optimizer == "adamw_8bit", "bitsandbytes", "adamw")
        trackers = "must be of " + ", ".join(TRACKERS) + ", or none"
        check(self, "report_to", lambda v: not v or set(v) <= set(TRACKERS), trackers)
        for tracker in self.report_to or ():
            needs_package(self, "report_to", True, tracker, "none")
        if self.push_to_hub and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.hub_model_id or ""):
            remedy = "must be user/name, the repository that push_to_hub makes"
            raise SettingError("hub_model_id", self.hub_model_id, remedy)

    def _check_lora(self):
        needs_package(self, "lora_r", self.lora_r > 0, "peft", 0)
        needs_package(self, "load_in_4bit", self.load_in_4bit, "bitsandbytes", False)
        if self.fsdp and (self.lora_r or self.optimizer != "adamw"):
            remedy = "goes with full fine-tuning and --optimizer adamw; LoRA and 8-bit moments need no shards"
            raise SettingError("fsdp", True, remedy)
        if self.load_in_4bit and self.model == "tiny":
            raise SettingError("load_in_4bit", True, "model=tiny is made here, and not loaded: give another")
        for name in ("lora_alpha", "lora_target_modules", "load_in_4bit", "save_adapter"):
            if getattr(self, name) != getattr(type(self), name) and not self.lora_r:
                remedy = "has no effect with lora_r=0: set lora_r too"
                raise SettingError(name, getattr(self, name), remedy)

    @property
    def moment_bytes(self):
        """Bytes a trained weight of what goes from step to step with it: moments, and its average."""
        return 2 if self.optimizer == "adamw_8bit" else 8


def check(config, names, good, remedy):
    """Every named field of `config` must satisfy `good`. Comparisons with NaN are False, so it is refused."""
    for name in names.split():
        if not good(getattr(config, name)):
            raise SettingError(name, getattr(config, name), remedy)


def check_one_of(config, name, values):
    check(config, name, lambda v: v in values, "must be one of " + ", ".join(values))


def needs_package(config, name, needed, package, otherwise):
    """Refuse a setting whose package is missing or too old; `otherwise` is the value that does without it."""
    if not needed:
        return
    what = "a package" if find_spec(package) is None else ""
    for it, bound, there in too_old("requirements-dev.txt"):
        if it == package and there is not None:
            what, package = f"{package}{bound} ({there} there)", f"-U {package}"
    if what:
        remedy = f"needs {what}: pip install {package}, or say --{name} {otherwise}"
        raise SettingError(name, getattr(config, name), remedy)


def check_prompting(config):
    """The settings that decide what the model reads, shared with the evaluation; keeps a file's text."""
    check_one_of(config, "grading", GRADINGS)
    object.__setattr__(config, "system_prompt", system_prompt_text(config))
    Prompting.of(config)


def refuse_at_once(config):
    """Refuse before torch is loaded: an output_dir in use, a model or a data file that is not there."""
    refuse_folder(config)
    if not config.resume:  # which has the weights
        refuse_missing_model(config.model)
    refuse_missing_data(config)


def refuse_missing_model(name):
    if is_path(name) and not os.path.exists(name):
        raise SettingError(
            "model", name, "there is no such folder: give one, or a hub id that can be reached"
        )


def refuse_missing_data(config):
    if config.dataset != "arithmetic":  # which is generated, whatever lies here
        data_files(config.dataset, config.split)


def refuse_folder(config):
    """Refuse an output_dir that cannot be a folder, or that is in use, which --check only reports."""
    remedy = _why_not(config, Path(config.output_dir))
    if remedy is None and not getattr(config, "check", False):
        remedy = why_in_use(config)
    if remedy:
        raise SettingError("output_dir", config.output_dir[:100], remedy)


def _why_not(config, folder):
    """Why a run cannot write there, or None."""
    is_too_long = any(len(os.fsencode(part)) > 255 for part in folder.parts)
    if not config.output_dir.strip() or "\0" in config.output_dir or is_too_long:
        return "is no name of a folder"
    if (folder / "grpo_train.py").is_file():
        return "is this project's own folder, whose README.md would be written over: choose another"
    if any(part.exists() and not part.is_dir() for part in (folder, *folder.parents)):
        return "is a file, or lies under one: give a folder"
    files = (*LOGS, FINISHED, "run_config.yaml", "config.json", "model.safetensors")
    blocking = [name for name in files if (folder / name).is_dir()]
    blocking += [name for name in (".saving", "best") if (folder / name).is_file()]
    if blocking:
        what = f"holds a {blocking[0]} of another kind, which is in the way"
        return f"{what}: move it, or choose another folder"
    return None


def why_in_use(config):
    """Why a run must take another output_dir than this, since a run or a model lies there, or None."""
    folder = Path(config.output_dir)
    holds_a_run = has_begun(folder)
    others = [name for name in ("config.json", "README.md") if (folder / name).exists()]
    if others and not holds_a_run and not config.overwrite_output_dir:
        what = f"holds a {others[0]} that is no run's and would be written over"
        return f"{what}: choose another, or say --overwrite_output_dir true"
    if holds_a_run and not (config.overwrite_output_dir or config.resume):
        return "holds a run already: choose another, or say --resume true, or --overwrite_output_dir true"
    return None


def has_begun(folder):
    """Whether a folder holds something of a run: a finished step, or a model. One of 0 steps is none."""
    if not (folder / "run_config.yaml").exists():
        return False
    others = any((folder / name).exists() for name in (FINISHED, "config.json"))
    return others or any(folder.glob("checkpoint-*")) or bool(read_metrics(folder))


def resolved(config):
    """Every setting, the versions and the commit: what `run_config.yaml` holds. No tokens, no environment."""
    return {**dataclasses.asdict(config), "versions": versions(), "commit": commit()}

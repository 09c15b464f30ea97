"""Settings: one frozen dataclass a script, YAML below it, the command line over both, and one line for a user's mistake."""

import argparse
import dataclasses
import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, get_args, get_origin, get_type_hints

import torch
import yaml
from transformers import HfArgumentParser
from transformers.utils import logging as transformers_logging

from data import DataError
from rewards import ANSWER_FORMATS, GRADINGS, RewardError


class SettingError(ValueError):
    """A bad setting: names the field, the value and what would do. The scripts print it as one line and exit with 2."""

    def __init__(self, name, value, remedy):
        super().__init__(f"{name}={value!r}: {remedy}")


class RunError(RuntimeError):
    """A run that cannot go on, said in one line; the scripts exit with 1."""


ALIASES = {"model_name_or_path": "model", "save_steps": "save_every", "dataset_name": "dataset"}
REFUSED = {
    "num_iterations": "says two things (outer iterations here, mu in TRL): use outer_iterations or mu",
    "top_p": "belongs to evaluation only: a nucleus of the new policy can exclude a token that was sampled",
    "top_k": "belongs to evaluation only: the policy's top k can exclude a token that was sampled",
    "min_p": "truncates the sampling distribution, which the loss does not: leave it out",
    "gradient_accumulation_steps": "follows from the rest: batch_size counts the problems of a whole step, micro_batch_tokens bounds memory",
    "per_device_train_batch_size": "is not needed: batch_size counts the problems of a step over all processes, micro_batch_tokens bounds memory",
    "load_best_model_at_end": "is keep_best here, which leaves the best model in output_dir/best",
}

TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "comet_ml": "comet_ml", "aim": "aim", "clearml": "clearml",
            "dvclive": "dvclive", "swanlab": "swanlab", "trackio": "trackio"}  # fmt: skip


def setting(default, text):
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainConfig:
    """What supervised and GRPO training have in common."""

    model: str = setting("Qwen/Qwen2.5-1.5B-Instruct", "directory or hub id of the model to start from; `tiny` builds the embedded 200,000-parameter one")
    dataset: str = setting("gsm8k", "gsm8k, math, arithmetic, a .jsonl/.json/.csv/.parquet file, a folder with <split>.jsonl, or a hub id")
    split: str = setting("train", "split to train on; held-out problems are cut from it, the test split is never looked at")
    question_column: str | None = setting(None, "column of the question, where its name is not a usual one")
    answer_column: str | None = setting(None, "column of the answer")
    solution_column: str | None = setting(None, "column of the worked solution")
    limit: int | None = setting(None, "train on the first N problems only")
    answer_format: str = setting("xml", "how answers are written: " + ", ".join(ANSWER_FORMATS))
    grading: str = setting("number", "what is right: number, the same characters or number; math, the same mathematical object (math-verify)")
    system_prompt_file: str | None = setting(None, "a text file to use instead of the format's own system prompt")
    chat_template_kwargs: str = setting("{}", 'JSON object handed to the chat template, such as {"enable_thinking": false}')
    output_dir: str = setting("grpo_finetuned_model", "where the model, metrics.jsonl and run_config.yaml go")
    overwrite_output_dir: bool = setting(False, "write into an output_dir that holds a run already; its checkpoints and logs go")
    resume: bool = setting(False, "go on from the newest whole checkpoint in output_dir; where there is none, from the start")
    resume_anyway: bool = setting(False, "with resume: although settings, data or the number of processes are not those of the checkpoint")
    stop_after: float | None = setting(None, "minutes after which to save and stop as on SIGTERM, for jobs with a time limit")
    batch_size: int = setting(7, "problems a step, over all processes")
    num_steps: int = setting(500, "steps (of each outer iteration)")
    num_epochs: float | None = setting(None, "passes over the problems, instead of num_steps")
    max_minutes: float | None = setting(None, "stop after the step that passes this much training time, then save as usual")
    max_prompt_length: int = setting(512, "longer prompts (in tokens) are skipped and counted, never cut")
    max_completion_length: int = setting(400, "tokens a completion may have")
    micro_batch_tokens: int | None = setting(None, "tokens (padding in) at once in the update: changes memory, not gradients (default: what memory holds)")
    learning_rate: float = setting(5e-6, "peak learning rate of AdamW")
    weight_decay: float = setting(0.0, "AdamW's decay, on matrices only")
    adam_beta1: float = setting(0.9, "AdamW's first beta")
    adam_beta2: float = setting(0.999, "AdamW's second beta")
    optimizer: str = setting("adamw", "adamw: float32 moments, 8 bytes a weight; adamw_8bit: 2 bytes a weight (needs bitsandbytes)")
    max_grad_norm: float = setting(0.1, "gradients are scaled down to this norm; 0 only measures")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = setting("constant", "learning rate after the warm-up")
    warmup_ratio: float = setting(0.0, "share of the optimiser steps in which the learning rate rises from 0")
    torch_compile: bool = setting(True, "on CUDA: compile the decoder's step and the layers of the update (a minute once a process, then faster)")
    gradient_checkpointing: str = setting("auto", "on: recompute activations in the backward (less memory, a third more time); auto: where memory is short")
    bf16: bool = setting(True, "on CUDA: bf16 autocast over float32 weights, bf16 rollouts; the CPU always computes in float32")
    eval_every: int = setting(50, "evaluate greedily on held-out problems every N steps, and before the first and after the last; 0: never")
    eval_problems: int = setting(100, "held-out problems, cut from the training split by hash; 0: none")
    keep_best: bool = setting(False, "keep the model with the best held-out accuracy in output_dir/best")
    patience: int = setting(0, "stop after N evaluations in a row without a better held-out accuracy; 0: never")
    save_every: int = setting(0, "a checkpoint to go on from every N steps and at the end of an outer iteration; 0: only where the run is stopped")
    keep_checkpoints: int = setting(2, "the newest N are kept; 0: all")
    max_bad_steps: int = setting(3, "stop after N steps in a row whose loss or gradient is not finite")
    cpu_threads: int | None = setting(None, "threads torch may use on the CPU (default: its own choice); 1 is best for a tiny model")
    fsdp: bool = setting(False, "shard float32 weights, gradients and moments over the processes (FSDP2); the rollout copy stays whole on each")
    num_processes: int | None = setting(None, "processes to start on this machine (default: one a visible GPU, one on the CPU)")
    seed: int = setting(42, "seeds problem order, draws and new models")
    report_to: list[str] | None = setting(None, "trackers that get every number of metrics.jsonl: tensorboard, wandb, ... (default: none)")
    project: str = setting("grpo-m3po", "project of the run in a tracker")
    run_name: str | None = setting(None, "its name there (default: the name of output_dir)")
    push_to_hub: bool = setting(False, "upload the finished model with its card")
    hub_model_id: str | None = setting(None, "repository to push to: user/name")
    hub_private: bool = setting(True, "make that repository private, where it is new")
    trust_remote_code: bool = setting(False, "run code that comes with a model")
    lora_r: int = setting(0, "rank of LoRA adapters (needs peft); 0: full fine-tuning")
    lora_alpha: int = setting(64, "LoRA: adapters count alpha / r")
    lora_target_modules: list[str] | None = setting(None, "LoRA: names of the layers that get adapters (default: all of attention and MLP)")
    save_adapter: bool = setting(False, "LoRA: also write the adapter alone into output_dir/adapter; output_dir itself holds merged weights")

    def __post_init__(self):
        words = {"true": "on", "false": "off"}  # as YAML and other trainers have it
        object.__setattr__(self, "gradient_checkpointing", words.get(str(self.gradient_checkpointing).lower(), self.gradient_checkpointing))
        check(self, "gradient_checkpointing", lambda v: v in ("auto", "on", "off"), "must be auto, on or off")
        check(self, "batch_size num_steps max_prompt_length max_completion_length", lambda v: v >= 1, "must be at least 1")
        check(self, "learning_rate weight_decay max_grad_norm", lambda v: 0 <= v < math.inf, "must be finite, 0 or more")
        check(self, "eval_every eval_problems save_every keep_checkpoints patience", lambda v: v >= 0, "must be 0 or more")
        check(self, "adam_beta1 adam_beta2", lambda v: 0 <= v < 1, "must be in [0, 1)")
        check(self, "warmup_ratio", lambda v: 0 <= v <= 1, "must be between 0 and 1")
        check(self, "max_bad_steps", lambda v: v >= 1, "must be at least 1")
        check(self, "num_epochs max_minutes stop_after", lambda v: v is None or 0 < v < math.inf, "must be positive and finite")
        check(self, "seed", lambda v: 0 <= v < 2**31, "must be from 0 to 2147483647")
        check(self, "lr_scheduler_type", lambda v: v in ("constant", "linear", "cosine"), "must be constant, linear or cosine")
        check(self, "limit num_processes micro_batch_tokens", lambda v: v is None or v >= 1, "must be at least 1")
        check(self, "cpu_threads", lambda v: v is None or 1 <= v <= 1024, "must be from 1 to 1024")
        check(self, "optimizer", lambda v: v in ("adamw", "adamw_8bit"), "must be adamw or adamw_8bit")
        needs_package(self, "optimizer", self.optimizer == "adamw_8bit", "bitsandbytes", "adamw")
        check(self, "lora_r", lambda v: v >= 0, "must be 0 (full fine-tuning) or more")
        check(self, "lora_alpha", lambda v: v >= 1, "must be at least 1")
        needs_package(self, "lora_r", self.lora_r > 0, "peft", 0)
        if self.fsdp and (self.lora_r or self.optimizer != "adamw"):
            raise SettingError("fsdp", True, "goes with full fine-tuning and --optimizer adamw; LoRA and 8-bit moments are small without it")
        if self.lora_target_modules and not self.lora_r:
            raise SettingError("lora_target_modules", self.lora_target_modules, "there are no adapters without LoRA: set lora_r")
        if self.save_adapter and not self.lora_r:
            raise SettingError("save_adapter", True, "there is no adapter without LoRA: set lora_r")
        if self.report_to == ["none"]:
            object.__setattr__(self, "report_to", None)
        check(self, "report_to", lambda v: not v or set(v) <= set(TRACKERS), "must be of " + ", ".join(TRACKERS) + ", or none")
        for tracker in self.report_to or ():
            needs_package(self, "report_to", True, TRACKERS[tracker], "none")
        if self.push_to_hub and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.hub_model_id or ""):
            raise SettingError("hub_model_id", self.hub_model_id, "must be user/name, the repository that push_to_hub makes")
        check_prompting(self)
        if (self.keep_best or self.patience) and not self.eval_every:
            raise SettingError("eval_every", 0, "keep_best and patience need evaluations")
        if self.eval_every and not self.eval_problems:
            raise SettingError("eval_problems", 0, "evaluation needs held-out problems; set eval_every 0 to do without it")

    @property
    def moment_bytes(self):
        """Bytes a weight of the optimiser's moments."""
        return 2 if self.optimizer == "adamw_8bit" else 8


def check(config, names, good, remedy):
    """Every named field of `config` must satisfy `good`; NaN satisfies nothing that compares."""
    for name in names.split():
        if not good(getattr(config, name)):
            raise SettingError(name, getattr(config, name), remedy)


def needs_package(config, name, needed, package, otherwise, install=None):
    """A feature of a library that is installed by those who use it."""
    if needed and find_spec(package) is None:
        raise SettingError(name, getattr(config, name), f"needs a package: pip install {install or package}, or say --{name} {otherwise}")


def check_prompting(config):
    """The settings that decide what the model reads, shared with the evaluation."""
    check(config, "grading", lambda v: v in GRADINGS, "must be one of " + ", ".join(GRADINGS))
    needs_package(config, "grading", config.grading == "math", "math_verify", "number", install="'math-verify[antlr4-13-2]'")
    check(config, "answer_format", lambda v: v in ANSWER_FORMATS, "must be one of " + ", ".join(ANSWER_FORMATS))
    template_kwargs(config)
    system_prompt(config)


def template_kwargs(config):
    """chat_template_kwargs as a dict."""
    try:
        value = json.loads(config.chat_template_kwargs)
    except json.JSONDecodeError as error:
        raise SettingError("chat_template_kwargs", config.chat_template_kwargs, f"is not JSON ({error.msg})") from error
    if not isinstance(value, dict):
        raise SettingError("chat_template_kwargs", config.chat_template_kwargs, "must be a JSON object")
    if {"tokenize", "add_generation_prompt", "conversation", "messages"} & set(value):
        remedy = "must not hold tokenize, add_generation_prompt, conversation or messages, which are set here"
        raise SettingError("chat_template_kwargs", config.chat_template_kwargs, remedy)
    return value


def system_prompt(config):
    """The system prompt: the format's, or the user's file, which must name the delimiter that the format waits for."""
    chosen = ANSWER_FORMATS[config.answer_format]
    if config.system_prompt_file is None:
        return chosen.system_prompt
    try:
        text = Path(config.system_prompt_file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        raise SettingError("system_prompt_file", config.system_prompt_file, f"cannot be read ({type(error).__name__})") from error
    if chosen.think_end not in text:
        raise SettingError("system_prompt_file", config.system_prompt_file, f"must name {chosen.think_end!r}, which answer_format={chosen.name} waits for")
    return text


# Files and flags


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses a repeated key and reads 5e-6 as a number (YAML 1.1 wants a point in it)."""


def _mapping(loader, node):
    keys = [loader.construct_object(key) for key, _ in node.value]
    repeated = sorted({str(k) for k in keys if keys.count(k) > 1})
    if repeated:
        raise yaml.YAMLError(f"line {node.start_mark.line + 1}: repeated key {repeated[0]}")
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


def read_yaml(path):
    """A YAML mapping as a dict; broken or missing files are a SettingError."""
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), _StrictLoader)  # a SafeLoader: builds plain data only
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingError("config", str(path), " ".join(str(error).split())) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingError("config", str(path), "must hold `key: value` lines")
    return values


def settings_from_file(config_class, path):
    """The settings of a YAML file, names checked against the class and values against its types."""
    fields = get_type_hints(config_class)  # not dataclasses.fields(): HfArgumentParser rewrites the types there
    settings = {}
    for key, value in read_yaml(path).items():
        name = ALIASES.get(key, key)
        if name in REFUSED and name not in fields:
            raise SettingError(key, value, REFUSED[name])
        if name not in fields:
            raise SettingError(key, value, f"no such setting in {path}; --help lists them{_meant(str(key), fields)}")
        if name in settings:
            raise SettingError(key, value, f"given twice in {path} (it is another name of {name})")
        settings[name] = _typed(name, fields[name], value)
    return settings


def _meant(name, known):
    """The name that a misspelt one is nearest to, for the end of a message; nothing where none is near."""
    near = get_close_matches(name.replace("-", "_"), known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _typed(name, hint, value):
    """A YAML value in the type of its field; an int serves as a float, a mapping as JSON text."""
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kinds = [get_origin(p) or p for p in parts if p is not NoneType]
    kinds = [str if kind is Literal else kind for kind in kinds]
    if isinstance(value, bool) and name == "gradient_checkpointing":  # YAML reads on and off so
        return str(value)
    if isinstance(value, dict) and str in kinds:
        try:
            return json.dumps(value)
        except TypeError as error:  # YAML reads 2024-01-01 as a date
            raise SettingError(name, value, f"must hold what JSON can ({error}); put it into quotes") from error
    if value is None and NoneType in parts:
        return None
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if list in kinds and isinstance(value, str):
        return [value]
    if isinstance(value, list) and list in kinds:
        item = next(get_args(p)[0] for p in parts if get_origin(p) is list)
        return [_typed(name, item, v) for v in value]
    if type(value) not in kinds:
        raise SettingError(name, value, "must be " + " or ".join(k.__name__ for k in kinds))
    return value


def parse_config(config_class, argv=None, description=None):
    """`[--config FILE.yaml] [--FIELD VALUE ...]` -> config_class. The command line wins over the file, the file over the defaults."""
    argv = list(sys.argv[1:] if argv is None else argv)
    fields = get_type_hints(config_class)
    for i, word in enumerate(argv):
        name = word.removeprefix("--").split("=")[0].replace("-", "_") if word.startswith("--") else ""
        if name in REFUSED and name not in fields:
            raise SettingError(name, word.partition("=")[2] or " ".join(argv[i + 1 : i + 2]), REFUSED[name])
        if name in ALIASES:
            argv[i] = "--" + ALIASES[name] + word[2 + len(name) :]
    parser = HfArgumentParser(config_class, description=description, allow_abbrev=False)
    parser.add_argument("--config", help="YAML file of settings; flags given beside it win")
    parser.error = lambda message: _usage_error(message, fields)
    known = _config_only(argv)
    if known is not None:
        parser.set_defaults(**settings_from_file(config_class, known))
    optional = {name for name, hint in fields.items() if NoneType in get_args(hint)}
    emptied = [i for i in range(len(argv) - 1) if argv[i].removeprefix("--") in optional and argv[i + 1].lower() in ("none", "null")]
    rest = [word for i, word in enumerate(argv) if i not in emptied and i - 1 not in emptied]
    values = vars(parser.parse_args(rest)) | {argv[i].removeprefix("--"): None for i in emptied}
    values.pop("config")
    return config_class(**values)


def _config_only(argv):
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    first.error = _usage_error
    return first.parse_known_args(argv)[0].config


def _usage_error(message, fields=()):
    flag = re.match(r"unrecognized arguments: --([\w-]+)", message)
    raise SettingError("command line", message, "--help lists every flag" + (_meant(flag[1], fields) if flag else ""))


def run_main(main):
    """Call main() for a script: 0, or one line on standard error and 2 (a bad setting or bad data) or 1 (a failed run)."""
    transformers_logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        main()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # threads of it that outlive the interpreter can abort the process
    except (SettingError, DataError) as error:
        sys.exit(_last_words(error, 2))
    except (RunError, RewardError) as error:
        sys.exit(_last_words(error, 1))
    except OSError as error:
        who = {errno.EPIPE: "the program that read the output is gone"} | dict.fromkeys(
            (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO), "the disk"
        )
        if error.errno not in who:
            raise
        if error.errno == errno.EPIPE:
            sys.stdout = open(os.devnull, "w")  # what is left to be written there would fail again at the end
        sys.exit(_last_words(f"{error.filename or who[error.errno]}: {error.strerror}; go on with --resume true when it can be written to again", 1))
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):  # on a card, on the CPU; the update says what it can do itself
            remedy = "try a lower batch_size, num_generations or max_completion_length, or a smaller model"
            sys.exit(_last_words(f"out of memory ({' '.join(str(error).split())[:200]}): {remedy}", 1))
        if not (isinstance(error, torch.distributed.DistError) or "gloo" in str(error)):
            raise
        print(f"process {os.environ.get('RANK', 0)}: lost its connection to the others; the process that ended says why", file=sys.stderr, flush=True)
        time.sleep(5)  # so that the launcher sees the other's status first
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _last_words(error, status):
    rank = os.environ.get("RANK", "0")
    print(f"{Path(sys.argv[0]).name}: {'' if rank == '0' else f'process {rank}: '}{error}", file=sys.stderr, flush=True)
    return status


def resolved(config):
    """Every setting, the versions and the commit: what `run_config.yaml` holds. No tokens, no environment."""
    commit = subprocess.run(
        ["git", "rev-parse", "--verify", "-q", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    packages = ("torch", "transformers", "accelerate", "datasets", "numpy", "peft", "bitsandbytes", "math-verify", "triton")
    versions = {name: metadata.version(name) for name in packages if _installed(name)}
    return {**dataclasses.asdict(config), "versions": {"python": sys.version.split()[0], **versions}, "commit": commit or "unknown"}


def _installed(package):
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def write_whole(path, text):
    """Write a file so that no reader ever sees half of it."""
    path = Path(path)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)

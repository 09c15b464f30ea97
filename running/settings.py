"""The settings that both training scripts share, each with its help text."""

import dataclasses
import math
import re
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from answers.formats import ANSWER_FORMATS
from errors import SettingError
from problems.prompts import Prompting
from rewards import GRADINGS

TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "comet_ml": "comet_ml", "aim": "aim", "clearml": "clearml",
            "dvclive": "dvclive", "swanlab": "swanlab", "trackio": "trackio"}  # fmt: skip


def setting(default, text):
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainConfig:
    """What supervised and GRPO training have in common."""

    model: str = setting(
        "Qwen/Qwen2.5-1.5B-Instruct",
        "directory or hub id of the model to start from; `tiny` builds the embedded 200,000-parameter one",
    )
    dataset: str = setting(
        "gsm8k",
        "gsm8k, math, arithmetic, a .jsonl/.json/.csv/.parquet file, a folder with <split>.jsonl, or a hub id",
    )
    split: str = setting(
        "train", "split to train on; held-out problems are cut from it, the test split is never looked at"
    )
    question_column: str | None = setting(None, "column of the question, where its name is not a usual one")
    answer_column: str | None = setting(None, "column of the answer")
    solution_column: str | None = setting(None, "column of the worked solution")
    limit: int | None = setting(None, "train on the first N problems only")
    answer_format: str = setting("xml", "how answers are written: " + ", ".join(ANSWER_FORMATS))
    grading: str = setting(
        "number",
        "what is right: number, the same characters or number; math, the same mathematical object (math-verify)",
    )
    system_prompt_file: str | None = setting(
        None, "a text file to use instead of the format's own system prompt"
    )
    chat_template_kwargs: str = setting(
        "{}", 'JSON object handed to the chat template, such as {"enable_thinking": false}'
    )
    output_dir: str = setting("grpo_finetuned_model", "where the model, metrics.jsonl and run_config.yaml go")
    overwrite_output_dir: bool = setting(
        False, "write into an output_dir that holds a run already; its checkpoints and logs go"
    )
    resume: bool = setting(
        False, "go on from the newest whole checkpoint in output_dir; where there is none, from the start"
    )
    resume_anyway: bool = setting(
        False,
        "with resume: although settings, data or the number of processes are not those of the checkpoint",
    )
    stop_after: float | None = setting(
        None, "minutes after which to save and stop as on SIGTERM, for jobs with a time limit"
    )
    batch_size: int = setting(7, "problems a step, over all processes")
    num_steps: int = setting(500, "steps (of each outer iteration)")
    num_epochs: float | None = setting(None, "passes over the problems, instead of num_steps")
    max_minutes: float | None = setting(
        None, "stop after the step that passes this much training time, then save as usual"
    )
    max_prompt_length: int = setting(512, "longer prompts (in tokens) are skipped and counted, never cut")
    max_completion_length: int = setting(400, "tokens a completion may have")
    micro_batch_tokens: int | None = setting(
        None,
        "tokens (padding in) at once in the update: changes memory, not gradients (default: what memory holds)",
    )
    learning_rate: float = setting(5e-6, "peak learning rate of AdamW")
    weight_decay: float = setting(0.0, "AdamW's decay, on matrices only")
    adam_beta1: float = setting(0.9, "AdamW's first beta")
    adam_beta2: float = setting(0.999, "AdamW's second beta")
    optimizer: str = setting(
        "adamw", "adamw: float32 moments, 8 bytes a weight; adamw_8bit: 2 bytes a weight (needs bitsandbytes)"
    )
    max_grad_norm: float = setting(0.1, "gradients are scaled down to this norm; 0 only measures")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = setting(
        "constant", "learning rate after the warm-up"
    )
    warmup_ratio: float = setting(0.0, "share of the optimiser steps in which the learning rate rises from 0")
    torch_compile: bool = setting(
        True,
        "on CUDA: compile the decoder's step and the layers of the update (a minute once a process, then faster)",
    )
    gradient_checkpointing: str = setting(
        "auto",
        "on: recompute activations in the backward (less memory, a third more time); auto: where memory is short",
    )
    bf16: bool = setting(
        True, "on CUDA: bf16 autocast over float32 weights, bf16 rollouts; the CPU always computes in float32"
    )
    eval_every: int = setting(
        50,
        "evaluate greedily on held-out problems every N steps, and before the first and after the last; 0: never",
    )
    eval_problems: int = setting(100, "held-out problems, cut from the training split by hash; 0: none")
    keep_best: bool = setting(False, "keep the model with the best held-out accuracy in output_dir/best")
    patience: int = setting(
        0, "stop after N evaluations in a row without a better held-out accuracy; 0: never"
    )
    save_every: int = setting(
        0,
        "a checkpoint to go on from every N steps and at the end of an outer iteration; 0: only where the run is stopped",
    )
    keep_checkpoints: int = setting(2, "the newest N are kept; 0: all")
    max_bad_steps: int = setting(3, "stop after N steps in a row whose loss or gradient is not finite")
    cpu_threads: int | None = setting(
        None, "threads torch may use on the CPU (default: its own choice); 1 is best for a tiny model"
    )
    fsdp: bool = setting(
        False,
        "shard float32 weights, gradients and moments over the processes (FSDP2); the rollout copy stays whole on each",
    )
    num_processes: int | None = setting(
        None, "processes to start on this machine (default: one a visible GPU, one on the CPU)"
    )
    seed: int = setting(42, "seeds problem order, draws and new models")
    report_to: list[str] | None = setting(
        None, "trackers that get every number of metrics.jsonl: tensorboard, wandb, ... (default: none)"
    )
    project: str = setting("grpo-m3po", "project of the run in a tracker")
    run_name: str | None = setting(None, "its name there (default: the name of output_dir)")
    push_to_hub: bool = setting(False, "upload the finished model with its card")
    hub_model_id: str | None = setting(None, "repository to push to: user/name")
    hub_private: bool = setting(True, "make that repository private, where it is new")
    trust_remote_code: bool = setting(False, "run code that comes with a model")
    lora_r: int = setting(0, "rank of LoRA adapters (needs peft); 0: full fine-tuning")
    lora_alpha: int = setting(64, "LoRA: adapters count alpha / r")
    lora_target_modules: list[str] | None = setting(
        None, "LoRA: names of the layers that get adapters (default: all of attention and MLP)"
    )
    save_adapter: bool = setting(
        False,
        "LoRA: also write the adapter alone into output_dir/adapter; output_dir itself holds merged weights",
    )

    def __post_init__(self):
        words = {"true": "on", "false": "off"}  # as YAML and other trainers have it
        object.__setattr__(
            self,
            "gradient_checkpointing",
            words.get(str(self.gradient_checkpointing).lower(), self.gradient_checkpointing),
        )
        check(self, "gradient_checkpointing", lambda v: v in ("auto", "on", "off"), "must be auto, on or off")
        check(
            self,
            "batch_size num_steps max_prompt_length max_completion_length",
            lambda v: v >= 1,
            "must be at least 1",
        )
        check(
            self,
            "learning_rate weight_decay max_grad_norm",
            lambda v: 0 <= v < math.inf,
            "must be finite, 0 or more",
        )
        check(
            self,
            "eval_every eval_problems save_every keep_checkpoints patience",
            lambda v: v >= 0,
            "must be 0 or more",
        )
        check(self, "adam_beta1 adam_beta2", lambda v: 0 <= v < 1, "must be in [0, 1)")
        check(self, "warmup_ratio", lambda v: 0 <= v <= 1, "must be between 0 and 1")
        check(self, "max_bad_steps", lambda v: v >= 1, "must be at least 1")
        check(
            self,
            "num_epochs max_minutes stop_after",
            lambda v: v is None or 0 < v < math.inf,
            "must be positive and finite",
        )
        check(self, "seed", lambda v: 0 <= v < 2**31, "must be from 0 to 2147483647")
        check(
            self,
            "lr_scheduler_type",
            lambda v: v in ("constant", "linear", "cosine"),
            "must be constant, linear or cosine",
        )
        check(
            self,
            "limit num_processes micro_batch_tokens",
            lambda v: v is None or v >= 1,
            "must be at least 1",
        )
        check(self, "cpu_threads", lambda v: v is None or 1 <= v <= 1024, "must be from 1 to 1024")
        check(self, "optimizer", lambda v: v in ("adamw", "adamw_8bit"), "must be adamw or adamw_8bit")
        needs_package(self, "optimizer", self.optimizer == "adamw_8bit", "bitsandbytes", "adamw")
        check(self, "lora_r", lambda v: v >= 0, "must be 0 (full fine-tuning) or more")
        check(self, "lora_alpha", lambda v: v >= 1, "must be at least 1")
        needs_package(self, "lora_r", self.lora_r > 0, "peft", 0)
        if self.fsdp and (self.lora_r or self.optimizer != "adamw"):
            raise SettingError(
                "fsdp",
                True,
                "goes with full fine-tuning and --optimizer adamw; LoRA and 8-bit moments are small without it",
            )
        if self.lora_target_modules and not self.lora_r:
            raise SettingError(
                "lora_target_modules",
                self.lora_target_modules,
                "there are no adapters without LoRA: set lora_r",
            )
        if self.save_adapter and not self.lora_r:
            raise SettingError("save_adapter", True, "there is no adapter without LoRA: set lora_r")
        if self.report_to == ["none"]:
            object.__setattr__(self, "report_to", None)
        check(
            self,
            "report_to",
            lambda v: not v or set(v) <= set(TRACKERS),
            "must be of " + ", ".join(TRACKERS) + ", or none",
        )
        for tracker in self.report_to or ():
            needs_package(self, "report_to", True, TRACKERS[tracker], "none")
        if self.push_to_hub and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.hub_model_id or ""):
            raise SettingError(
                "hub_model_id", self.hub_model_id, "must be user/name, the repository that push_to_hub makes"
            )
        check_prompting(self)
        if (self.keep_best or self.patience) and not self.eval_every:
            raise SettingError("eval_every", 0, "keep_best and patience need evaluations")
        if self.eval_every and not self.eval_problems:
            raise SettingError(
                "eval_problems", 0, "evaluation needs held-out problems; set eval_every 0 to do without it"
            )

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
        raise SettingError(
            name,
            getattr(config, name),
            f"needs a package: pip install {install or package}, or say --{name} {otherwise}",
        )


def check_prompting(config):
    """The settings that decide what the model reads, shared with the evaluation."""
    check(config, "grading", lambda v: v in GRADINGS, "must be one of " + ", ".join(GRADINGS))
    needs_package(
        config,
        "grading",
        config.grading == "math",
        "math_verify",
        "number",
        install="'math-verify[antlr4-13-2]'",
    )
    check(
        config, "answer_format", lambda v: v in ANSWER_FORMATS, "must be one of " + ", ".join(ANSWER_FORMATS)
    )
    Prompting.of(config)


def resolved(config):
    """Every setting, the versions and the commit: what `run_config.yaml` holds. No tokens, no environment."""
    commit = subprocess.run(
        ["git", "rev-parse", "--verify", "-q", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    packages = (
        "torch",
        "transformers",
        "accelerate",
        "datasets",
        "numpy",
        "peft",
        "bitsandbytes",
        "math-verify",
        "triton",
    )
    versions = {name: metadata.version(name) for name in packages if _installed(name)}
    return {
        **dataclasses.asdict(config),
        "versions": {"python": sys.version.split()[0], **versions},
        "commit": commit or "unknown",
    }


def _installed(package):
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False

"""The settings of sft_train.py, and those of a warm start. Loads no torch, so that --help and a mistake are
answered at once.
"""

from pathlib import Path
from typing import Literal

from errors import SettingError
from running.parsing import combined, refuse_idle, settings_from_file
from running.settings import FIRST, HELP_GROUPS, TrainConfig, check, names_with, setting, settings_class


@settings_class
class Config(TrainConfig):
    """Settings of a supervised run."""

    output_dir: str = setting(
        "sft_model", "where the model, metrics.jsonl and run_config.yaml go", resume="free", is_path=True
    )
    dataset: str = setting(
        "gsm8k",
        "as for grpo_train.py, or a file of {prompt, response} lines, which are learned as they stand",
        inherited=True,
        aliases=("sft_data_path",),
        is_path=True,
    )
    batch_size: int = setting(32, "problems a step, over all processes", in_card=True)
    num_epochs: float | None = setting(
        1.0, "passes over the problems, instead of num_steps", in_card=True, instead_of=("num_steps",)
    )
    num_steps: int | None = setting(None, "steps, instead of num_epochs")
    learning_rate: float = setting(1e-5, "peak learning rate of AdamW", in_card=True)
    max_grad_norm: float = setting(1.0, "gradients are scaled down to this norm; 0 only measures")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = setting(
        "linear", "learning rate after the warm-up", in_card=True
    )
    warmup_ratio: float = setting(
        0.05, "share of the steps in which the learning rate rises: of n steps 1/n, ..., 1"
    )
    unique_train_examples: int | None = setting(
        None, "train on the first N responses that are left; all: on every one", none_words=("all",)
    )
    eval_problems: int = setting(
        0,
        "held-out problems, cut by hash from those of the training split that have an answer; 0: none",
        inherited=True,
    )
    eval_every: int = setting(
        0, "evaluate greedily on held-out problems every N steps, and after the last; 0: never", resume="free"
    )

    help_groups = (
        (
            FIRST,
            "model dataset answer_format output_dir batch_size num_epochs num_steps learning_rate "
            "max_completion_length seed",
        ),
        *HELP_GROUPS,
    )

    def __post_init__(self):
        super().__post_init__()
        check(self, "unique_train_examples", lambda v: v is None or v >= 1, "must be at least 1")


def warm_start_settings(config, given=None):
    """Settings of the supervised run before a GRPO run; what its file leaves out is the GRPO run's.

    given: settings in the place of those of the file.
    """
    inherited = {name: getattr(config, name) for name in names_with(TrainConfig, "inherited")}
    inherited["system_prompt_file"] = None  # its text is in system_prompt
    try:
        if given is None:
            given = settings_from_file(Config, config.warm_start)
        if "system_prompt_file" in given:
            inherited["system_prompt"] = None
        settings = combined(Config, inherited, given)
        refuse_idle(Config(**settings), given)
        settings |= {
            "output_dir": str(Path(config.output_dir) / "warm_start"),
            "resume": config.resume,
            "resume_anyway": config.resume_anyway,
            "overwrite_output_dir": not config.resume,
        }
        return Config(**settings)
    except SettingError as error:
        raise SettingError("warm_start", config.warm_start, str(error)) from error

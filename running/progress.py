"""How far a run has come, and which problems come next."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from errors import counted

ADVICE = {
    "unearned": "no completion has earned anything for {}. What usually helps: a supervised warm start "
    "(--warm_start), easier problems, an answer_format the model knows, and in a reward of your own the text "
    "of a completion, which is completion[0]['content'] (see --check).",
    "format_only": "for {} all completions of each group earned the same, and none was right. The "
    "format is learnt and the answers are gone; what usually helps: a warm start, a lower learning_rate, "
    "a larger num_generations.",
    "constant": "for {} all completions have earned the same, so that nothing is learnt. Either "
    "nothing is left to learn, or the reward does not look at the text, which is completion[0]['content'] "
    "(see --check).",
}


@dataclass
class Progress:
    """How far a run has come; training_state.json of a checkpoint holds it."""

    step: int = 0  # finished steps
    problems_drawn: int = 0  # problems that the finished steps used, those of extra rollouts included
    train_seconds: float = 0.0
    bad_steps: int = 0  # latest steps in a row whose loss or gradient was not finite
    unearned_steps: int = 0  # latest steps in a row in which no completion earned anything
    format_only_steps: int = 0  # likewise, in which each group earned the same and none was right
    constant_steps: int = 0  # likewise, in which all completions earned the same, and not 0
    best: float = -1.0  # held-out accuracy
    best_step: int | None = None  # after which step it was measured
    since_best: int = 0  # evaluations since then
    unlogged: dict | None = None  # metrics of the last step, if a signal interrupted its evaluation
    # settings that a resumed run had otherwise, by --resume_anyway or for more steps: [{"after_step": int,
    # "changed": {name: [there, here]}}]
    changes: list = field(default_factory=list)

    @classmethod
    def from_state(cls, state):
        """The progress in training_state.json; checkpoints before 2026-11-29 have it under other names."""
        if "progress" in state:
            kept = dict(state["progress"])
            kept.pop("pass_rates", None)  # of a way to draw problems that is gone
            return cls(**kept)
        drawn = state.get("place", state["step"] * state["settings"]["batch_size"])
        unlogged = state["metrics"] if state["evaluate"] else None
        same = {name: state[name] for name in ("step", "train_seconds", "bad_steps", "best", "since_best")}
        silent = {"unearned_steps": state.get("nothing", 0), "format_only_steps": state.get("format_only", 0)}
        return cls(problems_drawn=drawn, unlogged=unlogged, **same, **silent)

    def collapse_warning(self, metrics, patience):
        """Count steps whose rewards carry no information; a warning when there are `patience` in a row."""
        earned_nothing = metrics["reward"] == metrics["reward_std"] == 0
        format_only = (
            metrics["reward"] > 0 and metrics["correct"] == 0 and metrics["frac_reward_zero_std"] == 1
        )
        constant = metrics["reward"] != 0 and metrics["reward_std"] == 0
        self.unearned_steps = self.unearned_steps + 1 if earned_nothing else 0
        self.constant_steps = self.constant_steps + 1 if constant else 0
        self.format_only_steps = self.format_only_steps + 1 if format_only else 0
        if patience and self.unearned_steps == patience:
            return "WARNING: " + ADVICE["unearned"].format(counted(patience, "step"))
        if patience and self.format_only_steps == patience:
            return "WARNING: " + ADVICE["format_only"].format(counted(patience, "step"))
        if patience and self.constant_steps == patience and not format_only:
            return "WARNING: " + ADVICE["constant"].format(counted(patience, "step"))
        return None


def next_problems(problems, count, run):
    """The next `count` problems, in an order that each pass over the data draws anew from (seed, pass)."""
    run.problems_of_a_pass = len(problems)
    indices, orders = [], {}
    for position in range(run.problems_drawn, run.problems_drawn + count):
        pass_number, offset = divmod(position, len(problems))
        if pass_number not in orders:
            generator = torch.Generator().manual_seed((run.config.seed << 20) + pass_number)
            orders[pass_number] = torch.randperm(len(problems), generator=generator).tolist()
        indices.append(orders[pass_number][offset])
    run.problems_drawn += count
    return [problems[i] for i in indices]


def trainer_state(step=0, total=0, epoch=0.0, num_epochs=None):
    """How far a run has come, as TRL's reward functions are told, in the words of transformers' TrainerState.

    epoch: passes over the problems. Importing TrainerState takes seconds where peft and bitsandbytes are
    installed.
    """
    counts = dict(global_step=step, max_steps=total, epoch=epoch, num_train_epochs=num_epochs or 0)
    return SimpleNamespace(**counts, logging_steps=1, log_history=[])


def steps_to_do(config, count):
    """Steps of one outer iteration over `count` problems."""
    if config.num_epochs is None:
        return config.num_steps
    return math.ceil(config.num_epochs * count / config.batch_size)

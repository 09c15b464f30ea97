"""How far a run has come, and which problems come next: those of a shuffled pass, or by their pass rates."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from accelerate.utils import gather_object

from decoding.rollout import rollout_uniforms
from errors import SettingError, counted
from rewards import right_answers

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

DISCOUNT = 0.5  # what earlier samples of a problem count beside those of its latest visit
DRAW = 2**31 + 1  # of the draws of problems: no step samples again so often


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
    # problem_sampling pass_rate: discounted numbers of right and wrong samples of each problem, as two lists;
    # how many samples their prior is worth, and the digest of the data that they are of
    pass_rates: dict | None = None

    @classmethod
    def from_state(cls, state):
        """The progress in training_state.json; checkpoints before 2026-11-29 have it under other names."""
        if "progress" in state:
            return cls(**state["progress"])
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
    """The next `count` problems, in an order that each pass over the data draws anew from (seed, pass).

    With problem_sampling pass_rate the order is that of `order_by_pass_rate`, which each step draws anew.
    """
    run.problems_of_a_pass = len(problems)
    if draws_by_pass_rate(run.config):
        first = run.problems_drawn - run.progress.problems_drawn  # those that this step has had already
        run.problems_drawn += count
        return [problems[i] for i in order_by_pass_rate(run)[first : first + count]]
    indices, orders = [], {}
    for position in range(run.problems_drawn, run.problems_drawn + count):
        pass_number, offset = divmod(position, len(problems))
        if pass_number not in orders:
            generator = torch.Generator().manual_seed((run.config.seed << 20) + pass_number)
            orders[pass_number] = torch.randperm(len(problems), generator=generator).tolist()
        indices.append(orders[pass_number][offset])
    run.problems_drawn += count
    return [problems[i] for i in indices]


def draws_by_pass_rate(config):
    return (
        getattr(config, "problem_sampling", "uniform") == "pass_rate"
    )  # supervised runs have no such setting


def check_draws(config, count):
    """Refuse fewer problems than a step may draw without replacement."""
    most = config.batch_size * (1 + config.dynamic_sampling)
    if draws_by_pass_rate(config) and count < most:
        step = (
            f"a step may draw {most} different problems (batch_size and dynamic_sampling), there are {count}"
        )
        raise SettingError("problem_sampling", "pass_rate", f"{step}: give a smaller batch_size, or uniform")


def prior_worth(right, samples):
    """How many samples of the average problem the prior of a pass rate is worth, by the spread of the rates.

    right (P,): how many of `samples` of each problem are right. The moments of the beta-binomial distribution
    (Griffiths 1973): few where problems are always or never solved, many where all are alike.
    """
    if samples < 2 or not 0 < (rate := right.mean() / samples) < 1:
        return 1.0
    correlation = (right.var() / (samples * rate * (1 - rate)) - 1) / (samples - 1)
    return float(1 / min(max(correlation, 0.05), 0.9) - 1)


def chance_of_mixed_group(right, wrong, num_generations, prior=1.0):
    """The chance that of a problem's G completions some are right and some are not; counts (P,) -> (P,).

    A pass rate has the Beta posterior of its counts, on a prior that is worth `prior` samples of the average
    problem; so the number of right completions is beta-binomial. Beta posteriors of discounted counts are
    those of MoPPS (arXiv 2507.04632); a group that is neither all right nor all wrong is what the dynamic
    sampling of DAPO (arXiv 2503.14476) keeps, after it was paid for.
    """
    mean = (right.sum() + 0.5) / (right.sum() + wrong.sum() + 1)
    a, b = right + prior * mean, wrong + prior * (1 - mean)
    k = np.arange(num_generations)[:, None]
    all_right, all_wrong = ((a + k) / (a + b + k)).prod(0), ((b + k) / (a + b + k)).prod(0)
    return (1 - all_right - all_wrong).clip(min=0)


def draw_probabilities(chances, power, floor):
    """Of a problem to be drawn first: in proportion to chance ** power, and a share `floor` for all alike.

    chances (P,) -> (P,)
    """
    weights = (chances / chances.max()) ** power
    return (1 - floor) * weights / weights.sum() + floor / len(weights)


def chances_and_probabilities(run):
    """Of each problem: the chance of a mixed group, and the probability with which it is drawn first."""
    config, history = run.config, run.progress.pass_rates
    counts = np.array(history["right"]), np.array(history["wrong"])
    chances = chance_of_mixed_group(*counts, config.num_generations, history["prior"])
    return chances, draw_probabilities(chances, config.pass_rate_power, config.pass_rate_floor)


def order_by_pass_rate(run):
    """The numbers of all problems in the order in which this step draws them, without replacement.

    A function of (seed, step, history). Exponential draws divided by the probabilities, in ascending order,
    are such a sample (Efraimidis and Spirakis 2006).
    """
    probabilities = chances_and_probabilities(run)[1]
    uniforms = rollout_uniforms(run.config.seed, run.progress.step, DRAW, len(probabilities), 1)
    return np.argsort(-np.log1p(-uniforms[:, 0].double().numpy()) / probabilities, kind="stable").tolist()


def note_pass_rates(run, problems, sampled, right):
    """Add what a step's groups got right to the history of problem_sampling pass_rate; returns what to log.

    sampled: a Sampled of this process, and which of its completions are right. Groups that gave way count
    too. Every process must call it, when the step is certain to be finished.
    """
    config, G = run.config, run.config.num_generations
    if not draws_by_pass_rate(config):
        return {}
    groups = [(p, right[n * G : (n + 1) * G]) for n, p in enumerate(sampled.problems)]
    for p, texts in sampled.left_out:
        answers = [p.problem.answer] * G
        groups.append((p, right_answers(texts, answers, config.answer_format, config.grading)))
    numbers = {id(p): i for i, p in enumerate(problems)}
    pairs = [(numbers[id(p)], sum(map(bool, of_group))) for p, of_group in groups]
    pairs = sorted(pair for one in gather_object([pairs]) for pair in one)
    chances, probabilities = chances_and_probabilities(run)
    history = run.progress.pass_rates
    for i, count in pairs:
        history["right"][i] = DISCOUNT * history["right"][i] + count
        history["wrong"][i] = DISCOUNT * history["wrong"][i] + G - count
    return {
        "mixed_groups": sum(0 < count < G for _, count in pairs) / len(pairs),
        "mixed_groups_expected": float(chances[[i for i, _ in pairs]].mean()),
        "mixed_groups_expected_uniform": float(chances.mean()),
        "effective_problems": float(1 / np.square(probabilities).sum()),
        **(run.first_pass if run.progress.step == 0 else {}),
    }


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

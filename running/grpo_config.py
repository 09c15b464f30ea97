"""The settings of grpo_train.py. Loads no torch, so that --help and a mistake are answered at once."""

import math

from answers.formats import answer_format_named
from decoding.names import CONTROLS, SIMILARITIES
from errors import SettingError
from problems.sources import GIVEN
from rewards import REWARD_SETS, load_reward, reward_name
from running.settings import FIRST, HELP_GROUPS, TrainConfig, check, check_one_of, setting, settings_class
from running.sft_config import warm_start_settings

NO_WEIGHT = "have no weight but 0, which is for rewards that are only logged: give one a weight"
LOSS_TYPES = ("grpo", "dapo", "dr_grpo")


@settings_class
class Config(TrainConfig):
    """Settings of a GRPO run; the defaults are the original recipe."""

    num_generations: int = setting(
        12, "G, completions of each problem; they are compared with each other, so at least 2", in_card=True
    )
    outer_iterations: int = setting(
        1,
        "times num_steps steps; each begins with the reference a copy of the policy (the original script "
        "calls it num_iterations, which in TRL means mu)",
    )
    temperature: float = setting(
        1.0, "sampling temperature; log-probs are taken at the same one", in_card=True
    )
    mu: int = setting(
        1, "optimiser steps a rollout; with 1 the ratio is always 1 and nothing is clipped", in_card=True
    )
    beta: float = setting(
        0.04,
        "weight of the KL to the reference; 0 loads no reference, and then the update leaves completions out "
        "whose advantage is 0 (with a KL they count)",
        in_card=True,
    )
    epsilon: float = setting(0.1, "the ratio is clipped below at 1 - epsilon", in_card=True)
    epsilon_high: float | None = setting(None, "and above at 1 + epsilon_high (default: epsilon)")
    loss_type: str = setting(
        "grpo",
        "grpo: mean over a row's tokens, then over rows; dapo: mean over all tokens; dr_grpo: sum over "
        "tokens / (N * max_completion_length)",
        in_card=True,
    )
    scale_rewards: str = setting(
        "group", "group: advantages are divided by the group's standard deviation; none: they are not"
    )
    mask_truncated_completions: bool = setting(
        False,
        "leave completions that the length limit cut off out of the loss; with loss_type grpo and dr_grpo "
        "they still count in N, so that many of them shrink the step (as in TRL): loss_type dapo divides by "
        "the tokens that are left",
    )
    rollout_is: str = setting(
        "none",
        "token: each token's clipped term, not its KL, is multiplied by min(p / q, rollout_is_cap), p its "
        "probability by the update's first forward and q by the sampler's; none: logp_diff only logs how far "
        "apart they are",
    )
    rollout_is_cap: float = setting(2.0, "largest importance weight of rollout_is", goes_with="rollout_is")
    reward_set: str = setting("grpo_m3po", "rewards by name: " + ", ".join(REWARD_SETS), in_card=True)
    reward: list[str] | None = setting(
        None,
        "your own rewards instead of a reward_set: FILE.py:function[=weight], several after one flag",
        in_card=True,
        instead_of=("reward_set",),
        is_path=True,
    )
    dynamic_sampling: int = setting(
        0, "groups of equal rewards give way to fresh problems, in at most N extra rollouts a step; 0: never"
    )
    reward_weights: list[float] | None = setting(
        None, "a weight for each reward, in their order", belongs_to=("reward", "reward_set")
    )
    warm_start: str = setting(
        "none",
        "a YAML of sft_train.py, which runs first, into output_dir/warm_start, and inherits the rest",
        is_path=True,
    )
    warm_start_cache: str = setting(
        "default",
        "folder where whole warm starts are kept, for every run that would make the same one (default: "
        "$GRPO_M3PO_CACHE, or ~/.cache/grpo-m3po/warm_starts; at most 20 GB); none: neither kept nor found",
        resume="free",
        goes_with="warm_start",
        is_path=True,
    )
    reward_timeout: float = setting(
        300.0, "seconds one reward function may take for a step's completions; 0: no limit", resume="free"
    )
    warn_after: int = setting(
        10, "warn after N steps in a row that earn nothing, or only for their format; 0: never", resume="free"
    )
    check: bool = setting(
        False, "print what the run would do and need, and what the rewards pay; train nothing", resume="free"
    )
    verbose: bool = setting(
        False, "with check: print every setting, too", resume="free", goes_with="check", short="v"
    )
    log_groups: int = setting(
        1, "groups a step whose tokens, log-probs and mixing weights go into rollouts.jsonl", resume="free"
    )
    inspect_every: int = setting(
        10,
        "M3PO: every N steps the first group is read again without its peers, for report.html; 0: never",
        resume="free",
        goes_with="m3po_lambda",
        idle_beside=("log_groups=0",),
    )
    ema_decay: float = setting(
        0.0,
        "evaluate and save the exponential moving average of the weights, with this decay an optimiser step "
        "(0.983: about the last 60), and go on from the last weights; 4 bytes a trained weight; 0: the last",
        in_card=True,
    )
    m3po_lambda: float = setting(
        0.1, "share of a thinking path's input that comes from its peers; 0 is plain GRPO", in_card=True
    )
    m3po_temperature: float = setting(
        0.1,
        "of the softmax over peers: small listens to the most alike only",
        in_card=True,
        goes_with="m3po_lambda",
        idle_beside=("m3po_similarity=mean",),
    )
    m3po_similarity: str = setting(
        "distribution",
        "peers are compared by: " + ", ".join(SIMILARITIES) + " (at temperature 1; mean: all alike)",
        in_card=True,
        goes_with="m3po_lambda",
    )
    m3po_control: str = setting(
        "none",
        "what a path hears in the place of its peers, its input moved as far as M3PO would move it, to find "
        "out what M3PO's effect comes from: " + ", ".join(CONTROLS) + " (docs/recipes.md)",
        goes_with="m3po_lambda",
    )
    m3po_scoring: str = setting(
        "blended",
        "blended: the update scores the inputs that the sampler saw; plain: the sampled ids alone, as the "
        "published scripts do, which is another policy than the one that sampled",
        goes_with="m3po_lambda",
    )
    m3po_credit: float = setting(
        0.0,
        "gamma: a token's advantage gains gamma times what its listeners earn beyond an even hearing, "
        "sum_j A_ji Adv_j + m Adv_i / (G - 1), m the weight that listens to it; 0: its own path's alone",
        goes_with="m3po_lambda",
        idle_beside=tuple(f"m3po_control={name}" for name in CONTROLS[1:]),
    )

    help_groups = (
        (
            FIRST,
            "model dataset reward output_dir batch_size num_generations num_steps learning_rate "
            "max_completion_length m3po_lambda",
        ),
        *HELP_GROUPS,
    )

    @property
    def first_line(self):
        if self.check:
            return f"checking {self.model} on {self.dataset}, for about a minute; nothing is trained"
        return super().first_line

    def __post_init__(self):
        super().__post_init__()
        if not self.eval_every:  # nothing is held out where nothing is evaluated, here and in the warm start
            object.__setattr__(self, "eval_problems", 0)
        peers = "a completion is judged against the others of its group: give at least 2"
        greedy = "must be positive, at least 0.001 (greedy paths of one prompt are all the same)"
        counts = "beta log_groups inspect_every dynamic_sampling reward_timeout warn_after m3po_credit"
        check(self, "num_generations", lambda v: v >= 2, peers)
        check(self, "ema_decay", lambda v: 0 <= v < 1, "must be in [0, 1)")
        check(self, "outer_iterations mu", lambda v: v >= 1, "must be at least 1")
        check(self, "temperature", lambda v: 1e-3 <= v < math.inf, greedy)
        check(self, "m3po_temperature", lambda v: 1e-6 <= v < math.inf, "must be positive")
        check(self, counts, lambda v: 0 <= v < math.inf, "must be finite and not negative")
        check(self, "epsilon", lambda v: 0 < v < 1, "must be between 0 and 1")
        check(self, "epsilon_high", lambda v: v is None or v > 0, "must be positive")
        check(self, "m3po_lambda", lambda v: 0 <= v <= 1, "must be between 0 and 1")
        check(self, "rollout_is_cap", lambda v: 1 <= v < math.inf, "must be at least 1")
        check_one_of(self, "loss_type", LOSS_TYPES)
        check_one_of(self, "scale_rewards", ("group", "none"))
        check_one_of(self, "m3po_similarity", SIMILARITIES)
        check_one_of(self, "m3po_control", CONTROLS)
        check_one_of(self, "m3po_scoring", ("blended", "plain"))
        is_mean = self.m3po_similarity == "mean" or self.num_generations == 2
        remedy = "is M3PO itself where all peers are heard alike: with m3po_similarity=mean, or one peer"
        check(self, "m3po_control", lambda v: not (v == "scaled_mean" and is_mean), remedy)
        remedy = "has no effect with num_generations=2: each path hears all there is; give at least 3"
        check(self, "m3po_credit", lambda v: not v or self.num_generations > 2, remedy)
        check_one_of(self, "rollout_is", ("none", "token"))
        if self.reward_set != GIVEN:
            check_one_of(self, "reward_set", tuple(REWARD_SETS))
            chosen_rewards(self)
        if self.warm_start != "none":
            warm_start_settings(self)

    @property
    def remarks(self):
        """What these settings do together that somebody might not expect, a sentence each."""
        remarks = []
        if self.m3po_lambda and self.m3po_control != "none":
            remarks.append(f"m3po_control={self.m3po_control}: paths do not hear what they hear in M3PO")
        if self.m3po_lambda and self.m3po_scoring == "plain":
            what = "the update scores the plain ids, and so another policy than the one that samples"
            remarks.append(f"with m3po_scoring=plain {what}: logp_diff says how far apart they are")
        default = Config.epsilon, Config.epsilon_high
        if self.mu == 1 and (self.epsilon, self.epsilon_high) != default:
            remarks.append("with mu=1 the ratio is always 1, so that epsilon and epsilon_high clip nothing")
        is_of_a_set = self.reward is None and self.reward_set != GIVEN
        if is_of_a_set and (self.reward_set == "math") != (self.grading == "math"):
            what = f"reward_set={self.reward_set} pays otherwise than grading={self.grading} counts as right"
            remarks.append(f"{what}: give both as math, or neither")
        return remarks

    @property
    def moment_bytes(self):
        return super().moment_bytes + (4 if self.ema_decay else 0)

    @property
    def clip_range(self):
        """The ratio is clipped to these two values."""
        epsilon_high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return 1 - self.epsilon, 1 + epsilon_high

    @property
    def think_end(self):
        """The text that ends the reasoning of a completion."""
        return answer_format_named(self.answer_format).think_end

    @property
    def interaction(self):
        from decoding.rollout import Interaction  # which loads torch

        of_pairs = (self.m3po_temperature, self.m3po_similarity)
        return Interaction(self.m3po_lambda, *of_pairs, self.m3po_control)


def chosen_rewards(config):
    """The (function, weight) pairs of a run."""
    if config.reward_set == GIVEN:
        remedy = "the rewards of that run were: name yours by --reward FILE.py:function, or a reward_set"
        raise SettingError("reward_set", GIVEN, remedy)
    check(config, "reward", lambda v: v is None or v, "must name at least one function, or be left out")
    pairs = REWARD_SETS[config.reward_set]
    try:
        if config.reward is not None:
            pairs = [load_reward(spec) for spec in config.reward]
    except ValueError as error:
        raise SettingError("reward", config.reward, str(error)) from error
    weights = config.reward_weights
    if weights is None:
        check(config, "reward", lambda _: any(weight for _, weight in pairs), NO_WEIGHT)
        return pairs
    if any("=" in spec.rpartition(":")[2] for spec in config.reward or ()):
        raise SettingError("reward_weights", weights, f"the weights stand in reward={config.reward} already")
    if len(weights) != len(pairs) or not all(map(math.isfinite, weights)):
        names = [reward_name(function) for function, _ in pairs]
        raise SettingError("reward_weights", weights, f"must be one finite weight for each of {names}")
    check(config, "reward_weights", any, NO_WEIGHT)
    return [(function, weight) for (function, _), weight in zip(pairs, weights, strict=True)]

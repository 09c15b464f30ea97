"""GRPO with M3PO: train a language model on problems whose answers can be checked.

    python grpo_train.py --config configs/tiny.yaml        the whole job on a laptop, in minutes
    python grpo_train.py --help                            every setting

The loop of `train` is the algorithm; its numbered comments are those of the README. Axes: B prompts in a
batch, G generations a prompt, N = B*G rows in group-major order (row n answers prompt n // G), T completion
tokens.
"""

from errors import end_on_interrupt

if __name__ == "__main__":
    end_on_interrupt()
    from running.grpo_config import Config
    from running.parsing import parse_early
    from running.settings import refuse_at_once

    SETTINGS = parse_early(Config, __doc__, refuse_at_once)  # before torch is imported, which takes seconds

import math
import statistics
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from pathlib import Path

import torch
from accelerate.utils import gather_object

from decoding.controls import row_keys
from decoding.rollout import Rollout, Sampling, rollout_uniforms, to_device
from decoding.tokens import end_answers_on
from errors import RewardError, SettingError, counted
from learning.inspection import debug_every, gate_sums, inspect_group
from learning.learner import make_learner
from learning.memory import peak_gib
from learning.models import check_positions, refresh
from learning.parallel import max_over_processes, together
from problems.prompts import Prompting, columns_of
from problems.sources import GIVEN, given_problems
from rewards import (
    RewardLog,
    check_answers,
    check_rewards,
    compute_rewards,
    lost_remarks,
    reward_columns,
    right_answers,
)
from running import preflight
from running.contract import inputs_of
from running.evaluation import held_out_accuracy
from running.grpo_config import NO_WEIGHT, Config, chosen_rewards
from running.launching import check_shares, launch, parse_on_all, refuse_other_start, starts_processes
from running.loaded import Loaded
from running.log import log_rollouts
from running.parsing import check_config, refuse_arguments, run_main, warn_of_idle
from running.progress import next_problems, steps_to_do, trainer_state
from running.run import Run
from running.settings import check
from running.strangers import hear_strangers
from sft_train import warm_start

# The line of a step: {metric: its format}. What passes 100 characters is left out, from the last one on.
SHOWN = {
    "reward": "reward {:.3g}",
    "skipped": "SKIPPED: {}",
    "eval_accuracy": "held-out {:.3f}",
    "correct": "right {:.2f}",
    "frac_reward_zero_std": "silent {:.2f}",
    "completion_length": "len {:.0f}",
    "step_seconds": "{:.3g} s",
    "kl": "kl {:.2g}",
    "grad_norm": "grad {:.2g}",
    "entropy": "entropy {:.2g}",
}
OF_THE_RUN = ("step", "epoch", "bad_examples", "train_seconds", "step_seconds", "rollout_seconds")
OF_THE_RUN += ("reward_seconds", "update_seconds")


def given_rewards(config, functions):
    """The (function, weight) pairs of a function, or of functions or pairs, that were given in Python."""
    if isinstance(functions, str):
        raise SettingError(
            "reward_functions", functions, "is a name: give the function, or Config(reward=...)"
        )
    functions = [functions] if callable(functions) else functions  # as TRL takes one
    if not functions:
        raise SettingError("reward_functions", functions, "must hold at least one function")
    beside = "cannot stand beside reward_functions: leave it out, and give (function, weight) pairs there"
    check(config, "reward reward_weights", lambda v: not v, beside)
    check(config, "reward_set", lambda v: v in (Config.reward_set, GIVEN), beside)
    pairs = [one if isinstance(one, tuple) else (one, 1.0) for one in functions]
    for pair in pairs:
        if isinstance(pair[0], type):
            raise SettingError("reward_functions", pair[0].__name__, "is a class: give an object of it")
        if len(pair) != 2 or not callable(pair[0]) or not isinstance(pair[1], Real):
            raise SettingError(
                "reward_functions", pair[0], "is neither a function nor a (function, weight) pair"
            )
        if not math.isfinite(pair[1]):
            raise SettingError("reward_functions", pair[0], f"has the weight {pair[1]}: give a finite number")
    if not any(weight for _, weight in pairs):
        raise SettingError("reward_functions", functions, NO_WEIGHT)
    # a float32 of numpy would round the rewards that it is multiplied with
    return [(f, weight if isinstance(weight, int | float) else float(weight)) for f, weight in pairs]


@dataclass(frozen=True)
class TrainingResult:
    """Where the trained model is, and the metrics of the last step (None where no step was left to do)."""

    folder: Path
    metrics: dict | None


def train(config=None, reward_functions=None, dataset=None, study=None, **others):
    """Run a training; the rewards and problems given here take the place of those of the settings.

    reward_functions: functions as TRL's GRPOTrainer takes them, or (function, weight) pairs. dataset: rows
    with a question and an answer: a list of dicts, a datasets.Dataset, or Problems. study: the RunOfStudy
    whose training this is: it has models loaded, and asks its questions at its steps.
    """
    refuse_arguments(others, Config, {"reward_funcs": "reward_functions", "train_dataset": "dataset"})
    check_config(config, Config)
    check(config, "check", lambda v: not v, "is the command line's; train() would train: leave it out")
    given, problems = reward_functions is not None, None
    if study is None:
        warn_of_idle(config)
    reward_functions = given_rewards(config, reward_functions) if given else chosen_rewards(config)
    if given:
        config = replace(config, reward_set=GIVEN)
    if dataset is not None:
        if config.warm_start != "none":
            remedy = "it reads the data of the settings: give them as --dataset, or run sft_train.py before"
            raise SettingError("warm_start", config.warm_start, remedy)
        beside = "cannot stand beside the rows that are given to train(): give one of the two"
        check(config, "dataset", lambda v: v in (Config.dataset, GIVEN), beside)
        check(config, "split", lambda v: v == Config.split, beside)
        config = replace(config, dataset=GIVEN)
        problems = given_problems(dataset, columns_of(config), limit=config.limit)
    of_study = study is not None
    with Run(config, SHOWN, of_study=of_study) as run:  # processes, signals; if told to stop, a checkpoint
        start = warm_start(config, run)
        loaded = study.loaded if study else Loaded()
        with together():  # where one process cannot load them, all end with its line
            tokenizer, (problems, held_out, skipped) = loaded.read(config, start, problems)
            check_rewards(config, reward_functions, problems[0].problem)
            lost = check_answers(config, reward_functions, [p.problem for p in problems])
            policy, sampler, reference = loaded.load(config, start, tokenizer, run.device)
            end_answers_on(Prompting.of(config).eos_id(tokenizer), tokenizer, policy, sampler)
            check_positions(policy, problems + held_out, config)
        refuse_other_start(config, problems + held_out, sampler)
        decoder = loaded.decode_with(config, sampler, tokenizer)
        steps = steps_to_do(config, len(problems))  # of one outer iteration
        total = steps * config.outer_iterations
        learner = make_learner(
            config, run.accelerator, policy, reference, decoder, total * config.mu, lambda: run.time_used
        )
        evaluate = partial(held_out_accuracy, run, decoder, held_out)
        inputs = inputs_of(run, problems, held_out, start, policy, reward_functions)
        run.open(learner, inputs, evaluate, steps, total)  # locks the folder; resumes or begins
        hear_strangers(run, decoder, problems)  # in the control of this name; sampled from the start
        refresh(sampler, policy)
        say_plan(run, decoder, problems, held_out, skipped, lost)
        if study:
            study.ask(run, decoder)  # before the first step, or what a stopped run had still to ask

        for step in run.steps():  # evaluates before the first; saves the model after the last
            # 1. An outer iteration begins: the reference becomes a copy of the policy.
            if step % steps == 0 and reference is not None:
                refresh(reference, policy)

            # 2. Sample G completions for each of B problems; with M3PO paths interact while they think.
            with run.timed("rollout_seconds"):
                batch = next_problems(problems, config.batch_size, run)  # of a shuffled pass
                sampled = sample(run, decoder, batch, step)

            # 3. Score them, and compare each with its group; silent groups give way to fresh problems.
            with run.timed("reward_seconds"):
                rewards = score(run, reward_functions, sampled, step)  # (N,) of all processes
            rewards, replaced = replace_silent_groups(
                run, decoder, problems, reward_functions, sampled, rewards
            )
            all_advantages = group_advantages(rewards, config.num_generations, config.scale_rewards)
            advantages = all_advantages[run.local_rows].to(run.device)

            # 4. mu optimiser steps on the clipped loss, KL inside; then the sampler sees the new weights.
            learning_rate = learner.schedule.get_last_lr()[0]
            inspection = inspect_group(run, sampler, decoder, sampled, step)  # with the weights that sampled
            gate = gate_sums(sampler, sampled.rollout)
            with run.timed("update_seconds"):
                update_metrics = update(learner, sampled.rollout, advantages, config)
                update_shown = refresh(sampler, policy)

            # 5. Log, now and then evaluate and save.
            right = right_answers(sampled.texts, sampled.references, config.answer_format, config.grading)
            metrics = {
                "outer_iteration": step // steps + 1,
                "learning_rate": learning_rate,
                "update_shown": float(update_shown),
                **rollout_metrics(run, sampled, right, rewards, gate),
                **replaced,
                **update_metrics,
                **speed_metrics(run, sampled.rollout),
                **listening_metrics(config, sampled, right, inspection),
            }
            metrics |= logged_metrics(sampled, metrics)
            log_rollouts(run, sampled, right, advantages, inspection)
            run.finish_step(metrics, sampled.batch)  # evaluates, writes checkpoints, ends when it is time
            if study:
                study.ask(run, decoder)
    return TrainingResult(run.folder, run.metrics)


# The formulas


def group_advantages(rewards, num_generations, scale_rewards="group"):
    """A = (r - mean) / (std + 1e-4) within each group (GRPO, section 4.1.2), sample standard deviation:
    rewards (N,) -> (N,) float32.

    Exactly 0 where all rewards of a group are equal, and where a reward is NaN: no function scored that
    completion. Such a row is left out of mean and std, but counts in N and bears the KL.
    """
    groups = rewards.view(-1, num_generations)
    scored = ~groups.isnan()
    count = scored.sum(-1, keepdim=True)
    mean = groups.nansum(-1, keepdim=True) / count.clamp(min=1)
    advantages = torch.where(scored, groups - mean, 0.0)
    if scale_rewards == "group":
        advantages = advantages / (group_std(groups)[:, None] + 1e-4)
    return advantages.masked_fill(all_equal(groups)[:, None], 0.0).float().view(-1)


def group_std(groups):
    """Sample standard deviation of each group's scored rewards, 0 for fewer than two: (B, G) -> (B,)."""
    count = (~groups.isnan()).sum(-1, keepdim=True)
    centred = (groups - groups.nansum(-1, keepdim=True) / count.clamp(min=1)).nan_to_num(0.0)
    return (centred.square().sum(-1) / (count.squeeze(-1) - 1).clamp(min=1)).sqrt()


def all_equal(groups):
    """Whether a group's scored rewards are exactly equal; their mean may round: (B, G) -> (B,)."""
    scored = ~groups.isnan()
    highest = torch.where(scored, groups, -torch.inf).amax(-1)
    lowest = torch.where(scored, groups, torch.inf).amin(-1)
    return highest <= lowest


def listeners_credit(mix, advantages):
    """What the listeners of a token earn beyond an even hearing: mix (B, T, G, G), advantages (N,) -> (N, T).

    sum_j A_ji Adv_j + m Adv_i / (G - 1) for a token of path i, A the weights with it, m = sum_j A_ji. Where
    every path hears all others alike it is 0, since the advantages of a group sum to 0.
    """
    B, T, G, _ = mix.shape
    of_group, listening = advantages.view(B, 1, G, 1), mix.mT  # [b, t, i, j]: how much j hears i
    credit = listening @ of_group + listening.sum(-1, keepdim=True) * of_group / (G - 1)  # (B, T, G, 1)
    return credit.squeeze(-1).transpose(1, 2).reshape(B * G, T)


def token_advantages(rollout, advantages, gamma):
    """Advantages (N,) with gamma times the credit of each token's listeners, (N, T); unchanged without."""
    if gamma == 0 or rollout.mix is None:
        return advantages
    return advantages[:, None] + gamma * listeners_credit(rollout.mix, advantages)


def token_weights(mask, loss_type, num_sequences, num_tokens, max_completion_length):
    """What each token's term counts in the loss, 0 where masked: mask (n, T) -> (n, T).

    GRPO's eq. 3; DAPO, arXiv 2503.14476; Dr. GRPO, arXiv 2503.20783. All normalisers are of the global batch,
    so that no cut of it changes a gradient. num_sequences: N over all processes, masked rows counted.
    num_tokens: unmasked tokens over all processes.
    """
    if loss_type == "grpo":
        return mask / mask.sum(-1, keepdim=True).clamp(min=1) / num_sequences
    if loss_type == "dapo":
        return mask / max(num_tokens, 1)
    assert loss_type == "dr_grpo", loss_type
    return mask / (num_sequences * max_completion_length)


def grpo_loss(logp, old_logp, advantages, weights, clip_range, kl_penalty=None, importance=None):
    """The clipped surrogate (GRPO, eq. 3) with beta * KL inside the same mean: (n, T) tensors, advantages
    (n,) or (n, T).

    Returns the loss and which tokens were clipped below and above. The gradient is not 0 at the first pass,
    although the ratio is 1 and centred advantages make the loss close to 0.
    """
    low, high = clip_range
    A = advantages if advantages.dim() == 2 else advantages[:, None]
    # A masked token may be far from its old log-prob: exp() would overflow, and inf * 0 is NaN.
    ratio = torch.exp(torch.where(weights > 0, logp - old_logp, 0.0))
    per_token = -torch.min(ratio * A, torch.clamp(ratio, low, high) * A)
    if importance is not None:
        per_token = per_token * importance
    if kl_penalty is not None:
        per_token = per_token + kl_penalty
    clipped = {"clip_low": (ratio < low) & (A < 0), "clip_high": (ratio > high) & (A > 0)}
    return (per_token * weights).sum(), clipped


def k3_divergence(logp, ref_logp):
    """The k3 estimate of the KL to the reference, a value a token (GRPO, eq. 4)."""
    log_ratio = (ref_logp - logp).clamp(-20, 20)  # a far token would drown all others; it has no gradient
    return torch.exp(log_ratio) - log_ratio - 1


def importance_weights(old_logp, sampler_logp, cap):
    """Truncated importance sampling: exp(old_logp - sampler_logp), at most `cap`, (n, T).

    https://fengyao.notion.site/off-policy-rl
    """
    return torch.exp((old_logp - sampler_logp).clamp(-20, 20)).clamp(max=cap)


# The steps of the loop


@dataclass
class Sampled:
    """What one process sampled for its groups of a step, and its rewards; a group has G rows."""

    batch: list  # the problems of the step, of all processes
    problems: list  # those of this process's groups
    rollout: Rollout
    completions: list  # a Completion a row
    retries: list  # of each group: in which extra rollout of its step it was sampled, 0 for the first
    rewards: list = field(default_factory=list)
    parts: dict = field(default_factory=dict)  # {reward function: its own values}
    trainer_state: object = None  # what reward functions are told of the run, as TRL does
    logged: RewardLog = field(default_factory=lambda: RewardLog([]))  # what they log

    @property
    def texts(self):
        return [completion.text for completion in self.completions]

    @property
    def row_problems(self):
        return [p.problem for p in self.problems for _ in range(self.rollout.num_generations)]

    @property
    def references(self):
        return [problem.answer for problem in self.row_problems]

    def take_groups(self, groups, other, pad_id):
        """Replace some groups by those of another, in its order."""
        G = self.rollout.num_generations
        self.rollout = self.rollout.with_groups(groups, other.rollout, pad_id)
        columns = [(self.completions, other.completions), (self.rewards, other.rewards)]
        columns += [(self.parts[name], other.parts[name]) for name in self.parts]
        columns += [(self.logged.rows, other.logged.rows)]
        for name, values in other.logged.metrics.items():
            self.logged.metrics.setdefault(name, []).extend(values)
        for n, group in enumerate(groups):
            self.problems[group], self.retries[group] = other.problems[n], other.retries[n]
            for old, new in columns:
                old[group * G : (group + 1) * G] = new[n * G : (n + 1) * G]


def sample(run, decoder, batch, step, groups=None, retry=0):
    """Completions for some groups of a step's batch, by default those of this process; None for no groups.

    The draws of a row depend on its number in the batch, not on the process that samples it. Raises Stopped
    where the run is told to stop meanwhile; all processes must call it.
    """
    groups = run.local_groups if groups is None else groups
    sampled = run.interruptible(
        decoder, lambda: sample_groups(run.config, decoder, batch, step, groups, retry)
    )
    if sampled is not None:
        epoch = run.progress.problems_drawn / run.problems_of_a_pass
        sampled.trainer_state = trainer_state(run.progress.step, run.total, epoch, run.config.num_epochs)
    return sampled


def sample_groups(config, decoder, batch, step, groups, retry=0):
    """Completions of these groups of a batch; only the decoder's own flag interrupts it."""
    if not groups:
        return None
    G, T, problems = config.num_generations, config.max_completion_length, [batch[i] for i in groups]
    uniforms = rollout_uniforms(config.seed, step, retry, len(batch) * G, T).view(len(batch), G, T)
    uniforms = uniforms[list(groups)].flatten(0, 1)
    keys = row_keys(config.seed, step, retry, len(batch) * G).view(len(batch), G)[list(groups)].flatten()
    sampling = Sampling(T, G, config.temperature)
    rollout = decoder.rollout([p.ids for p in problems], sampling, uniforms, keys=keys)
    rows = [p for p in problems for _ in range(G)]
    pairs = zip(rows, decoder.completions(rollout), strict=True)
    completions = [p.answered(completion) for p, completion in pairs]
    return Sampled(batch, problems, rollout, completions, [retry] * len(problems))


def score(run, reward_functions, sampled, step):
    """Float64 rewards (N,) of all processes, NaN where all functions abstained; sets those of `sampled`.

    Raises Stopped where the run is told to stop meanwhile; all processes must call it.
    """
    run.call_rewards(lambda gather: _score_rows(run.config, reward_functions, sampled, step, gather))
    return torch.tensor(gather_object(sampled.rewards), dtype=torch.float64)


def _score_rows(config, reward_functions, sampled, step, gather):
    ids = [completion.ids for completion in sampled.completions]
    columns = reward_columns(sampled.row_problems, sampled.texts, ids, config.answer_format)
    columns["trainer_state"] = sampled.trainer_state
    sampled.logged = RewardLog([{} for _ in sampled.texts])
    how = dict(step=step + 1, timeout=config.reward_timeout, gather=gather, log=sampled.logged)
    sampled.rewards, sampled.parts = compute_rewards(reward_functions, columns, **how)


def replace_silent_groups(run, decoder, problems, reward_functions, sampled, rewards):
    """Dynamic sampling: groups whose rewards are all equal give way to fresh problems, as often as the
    settings allow.

    Changes `sampled` and its batch; returns the rewards of all processes and what to log. The same on any
    number of processes.
    """
    config, step = run.config, run.progress.step
    metrics = {"extra_rollouts": 0, "replaced_groups": 0} if config.dynamic_sampling else {}
    for retry in range(1, config.dynamic_sampling + 1):
        silent = all_equal(rewards.view(-1, config.num_generations)).nonzero().flatten().tolist()
        if not silent:
            break
        for i, fresh in zip(silent, next_problems(problems, len(silent), run), strict=True):
            sampled.batch[i] = fresh
        local = [i for i in silent if i in run.local_groups]
        with run.timed("rollout_seconds"):
            new = sample(run, decoder, sampled.batch, step, local, retry)

        def score_again(gather, local=local, new=new):
            if new is not None:
                with run.timed("reward_seconds"):
                    # not all processes come here: whether anybody scored anything is not asked
                    _score_rows(config, reward_functions, new, step, gather=lambda values: [])
                first = run.local_groups.start
                sampled.take_groups([i - first for i in local], new, decoder.tables.pad_id)
            return gather(sampled.rewards)

        rewards = torch.tensor(run.call_rewards(score_again), dtype=torch.float64)
        metrics = {"extra_rollouts": retry, "replaced_groups": metrics["replaced_groups"] + len(silent)}
    return rewards, metrics


@dataclass
class LossInputs:
    """What the loss of a rollout needs beside the policy: (N, T) tensors, advantages (N,) or (N, T)."""

    rollout: Rollout
    advantages: torch.Tensor
    mask: torch.Tensor  # tokens that count in the loss
    weights: torch.Tensor
    old_logp: torch.Tensor  # of the policy before the first optimiser step; the first pass writes it
    ref_logp: torch.Tensor  # of the reference; the first pass writes it


@torch.enable_grad()  # a user's reward file that runs a model may have switched gradients off
def update(learner, rollout, advantages, config):
    """mu optimiser steps on one rollout; returns metrics.

    Neither micro-batches nor the number of processes change gradients: normalisers are of the whole batch.
    """
    _, scored = rows_that_count(rollout, advantages, config)
    rollout, advantages = learner.share_evenly(rollout, advantages, scored)
    mask, scored = rows_that_count(rollout, advantages, config)
    count, kept = torch.tensor(len(mask), device=mask.device), mask.any(-1)
    tokens_scored = (mask & scored[:, None]).sum()
    sums = [count, kept.sum(), mask.sum(), scored.sum(), tokens_scored]
    num_sequences, num_kept, num_tokens, num_scored, num_tokens_scored = learner.sum_over_processes(*sums)
    counts = {"scored_completions": int(num_scored)}
    if config.mask_truncated_completions:
        counts["masked_completions"] = int(num_sequences - num_kept)
    if config.m3po_credit:
        counts["credit_size"] = credit_size(learner, rollout, advantages, mask, config.m3po_credit)
    if num_tokens == 0 or num_scored == 0:  # Adam's momentum alone would move the weights
        for _ in range(config.mu):
            learner.schedule.step()
        counts["scored_completions"] = 0
        reason = "every completion was cut off and masked" if num_tokens == 0 else "no group carries a signal"
        return {"skipped": reason, "grad_norm": 0.0, **learner.scale_metrics(), **counts}
    weights = token_weights(mask, config.loss_type, num_sequences, num_tokens, config.max_completion_length)
    old_logp, ref_logp = torch.zeros_like(rollout.logp), torch.zeros_like(rollout.logp)
    in_tokens = token_advantages(rollout, advantages, config.m3po_credit)
    if config.m3po_scoring == "plain":  # without the weights, what the update reads are the ids alone
        rollout = replace(rollout, mix=None)
    inputs = LossInputs(rollout, in_tokens, mask, weights, old_logp, ref_logp)

    rows = scored.nonzero().flatten().tolist()
    sums, norms, skipped = {}, [], {}
    for iteration in range(config.mu):
        loss_of_rows = partial(rows_loss, learner, inputs, config, iteration == 0)
        losses, row_sums = zip(*learner.accumulate_gradients(rollout, loss_of_rows, rows), strict=True)
        if iteration == 0:
            largest_difference = max(float(row_sum.pop("logp_diff_max")) for row_sum in row_sums)
        has_stepped, norm = learner.step(losses)  # clips; no step where a loss or the norm is not finite
        norms.append(norm)
        if not has_stepped:
            skipped = {"skipped": learner.why_skipped}
        for row_sum in row_sums:
            sums |= {name: sums.get(name, 0) + value for name, value in row_sum.items()}
    totals = learner.sum_over_processes(*(value.float() for value in sums.values()))
    totals = dict(zip(sums, totals, strict=True))
    loss, logp_diff = totals.pop("loss"), totals.pop("logp_diff")
    return {
        "loss": loss / config.mu,
        **{name: total / (config.mu * num_tokens_scored) for name, total in totals.items()},
        # of the first pass, which the sampler's log-probs belong to
        "logp_diff": logp_diff / num_tokens_scored,
        "logp_diff_max": max_over_processes(largest_difference),
        "grad_norm": statistics.fmean(norms),
        **learner.scale_metrics(),
        **counts,
        **skipped,
    }


def rows_that_count(rollout, advantages, config):
    """The tokens that count in the loss (N, T) bool, and the rows that the update computes (N,) bool.

    A row without an advantage is left out: it adds nothing to any gradient, unless the loss has a term beside
    the advantages, as the KL is one; that needs all rows.
    """
    mask = rollout.mask
    if config.mask_truncated_completions:
        mask = mask & rollout.ended[:, None]
    if config.beta > 0:
        return mask, torch.ones_like(rollout.ended)
    in_tokens = token_advantages(rollout, advantages, config.m3po_credit).view(len(mask), -1)
    return mask, (mask & (in_tokens != 0)).any(-1)


def credit_size(learner, rollout, advantages, mask, gamma):
    """The mean size of what `token_advantages` adds over that of the advantages, of all tokens that count."""
    own = advantages[:, None].abs() * mask
    added = (token_advantages(rollout, advantages, gamma).view(len(mask), -1) - advantages[:, None]).abs()
    added, own = learner.sum_over_processes((added * mask).sum(), own.sum())
    return added / own if own else 0.0


def rows_loss(learner, inputs, config, is_first_pass, rows):
    """The loss of some rows, and sums of what is logged: each of `terms` (n, T) as a mean over tokens."""
    rollout, index = inputs.rollout, to_device(rows, inputs.mask.device)
    logp, entropy = learner.scorer(rollout, rows)
    if is_first_pass:
        inputs.old_logp[index] = logp.detach()
        if learner.reference_scorer is not None:
            with torch.no_grad():
                inputs.ref_logp[index] = learner.reference_scorer(rollout, rows)[0]
    old_logp, sampler_logp, terms = inputs.old_logp[index], rollout.logp[index], {"entropy": entropy}
    kl_penalty = importance = None
    if learner.reference_scorer is not None:
        terms["kl"] = k3_divergence(logp, inputs.ref_logp[index])
        kl_penalty = config.beta * terms["kl"]
    if config.rollout_is == "token":
        importance = importance_weights(old_logp, sampler_logp, config.rollout_is_cap)
    A, weights = inputs.advantages[index], inputs.weights[index]
    loss, clipped = grpo_loss(logp, old_logp, A, weights, config.clip_range, kl_penalty, importance)
    terms |= clipped
    sums = {name: (value.detach() * inputs.mask[index]).sum() for name, value in terms.items()}
    sums["loss"] = loss.detach()
    if is_first_pass:
        logp_diff = (logp.detach() - sampler_logp).abs() * inputs.mask[index]
        sums |= {"logp_diff": logp_diff.sum(), "logp_diff_max": logp_diff.max()}
    return loss, sums


# What is logged


def say_plan(run, decoder, problems, held_out, skipped, lost):
    config = run.config
    if run.is_finished:
        return
    ends = decoder.tokenizer.convert_ids_to_tokens(decoder.tables.eos_ids)
    number = counted(len(problems), "problem")
    run.say(
        f"{number} to train on, {len(held_out)} held out, {skipped} skipped (prompt over "
        f"{config.max_prompt_length} tokens)"
    )
    processes = run.accelerator.num_processes
    may_end_before = config.max_minutes or config.max_wall_minutes or config.patience
    steps = ("at most " if may_end_before else "") + counted(run.total, "step")
    run.say(
        f"{steps} of {config.batch_size} x {config.num_generations} completions on "
        f"{counted(processes, f'{run.device.type} process')}, each ends on {' or '.join(ends)}"
    )
    remarks = Prompting.of(config).remarks(decoder.tokenizer, problems) + lost_remarks(config, lost, problems)
    if len(problems) < config.batch_size:
        remarks.append(f"batch_size={config.batch_size} is above the {number}: steps repeat some")
    for remark in remarks + config.remarks:
        run.say(f"note: {remark}")


def rollout_metrics(run, sampled, right, rewards, gate=None):
    """Metrics of a step's samples (docs/metrics.md): rewards (N,) of all processes, gate of `gate_sums`."""
    G, groups = run.config.num_generations, rewards.view(-1, run.config.num_generations)
    first_rows = range(0, len(sampled.texts), G)
    local = {
        "correct": [float(bool(r)) for r in right],  # undecided is not right
        "undecided": [float(r is None) for r in right],
        "length": sampled.rollout.lengths.tolist(),
        "truncated": (~sampled.rollout.ended).float().tolist(),
        "unique": [len(set(sampled.texts[i : i + G])) / G for i in first_rows],
        **{f"reward/{name}": values for name, values in sampled.parts.items()},
        **interaction_sums(sampled.rollout),
        **(gate or {}),
    }
    gathered = gather_object([local])
    values = {name: [v for one in gathered for v in one[name] if v is not None] for name in local}
    # NaN where a function abstained for all completions of the step, which the log has as null
    mean = {name: statistics.fmean(v) if v else math.nan for name, v in values.items()}
    scored = rewards[~rewards.isnan()]
    metrics = {
        "reward": float(scored.mean()),
        "reward_std": float(scored.std(correction=min(1, len(scored) - 1))) if len(scored) else math.nan,
        "reward_std_in_group": float(group_std(groups).mean()),
        **{name: mean[name] for name in local if name.startswith("reward/")},
        "unscored": int(rewards.isnan().sum()),
        "correct": mean["correct"],
        **({"undecided": mean["undecided"]} if run.config.grading == "math" else {}),
        "frac_reward_zero_std": float(all_equal(groups).float().mean()),
        "unique_completions": mean["unique"],
        "completion_length": mean["length"],
        "completion_length_min": min(values["length"]),
        "completion_length_max": max(values["length"]),
        "truncated": mean["truncated"],
    }
    if "thinking" in mean:
        metrics["thinking_paths"] = mean["thinking"] / (mean["alive"] or 1.0)
        metrics["input_change"] = mean["change"] / (mean["listening"] or 1.0)
    for name in (name for name in mean if name.startswith("gate_")):  # null where no path could choose
        metrics[name] = mean[name] / mean["choosing"] if mean["choosing"] else math.nan
    return metrics


def listening_metrics(config, sampled, right, effect):
    """What listening did to the group that was read again, explained in docs/metrics.md; {} in other steps.

    `right`: the verdicts of the sampled completions. Sets the effect's own.
    """
    if effect is None or not effect.completions:
        return {}
    texts, answers = [c.text for c in effect.completions], sampled.references[: len(effect.completions)]
    effect.right = right_answers(texts, answers, config.answer_format, config.grading)
    changed = [
        token != other
        for completion, alone in zip(sampled.completions, effect.alone, strict=False)
        for token, other in zip(completion.ids, alone, strict=True)
    ]
    verdicts = [(bool(now), bool(alone)) for now, alone in zip(right, effect.right, strict=False)]
    return {
        "listening_tokens": len(changed),
        "listening_changed_tokens": sum(changed),
        "listening_became_right": verdicts.count((True, False)),
        "listening_became_wrong": verdicts.count((False, True)),
    }


def logged_metrics(sampled, metrics):
    """What reward functions have logged by log_metric: means over their calls, of all processes."""
    gathered = gather_object([sampled.logged.metrics])
    names = sorted({name for one in gathered for name in one})
    taken = {*metrics, *OF_THE_RUN}
    own = [name for name in names if name in taken or name.startswith(("eval_", "listening_"))]
    if own:
        raise RewardError(f"log_metric({own[0]!r}): the run has a metric of this name; choose another")
    return {name: statistics.fmean(v for one in gathered for v in one.get(name, ())) for name in names}


def interaction_sums(rollout):
    """Sums over this process's rows, as lists of one number; nothing where paths do not interact."""
    if rollout.mix is None:
        return {}
    N, T = rollout.mask.shape
    alive = rollout.mask.view(-1, rollout.num_generations, T).any(1)  # (B, T)
    widest = torch.float32 if rollout.mix.device.type == "mps" else torch.float64  # which mps lacks
    listening = rollout.mix.sum(-1).permute(0, 2, 1).reshape(N, T) > 0
    sums = {
        "thinking": rollout.thinking.sum(),
        "alive": alive.sum(),
        "change": rollout.input_change[listening].to(widest).sum(),
        "listening": listening.sum(),
    }
    numbers = torch.stack(list(sums.values())).tolist()  # device sync
    return {name: [number] for name, number in zip(sums, numbers, strict=True)}


def speed_metrics(run, rollout):
    """Completion tokens a second over all processes, and on CUDA the peak of the memory that tensors took."""
    tokens = sum(gather_object([int(rollout.mask.sum())]))
    metrics = {
        "rollout_tokens_per_s": tokens / run.seconds["rollout_seconds"],
        "update_tokens_per_s": tokens / run.seconds["update_seconds"],
    }
    if run.device.type == "cuda":
        metrics["peak_gib"] = max_over_processes(peak_gib())
    return metrics


def main(given=None):
    config = parse_on_all(Config, __doc__, given)
    debug_every()  # refuses a bad M3PO_DEBUG now
    if config.check:
        return preflight.report(config, chosen_rewards(config))
    if processes := starts_processes(config):
        check_shares(config, processes)
        launch(processes)
    else:
        train(config)


if __name__ == "__main__":
    run_main(main, SETTINGS)

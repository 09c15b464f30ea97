"""GRPO with M3PO: train a language model on problems whose answers can be checked.

    python grpo_train.py --config configs/tiny.yaml        the whole job on a laptop, in minutes
    python grpo_train.py --help                            every setting

The loop of `run` is the algorithm; its numbered comments are those of the README.
Axes: B prompts in a batch, G generations a prompt, N = B*G rows in group-major order (row n answers prompt n // G), T completion tokens.
"""

import base64
import dataclasses
import json
import math
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate.utils import gather_object

import sft_train
from answers.formats import ANSWER_FORMATS, extract_answer
from decoding.any_model import send
from decoding.decoder import GroupDecoder
from decoding.rollout import Interaction, Rollout, pad_left, rollout_uniforms
from decoding.tokens import token_pieces
from errors import SettingError
from learning.inspection import debug_every, explain_first_group, look_inside
from learning.learner import guarded_step, make_optimizer
from learning.log_probs import Scorer, make_scorer
from learning.memory import TokenBudget, peak_gib, within_memory
from learning.models import check_positions, load_model, load_policy, load_tokenizer, refresh, rollout_dtype
from learning.parallel import distribute, max_over_processes, shard
from m3po_module import SIMILARITIES
from problems.prompts import prepare_problems
from reporting.files import FINISHED, LOGS, write_whole
from rewards import REWARD_SETS, compute_rewards, load_reward, reward_columns, right_answers
from running import preflight
from running.checkpoint import Checkpoints
from running.evaluation import held_out_accuracy, unless_stopped
from running.folder import finish, keep_best, open_output, refuse_used, start_logs
from running.launching import check_shares, launch, start_processes, starts_processes
from running.log import MetricsLog
from running.parsing import parse_config, run_main, settings_from_file
from running.run import Stop, Stopwatch, check_bad_steps, leave, out_of_patience, problem_batch, steps_to_do
from running.settings import TrainConfig, check, free_on_resume, names_with, resolved, setting

LOSS_TYPES = ("grpo", "dapo", "dr_grpo")


SHOWN = {"reward": "reward", "correct": "correct", "eval_accuracy": "held-out", "completion_length": "length", "kl": "kl", "entropy": "entropy",
         "frac_reward_zero_std": "no-signal", "grad_norm": "grad", "rollout_seconds": "rollout s",
         "update_seconds": "update s", "skipped": "SKIPPED:"}  # fmt: skip


@dataclass(frozen=True)
class Config(TrainConfig):
    """Settings of a GRPO run; the defaults are the original recipe (7 problems x 12 completions of 400 tokens, Qwen2.5-1.5B-Instruct)."""

    num_generations: int = setting(
        12, "G, completions of each problem; they are compared with each other, so at least 2", in_card=True
    )
    outer_iterations: int = setting(
        1,
        "times num_steps steps, each begun with the reference a copy of the policy (num_iterations in the original script; in TRL that means mu)",
    )
    temperature: float = setting(
        1.0, "sampling temperature; log-probs are taken at the same one", in_card=True
    )
    mu: int = setting(
        1, "optimiser steps a rollout; with 1 the ratio is always 1 and nothing is clipped", in_card=True
    )
    beta: float = setting(0.04, "weight of the KL to the reference; 0 loads no reference", in_card=True)
    epsilon: float = setting(0.1, "the ratio is clipped below at 1 - epsilon", in_card=True)
    epsilon_high: float | None = setting(None, "and above at 1 + epsilon_high (default: epsilon)")
    loss_type: str = setting(
        "grpo",
        "grpo: mean over a row's tokens, then over rows; dapo: mean over all tokens; dr_grpo: sum over tokens / (N * max_completion_length)",
        in_card=True,
    )
    scale_rewards: str = setting(
        "group", "group: advantages are divided by the group's standard deviation; none: they are not"
    )
    mask_truncated_completions: bool = setting(
        False, "leave completions that the length limit cut off out of the loss"
    )
    rollout_is: str = setting(
        "none",
        "token: a token's loss counts min(pi / mu, rollout_is_cap), pi of the update's forward over mu of the sampler's; none: the ratio is only logged",
    )
    rollout_is_cap: float = setting(2.0, "largest importance weight of rollout_is")
    reward_set: str = setting("grpo_m3po", "rewards by name: " + ", ".join(REWARD_SETS), in_card=True)
    reward: list[str] | None = setting(
        None, "your own instead: FILE.py:function[=weight], several after one flag", in_card=True
    )
    dynamic_sampling: int = setting(
        0, "groups of equal rewards give way to fresh problems, in at most N extra rollouts a step; 0: never"
    )
    reward_weights: list[float] | None = setting(None, "a weight for each reward, in their order")
    warm_start: str = setting(
        "none",
        "a YAML for sft_train.py, which runs first into output_dir/warm_start and inherits what it leaves out",
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
    log_groups: int = setting(
        1, "groups a step whose tokens, log-probs and mixing weights go into rollouts.jsonl", resume="free"
    )
    inspect_every: int = setting(
        10,
        "M3PO: every N steps the first group is read again without its peers, for report.html; 0: never",
        resume="free",
    )
    m3po_lambda: float = setting(
        0.1, "share of a thinking path's input that comes from its peers; 0 is plain GRPO", in_card=True
    )
    m3po_temperature: float = setting(
        0.1, "of the softmax over peers: small listens to the most alike only", in_card=True
    )
    m3po_similarity: str = setting(
        "distribution",
        "peers are compared by: " + ", ".join(SIMILARITIES) + " (mean: all alike)",
        in_card=True,
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.eval_every:  # nothing is held out where nothing is evaluated, here and in the warm start
            object.__setattr__(self, "eval_problems", 0)
        check(
            self,
            "num_generations",
            lambda v: v >= 2,
            "a completion is judged against the others of its group: give at least 2",
        )
        check(self, "outer_iterations mu", lambda v: v >= 1, "must be at least 1")
        check(
            self,
            "temperature",
            lambda v: 1e-3 <= v < math.inf,
            "must be positive, at least 0.001 (greedy paths of one prompt are all the same)",
        )
        check(self, "m3po_temperature", lambda v: 1e-6 <= v < math.inf, "must be positive")
        check(
            self,
            "beta log_groups inspect_every dynamic_sampling reward_timeout warn_after",
            lambda v: 0 <= v < math.inf,
            "must be finite and not negative",
        )
        check(self, "epsilon", lambda v: 0 < v < 1, "must be between 0 and 1")
        check(self, "epsilon_high", lambda v: v is None or v > 0, "must be positive")
        check(self, "m3po_lambda", lambda v: 0 <= v <= 1, "must be between 0 and 1")
        check(self, "rollout_is_cap", lambda v: 1 <= v < math.inf, "must be at least 1")
        for name, values in dict(
            loss_type=LOSS_TYPES,
            scale_rewards=("group", "none"),
            m3po_similarity=SIMILARITIES,
            reward_set=tuple(REWARD_SETS),
            rollout_is=("none", "token"),
        ).items():
            check(self, name, lambda v, values=values: v in values, "must be one of " + ", ".join(values))
        reward_functions(self)
        if self.warm_start != "none":
            warm_start_settings(self)


def reward_functions(config):
    """The (function, weight) pairs of a run."""
    try:
        chosen = (
            REWARD_SETS[config.reward_set]
            if config.reward is None
            else [load_reward(spec) for spec in config.reward]
        )
    except ValueError as error:
        raise SettingError("reward", config.reward, str(error)) from error
    if config.reward_weights is None:
        return chosen
    if len(config.reward_weights) != len(chosen) or not all(map(math.isfinite, config.reward_weights)):
        raise SettingError(
            "reward_weights",
            config.reward_weights,
            f"must be one finite weight for each of {[f.__name__ for f, _ in chosen]}",
        )
    return [(function, weight) for (function, _), weight in zip(chosen, config.reward_weights, strict=True)]


def group_advantages(rewards, num_generations, scale_rewards="group"):
    """A = (r - mean) / (std + 1e-4) within each group, sample standard deviation: rewards (N,) -> (N,) float32.

    Exactly 0 where all rewards of a group are equal, and where a reward is NaN (nobody could score it; it is left out of mean and std).
    """
    groups = rewards.view(-1, num_generations)
    scored = ~groups.isnan()
    count = scored.sum(-1, keepdim=True)
    mean = groups.nansum(-1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(scored, groups - mean, 0.0)
    advantages = centred if scale_rewards == "none" else centred / (group_std(groups)[:, None] + 1e-4)
    return advantages.masked_fill(all_equal(groups)[:, None], 0.0).float().view(-1)


def group_std(groups):
    """Sample standard deviation of each group's scored rewards, 0 where fewer than two are: (B, G) -> (B,)."""
    count = (~groups.isnan()).sum(-1, keepdim=True)
    centred = (groups - groups.nansum(-1, keepdim=True) / count.clamp(min=1)).nan_to_num(0.0)
    return (centred.square().sum(-1) / (count.squeeze(-1) - 1).clamp(min=1)).sqrt()


def all_equal(groups):
    """Whether a group's scored rewards carry no signal, tested exactly (rounding gives a mean no claim to be one of them): (B, G) -> (B,)."""
    scored = ~groups.isnan()
    return torch.where(scored, groups, -torch.inf).amax(-1) <= torch.where(scored, groups, torch.inf).amin(-1)


def token_weights(mask, loss_type, num_sequences, num_tokens, max_completion_length):
    """What each token's term counts in the loss: mask (n, T) -> (n, T). All normalisers are of the global batch, so its cuts change nothing.

    num_sequences: N over all processes, masked rows counted; num_tokens: unmasked tokens over all processes.
    """
    if loss_type == "grpo":
        return mask / mask.sum(-1, keepdim=True).clamp(min=1) / num_sequences
    if loss_type == "dapo":
        return mask / max(num_tokens, 1)
    return mask / (num_sequences * max_completion_length)


def grpo_loss(
    logp, old_logp, advantages, weights, *, epsilon, epsilon_high, beta=0.0, ref_logp=None, importance=None
):
    """The clipped surrogate with the k3 estimate of the KL (GRPO, eq. 3 and 4): (n, T) tensors, advantages (n,) -> scalar, per-token terms.

    The gradient is not 0 at the first pass, although the ratio is 1 and centred advantages make the loss close to 0.
    """
    A = advantages[:, None]
    ratio = torch.exp(logp - old_logp)
    clipped = torch.clamp(ratio, 1 - epsilon, 1 + epsilon_high)
    per_token = -torch.min(ratio * A, clipped * A)
    per_token = per_token if importance is None else per_token * importance
    kl = torch.zeros_like(logp)
    if beta > 0:
        log_ratio = (ref_logp - logp).clamp(-20, 20)  # exp() of a far reference would drown every other token
        kl = torch.exp(log_ratio) - log_ratio - 1
        per_token = per_token + beta * kl
    terms = {
        "kl": kl,
        "clip_low": (ratio < 1 - epsilon) & (A < 0),
        "clip_high": (ratio > 1 + epsilon_high) & (A > 0),
    }
    return (per_token * weights).sum(), terms


def importance_weights(old_logp, sampler_logp, cap):
    """How much likelier each token is to the update's forward than to the sampler's, at most `cap`: truncated importance sampling, (n, T).

    https://fengyao.notion.site/off-policy-rl
    """
    return torch.exp((old_logp - sampler_logp).clamp(-20, 20)).clamp(max=cap)


def train(config):
    """Run a whole training; returns the output directory."""
    accelerator = start_processes(config)
    with Stop(config.stop_after) as stop:
        return run(config, accelerator, stop)


def run(config, accelerator, stop):
    functions = reward_functions(config)
    refuse_used(config)
    start = config.model if config.warm_start == "none" else warm_start(config, accelerator, stop)
    tokenizer = load_tokenizer(start, config.trust_remote_code)
    problems, held_out, skipped = prepare_problems(config, tokenizer)

    load = dict(
        name=start, tokenizer=tokenizer, device=accelerator.device, trust_remote_code=config.trust_remote_code
    )
    policy = load_policy(config, start, tokenizer, accelerator.device)
    sampler = load_model(dtype=rollout_dtype(config), **load).eval().requires_grad_(False)
    reference = (
        load_model(dtype=rollout_dtype(config), **load).eval().requires_grad_(False)
        if config.beta > 0
        else None
    )
    check_positions(policy, problems + held_out, config)
    interaction = Interaction(config.m3po_lambda, config.m3po_temperature, config.m3po_similarity)
    decoder = GroupDecoder(
        sampler,
        tokenizer,
        ANSWER_FORMATS[config.answer_format].think_end,
        interaction,
        compiled=config.torch_compile,
    )
    scorer = distribute(accelerator, make_scorer(policy, decoder.tables, config), config)
    ref_scorer = None if reference is None else make_scorer(reference, decoder.tables, config)
    steps = steps_to_do(config, len(problems))
    total = steps * config.outer_iterations
    optimizer, schedule = make_optimizer(policy, config, total * config.mu)
    budget = TokenBudget(config, policy)
    folder, held = open_output(config, accelerator)
    checkpoints = Checkpoints(
        config, folder, accelerator, policy, optimizer, schedule, tokenizer, problems, held, reference, LOGS
    )
    done = (
        checkpoints.resume(total, budget) if config.resume else None
    )  # what is finished, and what of it is saved
    if done == FINISHED:
        return folder
    start_logs(config, folder, accelerator, anew=done is None)
    done = done or {
        "step": 0,
        "place": 0,
        "train_seconds": 0.0,
        "bad_steps": 0,
        "evaluate": False,
        "best": -1.0,
        "since_best": 0,
    }
    saved, place, train_seconds = done["step"], done["place"], done["train_seconds"]
    refresh(sampler, policy)
    log = MetricsLog(config, folder, total, SHOWN, accelerator)
    log.say(f"{len(problems)} problems to train on, {len(held_out)} held out, {skipped} skipped (prompt over {config.max_prompt_length} tokens); "
            f"{config.batch_size} x {config.num_generations} completions a step on {accelerator.num_processes} {accelerator.device.type} process(es); "
            f"a completion ends on {tokenizer.convert_ids_to_tokens(decoder.tables.eos_ids)}")  # fmt: skip
    if done["evaluate"]:  # the signal came before the evaluation was over, and the step's line waits for it
        checkpoints.make_up_evaluation(decoder, held_out, stop, log, done)
    own = range(config.batch_size)[
        shard(config.batch_size, accelerator)
    ]  # the groups of a batch that are this process's

    for step in range(done["step"], done["step"] if out_of_patience(config, done) else total):
        first = {}
        if (
            step == 0
            and config.eval_every
            and (first := held_out_accuracy(accelerator, decoder, held_out, config, stop, log, 0))
        ):
            done["best"] = first["eval_accuracy"]
            log.say(
                f"before training: held-out accuracy {first['eval_accuracy']:.3f}, length {first['eval_length']:.0f}"
            )
        watch = Stopwatch(accelerator.device)

        # 1. An outer iteration begins: the reference becomes a copy of the policy.
        if step % steps == 0 and reference is not None:
            refresh(reference, policy)

        # 2. Sample G completions for each of B problems; with M3PO the paths of a group interact while they think.
        batch = [problems[i] for i in problem_batch(len(problems), config.batch_size, place, config.seed)]
        place += config.batch_size
        sampled = unless_stopped(decoder, stop, lambda: sample(decoder, batch, own, config, step))  # noqa: B023
        if sampled is None:
            leave(stop, checkpoints, done if done["step"] > saved else None)
        rollout_seconds = watch.lap()

        # 3. Score them, and compare each with its group; with dynamic sampling, groups without a signal give way to fresh problems.
        score(functions, sampled, config, step, gather_object)
        all_rewards = torch.tensor(gather_object(sampled.rewards), dtype=torch.float64)
        given = give_way(
            decoder, stop, functions, problems, batch, own, place, sampled, all_rewards, config, step
        )
        if given is None:
            leave(stop, checkpoints, done if done["step"] > saved else None)
        all_rewards, place, extra = given
        mine, rollout, completions, texts, rewards, parts, _ = sampled
        everyone = group_advantages(all_rewards, config.num_generations, config.scale_rewards)
        advantages = everyone[shard(config.batch_size, accelerator, config.num_generations)].to(
            accelerator.device
        )
        reward_seconds = watch.lap()

        # 4. mu optimiser steps on the clipped loss, the KL inside it; then the sampler sees the new weights.
        learning_rate = schedule.get_last_lr()[0]
        inside = (
            look_inside(Scorer(sampler, decoder.tables), sampled, step, config)
            if accelerator.is_main_process
            else None
        )
        watch.lap()
        update_metrics = update(
            accelerator, scorer, ref_scorer, optimizer, schedule, rollout, advantages, config, budget
        )
        shown = refresh(sampler, policy)
        update_seconds = watch.lap()
        train_seconds += rollout_seconds + reward_seconds + update_seconds

        # 5. Log, now and then evaluate and save.
        out_of_time = (
            config.max_minutes is not None and max_over_processes(train_seconds) >= 60 * config.max_minutes
        )
        last = step + 1 == total or out_of_time
        right = right_answers(
            texts,
            [p.problem.answer for p in mine for _ in range(config.num_generations)],
            config.answer_format,
            config.grading,
        )
        metrics = {
            "step": step + 1,
            "outer_iteration": step // steps + 1,
            **rollout_metrics(accelerator, rollout, texts, right, all_rewards, parts, config),
            **extra,
            **update_metrics,
            "learning_rate": learning_rate,
            "update_shown": float(shown),
            **speed_metrics(accelerator, rollout, rollout_seconds, reward_seconds, update_seconds),
            "train_seconds": train_seconds,
        }
        bad = done["bad_steps"] + 1 if "not finite" in update_metrics.get("skipped", "") else 0
        if bad:
            metrics["bad_examples"] = [p.problem.id for p in batch]
        if step == 0 and first:
            metrics |= {f"{name}_before": value for name, value in first.items() if name != "eval_questions"}
        done |= {
            "step": step + 1,
            "place": place,
            "train_seconds": train_seconds,
            "bad_steps": bad,
            "evaluate": False,
            "budget": budget.state(),
        }
        if config.eval_every and ((step + 1) % config.eval_every == 0 or last):
            evaluation = held_out_accuracy(accelerator, decoder, held_out, config, stop, log, step + 1)
            metrics, done["evaluate"] = metrics | (evaluation or {}), evaluation is None
            if keep_best(config, folder, accelerator, policy, tokenizer, evaluation, done):
                log.say(
                    f"no better held-out accuracy than {done['best']:.3f} in {done['since_best']} evaluations: the run ends"
                )
                last = True
        log_rollouts(
            accelerator,
            folder,
            step,
            decoder.tokenizer,
            sampled,
            right,
            advantages,
            config,
            inside and inside["alone"],
        )
        if done["evaluate"]:
            done["metrics"] = metrics
        else:
            log.write(metrics)
        if debug_every() and step % debug_every() == 0:
            log.say(explain_first_group(decoder, rollout, inside, step, config, folder))
        if warning := collapse(metrics, done, config.warn_after):
            log.say(warning)
        check_bad_steps(config, bad, metrics)
        if done["evaluate"] or (stop.agreed() and not last):
            leave(stop, checkpoints, done)
        if config.save_every and ((step + 1) % config.save_every == 0 or (step + 1) % steps == 0):
            checkpoints.save(done)
            saved = done["step"]
        if last:
            break

    log.close()
    finish(config, folder, accelerator, policy, tokenizer, len(held_out), done["step"])
    return folder


def warm_start_settings(config):
    """The settings of the supervised run that comes first."""
    shared = {name: getattr(config, name) for name in names_with(TrainConfig, "inherited")}
    how = {
        "resume": config.resume,
        "resume_anyway": config.resume_anyway,
        "overwrite_output_dir": not config.resume,
    }
    try:
        given = settings_from_file(sft_train.Config, config.warm_start)
        return sft_train.Config(
            **{**shared, **given, "output_dir": str(Path(config.output_dir) / "warm_start"), **how}
        )
    except SettingError as error:
        raise SettingError("warm_start", config.warm_start, str(error)) from error


def warm_start(config, accelerator, stop):
    """Supervised fine-tuning into output_dir/warm_start, unless it lies there whole already; returns the directory. With resume a half one is gone on with."""
    folder, sft = Path(config.output_dir) / "warm_start", warm_start_settings(config)
    free = free_on_resume(sft_train.Config)
    note, settings = (
        folder / "warm_start.json",
        {k: v for k, v in json.loads(json.dumps(resolved(sft))).items() if k not in free},
    )
    whole = accelerator.is_main_process and note.exists() and json.loads(note.read_text()) == settings
    if not max_over_processes(whole):
        if accelerator.is_main_process:
            note.unlink(missing_ok=True)
        sft_train.train(sft, stop)
        if accelerator.is_main_process:
            write_whole(note, json.dumps(settings))
    accelerator.wait_for_everyone()
    return str(folder)


@dataclass
class Sampled:
    """What one process sampled for some groups of a step, and what it was paid: a problem a group, G rows of everything else."""

    problems: list
    rollout: Rollout
    completions: list  # (ids, whether EOS came)
    texts: list
    rewards: list = field(default_factory=list)
    parts: dict = field(default_factory=dict)  # each function's own values
    retries: list = field(
        default_factory=list
    )  # a number a group: in which extra rollout of its step it was drawn

    def __iter__(self):
        return (getattr(self, f.name) for f in dataclasses.fields(self))

    def replace(self, places, other, pad_id):
        """Take groups `places` from another, in its order."""
        G = self.rollout.num_generations
        self.rollout = self.rollout.with_groups(places, other.rollout, pad_id)
        pairs = [(getattr(self, name), getattr(other, name)) for name in ("completions", "texts", "rewards")]
        for n, place in enumerate(places):
            self.problems[place], self.retries[place] = other.problems[n], other.retries[n]
            for old, new in pairs + [(self.parts[name], other.parts[name]) for name in self.parts]:
                old[place * G : (place + 1) * G] = new[n * G : (n + 1) * G]


def sample(decoder, batch, groups, config, step, retry=0):
    """Completions for some groups of a step's batch; the draws of a row depend on its place in the batch, not on who samples it."""
    G, T, problems = config.num_generations, config.max_completion_length, [batch[i] for i in groups]
    uniforms = (
        rollout_uniforms(config.seed, step, retry, len(batch) * G, T)
        .view(len(batch), G, T)[list(groups)]
        .flatten(0, 1)
    )
    ids, mask = pad_left([p.ids for p in problems], decoder.tables.pad_id)
    rollout = decoder.rollout(ids, mask, G, T, uniforms, config.temperature)
    completions = rollout.completions()
    return Sampled(
        problems,
        rollout,
        completions,
        [decoder.text(*pair) for pair in completions],
        retries=[retry] * len(problems),
    )


def score(functions, sampled, config, step, gather=lambda values: []):
    """Put the rewards of the rows into `sampled`: totals, and each function's own. `gather`: values of all processes, where a function may abstain."""
    problems = [p.problem for p in sampled.problems for _ in range(config.num_generations)]
    columns = reward_columns(
        problems, sampled.texts, [ids for ids, _ in sampled.completions], config.answer_format
    )
    sampled.rewards, sampled.parts = compute_rewards(
        functions, columns, step=step + 1, timeout=config.reward_timeout, gather=gather
    )


def give_way(decoder, stop, functions, problems, batch, own, place, sampled, all_rewards, config, step):
    """Dynamic sampling: groups whose rewards are all equal are replaced by fresh problems, in `batch` and in `sampled`, as often as the settings allow.

    Returns all processes' rewards, the next place in the data, and what to log; None where the run was told to stop. The same on any number of processes.
    """
    replaced = {"extra_rollouts": 0, "replaced_groups": 0} if config.dynamic_sampling else {}
    for retry in range(1, config.dynamic_sampling + 1):
        dead = all_equal(all_rewards.view(-1, config.num_generations)).nonzero().flatten().tolist()
        if not dead:
            break
        for i, fresh in zip(dead, problem_batch(len(problems), len(dead), place, config.seed), strict=True):
            batch[i] = problems[fresh]
        place += len(dead)
        again = [i for i in dead if i in own]
        new = unless_stopped(
            decoder, stop, lambda: again and sample(decoder, batch, again, config, step, retry)
        )  # noqa: B023
        if new is None:
            return None
        if again:
            score(functions, new, config, step)
            sampled.replace([i - own.start for i in again], new, decoder.tables.pad_id)
        all_rewards = torch.tensor(gather_object(sampled.rewards), dtype=torch.float64)
        replaced = {"extra_rollouts": retry, "replaced_groups": replaced["replaced_groups"] + len(dead)}
    return all_rewards, place, replaced


@torch.enable_grad()  # a file of rewards that runs a model of its own may have switched gradients off
def update(accelerator, scorer, ref_scorer, optimizer, schedule, rollout, advantages, config, budget):
    """mu optimiser steps on one rollout; returns their metrics. Micro-batches change memory, not gradients (I3)."""
    epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    mask = rollout.mask & rollout.ended[:, None] if config.mask_truncated_completions else rollout.mask
    signal = (mask.any(-1) & (advantages != 0)).sum()
    *counts, signal = accelerator.reduce(
        torch.stack([torch.tensor(len(mask), device=mask.device), mask.sum(), signal]), "sum"
    ).tolist()  # device sync
    if counts[1] == 0 or (signal == 0 and config.beta == 0):  # Adam's momentum alone would move the weights
        for _ in range(config.mu):
            schedule.step()
        return {
            "skipped": "every completion was cut off and masked"
            if counts[1] == 0
            else "no group carries a signal",
            "grad_norm": 0.0,
        }
    weights = token_weights(mask, config.loss_type, *counts, config.max_completion_length)
    old_logp, ref_logp = torch.zeros_like(rollout.logp), torch.zeros_like(rollout.logp)
    sums, furthest, norms, skipped = Counter(), 0.0, [], {}

    def one_batch(rows, counts):
        """Gradients of one micro-batch, added to those that are there; returns sums over its tokens."""
        logp, entropy = scorer(rollout, rows)
        chosen, rows = rows, send(rows, mask.device)
        if iteration == 0:
            old_logp[rows] = logp.detach()
            if ref_scorer is not None:
                with torch.no_grad():
                    ref_logp[rows] = ref_scorer(rollout, chosen)[0]
        importance = (
            importance_weights(old_logp[rows], rollout.logp[rows], config.rollout_is_cap)
            if config.rollout_is == "token"
            else None
        )
        loss, terms = grpo_loss(logp, old_logp[rows], advantages[rows], weights[rows], epsilon=config.epsilon, epsilon_high=epsilon_high, beta=config.beta,
                                ref_logp=ref_logp[rows], importance=importance)  # fmt: skip
        (
            loss * (counts * accelerator.num_processes)
        ).backward()  # data parallelism averages, the loss is a sum
        difference = (logp.detach() - rollout.logp[rows]).abs()
        terms |= {
            "entropy": entropy,
            "logp_diff": difference if iteration == 0 else torch.zeros_like(difference),
        }
        return {
            "loss": loss.detach(),
            "furthest": (difference * rollout.mask[rows]).max(),
            **{k: (v.detach() * mask[rows]).sum() for k, v in terms.items()},
        }

    for iteration in range(config.mu):
        batches = within_memory(accelerator, scorer, rollout, budget, one_batch)
        stepped, norm = guarded_step(
            accelerator,
            scorer,
            optimizer,
            schedule,
            torch.stack([b["loss"] for b in batches]),
            config.max_grad_norm,
        )
        norms.append(norm)
        skipped |= {} if stepped else {"skipped": "loss or gradient not finite"}
        apart = max(float(b.pop("furthest")) for b in batches)
        furthest = apart if iteration == 0 else furthest
        for batch in batches:
            sums.update(batch)
    names = list(sums)
    totals = accelerator.reduce(
        torch.stack([torch.as_tensor(sums[n], device=mask.device).float() for n in names]), "sum"
    ).tolist()
    tokens = config.mu * max(counts[1], 1)
    means = {
        n: value / {"loss": config.mu, "logp_diff": tokens / config.mu}.get(n, tokens)
        for n, value in zip(names, totals, strict=True)
    }
    if ref_scorer is None:
        del means["kl"]  # there is nothing to measure it against
    return {
        **means,
        "logp_diff_max": max_over_processes(furthest),
        "grad_norm": statistics.fmean(norms),
        **skipped,
    }


def rollout_metrics(accelerator, rollout, texts, right, all_rewards, parts, config):
    """Metrics of a step's samples over all processes; the README's glossary explains each."""
    G = config.num_generations
    groups = all_rewards.view(-1, G)
    local = {
        "correct": [float(r) for r in right],
        "length": rollout.lengths.tolist(),
        "truncated": (~rollout.ended).float().tolist(),
        "unique": [len(set(texts[i : i + G])) / G for i in range(0, len(texts), G)],
        **{f"reward/{name}": values for name, values in parts.items()},
    }
    if rollout.mix is not None:
        alive = rollout.mask.view(-1, G, rollout.mask.shape[1]).any(1)  # (B, T)
        listening = rollout.mix.sum(-1).permute(0, 2, 1).reshape(rollout.mask.shape) > 0  # (N, T)
        sums = (
            rollout.thinking.sum(),
            alive.sum(),
            rollout.input_change[listening].double().sum(),
            listening.sum(),
        )
        local |= {
            name: [value]
            for name, value in zip(
                ("thinking", "alive", "change", "listening"), torch.stack(sums).tolist(), strict=True
            )
        }
    everyone = gather_object([local])
    every = {name: [value for one in everyone for value in one[name]] for name in local}
    mean = {
        name: statistics.fmean(v for v in values if v is not None)
        if any(v is not None for v in values)
        else 0.0
        for name, values in every.items()
    }
    scored = all_rewards[~all_rewards.isnan()]
    metrics = {
        "reward": float(scored.mean()),
        "reward_std": float(scored.std()),
        "reward_std_in_group": float(group_std(groups).mean()),
        **{name: mean[name] for name in every if name.startswith("reward/")},
        "unscored": int(all_rewards.isnan().sum()),
        "correct": mean["correct"],
        "frac_reward_zero_std": float(all_equal(groups).float().mean()),
        "unique_completions": mean["unique"],
        "completion_length": mean["length"],
        "completion_length_min": min(every["length"]),
        "completion_length_max": max(every["length"]),
        "truncated": mean["truncated"],
    }
    if rollout.mix is not None:
        metrics |= {
            "thinking_paths": mean["thinking"] / (mean["alive"] or 1.0),
            "input_change": mean["change"] / (mean["listening"] or 1.0),
        }
    return metrics


MENDS = {
    "nothing": "It usually helps: a supervised warm start (--warm_start), easier problems, an answer_format the model knows (see --check).",
    "format_only": "The format is learnt and the answers are gone; it usually helps: a warm start, a lower learning_rate, a larger num_generations.",
}


def collapse(metrics, done, patience):
    """A warning, once, where the rewards have carried no information for `patience` steps; counts them in `done`."""
    done["nothing"] = done.get("nothing", 0) + 1 if metrics["reward"] == metrics["reward_std"] == 0 else 0
    done["format_only"] = (
        done.get("format_only", 0) + 1
        if metrics["reward"] > 0 and metrics["correct"] == 0 and metrics["frac_reward_zero_std"] == 1
        else 0
    )
    if patience and done["nothing"] == patience:
        return f"WARNING: no completion has earned anything for {patience} steps. {MENDS['nothing']}"
    if patience and done["format_only"] == patience:
        return f"WARNING: for {patience} steps every completion earned the same, and none was right. {MENDS['format_only']}"
    return None


def speed_metrics(accelerator, rollout, rollout_seconds, reward_seconds, update_seconds):
    """Seconds of the parts of a step, and completion tokens a second over all processes."""
    tokens = sum(gather_object([int(rollout.mask.sum())]))
    return {
        "rollout_seconds": rollout_seconds,
        "reward_seconds": reward_seconds,
        "update_seconds": update_seconds,
        "rollout_tokens_per_s": tokens / rollout_seconds,
        "update_tokens_per_s": tokens / update_seconds,
        **({"peak_gib": max_over_processes(peak_gib())} if accelerator.device.type == "cuda" else {}),
    }


def log_rollouts(accelerator, folder, step, tokenizer, sampled, right, advantages, config, alone=None):
    """One line a completion into rollouts.jsonl; the first groups carry their tokens, log-probs and who listened to whom.

    alone: G lists of the ids that the first group would have had with nobody heard; where they differ, the line says so.
    """
    mine, rollout, completions, texts, rewards, parts, _ = sampled
    G, records = config.num_generations, []
    first_row = shard(config.batch_size, accelerator, G).start
    for n, ((ids, ended), text) in enumerate(zip(completions, texts, strict=True)):
        problem = mine[n // G].problem
        records.append({
            "schema_version": 1, "step": step + 1, "example_id": problem.id, "generation": n % G, "question": problem.question,
            "prompt": mine[n // G].prompt, "completion": text,
            "answer": problem.answer, "extracted": extract_answer(text, config.answer_format), "right": bool(right[n]),
            "reward": None if math.isnan(rewards[n]) else rewards[n], "rewards": {name: values[n] for name, values in parts.items()},
            "advantage": float(advantages[n]), "length": len(ids), "stop_condition": "eos" if ended else "length",
        })  # fmt: skip
        if first_row + n < G * config.log_groups:
            logps = [
                round(v, 4) if math.isfinite(v) else None for v in rollout.logp[n, : len(ids)].tolist()
            ]  # JSON has no NaN
            records[-1] |= {
                "tokens": ids,
                "pieces": token_pieces(tokenizer, ids),
                "logps": logps,
                "think_end": int(rollout.thinking[n].sum()),
            }
            if rollout.mix is not None:  # (length, G) weights in 1/255
                weights = (rollout.mix[n // G, : len(ids), n % G] * 255).round().to(torch.uint8).cpu().numpy()
                records[-1]["mix"] = base64.b64encode(weights.tobytes()).decode()
            if alone and n < G:
                records[-1]["alone"] = {
                    t: tokenizer.decode([other])
                    for t, (i, other) in enumerate(zip(ids, alone[n], strict=True))
                    if i != other
                }
    records = gather_object(records)
    if accelerator.is_main_process:
        with open(folder / "rollouts.jsonl", "a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


def main():
    config = parse_config(Config, description=__doc__.splitlines()[0])
    debug_every()
    if config.check:
        return preflight.report(config, reward_functions(config))
    if processes := starts_processes(config):
        check_shares(config, processes)
        launch(processes)
    else:
        train(config)


if __name__ == "__main__":
    run_main(main)

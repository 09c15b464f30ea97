"""Supervised warm start: the same prompts, worked solutions written in the chosen answer format, loss on the response only.

    python sft_train.py --model DIR --dataset gsm8k --output_dir sft_model

It writes a directory that `grpo_train.py --model` starts from; `grpo_train.py --warm_start FILE.yaml` runs it by itself.
"""

import contextlib
import math
from dataclasses import dataclass
from typing import Literal

import torch

from answers.formats import ANSWER_FORMATS
from decoding.decoder import GroupDecoder
from decoding.rollout import Rollout, pad_left, pad_right
from errors import DataError
from learning.learner import guarded_step, make_optimizer
from learning.log_probs import make_scorer
from learning.memory import TokenBudget, within_memory
from learning.models import check_positions, load_model, load_policy, load_tokenizer, refresh, rollout_dtype
from learning.parallel import distribute, largest, shard
from problems.prompts import Prompting, prepare_problems
from reporting.files import FINISHED, LOGS
from running.checkpoint import Checkpoints
from running.evaluation import held_out_accuracy
from running.folder import finish, keep_best, open_output, refuse_used, start_logs
from running.launching import check_shares, launch, start_processes, starts_processes
from running.log import MetricsLog
from running.parsing import parse_config, run_main
from running.run import Stop, Stopwatch, check_bad_steps, leave, out_of_patience, problem_batch, steps_to_do
from running.settings import TrainConfig, check, setting

SHOWN = {
    "loss": "loss",
    "eval_accuracy": "held-out",
    "grad_norm": "grad",
    "learning_rate": "lr",
    "step_seconds": "s",
    "skipped": "SKIPPED:",
}


# What a warm start takes from the GRPO run it belongs to, unless its own file says otherwise.
INHERITED = {
    "model", "dataset", "split", "question_column", "answer_column", "solution_column", "limit", "answer_format", "grading", "system_prompt_file",
    "chat_template_kwargs", "max_prompt_length", "max_completion_length", "micro_batch_tokens", "gradient_checkpointing", "bf16", "eval_problems",
    "cpu_threads", "seed", "trust_remote_code", "torch_compile", "fsdp", "optimizer", "lora_r", "lora_alpha", "lora_target_modules", "num_processes",
}  # fmt: skip


@dataclass(frozen=True)
class Config(TrainConfig):
    """Settings of a supervised run."""

    output_dir: str = setting("sft_model", "where the model, metrics.jsonl and run_config.yaml go")
    batch_size: int = setting(32, "problems a step, over all processes")
    num_epochs: float | None = setting(
        1.0, "passes over the problems; leave it empty (null) to count num_steps"
    )
    learning_rate: float = setting(1e-5, "peak learning rate of AdamW")
    max_grad_norm: float = setting(1.0, "gradients are scaled down to this norm; 0 only measures")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = setting(
        "linear", "learning rate after the warm-up"
    )
    warmup_ratio: float = setting(0.05, "share of the steps in which the learning rate rises from 0")
    unique_train_examples: int | None = setting(None, "train on the first N problems only (default: all)")
    eval_problems: int = setting(0, "held-out problems, cut from the training split by hash; 0: none")
    eval_every: int = setting(
        0, "evaluate greedily on held-out problems every N steps, and after the last; 0: never"
    )

    def __post_init__(self):
        super().__post_init__()
        check(self, "unique_train_examples", lambda v: v is None or v >= 1, "must be at least 1")


def responses(problems, tokenizer, config):
    """The ids to learn for each problem, EOS of the chat template at the end, and which problems have them within max_completion_length."""
    answer_format, eos = ANSWER_FORMATS[config.answer_format], Prompting.of(config).eos_id(tokenizer)
    kept = []
    for p in problems:
        text = p.problem.response or _worked_answer(p.problem, answer_format, config)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [eos]
        if len(ids) <= config.max_completion_length:
            kept.append((p, ids))
    if not kept:
        raise DataError(
            f"{config.dataset}: no response fits into max_completion_length={config.max_completion_length} tokens; raise it"
        )
    return kept[: config.unique_train_examples]


def _worked_answer(problem, answer_format, config):
    """The worked solution in the answer format; as it stands where it is in that format already, as MATH's solutions are in boxed."""
    reasoning, marker, answer = problem.solution.rpartition("####")
    if not marker:
        raise DataError(
            f"{config.dataset}: problem {problem.id} has no worked solution ending in `#### answer`, which supervised training needs"
        )
    reasoning, answer = reasoning.strip(), answer.strip()
    return reasoning if answer_format.extract(reasoning) == answer else answer_format.write(reasoning, answer)


def as_rollout(pairs, tables, device):
    """Prompts and given responses in the shape of a rollout (G = 1, nobody listens), for the one scored forward."""
    padded = (
        *pad_left([p.ids for p, _ in pairs], tables.pad_id),
        *pad_right([ids for _, ids in pairs], tables.pad_id),
    )
    prompt_ids, prompt_mask, ids, mask = (tensor.to(device) for tensor in padded)
    blank, ended = (
        torch.zeros(ids.shape, device=device),
        torch.ones(len(ids), dtype=torch.bool, device=device),
    )
    return Rollout(
        prompt_ids, prompt_mask, ids, mask, blank, ended, blank.bool(), num_generations=1, temperature=1.0
    )


def train(config, stop=None):
    """Run a whole supervised training; returns the output directory. `stop`: of the run that this is the warm start of."""
    accelerator = start_processes(config)
    with contextlib.nullcontext(stop) if stop else Stop(config.stop_after) as stop:
        return run(config, accelerator, stop)


def run(config, accelerator, stop):
    tokenizer = load_tokenizer(config.model, config.trust_remote_code)
    problems, held_out, skipped = prepare_problems(config, tokenizer, responses=True)
    pairs = responses(problems, tokenizer, config)
    refuse_used(config)
    load = dict(
        name=config.model,
        tokenizer=tokenizer,
        device=accelerator.device,
        trust_remote_code=config.trust_remote_code,
    )
    policy = load_policy(config, config.model, tokenizer, accelerator.device)
    check_positions(policy, problems, config)
    sampler = (
        load_model(dtype=rollout_dtype(config), **load).eval().requires_grad_(False)
        if config.eval_every
        else policy
    )
    decoder = GroupDecoder(sampler, tokenizer, compiled=config.torch_compile)
    scorer = distribute(accelerator, make_scorer(policy, decoder.tables, config), config)
    total = steps_to_do(config, len(pairs))
    optimizer, schedule = make_optimizer(policy, config, total)
    budget = TokenBudget(config, policy)
    folder, held = open_output(config, accelerator)
    checkpoints = Checkpoints(
        config, folder, accelerator, policy, optimizer, schedule, tokenizer, problems, held, logs=LOGS
    )
    done = checkpoints.resume(total, budget) if config.resume else None
    if done == FINISHED:
        return folder
    start_logs(config, folder, accelerator, anew=done is None)
    done = done or {
        "step": 0,
        "train_seconds": 0.0,
        "bad_steps": 0,
        "evaluate": False,
        "best": -1.0,
        "since_best": 0,
    }
    saved, train_seconds = done["step"], done["train_seconds"]
    log = MetricsLog(config, folder, total, SHOWN, accelerator)
    log.say(
        f"supervised: {len(pairs)} problems, {skipped} prompts and {len(problems) - len(pairs)} solutions too long, {total} steps of {config.batch_size}"
    )
    if done["evaluate"]:  # the signal came before the evaluation was over, and the step's line waits for it
        refresh(sampler, policy)
        checkpoints.make_up_evaluation(decoder, held_out, stop, log, done)

    for step in range(done["step"], done["step"] if out_of_patience(config, done) else total):
        if stop.agreed():
            leave(stop, checkpoints, done if done["step"] > saved else None)
        watch = Stopwatch(accelerator.device)
        chosen = [
            pairs[i]
            for i in problem_batch(len(pairs), config.batch_size, step * config.batch_size, config.seed)
        ]
        batch = as_rollout(chosen[shard(len(chosen), accelerator)], decoder.tables, accelerator.device)
        tokens = sum(len(ids) for _, ids in chosen)  # of all processes
        learning_rate = schedule.get_last_lr()[0]

        def one_batch(rows, counts):
            loss = -scorer(batch, rows)[0].sum() / tokens  # noqa: B023
            (loss * (counts * accelerator.num_processes)).backward()
            return loss.detach()

        losses = within_memory(accelerator, scorer, batch, budget, one_batch)
        stepped, norm = guarded_step(
            accelerator, scorer, optimizer, schedule, torch.stack(losses), config.max_grad_norm
        )
        loss = float(accelerator.reduce(torch.stack(losses).sum(), "sum"))
        seconds = watch.lap()
        train_seconds += seconds
        last = step + 1 == total or (
            config.max_minutes is not None and largest(train_seconds) >= 60 * config.max_minutes
        )
        metrics = {"step": step + 1, "loss": loss, "perplexity": math.exp(min(loss, 50)), "grad_norm": norm, "learning_rate": learning_rate,
                   "tokens": tokens, "step_seconds": seconds, "train_seconds": train_seconds}  # fmt: skip
        bad = 0 if stepped else done["bad_steps"] + 1
        metrics |= (
            {}
            if stepped
            else {"skipped": "loss or gradient not finite", "bad_examples": [p.problem.id for p, _ in chosen]}
        )
        done |= {
            "step": step + 1,
            "train_seconds": train_seconds,
            "bad_steps": bad,
            "evaluate": False,
            "budget": budget.state(),
        }
        if config.eval_every and ((step + 1) % config.eval_every == 0 or last):
            refresh(sampler, policy)
            evaluation = held_out_accuracy(accelerator, decoder, held_out, config, stop, log, step + 1)
            metrics, done["evaluate"] = metrics | (evaluation or {}), evaluation is None
            last = keep_best(config, folder, accelerator, policy, tokenizer, evaluation, done) or last
        if done["evaluate"]:
            done["metrics"] = metrics
        else:
            log.write(metrics)
        check_bad_steps(config, bad, metrics)
        if done["evaluate"]:
            leave(stop, checkpoints, done)
        if config.save_every and ((step + 1) % config.save_every == 0 or last):
            checkpoints.save(done)
            saved = done["step"]
        if last:
            break
    log.close()
    finish(config, folder, accelerator, policy, tokenizer, len(held_out), done["step"])
    return folder


def main():
    config = parse_config(Config, description=__doc__.splitlines()[0])
    if processes := starts_processes(config):
        check_shares(config, processes)
        launch(processes)
    else:
        train(config)


if __name__ == "__main__":
    run_main(main)

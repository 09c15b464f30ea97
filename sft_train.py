"""Supervised training on worked solutions in the chosen answer format; the loss is on the response only.

    python sft_train.py --model DIR --dataset gsm8k --output_dir sft_model

It writes a directory that `grpo_train.py --model` starts from; `grpo_train.py --warm_start FILE.yaml` runs it
by itself.
"""

from errors import end_on_interrupt

if __name__ == "__main__":
    end_on_interrupt()
    from running.parsing import parse_early
    from running.settings import refuse_at_once
    from running.sft_config import Config

    SETTINGS = parse_early(Config, __doc__, refuse_at_once)  # before torch is imported, which takes seconds

import json
import math
from functools import partial
from pathlib import Path

import torch

from answers.formats import answer_format_named
from decoding.decoder import GroupDecoder
from decoding.rollout import Rollout, pad_right
from decoding.tokens import end_answers_on
from errors import counted
from learning.device import choose_device
from learning.learner import make_learner
from learning.models import check_positions, load_frozen, load_policy, load_tokenizer, refresh
from learning.parallel import max_over_processes, shard, together
from problems.prompts import Prompting, prepare_problems, problems_of, responses
from reporting.files import read_run_config, with_precision, write_whole
from running.contract import inputs_of
from running.evaluation import held_out_accuracy
from running.launching import check_shares, launch, parse_on_all, refuse_other_start, starts_processes
from running.parsing import check_config, refuse_arguments, run_main, warn_of_idle
from running.progress import next_problems, steps_to_do
from running.run import Run
from running.settings import free_on_resume, resolved
from running.sft_config import Config, warm_start_settings
from running.warm_starts import cache_folder, copy_out, keep, key_of, read_inputs

SHOWN = {
    "loss": "loss {:.3g}",
    "skipped": "SKIPPED: {}",
    "eval_accuracy": "held-out {:.3f}",
    "grad_norm": "grad {:.2g}",
    "learning_rate": "lr {:.2g}",
    "step_seconds": "{:.3g} s",
}


def as_rollout(pairs, tables, device):
    """Prompts and given responses in the shape of a rollout with G = 1, for the scored forward."""
    prompts, responses = [p.ids for p, _ in pairs], [ids for _, ids in pairs]
    ids, mask = (tensor.to(device) for tensor in pad_right(responses, tables.pad_id))
    blank, ended = (
        torch.zeros(ids.shape, device=device),
        torch.ones(len(ids), dtype=torch.bool, device=device),
    )
    return Rollout(prompts, ids, mask, blank, ended, blank.bool(), num_generations=1, temperature=1.0)


def train(config=None, outer=None, of_study=False, **others):
    """Run a whole supervised training; returns the output directory.

    outer: the run that this is the warm start of. of_study: a study makes it, as the start of a seed's arms.
    """
    refuse_arguments(others, Config)
    check_config(config, Config)
    if outer is None and not of_study:
        warn_of_idle(config)
    with Run(config, SHOWN, outer, few_lines=True, of_study=of_study) as run:
        start = run.find_folder(config.model, "model")
        with together():
            tokenizer = load_tokenizer(start, config.trust_remote_code)
            problems, held_out, skipped = prepare_problems(config, tokenizer, responses=True)
            pairs = responses(problems, tokenizer, config)
            policy = load_policy(config, start, tokenizer, run.device)
            check_positions(policy, problems + held_out, config)
            sampler = load_frozen(config, start, tokenizer, run.device) if config.eval_every else policy
            end_answers_on(Prompting.of(config).eos_id(tokenizer), tokenizer, policy, sampler)
        refuse_other_start(config, problems + held_out, sampler)
        think_end = answer_format_named(config.answer_format).think_end
        decoder = GroupDecoder(sampler, tokenizer, think_end, compiled=config.torch_compile)
        if sampler is not policy:
            decoder.choose_path()
        total = steps_to_do(config, len(pairs))
        learner = make_learner(config, run.accelerator, policy, None, decoder, total, lambda: run.time_used)

        def evaluate():
            refresh(sampler, policy)
            return held_out_accuracy(run, decoder, held_out)

        inputs = inputs_of(run, problems, held_out, config.model, policy)
        run.open(learner, inputs, evaluate, total, total)
        if not run.is_finished:
            used = f"{len(pairs)} of {counted(len(problems), 'problem')}, {len(held_out)} held out, "
            used += f"{counted(skipped, 'prompt')} too long"
            run.say(f"supervised: {used}, {counted(total, 'step')} of {config.batch_size}")
            for remark in Prompting.of(config).remarks(tokenizer, problems):
                run.say(f"note: {remark}")

        for _ in run.steps(evaluate_first=config.keep_best):  # the start may be the best
            with run.timed("step_seconds"):
                chosen = next_problems(pairs, config.batch_size, run)
                local = chosen[shard(len(chosen), run.accelerator)]
                tokens = sum(len(ids) for _, ids in chosen)  # of all processes
                learning_rate = learner.schedule.get_last_lr()[0]
                batch = as_rollout(local, decoder.tables, run.device)
                results = learner.accumulate_gradients(batch, partial(rows_loss, learner, batch, tokens))
                losses = [loss for loss, _ in results]
                has_stepped, norm = learner.step(losses)
                [loss] = learner.sum_over_processes(torch.stack(losses).sum())
            metrics = {
                "loss": loss,
                "perplexity": math.exp(min(loss, 50)),
                "grad_norm": norm,
                "learning_rate": learning_rate,
                "tokens": tokens,
                **learner.scale_metrics(),
                **({} if has_stepped else {"skipped": learner.why_skipped}),
            }
            run.finish_step(metrics, [problem for problem, _ in chosen])
    return run.folder


def rows_loss(learner, batch, tokens, rows):
    """The mean cross-entropy's part of some rows; nothing else is logged."""
    return -learner.scorer(batch, rows)[0].sum() / tokens, {}


def warm_start(config, run):
    """Where a GRPO run starts from: its model, or output_dir/warm_start, which is trained first unless it is
    whole, there or among those that are kept for every run.

    With resume, a warm start that was cut off is gone on with.
    """
    if config.warm_start == "none":
        return run.find_folder(config.model, "model")
    settings = warm_start_settings(config)
    folder, is_main = Path(settings.output_dir), run.accelerator.is_main_process
    note, free = folder / "warm_start.json", free_on_resume(Config)
    cache, key, made_with, is_whole = cache_folder(config), None, {}, False
    with together():
        if is_main:
            everything = json.loads(json.dumps(resolved(settings)))
            made_with = {name: value for name, value in everything.items() if name not in free}
            read = read_inputs(settings, problems_of(settings, responses=True))
            if note.exists():
                noted = with_precision(json.loads(note.read_text(encoding="utf-8")))
                is_whole = noted == made_with | {name: read[name] for name in read if name in noted}
            made_with |= read
            if not is_whole and cache is not None:
                key = key_of(settings, read, choose_device(), run.accelerator.num_processes)
                is_whole = copy_out(cache, key, settings)
                if is_whole:
                    write_whole(note, json.dumps(made_with))
    if not max_over_processes(is_whole):
        train(settings, run)  # with resume it refuses to go on from one of other settings or data
        if is_main:
            write_whole(note, json.dumps(made_with))
            if not read_run_config(folder).get("changes"):  # else the key names another one
                keep(cache, key, settings)
    run.accelerator.wait_for_everyone()
    return run.find_folder(folder)


def main(given=None):
    config = parse_on_all(Config, __doc__, given)
    if processes := starts_processes(config):
        check_shares(config, processes)
        launch(processes)
    else:
        train(config)


if __name__ == "__main__":
    run_main(main, SETTINGS)

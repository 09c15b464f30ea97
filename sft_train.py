"""Supervised training on worked solutions in the chosen answer format; the loss is on the response only.

    python sft_train.py --model DIR --dataset gsm8k --output_dir sft_model

It writes a directory that `grpo_train.py --model` starts from; `grpo_train.py --warm_start FILE.yaml` runs it
by itself.
"""

from errors import end_on_interrupt

if __name__ == "__main__":
    end_on_interrupt()

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from answers.formats import answer_format_named
from decoding.decoder import GroupDecoder
from decoding.rollout import Rollout, pad_right
from decoding.tokens import end_answers_on
from errors import DataError, SettingError
from learning.learner import make_learner
from learning.models import check_positions, load_frozen, load_policy, load_tokenizer, refresh
from learning.parallel import max_over_processes, shard, together
from problems.prompts import Prompting, prepare_problems, problems_of
from reporting.files import write_whole
from running.contract import inputs_of, model_fingerprint, problems_fingerprint
from running.evaluation import held_out_accuracy
from running.launching import check_shares, launch, parse_on_all, refuse_other_start, starts_processes
from running.parsing import combined, refuse_idle, run_main, settings_from_file, without_switches
from running.progress import next_problems, steps_to_do
from running.run import Run
from running.settings import TrainConfig, check, free_on_resume, names_with, resolved, setting

SHOWN = {
    "loss": "loss",
    "eval_accuracy": "held-out",
    "grad_norm": "grad",
    "learning_rate": "lr",
    "step_seconds": "s",
    "skipped": "SKIPPED:",
}


@dataclass(frozen=True)
class Config(TrainConfig):
    """Settings of a supervised run."""

    output_dir: str = setting(
        "sft_model", "where the model, metrics.jsonl and run_config.yaml go", resume="free"
    )
    dataset: str = setting(
        "gsm8k",
        "as for grpo_train.py, or a file of {prompt, response} lines, which are learned as they stand",
        inherited=True,
        aliases=("sft_data_path",),
    )
    batch_size: int = setting(32, "problems a step, over all processes", in_card=True)
    num_epochs: float | None = setting(
        1.0, "passes over the problems, instead of num_steps", in_card=True, instead_of=("num_steps",)
    )
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

    def __post_init__(self):
        super().__post_init__()
        check(self, "unique_train_examples", lambda v: v is None or v >= 1, "must be at least 1")


def responses(problems, tokenizer, config):
    """Pairs of a problem and the ids to learn, which go on from the prompt and end on the EOS of the chat
    template.

    Longer responses than max_completion_length are left out.
    """
    answer_format, eos = answer_format_named(config.answer_format), Prompting.of(config).eos_id(tokenizer)
    if eos is None:
        remedy = "the tokenizer names no EOS token, and the chat template writes none: set eos_token"
        raise SettingError("model", config.model, f"{remedy} in tokenizer_config.json")
    kept = []
    for p in problems:
        text = p.problem.response or _worked_answer(p.problem, answer_format, config)
        ids = tokenizer(answer_format.after_opening(text, p.opening), add_special_tokens=False)["input_ids"]
        ids += [eos] if ids[-1:] != [eos] else []  # some data ends its responses on it already
        if len(ids) <= config.max_completion_length:
            kept.append((p, ids))
    if not kept:
        limit = f"max_completion_length={config.max_completion_length} tokens"
        raise DataError(f"{config.dataset}: no response fits into {limit}; raise it")
    return kept[: config.unique_train_examples]


def _worked_answer(problem, answer_format, config):
    """The worked solution in the answer format; unchanged where it is in that format already."""
    reasoning, marker, answer = problem.solution.rpartition("####")
    if not marker:
        what = f"problem {problem.id} has no worked solution ending in `#### answer`"
        raise DataError(f"{config.dataset}: {what}, which supervised training needs")
    reasoning, answer = reasoning.strip(), answer.strip()
    if answer_format.extract(reasoning) == answer:  # as MATH's solutions have it in boxed
        return reasoning
    return answer_format.write(reasoning, answer)


def as_rollout(pairs, tables, device):
    """Prompts and given responses in the shape of a rollout with G = 1, for the scored forward."""
    prompts, responses = [p.ids for p, _ in pairs], [ids for _, ids in pairs]
    ids, mask = (tensor.to(device) for tensor in pad_right(responses, tables.pad_id))
    blank, ended = (
        torch.zeros(ids.shape, device=device),
        torch.ones(len(ids), dtype=torch.bool, device=device),
    )
    return Rollout(prompts, ids, mask, blank, ended, blank.bool(), num_generations=1, temperature=1.0)


def train(config, outer=None):
    """Run a whole supervised training; returns the output directory.

    outer: the run that this is the warm start of.
    """
    with Run(config, SHOWN, outer) as run:
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
        learner = make_learner(config, run.accelerator, policy, None, decoder, total)

        def evaluate():
            refresh(sampler, policy)
            return held_out_accuracy(run, decoder, held_out)

        inputs = inputs_of(run, problems, held_out, config.model, policy)
        run.open(learner, inputs, evaluate, total, total)
        if not run.is_finished:
            used = f"{len(pairs)} of {len(problems)} problems, {len(held_out)} held out, "
            used += f"{skipped} prompts too long"
            run.say(f"supervised: {used}, {total} steps of {config.batch_size}")
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


def warm_start(config, run):
    """Where a GRPO run starts from: its model, or output_dir/warm_start, which is trained first unless it is
    whole.

    With resume, a warm start that was cut off is gone on with.
    """
    if config.warm_start == "none":
        return run.find_folder(config.model, "model")
    settings = warm_start_settings(config)
    folder, is_main = Path(settings.output_dir), run.accelerator.is_main_process
    note, free = folder / "warm_start.json", free_on_resume(Config)
    made_with, is_whole = {}, False
    with together():
        if is_main:
            everything = json.loads(json.dumps(resolved(settings)))
            made_with = {name: value for name, value in everything.items() if name not in free}
            read = {"data": problems_fingerprint(problems_of(settings, responses=True))}
            read |= {"start": model_fingerprint(settings.model)}
            if note.exists():
                noted = without_switches(Config, json.loads(note.read_text()))
                is_whole = noted == made_with | {name: read[name] for name in read if name in noted}
            made_with |= read
    if not max_over_processes(is_whole):
        train(settings, run)  # with resume it refuses to go on from one of other settings or data
        if is_main:
            write_whole(note, json.dumps(made_with))
    run.accelerator.wait_for_everyone()
    return run.find_folder(folder)


def main():
    config = parse_on_all(Config, description=__doc__.splitlines()[0])
    if processes := starts_processes(config):
        check_shares(config, processes)
        launch(processes)
    else:
        train(config)


if __name__ == "__main__":
    run_main(main)

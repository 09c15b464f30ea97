"""Evaluation on the held-out problems while a run goes, the first pass over those to train on, and single
questions asked of interacting paths.
"""

import json
import statistics

import numpy as np
from accelerate.utils import gather_object
from tqdm import tqdm

from answers.formats import extract_answer
from decoding.controls import row_keys
from decoding.rollout import Sampling, rollout_uniforms
from errors import counted
from learning.parallel import first_over_processes, max_over_processes, shard, together
from reporting.files import PASS_RATES, write_whole
from rewards import right_answers
from running.contract import differences, noted
from running.progress import draws_by_pass_rate, prior_worth

FIRST_PASS = 2**32  # added to the seed of its draws: no run has such a seed
AT_ONCE = 8192  # problems whose draws are made at once


def held_out_accuracy(run, decoder, problems):
    """Share of held-out problems that greedy single-path decoding gets right, and the mean length in tokens.

    Every process decodes a part. The answers go into evaluations.jsonl as those after the steps that are
    finished. Raises Stopped where the run is told to stop in the meantime.
    """
    config, local = run.config, problems[shard(len(problems), run.accelerator)]
    prompts, greedy = [p.ids for p in local], Sampling(config.max_completion_length)
    is_shown = None if run.accelerator.is_main_process and local else True  # None: in a terminal only
    with tqdm(total=len(local), desc="held-out", unit="question", leave=False, disable=is_shown) as bar:
        keep = None if bar.disable else lambda *_: bar.update()
        answers = run.interruptible(decoder, lambda: decoder.complete(prompts, greedy, keep=keep))
    completions = [p.answered(completion) for p, [completion] in zip(local, answers, strict=True)]
    right = right_answers(
        [c.text for c in completions], [p.problem.answer for p in local], config.answer_format, config.grading
    )
    records = [
        {
            "step": run.progress.step,
            "example_id": p.problem.id,
            "question": p.problem.question,
            "answer": p.problem.answer,
            "right": bool(is_right),
            "extracted": extract_answer(completion.text, config.answer_format),
            "length": len(completion.ids),
            "completion": completion.text,
        }
        for p, is_right, completion in zip(local, right, completions, strict=True)
    ]
    records = gather_object(records)
    run.log.write_evaluation(records)
    undecided = sum(gather_object([verdict is None for verdict in right]))
    return {
        "eval_accuracy": statistics.fmean(r["right"] for r in records),
        "eval_length": statistics.fmean(r["length"] for r in records),
        "eval_questions": len(records),
        **({"eval_undecided": undecided} if undecided else {}),
    }


def first_pass(run, decoder, problems):
    """Begin the history of problem_sampling pass_rate: how many of N samples of each problem are right.

    They are single paths, sampled from the weights the run starts from, by all processes; their seconds count
    as training. The run's folder keeps the counts, for a run that is resumed before its first checkpoint.
    Raises Stopped where the run is told to stop in the meantime. Every process must call it.
    """
    config, progress, samples = run.config, run.progress, run.config.pass_rate_samples
    if run.is_finished or not draws_by_pass_rate(config):
        return
    data = first_over_processes(run.inputs.get("data"))
    if progress.pass_rates is not None and progress.pass_rates["data"] == data:
        return
    path, made = run.folder / PASS_RATES, None
    if run.accelerator.is_main_process and progress.step == 0:
        made = _kept_pass(run, path)
    made = first_over_processes(made)
    if made is None:
        with run.timed("first_pass_seconds"):
            right = _sample_pass(run, decoder, problems) if samples else [0] * len(problems)
        made = {"right": right, "seconds": max_over_processes(run.seconds["first_pass_seconds"])}
        with together():
            if run.accelerator.is_main_process:
                write_whole(path, json.dumps(noted(config, run.inputs) | made) + "\n")
    right, seconds = made["right"], made["seconds"]
    wrong, prior = [samples - count for count in right], prior_worth(np.array(right), samples)
    progress.pass_rates = {"data": data, "right": right, "wrong": wrong, "prior": prior}
    progress.train_seconds += seconds
    if samples:
        rate, total = sum(right) / (samples * len(right)), samples * len(right)
        mixed = statistics.fmean(0 < count < samples for count in right)
        run.first_pass = {"first_pass_seconds": seconds, "first_pass_completions": total}
        run.first_pass |= {"first_pass_correct": rate}
        said = f"{total} samples of {counted(len(right), 'problem')} in {seconds:.0f} s, {rate:.3f} right"
        run.say(f"first pass: {said}; {mixed:.3f} of the problems were answered both right and wrong")
        if not rate:
            run.say("WARNING: nothing is right: no problem is drawn more often than another until one is")


def _kept_pass(run, path):
    """What an earlier start of this run kept of its first pass, or None."""
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        if differences(run.config, note, run.inputs):
            return None
        return {"right": note["right"], "seconds": note["seconds"]}
    except (OSError, ValueError, KeyError, TypeError):  # none, or one whose writing was cut off
        return None


def _sample_pass(run, decoder, problems):
    """How many samples of each problem are right, in the order of the problems of all processes."""
    config, G = run.config, run.config.pass_rate_samples
    here = shard(len(problems), run.accelerator)
    local, first = problems[here], here.start
    sampling = Sampling(config.max_completion_length, G, config.temperature)
    rows = max(G, len(run.local_groups) * config.num_generations)  # as many at once as in a step

    def sample():
        answers = []
        while (i := first + len(answers)) < here.stop:  # up to the next of the parts that share their draws
            part, offset = divmod(i, AT_ONCE)
            asked = [p.ids for p in problems[i : min(here.stop, (part + 1) * AT_ONCE)]]
            indices, seed = list(range(offset, offset + len(asked))), config.seed + FIRST_PASS * (part + 1)
            answers += decoder.complete(asked, sampling, seed, rows, indices)
        return answers

    answers = run.interruptible(decoder, sample)
    texts = [p.answered(c).text for p, row in zip(local, answers, strict=True) for c in row]
    references = [p.problem.answer for p in local for _ in range(G)]
    right = right_answers(texts, references, config.answer_format, config.grading)
    return gather_object([sum(map(bool, right[n * G : (n + 1) * G])) for n in range(len(local))])


def complete_interacting(decoder, prompts, sampling, seed, indices=None, batch_rows=None):
    """Decode the G samples of each prompt as paths that interact; yields (index, G Completions).

    As in `decoder.complete`, whose draws these are, a completion depends on its prompt's index and `seed`.
    """
    G, T = sampling.num_generations, sampling.max_new_tokens
    indices = list(range(len(prompts)) if indices is None else indices)
    rows = (max(indices, default=0) + 1) * G
    uniforms = rollout_uniforms(seed, 0, 0, rows, T).view(-1, G, T)
    keys = row_keys(seed, 0, 0, rows).view(-1, G)
    at_once = max(1, (batch_rows or 256) // G)
    for start in range(0, len(prompts), at_once):
        batch = indices[start : start + at_once]
        draws = uniforms[batch].flatten(0, 1), True, keys[batch].flatten()
        rollout = decoder.rollout(prompts[start : start + at_once], sampling, *draws)
        completions = decoder.completions(rollout)
        yield from ((i, completions[n * G : (n + 1) * G]) for n, i in enumerate(batch))

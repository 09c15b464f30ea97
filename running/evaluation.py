"""Evaluation on the held-out problems while a run goes, and single questions asked of interacting paths."""

import statistics

from accelerate.utils import gather_object
from tqdm import tqdm

from answers.formats import extract_answer
from decoding.controls import row_keys
from decoding.rollout import Sampling, rollout_uniforms
from learning.parallel import shard
from rewards import right_answers


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


def complete_interacting(
    decoder, prompts, sampling, seed, indices=None, batch_rows=None, must_be_finite=False
):
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
        decoder.check_logp(rollout.logp, must_be_finite)
        completions = decoder.completions(rollout)
        yield from ((i, completions[n * G : (n + 1) * G]) for n, i in enumerate(batch))

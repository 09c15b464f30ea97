"""Evaluation on the held-out problems while a run goes."""

import statistics

from accelerate.utils import gather_object

from answers.formats import extract_answer
from decoding.rollout import Sampling
from learning.parallel import shard
from rewards import right_answers


def held_out_accuracy(run, decoder, problems):
    """Share of held-out problems that greedy single-path decoding gets right, and the mean length in tokens.

    Every process decodes a part. The answers go into evaluations.jsonl as those after the steps that are
    finished. Raises Stopped where the run is told to stop in the meantime.
    """
    config, local = run.config, problems[shard(len(problems), run.accelerator)]
    prompts, greedy = [p.ids for p in local], Sampling(config.max_completion_length)
    answers = run.interruptible(decoder, lambda: decoder.complete(prompts, greedy))
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

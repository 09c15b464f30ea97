"""Evaluation on the held-out problems while a run goes."""

import statistics

from accelerate.utils import gather_object

from answers.formats import extract_answer
from learning.parallel import shard
from rewards import right_answers


def held_out_accuracy(run, decoder, problems):
    """Share of held-out problems that greedy single-path decoding gets right, and the mean length in tokens.

    Every process decodes a part. The answers go into evaluations.jsonl as those after the steps that are
    finished. Raises Stopped where the run is told to stop in the meantime.
    """
    config, local = run.config, problems[shard(len(problems), run.accelerator)]
    prompts = [p.ids for p in local]
    answers = run.interruptible(decoder, lambda: decoder.complete(prompts, config.max_completion_length))
    completions = [decoder.text(*pairs[0]) for pairs in answers]
    right = right_answers(
        completions, [p.problem.answer for p in local], config.answer_format, config.grading
    )
    records = [
        {
            "step": run.progress.step,
            "example_id": p.problem.id,
            "question": p.problem.question,
            "answer": p.problem.answer,
            "right": bool(is_right),
            "extracted": extract_answer(text, config.answer_format),
            "length": len(pairs[0][0]),
            "completion": text,
        }
        for p, is_right, pairs, text in zip(local, right, answers, completions, strict=True)
    ]
    records = gather_object(records)
    run.log.write_evaluation(records)
    return {
        "eval_accuracy": statistics.fmean(r["right"] for r in records),
        "eval_length": statistics.fmean(r["length"] for r in records),
        "eval_questions": len(records),
    }

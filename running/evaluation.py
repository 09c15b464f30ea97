"""Evaluation on the held-out problems while a run goes."""

import statistics

from accelerate.utils import gather_object

from answers.formats import extract_answer
from errors import Interrupted
from learning.parallel import shard
from rewards import right_answers


def unless_stopped(decoder, stop, action):
    """What action() gives; None where a process was told to stop meanwhile. All processes must call it, and no action may wait for another process."""
    decoder.interrupted = stop.asked
    try:
        result = action()
    except Interrupted:
        result = None
    finally:
        decoder.interrupted = None
    return None if stop.agreed() else result


def held_out_accuracy(accelerator, decoder, problems, config, stop, log, step):
    """Share of held-out problems that greedy single-path decoding gets right, and the mean length; every process decodes its part.

    None where the run was told to stop meanwhile. The answers go into the log's evaluations.jsonl as those after `step` steps.
    """
    mine = problems[shard(len(problems), accelerator)]
    answers = unless_stopped(
        decoder, stop, lambda: decoder.complete([p.ids for p in mine], config.max_completion_length)
    )
    if answers is None:
        return None
    texts = [decoder.text(*pairs[0]) for pairs in answers]
    right = right_answers(texts, [p.problem.answer for p in mine], config.answer_format, config.grading)
    rows = gather_object([
        {"step": step, "example_id": p.problem.id, "question": p.problem.question, "answer": p.problem.answer, "right": bool(is_right),
         "extracted": extract_answer(text, config.answer_format), "length": len(pairs[0][0]), "completion": text}
        for p, is_right, pairs, text in zip(mine, right, answers, texts, strict=True)
    ])  # fmt: skip
    log.write_evaluation(rows)
    return {
        "eval_accuracy": statistics.fmean(r["right"] for r in rows),
        "eval_length": statistics.fmean(r["length"] for r in rows),
        "eval_questions": len(rows),
    }

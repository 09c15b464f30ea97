"""Did it improve? Statistics of evaluations, alone and in pairs on the same questions.

    python grpo_eval.py --compare eval_runs/before eval_runs/after [eval_runs/other ...]

A side may be several evaluations (seeds), joined by commas: a_seed0,a_seed1. Then the interval is over seeds
and questions; with one evaluation a side the text speaks of these checkpoints, not of a method.
"""

from dataclasses import dataclass

import numpy as np

from errors import SettingError
from reporting.evaluation import Evaluation, question_scores, read_evaluation
from reporting.statistics import (
    DRAWS,
    bootstrap_means,
    holm,
    mid_p,
    over_questions,
    percentiles,
    smallest_difference,
)

SAME_ON_BOTH_SIDES = (
    "dataset split answer_format grading max_completion_length temperature top_p top_k num_samples"
).split()


@dataclass
class Side:
    """One side of a comparison: its evaluations' records, in the order of the questions of the first."""

    name: str
    runs: list  # of lists of records

    def scores(self):
        """(runs, questions): the mean of a question's samples."""
        return np.array([question_scores(run) for run in self.runs])

    def interval(self):
        """95%, of the accuracy: over questions, and over runs where there are several."""
        scores = self.scores()
        if len(scores) == 1:
            return over_questions(scores[0])[1:]
        return _interval(bootstrap_means(scores, np.random.default_rng(0)))


def _interval(draws):
    return [round(float(v), 4) for v in percentiles(draws)]


def read_side(name):
    """The evaluations of a side, folders joined by commas; questions in the order of its first."""
    evaluations = []
    for folder in name.split(","):
        try:
            evaluations.append(read_evaluation(folder))
        except (OSError, ValueError) as error:
            remedy = f"is not a folder that grpo_eval.py wrote ({type(error).__name__})"
            raise SettingError("compare", folder, remedy) from error
    first, *others = evaluations
    return [first, *(aligned(first, other, name) for other in others)]


def aligned(first, other, name):
    """`other` with its records in the order of the first's questions.

    Refuses other questions, prompts or settings, and says which.
    """
    differ = [
        f"{key} {first.settings[key]!r} and {other.settings.get(key)!r}"
        for key in SAME_ON_BOTH_SIDES
        if key in first.settings and first.settings[key] != other.settings.get(key)
    ]
    if differ:
        raise SettingError("compare", name, "the evaluations were made differently: " + ", ".join(differ))
    partners = {_question_key(record): record for record in other.records}
    missing = [r["doc_id"] for r in first.records if _question_key(r) not in partners]
    if missing or len(other.records) != len(first.records):
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        counts = f"{len(first.records)} there, {len(other.records)} here"
        remedy = f"has other questions or prompts: {counts}; {len(missing)} without a partner ({shown})"
        raise SettingError("compare", name, remedy)
    return Evaluation([partners[_question_key(record)] for record in first.records], other.settings)


def _question_key(record):
    return record["doc_id"], record["prompt_hash"], record["target"]


def compare_two(a, b):
    """The paired comparison of two sides as a dict, and for each question how much b is better."""
    left, right = a.scores(), b.scores()
    difference, questions = float(right.mean() - left.mean()), left.shape[1]
    single = len(left) == len(right) == 1
    generator = np.random.default_rng(0)
    if single:
        draws = bootstrap_means(right - left, generator)
    else:
        draws = bootstrap_differences(left, right, generator)
    gaps = right.mean(0) - left.mean(0)
    gained, lost = int((gaps > 0).sum()), int((gaps < 0).sum())
    if single and np.isin(left, (0, 1)).all() and np.isin(right, (0, 1)).all():
        test, p = "mid-p McNemar", mid_p(gained, lost)
    else:
        test, p = "bootstrap", p_of_draws(draws)
    return {
        "a": a.name,
        "b": b.name,
        "questions": questions,
        "accuracy_a": round(float(left.mean()), 4),
        "accuracy_a_ci95": a.interval(),
        "accuracy_b": round(float(right.mean()), 4),
        "accuracy_b_ci95": b.interval(),
        "difference": round(difference, 4),
        "difference_ci95": _interval(draws),
        "p": p,
        "test": test,
        "gained": gained,
        "lost": lost,
        "smallest_difference": round(smallest_difference(float(np.mean(gaps**2)), questions), 4),
    }, gaps


def bootstrap_differences(left, right, generator):
    """Draws (DRAWS,) of the difference over questions (the same on both sides) and over each side's runs."""
    questions = left.shape[1]
    draws = np.empty(DRAWS)
    for i in range(DRAWS):
        picked = generator.integers(questions, size=questions)
        left_runs = generator.integers(len(left), size=len(left))
        right_runs = generator.integers(len(right), size=len(right))
        draws[i] = right[right_runs][:, picked].mean() - left[left_runs][:, picked].mean()
    return draws


def p_of_draws(draws):
    """Two-sided, by how often the bootstrap's difference is on the other side of 0."""
    return float(min(1.0, 2 * (min((draws <= 0).sum(), (draws >= 0).sum()) + 1) / (len(draws) + 1)))


def compare(names):
    """The text and the dicts of a comparison of two or more sides, the first against each of the others."""
    evaluations, *rest = [read_side(name) for name in names]
    first, others = Side(names[0], [evaluation.records for evaluation in evaluations]), []
    for name, side in zip(names[1:], rest, strict=True):
        runs = [aligned(evaluations[0], evaluation, name).records for evaluation in side]
        others.append(Side(name, runs))
    compared = [compare_two(first, other) for other in others]
    results = [result for result, _ in compared]
    text = []
    for result, p in zip(results, holm([result["p"] for result in results]), strict=True):
        result["p_holm"] = p
    for other, (result, gaps) in zip(others, compared, strict=True):
        text += _described(result, len(results), seeds=len(first.runs) > 1 and len(other.runs) > 1)
        text += _examples("gained", gaps > 0, first, other) + _examples("lost", gaps < 0, first, other)
    return "\n".join(text), results


def _described(result, comparisons, seeds):
    """The lines that say what a comparison of two sides found."""
    low, high = result["difference_ci95"]
    test = f"{result['test']} p = {result['p']:.3g}"
    scope = "of these checkpoints, which says nothing of the method that made them"
    if seeds:
        scope = "over seeds and questions"
    corrected = ""
    if comparisons > 1:
        corrected = f", {result['p_holm']:.3g} after Holm's correction for {comparisons} comparisons"
    return [
        f"{result['b']} against {result['a']}, {result['questions']} questions: "
        f"{result['accuracy_a']:.3f} -> {result['accuracy_b']:.3f}, difference {result['difference']:+.3f} "
        f"(95% interval {low:+.3f} to {high:+.3f}, {scope}); {test}{corrected}",
        f"{result['gained']} questions gained, {result['lost']} lost; so many questions show a difference of "
        f"{result['smallest_difference']:.3f} in 4 of 5 cases.",
    ]


def _examples(word, changed, first, other, shown=5):
    """Lines for the first of the questions that changed: the reference, and both sides' answers."""
    lines = []
    for i in np.flatnonzero(changed)[:shown]:
        a, b = first.runs[0][i], other.runs[0][i]
        answers = f"{shown_answers(a)} | {shown_answers(b)}"
        lines.append(f"    {word} {a['doc_id']} (reference {a['target']!r}): {answers}")
    return lines


def shown_answers(record):
    """The answer to a question, or of several samples how many are right."""
    answers, right = record["filtered_resps"]["strict-match"], record["exact_match"]["strict-match"]
    return repr(answers[0]) if len(answers) == 1 else f"{round(sum(right))} of {len(right)} right"

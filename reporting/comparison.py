"""Did it improve? Statistics of evaluations, alone and in pairs on the same questions.

    python grpo_eval.py --compare eval_runs/before eval_runs/after [eval_runs/other ...]

A side may be several evaluations (seeds), joined by commas: a_seed0,a_seed1. Then the interval is over seeds and questions; with one a side the text
speaks of these checkpoints, not of a method.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from errors import SettingError
from reporting.files import read_yaml
from reporting.statistics import DRAWS, _resampled, holm, mid_p, over_questions, smallest_difference

SETTINGS = (
    "dataset",
    "split",
    "answer_format",
    "grading",
    "max_completion_length",
    "temperature",
    "top_p",
    "top_k",
    "num_samples",
)


@dataclass
class Side:
    """One side of a comparison: its evaluations' records, in the order of the questions of the first."""

    name: str
    runs: list  # of lists of records

    def scores(self):
        """(runs, questions): the mean of a question's samples."""
        return np.array(
            [[statistics.fmean(r["exact_match"]["strict-match"]) for r in run] for run in self.runs]
        )

    def interval(self):
        """95%, of the accuracy: over questions, and over runs where there are several."""
        scores = self.scores()
        if len(scores) == 1:
            return over_questions(scores[0])[1:]
        return [
            round(float(v), 4)
            for v in np.percentile(_resampled(scores, np.random.default_rng(0)), (2.5, 97.5))
        ]


def read_side(words):
    """The evaluations of a side: folders of grpo_eval.py, joined by commas."""
    runs, settings = [], None
    for word in words.split(","):
        folder = Path(word)
        try:
            records = [
                json.loads(line)
                for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
            ]
            report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
            report |= read_yaml(folder / "run_config.yaml")
        except (OSError, ValueError) as error:
            raise SettingError(
                "compare", word, f"is not a folder that grpo_eval.py wrote ({type(error).__name__})"
            ) from error
        runs.append((records, report))
        settings = settings or report
    side = Side(words, [runs[0][0]])
    for records, report in runs[1:]:
        side.runs.append(_aligned(side.runs[0], records, settings, report, words))
    return side, settings


def _aligned(first, records, settings, report, words):
    """Records in the order of the first's questions; refuses other questions, prompts or settings, and says which."""
    differ = [
        f"{k} {settings.get(k)!r} and {report.get(k)!r}"
        for k in SETTINGS
        if k in settings and settings.get(k) != report.get(k)
    ]
    if differ:
        raise SettingError("compare", words, "the evaluations were made differently: " + ", ".join(differ))
    found = {(r["doc_id"], r["prompt_hash"], r["target"]): r for r in records}
    missing = [r["doc_id"] for r in first if (r["doc_id"], r["prompt_hash"], r["target"]) not in found]
    if missing or len(records) != len(first):
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise SettingError(
            "compare",
            words,
            f"has other questions or prompts: {len(first)} there, {len(records)} here; {len(missing)} without a partner ({shown})",
        )
    return [found[r["doc_id"], r["prompt_hash"], r["target"]] for r in first]


def compare_two(a, b):
    """The paired comparison of two sides as a dict, and the questions on which they differ."""
    left, right = a.scores(), b.scores()
    difference, questions = float(right.mean() - left.mean()), left.shape[1]
    generator = np.random.default_rng(0)
    if len(left) == len(right) == 1:
        draws = _resampled(right - left, generator)  # the same questions on both sides
    else:
        draws = _resampled_sides(left, right, generator)
    greedy = bool(
        np.isin(left, (0, 1)).all() and np.isin(right, (0, 1)).all() and len(left) == len(right) == 1
    )
    gap = right.mean(0) - left.mean(0)
    gained, lost = int((gap > 0).sum()), int((gap < 0).sum())
    p = mid_p(gained, lost) if greedy else _p_of_draws(draws)
    smallest = smallest_difference(float(np.mean(gap**2)), questions)
    return {
        "a": a.name, "b": b.name, "questions": questions, "accuracy_a": round(float(left.mean()), 4), "accuracy_a_ci95": a.interval(),
        "accuracy_b": round(float(right.mean()), 4), "accuracy_b_ci95": b.interval(),
        "difference": round(difference, 4), "difference_ci95": [round(float(v), 4) for v in np.percentile(draws, (2.5, 97.5))], "p": p,
        "test": "mid-p McNemar" if greedy else "bootstrap", "gained": gained, "lost": lost, "smallest_difference": round(smallest, 4),
    }, gap  # fmt: skip


def _resampled_sides(left, right, generator):
    """Draws of the difference over questions (the same on both sides) and over each side's runs."""
    questions, draws = left.shape[1], np.empty(DRAWS)
    for i in range(DRAWS):
        pick = generator.integers(questions, size=questions)
        means = [
            side[generator.integers(len(side), size=len(side))][:, pick].mean() for side in (left, right)
        ]
        draws[i] = means[1] - means[0]
    return draws


def _p_of_draws(draws):
    """Two-sided, by how often the bootstrap's difference is on the other side of 0."""
    return float(min(1.0, 2 * (min((draws <= 0).sum(), (draws >= 0).sum()) + 1) / (len(draws) + 1)))


def shown_answers(record):
    """The answer to a question, or of several samples how many are right."""
    answers, right = record["filtered_resps"]["strict-match"], record["exact_match"]["strict-match"]
    return repr(answers[0]) if len(answers) == 1 else f"{round(sum(right))} of {len(right)} right"


def compare(words, shown=5):
    """The text and the dicts of a comparison of two or more sides, the first against each of the others."""
    (first, settings), *others = (read_side(word) for word in words)
    results, text = [], []
    for side, report in others:
        side.runs = [_aligned(first.runs[0], run, settings, report, side.name) for run in side.runs]
        results.append((*compare_two(first, side), side))
    adjusted = holm([found["p"] for found, _, _ in results])
    for (found, gap, side), p in zip(results, adjusted, strict=True):
        found["p_holm"] = p
        seeds = len(first.runs) > 1 and len(side.runs) > 1
        low, high = found["difference_ci95"]
        what = (
            "over seeds and questions"
            if seeds
            else "of these checkpoints, which says nothing of the method that made them"
        )
        text += [
            f"{side.name} against {first.name}, {found['questions']} questions: {found['accuracy_a']:.3f} -> {found['accuracy_b']:.3f}, "
            f"difference {found['difference']:+.3f} (95% interval {low:+.3f} to {high:+.3f}, {what}); {found['test']} p = {found['p']:.3g}"
            + (
                f", {p:.3g} after Holm's correction for {len(results)} comparisons"
                if len(results) > 1
                else ""
            ),
            f"{found['gained']} questions gained, {found['lost']} lost; so many questions show a difference of "
            f"{found['smallest_difference']:.3f} in 4 of 5 cases.",
        ]
        for word, sign in (("gained", 1), ("lost", -1)):
            for i in [i for i in range(len(gap)) if gap[i] * sign > 0][:shown]:
                a, b = first.runs[0][i], side.runs[0][i]
                pair = " | ".join(shown_answers(r) for r in (a, b))
                text.append(f"    {word} {a['doc_id']} (reference {a['target']!r}): {pair}")
    return "\n".join(text), [found for found, _, _ in results]

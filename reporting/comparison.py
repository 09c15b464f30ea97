"""Did it improve? Statistics of evaluations, alone and in pairs on the same questions.

    python grpo_eval.py --compare eval_runs/before eval_runs/after [eval_runs/other ...]

A side may be several evaluations (seeds), joined by commas: a_seed0,a_seed1. Then the interval is over seeds
and questions; with one evaluation a side the text speaks of these checkpoints, not of a method.
"""

import itertools
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from errors import SettingError, counted
from reporting.evaluation import Evaluation, question_scores, read_evaluation, undecided_answers
from reporting.files import write_whole
from reporting.page import comparison_page
from reporting.statistics import (
    SeedError,
    difference_draws,
    holm,
    mid_p,
    over_questions,
    p_of_draws,
    percentiles,
    rounded,
    scores_of,
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
    seeds: list = field(default_factory=list)  # what each run shares with its partner, see `seed_of`
    folders: list = field(default_factory=list)
    precisions: list = field(default_factory=list)  # that its models computed in, each once

    def scores(self):
        """(runs, questions): the mean of a question's samples."""
        return np.array([question_scores(run) for run in self.runs])

    def interval(self):
        """95%, of the accuracy: over questions, and over runs where there are several."""
        scores = self.scores()
        mean, *interval = over_questions(scores.mean(0))
        if len(scores) > 1:
            interval = SeedError.of(scores.mean(0), scores).interval(mean, interval)
        return rounded(*np.clip(interval, 0, 1))

    def not_right(self):
        """How many questions were skipped and answers are undecided, over all runs."""
        skipped = sum(record.get("skipped", False) for run in self.runs for record in run)
        return {"skipped": skipped, "undecided": sum(map(undecided_answers, self.runs))}


def read_side(name):
    """The evaluations of a side, folders joined by commas; questions in the order of its first."""
    folders, evaluations = name.split(","), []
    if len({Path(folder).resolve() for folder in folders}) < len(folders):
        raise SettingError("compare", name, "names an evaluation twice: each seed must be one of its own")
    for folder in folders:
        try:
            evaluations.append(read_evaluation(folder))
        except (OSError, ValueError) as error:
            remedy = "is not a folder that grpo_eval.py wrote: give one, such as eval_runs/NAME"
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
    partners = dict(zip(_question_keys(other.records), other.records, strict=True))
    keys = _question_keys(first.records)
    missing = [key[0] for key in keys if key not in partners]
    if missing or len(other.records) != len(first.records):
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        counts = f"{len(first.records)} there, {len(other.records)} here"
        remedy = f"has other questions or prompts: {counts}; {len(missing)} without a partner ({shown})"
        raise SettingError("compare", name, remedy)
    return Evaluation([partners[key] for key in keys], other.settings)


def _question_keys(records):
    """What tells each question from the others; of repeated ones also which it is, in their order."""
    seen, keys = Counter(), []
    for record in records:
        key = record["doc_id"], record["prompt_hash"], record["target"]
        keys.append((*key, seen[key]))
        seen[key] += 1
    return keys


def seed_of(evaluation):
    """What makes two evaluations a pair of seeds: the seed, and the start, order and draws of training.

    None where the evaluation notes no seed.
    """
    seed = evaluation.settings.get("seed")
    return None if seed is None else json.dumps([seed, evaluation.settings.get("trained")], sort_keys=True)


def precision_of(evaluation):
    """What its model computed in; None of a server's, of which nothing is known."""
    return None if evaluation.settings.get("api") else evaluation.settings.get("precision")


def paired_runs(a, b):
    """For each run of side a the index of the run of b with the same seed; None where they are no pairs."""
    seeds = Counter(a.seeds)
    if len(a.runs) < 2 or None in seeds or max(seeds.values(), default=2) > 1 or seeds != Counter(b.seeds):
        return None
    return [b.seeds.index(seed) for seed in a.seeds]


def compare_two(a, b):
    """The paired comparison of two sides as a dict, and for each question how much b is better."""
    left, right = a.scores(), b.scores()
    gaps = right.mean(0) - left.mean(0)
    difference, draws = float(gaps.mean()), difference_draws(gaps)
    interval = percentiles(draws)
    gained, lost = int((gaps > 0).sum()), int((gaps < 0).sum())
    smallest = smallest_difference(float(np.mean(gaps**2)), len(gaps))
    of_seeds = {}
    if len(left) > 1 or len(right) > 1:
        test, of_seeds, error = _over_seeds(a, b, gaps)
        p = error.p(difference, interval)
        smallest = max(smallest, float(np.ptp(interval)) / 2)  # what lies within the interval does not show
        interval = np.clip(error.interval(difference, interval), -1, 1)
        smallest = error.smallest_difference(smallest)
    elif np.isin(left, (0, 1)).all() and np.isin(right, (0, 1)).all():
        test, p = "mid-p McNemar", mid_p(gained, lost)
    else:
        test, p = "bootstrap", p_of_draws(draws)
    counts = {f"{key}_{x}": n for x, side in (("a", a), ("b", b)) for key, n in side.not_right().items()}
    return {
        "a": a.name,
        "b": b.name,
        "questions": len(gaps),
        "accuracy_a": round(float(left.mean()), 4),
        "accuracy_a_ci95": a.interval(),
        "accuracy_b": round(float(right.mean()), 4),
        "accuracy_b_ci95": b.interval(),
        **counts,
        "difference": round(difference, 4),
        "difference_ci95": rounded(*interval),
        "p": p,
        "test": test,
        **of_seeds,
        "gained": gained,
        "lost": lost,
        "smallest_difference": round(smallest, 4),
    }, gaps


def _over_seeds(a, b, gaps):
    """The test over seeds: its name, what the result says of the seeds, and the error over seeds."""
    left, right = a.scores(), b.scores()
    pairs = paired_runs(a, b)
    if pairs is None:
        each = {f"accuracy_of_seeds_{x}": rounded(*side.mean(1)) for x, side in (("a", left), ("b", right))}
        return "Welch's t over seeds", {"seeds": "unpaired", **each}, SeedError.of(gaps, left, right)
    differences = right[pairs] - left
    each = {"difference_of_seeds": rounded(*differences.mean(1))}
    return "paired t over seeds", {"seeds": "paired", **each}, SeedError.of(gaps, differences)


def compare(names):
    """The text and the dicts of a comparison of two or more sides, the first against each of the others."""
    return compare_sides(sides_of(names))


def compare_sides(sides):
    """As `compare`, of sides that are read already."""
    first, *others = sides
    compared = [compare_two(first, other) for other in others]
    results = [result for result, _ in compared]
    text = []
    for other, result, p in zip(others, results, holm([result["p"] for result in results]), strict=True):
        result |= {"p_holm": p, "evaluations_a": first.folders, "evaluations_b": other.folders}
    for other, (result, gaps) in zip(others, compared, strict=True):
        text += _described(result, len(results), len(first.runs), len(other.runs))
        text += _precision_lines(first, other)
        text += _examples("gained", gaps, first, other) + _examples("lost", -gaps, first, other)
    return "\n".join(text), results


def sides_of(names):
    """The sides of a comparison, folders joined by commas, all in the order of the first one's questions."""
    sides = [read_side(name) for name in names]
    reference = sides[0][0]
    made = []
    for name, short, evaluations in zip(names, short_names(names), sides, strict=True):
        runs = [aligned(reference, evaluation, name).records for evaluation in evaluations]
        seeds = [seed_of(evaluation) for evaluation in evaluations]
        precisions = sorted(set(filter(None, map(precision_of, evaluations))))
        made.append(Side(short, runs, seeds, name.split(","), precisions))
    return made


def short_names(names):
    """Names of the sides for people: the last parts of their folders, as many as tell the sides apart."""
    paths = [[Path(folder).parts for folder in name.split(",")] for name in names]
    short = names
    for parts in range(1, max(len(path) for side in paths for path in side) + 1):
        short = [_short_name(["/".join(path[-parts:]) for path in side]) for side in paths]
        if len(set(short)) == len(set(names)):
            break
    repeated = [short[:i].count(name) for i, name in enumerate(short)]
    return [f"{name} again ({n})" if n else name for name, n in zip(short, repeated, strict=True)]


def _short_name(folders):
    """What the folders of a side begin with, and how many seeds they are."""
    first, *others = folders
    if not others:
        return first
    alike = itertools.takewhile(lambda characters: len(set(characters)) == 1, zip(*folders, strict=False))
    common = "".join(characters[0] for characters in alike)
    if any(folder[len(common) :][:1].isdigit() for folder in folders):  # not the first digit of 10 and 11
        common = common.rstrip("0123456789")
    common = common.rstrip("-_./ ")
    return f"{common} ({len(folders)} seeds)" if common else f"{first} and {len(others)} more"


def _described(result, comparisons, seeds_a, seeds_b):
    """The lines that say what a comparison of two sides found."""
    low, high = result["difference_ci95"]
    test = f"{result['test']} p = {result['p']:.3g}"
    scope = "of these checkpoints, which says nothing of the method that made them"
    if seeds_a > 1 and seeds_b > 1:
        scope = "over seeds and questions"
    elif seeds_a > 1 or seeds_b > 1:
        scope = f"over questions and the seeds of {result['b' if seeds_b > 1 else 'a']} alone"
    corrected = ""
    if comparisons > 1:
        corrected = f", {result['p_holm']:.3g} after Holm's correction for {comparisons} comparisons"
    lines = [
        f"{result['b']} against {result['a']}, {counted(result['questions'], 'question')}: "
        f"{result['accuracy_a']:.3f} -> {result['accuracy_b']:.3f}, difference {result['difference']:+.3f} "
        f"(95% interval {low:+.3f} to {high:+.3f}, {scope}); {test}{corrected}",
        f"{counted(result['gained'], 'question')} gained, {result['lost']} lost; with so many questions, "
        f"a true difference of {result['smallest_difference']:.3f} would be found in 4 of 5 comparisons.",
    ]
    return lines + _seed_lines(result) + _not_right_lines(result)


def _precision_lines(first, other):
    """A line where not all was computed alike: each model is asked in what it was trained in."""
    if len({*first.precisions, *other.precisions}) < 2:
        return []
    each = (f"{side.name} in {' and '.join(side.precisions)}" for side in (first, other))
    remedy = "part of the difference may be rounding: grpo_eval.py --precision sets it for both"
    return [f"Not all was computed in one precision, {', '.join(each)}; {remedy}."]


def _seed_lines(result):
    """What each seed found."""
    if result.get("seeds") == "paired":
        each = ", ".join(f"{difference:+.3f}" for difference in result["difference_of_seeds"])
        return [f"Seeds are paired by start, order and draws; each one's difference: {each}."]
    if result.get("seeds") == "unpaired":
        sides = (result[f"accuracy_of_seeds_{x}"] for x in "ab")
        each = " | ".join(", ".join(f"{accuracy:.3f}" for accuracy in side) for side in sides)
        return [f"Seeds do not share start, order and draws, and are not paired; their accuracies: {each}."]
    return []


def _not_right_lines(result):
    """A line on questions without an answer and answers without a verdict, where there are any."""
    counts = {key: (result[f"{key}_a"], result[f"{key}_b"]) for key in ("skipped", "undecided")}
    words = [f"{key} {a} and {b}" for key, (a, b) in counts.items() if a or b]
    return [f"{'; '.join(words)}, which count as not right."] if words else []


def _examples(word, gains, first, other, shown=5):
    """Lines for the questions that changed most: the reference, and the answers of each side's seeds."""
    order = np.argsort(-gains, kind="stable")
    lines = []
    for i in order[: min(shown, int((gains > 0).sum()))]:
        record = first.runs[0][i]
        answers = " | ".join(shown_answers([run[i] for run in side.runs]) for side in (first, other))
        lines.append(f"    {word} {record['doc_id']} (reference {record['target']!r}): {answers}")
    return lines


def shown_answers(records):
    """The answers of a side's seeds to a question, and of several how many are right."""
    answers = [answer for record in records for answer in record["filtered_resps"]["strict-match"]]
    right = sum(map(round, (score for record in records for score in scores_of(record))))
    if len(answers) == 1:
        return repr(answers[0])
    counted = f"{right} of {len(answers)} right"
    return f"{counted} ({', '.join(map(repr, answers))})" if len(answers) == len(records) else counted


def write_comparison_page(sides, results, folder, name):
    """Write name.html: every question with the answers of all sides, beside name.svg."""
    runs = {side.name: side.runs for side in sides}
    folders = {side.name: ", ".join(side.folders) for side in sides}
    write_whole(folder / f"{name}.html", comparison_page(runs, folders, results, folder / f"{name}.svg"))


def write_comparison(results, folder, name=None):
    """Write the results as name.json into a folder, and return the name; no file is overwritten.

    Without a name it is `compare`, or the first of compare-2, compare-3, ... that is free.
    """
    names = [name] if name else ["compare", *(f"compare-{n}" for n in range(2, 10_000))]
    for free in names:
        if not any((folder / f"{free}.{kind}").exists() for kind in ("svg", "png", "html")):
            try:
                with open(folder / f"{free}.json", "x", encoding="utf-8") as file:
                    file.write(json.dumps(results, indent=2) + "\n")
                return free
            except FileExistsError:
                continue
    raise SettingError("name", name, f"{folder} holds a comparison of that name: give another --name")

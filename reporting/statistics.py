"""Statistics of evaluations: intervals, pass@k, maj@k, paired tests."""

import math
from collections import Counter
from statistics import fmean

import numpy as np
from scipy import stats

from answers.numbers import parse_number

DRAWS = 10_000  # of a bootstrap
DRAWS_AT_ONCE = 500


def wilson(successes, trials):
    """95% interval of a share, (low, high), by Wilson's score method."""
    interval = stats.binomtest(int(successes), int(trials)).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def pass_at_k(samples, right, k):
    """Chance that one of k answers is right, unbiased, from `right` of `samples` that were.

    Chen et al. 2021, https://arxiv.org/abs/2107.03374, eq. 1.
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(answers, scores):
    """The score of the answer that most samples give, 1.0 or 0.0; 0.0 where no sample gives one.

    Answers that are equal numbers count as one. Of several with the same count, the first given wins.
    """
    keys = [_vote(answer) for answer in answers]
    counts = Counter(key for key in keys if key is not None)
    if not counts:
        return 0.0
    winner, _ = counts.most_common(1)[0]  # in the order given where counts are equal
    return scores[keys.index(winner)]


def _vote(answer):
    """What makes two answers the same: their number, else their text."""
    if answer in (None, ""):
        return None
    number = parse_number(answer)
    return answer if number is None else number


def over_questions(scores):
    """Mean and 95% interval over questions, [mean, low, high].

    Wilson's interval where every score is 0 or 1, else a percentile bootstrap.
    """
    scores = np.asarray(scores, dtype=float)
    mean = float(scores.mean())
    if np.isin(scores, (0, 1)).all():
        low, high = wilson(scores.sum(), len(scores))
    elif len(scores) < 2:
        low, high = 0.0, 1.0
    else:
        low, high = percentiles(bootstrap_means(scores[None], np.random.default_rng(0)))
    return [round(float(v), 4) for v in (mean, low, high)]


def percentiles(draws):
    """The bounds of a 95% bootstrap interval."""
    return np.percentile(draws, (2.5, 97.5))


def sampled_statistics(records):
    """pass@k and maj@k for k = 1, 2, 4, ... and all, and the mean, each [mean, low, high] over questions.

    maj@k is the mean over n // k votes of k consecutive samples: unbiased as pass@k is, from fewer of the
    possible choices.
    """
    scores = [r["exact_match"]["strict-match"] for r in records]
    answers = [r["filtered_resps"]["strict-match"] for r in records]
    n = len(scores[0])
    ks = sorted({2**i for i in range(n.bit_length())} | {n})
    report = {}
    for k in ks:
        report[f"pass@{k}"] = over_questions([pass_at_k(n, round(sum(s)), k) for s in scores])
    for k in ks[1:]:
        shares = [_share_of_votes(a, s, k) for a, s in zip(answers, scores, strict=True)]
        report[f"maj@{k}"] = over_questions(shares)
    return {**report, f"mean@{n}": over_questions([fmean(s) for s in scores])}


def _share_of_votes(answers, scores, k):
    """Of the votes among k consecutive samples of a question, the share that is right."""
    starts = range(0, len(scores) - k + 1, k)
    return fmean(majority(answers[i : i + k], scores[i : i + k]) for i in starts)


def bootstrap_means(scores, generator):
    """Means of bootstrap draws over questions, and over runs where there are several.

    scores (runs, questions) -> (DRAWS,)
    """
    runs, questions = scores.shape
    means = np.empty(DRAWS)
    for start in range(0, DRAWS, DRAWS_AT_ONCE):
        drawn = slice(start, start + DRAWS_AT_ONCE)
        picked = generator.integers(questions, size=(DRAWS_AT_ONCE, questions))
        if runs == 1:
            means[drawn] = scores[0][picked].mean(1)
        else:
            picked_runs = generator.integers(runs, size=(DRAWS_AT_ONCE, runs))
            means[drawn] = scores[picked_runs[:, :, None], picked[:, None, :]].mean((1, 2))
    return means


def mid_p(gained, lost):
    """Two-sided mid-p McNemar test of `gained` against `lost` questions.

    Fagerland et al. 2013, https://doi.org/10.1186/1471-2288-13-91.
    """
    changed, fewer = gained + lost, min(gained, lost)
    if changed == 0:
        return 1.0
    return min(1.0, float(2 * stats.binom.cdf(fewer, changed, 0.5) - stats.binom.pmf(fewer, changed, 0.5)))


def smallest_difference(discordant, questions):
    """The difference in accuracy that a paired test at 5% on so many questions shows in 4 of 5 cases.

    discordant: the share of questions on which the sides differ (Connor 1987).
    """
    return (1.96 + 0.84) * math.sqrt(max(discordant, 1.0 / questions) / questions)


def holm(p_values):
    """Holm's correction for several comparisons, in the order given."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted

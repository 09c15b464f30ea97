"""Statistics of evaluations: intervals, pass@k, maj@k, paired tests."""

import math
import statistics
from collections import Counter

import numpy as np
from scipy import stats

from answers.numbers import parse_number

DRAWS = 10_000  # of a bootstrap


def pass_at_k(samples, right, k):
    """Chance that one of k answers is right, unbiased, from `right` of `samples` that were (Chen et al. 2021, https://arxiv.org/abs/2107.03374, eq. 1)."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(answers, scores):
    """Whether the answer that most samples give is right: 1.0 or 0.0; answers that are equal numbers are one; of several the first that was given."""
    keys = [
        None if a in (None, "") else parse_number(a) if parse_number(a) is not None else a for a in answers
    ]
    given = Counter(key for key in keys if key is not None)
    if not given:
        return 0.0
    winner = max(given, key=lambda key: (given[key], -keys.index(key)))
    return scores[keys.index(winner)]


def over_questions(scores):
    """Mean and 95% interval over questions: Wilson's where every score is 0 or 1, a percentile bootstrap else. [mean, low, high]"""
    scores = np.asarray(scores, dtype=float)
    mean = float(scores.mean())
    if np.isin(scores, (0, 1)).all():
        found = stats.binomtest(int(scores.sum()), len(scores)).proportion_ci(method="wilson")
        return [round(v, 4) for v in (mean, float(found.low), float(found.high))]
    if len(scores) < 2:
        return [round(mean, 4), 0.0, 1.0]
    means = _resampled(scores[None], np.random.default_rng(0))
    return [round(float(v), 4) for v in (mean, *np.percentile(means, (2.5, 97.5)))]


def sampled_statistics(records):
    """pass@k and maj@k for k = 1, 2, 4, ... and all, and the mean, each [mean, low, high] over questions.

    maj@k is the mean over n // k votes of k samples that follow each other: unbiased as pass@k is, from fewer of the choices there are.
    """
    scores = [r["exact_match"]["strict-match"] for r in records]
    n = len(scores[0])
    ks = sorted({*(2**i for i in range(n.bit_length()) if 2**i <= n), n})
    found = {f"pass@{k}": over_questions([pass_at_k(n, round(sum(s)), k) for s in scores]) for k in ks}
    answers = [r["filtered_resps"]["strict-match"] for r in records]
    for k in ks[1:]:
        votes = [
            [majority(a[i : i + k], s[i : i + k]) for i in range(0, n - k + 1, k)]
            for a, s in zip(answers, scores, strict=True)
        ]
        found[f"maj@{k}"] = over_questions([statistics.fmean(v) for v in votes])
    return {**found, f"mean@{n}": over_questions([statistics.fmean(s) for s in scores])}


def _resampled(scores, generator):
    """Means of bootstrap draws over questions, and over runs where there are several: scores (runs, questions) -> (DRAWS,)."""
    runs, questions = scores.shape
    means = np.empty(DRAWS)
    for start in range(0, DRAWS, 500):
        pick = generator.integers(questions, size=(500, questions))
        if runs == 1:
            means[start : start + 500] = scores[0][pick].mean(1)
        else:
            which = generator.integers(runs, size=(500, runs))
            means[start : start + 500] = scores[which[:, :, None], pick[:, None, :]].mean((1, 2))
    return means


def mid_p(gained, lost):
    """Two-sided mid-p McNemar test of `gained` against `lost` questions (Fagerland et al. 2013, https://doi.org/10.1186/1471-2288-13-91)."""
    n, few = gained + lost, min(gained, lost)
    if n == 0:
        return 1.0
    return min(1.0, float(2 * stats.binom.cdf(few, n, 0.5) - stats.binom.pmf(few, n, 0.5)))


def smallest_difference(discordant, questions):
    """The difference in accuracy that a paired test on so many questions shows in 4 of 5 cases at 5%, with this share of discordant ones (Connor 1987)."""
    return (1.96 + 0.84) * math.sqrt(max(discordant, 1.0 / questions) / questions)


def holm(p_values):
    """Holm's correction for several comparisons, in the order given."""
    order, adjusted, largest = (
        sorted(range(len(p_values)), key=lambda i: p_values[i]),
        [0.0] * len(p_values),
        0.0,
    )
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted

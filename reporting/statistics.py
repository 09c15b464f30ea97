"""Statistics of evaluations: intervals, pass@k, maj@k, paired tests, tests over seeds."""

import math
from collections import Counter
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from scipy import optimize, stats

from answers.numbers import parse_number

DRAWS = 20_000  # of a mean's distribution
Z = stats.norm.ppf(0.975)  # standard errors of a 95% interval


def scores_of(record, grading="strict-match"):
    """1.0 for each answer of a record that is right, else 0.0: also for None, an undecided one."""
    return [float(score or 0.0) for score in record["exact_match"][grading]]


def clopper_pearson(successes, trials):
    """95% interval of a share, (low, high), by Clopper and Pearson's exact method.

    It covers in at least 95% of all cases whatever the share; Wilson's covers 84% near 0 and 1 at n = 20.
    """
    low = stats.beta.ppf(0.025, successes, trials - successes + 1) if successes > 0 else 0.0
    high = stats.beta.ppf(0.975, successes + 1, trials - successes) if successes < trials else 1.0
    return float(low), float(high)


def pass_at_k(samples, right, k):
    """Chance that one of k answers is right, unbiased, from `right` of `samples` that were.

    Chen et al. 2021, https://arxiv.org/abs/2107.03374, eq. 1.
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(answers, scores, equal=None):
    """The score of the answer that most samples give, 1.0 or 0.0; 0.0 where no sample gives one.

    Which answers count as one: see `votes`. Of several with the same count, the one given first wins.
    """
    return _winner(votes(answers, scores, equal), scores)


def _winner(voted, scores):
    counts = Counter(vote for vote in voted if vote is not None)
    if not counts:
        return 0.0
    winner, _ = counts.most_common(1)[0]  # in the order given where counts are equal
    return scores[voted.index(winner)]


def votes(answers, scores, equal=None):
    """For each sample what it votes for; None where it gives no answer.

    Right answers all say what the reference says, and are one vote. Of the others equal numbers are one, or
    equal texts. With `equal`, the predicate of a grading by meaning (True, False, or None where it cannot
    tell, which counts as different), other texts that are equal are one as well. It is asked once for a pair
    of texts at the most, and only where some sample is right: elsewhere no vote can be.
    """
    words = [_normal_form(answer, equal) for answer in answers]
    wrong = sorted(
        {w for w, score in zip(words, scores, strict=True) if w is not None and not score}, key=str
    )
    names = {word: word for word in wrong}
    if equal is not None and any(scores):
        names = {word: group[0] for group in _groups(wrong, equal) for word in group}
    is_right = ("right",)  # no text and no number
    return [None if w is None else is_right if s else names[w] for w, s in zip(words, scores, strict=True)]


def _normal_form(answer, equal):
    """The answer's number, else its text; a grading by meaning gets the text, with single spaces."""
    if answer in (None, ""):
        return None
    if equal is not None:
        return " ".join(answer.split())
    number = parse_number(answer)
    return answer if number is None else number


def _groups(texts, equal):
    """Lists of texts that are equal, or are linked by others that are; the same ones in whatever order."""
    groups = []
    for text in texts:
        linked = [group for group in groups if any(equal(other, text) for other in group)]
        groups = [group for group in groups if group not in linked]
        groups.append([other for group in linked for other in group] + [text])
    return groups


def over_questions(scores):
    """Mean and 95% interval over questions, [mean, low, high]; scores are from 0 to 1.

    Clopper and Pearson's interval where every score is 0 or 1. Else Gaffke's, which is the same there: the
    questions get random weights, with one more question that is wrong for the low end and right for the high
    one (Learned-Miller and Thomas 2019, https://arxiv.org/abs/1905.06208). It never has the width 0.
    """
    scores = np.asarray(scores, dtype=float)
    mean = float(scores.mean())
    if np.isin(scores, (0, 1)).all():
        low, high = clopper_pearson(scores.sum(), len(scores))
    elif len(scores) < 2:
        low, high = 0.0, 1.0
    else:
        means, more = weighted_means(scores)
        low, high = np.quantile(means, 0.025), np.quantile(means + more, 0.975)
    return rounded(mean, low, high)


def rounded(*values):
    return [round(float(value), 4) for value in values]


def weighted_means(scores):
    """Draws of the mean under random weights of the questions, and the weight of one more that scores 0.

    Weights are uniform over all that sum to 1 (Rubin's Bayesian bootstrap); both (DRAWS,). Questions of the
    same score are drawn together.
    """
    generator = np.random.default_rng(0)
    more = generator.standard_exponential(DRAWS)
    total, weighted = more.copy(), np.zeros(DRAWS)
    for value, count in zip(*np.unique(scores, return_counts=True), strict=True):
        weights = generator.standard_gamma(count, DRAWS)
        total += weights
        weighted += value * weights
    return weighted / total, more / total


def difference_draws(gaps):
    """Draws (2 * DRAWS,) of the mean of paired differences, each from -1 to 1.

    As in `over_questions`, but the one more question is lost in half of the draws and gained in the other
    half. Where the gaps are -1, 0 and 1, the share of draws on either side of 0 is the mid-p McNemar test's.
    """
    means, more = weighted_means(gaps)
    return np.concatenate([means - more, means + more])


def percentiles(draws):
    """The bounds of a 95% interval."""
    return np.quantile(draws, (0.025, 0.975))


def sampled_statistics(records, equal=None):
    """pass@k and maj@k for k = 1, 2, 4, ... and all, and the mean, each [mean, low, high] over questions.

    maj@k is the mean over n // k votes of k consecutive samples: unbiased as pass@k is, from fewer of the
    possible choices. `equal`: see `votes`.
    """
    scores = [scores_of(r) for r in records]
    answers = [r["filtered_resps"]["strict-match"] for r in records]
    voted = [votes(*row, equal) for row in zip(answers, scores, strict=True)]
    n = len(scores[0])
    ks = sorted({2**i for i in range(n.bit_length())} | {n})
    report = {}
    for k in ks:
        report[f"pass@{k}"] = over_questions([pass_at_k(n, round(sum(s)), k) for s in scores])
    for k in ks[1:]:
        shares = [_share_of_votes(v, s, k) for v, s in zip(voted, scores, strict=True)]
        report[f"maj@{k}"] = over_questions(shares)
    return {**report, f"mean@{n}": over_questions([fmean(s) for s in scores])}


def _share_of_votes(voted, scores, k):
    """Of the votes among k consecutive samples of a question, the share that is right."""
    starts = range(0, len(scores) - k + 1, k)
    return fmean(_winner(voted[i : i + k], scores[i : i + k]) for i in starts)


def mid_p(gained, lost):
    """Two-sided mid-p McNemar test of `gained` against `lost` questions.

    Fagerland et al. 2013, https://doi.org/10.1186/1471-2288-13-91.
    """
    changed, fewer = gained + lost, min(gained, lost)
    return min(1.0, float(2 * stats.binom.cdf(fewer, changed, 0.5) - stats.binom.pmf(fewer, changed, 0.5)))


def p_of_draws(draws):
    """Two-sided, by how often a drawn difference is on the other side of 0."""
    return float(min(1.0, 2 * (min((draws <= 0).sum(), (draws >= 0).sum()) + 1) / (len(draws) + 1)))


@dataclass(frozen=True)
class SeedError:
    """How much a mean would vary with other seeds, and what it varies with other questions beyond that.

    error: standard error over seeds; freedom: degrees of freedom of Student's t; beyond: from 0 to 1, the
    part of the margin over questions that is not the chance of single answers, which `error` holds already.
    """

    error: float
    freedom: float
    beyond: float

    @classmethod
    def of(cls, means, *sides):
        """sides: for each the scores (seeds, questions) that the means (questions,) are of, or differ by.

        Paired seeds are one side, that of their differences, with S - 1 degrees of freedom; two sides have
        Welch's. One seed has no spread and adds none.
        """
        several = [side for side in sides if len(side) > 1]
        spread = [(np.var(side.mean(1), ddof=1) / len(side), len(side) - 1) for side in several]
        variance = sum(part for part, _ in spread)
        freedom = min(df for _, df in spread)
        if variance > 0:
            freedom = variance**2 / sum(part**2 / df for part, df in spread)
        by_chance = sum(np.var(side, axis=0, ddof=1).mean() / len(side) for side in several)
        in_all = np.var(means, ddof=1) if len(means) > 1 else 0.0
        beyond = math.sqrt(max(0.0, 1 - by_chance / in_all)) if in_all > 0 else 1.0
        return cls(math.sqrt(variance), float(freedom), beyond)

    def margin(self, of_questions, quantile):
        """Both margins added as squares (Zou and Donner 2008), and never below that of the questions.

        quantile: of Student's t.
        """
        return max(of_questions, math.hypot(self.beyond * of_questions, quantile * self.error))

    def interval(self, mean, of_questions):
        """A 95% interval, (low, high), from the one over questions."""
        quantile = stats.t.ppf(0.975, self.freedom)
        low, high = (self.margin(abs(mean - end), quantile) for end in of_questions)
        return mean - low, mean + high

    def p(self, difference, of_questions):
        """Two-sided p of a difference: the level at which its interval would end on 0."""
        if difference == 0:
            return 1.0
        standard_error = abs(difference - of_questions[0 if difference > 0 else 1]) / Z

        def over_zero(level):
            """How far an interval at this level reaches over 0."""
            margin = stats.norm.isf(level / 2) * standard_error
            return self.margin(margin, stats.t.isf(level / 2, self.freedom)) - abs(difference)

        smallest = 1e-12
        return smallest if over_zero(smallest) < 0 else float(optimize.brentq(over_zero, smallest, 1.0))

    def smallest_difference(self, of_questions):
        """What 4 of 5 comparisons would show, from the same over questions."""
        return self.margin(of_questions, stats.t.ppf(0.975, self.freedom) + stats.t.ppf(0.8, self.freedom))


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

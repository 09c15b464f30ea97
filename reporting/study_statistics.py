"""Statistics of a study: tests of differences paired by seed, their power, numbers of seeds, and the verdict.

A difference is one arm's accuracy minus another's in the runs of one seed; the seeds are the sample.
"""

import math
import warnings
from bisect import bisect_left
from functools import cache

import numpy as np
from scipy import integrate, optimize, stats

BOOTSTRAP_DRAWS = 10_000
MOST_SEEDS = 1024  # that `seeds_needed` counts up to
NO_SPREAD = 1e-9  # of paired differences: what rounding leaves where all are alike


def paired_t(differences, level=0.95):
    """The paired t over seeds: two-sided p, and the low and high end of the interval at `level`.

    differences: (..., S), S at least 2; each result is (...,). Without any spread p is 0, or 1 where all
    differences are 0.
    """
    test = _t_test(differences)
    interval = test.confidence_interval(level)
    return np.nan_to_num(test.pvalue, nan=1.0), interval.low, interval.high


def tost(differences, margin):
    """p of two one-sided t tests, (...,): whether the mean difference lies within +-margin (Schuirmann 1987).

    differences: (..., S), S at least 2.
    """
    above = _t_test(differences, -margin, "greater").pvalue
    below = _t_test(differences, margin, "less").pvalue
    return np.nan_to_num(np.maximum(above, below), nan=1.0)


def _t_test(differences, mean=0.0, alternative="two-sided"):
    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # differences that are all alike
        return stats.ttest_1samp(differences, mean, axis=-1, alternative=alternative)


def t_power(effect, deviation, seeds, alpha=0.05):
    """The chance that the paired t finds a true difference, from the noncentral t.

    deviation: the standard deviation of the paired differences.
    """
    if deviation == 0:
        return 1.0 if effect else alpha
    return _noncentral_power(abs(effect) * math.sqrt(seeds) / deviation, seeds, alpha)


def _noncentral_power(noncentrality, seeds, alpha):
    freedom = seeds - 1
    limit = stats.t.isf(alpha / 2, freedom)
    above = stats.nct.sf(limit, freedom, noncentrality)
    below = np.nan_to_num(stats.nct.cdf(-limit, freedom, noncentrality))  # no number where it is nearly 0
    return float(above + below)


def tost_power(margin, deviation, seeds, alpha=0.05, effect=0.0):
    """The chance that TOST finds two arms equal within +-margin whose true difference is `effect`.

    Exact (Owen 1965; Phillips 1990), as an integral over the standard deviation that the seeds show: given
    it, the mean difference is normal and must lie within the margin less the t's part on either side.
    """
    if deviation == 0:
        return 1.0 if abs(effect) < margin else 0.0
    freedom, error = seeds - 1, deviation / math.sqrt(seeds)
    limit = stats.t.isf(alpha, freedom)

    def found(ratio):
        """The density of shown over true deviation, times the chance that TOST succeeds at it."""
        room = margin - limit * error * ratio
        inside = stats.norm.cdf((room - effect) / error) - stats.norm.cdf((-room - effect) / error)
        return stats.chi.pdf(ratio, freedom, scale=1 / math.sqrt(freedom)) * inside

    # Where the margin is used up, and beyond 12 deviations of the ratio, there is nothing to add.
    lowest = max(0.0, 1 - 12 / math.sqrt(freedom))
    highest = min(margin / (limit * error), 1 + 12 / math.sqrt(freedom))
    return float(integrate.fixed_quad(found, lowest, highest, n=200)[0]) if highest > lowest else 0.0


def seeds_needed(power_of, power=0.8):
    """The smallest number of seeds whose power_of(seeds) is at least `power`; None above MOST_SEEDS."""
    enough = 2
    while power_of(enough) < power:
        enough *= 2
        if enough > MOST_SEEDS:
            return None
    return bisect_left(range(enough), power, lo=max(2, enough // 2), key=power_of)


def smallest_effect(deviation, seeds, alpha=0.05, power=0.8):
    """The true difference that the paired t finds with the chance `power`."""
    if deviation == 0:
        return 0.0
    reached = optimize.brentq(lambda shift: _noncentral_power(shift, seeds, alpha) - power, 0.0, 200.0)
    return reached * deviation / math.sqrt(seeds)


def crossed_bootstrap(differences, level=0.95):
    """The low and high end of a percentile interval of the mean of differences (S, Q).

    Seeds are drawn, and questions are drawn once for all seeds, since all of them answer the same ones.
    """
    seeds, questions = differences.shape
    of_seeds = question_counts(questions) @ differences.astype(np.float32).T / questions  # (draws, S)
    drawn = np.random.default_rng(1).multinomial(seeds, [1 / seeds] * seeds, BOOTSTRAP_DRAWS)
    means = (of_seeds * drawn).sum(1) / seeds
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@cache
def question_counts(questions):
    """How often each question is drawn, (draws, Q) float32: the same draws for all comparisons."""
    generator = np.random.default_rng(0)
    counts = np.empty((BOOTSTRAP_DRAWS, questions), np.float32)
    for row in counts:
        row[:] = np.bincount(generator.integers(questions, size=questions), minlength=questions)
    return counts


def compared(differences, margin, alpha=0.05, power=0.8):
    """Every number of one comparison from its differences (S,) or, by question, (S, Q).

    With one seed there is a difference, and no test.
    """
    differences = np.asarray(differences, dtype=float)
    by_seed = differences.mean(1) if differences.ndim > 1 else differences
    found = {"seeds": len(by_seed), "difference": by_seed.mean() if len(by_seed) else None}
    if len(by_seed) < 2:
        return found
    p, low, high = paired_t(by_seed)
    deviation = by_seed.std(ddof=1)
    found |= {
        "difference_ci95": [low, high],
        "difference_ci_tost": list(paired_t(by_seed, 1 - 2 * alpha)[1:]),  # within the margin: equivalent
        "deviation": deviation,
        "freedom": len(by_seed) - 1,
        "p": p,
        "tost_p": tost(by_seed, margin),
        "smallest_effect": smallest_effect(deviation, len(by_seed), alpha, power),
    }
    if differences.ndim > 1:
        found["bootstrap_ci95"] = list(crossed_bootstrap(differences))
    return found


def remark_on_spread(rows):
    """A sentence on tests whose seeds all show one difference, or "": their p is 0 whatever their number.

    rows: comparisons with the numbers of `compared`.
    """
    alike = [row for row in rows if "p" in row and row["deviation"] < NO_SPREAD]
    pairs = ", ".join(f"{row['arm']} against {row['other']}" for row in alike)
    what = f"all seeds show the same difference ({pairs}), so there is no spread to test it by"
    remedy = "p and the interval are no evidence, and more questions or samples would show one"
    return f"Beware: {what}: {remedy}." if alike else ""


def look(differences, plan):
    """How many seeds a study needs, from the spread of its first paired differences (S,) alone.

    The larger of the t's number for `effect` and TOST's for `margin` at a true difference of 0, within
    fewest_seeds and most_seeds; `enough` is whether that many reach the power.
    """
    deviation, alpha, power = float(np.std(differences, ddof=1)), plan["alpha"], plan["power"]
    needed = {
        "t": seeds_needed(lambda seeds: t_power(plan["effect"], deviation, seeds, alpha), power),
        "tost": seeds_needed(lambda seeds: tost_power(plan["margin"], deviation, seeds, alpha), power),
    }
    most = max(MOST_SEEDS + 1 if number is None else number for number in needed.values())
    seeds = min(max(most, plan["fewest_seeds"]), plan["most_seeds"])
    found = {"sd": deviation, "seeds": seeds, "needed": needed, "enough": most <= plan["most_seeds"]}
    reached = {
        "t": t_power(plan["effect"], deviation, seeds, alpha),
        "tost": tost_power(plan["margin"], deviation, seeds, alpha),
    }
    return found | {"power_reached": reached}


def read_verdict(comparison, arms, alpha=0.05):
    """What a study found: the first of its verdicts that holds, and of `helps` the second part (or None).

    comparison(arm, other): the numbers of `compared` for arm minus other. arms: plan.json's `verdict`.
    """
    treatment, baseline, controls = arms["treatment"], arms["baseline"], arms["controls"]

    def above(arm, other):
        found = comparison(arm, other)
        return found["difference"] > 0 and found["p"] < alpha

    def alike(arm, other):
        return comparison(arm, other)["tost_p"] < alpha

    found = comparison(treatment, baseline)
    if found["difference"] < 0 and found["p"] < alpha:
        return "hurts", None
    if alike(treatment, baseline):
        return "no useful effect", None
    if above(treatment, baseline):
        if all(above(treatment, control) for control in controls):
            return "helps", _second_part(above, alike, treatment, arms.get("averaging"))
        if any(alike(treatment, control) and above(control, baseline) for control in controls):
            return "acts as noise", None
    return "undecided", None


def _second_part(above, alike, treatment, averaging):
    if averaging is None:
        return None
    if above(treatment, averaging):
        return "and choosing matters"
    return "and averaging is enough" if alike(treatment, averaging) else "undecided which"

"""How often the 95% intervals of an evaluation hold the true value, and equal methods seem to differ.

    python benchmarks/coverage.py [--trials 2000]

For each measure and number of questions: the lowest and the mean coverage over true rates from 0 to 1, where
all questions are alike and where most are easy or hard, and the mean width. What has few possible outcomes
(accuracy, the difference of two greedy evaluations) is summed up exactly over them, the rest is simulated.
"""

import argparse
import itertools
import math
import sys
from functools import cache

import numpy as np
from scipy import special, stats

from common import ROOT, write_results

sys.path.insert(0, str(ROOT))
from reporting import statistics
from reporting.comparison import Side, compare_two
from reporting.statistics import difference_draws, majority, over_questions, pass_at_k, percentiles

RATES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99, 1.0)
QUESTIONS = (20, 50, 200)
SAMPLES = 4
UNEVEN = 1.0  # concentration of the questions' own rates, a beta distribution; None: all alike
SEEDS, SPREAD = 3, 0.05
WRONG = (0.5, 0.3, 0.2)  # shares of the wrong answers that a vote may go to


def exact_accuracy(n):
    """(coverage, width) of accuracy for each rate, summed over all counts."""
    intervals = np.array([over_questions([1] * k + [0] * (n - k))[1:] for k in range(n + 1)])
    rates = sorted({*RATES, *np.linspace(0.005, 0.5, 100).round(4)})
    return [covered(stats.binom.pmf(range(n + 1), n, rate), intervals, rate) for rate in rates]


def exact_difference(n):
    """The same of the paired difference, for shares of gained and lost questions."""
    outcomes = [(b, c) for b in range(n + 1) for c in range(n + 1 - b)]
    gaps = [np.repeat([1.0, -1.0, 0.0], (b, c, n - b - c)) for b, c in outcomes]
    intervals = np.array([percentiles(difference_draws(gap)) for gap in gaps])
    counts = np.array([(b, c, n - b - c) for b, c in outcomes])
    found = []
    for gained, lost in itertools.product(RATES, RATES):
        if gained + lost <= 1:
            shares = (gained, lost, max(0.0, 1 - gained - lost))
            chances = stats.multinomial.pmf(counts, n, shares)
            found.append(covered(chances, intervals, gained - lost))
    return found


@cache
def interval_of(scores):
    return over_questions(scores)[1:]


@cache
def interval_of_difference(gaps):
    return percentiles(difference_draws(gaps))


def covered(chances, intervals, truth):
    """The chance that an interval holds the truth, and the mean width."""
    low, high = intervals.T
    holds = (low <= truth + 5e-5) & (high >= truth - 5e-5)  # they are rounded
    return float(chances[holds].sum()), float((chances * (high - low)).sum())


def outcomes_of_votes():
    """For each number of right samples: the mean over all orders and wrong answers of what a vote scores."""
    scores = np.zeros(SAMPLES + 1)
    chance = dict(zip("123", WRONG, strict=True))
    for answers in itertools.product("R123", repeat=SAMPLES):
        right = [float(answer == "R") for answer in answers]
        weight = math.prod(chance.get(answer, 1.0) for answer in answers)
        scores[round(sum(right))] += weight * majority(answers, right)
    return scores / [math.comb(SAMPLES, k) for k in range(SAMPLES + 1)]


COUNTS = np.arange(SAMPLES + 1)
MEASURES = {
    f"mean@{SAMPLES}": np.array([k / SAMPLES for k in COUNTS]),
    "pass@2": np.array([pass_at_k(SAMPLES, k, 2) for k in COUNTS]),
    f"pass@{SAMPLES}": np.array([pass_at_k(SAMPLES, k, SAMPLES) for k in COUNTS]),
    f"maj@{SAMPLES}": outcomes_of_votes(),
}  # the expected score of a question by its number of right samples


def chances_of_counts(rate, concentration):
    """The chance of each number of right samples, over questions."""
    if rate in (0, 1) or concentration is None:
        return stats.binom.pmf(COUNTS, SAMPLES, rate)
    a, b = rate * concentration, (1 - rate) * concentration
    ways = special.binom(SAMPLES, COUNTS)
    return ways * special.beta(a + COUNTS, b + SAMPLES - COUNTS) / special.beta(a, b)


def simulated(name, n, trials, generator):
    """(coverage, width) of a measure of several samples, for each rate, alike and uneven."""
    found = []
    for rate, concentration in itertools.product(RATES, (None, UNEVEN)):
        chances = chances_of_counts(rate, concentration)
        truth = float(chances @ MEASURES[name])
        intervals = []
        for _ in range(trials):
            scores = MEASURES[name][generator.choice(SAMPLES + 1, size=n, p=chances / chances.sum())]
            if name.startswith("maj"):  # a vote is right or wrong
                scores = (generator.random(n) < scores).astype(float)
            intervals.append(interval_of(tuple(np.sort(scores))))
        found.append(covered(np.full(trials, 1 / trials), np.array(intervals), truth))
    return found


def simulated_difference(n, trials, generator):
    """The same of the difference between two evaluations of several samples on the same questions."""
    found = []
    for rate, other, shared in itertools.product(RATES, (0.0, 0.05, 0.5, 1.0), (False, True)):
        intervals = []
        for _ in range(trials):
            luck = generator.random((2, n, SAMPLES))
            luck[1] = luck[0] if shared else luck[1]
            gaps = (luck[1] < other).mean(1) - (luck[0] < rate).mean(1)
            intervals.append(interval_of_difference(tuple(np.sort(gaps))))
        found.append(covered(np.full(trials, 1 / trials), np.array(intervals), other - rate))
    return found


def records(right):
    return [
        {"exact_match": {"strict-match": [float(r)]}, "filtered_resps": {"strict-match": ["x"]}}
        for r in right
    ]


def false_positives(paired, trials, generator, questions=200):
    """How often a comparison of two equal methods over seeds that spread has p < 0.05."""
    found = 0
    for _ in range(trials):
        rates = generator.beta(0.6, 0.6, questions)
        shifts = generator.normal(0, SPREAD, (2, SEEDS, 1))
        right = generator.random((2, SEEDS, questions)) < rates + shifts
        seeds = [str(seed) for seed in range(SEEDS)] if paired else [None] * SEEDS
        sides = (Side("", [records(run) for run in side], seeds) for side in right)
        found += compare_two(*sides)[0]["p"] < 0.05
    return found / trials


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=2000)
    args = parser.parse_args()
    statistics.DRAWS = 2000  # of each interval, for the sake of time
    generator, rows = np.random.default_rng(0), []
    for n in QUESTIONS:
        found = {"accuracy": exact_accuracy(n)}
        if n <= 50:
            found["difference"] = exact_difference(n)
        found |= {name: simulated(name, n, args.trials, generator) for name in MEASURES}
        found["difference of mean@4"] = simulated_difference(n, args.trials, generator)
        for name, points in found.items():
            coverage, width = np.array(points).T
            case = f"{name}, {n} questions"
            rows += [
                (case, "coverage_min", round(float(coverage.min()), 4), "share"),
                (case, "coverage_mean", round(float(coverage.mean()), 4), "share"),
                (case, "width_mean", round(float(width.mean()), 4), ""),
            ]
            print(*rows[-3:], sep="\n", flush=True)
    for paired, word in ((True, "paired"), (False, "unpaired")):
        share = false_positives(paired, args.trials, generator)
        rows.append((f"{SEEDS} {word} seeds, spread {SPREAD}", "false_positives", round(share, 4), "share"))
    write_results("coverage", rows, trials=args.trials)


if __name__ == "__main__":
    main()

"""How often the tests of a study are right, on simulated studies whose truth is known.

    python benchmarks/study_checks.py [--studies 10000]

Each run answers 1,319 questions 32 times (8 samples at 4 steps); its seed moves the chance of all of them a
little, by a normal amount or one with heavy tails (Student's t with 4 degrees of freedom, same deviation).
"""

import argparse
import sys
from collections import Counter

import numpy as np

from common import ROOT, write_results

sys.path.insert(0, str(ROOT))
from reporting.study_statistics import paired_t, read_verdict, t_power, tost, tost_power

SEEDS = (8, 16)
SPREAD = 0.008  # standard deviation of what a seed adds to a run's accuracy
EFFECT, MARGIN = 0.015, 0.01
LEVELS, QUESTIONS_OF_A_LEVEL, ANSWERS = 20, 66, 32  # chances of being right, and how many questions have each
TAILS = {"normal": None, "heavy tails": 4}

ARMS = ("grpo", "m3po", "scaled_mean", "noise", "strangers")
VERDICT = {
    "treatment": "m3po",
    "baseline": "grpo",
    "controls": ["noise", "strangers"],
    "averaging": "scaled_mean",
}
TRUTHS = {
    "all arms alike": (0, 0, 0, 0, 0),
    "M3PO 2 points below": (0, -0.02, 0, 0, 0),
    "M3PO 2 points above all": (0, 0.02, 0, 0, 0),
    "M3PO and the mean 2 points above": (0, 0.02, 0.02, 0, 0),
    "all 2 points above GRPO": (0, 0.02, 0.02, 0.02, 0.02),
    "M3PO 0.5 points above all": (0, 0.005, 0, 0, 0),
}  # gains over GRPO, in the order of ARMS


def accuracies(generator, chances, freedom, shape):
    """The accuracies of runs, (*shape): what its seed adds is drawn, then how many answers are right."""
    moved = generator.normal(0, SPREAD, shape)
    if freedom is not None:
        moved = generator.standard_t(freedom, shape) * SPREAD / np.sqrt(freedom / (freedom - 2))
    of_levels = QUESTIONS_OF_A_LEVEL * ANSWERS
    total = np.zeros(shape)
    for chance in chances:
        total += generator.binomial(of_levels, np.clip(chance + moved, 0, 1))
    return total / (LEVELS * of_levels)


def measure(studies, seeds, freedom, generator):
    """Yield (metric, value) for paired differences of two equal arms."""
    chances = generator.beta(0.7, 1.3, LEVELS)
    ours, theirs = accuracies(generator, chances, freedom, (2, studies, seeds))
    differences = ours - theirs
    deviation = differences.std()
    p, low, high = paired_t(differences)
    yield "false_positives", (p < 0.05).mean()
    yield "coverage", ((low <= 0) & (high >= 0)).mean()
    yield "power", (paired_t(differences + EFFECT)[0] < 0.05).mean()
    yield "power_computed", t_power(EFFECT, deviation, seeds)
    yield "equivalent", (tost(differences, MARGIN) < 0.05).mean()
    yield "equivalent_computed", tost_power(MARGIN, deviation, seeds)
    yield "equivalent_at_margin", (tost(differences + MARGIN, MARGIN) < 0.05).mean()


def verdicts(studies, seeds, gains, generator):
    """Yield (verdict, share of the studies that give it) where these are the arms' true gains over GRPO."""
    chances = generator.beta(0.7, 1.3, LEVELS)
    arms = {
        arm: accuracies(generator, np.clip(chances + gain, 0, 1), None, (studies, seeds))
        for arm, gain in zip(ARMS, gains, strict=True)
    }
    pairs = [("m3po", other) for other in ARMS if other != "m3po"]
    pairs += [(control, "grpo") for control in VERDICT["controls"]]
    differences = {pair: arms[pair[0]] - arms[pair[1]] for pair in pairs}
    tests = {
        pair: (values.mean(-1), paired_t(values)[0], tost(values, MARGIN))
        for pair, values in differences.items()
    }

    def comparison_in(study):
        names = ("difference", "p", "tost_p")
        return lambda *pair: dict(zip(names, (values[study] for values in tests[pair]), strict=True))

    found = Counter(read_verdict(comparison_in(study), VERDICT) for study in range(studies))
    for (words, second), count in found.most_common():
        yield ", ".join(filter(None, (words, second))), count / studies


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=10_000)
    args = parser.parse_args()
    generator, rows = np.random.default_rng(0), []
    for seeds in SEEDS:
        for name, freedom in TAILS.items():
            for metric, value in measure(args.studies, seeds, freedom, generator):
                rows.append((f"{seeds} seeds, {name}", metric, round(float(value), 4), "share"))
        for name, gains in TRUTHS.items():
            for words, share in verdicts(args.studies, seeds, gains, generator):
                rows.append((f"{seeds} seeds, {name}", words, round(share, 4), "share of verdicts"))
    write_results("study_checks", rows, studies=args.studies)


if __name__ == "__main__":
    main()

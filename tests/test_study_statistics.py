"""The statistics of a study: tests over seeds, their power, numbers of seeds, and the verdict."""

import math

import numpy as np
import pytest
from scipy import stats

from reporting import study_statistics
from reporting.study_statistics import (
    compared,
    crossed_bootstrap,
    look,
    paired_t,
    read_verdict,
    seeds_needed,
    smallest_effect,
    t_power,
    tost,
    tost_power,
)

PLAN = {"alpha": 0.05, "power": 0.8, "effect": 0.015, "margin": 0.01, "fewest_seeds": 8, "most_seeds": 16}
ARMS = {
    "treatment": "m3po",
    "baseline": "grpo",
    "controls": ["noise", "strangers"],
    "averaging": "scaled_mean",
}


def test_the_paired_t_by_hand():
    """Differences 0.1, 0.2 and 0.3: t = 0.2 / (0.1 / sqrt(3)) = 3.4641 with 2 degrees of freedom."""
    p, low, high = paired_t(np.array([0.1, 0.2, 0.3]))
    assert p == pytest.approx(0.0742, abs=5e-5)
    assert (low, high) == (
        pytest.approx(0.2 - 4.3027 * 0.057735, abs=1e-5),
        pytest.approx(0.448414, abs=1e-5),
    )


def test_tost_by_hand():
    """The mean 0.2 against +-0.5: t = 0.7 / 0.0577 = 12.12 and 0.3 / 0.0577 = 5.196; the larger p counts."""
    assert tost(np.array([0.1, 0.2, 0.3]), 0.5) == pytest.approx(0.01755, abs=1e-5)
    assert tost(np.array([0.1, 0.2, 0.3]), 0.5) == tost(np.array([-0.1, -0.2, -0.3]), 0.5)


def test_tost_is_whether_the_90_percent_interval_lies_within_the_margin():
    differences = np.random.default_rng(0).normal(0.003, 0.01, (500, 8))
    _, low, high = paired_t(differences, 0.9)
    assert np.array_equal((low > -0.01) & (high < 0.01), tost(differences, 0.01) < 0.05)


@pytest.mark.parametrize(
    ("value", "p", "tost_p"), [(0.0, 1.0, 0.0), (0.02, 0.0, 1.0), (-0.02, 0.0, 1.0), (0.005, 0.0, 0.0)]
)
def test_differences_without_spread_have_a_p(value, p, tost_p):
    """Two runs of the same numbers gave 0 / 0, which JSON cannot hold, and scipy's warning to the user."""
    found = compared([value] * 4, margin=0.01)
    assert (found["p"], found["tost_p"]) == (p, tost_p)


@pytest.mark.filterwarnings("error")
def test_every_number_of_a_comparison_by_hand():
    """Three seeds of four questions, whose means are 0.1, 0.2 and 0.3: 2 degrees of freedom."""
    by_question = np.array([[0.0, 0.2, 0.1, 0.1], [0.4, 0.0, 0.3, 0.1], [0.3, 0.3, 0.2, 0.4]])
    found, error = compared(by_question, margin=0.5), 0.1 / math.sqrt(3)
    assert (found["seeds"], found["freedom"]) == (3, 2)
    assert found["difference"] == pytest.approx(0.2)
    assert found["deviation"] == pytest.approx(0.1), "of a sample"
    assert found["difference_ci95"] == pytest.approx([0.2 - 4.302653 * error, 0.2 + 4.302653 * error])
    assert found["difference_ci_tost"] == pytest.approx([0.2 - 2.919986 * error, 0.2 + 2.919986 * error])
    assert (found["p"], found["tost_p"]) == (
        pytest.approx(0.0742, abs=5e-5),
        pytest.approx(0.01755, abs=1e-5),
    )
    shift = found["smallest_effect"] / error
    assert power_by_sums(shift, 2, 4.302653) == pytest.approx(0.8, abs=1e-4)
    assert found["bootstrap_ci95"] == list(crossed_bootstrap(by_question))
    assert compared(by_question.mean(1), margin=0.5) == {
        name: pytest.approx(value) for name, value in found.items() if name != "bootstrap_ci95"
    }
    assert compared([], margin=0.5) == {"seeds": 0, "difference": None}


def test_differences_that_all_lie_on_the_margin_are_not_within_it():
    """0 / 0: not a p of 0."""
    assert tost(np.full(4, 0.5), 0.5) == tost(np.full(4, -0.5), 0.5) == 1.0
    assert paired_t(np.zeros(4))[0] == 1.0


def test_one_seed_has_a_difference_and_no_test():
    assert compared([0.1], margin=0.01) == {"seeds": 1, "difference": pytest.approx(0.1)}


STUDIES, SEEDS = 10_000, 8


@pytest.fixture(scope="module")
def simulated():
    """Paired differences (studies, seeds) of two equal arms, and their true deviation.

    Each run answers the same 20 questions 32 times; its seed moves all of its questions a little.
    """
    generator = np.random.default_rng(0)
    easy = generator.beta(0.7, 1.3, 20)
    shape, spread, answers = (2, STUDIES, SEEDS), 0.01, 32
    moved = np.clip(easy + generator.normal(0, spread, shape)[..., None], 0, 1).astype(np.float32)
    chance = generator.normal(0, 1, (*shape, 20)).astype(np.float32)  # of so many answers: nearly normal
    scores = moved + chance * np.sqrt(moved * (1 - moved) / answers)
    differences = np.subtract(*scores.mean(-1, dtype=float))
    return differences, differences.std()


def test_of_10000_simulated_studies_of_equal_arms_5_percent_find_a_difference(simulated):
    differences, _ = simulated
    p, low, high = paired_t(differences)
    assert 0.045 < (p < 0.05).mean() < 0.055
    assert 0.945 < ((low < 0) & (high > 0)).mean() < 0.955


@pytest.mark.parametrize("share", [0.5, 1.0, 1.5])
def test_the_power_of_the_t_is_what_simulated_studies_have(simulated, share):
    differences, deviation = simulated
    effect = share * deviation
    found = (paired_t(differences + effect)[0] < 0.05).mean()
    assert found == pytest.approx(t_power(effect, deviation, SEEDS), abs=0.02)


@pytest.mark.parametrize(("margin", "effect"), [(1.5, 0.0), (1.0, 0.0), (0.6, 0.0), (1.5, 0.5), (1.0, 1.0)])
def test_the_power_of_tost_is_what_simulated_studies_have(simulated, margin, effect):
    """In deviations. At a true difference as large as the margin it is at most 5%."""
    differences, deviation = simulated
    found = (tost(differences + effect * deviation, margin * deviation) < 0.05).mean()
    computed = tost_power(margin * deviation, deviation, SEEDS, effect=effect * deviation)
    assert found == pytest.approx(computed, abs=0.02)
    assert computed <= 0.0501 or effect < margin


def test_the_power_of_tost_with_many_seeds_is_the_normal_one():
    error = 0.02 / math.sqrt(4000)
    expected = 2 * stats.norm.cdf(0.001 / error - stats.norm.isf(0.05)) - 1
    assert tost_power(0.001, 0.02, 4000) == pytest.approx(expected, abs=2e-3)
    assert tost_power(0.01, 1e-6, 8) == pytest.approx(1.0)


@pytest.mark.parametrize(("effect", "seeds"), [(0.2, 199), (0.5, 34), (0.8, 15)])
def test_numbers_of_seeds_are_those_of_the_tables(effect, seeds):
    """Cohen's small, medium and large effect, paired t, two-sided 5%, power 80%: G*Power's numbers."""
    assert seeds_needed(lambda n: t_power(effect, 1.0, n)) == seeds


def test_the_number_of_seeds_is_the_smallest_that_is_enough():
    for needed in (2, 3, 4, 7, 8, 9, 1024):
        assert seeds_needed(lambda n, needed=needed: 0.8 if n >= needed else 0.79) == needed
    assert seeds_needed(lambda n: 0.8 if n > 1024 else 0.79) is None


def test_tost_finds_nothing_at_a_difference_as_large_as_the_margin_or_without_room():
    assert tost_power(0.01, 0.0, 8, effect=0.01) == tost_power(0.01, 0.0, 8, effect=-0.02) == 0.0
    assert tost_power(0.01, 0.0, 8, effect=-0.009) == 1.0
    assert tost_power(0.0001, 0.02, 4000) == 0.0, "the t's part alone is wider than the margin"


def power_by_sums(noncentrality, freedom, limit):
    """The power of a two-sided t, as a sum over the deviation that is seen; limit: of a table of t."""
    total, width = 0.0, 1e-3
    for k in range(1, 6000):  # ratios of the deviation seen to the true one
        ratio = k * width
        log_density = (freedom - 1) * math.log(ratio) - freedom * ratio**2 / 2
        log_density += freedom / 2 * math.log(freedom / 2) - math.lgamma(freedom / 2) + math.log(2)
        above = math.erfc((limit * ratio - noncentrality) / math.sqrt(2)) / 2
        below = math.erfc((limit * ratio + noncentrality) / math.sqrt(2)) / 2
        total += width * math.exp(log_density) * (above + below)
    return total


@pytest.mark.parametrize(("effect", "seeds", "limit"), [(0.5, 10, 2.262157), (1.5, 3, 4.302653)])
def test_the_power_of_the_t_is_the_sum_over_what_is_seen(effect, seeds, limit):
    """With a degree of freedom too many, too, all numbers of seeds above were found."""
    expected = power_by_sums(effect * math.sqrt(seeds), seeds - 1, limit)
    assert t_power(effect, 1.0, seeds) == pytest.approx(expected, abs=2e-6)
    assert t_power(-0.02 * effect, 0.02, seeds) == pytest.approx(expected, abs=2e-6)


def test_without_a_difference_the_t_finds_one_in_alpha_of_all_cases():
    assert t_power(0.0, 0.01, 8) == pytest.approx(0.05)
    assert t_power(0.0, 0.01, 8, alpha=0.01) == pytest.approx(0.01)
    assert t_power(0.0, 0.0, 8) == 0.05


def test_the_smallest_effect_is_found_in_four_of_five_studies():
    effect = smallest_effect(0.012, 8)
    assert t_power(effect, 0.012, 8) == pytest.approx(0.8)
    assert smallest_effect(0.0, 8) == 0.0


def test_no_spread_and_huge_spread_give_numbers(monkeypatch):
    assert t_power(0.015, 0.0, 8) == tost_power(0.01, 0.0, 8) == 1.0
    assert t_power(0.015, 1e-9, 8) == 1.0
    monkeypatch.setattr(study_statistics, "MOST_SEEDS", 20)
    assert seeds_needed(lambda n: t_power(0.001, 1.0, n)) is None


def spread_of(deviation):
    """Six differences whose sample deviation is this."""
    values = np.array([-1.0, 1.0, -1.0, 1.0, -1.0, 1.0])
    return 0.2 + values * deviation / values.std(ddof=1)


def test_the_look_takes_the_larger_number_of_seeds_and_sees_the_spread_only():
    found = look(spread_of(0.01), PLAN)
    assert found["sd"] == pytest.approx(0.01)
    assert found["needed"] == {"t": 6, "tost": 11}, "effect 1.5 deviations, as G*Power; margin 1 deviation"
    assert (found["seeds"], found["enough"]) == (11, True)
    assert tost_power(0.01, 0.01, 11) >= 0.8 > tost_power(0.01, 0.01, 10)
    other = look(spread_of(0.01) - 0.6, PLAN)
    assert (other["seeds"], other["needed"]) == (found["seeds"], found["needed"]), "whatever the mean"
    assert set(found) == {"sd", "seeds", "needed", "enough", "power_reached"}, "nothing that tells the mean"


@pytest.mark.parametrize(("deviation", "seeds", "enough"), [(0.002, 8, True), (0.03, 16, False)])
def test_the_look_stays_within_the_fewest_and_the_most(deviation, seeds, enough):
    found = look(spread_of(deviation), PLAN)
    assert (found["seeds"], found["enough"]) == (seeds, enough)
    assert (found["power_reached"]["tost"] >= 0.8) == enough


def test_the_bootstrap_draws_questions_once_for_all_seeds():
    """Eight seeds that agree question for question: the interval is that of one seed's questions.

    Drawn for each seed anew it would be sqrt(8) times too narrow.
    """
    of_questions = np.random.default_rng(0).normal(0.02, 0.3, 200)
    low, high = crossed_bootstrap(np.tile(of_questions, (8, 1)))
    width = 2 * 1.96 * of_questions.std() / math.sqrt(200)
    assert high - low == pytest.approx(width, rel=0.05)
    assert (low + high) / 2 == pytest.approx(of_questions.mean(), abs=0.004)


def test_the_bootstrap_draws_seeds():
    """Each seed alike on all questions: the deviation of the mean is that of seeds drawn with replacement."""
    by_seed = np.array([0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07])
    low, high = crossed_bootstrap(np.repeat(by_seed[:, None], 50, axis=1))
    assert high - low == pytest.approx(2 * 1.96 * by_seed.std() / math.sqrt(8), rel=0.05)


def numbers(difference, p, tost_p):
    return {"difference": difference, "p": p, "tost_p": tost_p}


UP, DOWN, ALIKE = numbers(0.02, 0.01, 0.9), numbers(-0.02, 0.01, 0.9), numbers(0.001, 0.6, 0.01)
UNSURE, SMALL_UP, SMALL_DOWN = (
    numbers(0.01, 0.2, 0.5),
    numbers(0.005, 0.01, 0.02),
    numbers(-0.005, 0.01, 0.02),
)


@pytest.mark.parametrize(
    ("against_grpo", "noise", "strangers", "mean", "verdict"),
    [
        (DOWN, UP, UP, UP, ("hurts", None)),
        (SMALL_DOWN, UP, UP, UP, ("hurts", None)),  # within the margin too: hurts is read first
        (ALIKE, UP, UP, UP, ("no useful effect", None)),
        (SMALL_UP, UP, UP, UP, ("no useful effect", None)),  # whatever p, and before helps
        (UP, UP, UP, UP, ("helps", "and choosing matters")),
        (UP, UP, UP, SMALL_UP, ("helps", "and choosing matters")),
        (UP, UP, UP, ALIKE, ("helps", "and averaging is enough")),
        (UP, UP, UP, SMALL_DOWN, ("helps", "and averaging is enough")),
        (UP, UP, UP, UNSURE, ("helps", "undecided which")),
        (UP, UP, UP, DOWN, ("helps", "undecided which")),
        (UP, SMALL_UP, SMALL_UP, UP, ("helps", "and choosing matters")),  # above both, though near
        (UP, UP, ALIKE, UP, ("acts as noise", None)),
        (UP, ALIKE, UNSURE, UP, ("acts as noise", None)),
        (UP, ALIKE, DOWN, UP, ("acts as noise", None)),
        (UP, UNSURE, UP, UP, ("undecided", None)),
        (UP, DOWN, DOWN, UP, ("undecided", None)),
        (UNSURE, UP, UP, UP, ("undecided", None)),
        (UNSURE, ALIKE, ALIKE, UP, ("undecided", None)),
    ],
)
def test_the_verdict_is_the_first_that_holds(against_grpo, noise, strangers, mean, verdict):
    """m3po against each arm as given; noise and strangers are above grpo."""
    rows = {("m3po", "grpo"): against_grpo, ("m3po", "noise"): noise, ("m3po", "strangers"): strangers}
    rows |= {("m3po", "scaled_mean"): mean, ("noise", "grpo"): UP, ("strangers", "grpo"): UP}
    assert read_verdict(lambda *pair: rows[pair], ARMS) == verdict


@pytest.mark.parametrize("noise_above", [UNSURE, DOWN, ALIKE])
def test_it_acts_as_noise_only_where_that_noise_is_above_the_baseline(noise_above):
    rows = {("m3po", "grpo"): UP, ("m3po", "noise"): ALIKE, ("m3po", "strangers"): UP}
    rows |= {("noise", "grpo"): noise_above, ("strangers", "grpo"): UP}
    assert read_verdict(lambda *pair: rows[pair], ARMS) == ("undecided", None)


def test_a_study_without_controls_or_averaging_helps_by_its_baseline_alone():
    arms = {"treatment": "a", "baseline": "b", "controls": [], "averaging": None}
    assert read_verdict(lambda *pair: UP, arms) == ("helps", None)
    assert read_verdict(lambda *pair: numbers(0.02, 0.05, 0.9), arms) == ("undecided", None), "p < 0.05"

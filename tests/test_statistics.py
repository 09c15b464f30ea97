"""Statistics of evaluations against values worked out elsewhere, and comparisons of made-up ones."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from errors import SettingError
from reporting import files, plots
from reporting.comparison import Side, compare, compare_two, p_of_draws
from reporting.statistics import (
    bootstrap_means,
    holm,
    majority,
    mid_p,
    over_questions,
    pass_at_k,
    sampled_statistics,
    smallest_difference,
)


@pytest.mark.parametrize(
    ("n", "c", "k"), [(1, 0, 1), (1, 1, 1), (5, 2, 1), (5, 2, 3), (6, 1, 6), (8, 0, 4), (8, 3, 8)]
)
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(n, c, k):
    answers = [1] * c + [0] * (n - c)
    choices = list(itertools.combinations(answers, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(x) for x in choices) / len(choices))


def test_the_majority_counts_equal_numbers_as_one_and_no_answer_as_none():
    assert majority(["2", "2.0", "3"], [1.0, 1.0, 0.0]) == 1.0
    assert majority(["3", "3", "2"], [0.0, 0.0, 1.0]) == 0.0
    assert majority(["3", "2"], [0.0, 1.0]) == 0.0, "of several the first"
    assert majority([None, None, "2"], [0.0, 0.0, 1.0]) == 1.0
    assert majority([None, ""], [0.0, 0.0]) == 0.0


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [(0, 0, 1.0), (5, 5, 1.0), (1, 0, 0.5), (5, 0, 0.03125), (8, 2, 0.0654296875), (2, 8, 0.0654296875)],
)
def test_mid_p_mcnemar_against_sums_by_hand(gained, lost, p):
    n, few = gained + lost, min(gained, lost)
    tail = sum(math.comb(n, i) for i in range(few)) + 0.5 * math.comb(n, few) if n else 0.5
    assert mid_p(gained, lost) == pytest.approx(min(1.0, 2 * tail / 2**n))
    assert mid_p(gained, lost) == pytest.approx(p)


def test_the_test_is_right_as_often_as_it_says_and_less_timid_than_the_exact_one():
    draw, hits = np.random.default_rng(0), 0
    for _ in range(4000):
        discordant = draw.binomial(200, 0.2)
        gained = draw.binomial(discordant, 0.5)
        hits += mid_p(int(gained), int(discordant - gained)) < 0.05
    assert 0.035 < hits / 4000 < 0.055


def evaluations(rates, trials, draw):
    """Right or wrong, (trials, questions), of a model that answers each question with a rate of its own."""
    return draw.random((trials, len(rates))) < rates


def test_a_paired_test_errs_in_5_of_100_cases_and_sees_3_points_twice_as_often_as_an_unpaired_one():
    """2,000 pairs of evaluations on GSM8K's 1,319 questions, most of them easy or hard for both sides."""
    draw, trials, questions = np.random.default_rng(0), 2000, 1319
    rates = draw.beta(0.3, 0.3, questions)
    better = rates + 0.03 * rates * (1 - rates) / np.mean(rates * (1 - rates))
    assert better.max() <= 1
    assert np.mean(better - rates) == pytest.approx(0.03)
    a, same, b = (evaluations(r, trials, draw) for r in (rates, rates, better))

    def found(a, b):
        return np.mean(
            [
                mid_p(int(gained), int(lost)) < 0.05
                for gained, lost in zip((b & ~a).sum(1), (a & ~b).sum(1), strict=True)
            ]
        )

    def found_unpaired(a, b):
        p, q = a.mean(1), b.mean(1)
        return np.mean(np.abs(q - p) / np.sqrt((p * (1 - p) + q * (1 - q)) / questions) > 1.96)

    assert 0.04 < found(a, same) < 0.06
    assert found(a, b) > 0.6
    assert found_unpaired(a, b) < 0.4
    assert found_unpaired(a, same) < 0.02, "it does not know that the questions are the same"


def test_holm_s_correction():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]


def test_the_smallest_difference_is_found_in_4_of_5_cases():
    questions, discordant, draw = 500, 0.2, np.random.default_rng(0)
    difference = smallest_difference(discordant, questions)
    share = 0.5 + difference / (2 * discordant)
    found = 0
    for _ in range(2000):
        n = draw.binomial(questions, discordant)
        gained = draw.binomial(n, share)
        found += mid_p(int(gained), int(n - gained)) < 0.05
    assert 0.75 < found / 2000 < 0.87


def test_an_interval_covers_what_it_should():
    draw, covered = np.random.default_rng(1), 0
    for _ in range(200):
        rates = draw.beta(2, 3, size=150)
        scores = draw.binomial(4, rates) / 4
        _, low, high = over_questions(scores)
        covered += low <= 0.4 <= high
    assert covered >= 180


def graded_record(scores, answers=()):
    """What the statistics read of a record: the samples' scores and answers."""
    return {"exact_match": {"strict-match": list(scores)}, "filtered_resps": {"strict-match": list(answers)}}


def write(folder, scores, prompt="hash", **report):
    folder.mkdir()
    rows = []
    for i, score in enumerate(scores):
        graded = graded_record([float(score)], [str(i) if score else "no"])
        rows.append({"doc_id": f"q{i}", "prompt_hash": prompt, "target": str(i), **graded})
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "report.json").write_text(json.dumps({"questions": len(rows)}))
    settings = dict(dataset="gsm8k", split="test", answer_format="xml", temperature=0.0)
    settings |= dict(max_completion_length=300) | report
    (folder / "run_config.yaml").write_text(json.dumps(settings))
    return str(folder)


def test_a_comparison_tells_what_changed_and_how_sure_that_is(tmp_path):
    a = write(tmp_path / "a", [0] * 60 + [1] * 40)
    b = write(tmp_path / "b", [1] * 20 + [0] * 40 + [1] * 36 + [0] * 4)
    text, (found,) = compare([a, b])
    assert (found["accuracy_a"], found["accuracy_b"], found["gained"], found["lost"]) == (0.4, 0.56, 20, 4)
    assert found["p"] == pytest.approx(mid_p(20, 4))
    low, high = found["difference_ci95"]
    assert low < 0.16 < high
    assert low > 0
    assert "these checkpoints" in text
    assert "gained q0 (reference '0'): 'no' | '0'" in text
    assert "20 questions gained, 4 lost" in text


def test_seeds_of_a_side_widen_the_interval_and_change_the_words(tmp_path):
    draw = np.random.default_rng(0)
    sides = []
    for name, rates in (("a", (0.3, 0.5, 0.4)), ("b", (0.45, 0.65, 0.55))):
        sides.append(
            ",".join(write(tmp_path / f"{name}{i}", draw.random(300) < rate) for i, rate in enumerate(rates))
        )
    text, (found,) = compare(sides)
    _, (one,) = compare([side.split(",")[0] for side in sides])
    assert "over seeds and questions" in text
    width = found["difference_ci95"][1] - found["difference_ci95"][0]
    assert width > one["difference_ci95"][1] - one["difference_ci95"][0]


@pytest.mark.parametrize("seeds", [1, 2])
def test_intervals_have_the_width_of_the_normal_ones_and_the_difference_s_is_that_of_pairs(tmp_path, seeds):
    """400 questions, 80 gained and 16 lost; seeds that agree on everything add nothing.

    Unpaired, or at 90%, the widths would be others.
    """
    a, b = [0] * 240 + [1] * 160, [1] * 80 + [0] * 160 + [1] * 144 + [0] * 16
    sides = [
        ",".join(write(tmp_path / f"{name}{seed}", scores) for seed in range(seeds))
        for name, scores in (("a", a), ("b", b))
    ]
    _, (found,) = compare(sides)
    for name, mean, square in (
        ("accuracy_a", 0.4, 0.4),
        ("accuracy_b", 0.56, 0.56),
        ("difference", 0.16, 96 / 400),
    ):
        half = 1.96 * math.sqrt((square - mean**2) / 400)
        assert found[f"{name}_ci95"] == pytest.approx([mean - half, mean + half], abs=0.004), name


def test_the_bootstrap_s_p_is_two_sided_and_runs_are_drawn_too():
    """25 of 1,000 draws on the other side of 0 are 2 (25 + 1) / 1001.

    Of two runs that are 0 and 1 throughout, a quarter of the draws has one alone.
    """
    assert p_of_draws(np.array([-1.0] * 25 + [1.0] * 975)) == pytest.approx(52 / 1001)
    means = bootstrap_means(np.array([[0.0] * 50, [1.0] * 50]), np.random.default_rng(0))
    assert [float(np.mean(means == value)) for value in (0.0, 0.5, 1.0)] == pytest.approx(
        [0.25, 0.5, 0.25], abs=0.03
    )


def test_the_smallest_difference_of_sampled_answers_takes_the_squares_of_what_changed():
    """A quarter of 100 questions went from 2 to 3 right of 4: gaps of 1/4, squares of 1/16, variance 1/64."""
    records = [
        [graded_record([1.0] * n + [0.0] * (4 - n)) for n in counts]
        for counts in ([2] * 100, [3] * 25 + [2] * 75)
    ]
    found, _ = compare_two(*(Side(name, [run]) for name, run in zip("ab", records, strict=True)))
    assert found["smallest_difference"] == pytest.approx(2.8 * math.sqrt(1 / 64 / 100), abs=1e-4)


def test_votes_of_samples_that_follow_each_other_all_count():
    """Pairs (7, 7), (3, 3): one vote is right, one is wrong."""
    record = graded_record([1.0, 1.0, 0.0, 0.0], ["7", "7", "3", "3"])
    assert sampled_statistics([record])["maj@2"][0] == 0.5


def test_questions_are_paired_by_what_they_are_and_not_by_their_lines(tmp_path):
    """The same evaluation with its lines the other way round gains and loses nothing."""
    a, b = (Path(write(tmp_path / name, [1, 0, 0, 1, 1])) / "samples.jsonl" for name in "ab")
    b.write_text("".join(reversed(b.read_text().splitlines(keepends=True))))
    _, (found,) = compare([str(a.parent), str(b.parent)])
    assert (found["gained"], found["lost"], found["p"]) == (0, 0, 1.0)


def test_several_comparisons_are_corrected(tmp_path):
    a = write(tmp_path / "a", [0] * 50 + [1] * 50)
    others = [write(tmp_path / f"b{k}", [1] * k + [0] * (50 - k) + [1] * 50) for k in (3, 6)]
    text, found = compare([a, *others])
    assert [f["p_holm"] for f in found] == holm([f["p"] for f in found])
    assert text.count("after Holm's correction for 2 comparisons") == 2


def test_other_questions_prompts_or_settings_are_refused_and_named(tmp_path):
    a = write(tmp_path / "a", [1, 0, 1])
    with pytest.raises(
        SettingError, match=r"has other questions or prompts: 3 there, 2 here; 1 without a partner \(q2\)"
    ):
        compare([a, write(tmp_path / "b", [1, 0])])
    with pytest.raises(SettingError, match=r"3 without a partner \(q0, q1, q2\)"):
        compare([a, write(tmp_path / "c", [1, 0, 1], prompt="other")])
    with pytest.raises(SettingError, match="made differently: split 'test' and 'train'"):
        compare([a, write(tmp_path / "d", [1, 0, 1], split="train")])
    with pytest.raises(
        SettingError, match=r"made differently: max_completion_length 300 and 400, temperature 0\.0 and 1\.0"
    ):
        compare([a, write(tmp_path / "e", [1, 0, 1], temperature=1.0, max_completion_length=400)])
    with pytest.raises(SettingError, match="is not a folder that"):
        compare([a, str(tmp_path / "nowhere")])


def test_sampled_statistics_of_an_evaluation():
    records = [
        graded_record(scores, ["1" if v else "2" for v in scores])
        for scores in ([1, 1, 0], [0, 0, 0], [1, 1, 1])
    ]
    found = sampled_statistics(records)
    assert [found[k][0] for k in ("pass@1", "pass@2", "pass@3", "maj@3", "mean@3")] == [
        pytest.approx(v, abs=1e-4) for v in (5 / 9, 2 / 3, 2 / 3, 2 / 3, 5 / 9)
    ]


def test_pass_at_k_and_maj_at_k_are_exact_over_all_the_orders_in_which_samples_may_come():
    answers, scores = ["7", "7.0", "3", "3", "5", None], [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]

    def vote(chosen):
        values = [float(answers[i]) for i in chosen if answers[i]]
        return float(bool(values) and max(values, key=values.count) == 7.0)  # of several the first

    orders = list(itertools.permutations(range(6)))
    records = [graded_record([scores[i] for i in order], [answers[i] for i in order]) for order in orders]
    found = sampled_statistics(records)
    for k in (1, 2, 4, 6):
        choices = list(itertools.permutations(range(6), k))
        assert found[f"pass@{k}"][0] == pytest.approx(
            np.mean([max(scores[i] for i in c) for c in choices]), abs=1e-4
        )
        assert found[f"maj@{k}" if k > 1 else "mean@6"][0] == pytest.approx(
            np.mean([vote(c) for c in choices]), abs=1e-4
        )


@pytest.mark.slow
def test_the_curves_of_runs_are_drawn_the_same_each_time_and_whole(tmp_path):
    constant = {"reward/format_reward": 0.5, "correct": 0.1, "completion_length": 20.0, "loss": None}
    lines = [{"step": i, "reward": i / 10, "rollout_seconds": 1.0, **constant} for i in range(1, 31)]
    lines[-1] |= {"eval_accuracy": 0.4, "eval_questions": 50}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 31, "rew'
        )
    assert len(files.read_metrics(tmp_path / "one")) == 30, "half a line is left out"
    plots.draw({"one": lines}, tmp_path)
    first = (tmp_path / "curves.svg").read_bytes()
    plots.draw({"one": lines}, tmp_path)
    assert (tmp_path / "curves.svg").read_bytes() == first
    for words in (b"groups without", b"gradient norm", b"loss"):
        assert words not in first, "panels of what no run has are left out"
    assert b"held out" in first
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    plots.draw({name: files.read_metrics(tmp_path / name) for name in ("one", "two")}, tmp_path)
    assert b">two<" in (tmp_path / "curves.svg").read_bytes()


def test_a_run_without_an_evaluation_yet_is_drawn_beside_others(tmp_path):
    """The accuracy before training alone, in a panel that another run's evaluations called for, raised."""
    young = [{"step": 1, "reward": 0.1, "eval_accuracy_before": 0.3}]
    older = [{"step": 1, "eval_accuracy_before": 0.2}, {"step": 2, "eval_accuracy": 0.5, "eval_questions": 9}]
    plots.draw({"young": young, "older": older}, tmp_path)
    assert ">young<" in (tmp_path / "curves.svg").read_text()


def test_a_comparison_is_drawn_with_its_sides_and_differences(tmp_path):
    draw = np.random.default_rng(0)
    sides = [
        write(tmp_path / name, draw.random(100) < rate)
        for name, rate in (("before", 0.3), ("after", 0.5), ("other", 0.4))
    ]
    _, found = compare([sides[0], ",".join(sides[1:]), sides[2]])
    plots.draw_comparison(found, tmp_path)
    drawn = (tmp_path / "compare.svg").read_text()
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    for word in (
        ">before<",
        ">after and 1 more<",
        ">other<",
        *(f">{f['difference']:+.3f}<" for f in found),
        *(f">{f['accuracy_b']:.3f}<" for f in found),
    ):
        assert word.replace("-", "\N{MINUS SIGN}") in drawn or word in drawn, word
    for f in found:
        assert f["accuracy_b_ci95"][0] < f["accuracy_b"] < f["accuracy_b_ci95"][1]
    assert (
        found[1]["accuracy_b_ci95"]
        == over_questions([r["exact_match"]["strict-match"][0] for r in rows_of(sides[2])])[1:]
    )


def rows_of(folder):
    return [json.loads(line) for line in open(f"{folder}/samples.jsonl")]

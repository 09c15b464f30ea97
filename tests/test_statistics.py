"""Statistics of evaluations against values worked out elsewhere, and comparisons of made-up ones."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from errors import SettingError
from reporting import files, plots, statistics
from reporting.comparison import Side, compare, compare_two, short_names, write_comparison
from reporting.evaluation import skipped_record
from reporting.statistics import (
    SeedError,
    difference_draws,
    holm,
    majority,
    mid_p,
    over_questions,
    p_of_draws,
    pass_at_k,
    percentiles,
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
    assert majority(["", "", "2"], [0.0, 0.0, 1.0]) == 1.0
    assert majority(["3", "2", "2.0"], [1.0, 0.0, 0.0]) == 0.0, "wrong ones too"


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
    assert holm([0.6, 0.9]) == [1.0, 1.0]


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
    assert smallest_difference(0.0, 500) == pytest.approx(2.8 / 500), "as if one question differed"


def test_an_interval_covers_what_it_should():
    draw, covered = np.random.default_rng(1), 0
    for _ in range(200):
        rates = draw.beta(2, 3, size=150)
        scores = draw.binomial(4, rates) / 4
        _, low, high = over_questions(scores)
        covered += low <= 0.4 <= high
    assert covered >= 180


def test_intervals_of_few_questions_by_hand():
    """One of 20 right: all wrong has the chance 0.975 at the low end. One of 2 half right ones: a third, that
    is wrong, has a weight of Beta(1, 2), so that the low end is half the root of 0.025.
    """
    low, high = 1 - 0.975 ** (1 / 20), 1 - 0.025 ** (1 / 20)
    assert over_questions([1] + [0] * 19)[:2] == [0.05, round(low, 4)]
    assert over_questions([0] + [1] * 19)[::2] == [0.95, round(1 - low, 4)]
    assert over_questions([0] * 20) == [0.0, 0.0, round(high, 4)]
    assert over_questions([0.5]) == [0.5, 0.0, 1.0]
    half = math.sqrt(0.025) / 2
    assert over_questions([0.5, 0.5]) == pytest.approx([0.5, half, 1 - half], abs=0.005)
    _, low, high = over_questions([0.5] * 39 + [1.0])
    assert 0.44 < low < high < 0.62, "they vary less than 20 right and 20 wrong ones"


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


def test_a_comparison_says_where_not_all_was_computed_in_one_precision(tmp_path):
    """By default each model is asked in what it was trained in, and its start in bf16."""
    a, b, c = (
        write(tmp_path / name, [0, 1], precision=how)
        for name, how in zip("abc", ("bf16", "fp16", "bf16"), strict=True)
    )
    server, older = (
        write(tmp_path / "server", [0, 1], precision="fp32", api="http://x"),
        write(tmp_path / "o", [0, 1]),
    )
    told = (
        "not all was computed in one precision, a in bf16, b in fp16; part of the difference may be rounding"
    )
    assert told in compare([a, b])[0].lower()
    assert "one precision, a and 1 more in bf16 and fp16, c in bf16;" in compare([f"{a},{b}", c])[0]
    for other in (c, server, older):
        assert "precision" not in compare([a, other])[0]


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


def test_the_bootstrap_s_p_is_two_sided():
    """25 of 1,000 draws on the other side of 0 are 2 (25 + 1) / 1001."""
    assert p_of_draws(np.array([-1.0] * 25 + [1.0] * 975)) == pytest.approx(52 / 1001)
    assert p_of_draws(np.zeros(1000)) == 1.0


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
    with pytest.raises(SettingError, match="names an evaluation twice"):
        compare([f"{a},{a}", a])
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


def repeated(scores, texts=("a", "a", "b", "b")):
    """Records of an id that occurs several times, with the prompt's own hash."""
    answers = [str(i) for i in range(len(scores))]
    return [
        {"doc_id": "q", "prompt_hash": text, "target": "1", **graded_record([float(score)], [answer])}
        for text, score, answer in zip(texts, scores, answers, strict=True)
    ]


def write_records(folder, rows, **settings):
    """An evaluation of these records."""
    folder.mkdir()
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "report.json").write_text(json.dumps({"skipped": settings.pop("skipped", 0)}))
    (folder / "run_config.yaml").write_text(json.dumps(dict(dataset="d", **settings)))
    return str(folder)


def test_questions_that_repeat_are_paired_in_their_order(tmp_path):
    """The last of each id took the place of the others: a run against itself gained 3 of 16."""
    a = write_records(tmp_path / "a", repeated([0, 1, 1, 0]))
    _, (found,) = compare([a, a])
    assert (found["difference"], found["gained"], found["lost"], found["p"]) == (0.0, 0, 0, 1.0)
    swapped = write_records(tmp_path / "b", repeated([1, 0, 0, 1], texts=("b", "b", "a", "a")))
    _, (found,) = compare([a, swapped])
    assert (found["difference"], found["gained"], found["lost"]) == (0.0, 0, 0), "by the text of the question"
    fewer = write_records(tmp_path / "c", repeated([1, 0, 0, 1], texts=("a", "a", "a", "b")))
    with pytest.raises(
        SettingError, match=r"other questions or prompts: 4 there, 4 here; 1 without a partner"
    ):
        compare([a, fewer])


HALVES = {r"\frac{1}{2}", r"\dfrac{1}{2}", "0.5"}


def equal_halves(left, right):
    """A grading by meaning that knows halves, and cannot tell what a question mark is."""
    if "?" in left + right:
        return None
    return {left, right} <= HALVES or left == right


def test_a_majority_votes_by_meaning_where_grading_does():
    """Three spellings of one half lost against 3 and 3, when they were right as when they were wrong."""
    answers = [r"\frac{1}{2}", "3", "0.5", "3", r"\dfrac{1}{2}"]
    assert majority(answers, [1.0, 0.0, 1.0, 0.0, 1.0], equal_halves) == 1.0
    assert majority(answers, [0.0, 1.0, 0.0, 1.0, 0.0], equal_halves) == 0.0
    assert majority(answers, [0.0, 1.0, 0.0, 1.0, 0.0]) == 1.0, "texts alone: 3 has two votes"
    assert majority(["?", "?1", "?2", "7", "7"], [0.0, 0.0, 0.0, 1.0, 1.0], equal_halves) == 1.0, (
        "what nobody can tell is different"
    )
    assert majority(["0.5", "7", None, ""], [0.0, 1.0, 0.0, 0.0], equal_halves) == 0.0, "a tie: the first"


def test_a_vote_does_not_depend_on_the_order_of_the_samples_and_asks_seldom():
    asked = []

    def equal(left, right):
        asked.append((left, right))
        # only the \dfrac is seen to be both others
        return {left, right} in ({r"\dfrac{1}{2}", r"\frac{1}{2}"}, {"0.5", r"\dfrac{1}{2}"})

    samples = [(r"\frac{1}{2}", 0.0), (r"\dfrac{1}{2}", 0.0), ("0.5", 0.0), ("7", 1.0), ("7", 1.0)]
    for order in itertools.permutations(samples):
        asked.clear()
        assert majority(*zip(*order, strict=True), equal) == 0.0, "three wrong halves against two sevens"
        assert len(asked) == len({frozenset(pair) for pair in asked}) <= 3
    asked.clear()
    votes_of_64 = ["7"] * 32 + [" 8  9"] * 31 + ["8 9"]
    assert majority(votes_of_64, [0.0] * 64, equal) == 0.0
    assert majority(votes_of_64, [1.0] * 32 + [0.0] * 32, equal) == 1.0, "a tie: the first"
    assert not asked, "nothing is right, or one other text"


def test_sampled_statistics_hand_the_predicate_to_the_votes():
    record = graded_record([1.0, 1.0, 0.0, 0.0, 0.0], ["3", "3", r"\frac{1}{2}", "0.5", r"\dfrac{1}{2}"])
    assert sampled_statistics([record], equal_halves)["maj@5"][0] == 0.0
    assert sampled_statistics([record])["maj@5"][0] == 1.0


def test_an_undecided_answer_is_not_right_in_any_number():
    """None is the grader's: it counts as 0 in scores, pass@k, votes and comparisons."""
    records = [graded_record([None, 1.0], ["x", "1"]), graded_record([None, None], ["x", "x"])]
    found = sampled_statistics(records)
    assert [found[name][0] for name in ("pass@1", "pass@2", "maj@2", "mean@2")] == [0.25, 0.5, 0.0, 0.25]
    result, _ = compare_two(Side("a", [records]), Side("b", [records]))
    assert (result["accuracy_a"], result["undecided_a"], result["undecided_b"]) == (0.25, 3, 3)


def test_a_comparison_counts_skipped_questions_as_wrong_also_those_of_earlier_versions(tmp_path):
    """They were in the accuracy of the report, and not in that of the comparison."""
    rows = [
        {"doc_id": f"q{i}", "prompt_hash": "h", "target": "1", **graded_record([1.0], ["1"])}
        for i in range(3)
    ]
    ours = {**skipped_record(1), "doc_id": "q3", "prompt_hash": "h", "target": "1"}
    new = [write_records(tmp_path / name, [*rows, ours], skipped=1) for name in "ab"]
    old = [write_records(tmp_path / name, rows, skipped=1) for name in "cd"]
    for sides in (new, old):
        text, (found,) = compare(sides)
        assert (found["questions"], found["accuracy_a"], found["skipped_b"]) == (4, 0.75, 1)
        assert "skipped 1 and 1, which count as not right" in text
    asked = [*rows, {"doc_id": "q3", "prompt_hash": "h", "target": "1", **graded_record([1.0], ["1"])}]
    _, (found,) = compare([new[0], write_records(tmp_path / "longer", asked)])
    assert (found["gained"], found["skipped_a"], found["skipped_b"]) == (1, 1, 0), "the other side asked it"


@pytest.mark.parametrize(
    ("gained", "lost", "others"),
    [(3, 0, 0), (0, 3, 0), (0, 0, 40), (0, 0, 1), (1, 0, 39), (40, 0, 0), (2, 2, 0)],
)
def test_no_interval_of_a_difference_has_the_width_0_and_it_agrees_with_the_test(gained, lost, others):
    """3 of 3 gained gave [1, 1] beside p = 0.125, and no change of 40 gave [0, 0]."""
    a = [[graded_record([float(score)]) for score in [0] * gained + [1] * lost + [1] * others]]
    b = [[graded_record([float(score)]) for score in [1] * gained + [0] * lost + [1] * others]]
    found, _ = compare_two(Side("a", a), Side("b", b))
    low, high = found["difference_ci95"]
    assert -1 <= low <= found["difference"] <= high <= 1
    assert high - low > 0.02
    assert (low > 0 or high < 0) == (found["p"] < 0.05)


def test_the_interval_of_a_difference_ends_on_0_where_mid_p_is_5_of_100():
    """The one more question is lost in one half of the draws, gained in the other: that is the mid-p."""
    for gained, lost in ((5, 0), (4, 0), (8, 2), (9, 2), (9, 1), (13, 4)):
        low, _ = percentiles(difference_draws([1.0] * gained + [-1.0] * lost + [0.0] * 100))
        assert (low > 0) == (mid_p(gained, lost) < 0.05), (gained, lost)


def test_an_interval_near_1_is_as_wide_as_the_questions_are_few():
    """One of 40 questions with 2 of 4 right: pass@2 gave [.9875, 1] beside [.9124, 1] of pass@4."""
    records = [graded_record([1.0] * 4, ["1"] * 4)] * 39 + [graded_record([1.0, 1.0, 0.0, 0.0], ["1"] * 4)]
    found = sampled_statistics(records)
    for name in ("pass@1", "pass@2", "pass@4", "mean@4"):
        _, low, high = found[name]
        assert low < 0.93, name
        assert high == pytest.approx(1.0, abs=1e-3)
    assert over_questions([0.0] * 19 + [0.25])[1] == pytest.approx(0, abs=1e-3)
    assert over_questions([0.5] * 20)[1] < 0.49


def test_intervals_cover_down_to_20_questions_and_rates_of_0_and_1(monkeypatch):
    """93% at each point and 95% on average, summed exactly over all outcomes.

    Wilson's interval covers 92.4% at 0.05 and 84% at 0.0085; the percentile bootstrap 0 where nothing varies.
    """
    monkeypatch.setattr(statistics, "DRAWS", 4000)
    n, rates = 20, (0.0, 0.0085, 0.02, 0.05, 0.1, 0.3, 0.5, 0.9, 0.95, 0.99, 1.0)
    alone = np.array([over_questions([1] * k + [0] * (n - k))[1:] for k in range(n + 1)])
    counts = np.array([(b, c, n - b - c) for b in range(n + 1) for c in range(n + 1 - b)])
    paired = np.array([percentiles(difference_draws(np.repeat([1.0, -1.0, 0.0], c))) for c in counts])

    def coverage(chances, intervals, truth):
        return chances[(intervals[:, 0] <= truth + 1e-4) & (intervals[:, 1] >= truth - 1e-4)].sum()

    shares = [coverage(stats.binom.pmf(range(n + 1), n, rate), alone, rate) for rate in rates]
    assert min(shares) >= 0.95
    shares = []
    for gained, lost in (
        (0, 0),
        (1, 0),
        (0, 1),
        (0.05, 0),
        (0.05, 0.05),
        (0.2, 0.1),
        (0.5, 0.5),
        (0.9, 0.05),
    ):
        chances = stats.multinomial.pmf(counts, n, (gained, lost, max(0.0, 1 - gained - lost)))
        shares.append(coverage(chances, paired, gained - lost))
    assert min(shares) >= 0.93
    assert np.mean(shares) >= 0.95


@pytest.mark.parametrize("rate", [0.0, 0.02, 0.3, 0.97, 1.0])
def test_intervals_of_several_samples_cover_too(rate, monkeypatch):
    """mean@4 and pass@2 of 20 questions, most of them hard or easy: 150 evaluations, 93% less two errors."""
    monkeypatch.setattr(statistics, "DRAWS", 1000)
    draw, samples = np.random.default_rng(3), 4
    of_questions = draw.beta(rate, 1 - rate, (150, 20)) if 0 < rate < 1 else np.full((150, 20), rate)
    right = draw.binomial(samples, of_questions)
    # the chance that both are wrong where questions' rates have the beta distribution of rate and 1 - rate
    both_wrong = (1 - rate) * (2 - rate) / 2
    for truth, score in (
        (rate, [k / 4 for k in range(5)]),
        (1 - both_wrong, [pass_at_k(4, k, 2) for k in range(5)]),
    ):
        intervals = np.array([over_questions(np.array(score)[counts])[1:] for counts in right])
        covered = (intervals[:, 0] <= truth + 1e-4) & (intervals[:, 1] >= truth - 1e-4)
        assert covered.mean() >= 0.93 - 2 * math.sqrt(0.07 * 0.93 / 150)


def seeds_of(folder, name, rows, **settings):
    """A side of several seeds: evaluations name0, name1, ... of these scores, joined by commas."""
    folders = []
    for seed, scores in enumerate(rows):
        settings |= dict(seed=seed)
        folders.append(write(folder / f"{name}{seed}", scores, **settings))
    return ",".join(folders)


def test_seeds_that_share_their_start_are_paired_and_each_one_s_difference_is_told(tmp_path):
    """Seeds 0, 1, 2 start at 0.3, 0.5 and 0.7 and each gains 0.1: unpaired that is noise."""
    draw = np.random.default_rng(0)
    starts = [draw.permutation([1] * n + [0] * (100 - n)) for n in (30, 50, 70)]
    ends = [scores.copy() for scores in starts]
    for scores, more in zip(ends, (9, 10, 11), strict=True):
        scores[np.flatnonzero(scores == 0)[:more]] = 1
    a = seeds_of(tmp_path, "a", starts, trained={"model": "m"})
    b = seeds_of(tmp_path, "b", ends, trained={"model": "m"})
    text, (found,) = compare([a, ",".join(reversed(b.split(",")))])
    assert found["test"] == "paired t over seeds"
    assert found["difference_of_seeds"] == [0.09, 0.1, 0.11], "in the order of the first side's seeds"
    assert found["p"] < 0.01
    assert (
        "Seeds are paired by start, order and draws; each one's difference: +0.090, +0.100, +0.110." in text
    )
    other = seeds_of(tmp_path, "c", ends, trained={"model": "another start"})
    text, (found,) = compare([a, other])
    assert found["test"] == "Welch's t over seeds"
    assert found["p"] > 0.3
    assert found["accuracy_of_seeds_b"] == [0.39, 0.6, 0.81]
    assert "are not paired; their accuracies: 0.300, 0.500, 0.700 | 0.390, 0.600, 0.810." in text


def test_paired_seeds_by_hand():
    """Differences of 0.1, 0.2 and 0.3 over seeds: t = 0.2 / (0.1 / sqrt(3)) with 2 degrees of freedom."""
    differences = np.repeat([[0.1], [0.2], [0.3]], 50, axis=1)
    error = SeedError.of(differences.mean(0), differences)
    assert (error.error, error.freedom) == (pytest.approx(0.1 / math.sqrt(3)), 2)
    of_questions = (0.2, 0.2)  # no question differs from another
    assert error.p(0.2, of_questions) == pytest.approx(2 * stats.t.sf(2 * math.sqrt(3), 2), rel=1e-3)
    low, high = error.interval(0.2, of_questions)
    assert (high - low) / 2 == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-3)
    assert error.smallest_difference(0.0) == pytest.approx((4.3027 + 1.0607) * 0.1 / math.sqrt(3), rel=1e-3)


def test_what_single_answers_vary_by_chance_counts_once():
    """Questions' means of 1, 1/2, 1/2, 0 vary by 1/6; of that seeds vary 1/4 within questions, over two of
    them, and a quarter is left.
    """
    scores = np.array([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0]])
    assert SeedError.of(scores.mean(0), scores).beyond == pytest.approx(math.sqrt(1 / 4))


def test_seeds_that_agree_leave_the_test_over_questions():
    """Two standard errors, and one: 4.55 and 31.7 of 100, either way round; 1e-12 at the least."""
    agree = SeedError(error=0.0, freedom=2, beyond=1.0)
    for errors, p in ((2, 0.0455), (1, 0.3173), (6, 2e-9), (10, 1e-12)):
        ends = (0.1 - 1.96 * 0.1 / errors, 0.1 + 1.96 * 0.2)
        assert agree.p(0.1, ends) == pytest.approx(p, rel=0.02)
        assert agree.p(-0.1, (-ends[1], -ends[0])) == pytest.approx(p, rel=0.02)
    assert agree.p(0.0, (0.0, 0.0)) == 1.0


def test_unpaired_seeds_have_welch_s_degrees_of_freedom():
    left, right = (
        np.repeat(np.array(means)[:, None], 40, axis=1) for means in ([0.1, 0.2, 0.3], [0.4, 0.44])
    )
    error = SeedError.of(right.mean(0) - left.mean(0), left, right)
    welch = stats.ttest_ind([0.4, 0.44], [0.1, 0.2, 0.3], equal_var=False)
    assert error.freedom == pytest.approx(welch.df)
    assert error.p(0.22, (0.22, 0.22)) == pytest.approx(welch.pvalue, rel=1e-3)
    error = SeedError.of(right[0] - left.mean(0), left, right[:1])
    assert (error.error, error.freedom) == (pytest.approx(0.1 / math.sqrt(3)), 2), "one seed has no spread"


def test_an_interval_over_seeds_is_never_narrower_than_that_over_questions(tmp_path):
    """Three seeds that each miss another question have the same accuracy: no spread, but no certainty."""
    rows = [[float(i != seed) for i in range(20)] for seed in range(3)]
    _, (found,) = compare([seeds_of(tmp_path, name, rows) for name in "ab"])
    low, high = found["difference_ci95"]
    assert high - low > 0.1
    low, high = found["accuracy_a_ci95"]
    assert high - low > 0.1
    perfect = [[1.0] * 20] * 3
    _, (found,) = compare([seeds_of(tmp_path, name, perfect) for name in "cd"])
    assert found["difference_ci95"][0] < -0.05 < 0.05 < found["difference_ci95"][1]


@pytest.mark.parametrize("paired", [True, False])
def test_equal_methods_over_3_seeds_differ_in_5_of_100_cases(paired, monkeypatch):
    """With a spread of 0.05 between seeds the bootstrap over runs found a difference in 9."""
    monkeypatch.setattr(statistics, "DRAWS", 300)
    draw, found, trials = np.random.default_rng(0), 0, 400
    rates = draw.beta(0.6, 0.6, 500)
    for _ in range(trials):
        a, b = (draw.random((3, 500)) < rates + draw.normal(0, 0.05, (3, 1)) for _ in "ab")
        gaps = b.mean(0) - a.mean(0)
        sides = (b.astype(float) - a,) if paired else (a, b)
        interval = SeedError.of(gaps, *sides).interval(gaps.mean(), percentiles(difference_draws(gaps)))
        found += interval[0] > 0 or interval[1] < 0
    assert 0.015 < found / trials < 0.065


def test_the_smallest_difference_knows_the_seeds(tmp_path):
    """0.018 was printed beside an interval of half-width 0.065."""
    draw = np.random.default_rng(0)
    sides = [
        seeds_of(tmp_path, name, [draw.random(1000) < rate for rate in (0.2, 0.4, 0.6)]) for name in "ab"
    ]
    _, (found,) = compare(sides)
    low, high = found["difference_ci95"]
    assert found["smallest_difference"] >= (high - low) / 2 > 0.05


def test_examples_show_what_changed_over_all_seeds_most_changed_first(tmp_path):
    """The first seed of each side was shown: gained: '16' | '16'."""
    a = seeds_of(tmp_path, "a", [[1, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]])
    b = seeds_of(tmp_path, "b", [[1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 1]])
    text, _ = compare([a, b])
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    assert lines == [
        "gained q1 (reference '1'): 0 of 3 right ('no', 'no', 'no') | 3 of 3 right ('1', '1', '1')",
        "gained q0 (reference '0'): 1 of 3 right ('0', 'no', 'no') | 2 of 3 right ('0', '0', 'no')",
        "lost q3 (reference '3'): 3 of 3 right ('3', '3', '3') | 2 of 3 right ('no', '3', '3')",
    ]


def test_sides_have_short_names_that_tell_them_apart():
    assert short_names(["runs/grpo0,runs/grpo1", "runs/m3po0,runs/m3po1"]) == [
        "grpo (2 seeds)",
        "m3po (2 seeds)",
    ]
    assert short_names(["e/a-seed-10,e/a-seed-11", "e/b"]) == ["a-seed (2 seeds)", "b"]
    assert short_names(["grpo/0,grpo/1", "m3po/0,m3po/1"]) == ["grpo (2 seeds)", "m3po (2 seeds)"]
    assert short_names(["x/eval", "y/eval"]) == ["x/eval", "y/eval"]
    assert short_names(["x/eval", "x/eval"]) == ["eval", "eval again (1)"]
    assert short_names(["x/left,x/right", "x/up"]) == ["left and 1 more", "up"]


def test_a_comparison_s_text_and_result_have_the_short_names_and_the_folders(tmp_path):
    a, b = (seeds_of(tmp_path, name, [[1, 0], [1, 1]]) for name in ("grpo", "m3po"))
    text, (found,) = compare([a, b])
    assert text.startswith("m3po (2 seeds) against grpo (2 seeds), 2 questions")
    assert (found["a"], found["b"]) == ("grpo (2 seeds)", "m3po (2 seeds)")
    assert found["evaluations_a"] == a.split(",")


def test_a_comparison_is_kept_and_none_is_overwritten(tmp_path):
    for name in ("compare", "compare-2"):
        assert write_comparison([{"p": 1.0}], tmp_path) == name
        assert json.loads((tmp_path / f"{name}.json").read_text()) == [{"p": 1.0}]
    (tmp_path / "older.svg").touch()  # of a version that kept no results
    for name in ("compare", "older"):
        with pytest.raises(SettingError, match=f"name='{name}'.*holds a comparison of that name"):
            write_comparison([], tmp_path, name)


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


def test_what_m3po_does_has_panels_and_rounding_errors_have_none(tmp_path, monkeypatch):
    """In float32 sampler and update differ by 3e-7, which a panel of its own made look like a fault."""
    drawn = {}
    monkeypatch.setattr(plots, "_draw_panels", lambda folder, panels, *more, **options: drawn.update(panels))
    rounding = {"loss": 2e-8, "logp_diff": 3e-7, "kl": 0.0}
    of_m3po = {"input_change": 0.1, "thinking_paths": 3.0, "gate_entropy": 0.9, "reward": 0.0}
    listening = {"listening_tokens": 50, "listening_changed_tokens": 1}
    plots.draw({"fp32": [{"step": 1, **rounding, **of_m3po, **listening}]}, tmp_path)
    assert set(drawn) == {
        "reward",
        "inputs moved by listening",
        "paths that think",
        "entropy of the weights over its maximum",
        "tokens changed by listening",
    }
    plots.draw({"bf16": [{"step": 1, "logp_diff": 8e-3}], "fp32": [{"step": 1, **rounding}]}, tmp_path)
    assert "sampler against update, nats" in drawn
    with plots.figure_of(1, 1) as (_, [[axis]]):
        drawn["tokens changed by listening"](axis)
        assert axis.lines[0].get_ydata().tolist() == [0.02], "the share of the tokens that were read again"


def test_a_run_without_an_evaluation_yet_is_drawn_beside_others(tmp_path):
    """The accuracy before training alone, in a panel that another run's evaluations called for, raised."""
    young = [{"step": 1, "reward": 0.1, "eval_accuracy_before": 0.3}]
    older = [{"step": 1, "eval_accuracy_before": 0.2}, {"step": 2, "eval_accuracy": 0.5, "eval_questions": 9}]
    plots.draw({"young": young, "older": older}, tmp_path)
    assert ">young<" in (tmp_path / "curves.svg").read_text()


def test_undecided_answers_are_drawn_apart():
    """A bar of their own, and only where there are any."""
    graded = graded_record([1.0, 0.0, None, 0.0], ["1", "2", "3", None])
    record = {**graded, "length": [1] * 4, "stop_condition": ["eos"] * 4}
    counts = {name: len(rows) for name, rows in plots._outcomes([record]).items()}
    assert counts == {"right": 1, "wrong": 1, "no answer": 1, "undecided": 1}
    record = {**graded_record([1.0], ["1"]), "length": [1], "stop_condition": ["eos"]}
    assert "undecided" not in plots._outcomes([record])


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

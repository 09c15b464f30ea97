"""study.json and study.html: what is read from a study's folder, analysed, and shown."""

import gzip
import json
import re
import sys

import numpy as np
import pytest
from test_page import HOSTILE, browser  # noqa: F401 (a fixture)

from errors import DataError, SettingError
from reporting import study as study_module
from reporting import study_page
from reporting.files import read_metrics
from reporting.statistics import majority
from reporting.study import analysis, keep_study, main, result_rows, told, write_study
from reporting.study_answers import majorities, read_json
from reporting.study_page import endpoint_part
from reporting.study_runs import read_study
from small_study import (
    CONFIRMATORY,
    VERDICT,
    a_plan,
    an_evaluation,
    write_answers,
    write_fake_study,
    write_json,
    write_run,
)

QUESTIONS, SAMPLES = 100, 2


def rows_of_right(accuracy):
    """(QUESTIONS, SAMPLES) of which the first are right."""
    right = np.zeros(QUESTIONS * SAMPLES, int)
    right[: round(accuracy * QUESTIONS * SAMPLES)] = 1
    return right.reshape(QUESTIONS, SAMPLES)


def small_plan(arms=("grpo", "m3po"), seeds=(0, 1), steps=(70, 80), **more):
    evaluations = [an_evaluation("sampled", list(steps), SAMPLES)]
    return a_plan(arms, seeds) | {"evaluations": evaluations, "secondary": []} | more


def write_small_study(out, accuracies, **more):
    """A finished study: accuracies {arm: [one for each seed]}, the same at all steps."""
    plan = small_plan(tuple(accuracies), range(max(map(len, accuracies.values()))), **more)
    write_json(out / "plan.json", plan)
    for arm, values in accuracies.items():
        for seed, accuracy in enumerate(values):
            folder = write_run(out, seed, arm)
            for step in plan["evaluations"][0]["steps"]:
                write_answers(folder, "sampled", step, rows_of_right(accuracy))
    return plan


def analysed(out, hide_means=False):
    return analysis(read_study(out), hide_means)


def outcome(found, arm, endpoint="sampled mean@2"):
    return next(row for row in found["arms"] if row["name"] == arm)["outcomes"][endpoint]


def comparison(found, arm, other, endpoint="sampled mean@2"):
    rows = [
        r for r in found["comparisons"] if (r["arm"], r["other"], r["endpoint"]) == (arm, other, endpoint)
    ]
    assert len(rows) == 1
    return rows[0]


@pytest.fixture
def without_pictures(monkeypatch):
    """Drawing takes most of the time, and is looked at in tests of its own."""
    monkeypatch.setattr(study_module, "study_page", lambda found: "the page")


def test_an_accuracy_is_the_mean_over_steps_questions_and_samples(tmp_path):
    """Step 70: (1 + 0.5) / 2 over two questions, step 80: (0.5 + 0) / 2; an undecided answer is not right."""
    write_json(tmp_path / "plan.json", small_plan(seeds=(0,)))
    for arm in ("grpo", "m3po"):
        folder = write_run(tmp_path, 0, arm)
        lengths = np.array([[10, 20], [30, 40]])
        write_answers(folder, "sampled", 70, [[1, 1], [1, 0]], lengths=lengths)
        write_answers(folder, "sampled", 80, [[0, 1], [0, 0]], lengths=lengths)
    path = folder / "answers" / "sampled-80.json.gz"
    answers = json.loads(gzip.decompress(path.read_bytes()))
    answers["right"][0][1] = None
    write_json(path, answers)
    study = read_study(tmp_path)
    found = analysis(study)
    assert outcome(found, "grpo")["by_seed"] == {"0": pytest.approx((0.75 + 0.25) / 2)}
    assert outcome(found, "m3po")["by_seed"] == {"0": pytest.approx((0.75 + 0.0) / 2)}
    scores = study.scores[0, "grpo"]["sampled"]
    assert scores["pass"].tolist() == [[1, 1], [1, 0]]
    assert scores["length"].tolist() == [[15, 35], [15, 35]]


def test_the_majority_is_that_of_the_evaluations():
    """Of several answers with the same count the one given first wins; without any it is not right."""
    generator = np.random.default_rng(0)
    votes = generator.integers(0, 4, (300, 8)).astype(float)
    votes[generator.random(votes.shape) < 0.3] = np.nan
    votes[0] = np.nan
    right = (votes == generator.integers(0, 4, (300, 1))).astype(float)
    texts = [[None if np.isnan(vote) else f"answer {vote:.0f}" for vote in row] for row in votes]
    expected = [majority(*row) for row in zip(texts, right, strict=True)]
    assert majorities(right, votes).tolist() == expected
    assert {0.0, 1.0} == set(expected)


def test_the_questions_may_stand_in_another_order_but_must_be_the_same(tmp_path):
    write_small_study(tmp_path, {"grpo": [0.3, 0.3], "m3po": [0.4, 0.4]})
    path = tmp_path / "runs" / "1" / "m3po" / "answers" / "sampled-80.json.gz"
    answers = json.loads(gzip.decompress(path.read_bytes()))
    turned = answers | {key: answers[key][::-1] for key in ("questions", "right", "lengths", "votes")}
    before = read_study(tmp_path).scores[1, "m3po"]["sampled"]
    write_json(path, turned)
    after = read_study(tmp_path).scores[1, "m3po"]["sampled"]
    assert all(np.array_equal(before[measure], after[measure]) for measure in before)
    write_json(path, answers | {"questions": [*answers["questions"][1:], "another"]})
    with pytest.raises(DataError, match=r"1/m3po/answers/sampled-80\.json\.gz: has other questions"):
        read_study(tmp_path)


def test_arms_are_compared_by_seed(tmp_path):
    """Differences 0.1, 0.2, 0.3: the t's interval by hand is 0.2 -+ 4.3027 * 0.1 / sqrt(3)."""
    write_small_study(tmp_path, {"grpo": [0.1, 0.3, 0.2], "m3po": [0.2, 0.5, 0.5]})
    row = comparison(analysed(tmp_path), "m3po", "grpo")
    assert row["by_seed"] == {"0": pytest.approx(0.1), "1": pytest.approx(0.2), "2": pytest.approx(0.3)}
    assert (row["seeds"], row["freedom"], row["role"]) == (3, 2, "primary")
    assert row["difference"] == pytest.approx(0.2)
    assert row["difference_ci95"] == pytest.approx([-0.0484, 0.4484], abs=1e-4)
    assert row["p"] == pytest.approx(0.0742, abs=5e-5)
    low, high = row["bootstrap_ci95"]
    assert 0.05 < low < 0.2 < high < 0.35


GOOD = {"grpo": [0.30, 0.31, 0.32], "m3po": [0.40, 0.42, 0.41], "scaled_mean": [0.35, 0.36, 0.37]}
GOOD |= {"noise": [0.30, 0.32, 0.31], "strangers": [0.31, 0.30, 0.32]}


def test_a_whole_study_has_its_verdict_with_the_numbers(tmp_path):
    write_small_study(tmp_path, GOOD)
    found = analysed(tmp_path)
    assert found["complete"]
    assert (found["verdict"]["words"], found["verdict"]["second"]) == ("helps", "and choosing matters")
    sentence = found["verdict"]["sentence"]
    assert sentence.startswith(
        "m3po against grpo: helps, and choosing matters. The difference in sampled mean@2 "
    )
    assert (
        "is +10.00 points (95% interval +7.52 to +12.48, p = 0.0033, 3 seeds; TOST within 1 point" in sentence
    )
    tested = {(row["arm"], row["other"]) for row in found["comparisons"] if row["role"] == "control"}
    peers = CONFIRMATORY[2:]
    assert tested == {("m3po", peer) for peer in peers} | {(peer, "grpo") for peer in peers}


def test_an_undecided_study_says_what_it_could_have_seen(tmp_path):
    write_small_study(tmp_path, GOOD | {"m3po": [0.30, 0.35, 0.33]})
    verdict = analysed(tmp_path)["verdict"]
    assert verdict["words"] == "undecided"
    row = comparison(analysed(tmp_path), "m3po", "grpo")
    seen = (
        f"A true difference of {100 * row['smallest_effect']:.2f} points would have been found in 80% of such"
    )
    assert seen in verdict["sentence"]


@pytest.mark.parametrize("verdict", [None, VERDICT])
def test_without_a_verdict_in_the_plan_there_is_the_table_alone(tmp_path, verdict):
    write_small_study(tmp_path, GOOD, verdict=verdict)
    found = analysed(tmp_path)
    assert (found["verdict"] is None) == (verdict is None)
    assert (found["result"] is None) == (verdict is not None)
    [line] = told(found)
    assert (
        "The difference in sampled mean@2 is +10.00 points (95% interval +7.52 to +12.48, p = 0.0033" in line
    )
    assert {row["role"] for row in found["comparisons"]} == {"primary", "control"}


@pytest.mark.parametrize("verdict", [None, VERDICT])
@pytest.mark.parametrize("m3po", [0.40, 0.30])
def test_seeds_that_are_all_alike_are_said_to_prove_nothing(verdict, m3po, tmp_path, monkeypatch):
    """Two seeds that gain the same 10 points had p = 0 and an interval of no width, and no word beside."""
    monkeypatch.setattr(study_page, "draw_endpoint", lambda *_: None)
    arms = {arm: [0.30, 0.30] for arm in CONFIRMATORY} | {"m3po": [m3po, m3po]}
    write_small_study(tmp_path, arms, verdict=verdict)
    found = analysed(tmp_path)
    beware = "Beware: all seeds show the same difference (m3po against grpo"
    assert beware in (found["result"] or found["verdict"]["sentence"])
    assert beware in endpoint_part(found, found["endpoints"][0])["remark"]


def test_seeds_that_differ_need_no_such_word(tmp_path):
    write_small_study(tmp_path, GOOD, verdict=None)
    assert "Beware" not in analysed(tmp_path)["result"]


def test_an_incomplete_study_names_what_is_missing_and_has_no_verdict(tmp_path):
    write_small_study(tmp_path, GOOD)
    (tmp_path / "runs/0/noise/run.json").unlink()
    (tmp_path / "runs/1/m3po/answers/sampled-80.json.gz").unlink()
    write_run(tmp_path, 2, "grpo", status="running", step=40)
    found = analysed(tmp_path)
    assert found["missing"] == [
        "runs/2/grpo: running, at step 40",
        "runs/1/m3po: no answers/sampled-80.json.gz",
        "runs/0/noise: no run.json",
    ]
    assert (found["complete"], found["verdict"]) == (False, None)
    assert list(comparison(found, "m3po", "grpo")["by_seed"]) == ["0"], "what both arms have is shown"


def test_exploratory_runs_may_be_missing_and_are_named(tmp_path):
    """`own` has four seeds of five in the plan, and was not run at all."""
    plan = write_small_study(tmp_path, {arm: [*values, 0.3, 0.3] for arm, values in GOOD.items()})
    own = {"name": "own", "settings": {}, "role": "exploratory", "seeds": [0, 1, 2, 3]}
    write_json(tmp_path / "plan.json", plan | {"arms": [*plan["arms"], own]})
    found = analysed(tmp_path)
    assert found["missing_exploratory"] == [f"runs/{seed}/own: no run.json" for seed in range(4)]
    assert found["verdict"] is not None
    assert outcome(found, "own") == {"mean": None, "deviation": None, "by_seed": {}}


def test_exploratory_arms_are_shown_and_not_tested(tmp_path):
    plan = write_small_study(tmp_path, GOOD)
    plan["verdict"] = None
    plan["arms"][4]["role"] = "exploratory"
    write_json(tmp_path / "plan.json", plan)
    found = analysed(tmp_path)
    for pair in (("strangers", "grpo"), ("m3po", "strangers")):
        row = comparison(found, *pair)
        assert row["role"] == "shown"
        assert "difference_ci95" in row
        assert not {"p", "tost_p", "p_holm"} & set(row)


def test_a_collapsed_run_counts_with_its_last_weights(tmp_path):
    """It has its own answers at step 70, and at 80 again those; one without weights has 0 at both."""
    write_small_study(tmp_path, {"grpo": [0.3, 0.3], "m3po": [0.4, 0.4]})
    for seed, step in ((0, 70), (1, None)):
        folder = write_run(tmp_path, seed, "m3po", status="collapsed", step=step, reason="reward fell to 0")
        (folder / "answers" / "sampled-80.json.gz").unlink()
    (folder / "answers" / "sampled-70.json.gz").unlink()
    write_answers(tmp_path / "runs/0/m3po", "sampled", 70, rows_of_right(0.2))
    found = analysed(tmp_path)
    assert found["complete"]
    assert outcome(found, "m3po")["by_seed"] == {"0": pytest.approx(0.2), "1": 0.0}
    assert found["notes"] == [
        "m3po, seed 0: collapsed (reward fell to 0); it counts with its weights of step 70",
        "m3po, seed 1: collapsed (reward fell to 0); it counts as 0",
    ]


def test_answers_of_older_weights_do_not_stand_for_the_last_ones(tmp_path):
    """Its last weights are of step 75, and only those of step 70 have answered: the rest is missing."""
    write_small_study(tmp_path, {"grpo": [0.3, 0.3], "m3po": [0.4, 0.4]})
    folder = write_run(tmp_path, 0, "m3po", status="refused", step=75)
    (folder / "answers" / "sampled-80.json.gz").unlink()
    assert analysed(tmp_path)["missing"] == ["runs/0/m3po: no answers/sampled-80.json.gz"]


def test_a_run_without_weights_has_an_accuracy_of_0_and_no_length(tmp_path):
    secondary = [{"evaluation": "sampled", "measure": measure} for measure in ("length", "pass", "maj")]
    write_small_study(tmp_path, {"grpo": [0.3] * 3, "m3po": [0.4] * 3}, secondary=secondary)
    folder = write_run(tmp_path, 1, "m3po", status="refused", step=0)
    for path in (folder / "answers").iterdir():
        path.unlink()
    found = analysed(tmp_path)
    assert outcome(found, "m3po", "sampled length")["by_seed"] == {"0": 100.0, "2": 100.0}
    assert outcome(found, "m3po", "sampled maj@2")["by_seed"]["1"] == 0.0
    length = comparison(found, "m3po", "grpo", "sampled length")
    assert (length["seeds"], length["role"], "tost_p" in length) == (2, "shown", False)
    assert "p" not in length


def test_runs_from_different_starts_are_refused_with_both_hashes(tmp_path):
    write_small_study(tmp_path, {"grpo": [0.3], "m3po": [0.4]})
    write_run(tmp_path, 0, "m3po", start_hash="another")
    with pytest.raises(DataError, match="runs/0/m3po: start_hash another, and grpo of seed 0 has start0"):
        read_study(tmp_path)
    write_run(tmp_path, 0, "grpo", start_hash="another")
    read_study(tmp_path)
    write_json(tmp_path / "starts/0.json", {"seed": 0, "start_hash": "start0"})
    with pytest.raises(DataError, match="another, and its start of seed 0 has start0"):
        read_study(tmp_path)


def test_runs_of_other_code_are_named(tmp_path):
    write_small_study(tmp_path, {"grpo": [0.3, 0.3], "m3po": [0.4, 0.4]})
    write_run(tmp_path, 1, "m3po", code_hash="0123456789abcdef")
    assert analysed(tmp_path)["notes"] == [
        "made by other code than most runs (code): m3po, seed 1 (0123456789ab)"
    ]


def test_a_verdict_that_reads_an_exploratory_arm_is_refused(tmp_path):
    plan = write_small_study(tmp_path, GOOD)
    plan["arms"][3]["role"] = "exploratory"
    write_json(tmp_path / "plan.json", plan)
    with pytest.raises(DataError, match="the verdict reads the arm 'noise', which is exploratory"):
        read_study(tmp_path)


def test_secondary_comparisons_have_holm_s_correction_and_steps_can_differ(tmp_path):
    secondary = [
        {"evaluation": "sampled", "measure": "pass"},
        {"evaluation": "sampled", "measure": "maj"},
        {"evaluation": "sampled", "measure": "mean", "steps": {"treatment": 70, "baseline": 80}},
    ]
    write_small_study(tmp_path, {"grpo": [0.1, 0.3, 0.2], "m3po": [0.2, 0.5, 0.5]}, secondary=secondary)
    for seed in range(3):
        write_answers(tmp_path / f"runs/{seed}/m3po", "sampled", 70, rows_of_right(0.1 * (seed + 5)))
        for arm, seconds in (("grpo", 2.0), ("m3po", 2.5)):
            lines = [json.dumps({"step": step, "train_seconds": seconds * step}) + "\n" for step in (70, 80)]
            (tmp_path / f"runs/{seed}/{arm}/metrics.jsonl").write_text("".join(lines))
    found = analysed(tmp_path)
    two = [comparison(found, "m3po", "grpo", f"sampled {measure}@2") for measure in ("pass", "maj")]
    assert [row["role"] for row in two] == ["secondary", "secondary"]
    ps = [row["p"] for row in two]
    assert [row["p_holm"] for row in two] == [pytest.approx(max(2 * min(ps), p), rel=1e-5) for p in ps]
    apart = comparison(found, "m3po", "grpo", "sampled mean@2 at steps 70 and 80")
    assert apart["by_seed"] == {"0": pytest.approx(0.4), "1": pytest.approx(0.3), "2": pytest.approx(0.5)}
    assert (apart["seconds"], apart["role"], "p_holm" in apart) == ([175.0, 160.0], "shown", False)


def test_the_look_hides_the_means_and_sets_the_number_of_seeds_once(tmp_path, without_pictures):
    """Two of four seeds are looked at; a spread of 0.1 asks for all, one of 0 for the fewest, three."""
    more = dict(look_after=2, fewest_seeds=3, most_seeds=4, hide_means=True)
    write_small_study(tmp_path, {"grpo": [0.3] * 4, "m3po": [0.37] * 4}, **more)
    for seed in (1, 2, 3):
        (tmp_path / f"runs/{seed}/m3po/run.json").rename(tmp_path / f"{seed}.json")
    assert write_study(tmp_path)["look"] is None, "one seed has no spread"
    (tmp_path / "1.json").rename(tmp_path / "runs/1/m3po/run.json")
    found = write_study(tmp_path)
    look = json.loads((tmp_path / "look.json").read_text())
    assert (look["seeds_looked_at"], look["seeds"], look["sd"], look["enough"]) == ([0, 1], 3, 0.0, True)
    assert found["look"] == look
    text = (tmp_path / "study.json").read_text()
    assert "0.37" not in text
    assert "0.07" not in text
    assert {"arms", "comparisons", "curves"} & set(found) == set()
    for step in (70, 80):
        write_answers(tmp_path / "runs/0/m3po", "sampled", step, rows_of_right(0.6))
    assert write_study(tmp_path)["look"] == look, "written once"
    (tmp_path / "2.json").rename(tmp_path / "runs/2/m3po/run.json")
    (tmp_path / "3.json").rename(tmp_path / "runs/3/m3po/run.json")
    found = write_study(tmp_path)
    assert (found["complete"], found["hidden"], found["seeds"]) == (True, False, [0, 1, 2])
    assert comparison(found, "m3po", "grpo")["seeds"] == 3
    assert found["notes"] == ["runs that are not of the study, and left out: grpo, seed 3; m3po, seed 3"]


def test_a_look_that_asks_for_more_seeds_than_the_plan_has_leaves_the_study_incomplete(tmp_path):
    write_small_study(tmp_path, {"grpo": [0.3] * 3, "m3po": [0.4] * 3})
    write_json(tmp_path / "look.json", {"after": 2, "seeds": 5})
    assert analysed(tmp_path)["missing"] == ["the look asks for 5 seeds, and the plan has 3"]


def test_means_are_shown_before_the_end_unless_they_are_hidden(tmp_path, without_pictures):
    write_small_study(tmp_path, {"grpo": [0.3] * 3, "m3po": [0.37] * 3})
    (tmp_path / "runs/2/m3po/run.json").unlink()
    assert not write_study(tmp_path)["hidden"]
    assert not (tmp_path / "look.json").exists()
    assert write_study(tmp_path, hide_means=True)["hidden"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"treatment": "m4po"}, "names the arm 'm4po', and has grpo, m3po"),
        ({"primary": {"evaluation": "greedy"}}, "names the evaluation 'greedy', and has sampled"),
        ({"secondary": [{"evaluation": "sampled", "measure": "median"}]}, "names the measure 'median'"),
        (
            {
                "secondary": [
                    {"evaluation": "sampled", "measure": "mean", "steps": {"treatment": 9, "baseline": 80}}
                ]
            },
            "names the step of sampled 9, and has 70, 80",
        ),
        ({"verdict": VERDICT}, "names the arm 'noise'"),
        (
            {"secondary": [{"evaluation": "sampled", "measure": "mean"}]},
            "has the endpoint 'sampled mean@2' twice",
        ),
        ({"schema": 2}, "has schema 2, and this code reads 1"),
        (
            {"verdict": {"treatment": "grpo", "baseline": "m3po", "controls": []}},
            "the verdict's treatment is 'grpo', and the study's 'm3po'",
        ),
    ],
)
def test_a_plan_that_names_what_it_does_not_have_is_refused(tmp_path, change, words):
    write_small_study(tmp_path, {"grpo": [0.3], "m3po": [0.4]}, **change)
    with pytest.raises(DataError, match=re.escape(words)):
        read_study(tmp_path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda answers: answers.pop("right"), "cannot be read: KeyError"),
        (lambda answers: answers.pop("questions"), "cannot be read: KeyError"),
        (
            lambda answers: answers["right"].pop(),
            r"holds \[\(99, 2\), \(100, 2\)\] answers, and must hold \(100, 2\)",
        ),
        (lambda answers: answers["right"][0].pop(), "cannot be read: ValueError"),
        (lambda answers: answers.pop("votes"), "holds no votes, without which there is no majority"),
    ],
)
def test_answers_that_cannot_be_read_are_named(tmp_path, damage, words):
    secondary = [{"evaluation": "sampled", "measure": "maj"}]
    write_small_study(tmp_path, {"grpo": [0.3], "m3po": [0.4]}, secondary=secondary)
    path = tmp_path / "runs/0/m3po/answers/sampled-70.json.gz"
    answers = json.loads(gzip.decompress(path.read_bytes()))
    damage(answers)
    write_json(path, answers)
    with pytest.raises(DataError, match=rf"0/m3po/answers/sampled-70\.json\.gz: {words}"):
        read_study(tmp_path)


def test_a_damaged_file_is_named(tmp_path):
    write_small_study(tmp_path, {"grpo": [0.3], "m3po": [0.4]})
    path = tmp_path / "runs/0/m3po/answers/sampled-70.json.gz"
    data = path.read_bytes()
    path.write_bytes(data[:20] + b"damaged" + data[27:])
    with pytest.raises(DataError, match=r"sampled-70\.json\.gz: cannot be read"):
        read_study(tmp_path)


@pytest.mark.parametrize("cut", [0, 30, -9])
def test_half_a_file_is_named(tmp_path, cut):
    write_small_study(tmp_path, {"grpo": [0.3], "m3po": [0.4]})
    path = tmp_path / "runs/0/m3po/answers/sampled-70.json.gz"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"sampled-70\.json\.gz: cannot be read"):
        read_study(tmp_path)


def test_the_command_ends_with_one_line_where_there_is_no_study(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["study", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        main()
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("plan.json: there is none: give a folder that grpo_study.py filled")
    assert list(tmp_path.iterdir()) == []


def test_the_command_tells_what_it_found(tmp_path, monkeypatch, capsys, without_pictures):
    write_small_study(tmp_path, GOOD)
    monkeypatch.setattr(sys, "argv", ["study", str(tmp_path)])
    main()
    verdict, files = capsys.readouterr().out.splitlines()
    assert verdict == json.loads((tmp_path / "study.json").read_text())["verdict"]["sentence"]
    assert files.endswith("study.html")
    (tmp_path / "runs/2/m3po/run.json").unlink()
    main()
    out = capsys.readouterr().out
    assert "incomplete, without a verdict: runs/2/m3po: no run.json" in out


def test_the_rows_for_the_benchmarks_come_from_study_json(tmp_path):
    plan = small_plan(CONFIRMATORY, range(3))
    plan["evaluations"].append(an_evaluation("greedy", [80], 1, temperature=0.0))
    plan["secondary"] = [{"evaluation": "greedy", "measure": "mean"}]
    write_fake_study(tmp_path, plan, {"m3po": 0.2}, questions=30, train_steps=0)
    found = json.loads(json.dumps(analysed(tmp_path)))
    rows = {(case, metric): value for case, metric, value, unit in result_rows(found)}
    assert {case for case, _ in rows} == set(CONFIRMATORY)
    named = {"seeds", "mean2", "greedy", "difference", "difference_ci95", "p", "tost_p"}
    assert {metric for case, metric in rows if case == "m3po"} == named
    assert {metric for case, metric in rows if case == "grpo"} == {"seeds", "mean2", "greedy"}
    assert rows["noise", "difference"] == comparison(found, "noise", "grpo")["difference"]
    assert rows["m3po", "difference"] == pytest.approx(
        rows["m3po", "mean2"] - rows["grpo", "mean2"], abs=1e-5
    )
    assert rows["m3po", "greedy"] == outcome(found, "m3po", "greedy")["mean"]


@pytest.mark.slow
def test_a_kept_copy_is_small_and_gives_the_same_numbers(whole, tmp_path):
    out, found = whole
    keep_study(out, tmp_path / "kept")
    assert analysed(tmp_path / "kept") == found
    assert not list((tmp_path / "kept").rglob("*.html"))
    assert len(list((tmp_path / "kept").rglob("metrics.json.xz"))) == len(found["runs"])
    answers = read_json(tmp_path / "kept/runs/0/m3po/answers/sampled-70.json.xz")
    assert answers["questions"] is None, "they stand in one file"
    assert "lengths" not in answers
    with pytest.raises(SettingError, match="is there already"):
        keep_study(out, tmp_path / "kept")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A whole study with hostile words in it, written; and what study.json holds."""
    out = tmp_path_factory.mktemp("studies") / "study"
    plan = small_plan((*CONFIRMATORY, "own"), range(3), name="a <study>", text=f"# Registered\n\n{HOSTILE}")
    plan["secondary"] = [{"evaluation": "sampled", "measure": "length"}]
    plan["arms"][1]["settings"] = {"system_prompt": HOSTILE}
    write_fake_study(out, plan, {"m3po": 0.1}, questions=30, train_steps=12)
    write_run(out, 1, "noise", status="collapsed", reason=HOSTILE)
    return out, write_study(out)


def test_study_json_holds_the_numbers_of_the_page(whole):
    out, found = whole
    assert json.loads((out / "study.json").read_text(), parse_constant=pytest.fail) == found
    page = (out / "study.html").read_text()
    row = comparison(found, "m3po", "grpo")
    assert f"{100 * row['difference']:+.2f}" in page
    assert found["verdict"]["sentence"] in page
    assert set(found["curves"]) >= {"reward", "entropy, nats", "sampled mean@2"}
    curve = found["curves"]["reward"]["grpo"]
    assert curve["steps"] == list(range(1, 13))
    ends = [read_metrics(out / f"runs/{seed}/grpo")[-1]["reward"] for seed in range(3)]
    trained = found["arms"][0]["training"]["reward"]
    assert trained["mean"] == pytest.approx(np.mean(ends), rel=1e-5), "of 12 steps the last tenth is one"
    assert trained["deviation"] == pytest.approx(np.std(ends, ddof=1), rel=1e-5)
    assert f"{trained['mean']:.3g} ± {trained['deviation']:.3g}" in page
    assert all(
        low <= mean <= high
        for low, mean, high in zip(curve["low"], curve["mean"], curve["high"], strict=True)
    )


def test_words_of_others_cannot_leave_their_place(whole):
    page = (whole[0] / "study.html").read_text()
    assert HOSTILE not in page
    assert page.count("<script") == 1
    assert "a &lt;study&gt;" in page


@pytest.mark.slow
def test_a_study_is_shown_in_a_browser(whole, browser):  # noqa: F811
    out, _ = whole
    tab, messages = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark"), []
    tab.on("console", lambda message: messages.append(message.text))
    tab.on("pageerror", lambda error: messages.append(str(error)))
    requests = []
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto((out / "study.html").as_uri())
    assert (tab.title(), messages) == ("a <study>", [])
    assert [url for url in requests if not url.startswith("data:")] == [(out / "study.html").as_uri()]
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390, "only tables and pictures scroll"
    assert tab.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
    hint = tab.locator("#curves").get_by_text("scroll it sideways")
    assert hint.is_visible()
    assert tab.evaluate("document.querySelector('#curves .picture').scrollWidth") > 390
    assert tab.locator("html").get_attribute("data-theme") == "dark"
    tab.click("#theme")
    assert tab.locator("html").get_attribute("data-theme") == "light"
    shown = tab.locator(".endpoint:visible")
    assert shown.count() == 1
    assert "TOST p" in shown.inner_text()
    tab.keyboard.press("n")
    assert tab.locator("#endpoint").input_value() == "sampled length, tokens (secondary)"
    tab.keyboard.press("n")
    tab.keyboard.press("p")
    assert shown.count() == 1
    assert tab.locator("#endpoint").input_value() == "sampled length, tokens (secondary)"
    assert HOSTILE in tab.locator("#registered").inner_text()
    assert HOSTILE in tab.locator("#verdict").inner_text()
    tab.close()


def test_the_page_of_a_study_that_has_just_begun(tmp_path):
    write_json(tmp_path / "plan.json", small_plan(CONFIRMATORY))
    found = write_study(tmp_path)
    assert len(found["missing"]) == 10
    page = (tmp_path / "study.html").read_text()
    assert "No verdict: the study is incomplete, 10 parts of it are missing." in page
    assert "runs/1/m3po: no run.json" in page
    assert "No run has written metrics yet." in page
    write_study(tmp_path, hide_means=True)
    assert "The means are hidden until the study is complete." in (tmp_path / "study.html").read_text()


def test_the_page_of_a_look_has_the_spread_and_the_number_of_seeds_and_no_mean(tmp_path):
    write_small_study(tmp_path, {"grpo": [0.3, 0.3], "m3po": [0.37, 0.31]}, look_after=2, most_seeds=9)
    write_study(tmp_path, hide_means=True)
    page = (tmp_path / "study.html").read_text()
    assert "9 (not enough)" in page
    assert "4.24 points, from 2 seeds" in page
    for mean in ("37", "0.04", "+4.00", "<img"):
        assert mean not in page.split("</style>")[1]

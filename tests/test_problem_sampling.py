"""Problems drawn by their pass rates: the chances, the draw, the history, and what is refused."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from test_dynamic_sampling import PAYS_SOME

import grpo_study
import grpo_train
from decoding.rollout import Completion
from errors import SettingError
from problems.problem import EncodedProblem, Problem
from running import evaluation, sft_config
from running.parsing import parse_config
from running.progress import (
    Progress,
    chance_of_mixed_group,
    draw_probabilities,
    next_problems,
    note_pass_rates,
    order_by_pass_rate,
    prior_worth,
)
from running.study_file import read_study
from small_recipes import config_of
from small_runs import command, lines


def test_the_chance_of_a_mixed_group_by_hand():
    """One right of two, none of two: the average rate with its half sample is 1.5 / 5, so that the posteriors
    are Beta(1.3, 1.7) and Beta(0.3, 2.7); both completions are right with a (a + 1) / ((a + b) (a + b + 1)).
    """
    chances = chance_of_mixed_group(np.array([1, 0]), np.array([1, 2]), num_generations=2)
    expected = [1 - (1.3 * 2.3 + 1.7 * 2.7) / 12, 1 - (0.3 * 1.3 + 2.7 * 3.7) / 12]
    assert chances == pytest.approx(expected)


def test_the_chance_is_that_of_sampled_pass_rates():
    """Against pass rates drawn from the posterior, and groups drawn with them."""
    generator = np.random.default_rng(0)
    right, wrong = np.array([3.0, 0.5]), np.array([1.0, 7.5])
    mean = 4.0 / 13
    for chance, a, b in zip(chance_of_mixed_group(right, wrong, 8, prior=2.0), right, wrong, strict=True):
        counts = generator.binomial(8, generator.beta(a + 2 * mean, b + 2 * (1 - mean), 40_000))
        assert chance == pytest.approx(((counts > 0) & (counts < 8)).mean(), abs=0.01)


@pytest.mark.parametrize(("a", "b"), [(0.15, 0.85), (1, 3)])
def test_the_prior_is_worth_what_the_spread_of_the_rates_says(a, b):
    generator = np.random.default_rng(0)
    right = generator.binomial(4, generator.beta(a, b, 20_000))
    assert prior_worth(right, 4) == pytest.approx(a + b, rel=0.1)


def test_the_prior_is_worth_a_ninth_of_a_sample_at_least_and_19_at_most():
    """Problems that are always or never solved have a correlation of 1, and all alike one below 0."""
    assert prior_worth(np.array([0, 4] * 10), 4) == pytest.approx(1 / 9)
    assert prior_worth(np.array([2] * 20), 4) == pytest.approx(19)


@pytest.mark.parametrize("samples", [0, 1, 4])
def test_without_a_spread_the_prior_is_worth_one_sample(samples):
    assert prior_worth(np.zeros(5), samples) == 1.0


def test_every_problem_keeps_its_share_of_the_floor():
    """Chances 1 to 2, squared: 1/5 and 4/5 of what the floor leaves."""
    assert draw_probabilities(np.array([0.2, 0.4]), 2.0, 0.1) == pytest.approx([0.23, 0.77])
    assert draw_probabilities(np.array([0.0, 0.4]), 2.0, 0.1) == pytest.approx([0.05, 0.95])


def a_run(right, wrong, step=0, seed=0, **settings):
    history = {"data": "d", "right": right, "wrong": wrong, "prior": 1.0}
    config = grpo_train.Config(problem_sampling="pass_rate", seed=seed, **settings)
    return SimpleNamespace(config=config, problems_drawn=0, progress=Progress(step=step, pass_rates=history))


def test_the_draw_is_without_replacement_in_proportion_to_the_probabilities():
    """Two problems answered both ways, and one that is always right: of pairs drawn one after the other."""
    run, pairs = a_run([2, 2, 4], [2, 2, 0], pass_rate_power=1.0, pass_rate_floor=0.1), Counter()
    chances = chance_of_mixed_group(np.array([2, 2, 4]), np.array([2, 2, 0]), 12)
    p = draw_probabilities(chances, 1.0, 0.1)
    for step in range(3000):
        run.progress.step = step
        pairs[tuple(order_by_pass_rate(run)[:2])] += 1 / 3000
    for first, second in [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)]:
        assert pairs[first, second] == pytest.approx(p[first] * p[second] / (1 - p[first]), abs=0.03)


def test_a_draw_depends_on_seed_step_and_history_alone_and_goes_on_within_a_step():
    problems, counts = list(range(50)), ([i % 5 for i in range(50)], [4 - i % 5 for i in range(50)])
    run = a_run(*counts)
    whole = next_problems(problems, 50, run)
    assert sorted(whole) == problems
    again = a_run(*counts)
    assert [next_problems(problems, n, again) for n in (20, 5, 25)] == [whole[:20], whole[20:25], whole[25:]]
    later = a_run(*counts)  # what earlier steps have drawn takes nothing from this one
    later.problems_drawn = later.progress.problems_drawn = 20
    assert [next_problems(problems, n, later) for n in (20, 5)] == [whole[:20], whole[20:25]]
    others = [a_run(*counts, step=1), a_run(*counts, seed=1), a_run([0, 2] * 25, [4, 2] * 25)]
    assert all(next_problems(problems, 50, other) != whole for other in others)


def test_what_a_step_got_right_is_added_to_half_of_what_was_known():
    """By hand: problem 0 has 3 of 4 right, problem 2 all; problem 1 gave way with 1 of 4 in its texts."""
    problems = [EncodedProblem(Problem(f"q{i}", "7"), "", []) for i in range(4)]
    run = a_run([2.0, 0.0, 1.0, 5.0], [2.0, 4.0, 0.0, 1.0], step=1, num_generations=4)
    said = ["<answer>7</answer>", "<answer>8</answer>"]
    left_out = [(problems[1], [said[1], said[1], said[0], said[1]])]
    sampled = SimpleNamespace(problems=[problems[2], problems[0]], left_out=left_out)
    counts = np.array([2.0, 0, 1, 5]), np.array([2.0, 4, 0, 1])
    chances = chance_of_mixed_group(*counts, 4)
    p = draw_probabilities(chances, run.config.pass_rate_power, run.config.pass_rate_floor)
    metrics = note_pass_rates(run, problems, sampled, [True] * 4 + [True, None, True, True])
    assert run.progress.pass_rates["right"] == [1.0 + 3, 0.0 + 1, 0.5 + 4, 5.0]
    assert run.progress.pass_rates["wrong"] == [1.0 + 1, 2.0 + 3, 0.0, 1.0]
    assert metrics == {
        "mixed_groups": pytest.approx(2 / 3),
        "mixed_groups_expected": pytest.approx(sum(chances[:3]) / 3),
        "mixed_groups_expected_uniform": pytest.approx(sum(chances) / 4),
        "effective_problems": pytest.approx(1 / sum(p**2)),
    }


@pytest.fixture
def pays(tmp_path):
    (tmp_path / "pays.py").write_text(PAYS_SOME)
    return f"{tmp_path}/pays.py:pays"


def settings_by_pass_rate(recipe_start, out, pays, **more):
    how = dict(reward=[pays], problem_sampling="pass_rate", batch_size=3, eval_every=0, num_steps=3)
    return config_of("oneshot", recipe_start, out, grpo_train, **{**how, **more})


def test_a_step_s_groups_and_those_that_gave_way_are_of_different_problems_and_all_count(
    recipe_start, tmp_path, pays, monkeypatch
):
    """The model of these tests is never right: a visit adds G wrong answers to half of what was known."""
    drawn, histories, honest = [], [], grpo_train.next_problems

    def watched(problems, count, run):
        if run.problems_drawn == run.progress.problems_drawn:
            drawn.append([])
            histories.append([list(run.progress.pass_rates[of]) for of in ("right", "wrong")])
        chosen = honest(problems, count, run)
        drawn[-1] += [next(i for i, p in enumerate(problems) if p is one) for one in chosen]
        return chosen

    monkeypatch.setattr(grpo_train, "next_problems", watched)
    out = tmp_path / "out"
    grpo_train.train(settings_by_pass_rate(recipe_start, out, pays, dynamic_sampling=2, pass_rate_samples=2))
    assert any(len(of_step) > 3 for of_step in drawn), "some groups gave way"
    assert all(len(set(of_step)) == len(of_step) for of_step in drawn)
    assert histories[0] == [[0] * 12, [2] * 12]
    for (_, before), (_, after), of_step in zip(histories, histories[1:], drawn, strict=False):
        assert after == [0.5 * n + 4 if i in of_step else n for i, n in enumerate(before)]


def test_the_log_tells_of_the_first_pass_and_of_the_draw(recipe_start, tmp_path, pays, capsys):
    first, *others = (
        json.loads(line)
        for line in grpo_train.train(settings_by_pass_rate(recipe_start, tmp_path / "out", pays))
        .folder.joinpath("metrics.jsonl")
        .read_text()
        .splitlines()
    )
    assert first["first_pass_completions"] == 4 * 12
    assert first["first_pass_correct"] == 0.0
    assert first["train_seconds"] == pytest.approx(
        sum(first[f"{part}_seconds"] for part in ("first_pass", "rollout", "reward", "update"))
    )
    assert all("first_pass_seconds" not in line for line in others)
    assert first["effective_problems"] == pytest.approx(12), "all began alike"
    assert first["mixed_groups"] == 0.0
    assert 0 < first["mixed_groups_expected"] == pytest.approx(first["mixed_groups_expected_uniform"])
    assert others[-1]["mixed_groups_expected_uniform"] < first["mixed_groups_expected_uniform"]
    said = capsys.readouterr().out
    assert "first pass: 48 samples of 12 problems" in said
    assert "WARNING: nothing is right" in said


def test_the_draws_of_the_pass_are_a_problem_s_own_whatever_the_process_and_the_part(monkeypatch):
    """11 problems in parts of 4, on one process and on three."""
    monkeypatch.setattr(evaluation, "AT_ONCE", 4)
    monkeypatch.setattr(evaluation, "right_answers", lambda texts, *_: [True] * len(texts))
    monkeypatch.setattr(evaluation, "gather_object", list)
    problems = [EncodedProblem(Problem("q", "1", id=str(i)), "", [i]) for i in range(11)]
    config = grpo_train.Config(problem_sampling="pass_rate", seed=5, pass_rate_samples=2)
    drawn = {}

    def complete(prompts, sampling, seed, rows, indices):
        for prompt, index in zip(prompts, indices, strict=True):
            drawn.setdefault(processes, {})[prompt[0]] = (seed, index)
        return [[Completion([1], "t", True)] * sampling.num_generations for _ in prompts]

    for processes in (1, 3):
        counts = []
        for rank in range(processes):
            accelerator = SimpleNamespace(process_index=rank, num_processes=processes)
            run = SimpleNamespace(config=config, accelerator=accelerator, local_groups=range(2))
            run.interruptible = lambda decoder, action: action()
            counts += evaluation._sample_pass(run, SimpleNamespace(complete=complete), problems)
        assert counts == [2] * 11
    assert drawn[1] == drawn[3]
    assert len(set(drawn[1].values())) == 11
    assert min(seed for seed, _ in drawn[1].values()) >= 2**31, "no run's own seed, whose draws steps have"


def test_without_samples_there_is_no_pass(recipe_start, tmp_path, pays, capsys):
    grpo_train.train(settings_by_pass_rate(recipe_start, tmp_path / "out", pays, pass_rate_samples=0))
    assert "first pass" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--num_epochs 1", "num_epochs=1.0: counts passes over the problems, and with problem_sampling"),
        ("--pass_rate_floor 0", "pass_rate_floor=0.0: must be above 0"),
        ("--pass_rate_power 0", "pass_rate_power=0.0: must be above 0"),
        ("--pass_rate_samples -1", "pass_rate_samples=-1: must be from 0"),
        ("--problem_sampling hardest", "problem_sampling='hardest': must be one of uniform, pass_rate"),
        (
            "--problem_sampling uniform --pass_rate_samples 2",
            "pass_rate_samples=2: has no effect with problem",
        ),
    ],
)
def test_what_means_nothing_is_refused(flags, words):
    given = (
        flags.split() if "problem_sampling" in flags else ["--problem_sampling", "pass_rate", *flags.split()]
    )
    with pytest.raises(SettingError) as refused:
        parse_config(grpo_train.Config, given)
    assert words in str(refused.value)


def test_a_batch_that_cannot_be_drawn_without_replacement_is_refused(recipe_start, tmp_path, pays):
    """12 problems: four a step and as many in each of two extra rollouts fit, five do not."""
    config = settings_by_pass_rate(recipe_start, tmp_path / "out", pays, batch_size=5, dynamic_sampling=2)
    with pytest.raises(SettingError, match="a step may draw 15 different problems .* there are 12"):
        grpo_train.train(config)
    assert not (tmp_path / "out").exists()


def test_an_arm_of_a_study_may_draw_by_pass_rate_and_none_ends_by_the_clock(tmp_path):
    text = (grpo_study.Path("configs") / "study_tiny.yaml").read_text()
    file = tmp_path / "study.yaml"
    options = grpo_study.Options(output_dir=str(tmp_path / "out"))
    start = sft_config.Config, sft_config.warm_start_settings
    file.write_text(
        text.replace("  - name: m3po\n", "  - name: m3po\n    settings: {problem_sampling: pass_rate}\n")
    )
    study = read_study(file, grpo_train.Config, *start, options)
    assert study.configs["m3po"].problem_sampling == "pass_rate"
    file.write_text(text.replace("  eval_every: 0\n", "  eval_every: 0\n  max_wall_minutes: 5\n", 1))
    with pytest.raises(SettingError, match="max_wall_minutes=5.0: in base: the study sets it"):
        read_study(file, grpo_train.Config, *start, options)


@pytest.mark.slow
def test_the_pass_and_the_draws_are_the_same_on_two_processes(tmp_path):
    """A start that is right now and then, so that the counts of the pass say something."""
    start = (
        "sft_train.py --config configs/tiny_warm_start.yaml --model tiny --dataset arithmetic --limit 3000 "
    )
    start += f"--num_steps 120 --max_completion_length 48 --output_dir {tmp_path}/start"
    assert command(*start.split()).returncode == 0
    flags = f"grpo_train.py --config configs/tiny.yaml --model {tmp_path}/start --warm_start none --limit 45 "
    flags += (
        "--problem_sampling pass_rate --dynamic_sampling 1 --batch_size 5 --num_generations 4 --num_steps 2 "
    )
    flags += "--eval_every 0"
    keys, first_steps, passes = ("step", "example_id", "generation", "completion", "reward"), [], []
    for processes in ("1", "2"):
        where = f"--num_processes {processes} --output_dir {tmp_path / processes}"
        done = command(*flags.split(), *where.split())
        assert done.returncode == 0, done.stderr
        rows = [row for row in lines(tmp_path / processes / "rollouts.jsonl") if row["step"] == 1]
        first_steps.append(sorted(tuple(row[key] for key in keys) for row in rows))
        passes.append(json.loads((tmp_path / processes / "pass_rates.json").read_text())["right"])
    assert first_steps[0] == first_steps[1]
    assert passes[0] == passes[1]
    assert len(set(passes[0])) > 1

"""A run: which problems come next, evaluation on the way, and stopping."""

import io
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from accelerate import Accelerator
from datasets import Dataset

import grpo_train
import sft_train
from decoding.decoder import GroupDecoder
from decoding.rollout import Sampling
from errors import DataError, RunError, SettingError, Stopped
from problems.problem import EncodedProblem, Problem
from problems.sources import GIVEN, load_problems
from reporting.files import read_run_config
from running.contract import INPUTS, differences, noted
from running.evaluation import held_out_accuracy
from running.folder import say_what_is_there
from running.launching import PARENT, seconds_since_start
from running.log import MetricsLog, step_line
from running.parsing import parse_config
from running.progress import Progress, next_problems, steps_to_do
from running.run import Run
from small_faults import settings_of
from small_recipes import config_of

ROOT = Path(__file__).resolve().parents[1]


def test_an_epoch_ends_with_what_is_left_of_the_problems():
    assert steps_to_do(grpo_train.Config(num_epochs=1.0, batch_size=4), 10) == 3
    assert steps_to_do(grpo_train.Config(num_epochs=2.0, batch_size=5), 10) == 4


def test_a_warning_comes_when_steps_in_a_row_tell_nothing():
    """Once, at the step that makes their number; a step that tells something begins the count anew."""
    nothing = dict(reward=0.0, reward_std=0.0, correct=0.0, frac_reward_zero_std=1.0)
    form = dict(reward=0.8, reward_std=0.1, correct=0.0, frac_reward_zero_std=1.0)
    useful = dict(form, frac_reward_zero_std=0.5)
    progress = Progress()
    steps = [nothing, nothing, useful, nothing, nothing, nothing, nothing, form, form, form, form]
    steps += [dict(form, correct=0.1), form, form, dict(nothing, reward_std=0.2), nothing, nothing]
    said = [progress.collapse_warning(metrics, 3) or "" for metrics in steps]
    assert [i for i, line in enumerate(said) if "earned anything for 3 steps" in line] == [5]
    assert [i for i, line in enumerate(said) if "for 3 steps all completions of each" in line] == [9]
    assert (progress.unearned_steps, progress.format_only_steps) == (2, 0)
    assert not any(Progress().collapse_warning(nothing, 0) for _ in range(3)), "0: never"


def test_a_reward_that_pays_everything_alike_is_warned_of():
    """`len(c)` of a list of one message is 1 for all: such a run ended without a word."""
    alike = dict(reward=-1.0, reward_std=0.0, correct=0.1, frac_reward_zero_std=1.0)
    progress = Progress()
    steps = [alike, dict(alike, reward_std=0.2), alike, alike, alike, alike]
    said = [progress.collapse_warning(metrics, 3) or "" for metrics in steps]
    assert [i for i, line in enumerate(said) if "all completions have earned the same" in line] == [4]
    form = dict(alike, reward=0.8, correct=0.0)
    assert "The format is learnt" in [Progress(format_only_steps=2).collapse_warning(form, 3)][0]


def drawn(count, sizes, seed):
    """The numbers of the problems that steps of these sizes draw from `count` problems."""
    run = SimpleNamespace(problems_drawn=0, config=SimpleNamespace(seed=seed))
    return [i for size in sizes for i in next_problems(range(count), size, run)]


def test_each_pass_over_the_problems_is_a_permutation_of_its_own():
    first = drawn(10, [4] * 5, seed=1)
    assert sorted(first[:10]) == list(range(10)) == sorted(first[10:])
    assert first[:10] != first[10:]
    assert first == drawn(10, [4] * 5, seed=1)
    assert first != drawn(10, [4] * 5, seed=2)
    assert len(drawn(3, [8], seed=0)) == 8, "a batch may be larger than the data"


def stand_in(config, **parts):
    """A Run that was not opened, on the only process; nobody has asked it to stop."""
    run = Run(config, {})
    run.accelerator, run.stop = Accelerator(cpu=True), SimpleNamespace(asked=lambda: 0, agreed=lambda: 0)
    vars(run).update(parts)
    return run


@pytest.mark.parametrize("kind", ["file", "rows", "folder"])
def test_the_command_that_a_run_ends_with_is_one_that_evaluates(tmp_path, capsys, kind):
    """`grpo_eval.py --model DIR` was named, which refuses the one file that the model was trained on."""
    (tmp_path / "mine.jsonl").write_text("")
    data = {"file": str(tmp_path / "mine.jsonl"), "rows": GIVEN, "folder": str(tmp_path)}[kind]
    config = grpo_train.Config(dataset=data, output_dir=str(tmp_path / "out"))
    say_what_is_there(stand_in(config, outer=None, folder=tmp_path / "out"))
    other = "" if kind == "folder" else " --dataset OTHER_PROBLEMS.jsonl"
    assert f"grpo_eval.py --model {tmp_path / 'out'}{other}\n" in capsys.readouterr().out


def test_a_run_of_a_study_is_not_told_of_a_flag_that_studies_lack_nor_of_a_model_that_goes(
    tmp_path, capsys, monkeypatch
):
    """It ended with `go on with --resume true`, which grpo_study.py refuses, or a command on no model."""
    config = grpo_train.Config(output_dir=str(tmp_path))
    told = SimpleNamespace(agreed=lambda: 15)
    opened = []

    def begin(*given, **how):
        opened.append(stand_in(config, folder=tmp_path, stop=told, **how))
        raise Stopped

    monkeypatch.setattr(grpo_train, "Run", begin)
    for study in (None, object()):
        with pytest.raises(Stopped):
            grpo_train.train(config, study=study)
        with pytest.raises(SystemExit):
            opened[-1].save_and_leave()
        say_what_is_there(opened[-1])
    alone, of_study = capsys.readouterr().out.split("its page: ")[:2]
    assert "go on with --resume true\n" in alone
    assert "grpo_eval.py --model" in alone
    assert "go on with the same command again\n" in of_study
    assert "grpo_eval.py" not in of_study


def test_a_run_of_a_study_is_named_by_its_bar_and_a_start_says_nothing_of_its_folder(tmp_path, capsys):
    """`--check` of a study showed a bar for each arm without a name, and a start that is thrown away was
    recommended for an evaluation.
    """
    config = grpo_train.Config(output_dir=str(tmp_path / "noise"))
    assert stand_in(config, folder=tmp_path / "noise").bar_name is None
    assert stand_in(config, folder=tmp_path / "noise", of_study=True).bar_name == "noise"
    start = stand_in(config, folder=tmp_path / "0", few_lines=True, of_study=True)
    say_what_is_there(start)
    assert (start.bar_name, capsys.readouterr().out) == ("supervised", "")


def test_held_out_problems_are_answered_greedily(tokenizer, llama, prompts):
    """As `complete` answers them, which is tested against `generate`."""
    decoder, rows = GroupDecoder(llama, tokenizer), []
    problems = [EncodedProblem(Problem("q", "1", id=str(i)), "", ids) for i, ids in enumerate(prompts)]
    config, log = grpo_train.Config(max_completion_length=24), SimpleNamespace(write_evaluation=rows.extend)
    metrics = held_out_accuracy(stand_in(config, log=log, progress=Progress(step=3)), decoder, problems)
    greedy = [completion for [completion] in decoder.complete(prompts, Sampling(24))]
    mean_length = sum(len(completion.ids) for completion in greedy) / 5
    assert [row["completion"] for row in rows] == [completion.text for completion in greedy]
    assert {row["step"] for row in rows} == {3}
    assert metrics == {"eval_accuracy": 0.0, "eval_length": mean_length, "eval_questions": 5}


def test_undecided_answers_to_held_out_problems_are_counted_and_not_right(
    tokenizer, llama, prompts, monkeypatch
):
    monkeypatch.setattr("running.evaluation.right_answers", lambda *given: [True, None, None, False, True])
    problems = [EncodedProblem(Problem("q", "1", id=str(i)), "", ids) for i, ids in enumerate(prompts)]
    config, rows = grpo_train.Config(max_completion_length=2), []
    run = stand_in(config, log=SimpleNamespace(write_evaluation=rows.extend), progress=Progress(step=3))
    metrics = held_out_accuracy(run, GroupDecoder(llama, tokenizer), problems)
    assert (metrics["eval_accuracy"], metrics["eval_undecided"]) == (0.4, 2)
    assert [row["right"] for row in rows] == [True, False, False, False, True]


def test_what_was_decoded_counts_for_nothing_where_another_process_was_told_to_stop():
    """It has nothing to show, and would wait for this one for ever."""
    decoder, run = SimpleNamespace(interrupted=None), stand_in(grpo_train.Config())
    assert run.interruptible(decoder, lambda: "text") == "text"
    run.stop.agreed = lambda: 15
    with pytest.raises(Stopped):
        run.interruptible(decoder, lambda: "text")
    assert decoder.interrupted is None


def length_reward(completions, **columns):
    return [float(len(c[0]["content"])) for c in completions]


def rows_of(kind):
    rows = [{"prompt": f"What is {i} and {i}?", "answer": 2 * i, "id": f"mine-{i}"} for i in range(8)]
    if kind == "Problems":
        return [Problem(row["prompt"], str(row["answer"]), id=row["id"]) for row in rows]
    return Dataset.from_list(rows) if kind == "a Dataset" else rows


@pytest.mark.parametrize(("count", "shown"), [(8, "8 problems"), (3, "3 problems"), (1, "1 problem")])
def test_a_batch_of_more_problems_than_there_are_is_told(count, shown, recipe_start, tmp_path, capsys):
    """Of one it said `1 problems`, as of one step, one question and one value."""
    settings = dict(batch_size=4, num_generations=2, num_steps=1, max_completion_length=4, eval_every=0)
    config = grpo_train.Config(model=str(recipe_start / "model"), output_dir=str(tmp_path), **settings)
    grpo_train.train(config, reward_functions=length_reward, dataset=rows_of("dicts")[:count])
    out = capsys.readouterr().out
    assert f": {shown} to train on, 0 held out" in f": {out}"
    assert (f"note: batch_size=4 is above the {shown}: steps repeat some" in out) == (count < 4)


def test_reference_answers_that_can_never_be_right_are_told_with_their_number(recipe_start, tmp_path, capsys):
    settings = dict(batch_size=4, num_generations=2, num_steps=1, max_completion_length=4, eval_every=0)
    config = grpo_train.Config(model=str(recipe_start / "model"), output_dir=str(tmp_path), **settings)
    rows = [*rows_of("dicts")[:4], {"prompt": "What is left?", "answer": "..."}]
    grpo_train.train(config, reward_functions=length_reward, dataset=rows)
    said = "note: 1 of 5 reference answers can never be right in answer_format=xml, such as '...'"
    assert said in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:m3po_control")
@pytest.mark.parametrize("lam", [0.0, 0.1])
def test_of_controls_is_told_where_paths_hear_anything(lam, recipe_start, tmp_path, capsys):
    """A run of plain GRPO said that its paths do not hear what they hear in M3PO."""
    settings = dict(batch_size=2, num_generations=3, num_steps=1, max_completion_length=4, eval_every=0)
    settings |= dict(m3po_lambda=lam, m3po_control="noise", m3po_scoring="plain")
    config = grpo_train.Config(model=str(recipe_start / "model"), output_dir=str(tmp_path), **settings)
    grpo_train.train(config, reward_functions=length_reward, dataset=rows_of("dicts"))
    out = capsys.readouterr().out
    assert [f"m3po_{name}=" in out for name in ("control", "scoring")] == [lam > 0] * 2
    assert "\n1 step of 2 x 3 completions on 1 cpu process, each ends on " in out, "how long is it?"


@pytest.mark.parametrize("kind", ["dicts", "a Dataset", "Problems"])
def test_rewards_and_problems_can_be_given_from_python(kind, recipe_start, tmp_path):
    """Instead of names, as TRL takes them; what is returned says where the model is."""
    settings = dict(batch_size=2, num_generations=2, num_steps=2, max_completion_length=8, eval_every=0)
    config = grpo_train.Config(model=str(recipe_start / "model"), output_dir=str(tmp_path), **settings)
    functions = [(length_reward, np.float32(0.5))] if kind == "Problems" else length_reward
    weight = 0.5 if kind == "Problems" else 1.0
    result = grpo_train.train(config, reward_functions=functions, dataset=rows_of(kind))
    assert result.folder == tmp_path
    assert result.metrics["step"] == 2
    assert result.metrics["reward"] == pytest.approx(weight * result.metrics["reward/length_reward"])
    rows = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    assert {row["example_id"] for row in rows} <= {f"mine-{i}" for i in range(8)}
    noted = yaml.safe_load((tmp_path / "run_config.yaml").read_text())
    assert (noted["dataset"], noted["reward_set"]) == (GIVEN, GIVEN), "it said grpo_m3po, as the card did"
    card = (tmp_path / "README.md").read_text()
    assert "| `reward_set` | given in Python |" in card
    assert " on problems given in Python, " in card
    with pytest.raises(DataError, match="were given in Python: name a file or a hub id"):
        load_problems(GIVEN, "test")
    again = parse_config(grpo_train.Config, ["--config", str(tmp_path / "run_config.yaml")])
    with pytest.raises(SettingError, match="reward_set='given in Python': .* name yours by --reward"):
        grpo_train.train(replace(again, output_dir=str(tmp_path / "again")))


def test_a_run_in_a_thread_trains_and_leaves_signals_to_the_main_one(recipe_start, tmp_path):
    """It ended in a ValueError of Python's: `signal only works in main thread`."""
    settings = dict(batch_size=2, num_generations=2, num_steps=1, max_completion_length=8, eval_every=0)
    config = grpo_train.Config(model=str(recipe_start / "model"), output_dir=str(tmp_path), **settings)
    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(grpo_train.train, config, length_reward, rows_of("dicts")).result()
    assert result.metrics["step"] == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_training_at_once_in_a_process_is_refused_and_one_after_it_is_not(recipe_start, tmp_path):
    """Two threads loaded models in each other's midst: `lacks 1 of its weights`, of a whole model."""
    settings = dict(batch_size=2, num_generations=2, num_steps=1, max_completion_length=8, eval_every=0)
    config = grpo_train.Config(model=str(recipe_start / "model"), output_dir=str(tmp_path / "a"), **settings)
    other, refused = replace(config, output_dir=str(tmp_path / "b")), []

    def begins_another(completions, **columns):
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(grpo_train.train, other, length_reward, rows_of("dicts"))
        refused.append(second.exception())
        return [1.0] * len(completions)

    grpo_train.train(config, begins_another, rows_of("dicts"))
    assert [type(error) for error in refused] == [RunError]
    assert "another training goes on in this process" in str(refused[0])
    with pytest.raises(SettingError, match="holds a run already"):  # which lets others run again, too
        grpo_train.train(config, length_reward, rows_of("dicts"))
    assert grpo_train.train(other, length_reward, rows_of("dicts")).metrics["step"] == 1


def test_a_run_with_rewards_from_python_goes_on_from_what_an_older_version_left():
    """Which noted reward_set: grpo_m3po for them; the functions themselves are compared."""
    inputs = dict.fromkeys(INPUTS, "the same")
    then = noted(grpo_train.Config(), inputs)
    now = grpo_train.Config(reward_set=GIVEN)
    assert differences(now, then, inputs) == {}
    assert differences(now, then, inputs | {"rewards": "others"}) == {"rewards": ("the same", "others")}


PAID = 1.0  # by a function of a reward's, which looks it up in a comprehension
CALLS = 0


def paid_each(completions):
    return [PAID for _ in completions]


class Pays:
    """A reward that is an object, with a constant, a memory, a counter and a method of its own."""

    def __init__(self, paid):
        self.paid, self.memory, self.calls, self.remember = paid, [], 0, self.count

    def count(self, completions):
        self.memory.append(len(completions))
        self.calls += 1

    def __call__(self, completions, **columns):
        self.remember(completions)
        return [self.paid] * len(completions)


def rewards_that_hold(default=1.0, around=1.0, attribute=1.0):
    """Rewards whose text is the same, whatever they hold."""

    def by_default(completions, paid=default, **columns):
        return [paid] * len(completions)

    calls = 0

    def by_closure(completions, **columns):
        nonlocal calls
        calls += 1
        return [around for _ in completions]

    def by_global(completions, **columns):
        global CALLS
        CALLS += 1
        return paid_each(completions)

    made = {"__name__": None}
    exec("def of_no_module(completions, **columns): return [1.0] * len(completions)", made)
    return [by_default, by_closure, by_global, Pays(attribute), made["of_no_module"]]


def test_rewards_from_python_may_not_hold_other_values_when_a_run_goes_on(
    recipe_start, tmp_path, capsys, monkeypatch
):
    """Their text alone was compared: a run went on with its reward turned round, without a word. A counter
    is none of its values: a run with one could not go on in the process that had begun it.
    """
    settings = dict(batch_size=2, num_generations=2, num_steps=1, max_completion_length=8, eval_every=0)
    config = grpo_train.Config(model=str(recipe_start / "model"), output_dir=str(tmp_path), **settings)
    train = partial(grpo_train.train, dataset=rows_of("dicts"))
    remembers = rewards_that_hold()
    train(config, remembers)
    for rewards in (remembers, rewards_that_hold()):
        train(replace(config, resume=True), rewards)
        assert "nothing is left to do" in capsys.readouterr().out
    for changed in ("default", "around", "attribute"):
        with pytest.raises(SettingError, match="written by another run: what the rewards hold changed since"):
            train(replace(config, resume=True), rewards_that_hold(**{changed: -1.0}))
    monkeypatch.setitem(globals(), "PAID", -1.0)
    with pytest.raises(SettingError, match="written by another run: what the rewards hold changed since"):
        train(replace(config, resume=True), rewards_that_hold())


@pytest.mark.parametrize(
    ("given", "settings", "error", "words"),
    [
        (dict(dataset=[]), {}, DataError, "dataset: holds no rows"),
        (dict(dataset={"train": []}), {}, DataError, "is a dict of train, and no rows; .*one split"),
        (dict(reward_functions=[Fraction]), {}, SettingError, "is a class: give an object of it"),
        (dict(dataset=["How many?"]), {}, DataError, "is a list of How many.*give a list of dicts"),
        (dict(dataset=[{"question": "1 + 1?"}]), {}, DataError, "dataset row 1: has no answer"),
        (
            dict(dataset=[{"q": "1?", "a": 1}]),
            dict(question_column="Q"),
            DataError,
            "no column 'Q' for the question",
        ),
        (dict(reward_functions=[]), {}, SettingError, "must hold at least one function"),
        (
            dict(reward_functions="rewards.py:f"),
            {},
            SettingError,
            r"='rewards.py:f': is a name: give the func",
        ),
        (dict(reward_functions=["f"]), {}, SettingError, "reward_functions='f': is neither a function"),
        (dict(dataset=rows_of("dicts")), dict(check=True), SettingError, r"check=True: .*train\(\) would"),
        (
            dict(dataset=rows_of("dicts")),
            dict(num_processes=2),
            SettingError,
            "num_processes=2: a call from Python starts none: .* torchrun --nproc_per_node 2",
        ),
        (
            dict(reward_functions=[(length_reward, float("nan"))]),
            {},
            SettingError,
            "has the weight nan: give a fin",
        ),
        (
            dict(reward_functions=[(length_reward, 0.0)]),
            {},
            SettingError,
            "have no weight but 0, .* only logged",
        ),
        (dict(reward_functions=(length_reward, 0.5)), {}, SettingError, "=0.5: is neither a function"),
        (
            dict(dataset="mine.jsonl"),
            {},
            DataError,
            r"mine.jsonl is a name, .*Config\(dataset='mine.jsonl'\)",
        ),
        (
            dict(reward_functions=[(len, 1.0)]),
            dict(reward_weights=[2.0, 1.0]),
            SettingError,
            "give .function, weight. pairs",
        ),
        (
            dict(reward_functions=[length_reward]),
            dict(reward_set="math"),
            SettingError,
            "reward_set='math': cannot stand beside reward_functions",
        ),
        (
            dict(dataset=rows_of("dicts")),
            dict(dataset="math"),
            SettingError,
            r"dataset='math': cannot stand beside the rows that are given to train\(\): give one",
        ),
        (dict(dataset=rows_of("dicts")), dict(split="test"), SettingError, "split='test': cannot stand"),
        (dict(dataset=rows_of("Problems")), dict(answer_column="a"), DataError, "Problems have no columns"),
        (dict(reward_funcs=len), {}, SettingError, "reward_funcs=.*: is reward_functions here"),
        (dict(train_dataset=Dataset.from_list([{"a": 1}])), {}, SettingError, "is dataset here"),
        (dict(processing_class=None), {}, SettingError, "is not needed: the tokenizer is the model's"),
        (dict(args={}), {}, SettingError, r"is config here: give train\(Config\(...\)\)"),
        (dict(max_steps=3), {}, SettingError, r"max_steps=3: is a setting: give Config\(num_steps=...\)"),
        (dict(reward_function=len), {}, SettingError, "no such argument.*did you mean reward_functions?"),
        (
            dict(dataset=[{"question": "?", "answer": 1}]),
            dict(warm_start=str(ROOT / "configs/tiny_warm_start.yaml")),
            SettingError,
            "give them as --dataset",
        ),
    ],
)
def test_what_cannot_be_given_from_python_is_one_line(given, settings, error, words, recipe_start, tmp_path):
    config = grpo_train.Config(model=str(recipe_start / "model"), output_dir=str(tmp_path), **settings)
    with pytest.raises(error, match=words) as refusal:
        grpo_train.train(config, **given)
    assert "\n" not in str(refusal.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", [grpo_train, sft_train])
def test_the_call_of_a_trainer_of_trl_is_refused_with_our_names(script):
    """It ended in Python's TypeError about `config`, which says nothing of what the arguments are here."""
    with pytest.raises(SettingError, match=r"model='m': is a setting: give Config\(model=...\)"):
        script.train(model="m", args=None)
    with pytest.raises(SettingError, match=r"config=None: must be a Config of this script"):
        script.train()


def test_a_run_ends_saved_before_the_step_that_would_pass_the_minutes_on_the_clock(
    recipe_start, tmp_path, monkeypatch
):
    """Loading took 50 s, then each look at the clock finds it 6 s later; a step here takes none of them."""
    clock = iter(range(50, 1000, 6))
    monkeypatch.setattr("running.run.seconds_since_start", lambda: next(clock))
    how = dict(num_steps=50, eval_every=0, max_wall_minutes=1.4)
    out = grpo_train.train(config_of("oneshot", recipe_start, tmp_path / "out", grpo_train, **how)).folder
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6], "after the sixth it is 86 s, and 84 were given"
    assert (out / "model.safetensors").exists()


def test_a_step_that_is_as_long_as_the_last_one_must_fit_into_the_minutes(monkeypatch):
    monkeypatch.setattr("running.run.seconds_since_start", lambda: 50.0)
    monkeypatch.setattr("running.run.time", SimpleNamespace(perf_counter=lambda: 100.0))
    run = stand_in(grpo_train.Config(max_wall_minutes=1))
    assert [run._is_out_of_time() for run.step_began in (95.0, 85.0)] == [False, True]


def test_minutes_that_are_over_before_the_first_step_are_refused_with_what_it_takes(
    recipe_start, tmp_path, monkeypatch
):
    monkeypatch.setattr("running.run.seconds_since_start", lambda: 93.0)
    config = config_of(
        "oneshot", recipe_start, tmp_path / "out", grpo_train, max_wall_minutes=1, eval_every=0
    )
    with pytest.raises(
        SettingError, match=r"max_wall_minutes=1.0: loading .* took 93 s: give more than 1.7 min"
    ):
        grpo_train.train(config)


def test_a_warm_start_that_does_not_fit_into_the_minutes_is_refused_and_not_taken_for_whole(monkeypatch):
    """It was cut off, and used as it was by the next run. Nine steps of 10 s are left, after 55 s."""
    monkeypatch.setattr("running.run.seconds_since_start", lambda: 55.0)
    monkeypatch.setattr("running.run.time", SimpleNamespace(perf_counter=lambda: 110.0))
    config = grpo_train.Config(max_wall_minutes=1)
    run = stand_in(config, outer=object(), total=10, progress=Progress(step=1), step_began=100.0)
    with pytest.raises(
        SettingError, match="max_wall_minutes=1.0: the warm start alone needs about 2.5 minutes"
    ):
        run._is_out_of_time()
    run.progress.step = 10
    assert run._is_out_of_time(), "its last step was done"


def test_the_clock_of_a_run_began_with_the_launcher_that_started_it(monkeypatch):
    alone = seconds_since_start()
    monkeypatch.setenv(PARENT, str(os.getppid()))
    assert seconds_since_start() > alone > 0


LONGEST = {"step": 1234567, "reward": -1.234e-05, "correct": 0.123456, "eval_accuracy": 0.123456}
LONGEST |= {"skipped": "every completion was cut off and masked", "frac_reward_zero_std": 0.5, "kl": -1.2e-15}
LONGEST |= {"completion_length": 12345.6, "step_seconds": 12345.6, "grad_norm": 1.234e-08, "entropy": 1.2e-7}


@pytest.mark.parametrize("shown", [grpo_train.SHOWN, sft_train.SHOWN])
def test_the_line_of_a_step_is_short_and_says_first_what_matters_most(shown):
    """A GRPO line had up to 170 characters, and wrapped in every terminal."""
    metrics = dict.fromkeys(shown, -1.234e-05) | LONGEST
    names = list(shown)
    for count in range(len(names) + 1):
        line = step_line({name: metrics[name] for name in ("step", *names[:count])}, shown)
        assert len(line) <= 100
    assert line.startswith("step 1234567  ")
    assert "SKIPPED: every completion was cut off and masked" in line
    typical = dict(step=123, reward=1.69, correct=0.445, frac_reward_zero_std=0.03, completion_length=28.6)
    typical |= dict(
        step_seconds=0.65, kl=0.0123, grad_norm=0.113, entropy=0.0569, loss=0.03, learning_rate=1e-5
    )
    shown_parts = step_line({n: typical[n] for n in ("step", *(n for n in names if n in typical))}, shown)
    assert shown_parts.count("  ") == len([name for name in names if name in typical]), "none is left out"
    last = dict(step=123, reward=1.69, skipped=LONGEST["skipped"], eval_accuracy=0.5)
    assert "held-out 0.500" in step_line(last, shown)
    assert "  reward nan" in step_line({"step": 1, "reward": None}, grpo_train.SHOWN)


def test_supervised_steps_are_a_bar_or_in_a_file_ten_lines(warm, tmp_path, capsys, monkeypatch):
    """The warm start printed 400 lines, a step each, before the first of GRPO."""
    monkeypatch.setattr(MetricsLog, "draw", lambda log, *kinds: None)
    settings = read_run_config(warm) | dict(num_steps=25, limit=32, eval_problems=4, eval_every=20)
    settings = {name: settings[name] for name in sft_train.Config.__dataclass_fields__}
    settings |= dict(batch_size=2, output_dir=str(tmp_path / "a"))
    sft_train.train(sft_train.Config(**settings))
    said = capsys.readouterr().out.split("\n")
    steps = [int(line.split()[1]) for line in said if line.startswith("step ")]
    assert steps == [3, 5, 8, 10, 13, 15, 18, 20, 23, 25]
    assert said[-2] == f"its page: {tmp_path / 'a' / 'report.html'}"

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    sft_train.train(sft_train.Config(**settings | dict(output_dir=str(tmp_path / "b"))))
    said = capsys.readouterr().out.split("\n")
    assert [line.split()[1] for line in said if line.startswith("step ")] == ["20", "25"], "evaluations only"
    assert "supervised: 100%" in terminal.getvalue()
    assert "25/25" in terminal.getvalue()


def test_while_a_run_goes_on_it_draws_what_its_page_shows_and_all_at_its_end(warm, tmp_path, monkeypatch):
    """Both kinds of picture each minute took several seconds of a speedrun's five minutes."""
    drawn = []
    monkeypatch.setattr("running.log.draw", lambda runs, folder, kinds: drawn.append(list(kinds)))
    monkeypatch.setattr("running.log.SECONDS_BETWEEN_DRAWINGS", 0)
    monkeypatch.setattr("running.log.DRAWING_SHARE", 0)
    settings = read_run_config(warm) | dict(num_steps=12, limit=32, eval_every=0, batch_size=2)
    settings = {name: settings[name] for name in sft_train.Config.__dataclass_fields__}
    sft_train.train(sft_train.Config(**settings | dict(output_dir=str(tmp_path / "out"))))
    assert drawn == [["svg"]] * 3 + [["svg", "png"]], "from the tenth step on"


def test_report_html_is_opened_once_where_it_is_asked_for(fault_start, tmp_path, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or False)
    grpo_train.train(settings_of(fault_start, tmp_path / "a", open=True))
    page = tmp_path / "a" / "report.html"
    assert opened == [page.as_uri()]
    assert page.exists()
    said = capsys.readouterr().out
    assert f"open: there is no browser here; look at {page}" in said
    assert said.rstrip().endswith(f"its page: {page}")
    grpo_train.train(settings_of(fault_start, tmp_path / "a", open=True, resume=True))
    assert opened == [page.as_uri()] * 2, "a finished run is looked at, too"
    assert str(page) in capsys.readouterr().out
    grpo_train.train(settings_of(fault_start, tmp_path / "b", num_steps=1))
    assert len(opened) == 2


def test_the_end_by_max_minutes_is_said(fault_start, tmp_path, capsys):
    grpo_train.train(settings_of(fault_start, tmp_path / "out", max_minutes=1e-9))
    assert "max_minutes=1e-09 of training are over: the run ends" in capsys.readouterr().out


def rates_by_the_clock(fault_start, folder, monkeypatch, **limit):
    """The learning rates of a run whose steps take 60 s each, of which 3 x 10 s are training."""
    clock = SimpleNamespace(seconds=90.0)  # the first step begins then

    @contextmanager
    def timed(run, name):
        yield
        clock.seconds += 20
        run.seconds[name] = 10.0

    monkeypatch.setattr(Run, "timed", timed)
    monkeypatch.setattr("running.run.seconds_since_start", lambda: clock.seconds)
    monkeypatch.setattr("running.run.time", SimpleNamespace(perf_counter=lambda: clock.seconds))
    how = dict(lr_scheduler_type="linear", learning_rate=1e-3, warmup_ratio=0.0, eval_every=0, **limit)
    grpo_train.train(settings_of(fault_start, folder, **how))
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    return [round(json.loads(row)["learning_rate"], 9) for row in rows]


def test_a_falling_rate_ends_with_the_time_where_that_is_over_before_the_steps(
    fault_start, tmp_path, monkeypatch
):
    """A run of five minutes that had num_steps=1000 trained at the full rate to its end."""
    fall = [1e-3, 8e-4, 6e-4, 4e-4, 2e-4]
    rates = partial(rates_by_the_clock, fault_start, monkeypatch=monkeypatch)
    assert rates(tmp_path / "a", max_minutes=2.5, num_steps=1000) == fall
    # 390 s from the process's start, 300 of them for steps, and a fifth would end at their very end
    assert rates(tmp_path / "b", max_wall_minutes=6.5, num_steps=1000) == fall[:4]
    assert rates(tmp_path / "c", max_minutes=2.5, num_steps=2) == [1e-3, 5e-4], "the steps are nearer"


def test_a_resumed_run_s_rate_goes_on_where_its_minutes_are(fault_start, tmp_path, monkeypatch):
    rates = partial(rates_by_the_clock, fault_start, tmp_path / "a", monkeypatch, num_steps=1000)
    assert rates(max_minutes=1, save_every=1) == [1e-3, 5e-4]
    assert rates(max_minutes=2, save_every=1, resume=True) == [1e-3, 5e-4, 5e-4, 2.5e-4]


def test_a_reward_given_from_python_is_named_where_it_needs_what_is_not_there(recipe_start, tmp_path):
    """`reward=None` was named, a setting that nobody had set."""

    def by_difficulty(completions, difficulty):
        return [0.0] * len(completions)

    config = grpo_train.Config(model=str(recipe_start / "model"), output_dir=str(tmp_path / "out"))
    words = r"reward_functions=\['by_difficulty'\]: by_difficulty needs difficulty"
    with pytest.raises(SettingError, match=words):
        grpo_train.train(config, reward_functions=by_difficulty, dataset=rows_of("dicts") * 50)


def test_threads_of_a_run_are_its_own(recipe_start, tmp_path, monkeypatch):
    """Those of one arm with cpu_threads were those of all later arms of a study, and rounded otherwise."""
    there, before = [], torch.get_num_threads()
    update = grpo_train.update
    monkeypatch.setattr(
        grpo_train, "update", lambda *args: there.append(torch.get_num_threads()) or update(*args)
    )
    how = dict(cpu_threads=before + 1, num_steps=1, eval_every=0)
    grpo_train.train(config_of("oneshot", recipe_start, tmp_path / "out", grpo_train, **how))
    assert (there, torch.get_num_threads()) == ([before + 1], before)

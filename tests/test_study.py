"""Studies: the file is checked as a whole, runs are the same as alone, and any interruption is survived."""

import contextlib
import dataclasses
import gzip
import itertools
import json
import re
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import grpo_eval
import grpo_study
import grpo_train
import sft_train
from answers.user_files import forget_files
from decoding.engine import Engine
from decoding.rollout import Completion
from errors import NoRoomError, NotFiniteError, RewardError, RunError, SettingError
from grpo_study import Bench, main, make_all
from learning.log_probs import make_scorer
from learning.models import load_models, load_tokenizer, refresh, size_of
from reporting.files import write_whole
from rewards import _called_alone
from running.answering import RunOfStudy, accuracy, graded, load_questions, numbered
from running.forecast import disk_bytes
from running.grpo_config import chosen_rewards
from running.loaded import Loaded, overwrite
from running.parsing import parse_config, settings_from_file
from running.stop import Stop
from running.study import begin, code_files, code_hash, lock, read_note
from running.study_file import Options, parse, read_study, study_of_command
from small_recipes import missing
from small_runs import ROOT, command, lines, without_times

START = sft_train.Config, sft_train.warm_start_settings


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def study_file(folder, **changes):
    """A small study's file; changes: values of its keys, None leaves one out."""
    study = {
        "name": "small",
        "text": "studies/tiny.md",
        "output_dir": str(folder / "out"),
        "base": {"config": "configs/tiny.yaml", "num_steps": 4, "eval_every": 0},
        "seeds": [3, 1, 2],
        "arms": [{"name": "grpo", "settings": {"m3po_lambda": 0}}, {"name": "m3po"}],
        "baseline": "grpo",
        "treatment": "m3po",
        "evaluations": [{"name": "mean2", "steps": [2, 4], "samples": 2, "limit": 6}],
        "primary": "mean2",
    }
    study = {name: value for name, value in (study | changes).items() if value is not None}
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return path


def read(folder, options=None, **changes):
    return read_study(study_file(folder, **changes), grpo_train.Config, *START, options or Options())


def refusal(folder, **changes):
    with pytest.raises(SettingError) as caught:
        read(folder, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


ARM = {"name": "other", "settings": {"m3po_lambda": 0.3}}
GRPO, M3PO = {"name": "grpo", "settings": {"m3po_lambda": 0}}, {"name": "m3po"}
MEAN = {"name": "mean2", "steps": [2, 4], "samples": 2}
BAD = {
    "an arm twice": ({"arms": [GRPO, M3PO, M3PO]}, "name='m3po': is there twice in arms"),
    "an arm like another": (
        {"arms": [GRPO, M3PO, {"name": "same", "settings": {"m3po_lambda": 0.1}}]},
        "arms='same': differs in nothing from arm m3po",
    ),
    "an arm that differs in what changes no result": (
        {"arms": [GRPO, M3PO, {"name": "same", "settings": {"save_every": 2}}]},
        "arms='same': differs in nothing from arm m3po",
    ),
    "a seed twice": ({"seeds": [3, 1, 3]}, "seed 3 is there twice"),
    "a step past the end": ({"evaluations": [{**MEAN, "steps": [2, 5]}]}, "past the 4 steps of arm grpo"),
    "an arm's own length": (
        {"arms": [GRPO, M3PO, {"name": "short", "settings": {"num_steps": 3}}]},
        "past the 3 steps of arm short",
    ),
    "a setting that no run has": (
        {"arms": [GRPO, {"name": "m3po", "settings": {"m3po_lamda": 0.2}}]},
        "arms='m3po': m3po_lamda=0.2: no such setting in arm m3po.*did you mean m3po_lambda",
    ),
    "a setting out of its range": (
        {"arms": [GRPO, {"name": "m3po", "settings": {"m3po_lambda": 2.0}}]},
        "arms='m3po': m3po_lambda=2.0: must be between 0 and 1",
    ),
    "a setting without effect": (
        {"arms": [{"name": "grpo", "settings": {"m3po_lambda": 0, "m3po_temperature": 0.2}}, M3PO]},
        "arms='grpo': m3po_temperature=0.2: has no effect with m3po_lambda=0",
    ),
    "a setting of the study's own": (
        {"arms": [GRPO, {"name": "m3po", "settings": {"seed": 1}}]},
        "arms='m3po': seed=1: in arm m3po: the study sets it",
    ),
    "an end by the clock": (
        {"base": {"config": "configs/tiny.yaml", "num_steps": 4, "eval_every": 0, "max_wall_minutes": 5}},
        "max_wall_minutes=5.0: in base: the study sets it",
    ),
    "a key that no study has": ({"arm": []}, r"arm=\[\]: .*docs/study\.md lists them; did you mean arms"),
    "a key that no evaluation has": ({"evaluations": [{**MEAN, "sample": 3}]}, "sample=3: no such setting"),
    "steps that are no list": ({"evaluations": [{**MEAN, "steps": 4}]}, "steps=4: must be list"),
    "a baseline that is no arm": ({"baseline": "ppo"}, "baseline='ppo': must be one of grpo, m3po"),
    "a treatment that is the baseline": ({"treatment": "grpo"}, "treatment='grpo': is the baseline"),
    "a primary that is not asked": ({"primary": "greedy"}, "primary='greedy': must be one of mean2"),
    "no base": ({"base": None}, "base=None: is missing in .*: say base: {config: configs/gsm8k.yaml}, or {}"),
    "no seeds": ({"seeds": None}, "seeds=None: is missing"),
    "no text": ({"text": "studies/none.md"}, "text='studies/none.md': cannot be read"),
    "text left out": ({"text": ""}, "text='': is left out: write what is compared"),
    "greedy samples": ({"evaluations": [{**MEAN, "temperature": 0}]}, "greedy answers are all the same"),
    "one interacting sample": (
        {"evaluations": [{**MEAN, "samples": 1, "interacts": True}]},
        "paths need each other",
    ),
    "interaction that the recipe lacks": (
        {
            "base": {"config": "configs/tiny.yaml", "num_steps": 4, "eval_every": 0, "m3po_lambda": 0},
            "arms": [{"name": "grpo"}, {"name": "m3po", "settings": {"m3po_lambda": 0.1}}],
            "evaluations": [{**MEAN, "interacts": True}],
        },
        "interacts=True: of evaluation mean2: paths interact as in the base recipe",
    ),
    "interaction with strangers, whom not every run has": (
        {
            "base": {
                "config": "configs/tiny.yaml",
                "num_steps": 4,
                "eval_every": 0,
                "m3po_control": "strangers",
            },
            "arms": [{"name": "grpo", "settings": {"m3po_lambda": 0}}, {"name": "m3po"}],
            "evaluations": [{**MEAN, "interacts": True}],
        },
        "interacts=True: of evaluation mean2: as in the base recipe, whose m3po_control=strangers has",
    ),
    "epochs": (
        {"base": {"config": "configs/tiny.yaml", "num_epochs": 1, "eval_every": 0}},
        "num_epochs=1.0: a study asks at steps",
    ),
    "a measure that there is not": (
        {"secondary": [{"evaluation": "mean2", "measure": "median"}]},
        "measure='median': must be one of",
    ),
    "a secondary step that is not asked": (
        {"secondary": [{"evaluation": "mean2", "steps": {"treatment": 3, "baseline": 4}}]},
        "must give treatment and baseline a step",
    ),
    "a control that is no arm": ({"verdict": {"controls": ["noise"]}}, "verdict='noise': is no arm"),
    "a look after the last seed": ({"tests": {"look_after": 4}}, "look_after=4: must be from 2 to"),
    "more seeds than there are": ({"tests": {"most_seeds": 4}}, "fewest_seeds=3: must be 2 <="),
    "a setting of the warm start that is not": (
        {"warm_start": {"num_step": 3}},
        "num_step=3: no such setting",
    ),
    "a name of the folder above": (
        {"arms": [GRPO, {"name": "..", "settings": {"m3po_lambda": 0.2}}, M3PO]},
        r"name='\.\.': of arms: must be letters",
    ),
    "a study's name that is a path": ({"name": "../other"}, "name='../other': must be a name, and no path"),
    "a name that is no folder's": ({"arms": [GRPO, {"name": "a/b"}]}, "name='a/b': of arms: must be letters"),
}


@pytest.mark.parametrize(("changes", "line"), BAD.values(), ids=BAD)
def test_what_cannot_be_studied_is_refused_in_one_line_and_nothing_is_written(changes, line, tmp_path):
    assert re.search(line, refusal(tmp_path, **changes))
    assert not (tmp_path / "out").exists()


def test_questions_of_the_split_that_is_trained_on_are_told(tmp_path, recwarn):
    read(tmp_path)
    assert not recwarn
    with pytest.warns(
        UserWarning, match="evaluation mean2 asks split train, which the runs train on: its acc"
    ):
        read(tmp_path, evaluations=[{**MEAN, "split": "train"}])


def test_a_repeated_key_of_the_file_is_refused(tmp_path):
    path = study_file(tmp_path)
    path.write_text(path.read_text() + "seeds: [1]\n")
    with pytest.raises(SettingError, match="repeated key seeds"):
        read_study(path, grpo_train.Config, *START, Options())


def test_seeds_that_the_study_has_not_cannot_be_run(tmp_path):
    with pytest.raises(SettingError, match=r"only_seeds=\[3, 7\]: the study has the seeds \[3, 1, 2\]"):
        read(tmp_path, Options(only_seeds=[3, 7]))


def test_the_file_comes_first_on_the_command_line():
    assert parse(["a.yaml", "--check", "--only_seeds", "1", "2"]) == ("a.yaml", Options(True, None, [1, 2]))
    for words in ([], ["--check", "a.yaml"]):
        with pytest.raises(SettingError, match="give the study's file first"):
            parse(words)
    with pytest.raises(SettingError, match="stop_after=0.0: must be positive"):
        parse(["a.yaml", "--stop_after", "0"])


def test_the_help_of_a_study_tells_where_its_keys_are_listed_and_names_no_other_file(capsys):
    """--help showed a `--config` of its own, and nothing of what the study's file holds."""
    with pytest.raises(SystemExit):
        parse(["--help"])
    told = capsys.readouterr().out
    assert "docs/study.md lists its keys" in told
    assert "--config" not in told


@pytest.mark.parametrize("name", ["tiny", "m3po"])
def test_the_shipped_studies_are_read(name, monkeypatch):
    text = (ROOT / "configs" / f"study_{name}.yaml").read_text()
    if "m3po_control" in text and "m3po_control" not in grpo_train.Config.__dataclass_fields__:
        pytest.skip("the controls are not there yet")
    study = read_study(ROOT / "configs" / f"study_{name}.yaml", grpo_train.Config, *START, Options())
    assert study.plan["text"].startswith("# ")
    assert {study.plan["baseline"], study.plan["treatment"]} == {"grpo", "m3po"}


def test_an_arm_is_the_base_recipe_with_its_settings(tmp_path):
    study = read(tmp_path, warm_start={"config": "configs/tiny_warm_start.yaml", "num_steps": 7})
    by_hand = "--config configs/tiny.yaml --num_steps 4 --eval_every 0 --warm_start none --m3po_lambda 0"
    assert study.configs["grpo"] == parse_config(grpo_train.Config, by_hand.split())
    assert (study.start.num_steps, study.start.batch_size, study.start.model) == (7, 64, "tiny")
    assert study.plan["arms"][0]["settings"] == {"m3po_lambda": 0}


def test_arms_stand_in_an_order_of_their_own_for_each_seed(tmp_path):
    names = list("abcdef")
    arms = [{"name": name, "settings": {"m3po_lambda": 0.1 * i}} for i, name in enumerate(names)]
    arms[5]["first_seeds"] = 1
    study = read(tmp_path, arms=arms, baseline="a", treatment="b")
    orders = [study.arms_of(seed) for seed in (3, 1)]
    assert sorted(orders[0]) == names
    assert sorted(orders[1]) == names[:5]
    assert orders == [study.arms_of(seed) for seed in (3, 1)]
    assert [name for name in orders[0] if name != "f"] != orders[1]


# What is asked


def test_answers_are_graded_and_votes_are_numbered(tmp_path):
    study = read(tmp_path)
    questions = load_questions(study.evaluations[0], study.base)
    questions.encode(load_tokenizer("tiny"), study.base)

    def said(answer):
        return Completion([1, 2, 3], f"<answer>\n{answer}\n</answer>", True)

    golds = [p.problem.answer for p in questions.asked]
    rows = [[said(gold), said("777")] for gold in golds]
    rows[1] = [said("777"), Completion([1], "no", False)]
    record = graded(questions, rows)
    assert record["right"] == [[1, 0], [0, 0], *[[1, 0]] * 4]
    assert record["votes"] == [[0, 1], [0, None], *[[0, 1]] * 4]
    assert record["lengths"][1] == [3, 1]
    assert len(set(record["questions"])) == 6
    assert accuracy(record) == pytest.approx(5 / 12)
    questions.skipped = [questions.asked[0].problem]
    assert graded(questions, rows)["right"][-1] == [None, None]
    assert accuracy(graded(questions, rows)) == pytest.approx(5 / 14)


def test_votes_are_numbered_in_the_order_in_which_they_appear():
    assert numbered(["b", None, ("right",), "b"]) == [0, None, 1, 0]


def test_answers_after_the_step_that_a_run_goes_on_from_are_asked_again(tmp_path):
    run = RunOfStudy(tmp_path, 0, None, None, [])
    for name in ("a-2", "a-10", "b-3"):
        write_whole(tmp_path / f"{name}.json.gz", "")
    (tmp_path / "answers").mkdir()
    for path in tmp_path.glob("*.gz"):
        path.rename(tmp_path / "answers" / path.name)
    run.forget_after(3)
    assert {path.name for path in (tmp_path / "answers").iterdir()} == {"a-2.json.gz", "b-3.json.gz"}


# Interruptions, with a training that only pretends


class Pretended:
    """Stands for the two trainings: writes what they would leave; `fail` {(seed, arm): error to raise}."""

    def __init__(self, bench_folder):
        self.made, self.fail, self.starts = [], {}, 0

    def start(self, config, of_study):
        assert of_study, "else it says that its model can be evaluated, which goes when the seed is done"
        self.starts += 1
        folder = Path(config.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_text(f"start {config.seed} number {self.starts}")
        return folder

    def train(self, config, study):
        seed, arm = study.folder.parts[-2:]
        assert (Path(config.model) / "model.safetensors").exists()
        self.made.append((int(seed), arm))
        study.folder.mkdir(parents=True, exist_ok=True)
        (study.folder / "model.safetensors").write_text("weights")
        error = self.fail.pop((int(seed), arm), None)
        progress = SimpleNamespace(step=3 if error else 4)
        study.run = SimpleNamespace(
            progress=progress, learner=SimpleNamespace(as_saved=contextlib.nullcontext)
        )
        study.forget_after(0)
        for questions in study.questions:
            for step in (2,) if error else (2, 4):
                self.answer(study, questions, step)
        if error:
            raise error
        write_whole(study.folder / "finished.json", '{"step": 4}')

    def answer(self, study, questions, step):
        path = study.path(questions.evaluation, step)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps({"step": step, "right": [[1]]}).encode()))


@pytest.fixture
def pretended(monkeypatch, tmp_path):
    pretended = Pretended(tmp_path)
    monkeypatch.setattr(grpo_train, "train", lambda config, study: pretended.train(config, study))
    monkeypatch.setattr(sft_train, "train", pretended.start)
    monkeypatch.setattr(grpo_study, "write_results", lambda folder: None)
    last = {"step": 3, "right": [[0]]}
    monkeypatch.setattr(RunOfStudy, "_answers", lambda self, questions, step, through: dict(last))
    return pretended


def run_all(folder, options=None, **changes):
    options = options or Options()
    study = read(folder, options, **({"warm_start": {"num_steps": 3}} | changes))
    begin(study, options.resume_anyway)
    questions = [load_questions(evaluation, study.base) for evaluation in study.evaluations]
    make_all(Bench(study, questions, options, Loaded(), float("inf")), cards=1)
    return study


def statuses(study):
    return {key: note["status"] for key, note in study.notes().items()}


def test_all_runs_are_made_once_and_their_weights_go(pretended, tmp_path):
    study = run_all(tmp_path)
    by_seed = [pretended.made[i : i + 2] for i in (0, 2, 4)]
    assert by_seed == [[(seed, arm) for arm in study.arms_of(seed)] for seed in (3, 1, 2)]
    assert set(statuses(study).values()) == {"finished"}
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    hashes = {note["start_hash"] for note in study.notes().values()}
    assert len(hashes) == 3
    assert pretended.starts == 3
    run_all(tmp_path)
    assert len(pretended.made) == 6
    assert pretended.starts == 3


def test_a_killed_study_goes_on_and_makes_no_finished_run_again(pretended, tmp_path):
    first = read(tmp_path).arms_of(3)
    pretended.fail[3, first[1]] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_all(tmp_path)
    note = json.loads((tmp_path / f"out/runs/3/{first[1]}/run.json").read_text())
    assert (note["status"], note["step"]) == ("running", 3)
    study = run_all(tmp_path)
    assert pretended.made[:3] == [(3, first[0]), (3, first[1]), (3, first[1])]
    assert len(pretended.made) == 7
    assert pretended.starts == 3
    assert set(statuses(study).values()) == {"finished"}


def test_a_study_that_is_done_says_again_what_came_out(pretended, tmp_path, capsys, monkeypatch):
    """Its command ended without a word, and after a kill before the results there were none."""
    run_all(tmp_path)
    monkeypatch.setattr(grpo_study, "write_results", lambda folder: print(f"results of {folder}"))
    run_all(tmp_path)
    assert f"results of {tmp_path / 'out'}\n" in capsys.readouterr().out
    assert len(pretended.made) == 6


def test_a_seed_whose_start_is_gone_is_run_again_whole(pretended, tmp_path):
    """Arms from two starts are no pairs. A seed that was whole is left alone."""
    study = read(tmp_path)
    first, second = study.arms_of(1)
    pretended.fail[1, second] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_all(tmp_path)
    for file in (tmp_path / "out").rglob("*.safetensors"):  # as on another machine, without weights
        file.unlink()
    before = len(pretended.made)
    study = run_all(tmp_path)
    assert pretended.made[before:][:2] == [(1, first), (1, second)]
    assert [seed for seed, _ in pretended.made[before:]] == [1, 1, 2, 2]
    for seed in ("1", "2", "3"):
        hashes = {note["start_hash"] for (of, _), note in study.notes().items() if of == seed}
        assert hashes == {json.loads((tmp_path / f"out/starts/{seed}.json").read_text())["start_hash"]}


@pytest.mark.parametrize(
    ("error", "status"),
    [(NotFiniteError("3 steps\nin a row"), "collapsed"), (RewardError("it raised"), "refused")],
)
def test_a_run_that_ends_badly_counts_with_its_last_weights(error, status, pretended, tmp_path):
    pretended.fail[3, "m3po"] = error
    study = run_all(tmp_path)
    note = study.notes()["3", "m3po"]
    assert (note["status"], note["step"], note["reason"]) == (status, 3, " ".join(str(error).split()))
    answers = json.loads(gzip.open(tmp_path / "out/runs/3/m3po/answers/mean2-4.json.gz").read())
    assert answers == {"step": 4, "right": [[0]]}
    assert len(pretended.made) == 6
    run_all(tmp_path)
    assert len(pretended.made) == 6


def test_a_machine_without_room_ends_the_study_and_not_the_arm(pretended, tmp_path):
    pretended.fail[3, "m3po"] = NoRoomError("out of memory")
    with pytest.raises(NoRoomError):
        run_all(tmp_path)
    assert read_note(tmp_path / "out/runs/3/m3po")["status"] == "running"
    assert set(statuses(run_all(tmp_path)).values()) == {"finished"}


def test_a_run_that_an_unexpected_error_ends_is_left_out_and_the_others_go_on(pretended, tmp_path, capsys):
    """One ended the study, and a night's other runs with it. The start stays, and what is loaded does not."""
    study = read(tmp_path)
    first, second = study.arms_of(3)
    pretended.fail[3, first] = TypeError("own\ngoal")
    with pytest.raises(RunError, match=f"^runs that failed are missing: {first} of seed 3; the same command"):
        run_all(tmp_path)
    assert pretended.made[:3] == [(3, first), (3, second), (1, study.arms_of(1)[0])]
    assert len(pretended.made) == 6
    note = study.notes()["3", first]
    assert (note["status"], note["step"], note["reason"]) == ("failed", 3, "TypeError: own goal")
    assert not list((tmp_path / f"out/runs/3/{first}/answers").glob("*-4.json.gz")), "it counts as nothing"
    said = capsys.readouterr()
    assert f"arm {first} of seed 3 failed, which is no result: TypeError: own goal" in said.out
    assert "Traceback" in said.err
    study = run_all(tmp_path)
    assert pretended.made[6:] == [(3, first)]
    assert pretended.starts == 3
    assert set(statuses(study).values()) == {"finished"}
    assert not list((tmp_path / "out").rglob("*.safetensors"))


def test_an_error_that_meets_the_next_run_too_ends_the_study(pretended, tmp_path):
    """A broken card would be tried with every run there is."""
    arms = read(tmp_path).arms_of(3)
    pretended.fail |= {(3, arm): RuntimeError("CUDA error: an illegal memory access") for arm in arms}
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_all(tmp_path)
    assert pretended.made == [(3, arm) for arm in arms]


@pytest.mark.parametrize("error", [OSError(28, "No space left"), MemoryError(), torch.OutOfMemoryError("no")])
def test_an_error_of_the_machine_s_ends_the_study_at_once(error, pretended, tmp_path):
    first = read(tmp_path).arms_of(3)[0]
    pretended.fail[3, first] = error
    with pytest.raises(type(error)):
        run_all(tmp_path)
    assert pretended.made == [(3, first)]


def test_results_are_written_where_runs_of_some_card_failed(pretended, tmp_path, monkeypatch):
    """Those of the other cards went on."""
    written, study = [], read(tmp_path)
    monkeypatch.setattr(grpo_study, "write_results", written.append)
    ended = iter([0, 1, 143, 0])
    monkeypatch.setattr(
        grpo_study.subprocess, "Popen", lambda *args, **how: SimpleNamespace(wait=lambda: next(ended))
    )
    for status, results in ((1, [study.folder]), (143, [study.folder])):
        with pytest.raises(SystemExit) as end:
            make_all(Bench(study, [], Options(), Loaded(), float("inf")), cards=2)
        assert (end.value.code, written) == (status, results)


def test_a_process_that_dies_is_told_of_while_the_others_go_on(monkeypatch):
    """Its card stood idle for hours without a word: one that is killed says nothing itself."""
    said, is_told = [], threading.Event()
    monkeypatch.setattr(grpo_study, "say", lambda line: (said.append(line), is_told.set()))
    killed = SimpleNamespace(wait=lambda: -9)
    other = SimpleNamespace(wait=lambda: 0 if is_told.wait(5) else 1)
    assert grpo_study.wait_for_all([other, killed], ["0", "1"]) == [0, -9]
    assert said == ["the process of card 1 ended with status -9; the others go on"]


def test_the_process_of_a_card_has_the_minutes_that_are_left(tmp_path, monkeypatch):
    """They were a second --stop_after on its command, which is refused."""
    seen = []

    def popen(words, env):
        monkeypatch.setattr(sys, "argv", words[1:])
        with monkeypatch.context() as patch:
            patch.setenv("GRPO_STUDY_WORKER", env["GRPO_STUDY_WORKER"])
            seen.append(study_of_command("")[1].stop_after)
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr(grpo_study.subprocess, "Popen", popen)
    for flags, end in ((["--stop_after", "60"], grpo_study.time.monotonic() + 600), ([], float("inf"))):
        monkeypatch.setattr(sys, "argv", ["grpo_study.py", str(study_file(tmp_path)), *flags])
        study, options = study_of_command("")
        grpo_study.run_on_cards(Bench(study, [], options, Loaded(), end), 1)
    assert seen == [pytest.approx(10, abs=0.1), None]


REWARD = """import sys, torch
sys.path.insert(0, {folder!r})
import counter
{more}
own = []

def f(completions, **kwargs):
    own.append(1)
    counter.calls.append(1)
    is_wide = torch.get_default_dtype() == torch.float64
    return [counter.worth + 10.0 * len(own) + len(counter.calls) + is_wide / 2] * len(completions)
"""


def test_a_run_does_not_find_what_the_user_s_code_left_of_an_earlier_one(pretended, tmp_path, monkeypatch):
    """A reward that counted its calls went on where the arm before had left it; another's had the dtype that
    the first had set, and the module of its folder.
    """
    for name, more, worth in (("a", "torch.set_default_dtype(torch.float64)", 100), ("b", "", 200)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "counter.py").write_text(f"calls, worth = [], {worth}\n")
        text = REWARD.format(folder=str(tmp_path / name), more=more)
        (tmp_path / name / "mine.py").write_text(text)
    paths, paid, train = [*sys.path], {}, pretended.train

    def asks(config, study):
        train(config, study)
        [(function, _)] = chosen_rewards(config)
        of_run = [_called_alone(function, {"completions": [1]})[0] for _ in range(2)]
        paid.setdefault(study.folder.name, []).append(of_run)

    monkeypatch.setattr(pretended, "train", asks)
    arms = [{"name": name, "settings": {"reward": [f"{tmp_path}/{name}/mine.py:f"]}} for name in "ab"]
    run_all(tmp_path, arms=arms, baseline="a", treatment="b")
    assert paid == {"a": [[111.5, 122.5]] * 3, "b": [[211.0, 222.0]] * 3}
    forget_files([])
    assert sys.path == paths


def test_a_run_that_is_refused_before_it_begins_is_no_result(pretended, tmp_path, monkeypatch):
    def refuse(config, study):
        raise RunError("no such file")

    monkeypatch.setattr(pretended, "train", refuse)
    with pytest.raises(RunError, match="no such file"):
        run_all(tmp_path)


def test_a_seed_that_another_process_works_on_is_left_to_it(pretended, tmp_path, capsys):
    study = read(tmp_path)
    with lock(study, 1):
        run_all(tmp_path)
    assert [seed for seed, _ in pretended.made] == [3, 3, 2, 2]
    assert "seed 1 is left to the process that works on it" in capsys.readouterr().out
    run_all(tmp_path)
    assert [seed for seed, _ in pretended.made][4:] == [1, 1]


def test_only_some_seeds_are_run_where_that_is_asked(pretended, tmp_path):
    run_all(tmp_path, Options(only_seeds=[2]))
    assert {seed for seed, _ in pretended.made} == {2}


def test_the_look_says_how_many_seeds_there_are(pretended, tmp_path, monkeypatch):
    """Until then as many are run as there will be at the least."""
    monkeypatch.setattr(
        grpo_study, "write_results", lambda folder: (folder / "look.json").write_text('{"seeds": 3}')
    )
    tests = {"look_after": 2, "fewest_seeds": 2}
    study = read(tmp_path, tests=tests)
    assert study.plan["hide_means"]
    assert study.seeds == [3, 1]
    run_all(tmp_path, tests=tests)
    assert [seed for seed, _ in pretended.made] == [3, 3, 1, 1, 2, 2]


def test_a_study_that_has_runs_cannot_change(pretended, tmp_path):
    run_all(tmp_path)
    plan = (tmp_path / "out/plan.json").read_text()
    changes = {
        "seeds": ({"seeds": [3, 1]}, r"seeds=\[3, 1, 2\]: in .* and is \[3, 1\] now"),
        "arms": (
            {"arms": [GRPO, {"name": "m3po", "settings": {"m3po_lambda": 0.3}}]},
            "arms.m3po.settings.m3po_lambda=None: in .* and is 0.3 now",
        ),
        "base": (
            {"base": {"config": "configs/tiny.yaml", "num_steps": 4, "eval_every": 0, "learning_rate": 1e-4}},
            "base.learning_rate=0.0002: in .* and is 0.0001 now",
        ),
        "evaluations": (
            {"evaluations": [{**MEAN, "limit": 7}]},
            "evaluations.mean2.limit=6: in .* and is 7 now",
        ),
        "warm start": ({"warm_start": {"num_steps": 4}}, "start.num_steps=3: in .* and is 4 now"),
    }
    for change, line in changes.values():
        with pytest.raises(SettingError, match=line):
            run_all(tmp_path, **change)
    assert (tmp_path / "out/plan.json").read_text() == plan
    assert len(pretended.made) == 6


def test_a_plan_without_runs_can_change(pretended, tmp_path):
    begin(read(tmp_path))
    run_all(tmp_path, seeds=[1, 2])
    assert [seed for seed, _ in pretended.made] == [1, 1, 2, 2]


def test_a_run_of_other_code_is_named(pretended, tmp_path):
    study = run_all(tmp_path)
    study.code, study.files = "f" * 64, {**study.files, "m3po_module.py": "other"}
    line = (
        r"run grpo of seed 1 was made by other code, \w{12} there and f{12} here \(m3po_module.py changed\)"
    )
    with pytest.raises(SettingError, match=f"{line}.*--resume_anyway true"):
        begin(study)
    begin(study, resume_anyway=True)


def test_the_code_of_a_run_is_what_it_imports_and_its_own_rewards(tmp_path):
    files = code_files()
    assert {"grpo_train.py", "sft_train.py", "decoding/kernels.py", "running/answering.py"} <= set(files)
    assert not {"grpo_eval.py", "grpo_study.py", "tests/test_study.py"} & set(files)
    reward = tmp_path / "mine.py"
    reward.write_text("def right(completions, **kwargs):\n    return [1.0 for _ in completions]\n")
    config = parse_config(grpo_train.Config, ["--reward", f"{reward}:right"])
    assert code_hash(code_files([config])) != code_hash(files)


def test_the_check_predicts_from_runs_that_are_there(pretended, tmp_path, monkeypatch, capsys):
    study = run_all(tmp_path, Options(only_seeds=[3]))
    for arm, seconds in (("grpo", 60.0), ("m3po", 120.0)):
        note = tmp_path / f"out/runs/3/{arm}/run.json"
        note.write_text(json.dumps(json.loads(note.read_text()) | {"seconds": seconds}))
    note = study.start_note(3)
    note.write_text(json.dumps(json.loads(note.read_text()) | {"seconds": 30.0}))
    path = study_file(tmp_path, warm_start={"num_steps": 3})
    monkeypatch.setattr(sys, "argv", ["grpo_study.py", str(path), "--check"])
    before = sorted((tmp_path / "out").rglob("*"))
    main()
    said = capsys.readouterr().out
    assert "6 runs, 2 of them done" in said
    assert "time: 7.0 minutes for what is left, from runs that are there" in said  # 2 x (0.5 + 1 + 2)
    assert sorted((tmp_path / "out").rglob("*")) == before


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    monkeypatch.setattr(sys, "argv", ["grpo_study.py", str(study_file(tmp_path))])
    with pytest.raises(SettingError, match=r"output_dir=.*the study needs \S+ [kMG]B there, \S+ kB are free"):
        main()
    assert not (tmp_path / "out").exists()


def test_the_room_is_that_of_the_arm_whose_checkpoints_are_largest(tmp_path):
    """It was that of the base recipe, whose arms may keep a reference, an average or more copies."""
    settings = {"beta": 0.04, "ema_decay": 0.9, "save_every": 2}
    needed = []
    for arm in ({"settings": settings}, {"settings": {"m3po_lambda": 0.2}}):
        study = read(
            tmp_path, arms=[{"name": "grpo", "settings": {"m3po_lambda": 0}}, {"name": "m3po"} | arm]
        )
        needed.append(disk_bytes(study, [])[1])
    count, each = size_of("tiny")
    without, average = 4 + 8, 4  # weights and moments; bytes of each weight
    assert needed[0] - needed[1] == count * (3 * (without + average + each) - without)


# Real runs


@pytest.fixture(scope="module")
def small_study(warm, tmp_path_factory):
    """A study of real runs, three steps each, whose weights are kept; returns its folder."""
    folder = tmp_path_factory.mktemp("study")
    base = {"config": "configs/tiny.yaml", "model": str(warm), "num_steps": 3, "eval_every": 0}
    base |= {"batch_size": 3, "num_generations": 4, "limit": 12, "max_completion_length": 32, "beta": 0.04}
    evaluations = [
        {"name": "mean2", "steps": [0, 2, 3], "samples": 2, "limit": 8},
        {"name": "greedy", "steps": [3], "samples": 1, "temperature": 0, "limit": 8},
        {"name": "together", "steps": [3], "samples": 2, "limit": 8, "interacts": True},
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        base_file = yaml.safe_load((ROOT / "configs" / "tiny.yaml").read_text())
        del base_file["warm_start"]
        (folder / "base.yaml").write_text(yaml.safe_dump(base_file))
        base["config"] = str(folder / "base.yaml")
        strangers = {"name": "strangers", "settings": {"m3po_control": "strangers"}}
        how = dict(arms=[GRPO, M3PO, strangers], evaluations=evaluations, seeds=[1, 2])
        path = study_file(folder, base=base, **how)
        patch.setattr(grpo_study, "WEIGHTS", ())
        patch.setattr(sys, "argv", ["grpo_study.py", str(path)])
        main()
    return folder / "out"


def alone(folder, out, **changes):
    """The same run once more, without a study."""
    settings = settings_from_file(grpo_train.Config, folder / "run_config.yaml")
    return grpo_train.train(grpo_train.Config(**settings | {"output_dir": str(out)} | changes)).folder


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["grpo", "m3po", "strangers"])
def test_a_run_in_a_study_is_the_same_run_alone_to_the_bit(arm, small_study, tmp_path):
    """Runs of the second seed have models, decoder and storage of earlier ones; the same run without its
    questions is no other either.
    """
    run = small_study / "runs/2" / arm
    out = alone(run, tmp_path / "alone")
    assert (out / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    assert (out / "rollouts.jsonl").read_text() == (run / "rollouts.jsonl").read_text()
    assert without_times(lines(out / "metrics.jsonl")) == without_times(lines(run / "metrics.jsonl"))


def test_models_that_are_there_get_the_weights_of_the_next_start(warm, tmp_path):
    """Sampler and reference, too; what an update has made of a model is undone, as if it were loaded anew."""
    other, device = tmp_path / "other", torch.device("cpu")
    shutil.copytree(warm, other)
    weights = {name: 1.5 * w for name, w in load_file(warm / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    loaded, config = Loaded(), grpo_train.Config(dataset="arithmetic", beta=0.04, limit=200)
    tokenizer, _ = loaded.read(config, warm)
    first = loaded.load(config, warm, tokenizer, device)
    decoder = loaded.decode_with(config, first[1], tokenizer)
    scorer = make_scorer(first[0], decoder.tables, config)
    scorer.model.gradient_checkpointing_enable()
    config = dataclasses.replace(config, m3po_lambda=0.3, seed=7)
    assert loaded.read(config, other)[0] is tokenizer
    second = loaded.load(config, other, tokenizer, device)
    assert [id(model) for model in second] == [id(model) for model in first]
    assert loaded.decode_with(config, second[1], tokenizer) is decoder
    assert decoder.interaction.lambda_blend == decoder.engine.interaction.lambda_blend == 0.3
    for model, fresh in zip(second, load_models(config, other, tokenizer, device), strict=True):
        assert model.training == fresh.training
        assert model.is_gradient_checkpointing == fresh.is_gradient_checkpointing
        for (name, ours), theirs in zip(model.named_parameters(), fresh.parameters(), strict=True):
            assert torch.equal(ours, theirs), name
            assert ours.requires_grad == theirs.requires_grad
    config = dataclasses.replace(config, answer_format="hash")
    assert loaded.load(config, other, tokenizer, device)[0] is not first[0], "prompts may end on another EOS"


def test_weights_that_would_be_refused_are_refused_where_models_are_there(warm, tmp_path):
    """Models that were there took a start of NaN without a word."""
    other, device = tmp_path / "other", torch.device("cpu")
    shutil.copytree(warm, other)
    loaded, config = Loaded(), grpo_train.Config(dataset="arithmetic", beta=0.0, limit=200)
    tokenizer, _ = loaded.read(config, warm)
    loaded.load(config, warm, tokenizer, device)
    weights = load_file(warm / "model.safetensors")
    weights[next(iter(weights))][0] = float("nan")
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(SettingError, match="not finite: its weights are damaged"):
        loaded.load(config, other, tokenizer, device)
    assert torch.isfinite(next(loaded.load(config, warm, tokenizer, device)[1].parameters())).all()


def test_other_buffers_are_loaded(tmp_path):
    """The bias of a router is one: it stayed that of the start before."""
    policy = torch.nn.Linear(2, 2)
    policy.register_buffer("bias_of_router", torch.zeros(2))
    saved = {name: value.clone() for name, value in policy.state_dict().items()}
    save_file(saved, tmp_path / "model.safetensors")
    assert overwrite(policy, tmp_path)
    save_file(saved | {"bias_of_router": torch.ones(2)}, tmp_path / "model.safetensors")
    assert not overwrite(policy, tmp_path)


@pytest.mark.slow  # bitsandbytes is imported
@missing("bitsandbytes")
def test_a_sampler_that_is_there_has_the_weights_of_the_start_before_they_were_rounded(warm):
    """With load_in_4bit it had the policy's, so that a second run's strangers were others than alone."""
    config, device = grpo_train.Config(dataset="arithmetic", limit=200, lora_r=2, load_in_4bit=True), "cpu"
    loaded = Loaded()
    tokenizer, _ = loaded.read(config, warm)
    alone = [p.clone() for p in loaded.load(config, warm, tokenizer, device)[1].parameters()]
    first = loaded.models[1]
    refresh(first, loaded.models[0])
    again = loaded.load(config, warm, tokenizer, device)[1]
    assert again is first
    assert all(map(torch.equal, alone, again.parameters()))


def test_a_decoder_whose_test_fails_is_not_used_by_the_next_run(warm, monkeypatch):
    """It had a path, and would have been taken for one that was chosen."""
    loaded, config = Loaded(), grpo_train.Config(dataset="arithmetic", beta=0.0, limit=200)
    tokenizer, _ = loaded.read(config, warm)
    sampler = loaded.load(config, warm, tokenizer, torch.device("cpu"))[1]
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_differs", lambda engine: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loaded.decode_with(config, sampler, tokenizer)
    tried = []
    monkeypatch.setattr(Engine, "_differs", lambda engine: tried.append(1))
    loaded.decode_with(config, sampler, tokenizer)
    assert tried == [1]


def test_questions_are_put_anew_where_their_prompts_would_be_others(tmp_path):
    study = read(tmp_path)
    questions, tokenizer = load_questions(study.evaluations[0], study.base), load_tokenizer("tiny")
    questions.encode(tokenizer, study.base)
    asked = questions.asked
    questions.encode(tokenizer, dataclasses.replace(study.base, m3po_lambda=0.3))
    assert questions.asked is asked
    shortest = min(len(p.ids) for p in asked)
    questions.encode(tokenizer, dataclasses.replace(study.base, max_prompt_length=shortest))
    assert len(questions.asked) < len(asked)
    assert len(questions.asked) + len(questions.skipped) == len(asked)


@pytest.fixture
def stopped_often(monkeypatch):
    """Runs are told to end at every so many looks."""
    looks = itertools.count(1)

    def asked(self):
        self.number = self.number or int(signal.SIGTERM) * (next(looks) % 150 == 0)
        return self.number

    monkeypatch.setattr(Stop, "asked", asked)


def ended():
    """Run the script; the status that it exits with, None where it comes to its end."""
    try:
        main()
    except SystemExit as end:
        return end.code


@pytest.mark.slow
@pytest.mark.usefixtures("stopped_often")
def test_a_study_that_is_stopped_again_and_again_gives_the_same_answers(small_study, tmp_path, monkeypatch):
    study = yaml.safe_load((small_study.parent / "study.yaml").read_text())
    del study["arms"][2]  # its strangers take longer than it may go on
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(study | {"output_dir": str(tmp_path / "out")}))
    monkeypatch.setattr(sys, "argv", ["grpo_study.py", str(path)])
    codes = list(itertools.islice(iter(ended, None), 50))
    assert 4 < len(codes) < 50
    assert set(codes) == {128 + signal.SIGTERM}
    files = sorted(small_study.glob("runs/*/*po/answers/*.gz"))
    assert len(files) == 20
    for file in files:
        assert (tmp_path / "out" / file.relative_to(small_study)).read_bytes() == file.read_bytes(), file
    assert not list((tmp_path / "out").rglob("*.safetensors"))


@pytest.mark.slow
def test_runs_go_side_by_side_on_several_cards(small_study, tmp_path, monkeypatch):
    """One process a card, each with seeds of its own; here the cards are not there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    path = small_study.parent / "study.yaml"
    monkeypatch.setattr(sys, "argv", ["grpo_study.py", str(path), "--output_dir", str(tmp_path / "out")])
    main()
    for file in small_study.glob("runs/*/*/answers/*.gz"):
        assert (tmp_path / "out" / file.relative_to(small_study)).read_bytes() == file.read_bytes(), file


@pytest.mark.slow
def test_the_check_measures_a_few_steps_and_leaves_nothing(tmp_path):
    path = study_file(tmp_path, warm_start={"config": "configs/tiny_warm_start.yaml"})
    done = command("grpo_study.py", path, "--check")
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "6 runs, 0 of them done" in said
    assert "arm grpo: m3po_lambda 0; 3 seeds" in said
    assert re.search(r"time: \d+\.\d minutes for what is left, from 3 steps of each arm", said)
    assert not (tmp_path / "out").exists()


def answers(folder, name):
    return json.loads(gzip.open(folder / "answers" / f"{name}.json.gz").read())


@pytest.mark.slow
def test_arms_of_a_seed_have_the_same_start_and_the_same_draws(small_study):
    for seed in (1, 2):
        grpo, m3po = (answers(small_study / "runs" / str(seed) / arm, "mean2-0") for arm in ("grpo", "m3po"))
        assert grpo == m3po, "nothing but the weights may tell them apart"
    first, second = (answers(small_study / f"runs/{seed}/grpo", "mean2-0") for seed in (1, 2))
    assert first["lengths"] != second["lengths"], "each seed has draws of its own"
    note = json.loads((small_study / "starts/1.json").read_text())
    assert note["accuracy"] == accuracy(answers(small_study / "runs/1/grpo", "mean2-0"))


@pytest.mark.slow
def test_answers_are_those_of_the_weights_after_their_step(small_study):
    """As grpo_eval.py gives them for the saved model."""
    run = small_study / "runs/1/m3po"
    how = dict(model=str(run), split="test", limit=8, output_dir=str(small_study / "eval"), name="greedy")
    grpo_eval.evaluate(grpo_eval.Config(**how))
    records = lines(small_study / "eval/greedy/samples.jsonl")
    kept = answers(run, "greedy-3")
    assert kept["questions"] == [record["doc_id"] for record in records]
    assert kept["lengths"] == [record["length"] for record in records]
    assert kept["right"] == [[int(g) for g in r["exact_match"]["strict-match"]] for r in records]
    assert len(answers(run, "together-3")["right"]) == 8

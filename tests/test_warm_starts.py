"""The warm starts that are kept for every run that would make the same one."""

import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import grpo_train
import sft_train
from problems.prompts import problems_of
from running import preflight, warm_starts
from running.sft_config import warm_start_settings
from running.warm_starts import MANIFEST, copy_out, keep, key_of, make_room, read_inputs
from small_faults import settings_of
from small_runs import lines, without_times

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def recipe(fault_start, tmp_path_factory):
    """Settings of a run of one step, after a warm start of two."""
    folder = tmp_path_factory.mktemp("warm")
    rows = [{"prompt": f"{i}?", "response": f"<answer> {i} </answer>", "answer": str(i)} for i in range(1, 9)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "warm.yaml").write_text("num_steps: 2\nnum_epochs: null\nbatch_size: 2\nlearning_rate: 1e-2\n")
    given = dict(dataset=str(folder / "data.jsonl"), warm_start=str(folder / "warm.yaml"), num_steps=1)
    return given | dict(max_completion_length=24, warm_start_cache=str(folder / "cache"))


@pytest.fixture
def made(monkeypatch):
    """The output folders of the warm starts that are trained."""
    folders, train = [], sft_train.train
    spied = lambda config, outer: folders.append(config.output_dir) or train(config, outer)  # noqa: E731
    monkeypatch.setattr(sft_train, "train", spied)
    return folders


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".safetensors"}


def test_a_warm_start_is_made_once_and_a_run_from_the_kept_one_is_the_same_to_the_bit(
    recipe, fault_start, tmp_path, made, capsys
):
    """Each output_dir trained its own: minutes before every run of a sweep."""
    cache = tmp_path / "cache"
    recipe = recipe | dict(warm_start_cache=str(cache))
    for name, more in {"a": {}, "b": {}, "c": dict(warm_start_cache="none")}.items():
        grpo_train.train(settings_of(fault_start, tmp_path / name, **recipe | more))
    assert made == [str(tmp_path / name / "warm_start") for name in "ac"]
    fresh, kept, uncached = (tmp_path / name for name in "abc")
    for other in (kept, uncached):
        assert files_of(fresh) == files_of(other)
        assert files_of(fresh / "warm_start") == files_of(other / "warm_start")
        assert without_times(lines(fresh / "metrics.jsonl")) == without_times(lines(other / "metrics.jsonl"))
    assert {path.name for path in (kept / "warm_start").iterdir()} == {
        path.name for path in (uncached / "warm_start").iterdir()
    }
    assert f"output_dir: {kept / 'warm_start'}" in (kept / "warm_start" / "run_config.yaml").read_text()
    [entry] = cache.iterdir()
    said = capsys.readouterr().out
    assert f"warm start: kept for other runs in {entry}" in said
    assert said.count(f"in {entry}, which is the same to the bit") == 1
    config = settings_of(fault_start, tmp_path / "d", **recipe)
    preflight.report(config, grpo_train.chosen_rewards(config))
    assert "pass rate: " in capsys.readouterr().out, "--check measures the one that would be found"


def key(recipe, fault_start, threads=1, processes=1, **more):
    settings = warm_start_settings(settings_of(fault_start, "out", **{**recipe, **more}))
    settings = replace(settings, cpu_threads=threads)
    return key_of(settings, read_inputs(settings, problems_of(settings, responses=True)), CPU, processes)


def test_one_that_was_changed_on_the_way_is_not_kept_for_others(recipe, fault_start, tmp_path, made, capsys):
    """It was found by runs whose whole warm start had the later rate, as `the same to the bit`."""
    recipe = recipe | dict(warm_start_cache=str(tmp_path / "cache"))
    config = settings_of(fault_start, tmp_path / "a", resume=True, resume_anyway=True, **recipe)
    start = warm_start_settings(config)
    sft_train.train(replace(start, num_steps=1, learning_rate=1e-3, save_every=1), None)
    grpo_train.train(config)
    assert "going on although this is not what the run was" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()
    grpo_train.train(settings_of(fault_start, tmp_path / "b", **recipe))
    assert made[-1] == str(tmp_path / "b" / "warm_start")


def test_the_key_changes_with_all_that_the_weights_depend_on_and_with_nothing_else(
    recipe, fault_start, tmp_path, monkeypatch
):
    first = key(recipe, fault_start)
    same = dict(output_dir="other", num_steps=7, learning_rate=0.1, num_generations=5, mu=2, save_every=3)
    assert key(recipe, fault_start, **same) == first
    data, warm = Path(recipe["dataset"]), Path(recipe["warm_start"])
    other = tmp_path / "warm.yaml"
    others = [key(recipe, fault_start, seed=1), key(recipe, fault_start, answer_format="hash")]
    others += [key(recipe, fault_start, threads=2), key(recipe, fault_start, processes=2)]
    for line in ("num_steps: 3", "learning_rate: 2e-2", "weight_decay: 0.1"):
        other.write_text(line)
        others.append(key(recipe, fault_start, warm_start=str(other)))
    other.write_text(warm.read_text() + "max_minutes: 1\n")
    assert key(recipe, fault_start, warm_start=str(other)) is None, "a clock ends it"
    shutil.copytree(fault_start / "model", tmp_path / "model")
    model = tmp_path / "model" / "model.safetensors"
    others.append(key(recipe, fault_start, model=str(tmp_path / "model")))
    model.write_bytes(model.read_bytes()[:-1] + b"\1")
    others.append(key(recipe, fault_start, model=str(tmp_path / "model")))
    for name, value in {
        "imported_files": lambda *_: (("sft_train.py", "other"),),
        "resolved": with_torch(0),
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(warm_starts, name, value)
            others.append(key(recipe, fault_start))
    text = data.read_text()
    data.write_text(text.replace("<answer> 8", "<answer> 9"))
    others.append(key(recipe, fault_start))
    data.write_text(text)
    assert len({first, *others}) == 1 + len(others)
    assert None not in others
    assert key(recipe, fault_start) == first


def with_torch(version):
    def resolved(settings):
        return {**vars(settings), "versions": {"torch": version}}

    return resolved


def test_the_code_that_counts_is_that_of_supervised_training():
    names = dict(warm_starts.imported_files("sft_train.py"))
    assert {"sft_train.py", "learning/learner.py", "decoding/tokens.py", "running/run.py"} <= set(names)
    assert "grpo_train.py" not in names


@pytest.fixture
def warm_start(tmp_path):
    """Settings of a warm start whose output_dir holds files, as if it had just been trained."""

    def make(name, size=100):
        folder = tmp_path / name
        folder.mkdir()
        for file in ("model.safetensors", "config.json", "run_config.yaml", "warm_start.json"):
            (folder / file).write_bytes(name.encode() * (size // len(name)))
        return sft_train.Config(output_dir=str(folder))

    return make


def test_a_damaged_or_half_written_one_is_never_started_from(warm_start, tmp_path, capsys):
    cache = tmp_path / "cache"
    keep(cache, "k", warm_start("made"))
    assert {path.name for path in (cache / "k").iterdir()} == {
        "model.safetensors",
        "config.json",
        "run_config.yaml",
        MANIFEST,
    }
    target = sft_train.Config(output_dir=str(tmp_path / "new"))
    assert copy_out(cache, "k", target)
    weights = cache / "k" / "model.safetensors"
    weights.write_bytes(b"n" + weights.read_bytes()[1:])
    assert not copy_out(cache, "k", target)
    assert "model.safetensors has changed" in capsys.readouterr().out
    assert not (tmp_path / "new" / "model.safetensors").exists()
    assert not (cache / "k").exists(), "it is made again, and kept again"
    assert list(cache.iterdir()) == []
    (cache / "half").mkdir()
    (cache / "half" / "model.safetensors").write_text("x")
    assert not copy_out(cache, "half", target)


def test_a_killed_write_leaves_nothing_that_is_found_and_goes_after_a_day(warm_start, tmp_path, monkeypatch):
    cache, copies = tmp_path / "cache", []

    def killed(source, target):
        copies.append(target)
        if len(copies) == 2:
            raise KeyboardInterrupt
        return shutil.copyfile(source, target)

    settings = warm_start("made")
    monkeypatch.setattr(warm_starts, "shutil", Killed(killed))
    with pytest.raises(KeyboardInterrupt):
        keep(cache, "k", settings)
    monkeypatch.undo()
    [part] = cache.iterdir()
    assert part.name.startswith(".part-")
    make_room(cache, but="k")
    assert part.exists(), "another process may be writing it"
    os.utime(part, (0, 0))
    make_room(cache, but="k")
    assert not part.exists()


class Killed:
    """shutil as SIGKILL leaves it: the copy ends, and nothing is tidied up."""

    def __init__(self, copyfile):
        self.copyfile, self.rmtree = copyfile, lambda *given, **how: None


def test_several_runs_at_once_write_and_read_whole_ones(warm_start, tmp_path):
    cache, settings = tmp_path / "cache", [warm_start(f"run{i}", 200_000) for i in range(4)]
    failed, read = [], []

    def work(i):
        try:
            for turn in range(10):
                keep(cache, "same", settings[i])
                target = sft_train.Config(output_dir=str(tmp_path / f"read{i}-{turn}"))
                if copy_out(cache, "same", target):
                    files = [Path(target.output_dir) / name for name in ("model.safetensors", "config.json")]
                    read.append(files[0].read_bytes() == files[1].read_bytes())
                if turn == 5:
                    warm_starts._delete(cache / "same")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert read
    assert all(read)
    assert [path.name for path in cache.iterdir()] == ["same"]


def test_the_ones_not_used_for_longest_go_and_one_that_is_too_large_is_not_kept(
    warm_start, tmp_path, monkeypatch, capsys
):
    cache = tmp_path / "cache"
    monkeypatch.setattr(warm_starts, "LIMIT", 1100)
    for n, name in enumerate(("one", "two")):
        keep(cache, name, warm_start(name, 60))
        os.utime(cache / name, (n, n))
    assert copy_out(cache, "one", sft_train.Config(output_dir=str(tmp_path / "x"))), "used now"
    keep(cache, "three", warm_start("three", 60))
    assert sorted(path.name for path in cache.iterdir()) == ["one", "three"]
    keep(cache, "huge", warm_start("huge", 5000))
    assert "is not kept for other runs" in capsys.readouterr().out
    assert not (cache / "huge").exists()


def test_a_cache_that_cannot_be_written_to_costs_no_run(warm_start, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    keep(tmp_path / "file" / "cache", "k", warm_start("made"))
    assert "the warm start is not kept for other runs" in capsys.readouterr().out


def test_where_warm_starts_are_kept(monkeypatch, tmp_path):
    config = grpo_train.Config()
    for name in ("GRPO_M3PO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert warm_starts.cache_folder(config) == Path.home() / ".cache" / "grpo-m3po" / "warm_starts"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert warm_starts.cache_folder(config) == tmp_path / "grpo-m3po" / "warm_starts"
    monkeypatch.setenv("GRPO_M3PO_CACHE", "here")
    assert warm_starts.cache_folder(config) == Path("here")
    monkeypatch.setenv("GRPO_M3PO_CACHE", "none")
    assert warm_starts.cache_folder(config) is None

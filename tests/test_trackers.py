"""Experiment trackers."""

import json
import signal
from types import SimpleNamespace

import pytest

import grpo_train
from errors import RewardError, SettingError
from running.log import Trackers
from running.parsing import parse_config
from small_recipes import config_of, missing


@missing("tensorboard")
def test_tensorboard_gets_every_number_and_can_be_read_back(recipe_start, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    grpo_train.train(
        config_of(
            "oneshot", recipe_start, tmp_path / "out", grpo_train, report_to=["tensorboard"], run_name="mine"
        )
    )
    found = EventAccumulator(str(tmp_path / "out" / "trackers" / "mine"))
    found.Reload()
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [(e.step, pytest.approx(e.value, rel=1e-5)) for e in found.Scalars("train/reward")] == [
        (m["step"], m["reward"]) for m in metrics
    ]
    assert [e.step for e in found.Scalars("eval/accuracy")] == [2]


def log_records(data):
    """The records of a LevelDB log, as W&B writes its offline runs: blocks of 32 KiB, parts with a header of
    checksum, length and kind.
    """
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


@pytest.mark.slow
@missing("wandb")
def test_wandb_offline_gets_the_metrics_over_their_own_step(recipe_start, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    grpo_train.train(
        config_of("oneshot", recipe_start, tmp_path / "out", grpo_train, report_to=["wandb"], project="mine")
    )
    (file,) = (tmp_path / "out").glob("wandb/offline-run-*/run-*.wandb")
    from wandb.proto import wandb_internal_pb2

    rows, project = [], None
    for data in log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        project = record.run.project or project
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
            )
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert project == "mine"
    assert [(r["step"], r["train/reward"]) for r in rows] == [
        (m["step"], pytest.approx(m["reward"])) for m in metrics
    ]


def test_a_run_that_a_signal_stops_closes_its_trackers_and_its_page(recipe_start, tmp_path, monkeypatch):
    """They were left to Python's end, which one of several processes does not wait for."""
    closed, update = [], grpo_train.update
    monkeypatch.setattr(Trackers, "close", lambda trackers, failed=False: closed.append(1))

    def told_meanwhile(*args):
        signal.raise_signal(signal.SIGTERM)
        return update(*args)

    monkeypatch.setattr(grpo_train, "update", told_meanwhile)
    with pytest.raises(SystemExit):
        grpo_train.train(config_of("oneshot", recipe_start, tmp_path / "out", grpo_train))
    assert closed == [1]
    assert (tmp_path / "out" / "report.html").exists()


def test_a_run_that_fails_closes_its_trackers(recipe_start, tmp_path, monkeypatch):
    """The next run of a study was logged into its run by W&B, and not at all by MLflow."""
    closed = []
    monkeypatch.setattr(Trackers, "close", lambda trackers, failed=False: closed.append(failed))

    def fails(*args):
        raise RewardError("at step 2")

    monkeypatch.setattr(grpo_train, "score", fails)
    with pytest.raises(RewardError):
        grpo_train.train(config_of("oneshot", recipe_start, tmp_path / "out", grpo_train))
    assert closed == [True]


@pytest.mark.parametrize("failed", [False, True])
def test_wandb_is_told_whether_a_run_failed(failed, tmp_path):
    trackers, told = Trackers(grpo_train.Config(), tmp_path), []
    run = SimpleNamespace(finish=lambda exit_code: told.append(exit_code))
    trackers.started = {"wandb": SimpleNamespace(tracker=run, finish=lambda: told.append(None))}
    trackers.close(failed)
    assert told == [1 if failed else None]


@missing("wandb")
def test_a_tracker_that_fails_is_warned_of_and_the_run_goes_on(recipe_start, tmp_path, monkeypatch):
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    def fails(*args, **kwargs):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(LOGGER_TYPE_TO_CLASS["wandb"], "start", fails)
    with pytest.warns(
        UserWarning, match="report_to wandb: dropped, it raised ConnectionError: no route to host"
    ):
        grpo_train.train(
            config_of("oneshot", recipe_start, tmp_path / "out", grpo_train, report_to=["wandb"])
        )
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_tracker_nobody_knows_is_refused():
    with pytest.raises(SettingError, match="report_to=.*must be of tensorboard, wandb"):
        parse_config(grpo_train.Config, ["--report_to", "tensorboar"])
    assert parse_config(grpo_train.Config, ["--report_to", "none"]).report_to is None

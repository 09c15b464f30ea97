"""Several processes: shares, the launcher, signals, the same run whatever their number."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from errors import SettingError
from grpo_train import Config
from learning.parallel import shard
from running.launching import check_shares, signals_to_hand_on, starts_processes
from small_runs import SHORT, command, lines, run_short

ROOT = Path(__file__).resolve().parents[1]


def test_the_processes_shares_are_the_whole_batch_in_order_and_alike_in_size():
    """7 problems on 2 processes are 3 and 4 of them; with 12 rows each, 36 and 48."""
    for count, world in [(7, 2), (12, 8), (5, 5), (3, 1)]:
        ranks = [SimpleNamespace(process_index=rank, num_processes=world) for rank in range(world)]
        shares = [list(range(count))[shard(count, rank)] for rank in ranks]
        assert [i for share in shares for i in share] == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert [shard(count, rank, 12) for rank in ranks] == [
            slice(share[0] * 12, share[-1] * 12 + 12) for share in shares
        ]


def test_signals_that_are_switched_off_are_not_handed_on():
    """nohup's SIGHUP would end what nohup was to keep."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        assert signals_to_hand_on() == [
            name
            for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
            if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN
        ]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_every_process_has_a_problem_of_the_batch():
    check_shares(Config(batch_size=2), 2)
    with pytest.raises(SettingError, match="must give each of the 3 processes a problem"):
        check_shares(Config(batch_size=2), 3)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "problems"), [(2, 7), (2, 8), (4, 8), (8, 8), (4, 9)])
def test_many_processes_give_the_run_that_one_gives(processes, problems, warm, tmp_path):
    """I3, I10: seven problems do not divide by two processes, nor nine by four; TRL PR#2824 sampled the same texts on each."""
    flags = ("--batch_size", problems, "--max_grad_norm", "0.1", "--beta", "0.04", "--micro_batch_tokens", "300", "--max_completion_length", "24",
             "--log_groups", "5", "--cpu_threads", "1")  # fmt: skip
    done = command(
        "grpo_train.py",
        *SHORT,
        "--warm_start",
        "none",
        "--model",
        warm,
        "--output_dir",
        tmp_path / "many",
        *flags,
        nproc=processes,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    run_short(warm, tmp_path / "one", *map(str, flags))
    one, many = (lines(tmp_path / name / "rollouts.jsonl") for name in ("one", "many"))
    assert [(r["step"], r["example_id"], r["completion"], r["reward"]) for r in one] == [
        (r["step"], r["example_id"], r["completion"], r["reward"]) for r in many
    ]
    assert [sum("mix" in r for r in records) for records in (one, many)] == [3 * 5 * 4] * 2
    for a, b in zip(
        lines(tmp_path / "one" / "metrics.jsonl"), lines(tmp_path / "many" / "metrics.jsonl"), strict=True
    ):
        for name in (
            "loss",
            "grad_norm",
            "kl",
            "entropy",
            "reward",
            "completion_length",
            "thinking_paths",
            "frac_reward_zero_std",
        ):
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-6), name
    weights = [AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "many")]
    assert max(float((weights[0][k] - weights[1][k]).abs().max()) for k in weights[0]) < 1e-5


@pytest.mark.slow
def test_a_supervised_run_of_two_processes_is_that_of_one(warm, tmp_path):
    """I3: the loss is a mean over the tokens of all processes, seven rows on two of them, in micro-batches of uneven number."""
    flags = (
        "--model", warm, "--dataset", "arithmetic", "--limit", "60", "--batch_size", "7", "--num_epochs", "null", "--num_steps", "3", "--cpu_threads", "1",
        "--learning_rate", "1e-3", "--max_grad_norm", "0.1", "--eval_problems", "8", "--eval_every", "3", "--micro_batch_tokens", "200",
    )  # fmt: skip
    for name, processes in (("one", None), ("many", 2)):
        done = command("sft_train.py", *flags, "--output_dir", tmp_path / name, nproc=processes)
        assert done.returncode == 0, done.stderr[-2000:]
    for a, b in zip(
        lines(tmp_path / "one" / "metrics.jsonl"), lines(tmp_path / "many" / "metrics.jsonl"), strict=True
    ):
        for name in ("loss", "grad_norm", "tokens", "learning_rate"):
            assert a[name] == pytest.approx(b[name], rel=1e-5), name
        assert a.get("eval_accuracy") == b.get("eval_accuracy")
    weights = [AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "many")]
    assert max(float((weights[0][k] - weights[1][k]).abs().max()) for k in weights[0]) < 1e-4


def test_a_process_that_was_started_by_a_launcher_starts_none(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert starts_processes(Config()) == 4
    assert starts_processes(Config(num_processes=2)) == 2
    assert starts_processes(Config(num_processes=1)) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SettingError, match="there are 4 GPUs"):
        starts_processes(Config(num_processes=5))
    for variable in ("RANK", "ACCELERATE_MIXED_PRECISION"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "0")
            assert starts_processes(Config()) is None


def children_of(pid):
    """Processes of this machine that are alive and that `pid` started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            found += [int(folder.name)] if int(parent) == pid and state != "Z" else []
    return found


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "status"),
    [(("SIGTERM",), 143), (("SIGUSR1",), 138), (("SIGINT", "SIGINT"), 130), (("SIGKILL",), -9)],
)
def test_a_signal_to_the_one_that_was_started_ends_them_all(tmp_path, signals, status):
    """No orphan holds a card, whatever ended the parent; the second of two signals does not wait."""
    words = [
        *SHORT,
        "--warm_start",
        "none",
        "--model",
        "tiny",
        "--num_processes",
        "2",
        "--num_steps",
        "100000",
        "--eval_every",
        "0",
        "--output_dir",
        tmp_path / "out",
    ]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    parent = subprocess.Popen(
        [sys.executable, "grpo_train.py", *map(str, words)],
        cwd=ROOT,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics = tmp_path / "out" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, 60)
    children = children_of(parent.pid)
    assert len(children) == 2
    for name in signals:
        parent.send_signal(getattr(signal, name))
        time.sleep(0.05)
    assert parent.wait(timeout=20) == status
    wait_for(lambda: not any(map(alive, children)), 20)


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


@pytest.mark.slow
def test_the_script_starts_its_processes_and_ends_with_the_first_that_fails(warm, tmp_path):
    """open-r1#620: the others waited 30 minutes for the one that had died."""
    flags = [*SHORT, "--warm_start", "none", "--model", warm, "--num_processes", "2", "--num_steps", "2"]
    done = command("grpo_train.py", *flags, "--output_dir", tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert "on 2 cpu process(es)" in done.stdout
    (tmp_path / "fails.py").write_text(
        "import os\ndef reward(completions, **kwargs):\n    if os.environ['RANK'] == '1':\n        raise ValueError('boom')\n"
        "    return [0.0] * len(completions)\n"
    )
    started = time.perf_counter()
    done = command(
        "grpo_train.py",
        *flags,
        "--output_dir",
        tmp_path / "failed",
        "--reward",
        f"{tmp_path / 'fails.py'}:reward",
    )
    assert done.returncode == 1
    assert "boom" in done.stderr
    assert "process 1 ended with status 1" in done.stderr
    assert time.perf_counter() - started < 60


@pytest.mark.slow
def test_sharded_weights_train_as_whole_ones_do(warm, tmp_path):
    """FSDP2 against DDP on two processes: seven problems, so that one of them has fewer micro-batches, which must not hang the other."""
    flags = [
        *SHORT,
        "--warm_start",
        "none",
        "--model",
        warm,
        "--num_processes",
        "2",
        "--batch_size",
        "7",
        "--micro_batch_tokens",
        "300",
        "--beta",
        "0.04",
    ]
    states = []
    for fsdp in ("false", "true"):
        done = command(
            "grpo_train.py", *flags, "--fsdp", fsdp, "--save_every", "2", "--output_dir", tmp_path / fsdp
        )
        assert done.returncode == 0, done.stderr
        states.append(
            (
                load_file(tmp_path / fsdp / "model.safetensors"),
                [json.loads(line) for line in open(tmp_path / fsdp / "metrics.jsonl")],
            )
        )
        assert (tmp_path / fsdp / "checkpoint-2" / "model.safetensors").exists()
    (whole, metrics), (sharded, sharded_metrics) = states
    assert set(whole) == set(sharded)
    assert all(torch.allclose(whole[name], sharded[name], atol=1e-5) for name in whole)
    for a, b in zip(metrics, sharded_metrics, strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)

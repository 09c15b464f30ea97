"""Which device computes. There is no Mac here: its GPU is simulated."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from decoding.building import why_no_kernels
from learning import device
from learning.precision import compute_dtype

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def chosen(monkeypatch):
    """choose_device(), asked anew, on a machine with mps and without CUDA."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    return device.choose_device.__wrapped__


def test_an_mps_that_does_not_work_is_left_for_the_cpu_in_one_line(chosen, capsys):
    """This machine has none: the first tensor that is moved there raises."""
    assert chosen() == torch.device("cpu")
    said = capsys.readouterr().out
    assert said.startswith("mps does not pass the self-test (")
    assert said.endswith("): the CPU computes\n")
    assert said.count("\n") == 1


def test_an_mps_that_passes_the_self_test_computes_in_float32(chosen, monkeypatch, capsys):
    monkeypatch.setattr(device, "fault_of", lambda given: None)
    assert chosen() == torch.device("mps")
    assert compute_dtype("bf16", chosen()) == torch.float32
    assert capsys.readouterr().out == ""


def test_without_mps_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(device, "fault_of", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device.choose_device.__wrapped__() == torch.device("cpu")


def test_the_self_test_passes_what_computes_as_the_cpu_and_names_what_does_not(monkeypatch):
    cpu, tried = torch.device("cpu"), device._tried
    state = torch.get_rng_state()
    assert device.fault_of(cpu) is None
    assert torch.equal(state, torch.get_rng_state())
    other, calls = tried(cpu), []

    def differs(name):
        def on(given):
            calls.append(name)
            values = {key: value.clone() for key, value in other.items()}
            values[name] += 0.01 * (len(calls) % 2)
            return values

        return on

    assert set(other) == {"tokens", "log-probs", "weights of M3PO", "gradients"}
    for name in other:
        monkeypatch.setattr(device, "_tried", differs(name))
        assert device.fault_of(cpu) == f"other {name} than on the CPU"


def test_a_card_that_torch_cannot_use_is_told_of(chosen, monkeypatch, capsys):
    """A torch without CUDA trained on the CPU of a machine with cards, and said nothing of them."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(device.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert chosen() == torch.device("cpu")
    said = capsys.readouterr().out
    assert said.startswith("note: torch cannot use the NVIDIA card that is here (torch ")
    assert "is built without CUDA: install one that is built with it): the CPU computes" in said
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: 1 / 0)
    chosen()
    assert "(division by zero): the CPU computes" in capsys.readouterr().out
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        chosen()
        assert capsys.readouterr().out == ""


class Broken(ModuleType):
    """triton.runtime, whose driver raises where it is built."""

    @property
    def driver(self):
        return self

    @property
    def active(self):
        raise self.error


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            RuntimeError("Failed to find C compiler.\nPlease specify"),
            "or set CC: Failed to find C comp",
        ),
        (subprocess.CalledProcessError(1, ["gcc", "m.c"]), r"Python's headers, .*\['gcc', 'm.c'\]"),
        (PermissionError(13, "Permission denied", "/root/.triton"), "Permission denied"),
        (None, "^triton is not installed$"),
    ],
)
def test_a_machine_that_builds_no_kernels_takes_the_plain_path_and_says_why(error, why, monkeypatch):
    """An image without gcc ended in a traceback through torch's compiler. The card is simulated."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fake = Broken("triton.runtime") if error else None
    if error:
        fake.error = error
    monkeypatch.setitem(sys.modules, "triton", fake and ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.runtime", fake)
    assert re.search(why, why_no_kernels.__wrapped__())


def test_without_cuda_nothing_is_built(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert why_no_kernels.__wrapped__() == "no CUDA"


COMPILES_AFTER_A_SIGNAL = """
import os, signal, time
from decoding.building import start_compile_workers

start_compile_workers()
from torch._inductor.async_compile import AsyncCompile

took = []
signal.signal(signal.SIGTERM, lambda number, frame: took.append(number))
pool = AsyncCompile.process_pool()
first = pool.submit(os.getpid).result(60)
os.killpg(0, signal.SIGTERM)
time.sleep(0.5)
assert pool.submit(os.getpid).result(30) != os.getpid() != first
print(took)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="no such signals")
def test_a_signal_to_the_whole_group_leaves_the_processes_that_compile():
    """torch would wait without end for processes that it has lost."""
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    command = [sys.executable, "-c", COMPILES_AFTER_A_SIGNAL]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, start_new_session=True
    )
    assert (done.returncode, done.stdout) == (0, f"[{int(signal.SIGTERM)}]\n"), done.stderr

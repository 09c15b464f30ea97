"""Processes: one a GPU, which `python grpo_train.py` on a box starts by itself through torch's own launcher.

Under torchrun, accelerate launch or a cluster's launcher (they set RANK) nothing is started here."""

import ctypes
import dataclasses
import logging
import os
import signal
import sys
import threading
import uuid
import warnings

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from errors import SettingError

SIGNALS = (
    "SIGTERM",
    "SIGINT",
    "SIGHUP",
    "SIGQUIT",
    "SIGUSR1",
)  # handed on to every process: torch's default leaves orphans on SIGUSR1


SECONDS_TO_END = 3600  # for a process that was told to end and may be saving; torch kills those of a process that failed after 30


PARENT = "GRPO_PARENT"  # the process that started this one


def starts_processes(config):
    """How many processes this one must start: None where it is one of them, or the only one."""
    started = (
        "RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    )  # accelerate launch sets no rank for a single process
    wanted = config.num_processes or torch.cuda.device_count()
    if started or wanted <= 1:
        return None
    if torch.cuda.is_available() and wanted > torch.cuda.device_count():
        raise SettingError("num_processes", wanted, f"there are {torch.cuda.device_count()} GPUs")
    return wanted


def heeded():
    """The signals that are handed on: not those that nohup or a shell has switched off."""
    return [name for name in SIGNALS if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN]


def launch(processes):
    """Run this command once for each process, and end with the status of the first that failed. A second Ctrl-C ends everything at once."""
    settings = dict(min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id=uuid.uuid4().hex, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
                    max_restarts=0, monitor_interval=0.2, signals_to_handle=",".join(heeded()), shutdown_timeout=SECONDS_TO_END)  # fmt: skip
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    logging.disable(logging.ERROR)  # the process that failed has said why
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ[PARENT] = str(os.getpid())
    threading.Thread(target=_leave_on_a_second_ctrl_c, args=(_signals_as_bytes(),), daemon=True).start()
    try:
        elastic_launch(
            LaunchConfig(**{name: value for name, value in settings.items() if name in known}), sys.executable
        )(*sys.argv)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        print(f"process {rank} ended with status {status}; the others were stopped", file=sys.stderr)
        sys.exit(status)
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)


def _signals_as_bytes():
    """A pipe that gets a byte for each signal, whatever the main thread waits for."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read


def _leave_on_a_second_ctrl_c(pipe):
    seen = 0
    while seen < 2:
        seen += os.read(pipe, 1)[0] == signal.SIGINT
    os._exit(128 + signal.SIGINT)  # and the processes with it: see `end_with_parent`


def end_with_parent():
    """Linux kills this process when the one that started it is gone, however that went."""
    if os.environ.get(PARENT) == str(os.getppid()) and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


def start_processes(config):
    """One process, or one of many that torchrun or accelerate started; seeds this one alike everywhere."""
    end_with_parent()
    warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
    warnings.filterwarnings(
        "ignore", message="Detected call of `lr_scheduler.step", category=UserWarning
    )  # a first step may be one that is not taken
    no_broadcast = DistributedDataParallelKwargs(
        broadcast_buffers=False
    )  # processes differ in their number of forwards
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[no_broadcast])
    torch.manual_seed(config.seed)
    if config.cpu_threads:
        torch.set_num_threads(config.cpu_threads)
    check_shares(config, accelerator.num_processes)
    return accelerator


def check_shares(config, processes):
    """Every process needs a problem of each batch."""
    if config.batch_size < processes:
        raise SettingError(
            "batch_size", config.batch_size, f"must give each of the {processes} processes a problem"
        )

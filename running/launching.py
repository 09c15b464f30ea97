"""Processes: one a GPU, which `python grpo_train.py` starts by itself through torch's own launcher.

Under torchrun, accelerate launch or a cluster's launcher (they set RANK) nothing is started here.
"""

import ctypes
import dataclasses
import logging
import os
import signal
import sys
import uuid
import warnings

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from errors import SettingError

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")  # torch hands on all but SIGUSR1 by default
SECONDS_TO_END = 3600  # a process that was told to end may be saving; torch's default is 30
PARENT = "GRPO_PARENT"  # names the process that started this one


def starts_processes(config):
    """How many processes this one must start: None where it is one of them, or the only one."""
    # accelerate launch sets no rank for a single process
    started = "RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    wanted = config.num_processes or torch.cuda.device_count()
    if started or wanted <= 1:
        return None
    if torch.cuda.is_available() and wanted > torch.cuda.device_count():
        raise SettingError("num_processes", wanted, f"there are {torch.cuda.device_count()} GPUs")
    return wanted


def signals_to_hand_on():
    """Names of the signals that every process gets too: not those that nohup or a shell has switched off."""
    return [name for name in SIGNALS if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN]


def launch(processes):
    """Run this command once for each process, and end with the status of the first that failed."""
    settings = dict(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
        signals_to_handle=",".join(signals_to_hand_on()),
        shutdown_timeout=SECONDS_TO_END,
    )
    known = {field.name for field in dataclasses.fields(LaunchConfig)}  # older ones lack some of them
    config = LaunchConfig(**{name: value for name, value in settings.items() if name in known})
    logging.disable(logging.ERROR)  # the process that failed has said why
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ[PARENT] = str(os.getpid())
    try:
        elastic_launch(config, sys.executable)(*sys.argv)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        print(f"process {rank} ended with status {status}; the others were stopped", file=sys.stderr)
        sys.exit(status)
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)


def end_with_parent():
    """Let Linux kill this process when the one that started it is gone, however that went."""
    if os.environ.get(PARENT) == str(os.getppid()) and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


def start_processes(config):
    """Join the other processes, if there are any, and return the accelerator; all are seeded alike."""
    end_with_parent()
    warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
    # torch warns where the first step of the schedule comes before one of the optimiser, which may be refused
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
    # processes differ in their number of forwards, so DDP must not exchange buffers in each
    no_broadcast = DistributedDataParallelKwargs(broadcast_buffers=False)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[no_broadcast])
    torch.manual_seed(config.seed)
    if config.cpu_threads:
        torch.set_num_threads(config.cpu_threads)
    check_shares(config, accelerator.num_processes)
    return accelerator


def check_shares(config, processes):
    """Every process needs a problem of each batch."""
    if config.batch_size < processes:
        remedy = f"must give each of the {processes} processes a problem"
        raise SettingError("batch_size", config.batch_size, remedy)

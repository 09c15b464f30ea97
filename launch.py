"""One process a GPU: `python grpo_train.py` on a box starts the others by itself, through torch's own launcher.

Under torchrun, accelerate launch or a cluster's launcher (they set RANK) nothing is started here.
"""

import dataclasses
import logging
import os
import sys
import uuid

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # handed on to every process: torch's default leaves orphans on SIGUSR1
SECONDS_TO_END = 600  # a process that was told to end may be saving; torch's default kills it after 30


def starts_processes(num_processes):
    """How many processes this one must start: None where it is one of them, or the only one."""
    wanted = num_processes or torch.cuda.device_count()
    return wanted if wanted > 1 and "RANK" not in os.environ else None


def launch(processes):
    """Run this command once for each process, and end with the status of the first that failed."""
    settings = dict(min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id=uuid.uuid4().hex, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
                    max_restarts=0, monitor_interval=0.2, signals_to_handle=SIGNALS, shutdown_timeout=SECONDS_TO_END)  # fmt: skip
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the process that failed has said why
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    try:
        elastic_launch(LaunchConfig(**{name: value for name, value in settings.items() if name in known}), sys.executable)(*sys.argv)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        print(f"process {rank} ended with status {status}; the others were stopped", file=sys.stderr)
        sys.exit(status)
    except SignalException as signal:
        sys.exit(128 + signal.sigval)

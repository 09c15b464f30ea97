"""Processes: one a GPU, which `python grpo_train.py` starts by itself through torch's own launcher.

Under torchrun, accelerate launch or a cluster's launcher (they set RANK) nothing is started here.
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import logging
import os
import re
import shutil
import signal
import sys
import time
import uuid
import warnings
from argparse import ArgumentParser
from datetime import timedelta
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    broadcast,
    broadcast_object_list,
    gather_object,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from answers.user_files import code_of, user_files
from decoding.building import start_compile_workers
from errors import RunError, SettingError, counted, sized
from learning.device import choose_device, cpu_threads
from learning.models import fingerprint
from learning.parallel import is_first_of_node, of_first_of_node, refuse_unlike, together
from learning.precision import compute_dtype
from reporting.files import FINISHED, LOGS, here_or_ours, sha256_of
from running.folder import DRAWN, FOLDERS
from running.parsing import parse_config

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
SECONDS_TO_END = 3600  # a process that was told to end may be saving; torch's default is 30
LONGEST_WAIT = timedelta(hours=2)  # for a process that loads, saves or has a slow reward; torch: 10 minutes
PARENT = "GRPO_PARENT"  # names the process that started this one
BYTES_AT_ONCE = 2**26  # of a file that is sent to other machines


def starts_processes(config):
    """How many processes this one must start: None where it is one of them, or the only one."""
    # accelerate launch sets no rank for a single process
    started = "RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    wanted = config.num_processes or torch.cuda.device_count()
    here = os.environ.get("LOCAL_WORLD_SIZE", str(wanted))
    if started and config.num_processes and here != str(wanted) and is_first_of_node():
        unread = f"num_processes={wanted} has no effect: the launcher has started {here} on this machine"
        warnings.warn(unread, stacklevel=2)
    if started or wanted <= 1:
        return None
    if torch.cuda.is_available() and wanted > torch.cuda.device_count():
        raise SettingError(
            "num_processes", wanted, f"this machine has {counted(torch.cuda.device_count(), 'GPU')}"
        )
    return wanted


def signals_to_hand_on():
    """Names of the signals that every process gets too: not those that nohup or a shell has switched off."""
    there = [name for name in SIGNALS if hasattr(signal, name)]  # Windows lacks some
    return [name for name in there if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN]


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
    if _is_child() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


def _is_child():
    return "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get(PARENT) == str(os.getppid())


def seconds_since_start():
    """Seconds on the clock since this process began, or the launcher that started it."""
    return time.time() - psutil.Process(os.getppid() if _is_child() else None).create_time()


def parse_on_all(config_class, doc, given=None):
    """As `parse_config`, unless that has `given` the settings already.

    Of several processes the first reads the settings, and all of them get what it read.

    One that was given another command, or finds another file under a name in it, is refused on all of them.
    """
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", 1)) == 1:
        config = given or parse_config(config_class, description=doc)
        check_precision(config)
        return config
    end_with_parent()
    is_main = PartialState(cpu=choose_device().type == "cpu", timeout=LONGEST_WAIT).is_main_process
    config = None
    with together():
        if is_main:
            config = parse_config(config_class, description=doc)
            if PARENT not in os.environ:  # it has said so already
                print(config.first_line, flush=True)
    [config] = broadcast_object_list([config])
    command = re.sub("--output[-_]dir[= ][^ ]*", "", " ".join(sys.argv[1:]))  # the first process's counts
    refuse_unlike({("command line", "of the script"): command})
    refuse_unlike(named_files(config))
    with together():
        dataclasses.replace(config)  # checks it again: each machine needs the packages and rewards
        check_precision(config)
    return config


def named_files(config):
    """{(setting, path): sha256} of the files that the settings name, those of a model left out."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    named = [("config", parser.parse_known_args()[0].config)]
    named += [
        (name, getattr(config, name, None)) for name in ("warm_start", "system_prompt_file", "questions")
    ]
    code = code_of(config)
    named += code + [(setting, file) for setting, path in code for file in user_files(path)[1:]]
    data = Path(config.dataset)
    named += [("dataset", path) for path in (data, *sorted(data.glob(f"{config.split}[.-]*")))]
    found = [(name, path, here_or_ours(path)) for name, path in named if path]
    return {(name, str(path)): sha256_of(file) for name, path, file in found if file.is_file()}


def refuse_other_start(config, problems, model):
    """Refuse where a process starts from other problems or weights: another revision of the hub, say."""
    if PartialState().num_processes > 1:
        texts = [repr((vars(p.problem), p.ids)) for p in problems]
        digest = hashlib.sha256("".join(texts).encode()).hexdigest()
        refuse_unlike({("dataset", config.dataset): digest, ("model", config.model): fingerprint(model)})


def model_files(folder):
    """{name: (bytes, sha256)} of a model's or a checkpoint's files, without what else a run leaves there."""
    files = {}
    for path in sorted(Path(folder).rglob("*")):
        top = path.relative_to(folder).parts[0]
        is_other = top in (*LOGS, FINISHED, *DRAWN, *FOLDERS, "warm_start", "README.md")
        if path.is_file() and not (is_other or top.startswith((".", "checkpoint-"))):
            files[str(path.relative_to(folder))] = path.stat().st_size, sha256_of(path)
    return files


@contextlib.contextmanager
def folder_of_first(folder, spare, setting=None):
    """The path at which this process finds a folder as the first process has it; every process must call it.

    It is the folder itself on a machine that has the same, else a copy inside `spare`, which goes at the end.
    setting: its name where a user gave the folder; then another folder of that name is refused.
    """
    state, files = PartialState(), {}
    with together():
        if state.num_processes > 1 and is_first_of_node():
            files = model_files(folder)
    [files_of_first] = broadcast_object_list([files])
    is_lacking = is_first_of_node() and files != files_of_first
    if setting and files_of_first:
        found = files if files and is_first_of_node() else files_of_first
        refuse_unlike({(setting, str(Path(folder) / name)): found[name] for name in found})
    if not files_of_first or not any(gather_object([is_lacking])):
        yield str(folder)
        return
    copies = Path(spare) / f".sent-{state.process_index}"
    copy = copies / Path(folder).name if is_lacking else None
    try:
        _send(Path(folder), files_of_first, copy)
        yield of_first_of_node(str(copy or folder))
    finally:
        if copy:
            shutil.rmtree(copies, ignore_errors=True)
            with contextlib.suppress(OSError):  # where something else is in it
                Path(spare).rmdir()


def _send(folder, files, copy):
    """Send the first process's files to all processes; one that wants a `copy` of them writes it."""
    state, problem = PartialState(), None
    if copy:
        shutil.rmtree(copy.parent, ignore_errors=True)  # a kill may have left one
    for name, (size, _) in files.items():
        problem = problem or _append(copy, name, b"")
        for start in range(0, size, BYTES_AT_ONCE):
            part = torch.empty(min(BYTES_AT_ONCE, size - start), dtype=torch.uint8, device=state.device)
            if state.is_main_process:
                with open(folder / name, "rb") as file:
                    file.seek(start)
                    part.copy_(torch.frombuffer(bytearray(file.read(len(part))), dtype=torch.uint8))
            broadcast(part)
            problem = problem or _append(copy, name, part.cpu().numpy())
    with together():
        if problem:
            needed = sum(size for size, _ in files.values())
            raise RunError(f"{copy}: {problem.strerror}; {sized(needed)} of the first node are copied there")


def _append(copy, name, data):
    """Append to a file of the copy, if this process writes one; returns the OSError, if there is one."""
    try:
        if copy:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            with open(copy / name, "ab") as file:
                file.write(data)
    except OSError as error:
        return error


def start_processes(config):
    """Join the other processes, if there are any, and return the accelerator; all are seeded alike."""
    end_with_parent()
    warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
    # torch warns where the first step of the schedule comes before one of the optimiser, which may be refused
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
    # processes differ in their number of forwards, so DDP must not exchange buffers in each
    no_broadcast = DistributedDataParallelKwargs(broadcast_buffers=False)
    accelerator = make_accelerator(config, [no_broadcast])
    if config.torch_compile and accelerator.device.type == "cuda":
        start_compile_workers()  # they get ready while models are loaded
    torch.manual_seed(config.seed)
    if threads := cpu_threads(config, accelerator.device):
        torch.set_num_threads(threads)
    check_shares(config, accelerator.num_processes)
    return accelerator


def make_accelerator(config, handlers=()):
    """This process's Accelerator; the settings alone say what is computed in which precision."""
    check_precision(config)
    launcher_s = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if (config.num_processes or 1) > 1 and "RANK" not in os.environ and launcher_s is None:
        remedy = "a call from Python starts none: run your script with torchrun --nproc_per_node {}"
        raise SettingError("num_processes", config.num_processes, remedy.format(config.num_processes))
    if launcher_s not in (None, "no", config.precision) and is_first_of_node():
        unread = f"the launcher's mixed_precision={launcher_s} has no effect"
        warnings.warn(f"{unread}: --precision is {config.precision}", stacklevel=2)
    # of fp16, sums over parts of a product are in float32, too
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    cpu = choose_device().type == "cpu"
    handlers = [*handlers, InitProcessGroupKwargs(timeout=LONGEST_WAIT)]
    return Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=handlers)


def check_precision(config):
    """Refuse a precision that this machine has not; before anything is loaded, or other processes start."""
    device = choose_device()
    chosen = config.precision_on(device) if hasattr(config, "precision_on") else config.precision
    compute_dtype(chosen, device)


def check_shares(config, processes):
    """Every process needs a problem of each batch."""
    if config.batch_size < processes:
        remedy = f"must give each of the {processes} processes a problem"
        raise SettingError("batch_size", config.batch_size, remedy)

"""What a user is told in one line; `status` is the exit status of a script that ends with the error."""

import os
import re
import signal
import sys
from pathlib import Path

# What torch, the CPU's allocator, cuDNN and cuBLAS say where memory ran out
NO_MEMORY = ("out of memory", "can't allocate memory", "mha_graph.execute", "ALLOC_FAILED", "NOT_INITIALIZED")


def end_on_interrupt():
    """End on Ctrl-C with one line: a script calls it first, since its imports take seconds."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup and & switch it off
        signal.signal(signal.SIGINT, _end)


def _end(number, frame):
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(
            f"{Path(sys.argv[0]).name}: stopped by SIGINT while it was loading", file=sys.stderr, flush=True
        )
    os._exit(128 + number)


def raise_on_interrupt():
    """Make Ctrl-C a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_path(name):
    """Whether a name of a model or a data set can only be a path, since no hub id looks like it."""
    return not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(name))


def one_line(error, limit=200):
    """The text of an error, or of anything else, as one line of at most `limit` characters."""
    return " ".join(str(error).split())[:limit]


class SettingError(ValueError):
    """A bad setting: the line names the field, its value and what would do."""

    status = 2

    def __init__(self, name, value, remedy):
        shown = repr(value)
        shown = shown if len(shown) <= 300 else f"{shown[:150]} ..."  # rows of data, say
        super().__init__(f"{name}={shown}: {remedy}")


class DataError(ValueError):
    """Data that cannot be trained on: the line names the file and the row."""

    status = 2


class RunError(RuntimeError):
    """A run that cannot go on."""

    status = 1


class NotFiniteError(RunError):
    """Too many steps in a row had a loss or gradient that is not finite."""


class NoRoomError(RunError):
    """Memory or disk did not suffice: on another machine, or later, the same run may go on."""


class RewardError(RuntimeError):
    """A reward function raised, or returned something that cannot be trained on: the line names it."""

    status = 1


class SharedError(RuntimeError):
    """What all processes end with where one refused: the line names its node, `status` is the error's own."""

    def __init__(self, line, status):
        super().__init__(line)
        self.status = status


FORESEEN = (SettingError, DataError, RunError, RewardError, SharedError)  # any other is the program's fault


class Interrupted(Exception):
    """The run was asked to end while rows were being decoded; only their unfinished completions are lost."""


class Stopped(Exception):
    """All processes agreed to stop. Run saves what is finished and ends with 128 + the signal."""


def is_out_of_memory(error):
    """Whether memory ran out. Beside torch, CUDA's libraries take memory too, and have words of their own."""
    return type(error).__name__ == "OutOfMemoryError" or any(words in str(error) for words in NO_MEMORY)

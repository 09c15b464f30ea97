"""What a user is told in one line; `status` is the exit status of a script that ends with the error.

All modules of the project import this one first, and it asks at once whether the packages that they need are
there: see `require_packages`.
"""

import contextlib
import os
import re
import signal
import sys
import threading
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PYTHON = (3, 11)
SECONDS_OF_SILENCE = 60.0  # in which something is loaded, before a line says so
OR_OFFLINE = "; if the hub does not answer, HF_HUB_OFFLINE=1 takes what was loaded before"

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


def show_all_letters():
    """Print letters that the locale lacks, of a Chinese answer, say, by their numbers, and not an error."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def is_path(name):
    """Whether a name of a model or a data set can only be a path, since no hub id looks like it."""
    return not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(name))


def tell_after(seconds, line):
    """Write a line on standard error then, unless what this returns is cancelled before."""
    timer = threading.Timer(seconds, print, (line,), dict(file=sys.stderr, flush=True))
    timer.daemon = True  # it keeps no process from ending
    timer.start()
    return timer


@contextlib.contextmanager
def telling_if_slow(line):
    """Says a line where what is inside takes long: a large download, or a hub that never answers."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    timer = tell_after(SECONDS_OF_SILENCE, f"note: {line}")
    try:
        yield
    finally:
        timer.cancel()


def one_line(error, limit=200):
    """The text of an error, or of anything else, as one line of at most `limit` characters."""
    return " ".join(str(error).split())[:limit]


def counted(number, noun, form=""):
    """`1 step`, `2 steps`, `0 passes`; form: how the number is written, such as "," for 10,000."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:{form}} {noun if number == 1 else plural}"


def sized(count):
    """Bytes to read: `830 kB`, `12.3 MB`, `5.93 GB`."""
    power = min(3, max(1, (len(str(int(count))) - 1) // 3))
    value = count / 1000**power
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {'kB MB GB'.split()[power - 1]}"


class SettingError(ValueError):
    """A bad setting: the line names the field, its value and what would do."""

    status = 2

    def __init__(self, name, value, remedy):
        shown = re.sub(r"\s*\n\s*", " ", repr(value))  # of a model, a data set
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


class Interrupted(BaseException):
    """The run was asked to end while rows were being decoded or rewarded; only their completions are lost.

    No Exception: a reward that tries again after any error would go on.
    """


class Stopped(Exception):
    """All processes agreed to stop. Run saves what is finished and ends with 128 + the signal."""


def is_out_of_memory(error):
    """Whether memory ran out. Beside torch, CUDA's libraries take memory too, and have words of their own."""
    return type(error).__name__ == "OutOfMemoryError" or any(words in str(error) for words in NO_MEMORY)


def require_packages():
    """End a script with one line where Python, or a package of requirements.txt, is missing or too old.

    Elsewhere, in a notebook say, the line is that of an ImportError.
    """
    wrong = [f"{name}{bound} ({there or 'not'} there)" for name, bound, there in too_old("requirements.txt")]
    if sys.version_info < PYTHON:
        wrong.insert(0, f"Python>={'.'.join(map(str, PYTHON))} ({sys.version.split()[0]} there)")
    if not wrong:
        return
    line = f"needs {', '.join(wrong)}: pip install -r {ROOT / 'requirements.txt'}"
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    if script.resolve().parent not in (ROOT, ROOT / "reporting", ROOT / "benchmarks"):
        raise ImportError(line)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        name = script.parent.name if script.stem == "__main__" else script.name
        print(f"{name}: {line}", file=sys.stderr, flush=True)
    sys.exit(2)


def too_old(file):
    """(name, bound, version or None) of the packages of a requirements file that are missing or too old.

    What pip installed has no such file, and pip has seen to its packages.
    """
    text = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).exists() else ""
    found = []
    for name, bound in re.findall(r"^([\w-]+)(?:\[.*\])?(>=[\d.]+)$", text, re.MULTILINE):
        try:
            there = metadata.version(name)
        except metadata.PackageNotFoundError:
            there = None
        by_hand = there is None and find_spec(name) is not None
        if not by_hand and (there is None or _numbers(there) < _numbers(bound)):
            found.append((name, bound, there))
    return found


def _numbers(version):
    """2.13.0+cpu -> [2, 13, 0]"""
    return [int(number) for number in re.findall(r"\d+", version.split("+")[0])]


require_packages()

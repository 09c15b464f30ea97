"""Python files of the user's, named as FILE.py:name: rewards, answer formats."""

import ast
import contextlib
import importlib.util
import os
import re
import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path

from errors import one_line

ROOT = Path(__file__).resolve().parents[1]


def named_in_file(path, name):
    """What a file calls `name`, None where it has nothing of that name; sys.path stays as it is.

    The file runs once a process, however much of it is asked for, and again after it has changed, or was
    forgotten. ValueError where there is no such file, and where it does not import.
    """
    if not os.path.isfile(path):
        raise ValueError(f"{f'{path}:{name}'!r}: there is no file {path}")
    version, path_there = os.stat(path), os.path.abspath(path)
    try:
        with in_their_process():
            module = _module_of(path_there, version.st_mtime_ns, version.st_size)
    except (Exception, SystemExit) as error:  # the user's code, which may raise anything
        raise ValueError(f"{path} does not import: {shown_error(error)}") from error
    return getattr(module, name, None)


@contextlib.contextmanager
def in_their_process():
    """Around the user's code: what it changes of the process it finds again, and the run does not.

    That is the working directory, in which a run may have its folder, and torch's default dtype and device,
    its threads, whether it takes gradients, how it rounds products of float32, and whether it allows only
    deterministic algorithms.
    """
    ours = _process()
    _change_process(ours, _theirs)
    try:
        yield
    finally:
        left = _process()
        ours = {key: ours.get(key, AT_FIRST.get(key, value)) for key, value in left.items()}
        _theirs.clear()
        _theirs.update({key: value for key, value in left.items() if value != ours[key]})
        _change_process(left, ours)


_theirs = {}  # what the user's code has changed of the process
_folders = set()  # that its files have put into sys.path
# of a torch that the user's code loads
AT_FIRST = {"dtype": "float32", "device": "cpu", "gradients": True}
AT_FIRST |= {"products": "highest", "deterministic": False}
PRODUCTS = ("highest", "high", "medium")


def _process():
    torch, made = sys.modules.get("torch"), {"folder": os.getcwd()}
    if torch is not None:
        made["dtype"] = str(torch.get_default_dtype()).removeprefix("torch.")
        made["device"] = str(torch.get_default_device())
        made["threads"] = torch.get_num_threads()
        made["gradients"] = torch.is_grad_enabled()
        made["deterministic"] = torch.are_deterministic_algorithms_enabled()
        try:
            made["products"] = torch.get_float32_matmul_precision()
        except RuntimeError:  # the newer settings were used, too, of which this one knows no word
            made["products"] = "newer"
    return made


def _change_process(now, wanted):
    torch = sys.modules.get("torch")
    change = {
        "folder": os.chdir,
        "dtype": lambda name: torch.set_default_dtype(getattr(torch, name)),
        "device": lambda name: torch.set_default_device(None if name == "cpu" else name),
        "threads": lambda count: torch.set_num_threads(count),
        "gradients": lambda are_taken: torch.set_grad_enabled(are_taken),
        "deterministic": lambda are_all: torch.use_deterministic_algorithms(are_all),
        "products": lambda how: torch.set_float32_matmul_precision(how) if how in PRODUCTS else None,
    }
    for key, value in wanted.items():
        if now.get(key) != value:
            change[key](value)


def forget_files(paths):
    """Let files of the user's run anew when they are next asked for, and modules of their folders with them.

    What they remember, and what they have changed of the process, is of an earlier run, and where another
    folder has a module of the same name, they would be given that.
    """
    files = {str(file) for path in paths for file in user_files(path)}
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)) in files:
            del sys.modules[name]
    sys.path[:] = [folder for folder in sys.path if folder not in _folders]
    _folders.clear()
    _module_of.cache_clear()
    _theirs.clear()


def code_of(config):
    """Pairs (setting, path) of the files that settings name as FILE.py:name."""
    specs = [("reward", spec) for spec in getattr(config, "reward", None) or ()]
    specs.append(("answer_format", getattr(config, "answer_format", None) or ""))
    paths = [(setting, spec.rpartition(":")[0]) for setting, spec in specs]
    return [(setting, path) for setting, path in paths if path]


def shown_error(error):
    """An error of the user's code in one line, with the place; leaving by sys.exit has none to mend."""
    try:
        said = str(error)
    except Exception:  # an error whose own text raises
        said = ""
    text = one_line(f"{type(error).__name__}: {said}", 300)
    return text if isinstance(error, SystemExit) else f"{text} ({_place(error)})"


LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def _place(error):
    """`FILE.py line N` of an error of somebody's code: the last line of it that is no library's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short_path(error.filename)} line {error.lineno}"
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    others = (*LIBRARIES, "<frozen", __file__, str(ROOT / "rewards.py"))
    file, number = ([line for line in lines if not line[0].startswith(others)] or lines)[-1]
    return f"{_short_path(file)} line {number}"


def _short_path(path):
    """A path as somebody there would write it."""
    path, here = Path(path), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


# What belongs to the commit, where a file of the user's stands beside it
OWN = "answers decoding learning problems reporting running errors m3po_module rewards solver".split()
OWN += ["grpo_train", "grpo_eval", "sft_train"]


def user_files(path):
    """A user's file and the modules of its folder that it imports, what those import included."""
    files, folder = [Path(path).resolve()], Path(path).resolve().parent
    for file in files:  # which grow meanwhile
        for above, name in _imported(file):
            is_own = not above and folder == ROOT and name.partition(".")[0] in OWN
            base = [file, *file.parents][above] if above else folder
            parts = [] if is_own else name.split(".")
            stems = [base.joinpath(*parts[:n]) for n in range(1, len(parts) + 1)]
            found = [f for stem in stems for f in (stem.with_suffix(".py"), stem / "__init__.py")]
            files += [f for f in found if f.is_file() and f not in files]
    return files


def _imported(file):
    """Pairs (dots before it, dotted name) of what may be a module in a file's imports, or in its strings."""
    names = []
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError):  # it has not been imported, then
        nodes = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            named = [f"{node.module or ''}.{alias.name}".lstrip(".") for alias in node.names]
            names += [(node.level, name) for name in named]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # for importlib
            names += [(0, word) for word in re.findall(r"^[A-Za-z_][\w.]*$", node.value.removesuffix(".py"))]
    return names


@cache
def _module_of(path, changed_at, size):
    """The module that a user's file makes, for as long as the file stays the same."""
    path = Path(path).resolve()
    spec = importlib.util.spec_from_file_location(f"user_file_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses of the file look themselves up
    before = set(sys.path)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    finally:
        _folders.update({*sys.path} - before)
    return module

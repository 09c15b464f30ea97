"""What the result of a run depends on, noted with its checkpoints and its end, and compared on resume."""

import array
import contextlib
import dis
import functools
import hashlib
import inspect
import json
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path

from answers.user_files import LIBRARIES, OWN, code_of, user_files
from errors import ROOT, RunError
from problems.sources import GIVEN
from reporting.files import DIGESTS, MODEL_FILES, sha256_of, with_precision
from rewards import reward_name
from running.parsing import without_gone
from running.settings import free_on_resume, names_with, resolved

# beside the settings
INPUTS = ("data", "held_out", "rewards", "reward_values", "start", "device", "world_size")
CONSTANTS = (int, float, complex, str, bytes, type(None))


def inputs_of(run, problems, held_out, start, policy, reward_functions=()):
    """What a run reads beside its settings, by name: digests of texts and files, and what it runs on.

    start: the model directory or hub id that the weights came from. Empty on processes but the first.
    """
    if not run.accelerator.is_main_process:
        return {}
    return {
        "data": data_fingerprint(problems),
        "data_before_2026_11_30": _older_fingerprint(problems),
        "held_out": data_fingerprint(held_out),
        "rewards": rewards_fingerprint(run.config, reward_functions),
        "reward_values": values_fingerprint(run.config, reward_functions),
        "start": model_fingerprint(start) or getattr(policy.config, "_commit_hash", None),
        "device": run.device.type,
        "world_size": run.accelerator.num_processes,
    }


def data_fingerprint(problems):
    """sha256 over problems and prompts in their order, every column included: rewards may read any."""
    digest = hashlib.sha256()
    for p in problems:
        text = json.dumps([p.prompt, vars(p.problem)], default=str, sort_keys=True)
        digest.update(text.encode() + array.array("q", p.ids).tobytes())
    return digest.hexdigest()


def problems_fingerprint(problems):
    """sha256 over problems that have no prompts yet."""
    texts = (json.dumps(vars(problem), default=str, sort_keys=True) for problem in problems)
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _older_fingerprint(problems):
    """As it is in checkpoints that note no held-out problems."""
    digest = hashlib.sha256()
    for p in problems:
        texts = [p.prompt, p.problem.question, p.problem.answer, p.problem.solution, p.problem.response]
        digest.update(json.dumps(texts).encode())
    return digest.hexdigest()


def rewards_fingerprint(config, functions):
    """sha256 over the rewards' names, weights and source, modules of their folders that they import included,
    and over an answer format of the user's; those of rewards.py belong to the commit.
    """
    digest = hashlib.sha256()
    for _, path in code_of(config):
        for file in user_files(path):
            digest.update(file.read_bytes())
    for function, weight in functions:
        digest.update(f"{reward_name(function)}={weight}".encode())
        if getattr(config, "reward", None) is None and getattr(function, "__module__", "") != "rewards":
            digest.update(_source(function).encode())
    return digest.hexdigest()


def _source(function):
    """The text of a function or of a callable object's class, where Python has it."""
    if isinstance(function, partial):
        given = [function.args, function.keywords]
        return _source(function.func) + json.dumps(given, default=lambda value: type(value).__name__)
    try:
        return inspect.getsource(function if inspect.isroutine(function) else type(function))
    except (OSError, TypeError):
        return ""


def values_fingerprint(config, functions):
    """sha256 over what the rewards that were given from Python take from around them: see `_held`."""
    digest = hashlib.sha256()
    for function, _ in functions if getattr(config, "reward", None) is None else ():
        is_object = not inspect.isroutine(function) and not isinstance(function, partial)
        held = _held(function.__call__ if is_object else function, set())
        digest.update(json.dumps(held).encode())
    return digest.hexdigest()


def _held(value, seen):
    """Constants as they are, and of the user's functions the text, defaults, and what they hold of the
    globals and of the functions around them in turn. Of anything else its type: lists and other objects, and
    what a function assigns itself, such as a counter, may be its memory, which changes while a run goes on.
    """
    if isinstance(value, CONSTANTS):
        return repr(value)
    if isinstance(value, tuple):
        return [_held(one, seen) for one in value]
    if isinstance(value, partial):
        given = {name: _held(one, seen) for name, one in sorted(value.keywords.items())}
        return [_held(value.func, seen), _held(value.args, seen), given]
    if inspect.ismethod(value) and id(value.__self__) not in seen:
        seen.add(id(value.__self__))  # which may hold its own methods
        attributes = dict(sorted(getattr(value.__self__, "__dict__", {}).items()))
        changing = _assigned_by_methods(type(value.__self__))
        kept = [name for name in attributes if name not in changing and not name.startswith("__")]
        return [_held(value.__func__, seen), {name: _held(attributes[name], seen) for name in kept}]
    if not inspect.isfunction(value) or not _is_theirs(value) or id(value) in seen:
        return f"{type(value).__name__} {getattr(value, '__qualname__', '')}"
    seen.add(id(value))
    around = {name: value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__}
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is still empty
            around[name] = cell.cell_contents
    changing = _assigned(value.__code__, ("STORE_GLOBAL", "STORE_DEREF"))
    around = {name: one for name, one in around.items() if name not in changing}
    around |= value.__kwdefaults__ or {}
    held = {name: _held(one, seen) for name, one in sorted(around.items())}
    return [_source(value), _held(value.__defaults__ or (), seen), held]


def _is_theirs(function):
    """Whether a function is neither a library's nor the project's, which belongs to the commit."""
    room, file = (function.__module__ or "").partition(".")[0], function.__code__.co_filename
    is_own = room in OWN and file.startswith(str(ROOT))
    return not is_own and not file.startswith((*LIBRARIES, "<frozen"))


def _within(code):
    """Code and the comprehensions and functions within it."""
    inner = [const for const in code.co_consts if inspect.iscode(const)]
    return [code, *(one for each in inner for one in _within(each))]


def _names(code):
    """The names that code looks up."""
    return {name for one in _within(code) for name in one.co_names}


def _assigned(code, operations):
    """The names that code assigns by these operations of Python's."""
    instructions = (instruction for one in _within(code) for instruction in dis.get_instructions(one))
    return {each.argval for each in instructions if each.opname in operations}


def _assigned_by_methods(kind):
    """The attributes that the methods of a class assign, in its __init__ apart."""
    methods = (value for each in kind.__mro__ for name, value in vars(each).items() if name != "__init__")
    codes = [method.__code__ for method in methods if inspect.isfunction(method)]
    return {name for code in codes for name in _assigned(code, ("STORE_ATTR",))}


def model_fingerprint(name):
    """sha256 over the files of a model directory; None for what is no directory."""
    if not Path(name).is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted({path for pattern in (*MODEL_FILES, "*.py") for path in Path(name).glob(pattern)}):
        there = path.stat()
        file_digest = _read_once(path, there.st_ino, there.st_size, there.st_mtime_ns)
        digest.update(path.name.encode() + bytes.fromhex(file_digest))
    return digest.hexdigest()


@functools.lru_cache
def _read_once(path, *state):
    """The sha256 of a file; asked again in the same state it is not read again: weights are gigabytes."""
    return sha256_of(path)


def noted(config, inputs):
    """What a checkpoint and a finished run keep, for `differences`."""
    return {"settings": resolved(config), **{name: inputs[name] for name in INPUTS}}


def differences(config, then, inputs):
    """{name: (there, here)} of what a run noted `then` and what is otherwise now."""
    now = json.loads(json.dumps(resolved(config)))
    settings = with_precision(without_gone(then["settings"]))
    free = free_on_resume(type(config))
    if config.patience or config.keep_best:  # evaluations decide where the run ends, and what is best
        free.discard("eval_every")
    # a setting that there was not then had its default
    default = {f.name: f.default for f in fields(config) if f.default is not MISSING}
    there = {name: settings.get(name, default.get(name)) for name in {*now, *settings} - free}
    differ = {name: (value, now.get(name)) for name, value in there.items() if value != now.get(name)}
    if GIVEN in differ.get("reward_set", ()):  # which says where functions come from; "rewards" compares them
        del differ["reward_set"]
    inputs = dict(inputs)
    if "held_out" not in then:
        inputs["data"] = inputs["data_before_2026_11_30"]
    for name in INPUTS:
        if name in then and then[name] != inputs[name]:
            differ[name] = _short(then[name]), _short(inputs[name])
    return differ


def _short(value):
    return value[:12] if isinstance(value, str) else value


def refusal(config, then, differ):
    """Why a run with these differences cannot go on; None where it can."""
    hard = {
        name: pair for name, pair in differ.items() if name in names_with(type(config), "resume", "never")
    }
    if "beta" in differ and not then["settings"]["beta"]:  # beta 0 kept no reference
        hard["beta"] = differ["beta"]
    if not differ or (config.resume_anyway and not hard):
        return None
    remedy = (
        "what is saved would not fit" if hard else "say --resume_anyway true to go on with the new values"
    )
    return f"was written by another run: {shown(hard or differ)}; {remedy}"


def shown(differ):
    """The differences in words: of what was read only that it is no longer the same."""
    read = [what for name, what in DIGESTS.items() if name in differ]
    settings = sorted(set(differ) - set(DIGESTS))
    values = ["{} {!r} there, {!r} here".format(name, *differ[name]) for name in settings]
    return ", ".join(values + [f"{' and '.join(read)} changed since"] * bool(read))


def lengthens(config, differ):
    """Whether the differences only ask a finished run for more steps, whose earlier ones stay as they are."""
    names = set(differ)
    if names == {"outer_iterations"}:
        return True
    return (
        bool(names) and names <= {"num_steps", "num_epochs"} and getattr(config, "outer_iterations", 1) == 1
    )


def finished_note(path):
    """What a finished run noted, or None where it has not finished."""
    if not path.exists():
        return None
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        return note | {"step": int(note["step"])}
    except (ValueError, TypeError, KeyError) as error:
        remedy = "delete it and the run goes on from its newest checkpoint"
        raise RunError(f"{path} is damaged: {remedy}") from error


def finished_steps(path):
    """The steps that a finished run noted; 0 where there is no note."""
    note = finished_note(path)
    return 0 if note is None else note["step"]

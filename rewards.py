"""Rewards in TRL's calling convention, the sets of them that recipes use, and the one place that calls them.

Every function takes time linear in a completion's length, except `math_reward`, whose work is bounded.
"""

import asyncio
import contextlib
import faulthandler
import functools
import inspect
import itertools
import json
import math
import os
import re
import sys
import threading
import time
import warnings
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

from answers.formats import (
    ANSWER_FORMATS,
    R1_TAGS,
    SYSTEM_PROMPT,
    XML_TAGS,
    answer_format_named,
    completion_text,
    extract_answer,
    last_hash,
)
from answers.maths import all_math_equal, math_equal
from answers.numbers import ALONE, last_number, parse_number, plain_number_text
from answers.user_files import in_their_process, named_in_file, shown_error
from errors import Interrupted, RewardError, SettingError, counted, one_line

__all__ = ["ANSWER_FORMATS", "SYSTEM_PROMPT", "extract_answer", "last_number", "math_equal", "parse_number"]


def _text(completion):
    """The completion's text, "" where it has none."""
    return completion_text(completion) or ""


def _references(answer, completions, others):
    """The references as trimmed texts, "" for one that cannot be used.

    Without an `answer`, as in TRL's data, they are the `reference_answer` or `solution` of the `others`. What
    follows a `####` counts, as in GSM8K's solutions, and in a solution what its last box holds.
    """
    if answer is None:
        answer = others.get("reference_answer")
    if answer is None and isinstance(others.get("solution"), list):
        answer = [extract_answer(text, "boxed") or text for text in others["solution"]]
    if answer is None or isinstance(answer, str) or len(answer) != len(completions):
        got = repr(answer)[:80] if answer is None or isinstance(answer, str) else f"{len(answer)} values"
        raise ValueError(
            f"answer must hold one reference for each of {len(completions)} completions, got {got}"
        )
    return ["" if _is_missing(a) else str(a).rpartition("####")[2].strip() for a in answer]


def _is_missing(value):
    return value is None or (isinstance(value, float) and not math.isfinite(value))  # pandas: nan


@lru_cache(maxsize=4096)  # asked again for the log, and by other rewards
def _correctness(answer, reference):
    if not answer:  # an empty answer must not match an empty reference
        return 0.0
    if answer == reference:
        return 2.0
    number = parse_number(answer)
    return 1.5 if number is not None and number == parse_number(reference) else 0.0


def correctness_reward(prompts=None, completions=(), answer=None, answer_format="xml", **kwargs):
    """2.0 for the same characters, 1.5 for the same number, 0.0 otherwise."""
    chosen = answer_format_named(answer_format)
    answers = [chosen.extract(c) for c in completions]
    return [
        _correctness(a, r) for a, r in zip(answers, _references(answer, completions, kwargs), strict=True)
    ]


def format_reward(completions=(), answer_format="xml", **kwargs):
    """0.2 for each of the format's tags that is in the text, however often."""
    tags = answer_format_named(answer_format).tags
    return [sum(tag in text for tag in tags) / 5 for text in map(_text, completions)]


def combined_reward(prompts=None, completions=(), answer=None, answer_format="xml", **kwargs):
    """correctness_reward + format_reward, the seed project's one number."""
    correctness = correctness_reward(prompts, completions, answer, answer_format, **kwargs)
    layout = format_reward(completions, answer_format)
    return [sum(pair) for pair in zip(correctness, layout, strict=True)]


def _hash_score(completion, reference):
    text = _text(completion)
    target = parse_number(reference)
    answer = last_hash(text) if text.count("####") == 1 else None
    if answer is None or target is None or re.search(r"\*|\\[^$%]", answer):
        return 0.0
    is_bare = ALONE.fullmatch(plain_number_text(answer))
    return float(parse_number(answer) == target) if is_bare else 0.0


def hash_reward(prompts=None, completions=(), answer=None, **kwargs):
    """1.0 for exactly one `####` whose line holds the right number and nothing else (H3PO); 0.0 otherwise."""
    return [
        _hash_score(c, r) for c, r in zip(completions, _references(answer, completions, kwargs), strict=True)
    ]


GRADINGS = ("number", "math")


def right_answers(texts, answers, answer_format="xml", grading="number"):
    """Whether each answer is right, as correctness_reward or math_reward has it, whatever it is paid.

    None where the grader abstains: such an answer counts as not right, and is counted apart.
    """
    reward = math_reward if grading == "math" else correctness_reward
    values = reward(None, texts, answers, answer_format)
    return [None if value is None else value > 0 for value in values]


def equal_by_meaning(grading):
    """The predicate equal(a, b) -> True, False or None of a grading by meaning; None where there is none."""
    return math_equal if grading == "math" else None


def strict_correctness_reward(prompts=None, completions=(), answer=None, answer_format="xml", **kwargs):
    """2.0 for the reference's own characters, 0.0 otherwise."""
    values = correctness_reward(prompts, completions, answer, answer_format, **kwargs)
    return [value if value == 2.0 else 0.0 for value in values]


def int_reward(completions=(), answer_format="xml", **kwargs):
    """0.5 where the answer is an integer and nothing else."""
    answers = [extract_answer(c, answer_format) or "" for c in completions]
    return [0.5 if re.fullmatch("[-+]?[0-9]+", answer) else 0.0 for answer in answers]


def _in_order(text, marks):
    """Whether each mark occurs exactly once, one after the other."""
    starts = [text.find(mark) for mark in marks]
    return all(text.count(mark) == 1 for mark in marks) and starts == sorted(starts)


def _strict_layout(text):
    if not _in_order(text, XML_TAGS) or not text.startswith("<reasoning>\n"):
        return False
    return text.removesuffix("\n").endswith("\n</answer>") and "\n</reasoning>\n<answer>\n" in text


def strict_format_reward(completions=(), **kwargs):
    """0.5 where the text is <reasoning> and <answer> alone, each tag once and on a line of its own."""
    return [0.5 if _strict_layout(_text(c)) else 0.0 for c in completions]


def _soft_layout(text):
    if not text.startswith("<reasoning>"):
        return False
    _, closing, answer = text.partition("</reasoning>")
    return bool(closing) and answer.lstrip().startswith("<answer>") and "</answer>" in answer


def soft_format_reward(completions=(), **kwargs):
    """0.5 where the text begins with <reasoning>, its end, <answer> and its end, whatever the lines."""
    return [0.5 if _soft_layout(_text(c).lstrip()) else 0.0 for c in completions]


def _xml_count(text):
    marks = ("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n", "\n</answer>")
    placed = sum(text.count(mark) == 1 for mark in marks)
    # As published, what follows costs only where the closing tag is well placed, and one character is free.
    trailing = len(text.rpartition("</answer>")[2]) - 1 if text.count("\n</answer>") == 1 else 0
    return 0.125 * placed - 0.001 * (max(0, trailing) if placed == 4 else trailing)


def xmlcount_reward(completions=(), **kwargs):
    """0.125 for each tag that is once alone on a line, less 0.001 a character after the last closing tag."""
    return [_xml_count(_text(c)) for c in completions]


def binary_correctness_reward(prompts=None, completions=(), answer=None, answer_format="xml", **kwargs):
    """1.0 for the same characters or the same number, 0.0 otherwise."""
    return [
        float(value > 0)
        for value in correctness_reward(prompts, completions, answer, answer_format, **kwargs)
    ]


def numeric_reward(completions=(), answer_format="xml", **kwargs):
    """0.1 where the answer is one number."""
    return [0.1 if parse_number(extract_answer(c, answer_format)) is not None else 0.0 for c in completions]


def xml_share_reward(completions=(), **kwargs):
    """0.025 for each of the four XML tags that is in the text."""
    return [sum(tag in _text(c) for tag in XML_TAGS) / 40 for c in completions]


def math_reward(prompts=None, completions=(), answer=None, answer_format="boxed", **kwargs):
    """1.0 where answer and reference are the same mathematical object, None where that is undecided (see
    `math_equal`), else 0.0.
    """
    answers = [extract_answer(c, answer_format) or "" for c in completions]
    verdicts = all_math_equal(answers, _references(answer, completions, kwargs))
    return [None if verdict is None else float(verdict) for verdict in verdicts]


def _r1_layout(text):
    text = text.strip()
    if not _in_order(text, R1_TAGS):
        return False
    between = text.partition("</think>")[2].partition("<answer>")[0]
    return text.startswith("<think>") and text.endswith("</answer>") and not between.strip()


def r1_format_reward(completions=(), **kwargs):
    """1.0 where the whole completion is <think> ... </think> <answer> ... </answer>, each tag once."""
    return [float(_r1_layout(_text(c))) for c in completions]


REWARD_SETS = {
    "grpo_m3po": [(correctness_reward, 1.0), (format_reward, 1.0)],
    "h3po": [(hash_reward, 1.0)],
    "multi_reward": [
        (strict_correctness_reward, 1.0),
        (int_reward, 1.0),
        (strict_format_reward, 1.0),
        (soft_format_reward, 1.0),
        (xmlcount_reward, 1.0),
    ],
    "math": [(math_reward, 1.0), (r1_format_reward, 0.0)],  # the format is only logged: math_reward needs it
    "oneshot": [(binary_correctness_reward, 1.0), (numeric_reward, 1.0), (xml_share_reward, 1.0)],
}


def load_reward(spec):
    """`FILE.py:function` or `FILE.py:function=weight` -> (function, weight); sys.path stays as it is.

    The file runs once a process, in a study once a run, however many of its functions are asked for, and
    again after it has changed.
    """
    path, _, rest = spec.rpartition(":")
    name, equals, weight = rest.partition("=")
    if not path.endswith(".py") or not name:
        raise ValueError(f"{spec!r} must be FILE.py:function or FILE.py:function=weight")
    try:
        value = float(weight) if equals else 1.0
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{spec!r}: the weight {weight!r} is not a finite number")
    function = named_in_file(path, name)
    if not callable(function):
        raise ValueError(f"{path} has no function {name!r}")
    if isinstance(function, type):
        raise ValueError(f"{path}: {name} is a class: name an object of it, such as reward = {name}()")
    _check_form(function)
    return function, value


LARGEST_REWARD = 1e30  # squares and sums of a batch of such are finite still
SECONDS_BETWEEN_LOOKS = 0.2  # at the time that a reward function takes


def _quote(completion):
    text = completion_text(completion)
    return f"completion {(repr(completion) if text is None else text)[:200]!r}"


def _batch(completions):
    return f"{len(completions)} completions, the first of them {_quote(completions[0])}"


@contextlib.contextmanager
def _time_limit(where, completions, seconds):
    """Ends the process with one line where what is inside takes longer; 0 seconds: no limit.

    The reward stays in the main thread, where SIGALRM and CUDA want it; a thread that is started once ends
    it, since to start one for each function would take longer than most functions do.
    """
    if not seconds:
        yield
        return

    def end():
        line = f"{where} took longer than reward_timeout={seconds:g} s for {_batch(completions)}"
        print(f"{Path(sys.argv[0]).name}: {line}", file=sys.stderr, flush=True)
        os._exit(1)

    _start_watching()
    limit = (time.monotonic() + seconds, end)
    _limits.append(limit)
    try:
        yield
    finally:
        _limits.remove(limit)  # which need not be the last: another thread may have rewards of its own


_limits = []  # of what runs now: when its time is up, and what to do then


@functools.cache
def _start_watching():
    def watch():
        while True:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            for when, end in list(_limits):
                if time.monotonic() > when:
                    end()

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _last_resort(seconds):
    """Ends the process where a reward holds the interpreter itself, so that no other thread runs."""
    if seconds:
        faulthandler.dump_traceback_later(seconds + 30, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        if seconds:
            faulthandler.cancel_dump_traceback_later()


NESTED = (list, dict)  # a call for each text of thousands would take milliseconds


def _copied(value):
    """A deep copy of lists and dicts: what a function does to its arguments reaches no other and no log."""
    if isinstance(value, list):
        if not (value and isinstance(value[0], NESTED)):
            return value.copy()
        return [_copied(v) if isinstance(v, NESTED) else v for v in value]
    return {k: _copied(v) if isinstance(v, NESTED) else v for k, v in value.items()}


def _number(value, where, completion):
    """A finite float (bools, numpy and torch scalars too), or None for an abstention."""
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
        number = math.nan
    if not math.isfinite(number):
        returned = one_line(repr(value), 80)
        raise RewardError(
            f"{where} returned {returned}, which is not a finite number, for {_quote(completion)}"
        )
    if abs(number) > LARGEST_REWARD:
        raise RewardError(
            f"{where} returned {number:g}, too large to compare with others (at most {LARGEST_REWARD:g}), "
            f"for {_quote(completion)}"
        )
    return number


def reward_name(function):
    """The name of a function, or of the class of an object that is called like one."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


@cache
def _event_loop():
    """A loop in a thread of its own, for as long as the process lives: clients of an API belong to a loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


async def _awaited(values):
    return await values


def _called(function, columns):
    """What a function returns for the columns that it takes; a coroutine is waited for."""
    wanted, takes_all = _parameters(function)
    values = function(**(columns if takes_all else {k: v for k, v in columns.items() if k in wanted}))
    if inspect.isawaitable(values):
        values = asyncio.run_coroutine_threadsafe(_awaited(values), _event_loop()).result()
    return values


def _called_alone(function, columns):
    """The same, where what a user's function does to its arguments or to the process reaches nobody else."""
    if is_built_in(function):
        return _called(function, columns)
    with in_their_process():
        return _called(function, _copied(columns))


def _parameters(function):
    """The parameters of a function, {name: parameter}, and whether it takes any other by keyword, too."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # built in
        return {}, True
    return parameters, any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _check_form(function):
    """Refuse, in a ValueError, a function that cannot be called with keywords, or makes no list."""
    name, (wanted, takes_all) = reward_name(function), _parameters(function)
    if positional := [n for n, p in wanted.items() if p.kind is p.POSITIONAL_ONLY]:
        raise ValueError(f"{name} takes {positional[0]} by position only: leave out the / behind it")
    if not takes_all and all(p.kind is p.VAR_POSITIONAL for p in wanted.values()):
        raise ValueError(f"{name} takes no argument by its name: completions are given as `completions`")
    called = [function, type(function).__call__]
    if any(inspect.isgeneratorfunction(part) or inspect.isasyncgenfunction(part) for part in called):
        raise ValueError(f"{name} yields its values: it must return a list of them")


def check_parameters(functions, columns):
    """Refuse, in a ValueError, a function that needs what is not among the columns, or cannot be called."""
    for function, _ in functions:
        _check_form(function)
        wanted, _ = _parameters(function)
        varied = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        needed = [name for name, p in wanted.items() if p.default is p.empty and p.kind not in varied]
        missing = [name for name in needed if name not in columns]
        if missing:
            there = ", ".join(sorted(columns))
            raise ValueError(f"{reward_name(function)} needs {missing[0]}, which is not among {there}")


@dataclass
class RewardLog:
    """What reward functions log beside their values: columns of completions, and metrics of the step."""

    rows: list  # {column: value} of each completion
    metrics: dict = field(default_factory=dict)  # {name: values}, one a call

    def extra(self, column, values):
        """TRL's log_extra: a column, a value for each completion; a name that is taken gets a number."""
        _check_name("log_extra", column)
        values = list(values)
        if len(values) != len(self.rows):
            wanted = counted(len(self.rows), "completion")
            raise ValueError(f"log_extra({column!r}) has {counted(len(values), 'value')} for {wanted}")
        name = _free_name(column, {taken for row in self.rows for taken in row})
        for row, value in zip(self.rows, values, strict=True):
            row[name] = _plain(value)

    def metric(self, name, value):
        """TRL's log_metric: a number, averaged over the calls of a step and over processes."""
        _check_name("log_metric", name)
        self.metrics.setdefault(name, []).append(float(value))

    @property
    def arguments(self):
        return {"log_extra": self.extra, "log_metric": self.metric}


def _check_name(what, name):
    if not isinstance(name, str):
        raise ValueError(f"{what}({name!r}): a name must be text")


def _plain(value):
    """The value as JSON can hold it."""
    try:
        return json.loads(json.dumps(value.tolist() if hasattr(value, "tolist") else value, default=str))
    except (TypeError, ValueError):
        return str(value)


def _free_name(name, taken):
    numbered = (f"{name}_{n}" for n in itertools.count(2))
    return next(free for free in itertools.chain([name], numbered) if free not in taken)


def is_built_in(function):
    """Whether a function is one of this file, which changes nothing that it is given."""
    return getattr(function, "__module__", None) == __name__


def _values(function, columns, where, timeout):
    """What a function returns for the completions: a list with a float or None for each, or a RewardError."""
    completions = columns["completions"]
    if not completions:
        return []
    with _time_limit(where, completions, timeout):
        try:
            values = _called_alone(function, columns)
        except (KeyboardInterrupt, Interrupted):
            raise
        except BaseException as error:  # user code; its sys.exit(0) would look like a finished run
            said = shown_error(error) + _about_messages(error, completions)
            raise RewardError(f"{where} raised {said} for {_batch(completions)}") from error
    if not isinstance(values, list | tuple) and hasattr(values, "tolist"):  # numpy, torch, pandas
        values = values.tolist()
    if not isinstance(values, list | tuple):
        kind = type(values).__name__
        raise RewardError(f"{where} returned a {kind}, not a list of {len(completions)} values")
    if len(values) != len(completions):
        raise RewardError(
            f"{where} returned {counted(len(values), 'value')} for {counted(len(completions), 'completion')}"
        )
    return [_number(v, where, c) for v, c in zip(values, completions, strict=True)]


def _about_messages(error, completions):
    """What to mend where a function takes chat messages for texts; nothing for other errors."""
    is_of_type = isinstance(error, TypeError | AttributeError) and re.search("list|dict", str(error))
    if not (is_of_type and isinstance(completions[0], list)):
        return ""
    return ", where completions are chat messages: the text of one is completion[0]['content'],"


OF_THE_LOOP = set("prompts completions completion_ids reference_answer answer_format trainer_state".split())
OF_THE_LOOP |= set(RewardLog([]).arguments)


def reward_columns(problems, texts, completion_ids, answer_format):
    """The keyword arguments of reward functions: every column as the data has it, and what is said here.

    problems, texts and completion_ids have one entry for each completion, and so have the columns. `answer`
    is the reference answer alone; `solution` is the data's, or the answer where it has none, as TRL's own
    rewards expect.
    """
    names = dict.fromkeys(name for p in problems for name in p.more)
    answers = [p.answer for p in problems]
    solutions = [p.answer if _is_missing(p.more.get("solution")) else p.more["solution"] for p in problems]
    fields = {name: [getattr(p, name) for p in problems] for name in ("question", "subject", "level", "id")}
    columns = {name: [p.more.get(name) for p in problems] for name in names}
    return {"reference_solution": solutions, **fields, **columns} | dict(
        prompts=[list(p.messages) or [{"role": "user", "content": p.question}] for p in problems],
        completions=[[{"role": "assistant", "content": text}] for text in texts],
        completion_ids=completion_ids,
        answer=answers,
        reference_answer=answers,
        solution=solutions,
        answer_format=answer_format,
    )


def lost_answers(config, problems):
    """The reference answers that no completion can give: not right even as the format itself writes them.

    Such as `...`, or one of several lines behind `####`.
    """
    write = answer_format_named(config.answer_format).write
    answers = [p.answer for p in problems if p.answer]
    written = [write("So it is.", answer) for answer in answers]
    right = right_answers(written, answers, config.answer_format, config.grading)
    return [answer for answer, is_right in zip(answers, right, strict=True) if is_right is False]


def lost_remarks(config, lost, problems):
    """What is said of the `lost_answers` of some problems."""
    if not lost:
        return []
    what = f"{len(lost)} of {len(problems)} reference answers can never be right"
    return [f"{what} in answer_format={config.answer_format}, such as {lost[0][:60]!r}"]


def check_answers(config, reward_functions, problems):
    """The `lost_answers`; refuses built-in rewards where no completion of any problem could ever be right."""
    lost = lost_answers(config, problems)
    if len(lost) == len(problems) and all(is_built_in(function) for function, _ in reward_functions):
        wrong = f"none of the {len(lost)} reference answers can be right in it, such as {lost[0][:60]!r}"
        raise SettingError(
            "answer_format", config.answer_format, f"{wrong}: choose another, or mend the data"
        )
    return lost


def check_rewards(config, reward_functions, problem):
    """Refuse reward functions that need an argument which problems like this one do not give them.

    A column of the data that has the name of an argument of the loop's own is warned of.
    """
    columns = reward_columns([problem], [""], [[]], config.answer_format)
    hidden = sorted(problem.more.keys() & OF_THE_LOOP)
    if hidden and not all(is_built_in(function) for function, _ in reward_functions):
        what = f"the data's {', '.join(hidden)} does not reach reward functions, which get the loop's own"
        warnings.warn(f"{what} under this name: give the column another", stacklevel=2)
    try:
        check_parameters(reward_functions, {*columns, "trainer_state", *RewardLog([]).arguments})
    except ValueError as error:
        named = ("reward", config.reward)
        if config.reward is None:  # they were given in Python, or are those of a set
            named = ("reward_functions", [reward_name(function) for function, _ in reward_functions])
        raise SettingError(*named, str(error)) from error


def compute_rewards(functions, columns, step=None, gather=list, timeout=0.0, log=None):
    """Totals (N) = sum of weight * value, and each function's own values by name.

    None means "abstains": where every function abstains that has a weight, the total is NaN, which the
    training loop leaves out. One of weight 0 is only logged, and counts where no function has a weight.
    RewardError for what is no reward, and where no completion of any process was scored by any function.
    `gather` makes of this process's values those of all; `timeout` is in seconds a function; `columns` are as
    `reward_columns` makes them; what the functions log goes into `log`, a RewardLog.
    """
    columns = columns | (log.arguments if log else {})
    completions = columns["completions"]
    parts = {}
    totals, scored = [math.nan] * len(completions), [math.nan] * len(completions)
    at_step = "" if step is None else f" at step {step}"
    wheres = [f"reward function {reward_name(function)}{at_step}" for function, _ in functions]
    with _last_resort(timeout * len(functions)):
        pairs = zip(functions, wheres, strict=True)
        returned = [_values(function, columns, where, timeout) for (function, _), where in pairs]
    for (function, weight), where, values in zip(functions, wheres, returned, strict=True):
        parts[_free_name(reward_name(function), parts)] = values
        is_only_logged = weight == 0 and any(w for _, w in functions)
        for i, value in enumerate(values):
            if value is not None:
                scored[i] = value
            if value is not None and not is_only_logged:
                totals[i] = weight * value + (0.0 if math.isnan(totals[i]) else totals[i])
                _check_size(totals[i], value, weight, where)
    everywhere = gather(scored)
    if everywhere and all(map(math.isnan, everywhere)):
        where = f"reward function {' and '.join(parts)}{at_step}"
        first = f", the first of them {_quote(completions[0])}" if completions else ""
        raise RewardError(f"{where} returned None for all {len(everywhere)} completions{first}")
    return totals, parts


def _check_size(total, value, weight, where):
    if abs(total) > LARGEST_REWARD:
        raise RewardError(
            f"{where}: {value:g} times its weight {weight:g} is too large to compare with others "
            f"(at most {LARGEST_REWARD:g})"
        )

"""Rewards in TRL's calling convention, the sets of them that the recipes use, and the one place that calls them.

Every function takes time linear in a completion's length, but for `math_reward`, whose time is bounded.
"""

import contextlib
import faulthandler
import importlib.util
import math
import os
import re
import sys
import threading
from pathlib import Path

from answers.formats import (
    ANSWER_FORMATS,
    SYSTEM_PROMPT,
    answer_format_named,
    completion_text,
    extract_answer,
    last_hash,
)
from answers.judge import all_math_equal, math_equal
from answers.numbers import ALONE, last_number, parse_number, plain_number_text
from errors import RewardError

__all__ = ["ANSWER_FORMATS", "SYSTEM_PROMPT", "extract_answer", "last_number", "math_equal", "parse_number"]


def _references(answer, completions):
    """The references as trimmed texts, "" for one that cannot be used."""
    if answer is None or isinstance(answer, str) or len(answer) != len(completions):
        got = repr(answer)[:80] if answer is None or isinstance(answer, str) else f"{len(answer)} values"
        raise ValueError(
            f"answer must hold one reference for each of {len(completions)} completions, got {got}"
        )
    missing = [
        a is None or (isinstance(a, float) and not math.isfinite(a)) for a in answer
    ]  # pandas writes a missing cell as nan
    return ["" if gone else str(a).strip() for a, gone in zip(answer, missing, strict=True)]


def _correctness(answer, reference):
    if not answer:  # an empty answer must not match an empty reference
        return 0.0
    if answer == reference:
        return 2.0
    number = parse_number(answer)
    return 1.5 if number is not None and number == parse_number(reference) else 0.0


def correctness_reward(prompts=None, completions=(), answer=None, answer_format="xml", **kwargs):
    """2.0 for the same characters, 1.5 for the same number, 0.0 otherwise; an unusable reference pays nobody."""
    chosen = answer_format_named(answer_format)
    return [
        _correctness(chosen.extract(c), r)
        for c, r in zip(completions, _references(answer, completions), strict=True)
    ]


def format_reward(completions=(), answer_format="xml", **kwargs):
    """0.2 for each of the format's tags that is in the text, however often."""
    tags = answer_format_named(answer_format).tags
    return [sum(tag in (completion_text(c) or "") for tag in tags) / 5 for c in completions]


def combined_reward(prompts=None, completions=(), answer=None, answer_format="xml", **kwargs):
    """correctness_reward + format_reward, the seed project's one number."""
    parts = (
        correctness_reward(prompts, completions, answer, answer_format),
        format_reward(completions, answer_format),
    )
    return [sum(pair) for pair in zip(*parts, strict=True)]


def _hash_score(completion, reference):
    text, target = completion_text(completion) or "", parse_number(reference)
    answer = last_hash(text) if text.count("####") == 1 else None
    if (
        answer is None
        or target is None
        or re.search(r"\*|\\[^$%]", answer)
        or not ALONE.fullmatch(plain_number_text(answer))
    ):
        return 0.0
    return float(parse_number(answer) == target)


def hash_reward(prompts=None, completions=(), answer=None, **kwargs):
    """1.0 for exactly one `####` whose line holds the right number and nothing else, as the H3PO recipe has it; 0.0 otherwise."""
    return [_hash_score(c, r) for c, r in zip(completions, _references(answer, completions), strict=True)]


GRADINGS = ("number", "math")


def right_answers(texts, answers, answer_format="xml", grading="number"):
    """Whether each completion's answer is right, whatever it is paid: by correctness_reward, or by math_reward."""
    reward = math_reward if grading == "math" else correctness_reward
    return [value > 0 for value in reward(None, texts, answers, answer_format)]


def strict_correctness_reward(prompts=None, completions=(), answer=None, answer_format="xml", **kwargs):
    """2.0 for the reference's own characters, 0.0 otherwise."""
    return [
        value if value == 2.0 else 0.0
        for value in correctness_reward(prompts, completions, answer, answer_format)
    ]


def int_reward(completions=(), answer_format="xml", **kwargs):
    """0.5 where the answer is an integer and nothing else."""
    return [
        0.5 if re.fullmatch("[-+]?[0-9]+", extract_answer(c, answer_format) or "") else 0.0
        for c in completions
    ]


def _in_order(text, *marks):
    """Whether each mark occurs exactly once, one behind the other."""
    places = [text.find(mark) for mark in marks]
    return all(text.count(mark) == 1 for mark in marks) and places == sorted(places)


def _strict_layout(text):
    tags = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
    if (
        not _in_order(text, *tags)
        or not text.startswith("<reasoning>\n")
        or not text.removesuffix("\n").endswith("\n</answer>")
    ):
        return False
    return "\n</reasoning>\n<answer>\n" in text


def strict_format_reward(completions=(), **kwargs):
    """0.5 where the whole completion is <reasoning> and <answer>, each tag once and alone on its line, and nothing stands around them."""
    return [0.5 if _strict_layout(completion_text(c) or "") else 0.0 for c in completions]


def _soft_layout(text):
    end = text.find("</reasoning>")
    answer = text[end + len("</reasoning>") :].lstrip()
    return (
        text.startswith("<reasoning>")
        and end >= 0
        and answer.startswith("<answer>")
        and "</answer>" in answer
    )


def soft_format_reward(completions=(), **kwargs):
    """0.5 where the completion begins with <reasoning> ... </reasoning> and an <answer> ... </answer> follows, whatever the lines."""
    return [0.5 if _soft_layout((completion_text(c) or "").lstrip()) else 0.0 for c in completions]


def _xml_count(text):
    marks = ("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n", "\n</answer>")
    trailing = len(text.rpartition("</answer>")[2].removeprefix("\n")) if "</answer>" in text else 0
    return 0.125 * sum(text.count(mark) == 1 for mark in marks) - 0.001 * trailing


def xmlcount_reward(completions=(), **kwargs):
    """0.125 for each tag that stands on a line of its own exactly once, less 0.001 for each character after the last closing tag."""
    return [_xml_count(completion_text(c) or "") for c in completions]


def binary_correctness_reward(prompts=None, completions=(), answer=None, answer_format="xml", **kwargs):
    """1.0 for the same characters or the same number, 0.0 otherwise."""
    return [float(value > 0) for value in correctness_reward(prompts, completions, answer, answer_format)]


def numeric_reward(completions=(), answer_format="xml", **kwargs):
    """0.1 where the answer is one number."""
    return [0.1 if parse_number(extract_answer(c, answer_format)) is not None else 0.0 for c in completions]


def xml_share_reward(completions=(), **kwargs):
    """0.025 for each of the four XML tags that is in the text."""
    tags = ANSWER_FORMATS["xml"].tags
    return [sum(tag in (completion_text(c) or "") for tag in tags) / 40 for c in completions]


def math_reward(prompts=None, completions=(), answer=None, answer_format="boxed", **kwargs):
    """1.0 where answer and reference denote the same mathematical object (`math_equal`), 0.0 otherwise; side by side, 20 seconds in all."""
    answers = [extract_answer(c, answer_format) or "" for c in completions]
    return [float(equal) for equal in all_math_equal(answers, _references(answer, completions))]


def _r1_layout(text):
    text = text.strip()
    if not _in_order(text, "<think>", "</think>", "<answer>", "</answer>"):
        return False
    between = text.partition("</think>")[2].partition("<answer>")[0]
    return text.startswith("<think>") and text.endswith("</answer>") and not between.strip()


def r1_format_reward(completions=(), **kwargs):
    """1.0 where the whole completion is <think> ... </think> <answer> ... </answer>, each tag once."""
    return [float(_r1_layout(completion_text(c) or "")) for c in completions]


REWARD_SETS = {
    "grpo_m3po": [(correctness_reward, 1.0), (format_reward, 1.0)],
    "h3po": [(hash_reward, 1.0)],
    "multi_reward": [
        (f, 1.0)
        for f in (
            strict_correctness_reward,
            int_reward,
            strict_format_reward,
            soft_format_reward,
            xmlcount_reward,
        )
    ],
    "math": [
        (math_reward, 1.0),
        (r1_format_reward, 0.0),
    ],  # the format is logged; without it there is no answer to find
    "oneshot": [(binary_correctness_reward, 1.0), (numeric_reward, 1.0), (xml_share_reward, 1.0)],
}


def load_reward(spec):
    """`FILE.py:function` or `FILE.py:function=weight` -> (function, weight). Runs the file; sys.path stays as it is."""
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
    if not Path(path).is_file():
        raise ValueError(f"{spec!r}: there is no file {path}")
    found = importlib.util.spec_from_file_location(f"reward_file_{Path(path).stem}", path)
    module = sys.modules[found.name] = importlib.util.module_from_spec(
        found
    )  # dataclasses of the file look themselves up there
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code, which may raise anything
        del sys.modules[found.name]
        raise ValueError(f"{path} does not import: {_one_line(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{path} has no function {name!r}")
    return function, value


LARGEST_REWARD = 1e30  # squares and sums of a batch of such are finite still


def _one_line(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _quote(completion):
    text = completion_text(completion)
    return f"completion {(repr(completion) if text is None else text)[:200]!r}"


@contextlib.contextmanager
def _time_limit(where, completions, seconds):
    """Ends the process with one line where what is inside takes longer. It stays in the main thread, where math-verify and CUDA want to be."""
    if not seconds:
        yield
        return

    def end():
        shown = f"{where} took longer than reward_timeout={seconds:g} s for {len(completions)} completions, the first of them {_quote(completions[0])}"
        print(f"{Path(sys.argv[0]).name}: {shown}", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(
        seconds + 30, exit=True, file=sys.__stderr__
    )  # where the interpreter itself is held
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def _own_copy(value):
    """Lists and dicts, and those within them, as the function's own: what it does to its arguments reaches no other function and no log."""
    if isinstance(value, list):
        return [_own_copy(v) for v in value] if value and isinstance(value[0], list | dict) else value.copy()
    return {k: _own_copy(v) for k, v in value.items()} if isinstance(value, dict) else value


def _call(function, columns, where, timeout=0.0):
    """The function's values; if it raises, it is asked again row by row, so that the message shows the completion it raises on."""
    completions = columns["completions"]
    with _time_limit(where, completions, timeout):
        try:
            return function(**_own_copy(columns))
        except (
            Exception,
            SystemExit,
        ) as error:  # the user's code, which may raise anything; sys.exit(0) in it would end the run as if it were finished
            row = next(
                (i for i in range(len(completions)) if _raises(function, columns, i, type(error))), None
            )
            shown = " on no single completion" if row is None else f" on {_quote(completions[row])}"
            if row is None and completions:
                shown += f", the first being {_quote(completions[0])}"
            raise RewardError(f"{where} raised {_one_line(error)}{shown}") from error


def _raises(function, columns, row, kind):
    count = len(columns["completions"])
    try:
        function(
            **_own_copy(
                {
                    k: [v[row]] if isinstance(v, list | tuple) and len(v) == count else v
                    for k, v in columns.items()
                }
            )
        )
    except (Exception, SystemExit) as error:
        return type(error) is kind
    return False


def _number(value, where, completion):
    """A finite float (bools, numpy and torch scalars too), or None for an abstention."""
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(
            f"{where} returned {' '.join(repr(value).split())[:80]}, which is not a finite number, for {_quote(completion)}"
        )
    if abs(number) > LARGEST_REWARD:
        raise RewardError(
            f"{where} returned {number:g}, too large to compare with others (at most {LARGEST_REWARD:g}), for {_quote(completion)}"
        )
    return number


def reward_columns(problems, texts, completion_ids, answer_format):
    """What reward functions are given beside settings, a value a completion: problems and texts of the same length; other columns of the data too."""
    more = {
        column: [p.more.get(column) for p in problems]
        for column in dict.fromkeys(column for p in problems for column in p.more)
    }
    return more | dict(
        prompts=[[{"role": "user", "content": p.question}] for p in problems],
        completions=[[{"role": "assistant", "content": text}] for text in texts],
        completion_ids=completion_ids,
        answer=[p.answer for p in problems],
        solution=[p.answer for p in problems],
        answer_format=answer_format,
    )


def compute_rewards(functions, columns, step=None, gather=list, timeout=0.0):
    """Totals (N) = sum of weight * value, and each function's own values by name; raises RewardError rather than broadcast or guess.

    None means "abstains"; a completion for which every function abstains has total NaN, which the training loop leaves out. A function
    that abstains everywhere is an error; `gather` makes everywhere mean all processes (a list of one's own values -> those of all). `timeout`: seconds
    that a function may take. `columns`: what the functions get by keyword, prompts and completions among it, as `reward_columns` makes it.
    """
    parts, completions = {}, columns["completions"]
    totals = [math.nan] * len(completions)
    for function, weight in functions:
        name = getattr(function, "__name__", type(function).__name__)
        where = f"reward function {name}" + ("" if step is None else f" at step {step}")
        values = _call(function, columns, where, timeout) if completions else []
        if not isinstance(values, list | tuple) and hasattr(values, "tolist"):  # numpy, torch, pandas
            values = values.tolist()
        if not isinstance(values, list | tuple):
            raise RewardError(
                f"{where} returned a {type(values).__name__}, not a list of {len(completions)} values"
            )
        if len(values) != len(completions):
            raise RewardError(f"{where} returned {len(values)} values for {len(completions)} completions")
        values = [_number(v, where, c) for v, c in zip(values, completions, strict=True)]
        everywhere = gather(values)
        if everywhere and all(v is None for v in everywhere):
            shown = f", the first of them {_quote(completions[0])}" if completions else ""
            raise RewardError(f"{where} returned None for all {len(everywhere)} completions{shown}")
        key = next(
            k for k in (name, *(f"{name}_{n}" for n in range(2, len(functions) + 2))) if k not in parts
        )
        parts[key] = values
        for i, v in enumerate(values):
            if v is not None:
                totals[i] = weight * v + (0.0 if math.isnan(totals[i]) else totals[i])
                if abs(totals[i]) > LARGEST_REWARD:
                    raise RewardError(
                        f"{where}: {v:g} times its weight {weight:g} is too large to compare with others (at most {LARGEST_REWARD:g})"
                    )
    return totals, parts

"""Whether two MATH answers are the same object. math-verify decides single expressions in child processes that can be killed:
it bounds its time by SIGALRM, in the main thread only, and one big power holds the interpreter for minutes whatever the thread."""

import contextlib
import json
import os
import queue
import re
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from answers.maths import DECIMAL, FACTOR, MIXED, PAIR, SCIENTIFIC, _is_readable, clean, same, structure
from answers.numbers import parse_number

LONGEST = 2000  # characters; nothing in MATH comes near it


def _sympy_text(text):
    """What latex2sympy reads as it is meant: mixed numbers are sums, decimals exact; 2(3) is 6, where it reads 5."""
    text = FACTOR.sub(r"\1\\cdot ", MIXED.sub(r"(\1+\\frac{\2}{\3})", text))
    text = SCIENTIFIC.sub(r"(\1 \\cdot 10^{\2})", re.sub(r"(?<=\d),(?=\d{3}\b)", "", text))
    return DECIMAL.sub(lambda m: rf"\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}}", text)


def _decide(kind, left, right):
    """In the child: math-verify's judgement of two expressions, and no rounding."""
    import sympy
    from math_verify import LatexExtractionConfig, parse, verify

    def read(text):
        found = parse(
            rf"\boxed{{{_sympy_text(text)}}}",
            [LatexExtractionConfig(boxed_match_priority=0)],
            fallback_mode="no_fallback",
            parsing_timeout=None,
        )
        value = found[0] if found else None
        return (
            value.subs({s: sympy.I for s in value.free_symbols if s.name == "i"})
            if isinstance(value, sympy.Expr)
            else value
        )

    if (
        kind != "value"
    ):  # the same where one difference of the sides is a constant times the other, a positive one where order counts
        sides = [[read(x) for x in pair] for pair in (left, right)]
        if any(not isinstance(x, sympy.Expr) for pair in sides for x in pair):
            return False
        one, two = ((a - b) for a, b in sides)
        if one.free_symbols != two.free_symbols or not one.free_symbols:
            return False  # a statement about numbers is no value
        ratio = sympy.simplify(one / two)
        return bool(ratio.is_number and ratio.is_finite and (ratio > 0 if kind == "relation" else ratio != 0))
    a, b = read(left), read(right)
    if a is None or b is None:
        return False
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return False
    if a.free_symbols or b.free_symbols:
        return bool(verify(a, b, timeout_seconds=None))
    apart = (a - b).doit()
    if apart.is_Rational:
        return apart == 0
    parts = [part for value in (a, b) for part in sympy.N(value, 60).as_real_imag()]
    if not all(part.is_Float or part.is_Integer for part in parts):
        return False  # infinite, or not a number after all
    size = max(map(abs, parts))
    return all(
        bool(abs(x - y) <= size * sympy.Float("1e-45", 60)) for x, y in zip(parts[:2], parts[2:], strict=True)
    )


def _serve():
    """The child: one JSON line asked, one answered. The system kills it at its time, whatever holds the interpreter and whether its parent lives."""
    import resource

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    sys.set_int_max_str_digits(0)
    import logging

    import math_verify  # noqa: F401  loaded before the first question's time begins

    logging.disable(logging.CRITICAL)
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, *question = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            answer = _decide(*question)
        except Exception:  # the parser raises anything on what it cannot read
            answer = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


class _Child:
    def __init__(self):
        self.process = None

    def start(self):
        command = [sys.executable, "-m", "answers.judge"]
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=quiet,
            cwd=Path(__file__).resolve().parents[1],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if self._line(60.0) != b"ready\n":
            self.stop()
            raise RuntimeError(
                "the grader of MATH answers does not start: is math-verify installed? pip install 'math-verify[antlr4-13-2]'"
            )

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def ask(self, timeout, question):
        """True or False; None where it took too long. A child that died while it was idle is replaced, and asked again."""
        started = time.monotonic()
        answer = self._ask(timeout, question)
        return (
            self._ask(timeout, question)
            if answer is None and time.monotonic() - started < timeout / 4
            else answer
        )

    def _ask(self, timeout, question):
        if self.process is None or self.process.poll() is not None:
            self.stop()
            self.start()
        try:
            self.process.stdin.write(json.dumps([timeout, *question]).encode() + b"\n")
            self.process.stdin.flush()
            line = self._line(timeout + 0.5)
        except OSError:
            line = b""
        if line:
            return json.loads(line)
        self.stop()
        return None

    def _line(self, seconds):
        end, out, found = time.monotonic() + seconds, self.process.stdout, b""
        while not found.endswith(b"\n"):
            ready, _, _ = select.select([out], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(out.fileno(), 4096) if ready else b""
            if not piece:
                return b""
            found += piece
        return found


class _Pool:
    """As many children as are asked at the same time, up to the number of cores; each belongs to one thread at a time."""

    def __init__(self):
        self.owner, self.idle = os.getpid(), queue.LifoQueue()
        self.size = max(1, min(8, len(os.sched_getaffinity(0))))
        for _ in range(self.size):
            self.idle.put(_Child())

    def ask(self, timeout, *question):
        child = self.idle.get()
        try:
            return child.ask(timeout, question)
        finally:
            self.idle.put(child)


_pool = None


def _children():
    global _pool
    if _pool is None or _pool.owner != os.getpid():  # a forked process must not share the pipes
        _pool = _Pool()
    return _pool


class _Undecided(Exception):
    """Not in that time: another time it may be."""


@lru_cache(maxsize=100_000)
def _asked(kind, left, right, timeout):
    answer = _children().ask(timeout, kind, left, right)
    if answer is None:
        raise _Undecided
    return answer


def _as_key(value):
    return tuple(value) if isinstance(value, list) else value


def math_equal(answer, reference, timeout=5.0):
    """Whether two answers denote the same mathematical object, within about `timeout` seconds; what cannot be decided by then is not equal.

    Both are texts as extracted. Spelling, spaces, units, degree and percent signs do not count; nothing is rounded; a comma list and \\{...\\} are sets,
    (a,b) is ordered, kinds of brackets count; a statement such as 41=42 is not the value 42. From any thread.
    """
    if not isinstance(answer, str) or not isinstance(reference, str):
        return False
    answer, reference = answer.strip(), reference.strip()
    if not answer or not reference or len(answer) > LONGEST:
        return False
    if answer == reference:
        return True
    numbers = [None if PAIR.search(text) else parse_number(text) for text in (answer, reference)]
    if None not in numbers:
        return numbers[0] == numbers[1]
    end = time.monotonic() + timeout

    def ask(kind, left, right):
        left_over = end - time.monotonic()
        texts = [
            text for side in (left, right) for text in (side if isinstance(side, list | tuple) else [side])
        ]
        try:
            return (
                left_over > 0
                and _is_readable(texts)
                and _asked(
                    kind, _as_key(left), _as_key(right), timeout if left_over > timeout / 2 else left_over
                )
            )
        except _Undecided:
            return False

    return same(structure(clean(answer)), structure(clean(reference)), ask)


def all_math_equal(answers, references, timeout=5.0, in_all=20.0):
    """math_equal of many pairs, side by side; pairs not decided `in_all` seconds from now are not equal."""
    end = time.monotonic() + in_all

    def one(pair):
        left = end - time.monotonic()
        return left > 0 and math_equal(*pair, timeout=min(timeout, left))

    pairs = list(zip(answers, references, strict=True))
    different = list(dict.fromkeys(pairs))
    with ThreadPoolExecutor(_children().size) as threads:
        found = dict(zip(different, threads.map(one, different), strict=True))
    return [found[pair] for pair in pairs]


if __name__ == "__main__":
    _serve()

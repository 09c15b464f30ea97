"""Whether two MATH answers are the same object: by our own rules, and by math-verify for single expressions.

math-verify works in child processes that can be killed: it bounds its time by SIGALRM, which only the main
thread can use, and one big power holds the interpreter for minutes, whatever the thread.
"""

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

from answers.maths import clean, same, structure
from answers.numbers import parse_number

LONGEST = 2000  # characters; no answer in MATH comes near it
PAIR = re.compile(r"[(\[][^()]*,[^()]*[)\]]")  # (1,234) has two members

# What math-verify is asked about. Of other text it reads a part: of "41 \to \frac{1}{2}", "6:1", "x'" or
# "41 \boxed{42}" one number or letter; 204_5 it reads as 204, and 2{3} as 5. Possessive, since there are
# exponentially many ways to cut a text of many commands into commands and letters.
READABLE = re.compile(r"(?:[\da-zA-Z+*/^_{}()\[\]|!,=<> -]|(?<=\d)\.|\.(?=\d)|\\[a-zA-Z]++)++")
MISREAD = re.compile(r"[\d)}]_|\d\{|!!")
COMMANDS = set(
    "frac sqrt binom pi cdot times div pm mp infty circ log ln exp sum prod int lfloor rfloor lceil rceil "
    "lvert rvert vert max min gcd mod overline bar sin cos tan cot sec csc arcsin arccos arctan arccot "
    "arcsec arccsc sinh cosh tanh alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda "
    "mu nu xi rho sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega "
    "ell".split()
)

MIXED = re.compile(r"(?<![\w.}^])(\d+) ?\\frac\{(\d+)\}\{(\d+)\}")
DECIMAL = re.compile(r"(?<![\w.])(\d*)\.(\d+)(?![\w.])")
SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?!\w)")
FACTOR = re.compile(r"((?<![\w^_.])\d+(?:\.\d+)?|\)|\\binom\{[^{}]*\}\{[^{}]*\}) ?(?=\()")


def is_readable(texts):
    """Whether math-verify reads all of each text, and tells its letters apart: it takes A for a."""
    commands = {name for text in texts for name in re.findall(r"\\([a-zA-Z]+)", text)}
    letters = set(re.findall(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", "".join(texts)))) | commands
    if not commands <= COMMANDS or len({letter.lower() for letter in letters}) < len(letters):
        return False
    return all(
        READABLE.fullmatch(text) and text.count("|") % 2 == 0 and not MISREAD.search(text) for text in texts
    )


def _sympy_text(text):
    """What latex2sympy reads as it is meant: mixed numbers as sums, decimals exact, 2(3) with a dot."""
    text = FACTOR.sub(r"\1\\cdot ", MIXED.sub(r"(\1+\\frac{\2}{\3})", text))
    text = SCIENTIFIC.sub(r"(\1 \\cdot 10^{\2})", re.sub(r"(?<=\d),(?=\d{3}\b)", "", text))
    return DECIMAL.sub(lambda m: rf"\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}}", text)


def _read(text):
    """In the child: math-verify's reading of an expression, i as the imaginary unit; None if it has none."""
    import sympy
    from math_verify import LatexExtractionConfig, parse

    boxed = rf"\boxed{{{_sympy_text(text)}}}"
    extraction = [LatexExtractionConfig(boxed_match_priority=0)]
    readings = parse(boxed, extraction, fallback_mode="no_fallback", parsing_timeout=None)
    value = readings[0] if readings else None
    if not isinstance(value, sympy.Expr):
        return value
    return value.subs({symbol: sympy.I for symbol in value.free_symbols if symbol.name == "i"})


def _same_statements(kind, left, right):
    """In the child: whether two equations or relations, given by their two sides, say the same.

    They do where one difference of sides is a constant times the other; for a relation a positive constant.
    """
    import sympy

    sides = [[_read(side) for side in pair] for pair in (left, right)]
    if any(not isinstance(side, sympy.Expr) for pair in sides for side in pair):
        return False
    one, two = (a - b for a, b in sides)
    if one.free_symbols != two.free_symbols or not one.free_symbols:
        return False  # a statement about numbers is no value
    ratio = sympy.simplify(one / two)
    return bool(ratio.is_number and ratio.is_finite and (ratio > 0 if kind == "relation" else ratio != 0))


def _same_values(left, right):
    """In the child: whether two expressions are equal; numbers to 45 digits, so that nothing is rounded."""
    import sympy
    from math_verify import verify

    a, b = _read(left), _read(right)
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return False
    if a.free_symbols or b.free_symbols:
        return bool(verify(a, b, timeout_seconds=None))
    difference = (a - b).doit()
    if difference.is_Rational:
        return difference == 0
    parts = [part for value in (a, b) for part in sympy.N(value, 60).as_real_imag()]
    if not all(part.is_Float or part.is_Integer for part in parts):
        return False  # infinite, or not a number after all
    tolerance = max(map(abs, parts)) * sympy.Float("1e-45", 60)
    return all(bool(abs(x - y) <= tolerance) for x, y in zip(parts[:2], parts[2:], strict=True))


def _decide(kind, left, right):
    return _same_values(left, right) if kind == "value" else _same_statements(kind, left, right)


def _serve():
    """The child: one JSON line asked, one answered.

    The system kills it when a question's time is up, whatever holds the interpreter, parent alive or not.
    """
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
    """A child process, started when it is first asked."""

    def __init__(self):
        self.process = None

    def start(self):
        # -m looks in the working directory, unless PYTHONSAFEPATH is set. So the child works in the folder
        # that holds this package (the project's root, or site-packages), whatever the caller's is.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "answers.judge"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).resolve().parents[1],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": ""},
        )
        if self._line(60.0) != b"ready\n":
            self.stop()
            raise RuntimeError(
                "the grader of MATH answers does not start: is math-verify installed? "
                "pip install 'math-verify[antlr4-13-2]'"
            )

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def ask(self, timeout, question):
        """True or False; None where it took too long. A child that died while it was idle is replaced."""
        started = time.monotonic()
        answer = self._ask(timeout, question)
        if answer is None and time.monotonic() - started < timeout / 4:
            answer = self._ask(timeout, question)
        return answer

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
        """The next line of the child's output; empty where it does not come in time."""
        end = time.monotonic() + seconds
        out = self.process.stdout
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([out], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(out.fileno(), 4096) if ready else b""
            if not piece:
                return b""
            line += piece
        return line


class _Pool:
    """A child for each core, started as needed; each is asked by one thread at a time."""

    def __init__(self):
        self.owner = os.getpid()
        self.size = max(1, min(8, len(os.sched_getaffinity(0))))
        self.idle = queue.LifoQueue()
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
    """Not decided in time. It is raised, so that the cache does not keep it."""


@lru_cache(maxsize=100_000)
def _asked(kind, left, right, timeout):
    answer = _children().ask(timeout, kind, left, right)
    if answer is None:
        raise _Undecided
    return answer


def math_equal(answer, reference, timeout=5.0):
    """Whether two answers denote the same mathematical object; False if undecided in about `timeout` seconds.

    Both are texts as extracted. Spelling, spaces, units, degree and percent signs do not count; nothing is
    rounded; a comma list and \\{...\\} are sets, (a,b) is ordered, kinds of brackets count; a statement such
    as 41=42 is not the value 42. From any thread.
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
        texts = [left, right] if kind == "value" else [*left, *right]
        remaining = end - time.monotonic()
        if remaining <= 0 or not is_readable(texts):
            return False
        if kind != "value":
            left, right = tuple(left), tuple(right)  # hashable
        try:  # the time is a part of the cache's key, so it is the whole timeout while half of it is left
            return _asked(kind, left, right, timeout if remaining > timeout / 2 else remaining)
        except _Undecided:
            return False

    return same(structure(clean(answer)), structure(clean(reference)), ask)


def all_math_equal(answers, references, timeout=5.0, in_all=20.0):
    """math_equal of many pairs, side by side; pairs not decided `in_all` seconds from now are not equal."""
    end = time.monotonic() + in_all

    def equal(pair):
        remaining = end - time.monotonic()
        return remaining > 0 and math_equal(*pair, timeout=min(timeout, remaining))

    pairs = list(zip(answers, references, strict=True))
    different = list(dict.fromkeys(pairs))
    with ThreadPoolExecutor(_children().size) as threads:
        verdicts = dict(zip(different, threads.map(equal, different), strict=True))
    return [verdicts[pair] for pair in pairs]


if __name__ == "__main__":
    _serve()

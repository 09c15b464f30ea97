"""The generated task: one-step word problems."""

import hashlib
import itertools
import random
from functools import cache

from errors import DataError
from problems.problem import Problem

NAMES = ("Ann", "Bob", "Eve", "Tom", "Sue", "Max", "Liz", "Dan")
ITEMS = ("pens", "cups", "eggs", "cards", "books", "apples", "coins", "balls")
MORE, LESS = ("gets", "buys"), ("loses", "sells")
FIRST, SECOND = range(3, 21), range(1, 10)
TEST_SEED = 0  # of the test problems that load_problems gives, whatever the run's seed


def arithmetic_problems(split, count, seed=0, limit=None):
    """`count` one-step word problems, or the first `limit` of them: "Ann has 12 pens and gets 5 more".

    *Half of the train solutions choose the wrong operation*, as text found in the wild would, so that
    supervised training on them gives a fluent model that is right half of the time; answers are always right,
    and so are test solutions. A problem's own text decides which split it is in, so no seed can mix them.
    """
    of_split = _combinations(split == "test")
    if not 1 <= count <= len(of_split):
        raise DataError(f"arithmetic: {split} has {len(of_split)} problems, {count} were asked for")
    draw = random.Random(f"{seed}-{split}")
    problems = []
    for i, parts in enumerate(draw.sample(of_split, count)[:limit]):
        wrong = split == "train" and draw.random() < 0.5
        problems.append(_arithmetic(parts, wrong, f"{split}-{i}"))
    return problems


@cache
def _combinations(test):
    every = itertools.product(FIRST, SECOND, MORE + LESS, NAMES, ITEMS)
    return [parts for parts in every if parts[1] < parts[0] and _is_test(parts) == test]


def _is_test(parts):
    return hashlib.sha256(repr(parts).encode()).digest()[0] < 16  # a sixteenth


def _arithmetic(parts, wrong, problem_id):
    first, second, verb, name, item = parts
    adds = verb in MORE
    more = " more" if adds else ""
    question = f"{name} has {first} {item} and {verb} {second}{more}. How many {item} does {name} have now?"
    sign = "-" if adds == wrong else "+"
    result = first + second if sign == "+" else first - second
    solution = f"{name} {verb} {second}. {first} {sign} {second} = {result}\n#### {result}"
    return Problem(question, str(first + second if adds else first - second), solution, id=problem_id)

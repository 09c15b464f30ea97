"""The generated task: one-step word problems."""

import hashlib
import itertools
import random

from errors import DataError
from problems.problem import Problem

NAMES = ("Ann", "Bob", "Eve", "Tom", "Sue", "Max", "Liz", "Dan")


ITEMS = ("pens", "cups", "eggs", "cards", "books", "apples", "coins", "balls")


MORE, LESS = ("gets", "buys"), ("loses", "sells")


FIRST, SECOND = range(3, 21), range(1, 10)


def arithmetic_problems(split, count, seed=0):
    """One-step word problems: "Ann has 12 pens and gets 5 more", or "and loses 5".

    *Half of the train solutions choose the wrong operation*, as text found in the wild would, so that supervised training on them gives
    a fluent model that is right half of the time; answers are always right, and so are test solutions. Which problems are in which split
    is a matter of their own text: no seed can mix them.
    """
    every = [
        p
        for p in itertools.product(FIRST, SECOND, MORE + LESS, NAMES, ITEMS)
        if p[1] < p[0] and _is_test(p) == (split == "test")
    ]
    if not 1 <= count <= len(every):
        raise DataError(f"arithmetic: {split} has {len(every)} problems, {count} were asked for")
    draw = random.Random(f"{seed}-{split}")
    return [
        _arithmetic(parts, split == "train" and draw.random() < 0.5, f"{split}-{i}")
        for i, parts in enumerate(draw.sample(every, count))
    ]


def _is_test(parts):
    return hashlib.sha256(repr(parts).encode()).digest()[0] < 16  # a sixteenth


def _arithmetic(parts, wrong, problem_id):
    first, second, verb, name, item = parts
    adds = verb in MORE
    question = f"{name} has {first} {item} and {verb} {second}{' more' if adds else ''}. How many {item} does {name} have now?"
    plus = adds != wrong
    result = first + second if plus else first - second
    solution = f"{name} {verb} {second}. {first} {'+' if plus else '-'} {second} = {result}\n#### {result}"
    return Problem(question, str(first + second if adds else first - second), solution, id=problem_id)

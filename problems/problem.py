"""A problem, and a problem with its prompt."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Problem:
    """`solution` is a worked solution ending in a line `#### answer` (GSM8K's own form), or empty; `response` a text to learn as it stands, or empty.

    `more`: the columns of the data that are none of these, as they came; reward functions get them.
    """

    question: str
    answer: str
    solution: str = ""
    subject: str = ""
    level: str = ""
    id: str = ""
    response: str = ""
    more: dict = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class EncodedProblem:
    """A problem, its prompt as text, and as ids."""

    problem: Problem
    prompt: str
    ids: list[int]

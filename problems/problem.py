"""A problem, and a problem with its prompt."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Problem:
    """A question with its answer; what else the data says of it is empty where it says nothing.

    `solution`: a worked solution ending in a line `#### answer`, as GSM8K has it; `response`: a text to learn
    as it is; `more`: every column as the data has it, which reward functions get.
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

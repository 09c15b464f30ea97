"""A problem, and a problem with its prompt."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Problem:
    """A question with its answer; what else the data says of it is empty where it says nothing.

    `solution`: a worked solution ending in a line `#### answer`, as GSM8K has it; `response`: a text to learn
    as it is; `more`: every column as the data has it, which reward functions get. `messages`: the chat that
    asks, where the data has one, the question being its last user message; `is_prompt`: the question is the
    text of a `prompt` column, which prompt_format raw takes as it stands.
    """

    question: str
    answer: str
    solution: str = ""
    subject: str = ""
    level: str = ""
    id: str = ""
    response: str = ""
    more: dict = field(default_factory=dict, compare=False)
    messages: tuple = field(default=(), compare=False)
    is_prompt: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class EncodedProblem:
    """A problem, its prompt as text, and as ids.

    `opening` is the end of the prompt that belongs to the answer already, such as the <think> that some chat
    templates write for the model. An answer's text begins with it wherever it is graded, shown or kept.
    """

    problem: Problem
    prompt: str
    ids: list[int]
    opening: str = ""

    def answered(self, completion):
        """The completion with the text of the whole answer."""
        return completion._replace(text=self.opening + completion.text)

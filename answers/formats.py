"""How answers are asked for, written, and found in a completion."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from answers.user_files import named_in_file, shown_error
from errors import RewardError, one_line


def completion_text(completion):
    """The text of a completion: a string, or chat messages, of which the last counts; None otherwise."""
    if isinstance(completion, list | tuple) and completion and isinstance(completion[-1], dict):
        completion = completion[-1].get("content")
        if isinstance(completion, list | tuple):  # content in parts, as multimodal chat templates have it
            texts = [part.get("text") for part in completion if isinstance(part, dict)]
            completion = "".join(text for text in texts if isinstance(text, str))
    return completion if isinstance(completion, str) else None


def _last_answer_tag(text):
    _, tag, rest = text.rpartition("<answer>")
    answer, closing, _ = rest.partition("</answer>")
    return answer.strip() if tag and closing else None


END_TOKEN = re.compile(r"<\|[^<>|]*\|>|</s>|<(?:eos|end_of_turn)>")  # as a server may leave it in the text


def last_hash(text):
    """The rest of the line after the last ####, or None."""
    _, marker, rest = text.rpartition("####")
    line = re.match(r"[^\r\n]*", rest)[0]
    return END_TOKEN.split(line, maxsplit=1)[0].strip() or None if marker else None


# `\\boxed` with a doubled backslash is still a box; other escaped backslashes and braces delimit nothing.
BRACES = re.compile(r"\\(boxed|fbox)\s*\{|\\\\(?!boxed|fbox)|\\[{}]|([{}])")


def _last_box(text):
    r"""The last \boxed{} whose braces balance, else the last such \fbox{}.

    One pass over the text, so that the time stays linear for "\boxed{" * 100,000.
    """
    first = re.search(r"\\(?:boxed|fbox)", text)
    opened, last = [], {}
    for token in BRACES.finditer(text, first.start()) if first else ():
        kind, brace = token.groups()
        if kind or brace == "{":
            opened.append((kind, token.end()))
        elif brace and opened:
            kind, start = opened.pop()
            if kind:
                last[kind] = max(last.get(kind, (0, 0)), (start, token.start()))
    start, end = last.get("boxed") or last.get("fbox") or (0, -1)
    return text[start:end].strip() if end >= 0 else None


def _r1_answer(text):
    answer = _last_answer_tag(text)
    boxed = None if answer is None else _last_box(answer)
    return answer if boxed is None else boxed


@dataclass(frozen=True)
class AnswerFormat:
    """How answers are asked for, written and found. `think_end` is the text that ends the reasoning."""

    name: str
    system_prompt: str
    think_end: str
    tags: tuple[str, ...]  # format_reward pays 0.2 for each
    template: str
    find: Callable[[str], str | None]
    raw_prompt: str = ""  # what prompt_format raw asks with; "": the system prompt, then the question

    def extract(self, text):
        """The answer in a completion, trimmed, or None. A literal `...` is the prompt's placeholder."""
        text = completion_text(text)
        answer = None if text is None else self._found(text)
        answer = answer and answer.strip()
        return None if answer == "..." else answer

    def _found(self, text):
        if getattr(self.find, "__module__", None) == __name__:
            return self.find(text)
        where, in_text = f"the find of answer_format {self.name!r}", f"for {text[:200]!r}"
        try:
            answer = self.find(text)
        except Exception as error:  # the user's code, which may raise anything
            raise RewardError(f"{where} raised {shown_error(error)} {in_text}") from error
        if not isinstance(answer, str | None):
            raise RewardError(f"{where} gave {one_line(repr(answer), 80)}, neither text nor None, {in_text}")
        return answer

    def opening(self, prompt):
        """The end of a prompt that belongs to the answer already: a tag of the format that it opens."""
        ends = (tag for tag in self.tags if not tag.startswith("</") and prompt.rstrip().endswith(tag))
        return next((prompt[prompt.rindex(tag) :] for tag in ends), "")

    def after_opening(self, text, opening):
        """What is left of an answer's text where the prompt has opened it already."""
        if opening and text.startswith(opening):
            return text[len(opening) :]
        tag = opening.rstrip()
        return text[len(tag) :].lstrip() if tag and text.startswith(tag) else text

    def write(self, reasoning, answer):
        """A solution in this format, for supervised training."""
        return self.template.format(reasoning=reasoning, answer=answer)


STEP_BY_STEP = "Solve the problem step by step. "
SYSTEM_PROMPT = (
    "Respond in the following format:\n\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n"
)
HASH_PROMPT = STEP_BY_STEP + (
    "Finish with a line that holds #### and the final number, in this format:\n\n#### ...\n"
)
BOXED_PROMPT = STEP_BY_STEP + (
    "Put the final answer into a box, in this format:\n\nThe answer is \\boxed{...}.\n"
)
R1_PROMPT = (
    "Think first, then answer. Respond in the following format:\n\n"
    "<think>\n...\n</think>\n<answer>\n...\n</answer>\n"
)

# After the prompt of DeepSeek-R1-Zero, for models that know no chat.
R1_RAW_PROMPT = (
    "A conversation of a User with an Assistant. The User asks, and the Assistant answers: it first thinks "
    "in its mind about how to get there, and then tells the User the answer. The thinking stands between "
    "<think> and </think>, the answer between <answer> and </answer>, in this way: "
    "<think> thinking </think> <answer> ... </answer>.\nUser: {question}\nAssistant: <think>"
)

XML_TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
R1_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
XML_TEMPLATE = "<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>\n"
R1_TEMPLATE = "<think>\n{reasoning}\n</think>\n<answer>\n{answer}\n</answer>"
BOXED_TEMPLATE = "{reasoning}\nThe answer is \\boxed{{{answer}}}."

FORMATS = (
    AnswerFormat("xml", SYSTEM_PROMPT, "</reasoning>", XML_TAGS, XML_TEMPLATE, _last_answer_tag),
    AnswerFormat("hash", HASH_PROMPT, "####", ("####",), "{reasoning}\n#### {answer}", last_hash),
    AnswerFormat("boxed", BOXED_PROMPT, "\\boxed{", ("\\boxed{",), BOXED_TEMPLATE, _last_box),
    AnswerFormat("r1", R1_PROMPT, "</think>", R1_TAGS, R1_TEMPLATE, _r1_answer, R1_RAW_PROMPT),
)
ANSWER_FORMATS = {made.name: made for made in FORMATS}


def answer_format_named(name):
    """The AnswerFormat of this name, or of FILE.py:name; ValueError where there is none, or one unfit."""
    if name in ANSWER_FORMATS:
        return ANSWER_FORMATS[name]
    path, _, within = str(name).rpartition(":")
    if not path.endswith(".py"):
        known = ", ".join(ANSWER_FORMATS)
        raise ValueError(f"answer_format {name!r} is unknown: must be one of {known}, or FILE.py:name")
    try:
        found = named_in_file(path, within)
    except ValueError as error:
        raise ValueError(f"answer_format {name!r} cannot be had: {error}") from error
    if not isinstance(found, AnswerFormat):
        kind = "not in that file" if found is None else f"a {type(found).__name__} there"
        raise ValueError(f"answer_format {name!r} is {kind}: make it with answers.formats.AnswerFormat")
    if problem := _wrong_type_in(found) or _problem_of(found):
        raise ValueError(f"answer_format {name!r} {problem}")
    return found


def _wrong_type_in(found):
    """Which field of an AnswerFormat holds another type; None where none does.

    The letters of a text in the place of `tags` would be paid for as tags.
    """
    if not isinstance(found.tags, tuple) or not all(isinstance(tag, str) for tag in found.tags):
        return f"has tags={found.tags!r}, which must be a tuple of texts, such as ('<answer>', '</answer>')"
    for name in ("name", "system_prompt", "think_end", "template", "raw_prompt"):
        if not isinstance(getattr(found, name), str):
            return f"has {name}={getattr(found, name)!r}, which must be a text"
    return None if callable(found.find) else f"has find={found.find!r}, which must be a function of a text"


@cache
def _problem_of(found):
    """Why an AnswerFormat cannot be used: it must find what it has written; None where it can."""
    try:
        written = {answer: found.write("So it is.", answer) for answer in ("42", "x = 7, y = 8")}
        read = {answer: found.find(text) for answer, text in written.items()}
        of_nothing = [found.find(text) for text in ("", "It is 42.")]
    except Exception as error:  # the user's code, which may raise anything
        return f"raises {shown_error(error)}"
    for answer, text in written.items():
        if read[answer] != answer:
            return f"finds {read[answer]!r} in {text!r}, which it has written for {answer!r}"
        for tag in (found.think_end, *found.tags):
            if not tag or tag not in text:
                return f"writes {text!r} without {tag!r}: its template must hold think_end and all tags"
    if any(answer is not None for answer in of_nothing):
        wrong = of_nothing[1] or of_nothing[0]
        return f"finds {wrong!r} in a text that has none of its tags: its find must give None there"
    return None


def extract_answer(text, answer_format="xml"):
    """The answer in a completion (a string or chat messages), or None; never just its last number."""
    return answer_format_named(answer_format).extract(text)

"""Answer formats (prompt, delimiter, extractor) and exact number reading.

Model text is data: it is never evaluated, and every function here takes time linear in its length.
"""

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

# Answer formats


def completion_text(completion):
    """The text of a completion: a string, or chat messages, of which the last one counts. None for anything else."""
    if isinstance(completion, list | tuple) and completion and isinstance(completion[-1], dict):
        completion = completion[-1].get("content")
        if isinstance(completion, list | tuple):  # content in parts, as multimodal chat templates have it
            completion = "".join(part["text"] for part in completion if isinstance(part, dict) and isinstance(part.get("text"), str))
    return completion if isinstance(completion, str) else None


def _last_answer_tag(text):
    _, tag, rest = text.rpartition("<answer>")
    answer, closing, _ = rest.partition("</answer>")
    return answer.strip() if tag and closing else None


def last_hash(text):
    _, marker, rest = text.rpartition("####")
    return re.match(r"[^\r\n]*", rest)[0].strip() or None if marker else None


# `\\boxed` with a doubled backslash is still a box; any other escaped backslash or brace opens and closes nothing
BRACES = re.compile(r"\\(boxed|fbox)\s*\{|\\\\(?!boxed|fbox)|\\[{}]|([{}])")


def _last_box(text):
    r"""The last \boxed{} whose braces balance, else the last such \fbox{}; one pass, since "\boxed{" * 100,000 is a text too."""
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
    """How answers are asked for, written and found. `think_end` is the text whose completion ends the reasoning (design.md, M3PO)."""

    name: str
    system_prompt: str
    think_end: str
    tags: tuple[str, ...]  # each is worth 0.2 in format_reward
    template: str
    find: Callable[[str], str | None]

    def extract(self, text):
        """The answer in a completion, trimmed, or None. A literal `...` is the prompt's placeholder, not an answer."""
        text = completion_text(text)
        answer = None if text is None else self.find(text)
        return None if answer == "..." else answer

    def write(self, reasoning, answer):
        """A solution in this format, for supervised training."""
        return self.template.format(reasoning=reasoning, answer=answer)


SYSTEM_PROMPT = "Respond in the following format:\n\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n"
R1_PROMPT = "Think first, then answer. Respond in the following format:\n\n<think>\n...\n</think>\n<answer>\n...\n</answer>\n"
HASH_PROMPT = "Solve the problem step by step. Finish with a line that holds #### and the final number, in this format:\n\n#### ...\n"
BOXED_PROMPT = "Solve the problem step by step. Put the final answer into a box, in this format:\n\nThe answer is \\boxed{...}.\n"
ANSWER_BLOCK = "<answer>\n{answer}\n</answer>"

ANSWER_FORMATS = {
    made.name: made
    for made in (
        AnswerFormat("xml", SYSTEM_PROMPT, "</reasoning>", ("<reasoning>", "</reasoning>", "<answer>", "</answer>"),
                     "<reasoning>\n{reasoning}\n</reasoning>\n" + ANSWER_BLOCK + "\n", _last_answer_tag),
        AnswerFormat("hash", HASH_PROMPT, "####", ("####",), "{reasoning}\n#### {answer}", last_hash),
        AnswerFormat("boxed", BOXED_PROMPT, "\\boxed{", ("\\boxed{",), "{reasoning}\nThe answer is \\boxed{{{answer}}}.", _last_box),
        AnswerFormat("r1", R1_PROMPT, "</think>", ("<think>", "</think>", "<answer>", "</answer>"),
                     "<think>\n{reasoning}\n</think>\n" + ANSWER_BLOCK, _r1_answer),
    )
}  # fmt: skip


def answer_format_named(name):
    if name not in ANSWER_FORMATS:
        raise ValueError(f"answer_format {name!r} is unknown: must be one of {', '.join(ANSWER_FORMATS)}")
    return ANSWER_FORMATS[name]


def extract_answer(text, answer_format="xml"):
    """The answer in a completion (a string or chat messages), or None; never "the last number in the text"."""
    return answer_format_named(answer_format).extract(text)


# Numbers

MAX_DIGITS = 4300  # Python's own limit for int(); exponents have the same bound, so that 1e4000000 is never computed
INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
DECIMAL = rf"(?:{INTEGER}(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)(?:[eE]([+-]?[0-9]+))?"
LITERAL = re.compile(rf"({INTEGER}) ?/ ?(-?{INTEGER})|{DECIMAL}")
FIRST_TO_LAST_DIGIT = re.compile(r"\.?[0-9](?:.*[0-9])?", re.DOTALL)
ALONE = re.compile(rf"(?:[+-]? ?\$? ?|\$ ?[+-])(?:{INTEGER} ?/ ?-?{INTEGER}|{DECIMAL})\.? ?%?\.?")
IN_TEXT = re.compile(rf"(?:(?<![\w)\]}}])(-)\$?)?((?<![0-9./]){INTEGER}/{INTEGER}(?![0-9./])|{DECIMAL})")

LETTER = r"[^\W\d_]"
LONE_LETTER = rf"{LETTER}(?!{LETTER})"
CHARACTERS = {"−": "-", "⁄": "/", "٪": "%", "٫": ".", "٬": ","}
LATEX_SPACING = re.compile(r"\\(?:(?:text|math)(?:bf|rm|it)?|mbox|boxed|fbox|left|right|q?quad)(?![a-zA-Z])|\\[,;: ()\[\]]")
EMPHASIS = re.compile(r"(?<![\w)\]}*])\*([^*\s]+)\*(?![\w(\[{*])")
# Words that make another value of the number beside them. Scale words and open ends do so wherever they stand: "3 (in millions)", "3 eggs or more".
SCALE = re.compile(r"\b(?:(?:hundred|thousand|[a-z]{1,5}illion|dozen|lakh|crore)(?:s|ths?)?|or (?:more|less|fewer|greater))\b|[百千万萬亿億兆]", re.IGNORECASE)
CHANGED_BEFORE = re.compile(
    r"\b(?:minus|negative|not|(?:more|less|fewer|greater) than|(?:half|twice|double|triple|root)(?: of)?|sqrt|log|ln|exp|sin|cos|tan)\b\W*$", re.IGNORECASE
)
CHANGED_AFTER = re.compile(
    r"\W*(?:and (?:an?|one) (?:half|quarter|third)|half|halves|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth)s"
    r"|squared|cubed|factorial|pi|mil|mio|mln|mn|bln|bn|mrd)\b",
    re.IGNORECASE,
)
UNIT_LETTERS = "mgslLhdtcpVWANJCF"  # "5m" is five metres; any other lone letter is a variable, a constant or a scale
OPERATOR_AFTER = re.compile(rf"^ ?/ ?(?:$|{LONE_LETTER})|- ?(?:$|{LONE_LETTER})|^\.\.|^ ?…|^[xX]{LETTER}")
NOT_PUNCTUATION = set("_!*\\^·‰‱")


def ascii_char(char):
    if char.isspace():
        return " "
    if char.isdecimal():  # full-width, Arabic-Indic, Devanagari ...; superscripts are digits but not decimal
        return str(unicodedata.decimal(char))
    if "！" <= char <= "～":  # the full-width twins of ASCII
        return chr(ord(char) - 0xFEE0)
    return {"Sc": "$", "Pd": "-"}.get(unicodedata.category(char)) or CHARACTERS.get(char, char)


def plain_number_text(text):
    """ASCII digits, signs and spaces, `-` for every dash, `$` for every currency sign, no LaTeX spacing."""
    text = text.translate({ord(char): ascii_char(char) for char in set(text)})
    if "\\" in text:
        text = text.replace("\\$", "$").replace("\\%", "%").replace("\\!", "")
        text = re.sub(r"\^ ?\\circ(?![a-zA-Z])|\^ ?\{ ?\\circ ?\}", "°", text)
        text = LATEX_SPACING.sub(" ", text)
    return EMPHASIS.sub(r"\1", text.replace("{,}", ",").replace("**", " ")).strip("* ")


def _is_ignored(char):
    """Letters, punctuation, spaces and pictures say nothing about a value; operators, superscripts and vulgar fractions do."""
    if char in NOT_PUNCTUATION or unicodedata.decomposition(char).startswith(("<super>", "<sub>", "<fraction>")):
        return False
    return char in " =$`" or unicodedata.category(char)[0] in "LPM" or unicodedata.category(char) in ("So", "Cf")


def _is_cased(char):
    """Scripts without case (CJK, Arabic ...) write words and numbers without a space between; a cased letter makes `x2` of it."""
    return char.lower() != char.upper()


def _sign(before):
    """(sign, the text before it) for what stands before a number; None where that text is a part of the number or an operand."""
    head, sign = before.rstrip(" $"), ""
    gap = before[len(head) :]
    if head.endswith(("+", "-")):
        sign, body = head[-1], head[:-1]
        head = body.rstrip(" $")
        is_letter = head[-1:].isalpha()
        is_operand = is_letter or head.endswith((")", "]", "}"))
        is_glued, is_variable = body == head, is_letter and not head[-2:-1].isalpha()
        if head.endswith(("+", "-")) or (is_operand and (gap.startswith(" ") or is_glued or is_variable)):
            return None  # "--5", "2 - 5" with a word for the 2, "x-5", "x -5"; but "a profit of -$5" is a sign
    elif not gap and (_is_cased(head[-1:]) or head.endswith((".", ","))):
        return None
    unbracketed = head.rstrip("([{ $")
    if unbracketed != head and unbracketed.endswith(("+", "-")):
        return None  # "-(5)", "-(-5)"
    return None if head.endswith("(") and _is_cased(head[-2:-1]) else (sign, head)


def _is_unit(after, is_money):
    """Whether the text after a number leaves its value alone."""
    word = re.match(rf"([ {{]*)({LETTER}++)(?!['’]|\.\w)", after)  # the o of "5 o'clock" and the a of "5 a.m." are not lone
    if word and len(word[2]) == 1 and _is_cased(word[2]):
        is_article = word[1] and word[2] in "aAI"
        if not is_article and (is_money or word[2] not in UNIT_LETTERS):
            return False
    is_overlined = unicodedata.category(after[0])[0] == "M" if after else False  # a repeating decimal
    return not (is_overlined or OPERATOR_AFTER.search(after) or CHANGED_AFTER.match(after))


def parse_number(text):
    """The one number that a text holds, exact, or None where it holds none, two or more, or something that makes another value of it.

    Ignored: currency and percent signs, commas between groups of three, words and units, `x =`, one closing full stop, LaTeX spacing.
    """
    plain = plain_number_text(text) if isinstance(text, str) else ""
    found = FIRST_TO_LAST_DIGIT.search(plain)
    literal = LITERAL.fullmatch(found[0]) if found else None
    if literal is None or len(re.sub("[^0-9]", "", found[0])) > MAX_DIGITS:
        return None
    before, after = plain[: found.start()], plain[found.end() :]
    signed = _sign(before)
    if signed is None or "/" in signed[1] or not all(map(_is_ignored, set(signed[1] + after))):
        return None
    if SCALE.search(before) or SCALE.search(after) or CHANGED_BEFORE.search(before[-40:]) or not _is_unit(after, "$" in before):
        return None
    numerator, denominator, exponent = (part and part.replace(",", "") for part in literal.groups())
    if (denominator and int(denominator) == 0) or (exponent and abs(int(exponent)) > MAX_DIGITS):
        return None
    value = Fraction(int(numerator), int(denominator)) if denominator else Fraction(found[0].replace(",", ""))
    return -value if signed[0] == "-" else value


def last_number(text):
    """The last number literal of a whole text (lm-evaluation-harness's flexible-extract); for evaluation, never for a reward."""
    upto = re.match(r".*\d", completion_text(text) or "", re.DOTALL)
    if upto is None:
        return None
    *_, last = IN_TEXT.finditer(plain_number_text(upto[0][-3 * MAX_DIGITS :]))  # what reaches further back has too many digits for a number
    return (last[1] or "") + last[2]

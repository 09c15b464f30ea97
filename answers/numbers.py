"""Exact number reading: of texts, which are never evaluated, in time linear in their length."""

import re
import unicodedata
from fractions import Fraction

from answers.expressions import MAX_DIGITS, NotUnderstood, Unit, is_product
from answers.formats import completion_text
from answers.tokens import RUPEES, ascii_char, tokenise, without_wrapping
from answers.words import (
    FIGURES,
    FUNCTION_NAMES,
    GREEK,
    NEGATIONS,
    OPERATIONS,
    ORDINALS,
    SCALE,
    SMALL_WORDS,
    UNIT_LETTERS,
    UNIT_POWERS,
    UNITS,
)

# No group begins with 0: elsewhere 0,125 is an eighth.
INTEGER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
DECIMAL = rf"(?:{INTEGER}(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)(?:[eE]([+-]?[0-9]+))?"
LITERAL = re.compile(rf"({INTEGER}) ?/ ?(-?{INTEGER})|{DECIMAL}")
FIRST_TO_LAST_DIGIT = re.compile(r"\.?[0-9](?:.*[0-9])?", re.DOTALL)
ALONE = re.compile(rf"(?:[+-]? ?\$? ?|\$ ?[+-])(?:{INTEGER} ?/ ?-?{INTEGER}|{DECIMAL})\.? ?%?\.?")
IN_TEXT = re.compile(rf"(?:(?<![\w)\]}}])(-)\$?)?((?<![0-9./]){INTEGER}/{INTEGER}(?![0-9./])|{DECIMAL})")

LETTER = r"[^\W\d_]"
LONE_LETTER = rf"{LETTER}(?!{LETTER})"
LATEX_SPACING = re.compile(
    r"\\(?:(?:text|math)(?:bf|rm|it)?|mbox|boxed|fbox|left|right|q?quad)(?![a-zA-Z])|\\(?:[,;: ()\[\]]|$)"
)
TEXT_BEFORE = re.compile(r"\\(?:text|mbox|mathrm) ?\{([^{}\d]*[\s:])\}")  # \\text{The answer is }-1
GAP = re.compile("[ {}]+")  # 7\\text{ times }x is "7 times x"
EMPHASIS = re.compile(r"(?<![\w)\]}*])\*([^*\s]+)\*(?![\w(\[{*])")


def _any(words):
    return "(?:" + "|".join(map(re.escape, sorted(words, reverse=True))) + ")"


NOT = _any(NEGATIONS.split())
FIGURE = _any(FIGURES.split())
PART = f"(?:{_any(ORDINALS.split())}s?|quarters?)"
# Words that make another value of the number that they stand right before, or after it and its noun.
BESIDE = r"[^\w.,:;!?\n]*"  # a dollar, a bracket, a space; no end of a clause
CHANGED_BEFORE = re.compile(
    rf"(?:[负負减減]|零下|(?<!差)不\w{{0,3}}|[多少大小高低][于於]|超[过過]|[至最][少多]"
    rf"|\b(?:(?:{NOT}|[a-z]+n't)(?: [\w']+){{0,3}}"
    rf"|{FIGURE}|(?:more|less|fewer|greater|mehr|weniger|größer|kleiner) (?:than|als)"
    r"|at least|at most|up to|over|mindestens|höchstens"
    r"|upwards? of|in excess of|(?:shy|short) of|anything but|other than|unlike"
    rf"|under|above|below|between|half|{PART} of(?: the)?|{_any(OPERATIONS.split())}(?: (?:of|de|que))?"
    rf"|(?:square|cube|power|reciprocal|opposite|inverse|absolute value)s? of(?: the)?"
    rf"|{_any(FUNCTION_NAMES)}(?: of)?)){BESIDE}$",
    re.IGNORECASE,
)
# Nothing is tried at two lengths: a row of apostrophes behind a number took cubic time.
COUNTED = r"(?:(?!(?:in|for|per|each|of|an?|the|at|by|on|to|every|from)\b)[a-z][a-z']*+[^\w.:;!?(]++)?"
CHANGED_AFTER = re.compile(
    rf"[^\w.:;!?(]*+(?:(?:(?:is|was|are) )?{NOT}\b|(?:is|was) (?:wrong|incorrect|false)\b"
    rf"|{COUNTED}(?:and )?(?:"
    rf"(?:an? |one )?(?:half|halves|{_any(ORDINALS.split())}s?)|(?:an?|one) quarter"
    rf"|{FIGURE}(?:(?<!one)s)?|minus|plus|einhalb|et demie?|y medi[ao]"
    rf"|squared|cubed|factorial|halved|doubled|tripled|point|divided|multiplied|mod|modulo"
    rf"|(?:times|over|under|percent of|to the) (?:{FIGURE}|{_any(ORDINALS.split())}|itself|[b-z]\b)"
    r"|(?:and|or|of) [b-z]\b"
    rf"|(?:more|less|fewer|greater) than (?:{FIGURE}|[b-z]\b)"
    r"|and (?:up|above|over|under|below|beyond|change|counting|a bit)|or (?:not|none|nothing|neither)"
    r"|(?:below|under) (?:zero|freezing|sea level)|over par|below$|mil|mio|mln|mn|bln|bil|bn|mrd|thou|tril"
    r"|trn|grand(?! \w)|score|tens|(?:in )?base|at (?:least|most)"
    r"|to the (?:power|nth)|if [b-z])\b)",
    re.IGNORECASE,
)
UNIT_WITH_POWER = re.compile(
    r"[\^²³·⋅]|\\(?:frac|cdot|degree|textdegree|text|mathrm)(?![a-zA-Z])| (?:squared|cubed)\b"
)
OPERATOR_AFTER = re.compile(
    rf"^ ?/ ?(?:$|{LONE_LETTER})|- ?(?:$|{LONE_LETTER})|^[ ,]*(?:\.\.|…)|^[xX]{LETTER}"
    "|^ ?[백천만억多余餘几幾]"
)
NOT_PUNCTUATION = set("_!*\\^·‰‱")


def plain_number_text(text):
    """ASCII digits, signs and spaces, `-` for every dash, `$` for every currency sign, no LaTeX spacing."""
    text = RUPEES.sub("$", text)
    text = text.translate({ord(char): ascii_char(char) for char in set(text)})
    if "\\" in text:
        text = text.replace("\\$", "$").replace("\\%", "%").replace("\\!", "")
        text = re.sub(r"(?<=\d)\\,(?=\d{3}(?!\d))", ",", text)
        text = re.sub(r"\^ ?\\circ(?![a-zA-Z])|\^ ?\{ ?\\circ ?\}", "°", text)
        text = TEXT_BEFORE.sub(r" \1", text)
        text = LATEX_SPACING.sub(" ", text)
    if "!" in text:
        text = re.sub(r"(?<=[^\W\d_]{3})!+", "", text)  # 42 pens!
    return EMPHASIS.sub(r"\1", text.replace("{,}", ",").replace("**", " ")).strip("* ")


def _is_ignored(char):
    """Letters, punctuation, spaces and pictures leave a value alone; operators, superscripts, ½ do not."""
    part_of_a_value = ("<super>", "<sub>", "<fraction>")
    if char in NOT_PUNCTUATION or unicodedata.decomposition(char).startswith(part_of_a_value):
        return False
    category = unicodedata.category(char)
    return char in " =$`~" or category[0] in "LPM" or category in ("So", "Cf")


def _is_cased(char):
    """Whether a letter beside a digit makes a name of the two, as in `x2`.

    Scripts without case (CJK, Arabic ...) write words and numbers without a space between.
    """
    return char.lower() != char.upper()


def _sign(before):
    """(sign, the text before it) of what stands before a number; None where that changes the value.

    None for "--5", "2 - 5" with a word for the 2, "x-5" and "x -5"; but "a profit of -$5" has a sign.
    """
    head = before.rstrip(" $~")
    sign = ""
    gap = before[len(head) :]
    if head.endswith(("+", "-")):
        sign = head[-1]
        body = head[:-1]
        head = body.rstrip(" $")
        is_letter = head[-1:].isalpha()
        is_operand = is_letter or head.endswith((")", "]", "}"))
        is_glued = body == head
        is_variable = is_letter and not head[-2:-1].isalpha()
        if head.endswith(("+", "-")) or (is_operand and (gap.startswith(" ") or is_glued or is_variable)):
            return None
    elif not gap and (_is_cased(head[-1:]) or head.endswith((".", ",", "…"))):
        return None
    unbracketed = head.rstrip("([{ $")
    if unbracketed != head and unbracketed.endswith(("+", "-")):
        return None  # "-(5)", "-(-5)"
    return None if head.endswith("(") and _is_cased(head[-2:-1]) else (sign, head)


def _is_factor(word):
    """Whether a word after a number is a function or letters that multiply it: 2 ab, 5 theta, 2sin(x)."""
    if not word.isascii() or word in UNITS or word.lower() in UNITS:
        return False
    if len(word) == 2:
        return word.lower() not in (*SMALL_WORDS, *UNIT_POWERS, "if", "or", "vs", "co", "ad", "bc")
    is_letters = len(word) == 3 and word.islower() and is_product([word])
    return is_letters or word in GREEK or word.lower() in FUNCTION_NAMES


def _is_unit(after, is_money):
    """Whether the text after a number leaves its value alone."""
    # The o of "5 o'clock" and the a of "5 a.m." are not lone letters.
    word = re.match(rf"([ {{]*)({LETTER}++)(?!'|\.\w)", after)
    if word and len(word[2]) == 1 and _is_cased(word[2]):
        is_article = word[1] and word[2] in "aAI"
        if not is_article and (is_money or word[2] not in UNIT_LETTERS):
            return False
    if word and is_money and word[2].lower() == "mm":  # $7mm: millions
        return False
    if word and len(word[2]) > 1 and _is_factor(word[2]):
        return False
    is_overlined = unicodedata.category(after[0])[0] == "M" if after else False  # a repeating decimal
    return not (is_overlined or OPERATOR_AFTER.search(after) or CHANGED_AFTER.match(GAP.sub(" ", after)))


def _without_unit(text):
    r"""Without a unit that has a power or a command: 48 ft², 42\text{ cm}^2, 12 \frac{\text{m}}{\text{s}}."""
    if not UNIT_WITH_POWER.search(text):
        return text
    inside = without_wrapping(text)
    literal = re.match(rf"[^\d\\{{}}]{{0,40}}{DECIMAL}", inside)
    after = inside[literal.end() :] if literal else ""
    if not 0 < len(after) <= 100:
        return text
    try:
        Unit(tokenise(after)).whole(units_only=True)
    except NotUnderstood:
        return text
    return literal[0]


def parse_number(text):
    """The one number that a text holds, exact; None where it holds none, several, or one that is changed.

    Ignored: currency and percent signs, commas between groups of three, words and units, `x =`, one closing
    full stop, LaTeX spacing. Changed are "7 million", "x - 5" and "2^5".
    """
    if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS:
        return Fraction(int(text))  # as nearly all are: the same in a tenth of the time
    plain = plain_number_text(_without_unit(text)) if isinstance(text, str) else ""
    span = FIRST_TO_LAST_DIGIT.search(plain)
    literal = LITERAL.fullmatch(span[0]) if span else None
    if literal is None or len(re.sub("[^0-9]", "", span[0])) > MAX_DIGITS:
        return None
    before, after = plain[: span.start()], plain[span.end() :]
    sign, head = _sign(before) or (None, "")
    if sign is None or "/" in head or not all(map(_is_ignored, set(head + after))):
        return None
    if SCALE.search(before) or SCALE.search(after) or CHANGED_BEFORE.search(GAP.sub(" ", before)[-40:]):
        return None
    if not _is_unit(after, "$" in before):
        return None
    numerator, denominator, exponent = (part and part.replace(",", "") for part in literal.groups())
    if (denominator and int(denominator) == 0) or (exponent and abs(int(exponent)) > MAX_DIGITS):
        return None
    value = Fraction(int(numerator), int(denominator)) if denominator else Fraction(span[0].replace(",", ""))
    return -value if sign == "-" else value


def last_number(text):
    """The last number of a text (lm-evaluation-harness's flexible-extract), or None; never for a reward."""
    upto = re.match(r".*\d", completion_text(text) or "", re.DOTALL)
    if upto is None:
        return None
    tail = upto[0][-3 * MAX_DIGITS :]  # what reaches further back has too many digits for a number
    *_, last = IN_TEXT.finditer(plain_number_text(tail))
    return (last[1] or "") + last[2]

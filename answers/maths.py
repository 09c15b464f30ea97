"""MATH answers: one spelling for each, their structure (set, interval, matrix ...), and comparing two."""

import itertools
import re
from fractions import Fraction

from answers.numbers import CHANGED_AFTER, SCALE, ascii_char, parse_number

UNICODE = {
    "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "≈": r"\approx ", "∈": r"\in ", "∪": r"\cup ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "∞": r"\infty ",
    "√": r"\sqrt ", "°": r"^\circ ", "π": r"\pi ", "θ": r"\theta ",
    "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
}  # fmt: skip
SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
SAME_COMMAND = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac",
    r"\dbinom": r"\binom", r"\tbinom": r"\binom", r"\varnothing": r"\emptyset", r"\infin": r"\infty",
    r"\leq": r"\le", r"\geq": r"\ge", r"\neq": r"\ne", r"\leqslant": r"\le", r"\geqslant": r"\ge",
    r"\lbrace": r"\{", r"\rbrace": r"\}", r"\lbrack": "[", r"\rbrack": "]",
}  # fmt: skip

# What does not count: size commands, degree, percent and currency signs, spaces.
GONE = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|[bB]igg?[lr]?)(?![a-zA-Z])|\\hspace\{[^{}]*\}"
    r"|\^ ?\{? ?\\circ ?\}?|\\degree(?![a-zA-Z])|\\text\{ ?degrees?\}|(?<!\\)\\[!$%]|[$%]"
)
SPACE = re.compile(r"\\(?:quad|qquad|enspace|thinspace)(?![a-zA-Z])|(?<!\\)\\[,;: ]|~|\s+")
# The degree sign counts for an angle: \sin 30^\circ is not \sin 30.
TRIG_DEGREES = re.compile(
    r"((?<![a-zA-Z])\\?(?:sin|cos|tan|cot|sec|csc)(?:\^\{?-?\d\}?)? ?(?:\\left)? ?[({]? ?)"
    r"(-?\d+(?:\.\d+)?) ?(?:\^ ?\{ ?\\circ ?\}|(?:\^ ?\\circ|\\degree)(?![a-zA-Z]))"
)

TEXT = r"\\(?:text|mbox|textbf|textit|textrm|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}"
FUNCTIONS = r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)|ln|log|exp|sqrt|pi|infty"
GREEK = r"\\(?:alpha|beta|gamma|delta|theta|lambda|mu|rho|sigma|tau|phi|varphi|psi|omega)(?![a-zA-Z])"
LETTER = rf"(?:[a-zA-Z]|{GREEK})"

# Words after a value: 12 dollars, 12\text{ cm}, 12\mbox{ inches}^2. NO_UNIT: 42 \text{ or 41} holds no unit.
UNIT = re.compile(
    rf"(?:(?<=[\da-zA-Z}})])\s*{TEXT}"
    rf"|(?<=[\d}}\)]) (?!(?:and|or|{FUNCTIONS})\b)[a-zA-Z]{{2,}}(?: [a-zA-Z]{{2,}})*\.?)(?:\^\{{?\d\}}?)?$"
)
NO_UNIT = re.compile(r"\b(?:and|or|not|times|plus|minus|over)\b|\d(?<!\^\d)(?<!\^\{\d)", re.IGNORECASE)

# The left side of x = 7, x_1 = 7, P(A) = 1/3, AB = 7, \vec{v} = ..., m\angle A = 40, (x,y) = (1,2), x \in ...
NAME = (
    rf"[a-zA-Z](?:_\{{?\w+\}}?|\([a-zA-Z0-9]+\))?|[A-Z]{{2,3}}|{GREEK}|\\(?:mathbf|vec) ?\{{[a-zA-Z]\}}"
    rf"|(?:m ?)?\\angle ?[a-zA-Z]{{1,3}}|\((?:{LETTER}, ?)+{LETTER}\)"
)
NAMED = re.compile(rf"^(?:{NAME}) ?= ?|^[a-zA-Z] ?\\in ?")

MATRIX = re.compile(r"\\begin\{([pbBv]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}")
MATRIX_ROW_END = re.compile(r"\\\\(?:\[[\d.]+ ?[a-z]{2}\])?")
AND_OR = re.compile(
    r"(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]| (?:more|less|fewer|greater)\b)"
    rf"|{TEXT.replace('([^{}]*)', ' ?(?:and|or) ?')}"
)
PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])")
RELATION = re.compile(r"(<=|>=|<|>|\\(?:le|ge|lt|gt|ne)(?![a-zA-Z]))")
ORDER = {
    "<": "<", ">": ">", "<=": "<=", ">=": ">=",
    r"\lt": "<", r"\gt": ">", r"\le": "<=", r"\ge": ">=", r"\ne": "!=",
}  # fmt: skip
APPROXIMATED = re.compile(r" ?\\approx ?-?\d+(?:\.\d+)?$")
OPENING, CLOSING = {"(": ")", "[": "]", "{": "}"}, set(")]}")
REALS = "()", [("value", r"-\infty"), ("value", r"\infty")]

REPEATING = re.compile(r"([-+]?)(\d{0,50})\.(\d{0,50})\\overline\{(\d{1,50})\}")
BASE = re.compile(r"([0-9][0-9A-Fa-f]*)_\{?\(?(\d{1,2})\)?\}?$")
TWO_NUMBERS = re.compile(r"(?<![_^\d])\d+ \d")
SCALED = re.compile(rf"\d ?(?:{SCALE.pattern}|squared|cubed|factorial)", re.IGNORECASE)

SUPERSCRIPT_RUN = re.compile("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
DELIMITERS = ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")
DIGITS_GROUPED = r"(?<![\d.])\d{1,3}(?:(?:\\,|\{,\})\d{3})+(?!\d)"
ONE_ARGUMENT = rf"\\(frac|sqrt|binom)(?: ?(\d|\\pi(?![a-zA-Z])|{GREEK})| ([a-zA-Z]))"
SECOND_ARGUMENT = rf"(\\(?:frac|binom)\{{[^{{}}]*\}}) ?(\d|[a-zA-Z]|\\pi(?![a-zA-Z])|{GREEK})(?![^{{]*\}}\{{)"
REWRITES = (  # applied in this order: pattern, replacement
    (r",\\! ?", ","),
    (DIGITS_GROUPED, lambda match: re.sub(r"\D", "", match[0])),  # 1\,000 and 10{,}000
    (TRIG_DEGREES, r"\1\\frac{\2\\pi}{180}"),
    (GONE, ""),
    (SPACE, " "),
    (r"\binfinity\b", r"\\infty"),
    (r"(?<=\d) ?[xX] ?(?=10 ?\^)", r"\\times "),  # 6.7 x 10^-5
    (r"\^ ?(-\d+|\d{2,})", r"^{\1}"),
    (r"\\(?:mathrm|text) ?\{([ie])\}", r"\1"),
    (r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"(?:\\text ?\{|\()(\d\w*)[)}] ?_|(\d\w*),? (?:in )?base (?=\d)", r"\1\2_"),  # (204)_5 and 204 base 5
    (r"(?<=[)\]}]) ?U ?(?=[(\[\\])", r"\\cup "),
    (r"\\[a-zA-Z]+", lambda match: SAME_COMMAND.get(match[0], match[0])),
    (ONE_ARGUMENT, r"\\\1{\2\3}"),  # \frac12, \frac1{72}, \sqrt2, \frac\pi4
    (SECOND_ARGUMENT, r"\1{\2}"),
    (r"(?<![a-zA-Z])\\?sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(^|[(\[{,]) ?\+ ?", r"\1"),
    (rf"(?<![\\a-zA-Z])({FUNCTIONS})(?![a-zA-Z])", r"\\\1"),
    (r"\\frac ?\{", r"\\frac{"),
    (r"\*", r"\\cdot "),
)


def clean(text):
    """One spelling for what may be spelt in many ways."""
    text = SUPERSCRIPT_RUN.sub(lambda match: f"^{{{match[0].translate(SUPERSCRIPTS)}}}", text)
    text = re.sub(r"√ ?(\d+)", r"\\sqrt{\1}", text)
    text = "".join(UNICODE.get(c) or ascii_char(c) for c in text).replace("**", "^")
    text = text.strip().strip("*").strip()
    for opening, closing in DELIMITERS:
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)]
    box = re.fullmatch(r"\\f?box(?:ed)?\{(.*)\}", text.strip())
    text = box[1] if box else text
    for pattern, replacement in REWRITES:
        text = re.sub(pattern, replacement, text)
    text = re.sub(r"(?<!\.)\.$", "", text.strip()).strip()
    return re.sub(r"\s+", " ", UNIT.sub(_unit, text)).strip()


def _unit(match):
    """Nothing; but the words where they follow no value or change it: (B) or (C), 4 or 5, 5 million."""
    words = re.sub(TEXT, r" \1", match[0])
    before = re.sub(TEXT, r"\1", match.string[: match.start()])
    is_value = re.search(r"\d|\\[a-zA-Z]", before)
    changes = SCALE.search(words) or CHANGED_AFTER.match(words) or NO_UNIT.search(words)
    return words if changes or not is_value else ""


def _squeezed(text):
    """Without spaces, but for one that ends a command or is between two numbers."""
    text = re.sub(r"(?<=\d) (?=\d)|(\\[a-zA-Z]+) (?=[a-zA-Z])", lambda match: (match[1] or "") + "\0", text)
    return re.sub(r"\s+", "", text).replace("\0", " ")


def _split(text, separator):
    """The stripped parts between separators (a character or a command) that are outside of all brackets."""
    is_command = separator.startswith("\\")
    parts = []
    depth = start = i = 0
    while i < len(text):
        end = i + len(separator)
        if (
            depth == 0
            and text.startswith(separator, i)
            and not (is_command and text[end : end + 1].isalpha())
        ):
            parts.append(text[start:i])
            start = i = end
            continue
        if text[i] == "\\" and text[i + 1 : i + 2] in ("{", "}"):
            i += 1
        depth += (text[i] in OPENING) - (text[i] in CLOSING)
        i += 1
    return [part.strip() for part in (*parts, text[start:])]


def _enclosed(text):
    """(opening, inside, closing) where one pair of brackets holds the whole; None otherwise."""
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return ("{", text[2:-2].strip(), "}")
    if text[:1] not in ("(", "[") or text[-1:] not in (")", "]"):
        return None
    depth = 0
    for i, char in enumerate(text):
        depth += (char in OPENING) - (char in CLOSING)
        if depth == 0:
            return (text[0], text[1:-1].strip(), text[-1]) if i == len(text) - 1 else None
    return None


def structure(text, depth=0):
    """(kind, parts) of a cleaned text; the kind says what the parts are.

    value and word: the text; equation: its sides; relation: (sides, signs); set: structures; named: a dict of
    them; matrix: rows of them; an opening and a closing bracket such as "[)": structures in their order.
    """
    if depth > 4:
        return "value", text
    text = _without_name(_without_wrapping(text))
    matrix = _matrix(text, depth)
    if matrix is not None:
        return matrix
    text = AND_OR.sub(",", text)
    for read in (_union, _known_set, _list, _in_brackets, _plus_minus, _words, _relation):
        parts = read(text, depth)
        if parts is not None:
            return parts
    sides = _split(text, "=")
    return ("equation", sides) if len(sides) > 1 else ("value", text)


def _without_wrapping(text):
    r"""Without \text{} around a list, braces around the whole, or decimals after an exact value.

    Of \frac{1}{3} \approx 0.33 the decimals go; 42 \approx 41 stays as it is.
    """
    listed = re.fullmatch(TEXT, text)
    text = listed[1].strip() if listed and re.search(", |\\band\\b", listed[1]) else text
    grouped = re.fullmatch(r"\{((?:[^{}\\]|\\.|\{[^{}]*\})*+)\}", text)
    if grouped:
        return grouped[1].strip()
    exact = APPROXIMATED.sub("", text)
    return exact if "\\" in exact else text


def _without_name(text):
    r"""7 of `x = 7`, (0,3] of `x \in (0,3]`; an equation such as `y = 3x - 1` stays whole."""
    bare = NAMED.sub("", text, count=1)
    name = text[: len(text) - len(bare)]
    states_more = re.search(r"[=<>]|\\[lg]e\b", bare) and r"\in" not in name
    is_equation = _has_variable(bare) and r"\in" not in text
    return bare.strip() if name and not states_more and not is_equation else text


def _matrix(text, depth):
    matrix = MATRIX.fullmatch(text)
    if matrix is None:
        return None
    rows = [row.strip() for row in MATRIX_ROW_END.split(matrix[2]) if row.strip()]
    kind = "determinant" if matrix[1] == "vmatrix" else "matrix"
    return kind, [("row", [structure(cell, depth + 1) for cell in row.split("&")]) for row in rows]


def _union(text, depth):
    parts = _split(text, r"\cup")
    return ("set", [structure(part, depth + 1) for part in parts]) if len(parts) > 1 else None


def _known_set(text, depth):
    if text in (r"\emptyset", r"\{\}", r"\{ \}"):
        return "set", []
    return REALS if text in (r"\mathbb{R}", r"\mathbb R") else None


def _list(text, depth):
    """`x=1, y=2` has names, `1, 2` is a set; 1,234 is a number."""
    parts = [part for part in _split(text, ",") if part]
    if len(parts) < 2:
        return None
    names = [name and name[0].rstrip(" =") for name in map(NAMED.match, parts)]
    if None not in names and len(set(names)) == len(names):
        return "named", {name: structure(part, depth + 1) for name, part in zip(names, parts, strict=True)}
    return ("set", _members(parts, depth)) if parse_number(text) is None else None


def _in_brackets(text, depth):
    """A set in braces, an interval or a tuple; round brackets around one thing are left out."""
    enclosed = _enclosed(text)
    if enclosed is None:
        return None
    opening, inside, closing = enclosed
    parts = [part for part in _split(inside, ",") if part]
    if opening == "{":
        return "set", _members(parts, depth)
    if len(parts) > 1:
        return opening + closing, [structure(part, depth + 1) for part in parts]
    if opening + closing == "()" or inside.startswith(r"\begin{"):
        return structure(inside, depth + 1)
    return None


def _plus_minus(text, depth):
    return ("set", _members([text], depth)) if len(PLUS_MINUS.findall(text)) == 1 else None


def _words(text, depth):
    """Words without case and article, where the text holds nothing else: North, an ellipse, (B)."""
    words = re.sub(TEXT, r"\1", text).strip(" ()")
    is_long = re.fullmatch(r"(?=.*[a-zA-Z]{3})[a-zA-Z][a-zA-Z' -]{3,}", words)
    if not is_long and (words == text or not re.fullmatch(r"[a-zA-Z' -]+", words)):
        return None
    words = re.sub("^(?:an?|the) (?=...)", "", " ".join(words.lower().split()))
    return REALS if words in ("all real numbers", "all reals") else ("word", words)


def _relation(text, depth):
    sides = [part.strip() for part in RELATION.split(text)]
    return _interval(sides[::2], [ORDER[sign] for sign in sides[1::2]], depth) if len(sides) > 1 else None


def _interval(sides, signs, depth):
    """What a variable may be, as an interval: x > 5, 1 < x <= 3. Otherwise the relation, with < for >."""
    if signs[0][0] == ">":
        sides, signs = sides[::-1], [sign.replace(">", "<") for sign in signs[::-1]]
    relation = "relation", (tuple(sides), tuple(signs))
    is_letter = [re.fullmatch("[a-zA-Z]", side) is not None for side in sides]
    if any(sign[0] != "<" for sign in signs) or sum(is_letter) != 1:
        return relation
    at = is_letter.index(True)
    low, high = sides[:at], sides[at + 1 :]
    if len(low) > 1 or len(high) > 1 or any(map(_has_variable, low + high)):
        return relation
    opening = "[" if low and signs[0] == "<=" else "("
    closing = "]" if high and signs[-1] == "<=" else ")"
    ends = low[0] if low else r"-\infty", high[0] if high else r"\infty"
    return opening + closing, [structure(end, depth + 1) for end in ends]


def _members(parts, depth):
    """The parts of a set, with both values of each plus-minus."""
    values = []
    for part in parts:
        if len(PLUS_MINUS.findall(part)) == 1:
            plus = re.sub(r"(^|[{(]) ?\+ ?", r"\1", PLUS_MINUS.sub("+", part))
            values += [plus, PLUS_MINUS.sub("-", part)]
        else:
            values.append(part)
    return [structure(value, depth + 1) for value in values]


def _has_variable(text):
    """Whether a letter stands for an unknown: not one of a command, nor e or i."""
    return bool(re.search(r"[a-df-hj-zA-Z]", re.sub(r"\\(?:begin|end)\{\w+\}|\\[a-zA-Z]+", "", text)))


# Groups: sign, whole, numerator, denominator; whole is empty for a plain fraction.
LATEX_FRACTION = re.compile(r"([-+]?)()\\frac\{([-+]?\d{1,50})\}\{(\d{1,50})\}")
LATEX_MIXED = re.compile(r"([-+]?)(\d{1,50})\\frac\{(\d{1,50})\}\{(\d{1,50})\}")
SLASH_FRACTION = re.compile(r"([-+]?)() ?(\d{1,50}) ?/ ?(\d{1,50})")
SLASH_MIXED = re.compile(r"([-+]?)(\d{1,50}) (\d{1,50})/(\d{1,50})")


def number(text):
    """A Fraction where the text is one number or a numeral of any base (204_5), None otherwise."""
    squeezed = _squeezed(text)
    based = BASE.fullmatch(squeezed)
    if based:
        try:
            return Fraction(int(based[1], int(based[2]))) if len(based[1]) < 100 else None
        except ValueError:
            return None
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", squeezed)
    latex = LATEX_FRACTION.fullmatch(plain) or LATEX_MIXED.fullmatch(plain)
    fraction = latex or SLASH_FRACTION.fullmatch(text) or SLASH_MIXED.fullmatch(text)
    if fraction and int(fraction[4]):
        sign, whole, numerator, denominator = fraction.groups()
        value = int(whole or 0) + Fraction(int(numerator), int(denominator))
        return -value if sign == "-" else value
    repeating = REPEATING.fullmatch(plain)
    if repeating:
        sign, whole, fixed, cycle = repeating.groups()
        all_digits, head = int(whole + fixed + cycle), int(whole + fixed or 0)
        value = Fraction(all_digits - head, 10 ** len(fixed) * (10 ** len(cycle) - 1))
        return -value if sign == "-" else value
    return parse_number(text)


def same(a, b, ask):
    """Whether two structures are equal; `ask(kind, x, y)` decides between single expressions."""
    (kind, left), (other, right) = a, b
    if kind == other:
        return COMPARERS.get(kind, _same_in_order)(left, right, ask)
    if {kind, other} == {"value", "set"}:  # an element, and a set of one element
        value, members = (a, right) if kind == "value" else (b, left)
        return len(members) == 1 and same(value, members[0], ask)
    if {kind, other} == {"value", "word"}:  # a choice: C, and (C)
        return left.isalpha() and left.lower() == right.lower()
    if {kind, other} == {"named", "set"}:  # x=1, x=2 and 1, 2
        left, right = (list(x.values()) if isinstance(x, dict) else x for x in (left, right))
        return _same_set(left, right, ask)
    return False


def _same_in_order(left, right, ask):
    return len(left) == len(right) and all(same(x, y, ask) for x, y in zip(left, right, strict=True))


def _same_set(left, right, ask):
    if len(left) > 20 or len(right) > 20:
        return False
    rest = list(right)
    for part in left:
        match = next((i for i, other in enumerate(rest) if same(part, other, ask)), None)
        if match is None:
            return False
        del rest[match]
    return not rest


def _same_named(left, right, ask):
    return left.keys() == right.keys() and all(same(left[name], right[name], ask) for name in left)


def _same_word(left, right, ask):
    return left == right


def _same_equation(left, right, ask):
    if _same_text(left, right):
        return True
    return len(left) == len(right) == 2 and ask("equation", left, right)


def _same_relation(left, right, ask):
    """Chains such as a < b <= c, compared link by link."""
    (sides, signs), (other_sides, other_signs) = left, right
    if signs != other_signs or len(sides) != len(other_sides):
        return False
    links = zip(itertools.pairwise(sides), itertools.pairwise(other_sides), strict=True)
    return all(_same_text(one, two) or ask("relation", one, two) for one, two in links)


def _same_text(sides, others):
    return [_squeezed(side) for side in sides] == [_squeezed(side) for side in others]


def _same_value(left, right, ask):
    is_choice = re.fullmatch("[a-zA-Z]{2,3}", left) and left.lower() == right.lower()
    if is_choice or _same_text([left], [right]):
        return left != ""
    if len(left) == len(right) == 1 and (left + right).isalpha():
        return False  # a and A are two things
    numbers = [number(left), number(right)]
    if None not in numbers:
        return numbers[0] == numbers[1]
    if any(TWO_NUMBERS.search(text) or SCALED.search(text) for text in (left, right)):
        return False
    return ask("value", left, right)


COMPARERS = {
    "value": _same_value,
    "word": _same_word,
    "set": _same_set,
    "named": _same_named,
    "equation": _same_equation,
    "relation": _same_relation,
}  # of every other kind the parts are compared in their order

"""MATH answers: one spelling for what may be spelt in many ways, and the structure of an answer (set, interval, matrix, equation, value)."""

import itertools
import re
from fractions import Fraction

from answers.numbers import CHANGED_AFTER, SCALE, ascii_char, parse_number

UNICODE = {"×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "∪": r"\cup ", "±": r"\pm ", "≤": r"\le ",
           "≥": r"\ge ", "≠": r"\ne ", "∈": r"\in ", "°": r"^\circ ", "≈": r"\approx ", "ℝ": r"\mathbb{R}", "θ": r"\theta ",
           "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
           "∅": r"\emptyset "}  # fmt: skip


TRIG_DEGREES = re.compile(r"((?<![a-zA-Z])\\?(?:sin|cos|tan|cot|sec|csc)(?:\^\{?-?\d\}?)? ?(?:\\left)? ?[({]? ?)"
                          r"(-?\d+(?:\.\d+)?) ?(?:\^ ?\{ ?\\circ ?\}|(?:\^ ?\\circ|\\degree)(?![a-zA-Z]))")  # fmt: skip


SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


GONE = re.compile(r"\\(?:left|right|displaystyle|textstyle|limits|[bB]igg?[lr]?)(?![a-zA-Z])|\\hspace\{[^{}]*\}|\^ ?\{? ?\\circ ?\}?|\\degree(?![a-zA-Z])"
                  r"|\\text\{ ?degrees?\}|(?<!\\)\\[!$%]|[$%]")  # fmt: skip


SPACE = re.compile(r"\\(?:quad|qquad|enspace|thinspace)(?![a-zA-Z])|(?<!\\)\\[,;: ]|~|\s+")


TEXT = r"\\(?:text|mbox|textbf|textit|textrm|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}"


SAME = {r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\lbrace": r"\{", r"\rbrace": r"\}", r"\leq": r"\le", r"\geq": r"\ge",
        r"\neq": r"\ne", r"\leqslant": r"\le", r"\geqslant": r"\ge", r"\dbinom": r"\binom", r"\tbinom": r"\binom",
        r"\varnothing": r"\emptyset", r"\lbrack": "[", r"\rbrack": "]", r"\infin": r"\infty"}  # fmt: skip


FUNCTIONS = r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)|ln|log|exp|sqrt|pi|infty"


AFTER_VALUE = r"(?<=[\d}\)])"


POWER = r"(?:\^\{?\d\}?)?$"


UNIT = re.compile(
    rf"(?:(?<=[\da-zA-Z}})])\s*{TEXT}|{AFTER_VALUE} (?!(?:and|or|{FUNCTIONS})\b)[a-zA-Z]{{2,}}(?: [a-zA-Z]{{2,}})*\.?)"
    + POWER
)


NO_UNIT = re.compile(
    r"\b(?:and|or|not|times|plus|minus|over)\b|\d(?<!\^\d)(?<!\^\{\d)", re.IGNORECASE
)  # 42 \text{ or 41}


GREEK = r"\\(?:alpha|beta|gamma|delta|theta|lambda|mu|rho|sigma|tau|phi|varphi|psi|omega)(?![a-zA-Z])"


LETTER = rf"(?:[a-zA-Z]|{GREEK})"


NAME = (rf"[a-zA-Z](?:_\{{?\w+\}}?|\([a-zA-Z0-9]+\))?|[A-Z]{{2,3}}|{GREEK}|\\(?:mathbf|vec) ?\{{[a-zA-Z]\}}|(?:m ?)?\\angle ?[a-zA-Z]{{1,3}}"
        rf"|\((?:{LETTER}, ?)+{LETTER}\)")  # fmt: skip


NAMED = re.compile(rf"^(?:{NAME}) ?= ?|^[a-zA-Z] ?\\in ?")


PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])")


MIXED = re.compile(r"(?<![\w.}^])(\d+) ?\\frac\{(\d+)\}\{(\d+)\}")


DECIMAL = re.compile(r"(?<![\w.])(\d*)\.(\d+)(?![\w.])")


BASE = re.compile(r"([0-9][0-9A-Fa-f]*)_\{?\(?(\d{1,2})\)?\}?$")


PAIR = re.compile(r"[(\[][^()]*,[^()]*[)\]]")  # (1,234) has two members


MISREAD = re.compile(r"[\d)}]_|\d\{|!!")  # 204_5 is read as 204, 2{3} as 5


TWO_NUMBERS = re.compile(r"(?<![_^\d])\d+ \d")


SCALED = re.compile(rf"\d ?(?:{SCALE.pattern}|squared|cubed|factorial)", re.IGNORECASE)


REPEATING = re.compile(r"([-+]?)(\d{0,50})\.(\d{0,50})\\overline\{(\d{1,50})\}")


SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?!\w)")


RELATION = re.compile(r"(<=|>=|<|>|\\(?:le|ge|lt|gt|ne)(?![a-zA-Z]))")


ORDER = {
    "<": "<",
    ">": ">",
    "<=": "<=",
    ">=": ">=",
    r"\le": "<=",
    r"\ge": ">=",
    r"\lt": "<",
    r"\gt": ">",
    r"\ne": "!=",
}


APPROXIMATED = re.compile(r" ?\\approx ?-?\d+(?:\.\d+)?$")


REALS = "()", [("value", r"-\infty"), ("value", r"\infty")]


# What math-verify is asked about. Of other text it reads a part: of "41 \to \frac{1}{2}", "6:1", "41 \boxed{42}" or "x'" one number or letter.
READABLE = re.compile(r"(?:[\da-zA-Z+*/^_{}()\[\]|!,=<> -]|(?<=\d)\.|\.(?=\d)|\\[a-zA-Z]+)+")


COMMANDS = set(
    "frac sqrt binom pi cdot times div pm mp infty circ log ln exp sum prod int lfloor rfloor lceil rceil lvert rvert vert max min gcd mod "
    "overline bar sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh alpha beta gamma delta epsilon varepsilon zeta "
    "eta theta kappa lambda mu nu xi rho sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell".split()
)


FACTOR = re.compile(r"((?<![\w^_.])\d+(?:\.\d+)?|\)|\\binom\{[^{}]*\}\{[^{}]*\}) ?(?=\()")


OPENING, CLOSING = {"(": ")", "[": "]", "{": "}"}, set(")]}")


def clean(text):
    """One spelling for what may be spelt in many ways."""
    text = re.sub(
        f"[{''.join(map(chr, SUPERSCRIPTS))}]+",
        lambda found: f"^{{{found[0].translate(SUPERSCRIPTS)}}}",
        text,
    )
    text = re.sub(r"√ ?(\d+)", r"\\sqrt{\1}", text)
    text = "".join(UNICODE.get(c) or ascii_char(c) for c in text).replace("**", "^")
    text = text.strip().strip("*").strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)]
    box = re.fullmatch(r"\\f?box(?:ed)?\{(.*)\}", text.strip())
    text = re.sub(r",\\! ?", ",", box[1] if box else text)
    text = re.sub(
        r"(?<![\d.])\d{1,3}(?:(?:\\,|\{,\})\d{3})+(?!\d)", lambda found: re.sub(r"\D", "", found[0]), text
    )
    text = TRIG_DEGREES.sub(r"\1\\frac{\2\\pi}{180}", text)  # elsewhere the sign does not count
    text = re.sub(r"\binfinity\b", r"\\infty", SPACE.sub(" ", GONE.sub("", text)))
    text = re.sub(
        r"\^ ?(-\d+|\d{2,})", r"^{\1}", re.sub(r"(?<=\d) ?[xX] ?(?=10 ?\^)", r"\\times ", text)
    )  # 6.7 x 10^-5
    text = re.sub(r"\\(?:mathrm|text) ?\{([ie])\}", r"\1", text)
    text = re.sub(r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}", r"\\binom{\1}{\2}", text)
    text = re.sub(
        r"(?:\\text ?\{|\()(\d\w*)[)}] ?_|(\d\w*),? (?:in )?base (?=\d)",
        lambda found: (found[1] or found[2]) + "_",
        text,
    )
    text = re.sub(r"(?<=[)\]}]) ?U ?(?=[(\[\\])", r"\\cup ", text)
    text = re.sub(r"\\[a-zA-Z]+", lambda found: SAME.get(found[0], found[0]), text)
    text = re.sub(
        rf"\\(frac|sqrt|binom)(?: ?(\d|\\pi(?![a-zA-Z])|{GREEK})| ([a-zA-Z]))", r"\\\1{\2\3}", text
    )  # \frac12, \frac1{72}, \sqrt2, \frac\pi4
    text = re.sub(
        rf"(\\(?:frac|binom)\{{[^{{}}]*\}}) ?(\d|[a-zA-Z]|\\pi(?![a-zA-Z])|{GREEK})(?![^{{]*\}}\{{)",
        r"\1{\2}",
        text,
    )
    text = re.sub(r"(?<![a-zA-Z])\\?sqrt ?\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(^|[(\[{,]) ?\+ ?", r"\1", text)
    text = re.sub(rf"(?<![\\a-zA-Z])({FUNCTIONS})(?![a-zA-Z])", r"\\\1", text)
    text = re.sub(r"\\frac ?\{", r"\\frac{", text).replace("*", r"\cdot ")
    text = re.sub(
        r"(?<=\d) ?, ?(?=\d{3}\b)", lambda found: "," if found[0] == "," else found[0], text
    ).strip()
    text = re.sub(r"(?<!\.)\.$", "", text).strip()
    return re.sub(r"\s+", " ", UNIT.sub(_unit, text)).strip()


def _unit(found):
    """Nothing, or the words themselves where they make another value, or where no value stands before them: 5 million, 4 squared, 4 or 5, (B) or (C)."""
    words = re.sub(TEXT, r" \1", found[0])
    is_value = re.search(r"\d|\\[a-zA-Z]", re.sub(TEXT, lambda text: text[1], found.string[: found.start()]))
    return (
        words
        if not is_value or SCALE.search(words) or CHANGED_AFTER.match(words) or NO_UNIT.search(words)
        else ""
    )


def _squeezed(text):
    """Without spaces, but for one that ends a command or stands between two numbers."""
    text = re.sub(r"(?<=\d) (?=\d)|(\\[a-zA-Z]+) (?=[a-zA-Z])", lambda found: (found[1] or "") + "\0", text)
    return re.sub(r"\s+", "", text).replace("\0", " ")


def _split(text, separator):
    """Cut at a separator (a character or a command) outside of all brackets."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        if (
            text.startswith(separator, i)
            and depth == 0
            and not (
                separator.startswith("\\") and text[i + len(separator) : i + len(separator) + 1].isalpha()
            )
        ):
            parts.append(text[start:i])
            start = i = i + len(separator)
            continue
        if text[i] == "\\" and text[i + 1 : i + 2] in ("{", "}"):
            i += 1
        depth += (text[i] in OPENING) - (text[i] in CLOSING)
        i += 1
    return [part.strip() for part in (*parts, text[start:])]


def _enclosed(text):
    """(opening, inside, closing) where one pair of brackets holds the whole; None else."""
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


def _exactly(text):
    r"""Without the decimals that follow an exact value: \frac{1}{3} \approx 0.33 is \frac{1}{3}, but 42 \approx 41 stays."""
    exact = APPROXIMATED.sub("", text)
    return exact if "\\" in exact else text


def structure(text, depth=0):
    """("value" | "word" | "equation" | "relation" | "set" | "union" | "matrix" | opening and closing bracket, parts)."""
    if depth > 4:
        return "value", text
    listed = re.fullmatch(TEXT, text)
    text = listed[1].strip() if listed and re.search(", |\\band\\b", listed[1]) else text
    grouped = re.fullmatch(r"\{((?:[^{}\\]|\\.|\{[^{}]*\})*+)\}", text)
    text = grouped[1].strip() if grouped else _exactly(text)
    bare = NAMED.sub("", text, count=1)
    if (
        bare != text
        and (r"\in" in text[: len(text) - len(bare)] or not re.search(r"[=<>]|\\[lg]e\b", bare))
        and (r"\in" in text or not _has_variable(bare))
    ):
        text = bare.strip()
    matrix = re.fullmatch(r"\\begin\{([pbBv]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}", text)
    if matrix:
        rows = [row.strip() for row in re.split(r"\\\\(?:\[[\d.]+ ?[a-z]{2}\])?", matrix[2]) if row.strip()]
        return f"matrix {'v' if matrix[1] == 'vmatrix' else ''}", [
            ("row", [structure(cell, depth + 1) for cell in row.split("&")]) for row in rows
        ]
    text = re.sub(
        rf"(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]| (?:more|less|fewer|greater)\b)|{TEXT.replace('([^{}]*)', ' ?(?:and|or) ?')}",
        ",",
        text,
    )
    union = _split(text, r"\cup")
    if len(union) > 1:
        return "set", [structure(part, depth + 1) for part in union]
    if text in (r"\emptyset", r"\{\}", r"\{ \}"):
        return "set", []
    if text in (r"\mathbb{R}", r"\mathbb R"):
        return REALS
    listed = [part for part in _split(text, ",") if part]
    names = [name and name[0].rstrip(" =") for name in map(NAMED.match, listed)]
    if len(listed) > 1 and None not in names and len(set(names)) == len(names):  # x=1, y=2
        return "named", {name: structure(part, depth + 1) for name, part in zip(names, listed, strict=True)}
    if len(listed) > 1 and parse_number(text) is None:
        return "set", _members(listed, depth)
    enclosed = _enclosed(text)
    if enclosed:
        opening, inside, closing = enclosed
        parts = [part for part in _split(inside, ",") if part]
        if opening == "{":
            return "set", _members(parts, depth)
        if len(parts) > 1:
            return f"{opening}{closing}", [structure(part, depth + 1) for part in parts]
        if opening + closing == "()" or inside.startswith(r"\begin{"):
            return structure(inside, depth + 1)
    if len(PLUS_MINUS.findall(text)) == 1:
        return "set", _members([text], depth)
    word = re.sub(TEXT, r"\1", text).strip(" ()")
    if re.fullmatch(r"(?=.*[a-zA-Z]{3})[a-zA-Z][a-zA-Z' -]{3,}", word) or (
        word != text and re.fullmatch(r"[a-zA-Z' -]+", word)
    ):
        word = re.sub("^(?:an?|the) (?=...)", "", " ".join(word.lower().split()))
        return REALS if word in ("all real numbers", "all reals") else ("word", word)
    sides = [part.strip() for part in RELATION.split(text)]
    if len(sides) > 1:
        return _interval(sides[::2], [ORDER[sign] for sign in sides[1::2]], depth)
    sides = _split(text, "=")
    return ("equation", sides) if len(sides) > 1 else ("value", text)


def _interval(sides, signs, depth):
    """What a variable may be, as an interval where the relation says it: x > 5, 1 < x <= 3; else the relation, all signs turned to < and <=."""
    if signs[0][0] == ">":
        sides, signs = sides[::-1], [sign.replace(">", "<") for sign in signs[::-1]]
    is_letter = [re.fullmatch("[a-zA-Z]", side) is not None for side in sides]
    if (
        any(sign[0] != "<" for sign in signs)
        or sum(is_letter) != 1
        or any(_has_variable(s) for s, letter in zip(sides, is_letter, strict=True) if not letter)
    ):
        return "relation", (tuple(sides), tuple(signs))
    at = is_letter.index(True)
    low, high = sides[:at], sides[at + 1 :]
    if len(low) > 1 or len(high) > 1:
        return "relation", (tuple(sides), tuple(signs))
    opening = "[" if low and signs[0] == "<=" else "("
    closing = "]" if high and signs[-1] == "<=" else ")"
    return opening + closing, [
        structure(low[0] if low else r"-\infty", depth + 1),
        structure(high[0] if high else r"\infty", depth + 1),
    ]


def _members(parts, depth):
    """The parts of a set, with both values of each plus-minus."""
    values = []
    for part in parts:
        once = len(PLUS_MINUS.findall(part)) == 1
        values += (
            [re.sub(r"(^|[{(]) ?\+ ?", r"\1", PLUS_MINUS.sub("+", part)), PLUS_MINUS.sub("-", part)]
            if once
            else [part]
        )
    return [structure(value, depth + 1) for value in values]


def _has_variable(text):
    """Whether a letter stands for an unknown: not one of a command, nor e or i."""
    return bool(re.search(r"[a-df-hj-zA-Z]", re.sub(r"\\(?:begin|end)\{\w+\}|\\[a-zA-Z]+", "", text)))


def number(text):
    """A Fraction where the text is a numeral (of any base) or one number, None else."""
    based = BASE.fullmatch(_squeezed(text))
    if based:
        try:
            return Fraction(int(based[1], int(based[2]))) if len(based[1]) < 100 else None
        except ValueError:
            return None
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", _squeezed(text))
    fraction = re.fullmatch(r"([-+]?)\\frac\{([-+]?\d{1,50})\}\{(\d{1,50})\}", plain) or re.fullmatch(
        r"([-+]?) ?(\d{1,50}) ?/ ?(\d{1,50})", text
    )
    if fraction and int(fraction[3]):
        return Fraction(int(fraction[2]), int(fraction[3])) * (-1 if fraction[1] == "-" else 1)
    mixed = re.fullmatch(r"([-+]?)(\d{1,50})\\frac\{(\d{1,50})\}\{(\d{1,50})\}", plain) or re.fullmatch(
        r"([-+]?)(\d{1,50}) (\d{1,50})/(\d{1,50})", text
    )
    if mixed and int(mixed[4]):
        return (int(mixed[2]) + Fraction(int(mixed[3]), int(mixed[4]))) * (-1 if mixed[1] == "-" else 1)
    repeating = REPEATING.fullmatch(plain)
    if repeating:
        whole, fixed, cycle = repeating.groups()[1:]
        value = Fraction(
            int(whole + fixed + cycle) - int(whole + fixed or 0), 10 ** len(fixed) * (10 ** len(cycle) - 1)
        )
        return -value if repeating[1] == "-" else value
    return parse_number(text)


def same(a, b, ask):
    """Whether two structures are equal; `ask(kind, x, y)` decides between single expressions."""
    (kind, left), (other, right) = a, b
    if {kind, other} == {"value", "set"}:  # a set of one element, and that element
        lone, many = (left, right) if kind == "value" else (right, left)
        return len(many) == 1 and same(("value", lone), many[0], ask)
    if {kind, other} == {"value", "word"}:  # a choice: (C), and C
        return left.isalpha() and left.lower() == right.lower()
    if {kind, other} == {"named", "set"}:
        (kind, left), (other, right) = (("set", list(x.values()) if k == "named" else x) for k, x in (a, b))
    if kind != other:
        return False
    if kind == "named":
        return left.keys() == right.keys() and all(same(left[name], right[name], ask) for name in left)
    if kind == "value":
        return _same_value(left, right, ask)
    if kind == "word":
        return left == right
    if kind == "relation":
        (sides, signs), (others, other_signs) = left, right
        if signs != other_signs or len(sides) != len(others):
            return False
        pairs = zip(itertools.pairwise(sides), itertools.pairwise(others), strict=True)
        return all(
            [_squeezed(x) for x in one] == [_squeezed(x) for x in two] or ask("relation", one, two)
            for one, two in pairs
        )
    if kind == "equation":
        return [_squeezed(x) for x in left] == [_squeezed(x) for x in right] or (
            len(left) == len(right) == 2 and ask("equation", left, right)
        )
    if kind == "set":
        return _same_set(left, right, ask)
    return len(left) == len(right) and all(same(x, y, ask) for x, y in zip(left, right, strict=True))


def _same_value(left, right, ask):
    if _squeezed(left) == _squeezed(right) or (
        re.fullmatch("[a-zA-Z]{2,3}", left) and left.lower() == right.lower()
    ):
        return left != ""
    if len(left) == len(right) == 1 and (left + right).isalpha():
        return False  # a and A are two things
    numbers = number(left), number(right)
    if None not in numbers:
        return numbers[0] == numbers[1]
    if any(TWO_NUMBERS.search(text) or SCALED.search(text) for text in (left, right)):
        return False
    return ask("value", left, right)


def _is_readable(texts):
    """Whether math-verify reads all of each text. It takes A for a and drops subscripts of numerals: such texts it is not asked about."""
    commands = {name for text in texts for name in re.findall(r"\\([a-zA-Z]+)", text)}
    letters = set(re.findall(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", "".join(texts)))) | commands
    if not commands <= COMMANDS or len({letter.lower() for letter in letters}) < len(letters):
        return False
    return all(
        READABLE.fullmatch(text) and text.count("|") % 2 == 0 and not MISREAD.search(text) for text in texts
    )


def _same_set(left, right, ask):
    if len(left) > 20 or len(right) > 20:
        return False
    rest = list(right)
    for part in left:
        found = next((i for i, other in enumerate(rest) if same(part, other, ask)), None)
        if found is None:
            return False
        del rest[found]
    return not rest

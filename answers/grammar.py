"""What the tokens of an answer say: an object made of expressions, or nothing where one was not understood.

Objects are tuples: (expression, tree, unit), (words, text), (set, members), (matrix, rows), (determinant,
rows), (equation, sides), (relation, sides, signs), (all, members) of relations that hold together, (named,
{name: object}, objects in order or None), and a pair of brackets such as ("[)", members) for intervals and
tuples. A unit is {name: power}, empty where none is given.

Trees are tuples, too: (number, Fraction), (symbol, name), (pi,), (e,), (i,), (infinity,), (add, a, b, ...),
(multiply, a, b, ...), (divide, a, b), (power, a, b), (negate, a), (degrees, a), (percent, a), (call, name,
arguments).
"""

import itertools
import re
from fractions import Fraction

from answers.tokens import ACCENTS, CLOSERS, OPENERS, Token
from answers.words import (
    COMPOUND_UNITS,
    CURRENCIES,
    FUNCTIONS,
    GREEK,
    LONE_UNITS,
    PRODUCTS,
    SCALES,
    UNIT_POWERS,
    UNITS,
    is_label,
)

MOST_TOKENS, DEEPEST = 800, 40  # of an answer, and brackets within brackets
MAX_DIGITS = 4300
RELATIONS = {"<": "<", ">": ">", "le": "<=", "ge": ">=", "ne": "!="}
ENCLOSING = {"|": "|", "lfloor": "rfloor", "lceil": "rceil"}
CALLS = {"|": "abs", "lfloor": "floor", "lceil": "ceil"}
INVERSES = {
    "sin": "arcsin",
    "cos": "arccos",
    "tan": "arctan",
    "cot": "arccot",
    "sec": "arcsec",
    "csc": "arccsc",
}
SAME_FUNCTION = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log", "cosec": "csc"}
AFTER_PI = {"cm", "mm", "km"} | {word for word in UNITS if len(word) > 2}
DEGREE_SCALES = {"C": "°C", "F": "°F", "Celsius": "°C", "Fahrenheit": "°F"}
REALS = ("()", (("expression", ("negate", ("infinity",)), {}), ("expression", ("infinity",), {})))


class NotUnderstood(Exception):
    """The tokens are no answer that these rules know."""


def read(tokens):
    """The object that tokens say; NotUnderstood where they say none."""
    if len(tokens) == 2 and _is_letter(tokens[0]) and tokens[1].is_(")"):  # a choice: C)
        tokens = tokens[:1]
    depth = deepest = 0
    for token in tokens:
        depth += token.is_(*OPENERS) - token.is_(*CLOSERS)
        deepest = max(deepest, depth)
    if not 0 < len(tokens) <= MOST_TOKENS or deepest > DEEPEST:
        raise NotUnderstood
    return _object(tokens, 0)


# Lists, equations, brackets


def _object(tokens, depth):
    if depth > DEEPEST:
        raise NotUnderstood
    tokens = _without_name(_without_braces(tokens))
    for reader in (
        _named_tuple,
        _built_plainly,
        _listed,
        _united,
        _related,
        _equated,
        _known_set,
        _matrix,
        _bracketed,
        _plus_minus,
        _worded,
    ):
        made = reader(tokens, depth)
        if made is not None:
            return made
    return Reader(tokens).whole()


def split(tokens, *separators):
    """The parts between separators that stand outside of all brackets, and the separators."""
    parts, found, depth, start, bars = [], [], 0, 0, 0
    for i, token in enumerate(tokens):
        is_word = token.kind == "word" and token.value != "in"
        is_word = is_word and (token.value in separators or token.value.lower() in separators)
        if depth == 0 and bars % 2 == 0 and (token.is_(*separators) or is_word):
            parts.append(tokens[start:i])
            found.append(token.value.lower() if is_word else token.value)
            start = i + 1
            continue
        depth += token.is_(*OPENERS) - token.is_(*CLOSERS)
        depth += (token.kind == "environment") * (1 if token.value.startswith("begin") else -1)
        bars += token.is_("|") and depth == 0
        if depth < 0:
            raise NotUnderstood
    return [*parts, tokens[start:]], found


def closing(tokens, start):
    """The index of the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(tokens)):
        depth += tokens[i].is_(*OPENERS) - tokens[i].is_(*CLOSERS)
        if depth == 0:
            return i
    raise NotUnderstood


def _without_braces(tokens):
    while tokens and tokens[0].is_("{") and closing(tokens, 0) == len(tokens) - 1:
        tokens = tokens[1:-1]
    if not tokens:
        raise NotUnderstood
    return tokens


def has_unknown(tokens):
    """Whether a letter stands for something unknown: not one of a function, nor e or i, nor a unit."""
    return any(_is_unknown(*pair) for pair in itertools.pairwise((Token("end", ""), *tokens)))


def _is_unknown(before, token):
    if token.kind == "command":
        return token.value in GREEK and token.value != "pi"
    if token.kind != "word" or token.text or token.value in (*FUNCTIONS, "e", "i", "pi"):
        return False
    if token.value in UNITS:
        return token.value in PRODUCTS and not (token.spaced and before.kind == "number")
    return len(token.value) < 3 or not is_label(token.value)


NAME = re.compile(
    r"[a-zA-Z]'?(?: _ (?:\{ )?\w+(?: \})?)?|[A-Z]{2,3}|\\(?:vec|bar|hat|overline) \{ \w+ \}|\[ [A-Z] \]"
    r"|(?:m )?\\angle [a-zA-Z]{1,3}|\\[a-zA-Z]+"
    r"|(?P<function>[a-zA-Z](?: '| \^ \{ - 1 \})? \( (?:- )?[\w, ]+ \))"
    r"|\| [A-Z]{2} \||(?:P|Pr|E|Var) (?:\( [^()]+ \)|\[ [^\[\]]+ \])"
)


def spelt(tokens):
    return " ".join(f"\\{t.value}" if t.kind == "command" else t.value for t in tokens)


def _name(tokens):
    """The match of a name such as x, x_1, P(A), AB, (x, y); None for other tokens. Words are names, too."""
    if all(t.kind == "word" and (t.text or len(t.value) > 2) for t in tokens):
        return re.match(".*", spelt(tokens)) if all(is_label(t.value) for t in tokens) else None
    match = NAME.fullmatch(spelt(tokens))
    is_greek = (
        match and match[0].startswith("\\") and " " not in match[0] and match[0][1:] not in GREEK - {"pi"}
    )
    return None if is_greek else match


def _without_name(tokens):
    r"""7 of `x = 7`, (0,3] of `x \in (0,3]`; an equation such as `y = 3x - 1` stays whole.

    The right side alone of `f(x) = 3x`, and 1/3 of `\frac13 \approx 0.33`.
    """
    parts, _ = split(tokens, "approx")
    if len(parts) == 2 and spelt(parts[1]).lstrip("- ").replace(".", "").isdigit():
        if any(t.kind == "command" for t in parts[0]):
            tokens = parts[0]
    sides, found = split(tokens, "=", "in")
    if len(sides) == 2 and len(sides[1]) == 1 and _is_letter(sides[1][0]):  # 5 = x
        sides = sides[::-1]
    if (
        len(sides) != 2
        or not all(sides)
        or (name := _name(sides[0])) is None
        or (found == ["in"] and sides[1][0].text)
    ):
        return tokens
    states_more = any(t.is_("=", *RELATIONS, ",", ";") for t in _outermost(sides[1]))
    is_function = name.re is NAME and name["function"]
    is_equation = found == ["="] and has_unknown(sides[1]) and not is_function
    return tokens if is_equation or states_more else _without_name(_without_braces(sides[1]))


def _outermost(tokens):
    depth = 0
    for token in tokens:
        depth += token.is_(*OPENERS)
        if depth == 0:
            yield token
        depth -= token.is_(*CLOSERS)


TUPLE_OF_NAMES = re.compile(r"\( (?:\w|\\[a-z]+)(?: , (?:\w|\\[a-z]+))+ \)")


def _named_tuple(tokens, depth):
    """(x,y) = (1,2); the set alone of (x,y) = (1,2), (3,4)."""
    sides, found = split(tokens, "=", "in")
    if len(sides) != 2 or not TUPLE_OF_NAMES.fullmatch(spelt(sides[0])):
        return None
    names = spelt(sides[0][1:-1]).split(" , ")
    kind, values, *_ = made = _object(sides[1], depth + 1)
    if kind == "set":
        return made
    if kind != "()" or len(values) != len(names) or len(set(names)) != len(names):
        raise NotUnderstood
    return "named", dict(zip(names, values, strict=True)), values


def _listed(tokens, depth):
    """`x=1, y=2` has names, `1, 2` is a set; the parts of a list stand between ; or commas, and, or."""
    parts, found = split(tokens, ";")
    if not found:
        parts, found = split(tokens, ",", "and", "or")
    if not found:
        return None
    for n, part in enumerate(parts):  # nothing may stand between a comma and the `and` or the end after it
        is_ended = n == len(found) or found[n] in ("and", "or")
        if not part and not (n > 0 and found[n - 1] in (",", ";") and is_ended):
            raise NotUnderstood
    parts = [part for part in parts if part]
    names = [_stated_name(part) for part in parts]
    is_relation = any(t.is_(*RELATIONS) for part in parts for t in part)
    if None not in names and len(set(names)) == len(names) > 1:
        if "or" in found:
            raise NotUnderstood
        values = tuple(_object(part, depth + 1) for part in parts)
        in_order = sorted(zip(names, values, strict=True), key=lambda pair: pair[0])
        is_ordered = _are_neighbours("".join(names)) and all(len(name) == 1 for name in names)
        return "named", dict(in_order), tuple(value for _, value in in_order) if is_ordered else None
    return "all" if is_relation and "and" in found else "set", _members(parts, depth)


def _stated_name(part):
    sides, found = split(part, "=")
    return spelt(sides[0]) if found == ["="] and sides[0] and _name(sides[0]) else None


def _members(parts, depth):
    """The parts of a set, those of both values of each plus-minus; without the words after the last."""
    made = []
    for part in parts:
        member = _object(part, depth + 1)
        is_pair = sum(t.is_("pm", "mp") for t in part) == 1 and member[0] == "set"
        made += member[1] if is_pair else [member]
    return tuple(made)


def _united(tokens, depth):
    parts, found = split(tokens, "cup", "U")
    if not found or not all(parts):
        return None
    return "set", tuple(_object(part, depth + 1) for part in parts)


def _related(tokens, depth):
    sides, found = split(tokens, *RELATIONS)
    if not found:
        return None
    if not all(sides) or any(split(side, "=")[1] for side in sides):
        raise NotUnderstood
    signs = [RELATIONS[sign] for sign in found]
    if signs == ["!="] and (letter := _letter_among(sides)) is not None:
        return _all_but(sides[1 - letter], depth)
    if signs[0][0] == ">":
        sides, signs = sides[::-1], [sign.replace(">", "<") for sign in signs[::-1]]
    if any(sign[0] == ">" for sign in signs):
        raise NotUnderstood
    return _interval(sides, signs, depth) or ("relation", tuple(map(_tree, sides)), tuple(signs))


def _letter_among(sides):
    """Where the one side stands that is a variable, the others without unknowns; else None."""
    letters = [side[0] if len(side) == 1 else Token("end", "") for side in sides]
    is_letter = [_is_letter(t) or t.value in GREEK - {"pi"} for t in letters]
    others = [side for side, is_one in zip(sides, is_letter, strict=True) if not is_one]
    has_one = sum(is_letter) == 1 and not any(map(has_unknown, others))
    return is_letter.index(True) if has_one else None


def _all_but(tokens, depth):
    """All real numbers but one."""
    end = _object(tokens, depth + 1)
    return "set", (("()", (REALS[1][0], end)), ("()", (end, REALS[1][1])))


def _interval(sides, signs, depth):
    """What a variable may be, as an interval: x > 5, 1 < x <= 3."""
    at = _letter_among(sides)
    if "!=" in signs or at is None:
        return None
    low, high = sides[:at], sides[at + 1 :]
    if len(low) > 1 or len(high) > 1:
        return None
    opening = "[" if low and signs[0] == "<=" else "("
    ending = "]" if high and signs[-1] == "<=" else ")"
    ends = [_object(end[0], depth + 1) if end else None for end in (low, high)]
    return opening + ending, (ends[0] or REALS[1][0], ends[1] or REALS[1][1])


def _is_letter(token):
    return token.kind == "word" and len(token.value) == 1


def _equated(tokens, depth):
    sides, found = split(tokens, "=")
    return ("equation", tuple(map(_tree, sides))) if found else None


def _tree(tokens):
    """The tree of one side of an equation, which has no unit."""
    made = Reader(_without_braces(tokens)).whole()
    if made[0] != "expression" or made[2]:
        raise NotUnderstood
    return made[1]


def _known_set(tokens, depth):
    kinds = [t.value for t in tokens]
    if kinds in (["emptyset"], [r"\{", r"\}"]):
        return "set", ()
    spellings = ["mathbb", "{", "R", "}"], ["mathbb", "R"]
    reals = next((len(spelling) for spelling in spellings if kinds[: len(spelling)] == spelling), 0)
    if reals and len(kinds) > reals + 3 and tokens[reals].is_("setminus", "-"):  # R without {2}
        if kinds[reals + 1] == r"\{" and kinds[-1] == r"\}" and not split(tokens[reals + 2 : -1], ",")[1]:
            return _all_but(tokens[reals + 2 : -1], depth)
    return REALS if reals and len(kinds) == reals else None


def _matrix(tokens, depth):
    if tokens[0].is_("[", "(") and len(tokens) > 2 and tokens[1].kind == "environment":
        if closing(tokens, 0) == len(tokens) - 1:
            tokens = tokens[1:-1]
    kind = tokens[0].value.removeprefix("begin ") if tokens[0].kind == "environment" else ""
    if not re.fullmatch("[pbBv]?(matrix|array|smallmatrix)", kind) or tokens[-1].value != f"end {kind}":
        return None
    rows, _ = split(tokens[1:-1], r"\\")
    rows = [split(row, "&")[0] for row in rows if row]
    made = tuple(("row", tuple(_object(cell, depth + 1) for cell in row)) for row in rows)
    return "determinant" if kind == "vmatrix" else "matrix", made


def _bracketed(tokens, depth):
    """A set in braces, an interval or a tuple; round brackets around one thing are left out."""
    first, last = tokens[0].value, tokens[-1].value
    if not tokens[0].is_("(", "[", r"\{", "langle") or len(tokens) < 3:
        return None
    if first == "langle":
        parts = split(tokens[1:-1], ",")[0] if last == "rangle" else []
        return ("<>", tuple(_object(part, depth + 1) for part in parts)) if len(parts) > 1 else None
    if closing(tokens, 0) != len(tokens) - 1 or (first == r"\{") != (last == r"\}"):
        return None
    inside = tokens[1:-1]
    if first == r"\{":
        return _built(inside, depth) or ("set", _set(inside, depth))
    parts, found = split(inside, ",", ";")
    if found and all(parts):
        return first + last, tuple(_object(part, depth + 1) for part in parts)
    if first + last != "()":
        return None
    return _worded(inside, depth) or None if any(t.text for t in inside) else _paren(inside, depth)


def _paren(inside, depth):
    """What round brackets around a whole hold, unless they belong to an expression that reads them itself."""
    made = _object(inside, depth + 1)
    return made if made[0] in ("expression", "words") else None


def _set(inside, depth):
    parts, _ = split(inside, ",", ";")
    return _members(parts, depth) if all(parts) else _refuse()


def _refuse():
    raise NotUnderstood


def _built_plainly(tokens, depth):
    """{x | x > 3} without backslashes, whose braces are gone by now."""
    is_built = len(tokens) > 2 and _is_letter(tokens[0]) and tokens[1].is_("|", ":")
    is_built = is_built and tokens[0].key in [t.key for t in tokens[2:]]
    return _built(tokens, depth) if is_built else None


def _built(inside, depth):
    r"""\{x | x > 3\} and \{x \in R : 1 < x\}: the interval, or the union of them."""
    for bar in ("|", ":"):
        at = next((i for i, t in enumerate(inside) if t.is_(bar)), None)
        if at is None or at + 1 == len(inside):
            continue
        letter = inside[0]
        is_real = at == 1 or (inside[1].is_("in") and "R" in [t.value for t in inside[2:at]])
        if not (_is_letter(letter) and is_real):
            raise NotUnderstood
        made = _object(inside[at + 1 :], depth + 1)
        return made if made[0] in ("()", "(]", "[)", "[]", "set") else _refuse()
    return None


def _plus_minus(tokens, depth):
    """Both values of what holds one plus-minus."""
    at = [i for i, t in enumerate(tokens) if t.is_("pm", "mp")]
    if not at:
        return None
    if len(at) > 1:
        raise NotUnderstood
    values = []
    for sign in "+-":
        values.append(_object((*tokens[: at[0]], Token("sign", sign, True), *tokens[at[0] + 1 :]), depth + 1))
    return "set", tuple(values)


def _worded(tokens, depth):
    """Words without case and article: North, an ellipse, (B), Yes."""
    tokens = [t for t in tokens if not t.is_(".", "!")]
    while len(tokens) > 2 and tokens[0].is_("(") and tokens[-1].is_(")"):
        tokens = tokens[1:-1]
    if not tokens or any(t.kind != "word" for t in tokens):
        return None
    values = [t.value for t in tokens]
    is_bare = not any(t.text for t in tokens)
    if set(values) & FUNCTIONS or (is_bare and set(values) & GREEK):
        return None
    is_word = re.fullmatch("[Nn]o|[IVX]{2,}|[A-Z]{3,}", values[0])  # and no product: HTT is not TTH
    if is_bare and (all(len(v) < 3 for v in values) or is_product(values)) and not is_word:
        return None
    if values[0].lower() in ("a", "an", "the", "option", "choice") and len(values) > 1:
        values = values[1:]
    words = " ".join(values).lower()
    if words in ("infinity", "pi"):
        return None
    return REALS if words in ("all real numbers", "all reals", "real numbers") else ("words", words)


def is_product(words):
    """Whether letters that stand together are a product: ab, abc, xyz, prq; but no word."""
    return len(words) == 1 and (not re.search("[aeiou]", words[0].lower()) or _are_neighbours(words[0]))


def _are_neighbours(word):
    codes = sorted(map(ord, word))
    return 1 < len(codes) < 5 and codes == list(range(codes[0], codes[0] + len(codes)))


# Expressions


class Reader:
    """Reads one expression from the left; `at` is the index of the next token."""

    def __init__(self, tokens):
        self.tokens, self.at, self.depth = tokens, 0, 0

    def next(self, ahead=0):
        at = self.at + ahead
        return self.tokens[at] if at < len(self.tokens) else Token("end", "")

    def take(self, *values):
        """The next token, read, where it is one of these signs."""
        if values and not self.next().is_(*values):
            return None
        self.at += 1
        return self.tokens[self.at - 1]

    def whole(self):
        """(expression, tree, unit) of all the tokens: a currency before, a unit or label after included."""
        unit = {}
        sign = self.take("-", "+") if self.next(1).is_(*CURRENCIES) else None
        if self.next().is_(*CURRENCIES):
            unit = {CURRENCIES[self.take().value]: 1}
        tree = self.chosen() or self.sum()
        if sign and sign.value == "-":
            tree = ("negate", tree)
        if self.next().kind != "end":
            after = Unit(self.tokens[self.at :]).whole()
            if unit and after and unit != after:
                raise NotUnderstood
            unit = unit or after
        if tree[0] in ("degrees", "percent") and not unit:
            tree, unit = tree[1], {"degree" if tree[0] == "degrees" else "percent": 1}
        return "expression", tree, unit

    def sum(self):
        terms = []
        while not terms or self.next().is_("+", "-"):
            sign = self.take("+", "-")
            if self.next().is_("+", "-"):
                raise NotUnderstood
            term = self.product()
            terms.append(("negate", term) if sign and sign.value == "-" else term)
        return ("add", *terms) if len(terms) > 1 else terms[0]

    def product(self):
        factors, slashes = [self.signed_factor()], 0
        was_slash = False
        while True:
            if self.next().is_("cdot") or self.is_times():
                self.take()
                factors.append(self.signed_factor())
                was_slash = False
            elif self.next().is_("/", "div") and not self.starts_unit():
                self.take()
                factors = [("divide", _product(factors), self.signed_factor())]
                slashes, was_slash = slashes + 1, True
            elif self.next().is_("frac") and self.starts_unit():
                return _product(factors)
            elif self.starts_factor():
                if was_slash and not self.next().spaced:
                    raise NotUnderstood  # 1/2x
                factors.append(self.factor(factors[-1]))
            else:
                return _product(factors)
            if slashes > DEEPEST:
                raise NotUnderstood

    def is_times(self):
        """The x of 6.7 x 10^{-5}."""
        is_x = self.next().kind == "word" and self.next().value in "xX" and self.next(1).value == "10"
        return is_x and self.next(2).is_("^") and self.tokens[self.at - 1].kind == "number"

    def signed_factor(self):
        if self.take("-"):
            if self.next().is_("-", "+"):
                raise NotUnderstood
            return ("negate", self.factor())
        self.take("+")
        return self.factor()

    def starts_factor(self):
        """Whether what follows is one more factor of a product without a sign between."""
        token = self.next()
        if token.kind == "word":
            return not self.starts_unit() and not self.starts_label()
        if token.kind in ("number", "scientific", "repeating"):
            before = self.tokens[self.at - 1]
            if not before.is_(")", "}", "!"):
                raise NotUnderstood  # 3 4, x2
            return True
        if token.is_("|"):
            return self.bar_opens()
        return token.is_("(", "[", "{", "lfloor", "lceil", "frac", "sqrt", "binom", "infty") or (
            token.kind == "command" and token.value in (*FUNCTIONS, *GREEK, *ACCENTS)
        )

    def bar_opens(self):
        """Whether a bar begins an absolute value: an even number of bars was read before."""
        return sum(t.is_("|") for t in self.tokens[: self.at]) % 2 == 0

    def starts_unit(self):
        """Whether the rest is a unit: a word of the list, or a power or a quotient of such words."""
        token = self.next()
        if token.kind == "word" and not token.text:
            before = self.tokens[self.at - 1]
            is_number = before.kind in ("number", "scientific")
            is_after = (
                is_number or before.is_("}", "deg", ")") or (before.is_("pi") and token.value in AFTER_PI)
            )
            is_function = token.value in FUNCTIONS and self.next(1).kind != "end"  # 30 sec, 90 min
            if not is_after or is_function:
                return False
            if len(token.value) == 1 or token.value in PRODUCTS:
                is_known = token.value in LONE_UNITS or len(token.value) > 1
                is_half = any(t.is_("frac") for t in self.tokens[max(0, self.at - 3) : self.at])  # \frac12 hr
                is_after = is_number and token.spaced and not is_half
                if not (is_known and is_after) or has_unknown(self.tokens[: self.at]):
                    return False
        try:
            return bool(Unit(self.tokens[self.at :]).whole(units_only=True))
        except NotUnderstood:
            return False

    def starts_label(self):
        token = self.next()
        if token.value in FUNCTIONS or token.value in GREEK or token.value.lower() in SCALES:
            return False
        if token.text:
            return True
        return len(token.value) > 2 and token.spaced and not is_product([token.value])

    def factor(self, left=None):
        """A primary with its powers, marks and scale words; `left` is the factor before it."""
        token = self.next()
        tree = self.mixed() if token.kind == "number" else self.primary()
        if left and left[0] == "number" and tree[0] == "number" and token.is_("{"):
            raise NotUnderstood  # 2{3}
        while (marked := self.marked(tree)) is not None:
            tree = marked
        return tree

    def marked(self, tree):
        """The tree with the power or mark that follows it; None where none follows."""
        if self.take("^"):
            if self.next(1).is_("^"):
                raise NotUnderstood
            return ("power", tree, self.exponent())
        if self.take("!"):
            return ("call", "factorial", (tree,)) if not self.next().is_("!") else _refuse()
        is_degrees = self.next().is_("deg") or self.next().value in ("degree", "degrees")
        if is_degrees and not self.starts_unit_with_scale():
            self.take()
            return ("degrees", tree)
        if self.take("%"):
            return ("percent", tree) if not self.next().is_("%", "!", "^") else _refuse()
        scale = self.scale()
        return None if scale is None else ("multiply", tree, ("number", scale))

    def starts_unit_with_scale(self):
        """Whether °C or °F follows."""
        return self.next(1).value in DEGREE_SCALES and self.next(2).kind == "end"

    def scale(self):
        """Million after a number: 10^6."""
        token = self.next()
        word = token.value.lower().removesuffix("s")
        if token.kind != "word" or (word not in SCALES and word != "dozen"):
            return None
        self.take()
        return Fraction(12) if word == "dozen" else Fraction(10) ** SCALES[word]

    def exponent(self):
        """What a power is raised to: a group, or one token; `10^-3` and `x^10` as they are meant."""
        if self.next().is_("{", "("):
            return self.primary()
        sign = self.take("-")
        tree = self.one_token(whole_number=True)
        return ("negate", tree) if sign else tree

    def one_token(self, whole_number=False):
        r"""The argument of a command without braces: \frac12, \sqrt2, \frac\pi4."""
        token = self.next()
        if token.is_("{"):
            return self.primary()
        if token.kind == "number" and not whole_number and len(token.value) > 1:
            first, rest = token.value[0], token.value[1:]
            if not token.value.isdigit():
                raise NotUnderstood
            kept = (Token("number", rest, False, token.text),)
            self.tokens = (
                *self.tokens[: self.at],
                Token("number", first),
                *kept,
                *self.tokens[self.at + 1 :],
            )
            return ("number", Fraction(self.take().value))
        if token.kind == "word" and len(token.value) > 1:
            first, rest = token.value[0], token.value[1:]
            words = (Token("word", first, token.spaced, token.text), Token("word", rest, False, token.text))
            self.tokens = (*self.tokens[: self.at], *words, *self.tokens[self.at + 1 :])
        return self.primary()

    def mixed(self):
        r"""A number, with the fraction after it: 3\frac{1}{4}, 3 1/4, 1⅔."""
        token = self.next()
        whole = self.primary()
        if token.kind != "number" or not token.value.isdigit() or whole[0] != "number":
            return whole
        if self.next().kind == "number" and self.next(1).is_("/") and self.next(2).kind == "number":
            parts = [self.next().value, self.next(2).value]
            if (
                not self.next().spaced
                or self.next(3).kind == "number"
                or (self.next(3).kind == "word" and not self.next(3).spaced)
                or self.next(3).is_("/", "^")
            ):
                raise NotUnderstood
            self.at += 3
        elif self.next().is_("frac") and not self.starts_unit():
            before = self.at
            tree = self.primary()
            if tree[0] != "divide" or not all(part[0] == "number" for part in tree[1:]):
                self.at = before
                return whole
            parts = [part[1] for part in tree[1:]]
        else:
            return whole
        try:
            top, bottom = map(Fraction, parts)
        except ValueError:
            raise NotUnderstood
        if not 0 < top < bottom or top.denominator != 1 or bottom.denominator != 1:
            raise NotUnderstood
        return ("number", whole[1] + top / bottom)

    def primary(self):
        """One thing: a number, letter, bracket, or command with its arguments."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise NotUnderstood
        tree = self.one_thing()
        self.depth -= 1
        return tree

    def one_thing(self):
        token = self.next()
        if token.kind in ("number", "scientific", "repeating"):
            return self.numeral(self.take())
        if token.kind == "word":
            return self.letters(self.take())
        if token.is_("(", "[", "{"):
            return self.group()
        if token.is_(*ENCLOSING):
            opening = self.take().value
            tree = self.sum()
            return ("call", CALLS[opening], (tree,)) if self.take(ENCLOSING[opening]) else _refuse()
        if token.kind == "command":
            return self.command(self.take())
        raise NotUnderstood

    def numeral(self, token):
        if len(token.value) > MAX_DIGITS:
            raise NotUnderstood
        if token.kind == "repeating":
            whole, fixed, cycle = re.fullmatch(r"(\d*)\.(\d*)\\\w+\s?\{(\d+)\}", token.value).groups()
            head, full = int(whole + fixed or 0), int(whole + fixed + cycle)
            return ("number", Fraction(full - head, 10 ** len(fixed) * (10 ** len(cycle) - 1)))
        if token.kind == "scientific":
            digits, _, power = token.value.lower().partition("e")
            if abs(int(power)) > MAX_DIGITS:
                raise NotUnderstood
            return ("number", Fraction(digits) * Fraction(10) ** int(power))
        if self.next().is_("_") or self.base_follows():
            return self.in_base(token)
        return ("number", Fraction(token.value))

    def base_follows(self):
        """`204 base 5`, `204 in base 5`."""
        skipped = self.next().value in ("in", ",")
        if self.next(skipped).kind == "word" and self.next(skipped).value.lower() == "base":
            if self.next(skipped + 1).kind == "number":
                self.at += skipped
                return True
        return False

    def in_base(self, token):
        self.take()
        base = self.one_token(whole_number=True)
        if base[0] != "number" or not token.value.isdigit() or len(token.value) > 100:
            raise NotUnderstood
        try:
            return ("number", Fraction(int(token.value, int(base[1]))))
        except ValueError:
            raise NotUnderstood

    def letters(self, token):
        """A letter with its index, a function, or a product of letters."""
        word = token.value
        if word in FUNCTIONS:
            return self.function(word)
        if word in ("pi", "infinity", "Infinity", "infty", "inf"):
            return ("pi",) if word == "pi" else ("infinity",)
        if word in GREEK:
            return self.symbol(word)
        if token.text:
            raise NotUnderstood
        if len(word) > 1:
            known = next((f for f in sorted(FUNCTIONS, key=len, reverse=True) if word.startswith(f)), None)
            if known and len(word) <= len(known) + 2:
                self.put_back(known, word[len(known) :])
                return self.function(self.take().value)
            if len(word) > 3 and not token.spaced and not is_product([word]) and len(set(word)) > 3:
                raise NotUnderstood  # a word
            self.put_back(word[0], word[1:])
            return self.letters(self.take())
        return ("e",) if word == "e" else ("i",) if word == "i" else self.symbol(word)

    def put_back(self, *words):
        self.at -= 1
        made = tuple(Token("word", word, False) for word in words if word)
        self.tokens = (*self.tokens[: self.at], *made, *self.tokens[self.at + 1 :])

    def symbol(self, name):
        if self.take("_"):
            start = self.at
            if self.next().is_("{"):
                self.at = closing(self.tokens, self.at) + 1
            else:
                self.at += 1
            index = [t.value for t in self.tokens[start : self.at] if t.value not in ("{", "}")]
            name += "_" + " ".join(index)
        while self.next().is_("'"):
            self.take()
            name += "'"
        return ("symbol", name)

    def group(self):
        opening = self.at
        end = closing(self.tokens, opening)
        if self.tokens[end].value != {"(": ")", "[": "]", "{": "}"}[self.tokens[opening].value]:
            raise NotUnderstood
        inside = Reader(self.tokens[opening + 1 : end])
        inside.depth = self.depth
        self.at = end + 1
        tree = inside.chosen() or inside.sum()
        if inside.next().kind != "end":
            raise NotUnderstood
        if self.next().is_("_") and tree[0] == "number":  # (204)_5
            digits = self.tokens[opening + 1]
            return self.in_base(digits) if end == opening + 2 else _refuse()
        return tree

    def chosen(self):
        r"""{n \choose k}"""
        parts, found = split(self.tokens, "choose")
        if len(parts) != 2:
            return None
        self.at = len(self.tokens)
        return ("call", "binom", tuple(map(_tree, parts)))

    def command(self, token):
        name = token.value
        if name in FUNCTIONS:
            return self.function(name)
        if name == "frac":
            top = self.one_token()
            return ("divide", top, self.one_token())
        if name == "binom":
            top = self.one_token()
            return ("call", "binom", (top, self.one_token()))
        if name in ("pi", "infty"):
            return ("pi",) if name == "pi" else ("infinity",)
        if name in GREEK:
            return self.symbol(name)
        if name in ACCENTS:
            start = self.at
            self.at = closing(self.tokens, start) + 1 if self.next().is_("{") else start + 1
            return self.symbol(f"{name} {spelt(self.tokens[start : self.at]).strip('{} ')}")
        raise NotUnderstood

    def function(self, name):
        """A function with its base or power, and its argument."""
        name = SAME_FUNCTION.get(name, name)
        if name == "sqrt":
            return self.root()
        base = power = None
        while self.next().is_("_", "^"):
            if self.take().value == "_":
                base = self.one_token(whole_number=True)
            else:
                power = self.exponent()
        if base and name != "log":
            raise NotUnderstood
        if power in (("negate", ("number", Fraction(1))), ("number", Fraction(-1))):
            name, power = INVERSES.get(name) or _refuse(), None
        tree = ("call", name, self.arguments(base))
        return ("power", tree, power) if power else tree

    def root(self):
        index = ("number", Fraction(2))
        if self.next().is_("["):
            end = closing(self.tokens, self.at)
            index = _tree(self.tokens[self.at + 1 : end])
            self.at = end + 1
        token = self.next()
        if token.kind == "number" and len(token.value) > 1 and not token.spaced:
            raise NotUnderstood  # \sqrt53
        return ("call", "root", (self.one_token(whole_number=True), index))

    def arguments(self, base):
        r"""What a function is of: its brackets, or the factors that follow, as in \sin 2x."""
        more = (base,) if base else ()
        if self.next().is_("(", "[", "{"):
            end = closing(self.tokens, self.at)
            parts, found = split(self.tokens[self.at + 1 : end], ",")
            if found:
                self.at = end + 1
                return tuple(map(_tree, parts)) if not base else _refuse()
            return (self.bracketed_argument(), *more)
        tree = self.signed_factor()
        factors = [tree]
        while self.starts_factor() and not self.next().is_("(", "[") and self.next().value not in FUNCTIONS:
            factors.append(self.factor(factors[-1]))
        tree = _product(factors)
        if self.next().is_("/"):
            raise NotUnderstood  # \sin x/2
        return (tree, *more)

    def bracketed_argument(self):
        tree = self.group()
        return ("degrees", tree) if self.take("deg") else tree


def _product(factors):
    return ("multiply", *factors) if len(factors) > 1 else factors[0]


class Unit(Reader):
    """Reads what follows a value: a unit with its powers and quotients, or words that say what is counted."""

    def whole(self, units_only=False):
        """{name: power}, empty for a label."""
        unit = self.unit()
        rest = self.tokens[self.at :]
        if units_only and rest and not all(t.text or len(t.value) > 2 for t in rest):
            raise NotUnderstood
        rest = [t for t in rest if not t.is_(".", "(", ")")]
        if not all(t.kind == "word" and is_label(t.value) for t in rest):
            raise NotUnderstood
        if units_only and not unit:
            raise NotUnderstood
        return unit

    def unit(self):
        unit = {}
        power = 1
        while True:
            before = self.at
            part = self.part()
            if part is None:
                self.at = before
                return unit
            for name, exponent in part.items():
                unit[name] = unit.get(name, 0) + power * exponent
            power = 1
            if self.next().is_("/") or (self.next().kind == "word" and self.next().value == "per" and unit):
                self.take()
                power = -1
            elif self.next().is_("cdot", "."):
                self.take()
            elif self.next().kind == "word" and self.next().value not in UNITS and not _is_power(self.next()):
                return unit

    def part(self):
        """One name with its power, or a fraction of them."""
        if self.next().is_("frac"):
            return self.quotient()
        if self.next().is_("deg") or (self.next().value == "degrees" and self.next(1).value in DEGREE_SCALES):
            self.take()
            scale = DEGREE_SCALES.get(self.next().value)
            if scale:
                self.take()
            return {scale or "degree": 1}
        if self.next().is_("%"):
            self.take()
            return {"percent": 1}
        power = 1
        if _is_power(self.next()):
            power = UNIT_POWERS[self.take().value.lower()]
            self.take(".")
        name = self.name()
        if name is None:
            return None
        self.take()
        power = self.power() if self.take("^") else power
        return {part: power * times for part, times in COMPOUND_UNITS.get(name, {name: 1}).items()}

    def name(self):
        """The name of the unit that comes next; None for another word."""
        token = self.next()
        if token.is_(*CURRENCIES):
            return CURRENCIES[token.value]
        word = token.value if token.kind == "word" else ""
        return UNITS.get(word) or (UNITS.get(word.lower()) if len(word) > 2 else None)

    def power(self):
        tree = self.exponent()
        sign, number = (-1, tree[1]) if tree[0] == "negate" else (1, tree)
        if number[0] != "number" or number[1].denominator != 1:
            raise NotUnderstood
        return sign * int(number[1])

    def quotient(self):
        self.take()
        parts = []
        for _ in range(2):
            end = closing(self.tokens, self.at) if self.next().is_("{") else self.at
            inside = Unit(self.tokens[self.at : end + 1]).tokens
            parts.append(Unit(_without_braces(inside)).whole(units_only=True))
            self.at = end + 1
        top, bottom = parts
        return {name: top.get(name, 0) - bottom.get(name, 0) for name in (*top, *bottom)}


def _is_power(token):
    return token.kind == "word" and token.value.lower() in UNIT_POWERS

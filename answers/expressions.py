"""One expression from its tokens, as a tree, with the unit or label after it; NotUnderstood where it is none.

Trees are tuples: (number, Fraction), (symbol, name), (pi,), (e,), (i,), (infinity,), (add, a, b, ...),
(multiply, a, b, ...), (divide, a, b), (power, a, b), (negate, a), (degrees, a), (percent, a), (call, name,
arguments). A unit is {name: power}, empty where none is given.
"""

import itertools
import re
from fractions import Fraction

from answers.tokens import ACCENTS, CLOSERS, OPENERS, Token
from answers.words import (
    COMPOUND_UNITS,
    CURRENCIES,
    FIGURES,
    FUNCTIONS,
    GREEK,
    LONE_UNITS,
    POWERS_AFTER,
    PRODUCTS,
    SCALES,
    UNIT_POWERS,
    UNITS,
    is_label,
)

DEEPEST = 40  # brackets within brackets
# Python's own limit for int(). Exponents have the same bound, so that 1e4000000 is never computed.
MAX_DIGITS = 4300
TOO_LARGE = 10**MAX_DIGITS  # Python shows no integer of so many digits, and raises
ENCLOSING = {"|": "|", "lfloor": "rfloor", "lceil": "rceil"}
CALLS = {"|": "abs", "lfloor": "floor", "lceil": "ceil"}
INVERSES = {name: f"arc{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc")}
SAME_FUNCTION = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log", "cosec": "csc"}
AFTER_PI = {"cm", "mm", "km"} | {word for word in UNITS if len(word) > 2}
NUMERALS = FIGURES.split()[:21]  # zero to twenty
DEGREE_SCALES = {"C": "°C", "F": "°F", "Celsius": "°C", "Fahrenheit": "°F"}


class NotUnderstood(Exception):
    """The tokens are no answer that these rules know."""


def refuse():
    raise NotUnderstood


def split(tokens, *separators):
    """The parts between separators that stand outside of all brackets, and the separators."""
    parts, found, depth, start, bars = [], [], 0, 0, 0
    for i, token in enumerate(tokens):
        kind, value = token.kind, token.value
        is_sign = kind in ("sign", "command")
        if kind == "word" and value != "in":
            is_separator = value in separators or value.lower() in separators
        else:
            is_separator = is_sign and value in separators
        if is_separator and depth == 0 and bars % 2 == 0:
            parts.append(tokens[start:i])
            found.append(value.lower() if kind == "word" else value)
            start = i + 1
        elif is_sign:
            depth += (value in OPENERS) - (value in CLOSERS)
            bars += value == "|" and depth == 0
        elif kind == "environment":
            depth += 1 if value.startswith("begin") else -1
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


def without_braces(tokens):
    while tokens and tokens[0].is_("{") and closing(tokens, 0) == len(tokens) - 1:
        tokens = tokens[1:-1]
    if not tokens:
        raise NotUnderstood
    return tokens


def spelt(tokens):
    return " ".join(f"\\{t.value}" if t.kind == "command" else t.value for t in tokens)


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


def is_product(words):
    """Whether letters that stand together are a product: ab, abc, xyz, prq; but no word."""
    return len(words) == 1 and (not re.search("[aeiou]", words[0].lower()) or are_neighbours(words[0]))


def are_neighbours(word):
    codes = sorted(map(ord, word))
    return 1 < len(codes) < 5 and codes == list(range(codes[0], codes[0] + len(codes)))


def tree_of(tokens):
    """The tree of one side of an equation, which has no unit."""
    made = Reader(without_braces(tokens)).whole()
    if made[0] != "expression" or made[2]:
        raise NotUnderstood
    return made[1]


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
        is_negative = tree[0] == "negate"
        marked = tree[1] if is_negative else tree
        if marked[0] in ("degrees", "percent") and not unit:
            unit = {"degree" if marked[0] == "degrees" else "percent": 1}
            tree = ("negate", marked[1]) if is_negative else marked[1]
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
            self.open_text()
            if self.next().is_("cdot") or self.is_times():
                self.take()
                factors.append(self.signed_factor())
                was_slash = False
            elif self.next().is_("/", "div") and not self.starts_unit():
                self.take()
                factors = [("divide", _product(factors), self.signed_factor())]
                slashes, was_slash = slashes + 1, True
            elif (self.next().is_("frac") and self.starts_unit()) or self.starts_unit_in_brackets():
                return _product(factors)
            elif self.starts_factor():
                if was_slash and not self.next().spaced:
                    raise NotUnderstood  # 1/2x
                factors.append(self.factor(factors[-1]))
                was_slash = False
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

    def open_text(self):
        r"""Takes away the braces of the {\rm cm} that follows."""
        end = closing(self.tokens, self.at) if self.next().is_("{") and self.next(1).text else self.at
        inside = self.tokens[self.at + 1 : end]
        if inside and all(token.kind == "word" and token.text for token in inside):
            self.tokens = (*self.tokens[: self.at], *inside, *self.tokens[end + 1 :])

    def starts_unit_in_brackets(self):
        """Whether the rest is the (cm) of 5 (cm)."""
        token, inside = self.next(), self.tokens[self.at + 1 : -1]
        if not (token.is_("(") and token.spaced and inside and self.tokens[-1].is_(")")):
            return False
        if len(inside[0].value) < 2 or inside[0].value in PRODUCTS or inside[0].kind != "word":
            return False
        try:
            return bool(Unit(inside).whole(units_only=True))
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
        if left and left[0] == "number" and token.is_("{") and _is_numeral(tree):
            raise NotUnderstood  # 2{3}, 2{1 \over 2}
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
            return ("call", "factorial", (tree,)) if not self.next().is_("!") else refuse()
        is_degrees = self.next().is_("deg") or self.next().value in ("degree", "degrees")
        if is_degrees and not self.starts_unit_with_scale():
            self.take()
            return ("degrees", tree)
        if self.take("%"):
            return ("percent", tree) if not self.next().is_("%", "!", "^") else refuse()
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
            self.put_instead(Token("number", first), Token("number", rest, False, token.text))
            return ("number", Fraction(self.take().value))
        if token.kind == "word" and len(token.value) > 1:
            first, rest = token.value[0], token.value[1:]
            words = Token("word", first, token.spaced, token.text), Token("word", rest, False, token.text)
            self.put_instead(*words)
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
            return ("call", CALLS[opening], (tree,)) if self.take(ENCLOSING[opening]) else refuse()
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
            value = Fraction(digits) * Fraction(10) ** int(power)
            if max(abs(value.numerator), value.denominator) >= TOO_LARGE:
                raise NotUnderstood
            return ("number", value)
        if self.next().is_("_") or self.base_follows():
            return self.in_base(token)
        return ("number", Fraction(token.value))

    def base_follows(self):
        """`204 base 5`, `204 in base 5`, `204 (base 5)`."""
        skipped = self.next().value in ("in", ",", "(")
        if self.next(skipped).kind != "word" or self.next(skipped).value.lower() != "base":
            return False
        if self.next().is_("("):
            end = closing(self.tokens, self.at)
            self.tokens = (*self.tokens[: self.at], *self.tokens[self.at + 1 : end], *self.tokens[end + 1 :])
            skipped = 0
        is_base = self.next(skipped + 1).kind == "number"
        self.at += skipped * is_base
        return is_base

    def in_base(self, token):
        self.take()
        ahead = int(self.next().is_("{"))
        if self.next(ahead).value in NUMERALS:  # 204_{\text{five}}
            self.at += ahead
            self.put_instead(Token("number", str(NUMERALS.index(self.next().value))))
            self.at -= ahead
        base = self.one_token(whole_number=True)
        if base[0] != "number" or base[1] not in range(2, 37):  # int() takes 0 and 8.5, too
            raise NotUnderstood
        if not token.value.isalnum() or len(token.value) > 100:
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
        if len(word) > DEEPEST:
            raise NotUnderstood  # each letter would be a step of its own
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
        """Several words instead of the one that was just taken."""
        self.at -= 1
        self.put_instead(*(Token("word", word) for word in words if word))

    def put_instead(self, *tokens):
        """Several tokens instead of the next one."""
        self.tokens = (*self.tokens[: self.at], *tokens, *self.tokens[self.at + 1 :])

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
        if self.tokens[end].value != {"(": ")", "[": "]", "{": "}"}.get(self.tokens[opening].value):
            raise NotUnderstood
        inside = Reader(self.tokens[opening + 1 : end])
        inside.depth = self.depth
        self.at = end + 1
        tree = inside.chosen() or inside.sum()
        if inside.next().kind != "end":
            raise NotUnderstood
        if self.next().is_("_") and tree[0] == "number":  # (204)_5
            digits = self.tokens[opening + 1]
            return self.in_base(digits) if end == opening + 2 else refuse()
        return tree

    def chosen(self):
        r"""{n \choose k}, {3 \over 4}"""
        parts, found = split(self.tokens, "choose", "over")
        if len(parts) != 2 or self.tokens[len(parts[0])].key == ("word", "over"):  # "3 over par"
            return None
        self.at = len(self.tokens)
        top, bottom = map(tree_of, parts)
        return ("divide", top, bottom) if found == ["over"] else ("call", "binom", (top, bottom))

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
            name, power = INVERSES.get(name) or refuse(), None
        arguments = self.arguments(base)
        tree = _spelt_out(name, arguments) or ("call", name, arguments)
        return ("power", tree, power) if power else tree

    def root(self):
        index = ("number", Fraction(2))
        if self.next().is_("["):
            end = closing(self.tokens, self.at)
            index = tree_of(self.tokens[self.at + 1 : end])
            self.at = end + 1
        token = self.next()
        if token.kind == "number" and len(token.value) > 1 and not token.spaced:
            raise NotUnderstood  # \sqrt53
        return ("call", "root", (self.one_token(whole_number=True), index))

    def arguments(self, base):
        r"""What a function is of: its brackets, or the factors that follow, as in \sin 2x."""
        more = (base,) if base else ()
        if self.next().is_("(", "[", "{", r"\{"):  # \max\{1,2\}
            end = closing(self.tokens, self.at)
            parts, found = split(self.tokens[self.at + 1 : end], ",")
            if found:
                self.at = end + 1
                return tuple(map(tree_of, parts)) if not base else refuse()
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


def _spelt_out(name, arguments):
    """The tree of cis, which is cos + i sin, and of exp, a power of e; None for other functions."""
    if name == "cis":
        return "add", ("call", "cos", arguments), ("multiply", ("i",), ("call", "sin", arguments))
    return ("power", ("e",), *arguments) if name == "exp" and len(arguments) == 1 else None


def _is_numeral(tree):
    return tree[0] == "number" or (tree[0] == "divide" and all(part[0] == "number" for part in tree[1:]))


def _product(factors):
    return ("multiply", *factors) if len(factors) > 1 else factors[0]


class Unit(Reader):
    """Reads what follows a value: a unit with its powers and quotients, or words that say what is counted."""

    def whole(self, units_only=False):
        """{name: power}, empty for a label."""
        if self.next().is_("(") and closing(self.tokens, 0) == len(self.tokens) - 1:
            self.tokens = self.tokens[1:-1]
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
        if self.next().is_(".") and self.next(1).is_("^"):  # in.^2
            self.take()
        if self.next().value in POWERS_AFTER:
            power = POWERS_AFTER[self.take().value]
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
            inside = without_braces(self.tokens[self.at : end + 1])
            parts.append(Unit(inside).whole(units_only=True))
            self.at = end + 1
        top, bottom = parts
        return {name: top.get(name, 0) - bottom.get(name, 0) for name in (*top, *bottom)}


def _is_power(token):
    return token.kind == "word" and token.value.lower() in UNIT_POWERS

"""What the tokens of an answer say: an object made of expressions, or nothing where one was not understood.

Objects are tuples: (expression, tree, unit) as in answers.expressions, (words, text), (set, members),
(matrix, rows), (determinant, rows), (equation, sides), (near, value, decimal), (relation, sides, signs),
(all, members) of relations that hold together, (named, {name: object}, objects in order or None), and a pair
of brackets such as ("[)", members) for intervals and tuples.
"""

import itertools
import re
from fractions import Fraction

from answers.expressions import (
    DEEPEST,
    NotUnderstood,
    Reader,
    are_neighbours,
    closing,
    has_unknown,
    is_product,
    refuse,
    spelt,
    split,
    tree_of,
    without_braces,
)
from answers.tokens import CLOSERS, OPENERS, Token
from answers.words import FUNCTIONS, GREEK, is_label

MOST_TOKENS = 800  # of an answer
RELATIONS = {"<": "<", ">": ">", "le": "<=", "ge": ">=", "ne": "!="}
BETWEEN_SETS = {"=", "in", "cup", "cap", "or"}
NAMING = {"=", "in", *RELATIONS}
REALS = ("()", (("expression", ("negate", ("infinity",)), {}), ("expression", ("infinity",), {})))


def read(tokens):
    """The object that tokens say; NotUnderstood where they say none."""
    if len(tokens) == 2 and _is_letter(tokens[0]) and tokens[1].is_(")"):  # a choice: C)
        tokens = tokens[:1]
    tokens = _turned(tokens)
    depth = deepest = 0
    for token in tokens:
        depth += token.is_(*OPENERS) - token.is_(*CLOSERS)
        deepest = max(deepest, depth)
    if not 0 < len(tokens) <= MOST_TOKENS or deepest > DEEPEST:
        raise NotUnderstood
    return _object(tokens, 0)


def _turned(tokens):
    """The tokens, with ]1,2[ as (1,2): brackets that open to the outside, as in France and Germany."""
    if not any(t.is_("[", "]") for t in tokens):
        return tokens
    around = [Token("sign", "="), *tokens, Token("sign", "=")]
    turned = list(tokens)
    for i, (before, token, after) in enumerate(zip(around, tokens, around[2:], strict=False)):
        if token.is_("]") and before.is_(*BETWEEN_SETS):
            turned[i] = Token("sign", "(", token.spaced, token.text)
        elif token.is_("[") and after.is_(*BETWEEN_SETS):
            turned[i] = Token("sign", ")", token.spaced, token.text)
    return tuple(turned)


def _object(tokens, depth):
    if depth > DEEPEST:
        raise NotUnderstood
    tokens = _without_name(without_braces(tokens))
    for reader in (
        _approximated,
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


NAME = re.compile(
    r"[a-zA-Z]'?(?: _ (?:\{ )?\w+(?: , \w+)*(?: \})?)?|[A-Z]{2,3}|\\(?:vec|bar|hat|overline) \{ \w+ \}"
    r"|\[ [A-Z] \]|(?:m )?\\angle [a-zA-Z]{1,3}|\\[a-zA-Z]+"
    r"|(?P<function>[a-zA-Z](?: '| \^ \{ - 1 \})? \( (?:- )?[\w, ]+ \))"
    r"|\| [A-Z]{2} \||(?:P|Pr|E|Var) (?:\( [^()]+ \)|\[ [^\[\]]+ \])"
)


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

    The right side alone of `f(x) = 3x`.
    """
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
    return tokens if is_equation or states_more else _without_name(without_braces(sides[1]))


def subject(tokens):
    """The variable that a whole answer names: the x of x = 5, x > 5 and 1 < x < 5; else None."""
    if NAMING.isdisjoint(token.value for token in tokens):
        return None
    try:
        sides, found = split(tokens, *NAMING, ",", ";", "and", "or")
    except NotUnderstood:  # prose
        return None
    names = [side[0].value for side in sides if len(side) == 1 and _is_letter(side[0])]
    is_about = len(names) == 1 == sum(map(has_unknown, sides)) and NAMING.issuperset(found)
    return names[0] if is_about else None


def _outermost(tokens):
    depth = 0
    for token in tokens:
        depth += token.is_(*OPENERS)
        if depth == 0:
            yield token
        depth -= token.is_(*CLOSERS)


def _approximated(tokens, depth):
    r"""The value of `\frac13 \approx 0.33`, with the decimal that it is said to be near."""
    parts, found = split(tokens, "approx")
    decimal = re.fullmatch(r"((?:- )?\d*\.?\d+)(?: \\deg| %)?", spelt(parts[-1])) if found else None
    if decimal is None or len(parts) > 2:
        return None
    value = _object(parts[0], depth + 1)
    is_number = value[0] in ("expression", "equation")
    return ("near", value, decimal[1].replace(" ", "")) if is_number else refuse()


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
    if tokens[0].value == "begin cases" and tokens[-1].value == "end cases":
        parts, found = split(tokens[1:-1], r"\\")
    else:
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
        is_ordered = are_neighbours("".join(names)) and all(len(name) == 1 for name in names)
        return "named", dict(in_order), tuple(value for _, value in in_order) if is_ordered else None
    members = _members(parts, depth)
    if not (is_relation and "and" in found):
        return "set", members
    return _both(members) if len(set(map(subject, parts))) == 1 else ("all", members)


def _both(members):
    """What holds together: the interval of x > 1 and x < 5."""
    if len(members) == 2 and all(kind in ("()", "[)", "(]") for kind, *_ in members):
        below, above = sorted(members, key=lambda interval: interval[1][0] != REALS[1][0])
        if below[1][0] == REALS[1][0] and above[1][1] == REALS[1][1]:
            return above[0][0] + below[0][1], (above[1][0], below[1][1])
    return "all", members


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
    members = [_object(part, depth + 1) for part in parts]
    return "set", tuple(itertools.chain.from_iterable(m[1] if m[0] == "set" else [m] for m in members))


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
    return _interval(sides, signs, depth) or ("relation", tuple(map(tree_of, sides)), tuple(signs))


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
    if len(found) > 1 and sides[0] and _name(sides[0]) and not any(map(has_unknown, sides[1:])):
        sides = sides[1:]  # A = 6/2 = 3
    return ("equation", tuple(map(tree_of, sides))) if found else None


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
    """A matrix, and one with a factor before it."""
    if tokens[-1].kind != "environment" and not tokens[-1].is_("]", ")"):
        return None
    start = next((i for i, t in enumerate(tokens) if t.kind == "environment"), 0)
    start -= start > 0 and tokens[start - 1].is_("[", "(")
    if start > 0:
        before = tokens[: start - tokens[start - 1].is_("cdot")]
        factor = ("number", Fraction(-1)) if spelt(before) == "-" else tree_of(before)
        kind, rows = _matrix(tokens[start:], depth) or refuse()
        return kind, tuple(_times(factor, row) for row in rows) if kind == "matrix" else refuse()
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


def _times(factor, row):
    """A row, each of whose cells is multiplied by a factor."""
    cells = [cell[1] if cell[0] == "expression" and not cell[2] else refuse() for cell in row[1]]
    return "row", tuple(("expression", ("multiply", factor, cell), {}) for cell in cells)


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
    return _members(parts, depth) if all(parts) else refuse()


def _built_plainly(tokens, depth):
    """{x | x > 3} and {x ∈ ℝ | x > 3} without backslashes, whose braces are gone by now."""
    is_built = len(tokens) > 2 and _is_letter(tokens[0]) and tokens[1].is_("|", ":", "in")
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
        return made if made[0] in ("()", "(]", "[)", "[]", "set") else refuse()
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
    is_choice = len(tokens) > 1 and tokens[0].value.lower() in ("option", "choice")
    tokens = tokens[is_choice:]
    while len(tokens) > 2 and tokens[0].is_("(") and tokens[-1].is_(")"):
        tokens = tokens[1:-1]
    if not tokens or any(t.kind != "word" for t in tokens):
        return None
    values = [t.value for t in tokens]
    is_bare = not any(t.text for t in tokens)
    if set(values) & FUNCTIONS or (is_bare and set(values) & GREEK):
        return None
    is_word = re.fullmatch("[Nn]o|[IVX]{2,}|[A-Z]{3,}", values[0])  # and no product: HTT is not TTH
    if is_bare and not is_choice and (all(len(v) < 3 for v in values) or is_product(values)) and not is_word:
        return None
    if values[0].lower() in ("a", "an", "the") and len(values) > 1:
        values = values[1:]
    words = " ".join(values).lower()
    if words in ("infinity", "pi"):
        return None
    if words in ("negative infinity", "minus infinity"):
        return "expression", ("negate", ("infinity",)), {}
    return REALS if words in ("all real numbers", "all reals", "real numbers") else ("words", words)

"""Whether two MATH answers are the same object: right, wrong or undecided, in bounded work."""

import itertools
from functools import lru_cache

from answers.expressions import NotUnderstood
from answers.grammar import read, subject
from answers.numbers import parse_number
from answers.tokens import tokenise
from answers.values import WORK_A_SECOND, Budget, NoValue, Undecided, is_near, proportional, same_value
from answers.words import is_label

LONGEST = 2000  # characters; no answer in MATH comes near it
MODULUS_KEYS = {("command", "pmod"), ("command", "mod"), ("word", "mod")}
MODULUS = ("word", "mod")
HALF_DAYS = {("word", "AM"): ("word", "am"), ("word", "PM"): ("word", "pm")}
MOST_MEMBERS = 40  # of a set whose members are compared each with each


def math_equal(answer, reference, timeout=1.0):
    """Whether two answers, texts as extracted, denote the same mathematical object: True, False or None.

    None: undecided, since numbers are too large, or it might take longer than `timeout` seconds. That bounds
    the work and is no clock: a verdict depends on the two texts alone. Spelling, spaces, labels, and units
    that only one side has do not count; nothing is rounded; a comma list and \\{...\\} are sets, (a,b) is
    ordered, brackets count; 6*7=42 is 42, and the false 41=42 is no value. From any thread.
    """
    if not isinstance(answer, str) or not isinstance(reference, str):
        return False
    answer, reference = answer.strip(), reference.strip()
    if not answer or not reference:
        return False
    if answer == reference:
        return True
    if len(answer) > LONGEST or len(reference) > LONGEST:
        return False
    return _compared(answer, reference, timeout)


def all_math_equal(answers, references, timeout=1.0):
    """math_equal of each pair; a pair that occurs again is compared once."""
    return [math_equal(*pair, timeout) for pair in zip(answers, references, strict=True)]


@lru_cache(maxsize=100_000)
def _compared(answer, reference, timeout):
    (tokens, one), (other_tokens, two) = _read(answer), _read(reference)
    if not tokens or not other_tokens:
        return False
    if [token.key for token in tokens] == [token.key for token in other_tokens]:
        return True
    if one is None and two is None:
        return _spelling(tokens) == _spelling(other_tokens)
    one, two = one or _in_prose(answer, tokens), two or _in_prose(reference, other_tokens)
    if one is None or two is None:
        return False
    verdict = Comparison(Budget(timeout * WORK_A_SECOND)).same_whole(one, two)
    names = {subject(tokens), subject(other_tokens)} - {None} if verdict else ()
    return verdict if len(names) < 2 else False  # x = 5 is not y = 5


def _spelling(tokens):
    r"""The tokens' keys, without braces around a single character: \pmod{7} is \pmod 7.

    All ways to write a modulus are one: \pmod{12}, \pmod 12, \bmod 12 and (mod 12). Words have no case, but
    for names of points and the like.
    """
    keys, opened = [], []
    for token in tokens:
        is_name = token.kind == "word" and (len(token.value) < 3 or token.value.isupper())
        key = token.key if is_name or token.kind != "word" else ("word", token.value.lower())
        keys.append(MODULUS if key in MODULUS_KEYS else HALF_DAYS.get(key, key))
        if token.is_("{", "("):
            opened.append(len(keys) - 1)
        elif token.is_("}", ")") and opened:
            start = opened.pop()
            before, inside = keys[max(0, start - 1) : start], keys[start + 1 : -1]
            is_braced = keys[start] == ("sign", "{")
            is_character = len(inside) == 1 and len(inside[0][1]) == 1
            if (is_braced and (is_character or before == [MODULUS])) or inside[:1] == [MODULUS]:
                keys[start:] = inside
    return keys


def _in_prose(text, tokens):
    """The one number of a text such as `there are 19 eggs left`, whose words change nothing of it."""
    words = [token.value for token in tokens if token.kind == "word"]
    number = parse_number(text) if all(word == "times" or is_label(word) for word in words) else None
    return None if number is None else ("expression", ("number", number), {})


@lru_cache(maxsize=20_000)
def _read(text):
    """The tokens, and the object that they say; None where a token was not understood."""
    tokens = tokenise(text)
    try:
        return tokens, read(tokens)
    except NotUnderstood:
        return tokens, None


class Comparison:
    """Of two objects of the grammar; every verdict is True, False, or None for undecided."""

    def __init__(self, budget):
        self.budget = budget

    def same_whole(self, a, b):
        """same, where a set of one element is that element."""
        for one, other in ((a, b), (b, a)):
            if one[0] == "set" != other[0] and len(one[1]) == 1:
                return self.same(one[1][0], other)
        return self.same(a, b)

    def same(self, a, b):
        kinds = {a[0], b[0]}
        if "near" in kinds:
            (_, value, decimal), other = (a, b) if a[0] == "near" else (b, a)
            tree = value[1] if value[0] == "expression" else value[1][0]
            return _all([self.ask(is_near, tree, decimal), self.same(value, other)])
        if len(kinds) == 1:
            # of brackets and matrices, in order
            return getattr(self, f"_same_{a[0]}", self._same_in_order)(a, b)
        if kinds == {"expression", "words"}:  # a choice: C, and (C)
            value, words = (a, b) if a[0] == "expression" else (b, a)
            return value[1][0] in ("symbol", "e", "i") and value[1][-1].lower() == words[1]
        if kinds == {"expression", "equation"}:  # 6*7 = 42 is 42, where 41 = 42 is no value
            value, (_, sides) = (a, b) if a[0] == "expression" else (b, a)
            return _all(self.ask(same_value, side, value[1]) for side in sides)
        if kinds == {"named", "set"}:  # x_1=1, x_2=2 and 1, 2
            (_, values, _), members = (a, b) if a[0] == "named" else (b, a)
            is_one_letter = len({name.partition(" _")[0] for name in values}) == 1
            return self._same_set(("set", tuple(values.values())), members) if is_one_letter else False
        if kinds == {"named", "()"}:  # x=1, y=2 and (1,2)
            (_, _, ordered), members = (a, b) if a[0] == "named" else (b, a)
            return self._same_in_order(("()", ordered), members) if ordered else False
        return False

    def _same_in_order(self, a, b):
        if len(a[1]) != len(b[1]):
            return False
        return _all(self.same(x, y) for x, y in zip(a[1], b[1], strict=True))

    def _same_set(self, a, b):
        """Each member of one has its equal in the other, which serves once."""
        if len(a[1]) != len(b[1]):
            return False
        if len(a[1]) > MOST_MEMBERS:
            return True if a == b else None
        rest, is_sure = list(b[1]), True
        for member in a[1]:
            verdicts = []
            for i, candidate in enumerate(rest):
                verdicts.append(self.same(member, candidate))
                if verdicts[-1]:
                    del rest[i]
                    break
            else:
                if None not in verdicts:
                    return False
                is_sure = False
        return True if is_sure else None

    _same_all = _same_set

    def _same_named(self, a, b):
        if a[1].keys() != b[1].keys():
            return False
        return _all(self.same(value, b[1][name]) for name, value in a[1].items())

    def _same_words(self, a, b):
        return a[1] == b[1]

    def _same_expression(self, a, b):
        (_, left, unit), (_, right, other) = a, b
        if unit and other and _differ(unit, other):
            return False
        return True if left == right else self.ask(same_value, left, right)

    def _same_equation(self, a, b):
        if a == b:
            return True
        if len(a[1]) != 2 or len(b[1]) != 2:
            return False
        return self.ask(proportional, _difference(a[1]), _difference(b[1]), False)

    def _same_relation(self, a, b):
        """Chains such as a < b <= c, compared link by link."""
        (_, sides, signs), (_, other_sides, other_signs) = a, b
        if signs != other_signs or len(sides) != len(other_sides):
            return False
        links = zip(itertools.pairwise(sides), itertools.pairwise(other_sides), signs, strict=True)
        return _all(self._same_link(one, two, sign) for one, two, sign in links)

    def _same_link(self, one, two, sign):
        if one == two:
            return True
        return self.ask(proportional, _difference(one), _difference(two), sign != "!=")

    def ask(self, question, *trees):
        try:
            return question(*trees, self.budget)
        except Undecided:
            return None
        except NoValue:
            return False


def _differ(unit, other):
    """Whether two units differ: `units` may be any, of the same power; `degrees` may be of a temperature."""
    if ["unit"] in (list(unit), list(other)):
        return sum(unit.values()) != sum(other.values())
    return unit != other and {*unit, *other} not in ({"degree", "°C"}, {"degree", "°F"})


def _all(verdicts):
    """True where all are, None where one is undecided and none is False."""
    result = True
    for verdict in verdicts:
        if verdict is False:
            return False
        result = result and verdict
    return result


def _difference(sides):
    return "add", sides[0], ("negate", sides[1])

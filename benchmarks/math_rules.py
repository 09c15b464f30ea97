"""Forty rules on MATH answers: thirty write the same answer in another way, ten make another answer of it.

Each rule is a function from a text to a text, or to None where it does not apply. A rule applies only where
its effect is certain by construction; nothing here asks a grader. Conventions of MATH hold: a unit, a label,
a degree or currency sign beside a number that stands alone does not count, and a comma list is a set.
"""

import re
import zlib
from decimal import Decimal
from fractions import Fraction

NUMBER = re.compile(r"\d+|\d*\.\d+")
FRACTION = r"\\[dt]?frac ?(?:\{(\d+)\}|(\d)) ?(?:\{(\d+)\}|(\d))"
GROUPED = re.compile(r"\d(?:,|\{,\}|\\,|,\\!) ?\d{3}(?!\d)")
DELIMITERS = re.compile(r"\\[()\[\]]|\\boxed|(?<!\\)\$")
WORDS = re.compile(r"\\(?:text|mbox|math)[a-z]*\{|\\\$|(?<![\\a-zA-Z])[a-zA-Z]{2}|(?<!\\)\\ ")
SUM = re.compile(r"(?:[\w+^{}()*/ √-]|\d\.\d|\\(?:[dtc]?frac|sqrt|pi|cdot|times|cot)(?![a-z]))+")
# A coefficient and what it multiplies: a root, pi, or one letter, with a power of one digit.
FACTORS = re.compile(
    r"(?<![\w^.}\\])(\d+) ?((?:\\sqrt(?:\{\d+\}|\d)|\\pi(?![a-z])|[a-zA-Z](?!\w))(?:\^\d)?)(?![\^{])"
)
TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)
OPENING, CLOSING = {"(", "[", "{", r"\{", r"\begin"}, {")", "]", "}", r"\}", r"\end"}


def one_of(text, *variants):
    """One of several spellings, always the same one for a text."""
    return variants[zlib.crc32(text.encode()) % len(variants)]


def has_words(text):
    """Whether a text has more than mathematics in it: words, units, delimiters, the end of a sentence."""
    names = re.sub(r"\\(?:begin|end)\{[a-z]+\}(?:\{c+\})?", "", text)
    bare = re.sub(r"\\(?!text|mbox|math|boxed)[a-zA-Z]+", "#", names)
    return bool(WORDS.search(bare) or DELIMITERS.search(bare) or text.endswith("."))


def pieces(text, separators):
    """The parts outside all brackets, with the separators between them; None where brackets do not match."""
    parts, depth = [""], 0
    for token in TOKEN.findall(text):
        depth += (token in OPENING) - (token in CLOSING)
        if depth < 0:
            return None
        if depth == 0 and token in separators:
            parts += [token, ""]
        else:
            parts[-1] += token
    return [part.strip() for part in parts] if depth == 0 else None


def bracketed(text):
    """(opening bracket, members, closing bracket) of a tuple, an interval or a set of two members or more."""
    match = re.fullmatch(r"(?:\\left)? ?(\(|\[|\\\{)(.*?)(?:\\right ?)?(\)|\]|\\\})", text)
    parts = pieces(match[2], {","}) if match else None
    if not parts or len(parts) < 3 or GROUPED.search(text):
        return None
    return match[1], parts[::2], match[3]


def listed(text):
    """The members of a comma list without brackets."""
    parts = pieces(text, {","})
    return parts[::2] if parts and len(parts) > 1 and not GROUPED.search(text) and "=" not in text else None


def intervals(text):
    """[(opening bracket, [from, to], closing bracket), ...] of a union or of what can only be an interval.

    (1,2) alone may be a point.
    """
    text = text.removeprefix(r"x \in ")
    found = [bracketed(part) for part in (pieces(text, {r"\cup"}) or [])[::2]]
    if not found or not all(item and len(item[1]) == 2 and item[0] != r"\{" for item in found):
        return None
    certain = len(found) > 1 or r"\infty" in text or "]" in text or "[" in text
    return found if certain else None


def terms(text):
    """The signed terms of a sum, as [sign, term, sign, term, ...]; None where it is no sum of two or more."""
    parts = pieces(text.strip(), {"+", "-"})
    if parts is None or has_words(text) or not SUM.fullmatch(text):
        return None
    parts = parts[1:] if parts[0] == "" else ["+", *parts]
    return parts if len(parts) > 2 and all(parts) else None


def joined(signed):
    text = " ".join(signed)
    return text[2:] if signed[0] == "+" else text


def is_value(text):
    """Whether a text is a number without a unit: digits, fractions, roots, pi."""
    plain = re.sub(r"\\(?:[dt]?frac|sqrt|pi)(?![a-z])", "", text)
    return bool(re.fullmatch(r"[-+\d.{} ]+", plain)) and any(map(str.isalnum, plain + text))


def as_fraction(match):
    above, below = (int(match[i] or match[i + 1]) for i in (1, 3))
    return above, below


def is_delimited(text):
    """Whether a text has delimiters of mathematics already, or words that stand outside mathematics."""
    return bool(DELIMITERS.search(text) or re.search(r"\d [a-z]{2}", text))


# Rules that keep the value.


def spaces_added(text):
    # A blank counts for nothing in mathematics; 1,000 must not become a list.
    if not has_words(text) and not GROUPED.search(text):
        wide = one_of(text, " ", r"\, ", r"\; ", "  ")
        binary = re.compile(r"(?<=[\w})])(?<!matrix}) ?([-+=]|\\(?:cup|pm|in)(?![a-z])) ?")
        spaced = binary.sub(lambda m: f"{wide}{m[1]}{wide}", text)
        return re.sub(r"(?<!\\) ?([/,]|(?<![^(\[])-) ?", r" \1 ", spaced).strip()


def spaces_removed(text):
    # As above; the blank between a command and a letter, and the one in "3, 500", have to stay.
    if not has_words(text) and not re.search(r"\d, +\d{3}(?!\d)|\d +\d", text):
        return re.sub(r"(\\[a-zA-Z]+ )(?=[a-zA-Z])| ", r"\1", text)


def arguments_spaced(text):
    # Blanks inside the braces of a fraction, a root or an exponent count for nothing.
    if not has_words(text) and r"\begin" not in text:
        return re.sub(r"(?<!\\)\{([^{},]+)\}", r"{ \1 }", text)


def slash(text):
    # A fraction of whole numbers that is a whole answer or member, so that nothing else binds its parts.
    def written(match):
        above, below = (match[i] or match[i + 1] for i in (2, 4))
        return f"{match[1]}{above}/{below}"

    return re.sub(rf"((?:^|[(\[,] ?)-?){FRACTION}(?= ?(?:$|[,)\]]|\\right))", written, text)


def fraction_size(text):
    # \dfrac, \tfrac and \cfrac differ from \frac in size only.
    if r"\dfrac" in text:
        return text.replace(r"\dfrac", r"\frac")
    return text.replace(r"\frac", one_of(text, r"\dfrac", r"\tfrac", r"\cfrac"))


def short_arguments(text):
    # The braces of an argument of one character may be left out.
    text = re.sub(r"(\\[dt]?frac)\{(\d)\}(?=\{)", r"\1\2", text)
    text = re.sub(r"(\\[dt]?frac(?:\d|\{\w+\}|\{\w*\\sqrt\{?\d+\}?\}))\{(\d)\}(?!\d)", r"\1\2", text)
    return re.sub(r"(\\sqrt)\{(\d)\}(?!\d)", r"\1\2", text)


def decimal_value(text):
    # A fraction whose denominator divides a power of ten is a finite decimal.
    match = re.fullmatch(rf"-?{FRACTION}", text)
    if match:
        above, below = as_fraction(match)
        if above % below and 10**12 % below == 0:
            return f"{'-' * text.startswith('-')}{Decimal(above) / Decimal(below):f}"


def bracket_size(text):
    # \left, \right and \bigl set the size of a bracket.
    if has_words(text) or r"\big" in text:
        return None
    if r"\left" in text:
        return text.replace(r"\left", r"\bigl").replace(r"\right", r"\bigr")
    return re.sub(r"(\\\}|[)\]])", r"\\right\1", re.sub(r"(\\\{|[(\[])", r"\\left\1", text))


def dollars(text):
    # Dollar signs say that mathematics stands between them.
    if not is_delimited(text):
        return one_of(text, f"${text}$", f"$ {text} $", f"$${text}$$")


def math_delimiters(text):
    # So do \( \) and \[ \].
    if not is_delimited(text):
        return one_of(text, rf"\({text}\)", rf"\[{text}\]", rf"\( {text} \)")


def boxed(text):
    # A box is a frame.
    if not is_delimited(text):
        return rf"\boxed{{{text}}}"


def bare_words(text):
    # \text sets the font.
    match = re.fullmatch(r"\\text\{ ?(\(?[A-Za-z]+\)?) ?\}", text)
    return match and match[1]


def font(text):
    # As do these.
    names = ("mbox", "textbf", "textrm", "mathrm", "textit")
    return re.sub(
        r"\\(?:text|mbox)\{", lambda m: f"\\{one_of(text, *(n for n in names if n not in m[0]))}{{", text
    )


def full_stop(text):
    # The mark that ends a sentence.
    if not text.endswith("."):
        return f"{text}."


def label(text):
    # A plain noun after a bare number says what was counted.
    if NUMBER.fullmatch(text):
        nouns = (
            r"{}\text{{ apples}}",
            "{} students",
            r"{} \mbox{{ people}}",
            r"{}\text{{ ways}}",
            "{} marbles",
        )
        return one_of(text, *nouns).format(text)


def unit(text):
    # A reference without a unit asks for the number.
    if NUMBER.fullmatch(text):
        units = (
            *(
                r"\text{ cm}",
                r"\,\text{cm}^2",
                " cm",
                r"\text{ kg}",
                " ft²",
                r" \mbox{ inches}",
                r"\mathrm{~km/h}",
            ),
            *(
                r"\,\text{m}^{3}",
                " km/h",
                r"\ \mathrm{m}",
                r" \text{ square feet}",
                r" \frac{\text{m}}{\text{s}}",
            ),
        )
        return text + one_of(text, *units)


def degrees(text):
    # Spellings of one sign.
    signs = ("°", r"\degree", r"^{\circ}", r"\text{ degrees}", " degrees")
    if r"\text{ degrees}" in text:
        return text.replace(r"\text{ degrees}", r"^\circ")
    return text.replace(r"^\circ", one_of(text, *signs))


def currency(text):
    # The sign of a currency is a unit, and has a name.
    if NUMBER.fullmatch(text):
        return one_of(text, rf"\${text}", rf"{text}\text{{ dollars}}", f"{text} dollars", rf"\$ {text}")
    if text.startswith(r"\$"):
        return one_of(text, r"{}\text{{ dollars}}", "{} dollars").format(text.removeprefix(r"\$"))


def members(text):
    # The order in a comma list, a set or a union does not count, and a \pm b are two members.
    if has_words(text):
        return None
    if parts := listed(text):
        return one_of(text, ", ".join(parts[::-1]), r"\{" + ", ".join(parts[::-1]) + r"\}")
    item = bracketed(text)
    if item and item[0] == r"\{":
        return r"\{" + ", ".join(item[1][::-1]) + r"\}"
    if r"\cup" in text:
        return r" \cup ".join(pieces(text, {r"\cup"})[::-2])
    parts = pieces(text, {r"\pm"})
    if parts and len(parts) == 3:
        return f"{parts[0]} - {parts[2]}, {parts[0]} + {parts[2]}"


def factors(text):
    # Multiplication of numbers and letters commutes.
    if not has_words(text):
        parts = re.fullmatch(r"(\([^()]+\))(\([^()]+\))", text)
        return parts[2] + parts[1] if parts else FACTORS.sub(r"\2 \\cdot \1", text)


def summands(text):
    # So does addition.
    sides = [(terms(side), side.strip()) for side in text.split("=")]
    reordered = []
    for signed, side in sides:
        pairs = [] if signed is None else [signed[i : i + 2] for i in range(0, len(signed), 2)]
        reordered.append(joined([part for pair in pairs[::-1] for part in pair]) if pairs else side)
    return " = ".join(reordered) if any(signed for signed, _ in sides) else None


def named(text):
    # The name of the unknown whose value it is.
    if is_value(text):
        return one_of(text, "x = ", "x=", "k = ", "n=", r"\theta = ") + text
    if text.startswith(r"x \in "):
        return text.removeprefix(r"x \in ")
    if re.fullmatch(r"[a-z] ?= ?-?\d+", text):
        return text.partition("=")[2].strip()
    return rf"x \in {text}" if intervals(text) else None


def thousands(text):
    # Digits in groups of three from the right.
    if re.fullmatch(r"\d{4,}", text):
        return f"{int(text):,}".replace(",", one_of(text, ",", "{,}", r"\,", r",\!", r",\! "))
    if re.fullmatch(r"(\\\$)?\d{1,3}((,\\! ?|,)\d{3})+", text):
        return re.sub(r",|\\!| ", "", text)


def zeros(text):
    # Zeros in front of the point, and behind the last decimal, count for nothing.
    match = re.fullmatch(r"(-|\\\$)?(\d*)(\.\d+)?", text)
    if not match or not text:
        return None
    sign, whole, decimals = (group or "" for group in match.groups())
    if not decimals:
        return f"{sign}{whole}{one_of(text, '.0', '.00')}"
    return (
        f"{sign}{'0' if not whole else whole if int(whole) else ''}{decimals}{'0' * (whole not in ('', '0'))}"
    )


def times(text):
    # A product without a sign is a product.
    if not has_words(text):
        sign = one_of(text, r" \cdot ", r" \times ", "*", r"\cdot ")
        return FACTORS.sub(lambda m: m[1] + sign + m[2], text).replace(")(", f"){sign}(")


def symbols(text):
    # Characters that Unicode has for these commands.
    characters = {r"\pi": "π", r"\infty": "∞", r"\cup": one_of(text, "∪", "U"), r"\pm": "±", r"\in": "∈"}
    for command, character in characters.items():
        text = re.sub(rf"{re.escape(command)}(?![a-z])", character, text)
    text = re.sub(r"\\sqrt(?:\{(\d+)\}|(\d))(?!\d)", lambda m: f"√{m[1] or m[2]}", text)
    return re.sub(r"\^([2-9])(?!\d)", lambda m: "²³⁴⁵⁶⁷⁸⁹"[int(m[1]) - 2], text)


def minus_sign(text):
    # The typographic minus.
    return text.replace("-", "−")


def script_braces(text):
    # One character needs no braces, and may have them.
    if re.search(r"[\^_]\{\w\}", text):
        return re.sub(r"([\^_])\{(\w)\}(?!\d)", r"\1\2", text)
    return re.sub(r"([\^_])(\d|\\circ)", r"\1{\2}", text)


def inequality(text):
    # An interval is the set of the numbers between its ends.
    found = intervals(text)
    if not found:
        return None
    or_equal = one_of(text, r"\le", r"\leq", "≤")
    ranges = []
    for opening, (low, high), closing in found:
        above = "" if low == r"-\infty" else f"{low} {'<' if opening == '(' else or_equal} "
        below = "" if high == r"\infty" else f" {'<' if closing == ')' else or_equal} {high}"
        ranges.append(f"{above}x{below}")
    return one_of(text, r"\text{ or }", " or ").join(ranges)


def matrix(text):
    # The brackets around a matrix are a matter of taste.
    if r"\begin{pmatrix}" in text:
        columns = "c" * (text.split(r"\\")[0].count("&") + 1)
        array = text.replace(r"\begin{pmatrix}", rf"\left[\begin{{array}}{{{columns}}}")
        array = array.replace(r"\end{pmatrix}", r"\end{array}\right]")
        return one_of(text, text.replace("pmatrix", "bmatrix"), array)


# Rules that change the value.


def sign(text):
    # The opposite of a number that is not 0, or of one term of a sum, is another; so is a tuple with it.
    if has_words(text) or r"\pm" in text or re.fullmatch(r"[\D0]*0[\D0]*", text):
        return None
    if (
        "=" in text
        or r"\in " in text
        or r"\begin" in text
        or pieces(text, {","}) != [text]
        or bracketed(text)
    ):
        return re.sub(r"-?(?=[1-9])(?<![\d^_.{])", lambda m: "" if m[0] else "-", text, count=1)
    signed = terms(text)
    if signed:
        return joined([*signed[:-2], "+" if signed[-2] == "-" else "-", signed[-1]])
    return text[1:].strip() if text.startswith("-") else f"-{text}"


def digit(text):
    # The first number, whatever it counts, becomes another by one in its last digit.
    def lowered(match):
        last = int(match[0][-1])
        return match[0][:-1] + str(last - 1 if last else 1)

    return re.sub(r"\d*\.?\d+", lowered, text, count=1)


def bracket_kind(text):
    # (a,b), [a,b), (a,b] and \{a,b\} are four kinds of objects.
    if r"\cup" in text:
        parts = pieces(text, {r"\cup"})
        return " ".join([bracket_kind(parts[0]) or "", *parts[1:]])
    item = bracketed(text)
    if not item:
        return None
    opening, inside, closing = item
    if opening == r"\{":
        return f"({', '.join(inside)})"
    if len(inside) > 2:
        return rf"\{{{', '.join(inside)}\}}"
    other = {"(": "[", "[": "(", ")": "]", "]": ")"}
    if inside[0] == r"-\infty":
        return f"{opening}{inside[0]}, {inside[1]}{other[closing]}"
    return f"{other[opening]}{inside[0]}, {inside[1]}{closing}"


def are_distinct(one, two):
    """Whether two members are certainly different: two fractions, opposites, or one with pi or a bar only."""
    try:
        return Fraction(one) != Fraction(two)
    except ValueError:
        is_opposite = one in (f"-{two}", f"- {two}") or two == f"-{one}"
        return is_opposite or (r"\pi" in one) != (r"\pi" in two) or (r"\frac" in one) != (r"\frac" in two)


def order(text):
    # The members of a tuple, the ends of an interval and the rows of a matrix have places.
    if r"\begin{pmatrix}" in text:
        head, body, tail = re.fullmatch(r"(\\begin\{pmatrix\})(.*)(\\end\{pmatrix\})", text).groups()
        inside = [row.strip() for row in body.split(r"\\")]
        if len(inside) > 1 and inside[0] != inside[1] and ("&" in body or are_distinct(*inside[:2])):
            return head + r" \\ ".join([inside[1], inside[0], *inside[2:]]) + tail
        return None
    item = bracketed(text)
    if item and item[0] != r"\{" and are_distinct(*item[1][:2]):
        return f"{item[0]}{', '.join([item[1][1], item[1][0], *item[1][2:]])}{item[2]}"


def letter_case(text):
    # R and r are two unknowns. Not i, which may be the imaginary unit, nor the name before a value.
    if has_words(text) or r"\in " in text or re.fullmatch(r"[a-z] ?= ?-?[\d.]+", text):
        return None
    bare = re.sub(r"\\[a-zA-Z]+(?:\{pmatrix\})?", lambda m: "#" * len(m[0]), text)
    places = [m.start() for m in re.finditer(r"[a-zA-Z]", bare) if m[0] not in "iIeE"]
    if places:
        return text[: places[-1]] + text[places[-1]].swapcase() + text[places[-1] + 1 :]


def dropped_factor(text):
    # A product without one factor that is neither 1 nor 0 is another.
    if not has_words(text) and r"\circ" not in text:
        text = re.sub(r"^(\([^()]+\))\([^()]+\)$", r"\1", text)
        return FACTORS.sub(lambda m: m[0] if m[1] in "01" else m[2], text, count=1)


def unit_power(text):
    # A length is no area, and an area no volume.
    return re.sub(r"((?:text|mbox)\{ ?[a-z]+\}\^)([23])", lambda m: m[1] + str(5 - int(m[2])), text)


def coefficient(text):
    # One more of something that is not 0; 2 instead of none.
    if has_words(text):
        return None
    if FACTORS.search(text):
        return FACTORS.sub(lambda m: f"{int(m[1]) + 1}{m[2]}", text, count=1)
    return re.sub(r"^(\\sqrt|\\pi|\\cot|[a-z](?= ?[-+^]))", r"2\1", text)


def reciprocal(text):
    # a/b is not b/a, unless a = b or a = -b.
    def turned(match):
        above, below = as_fraction(match)
        return match[0] if above in (0, below) else rf"\frac{{{below}}}{{{above}}}"

    return re.sub(FRACTION, turned, text, count=1)


def fewer(text):
    # Without its last member a list, a set, a tuple, a union, a matrix is another.
    if parts := listed(text):
        return ", ".join(parts[:-1])
    if r"\cup" in text:
        return pieces(text, {r"\cup"})[0]
    if r"\\" in text:
        return text.rpartition(r"\\")[0] + r"\end{pmatrix}"
    item = bracketed(text)
    if item and (len(item[1]) > 2 or item[0] == r"\{"):
        return f"{item[0]}{', '.join(item[1][:-1])}{item[2]}"
    if item and r"\infty" not in text:
        return item[1][0]
    return text.replace(r"\pm", "+")


KEEPING = (
    *(spaces_added, spaces_removed, arguments_spaced, slash, fraction_size, short_arguments, decimal_value),
    *(
        bracket_size,
        dollars,
        math_delimiters,
        boxed,
        bare_words,
        font,
        full_stop,
        label,
        unit,
        degrees,
        currency,
    ),
    *(members, factors, summands, named, thousands, zeros, times, symbols, minus_sign, script_braces),
    *(inequality, matrix),
)
CHANGING = (
    *(
        sign,
        digit,
        bracket_kind,
        order,
        letter_case,
        dropped_factor,
        unit_power,
        coefficient,
        reciprocal,
        fewer,
    ),
)


def applied(rule, text):
    """What a rule makes of a text; None where it does not apply or changes nothing."""
    other = rule(text)
    return None if other == text or not other else other

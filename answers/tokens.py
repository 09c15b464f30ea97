"""A MATH answer cut into tokens, all of it: what is not known becomes a token that no rule reads."""

import re
import unicodedata
from dataclasses import dataclass

from answers.words import CURRENCIES, GREEK

CHARACTERS = {"−": "-", "⁄": "/", "∕": "/", "∶": ":", "٪": "%", "٫": ".", "٬": ",", "’": "'"}
SUPERSCRIPTS = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ", "+-0123456789n")
SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
UNICODE = {
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": r"\div ", "±": r"\pm ",
    "≤": r"\le ",
    "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ", "∪": r"\cup ",
    "∩": r"\cap ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "∞": r"\infty ", "√": r"\sqrt ", "∛": r"\sqrt[3]",
    "°": r"\degree ", "º": r"\degree ", "∣": "|", "…": r"\ldots ", "→": r"\to ", "∠": r"\angle ", "′": "'",
    "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "²": "^{2}", "³": "^{3}",
    "≡": r"\equiv ", "≅": r"\cong ", "∼": r"\sim ", "∥": r"\parallel ", "⊥": r"\perp ", "△": r"\triangle ",
    "∧": r"\land ", "∨": r"\lor ", "∖": r"\setminus ", "⊂": r"\subset ", "⊆": r"\subseteq ",
    "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}",
}  # fmt: skip
UNICODE |= {"、": ", ", "或": " or ", "和": " and "}
UNICODE |= dict.fromkeys("✕✖⨯⨉", r"\times ")
UNICODE |= dict.fromkeys("\u27e8\u2329\u3008", r"\langle ") | dict.fromkeys("\u27e9\u232a\u3009", r"\rangle ")
# not seen, but meant: a function's argument, times, a comma, plus
UNICODE |= {"\u2061": " ", "\u2062": r"\cdot ", "\u2063": ",", "\u2064": "+"}
for name in GREEK - {"varepsilon", "vartheta", "varphi", "ell"}:
    size = "SMALL" if name.islower() else "CAPITAL"
    letter = unicodedata.lookup(f"GREEK {size} LETTER {name.upper().replace('LAMBDA', 'LAMDA')}")
    UNICODE[letter] = f"\\{name} "
UNICODE |= {"ς": r"\sigma ", "ϕ": r"\phi ", "ϵ": r"\epsilon ", "ϑ": r"\theta ", "µ": r"\mu "}
SAME_COMMAND = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "infin": "infty",
    "varnothing": "emptyset", "leq": "le", "geq": "ge", "neq": "ne", "leqslant": "le", "geqslant": "ge",
    "lt": "<", "gt": ">", "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]", "times": "cdot",
    "lparen": "(", "rparen": ")",
    "ast": "cdot", "mid": "|", "vert": "|", "lvert": "|", "rvert": "|", "dots": "ldots", "cdots": "ldots",
    "degree": "deg", "colon": ":", "rightarrow": "to", "textdegree": "deg", "bullet": "cdot",
    "lang": "langle", "rang": "rangle", "exponentialE": "e", "longrightarrow": "to", "bigcup": "cup",
    "bigcap": "cap", "lor": "or", "vee": "or", "wedge": "land", "backslash": "setminus",
    "nicefrac": "frac", "sfrac": "frac", "pounds": "£", "textdollar": "$",
    "varphi": "phi", "varepsilon": "epsilon", "vartheta": "theta", "bmod": "mod", "cr": r"\\",
}  # fmt: skip
SIZES = re.compile(
    r"(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|mathstrut|[lL]arge)$"
)
SPACES = {"quad", "qquad", "enspace", "thinspace", "medspace", "thickspace", "space", "nobreakspace"}
TEXTS = {
    "text", "mbox", "textbf", "textit", "textrm", "textnormal", "textsf", "texttt", "mathrm", "operatorname",
    "hbox", "rm", "textup", "mathbf", "mathit", "mathsf", "bf", "boldsymbol", "bm", "underline",
    "emph", "textsc", "pmb",
}  # fmt: skip
# of a single letter: a letter as any other
FONTS = {"mathbf", "mathit", "mathsf", "bf", "boldsymbol", "bm", "pmb", "underline"}
ACCENTS = {"overline", "bar", "vec", "hat", "overrightarrow", "tilde", "mathbb", "mathcal", "widehat", "dot"}
BRACKETS = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", "langle": "rangle"}
SAME_SIGN = {"+/-": "pm", "**": "^", "*": "cdot", "<=": "le", ">=": "ge", "!=": "ne", "...": "ldots"}
OPENERS, CLOSERS = set(BRACKETS), set(BRACKETS.values())
RUPEES = re.compile(r"\bRs\.? ?(?=\}? ?\d)")
INNER_MATH = re.compile(r"(?<!\\)\$(?=\S)([^$]*[^$\s\\])\$(?!\d)")  # $x=3$ or $x=5$, but not $5 or $6
# around a whole answer: dollars of mathematics, Markdown, quotation marks
WRAPPERS = (
    ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("*", "*"), ("`", "`"),
    ('"', '"'), ("“", "”"), ("``", "''"), ("'", "'"), ("‘", "’"),
)  # fmt: skip
LEADING = re.compile(r"\A\s*(?:=|∴|⇒|\\(?:therefore|implies|[Rr]ightarrow)(?![a-zA-Z]))")
MOST_WRAPPERS = 20  # one around the other; each is a pass over the text

NUMBER = r"\d+(?:\.\d+)?|\.\d+"
GROUPED = (
    r"[1-9]\d{0,2}(?:(?:,\\!\s?|\\,|\{,\}|,\\,)\d{3})+(?!\d)(?:\.\d+)?"  # 1,\!000 and 1\,000 and 10{,}000
)
LEXEMES = re.compile(
    rf"(?P<repeating>(?:\d*)\.(?:\d*)\\(?:overline|bar|dot)\s?\{{\d+\}})"
    rf"|(?P<grouped>{GROUPED})|(?P<comma>(?<![\d.])(?<!(?<!\\),)[1-9]\d{{0,2}}(?:,\d{{3}})+(?!\d|,\d)(?:\.\d+)?)"
    r"|(?P<digits>(?<![\da-zA-Z])(?=\d*[A-F])(?=[A-F]*\d)[\dA-F]++(?=\}?_\{?1[1-6](?!\d)))"
    rf"|(?P<scientific>(?:{NUMBER})[eE](?:-?\d+|\+\d{{2,3}})(?![a-zA-Z\d]))|(?P<number>{NUMBER})"
    r"|(?P<degree>\^\s?(?:\{\s?\\(?:circ|degree)\s?\}|\\(?:circ|degree)(?![a-zA-Z]))|\\(?:degree|textdegree)(?![a-zA-Z])(?:\{\})?|(?<=[\d}])\^(?:\{(?:\\(?:text|mathrm)\{o\}|o)\}|o(?![a-zA-Z])))"
    r"|(?P<environment>\\(?P<edge>begin|end)\s?\{(?P<env>[a-zA-Z]+\*?)\}(?:\{[lcr|\s]*\})?)"
    r"|(?P<unseen>\\(?:[hv]space\*?|(?:text)?color)\s?\{[^{}]*\}|\^\{\\(?:text|mathrm)\{(?:st|nd|rd|th)\}\})"
    r"|(?P<command>\\[a-zA-Z]+)|(?P<row>\\\\(?:\[[^\]]*\])?)"
    r"|(?P<space>(?:\s|~|\\[ ,;:!>]|\\\n)+)|(?P<escaped>\\.)"
    r"|(?P<half_day>[aApP]\.\s?[mM]\.?(?![a-zA-Z]))|(?P<word>[a-zA-Z]{2,}'[a-zA-Z]+|[a-zA-Z]{3,}(?:-[a-zA-Z]{3,})+|[a-zA-Z]+)"
    r"|(?P<sign>\+/-|<=|>=|!=|\*\*|\.\.\.|.)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Token:
    """kind: number, scientific, repeating, word, command, sign, environment. `spaced`: a space stood before
    it; `text`: it stood in \\text{} or its like. Of two tokens with the same key both mean the same.
    """

    kind: str
    value: str
    spaced: bool = False
    text: bool = False

    @property
    def key(self):
        return self.kind, self.value

    def is_(self, *values):
        return self.kind in ("sign", "command") and self.value in values


def ascii_char(char):
    """The ASCII twin of a character, where it has one."""
    if char.isspace():
        return " "
    if char.isdecimal():  # full-width, Arabic-Indic, Devanagari ...; superscripts are digits but not decimal
        return str(unicodedata.decimal(char))
    if "！" <= char <= "～":  # the full-width twins of ASCII
        return chr(ord(char) - 0xFEE0)
    return {"Sc": "$", "Pd": "-"}.get(unicodedata.category(char)) or CHARACTERS.get(char, char)


def normal_characters(text):
    """ASCII and LaTeX for what has such a twin; the rest stays as it is."""
    text = RUPEES.sub("₹", text)
    text = text.replace(r"\left<", r"\langle ").replace(r"\right>", r"\rangle ")
    text = re.sub("[⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ]+", lambda match: f"^{{{match[0].translate(SUPERSCRIPTS)}}}", text)
    text = re.sub("[₀-₉]+", lambda match: f"_{{{match[0].translate(SUBSCRIPTS)}}}", text)
    return "".join(_normal(char) for char in text)


def _normal(char):
    if char in UNICODE:
        return UNICODE[char]
    if char in CURRENCIES:
        return char
    if unicodedata.decomposition(char).startswith("<fraction>"):
        top, _, bottom = unicodedata.normalize("NFKC", char).partition("⁄")
        return rf"\frac{{{top}}}{{{bottom}}}" if bottom else char
    if unicodedata.decomposition(char).startswith("<font>"):  # 𝑥, 𝜋
        return "".join(map(_normal, unicodedata.normalize("NFKC", char)))
    return "" if unicodedata.category(char) == "Cf" else ascii_char(char)  # not seen


def without_wrapping(text):
    """Without a box or the like of math's dollars around the whole, and one closing full stop."""
    text = LEADING.sub("", text).strip()
    for _ in range(MOST_WRAPPERS):
        before = text
        for opening, closing in WRAPPERS:
            if not (text.startswith(opening) and text.endswith(closing) and len(text) > 2 * len(opening)):
                continue
            inside = text[len(opening) : -len(closing)]
            if opening not in inside and closing not in inside:
                text = inside.strip()
        box = re.fullmatch(r"\\f?box(?:ed)?\s*\{(.*)\}", text, re.DOTALL)
        if box and _balanced(box[1]):
            text = box[1].strip()
        text = INNER_MATH.sub(r" \1 ", text)
        text = re.sub(r"(?<![.\\])[.。．](\$?)$|\\+$", r"\1", text).strip()  # and what is left of `\ `
        if text == before:
            break
    return text


def _balanced(text):
    depth = 0
    for brace in re.findall(r"\\[{}]|[{}]", text):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            return False
    return depth == 0


def tokenise(text):
    """The tokens of an answer; each character is in one of them, but for spaces and size commands."""
    out, spaced, font = [], False, None
    fonts = []  # of each open brace, the \\text{} or its like that it belongs to, or None
    depth = 0  # of other open brackets
    for match in LEXEMES.finditer(normal_characters(without_wrapping(text))):
        kind, raw = match.lastgroup, match[0]
        name = raw[1:] if kind == "command" else ""
        if kind in ("space", "unseen") or name in SPACES:
            spaced = True
            continue
        if name in TEXTS or SIZES.match(name):
            font = name if name in TEXTS else font
            continue
        kind, value = _token(match)
        if value == "{":
            fonts.append(font)
            if font:
                font = None
                continue
        elif value == "}" and fonts and fonts.pop():
            continue
        depth += (value in ("(", "[", r"\{")) - (value in (")", "]", r"\}"))
        in_font = font or next(filter(None, reversed(fonts)), None)
        is_letter = len(value) == 1 and (in_font in FONTS or value in "ei")
        is_text = in_font is not None and not is_letter
        font = None
        if kind == "comma":  # 1,234: one number, or in brackets two
            first, *others = value.split(",") if depth > 0 else [value.replace(",", "")]
            out.append(Token("number", first, spaced, is_text))
            for part in others:
                out += [Token("sign", ","), Token("number", part, False, is_text)]
        else:
            out.append(Token(kind, value, spaced, is_text))
        spaced = False
    return tuple(out)


def _token(match):
    """(kind, value) of a match."""
    raw = match[0]
    if match["environment"]:
        return "environment", f"{match['edge']} {match['env'].rstrip('*')}"
    if match["degree"]:
        return "command", "deg"
    if match["digits"]:
        return "number", raw
    if match["grouped"]:
        return "number", re.sub(r"[^\d.]", "", raw)
    if match["half_day"]:
        return "word", f"{raw[0].lower()}m"
    if match["row"]:
        return "sign", r"\\"
    if match["escaped"]:
        return "sign", raw if raw in (r"\{", r"\}") else raw[1:]
    if match["command"]:
        return _sign(SAME_COMMAND.get(raw[1:], raw[1:]))
    if match["sign"]:
        return _sign(SAME_SIGN.get(raw, raw))
    return match.lastgroup, raw


def _sign(value):
    return "command" if value.isalpha() else "sign", value

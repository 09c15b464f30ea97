"""Closed lists of words: units, scales, words that change a number, functions and Greek letters."""

import re

FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc",
    "sinh", "cosh", "tanh", "ln", "log", "lg", "exp", "sqrt", "max", "min", "gcd", "lcm", "asin", "acos",
    "atan", "cosec", "abs", "cis",
}  # fmt: skip
# All names of functions, of which these are not computed.
FUNCTION_NAMES = FUNCTIONS | set(
    "sine cosine tangent cotangent secant cosecant logarithm det dim arg sgn erf deg mod sech csch coth "
    "sup lim".split()
)
GREEK = {
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota",
    "kappa", "lambda", "mu", "nu", "xi", "pi", "rho", "sigma", "tau", "upsilon", "phi", "varphi", "chi",
    "psi", "omega",
    "Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega", "ell",
}  # fmt: skip

# Each unit's spellings; the first is its name. Words of three letters or more also have a plural in s.
UNIT_SPELLINGS = """
degree deg
°C celsius
°F fahrenheit
radian rad
percent pct
dollar USD
cent ¢
euro EUR
pound_sterling GBP
rupee INR Rs
yen JPY
peso
yuan RMB
krone kr krona
m meter metre
km kilometer kilometre kms
cm centimeter centimetre cms
mm millimeter millimetre
dm decimeter decimetre
inch inches in
ft foot feet
yd yard yds
mile mi
g gram gm gms
kg kilogram kilo kgs
mg milligram
lb pound lbs
oz ounce
ton tonne
s second sec secs
ms millisecond
min minute mins
h hour hr hrs
am AM
pm PM
day
week wk wks
month mo mos
year yr yrs
L liter litre l
mL milliliter millilitre ml
dL deciliter decilitre dl
cL centiliter centilitre cl
gal gallon
qt quart
pt pint
cup
tablespoon tbsp
teaspoon tsp
acre
hectare ha
mph
kph kmh kmph
unit
point pts
piece pcs
rpm
dB decibel
hp horsepower
N newton
kN kilonewton
J joule
kJ kilojoule
W watt
kW kilowatt
kWh
MW megawatt
V volt
kV kilovolt
A_ ampere amp
mA milliampere milliamp
Hz hertz
Pa pascal
kPa kilopascal
cal calorie
kcal kilocalorie
mol mole
K_ kelvin
byte
bit
kB KB kb kilobyte
MB mb megabyte
GB gb gigabyte
TB tb terabyte
"""
UNITS = {}
for _name, *_others in map(str.split, UNIT_SPELLINGS.split("\n")[1:-1]):
    for _word in (_name, *_others):
        UNITS[_word] = _name
        if len(_word) > 2:
            UNITS.setdefault(_word.lower(), _name)
            UNITS.setdefault(_word.lower() + "s", _name)
# As bare letters these are a product, unless a space and a number stand before: \\frac12 hr, 2ha.
PRODUCTS = {
    "hp",
    "kr",
    "mo",
    "wk",
    "kN",
    "MW",
    "kV",
    "mA",
    "dB",
    "hr",
    "ha",
    "pt",
    "qt",
    "ms",
    "mi",
    "in",
    "gm",
    "am",
    "pm",
}
# With these, a bare letter after a number and a space is a unit; in \text{} the whole list is.
LONE_UNITS = {"m", "g", "s", "h", "L", "N", "J", "W", "V"}
# Where numbers are graded these are, right after the digits too: 5m, 5p; any other is a variable or a scale.
UNIT_LETTERS = "mgslLhdtcpVWANJCF"
CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound_sterling", "¥": "yen", "₹": "rupee", "¢": "cent"}
COMPOUND_UNITS = {"mph": {"mile": 1, "h": -1}, "kph": {"km": 1, "h": -1}}
UNIT_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
POWERS_AFTER = {"squared": 2, "cubed": 3}  # inches squared

SCALES = {
    "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "lakh": 5, "crore": 7,
}  # fmt: skip
FIGURES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)
ORDINALS = (
    "half halves third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth fifteenth sixteenth "
    "twentieth thirtieth fortieth fiftieth sixtieth hundredth thousandth millionth"
)
NEGATIONS = (
    "not no non none never without neither nor except isn't isnt aren't arent wasn't wasnt ain't cannot can't"
    " nicht kein keine pas ne ni не"
)
OPERATIONS = (
    "minus plus negative times over divided multiplied point squared cubed factorial root mod modulo twice "
    "double triple thrice halved doubled tripled quadruple quintuple neg negativ moins menos más минус "
    "больше меньше"
)
# Whole words that make of the number beside them another one, or none.
CHANGING = set(
    f"{FIGURES} {ORDINALS} {NEGATIONS} {OPERATIONS} dozen score and or than least most below under above "
    "between tens base january february march april may june july august september october november december "
    "mil mio mln mn bln bil bn mrd thou tril trn mehr weniger mindestens höchstens oder einhalb".split()
) | set(SCALES)
CHANGING |= {f"{word}s" for word in (*FIGURES.split(), *ORDINALS.split(), *SCALES, "dozen", "hundredth")}
CHANGING.remove("ones")  # 12 red ones
# Scale words of more languages ("3 (in millions)") and open ends ("3 eggs or more") change a number wherever
# they stand. A hedge that names the number itself is a word like others: "about 3", "3 or so".
SCALE = re.compile(
    r"\b(?:(?:hundred|thousand|[a-z]{1,5}illi(?:on|ard)|dozen|lakh|crore)(?:s|ths?|en|es|e)?"
    r"|tausend|dutzend|(?:mille|millier|douzaine|docena)s?|[mb]ill[oó]n(?:es)?|milh(?:ão|ões)|milion[ei]"
    r"|(?<!more )or (?:more|less|fewer|greater|higher|lower|above|below|over|under)"
    r"|(?:oder|ou|o) (?:mehr|weniger|plus|moins|más|menos))\b"
    r"|[百千万萬亿億兆半]|以[上下内內]|或更?[多少]|тысяч|миллион|миллиард",
    re.IGNORECASE,
)

# Words of one or two letters that may stand among the words of a label: 12 ways to do it.
SMALL_WORDS = set(
    "a an of to in on at by is it we he as so up us me my be do go am pm th st nd rd tv pc cd".split()
)


def changes(word):
    """Whether a word beside a number makes another number of it: million, half, minus, isn't, thirty-two."""
    word = word.lower()
    if word in CHANGING or word.endswith("n't") or SCALE.match(word):
        return True
    return any(part in CHANGING for part in word.split("-"))


def is_label(word):
    """Whether a word beside a number only says what is counted, as in 42 apples."""
    letters = re.sub("['-]", "", word)
    if changes(word) or not letters.isalpha() or word in GREEK or word.lower() in FUNCTION_NAMES:
        return False
    return len(letters) > 2 or word.lower() in SMALL_WORDS

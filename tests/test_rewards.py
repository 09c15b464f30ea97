"""Extraction, number reading and rewards on cases worked by hand, and on shared graded completions."""

import asyncio
import copy
import functools
import json
import math
import random
import re
import sys
import warnings
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest

import grpo_eval
import grpo_train
import rewards
from answers.formats import XML_TAGS, answer_format_named
from answers.user_files import code_of, user_files
from decoding.rollout import Completion
from errors import RewardError, SettingError
from problems.problem import Problem
from problems.prompts import system_prompt
from problems.sources import load_problems
from rewards import (
    ANSWER_FORMATS,
    REWARD_SETS,
    SYSTEM_PROMPT,
    RewardLog,
    binary_correctness_reward,
    check_answers,
    check_parameters,
    combined_reward,
    compute_rewards,
    correctness_reward,
    extract_answer,
    format_reward,
    hash_reward,
    int_reward,
    last_number,
    load_reward,
    lost_answers,
    math_equal,
    math_reward,
    numeric_reward,
    parse_number,
    r1_format_reward,
    reward_columns,
    right_answers,
    soft_format_reward,
    strict_correctness_reward,
    strict_format_reward,
    xml_share_reward,
    xmlcount_reward,
)
from running.contract import rewards_fingerprint
from small_growth import growth
from small_models import paid

GRADED = Path(__file__).parents[2] / "shared" / "cases" / "grading.jsonl"

NUMBERS = {
    "17": "17", "-3": "-3", "+8": "8", "007": "7", "-0": "0", "12.50": "25/2", "12.": "12", ".25": "1/4",
    "-.5": "-1/2", "8.0.": "8", "2,500": "2500", "-12,345,678.5": "-24691357/2", "75%": "75", "75 %": "75",
    "75\\%": "75", "75 percent": "75", "$18": "18", "\\$18": "18", "€7.50": "15/2", "£9": "9", "¥300": "300",
    "₹1,000": "1000", "US$4": "4", "9 €": "9", "$ 5": "5", "-$6": "-6", "$-6": "-6", "- 6": "-6",
    "a loss of -$6.": "-6", "−6": "-6", "x = −6": "-6", "x=-6": "-6", "–6": "-6", "－６": "-6", "(6)": "6",
    "**19**": "19", "*19*": "19", "`19`": "19", "$19$": "19", "\\(19\\)": "19", "\\boxed{19}": "19",
    '"19"': "19", "２７": "27", "１，２００．５": "2401/2", "٢٧": "27", "٣٫٥": "7/2", "२७": "27", "𝟐𝟕": "27",
    "4e3": "4000", "4E+3": "4000", "25e-1": "5/2", "3/8": "3/8", "-6/8": "-3/4", "6/-8": "-3/4",
    "3 / 8 cup": "3/8", "1,000/8": "125", "19 eggs": "19", "19kg": "19", "19cm": "19", "19m": "19",
    "19°": "19", "19^\\circ": "19", "-5°C": "-5", "60 km/h": "60", "$4/hour": "4", "19\\text{ cm}": "19",
    "19\\,\\mathrm{m}": "19", "10,\\!000": "10000", "10{,}000": "10000", "there are 19 eggs left.": "19",
    "n = 19": "19", "答案是19": "19", "19个": "19", "\n\t19 \u00a0": "19", "19 (nineteen)": "19",
    "5 o'clock": "5", "19 a day": "19", "the 5th": "5", "*19* pens": "19", "48 ft²": "48", "48 ft^2": "48",
    "42\\text{ cm}^2": "42", "\\boxed{42\\text{ cm}^2}": "42", "\\boxed{42\\,\\text{cm}^3}": "42",
    "9.8 m/s^2": "49/5",
    "12 \\frac{\\text{m}}{\\text{s}}": "12", "\\boxed{42\\degree}": "42", "Rs.42": "42", "Rs 42": "42",
    "42 m²": "42",
    "42 more": "42", "12 more apples": "12", "5 times a day": "5", "7 quarters": "7", "42 in one week": "42",
    "5 seconds": "5", "about 42": "42", "so the two friends have 42": "42", "12 more than John": "12",
    "42 sq ft": "42", "3 co-workers": "3", "10 if she is there": "10", "20kb": "20", "8400 BC": "8400",
    "35 phone calls": "35", "17 kittens": "17", "7 TV shows": "7", "42 US dollars": "42", "5 a.m.": "5",
    "9.8 N·m": "49/5", "42\\": "42", "7 wrong answers": "7", "7 apples and oranges": "7",
    "7 millionaires": "7", "7 bouillon cubes": "7", "12 mm": "12", "7 eggs...": "7", "7조각": "7",
    "7 pcs": "7", "7 DVDs": "7", "5 pts": "5", "4 common tangents": "4",
    "almost 7": "7", "7 or so": "7", "about 7-ish": "7", "7, roughly": "7", "7 give or take": "7",
    "more or less 7": "7", "7 eggs, more or less": "7", "probably 7": "7",
    "7 *": "7", "* 7": "7", "7\u200b": "7", "\u200b7": "7", "7 ABC": "7", "7 pkgs": "7", "44 b.c.": "44",
    "7 I think": "7", "about 19^{\\circ}, and so on": "19",
    "7 eggs!": "7", "So it is 7 eggs every day!!": "7", "70\\,000": "70000", "1\\,234\\,567": "1234567",
    "12 red ones": "12", "12 of them in three colours": "12", "a 7 dollar grand prize": "7",
    "the grand total is 7": "7", "7 apples and a pear": "7",
    "\\text{The answer is }-7": "-7", "7 kr": "7", "7 hp": "7", "7 rpm": "7", "7 wk": "7",
    "7~": "7", "~7": "7", "差不多20个": "20", "比小明多20": "20", "20 fois par jour": "20", "20 Stück": "20",
}  # fmt: skip
NOT_NUMBERS = (
    "", " ", "seven", "nan", "-inf", "Infinity", "...", "-", ".", ",", "$", "%", "1_000", "_7_", "10³", "x²",
    "5⁻", "½", "3½", "Ⅳ", "①", "∞", "12-5", "12 - 5", "12–5", "6 or 7", "6 and 7", "6, 7", "6/7/8", "6.7.8",
    "6:30", "6 to 7", "1.234,5", "1,23", "12,34,567", "1,2345", "1234,567", "1,,234", "0,5", ",5", "..5",
    "...5", "1 234", "1'000", "2 3/4", "0.5/2", "1/0", "0/0", "1/2.5", "7=8", "(1,2)", "\\{5\\}", "7 million",
    "7million", "7 (in millions)", "$7M", "$7m", "7k", "7K", "7 thousand", "7 hundred", "7 dozen eggs",
    "7 billion", "7bn", "7 lakh", "7万", "7 or more", "7 eggs or more", "7 or less", "more than 7",
    "less than 7 eggs", "greater than $7", "7 and a half", "7 tenths", "7 sevenths", "7 squared", "minus 7",
    "negative 7", "not 7", "half of 7", "twice 7", "7!", "2^5", "2^n", "2ⁿ", "√9", "3*9", "2*3*4", "x*42*",
    "3+9", "3×9", "x·9", "9·x", "x2", "H2O", "0x1F", "0xF", "2x", "2 x", "3i", "3e", "10\\pi", "10π",
    "10\\sqrt{3}", "\\sqrt2", "\\frac12", "\\frac{1}{2}", "\\dfrac34", "f(5)", "x-5", "x - 5", "x -5",
    "x + 5", "5 + x", "5-x", "5/x", "x/5", "--5", "+-5", "±5", "-(5)", "-(-5)", "-{5}", "- ($5)",
    "-\\left(5\\right)", "> 5", "x ≥ 5", "≠ 5", "|5|", "5‰", "0.333...", "0.3̅", "0.3…", "1e2e3", "1e99999",
    "1e-99999", "1e4000000", "9" * 4301, "0." + "3" * 5000, "1e" + "0" * 5000, "9^{9^9}",
    "__import__('os').system('7')", "42 minus one", "two-thirds of 42", "isn't 42", "is not 42",
    "three point 5",
    "42 below zero", "5 degrees below zero", "at least 5", "at most 5", "up to 5", "5 hours, thirty minutes",
    "5\\text{ hours, thirty minutes}", "5 feet six inches", "5 and one quarter", "a third of 42", "twenty 5",
    "42 times two", "42 less than x", "42 divided by two", "double 42", "over 5", "5 plus one",
    "42 is not right",
    "48 ab^2", "5 x^2", "12 \\frac{a}{b}", "42 minus three",
    "9 over par", "7 score", "7 and up", "7 xy", "7ab", "7 ab", "7pq", "7 pq", "7 theta", "7 alpha",
    "7 lambda", "7sin(x)", "7 sin x", "7 log x", "7log x", "7 ln x", "7 cos", "square of 7", "the cube of 7",
    "reciprocal of 7", "the opposite of 7", "doesn't equal 7", "10 percent of x", "7 to the power of two",
    "7 times x", "7 times itself", "7 over x", "7 below", "42abc", "负42", "5个半", "零下5度", "不是5",
    "5 tens",
    "logarithm of 5", "sine of 30", "the cosine of 60 degrees", "the absolute value of 5", "5 in base eight",
    "5 if x is even", "5 \\text{ if } x", "5\\text{ times }x", "not\\text{ equal to }5", "5 is wrong",
    "$5mm", "5 bil", "5 thou", "5 tril", "5 Millionen", "5 millones", "5 Milliarden", "5 milhões",
    "5 milioni", "5 Tausend", "5 Dutzend", "5 douzaines", "5 docenas", "5 тысяч", "5 миллионов", "5만",
    "5천원",
    "5, ...", "5,…", "5 ...", "…5", "5 or higher", "5 eggs or under", "5 and over", "5 at least",
    "5 eggs at most", "upwards of 5", "in excess of $5", "just shy of 5", "5 and change",
    "5 eggs and counting",
    "5 and a bit", "anything but 5", "other than 5", "unlike 5", "5 or none", "5 or nothing", "5 or not",
    "x $-5", "profit - 5", "profit-5", "[x] - 5", "5ₓ", "in millions: 7", "total (in thousands): $7",
    "不到20", "不足20个", "至少20", "最多20", "超过20", "多于20", "小于20", "20以上", "20岁以下",
    "20多个", "20余人", "20几", "20个或更多",
    "nicht 20", "kein 20", "mehr als 20", "weniger als 20", "mindestens 20", "höchstens 20", "20 oder mehr",
    "20 einhalb", "negativ 20", "moins 20", "plus de 20", "moins de 20", "au moins 20",
    "au plus 20", "pas 20", "20 ou plus", "20 heures et demie", "más de 20", "menos de 20", "al menos 20",
    "20 y medio", "no 20", "не 20", "больше 20", "7 fives",
    "7 % of x", "7 of x", "7!!", "70\\,00", "1234\\,567", "7~8", "x! 7", "7 m!",
    "0,125", "00,100", "0{,}125", "\\text{profit}-7",
    "7 grand", "quadruple 7", "neg 7", "7 and x", "7 or y",
)  # fmt: skip


def test_a_text_with_one_number_is_read_exactly():
    read = {text: parse_number(text) for text in NUMBERS}
    assert read == {text: Fraction(number) for text, number in NUMBERS.items()}


def test_a_text_without_exactly_one_number_is_no_number():
    assert [text[:80] for text in NOT_NUMBERS if parse_number(text) is not None] == []


@pytest.mark.parametrize("thing", [None, 5, 5.0, ["5"], b"5"])
def test_what_is_not_text_is_no_number(thing):
    assert parse_number(thing) is None


def test_numbers_are_compared_as_rationals_not_as_floats():
    assert parse_number("0.1") == Fraction(1, 10)
    assert parse_number("9007199254740993") != parse_number("9007199254740992")
    assert parse_number("0.3333333333333333333") != parse_number("1/3")


def test_the_largest_numbers_allowed_are_still_numbers():
    assert parse_number("9" * 4300) == 10**4300 - 1
    assert parse_number("-" + "9" * 4300) == 1 - 10**4300
    assert parse_number("1e4300") == 10**4300
    assert parse_number("1e-4300") == Fraction(1, 10**4300)


EXTRACTIONS = [
    ("xml", "<reasoning>\na\n</reasoning>\n<answer>\n 7 \n</answer>\n", "7"),
    ("xml", "<answer>6</answer> no <answer>7</answer> done <b>8</b>", "7"),
    ("xml", "<answer><answer>7</answer></answer>", "7"),
    ("xml", "<answer>7</answer></answer>", "7"),
    ("xml", "<answer>7</answer><|im_end|>", "7"),
    ("xml", "<answer>\n7", None),
    ("xml", "<answer>6</answer>\n<answer>7", None),
    ("xml", "</answer>7<answer>", None),
    ("xml", "7</answer>", None),
    ("xml", "The answer is 7.", None),
    ("xml", "<ANSWER>7</ANSWER>", None),
    ("xml", "<answer></answer>", ""),
    ("xml", "<answer>\n...\n</answer>", None),
    ("xml", "#### 7", None),
    ("hash", "a\n#### 7", "7"),
    ("hash", "a\n####7 \r\nand 8", "7"),
    ("hash", "#### 7 eggs\nCheck: 8", "7 eggs"),
    ("hash", "#### 7\rand 8", "7"),
    ("hash", "#### 6\n#### 7", "7"),
    ("hash", "a\n####", None),
    ("hash", "#### \n7", None),
    ("hash", "#### ...", None),
    ("hash", "#### 7</s>", "7"),
    ("hash", "#### 7 <|im_end|> 8", "7"),
    ("hash", "#### <|endoftext|>7", None),
    ("hash", "#### 7 <|> 8", "7 <|> 8"),
    ("hash", "#### x < 7 </b>", "x < 7 </b>"),
    ("hash", "### 7", None),
    ("hash", "so 7", None),
    ("boxed", r"\boxed{6} no, \boxed{7}.", "7"),
    ("boxed", r"\boxed{\frac{1}{\sqrt{3}}} and {x}", r"\frac{1}{\sqrt{3}}"),
    ("boxed", r"\boxed{\{1,2\}}", r"\{1,2\}"),
    ("boxed", r"\boxed{\left\{1\right.}", r"\left\{1\right."),
    ("boxed", r"{ } } \boxed {7} {", "7"),
    ("boxed", r"\\boxed{7}", "7"),
    ("boxed", r"\boxed{6} or \\boxed{7}", "7"),
    ("boxed", r"\boxed{\text{It is }\boxed{ 7 }}", "7"),
    ("boxed", r"\boxed{7 \\} and", r"7 \\"),
    ("boxed", r"\fbox{7}", "7"),
    ("boxed", r"\boxed{6} \fbox{7}", "6"),
    ("boxed", r"\boxed{6} \boxed{7", "6"),
    ("boxed", r"\boxed{7", None),
    ("boxed", r"\boxed 7", None),
    ("boxed", r"\boxed{}", ""),
    ("boxed", "7", None),
    ("r1", "<think>6</think> <answer>7</answer>", "7"),
    ("r1", r"<think>\boxed{6}</think> <answer>7</answer>", "7"),
    ("r1", r"<think>a</think> <answer>It is $\boxed{7}$ or $\boxed{\frac12}$.</answer>", r"\frac12"),
    ("r1", r"<think>a</think> <answer>\boxed{7</answer>", r"\boxed{7"),
    ("r1", r"<think>a</think> \boxed{7}", None),
]


@pytest.mark.parametrize(("answer_format", "text", "expected"), EXTRACTIONS)
def test_the_extractor_finds_what_the_format_says_and_nothing_else(answer_format, text, expected):
    assert extract_answer(text, answer_format) == expected
    assert extract_answer([{"role": "assistant", "content": text}], answer_format) == expected
    assert ANSWER_FORMATS[answer_format].extract(text) == expected


@pytest.mark.parametrize(
    "thing", [None, 7, [], [None], [{}], [{"content": None}], {"content": "<answer>7</answer>"}]
)
def test_a_completion_without_text_has_no_answer_and_earns_nothing(thing):
    assert extract_answer(thing) is None
    assert combined_reward(completions=[thing], answer=["7"]) == [0.0]
    assert hash_reward(completions=[thing], answer=["7"]) == [0.0]
    assert last_number(thing) is None


def test_of_several_messages_the_last_counts_and_content_may_come_in_parts():
    parts = [{"type": "text", "text": "<answer>"}, {"type": "image"}, {"type": "text", "text": "7</answer>"}]
    messages = [{"role": "tool", "content": "<answer>6</answer>"}, {"role": "assistant", "content": parts}]
    assert extract_answer(messages) == extract_answer(tuple(messages)) == "7"
    parts.insert(1, "not a part")
    assert extract_answer(messages) == "7"


@pytest.mark.parametrize("name", ANSWER_FORMATS)
def test_each_prompt_names_its_delimiter_and_its_example_is_no_answer(name):
    chosen = ANSWER_FORMATS[name]
    assert chosen.name == name
    assert chosen.think_end in chosen.system_prompt
    assert chosen.extract(chosen.system_prompt) is None
    assert chosen.extract(chosen.system_prompt.strip()) is None


@pytest.mark.parametrize(
    ("text", "opening", "rest"),
    [
        ("<think>\n  so", "<think>\n", "  so"),
        ("<think> so", "<think>\n", "so"),
        ("so", "<think>\n", "so"),
        (" so", "", " so"),
    ],
)
def test_what_the_prompt_has_opened_is_not_trained_again(text, opening, rest):
    assert ANSWER_FORMATS["r1"].after_opening(text, opening) == rest


@pytest.mark.parametrize("name", ANSWER_FORMATS)
def test_a_written_solution_is_read_back_and_earns_all_there_is(name):
    chosen = ANSWER_FORMATS[name]
    text = chosen.write("3 + 4 = 7, so {x}", "7")
    assert chosen.extract(text) == "7"
    assert text.index("{x}") < text.index(chosen.think_end)
    assert correctness_reward(completions=[text], answer=["7"], answer_format=name) == [2.0]
    assert format_reward([text], name) == [0.2 if name in ("hash", "boxed") else 0.8]


def test_the_written_forms_and_the_seed_prompt_are_these_very_characters():
    written = {name: chosen.write("a", "b") for name, chosen in ANSWER_FORMATS.items()}
    assert written == {
        "xml": "<reasoning>\na\n</reasoning>\n<answer>\nb\n</answer>\n",
        "hash": "a\n#### b",
        "boxed": "a\nThe answer is \\boxed{b}.",
        "r1": "<think>\na\n</think>\n<answer>\nb\n</answer>",
    }
    assert (
        SYSTEM_PROMPT
        == "Respond in the following format:\n\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n"
    )
    assert [f.think_end for f in ANSWER_FORMATS.values()] == ["</reasoning>", "####", "\\boxed{", "</think>"]


def test_an_unknown_format_is_refused_with_the_valid_ones():
    for call in (
        lambda: extract_answer("x", "json"),
        lambda: format_reward(["x"], "json"),
        lambda: correctness_reward(None, [], [], "json"),
    ):
        with pytest.raises(
            ValueError,
            match=r"^answer_format 'json' is unknown: must be one of xml, hash, boxed, r1, or FILE.py:name$",
        ):
            call()


CORRECTNESS = [
    ("7", "7", 2.0), ("  7 ", " 7\n", 2.0), ("7.0", "7", 1.5), ("7 eggs", "7", 1.5), ("$7", "7.00", 1.5),
    ("7%", "7", 1.5), ("1/4", "0.25", 1.5), ("３", "3", 1.5), ("1,200", "1200", 1.5), ("7", 7, 2.0),
    ("7", 7.0, 1.5), ("7.0", 7.0, 2.0), ("8", "7", 0.0), ("", "", 0.0), ("", "7", 0.0), ("7", "", 0.0),
    ("7", " ", 0.0), ("7", None, 0.0), ("None", None, 0.0), ("nan", math.nan, 0.0), ("inf", math.inf, 0.0),
    ("7 or 8", "8", 0.0),
    ("17", "7", 0.0), ("north", "north", 2.0), ("North", "north", 0.0), ("seven", "7", 0.0),
    ("(2,4)", "(2,4)", 2.0), ("10", "10\\sqrt{3}", 0.0), ("10", "10\\pi", 0.0),
    ("33.3", "\\frac{100}{3}", 0.0), ("3 million", "3", 0.0), ("6=7", "7", 0.0),
    ("0.1", "0.10000000000000001", 0.0), ("1e400", "1e401", 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "reference", "expected"), CORRECTNESS)
def test_correctness_pays_2_for_the_same_characters_1_5_for_the_same_number(answer, reference, expected):
    completion = f"<reasoning>\n1\n</reasoning>\n<answer>{answer}</answer>"
    assert correctness_reward(prompts=None, completions=[completion], answer=[reference]) == [expected]
    assert combined_reward(
        prompts=["p"], completions=[completion], answer=[reference], completion_ids=[[1]]
    ) == [expected + 0.8]


def test_the_answer_must_be_in_its_tags_to_be_paid():
    assert correctness_reward(completions=["It is 7."], answer=["7"]) == [0.0]
    assert correctness_reward(completions=["#### 7"], answer=["7"]) == [0.0]


def test_the_format_reward_is_0_2_a_tag_however_often_it_stands_there():
    texts = [
        "",
        "<answer>",
        "<reasoning></reasoning><answer>",
        "<answer>" * 9,
        "<reasoning></reasoning><answer></answer>",
        "#### 7 \\boxed{7}",
    ]
    assert format_reward(completions=texts) == [0.0, 0.2, 0.6, 0.2, 0.8, 0.0]
    assert format_reward(completions=["#### 7", "7"], answer_format="hash") == [0.2, 0.0]
    assert format_reward(completions=["\\boxed{7}", "boxed"], answer_format="boxed") == [0.2, 0.0]
    assert format_reward(completions=["<think></think> <answer>7"], answer_format="r1") == [0.6]


HASH = [
    ("#### 7", "7", 1.0), ("so\n####7", "7", 1.0), ("#### $1,200.", "1200", 1.0), ("#### -$3", "-3", 1.0),
    ("#### $-3", "-3", 1.0), ("#### −3", "-3", 1.0), ("#### 7%", "7", 1.0), ("#### 7.0", "7", 1.0),
    ("#### 1/2", "0.5", 1.0), ("#### 7 \nbye 8", "7", 1.0), ("#### 7", "7 eggs", 1.0), ("#### 8", "7", 0.0),
    ("#### 7\n#### 7", "7", 0.0), ("#### 7 eggs", "7", 0.0), ("#### x = 7", "7", 0.0),
    ("#### seven", "7", 0.0), ("#### **7**", "7", 0.0), ("#### \\boxed{7}", "7", 0.0), ("#### ", "7", 0.0),
    ("####\n7", "7", 0.0), ("7", "7", 0.0), ("#### 7 8", "7", 0.0), ("#### 7", "", 0.0),
    ("#### 7", None, 0.0), ("#### x", "x", 0.0), ("####", "", 0.0), ("#### 7_0", "70", 0.0),
    ("#### \\$7", "7", 1.0), ("#### 7\\%", "7", 1.0), ("#### \\,7", "7", 0.0), ("#### 7<|im_end|>", "7", 1.0),
    ("#### ~7", "7", 0.0), ("#### 7!", "7", 0.0), ("#### 0,700", "700", 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reference", "expected"), HASH)
def test_the_hash_reward_pays_one_marker_with_a_bare_right_number(text, reference, expected):
    assert hash_reward(prompts=None, completions=[text], answer=[reference], answer_format="hash") == [
        expected
    ]


@pytest.mark.parametrize("reward", [correctness_reward, combined_reward, hash_reward])
@pytest.mark.parametrize("answer", [["7"], ["7"] * 3, [], "77", None])
def test_references_that_do_not_match_the_completions_are_refused(reward, answer):
    with pytest.raises(ValueError, match=r"^answer must hold one reference for each of 2 completions"):
        reward(prompts=None, completions=["#### 7", "<answer>7</answer>"], answer=answer)


LAST_NUMBERS = {
    "6*7 = 42.": "42", "It costs $1,234.50!": "1,234.50", "12-5": "5", "from 3 to -$5": "-5", "a −5 b": "-5",
    "It is 1/2.": "1/2", "on 1/2/2024": "2024", "x2": "2", "3e2 or so": "3e2", "1.2.3": "3", "5 or ６": "6",
    "12,34": "34", "1,2345": "2345", "So 6.\nIt is 7.\n": "7", "9" * 40: "9" * 40, "five": None, "": None,
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), LAST_NUMBERS.items())
def test_the_last_number_of_a_text_is_found_for_the_evaluation(text, expected):
    assert last_number(text) == expected


SMALL = 10_000
HOSTILE = {
    "opening tags": lambda n: "<reasoning>" * n,
    "answer tags": lambda n: "<answer>" * n,
    "closing tags": lambda n: "</answer>" * n,
    "boxes": lambda n: "\\boxed{" * n,
    "markers": lambda n: "#### 1\n" * n,
    "braces": lambda n: "\\boxed{" + "{}" * n,
    "digits": lambda n: "7" * n,
    "wide digits": lambda n: "７" * n,
    "spaces": lambda n: " " * n + "7",
    "newlines": lambda n: "7" + "\n" * n,
    "commas": lambda n: "," * n + "7",
    "dots": lambda n: "7" + "." * n,
    "minus signs": lambda n: "-" * n + "7",
    "letters": lambda n: "a" * n + " 7",
    "units": lambda n: "7 " + "b" * n,
    "underscores": lambda n: "_" * n,
    "backslashes": lambda n: "7" + "\\" * n,
    "text": lambda n: "\\text{" * n,
    "dollars": lambda n: "$" * n + "7",
    "commas and digits": lambda n: "1," * n,
    "groups": lambda n: "1" + ",111" * n + "1",
    "slashes": lambda n: "1/" * n,
    "two long": lambda n: "5" * n + " " + "5" * n,
    "exponents": lambda n: "1e" * n,
    "one exponent": lambda n: f"1e{(n // SMALL) ** 11}",  # 1, and 4 million
    "wide gap": lambda n: "1" + " " * n + "2",
    "words": lambda n: "half " * n + "5",
    "stars": lambda n: "*" * n + "5",
    "apostrophes": lambda n: "5" + "'" * n,
    "boxes around boxes": lambda n: "\\boxed{" * (n // 8) + "5 cm^2" + "}" * (n // 8),
}
READERS = {
    "number": parse_number,
    "last number": last_number,
    "hash": lambda text: hash_reward(None, ["#### " + text], [text]),
    "r1 answer": lambda text: correctness_reward(None, [f"<answer>{text}</answer>"], ["7"], "r1"),
    **{
        name: lambda text, name=name: combined_reward(None, [text], ["7"], answer_format=name)
        for name in ANSWER_FORMATS
    },
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_text_takes_linear_time(kind):
    """A lazy regex over 20,000 opening tags took 12 s, and int() of 5,000 digits raises."""
    small, large = HOSTILE[kind](SMALL), HOSTILE[kind](4 * SMALL)
    for name, read in READERS.items():
        assert growth(read, small, large, limit=12) < 12, name


def test_no_random_text_makes_a_reward_raise_or_leave_the_finite_numbers():
    pieces = [
        *"0123456789-+.,/%$€*_^\\{}()=#!…− \n²½５٣万éxeE\u0305\u200b\ud800\x00",
        "<answer>",
        "</answer>",
        "\\boxed{",
        "\\fbox{",
        "#### ",
        "1e",
        "{,}",
        "...",
    ]
    draw = random.Random(0)
    for _ in range(2000):
        inner, reference = ("".join(draw.choices(pieces, k=draw.randrange(14))) for _ in range(2))
        for text in (inner, f"<answer>{inner}</answer>", f"#### {inner}", f"\\boxed{{{inner}}}"):
            number, last = parse_number(text), last_number(text)
            assert number is None or isinstance(number, Fraction)
            assert last is None or isinstance(last, str)
            values = hash_reward(completions=[text], answer=[reference])
            for name in ANSWER_FORMATS:
                values += combined_reward(completions=[text], answer=[reference], answer_format=name)
            assert all(isinstance(v, float) and 0 <= v <= 2.8 for v in values)


LOST = {
    "xml": ("...", "a</answer>b"),
    "hash": ("1\n2", "..."),
    "boxed": ("}{", "..."),
    "r1": ("...", "</answer>"),
}


@pytest.mark.parametrize(("answer_format", "answers"), LOST.items())
def test_reference_answers_that_no_completion_can_give_are_told(answer_format, answers):
    """A run over them ended as if all had gone well, with every reward 0."""
    config = SimpleNamespace(answer_format=answer_format, grading="number", reward=None)
    lost = [Problem("Q", answer) for answer in answers]
    good = [Problem("Q", answer) for answer in ("7", "7 million", "(1, 2]", r"\frac12", "north")]
    assert lost_answers(config, [*good, *lost, Problem("Q", "")]) == list(answers)
    assert check_answers(config, REWARD_SETS["grpo_m3po"], [*good, *lost]) == list(answers)
    check_answers(config, [(constant([1.0]), 1.0)], lost)  # one's own reward may need no answer
    with pytest.raises(
        SettingError, match=f"^answer_format='{answer_format}': none of the 2 reference answers"
    ):
        check_answers(config, REWARD_SETS["grpo_m3po"], lost)


class Unsayable(Exception):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize("error", [Unsayable(), asyncio.CancelledError(), GeneratorExit()])
def test_whatever_a_reward_raises_is_one_line(error):
    """An error whose text raises, and those that are no Exception, ended in a traceback."""

    def fails(completions, **kwargs):
        raise error

    with pytest.raises(RewardError, match=rf"reward function fails at step 3 raised {type(error).__name__}"):
        paid([(fails, 1.0)], ["p"], ["x"], step=3)


@pytest.mark.parametrize("log", ["log_metric", "log_extra"])
def test_a_name_that_is_no_text_is_refused_where_it_is_logged(log):
    with pytest.raises(ValueError, match=rf"^{log}\(\('a', 1\)\): a name must be text$"):
        RewardLog([{}]).arguments[log](("a", 1), [1.0] if log == "log_extra" else 1.0)


@pytest.mark.parametrize(
    ("found", "words"),
    [("[text]", r"gave \['<r>7'\], neither text nor None"), ("text[9]", "raised IndexError")],
)
def test_a_format_of_one_s_own_that_fails_on_a_later_text_is_one_line(found, words, tmp_path):
    source = "from answers.formats import AnswerFormat\ndef find(text):\n    if text == '<r>7':\n"
    source += f"        return {found}\n    return text.partition('<r>')[2] or None\n"
    source += "mine = AnswerFormat('mine', 's', '<r>', ('<r>',), '{reasoning}<r>{answer}', find)\n"
    (tmp_path / "own.py").write_text(source)
    name = f"{tmp_path}/own.py:mine"
    assert correctness_reward(None, ["<r>8"], ["8"], name) == [2.0]
    with pytest.raises(RewardError, match=f"^the find of answer_format 'mine' {words}.* for '<r>7'$"):
        correctness_reward(None, ["<r>7"], ["8"], name)


def test_the_named_reward_sets_are_these():
    assert REWARD_SETS["grpo_m3po"] == [(correctness_reward, 1.0), (format_reward, 1.0)]
    assert REWARD_SETS["h3po"] == [(hash_reward, 1.0)]


def constant(values, name="constant"):
    def function(completions, **kwargs):
        return values

    function.__name__ = name
    return function


def test_totals_are_weighted_sums_and_an_abstention_is_left_out():
    functions = [(constant([1.0, None, None], "a"), 2.0), (constant((True, 0.5, None), "b"), 1.0)]
    totals, parts = paid(functions, ["p"] * 3, ["x", "y", "z"])
    assert totals[:2] == [3.0, 0.5]
    assert math.isnan(totals[2])
    assert parts == {"a": [1.0, None, None], "b": [1.0, 0.5, None]}


def test_what_a_grader_does_not_decide_is_neither_right_nor_wrong(monkeypatch):
    monkeypatch.setattr("rewards.correctness_reward", lambda *given: [2.0, None, 0.0])
    assert right_answers(["a", "b", "c"], ["a"] * 3) == [True, None, False]


def test_the_same_number_in_other_characters_is_right():
    assert right_answers(["<answer>7.0</answer>", "<answer>7</answer>", "<answer>8</answer>"], ["7"] * 3) == [
        True,
        True,
        False,
    ]


def test_a_function_may_abstain_for_a_whole_step_that_others_score():
    """The run ended, although every completion had its reward."""
    silent, scores = constant([None, None], "silent"), constant([1.0, 2.0], "scores")
    for functions in ([silent, scores], [scores, silent]):
        totals, parts = paid([(f, 3.0) for f in functions], ["p"] * 2, ["x", "y"])
        assert totals == [3.0, 6.0]
        assert parts == {"silent": [None, None], "scores": [1.0, 2.0]}
    with pytest.raises(RewardError, match="reward function silent and quiet returned None for all 2"):
        paid([(silent, 1.0), (constant([None, None], "quiet"), 1.0)], ["p"] * 2, ["x", "y"])


def test_a_process_without_completions_pays_nothing():
    assert paid([(constant([]), 1.0)], [], []) == ([], {"constant": []})


def test_a_function_may_abstain_for_all_completions_of_one_process():
    """Where those of another were scored: `gather` gives the values of both."""
    totals, _ = paid(
        [(constant([None, None], "mine"), 1.0)], ["p"] * 2, ["x", "y"], gather=lambda values: [*values, 1.0]
    )
    assert all(map(math.isnan, totals))
    with pytest.raises(RewardError, match="None for all 4 completions"):
        paid(
            [(constant([None, None], "mine"), 1.0)],
            ["p"] * 2,
            ["x", "y"],
            gather=lambda values: values + values,
        )


def test_a_reward_function_receives_the_columns_by_keyword():
    seen = {}
    paid(
        [(lambda **columns: seen.update(columns) or [0.0], 1.0)],
        ["p"],
        ["c"],
        step=3,
        answer=["7"],
        answer_format="hash",
    )
    assert seen == dict(prompts=["p"], completions=["c"], answer=["7"], answer_format="hash")


def test_functions_of_one_name_keep_their_own_values():
    functions = [(constant([1.0], "f_2"), 1.0), (constant([2.0], "f"), 1.0), (constant([3.0], "f"), 1.0)]
    totals, parts = paid(functions, ["p"], ["c"])
    assert totals == [6.0]
    assert sorted(v for values in parts.values() for v in values) == [1.0, 2.0, 3.0]
    assert list(paid(functions[1:], ["p"], ["c"])[1]) == ["f", "f_2"]


def test_numpy_and_torch_values_are_accepted():
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    for values in (np.array([1, 2]), torch.tensor([1.0, 2.0]), [np.float32(1), torch.tensor(2)]):
        assert paid([(constant(values), 1.0)], ["p"] * 2, ["x", "y"])[0] == [1.0, 2.0]
    for values in (torch.tensor(1.0), torch.ones(2, 2), [torch.ones(2), 1.0]):
        with pytest.raises(RewardError, match="constant"):
            paid([(constant(values), 1.0)], ["p"] * 2, ["x", "y"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "returned 1 value for 2 completions"),
        ([1.0] * 3, "returned 3 values for 2 completions"),
        (1.0, "returned a float, not a list"),
        (None, "returned a NoneType, not a list"),
        ("ab", "returned a str, not a list"),
        ({1.0, 2.0}, "returned a set, not a list"),
        ([None, None], "returned None for all 2 completions"),
        ([1.0, float("nan")], "nan, which is not a finite number, for completion 'second\\\\nline"),
        ([1.0, float("-inf")], "-inf, which is not a finite number, for completion 'second"),
        ([1.0, "1.0"], "'1.0', which is not a finite number, for completion 'second"),
        ([1.0, 1j], "1j, which is not a finite number"),
        ([1.0, [1.0]], "which is not a finite number"),
        ([1.0, 10**400], "which is not a finite number"),
    ],
)
def test_what_cannot_be_a_reward_is_one_line_that_names_the_function_and_the_step(values, message):
    with pytest.raises(RewardError, match=message) as caught:
        paid(
            [(constant(values, "mine"), 1.0)],
            ["p"] * 2,
            ["first", [{"content": "second\nline " + "y" * 999}]],
            step=12,
        )
    text = str(caught.value)
    assert text.startswith("reward function mine at step 12 ")
    assert "\n" not in text
    assert len(text) < 400


@pytest.mark.parametrize(
    "taken_for_text", [lambda c: c.lower(), lambda c: re.search("7", c), lambda c: c[0] + " "]
)
def test_a_reward_that_takes_messages_for_texts_is_told_where_the_text_is(taken_for_text):
    """Only where completions are messages: it can be right elsewhere."""

    def mine(completions, **kwargs):
        return [float(len(taken_for_text(c))) for c in completions]

    chats = [[{"role": "assistant", "content": "7"}]]
    with pytest.raises(RewardError, match=r"the text of one is completion\[0\]\['content'\], for 1 comp"):
        paid([(mine, 1.0)], ["p"], chats, answer=["7"])

    def other(completions, answer, **kwargs):
        return [answer.lower()]

    with pytest.raises(RewardError) as caught:
        paid([(other, 1.0)], ["p"], ["7"], answer=["7"])
    assert "chat messages" not in str(caught.value)


def test_a_function_that_raises_is_named_with_its_error_and_the_first_completion_and_is_not_asked_again():
    """It was asked again row by row, and the calls that a reward pays for were paid for twice."""
    calls = []

    def picky(completions, answer, **kwargs):
        calls.append(completions)
        return [float(int(c)) + len(a) for c, a in zip(completions, answer, strict=True)]

    message = (
        r"^reward function picky at step 4 raised ValueError: invalid literal .* "
        r"for 3 completions, the first of them completion 'b\\na'$"
    )
    with pytest.raises(RewardError, match=message) as caught:
        paid([(picky, 1.0)], ["p"] * 3, ["b\na", "1", "3"], step=4, answer=["7"] * 3)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "\n" not in str(caught.value)
    assert len(calls) == 1


def test_a_function_that_leaves_by_sys_exit_is_a_failure_and_not_the_end_of_a_finished_run():
    """sys.exit(0) ended the training with status 0, without a word and without a model."""

    def leaves(completions, **kwargs):
        if "b" in completions:
            raise SystemExit(0)
        return [0.0] * len(completions)

    message = (
        r"^reward function leaves raised SystemExit: 0 for 2 completions, the first of them completion 'a'$"
    )
    with pytest.raises(RewardError, match=message):
        paid([(leaves, 1.0)], [None] * 2, ["a", "b"])


def test_what_a_function_does_to_its_arguments_reaches_no_other_function_and_no_log():
    """Cleared ids ended a run in its log; a rewritten message was what the next function graded."""

    def spoils(completions, completion_ids, answer, **kwargs):
        values = [float(len(c)) for c in completion_ids]
        completions[0][0]["content"] = "spoilt"
        completion_ids[1].clear()
        answer.reverse()
        completions.pop()
        return values

    def reads(completions, completion_ids, answer, **kwargs):
        return [
            len(c[0]["content"]) + 10 * len(i) + 100 * int(a)
            for c, i, a in zip(completions, completion_ids, answer, strict=True)
        ]

    completions, ids = [[{"role": "assistant", "content": text}] for text in ("a", "bcd")], [[5], [6, 7]]
    _, parts = paid(
        [(spoils, 1.0), (reads, 1.0)], [None] * 2, completions, completion_ids=ids, answer=["1", "2"]
    )
    assert parts == {"spoils": [1.0, 2.0], "reads": [111.0, 223.0]}
    assert ids == [[5], [6, 7]]


def test_the_projects_own_rewards_change_none_of_the_columns_which_they_get_uncopied():
    problem = Problem("a?", "1", "", more={"notes": [["x"], {"y": 1}]})
    columns = reward_columns([problem] * 2, ["<answer>1</answer>", "#### 2"], [[1], [2]], "xml")
    before, own = copy.deepcopy(columns), {f: w for of_set in REWARD_SETS.values() for f, w in of_set}
    compute_rewards(list(own.items()), columns)
    assert columns == before
    assert {f.__module__ for f in own} == {"rewards"}


def test_a_reward_too_large_to_be_compared_is_refused_alone_and_with_its_weight():
    """1e308 beside 0 ended in OverflowError; with such a weight no step was taken, and the run ended well."""

    def pays(completions, **kwargs):
        return [1e308] * len(completions)

    def counts(completions, **kwargs):
        return [3.0] * len(completions)

    message = (
        r"^reward function pays returned 1e\+308, too large to compare with others \(at most 1e\+30\), "
        r"for completion 'a'$"
    )
    with pytest.raises(RewardError, match=message):
        paid([(pays, 1.0)], [None], ["a"])
    with pytest.raises(RewardError, match=r"returned -1e\+308, too large"):
        paid([(constant([-1e308]), 1.0)], [None], ["a"])
    with pytest.raises(RewardError, match=r"^reward function counts: 3 times its weight 1e\+30 is too large"):
        paid([(counts, 1e30)], [None], ["a"])


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "my=rewards.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Bonus:\n    size: float = 0.5\n"
        "def bonus(completions, **kwargs):\n    return [Bonus().size] * len(completions)\nnumber = 3\n"
    )
    return path


def test_a_reward_is_loaded_from_a_file_with_its_weight_and_sys_path_stays(reward_file):
    before = list(sys.path)
    function, weight = load_reward(f"{reward_file}:bonus=-0.25")
    assert (function.__name__, weight) == ("bonus", -0.25)
    assert load_reward(f"{reward_file}:bonus")[1] == 1.0
    assert paid([(function, weight)], ["p"], ["c"])[0] == [-0.125]
    assert sys.path == before


@pytest.mark.parametrize(
    "rest", [":absent", ":number", ":bonus=", ":bonus=much", ":bonus=nan", ":bonus=inf", ":", "", ":=2"]
)
def test_a_spec_that_names_no_function_or_no_weight_is_refused_in_one_line(reward_file, rest):
    with pytest.raises(ValueError) as caught:
        load_reward(f"{reward_file}{rest}")
    assert "my=rewards.py" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module_here", "ModuleNotFoundError: No module named"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit('no\\nway')", "SystemExit: no way"),
    ],
)
def test_a_file_that_does_not_import_is_refused_with_what_it_raised(tmp_path, source, message):
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(ValueError, match=rf"bad\.py does not import: {message}") as caught:
        load_reward(f"{tmp_path / 'bad.py'}:f")
    assert "\n" not in str(caught.value)
    assert "reward_file_bad" not in sys.modules


@pytest.fixture
def counting_file(tmp_path):
    """A reward file that notes each time it is run."""
    path = tmp_path / "counting.py"
    path.write_text(
        "from pathlib import Path\n"
        "with open(Path(__file__).with_name('runs'), 'a') as runs:\n    runs.write('x')\n"
        "def one(completions, **kwargs):\n    return [1.0] * len(completions)\n"
        "def two(completions, **kwargs):\n    return [2.0] * len(completions)\n"
    )
    return path


def test_a_reward_file_runs_once_a_process_however_often_settings_are_made_of_it(counting_file, monkeypatch):
    """It ran at each check of the settings and again for the run; a reward with a model held it twice."""
    monkeypatch.chdir(counting_file.parent)
    for specs in (
        [f"{counting_file}:one", f"{counting_file}:two=0.5"],
        ["counting.py:two", "counting.py:one"],
    ):
        config = grpo_train.Config(reward=specs)
        functions = [function for function, _ in grpo_train.chosen_rewards(config)]
        assert len({id(function.__globals__) for function in functions}) == 1
    assert counting_file.with_name("runs").read_text() == "x"


def test_a_reward_file_that_has_changed_runs_again(counting_file):
    before, _ = load_reward(f"{counting_file}:one")
    counting_file.write_text("def one(completions, **kwargs):\n    return [3.0]\n")
    after, _ = load_reward(f"{counting_file}:one")
    assert (before(["c"]), after(["c"])) == ([1.0], [3.0])


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file .*absent\.py$"):
        load_reward(f"{tmp_path / 'absent.py'}:f")


WHOLE = "<reasoning>\n3*4\n</reasoning>\n<answer>\n12\n</answer>\n"
LAYOUTS = {  # completion: strict, soft, count
    WHOLE: (0.5, 0.5, 0.5),
    WHOLE.rstrip(): (0.5, 0.5, 0.5),
    WHOLE.replace("\n", ""): (0.0, 0.5, 0.0),
    WHOLE + "\n": (0.0, 0.5, 0.5 - 0.001),
    WHOLE.replace("<answer>", "so\n<answer>"): (0.0, 0.0, 0.5),
    WHOLE.removesuffix("\n</answer>\n"): (0.0, 0.0, 0.375),
    WHOLE + "and so on": (0.0, 0.5, 0.5 - 0.009),
    WHOLE + WHOLE: (0.0, 0.5, 0.0),
    "Well. " + WHOLE: (0.0, 0.0, 0.5),
    "<reasoning>\n3*4\n</reasoning>\n": (0.0, 0.0, 0.25),
    "<answer>\n12\n</answer>\n<reasoning>\n3*4\n</reasoning>\n": (0.0, 0.0, 0.375 - 0.029),
    "12": (0.0, 0.0, 0.0),
    "": (0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("text", LAYOUTS)
def test_the_layout_rewards_of_the_multi_reward_recipe(text):
    for function, expected in zip(
        (strict_format_reward, soft_format_reward, xmlcount_reward), LAYOUTS[text], strict=True
    ):
        assert (
            function(completions=[text])
            == function(completions=[[{"role": "assistant", "content": text}]])
            == [pytest.approx(expected)]
        ), function.__name__


def published_xml_count(text):
    """The function of the notebook that these rewards come from."""
    count = 0.125 * sum(text.count(mark) == 1 for mark in ("<reasoning>\n", "\n</reasoning>\n"))
    if text.count("\n<answer>\n") == 1:
        count += 0.125 - 0.001 * len(text.split("\n</answer>\n")[-1])
    if text.count("\n</answer>") == 1:
        count += 0.125 - 0.001 * (len(text.split("\n</answer>")[-1]) - 1)
    return count


def test_a_malformed_layout_never_earns_less_than_by_the_published_function():
    """A thousand blanks after tags on one line cost a point there was none for."""
    assert xmlcount_reward(completions=["<reasoning>a</reasoning><answer>42</answer>" + " " * 1000]) == [0.0]
    draw = random.Random(0)
    pieces = [*XML_TAGS, "\n", "\n", "\n", " ", "a", "xxxx"]
    for _ in range(3000):
        text = "".join(draw.choices(pieces, k=draw.randint(1, 14)))
        assert xmlcount_reward(completions=[text])[0] >= published_xml_count(text) - 1e-9, text


EARNED = {
    "12": (2.0, 0.5, 1.0, 0.1), "12.0": (0.0, 0.0, 1.0, 0.1), "-12": (0.0, 0.5, 0.0, 0.1),
    "+12": (0.0, 0.5, 1.0, 0.1),
    "twelve": (0.0,) * 4,
    "11 or 12": (0.0,) * 4, "": (0.0,) * 4, "1_2": (0.0,) * 4,
}  # fmt: skip


@pytest.mark.parametrize(("answer", "values"), EARNED.items())
def test_what_an_answer_earns_in_the_other_recipes(answer, values):
    call = dict(completions=[WHOLE.replace("12", answer)], answer=["12"])
    functions = (strict_correctness_reward, int_reward, binary_correctness_reward, numeric_reward)
    assert tuple(function(**call)[0] for function in functions) == values
    assert xml_share_reward(**call) == [pytest.approx(0.1)]


def test_the_rewards_of_the_math_recipe():
    texts = [
        "<think>x</think> <answer>\\frac12</answer>",
        "<think>x</think>\n<answer>0.5</answer>\n",
        "<answer>1/2</answer>",
        "<think>x</think><answer>2</answer>",
        None,
    ]
    assert math_reward(None, texts, ["\\frac{1}{2}"] * 5, answer_format="r1") == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert r1_format_reward(texts) == [1.0, 1.0, 0.0, 1.0, 0.0]


def test_an_undecided_answer_is_not_paid_as_a_wrong_one_by_the_math_recipe():
    """The reward of weight 0 made of the abstention a total of 0, which is what a wrong answer gets."""
    answers, references = ["9^{9^9}+1", "42", "41"], ["9^{9^9}", "42", "42"]
    texts = [f"<think>x</think> <answer>{answer}</answer>" for answer in answers]
    totals, parts = paid(REWARD_SETS["math"], [""] * 3, texts, answer=references, answer_format="r1")
    assert parts == {"math_reward": [None, 1.0, 0.0], "r1_format_reward": [1.0, 1.0, 1.0]}
    assert math.isnan(totals[0])
    assert totals[1:] == [1.0, 0.0]
    assert right_answers(texts, references, "r1", "math") == [None, True, False]


def test_a_step_of_undecided_answers_alone_goes_on_where_another_reward_is_logged():
    texts = ["<think>x</think> <answer>9^{9^9}+1</answer>"] * 2
    call = dict(answer=["9^{9^9}"] * 2, answer_format="r1")
    totals, _ = paid(REWARD_SETS["math"], [""] * 2, texts, **call)
    assert all(map(math.isnan, totals))
    with pytest.raises(RewardError, match="None for all 2"):
        paid([(math_reward, 1.0)], [""] * 2, texts, **call)


def test_rewards_that_all_have_weight_zero_make_totals_of_zero():
    assert paid([(constant([1.0, None]), 0.0)], ["p"] * 2, ["x", "y"])[0][0] == 0.0


def test_the_r1_format_has_nothing_but_space_between_its_parts():
    texts = [
        "<think>a</think>\n<answer>b</answer>",
        "<think>a</think> so <answer>b</answer>",
        "so <think>a</think> <answer>b</answer>",
        "<think>a</think> <answer>b</answer> so",
        "<answer>b</answer> <think>a</think>",
    ]
    assert r1_format_reward(texts) == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("piece", ["<reasoning>", "<answer>\n", "</answer>", "<think>", "9", WHOLE])
def test_every_reward_takes_linear_time(piece):
    functions = {function for pairs in REWARD_SETS.values() for function, _ in pairs}
    for function in functions:

        def pay(text, function=function):
            return function(prompts=None, completions=[text], answer=["12"])[0]

        assert math.isfinite(pay(piece * 8000))
        assert growth(pay, piece * 2000, piece * 8000, limit=12) < 12, function.__name__


GRADERS = dict(
    c_correct=strict_correctness_reward,
    c_int=int_reward,
    c_strict=strict_format_reward,
    c_soft=soft_format_reward,
    c_xmlcount=xmlcount_reward,
    e_correct=binary_correctness_reward,
    e_numeric=numeric_reward,
    e_xml=xml_share_reward,
    r1_strict=r1_format_reward,
)
TAKE_A_FORMAT = {"c_correct", "c_int", "e_correct", "e_numeric"}


def checks_of(case):
    """What a shared case states, by name, and whether it is so here. null, or no key, states nothing."""
    text = case["completion"]
    if "completion_build" in case:
        text = "".join(piece * times for piece, times in case["completion_build"])
    call = dict(completions=[text], answer=[case["reference"]])
    own_format = {"answer_format": case["format"]}
    [score] = correctness_reward(**call, **own_format)
    graders = {name: value for name, value in case["graders"].items() if value is not None}
    for name in GRADERS.keys() & graders.keys():
        [value] = GRADERS[name](**call, **(own_format if name in TAKE_A_FORMAT else {}))
        yield name, abs(value - graders[name]) < 1e-9
    yield "b_format", graders.get("b_format") in (None, format_reward([text])[0])
    yield "d_h3po", "d_h3po" not in graders or hash_reward(**call) == [graders["d_h3po"] == "one"]
    yield "c_xmlcount_lt", xmlcount_reward([text])[0] < graders.get("c_xmlcount_lt", math.inf)
    yield "correctness", case["correctness"] in (None, score)
    yield "correctness_min", score >= case.get("correctness_min", 0)
    if not case.get("extracted_open"):
        extracted = extract_answer(text, case["format"])
        seconds = 0.5 if case["kind"] == "hazard" else 5.0  # no time is enough for a hazard
        yield "extracted", extracted == case["extracted"]
        if case["math_equal"] is not None:
            equal = math_equal(extracted or "", case["reference"], seconds)
            yield "math_equal", equal == case["math_equal"]


@pytest.mark.skipif(not GRADED.exists(), reason="the shared grading cases are not beside this checkout")
def test_every_shared_graded_completion_gets_its_values():
    cases = map(json.loads, GRADED.read_text(encoding="utf-8").splitlines())
    assert [(case["id"], name) for case in cases for name, agrees in checks_of(case) if not agrees] == []


def test_a_reward_function_gets_the_other_columns_of_the_data(tmp_path):
    """Tests of a program, a hint, a source: what the data holds beside question and answer, or None."""
    rows = [
        {"question": "a", "answer": "1", "tests": ["f(1) == 2"]},
        {"question": "b", "answer": "2", "level": "3", "source": "book"},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = reward_columns(load_problems(str(tmp_path)), ["x", "y"], [[1], [2]], "xml")
    assert columns["tests"] == [["f(1) == 2"], None]
    assert columns["source"] == [None, "book"]
    assert columns["answer"] == columns["solution"] == ["1", "2"]
    assert columns["level"] == [None, "3"]
    assert columns["question"] == ["a", "b"]


def test_a_reward_gets_the_chat_that_asked_and_the_answer_where_a_solution_is_missing():
    chat = ({"role": "system", "content": "S"}, {"role": "user", "content": "Q"})
    problems = [Problem("Q", "7", messages=chat, more={"solution": None}), Problem("R", "8")]
    columns = reward_columns(problems, ["x", "y"], [[1], [2]], "xml")
    assert columns["prompts"] == [list(chat), [{"role": "user", "content": "R"}]]
    assert columns["solution"] == columns["answer"] == ["7", "8"]


def test_a_column_that_the_loop_s_own_arguments_hide_is_warned_of():
    """A column `prompts` of the data was replaced by the loop's without a word."""
    problem, config = Problem("q", "1", more={"prompts": "mine", "notes": "n"}), grpo_train.Config()
    with pytest.warns(UserWarning, match="the data's prompts does not reach reward functions"):
        rewards.check_rewards(config, [(lambda completions, **_: [0.0], 1.0)], problem)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rewards.check_rewards(config, [(rewards.correctness_reward, 1.0)], problem)


@pytest.mark.parametrize("name", ["step", "timeout", "gather", "functions", "columns"])
def test_a_column_of_the_data_may_have_any_name(name):
    """One called `step` ended the run in a traceback: compute_rewards had an argument of that name."""
    seen, problem = {}, Problem("q", "1", more={name: 7})
    columns = reward_columns([problem], ["x"], [[1]], "xml")
    compute_rewards([(lambda **given: seen.update(given) or [1.0], 1.0)], columns, step=3, timeout=9.0)
    assert seen[name] == [7]
    config = grpo_train.Config(num_generations=2, eval_every=0)
    completions = [Completion([1], "x", True), Completion([1], "y", True)]
    rollout = SimpleNamespace(num_generations=2)
    problems = [SimpleNamespace(problem=problem)]
    sampled = grpo_train.Sampled(problems, problems, rollout, completions, [0])
    functions = [(lambda **given: given[name], 1.0)]
    run = SimpleNamespace(config=config, call_rewards=lambda action: action(list))
    grpo_train.score(run, functions, sampled, 0)
    assert sampled.rewards == [7.0, 7.0]


def test_a_reward_function_gets_the_data_as_it_is(tmp_path):
    """`subject`, `level`, `type`, `id` and the question were left out, and `solution` was the answer."""
    row = {"problem": "a", "answer": "1", "solution": "So \\boxed{1}.", "type": "Algebra", "level": "Level 5"}
    row |= {"unique_id": "x/1", "id": 7}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    columns = reward_columns(load_problems(str(tmp_path)), ["x"], [[1]], "xml")
    assert {name: columns[name] for name in row} == {name: [value] for name, value in row.items()}
    assert columns["question"] == ["a"]
    assert columns["subject"] == ["Algebra"]
    assert columns["reference_answer"] == ["1"]


def test_the_columns_of_the_oneshot_package_are_read_and_given(tmp_path):
    row = {"question": "a", "reference_answer": "1,000", "reference_solution": "So.\n#### 1,000"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    [problem] = load_problems(str(tmp_path))
    assert (problem.answer, problem.solution) == ("1000", "So.\n#### 1000")
    columns = reward_columns([problem], ["x"], [[1]], "xml")
    assert (columns["reference_answer"], columns["reference_solution"]) == (["1000"], ["So.\n#### 1,000"])

    def theirs(*, prompts, completions, reference_answer, **_):
        return [float(reference == "1000") for reference in reference_answer]

    assert compute_rewards([(theirs, 1.0)], columns)[0] == [1.0]


def test_a_solution_column_that_is_named_is_the_solution(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "a", "answer": "1", "worked": "It is 1."}\n')
    [problem] = load_problems(str(tmp_path), columns={"solution": "worked"})
    assert reward_columns([problem], ["x"], [[1]], "xml")["solution"] == ["It is 1."]


@pytest.mark.parametrize(
    "columns",
    [
        dict(answer=["Sold 72.\n#### 72"]),
        dict(reference_answer=["72"]),
        dict(solution=["It is \\boxed{72}."]),
        dict(solution=["72"]),
    ],
)
def test_our_rewards_take_the_reference_from_the_columns_that_trl_s_data_has(columns):
    """GSM8K's own answers, which are solutions, paid 0 in TRL's trainer without a word."""
    completion = "<reasoning>\nso\n</reasoning>\n<answer>\n72\n</answer>\n"
    for function in (
        correctness_reward,
        strict_correctness_reward,
        combined_reward,
        binary_correctness_reward,
    ):
        assert function(prompts=["p"], completions=[completion], **columns)[0] >= 1.0
    assert hash_reward(completions=["#### 72"], **columns) == [1.0]


class Judge:
    """A reward that is an object, with a coroutine to call, as TRL takes them."""

    def __init__(self):
        self.loops = set()

    async def __call__(self, completions, **kwargs):
        await asyncio.sleep(0)
        self.loops.add(asyncio.get_running_loop())
        return [1.0, None][: len(completions)]


def test_coroutines_objects_and_partials_are_rewards():
    """A coroutine ended the run, and an object beside a wrong number of weights did in a traceback."""

    async def scored(completions, scale, **kwargs):
        return [scale] * len(completions)

    judge = Judge()
    functions = [(judge, 1.0), (functools.partial(scored, scale=2.0), 1.0)]
    for _ in range(2):
        totals, parts = paid(functions, ["p"] * 2, ["x", "y"])
        assert (totals, parts) == ([3.0, 2.0], {"Judge": [1.0, None], "scored": [2.0, 2.0]})
    assert len(judge.loops) == 1, "a client that a first call opened lives in its loop"

    async def inside():
        return paid(functions[:1], ["p"] * 2, ["x", "y"])[0]

    assert asyncio.run(inside())[0] == 1.0, "a notebook has a loop that runs already"


def test_a_coroutine_that_raises_is_named():
    async def fails(**kwargs):
        raise OSError("no route")

    with pytest.raises(RewardError, match="reward function fails at step 3 raised OSError: no route"):
        paid([(fails, 1.0)], ["p"], ["x"], step=3)


def test_a_function_without_kwargs_gets_what_it_names_and_one_that_needs_more_is_refused():
    def short(completions, answer):
        return [float(a) for a in answer]

    assert paid([(short, 1.0)], ["p"], ["x"], answer=["7"])[0] == [7.0]
    check_parameters([(short, 1.0)], {"completions", "answer"})
    with pytest.raises(ValueError, match="short needs answer, which is not among completions, prompts"):
        check_parameters([(short, 1.0)], {"completions", "prompts"})


def test_a_class_in_place_of_an_object_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("class Judge:\n    def __call__(self, **k):\n        return [0.0]\n")
    with pytest.raises(ValueError, match="Judge is a class: name an object of it"):
        load_reward(f"{tmp_path}/mine.py:Judge")


def test_what_functions_log_is_kept_by_completion_and_by_step():
    numpy = pytest.importorskip("numpy")

    def logs(completions, log_extra, log_metric, **kwargs):
        log_extra("parsed", [Decimal("1.5"), {("a", 1): 2}])
        log_extra("scores", numpy.array([1.5, 2.5], dtype="float32"))
        log_metric("share", 0.25)
        log_metric("share", 0.75)
        return [0.0, 1.0]

    log = RewardLog([{}, {}])
    compute_rewards([(logs, 1.0), (logs, 1.0)], dict(completions=["x", "y"]), log=log)
    assert log.rows[0] == {"parsed": "1.5", "scores": 1.5, "parsed_2": "1.5", "scores_2": 1.5}
    assert log.rows[1]["parsed"] == "{('a', 1): 2}"
    assert log.metrics == {"share": [0.25, 0.75, 0.25, 0.75]}

    def logs_one(log_extra, **kwargs):
        log_extra("parsed", [1])

    with pytest.raises(RewardError, match="'parsed'.* has 1 value for 2 completions"):
        compute_rewards([(logs_one, 1.0)], dict(completions=["x", "y"]), log=log)


def by_position(completions, /, **kwargs):
    return [0.0] * len(completions)


def everything_by_position(*args):
    return [0.0]


def yields(completions, **kwargs):
    yield from [0.0] * len(completions)


async def yields_later(completions, **kwargs):
    yield 0.0


class Yields:
    def __call__(self, completions, **kwargs):
        yield 0.0


NO_REWARDS = {
    "by_position": (by_position, "takes completions by position only"),
    "args": (everything_by_position, "takes no argument by its name"),
    "nothing": (lambda: [0.0], "takes no argument by its name"),
    "generator": (yields, "yields its values"),
    "partial": (functools.partial(yields, answer=1), "yields its values"),
    "async": (yields_later, "yields its values"),
    "object": (Yields(), "Yields yields its values"),
}


@pytest.mark.parametrize("kind", NO_REWARDS)
def test_a_function_that_no_step_could_call_is_refused_when_it_is_loaded(kind, tmp_path, monkeypatch):
    """It was refused in the first step, when the models were loaded and a rollout was sampled."""
    function, words = NO_REWARDS[kind]
    with pytest.raises(ValueError, match=words):
        check_parameters([(function, 1.0)], {"completions": []})
    (tmp_path / "mine.py").write_text("")
    monkeypatch.setattr("answers.user_files._module_of", lambda *args: SimpleNamespace(mine=function))
    with pytest.raises(SettingError, match=f"reward=.*{words}"):
        grpo_train.Config(reward=[f"{tmp_path}/mine.py:mine"])


def test_the_modules_beside_a_reward_file_that_it_imports_belong_to_it(tmp_path):
    """A run was resumed after a helper of its reward had changed: only the reward's own text counted."""
    files = {
        "mine.py": "import os\nimport helper as h\nfrom parts.units import metres\nimport rewards\n",
        "helper.py": "def f():\n    from sub import *\n    importlib.import_module('late')\n",
        "parts/__init__.py": "",
        "parts/units.py": "from . import deep\nfrom .more import x\nfrom ..late import y\n",
        "parts/deep.py": "import mine\n",
        "parts/more.py": "",
        "sub/__init__.py": "def (",
        "late.py": "",
        "os.txt": "",
        "others.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = [str(path.relative_to(tmp_path.resolve())) for path in user_files(tmp_path / "mine.py")]
    assert found[0] == "mine.py"
    assert sorted(found) == sorted(files.keys() - {"os.txt", "others.py"})
    assert user_files(rewards.__file__) == [Path(rewards.__file__)], "the project's own belong to the commit"


OWN_FORMAT = """
import dataclasses
import re
from answers.formats import AnswerFormat

def find(text):
    found = re.findall(r"RESULT\\[(.*?)\\]", text)
    return found[-1] if found else None

def made(template="{reasoning}\\nRESULT[{answer}]", find=find, think_end="RESULT[", tags=("RESULT[",)):
    return AnswerFormat("mine", "End with RESULT[...].", think_end, tags, template, find)

mine = made()
lost = made("{reasoning}\\n{answer}")
guesses = made(find=lambda text: (re.findall(r"[-\\w=, ]+", text) or [""])[-1].strip() or None)
raises = made(find=lambda text: text.index("RESULT") and None)
never = made(think_end="</think>")
empty = made(think_end="")
text_as_tags = made(think_end="RESULT[", tags="RESULT[")
list_of_tags = made(tags=["RESULT["])
number_as_tag = made(tags=("RESULT[", 7))
other_tag = made(tags=("RESULT[", "]."))
first_number = made(find=lambda text: (re.findall(r"RESULT\\[\\D*(\\d+)", text) or [None])[-1])
no_prompt = dataclasses.replace(mine, system_prompt=None)
no_raw_prompt = dataclasses.replace(mine, raw_prompt=None)
no_function = made(find=None)
no_field = made("{reasoning} {result} RESULT[{answer}]")
a_string = "RESULT"
"""


def test_an_answer_format_of_the_users_is_read_from_a_file(tmp_path, monkeypatch):
    """In every place that knows the four: prompts, grading, rewards, evaluation, from any folder."""
    (tmp_path / "own.py").write_text(OWN_FORMAT)
    monkeypatch.chdir(tmp_path)
    config = grpo_train.Config(answer_format="own.py:mine")
    assert config.answer_format == f"{tmp_path / 'own.py'}:mine", "whoever evaluates may stand elsewhere"
    assert config.think_end == "RESULT["
    assert system_prompt(config) == "End with RESULT[...]."
    monkeypatch.chdir(tmp_path.parent)
    text = answer_format_named(config.answer_format).write("6 * 7", "42")
    assert extract_answer(text, config.answer_format) == "42"
    assert right_answers([text, "42"], ["42", "42"], config.answer_format) == [True, False]
    assert correctness_reward(None, [text], ["42"], config.answer_format) == [2.0]
    assert format_reward([text, ""], config.answer_format) == [0.2, 0.0]
    spaced = ["RESULT[ 42 ]", "RESULT[ north ]"]  # text that is no number was paid nothing
    assert correctness_reward(None, spaced, ["42", "north"], config.answer_format) == [2.0, 2.0]
    assert extract_answer("RESULT[ ... ]", config.answer_format) is None
    assert grpo_eval.Config(model="tiny", answer_format=config.answer_format).answer_format
    assert code_of(config) == [("answer_format", str(tmp_path / "own.py"))]
    before = rewards_fingerprint(config, [])
    (tmp_path / "own.py").write_text(OWN_FORMAT + "# other\n")
    assert rewards_fingerprint(config, []) != before, "a resumed run notices"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lost", "finds None in 'So it is.\\n42', which it has written for '42'"),
        ("guesses", "finds 'It is 42' in a text that has none of its tags: its find must give None there"),
        ("raises", "raises ValueError: substring not found"),
        ("never", "without '</think>': its template must hold think_end and all tags"),
        ("empty", "without '': its template must hold think_end and all tags"),
        ("no_field", "raises KeyError: 'result'"),
        ("text_as_tags", "has tags='RESULT[', which must be a tuple of texts"),  # each letter was a tag
        ("list_of_tags", "has tags=['RESULT['], which must be a tuple of texts"),  # was a bare TypeError
        ("number_as_tag", "has tags=('RESULT[', 7), which must be a tuple of texts"),
        ("other_tag", "without '].': its template must hold think_end and all tags"),
        (
            "first_number",
            "finds '7' in 'So it is.\\nRESULT[x = 7, y = 8]', which it has written for 'x = 7, y",
        ),
        ("no_prompt", "has system_prompt=None, which must be a text"),
        ("no_raw_prompt", "has raw_prompt=None, which must be a text"),
        ("no_function", "has find=None, which must be a function of a text"),
        ("a_string", "is a str there: make it with answers.formats.AnswerFormat"),
        ("nowhere", "is not in that file: make it with answers.formats.AnswerFormat"),
    ],
)
def test_a_format_that_cannot_be_used_is_refused_before_anything_is_loaded(name, words, tmp_path):
    (tmp_path / "own.py").write_text(OWN_FORMAT)
    with pytest.raises(SettingError) as refused:
        grpo_train.Config(answer_format=f"{tmp_path}/own.py:{name}")
    assert words in str(refused.value).replace("\\\\", "\\")
    assert str(refused.value).startswith(f"answer_format='{tmp_path}/own.py:{name}': ")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("none.py:mine", "there is no file none.py"),
        ("json", "is unknown: must be one of xml, hash, boxed, r1, or FILE.py:name"),
        ("own.txt:mine", "is unknown: must be one of"),
    ],
)
def test_a_format_that_is_not_there_is_one_line(spec, words):
    for make in (grpo_train.Config, lambda **given: grpo_eval.Config(model="tiny", **given)):
        with pytest.raises(SettingError, match=words):
            make(answer_format=spec)


def test_an_error_in_a_reward_is_told_with_file_and_line_of_the_user_s_code(tmp_path, monkeypatch):
    """`KeyError: 'gold'` for 84 completions, and a file of 300 lines to look through."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text("import json\n\n\ndef parse(text):\n    return json.loads(text)\n")
    code = "import importlib.util\nspec = importlib.util.spec_from_file_location('helper', 'helper.py')\n"
    code += "helper = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(helper)\n\n\n"
    code += "def f(completions, **kwargs):\n    return [helper.parse(c) for c in completions]\n\n\n"
    code += "async def g(completions, **kwargs):\n    return [0.0, {}['gold']]\n"
    (tmp_path / "mine.py").write_text(code)
    places = {"f": r"JSONDecodeError: .* \(helper.py line 5\)", "g": r"KeyError: 'gold' \(mine.py line 12\)"}
    for name, words in places.items():
        with pytest.raises(RewardError, match=f"{words} for 2 completions"):
            paid([load_reward(f"{tmp_path}/mine.py:{name}")], [None] * 2, ["a", "b"])
    for text, line in {"import json\njson.loads('')\n": 2, "def f(:\n": 1, "\n\nimport nope\n": 3}.items():
        (tmp_path / "broken.py").write_text(text)
        with pytest.raises(ValueError, match=rf"broken.py does not import: .* \(broken.py line {line}\)$"):
            load_reward("broken.py:f")

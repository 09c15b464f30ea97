"""Problems: GSM8K, MATH, a file or hub data set of the user's, the generated arithmetic task; and their prompts as padded ids."""

import csv
import hashlib
import io
import itertools
import json
import math
import random
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jinja2 import TemplateError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from answers import extract_answer


class DataError(ValueError):
    """Data that cannot be trained on: one line that names the file and the row."""


@dataclass(frozen=True)
class Problem:
    """`solution` is a worked solution ending in a line `#### answer` (GSM8K's own form), or empty; `response` a text to learn as it stands, or empty.

    `more`: the columns of the data that are none of these, as they came; reward functions get them.
    """

    question: str
    answer: str
    solution: str = ""
    subject: str = ""
    level: str = ""
    id: str = ""
    response: str = ""
    more: dict = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class EncodedProblem:
    """A problem, its prompt as text, and as ids."""

    problem: Problem
    prompt: str
    ids: list[int]


HUB = {"gsm8k": {"": ("openai/gsm8k", "main")}, "math": {"test": ("HuggingFaceH4/MATH-500", None), "": ("nlile/hendrycks-MATH-benchmark", None)}}
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
QUESTION, ANSWER, SOLUTION = ("question", "problem", "prompt"), ("answer", "final_answer", "target", "label"), ("solution", "rationale", "response")
EXTRA = {"subject": "subject", "type": "subject", "level": "level", "unique_id": "id", "id": "id"}  # column: field
ARITHMETIC_SIZES = {"train": 30000, "test": 500}


def load_problems(dataset, split="train", *, question_column=None, answer_column=None, solution_column=None, limit=None, seed=0, responses=False):
    """The problems of a split, in the order of the data; with `limit` the first of them.

    dataset: gsm8k, math, arithmetic, a file (one file serves every split), a folder with <split>.jsonl/.json/.csv/.parquet, or a hub id.
    `responses`: a row may have a `response` to learn instead of an answer.
    Raises DataError, with the file and the row, for anything that is not a question with an answer.
    """
    if limit is not None and limit < 1:
        raise DataError(f"limit={limit}: must be at least 1")
    if dataset == "arithmetic":
        if split not in ARITHMETIC_SIZES:
            raise DataError(f"arithmetic has no split {split!r}: there are train and test")
        return arithmetic_problems(split, ARITHMETIC_SIZES[split], seed)[:limit]
    path = Path(dataset)
    if path.is_dir():
        path = _split_file(path, split)
    elif path.suffix not in SUFFIXES and path.exists():
        raise DataError(f"{path}: a data file ends in one of {', '.join(SUFFIXES)}")
    elif path.suffix in SUFFIXES and not path.is_file():
        raise DataError(f"{path}: {'is not a file' if path.exists() else 'there is no such file'}")  # a pipe would be waited for
    rows = _file_rows(path) if path.suffix in SUFFIXES else _hub_rows(dataset, split)
    rows = list(itertools.islice(rows, limit))
    if not rows:
        raise DataError(f"{path}: holds no rows")
    columns = {"question": question_column, "answer": answer_column, "solution": solution_column}
    return [_problem(where, row, columns, f"{split}-{index}", responses) for index, (where, row) in enumerate(rows)]


def _split_file(folder, split):
    for suffix in SUFFIXES:
        if (folder / f"{split}{suffix}").is_file():
            return folder / f"{split}{suffix}"
    raise DataError(f"{folder}: has no {split}.jsonl (or .json, .csv, .parquet)")


def _file_rows(path):
    """Pairs (where, row) of a file: the place is a line for .jsonl and .csv, a row else."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.read_table(path).to_pylist()
        except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
            raise DataError(f"{path}: cannot be read as a parquet file ({' '.join(str(error).split())[:120]})") from error
        return [(f"{path} row {i}", row) for i, row in enumerate(table, 1)]
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path} line {line}: is not UTF-8") from error
    if path.suffix == ".csv":
        return _csv_rows(path, text)
    if path.suffix == ".jsonl":
        lines = ((i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip())
        return [(f"{path} line {i}", _json(path, line, i)) for i, line in lines]
    if not text.strip():
        return []
    whole = _json(path, text, 1)
    lists = [whole] if isinstance(whole, list) else [v for v in whole.values() if isinstance(v, list)] if isinstance(whole, dict) else []
    if len(lists) != 1:
        raise DataError(f"{path}: must hold a list of objects, or an object with one such list")
    return [(f"{path} row {i}", row) for i, row in enumerate(lists[0], 1)]


def _csv_rows(path, text):
    """Strict: an unclosed quote or a cell too many (a comma without quotes) would otherwise swallow rows or cut answers without a word."""
    csv.field_size_limit(1 << 30)
    reader, rows = csv.DictReader(io.StringIO(text, newline=""), strict=True), []  # not splitlines(): it also cuts at U+2028 and the like
    try:
        if repeated := sorted({name for name in reader.fieldnames or () if reader.fieldnames.count(name) > 1}):  # the last would win without a word
            raise DataError(f"{path} line 1: has more than one column {repeated[0]!r}")
        for row in reader:
            if None in row:
                raise DataError(f"{path} line {reader.line_num}: has more cells than the header; put text with commas into double quotes")
            rows.append((f"{path} line {reader.line_num}", row))
    except csv.Error as error:
        raise DataError(f"{path} line {reader.line_num + 1}: is not CSV ({error})") from error  # where the row begins
    return rows


def _json(path, text, first_line):
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise DataError(f"{path} line {first_line + error.lineno - 1}: is not JSON ({error.msg})") from error
    except (ValueError, RecursionError) as error:  # an integer of more than 4,300 digits; brackets within brackets without end; a key twice
        raise DataError(f"{path} line {first_line}: cannot be read as JSON ({error})") from error


def _once(pairs):
    """A dict, unless a key is there twice: the last would win without a word."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError(f"the key {next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))!r} is there twice")
    return made


def _hub_rows(dataset, split):
    import datasets

    places = HUB.get(dataset, {"": (dataset, None)})
    name, config = places.get(split, places[""])
    try:
        rows = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:150]
        raise DataError(f"data set {name!r}, split {split!r}, cannot be loaded: give a folder with {split}.jsonl or a file instead ({reason})") from error
    return [(f"{name} row {i}", row) for i, row in enumerate(rows, 1)]


def _problem(where, row, columns, default_id, responses):
    if not isinstance(row, dict):
        raise DataError(f"{where}: must be an object with a question and an answer")
    text, used = {}, {"response", *EXTRA}
    for name, usual in (("question", QUESTION), ("answer", ANSWER), ("solution", SOLUTION)):
        named = columns[name]
        if named is not None and named not in row:
            raise DataError(f"{where}: has no column {named!r} for the {name}; there are: {', '.join(map(str, row))}")
        column = named or next((c for c in usual if c in row), None)
        text[name] = _text(where, column, row[column]) if column is not None else ""
        used.add(column)
    if "####" in text["answer"]:
        text["solution"], text["answer"] = text["solution"] or text["answer"], text["answer"].rpartition("####")[2]
    elif not text["answer"]:
        text["answer"] = extract_answer(text["solution"], "boxed") or extract_answer(text["solution"], "hash") or ""
    response = _text(where, "response", row["response"]) if responses and "response" in row and columns["solution"] is None else ""
    if response:
        text["answer"] = text["answer"] or next((a for name in ("xml", "boxed", "hash") if (a := extract_answer(response, name))), "")
    answer = _without_commas(text["answer"].strip())
    if not text["question"] or not (answer or response):
        found = ", ".join(map(str, row))
        raise DataError(f"{where}: has no {'answer' if text['question'] else 'question'} (columns: {found}); name it with a *_column setting or mend the row")
    extra = {name: _text(where, column, row[column]) for column, name in EXTRA.items() if column in row}
    named = {"id": default_id, **{k: v for k, v in extra.items() if v}}
    more = {column: value for column, value in row.items() if column not in used}
    return Problem(text["question"], answer, _worked(text["solution"], answer), response=response, more=more, **named)


def _text(where, column, value):
    """A cell as trimmed text; None and NaN are empty."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{where}: column {column!r} holds {type(value).__name__}, not text or a number")
    text = str(value).strip()
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):  # JSON can spell half a character, no tokenizer takes it
        raise DataError(f"{where}: column {column!r} holds half of a surrogate pair, which is not text")
    return text


def _without_commas(answer):
    return answer.replace(",", "") if re.fullmatch(r"[-+$]*\d{1,3}(,\d{3})+(\.\d+)?", answer) else answer


def _worked(solution, answer):
    """A solution in GSM8K's form, without its <<48/2=24>> calculator notes."""
    if not solution:
        return ""
    reasoning, marker, _ = solution.rpartition("####")
    return re.sub(r"<<[^<>]*>>", "", reasoning if marker else solution).strip() + f"\n#### {answer}"


# The generated task

NAMES = ("Ann", "Bob", "Eve", "Tom", "Sue", "Max", "Liz", "Dan")
ITEMS = ("pens", "cups", "eggs", "cards", "books", "apples", "coins", "balls")
MORE, LESS = ("gets", "buys"), ("loses", "sells")
FIRST, SECOND = range(3, 21), range(1, 10)


def arithmetic_problems(split, count, seed=0):
    """One-step word problems: "Ann has 12 pens and gets 5 more", or "and loses 5".

    *Half of the train solutions choose the wrong operation*, as text found in the wild would, so that supervised training on them gives
    a fluent model that is right half of the time; answers are always right, and so are test solutions. Which problems are in which split
    is a matter of their own text: no seed can mix them.
    """
    every = [p for p in itertools.product(FIRST, SECOND, MORE + LESS, NAMES, ITEMS) if p[1] < p[0] and _is_test(p) == (split == "test")]
    if not 1 <= count <= len(every):
        raise DataError(f"arithmetic: {split} has {len(every)} problems, {count} were asked for")
    draw = random.Random(f"{seed}-{split}")
    return [_arithmetic(parts, split == "train" and draw.random() < 0.5, f"{split}-{i}") for i, parts in enumerate(draw.sample(every, count))]


def _is_test(parts):
    return hashlib.sha256(repr(parts).encode()).digest()[0] < 16  # a sixteenth


def _arithmetic(parts, wrong, problem_id):
    first, second, verb, name, item = parts
    adds = verb in MORE
    question = f"{name} has {first} {item} and {verb} {second}{' more' if adds else ''}. How many {item} does {name} have now?"
    plus = adds != wrong
    result = first + second if plus else first - second
    solution = f"{name} {verb} {second}. {first} {'+' if plus else '-'} {second} = {result}\n#### {result}"
    return Problem(question, str(first + second if adds else first - second), solution, id=problem_id)


def arithmetic_tokenizer():
    """One token a word (with the space before it), tag, digit or sign; decoding gives back the text that was encoded, to the letter.

    Its chat template leaves the system message out: a model of this size learns the format from its warm start.
    """
    words = NAMES + ITEMS + MORE + LESS + ("has", "and", "more", "How", "many", "does", "have", "now")
    special = ["<|pad|>", "<|eos|>", "<|user|>", "<|assistant|>", "<unk>"]
    tags = ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]
    tokens = [*special, *tags, *"\n .?+-=0123456789", *words, *(f" {w}" for w in words), "#"]
    raw = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?[a-z]+>| ?[A-Za-z]+|\n|."), "isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|eos|>", pad_token="<|pad|>", unk_token="<unk>", additional_special_tokens=["<|user|>", "<|assistant|>"],
        padding_side="left", clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}{% elif m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}<|eos|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return tokenizer


# Prompts

PLAIN_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}\n\n{% elif m['role'] == 'user' %}Question: {{ m['content'] }}\n"
    "{% else %}Answer: {{ m['content'] }}{{ eos_token }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}Answer: {% endif %}"
)


def build_prompt(tokenizer, question, system_prompt, chat_template_kwargs=None, response=None):
    """The text that the model's chat template makes of a question, ready for an answer; with `response`, of the whole dialogue.

    A tokenizer without a chat template gets PLAIN_TEMPLATE, with a warning. A template that refuses a system message gets its text before
    the question.
    """
    if tokenizer.chat_template is None:
        warnings.warn(f"{tokenizer.name_or_path or 'the tokenizer'} has no chat template: using a plain one (Question: ... Answer: ...)", stacklevel=2)
        tokenizer.chat_template = PLAIN_TEMPLATE
    answer = [] if response is None else [{"role": "assistant", "content": response}]

    def render(messages):
        return tokenizer.apply_chat_template(messages + answer, tokenize=False, add_generation_prompt=response is None, **(chat_template_kwargs or {}))

    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    try:
        return render([*system, {"role": "user", "content": question}])
    except (TemplateError, TypeError, ValueError):
        try:
            return render([{"role": "user", "content": f"{system_prompt}\n\n{question}" if system_prompt else question}])
        except (TemplateError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} cannot be filled in: {reason}") from error


def chat_eos_id(tokenizer, chat_template_kwargs=None):
    """The id that the chat template writes after an answer (what supervised training must teach); the tokenizer's EOS if it writes none."""
    mark = "The answer is 42"
    after = build_prompt(tokenizer, "What is it?", "", chat_template_kwargs, response=mark).rpartition(mark)[2]
    special = {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}  # Gemma's <end_of_turn>
    return next((i for i in tokenizer(after, add_special_tokens=False)["input_ids"] if i in special), tokenizer.eos_token_id)


def encode_prompts(problems, tokenizer, system_prompt, max_prompt_length, chat_template_kwargs=None):
    """The problems with their prompts, and how many were left out because theirs is longer than max_prompt_length tokens (none is ever cut).

    Templates write their own BOS, so none is added. Raises DataError where every prompt is too long, or one has no tokens.
    """
    kept, shortest = [], math.inf
    for problem in problems:
        prompt = build_prompt(tokenizer, problem.question, system_prompt, chat_template_kwargs)
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if not ids:
            raise DataError(f"the tokenizer makes no token of the prompt {prompt[:60]!r}: it does not belong to this model")
        shortest = min(shortest, len(ids))
        if len(ids) <= max_prompt_length:
            kept.append(EncodedProblem(problem, prompt, ids))
    if kept and all(p.prompt == kept[0].prompt for p in kept) and any(p.problem.question != kept[0].problem.question for p in kept):
        raise DataError("the chat template leaves the question out: all prompts are the same")
    if not kept:
        raise DataError(f"every prompt is longer than max_prompt_length={max_prompt_length}: the shortest has {shortest} tokens; raise it")
    return kept, len(problems) - len(kept)


def pad_left(rows, pad_id):
    """Lists of ids -> ids (B, P) and mask (B, P) bool, padding on the left: prompts, so that all go on from the last column."""
    return _pad(rows, pad_id, left=True)


def pad_right(rows, pad_id):
    """Lists of ids -> ids (B, T) and mask (B, T) bool, padding on the right: completions."""
    return _pad(rows, pad_id, left=False)


def _pad(rows, pad_id, left):
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), pad_id), torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(len(row))
        ids[i, place], mask[i, place] = torch.tensor(list(row), dtype=torch.long), True
    return ids, mask


def split_held_out(problems, count):
    """(train, held out): the problems with the smallest hashes of their questions, until `count` are held out, whatever their order.

    A question that occurs twice is on one side only, so a few more than `count` may be held out.
    """
    if count == 0:
        return problems, []
    hashes = [hashlib.sha256(p.question.encode()).digest() for p in problems]
    if count >= len(problems):
        raise DataError(f"{count} held-out problems leave none of {len(problems)} to train on: set eval_problems lower")
    edge = sorted(hashes)[count - 1]
    train = [p for p, h in zip(problems, hashes, strict=True) if h > edge]
    if not train:
        raise DataError(f"{count} held-out problems leave none of {len(problems)} to train on: set eval_problems lower")
    return train, [p for p, h in zip(problems, hashes, strict=True) if h <= edge]

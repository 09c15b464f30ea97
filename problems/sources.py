"""Where problems come from: GSM8K, MATH, a file or a hub data set of the user's, the generated arithmetic task."""

import csv
import hashlib
import io
import itertools
import json
import math
import re
from pathlib import Path

from answers.formats import extract_answer
from errors import DataError
from problems.arithmetic import arithmetic_problems
from problems.problem import Problem

HUB = {
    "gsm8k": {"": ("openai/gsm8k", "main")},
    "math": {"test": ("HuggingFaceH4/MATH-500", None), "": ("nlile/hendrycks-MATH-benchmark", None)},
}


SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


QUESTION, ANSWER, SOLUTION = (
    ("question", "problem", "prompt"),
    ("answer", "final_answer", "target", "label"),
    ("solution", "rationale", "response"),
)


EXTRA = {
    "subject": "subject",
    "type": "subject",
    "level": "level",
    "unique_id": "id",
    "id": "id",
}  # column: field


ARITHMETIC_SIZES = {"train": 30000, "test": 500}


def load_problems(
    dataset,
    split="train",
    *,
    question_column=None,
    answer_column=None,
    solution_column=None,
    limit=None,
    seed=0,
    responses=False,
):
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
        raise DataError(
            f"{path}: {'is not a file' if path.exists() else 'there is no such file'}"
        )  # a pipe would be waited for
    rows = _file_rows(path) if path.suffix in SUFFIXES else _hub_rows(dataset, split)
    rows = list(itertools.islice(rows, limit))
    if not rows:
        raise DataError(f"{path}: holds no rows")
    columns = {"question": question_column, "answer": answer_column, "solution": solution_column}
    return [
        _problem(where, row, columns, f"{split}-{index}", responses)
        for index, (where, row) in enumerate(rows)
    ]


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
            raise DataError(
                f"{path}: cannot be read as a parquet file ({' '.join(str(error).split())[:120]})"
            ) from error
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
    lists = (
        [whole]
        if isinstance(whole, list)
        else [v for v in whole.values() if isinstance(v, list)]
        if isinstance(whole, dict)
        else []
    )
    if len(lists) != 1:
        raise DataError(f"{path}: must hold a list of objects, or an object with one such list")
    return [(f"{path} row {i}", row) for i, row in enumerate(lists[0], 1)]


def _csv_rows(path, text):
    """Strict: an unclosed quote or a cell too many (a comma without quotes) would otherwise swallow rows or cut answers without a word."""
    csv.field_size_limit(1 << 30)
    reader, rows = (
        csv.DictReader(io.StringIO(text, newline=""), strict=True),
        [],
    )  # not splitlines(): it also cuts at U+2028 and the like
    try:
        if repeated := sorted(
            {name for name in reader.fieldnames or () if reader.fieldnames.count(name) > 1}
        ):  # the last would win without a word
            raise DataError(f"{path} line 1: has more than one column {repeated[0]!r}")
        for row in reader:
            if None in row:
                raise DataError(
                    f"{path} line {reader.line_num}: has more cells than the header; put text with commas into double quotes"
                )
            rows.append((f"{path} line {reader.line_num}", row))
    except csv.Error as error:
        raise DataError(
            f"{path} line {reader.line_num + 1}: is not CSV ({error})"
        ) from error  # where the row begins
    return rows


def _json(path, text, first_line):
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise DataError(f"{path} line {first_line + error.lineno - 1}: is not JSON ({error.msg})") from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # an integer of more than 4,300 digits; brackets within brackets without end; a key twice
        raise DataError(f"{path} line {first_line}: cannot be read as JSON ({error})") from error


def _once(pairs):
    """A dict, unless a key is there twice: the last would win without a word."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError(
            f"the key {next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))!r} is there twice"
        )
    return made


def _hub_rows(dataset, split):
    import datasets

    places = HUB.get(dataset, {"": (dataset, None)})
    name, config = places.get(split, places[""])
    try:
        rows = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:150]
        raise DataError(
            f"data set {name!r}, split {split!r}, cannot be loaded: give a folder with {split}.jsonl or a file instead ({reason})"
        ) from error
    return [(f"{name} row {i}", row) for i, row in enumerate(rows, 1)]


def _problem(where, row, columns, default_id, responses):
    if not isinstance(row, dict):
        raise DataError(f"{where}: must be an object with a question and an answer")
    text, used = {}, {"response", *EXTRA}
    for name, usual in (("question", QUESTION), ("answer", ANSWER), ("solution", SOLUTION)):
        named = columns[name]
        if named is not None and named not in row:
            raise DataError(
                f"{where}: has no column {named!r} for the {name}; there are: {', '.join(map(str, row))}"
            )
        column = named or next((c for c in usual if c in row), None)
        text[name] = _text(where, column, row[column]) if column is not None else ""
        used.add(column)
    if "####" in text["answer"]:
        text["solution"], text["answer"] = (
            text["solution"] or text["answer"],
            text["answer"].rpartition("####")[2],
        )
    elif not text["answer"]:
        text["answer"] = (
            extract_answer(text["solution"], "boxed") or extract_answer(text["solution"], "hash") or ""
        )
    response = (
        _text(where, "response", row["response"])
        if responses and "response" in row and columns["solution"] is None
        else ""
    )
    if response:
        text["answer"] = text["answer"] or next(
            (a for name in ("xml", "boxed", "hash") if (a := extract_answer(response, name))), ""
        )
    answer = _without_commas(text["answer"].strip())
    if not text["question"] or not (answer or response):
        found = ", ".join(map(str, row))
        raise DataError(
            f"{where}: has no {'answer' if text['question'] else 'question'} (columns: {found}); name it with a *_column setting or mend the row"
        )
    extra = {name: _text(where, column, row[column]) for column, name in EXTRA.items() if column in row}
    named = {"id": default_id, **{k: v for k, v in extra.items() if v}}
    more = {column: value for column, value in row.items() if column not in used}
    return Problem(
        text["question"], answer, _worked(text["solution"], answer), response=response, more=more, **named
    )


def _text(where, column, value):
    """A cell as trimmed text; None and NaN are empty."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{where}: column {column!r} holds {type(value).__name__}, not text or a number")
    text = str(value).strip()
    if not text.isascii() and any(
        "\ud800" <= char <= "\udfff" for char in text
    ):  # JSON can spell half a character, no tokenizer takes it
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


def split_held_out(problems, count):
    """(train, held out): the problems with the smallest hashes of their questions, until `count` are held out, whatever their order.

    A question that occurs twice is on one side only, so a few more than `count` may be held out.
    """
    if count == 0:
        return problems, []
    hashes = [hashlib.sha256(p.question.encode()).digest() for p in problems]
    if count >= len(problems):
        raise DataError(
            f"{count} held-out problems leave none of {len(problems)} to train on: set eval_problems lower"
        )
    edge = sorted(hashes)[count - 1]
    train = [p for p, h in zip(problems, hashes, strict=True) if h > edge]
    if not train:
        raise DataError(
            f"{count} held-out problems leave none of {len(problems)} to train on: set eval_problems lower"
        )
    return train, [p for p, h in zip(problems, hashes, strict=True) if h <= edge]

"""Where problems come from: GSM8K, MATH, a user's file or hub data set, the generated arithmetic task."""

import ast
import csv
import hashlib
import io
import itertools
import json
import math
import re
import warnings
from collections import defaultdict
from decimal import Decimal
from functools import partial
from numbers import Rational, Real
from pathlib import Path

from answers.formats import completion_text, extract_answer
from answers.numbers import parse_number
from errors import OR_OFFLINE, DataError, is_path, one_line, telling_if_slow
from problems.arithmetic import TEST_SEED, arithmetic_problems
from problems.problem import Problem

HUB = {
    "gsm8k": {"": ("openai/gsm8k", "main")},
    "math": {"test": ("HuggingFaceH4/MATH-500", None), "": ("nlile/hendrycks-MATH-benchmark", None)},
}  # split, "" being every other: (name on the hub, configuration)
ARITHMETIC_SIZES = {"train": 30000, "test": 500}
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")

COLUMNS = {
    "question": ("question", "problem", "prompt", "messages"),
    "answer": ("answer", "reference_answer", "final_answer", "target", "label"),
    "solution": ("solution", "reference_solution", "rationale", "response"),
}  # the columns that are looked for, in this order, where none is named
GIVEN = "given in Python"  # the name of a data set that has none
RESPONSE = ("response", "completion")  # what supervised training learns as it stands
LIKE_ROW = re.compile(r"\s*\{.*\}\s*")  # a line of .jsonl
LIKE_CHAT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")  # messages that a CSV holds as text
# column: field
EXTRA = {"subject": "subject", "type": "subject", "level": "level", "unique_id": "id", "id": "id"}


def load_problems(dataset, split="train", columns=None, *, also=None, limit=None, seed=0, responses=False):
    """The problems of a split, in the order of the data; with `limit` the first of them.

    dataset: gsm8k, math, arithmetic, a file (one file serves every split), a folder with
    <split>.jsonl/.json/.csv/.parquet or the shards of one, or a hub id. `columns`: the names of question,
    answer, solution, where they are not the usual ones; `also`: names to look for before those. `responses`:
    a row may have a `response` or `completion` to learn instead of an answer, or end its `messages` with
    one. `seed`: of the generated training problems; the generated test problems are the same for every seed,
    so that runs can be compared.
    Raises DataError, with the file and the row, for anything that is not a question with an answer.
    """
    if limit is not None and limit < 1:
        raise DataError(f"limit={limit}: must be at least 1")
    if dataset == "arithmetic":
        if split not in ARITHMETIC_SIZES:
            raise DataError(f"arithmetic has no split {split!r}: there are train and test")
        if columns and any(columns.values()):
            raise DataError("arithmetic is generated and has no columns: leave the *_column settings out")
        seed = TEST_SEED if split == "test" else seed
        return arithmetic_problems(split, ARITHMETIC_SIZES[split], seed, limit)
    paths = data_files(dataset, split)
    if dataset == GIVEN:
        raise DataError("the rows of this data set were given in Python: name a file or a hub id")
    rows = itertools.chain.from_iterable(map(file_rows, paths)) if paths else _hub_rows(dataset, split)
    rows = list(itertools.islice(rows, limit))
    if not rows:
        raise DataError(f"{', '.join(map(str, paths)) or dataset}: holds no rows")
    return _problems(rows, columns or {}, also or {}, split, responses)


def given_problems(rows, columns=None, *, limit=None):
    """The problems of rows that are there in Python: dicts as a file would hold them, or Problems.

    rows: any iterable, such as a list or a datasets.Dataset; the first `limit` of them are read. Raises
    DataError as `load_problems` does.
    """
    if isinstance(rows, str | Path):
        raise DataError(f"dataset: {rows} is a name, and rows belong here: say Config(dataset={str(rows)!r})")
    with telling_if_slow("still reading the rows that were given; Config(limit=N) reads the first N"):
        kind, rows = type(rows).__name__, list(itertools.islice(rows, limit))
    if not rows:
        raise DataError("dataset: holds no rows")
    if all(isinstance(row, Problem) for row in rows):
        if columns and any(columns.values()):
            raise DataError("dataset: Problems have no columns: leave the *_column settings out")
        return rows
    if isinstance(rows[0], str):  # the names of splits, or of columns
        names = one_line(", ".join(map(str, rows)), 60)
        remedy = "give a list of dicts or a datasets.Dataset: one split, or DataFrame.to_dict('records')"
        if kind == "dict":
            remedy = "give one split, or datasets.Dataset.from_dict(columns), or a list with a dict a row"
        raise DataError(f"dataset: is a {kind} of {names}, and no rows; {remedy}")
    rows = [(f"dataset row {i}", row) for i, row in enumerate(rows, 1)]
    return _problems(rows, columns or {}, {}, "train", responses=False)


def _problems(rows, columns, also, split, responses):
    """The problems of pairs (where, row)."""
    columns = _names_there(rows, columns, also)
    problems = [
        _problem(where, row, columns, f"{split}-{i}", responses) for i, (where, row) in enumerate(rows)
    ]
    _warn_of_two_answers(rows, problems)
    names = dict.fromkeys(name for problem in problems for name in problem.more)
    for problem in problems:  # a column that other rows have is None
        problem.more.update(dict.fromkeys(names) | problem.more)
    return problems


def _warn_of_two_answers(rows, problems):
    """A question with two answers teaches against itself, and one of them is wrong."""
    asked = defaultdict(list)
    for (where, _), problem in zip(rows, problems, strict=True):
        if problem.answer:
            asked[problem.question, str(problem.messages)].append((where, problem.answer))
    pairs = []
    for (first, answer), *others in asked.values():
        other = next((row for row in others if _is_another(row[1], answer)), None)
        if other:
            pairs.append(
                f"{other[0]} asks what {first} asks and has another answer, {other[1]!r}, not {answer!r}"
            )
    if pairs:
        more = f"; {len(pairs)} questions have more than one answer" if len(pairs) > 1 else ""
        warnings.warn(f"{one_line(pairs[0], 300)}{more}: mend the rows", stacklevel=2)


def _is_another(answer, other):
    number = parse_number(answer)
    return answer != other and (number is None or number != parse_number(other))


def _names_there(rows, columns, also):
    """The names of columns, with those of `also` that the data has where none is given."""
    there = {name for _, row in rows if isinstance(row, dict) for name in row}
    return columns | {field: name for field, name in also.items() if name in there and not columns.get(field)}


def data_files(dataset, split):
    """The files of a split, in the order of their rows; none where the name may be that of a hub data set."""
    path = Path(dataset)
    if path.is_dir():
        return _files_of_split(path, split)
    if path.suffix in SUFFIXES and not path.is_file():  # a pipe would be waited for
        raise DataError(f"{path}: {'is not a file' if path.exists() else 'there is no such file'}")
    if path.suffix not in SUFFIXES and path.exists():
        raise DataError(f"{path}: a data file ends in one of {', '.join(SUFFIXES)}")
    return [path] if path.suffix in SUFFIXES else []


def _files_of_split(folder, split):
    """The one file of a split, or its shards as `datasets` names them, such as
    train-00000-of-00002.parquet.
    """
    found = defaultdict(list)  # (suffix, how many shards): [(number of the shard, path)]
    shard, suffixes = r"-(\d{5})-of-(\d{5})(?:-\w+)?", "|".join(map(re.escape, SUFFIXES))
    names = re.compile(f"{re.escape(split)}(?:{shard})?({suffixes})")
    entries = sorted(folder.iterdir())
    for path in entries:
        if (named := names.fullmatch(path.name)) and path.is_file():
            found[named[3], int(named[2] or 1)].append((int(named[1] or 0), path))
    if not found:
        there = (
            f"there are: {one_line(', '.join(p.name for p in entries), 150)}" if entries else "it is empty"
        )
        what = f"has no {split}.jsonl (or .json, .csv, .parquet), nor shards of it"
        raise DataError(f"{folder}: {what} ({split}-00000-of-00001.jsonl); {there}")
    (_, count), shards = next(iter(found.items()))
    numbers = [number for number, _ in shards]
    if len(found) > 1 or len(set(numbers)) < len(numbers):
        several = ", ".join(path.name for files in found.values() for _, path in files)
        raise DataError(
            f"{folder}: has more than one {split}: {one_line(several, 150)}; leave one there, or name a file"
        )
    if missing := sorted(set(range(count)) - set(numbers)):
        raise DataError(f"{folder}: of the {count} shards of {split} it lacks number {missing[0]:05d}")
    return [path for _, path in shards]


def file_rows(path):
    """Pairs (where, row) of a file; `where` names the file and the line, or the row of .json and .parquet."""
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path} line {line}: is not UTF-8: save the file as UTF-8") from error
    if path.suffix == ".csv":
        return _csv_rows(path, text)
    if path.suffix == ".jsonl":
        lines = ((i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip())
        return [(f"{path} line {i}", _json(path, line, i, _mend_line(line))) for i, line in lines]
    return _json_rows(path, text)


def _parquet_rows(path):
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as a parquet file ({one_line(error, 120)})") from error
    return [(f"{path} row {i}", row) for i, row in enumerate(table, 1)]


def _json_rows(path, text):
    if not text.strip():
        return []
    first_line = text.split("\n", 1)[0]
    has_lines = LIKE_ROW.fullmatch(first_line) and text.strip() != first_line.strip()
    whole = _json(
        path, text, 1, "; with an object in each line its name must end in .jsonl" * bool(has_lines)
    )
    values = whole.values() if isinstance(whole, dict) else [whole]
    lists = [value for value in values if isinstance(value, list)]
    if len(lists) != 1:
        raise DataError(f"{path}: must hold a list of objects, or an object with one such list")
    return [(f"{path} row {i}", row) for i, row in enumerate(lists[0], 1)]


def _csv_rows(path, text):
    """Strict: an unclosed quote would swallow rows, a comma without quotes cut answers, silently."""
    csv.field_size_limit(1 << 30)
    # newline="" and no splitlines(), which also cuts at U+2028 and the like.
    read = partial(csv.DictReader, strict=True)
    reader, rows = read(io.StringIO(text, newline="")), []
    try:
        if any(name.startswith(" ") for name in reader.fieldnames or ()):
            # as behind the commas of the rows, where a blank would make a quote part of the text
            reader = read(io.StringIO(text, newline=""), skipinitialspace=True)
        names = reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:  # the last would win silently
            raise DataError(f"{path} line 1: has more than one column {repeated[0]!r}")
        if len(names) == 1 and (other := re.search("[;\t|]", names[0])):
            remedy = f"is one column, {names[0]!r}: separate columns by commas, not by {other[0]!r}"
            raise DataError(f"{path} line 1: {remedy}")
        for row in reader:
            where = f"{path} line {reader.line_num}"
            if None in row:
                remedy = "put text with commas into double quotes"
                raise DataError(f"{where}: has more cells than the header; {remedy}")
            rows.append((where, row))
    except csv.Error as error:  # line_num is the line before the row
        raise DataError(f"{path} line {reader.line_num + 1}: is not CSV ({error})") from error
    return rows


def _mend_line(line):
    """What to say of a line that is part of a list."""
    if line.strip() == "[" or line.lstrip().startswith("[{"):
        return "; a list of objects belongs into a file whose name ends in .json"
    return "; leave out the comma behind the object" if line.rstrip().endswith("},") else ""


def _json(path, text, first_line, remedy=""):
    """What the text holds; `remedy` is the end of the message where it is not JSON."""
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path} line {first_line + error.lineno - 1}: is not JSON ({error.msg}){remedy}"
        ) from error
    except (ValueError, RecursionError) as error:  # more than 4,300 digits, endless brackets, a key twice
        raise DataError(f"{path} line {first_line}: cannot be read as JSON ({error})") from error


def _without_repeats(pairs):
    """A dict, unless a key is there twice: the last would win silently."""
    made = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {key!r} is there twice")
        made[key] = value
    return made


def _hub_rows(dataset, split):
    import datasets

    by_split = HUB.get(dataset, {"": (dataset, None)})
    name, config = by_split.get(split, by_split[""])
    try:
        with telling_if_slow(f"still loading data set {name}{OR_OFFLINE}"):
            rows = list(datasets.load_dataset(name, config, split=split))
    except ImportError as error:  # of columns that hold pictures or sound
        raise DataError(f"data set {name!r} needs a package that is missing: {one_line(error)}") from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        if is_path(dataset):
            raise DataError(f"{dataset}: there is no such file or folder, and it is no hub id") from error
        raise DataError(
            f"data set {name!r}, split {split!r}, cannot be loaded: "
            f"give a folder with {split}.jsonl or a file instead (there is no folder {dataset!r} here; "
            f"{one_line(error, 150)})"
        ) from error
    return [(f"{name} row {i}", row) for i, row in enumerate(rows, 1)]


def _problem(where, row, columns, default_id, responses):
    """The problem of a row, or a DataError that says what is missing."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: must be an object with a question and an answer")
    column = {field: _column(where, row, field, columns.get(field)) for field in COLUMNS}
    question, asked, response = question_of(where, row, column["question"])
    text = {field: _text(where, row, column[field]) for field in ("answer", "solution")}
    answer, solution = _answer_and_solution(text["answer"], text["solution"])
    if columns.get("solution") is None:
        response = _response(where, row, responses) or response
    if response and not answer:
        read = (extract_answer(response, name) for name in ("xml", "boxed", "hash"))
        answer = next(filter(None, read), "")
    answer = _without_commas(answer.strip())
    if not question.strip() or not (answer or (responses and response)):
        missing = "answer" if question.strip() else "question"
        empty, there = column[missing], ", ".join(map(repr, row))
        why = f"its {empty} is empty" if empty else f"columns: {there}"
        remedy = f"name it with --{missing}_column or mend the row"
        raise DataError(f"{where}: has no {missing} ({why}); {remedy}")
    extra = {field: _shown(where, row, column) for column, field in EXTRA.items() if column in row}
    extra = {"id": default_id} | {field: value for field, value in extra.items() if value}
    more = dict(row)
    if named := columns.get("solution"):
        more.setdefault("solution", row[named])
    learnt = response if responses else ""
    return Problem(question, answer, _worked(solution, answer), response=learnt, more=more, **asked, **extra)


def question_of(where, row, column):
    """(the question, what else its Problem says of it, the response that ends its messages or "")."""
    messages, response = _chat(where, row, column), ""
    if not messages:
        is_prompt = column == "prompt"
        return _text(where, row, column, trim=not is_prompt), {"is_prompt": is_prompt}, ""
    if column == "messages" and messages[-1]["role"] == "assistant":
        response = messages.pop()["content"]
    asked = [message["content"] for message in messages if message["role"] == "user"]
    if not asked:
        raise DataError(f"{where}: column {column!r} holds no message of the user")
    return asked[-1], {"messages": tuple(messages)}, response


def _response(where, row, needed):
    """The response that a row holds, as text or as messages, spaces and all; "" where it holds none.

    Where none is needed, a column of this name may hold something else, which is for the rewards.
    """
    for column in RESPONSE:
        try:
            messages = _chat(where, row, column)
            text = messages[-1]["content"] if messages else _text(where, row, column, trim=False)
        except DataError:
            if needed:
                raise
            continue
        if text.strip():
            return text
    return ""


def _chat(where, row, column):
    """The messages of a cell as roles and texts; none where it holds something else.

    They may stand there as text, in JSON or as Python writes them.
    """
    value = row.get(column)
    if isinstance(value, str) and LIKE_CHAT.match(value):
        value = _parsed_chat(where, column, value)
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return []
    messages = []
    for message in value:
        role, content = message.get("role"), message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        if not isinstance(role, str) or not all(_is_text_part(part) for part in parts):
            keys = ", ".join(map(str, message))
            remedy = f"a message must hold a role, and text as its content (it has: {keys})"
            raise DataError(f"{where}: column {column!r}: {remedy}")
        text = _whole_characters(where, column, completion_text([message]))
        messages.append({"role": role, "content": text})
    return messages


def _parsed_chat(where, column, text):
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    what = "looks like chat messages, but is neither JSON nor as Python writes a list"
    raise DataError(f"{where}: column {column!r} {what}")


def _is_text_part(part):
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _column(where, row, field, named):
    """The column of a field: the named one, else the first usual one that the row has, else None."""
    if named is not None and named not in row:
        there = ", ".join(map(repr, row))
        raise DataError(f"{where}: has no column {named!r} for the {field}; there are: {there}")
    usual = [column for column in COLUMNS[field] if column in row]
    if field == "solution":  # a `response` may hold something else, for the rewards
        usual = [column for column in usual if not isinstance(row[column], list | dict)]
    return named or next(iter(usual), None)


def _text(where, row, column, trim=True):
    """A cell as text; empty where there is none, or None or NaN in it."""
    value = row.get(column)
    # Real: numpy's numbers, too; a large int is no float
    is_float = isinstance(value, Real | Decimal) and not isinstance(value, Rational)
    if value is None or (is_float and math.isnan(value)):
        return ""
    if is_float and math.isinf(value):
        raise DataError(f"{where}: column {column!r} holds {value}, which is no finite number")
    if isinstance(value, bool) or not isinstance(value, str | Real | Decimal):
        raise DataError(f"{where}: column {column!r} holds {type(value).__name__}, not text or a number")
    text = str(value).strip() if trim else str(value)
    return _whole_characters(where, column, text)


def _shown(where, row, column):
    """A cell that only reports show, as text whatever it holds."""
    value = row.get(column)
    is_text = value is None or isinstance(value, str | float)
    return _text(where, row if is_text else {column: str(value)}, column)


def _whole_characters(where, column, text):
    """The text; JSON can spell half a character, which no tokenizer takes and which is refused."""
    if re.search("[\ud800-\udfff]", text):
        raise DataError(f"{where}: column {column!r} holds half of a surrogate pair, which is not text")
    return text


def _answer_and_solution(answer, solution):
    """GSM8K's answers are solutions ending in `#### answer`; MATH's are in the solution's last box."""
    if "####" in answer:
        return answer.rpartition("####")[2], solution or answer
    if not answer:
        answer = extract_answer(solution, "boxed") or extract_answer(solution, "hash") or ""
    return answer, solution


def _without_commas(answer):
    return answer.replace(",", "") if re.fullmatch(r"[-+$]*\d{1,3}(,\d{3})+(\.\d+)?", answer) else answer


def _worked(solution, answer):
    """A solution in GSM8K's form, without its <<48/2=24>> calculator notes."""
    if not solution:
        return ""
    reasoning, marker, _ = solution.rpartition("####")
    return re.sub(r"<<[^<>]*>>", "", reasoning if marker else solution).strip() + f"\n#### {answer}"


def split_held_out(problems, count):
    """(train, held out): held out are the problems with the smallest hashes, whatever the problems' order.

    A question (its hash counts) that occurs twice is on one side only, so there may be more than `count`. A
    problem without an answer, which supervised data may hold, can never be right and is not held out (and
    not trained on where a held-out one asks the same); there is a warning where too few are left.
    """
    hashes = [hashlib.sha256(p.question.encode()).digest() for p in problems]
    answered = sorted(h for p, h in zip(problems, hashes, strict=True) if p.answer)
    chosen = set(answered[:count])
    train = [p for p, h in zip(problems, hashes, strict=True) if h not in chosen]
    held_out = [p for p, h in zip(problems, hashes, strict=True) if h in chosen and p.answer]
    if len(answered) < min(count, len(problems)):
        what = f"eval_problems={count}: {len(answered)} of {len(problems)} problems have an answer"
        warnings.warn(f"{what} and are held out; the others can only be trained on", stacklevel=2)
    if train and len(held_out) > len(train):
        what = f"eval_problems={count}: {len(held_out)} of {len(problems)} problems are held out, and only"
        warnings.warn(f"{what} {len(train)} are left to train on", stacklevel=2)
    if not train:
        raise DataError(
            f"{count} held-out problems leave none of {len(problems)} to train on: set eval_problems lower"
        )
    return train, held_out

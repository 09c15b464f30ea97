"""Problems from files, the hub and the generator; prompts; padding; the cut of held-out problems."""

import copy
import csv
import dataclasses
import datetime as dates
import json
import math
import os
import random
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import errors
import sft_train
from decoding.rollout import Completion, pad_left, pad_right
from decoding.tokens import arithmetic_tokenizer
from errors import DataError
from learning.models import load_tokenizer
from problems.arithmetic import arithmetic_problems
from problems.problem import Problem
from problems.prompts import PLAIN_TEMPLATE, Prompting, prepare_problems
from problems.sources import given_problems, load_problems, split_held_out
from rewards import ANSWER_FORMATS, SYSTEM_PROMPT, extract_answer, r1_format_reward
from small_models import CHAT_TEMPLATE

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data"
PLAIN, WITH_SYSTEM = Prompting("xml", ""), Prompting("xml", "S")
XML = Prompting("xml", SYSTEM_PROMPT)
NATALIA = "She sold 48/2 = <<48/2=24>>24 clips.\nIn all 48+24 = <<48+24=72>>72.\n#### 72"


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def words():
    return arithmetic_tokenizer()


def test_a_gsm8k_answer_gives_the_last_number_without_commas_and_a_solution_without_calculator_notes(
    tmp_path,
):
    path = jsonl(
        tmp_path / "a.jsonl",
        {"question": " How many? ", "answer": NATALIA},
        {"question": "Q", "answer": "#### is a sign\nx\n#### 1,200 "},
    )
    first, second = load_problems(path)
    assert first == Problem(
        "How many?", "72", "She sold 48/2 = 24 clips.\nIn all 48+24 = 72.\n#### 72", id="train-0"
    )
    assert second.answer == "1200"
    assert second.solution == "#### is a sign\nx\n#### 1200"


COMMAS = {
    "1,200": "1200",
    "-$1,234,567.50": "-$1234567.50",
    "1,2": "1,2",
    "(1,200)": "(1,200)",
    "3, 5": "3, 5",
}


@pytest.mark.parametrize(("written", "answer"), COMMAS.items())
def test_only_commas_that_group_thousands_of_a_number_are_dropped(tmp_path, written, answer):
    assert (
        load_problems(jsonl(tmp_path / "a.jsonl", {"question": "Q", "answer": written}))[0].answer == answer
    )


@pytest.mark.parametrize(("value", "answer"), [(3, "3"), (3.0, "3.0"), (-0.5, "-0.5"), (" x ", "x")])
def test_an_answer_that_is_a_number_becomes_its_text(tmp_path, value, answer):
    assert load_problems(jsonl(tmp_path / "a.jsonl", {"question": "Q", "answer": value}))[0].answer == answer


def test_a_missing_answer_is_the_last_box_of_the_solution_and_never_the_whole_solution(tmp_path):
    """A solution with neither box nor #### was once taken whole as the answer."""
    boxed = {
        "problem": "P",
        "solution": r"first \boxed{1}, then \boxed{\frac{1}{2}}.",
        "type": "Algebra",
        "level": 5,
        "unique_id": "alg/7",
    }
    problem, hashed = load_problems(
        jsonl(tmp_path / "a.jsonl", boxed, {"problem": "P", "solution": "x\n#### 1,000"})
    )
    assert problem == Problem(
        "P", r"\frac{1}{2}", boxed["solution"] + "\n#### \\frac{1}{2}", "Algebra", "5", "alg/7"
    )
    assert hashed.answer == "1000"
    with pytest.raises(DataError, match=r"b\.jsonl line 1: has no answer"):
        load_problems(
            jsonl(tmp_path / "b.jsonl", {"problem": "P", "solution": "it is plain that the answer is 5"})
        )


def test_usual_column_names_are_found_and_named_ones_win(tmp_path):
    row = {"prompt": "P", "final_answer": "1", "rationale": "because", "mine": "M", "gold": 2, "why": "so"}
    path = jsonl(tmp_path / "a.jsonl", row)
    assert load_problems(path)[0] == Problem("P", "1", "because\n#### 1", id="train-0")
    named = load_problems(path, columns={"question": "mine", "answer": "gold", "solution": "why"})
    assert named[0] == Problem("M", "2", "so\n#### 2", id="train-0")


@pytest.mark.parametrize("field", ["question", "answer", "solution"])
def test_an_unknown_named_column_is_refused_with_the_columns_there_are(tmp_path, field):
    path = jsonl(tmp_path / "a.jsonl", {"question": "Q", "answer": "1"})
    with pytest.raises(DataError, match=r"a\.jsonl line 1: has no column 'nope' .*'question', 'answer'"):
        load_problems(path, columns={field: "nope"})


def test_all_four_kinds_of_file_give_the_same_problems(tmp_path):
    rows = [
        {"question": 'Wörter, "2"\nLinien', "answer": "5", "level": "1"},
        {"question": "Q\u2028R\x0cS", "answer": "6", "level": "2"},
    ]
    jsonl(tmp_path / "a.jsonl", *rows)
    (tmp_path / "b.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "c.json").write_text(json.dumps({"version": 1, "data": rows}), encoding="utf-8")
    with open(tmp_path / "d.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer", "level"])
        writer.writeheader()
        writer.writerows(rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "e.parquet")
    expected = [
        Problem(rows[0]["question"], "5", level="1", id="train-0"),
        Problem("Q\u2028R\x0cS", "6", level="2", id="train-1"),
    ]
    for name in ("a.jsonl", "b.json", "c.json", "d.csv", "e.parquet"):
        assert load_problems(str(tmp_path / name)) == expected, name


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_a_byte_order_mark_and_windows_line_ends_are_tolerated(tmp_path, name):
    text = {
        "a.jsonl": '{"question": "Q", "answer": 1}\r\n\r\n',
        "a.json": '[{"question": "Q",\r\n"answer": 1}]',
        "a.csv": "question,answer\r\nQ,1\r\n",
    }[name]
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load_problems(str(tmp_path / name)) == [Problem("Q", "1", id="train-0")]


def test_a_folder_gives_the_file_of_the_split_and_a_file_serves_every_split(tmp_path):
    jsonl(tmp_path / "train.jsonl", {"question": "Q", "answer": "1"})
    jsonl(tmp_path / "test.jsonl", {"question": "R", "answer": "2"})
    assert load_problems(str(tmp_path), "train")[0].question == "Q"
    assert load_problems(str(tmp_path), "test")[0] == Problem("R", "2", id="test-0")
    assert load_problems(str(tmp_path / "train.jsonl"), "test")[0].question == "Q"
    with pytest.raises(DataError, match=r"has no validation\.jsonl.*; there are: test\.jsonl, train\.jsonl"):
        load_problems(str(tmp_path), "validation")
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match="it is empty"):
        load_problems(str(tmp_path / "data"), "train")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_shards_of_a_split_are_read_in_their_order(suffix, tmp_path):
    """A folder of the hub's own files was refused: `has no train.jsonl`."""
    rows = [{"question": f"Q{i}", "answer": str(i)} for i in range(11)]
    parts = datasets.Dataset.from_list(rows)
    for i in range(11):
        shard, name = parts.shard(11, i, contiguous=True), f"train-{i:05d}-of-00011"
        name += "-0123456789abcdef" if i == 3 else ""  # as older files have it
        getattr(shard, f"to_{suffix.replace('jsonl', 'json')}")(tmp_path / f"{name}.{suffix}")
    jsonl(tmp_path / "test-00000-of-00001.jsonl", {"question": "R", "answer": "2"})
    assert [p.question for p in load_problems(str(tmp_path), "train")] == [f"Q{i}" for i in range(11)]
    assert [p.id for p in load_problems(str(tmp_path), "train", limit=2)] == ["train-0", "train-1"]
    assert [p.question for p in load_problems(str(tmp_path), "test")] == ["R"]
    (tmp_path / f"train-00009-of-00011.{suffix}").unlink()
    with pytest.raises(DataError, match="of the 11 shards of train it lacks number 00009"):
        load_problems(str(tmp_path), "train")


def test_blanks_around_the_names_of_columns_do_not_count(tmp_path):
    """As people write a header by hand; it said that the file has no column answer, and named one."""
    (tmp_path / "a.csv").write_text("question , answer\nQ, 12\n")
    [problem] = load_problems(str(tmp_path / "a.csv"))
    assert (problem.question, problem.answer) == ("Q", "12")


def test_blanks_behind_the_commas_of_a_header_may_stand_before_quotes_too(tmp_path):
    """The quotes were part of the answer, and no answer was right."""
    (tmp_path / "a.csv").write_text('question, "answer"\n"Ann, or Bob?", "Ann, Bob"\n')
    [problem] = load_problems(str(tmp_path / "a.csv"))
    assert (problem.question, problem.answer) == ("Ann, or Bob?", "Ann, Bob")
    (tmp_path / "a.csv").write_text("prompt,answer\n a,b\n")
    assert load_problems(str(tmp_path / "a.csv"))[0].question == " a", "a prompt is kept as it is"


@pytest.mark.parametrize("other", ["train.csv", "train-00000-of-00001.jsonl", "train-00000-of-00002.jsonl"])
def test_a_split_that_is_there_twice_is_refused(other, tmp_path):
    """The .jsonl was read, and the other file left without a word."""
    jsonl(tmp_path / "train.jsonl", {"question": "Q", "answer": "1"})
    (tmp_path / other).write_text("question,answer\nR,2\n")
    with pytest.raises(DataError, match=f"more than one train: .*{other}.*; leave one there, or name a file"):
        load_problems(str(tmp_path), "train")


def test_the_limit_takes_the_first_rows_in_order_and_must_be_positive(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", *({"question": f"Q{i}", "answer": i} for i in range(5)))
    assert [p.question for p in load_problems(path, limit=2)] == ["Q0", "Q1"]
    assert [p.question for p in load_problems(path, limit=9)] == ["Q0", "Q1", "Q2", "Q3", "Q4"]
    assert load_problems("arithmetic", "test", limit=7) == load_problems("arithmetic", "test")[:7]
    for limit in (0, -1):
        with pytest.raises(DataError, match=f"limit={limit}"):
            load_problems(path, limit=limit)


def test_a_row_of_five_megabytes_is_fine(tmp_path):
    long = "x" * 5_000_000
    (tmp_path / "a.csv").write_text(f"question,answer\n{long},1\n")
    assert load_problems(jsonl(tmp_path / "a.jsonl", {"question": long, "answer": "1"})) == load_problems(
        str(tmp_path / "a.csv")
    )


GOOD = b'{"question": "Q", "answer": "1"}\n'
BAD = {
    "broken JSON, blank lines counted": ("a.jsonl", GOOD + b"\n{'question'\n", r"line 3: is not JSON"),
    "a list in a line": ("a.jsonl", GOOD + b"[1]\n", r"line 2: must be an object"),
    "no question": (
        "a.jsonl",
        b'{"text": "Q", "answer": "1"}\n',
        r"line 1: has no question \(columns: 'text', 'answer'\)",
    ),
    "no answer": ("a.jsonl", GOOD + b'{"question": "Q"}\n', r"line 2: has no answer"),
    "blank question": ("a.jsonl", GOOD + b'{"question": " ", "answer": "1"}\n', r"line 2: has no question"),
    "null answer": (
        "a.jsonl",
        GOOD + b'{"question": "Q", "answer": null}\n',
        r"line 2: has no answer \(its answer is empty\); name it with --answer_column or mend the row",
    ),
    "NaN answer": ("a.jsonl", GOOD + b'{"question": "Q", "answer": NaN}\n', r"line 2: has no answer"),
    "an answer past the largest float": (
        "a.jsonl",
        GOOD + b'{"question": "Q", "answer": 1e400}\n',
        r"line 2: column 'answer' holds inf, which is no finite number",
    ),
    "nothing after ####": (
        "a.jsonl",
        GOOD + b'{"question": "Q", "answer": "x #### "}\n',
        r"line 2: has no answer",
    ),
    "a list for a question": (
        "a.jsonl",
        GOOD + b'{"question": ["Q"], "answer": "1"}\n',
        r"line 2: column 'question' holds list",
    ),
    "a truth value for an answer": (
        "a.jsonl",
        GOOD + b'{"question": "Q", "answer": true}\n',
        r"line 2: column 'answer' holds bool",
    ),
    "half of a surrogate pair": (
        "a.jsonl",
        GOOD + b'{"question": "\\ud83d", "answer": "1"}\n',
        r"line 2: column 'question' holds half",
    ),
    "an integer too long for Python": (
        "a.jsonl",
        GOOD + b'{"question": "Q", "answer": ' + b"9" * 5000 + b"}\n",
        r"line 2: cannot be read as JSON",
    ),
    "brackets without end": (
        "a.jsonl",
        GOOD + b"[" * 200_000 + b"\n",
        r"line 2: cannot be read as JSON|line 2: is not JSON",
    ),
    "a key twice": (
        "a.jsonl",
        GOOD + b'{"question": "Q", "answer": "1", "answer": "2"}\n',
        r"line 2: .*the key 'answer' is there twice",
    ),
    "bytes that are not UTF-8": (
        "a.jsonl",
        GOOD + b'{"question": "\xff"}\n',
        r"line 2: is not UTF-8: save the file as UTF-8",
    ),
    "UTF-16": ("a.csv", "question,answer\nQ,1".encode("utf-16"), r"line 1: is not UTF-8"),
    "an empty file": ("a.jsonl", b"", r"holds no rows"),
    "blank lines only": ("a.jsonl", b"\n \n", r"holds no rows"),
    "an empty .json": ("a.json", b" ", r"holds no rows"),
    "an empty list": ("a.json", b"[]", r"holds no rows"),
    "broken .json": ("a.json", b'[{"question": "Q",\n"answer" 1}]', r"line 2: is not JSON"),
    "lines in a .json": ("a.json", GOOD + GOOD, r"line 2: is not JSON .*its name must end in \.jsonl$"),
    "a list in a .jsonl": ("a.jsonl", b"[\n" + GOOD + b"]", r"line 1: is not JSON .*ends in \.json$"),
    "a comma behind a row": (
        "a.jsonl",
        GOOD.rstrip() + b",\n" + GOOD,
        r"line 1: is not JSON .*leave out the comma behind the object$",
    ),
    ".json with two lists": ("a.json", b'{"a": [], "b": []}', r"one such list"),
    ".json with a bare number": ("a.json", b"5", r"must hold a list"),
    "a second object without answer": (
        "a.json",
        b'[{"question": "Q", "answer": 1}, {"question": "Q"}]',
        r"row 2: has no answer",
    ),
    "a header alone": ("a.csv", b"question,answer\n", r"holds no rows"),
    "a short row after one of two lines": (
        "a.csv",
        b'question,answer\n"Q\nR",1\nQ\n',
        r"line 4: has no answer",
    ),
    "a comma without quotes": (
        "a.csv",
        b"question,answer\nQ,1\nOne, two?,3\n",
        r"line 3: has more cells than the header",
    ),
    "semicolons between columns": (  # `name it with --question_column` was no help
        "a.csv",
        b"question;answer\nQ;1\n",
        r"line 1: is one column, 'question;answer': separate columns by commas, not by ';'",
    ),
    "a quote that is never closed": ("a.csv", b'question,answer\n"Q,1\nR,2\n', r"line 2: is not CSV"),
    "a column twice": (
        "a.csv",
        b"question,answer,answer\nQ,1,2\n",
        r"line 1: has more than one column 'answer'",
    ),
    "a file that is not parquet": ("a.parquet", b"PAR1 nothing", r"cannot be read as a parquet file"),
    "an unknown kind of file": ("a.txt", b"Q 1", r"ends in one of \.jsonl, \.json, \.csv, \.parquet"),
}


def test_a_question_with_two_answers_is_warned_of(tmp_path):
    """It was trained on without a word; the same number in other characters is one answer."""
    pens, cups = ({"question": text, "answer": "1,000"} for text in ("How many pens?", "How many cups?"))
    same = jsonl(tmp_path / "same.jsonl", pens, cups, dict(pens, answer="1000.0"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_problems(same)
    rows = [pens, dict(pens, answer="1000"), dict(pens, answer="7"), cups, dict(cups, answer="8")]
    other = jsonl(tmp_path / "other.jsonl", *rows)
    told = r"line 3 asks what .* line 1 asks and has another answer, '7', not '1000'; 2 questions have"
    with pytest.warns(UserWarning, match=told):
        assert len(load_problems(other)) == 5


def test_numpys_numbers_are_answers():
    """They were refused as no numbers; NaN is no answer in any precision."""
    answers = [np.int64(7), np.float32(0.5), np.float64(2)]
    rows = [{"question": str(i), "answer": answer} for i, answer in enumerate(answers)]
    assert [problem.answer for problem in given_problems(rows)] == ["7", "0.5", "2.0"]
    with pytest.raises(DataError, match="has no answer"):
        given_problems([{"question": "Q", "answer": np.float32("nan")}])
    with pytest.raises(DataError, match="holds bool"):
        given_problems([{"question": "Q", "answer": np.bool_(True)}])


def test_columns_given_as_lists_are_refused_with_the_way_to_make_rows_of_them():
    with pytest.raises(DataError, match=r"is a dict of question, answer, .*Dataset\.from_dict\(columns\)"):
        given_problems({"question": ["Q"], "answer": ["1"]})


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_line_with_the_file_and_the_place(tmp_path, case):
    name, content, message = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_problems(str(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_cells_of_a_parquet_file_are_named_by_row(tmp_path):
    for i, missing in enumerate((None, math.nan)):
        path = tmp_path / f"{i}.parquet"
        pyarrow.parquet.write_table(
            pyarrow.table(
                {"question": ["Q", "R"], "answer": pyarrow.array([1.5, missing], pyarrow.float64())}
            ),
            path,
        )
        with pytest.raises(DataError, match=rf"{i}\.parquet row 2: has no answer"):
            load_problems(str(path))


def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path):
    with pytest.raises(DataError, match=r"gone\.jsonl: there is no such file"):
        load_problems(str(tmp_path / "gone.jsonl"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=f"{name}: is not a file"):
        load_problems(str(tmp_path / name))


def test_a_hub_that_cannot_be_reached_names_the_data_set_and_the_local_way(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach\nthe hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    message = (
        r"'openai/gsm8k', split 'test', cannot be loaded: "
        r"give a folder with test\.jsonl or a file.*reach the hub"
    )
    with pytest.raises(DataError, match=message):
        load_problems("gsm8k", "test")


def test_a_wait_for_the_hub_or_for_rows_is_told_after_a_while(tokenizer, monkeypatch, capsys):
    """A hub that takes the connection and never answers was waited for without a word, as was a generator
    without end.
    """
    monkeypatch.setattr(errors, "SECONDS_OF_SILENCE", 0.01)

    def slowly(*args, **kwargs):
        time.sleep(0.1)
        yield {"question": "a", "answer": "1"}

    monkeypatch.setattr(datasets, "load_dataset", slowly)
    load_problems("me/data")
    given_problems(slowly())
    hub, rows = capsys.readouterr().err.splitlines()
    assert hub.startswith(
        "note: still loading data set me/data; if the hub does not answer, HF_HUB_OFFLINE=1"
    )
    assert rows == "note: still reading the rows that were given; Config(limit=N) reads the first N"
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **how: [*slowly()] and tokenizer)
    load_tokenizer("me/model")
    assert "note: still loading me/model; if the hub" in capsys.readouterr().err


def test_a_package_that_a_data_set_of_the_hub_lacks_is_one_line(monkeypatch):
    """Columns of pictures or sound need packages of their own, which datasets imports when it reads them."""

    class Rows:
        def __iter__(self):
            raise ImportError("To support decoding images,\nplease install 'Pillow'.")

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: Rows())
    with pytest.raises(DataError, match="'me/pictures' needs a package that is missing: .*Pillow") as error:
        load_problems("me/pictures")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("dataset", "split", "asked"),
    [
        ("gsm8k", "train", ("openai/gsm8k", "main", "train")),
        ("math", "train", ("nlile/hendrycks-MATH-benchmark", None, "train")),
        ("math", "test", ("HuggingFaceH4/MATH-500", None, "test")),
        ("me/my-data.v1", "dev", ("me/my-data.v1", None, "dev")),
    ],
)
def test_each_name_asks_the_hub_for_its_data_set(monkeypatch, dataset, split, asked):
    seen = []

    def stand_in(name, config=None, split=None):
        seen.append((name, config, split))
        first = {"problem": "P", "answer": "1", "subject": "Algebra", "level": 3, "unique_id": "u1"}
        return datasets.Dataset.from_list([first, {**first, "problem": ""}])

    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    assert load_problems(dataset, split, limit=1) == [
        Problem("P", "1", subject="Algebra", level="3", id="u1")
    ]
    assert seen == [asked]
    with pytest.raises(DataError, match=rf"{asked[0]} row 2: has no question"):
        load_problems(dataset, split)


@pytest.mark.skipif(not (SHARED / "gsm8k").is_dir(), reason="no GSM8K beside the project (shared/data/gsm8k)")
def test_gsm8k_loads_whole_with_numbers_for_answers():
    for split, count in (("train", 7473), ("test", 1319)):
        problems = load_problems(str(SHARED / "gsm8k"), split)
        assert len(problems) == count
        assert all(p.answer.lstrip("-").isdigit() for p in problems)
        assert not any("<<" in p.solution or "," in p.answer for p in problems)
        assert all(
            p.solution.endswith(f"\n#### {p.answer}") and p.solution.count("####") == 1 for p in problems
        )


@pytest.mark.skipif(
    not (SHARED / "math500").is_dir(), reason="no MATH-500 beside the project (shared/data/math500)"
)
def test_math500_loads_whole_with_its_levels():
    problems = load_problems(str(SHARED / "math500"), "test")
    assert len(problems) == 500
    assert {p.level for p in problems} == {"1", "2", "3", "4", "5"}
    assert problems[0].answer == r"\left( 3, \frac{\pi}{2} \right)"


def test_arithmetic_answers_are_what_the_question_asks_for():
    """Read independently of the generator: `more` stands in every adding question and in no other."""
    for split in ("train", "test"):
        for p in load_problems("arithmetic", split, limit=2000):
            first, second = (int(w.strip(".")) for w in p.question.split() if w.strip(".").isdigit())
            assert p.answer == str(first + second if " more." in p.question else first - second)
            assert 3 <= first <= 20
            assert 1 <= second <= 9
            assert 1 <= int(p.answer) <= 29


def test_half_of_the_train_solutions_choose_the_wrong_operation_whatever_the_verb_and_no_test_solution_does():
    """Binomial, n = 8,000, p = 1/2: within 4 standard deviations, 179; the same within each verb."""
    train, test = load_problems("arithmetic", limit=8000), load_problems("arithmetic", "test")
    wrong = {}
    for p in train:
        wrong.setdefault(p.question.split(" and ")[1].split()[0], []).append(
            extract_answer(p.solution, "hash") != p.answer
        )
    assert len(wrong) == 4
    assert abs(sum(map(sum, wrong.values())) - 4000) < 179
    for verb, flags in wrong.items():
        assert abs(sum(flags) - len(flags) / 2) < 4 * math.sqrt(len(flags) / 4), verb
    assert all(extract_answer(p.solution, "hash") == p.answer for p in test)


def test_a_wrong_solution_is_the_other_operation_worked_out_correctly():
    for p in load_problems("arithmetic", limit=500):
        left, operator, right, _, result = p.solution.splitlines()[0].split()[-5:]
        assert int(result) == int(left) + int(right) * {"+": 1, "-": -1}[operator]
        assert p.solution.endswith(f"\n#### {result}")


def test_no_seed_and_no_count_puts_a_question_into_both_splits():
    train = [{p.question for p in arithmetic_problems("train", 32_000, seed)} for seed in (0, 1)]
    test = [{p.question for p in arithmetic_problems("test", 2_000, seed)} for seed in (0, 1)]
    assert list(map(len, train + test)) == [32_000, 32_000, 2_000, 2_000]  # no duplicates either
    assert not (train[0] | train[1]) & (test[0] | test[1])
    assert train[0] != train[1]
    assert test[0] != test[1]


def test_every_run_is_tested_on_the_same_arithmetic():
    """Test questions followed the run's seed, and two seeds could not be compared."""
    assert load_problems("arithmetic", "test", seed=1) == load_problems("arithmetic", "test", seed=2)
    assert load_problems("arithmetic", "test", seed=2) == arithmetic_problems("test", 500, seed=0)
    assert load_problems("arithmetic", "train", seed=1) != load_problems("arithmetic", "train", seed=2)


def test_asking_for_more_arithmetic_than_exists_or_for_an_unknown_split_is_refused():
    with pytest.raises(DataError, match=r"test has [0-9]+ problems, 1000000 were asked for"):
        arithmetic_problems("test", 1_000_000)
    with pytest.raises(DataError, match="arithmetic has no split 'dev'"):
        load_problems("arithmetic", "dev")


def test_arithmetic_is_the_same_in_another_process():
    """hash() of a text is another number in each process; the draw must not rest on it."""
    program = (
        "from problems.arithmetic import arithmetic_problems\n"
        "for p in arithmetic_problems('train', 20, seed=3):\n    print(p.question, p.solution.split())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        f"{p.question} {p.solution.split()}" for p in arithmetic_problems("train", 20, seed=3)
    ]


def test_the_word_tokenizer_gives_back_every_text_to_the_letter(words):
    """Word-level decoding that puts a space inside 17 makes two numbers of it; `#` was once missing."""
    for p in load_problems("arithmetic", limit=500):
        reasoning, answer = p.solution.split("\n#### ")
        written = [ANSWER_FORMATS[name].write(reasoning, answer) for name in ("xml", "hash")]
        for text in (
            p.question,
            p.solution,
            *written,
            XML.build(words, p.question, response=written[0]),
        ):
            ids = words(text, add_special_tokens=False)["input_ids"]
            assert words.unk_token_id not in ids
            assert words.decode(ids) == text
            assert "".join(words.decode([i]) for i in ids) == text


def test_the_word_tokenizer_is_small_and_has_one_token_a_word_tag_or_digit(words):
    assert 80 <= len(words) <= 150
    ids = words("<reasoning>\nAnn has 17 pens.</reasoning>", add_special_tokens=False)["input_ids"]
    pieces = ["<reasoning>", "\n", "Ann", " has", " ", "1", "7", " pens", ".", "</reasoning>"]
    assert words.convert_ids_to_tokens(ids) == pieces
    assert (words.pad_token, words.eos_token, words.unk_token, words.padding_side) == (
        "<|pad|>",
        "<|eos|>",
        "<unk>",
        "left",
    )


def test_the_word_tokenizer_survives_saving_and_loading(words, tmp_path):
    words.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.chat_template, loaded.padding_side, loaded.get_vocab()) == (
        words.chat_template,
        "left",
        words.get_vocab(),
    )
    assert (loaded.eos_token_id, loaded.pad_token_id, len(loaded)) == (
        words.eos_token_id,
        words.pad_token_id,
        len(words),
    )
    solution = "<reasoning>\n12 + 5 = 17\n</reasoning>\n<answer>\n17\n</answer>\n"
    for p in load_problems("arithmetic", limit=50):
        text = XML.build(loaded, p.question, response=solution)
        ids = loaded(text, add_special_tokens=False)["input_ids"]
        assert ids == words(text, add_special_tokens=False)["input_ids"]
        assert loaded.decode(ids) == text


def test_the_word_tokenizers_template_leaves_the_system_message_out(words):
    assert XML.build(words, "How many?") == "<|user|>How many?<|assistant|>"
    assert XML.build(words, "How many?", response="17") == "<|user|>How many?<|assistant|>17<|eos|>"


def copy_of(tokenizer, template):
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    made.chat_template = template
    return made


def test_the_prompt_is_the_chat_templates_and_an_empty_system_prompt_is_left_out(tokenizer):
    user = "<|im_start|>user\nQ<|im_end|>\n"
    assert (
        WITH_SYSTEM.build(tokenizer, "Q") == f"<|im_start|>system\nS<|im_end|>\n{user}<|im_start|>assistant\n"
    )
    assert PLAIN.build(tokenizer, "Q") == f"{user}<|im_start|>assistant\n"
    assert PLAIN.build(tokenizer, "Q", response="A") == f"{user}<|im_start|>assistant\nA<|im_end|>\n"


def test_a_prompt_with_a_response_goes_on_from_the_prompt_without_one(tokenizer):
    assert WITH_SYSTEM.build(tokenizer, "Q", response="A").startswith(WITH_SYSTEM.build(tokenizer, "Q") + "A")


def test_template_settings_reach_the_template(tokenizer):
    thinking = copy_of(tokenizer, "{{ messages[-1]['content'] }}{% if enable_thinking %}<think>{% endif %}")
    assert Prompting("xml", "", {"enable_thinking": True}).build(thinking, "Q") == "Q<think>"
    assert Prompting("xml", "", {"enable_thinking": False}).build(thinking, "Q") == "Q"


REFUSES_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)


def test_template_settings_that_do_not_go_together_are_one_line(tokenizer):
    with pytest.raises(
        DataError,
        match="cannot be filled in: continue_final_message and add_generation_prompt are not compatible",
    ):
        Prompting("xml", "S", {"continue_final_message": True}).build(tokenizer, "Q")


def test_where_the_template_refuses_a_system_message_its_text_stands_before_the_question(tokenizer):
    gemma = copy_of(tokenizer, REFUSES_SYSTEM)
    assert WITH_SYSTEM.build(gemma, "Q") == "<|im_start|>user\nS\n\nQ<|im_end|>\n<|im_start|>model\n"
    assert PLAIN.build(gemma, "Q") == "<|im_start|>user\nQ<|im_end|>\n<|im_start|>model\n"


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}", "{{ messages[7].content }}", "{{ messages[0].content + 3 }}"]
)
def test_a_template_that_cannot_be_filled_in_is_one_line(tokenizer, template):
    with pytest.raises(DataError, match=r"^the chat template of .* cannot be filled in: ") as error:
        WITH_SYSTEM.build(copy_of(tokenizer, template), "Q")
    assert "\n" not in str(error.value)


def test_a_template_that_leaves_the_question_out_is_refused(tokenizer):
    deaf = copy_of(tokenizer, "{% for m in messages %}<|im_start|>{{ m.role }}<|im_end|>{% endfor %}")
    with pytest.raises(DataError, match="leaves the question out"):
        WITH_SYSTEM.encode(deaf, [Problem("How many pens?", "1"), Problem("How many cups?", "2")], 64)
    assert len(WITH_SYSTEM.encode(deaf, [Problem("How many pens?", "1")] * 2, 64)[0]) == 2


def test_a_tokenizer_without_a_chat_template_gets_the_plain_one_and_one_warning(tokenizer):
    bare = copy_of(tokenizer, None)
    with pytest.warns(UserWarning, match="no chat template"):
        assert WITH_SYSTEM.build(bare, "Q") == "S\n\nQuestion: Q\nAnswer: "
    assert bare.chat_template == PLAIN_TEMPLATE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert WITH_SYSTEM.build(bare, "Q", response="A") == "S\n\nQuestion: Q\nAnswer: A<|im_end|>\n"
    assert PLAIN.eos_id(bare) == bare.eos_token_id


def test_the_eos_to_train_is_the_one_the_template_writes_not_the_tokenizers(tokenizer):
    """Two EOS ids are usual; Gemma's <end_of_turn> is special without being a named special token."""
    end, other = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert PLAIN.eos_id(tokenizer) == end
    for template, expected in (
        ("{% for m in messages %}{{ m['content'] }} <|endoftext|>{% endfor %}", other),
        (
            "{% for m in messages %}{{ m['content'] }}\nend of turn<|im_start|>{% endfor %}",
            tokenizer.convert_tokens_to_ids("<|im_start|>"),
        ),
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", end),  # writes none: the tokenizer's
    ):
        assert PLAIN.eos_id(copy_of(tokenizer, template)) == expected
    gemma = copy_of(tokenizer, "{% for m in messages %}{{ m['content'] }}<end_of_turn>\n{% endfor %}")
    gemma.add_tokens([AddedToken("<end_of_turn>", special=True)])
    assert PLAIN.eos_id(gemma) == gemma.convert_tokens_to_ids("<end_of_turn>")


def test_the_eos_to_train_is_found_behind_changed_text_and_added_tokens(tokenizer):
    """A template in upper case taught <|im_start|>, the first special token of the whole text."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for change in ("upper", "trim", "replace('T', 't')"):
        changed = copy_of(tokenizer, CHAT_TEMPLATE.replace("m['content']", f"m['content'] | {change}"))
        changed.eos_token = "<|endoftext|>"
        assert PLAIN.eos_id(changed) == end
    assert PLAIN.eos_id(copy_of(tokenizer, "<|im_start|>{{ messages[0].content }}")) == end  # no answer in it
    turn = "{% for m in messages %}{{ m['content'] }}\n\n<turn>{% endfor %}"
    ordinary = copy_of(copy.deepcopy(tokenizer), turn)
    ordinary.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("<turn>", special=False)])
    assert PLAIN.eos_id(ordinary) == ordinary.convert_tokens_to_ids("<turn>")


def test_a_prompt_that_is_too_long_is_skipped_and_counted_and_none_is_cut(tokenizer):
    """TRL#3569: cutting at the token limit cuts off the question or <|im_start|>."""
    problems = [Problem("Q", "1"), Problem("pens " * 5000, "2"), Problem("R", "3")]
    kept, skipped = WITH_SYSTEM.encode(tokenizer, problems, 100)
    assert [e.problem.answer for e in kept] == ["1", "3"]
    assert skipped == 1
    for e in kept:
        assert tokenizer.decode(e.ids) == e.prompt == WITH_SYSTEM.build(tokenizer, e.problem.question)


def test_not_all_texts_are_in_the_tokenizer_at_once(tokenizer, monkeypatch):
    """It keeps some 25 kB of a prompt until it is through: 26 GB of a million, beside 6 GB of ids."""
    sizes, tokenise = [], type(tokenizer).__call__

    def counted(self, text, **how):
        sizes.append(len(text))
        return tokenise(self, text, **how)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    problems = [Problem(f"{i} pens", str(i), f"{i}\n#### {i}") for i in range(2500)]
    kept, _ = Prompting("xml", "", prompt_format="raw").encode(tokenizer, problems, 100)
    assert [tokenizer.decode(e.ids) for e in kept] == [f"Question: {i} pens\nAnswer: " for i in range(2500)]
    for i, (_, ids) in enumerate(sft_train.responses(kept, tokenizer, sft_train.Config())):
        assert f"<answer>\n{i}\n</answer>" in tokenizer.decode(ids)
    assert 2 < max(sizes) <= 1000


def test_the_longest_prompt_allowed_is_kept_and_all_too_long_is_an_error_that_says_what_would_do(tokenizer):
    length = len(tokenizer(WITH_SYSTEM.build(tokenizer, "Q"))["input_ids"])
    assert len(WITH_SYSTEM.encode(tokenizer, [Problem("Q", "1")], length)[0]) == 1
    with pytest.raises(DataError, match=f"max_prompt_length={length - 1}: the shortest has {length} tokens"):
        WITH_SYSTEM.encode(tokenizer, [Problem("Q and more", "1"), Problem("Q", "1")], length - 1)


def test_the_tokenizer_adds_no_second_bos_to_the_templates(words):
    """Llama's template writes a BOS and its tokenizer would add another, but for add_special_tokens=False."""
    adds_bos = arithmetic_tokenizer()
    adds_bos.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", words.pad_token_id)]
    )
    assert adds_bos("17")["input_ids"][0] == words.pad_token_id
    assert (
        PLAIN.encode(adds_bos, [Problem("17", "1")], 9)[0][0].ids
        == words("<|user|>17<|assistant|>")["input_ids"]
    )


def with_bos(tokenizer, template):
    """The tokenizer, putting <|endoftext|> in front of each text by post-processing."""
    made = copy_of(copy.deepcopy(tokenizer), template)
    ids = [("<|endoftext|>", made.pad_token_id)]
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=ids
    )
    return made


def test_a_bos_that_post_processing_adds_is_in_plain_and_raw_prompts_once_and_missed_aloud_elsewhere(
    tokenizer, tmp_path
):
    """A base model got none with the plain template, and nobody was told."""
    bare, R = with_bos(tokenizer, None), Prompting("r1", "Q: {question}", prompt_format="raw")
    bos = bare.pad_token_id
    with pytest.warns(UserWarning, match="no chat template"):
        [asked], _ = WITH_SYSTEM.encode(bare, [Problem("Q", "1")], 99)
    assert asked.ids == [bos, *tokenizer("S\n\nQuestion: Q\nAnswer: ")["input_ids"]]
    assert WITH_SYSTEM.remarks(bare, [asked]) == []
    bare.save_pretrained(tmp_path)
    elsewhere = AutoTokenizer.from_pretrained(tmp_path)
    assert WITH_SYSTEM.encode(elsewhere, [Problem("Q", "1")], 99)[0][0].ids == asked.ids
    whole = Problem("<|endoftext|>Q", "1", is_prompt=True)
    [one, other] = R.encoded(bare, [Problem("one", "1"), whole])
    assert one.ids == [bos, *tokenizer("Q: one")["input_ids"]]
    assert other.ids == [bos, *tokenizer("Q")["input_ids"]]
    without = with_bos(tokenizer, CHAT_TEMPLATE)
    [asked] = WITH_SYSTEM.encoded(without, [Problem("Q", "1")])
    [remark] = WITH_SYSTEM.remarks(without, [asked])
    assert "puts '<|endoftext|>' in front of a text, and the chat template does not" in remark


DATED = (
    "{%- if date_string is not defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}{%- endif %}"
    "{%- macro head() %}{{ strftime_now('%A, %-d.%m.%y') }}{% endmacro %}"
    "{{ date_string }}|{{ head() }}|" + CHAT_TEMPLATE
)


def test_a_template_that_writes_the_date_writes_the_same_one_on_every_day_and_where_it_is_saved(
    tokenizer, tmp_path, monkeypatch
):
    """Resume and --compare refused on the next day."""
    dated = copy_of(tokenizer, DATED)
    prompt = WITH_SYSTEM.build(dated, "Q")
    assert prompt.startswith("26 Jul 2024|Friday, 26.07.24|<|im_start|>system\nS")
    assert WITH_SYSTEM.build(dated, "Q") == prompt
    dated.save_pretrained(tmp_path)
    plain = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    assert plain.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == prompt
    assert WITH_SYSTEM.build(plain, "Q") == prompt
    assert plain.chat_template == dated.chat_template, "settled once"
    chosen = Prompting("xml", "S", {"date_string": "today"})
    assert chosen.build(copy_of(tokenizer, DATED), "Q").startswith("today|Friday")


def test_a_template_that_draws_lots_is_refused(tokenizer):
    lots = copy_of(tokenizer, "{{ range(90000) | random }}" + CHAT_TEMPLATE)
    with pytest.raises(DataError, match="another prompt each time"):
        PLAIN.encode(lots, [Problem("Q", "1")], 99)


def test_template_settings_are_the_defaults_of_the_saved_template(tokenizer, tmp_path):
    thinks = "{% if enable_thinking is not defined or enable_thinking %}+{% endif %}"
    made = copy_of(tokenizer, "{{ messages[-1].content }}" + thinks)
    assert Prompting("xml", "", {"enable_thinking": False}).build(made, "Q") == "Q"
    made.save_pretrained(tmp_path)
    elsewhere = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "Q"}]
    assert elsewhere.apply_chat_template(chat, tokenize=False) == "Q"
    assert elsewhere.apply_chat_template(chat, tokenize=False, enable_thinking=True) == "Q+"


REMARKS = {
    "nothing": (CHAT_TEMPLATE, []),
    "upper case": (
        CHAT_TEMPLATE.replace("m['content']", "m['content'] | upper"),
        ["changes the system prompt", "changes the message of the user"],
    ),
    "no system prompt": ("{{ messages[-1].content }}", ["leaves the system prompt out"]),
    "half the question": ("S how\n many {{ messages[-1].content[:9] }}", ["parts of it out"]),
    "a think block": (CHAT_TEMPLATE + "<think>\n", ["inside a <think> block"]),
    "an empty block": (CHAT_TEMPLATE + "<reasoning></reasoning>", ["ends in </reasoning> already"]),
    "trimmed": (CHAT_TEMPLATE.replace("m['content']", "m['content'] | trim"), []),
    "no header": (
        CHAT_TEMPLATE.partition("{% if add")[0],
        ["writes '<|im_start|>assistant' before an answer, and does not end a prompt with it"],
    ),
    "empty thoughts in answers": (
        CHAT_TEMPLATE.replace("\n{{ m", "\n{% if m['role'] == 'assistant' %}<think></think>{% endif %}{{ m"),
        [],
    ),
}


@pytest.mark.parametrize("case", REMARKS)
def test_what_a_template_does_to_the_messages_is_told(tokenizer, case):
    template, words = REMARKS[case]
    made, asking = copy_of(tokenizer, template), Prompting("xml", "S how\n many\n")
    encoded, _ = asking.encode(made, [Problem("how many pens", "1")], 99)
    remarks = asking.remarks(made, encoded)
    assert len(remarks) == len(words)
    assert all(word in remark for word, remark in zip(words, remarks, strict=True))


OPENINGS = [
    ("r1", "<think>\n", "<think>\n"),
    ("r1", "<think>", "<think>"),
    ("r1", "<think>\n\n</think>\n\n", ""),  # Qwen3 without thinking
    ("xml", "<think>\n", ""),
    ("xml", "<reasoning>\n", "<reasoning>\n"),
    ("boxed", "The answer is \\boxed{", "\\boxed{"),
    ("r1", "", ""),
]


@pytest.mark.parametrize(("name", "end", "opening"), OPENINGS)
def test_what_a_template_opens_of_the_answer_is_the_answer_s(tokenizer, name, end, opening):
    """The r1 layout paid 0 for a right completion, whose <think> stood in the prompt."""
    template = f"{CHAT_TEMPLATE}{{{{ {end!r} }}}}"
    [asked] = Prompting(name, "<think> S").encoded(copy_of(tokenizer, template), [Problem("Q", "1")])
    assert asked.opening == opening
    assert asked.answered(Completion([], "so", True)).text == opening + "so"


def test_the_raw_prompt_of_r1_ends_in_the_think_that_it_opens(tokenizer):
    asking = Prompting("r1", ANSWER_FORMATS["r1"].raw_prompt, prompt_format="raw")
    [asked] = asking.encoded(tokenizer, [Problem("How many {question}?", "1")])
    assert asked.prompt.endswith("\nUser: How many {question}?\nAssistant: <think>")
    text = asked.answered(Completion([], " so </think> <answer> 1 </answer>", True)).text
    assert r1_format_reward([text]) == [1.0]
    assert extract_answer(asked.prompt, "r1") is None
    assert asking.eos_id(tokenizer) == tokenizer.eos_token_id
    other = Prompting("hash", "Use ####", prompt_format="raw")
    assert other.build(tokenizer, "Q") == "Use ####\n\nQuestion: Q\nAnswer: "


def test_prompt_rows_stand_as_they_are_spaces_and_all(tokenizer, tmp_path):
    """They were trimmed, and wrapped into a chat."""
    rows = [{"prompt": " User: Q\nAssistant: <think>", "response": " so </think> <answer> 1 </answer>\n"}]
    [problem] = load_problems(jsonl(tmp_path / "a.jsonl", *rows), responses=True)
    assert (problem.response, problem.answer) == (rows[0]["response"], "1")
    assert Prompting("r1", "S", prompt_format="raw").build(tokenizer, problem) == rows[0]["prompt"]
    assert f"user\n{rows[0]['prompt']}<|im_end|>" in WITH_SYSTEM.build(tokenizer, problem)


def said(*texts):
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[text[0]], "content": text[2:]} for text in texts]


CHATS = {
    "a prompt of messages": ({"prompt": said("u Q"), "answer": "1"}, said("s S", "u Q"), "Q", ""),
    "its own system prompt": ({"prompt": said("s T", "u Q"), "answer": "1"}, said("s T", "u Q"), "Q", ""),
    "messages": ({"messages": said("u Q", "a #### 1")}, said("s S", "u Q"), "Q", "#### 1"),
    "several turns": (
        {"messages": said("u P", "a so", "u Q", "a #### 1")},
        said("s S", "u P", "a so", "u Q"),
        "Q",
        "#### 1",
    ),
    "prompt and completion": (
        {"prompt": said("u Q"), "completion": said("a  #### 1 ")},
        said("s S", "u Q"),
        "Q",
        " #### 1 ",
    ),
    "texts": ({"prompt": "Q", "completion": " #### 1 "}, said("s S", "u Q"), "Q", " #### 1 "),
    "parts": (
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}], "answer": "1"},
        said("s S", "u Q"),
        "Q",
        "",
    ),
}


@pytest.mark.parametrize("case", CHATS)
def test_chat_messages_and_completions_are_read_as_trl_has_them(tokenizer, tmp_path, case):
    row, messages, question, response = CHATS[case]
    [problem] = load_problems(jsonl(tmp_path / "a.jsonl", row), responses=True)
    assert (problem.question, problem.answer, problem.response) == (question, "1", response)
    assert WITH_SYSTEM.messages(problem) == messages
    written = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    assert WITH_SYSTEM.build(tokenizer, problem) == f"{written}<|im_start|>assistant\n"
    if case != "texts":
        with pytest.raises(DataError, match="prompt_format raw has no template"):
            Prompting("xml", "S", prompt_format="raw").build(tokenizer, problem)


def test_an_answer_that_the_data_begins_is_gone_on_with(tokenizer, tmp_path):
    row = {"prompt": said("u Q", "a <think> so"), "answer": "1"}
    [problem] = load_problems(jsonl(tmp_path / "a.jsonl", row))
    assert PLAIN.build(tokenizer, problem).endswith("user\nQ<|im_end|>\n<|im_start|>assistant\n<think> so")


BAD_CHATS = {
    "no user": ([{"role": "system", "content": "S"}], "no message of the user"),
    "other keys": ([{"from": "human", "value": "Q"}], r"must hold a role.*it has: from, value"),
    "a picture": ([{"role": "user", "content": [{"type": "image"}, {"text": "Q"}]}], "text as its content"),
    "no content": ([{"role": "user", "content": None}], "text as its content"),
    "nothing": ([], "holds list"),
    "half a pair": ([{"role": "user", "content": "\ud83d"}], "half of a surrogate pair"),
}


@pytest.mark.parametrize("case", BAD_CHATS)
def test_messages_that_cannot_be_read_are_named_by_row(tmp_path, case):
    messages, words = BAD_CHATS[case]
    path = jsonl(tmp_path / "a.jsonl", {"prompt": messages, "answer": "1"})
    with pytest.raises(DataError, match=rf"a\.jsonl line 1: .*{words}"):
        load_problems(path)


def test_prompts_are_padded_on_the_left_and_completions_on_the_right():
    ids, mask = pad_left([[1, 2, 3], [0], (4, 5)], pad_id=0)
    assert ids.tolist() == [[1, 2, 3], [0, 0, 0], [0, 4, 5]]
    assert mask.tolist() == [
        [True, True, True],
        [False, False, True],
        [False, True, True],
    ]  # a real token may be the pad id
    assert (ids.dtype, mask.dtype) == (torch.long, torch.bool)
    ids, mask = pad_right([[1, 2, 3], [0], (4, 5)], pad_id=9)
    assert ids.tolist() == [[1, 2, 3], [0, 9, 9], [4, 5, 9]]
    assert mask.tolist() == [[True, True, True], [True, False, False], [True, True, False]]
    assert (ids.dtype, mask.dtype) == (torch.long, torch.bool)


def numbered(count):
    return [Problem(f"Question {i}?", str(i), id=str(i)) for i in range(count)]


def test_the_held_out_problems_do_not_depend_on_the_order_and_both_sides_keep_theirs():
    problems = numbered(200)
    train, held = split_held_out(problems, 40)
    assert (len(train), len(held)) == (160, 40)
    for side in (train, held):
        assert all(int(a.id) < int(b.id) for a, b in pairwise(side))
    shuffled = random.Random(0).sample(problems, 200)
    assert set(split_held_out(shuffled, 40)[1]) == set(held)
    assert held != problems[:40]
    assert held != problems[-40:]


def test_a_row_more_moves_at_most_one_problem_back_to_training():
    held = split_held_out(numbered(200), 40)[1]
    more = split_held_out(numbered(201), 40)[1]
    assert len(set(held) - set(more)) <= 1


def test_a_question_that_occurs_twice_is_on_one_side_only():
    doubled = [Problem(p.question, p.answer, id=f"{p.id}-{copy}") for copy in range(3) for p in numbered(50)]
    for count in (1, 10, 50, 148 - 3):
        train, held = split_held_out(doubled, count)
        assert not {p.question for p in train} & {p.question for p in held}
        assert count <= len(held) < count + 3
        assert len(train) + len(held) == 150


def test_a_problem_without_an_answer_is_not_held_out():
    """Supervised data may hold responses alone: 4 of 10 held-out problems had none and were never right."""
    without = {str(i) for i in range(200) if i % 3}
    problems = [replace(p, answer="" if p.id in without else p.answer) for p in numbered(200)]
    train, held = split_held_out(problems, 40)
    assert len(held) == 40
    assert all(p.answer for p in held)
    assert len(train) == 160
    with pytest.warns(
        UserWarning, match="eval_problems=80: 67 of 200 problems have an answer and are held out"
    ):
        train, held = split_held_out(problems, 80)
    assert (len(train), len(held)) == (133, 67)
    asked_twice = [*numbered(5), Problem("Question 3?", "")]
    train, held = split_held_out(asked_twice, 4)
    assert all(p.answer for p in held)
    assert "Question 3?" not in {p.question for p in train} & {p.question for p in held}


def test_evaluation_without_a_problem_that_has_an_answer_is_refused(tokenizer, tmp_path):
    rows = [{"question": f"Question {i}?", "response": "Well."} for i in range(10)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = sft_train.Config(dataset=str(tmp_path), eval_problems=4, eval_every=1)
    with (
        pytest.warns(UserWarning, match="0 of 10 problems have an answer"),
        pytest.raises(
            DataError, match="none of 10 problems has an answer.*--answer_column, or set eval_every 0"
        ),
    ):
        prepare_problems(config, tokenizer, responses=True)


def test_nothing_can_be_held_out_but_not_everything():
    problems = numbered(5)
    assert split_held_out(problems, 0) == (problems, [])
    for count in (5, 6):
        with pytest.raises(DataError, match=f"{count} held-out problems leave none of 5"):
            split_held_out(problems, count)
    with pytest.raises(DataError, match="leave none of 3"):
        split_held_out([Problem("the same", "1")] * 3, 1)


def test_columns_that_no_answer_comes_from_may_hold_anything(tmp_path):
    """A list of subjects, a date as the type or responses of another kind ended the run; so did a Decimal."""
    row = dict(question="How many?", answer=Decimal("4"), subject=["Algebra", "x"], level=True)
    row |= dict(type=dates.date(2024, 1, 2), id=b"\x01", response=["a", "b"], completion={"text": "x"})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    [problem] = load_problems(str(tmp_path))
    assert (problem.answer, problem.level, problem.id) == ("4", "True", "b'\\x01'")
    assert problem.more["response"] == ["a", "b"]
    with pytest.raises(DataError, match="column 'response' holds list"):
        load_problems(str(tmp_path), responses=True)


def test_an_answer_that_the_data_begins_is_read_from_its_beginning(tokenizer):
    """Its <think> was not the completion's, so that the r1 layout paid 0."""
    begun = "<think>\nLet me see"
    chat = ({"role": "user", "content": "Q"}, {"role": "assistant", "content": begun})
    [encoded] = Prompting("r1", "S").encoded(tokenizer, [Problem("Q", "1", messages=chat)])
    assert encoded.prompt.endswith(begun)
    rest = Completion([], ".\n</think>\n<answer>\n1\n</answer>", ended=True)
    assert r1_format_reward(completions=[encoded.answered(rest).text]) == [1.0]


@pytest.mark.parametrize("write", [json.dumps, repr])
@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_chat_messages_that_a_table_holds_as_text_are_messages(write, column, tmp_path):
    """pandas writes a list into a CSV as Python does; its brackets were asked as the question."""
    chat = [{"role": "system", "content": "It's short"}, {"role": "user", "content": 'Say "one"'}]
    with open(tmp_path / "d.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([[column, "answer"], [write(chat), "1"]])
    [problem] = load_problems(str(tmp_path / "d.csv"))
    assert (problem.question, problem.messages) == ('Say "one"', tuple(chat))


def test_chat_messages_as_text_that_is_broken_are_named(tmp_path):
    with open(tmp_path / "d.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(
            [["prompt", "answer"], ["[{'role': 'user', 'content': array(['a'])}]", "1"]]
        )
    with pytest.raises(DataError, match=r"d\.csv line 2: column 'prompt' looks like chat messages"):
        load_problems(str(tmp_path / "d.csv"))


def test_what_a_tokenizer_has_no_tokens_for_is_told():
    """`tiny` was trained in a format that it cannot write, on words that it cannot read, without a note."""
    tiny = arithmetic_tokenizer()
    for text, answer_format, words in (
        ("Ann has 2 pens.", "xml", []),
        ("Ann has 2 pens.", "boxed", ["no tokens for '\\\\boxed{': no completion can have the"]),
        ("Ann has 2 zebras.", "xml", ["no tokens for some words of 1 of 1 prompts: the model reads <unk>"]),
    ):
        asking = Prompting(answer_format, "")
        encoded, _ = asking.encode(tiny, [Problem(text, "1")], 99)
        remarks = [remark for remark in asking.remarks(tiny, encoded) if "no tokens" in remark]
        assert len(remarks) == len(words)
        assert all(word in remark for word, remark in zip(words, remarks, strict=True))


def normalized(tokenizer, normalizer):
    """The tokenizer with another normalizer."""
    made = copy_of(tokenizer, CHAT_TEMPLATE)
    made.backend_tokenizer.normalizer = normalizer
    return made


def dropping(kept):
    """A tokenizer of characters without a token for the unknown: it leaves out what it has not seen."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    raw.train_from_iterator([kept], trainers.BpeTrainer(special_tokens=special, show_progress=False))
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = CHAT_TEMPLATE
    return made


@pytest.mark.parametrize(
    ("made", "question", "words"),
    [
        (lambda whole: whole, "How BIG is x² ? e\u0301", []),
        (lambda whole: normalized(whole, normalizers.NFC()), "How BIG is x² ? e\u0301", []),
        (
            lambda whole: normalized(whole, normalizers.NFKC()),
            "one x² ?",
            ["1 of 1 prompts: 'ronex²?<|im_end|><|i' becomes 'ronex2?<|im_end|><|i'"],
        ),
        (
            lambda whole: normalized(whole, normalizers.Lowercase()),
            "Is x Big ?",
            ["'>userIsxBig?<|im_end' becomes '>userisxbig?"],
        ),
        (lambda whole: dropping("<>/user asitn wreogc"), "one nine", ["keeps no line breaks"]),
        (
            lambda whole: dropping("user asitn wreogc"),
            "one nine",
            [
                "keep '</reasoning>', '<reasoning>', '<answer>', '</answer>': no completion can",
                "keeps no line",
            ],
        ),
    ],
)
def test_what_a_tokenizer_does_not_give_back_is_told(made, question, words, tokenizer):
    """One without a token for the unknown left the tags out, one in NFKC made x2 of x², without a note."""
    tokenizer, asking = made(tokenizer), Prompting("xml", "")
    encoded, _ = asking.encode(tokenizer, [Problem(question, "1")], 99)
    remarks = asking.remarks(tokenizer, encoded)
    assert len(remarks) == len(words), remarks
    assert all(word in remark for word, remark in zip(words, remarks, strict=True)), remarks


def test_what_is_set_and_no_prompt_reads_is_told(tokenizer):
    """A switch that the template lacks, or a system prompt beside the data's own, was dropped in silence."""
    reads = copy_of(tokenizer, CHAT_TEMPLATE + "{% if enable_thinking %}{% endif %}")
    asking = Prompting("xml", "S", {"enable_thinking": False, "thinking": True})
    encoded, _ = asking.encode(reads, [Problem("how many", "1")], 99)
    [remark] = asking.remarks(reads, encoded)
    assert remark == "the chat template does not read thinking of chat_template_kwargs"
    own = ({"role": "system", "content": "Mine"}, {"role": "user", "content": "Q"})
    problems = [Problem("Q", "1", messages=own), Problem("R", "1"), Problem("T", "1", is_prompt=True)]
    for asking in (Prompting("xml", "S"), Prompting("xml", "S", prompt_format="raw")):
        asked = problems if asking.prompt_format == "chat" else problems[1:]
        encoded, _ = asking.encode(tokenizer, asked, 99)
        assert f"1 of {len(asked)} problems bring their own" in asking.remarks(tokenizer, encoded)[0]
        usual = dataclasses.replace(asking, system_prompt=ANSWER_FORMATS["xml"].system_prompt)
        assert not any("bring" in remark for remark in usual.remarks(tokenizer, encoded))


def test_a_held_out_split_that_takes_most_of_the_data_is_warned_of():
    """100 problems of 120 were held out by default, and 20 trained on, without a word."""
    words = "eval_problems=100: 100 of 120 problems are held out, and only 20 are left to train on"
    with pytest.warns(UserWarning, match=words):
        split_held_out(numbered(120), 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split_held_out(numbered(120), 60)


def test_a_local_data_set_that_is_not_there_is_called_that():
    """A misspelt folder was looked for on the hub."""
    for name in ("./my_data", "/no/such/folder", "a/b/c", "../problems"):
        with pytest.raises(DataError, match="there is no such file or folder, and it is no hub id"):
            load_problems(name)

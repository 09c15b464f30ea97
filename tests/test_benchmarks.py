"""What the pages say is what the result files say."""

import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import reporting.study
from reporting import study_statistics
from reporting.study import result_rows, write_study
from small_study import a_plan, write_fake_study

ROOT = Path(__file__).resolve().parents[1]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


LINE = dict(
    update_seconds=1.0, rollout_seconds=0.5, completion_length=100, logp_diff=0.002, logp_diff_max=0.5
)


@pytest.fixture
def benchmark_module(monkeypatch):
    """Imports a file of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


def check_tables():
    words = [sys.executable, "benchmarks/tables.py", "--check"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_tables_of_all_pages_are_those_of_the_result_files():
    done = check_tables()
    assert done.returncode == 0, done.stderr


def test_a_table_that_was_changed_by_hand_is_named(benchmark_module, tmp_path, monkeypatch):
    tables = benchmark_module("tables")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- kill -->\n31 times kill -9\n<!-- end -->\nafter\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PAGES", [page])
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    with pytest.raises(SystemExit, match=r"page\.md: differs"):
        tables.main()
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    tables.main()
    filled = page.read_text()
    assert filled.startswith("before\n<!-- kill -->\n30 times kill -9")
    assert filled.endswith("<!-- end -->\nafter\n")


def test_every_table_stands_on_some_page(benchmark_module):
    tables = benchmark_module("tables")
    text = "".join(page.read_text() for page in tables.PAGES)
    assert set(re.findall(r"^<!-- (\w+) -->$", text, re.MULTILINE)) - {"end"} == set(tables.TABLES)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_file_says_where_its_numbers_come_from(path):
    result = json.loads(path.read_text())
    assert {"script", "command", "card", "cpu", "versions", "date", "commit", "rows"} <= set(result)
    assert (ROOT / result["script"]).exists()
    assert all(set(row) == {"case", "metric", "value", "unit"} for row in result["rows"])
    assert not re.search(r"(^|\s)/\w+/", result["command"]), "no folder of one machine"


def test_bf16_and_fp16_stand_beside_each_other_in_a_table(benchmark_module, tmp_path, monkeypatch):
    """Two runs of 23 steps; the mean difference is 0.024 once and 0.002 in 44 other steps."""
    precision, tables = benchmark_module("precision"), benchmark_module("tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.precision().startswith("Not measured yet: `python benchmarks/precision.py")
    steps = [LINE | {"skipped": "fp16 overflow"} for _ in range(3)] + [dict(LINE) for _ in range(20)]
    another = [dict(LINE) for _ in range(23)]
    steps[0] |= {"logp_diff": 0.024, "update_seconds": 60.0, "logp_diff_max": 0.7}
    steps[21] |= {"skipped": "fp16 overflow", "logp_diff": None}
    rows = [("fp16", *row) for row in precision.summary([steps, another])]
    rows += [("fp16", "mean8", 0.43, ""), ("fp16", "greedy", 0.5, ""), ("fp16", "difference", 0.026, "")]
    rows += [("fp16", "difference_ci95", [0.01, 0.042], ""), ("fp16", "p", 0.011, "p")]
    names = ("case", "metric", "value", "unit")
    result = {
        "script": "s.py",
        "card": "a card",
        "versions": {"torch": "2", "transformers": "5"},
        "date": "d",
    }
    result |= {"steps": 23, "seeds": [1, 2], "questions": 9}
    result |= {"rows": [dict(zip(names, row, strict=True)) for row in rows]}
    (tmp_path / "precision.json").write_text(json.dumps(result))
    lines = tables.precision().splitlines()
    assert lines[2] == "| fp16 | 0.430 | 0.500 | 0.0025 | 0.70 | 1.00 | 0.50 | 3 / 1 |"
    assert "fp16 minus the other, samples: +2.6 points (95% interval +1.0 to +4.2, p = 0.011)" in lines[-1]


def a_study(folder, gains, **more):
    """A study of the shape of the real one, with drawn answers, in the place of its results."""
    plan = a_plan(seeds=range(4), steps=(80,), **more)
    write_fake_study(folder / "study_m3po", plan, gains, questions=200, spread=0.002, train_steps=3)
    return write_study(folder / "study_m3po")


@pytest.fixture
def without_pages(monkeypatch):
    """Drawing takes most of the time."""
    monkeypatch.setattr(reporting.study, "study_page", lambda found: "the page")


ALIKE = {"m3po": 0.1, "noise": 0.1, "strangers": 0.1, "scaled_mean": 0.1}


@pytest.mark.usefixtures("without_pages")
@pytest.mark.parametrize(
    ("gains", "margin", "said"),
    [
        ({"m3po": 0.1}, 0.01, ("helps", "It helps: models trained with M3PO answer better", "matters")),
        ({"m3po": -0.1}, 0.01, ("hurts", "It hurts: ", "matters")),
        (ALIKE, 1e-6, ("undecided", "Undecided: ", "matters could not be told")),
        ({}, 0.06, ("no useful effect", "No, not here: ", "makes less than 6 points of difference")),
    ],
)
def test_the_first_screen_says_what_the_study_found(
    gains, margin, said, benchmark_module, tmp_path, monkeypatch
):
    words, sentence, choosing = said
    tables = benchmark_module("tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    found = a_study(tmp_path, gains, margin=margin)
    assert found["verdict"]["words"] == words
    text, row = tables.study(), found["comparisons"][0]
    assert text.startswith(sentence)
    assert f"is {100 * row['difference']:+.1f} points" in text
    *_, table, gate = text.split("\n\n")
    assert gate.startswith("On the trained model M3PO's weights choose. Their entropy is 0.70 of"), gate
    assert f"hoosing {choosing}: M3PO minus the plain mean is " in gate
    lines = table.splitlines()[-5:]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == list(tables.ARMS.values())
    assert f"| {100 * row['difference']:+.2f} (" in lines[1]
    mean = found["arms"][1]["outcomes"]["sampled mean@8"]["mean"]
    assert f"| 4 | {mean:.3f} |" in lines[1]


@pytest.mark.slow
@pytest.mark.usefixtures("without_pages")
def test_the_kept_study_is_made_of_the_runs_that_are_kept_with_it(tmp_path):
    """They stood in no commit for a while: a pattern of .gitignore hid them, and study.json stood alone."""
    kept = ROOT / "benchmarks" / "results" / "study_m3po"
    shutil.copytree(kept, tmp_path / "study")
    (tmp_path / "study" / "study.json").unlink()
    write_study(tmp_path / "study")
    made, said = (json.loads((folder / "study.json").read_text()) for folder in (tmp_path / "study", kept))
    assert made == said
    rows = json.loads((kept.parent / "study_m3po.json").read_text())["rows"]
    assert [tuple(row.values()) for row in rows] == result_rows(made)


@pytest.mark.usefixtures("without_pages")
def test_before_a_study_is_whole_the_first_screen_counts_its_seeds(benchmark_module, tmp_path, monkeypatch):
    tables = benchmark_module("tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    plan = a_plan(seeds=range(4), steps=(80,))
    write_fake_study(tmp_path / "study_m3po", plan, {}, questions=20, train_steps=12)
    shutil.rmtree(tmp_path / "study_m3po" / "runs" / "3" / "noise")
    found = write_study(tmp_path / "study_m3po", hide_means=True)
    text = tables.study()
    assert text.startswith("We do not know yet.")
    assert "3 of at most 4 seeds are there" in text
    assert "arms" not in found, "no mean is written"


def test_every_verdict_has_plain_words(benchmark_module):
    """Those that `read_verdict` can give."""
    tables, source = benchmark_module("tables"), inspect.getsource(study_statistics)
    for words in [*tables.VERDICTS, *filter(None, tables.SECOND_PARTS)]:
        assert f'"{words}"' in source
    returned = re.findall(r'return "([a-z ]+)", ', source)
    assert set(returned) == set(tables.VERDICTS)


def test_the_cost_model_by_hand(benchmark_module):
    """A gigabyte of gradients over a ring of a gigabyte a second: 2 (n - 1) / n seconds, behind a step of one
    second.
    """
    rows = {}

    def record(case, metric, value, unit):
        rows[case, metric] = value

    bench_gpus = benchmark_module("bench_gpus")
    bench_gpus.cost_model("case", {1: {"step_seconds": 1.0}}, 250_000_000, 1e9, record)
    seconds = [rows[f"case on {n}", "all_reduce_seconds_predicted"] for n in (2, 4, 8)]
    assert seconds == pytest.approx([1.0, 1.5, 1.75])
    speedups = [rows[f"case on {n}", "speedup_predicted"] for n in (2, 4, 8)]
    assert speedups == pytest.approx([2 / 2, 4 / 2.5, 8 / 2.75])


@pytest.mark.slow
def test_the_collectives_are_timed_on_the_cpu_too(benchmark_module):
    rate, gather = benchmark_module("bench_gpus").collectives(3)
    assert 1e6 < rate < 1e12
    assert 0 < gather < 1


# Hand-written answers to which each of the forty rules of math_rules.py applies at least once.
ANSWERS = (
    r"-\frac{3}{8}", r"6\sqrt{5}", "2x^2 - 7x + 3", "12500", r"40^\circ", r"\text{west}", "(-1,4]", "4,-9",
    r"\begin{pmatrix} 3 \\ -5 \end{pmatrix}", r"30\text{ cm}^2", r"\left(\frac{1}{2},5\pi\right)",
)  # fmt: skip
NOUNS = "cm|km/h|kg|ft|m|inches|square feet|apples|students|people|ways|marbles|dollars|degrees"
UNIT = rf"( |\\[,; ])?(\\?[ a-z]*\{{)?[ ~]*({NOUNS})\}}?([²³]|\^\{{?[23]\}}?)?"
SPELLINGS = (
    (r"^\$\$?(.*?)\$?\$$|^\\[(\[](.*)\\[)\]]$|^\\boxed\{(.*)\}$", r"\1\2\3"), (r"^\\\$|\.$", ""),
    (r" \\frac\{\\text\{m\}\}\{\\text\{s\}\}$", ""), (rf"(?<=\d){UNIT} *$", ""), ("−", "-"), ("π", r"\\pi"),
    (r"\^?\\circ|°|\\degree|\^\{\\circ\}", ""), (r"√(\d+)", r"\\sqrt{\1}"), ("²", "^2"), (r"\\[,;!]|\s", ""),
    (r"\\left|\\right|\\bigl|\\bigr", ""), (r"(?<=\d)(,|\{,\})(?=\d{3}$)", ""), (r"^(x|k|n|\\theta)=", ""),
    (r"\\[dtc]frac", r"\\frac"), (r"≤|\\leq?(?![a-z])", "<="),
    (r"^x(\\in|∈)|^\\(text|mbox|math)\w*(?={)", ""),
)  # fmt: skip


def arithmetic(text):
    """A LaTeX expression by Python's own arithmetic, at fixed values of its letters."""
    for pattern, other in (
        (r"\\frac(\d)(\d)", r"((\1)/(\2))"), (r"\\frac\{(.*?)\}\{(.*?)\}", r"((\1)/(\2))"),
        (r"\\sqrt\{?(\d+)\}?", r"((\1)**0.5)"), (r"\^\{?(\d)\}?", r"**\1"), (r"\\cdot|\\times", "*"),
        (r"\\pi", "(3.14159265)"), (r"(?<=[\d)])(?=[a-zA-Z(])", "*"),
    ):  # fmt: skip
        text = re.sub(pattern, other, text)
    return round(eval(text, {"x": 0.37, "X": 1.91}), 9)


def meaning(text):
    """What an answer stands for, read without the grader: a number, a word, or members in brackets."""
    for pattern, other in SPELLINGS:
        text = re.sub(pattern, other, text)
    if re.fullmatch(r"\{?\(?[a-z]{3,}\)?\}?", text):
        return text.strip("{()}")
    body = re.fullmatch(r"(?:\[|\()?\\begin\{(?:[bp]matrix|array)\}(?:\{c\})?(.*)\\end\{\w+\}\]?", text)
    if body:
        return "matrix", *map(arithmetic, body[1].split(r"\\"))
    ends = re.fullmatch(r"(.*?)(<=?)x(<=?)(.*)", text)
    if ends:
        text = f"{'(['[len(ends[2]) - 1]}{ends[1]},{ends[4]}{')]'[len(ends[3]) - 1]}"
    bracket = re.fullmatch(r"(\\?[(\[{])(.*?)\\?([)\]}])", text)
    if bracket and "," in text:
        members = map(arithmetic, bracket[2].split(","))
        return frozenset(members) if bracket[1] == r"\{" else (bracket[1], *members, bracket[3])
    values = list(map(arithmetic, text.split(",")))
    return frozenset(values) if len(values) > 1 else values[0]


@pytest.mark.parametrize("kind", ["KEEPING", "CHANGING"])
def test_the_forty_rules_keep_or_change_what_python_reads_in_answers(benchmark_module, kind, monkeypatch):
    rules = benchmark_module("math_rules")
    assert (len(rules.KEEPING), len(rules.CHANGING)) == (30, 10)
    for rule in getattr(rules, kind):
        made = {}
        for turn in range(12):  # at least as many as a rule has spellings to choose from
            monkeypatch.setattr(
                rules, "one_of", lambda _, *variants, turn=turn: variants[turn % len(variants)]
            )
            made |= {rules.applied(rule, answer): answer for answer in ANSWERS}
        made.pop(None, None)
        assert made, f"{rule.__name__} applies to nothing"
        for other, answer in made.items():
            if rule.__name__ == "unit_power":  # a unit has no value of its own
                assert (answer, other) == (r"30\text{ cm}^2", r"30\text{ cm}^3")
            else:
                is_kept = meaning(other) == meaning(answer)
                assert is_kept == (kind == "KEEPING"), f"{rule.__name__}: {answer} became {other}"


def test_rules_leave_alone_what_they_are_not_sure_of(benchmark_module):
    """A rule that goes too far makes a right grader look wrong, or a wrong one right."""
    rules = benchmark_module("math_rules")
    for rule, answer in (
        (rules.slash, r"2\frac{1}{3}"), (rules.slash, r"\frac{1}{2}x"), (rules.decimal_value, r"\frac{1}{3}"),
        (rules.spaces_added, "1,234"), (rules.spaces_removed, "3, 500"), (rules.factors, "5r^{5}"),
        (rules.factors, r"5\text{ m}"), (rules.label, "52_8"), (rules.unit, r"40^\circ"),
        (rules.inequality, "(1,2)"), (rules.members, "58,500"), (rules.members, "(1,2)"), (rules.sign, "0"),
        (rules.sign, r"3 \pm 2\sqrt{2}"), (rules.summands, "x = 5"), (rules.summands, "-2 < x < -1"),
        (rules.order, "(2,2)"), (rules.letter_case, "6 - 5i"), (rules.letter_case, "x = 5"),
        (rules.reciprocal, r"\dfrac{3}{3}"), (rules.dropped_factor, "1x"), (rules.named, "2k+2"),
        (rules.bracket_kind, "(a+5)(b+2)"), (rules.fewer, "7"),
    ):  # fmt: skip
        assert rules.applied(rule, answer) is None, f"{rule.__name__}: {answer}"
    assert rules.applied(rules.sign, "0.05") == "-0.05"
    assert rules.applied(rules.bracket_kind, r"(2,\infty)") == r"[2, \infty)", "an infinite end has one kind"


def test_the_pairs_of_the_corpus_have_their_verdicts_by_construction(benchmark_module):
    grading = benchmark_module("math_grading")
    cases = grading.corpus(["5", "x=5", "7", "7", r"\frac{1}{2}"], others=99)
    assert len(cases["math-500-same"]) == 4, "each text once"
    assert {frozenset(pair[1:3]) for pair in cases["math-500-others"]} == {
        *map(frozenset, [("5", "7"), ("x=5", "7"), ("5", r"\frac{1}{2}"), ("x=5", r"\frac{1}{2}")]),
        frozenset(["7", r"\frac{1}{2}"]),
    }, "x=5 is no other answer than 5"
    pairs = [pair for case in cases.values() for pair in case]
    assert grading.Pair("digit", r"\frac{0}{2}", r"\frac{1}{2}", False) in pairs
    assert grading.Pair("slash + full_stop", "1/2.", r"\frac{1}{2}", True) in pairs

    def grade(answers, references):
        return [{"1/2.": None, r"\frac{0}{2}": True}.get(answer, True) for answer in answers]

    kept = [grading.Pair("", "1/2.", "", True), grading.Pair("", "1/2", "", True)]
    changed = [grading.Pair("", r"\frac{0}{2}", "", False), *[grading.Pair("", "1/2.", "", False)] * 3]
    rows, failing = grading.measure("case", kept + changed, grade)
    assert {row[1]: row[2] for row in rows[:-1]} == {
        "pairs": 6, "refused": 0.5, "paid_wrongly": 0.25, "undecided_share": round(4 / 6, 5)
    }  # fmt: skip
    assert len(failing) == 5, "what was not decided fails on both sides"

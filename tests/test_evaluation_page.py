"""report.html of an evaluation, and compare.html: what stands in them, and that a browser shows it."""

import json

import pytest
import yaml
from test_page import HOSTILE, browser, data_of  # noqa: F401 (a fixture)

from reporting.comparison import compare_sides, sides_of, write_comparison_page
from reporting.evaluation import skipped_record, summarise, write_evaluation
from reporting.page import longest_text, questions_of, without_middle, write_report

SYSTEM = "Think, then answer.\n\n"


def a_record(number, grades, texts=None, **more):
    """A line of samples.jsonl; grades: 1, 0 or None for each sample."""
    question, answers = f"Question {number}? {HOSTILE}", [str(number) if grade else "no" for grade in grades]
    record = dict(doc_id=f"test-{number}", prompt_hash=f"{number:064x}", target=str(number), skipped=False)
    record |= dict(
        prompt=f"{SYSTEM}{question}\nAnswer:", question=question, subject="algebra", level="", by={}
    )
    record |= dict(resps=texts or [f"said {answer} {HOSTILE}" for answer in answers])
    record |= dict(filtered_resps={"strict-match": answers, "flexible-extract": answers})
    record |= dict(exact_match={name: grades for name in ("strict-match", "flexible-extract")})
    record |= dict(reward=[2.0 if g else 0.5 for g in grades], length=[7] * len(grades))
    return record | dict(stop_condition=["eos"] * len(grades)) | more


def an_evaluation(folder, all_grades, **settings):
    """A folder as grpo_eval.py leaves it; the last question was too long to ask."""
    folder.mkdir(parents=True)
    settings = dict(model="m", dataset="d", split="test", answer_format="xml", temperature=1.0) | settings
    (folder / "run_config.yaml").write_text(yaml.safe_dump(settings))
    records = [a_record(i, list(grades)) for i, grades in enumerate(all_grades)]
    too_long = a_record(99, [0.0]) | skipped_record(len(all_grades[0]))
    records.append(too_long | dict(prompt_hash="f" * 64, target="99"))
    write_evaluation(folder, summarise(records) | {"seconds": 1.0}, {"samples": records})
    return folder


@pytest.fixture(scope="module")
def evaluations(tmp_path_factory):
    """Two evaluations of the same questions, with two samples each."""
    folder = tmp_path_factory.mktemp("evaluations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reporting.evaluation.draw_evaluation", lambda *_: None)
        before = an_evaluation(folder / "a <b>before", [(1, 0), (0, 0), (None, 0), (1, 1)])
        after = an_evaluation(folder / "after", [(1, 1), (0, 0), (0, 0), (0, 1)])
    return before, after


def test_the_page_of_an_evaluation_holds_its_questions_samples_and_grades(evaluations):
    text = (evaluations[0] / "report.html").read_text()
    data = data_of(text)
    assert data["kind"] == "evaluation"
    assert HOSTILE not in text
    assert text.count("<script") == 2, "the data and the page's own"
    assert "a &lt;b&gt;before" in text
    assert [group["id"] for group in data["groups"]] == [f"test-{i}" for i in (0, 1, 2, 3, 99)]
    assert [[path["right"] for path in group["paths"]] for group in data["groups"]] == [
        [True, False],
        [False, False],
        [None, False],
        [True, True],
        [False, False],
    ]
    first = data["groups"][0]
    assert data["frames"] == [[SYSTEM, "\nAnswer:"]], "what all prompts share stands there once"
    assert (first["question"], first["answer"], first["by"]) == (
        f"Question 0? {HOSTILE}",
        "0",
        {"subject": "algebra"},
    )
    assert first["paths"][0]["text"] == f"said 0 {HOSTILE}"
    assert data["groups"][4]["skipped"]
    summary = dict(data["summary"])
    assert summary["accuracy"].startswith("0.300 ("), "three of ten, the question that was not asked too"
    assert (summary["undecided answers"], summary["too long"]) == ("1", "1")
    assert data["settings"]["model"] == "m"


def test_the_page_of_an_older_evaluation_has_the_prompt_as_its_question(evaluations, tmp_path):
    """Its records name no question."""
    for name in ("report.json", "samples.jsonl"):
        (tmp_path / name).write_bytes((evaluations[0] / name).read_bytes())
    records = [json.loads(line) for line in open(tmp_path / "samples.jsonl")]
    for record in records:
        del record["question"], record["by"]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = data_of(write_report(tmp_path).read_text())
    assert data["groups"][1]["question"] == records[1]["prompt"]
    assert data["frames"] == [["", ""]]


def test_long_answers_lose_their_middle_so_that_the_page_stays_small(monkeypatch):
    """8 answers of 4,000 characters to 5,000 questions were a page of 160 MB; short ones stay whole."""
    assert longest_text([5, 100, 100], 65) == 30
    assert longest_text([5, 10], 1000) == 10
    assert longest_text([], 10) == 0
    assert without_middle("abcdefgh", 8) == "abcdefgh"
    cut = without_middle("ab" + "x" * 1000 + "yz", 4)
    assert cut.startswith("ab\n[... 1,000 characters are left out")
    assert cut.endswith("]\nyz")
    monkeypatch.setattr("reporting.page.MAX_CHARACTERS", 4000)
    runs = [[a_record(i, [1], ["short" if i % 2 else "long " * 200]) for i in range(10)]]
    texts = [group["paths"][0]["text"] for group in questions_of({"one": runs})["groups"]]
    assert [text == "short" for text in texts] == [False, True] * 5
    assert 3500 < sum(map(len, texts)) < 4500
    monkeypatch.setattr("reporting.page.MAX_ANSWERS", 3)
    found = questions_of({"one": runs})
    assert ([g["id"] for g in found["groups"]], found["total"]) == (["test-0", "test-4", "test-9"], 10)


@pytest.fixture
def open_page(browser):  # noqa: F811
    """Opens a page in a tab and collects what its console says."""
    tabs = []

    def open_page(path):
        tab = browser.new_page(viewport={"width": 1366, "height": 800})
        tab.said = []
        tab.on("console", lambda message: tab.said.append(message.text))
        tab.on("pageerror", lambda error: tab.said.append(str(error)))
        tab.goto(path.as_uri())
        tab.wait_for_selector("#list tr")
        tabs.append(tab)
        return tab

    yield open_page
    for tab in tabs:
        assert tab.said == []
        tab.close()


def test_questions_are_filtered_searched_and_walked_through_by_the_keys_of_a_run_s_page(
    evaluations, open_page
):
    tab = open_page(evaluations[0] / "report.html")
    position = tab.locator("#position")
    assert position.inner_text() == "1 of 5 questions"
    assert HOSTILE in tab.locator(".question").inner_text()
    assert tab.locator(".text b, .text img, .question b, #list b, #list img").count() == 0
    assert tab.title() == "a <b>before"
    second = tab.locator(".path").all_inner_texts()[1]
    assert second.startswith("sample 1\n✗ wrong")
    assert "grpo_m3po reward 0.50" in second, "it was called the reward, as if the model's own run paid it"
    tab.keyboard.press("n")
    tab.keyboard.press("n")
    assert position.inner_text() == "3 of 5 questions"
    assert "? undecided" in tab.locator("#group").inner_text()
    tab.keyboard.press("p")
    assert "test-1" in tab.locator("#group").inner_text()
    for kind, ids in {
        "mixed": [0],
        "right": [3],
        "undecided": [2],
        "skipped": [99],
        "cut": [],
        "all": [0, 1, 2, 3, 99],
    }.items():
        tab.select_option("#filter", kind)
        shown = tab.locator("#list tr td:first-child").all_inner_texts()
        assert shown == [f"test-{i}" for i in ids], kind
    tab.keyboard.press("Tab")
    tab.fill("#search", "QUESTION 3?")
    assert position.inner_text() == "1 of 1 question"
    tab.fill("#search", "")
    tab.locator("#list tr", has_text="test-2").click()
    assert position.inner_text() == "3 of 5 questions"
    tab.locator("summary", has_text="Prompt").click()
    assert tab.locator("#group pre").inner_text() == f"{SYSTEM}Question 2? {HOSTILE}\nAnswer:"


def test_another_evaluation_is_read_from_its_file_and_shows_flips(evaluations, open_page, tmp_path):
    tab = open_page(evaluations[0] / "report.html")
    assert "Choose the samples.jsonl" in tab.locator("#flips").inner_text()
    (tmp_path / "no.jsonl").write_text('{"step": 1}\n')
    tab.set_input_files("#flips input", tmp_path / "no.jsonl")
    tab.wait_for_selector("text=no.jsonl is no samples.jsonl of grpo_eval.py")
    tab.set_input_files("#flips input", evaluations[1] / "samples.jsonl")
    tab.wait_for_selector("text=4 of 5 questions are in both")
    kinds = tab.locator("#flips select").nth(2)
    names = ["right more often (1)", "right less often (1)", "right as often (0)", "never right (2)"]
    assert kinds.locator("option").all_inner_texts() == names
    assert tab.locator("#flipped summary").inner_text().startswith("test-0: 1 of 2 right → 2 of 2 right")
    assert tab.locator("#list tr", has_text="test-3").inner_text().split("\t")[3:] == [
        "2 of 2 right",
        "1 of 2 right",
    ]
    assert "samples.jsonl: 2 of 2 right" in tab.locator("#group").inner_text()


def test_a_comparison_has_a_page_of_the_questions_with_the_answers_of_both_sides(
    evaluations, open_page, tmp_path
):
    sides = sides_of(list(map(str, evaluations)))
    _, results = compare_sides(sides)
    write_comparison_page(sides, results, tmp_path, "compare")
    tab = open_page(tmp_path / "compare.html")
    assert tab.locator("#cards dd").all_inner_texts()[1] == "1 gained, 1 lost"
    assert tab.locator("#list th").all_inner_texts()[3:] == ["a <b>before", "after"]
    assert tab.locator("#group h3.side").all_inner_texts() == [
        "a <b>before: 1 of 2 right",
        "after: 2 of 2 right",
    ]
    tab.locator("#flips select").nth(2).select_option(label="right less often (1)")
    tab.locator("#flipped summary").click()
    tab.locator("#flipped pre").nth(3).wait_for()  # they are made when the browser says that it has opened
    assert tab.locator("#flipped pre").all_inner_texts() == [
        f"said {answer} {HOSTILE}" for answer in ("3", "3", "no", "3")
    ]

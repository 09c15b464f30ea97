"""report.html: what stands in it, and that a real browser shows it (skipped where there is no Chromium)."""

import base64
import itertools
import json
import math
import random
import re
import shutil
import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from decoding.tokens import token_pieces
from reporting.__main__ import main
from reporting.files import damaged_lines, read_metrics
from reporting.page import evenly, page, read_evaluations, read_groups, summary, write_report

HOSTILE = (
    "</script><script>document.title = 'taken'</script>"
    "<img src=x onerror=\"document.title='taken'\"><b>bold</b> &amp; {{DATA}}"
)
G, LENGTH = 4, 6


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def a_rollout(step, generation, detailed, length=LENGTH, text="12 + 5 = 17 ok"):
    right = generation < 2
    record = dict(schema_version=1, step=step, example_id=f"train-{step}", generation=generation)
    record |= dict(prompt=f"How many? {HOSTILE}", completion=text, answer="17", extracted="17", right=right)
    record |= dict(reward=2.0 if right else 0.5, rewards={"correctness": 1.0})
    record |= dict(advantage=0.5 if right else -0.5, length=length, stop_condition="eos")
    if detailed:
        weights = bytearray(length * G)
        for t in range(length - 1):  # path g hears its neighbour most, then the one after
            weights[t * G + (generation + 1) % G], weights[t * G + (generation + 2) % G] = 204, 51
        pieces = [f" {generation}{t}" for t in range(length)]
        pieces[2] = HOSTILE if generation == 1 else pieces[2]
        record |= dict(tokens=list(range(length)), pieces=pieces, logps=[-0.1 * t for t in range(length)])
        record |= dict(think_end=length - 1, mix=base64.b64encode(bytes(weights)).decode())
        record |= dict(alone={"3": " other"} if generation == 0 else {})
        if generation == 0:
            record |= dict(alone_completion=f"12 - 5 = 7 {HOSTILE}", alone_extracted="7", alone_right=False)
    return record


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder as a run of M3PO leaves it: three steps, each with a group with tokens; two evaluations."""
    folder = tmp_path_factory.mktemp("runs") / "a <run>"
    folder.mkdir()
    write_lines(
        folder / "rollouts.jsonl",
        [a_rollout(step, g, detailed) for step in (1, 2, 3) for detailed in (True, False) for g in range(G)],
    )
    metrics = [
        {"step": s, "reward": s / 10, "correct": 0.5, "completion_length": 6.0, "train_seconds": 60.0 * s}
        for s in (1, 2, 3)
    ]
    metrics[0] |= {"eval_accuracy_before": 0.25}
    metrics[2] |= {"eval_accuracy": 0.5, "eval_questions": 4}
    write_lines(folder / "metrics.jsonl", metrics)
    rights = {0: (True, False, False, False), 3: (False, True, True, False)}
    answers = []
    for step in rights:
        for q, right in enumerate(rights[step]):
            row = dict(
                step=step, example_id=f"train-{q}", question=f"Question {q}?", answer="17", right=right
            )
            row |= dict(length=3, extracted="17" if right else None)
            answers.append(row | dict(completion=f"said after {step}: {HOSTILE}"))
    write_lines(folder / "evaluations.jsonl", answers)
    (folder / "run_config.yaml").write_text(
        yaml.safe_dump({"model": "tiny", "m3po_lambda": 0.1, "beta": None})
    )
    (folder / "curves.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg' width='10' height='10'/>")
    return folder


def data_of(text):
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    )


def test_the_page_holds_the_run_and_no_text_can_leave_its_block(run):
    text = page(run)
    data = data_of(text)
    assert len(data["groups"]) == 6
    assert data["groups"][0]["paths"][1]["pieces"][2] == HOSTILE
    assert HOSTILE not in text
    assert text.count("<script") == 2, "the data and the page's own"
    assert "a &lt;run&gt;" in text
    assert data["evaluations"]["steps"] == [0, 3]
    assert [q["right"] for q in data["evaluations"]["questions"]] == [
        [True, False],
        [False, True],
        [False, True],
        [False, False],
    ]
    told = summary([json.loads(line) for line in open(run / "metrics.jsonl")], data["evaluations"])
    assert ("held-out accuracy", "0.250 → 0.500 (0.068–0.932) of 4, after step 3") in told
    assert ("first → last evaluation, paired", "2 questions gained, 1 lost: p = 0.62, no sure change") in told
    assert data["total"] == 6
    assert data["settings"] == {"model": "tiny", "m3po_lambda": 0.1}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (dict(reward_set="math", reward=None), dict(reward_set="math")),
        (dict(reward_set="grpo_m3po", reward=["r.py:f"]), dict(reward=["r.py:f"])),
        (dict(reward=["r.py:f"]), dict(reward=["r.py:f"])),  # no set is noted
        (dict(reward_set="math", ema_decay=0.9), dict(reward_set="math", ema_decay=0.9)),
        (dict(reward_set="math", ema_decay=0.0), dict(reward_set="math")),  # the last weights, as expected
    ],
)
def test_the_settings_of_the_page_name_what_was_paid_and_whose_answers_are_shown(settings, told, tmp_path):
    """They named no rewards, nor the warm start."""
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "reward": 0.5, "train_seconds": 1.0}])
    (tmp_path / "run_config.yaml").write_text(yaml.safe_dump(settings | {"warm_start": "w.yaml"}))
    assert data_of(page(tmp_path))["settings"] == told | {"warm_start": "w.yaml"}


def test_the_page_says_from_where_on_problems_were_seen_before():
    """What is right in training ran to 0.55 where new problems gave 0.41, and nothing said why."""

    def passes(*epochs, **more):
        lines = [dict(step=n, epoch=epoch, train_seconds=1.0, **more) for n, epoch in enumerate(epochs, 1)]
        return dict(summary(lines, {"questions": []})).get("passes over the problems")

    assert passes(0.5, 1.0, correct=0.1) == "1"
    assert passes(0.5, 1.0, 1.5, correct=0.1) == "1.5; from step 3 on, they were trained on before"
    assert passes(0.5, 1.0, 1.5) == "1.5", "supervised training samples nothing"


def test_the_best_of_equal_accuracies_is_the_first_as_it_is_kept_in_best():
    """The page named step 5, and the run's last line the start, whose model was in best/."""

    def best(*first):
        lines = [dict(line, eval_accuracy=0.5, eval_questions=4, train_seconds=1.0) for line in first]
        return dict(summary(lines, {"questions": []})).get("best")

    assert best({"step": 5, "eval_accuracy_before": 0.5}, {"step": 10}) == "0.500 after step 0"
    assert best({"step": 5, "eval_accuracy_before": 0.4}, {"step": 10}) == "0.500 after step 5"
    assert best({"step": 5}) is None


def test_a_page_is_made_of_what_is_there(tmp_path, monkeypatch, capsys):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 0.5, "perplexity": 1.6, "train_seconds": 1.0}\n{"step": 2, "lo'
    )
    text = write_report(tmp_path).read_text()
    assert data_of(text)["groups"] == []
    assert "Curves come with the tenth step" in text
    monkeypatch.setattr("sys.argv", ["reporting", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err


def test_a_long_run_is_thinned_evenly_and_groups_with_tokens_come_first(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    write_lines(
        path,
        [
            a_rollout(step, g, detailed)
            for step in range(1, 101)
            for detailed in (True, False, False)
            for g in range(G)
        ],
    )
    groups, _ = read_groups(path, max_rollouts=40 * G)
    assert len(groups) == 40
    assert all("pieces" in path for group in groups for path in group["paths"])
    steps = [group["step"] for group in groups]
    assert (steps[0], steps[-1]) == (1, 100)
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 3
    more, _ = read_groups(path, max_rollouts=150 * G)
    assert sum("pieces" in group["paths"][0] for group in more) == 100
    assert len(more) == 150
    assert evenly([1, 2, 3], 0) == []


@pytest.mark.slow
def test_the_page_of_long_completions_stays_small_and_its_making_too(tmp_path):
    """The whole of rollouts.jsonl lay in memory; 2,000 completions of 4,096 tokens made a page of 270 MB."""
    path = tmp_path / "rollouts.jsonl"
    write_lines(
        path, [a_rollout(step, g, step % 2 == 0, length=200) for step in range(1, 401) for g in range(G)]
    )
    written = path.stat().st_size
    tracemalloc.start()
    groups, _ = read_groups(path, max_bytes=written // 10)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(json.dumps(groups)) < written // 10
    assert len(groups) > 5
    assert taken < written


def test_curves_of_what_is_no_run_are_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["reporting", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "nothing holds no metrics.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "nothing").exists()


def test_questions_that_share_an_id_are_told_apart(tmp_path):
    """The answers of the last were shown, and counted as gained or lost, as those of all."""
    rows = [
        {"step": step, "example_id": "easy", "question": q, "answer": "1", "right": right, "completion": q}
        for step in (0, 1)
        for q, right in (("a", True), ("b", False))
    ]
    write_lines(tmp_path / "evaluations.jsonl", rows)
    found = read_evaluations(tmp_path / "evaluations.jsonl")["questions"]
    assert [(q["question"], q["right"]) for q in found] == [("a", [True, True]), ("b", [False, False])]


def test_a_question_that_occurs_twice_is_there_twice(tmp_path):
    """The last took the place of the first: a gain and a loss were one loss."""
    rows = [
        {
            "step": step,
            "example_id": "q",
            "question": "a",
            "answer": answer,
            "right": right,
            "completion": "x",
        }
        for step, verdicts in ((0, (True, False, True)), (1, (False, True, True)))
        for answer, right in zip(("1", "1", "2"), verdicts, strict=True)
    ]
    write_lines(tmp_path / "evaluations.jsonl", rows)
    found = read_evaluations(tmp_path / "evaluations.jsonl")["questions"]
    assert [q["right"] for q in found] == [[True, False], [False, True], [True, True]]


def test_a_group_that_is_being_written_is_left_out(tmp_path):
    """Its weights, of a whole group, were read as those of the paths that were there."""
    path = tmp_path / "rollouts.jsonl"
    records = [a_rollout(step, g, True) for step in (1, 2) for g in range(G)]
    write_lines(path, records)
    whole = path.read_bytes()
    for cut, count in ((len(whole), 2), (len(whole) - 9, 1), (whole.index(b"\n") + 20, 0)):
        path.write_bytes(whole[:cut])
        groups, _ = read_groups(path, size=G)
        assert [len(group["paths"]) for group in groups] == [G] * count
    path.write_bytes(whole[whole.index(b"\n") + 1 :])
    assert [group["step"] for group in read_groups(path, size=G)[0]] == [2], (
        "the first group has lost its first path"
    )


def test_a_damaged_line_costs_its_group_and_no_other(tmp_path):
    """What came after it was missing from the page, and nothing said so."""
    records = [a_rollout(step, g, True) for step in (1, 2, 3) for g in range(G)]
    for damaged in (G, G + 1, 2 * G - 1):  # the first, a middle and the last line of the second group
        lines = [json.dumps(record) for record in records]
        lines[damaged] = lines[damaged][:50]
        (tmp_path / "rollouts.jsonl").write_text("\n".join([*lines, "7", ""]))
        groups, total = read_groups(tmp_path / "rollouts.jsonl", size=G)
        assert [(group["step"], len(group["paths"])) for group in groups] == [(1, G), (3, G)]
        assert total == 2
    rows = [
        dict(step=s, example_id="q", question="a", answer="1", right=True, completion="x") for s in (0, 1)
    ]
    (tmp_path / "evaluations.jsonl").write_text('{"st\n' + "\nnull\n".join(map(json.dumps, rows)))
    assert read_evaluations(tmp_path / "evaluations.jsonl")["steps"] == [0, 1]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"loss": 1.0}\n{"step": 3}\n{"step": 4')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]
    assert damaged_lines(tmp_path / "metrics.jsonl") == 1, "the last one is being written"


def test_what_listening_changed_is_summed_over_the_run():
    lines = [{"step": s, "train_seconds": 1.0, "gate_entropy": 1 - s / 10} for s in range(1, 5)]
    assert not [label for label, _ in summary(lines, {"questions": []}) if "changed by" in label]
    names = "listening_tokens listening_changed_tokens listening_became_right listening_became_wrong".split()
    for line, values in zip(lines[::2], ((200, 0, 0, 0), (200, 3, 1, 2)), strict=True):
        line |= dict(zip(names, values, strict=True))
    told = dict(summary(lines, {"questions": []}))
    assert told["groups changed by listening"] == "1 of 2 that were read again"
    assert told["tokens changed by listening"] == "3 of 400 (0.75%)"
    assert told["answers changed by listening"] == "1 became right, 2 became wrong"
    assert told["entropy of the weights over its maximum"] == "0.9 → 0.6"


def test_what_is_no_number_breaks_no_page(tmp_path):
    """NaN, which Python writes and reads as JSON, is none: the page's own script could not read its data."""
    write_lines(
        tmp_path / "rollouts.jsonl",
        [
            a_rollout(1, g, True) | {"logps": [math.nan] * LENGTH, "reward": math.inf, "advantage": math.nan}
            for g in range(G)
        ],
    )
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "reward": 1.0, "train_seconds": 1.0}])
    data = re.search(r'id="data">(.*?)</script>', page(tmp_path), re.DOTALL)[1]
    path = json.loads(data, parse_constant=pytest.fail)["groups"][0]["paths"][0]
    assert (path["logps"], path["reward"], path["advantage"]) == ([None] * LENGTH, None, None)


def test_the_pieces_of_a_text_join_to_it(tokenizer):
    for text in ("12 + 5 = 17.\n#### 17", "naïve — 数学 🙂 done", ""):
        ids = tokenizer(text)["input_ids"]
        pieces = token_pieces(tokenizer, ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == text
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert token_pieces(tokenizer, [*tokenizer("ok")["input_ids"], end])[-1] == "<|im_end|>"


def byte_fallback_tokenizer():
    """As Llama-2, Mistral and Gemma have it: what is in no token is said in bytes."""
    vocabulary = {
        word: i
        for i, word in enumerate(["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁a", "b"])
    }
    raw = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", unk_token="<unk>")


def test_bytes_that_are_no_text_end_no_run(tokenizer):
    """tokenizers' DecodeStream raised "Invalid prefix encountered" on a byte, a half character and a space.

    The run ended, for the sake of its log.
    """
    fallback, generator = byte_fallback_tokenizer(), random.Random(0)
    a, letter = fallback.convert_tokens_to_ids(["▁a", "b"])
    for text in ("naïve 🙂 数", "   "):
        ids = [a, *(2 + byte for byte in text.encode()), letter, a]
        assert "".join(token_pieces(fallback, ids)) == f"a{text}b a"
    assert token_pieces(fallback, [a, 2 + 0xF0, 2 + 0x9F])[0] == "a"
    for some in (fallback, tokenizer):
        for _ in range(300):
            ids = [generator.randrange(len(some)) for _ in range(generator.randrange(1, 40))]
            assert len(token_pieces(some, ids)) == len(ids)


def test_the_pieces_of_a_long_row_of_half_characters_take_linear_time(tokenizer):
    """A policy that says one byte over and over; 4,096 of them took 5 seconds."""
    half = next(i for i in range(len(tokenizer)) if tokenizer.decode([i]) == "�")

    def seconds(count):
        times = []
        for _ in range(3):
            started = time.process_time()
            assert "".join(token_pieces(tokenizer, [half] * count)) == "�" * count
            times.append(time.process_time() - started)
        return min(times)

    assert seconds(4096) < 9 * seconds(1024)


CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, run):
    """The page in a browser: its tab, the messages of its console, and the addresses that it asked for."""
    tab = browser.new_page(viewport={"width": 1366, "height": 800})
    page = SimpleNamespace(tab=tab, messages=[], requests=[])
    tab.on("console", lambda message: page.messages.append(message.text))
    tab.on("pageerror", lambda error: page.messages.append(str(error)))
    tab.on("request", lambda request: page.requests.append(request.url))
    tab.goto(write_report(run).as_uri())
    tab.wait_for_selector(".path")
    yield page
    tab.close()


def test_a_narrow_window_is_told_that_the_curves_go_on_to_the_right(browser, run):
    """At 500 pixels the picture ended at the window's edge, as if there were nothing more of it."""
    tab = browser.new_page(viewport={"width": 500, "height": 800})
    tab.goto(write_report(run).as_uri())
    hint = tab.get_by_text("scroll it sideways")
    for width in (1366, 804, 803, 390):
        tab.set_viewport_size({"width": width, "height": 800})
        is_cut = tab.evaluate("document.querySelector('.picture').scrollWidth > innerWidth - 44")
        assert is_cut == hint.is_visible() == (width < 804)
    tab.close()


def test_it_loads_without_a_message_and_requests_nothing_else(opened, run):
    tab = opened.tab
    assert opened.messages == []
    requests = [url for url in opened.requests if not url.startswith("data:")]
    assert requests == [(run / "report.html").as_uri()]
    assert tab.title() == "a <run>"
    tab.evaluate(
        "const image = new Image(); image.src = 'http://127.0.0.1:9/x.png'; document.body.append(image)"
    )
    tab.wait_for_timeout(100)
    blocked = ["Content Security Policy" in message for message in opened.messages]
    assert any(blocked), "the page's own policy forbids it"


def test_a_click_on_a_token_shows_the_weights_that_stand_in_the_file(opened):
    tab = opened.tab
    tab.locator('.text[data-path="0"] [data-t="3"]').click()
    shown = tab.locator("#detail .now .weight")
    assert [(w.get_attribute("data-peer"), w.inner_text().split()[2]) for w in shown.all()] == [
        ("1", "0.80"),
        ("2", "0.20"),
    ]
    assert "the same random draw would have given  other" in tab.locator("#detail").inner_text()
    tab.locator('.text[data-path="0"] [data-t="5"]').click()
    assert "hears nobody" in tab.locator("#detail").inner_text()
    minds = tab.locator(".minds").inner_text()
    assert "Listening changed 1 of 24 tokens. Most often path 1 changed path 0: 1 token." in minds
    assert "path 0, token 4: wrote  03 instead of  other, having heard path 1 (0.80) say" in minds
    assert "; it went on to answer 17 (right)" in minds
    unheard = tab.locator(".path details")
    assert unheard.locator("summary").all_inner_texts() == ["without listening: 7 ✗ wrong"]
    unheard.locator("summary").click()
    assert unheard.locator(".unheard").inner_text() == f"12 - 5 = 7 {HOSTILE}"
    tab.select_option("#filter", "flipped")
    assert tab.locator("#position").inner_text() == "1 of 3 groups", "listening made one of its answers right"


def test_markup_and_script_of_a_model_show_as_text(opened):
    tab = opened.tab
    assert HOSTILE in tab.locator('.text[data-path="1"]').inner_text()
    tab.locator("summary", has_text="Prompt").click()
    assert HOSTILE in tab.locator("#group pre").inner_text()
    tab.locator("#flipped summary").first.click()
    assert HOSTILE in tab.locator("#flipped pre").first.inner_text()
    assert tab.locator(".text b, .text img, pre b, pre img").count() == 0
    assert tab.title() == "a <run>"
    assert opened.messages == []


def test_groups_are_filtered_searched_and_walked_through_by_keyboard(opened):
    tab = opened.tab
    position = tab.locator("#position")
    assert position.inner_text() == "1 of 3 groups", "those with their tokens, where there are some"
    tab.select_option("#filter", "all")
    assert position.inner_text() == "1 of 6 groups"
    tab.keyboard.press("n")
    tab.keyboard.press("n")
    assert position.inner_text() == "3 of 6 groups"
    tab.keyboard.press("p")
    assert "step 1" in tab.locator("#group").inner_text()
    tab.select_option("#filter", "turned")
    assert position.inner_text() == "1 of 3 groups"
    tab.select_option("#filter", "right")
    assert position.inner_text() == "no group matches"
    tab.select_option("#filter", "all")
    tab.fill("#search", "TRAIN-2")
    assert position.inner_text() == "1 of 2 groups"
    tab.fill("#search", "")
    tab.fill("#low", "3")
    assert position.inner_text() == "no group matches"
    tab.fill("#low", "")
    tab.select_option("#step", "3")
    assert position.inner_text() == "1 of 2 groups"
    tab.locator('.text[data-path="2"]').focus()
    tab.keyboard.press("ArrowRight")
    assert "path 2, token 2 of 6" in tab.locator("#detail").inner_text()
    tab.keyboard.press("ArrowDown")
    assert "path 3, token 2 of 6" in tab.locator("#detail").inner_text()
    tab.keyboard.press("End")
    assert "path 3, token 6 of 6" in tab.locator("#detail").inner_text()
    tab.select_option("#filter", "tokens")
    tab.select_option("#step", "")
    tab.locator('.text[data-path="2"]').focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("n")
    assert "path 2, token 2 of 6" in tab.locator("#detail").inner_text(), "the same token of the next group"
    tab.keyboard.press("Escape")
    assert tab.locator("#detail").inner_text() == ""
    for _ in range(4):
        tab.keyboard.press("c")
    assert opened.messages == []


def test_flips_between_evaluations(opened):
    tab = opened.tab
    kind = tab.locator("#flips select").nth(2)
    names = ["wrong to right (2)", "right to wrong (1)", "right both times (0)", "wrong both times (1)"]
    assert kind.locator("option").all_inner_texts() == names
    kind.select_option(label="right to wrong (1)")
    assert tab.locator("#flipped summary").all_inner_texts() == [
        "train-0: 17 → nothing (reference 17) Question 0?"
    ]


def open_in(browser, path, groups, script="", prepare=lambda tab: None):
    """A tab with the page at `path`, opened; `script` runs before the page's own."""
    tab = browser.new_page()
    prepare(tab)
    tab.add_init_script(script)
    tab.goto(path.as_uri())
    tab.wait_for_selector(".path")
    assert f"1 of {groups} group" in tab.locator("#position").inner_text()
    return tab


def seconds_to_open(browser, path, groups):
    """The best of three times that the tab's thread computes until the first group is shown."""
    seconds = []
    for _ in range(3):
        sessions = []

        def count_processor_time(tab, sessions=sessions):
            sessions.append(tab.context.new_cdp_session(tab))
            sessions[0].send("Performance.enable", {"timeDomain": "threadTicks"})

        tab = open_in(browser, path, groups, prepare=count_processor_time)
        metrics = sessions[0].send("Performance.getMetrics")["metrics"]
        seconds.append(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))
        assert tab.locator(".text span[data-t]").count() == G * 400, "only the group that is shown is made"
        tab.close()
    return min(seconds)


@pytest.mark.slow
def test_two_thousand_rollouts_open_in_time_linear_in_their_number(browser, tmp_path):
    def page_of(groups):
        folder = tmp_path / str(groups)
        folder.mkdir()
        rows = [a_rollout(step, g, True, length=400) for step in range(1, groups + 1) for g in range(G)]
        write_lines(folder / "rollouts.jsonl", rows)
        write_lines(folder / "metrics.jsonl", [{"step": 1, "reward": 1.0, "train_seconds": 1.0}])
        return write_report(folder)

    few, many = (seconds_to_open(browser, page_of(groups), groups) for groups in (125, 500))
    assert many < 8 * few


COUNT_COLOURS = """
window.coloursSet = 0;
const fillStyle = Object.getOwnPropertyDescriptor(CanvasRenderingContext2D.prototype, "fillStyle");
Object.defineProperty(CanvasRenderingContext2D.prototype, "fillStyle", {
  get() { return fillStyle.get.call(this); },
  set(value) { window.coloursSet += 1; fillStyle.set.call(this, value); },
});
"""


@pytest.mark.slow
def test_a_group_of_64_paths_that_all_hear_each_other_sets_a_colour_for_each_pair_only(browser, tmp_path):
    """It took 3.5 seconds: a colour was read from text for each of 1.6 million weights."""
    size, length = 64, 400
    mix = base64.b64encode(bytes([4] * size * (length - 1) + [0] * size)).decode()
    tokens = dict(pieces=[" x"] * length, logps=[-1.0] * length, think_end=length - 1, mix=mix)
    rows = [a_rollout(1, g, False, length=length) | tokens for g in range(size)]
    write_lines(tmp_path / "rollouts.jsonl", rows)
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "reward": 1.0, "train_seconds": 1.0}])
    tab = open_in(browser, write_report(tmp_path), groups=1, script=COUNT_COLOURS)
    assert size * size <= tab.evaluate("window.coloursSet") <= size * (size + 1), "and one for the bar"
    tab.close()


def test_weights_of_a_control_that_are_negative_or_above_1_are_shown(browser, tmp_path):
    """They are float16; the bytes of older runs are read as before."""
    weights = np.zeros((LENGTH, G), dtype=np.float16)
    weights[:-1, :2] = -0.25, 1.25
    mix = base64.b64encode(weights.tobytes()).decode()
    rows = [a_rollout(1, g, True) | dict(mix=mix, mix_dtype="float16") for g in range(G)]
    write_lines(tmp_path / "rollouts.jsonl", rows)
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "reward": 1.0, "train_seconds": 1.0}])
    tab = open_in(browser, write_report(tmp_path), groups=1)
    tab.locator(".text span[data-t]").nth(1).click()
    heard = tab.locator("#detail .now .weight").all_inner_texts()
    assert "1.25" in heard[0]
    assert "-0.25" in heard[1]
    tab.close()

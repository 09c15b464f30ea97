"""python -m reporting over several runs, and runs.html: what it holds, what it leaves alone, what it says."""

import os
import time
from types import SimpleNamespace

import pytest
import yaml
from test_page import HOSTILE, browser, data_of, write_lines  # noqa: F401 (a fixture)

from reporting.__main__ import main
from reporting.runs import curves_of, differing, folders_below, metrics_to_show, names_of, runs_page, thinned

LOSS = {"loss": 3e-8, "logp_diff": 4e-7}


def a_run(folder, rewards, **settings):
    """A folder as a run leaves it, with a reward a step."""
    folder.mkdir(parents=True)
    lines = [
        {"step": i + 1, "reward": reward, "train_seconds": 60.0 * (i + 1), "skipped": None, **LOSS}
        for i, reward in enumerate(rewards)
    ]
    if lines:
        lines[0]["eval_accuracy_before"] = 0.25
        lines[-1] |= {"eval_accuracy": 0.5, "eval_questions": 4}
    write_lines(folder / "metrics.jsonl", lines)
    (folder / "run_config.yaml").write_text(yaml.safe_dump({"output_dir": str(folder), **settings}))
    return folder


@pytest.fixture
def reporting(monkeypatch, capsys):
    """Calls python -m reporting; returns its exit status and what it printed, notes last."""
    monkeypatch.setattr(
        "reporting.__main__.draw", lambda runs, folder: (folder / "curves.svg").write_text("<svg/>")
    )

    def call(*words):
        monkeypatch.setattr("sys.argv", ["reporting", *map(str, words)])
        status = 0
        try:
            main()
        except SystemExit as left:
            status = left.code
        said = capsys.readouterr()
        return status, said.out.splitlines(), said.err.splitlines()

    return call


@pytest.fixture
def four(tmp_path):
    """Two arms with two seeds each, one of them still going."""
    for arm, lam in (("grpo", 0.0), ("m3po", 0.1)):
        for seed in (0, 1):
            count = 3 if (arm, seed) == ("m3po", 1) else 4
            rewards = [lam + seed + i for i in range(count)]
            folder = a_run(
                tmp_path / "out" / arm / str(seed), rewards, m3po_lambda=lam, seed=seed, note=HOSTILE
            )
            (folder / "finished.json").write_text('{"step": 4}')
    (tmp_path / "out" / "m3po" / "1" / "finished.json").unlink()
    return tmp_path / "out"


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_of_runs_has_a_page_and_none_of_their_files_is_overwritten(four, reporting):
    """The curves of all runs took the place of the first one's own, on its page too."""
    for run in folders_below(four):
        (run / "curves.svg").write_text("its own")
    (four / "grpo" / "0" / "report.html").write_text("written after the last step")
    before = contents(four)
    status, printed, notes = reporting(four)
    assert (status, notes) == (0, [])
    assert printed[-1] == str(four / "runs.html")
    after = contents(four)
    assert {path: after[path] for path in before} == before
    new = {path.as_posix() for path in after.keys() - before.keys()}
    pages = {"grpo/1/report.html", "m3po/0/report.html", "m3po/1/report.html"}
    assert new == {"runs.html", "curves.svg", *pages}
    text = (four / "runs.html").read_text()
    data = data_of(text)
    assert text.count("<script") == 2
    assert [run["name"] for run in data["runs"]] == ["grpo/0", "grpo/1", "m3po/0", "m3po/1"]
    assert [run["page"] for run in data["runs"]] == [f"./{run['name']}/report.html" for run in data["runs"]]
    assert data["settings"] == ["m3po_lambda", "seed"], "what they share is not shown, nor their folders"
    assert data["groups"] == ["m3po_lambda"]
    assert [run["steps"] for run in data["runs"]] == [4, 4, 4, 3]
    assert [run["finished"] for run in data["runs"]] == [True, True, True, False]
    assert data["runs"][2]["curves"]["reward"] == [[1, 0.1], [2, 1.1], [3, 2.1], [4, 3.1]]
    assert data["runs"][0]["curves"]["eval_accuracy"] == [[0, 0.25], [4, 0.5]]
    assert list(data["metrics"]) == ["reward", "eval_accuracy", "eval_questions", "train_seconds"], (
        "no rounding errors"
    )


def test_several_runs_are_shown_where_they_all_are_or_in_out(four, reporting, tmp_path):
    runs = [four / "grpo" / "0", four / "m3po" / "1"]
    assert reporting(*runs)[1][-1] == str(four / "runs.html")
    status, printed, _ = reporting(*runs, "--out", tmp_path / "new" / "place")
    assert (status, printed[-1]) == (0, str(tmp_path / "new" / "place" / "runs.html"))
    [first, _] = data_of((tmp_path / "new" / "place" / "runs.html").read_text())["runs"]
    assert first["page"] == "./../../out/grpo/0/report.html"
    status, _, said = reporting(*runs, "--out", runs[0])
    assert status == 2
    assert "is a run's own folder, whose curves would be written over" in said[-1]
    (tmp_path / "file").touch()
    status, _, said = reporting(*runs, "--out", tmp_path / "file" / "x")
    assert status == 2
    assert "cannot be made (Not a directory)" in said[-1]


def test_a_run_that_was_changed_on_the_way_is_told_from_one_that_was_not(tmp_path):
    """Its settings are those of its end: the page showed no difference."""
    change = {"after_step": 2, "changed": {"learning_rate": [0.1, 0.2], "data": ["0a1b", "2c3d"]}}
    ways = ({}, {"changes": [change]})
    folders = [a_run(tmp_path / str(i), [1.0], learning_rate=0.2, **way) for i, way in enumerate(ways)]
    data = data_of(runs_page(folders, tmp_path, []))
    assert data["settings"] == data["groups"] == ["changes"]
    line = "Changed after step 2: the problems or their prompts, learning_rate 0.1 before, 0.2 since."
    assert [run["settings"]["changes"] for run in data["runs"]] == ["", line]


def test_runs_are_not_grouped_by_the_version_of_what_made_them(tmp_path):
    settings = ({"seed": 0, "commit": "a", "versions": {"torch": "2.11", "numpy": "2"}, "beta": 0.0},)
    settings += ({"seed": 0, "commit": "b", "versions": {"torch": "2.12", "numpy": "2"}, "beta": 0.1},)
    folders = [a_run(tmp_path / f"{i} #%?", [1.0], **of_run) for i, of_run in enumerate(settings)]
    (folders[0] / "report.html").touch()
    data = data_of(runs_page(folders, tmp_path, []))
    assert [run["page"] for run in data["runs"]] == ["./0%20%23%25%3F/report.html", None]
    assert data["settings"] == ["beta", "commit", "version of torch"]
    assert data["groups"] == ["beta"]


def test_the_page_of_a_run_that_goes_on_is_left_to_the_run(four, reporting):
    run = four / "m3po" / "1"
    (run / ".lock").touch()
    assert str(run / "report.html") not in reporting(four)[1]
    assert {path.name for path in run.iterdir()} == {".lock", "metrics.jsonl", "run_config.yaml"}
    os.utime(run / "metrics.jsonl", (0, 0))  # it was killed some time ago
    assert str(run / "report.html") in reporting(four)[1]


def test_one_run_gets_its_own_page_and_curves_again_and_no_other_file(four, reporting):
    run = four / "grpo" / "0"
    (run / "report.html").write_text("old")
    status, printed, notes = reporting(f"{run}/")
    assert (status, notes) == (0, [])
    curves = f"{run / 'curves.svg'}, {run / 'curves.png'}"
    assert printed == ["reading 1 run", curves, str(run / "report.html")]
    assert data_of((run / "report.html").read_text())["kind"] == "run"
    assert not list(four.rglob("runs.html"))


def test_what_is_wrong_with_a_run_is_one_line_and_the_others_are_shown(four, reporting, tmp_path):
    log = four / "grpo" / "0" / "metrics.jsonl"
    good = log.read_text().splitlines()
    log.write_text("\n".join([good[0], '{"step": 2, "rew', "7", *good[2:], '{"step": 5, "rewa']))
    a_run(four / "young", [])
    (four / "m3po" / "0" / "run_config.yaml").write_text("a: [\n")
    (four / "m3po" / "1" / "rollouts.jsonl").write_text('{"generation": 0}\n{"a": \n')
    status, printed, notes = reporting(four, four / "grpo")
    assert status == 0
    assert printed[-1] == str(four / "runs.html")
    assert f"note: {log}: 2 damaged lines are left out" in notes
    assert f"note: {four / 'young'}: has no finished step yet, and no curve" in notes
    assert len(notes) == len(set(notes)), "each is said once"
    assert sum(str(four / "m3po" / "0") in note and "settings are left out" in note for note in notes) == 1
    assert f"note: {four / 'm3po' / '1' / 'rollouts.jsonl'}: 1 damaged line is left out" in notes
    assert any(str(four / "m3po" / "1") in note and "its page cannot be made" in note for note in notes)
    data = data_of((four / "runs.html").read_text())
    assert [run["name"] for run in data["runs"]] == ["grpo/0", "grpo/1", "m3po/0", "m3po/1", "out/young"]
    assert [p[0] for p in data["runs"][0]["curves"]["reward"]] == [1, 3, 4]
    assert data["runs"][4]["curves"] == {}


def test_a_folder_without_runs_is_refused_in_one_line(reporting, tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "none"):
        status, _, [said] = reporting(tmp_path / name)
        assert status == 2
        assert f"{tmp_path / name} holds no metrics.jsonl: give a folder that" in said
    young = a_run(tmp_path / "young", [])
    status, _, [said] = reporting(young)
    assert status == 2
    assert f"{young} holds no finished step of a run: give a folder that" in said
    status, _, [said] = reporting(tmp_path, "--watch", "0.1")
    assert status == 2
    assert "--watch 0.1: must be from 1 to 86400 seconds" in said
    status, _, [said] = reporting(tmp_path, "--out", "a", "--out", "b")
    assert (status, said) == (2, "python -m reporting: --out is given 2 times: give one folder")
    for name in ("a" * 300, "a" * 300 + "/run", "长" * 100, "run/" * 2000):  # 300 bytes are too many
        for words in ((name,), (tmp_path, "--out", name)):
            status, _, [said] = reporting(*words)
            assert (status, f"a name of {len(name)} characters is no folder's" in said) == (2, True)
    assert not list((tmp_path / "empty").iterdir())


def test_an_evaluation_s_page_is_written_again(reporting, tmp_path):
    from test_evaluation_page import an_evaluation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reporting.evaluation.draw_evaluation", lambda *_: None)
        folder = an_evaluation(tmp_path / "e", [(1, 0)])
    (folder / "report.html").unlink()
    said = ["reading 1 evaluation", str(folder / "report.html")]
    assert reporting(folder) == (0, said, [])
    (folder / "report.html").unlink()
    assert reporting(tmp_path) == (0, said, []), "a folder of evaluations"
    assert data_of((folder / "report.html").read_text())["kind"] == "evaluation"
    (folder / "samples.jsonl").write_text('{"doc_id": "q0"}\n{"doc')
    status, printed, [note] = reporting(folder)
    assert (status, printed) == (1, said[:1])
    assert note.startswith(f"note: {folder}: its page cannot be made (JSONDecodeError")


def test_runs_of_one_name_are_told_apart(tmp_path):
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "b" / "x,y"]
    assert names_of(folders) == ["a/run", "b/run", "b/x,y"]
    assert names_of([tmp_path / "one"]) == ["one"]


def test_runs_are_looked_for_below_a_folder_but_not_within_runs(tmp_path):
    a_run(tmp_path / "b", [1.0])
    a_run(tmp_path / "b" / "warm_start", [1.0])
    a_run(tmp_path / "study" / "runs" / "0" / "arm", [1.0])
    a_run(tmp_path / ".hidden", [1.0])
    assert [path.relative_to(tmp_path).as_posix() for path in folders_below(tmp_path)] == ["b"]
    assert len(folders_below(tmp_path / "study")) == 1
    assert folders_below(tmp_path / "no such folder") == []


def test_a_long_curve_is_a_mean_over_steps_at_the_last_of_them():
    assert thinned([(0, 5.0), (1, 1.0), (2, 3.0), (3, 7.0)], 2) == [[0, 5.0], [2, 2.0], [3, 7.0]]
    lines = [{"step": 1, "x": 1.0, "flag": True, "word": "a"}, {"step": 1, "x": 2.0}, {"step": 2, "x": None}]
    assert curves_of(lines, 1) == {"x": [[1, 2.0]]}, "the last line of a step counts"


def test_a_metric_of_rounding_errors_is_not_shown_and_one_of_bf16_is():
    assert metrics_to_show([{"logp_diff": [[1, 3e-7]], "loss": [[1, -2e-8]], "truncated": [[1, 0.0]]}]) == [
        "truncated"
    ]
    assert metrics_to_show([{"logp_diff": [[1, 3e-7]]}, {"logp_diff": [[1, 8e-3]]}]) == ["logp_diff"]
    assert differing([{"a": 1, "b": [1]}, {"a": 1, "b": [2], "c": 3}, {"a": 1, "b": [1]}]) == ["b"]


def test_the_page_is_written_again_when_a_run_has_gone_on(four, reporting, monkeypatch):
    """--watch: a new line, a new run; Ctrl-C ends it, and the page that stays opens itself no longer."""
    seen = []

    def sleep(seconds):
        seen.append([run["steps"] for run in data_of((four / "runs.html").read_text())["runs"]])
        if len(seen) == 3:
            raise KeyboardInterrupt
        if len(seen) == 1:
            with open(four / "m3po" / "1" / "metrics.jsonl", "a") as log:
                log.write('{"step": 4, "reward": 9.0}\n')
        else:
            a_run(four / "m3po" / "2", [1.0])

    # of this module alone: threads that other tests left sleep, too
    monkeypatch.setattr("reporting.__main__.time", SimpleNamespace(sleep=sleep, time=time.time))
    status, printed, _ = reporting(four, "--watch", "7")
    assert status == 0
    assert seen == [[4, 4, 4, 3], [4, 4, 4, 4], [4, 4, 4, 4, 1]]
    assert printed[-1] == f"stopped watching; {four / 'runs.html'} stays as it is"
    assert data_of((four / "runs.html").read_text())["reload"] is None


def test_curves_are_picked_grouped_hovered_and_hidden(four, reporting, browser):  # noqa: F811
    config = four / "grpo" / "0" / "run_config.yaml"
    config.write_text(config.read_text().replace("m3po_lambda: 0.0", "m3po_lambda: 0.0\nname: <b>x</b>"))
    reporting(four)
    tab, said = browser.new_page(viewport={"width": 500, "height": 800}), []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.goto((four / "runs.html").as_uri())
    assert tab.locator("#table a").first.get_attribute("href") == "./grpo/0/report.html"
    assert tab.locator("#table b").count() == 0
    tab.select_option("#group", "m3po_lambda")
    names = tab.locator("#legend button").all_inner_texts()
    assert names == ["3.5 (3 to 4, 2 runs): m3po_lambda 0.0", "3.1 (3.1 to 3.1, 2 runs): m3po_lambda 0.1"]
    tab.locator("#chart").focus()
    for _ in range(4):
        tab.keyboard.press("ArrowRight")
    tip = tab.locator("#tip").inner_text()
    assert tip.split("\n")[:3] == ["step 4", "3.5 (3 to 4)", "m3po_lambda 0.0"]
    assert "2.6 (2.1 to 3.1), at step 3\nm3po_lambda 0.1" in tip, "the mean is of steps that all of them have"
    tab.keyboard.press("ArrowLeft")
    assert tab.locator("#tip").inner_text().startswith("step 3\n2.6 (2.1 to 3.1)\nm3po_lambda 0.1")
    tab.locator("#legend button").first.click()
    assert tab.locator("#chart path").count() == 4, "a band, two runs and their mean"
    tab.keyboard.press("n")
    assert tab.locator("#metric").input_value() == "eval_accuracy"
    tab.reload()
    assert tab.locator("#metric").input_value() == "eval_accuracy", "what was chosen stays"
    assert tab.locator("#group").input_value() == "m3po_lambda"
    assert tab.evaluate("document.documentElement.scrollWidth") == 500
    assert said == []
    tab.close()

"""Evaluating a saved model: records, reports, and going on after a kill."""

import datetime
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_sft_train import encoded

import grpo_eval
from decoding.rollout import Completion, Sampling
from errors import DataError, SettingError
from reporting import evaluation
from reporting.evaluation import skipped_record, summarise, told
from reporting.statistics import over_questions
from rewards import math_equal
from running.folder import save_model
from small_models import build_model
from solver import load_solver


def record(strict, flexible):
    """The record of a question with one answer."""
    answer = {"resps": ["x"], "length": [5], "stop_condition": ["eos"], "reward": [1.0]}
    scores = {"strict-match": [strict], "flexible-extract": [flexible]}
    return answer | {"exact_match": scores, "filtered_resps": {"strict-match": ["1"]}}


def test_the_summary_counts_skipped_questions_as_wrong():
    records = [record(1.0, 1.0), record(0.0, 1.0), record(1.0, 1.0)]
    report = summarise(records, skipped=1)
    assert report["questions"] == 4
    assert report["accuracy"] == 0.5
    assert report["accuracy_last_number"] == 0.75


def with_samples(scores, answers, **more):
    """The record of a question with several answers."""
    samples = len(scores)
    answer = {"resps": ["x"] * samples, "length": [5] * samples, "stop_condition": ["eos"] * samples}
    graded = {"exact_match": {"strict-match": scores, "flexible-extract": scores}}
    return answer | graded | {"reward": [1.0] * samples, "filtered_resps": {"strict-match": answers}} | more


def test_skipped_questions_count_in_every_number():
    """Accuracy said 0.75 where pass@k, maj@k, mean@k and the groups said 1."""
    right = with_samples([1.0] * 4, ["1"] * 4, level="1")
    report = summarise([right] * 3, skipped=1)
    names = "accuracy accuracy_last_number pass@1 pass@2 pass@4 maj@2 maj@4 mean@4".split()
    values = [report[name] if "@" not in name else report[name][0] for name in names]
    assert values == [0.75] * 8
    ours = {**right, **skipped_record(4), "level": "1"}
    report = summarise([right, right, right, ours])
    assert (report["skipped"], report["accuracy_by_level"]["1"]["accuracy"]) == (1, 0.75)
    assert (report["parsable"], report["mean_length"]) == (1.0, 5.0), "of the answers that there are"


def test_undecided_answers_are_counted_and_not_right_in_any_number():
    report = summarise([with_samples([1.0, None], ["1", "x"]), with_samples([None, None], ["x", "x"])])
    assert (report["undecided"], report["accuracy"], report["pass@2"][0]) == (3, 0.25, 0.5)
    assert report["mean@2"][0] == 0.25
    assert summarise([with_samples([1.0], ["1"])])["undecided"] == 0


def test_people_get_a_table(tmp_path):
    report = summarise([with_samples([1.0, 0.0], ["1", "2"])] * 30 + [with_samples([None] * 2, ["x"] * 2)], 1)
    lines = told(report | {"seconds": 2.0}, tmp_path)
    rows = {line.split("  ")[0]: line.split()[-6:] for line in lines}
    for name, key in (
        ("accuracy", "accuracy"),
        ("pass@2", "pass@2"),
        ("maj@2", "maj@2"),
        ("mean@2", "mean@2"),
    ):
        value, low, high = report[key] if "@" in key else (report[key], *report[f"{key}_ci95"])
        assert f"{value:.3f} {low:.3f} to {high:.3f}".split() == rows[name][-4:], name
    assert "skipped 1 of 32 questions" in [" ".join(line.split()) for line in lines]
    assert "undecided 2 of 64 answers" in [" ".join(line.split()) for line in lines]
    assert not any(line.startswith("{") for line in lines)


@pytest.mark.parametrize(("stop", "advised"), [("eos", False), ("length", True)])
def test_where_many_answers_are_cut_off_the_limit_is_named(tmp_path, stop, advised):
    report = summarise([with_samples([0.0], ["x"], stop_condition=[stop])] * 3) | {"seconds": 2.0}
    assert ("--max_completion_length is short" in " ".join(told(report, tmp_path))) == advised


def test_two_kinds_of_paths_stand_side_by_side_in_the_table(tmp_path):
    report = summarise([with_samples([1.0, 0.0], ["1", "2"])] * 3) | {"seconds": 2.0}
    pair = {"accuracy_a": 0.5, "accuracy_b": 1.0, "difference": 0.5, "difference_ci95": [0.1, 0.9]}
    both = summarise([with_samples([1.0, 1.0], ["1", "1"])] * 3) | {"against_single_paths": pair}
    lines = told(report | {"m3po": both}, tmp_path)
    assert any(line.split()[:1] == ["mean@2"] and " 0.500 " in line and " 1.000 " in line for line in lines)


@pytest.mark.parametrize(("is_terminal", "asked", "printed"), [(1, 0, 0), (1, 1, 1), (0, 0, 1), (0, 1, 1)])
def test_the_json_line_is_for_pipes_and_for_those_who_ask(is_terminal, asked, printed, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: bool(is_terminal), raising=False)
    grpo_eval.print_json({"a": 1}, grpo_eval.Config(model="m", json=bool(asked)))
    assert capsys.readouterr().out == ('{"a": 1}\n' if printed else "")


@pytest.mark.usefixtures("undrawn")
def test_votes_are_by_meaning_where_grading_is(saved, monkeypatch):
    given = []
    monkeypatch.setattr(
        grpo_eval, "summarise", lambda *records, equal: given.append(equal) or summarise(*records)
    )
    for grading in ("math", "number"):
        evaluate(saved, grading, grading=grading)
    assert given == [math_equal, None]


def test_a_report_says_what_a_model_was_trained_with_as_far_as_seeds_are_pairs(tmp_path):
    assert grpo_eval.trained_with(str(tmp_path)) == {}, "nobody knows"
    settings = "seed: 3\nmodel: m\nwarm_start: none\nm3po_lambda: 0.1\nbatch_size: 7\nnum_generations: 4\n"
    (tmp_path / "run_config.yaml").write_text(settings)
    trained = grpo_eval.trained_with(str(tmp_path))["trained"]
    assert (trained["seed"], trained["model"], trained["batch_size"]) == (3, "m", 7)
    (tmp_path / "run_config.yaml").write_text(settings.replace("0.1", "0").replace("seed: 3", "seed: 4"))
    assert grpo_eval.trained_with(str(tmp_path))["trained"] == trained | {"seed": 4}, "the method may differ"


def test_accuracy_by_any_column_of_the_data(tokenizer, tmp_path):
    save_model(build_model("llama", tokenizer), tokenizer, tmp_path / "model", torch.float32)
    rows = [
        {"question": "pens " * n, "answer": str(n), "operation": "plus" if n % 2 else "minus", "digits": n}
        for n in range(1, 7)
    ]
    write_rows(tmp_path / "test.jsonl", rows)
    flags = dict(
        model=str(tmp_path / "model"),
        dataset=str(tmp_path),
        output_dir=str(tmp_path),
        max_completion_length=4,
    )
    report, folder = grpo_eval.evaluate(grpo_eval.Config(name="e", by=["operation", "digits"], **flags))
    assert {name: group["questions"] for name, group in report["accuracy_by_operation"].items()} == {
        "minus": 3,
        "plus": 3,
    }
    assert len(report["accuracy_by_digits"]) == 6
    words = [line.split() for line in told(report, folder)]
    assert ["operation", "minus", "(3)", "0.000", "0.000", "to", "0.708"] in words, "the table left --by out"
    assert (folder / "curves.png").exists()
    with pytest.raises(SettingError, match="no such column.*there are: digits, operation"):
        grpo_eval.evaluate(grpo_eval.Config(name="f", by=["topic"], **flags))


def test_the_exact_interval_by_its_definition():
    """At its low end 5 of 20 or more are right in 2.5% of all cases, at its high end 5 or fewer."""
    n, k = 20, 5
    _, low, high = over_questions([1] * k + [0] * (n - k))

    def chance(p, counts):
        return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in counts)

    assert chance(low, range(k, n + 1)) == pytest.approx(0.025, abs=1e-4)
    assert chance(high, range(k + 1)) == pytest.approx(0.025, abs=1e-4)


def test_a_bootstrap_over_questions_has_the_width_of_their_spread():
    """Four answers a question are not four questions: 100 that are wholly right or wrong are 100 draws."""
    scores = [0.0, 0.25, 0.5, 1.0] * 50
    _, low, high = over_questions(scores)
    mean, error = sum(scores) / 200, (sum((s - sum(scores) / 200) ** 2 for s in scores) / 200 / 200) ** 0.5
    assert [low, high] == pytest.approx(
        [mean - 1.96 * error, mean + 1.96 * error], abs=0.004
    )  # a 90% interval is 0.008 nearer on either side


def test_one_question_answered_in_part_tells_nothing_of_the_spread():
    assert over_questions([0.5])[1:] == [0.0, 1.0]


def test_records_are_graded_strictly_and_by_the_last_number(tokenizer):
    problem = encoded(tokenizer, "q", "17", "")
    texts = ["<answer>17</answer>", "it is 17", "<answer>1</answer> 17", ""]
    completions = [Completion(tokenizer(t)["input_ids"] + [tokenizer.eos_token_id], t, True) for t in texts]
    [r] = grpo_eval.grade([problem], [grpo_eval.answers_of(completions)], "xml")
    assert r["length"] == [len(c.ids) for c in completions]
    assert r["resps"] == texts
    assert r["exact_match"] == {
        "strict-match": [1.0, 0.0, 0.0, 0.0],
        "flexible-extract": [1.0, 1.0, 1.0, 0.0],
    }


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def saved(tokenizer, tmp_path):
    save_model(build_model("llama", tokenizer), tokenizer, tmp_path / "model", torch.float32)
    (tmp_path / "d").mkdir()
    rows = [{"question": "pens " * n, "answer": str(n)} for n in (1, 2, 3, 300)]
    write_rows(tmp_path / "d" / "test.jsonl", rows)
    return tmp_path


def evaluate(saved, name, **kwargs):
    settings = dict(
        model=str(saved / "model"),
        dataset=str(saved / "d"),
        output_dir=str(saved / "runs"),
        max_completion_length=12,
        max_prompt_length=200,
    )
    return grpo_eval.evaluate(grpo_eval.Config(**settings, name=name, **kwargs))


@pytest.mark.usefixtures("undrawn")
def test_questions_that_were_trained_on_are_counted_whatever_their_file_is_called(saved, capsys):
    """A copy of the training data was taken for new questions; those held out of it were never trained on."""
    rows = [{"question": f"{n} pens", "answer": str(n)} for n in range(6)]
    write_rows(saved / "train.jsonl", rows)
    trained = {"dataset": str(saved / "train.jsonl"), "split": "train", "eval_problems": 2}
    (saved / "model" / "run_config.yaml").write_text(json.dumps(trained))
    write_rows(saved / "d" / "test.jsonl", [*rows, {"question": "7 pens", "answer": "7"}])
    evaluate(saved, "a")
    told = "note: 4 of 7 questions are among those that the model was trained on"
    assert f"{told} ({saved}/train.jsonl, split train)" in capsys.readouterr().out
    (saved / "train.jsonl").unlink()
    evaluate(saved, "b")
    assert "trained on" not in capsys.readouterr().out


@pytest.mark.parametrize("m3po", [False, True])
def test_answers_from_logits_that_are_not_finite_are_refused_and_in_a_run_told(
    m3po, saved, tokenizer, monkeypatch
):
    """Weights that no token of the self-test reads were damaged, or a prompt passed fp16's range: the answers
    were empty, counted as wrong, and nothing was said.
    """
    path, [unread] = saved / "model" / "model.safetensors", tokenizer("Z", add_special_tokens=False).input_ids
    weights = load_file(path)
    weights["model.embed_tokens.weight"][unread, 0] = math.inf
    save_file(weights, path, metadata={"format": "pt"})
    how = dict(m3po=m3po, num_samples=2, temperature=1.0)
    evaluate(saved, "a", **how)
    write_rows(saved / "d" / "test.jsonl", [{"question": f"{end} pens", "answer": "1"} for end in "YZ"])
    if m3po:  # single paths are asked first, and say so, too
        monkeypatch.setattr(
            grpo_eval.LocalModel, "ask", lambda asked, indices, keep: [keep(i, []) for i in indices]
        )
    with pytest.raises(
        SettingError, match="model=.*gives logits that are not finite: its weights are damaged"
    ):
        evaluate(saved, "b", **how)
    decoder = load_solver(str(saved / "model")).decoder
    with pytest.warns(UserWarning, match="not finite: .* damaged; some answers are not what the model says"):
        decoder.complete([[unread]], Sampling(4))


@pytest.mark.usefixtures("undrawn")
def test_an_evaluation_writes_its_report_and_every_completion(saved):
    report, folder = evaluate(saved, "a", num_samples=3, temperature=0.7)
    assert report["questions"] == 4
    assert report["skipped"] == 1
    assert json.loads((folder / "report.json").read_text()) == report
    records = rows_of(folder / "samples.jsonl")
    assert [len(r["resps"]) for r in records] == [3, 3, 3, 3]
    assert [r["skipped"] for r in records] == [False, False, False, True]
    assert (records[3]["target"], records[3]["exact_match"]["strict-match"]) == ("300", [0.0] * 3)
    names = "doc_id prompt_hash prompt target resps filtered_resps exact_match reward"
    assert set(names.split()) <= set(records[0])
    _, again = evaluate(saved, "b", num_samples=3, temperature=0.7, batch_size=3)
    _, other = evaluate(saved, "c", num_samples=3, temperature=0.7, seed=1)
    samples, same, others = (
        [row["resps"] for row in rows_of(f / "samples.jsonl")] for f in (folder, again, other)
    )
    assert samples == same != others


@pytest.mark.usefixtures("undrawn")
def test_an_evaluation_is_never_overwritten(saved):
    evaluate(saved, "a")
    with pytest.raises(SettingError, match="holds an evaluation already"):
        evaluate(saved, "a")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("m3po_temperature", 0.0),
        ("m3po_lambda", 5.0),
        ("temperature", math.inf),
        ("api_timeout", math.inf),
        ("save_jsonl", "/nowhere/answers.jsonl"),
    ],
)
def test_settings_that_gave_noise_or_a_traceback_at_the_end_are_refused(name, value):
    """The first three were answered with, in silence; the last lost all answers when it came to writing."""
    with pytest.raises(SettingError, match=f"^{name}="):
        grpo_eval.Config(model="m", **{"questions": "q.txt", name: value})


def test_several_greedy_answers_are_refused():
    with pytest.raises(SettingError, match="--temperature 1"):
        grpo_eval.Config(model="m", num_samples=4)


@pytest.mark.usefixtures("undrawn")
def test_paths_that_interact_are_evaluated_beside_single_ones(saved):
    settings = dict(
        model=str(saved / "model"),
        dataset=str(saved / "d"),
        num_samples=4,
        temperature=1.0,
        m3po=True,
        max_completion_length=16,
    )
    settings |= dict(output_dir=str(saved / "runs"), max_prompt_length=200)
    report, folder = grpo_eval.evaluate(grpo_eval.Config(**settings, m3po_lambda=0.5, name="together"))
    rows = [row["resps"] for row in rows_of(folder / "samples.jsonl")]
    together = [row["resps"] for row in rows_of(folder / "samples_m3po.jsonl")]
    assert report["m3po"]["against_single_paths"]["questions"] == len(together) == 4, "one is too long to ask"
    assert rows != together
    assert '"sides":["single paths","interacting"]' in (folder / "report.html").read_text()
    _, other = grpo_eval.evaluate(grpo_eval.Config(**settings, m3po_lambda=0.0, name="alone"))
    unblended = [row["resps"] for row in rows_of(other / "samples_m3po.jsonl")]
    assert unblended == rows, "the same draws"
    with pytest.raises(SettingError, match="paths need each other"):
        grpo_eval.Config(model=str(saved / "model"), m3po=True)
    (saved / "model" / "run_config.yaml").write_text("m3po_lambda: 0.0\n")
    with pytest.raises(
        SettingError, match="m3po=True: the model was trained with m3po_lambda=0, at which paths h"
    ):
        grpo_eval.Config(model=str(saved / "model"), m3po=True, num_samples=4, temperature=1.0)


@pytest.mark.usefixtures("undrawn")
def test_reference_answers_that_nothing_can_match_are_counted(saved, capsys):
    """A training said so; an evaluation counted every answer as wrong."""
    rows = [{"question": f"{answer} pens", "answer": answer} for answer in ("1", "2\n3", "...")]
    write_rows(saved / "d" / "test.jsonl", rows)
    evaluate(saved, "a")
    told = "note: 1 of 3 reference answers can never be right in answer_format=xml, such as '...'"
    assert told in capsys.readouterr().out


@pytest.mark.slow
def test_an_evaluation_draws_what_it_has_and_a_comparison_says_where_it_is_drawn(saved, monkeypatch, capsys):
    rows = [{"question": f"{n} pens", "answer": str(n), "level": f"Level {n % 2}"} for n in range(6)]
    write_rows(saved / "d" / "test.jsonl", rows)
    folders = [evaluate(saved, "a")[1], evaluate(saved, "b", num_samples=4, temperature=1.0)[1]]
    alone, sampled = ((folder / "curves.svg").read_text() for folder in folders)
    for words in ("accuracy", "by level"):
        assert words in alone
        assert words in sampled
    assert "by subject" not in alone + sampled
    assert "maj@k" in sampled
    assert "maj@k" not in alone
    assert (folders[0] / "curves.png").read_bytes().startswith(b"\x89PNG")
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "draw_evaluation", lambda *_: None)
        folders[1] = evaluate(saved, "c")[1]
    words = f"grpo_eval.py --compare {folders[0]} {folders[1]} --output_dir"
    monkeypatch.setattr(sys, "argv", [*words.split(), str(saved / "pictures")])
    grpo_eval.main()
    assert (saved / "pictures" / "compare.svg").exists()
    assert "<title>a | c</title>" in (saved / "pictures" / "compare.html").read_text()
    *_, kept, where, last = capsys.readouterr().out.splitlines()
    assert kept == f"kept in {saved / 'pictures' / 'compare'}.json"
    assert json.loads((saved / "pictures" / "compare.json").read_text()) == json.loads(last)
    grpo_eval.main()
    assert (saved / "pictures" / "compare-2.svg").exists(), "beside the first, which stays"
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [*words.split(), str(saved / "pictures"), "--name", "compare"])
    with pytest.raises(SettingError, match="name='compare'.*holds a comparison of that name"):
        grpo_eval.main()
    assert where == f"drawn in {saved / 'pictures' / 'compare'}.svg and .png"
    assert json.loads(last)[0]["difference"] == 0.0
    (saved / "file").touch()
    monkeypatch.setattr(sys, "argv", [*words.split(), str(saved / "file" / "pictures")])
    with pytest.raises(SettingError, match=r"output_dir.*cannot be made \(Not a directory\)"):
        grpo_eval.main()
    monkeypatch.setattr(evaluation, "draw_evaluation", None)
    with pytest.warns(UserWarning, match="no picture: TypeError"):
        evaluate(saved, "d")
    assert (saved / "runs" / "d" / "report.json").exists(), (
        "an evaluation does not fail for want of a picture"
    )


@pytest.fixture
def many(saved):
    """Thirty questions of different lengths."""
    rows = [{"question": "pens " * (1 + n % 7) + str(n), "answer": str(n)} for n in range(30)]
    write_rows(saved / "d" / "test.jsonl", rows)
    return saved


def texts_of(folder):
    return {path.name: path.read_text() for path in folder.glob("samples*.jsonl")}


def cut_off(monkeypatch, after, run):
    """Run until `after` questions have ended."""
    ended, real = [], grpo_eval.answers_of

    def dies(*args):
        ended.append(args)
        if len(ended) > after:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(grpo_eval, "answers_of", dies)
        with pytest.raises(KeyboardInterrupt):
            run()


SAMPLED = dict(num_samples=3, temperature=0.8)


@pytest.mark.parametrize(
    ("settings", "after"),
    [
        ({}, (11, 7)),
        pytest.param(SAMPLED, (11, 7), marks=pytest.mark.slow),
        pytest.param(dict(SAMPLED, m3po=True, m3po_lambda=0.5), (20, 21), marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_an_evaluation_that_was_cut_off_goes_on_to_the_same_numbers(
    many, monkeypatch, capsys, settings, after
):
    """Cut off twice, the second time after going on; the last one while paths interact where they do."""
    settings = dict(settings, batch_size=6)
    whole, left_alone = evaluate(many, "whole", **settings)
    for count in after:
        cut_off(monkeypatch, count, lambda: evaluate(many, "cut", **settings))
        folder = many / "runs" / "cut"
        with open(folder / "answers-0.jsonl", "a") as file:
            file.write('{"question": 29, "prompt_ha')
        assert not (folder / "report.json").exists()
    capsys.readouterr()
    report, folder = evaluate(many, "cut", **settings)
    assert f"{folder}: {min(30, sum(after))} of 30 questions answered already" in capsys.readouterr().out
    assert {**report, "seconds": 0} == {**whole, "seconds": 0}
    assert texts_of(folder) == texts_of(left_alone)
    assert {path.name for path in folder.iterdir()} == {path.name for path in left_alone.iterdir()}, (
        "what was kept is gone"
    )


@pytest.mark.usefixtures("undrawn")
def test_going_on_with_other_settings_questions_or_weights_is_refused(many, monkeypatch, tokenizer):
    cut_off(monkeypatch, 5, lambda: evaluate(many, "cut"))
    kind = r"unfinished evaluation of another kind \(temperature 0\.0 there, 0\.5 here\)"
    with pytest.raises(SettingError, match=f"{kind}: give another --name"):
        evaluate(many, "cut", temperature=0.5)
    rows = (many / "d" / "test.jsonl").read_text()
    (many / "d" / "test.jsonl").write_text(rows.replace("pens", "Pens"))
    with pytest.raises(SettingError, match="answers other questions or prompts: give another --name"):
        evaluate(many, "cut")
    (many / "d" / "test.jsonl").write_text(rows)
    save_model(build_model("llama", tokenizer, seed=1), tokenizer, many / "model", torch.float32)
    with pytest.raises(SettingError, match=r"another kind \(answerer '"):
        evaluate(many, "cut")
    save_model(build_model("llama", tokenizer), tokenizer, many / "model", torch.float32)
    assert evaluate(many, "cut", batch_size=2)[0]["questions"] == 30, "how it is decoded may change"


@pytest.mark.slow
def test_two_processes_killed_and_gone_on_with_by_one_give_the_same_numbers(many):
    rows = [{"question": f"{n} pens", "answer": str(n)} for n in range(200)]
    write_rows(many / "d" / "test.jsonl", rows)
    flags = dict(
        model=many / "model",
        dataset=many / "d",
        output_dir=many / "runs",
        name="cut",
        max_completion_length=60,
        temperature=1.0,
        batch_size=2,
    )
    words = [sys.executable, "grpo_eval.py", *(f"--{k}={v}" for k, v in flags.items()), "--num_processes=2"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        words,
        cwd=Path(grpo_eval.__file__).parent,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    files = [many / "runs" / "cut" / f"answers-{rank}.jsonl" for rank in range(2)]
    while not all(file.exists() and file.read_text().count("\n") > 3 for file in files):
        assert run.poll() is None, run.stdout.read()
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    run.communicate(timeout=60)
    time.sleep(1)  # its processes end with it
    there = sum(file.read_text().count("\n") for file in files)
    assert 8 <= there < 200
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in flags.items()}
    report, folder = grpo_eval.evaluate(grpo_eval.Config(**settings))
    whole, left_alone = grpo_eval.evaluate(grpo_eval.Config(**settings | dict(name="whole", batch_size=64)))
    assert texts_of(folder) == texts_of(left_alone)
    assert {**report, "seconds": 0} == {**whole, "seconds": 0}


def test_columns_of_dates_decimals_and_bytes_do_not_end_an_evaluation_that_is_paid_for(
    saved, tokenizer, undrawn, tmp_path
):
    """`--by` wrote them as JSON when all questions were answered, and ended in a traceback."""
    rows = {
        "question": ["Ann has 12 pens."] * 2,
        "answer": ["12"] * 2,
        "day": [datetime.date(2024, 1, 1), datetime.date(2024, 1, 2)],
        "price": [Decimal("1.50"), None],
        "raw": [b"ab", b"cd"],
        "tags": [["a"], []],
    }
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "test.parquet")
    config = grpo_eval.Config(
        model=str(saved / "model"),
        dataset=str(tmp_path),
        by=["day", "price", "raw", "tags"],
        max_completion_length=4,
        output_dir=str(tmp_path / "eval"),
    )
    report, folder = grpo_eval.evaluate(config)
    assert set(report["accuracy_by_day"]) == {"2024-01-01", "2024-01-02"}
    assert set(report["accuracy_by_price"]) == {"1.50", "none"}
    written = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert written[0]["by"]["raw"] == "b'ab'"


def test_two_evaluations_of_one_second_have_folders_of_their_own(monkeypatch):
    monkeypatch.setattr("time.strftime", lambda _: "20260101-000000")
    config = SimpleNamespace(dataset="d", split="test", name=None, output_dir="eval_runs")
    assert grpo_eval.new_folder(config, "m") != grpo_eval.new_folder(config, "m")


@pytest.mark.parametrize(
    ("columns", "given", "expected"),
    [
        (("q", "ans"), {}, "by q"),
        (("question", "ans"), {}, "by question"),
        (("q", "answer"), {}, "by q"),
        (("question", "answer"), {}, "by question"),
        (("question", "answer"), {"question_column": "q"}, None),
    ],
)
def test_the_columns_of_the_training_data_are_read_in_other_data_where_it_has_them(
    columns, given, expected, tmp_path
):
    """`--dataset OTHER` was refused for a column that only the training data had."""
    (tmp_path / "run_config.yaml").write_text("dataset: gsm8k\nquestion_column: q\nanswer_column: ans\n")
    write_rows(tmp_path / "test.jsonl", [{columns[0]: f"by {columns[0]}", columns[1]: "1"}])
    config = grpo_eval.Config(model=str(tmp_path), dataset=str(tmp_path), **given)
    if expected:
        assert [p.question for p in grpo_eval.read_problems(config)] == [expected]
    else:
        with pytest.raises(DataError, match="has no column 'q' for the question"):
            grpo_eval.read_problems(config)
    arithmetic = grpo_eval.Config(model=str(tmp_path), dataset="arithmetic", limit=1)
    assert len(grpo_eval.read_problems(arithmetic)) == 1


@pytest.mark.parametrize("given", [{}, {"ask": "What is 1 + 1?"}])
def test_before_anything_is_trained_the_default_model_is_told_to_be_trained(given, tmp_path, monkeypatch):
    """It was looked for on the hub, and the line ended within an address."""
    monkeypatch.chdir(tmp_path)
    config = grpo_eval.Config(dataset="arithmetic", **given)
    with pytest.raises(SettingError, match=r"is not here yet: train it with python grpo_train\.py, or give"):
        grpo_eval.answer(config) if given else grpo_eval.evaluate(config)


@pytest.mark.usefixtures("undrawn")
def test_two_evaluations_of_one_name_at_once_are_refused(many, monkeypatch):
    """Each went on from the other's answers, and deleted them under it."""
    folder = many / "runs" / "one"
    folder.mkdir(parents=True)
    with open(folder / ".lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SettingError, match="name='one': another run is writing there"):
            evaluate(many, "one")
    assert {path.name for path in evaluate(many, "one")[1].iterdir()} == {
        "run_config.yaml",
        "report.json",
        "report.html",
        "samples.jsonl",
    }
    monkeypatch.setattr(grpo_eval, "new_folder", lambda *args: folder)  # as if it had begun before
    with pytest.raises(SettingError, match="holds an evaluation already"):
        evaluate(many, "one")

"""A trained model as a solver."""

import json
import shutil
import warnings
from dataclasses import replace

import pytest
import yaml

import grpo_eval
import grpo_train
from decoding.rollout import Completion
from errors import DataError, SettingError
from running.parsing import parse_config
from sft_train import warm_start_settings
from small_recipes import config_of
from solver import load_solver, read_questions, readable, solve


def test_a_solver_answers_one_question_and_many(recipe_run, tmp_path, capsys):
    solver = load_solver(str(recipe_run))
    one, many = solve("What is 3 halves?", solver), solve(["What is 3 halves?", "What is 4 halves?"], solver)
    assert one == many[0]
    assert one.completion
    assert readable(one).endswith(f"Answer: {one.answer or 'none in the format'}") or not one.finished
    questions = tmp_path / "questions.txt"
    questions.write_text("What is 3 halves?\n\nWhat is 4 halves?\n")
    from_file = f"--model {recipe_run} --questions {questions}"
    for flags in (from_file, f"{from_file} --save_jsonl {tmp_path / 'out.jsonl'}"):
        grpo_eval.answer(parse_config(grpo_eval.Config, flags.split()))
    ask = ["--model", str(recipe_run), "--ask", "What is 3 halves?"]
    grpo_eval.answer(parse_config(grpo_eval.Config, ask))
    printed = capsys.readouterr().out
    assert printed.count("Answer: ") == 3
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(r["prompt"], r["response"]) for r in rows] == [(s.question, s.completion) for s in many]
    with pytest.raises(SettingError, match="goes with --questions"):
        parse_config(grpo_eval.Config, [*"--save_jsonl x".split()])


def test_a_solver_whose_system_prompt_is_gone_says_so(recipe_run, tmp_path):
    """It asked with the format's own words, which the model was not trained on, and said nothing."""
    shutil.copytree(recipe_run, tmp_path / "model")
    settings = yaml.safe_load((tmp_path / "model" / "run_config.yaml").read_text())
    (tmp_path / "model" / "run_config.yaml").write_text(
        yaml.safe_dump(settings | {"system_prompt_file": "gone.txt"})
    )
    with pytest.raises(SettingError, match=r"system_prompt_file='gone.txt': cannot be read"):
        load_solver(str(tmp_path / "model"))


def test_a_system_prompt_s_text_is_saved_with_the_run_whatever_becomes_of_its_file(recipe_start, tmp_path):
    """A changed file changed the prompts of a model that was trained long ago."""
    file = tmp_path / "words.txt"
    file.write_text("Think up to </reasoning>, then <answer>.")
    config = config_of("oneshot", recipe_start, tmp_path / "out", grpo_train, system_prompt_file=str(file))
    out = str(grpo_train.train(replace(config, num_steps=1, eval_every=0)).folder)
    saved = file.read_text()
    file.write_text("Other words, </reasoning>.")
    asked = dict(model=out, dataset=str(recipe_start))
    assert load_solver(out).prompting.system_prompt == grpo_eval.Config(**asked).system_prompt == saved
    given = grpo_eval.Config(**asked, system_prompt_file=str(file))
    assert given.system_prompt == "Other words, </reasoning>.", "a file that is given wins"
    with pytest.raises(SettingError, match="says something else than system_prompt"):
        replace(config, system_prompt=saved)
    (tmp_path / "sft.yaml").write_text("num_steps: 1\nnum_epochs: null\n")
    config = replace(
        config, system_prompt_file=None, system_prompt=saved, warm_start=str(tmp_path / "sft.yaml")
    )
    assert warm_start_settings(config).system_prompt == saved
    (tmp_path / "own.yaml").write_text(f"system_prompt_file: {file}\n")
    own = replace(config, warm_start=str(tmp_path / "own.yaml"))
    assert warm_start_settings(own).system_prompt == "Other words, </reasoning>.", "its own file wins"
    file.unlink()
    assert load_solver(out).prompting.system_prompt == grpo_eval.Config(**asked).system_prompt == saved
    assert replace(config, system_prompt_file=str(file)).system_prompt == saved


def test_a_question_past_the_model_s_positions_is_refused(recipe_run):
    """It was answered with what a model says where it has never been."""
    with pytest.raises(SettingError, match="it passes the model's 512 positions"):
        solve("pens " * 600, load_solver(str(recipe_run)))


def test_a_solution_is_told_apart_into_reasoning_and_answer(recipe_run, monkeypatch):
    solver = load_solver(str(recipe_run))
    made = Completion([], "<reasoning>\n3*4\n</reasoning>\n<answer>\n12\n</answer>", ended=False)
    monkeypatch.setattr(solver.decoder, "complete", lambda *args, **kwargs: [[made]])
    found = solve("What is 3*4?", solver)
    assert (found.reasoning, found.answer, found.finished) == ("3*4", "12", False)
    assert readable(found) == "3*4\n\nAnswer: 12"


CHAT = [
    {"role": "system", "content": "Be short, </reasoning>."},
    {"role": "user", "content": "What is 3 halves?"},
]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("q.txt", "\ufeffOne\u2028and a half\r\n\r\nTwo\n", ["One\u2028and a half", "Two"]),
        (
            "q.jsonl",
            '\ufeff{"question": "One\u2028and a half"}\n\n{"prompt": "Two"}\n',
            ["One\u2028and a half", "Two"],
        ),
        ("q.csv", "id,problem\n1,One\n2,Two\n", ["One", "Two"]),
        ("q.json", '[{"question": "One"}, {"question": 2}]', ["One", "2"]),
    ],
)
def test_a_file_of_questions_is_read_as_data_is(name, text, expected, tmp_path):
    """A line with U+2028 became two questions, a BOM was asked, and so was the header of a CSV."""
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    assert [problem.question for problem in read_questions(tmp_path / name)] == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"query": "a", "answer": 1}', r"question or .* \(columns: query, answer\)"),
        ('["a"]', "has no question in a column question or"),
        ('{"question": " "}', r"question or .* \(columns: question\)"),
        ('{"prompt": [{"role": "system", "content": "a"}]}', "column 'prompt' holds no message of the user"),
    ],
)
def test_a_row_without_a_question_is_named_with_its_line(text, words, tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question": "One"}\n' + text)
    with pytest.raises(DataError, match=rf"q\.jsonl line 2: .*{words}"):
        read_questions(tmp_path / "q.jsonl")


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_questions_asked_by_messages_are_asked_and_kept_as_messages(
    column, recipe_run, tmp_path, monkeypatch
):
    (tmp_path / "q.jsonl").write_text(json.dumps({column: CHAT}))
    flags = f"--model {recipe_run} --questions {tmp_path / 'q.jsonl'} --save_jsonl {tmp_path / 'out.jsonl'}"
    config = parse_config(grpo_eval.Config, [*flags.split(), "--max_completion_length", "4"])
    asked, solver = [], load_solver(str(recipe_run), max_completion_length=4)
    real = solver.decoder.complete
    monkeypatch.setattr(
        solver.decoder, "complete", lambda ids, *rest, **how: asked.extend(ids) or real(ids, *rest, **how)
    )
    monkeypatch.setattr(grpo_eval, "load_solver", lambda *args, **kwargs: solver)
    grpo_eval.answer(config)
    assert solver.decoder.tokenizer.decode(asked[0]).count("Be short, </reasoning>.") == 1
    assert json.loads((tmp_path / "out.jsonl").read_text())["prompt"] == CHAT


def test_a_model_of_one_file_is_asked_though_it_is_not_evaluated_on_it(recipe_run, tmp_path):
    """`--ask` was refused for the data set that it does not read."""
    shutil.copytree(recipe_run, tmp_path / "model")
    (tmp_path / "d.jsonl").write_text('{"question": "One", "answer": "1"}')
    settings = yaml.safe_load((tmp_path / "model" / "run_config.yaml").read_text())
    settings |= {"dataset": str(tmp_path / "d.jsonl")}
    (tmp_path / "model" / "run_config.yaml").write_text(yaml.safe_dump(settings))
    assert grpo_eval.Config(model=str(tmp_path / "model"), ask="One").ask == "One"
    with pytest.raises(SettingError, match="is the one file this model was trained on"):
        grpo_eval.Config(model=str(tmp_path / "model"))


def test_an_evaluation_on_the_split_that_was_trained_on_is_told(recipe_run, tmp_path):
    """A model trained with --split test was evaluated on the same questions without a word."""
    shutil.copytree(recipe_run, tmp_path / "model")
    settings = yaml.safe_load((tmp_path / "model" / "run_config.yaml").read_text())
    settings |= {"dataset": "arithmetic", "split": "test"}
    (tmp_path / "model" / "run_config.yaml").write_text(yaml.safe_dump(settings))
    with pytest.warns(UserWarning, match="^split=test: the model was trained on this split"):
        grpo_eval.Config(model=str(tmp_path / "model"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grpo_eval.Config(model=str(tmp_path / "model"), dataset="gsm8k")

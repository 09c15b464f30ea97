"""Supervised training: what is learnt, and the loss on it."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

import grpo_eval
import grpo_train
import sft_train
from decoding.decoder import GroupDecoder
from decoding.rollout import Sampling
from decoding.tokens import token_tables
from errors import DataError, SettingError
from learning.log_probs import Scorer
from problems.problem import EncodedProblem, Problem
from problems.prompts import Prompting, prepare_problems
from rewards import ANSWER_FORMATS, extract_answer, r1_format_reward
from running.folder import save_model
from running.settings import TrainConfig, names_with
from small_models import CHAT_TEMPLATE, a_model_and_problems, build_model, with_layers
from solver import load_solver, solve


def encoded(tokenizer, question, answer, solution):
    prompt = Prompting("xml", "").build(tokenizer, question)
    return EncodedProblem(
        Problem(question, answer, solution, id="p1"),
        prompt,
        tokenizer(prompt, add_special_tokens=False)["input_ids"],
    )


@pytest.mark.parametrize("name", list(ANSWER_FORMATS))
def test_a_target_is_the_solution_in_the_format_and_ends_in_the_eos_of_the_template(tokenizer, name):
    problem = encoded(tokenizer, "How many pens?", "17", "Ann has 12 + 5 = 17.\n#### 17")
    [(_, ids)] = sft_train.responses([problem], tokenizer, sft_train.Config(answer_format=name))
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert "12 + 5 = 17" in text
    assert extract_answer(text, name) == "17"


def test_the_solution_s_own_answer_is_learned_even_where_it_is_wrong(tokenizer):
    """The embedded task's warm start copies wrong solutions; writing the right label under a wrong derivation
    would leak it.
    """
    problem = encoded(tokenizer, "How many pens?", "17", "12 - 5 = 7\n#### 7")
    [(_, ids)] = sft_train.responses([problem], tokenizer, sft_train.Config())
    assert extract_answer(tokenizer.decode(ids)) == "7"


def test_problems_without_a_worked_solution_are_named(tokenizer):
    with pytest.raises(DataError, match=r"problem p1 has no worked solution"):
        sft_train.responses([encoded(tokenizer, "q", "17", "")], tokenizer, sft_train.Config())


def test_a_solution_too_long_is_left_out_and_all_too_long_is_an_error(tokenizer):
    long, short = (
        encoded(tokenizer, "q", "1", "pens " * 100 + "\n#### 1"),
        encoded(tokenizer, "q", "1", "x\n#### 1"),
    )
    config = sft_train.Config(max_completion_length=60)
    assert [p for p, _ in sft_train.responses([long, short], tokenizer, config)] == [short]
    with pytest.raises(DataError, match="max_completion_length=60"):
        sft_train.responses([long], tokenizer, config)


def test_the_loss_is_on_the_response_only_and_is_the_cross_entropy_of_plain_transformers(tokenizer):
    model = build_model("llama", tokenizer)
    problems = [
        encoded(tokenizer, "How many pens?", "17", "12 + 5 = 17\n#### 17"),
        encoded(tokenizer, "And now, how many of them?", "1", "1\n#### 1"),
    ]
    pairs = sft_train.responses(problems, tokenizer, sft_train.Config())
    batch = sft_train.as_rollout(pairs, token_tables(tokenizer, model), "cpu")
    logp, _ = Scorer(model, token_tables(tokenizer, model))(batch, torch.arange(2))
    total = 0.0
    for p, ids in pairs:
        row = torch.tensor([p.ids + ids])
        labels = torch.tensor([[-100] * len(p.ids) + ids])
        logits = model(input_ids=row).logits[..., : len(tokenizer)]
        total += float(
            torch.nn.functional.cross_entropy(
                logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum"
            )
        )
    assert float(-logp.sum()) == pytest.approx(total, rel=1e-5)


def test_a_supervised_step_does_not_depend_on_its_micro_batches(tokenizer, tmp_path):
    """I3: the loss is a mean over the tokens of the whole batch, long responses counting for more, however it
    is cut.
    """
    a_model_and_problems(tmp_path, "llama", tokenizer)
    rows = [{"question": f"{n}?", "answer": "pens " * (1 + 5 * (n % 3)) + f"\n#### {n}"} for n in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    logged = []
    for budget in (10**6, 1):
        settings = dict(
            model=str(tmp_path / "model"),
            dataset=str(tmp_path / "train.jsonl"),
            num_epochs=None,
            num_steps=2,
            batch_size=6,
            warmup_ratio=0.0,
        )
        out = sft_train.train(
            sft_train.Config(
                **settings,
                micro_batch_tokens=budget,
                learning_rate=1e-3,
                output_dir=str(tmp_path / f"out{budget}"),
            )
        )
        logged.append([json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()])
    for whole, cut in zip(*logged, strict=True):
        for name in ("loss", "grad_norm"):
            assert whole[name] == pytest.approx(cut[name], rel=1e-4)


def test_the_longest_response_allowed_is_kept_and_of_all_the_first_are_taken(tokenizer):
    problems = [encoded(tokenizer, "q", str(n), f"pens\n#### {n}") for n in range(3)]
    pairs = sft_train.responses(problems, tokenizer, sft_train.Config())
    exactly = sft_train.Config(max_completion_length=len(pairs[0][1]), unique_train_examples=2)
    assert sft_train.responses(problems, tokenizer, exactly) == pairs[:2]


def test_a_supervised_run_of_epochs_evaluates_the_weights_it_has_and_ends_its_schedule_with_its_last_step(
    tokenizer, tmp_path, monkeypatch
):
    """30 problems, 6 of them held out: 24 in batches of 8 are 3 steps, in which each is met once, and the
    linear rate goes down by thirds.
    """
    a_model_and_problems(tmp_path, "llama", tokenizer)
    met, made = [], sft_train.as_rollout
    monkeypatch.setattr(
        sft_train,
        "as_rollout",
        lambda pairs, *rest: met.extend(p.problem.id for p, _ in pairs) or made(pairs, *rest),
    )
    settings = dict(
        model=str(tmp_path / "model"),
        dataset=str(tmp_path),
        batch_size=8,
        learning_rate=3e-2,
        warmup_ratio=0.0,
        max_completion_length=100,
    )
    out = sft_train.train(
        sft_train.Config(**settings, eval_problems=6, eval_every=3, output_dir=str(tmp_path / "out"))
    )
    logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [m["learning_rate"] for m in logged] == pytest.approx([3e-2, 2e-2, 1e-2])
    assert len(met) == len(set(met)) == 24
    decoder = GroupDecoder(AutoModelForCausalLM.from_pretrained(out).eval(), tokenizer)
    for row in [json.loads(line) for line in (out / "evaluations.jsonl").read_text().splitlines()]:
        ids = tokenizer(
            Prompting("xml", ANSWER_FORMATS["xml"].system_prompt).build(tokenizer, row["question"]),
            add_special_tokens=False,
        )["input_ids"]
        [[completion]] = decoder.complete([ids], Sampling(100))
        assert completion.text == row["completion"]


R1 = CHAT_TEMPLATE + "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"


def test_a_response_goes_on_from_what_the_prompt_opened(tokenizer):
    """R1's template writes <think> for the model; what was learnt wrote it a second time."""
    opening = copy.deepcopy(tokenizer)
    opening.chat_template = R1
    config = sft_train.Config(answer_format="r1")
    [asked] = Prompting.of(config).encoded(opening, [Problem("q", "17", "12 + 5\n#### 17")])
    given = replace(asked.problem, response="<think>12</think> <answer>17</answer>")
    other = replace(asked.problem, response=" 12</think> <answer>17</answer><|im_end|>")
    pairs = [asked, replace(asked, problem=given), replace(asked, problem=other)]
    texts = [opening.decode(ids) for _, ids in sft_train.responses(pairs, opening, config)]
    assert texts == [
        "12 + 5\n</think>\n<answer>\n17\n</answer><|im_end|>",
        "12</think> <answer>17</answer><|im_end|>",
        " 12</think> <answer>17</answer><|im_end|>",
    ]
    whole = [asked.opening + text.removesuffix("<|im_end|>") for text in texts]
    assert r1_format_reward(whole) == [1.0, 1.0, 1.0]


def test_no_end_to_teach_is_refused(tokenizer):
    endless = copy.deepcopy(tokenizer)
    endless.eos_token, endless.chat_template = None, "{{ messages[0].content }}"
    with pytest.raises(SettingError, match="names no EOS token"):
        sft_train.responses([encoded(tokenizer, "q", "1", "1\n#### 1")], endless, sft_train.Config())


def test_what_is_taught_as_the_end_ends_decoding_everywhere_and_is_saved_with_the_model(
    tokenizer, tmp_path, capsys
):
    """A ChatML template over EOS ids that are all <|endoftext|>: training taught <|im_end|>, and decoding ran
    on to its limit.
    """
    chatml = copy.deepcopy(tokenizer)
    chatml.eos_token, model = "<|endoftext|>", with_layers(build_model("llama", tokenizer), 1)
    ends = chatml.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    model.config.eos_token_id = model.generation_config.eos_token_id = ends[0]
    save_model(model, chatml, tmp_path / "base", torch.float32)
    rows = [{"prompt": f"{n}?", "response": "pens", "answer": str(n)} for n in range(4)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = dict(dataset=str(tmp_path / "a.jsonl"), batch_size=2, max_completion_length=8, cpu_threads=1)
    base = dict(model=str(tmp_path / "base"), **shared)
    out = sft_train.train(
        sft_train.Config(**base, num_epochs=None, num_steps=1, output_dir=str(tmp_path / "sft"))
    )
    grpo = dict(**base, num_steps=1, num_generations=2, beta=0.0, eval_every=0)
    made = grpo_train.train(grpo_train.Config(**grpo, output_dir=str(tmp_path / "grpo"))).folder
    for folder in (out, made):
        assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == ends
    checked = grpo_train.Config(**grpo, output_dir=str(tmp_path / "none"))
    grpo_train.preflight.report(checked, grpo_train.chosen_rewards(checked))
    assert "a completion ends on: ['<|endoftext|>', '<|im_end|>']" in capsys.readouterr().out
    assert load_solver(base["model"]).decoder.tables.eos_ids == ends
    asked = grpo_eval.Config(model=base["model"], dataset=shared["dataset"], output_dir=str(tmp_path))
    assert grpo_eval.LocalModel(asked, asked.model, torch.device("cpu")).decoder.tables.eos_ids == ends


def test_raw_rows_are_trained_on_sampled_and_evaluated_as_one_text(tokenizer, tmp_path):
    """The MATH script's rows: a prompt that opens <think>, and what is to be learnt after it."""
    save_model(with_layers(build_model("llama", tokenizer), 1), tokenizer, tmp_path / "m", torch.float32)
    rows = [
        {"prompt": f" {n}?\nAssistant: <think>", "response": f" so </think> <answer> {n} </answer>"}
        for n in range(5)
    ]
    data = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = dict(dataset=str(data), answer_format="r1", prompt_format="raw", batch_size=2, cpu_threads=1)
    shared |= dict(max_completion_length=60)
    config = sft_train.Config(**shared, model=str(tmp_path / "m"), output_dir=str(tmp_path / "sft"))
    problems, _, _ = prepare_problems(config, tokenizer, responses=True)
    pairs = sft_train.responses(problems, tokenizer, config)
    written = [tokenizer.decode(p.ids + ids) for p, ids in pairs]
    assert written == [f"{row['prompt']}{row['response']}<|im_end|>" for row in rows]
    start = str(sft_train.train(replace(config, num_epochs=None, num_steps=1)))
    card = (tmp_path / "sft" / "README.md").read_text()
    assert 'prompt = system.replace("{question}", "A pen costs 3 dollars.' in card
    assert "chat = [" not in card
    grpo = dict(num_steps=1, num_generations=2, beta=0.0, eval_every=0, reward_set="math")
    config = grpo_train.Config(**shared, **grpo, model=start, output_dir=str(tmp_path / "grpo"))
    folder = grpo_train.train(config).folder
    lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert {line["prompt"] for line in lines} <= {row["prompt"] for row in rows}
    assert all(line["completion"].startswith("<think>") for line in lines)
    asked = grpo_eval.Config(model=start, dataset=str(data), split="train", output_dir=str(tmp_path / "e"))
    kept = {}
    model = grpo_eval.LocalModel(asked, asked.model, torch.device("cpu"))
    model.ask([0, 1], lambda i, answers: kept.update({i: answers[0].text}))
    assert [question.prompt for question in model.questions] == [row["prompt"] for row in rows]
    assert kept[0].startswith("<think>")
    assert solve("1+1", load_solver(start)).completion.startswith("<think>")


def test_sft_inherits_from_the_grpo_run_only_settings_that_exist():
    assert set(sft_train.Config.__dataclass_fields__) >= set(names_with(TrainConfig, "inherited"))


@pytest.mark.parametrize("count", [0, -5])
def test_a_number_of_examples_that_is_none_is_refused(count):
    """0 divided by itself, and -5 left out the last five."""
    with pytest.raises(SettingError, match="unique_train_examples=.*must be at least 1"):
        sft_train.Config(unique_train_examples=count)

"""Each recipe's config end to end on a small model, and what goes out of a run: trackers, the hub, a solver, TRL."""

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoModelForCausalLM, pipeline

import grpo_eval
import grpo_train
import sft_train
from conftest import build_model, paid
from decoding.any_model import vocab_logits
from decoding.decoder import GroupDecoder
from decoding.rollout import Interaction, pad_left, rollout_uniforms
from decoding.step import draw
from errors import RunError, SettingError
from learning import inspection
from learning.inspection import interaction_effect
from learning.log_probs import Scorer
from reporting import card
from rewards import REWARD_SETS
from running.folder import save_model
from running.parsing import parse_config
from solver import load_solver, readable, solve

ROOT = Path(__file__).parents[1]


def missing(*packages):
    return pytest.mark.skipif(
        any(importlib.util.find_spec(p) is None for p in packages), reason=f"needs {' and '.join(packages)}"
    )


@pytest.fixture(scope="session")
def start(tokenizer, tmp_path_factory):
    """A small random model and made-up problems with worked solutions, levels and subjects."""
    folder = tmp_path_factory.mktemp("start")
    save_model(build_model("llama", tokenizer), tokenizer, folder / "model", torch.float32)
    subjects = ("Algebra", "Geometry")
    for split in ("train", "test"):
        rows = [{"problem": f"What is {i} halves?", "solution": f"It is \\boxed{{\\frac{{{i}}}{{2}}}}.", "answer": f"\\frac{{{i}}}{{2}}", "level": 1 + i % 3,
                 "subject": subjects[i % 2]} for i in range(1, 13)]  # fmt: skip
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


SMALL = dict(
    num_steps=2,
    num_epochs=None,
    batch_size=2,
    max_completion_length=24,
    eval_every=2,
    eval_problems=3,
    report_to=None,
    cpu_threads=1,
    warmup_ratio=0.0,
)


def config_of(recipe, start, out, script, **settings):
    given = script.__dict__.get("settings_from_file") or grpo_train.settings_from_file
    small = {**SMALL, "num_generations": 4} if script is grpo_train else SMALL
    values = {
        **given(script.Config, ROOT / "configs" / f"{recipe}.yaml"),
        **small,
        "model": str(start / "model"),
        "dataset": str(start),
        "output_dir": str(out),
    }
    return script.Config(**{**values, **settings})


@pytest.mark.parametrize(
    "recipe",
    [
        "gsm8k",
        pytest.param("m3po_paper", marks=missing("peft", "bitsandbytes")),
        pytest.param("multi_reward", marks=missing("peft")),
        "math_grpo",
        "oneshot",
    ],
)
def test_every_grpo_config_runs_from_start_to_evaluation(recipe, start, tmp_path):
    config = config_of(recipe, start, tmp_path / "out", grpo_train)
    grpo_train.train(config)
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [1, 2]
    names = [function.__name__ for function, _ in REWARD_SETS[config.reward_set]]
    assert {f"reward/{name}" for name in names} <= set(metrics[0])
    report, folder = grpo_eval.evaluate(
        grpo_eval.Config(model=str(tmp_path / "out"), output_dir=str(tmp_path / "eval"))
    )
    assert report["answer_format"] == config.answer_format
    assert report["questions"] == 12
    assert {k: v["questions"] for k, v in report["accuracy_by_subject"].items()} == {
        "Algebra": 6,
        "Geometry": 6,
    }
    assert set(report["accuracy_by_level"]) == {"1", "2", "3"}


def test_the_math_recipe_goes_from_supervised_text_to_grpo(start, tmp_path):
    sft_train.train(
        config_of(
            "math_sft", start, tmp_path / "sft", sft_train, unique_train_examples=4, max_completion_length=64
        )
    )
    settings = yaml.safe_load((tmp_path / "sft" / "run_config.yaml").read_text())
    assert settings["grading"] == "math"
    grpo_train.train(
        config_of("math_grpo", start, tmp_path / "grpo", grpo_train, model=str(tmp_path / "sft"))
    )
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "grpo").config.model_type == "llama"


def test_prompt_and_response_are_learnt_as_they_stand(start, tmp_path, tokenizer):
    """JSONL of another effort: no answer column, one in the format where the response holds it."""
    rows = [
        {
            "prompt": f"Say {i}.",
            "response": f"<think>so</think> <answer>{i}</answer>" if i % 2 else "I would rather not.",
        }
        for i in range(8)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(
        "math_sft",
        start,
        tmp_path / "out",
        sft_train,
        dataset=str(tmp_path / "pairs.jsonl"),
        eval_every=0,
        eval_problems=0,
        max_completion_length=64,
    )
    problems, _, _ = sft_train.prepare_problems(config, tokenizer, responses=True)
    pairs = sft_train.responses(problems, tokenizer, config)
    assert sorted(tokenizer.decode(ids[:-1]) for _, ids in pairs) == sorted(row["response"] for row in rows)
    assert [p.problem.answer for p, _ in pairs[:2]] == ["", "1"]
    assert (
        len(
            sft_train.responses(
                problems, tokenizer, sft_train.Config(**{**vars(config), "unique_train_examples": 3})
            )
        )
        == 3
    )
    sft_train.train(config)


def test_a_solution_that_is_in_the_format_already_is_left_alone(start, tokenizer):
    config = sft_train.Config(model="tiny", dataset=str(start), answer_format="boxed", eval_every=0)
    problems, _, _ = sft_train.prepare_problems(config, tokenizer, responses=True)
    (_, ids), *_ = sft_train.responses(problems, tokenizer, config)
    assert tokenizer.decode(ids[:-1]) == "It is \\boxed{\\frac{1}{2}}."


def test_a_prompt_that_does_not_name_the_delimiter_is_refused(tmp_path):
    (tmp_path / "words.txt").write_text("Just answer.")
    with pytest.raises(SettingError, match="must name '</reasoning>'"):
        grpo_train.Config(system_prompt_file=str(tmp_path / "words.txt"))


# Dynamic sampling


def sampled(tokenizer, prompts, G, length, seed=0):
    decoder = GroupDecoder(build_model("qwen2", tokenizer), tokenizer, "e", Interaction(0.3))
    ids, mask = pad_left(prompts, decoder.tables.pad_id)
    return decoder, decoder.rollout(
        ids, mask, G, length, rollout_uniforms(seed, 0, 0, len(prompts) * G, length)
    )


def test_a_rollout_with_groups_of_another_is_scored_as_both_were_sampled(tokenizer, prompts):
    """Other prompt lengths, other completion lengths, M3PO on: the groups keep what was recorded of them."""
    decoder, rollout = sampled(tokenizer, prompts[:3], 4, 12)
    _, other = sampled(tokenizer, [prompts[3], prompts[0] + prompts[1]], 4, 20, seed=1)
    joined = rollout.with_groups([2, 0], other, decoder.tables.pad_id)
    rows = torch.arange(12)
    logp, _ = Scorer(decoder.model, decoder.tables)(joined, rows)
    assert torch.allclose(logp, joined.logp, atol=1e-4)
    width = other.ids.shape[1]
    assert torch.equal(joined.ids[8:, :width], other.ids[:4])
    assert torch.equal(joined.ids[:4, :width], other.ids[4:])
    assert torch.equal(joined.ids[4:8, :12], rollout.ids[4:8, :12])
    assert torch.equal(
        joined.mask.sum(-1), torch.cat([other.lengths[4:], rollout.lengths[4:8], other.lengths[:4]])
    )


PAYS_SOME = """
def pays(prompts, completions, **kwargs):  # no signal for half of the problems
    return [float(len(c[0]["content"]) % 3) * (len(p[0]["content"]) % 2) for p, c in zip(prompts, completions)]
"""


def test_groups_without_a_signal_give_way_to_fresh_problems(start, tmp_path):
    (tmp_path / "pays.py").write_text(PAYS_SOME)
    runs = {}
    for extra in (0, 3):
        config = config_of(
            "oneshot",
            start,
            tmp_path / str(extra),
            grpo_train,
            reward=[f"{tmp_path}/pays.py:pays"],
            dynamic_sampling=extra,
            batch_size=4,
            eval_every=0,
        )
        grpo_train.train(config)
        runs[extra] = [
            json.loads(line) for line in (tmp_path / str(extra) / "metrics.jsonl").read_text().splitlines()
        ]
    assert runs[0][0]["frac_reward_zero_std"] > 0
    assert all(m["frac_reward_zero_std"] < runs[0][0]["frac_reward_zero_std"] for m in runs[3][:1])
    assert runs[3][0]["extra_rollouts"] >= 1
    assert runs[3][0]["replaced_groups"] >= 1
    assert "extra_rollouts" not in runs[0][0]


def test_fresh_problems_are_the_next_ones_and_are_not_drawn_again_in_the_next_step(
    start, tmp_path, monkeypatch
):
    (tmp_path / "pays.py").write_text(PAYS_SOME)
    drawn, honest = [], grpo_train.problem_batch
    monkeypatch.setattr(
        grpo_train,
        "problem_batch",
        lambda count, size, first, seed: drawn.append((first, size)) or honest(count, size, first, seed),
    )
    settings = dict(
        reward=[f"{tmp_path}/pays.py:pays"], dynamic_sampling=2, batch_size=4, eval_every=0, num_steps=3
    )
    grpo_train.train(config_of("oneshot", start, tmp_path / "out", grpo_train, **settings))
    assert len(drawn) > 3, "some groups gave way"
    assert all(first + size == following for (first, size), (following, _) in itertools.pairwise(drawn))


def test_what_listening_changed_is_asked_with_the_draws_of_the_group_that_stayed(
    start, tmp_path, monkeypatch
):
    """A group that gave way was drawn anew, and was read again with the draws of the one before it: nearly every token "would have been another"."""
    (tmp_path / "pays.py").write_text(PAYS_SOME)
    again = []

    def spy(scorer, rollout, uniforms):
        for g in range(rollout.num_generations):
            logits = (
                vocab_logits(scorer.model, scorer.hidden(rollout, [g])[0], scorer.tables)
                / rollout.temperature
            )
            again.append(
                draw(logits, uniforms[g, : len(logits)])[0].tolist() == rollout.ids[g, : len(logits)].tolist()
            )
        return interaction_effect(scorer, rollout, uniforms)

    monkeypatch.setattr(inspection, "interaction_effect", spy)
    settings = dict(
        reward=[f"{tmp_path}/pays.py:pays"],
        dynamic_sampling=2,
        batch_size=2,
        eval_every=0,
        num_steps=4,
        inspect_every=1,
        m3po_lambda=0.3,
    )
    grpo_train.train(config_of("oneshot", start, tmp_path / "out", grpo_train, **settings))
    assert len(again) == 4 * 4
    assert all(again)


@pytest.mark.slow
def test_dynamic_sampling_is_the_same_on_two_processes(start, tmp_path):
    (tmp_path / "pays.py").write_text(PAYS_SOME)
    rows = {}
    for processes in ("1", "2"):
        flags = dict(config="configs/oneshot.yaml", model=start / "model", dataset=start, reward=f"{tmp_path}/pays.py:pays", report_to="none",
                     dynamic_sampling=3, batch_size=5, num_generations=4, num_steps=2, max_completion_length=16, eval_every=0, learning_rate=1e-4,
                     num_processes=processes, output_dir=tmp_path / processes)  # fmt: skip
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "grpo_train.py", *map(str, words)],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        rows[processes] = [
            json.loads(line) for line in (tmp_path / processes / "rollouts.jsonl").read_text().splitlines()
        ]
    keys = ("step", "example_id", "generation", "completion", "reward")
    one, two = (
        sorted(tuple(row[k] for k in keys) for row in rows[p] if row["step"] == 1) for p in ("1", "2")
    )
    assert one == two


# What goes out of a run


@pytest.fixture(scope="session")
def trained(start, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "my-model"
    grpo_train.train(config_of("oneshot", start, out, grpo_train, eval_every=2))
    return out


@missing("tensorboard")
def test_tensorboard_gets_every_number_and_can_be_read_back(start, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    grpo_train.train(
        config_of("oneshot", start, tmp_path / "out", grpo_train, report_to=["tensorboard"], run_name="mine")
    )
    found = EventAccumulator(str(tmp_path / "out" / "trackers" / "mine"))
    found.Reload()
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [(e.step, pytest.approx(e.value, rel=1e-5)) for e in found.Scalars("train/reward")] == [
        (m["step"], m["reward"]) for m in metrics
    ]
    assert [e.step for e in found.Scalars("eval/accuracy")] == [2]


def log_records(data):
    """The records of a LevelDB log, as W&B writes its offline runs: blocks of 32 KiB, parts with a header of checksum, length and kind."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


@missing("wandb")
def test_wandb_offline_gets_the_metrics_over_their_own_step(start, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    grpo_train.train(
        config_of("oneshot", start, tmp_path / "out", grpo_train, report_to=["wandb"], project="mine")
    )
    (file,) = (tmp_path / "out").glob("wandb/offline-run-*/run-*.wandb")
    from wandb.proto import wandb_internal_pb2

    rows, project = [], None
    for data in log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        project = record.run.project or project
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
            )
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert project == "mine"
    assert [(r["step"], r["train/reward"]) for r in rows] == [
        (m["step"], pytest.approx(m["reward"])) for m in metrics
    ]


@missing("wandb")
def test_a_tracker_that_fails_is_warned_of_and_the_run_goes_on(start, tmp_path, monkeypatch):
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    def fails(*args, **kwargs):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(LOGGER_TYPE_TO_CLASS["wandb"], "start", fails)
    with pytest.warns(
        UserWarning, match="report_to wandb: dropped, it raised ConnectionError: no route to host"
    ):
        grpo_train.train(config_of("oneshot", start, tmp_path / "out", grpo_train, report_to=["wandb"]))
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_tracker_nobody_knows_is_refused():
    with pytest.raises(SettingError, match="report_to=.*must be of tensorboard, wandb"):
        parse_config(grpo_train.Config, ["--report_to", "tensorboar"])
    assert parse_config(grpo_train.Config, ["--report_to", "none"]).report_to is None


def test_the_card_tells_what_was_done_and_loads(trained):
    card = ModelCard.load(trained / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert "| `reward_set` | oneshot |" in card.text
    assert "problems held out" in card.text
    assert "lora_alpha" not in card.text
    low, high = (card.text.split("| after | ")[1].split("(")[1].split(")")[0].split(" to "))[:2]
    assert 0 <= float(low) < float(high) <= 1
    code = card.text.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")


def test_push_uploads_what_a_user_needs_and_nothing_else(start, tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(
        card.HfApi, "create_repo", lambda self, *args, **kwargs: calls.append(("create", args, kwargs))
    )
    monkeypatch.setattr(
        card.HfApi,
        "upload_folder",
        lambda self, **kwargs: calls.append(("upload", kwargs)) or "https://example.org/me/mine",
    )
    config = config_of(
        "oneshot", start, tmp_path / "out", grpo_train, push_to_hub=True, hub_model_id="me/mine", save_every=1
    )
    grpo_train.train(config)
    (tmp_path / "out" / "wandb" / "run").mkdir(parents=True)
    (tmp_path / "out" / "wandb" / "run" / "tokenizer.json").write_text("{}")
    (_, args, kwargs), (_, upload) = calls
    assert args == ("me/mine",)
    assert kwargs == {"private": True, "exist_ok": True}
    files = [str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()]
    sent = set(
        filter_repo_objects(
            files, allow_patterns=upload["allow_patterns"], ignore_patterns=upload["ignore_patterns"]
        )
    )
    assert {
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "generation_config.json",
    } <= sent
    assert not any("/" in name or "jsonl" in name or "run_config" in name for name in sent), (
        "no checkpoint, no log, no path of this machine"
    )
    assert str(tmp_path) not in (tmp_path / "out" / "README.md").read_text()
    assert any("checkpoint-1/" in name for name in files)
    assert "uploaded to https://example.org/me/mine" in capsys.readouterr().out

    def refuses(self, *args, **kwargs):
        raise OSError("401 unauthorized")

    monkeypatch.setattr(card.HfApi, "create_repo", refuses)
    with pytest.raises(
        RunError, match=r"the model is saved in .*, but not uploaded \(OSError: 401 unauthorized\)"
    ):
        card.push(config, tmp_path / "out")
    with pytest.raises(SettingError, match="hub_model_id"):
        parse_config(grpo_train.Config, ["--push_to_hub", "true"])


def test_the_saved_model_loads_in_a_plain_pipeline(trained):
    ask = pipeline("text-generation", str(trained))
    reply = ask([{"role": "user", "content": "What is 3 halves?"}], max_new_tokens=8, do_sample=False)[0][
        "generated_text"
    ][-1]
    assert reply["role"] == "assistant"


def test_a_solver_answers_one_question_and_many(trained, tmp_path, capsys):
    solver = load_solver(str(trained))
    one, many = solve("What is 3 halves?", solver), solve(["What is 3 halves?", "What is 4 halves?"], solver)
    assert one == many[0]
    assert one.completion
    assert readable(one).endswith(f"Answer: {one.answer or 'none'}") or not one.finished
    questions = tmp_path / "questions.txt"
    questions.write_text("What is 3 halves?\n\nWhat is 4 halves?\n")
    for words in (
        ["--ask", "What is 3 halves?"],
        ["--questions", str(questions)],
        ["--questions", str(questions), "--save_jsonl", str(tmp_path / "out.jsonl")],
    ):
        grpo_eval.answer(parse_config(grpo_eval.Config, ["--model", str(trained), *words]))
    printed = capsys.readouterr().out
    assert printed.count("Answer: ") == 3
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(r["prompt"], r["response"]) for r in rows] == [(s.question, s.completion) for s in many]
    with pytest.raises(SettingError, match="goes with --questions"):
        parse_config(grpo_eval.Config, ["--save_jsonl", "x"])


def test_a_solver_whose_system_prompt_is_gone_says_so(trained, tmp_path):
    """It asked with the format's own words, which the model was not trained on, and said nothing."""
    shutil.copytree(trained, tmp_path / "model")
    settings = yaml.safe_load((tmp_path / "model" / "run_config.yaml").read_text())
    (tmp_path / "model" / "run_config.yaml").write_text(
        yaml.safe_dump(settings | {"system_prompt_file": "gone.txt"})
    )
    with pytest.raises(SettingError, match=r"system_prompt_file='gone.txt': cannot be read"):
        load_solver(str(tmp_path / "model"))


def test_a_question_past_the_model_s_positions_is_refused(trained):
    """It was answered with what a model says where it has never been."""
    with pytest.raises(SettingError, match="it passes the model's 512 positions"):
        solve("pens " * 600, load_solver(str(trained)))


def test_a_solution_is_told_apart_into_reasoning_and_answer(trained, monkeypatch):
    solver = load_solver(str(trained))
    ids = solver.decoder.tokenizer("<reasoning>\n3*4\n</reasoning>\n<answer>\n12\n</answer>")["input_ids"]
    monkeypatch.setattr(solver.decoder, "complete", lambda *args, **kwargs: [[(ids, False)]])
    found = solve("What is 3*4?", solver)
    assert (found.reasoning, found.answer, found.finished) == ("3*4", "12", False)
    assert readable(found) == "3*4\n\nAnswer: 12"


# TRL


@missing("trl")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted({f.__name__ for functions in REWARD_SETS.values() for f, _ in functions})
)
def test_our_rewards_run_unchanged_in_trl(name, start, tokenizer, tmp_path):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    import rewards

    seen = []

    def watched(*args, **kwargs):
        seen.append(getattr(rewards, name)(*args, **kwargs))
        return seen[-1]

    data = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": f"What is {i} halves?"}], "answer": f"{i}/2"}
            for i in range(4)
        ]
    )
    settings = GRPOConfig(output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4, max_completion_length=8, max_steps=1, report_to="none",
                          use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, beta=0.0)  # fmt: skip
    GRPOTrainer(
        str(start / "model"), watched, args=settings, train_dataset=data, processing_class=tokenizer
    ).train()
    assert len(seen[0]) == 4
    assert all(isinstance(value, float) for value in seen[0])


@missing("trl")
def test_trl_s_own_rewards_run_unchanged_here(start, tmp_path):
    (tmp_path / "theirs.py").write_text(
        "from trl.rewards import accuracy_reward, get_soft_overlong_punishment, think_format_reward\nshort = get_soft_overlong_punishment(20, 10)\n"
    )
    reward = [f"{tmp_path}/theirs.py:{name}" for name in ("accuracy_reward", "think_format_reward", "short")]
    grpo_train.train(config_of("oneshot", start, tmp_path / "out", grpo_train, reward=reward))
    metrics = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[0])
    assert {"reward/accuracy_reward", "reward/think_format_reward"} <= set(metrics)
    from trl.rewards import accuracy_reward

    totals, _ = paid(
        [(accuracy_reward, 1.0)],
        [None],
        [[{"role": "assistant", "content": "\\boxed{\\frac{1}{2}}"}]],
        solution=["\\frac{1}{2}"],
    )
    assert totals == [1.0]

"""Each recipe's config end to end on a small model, and what goes out of a run: trackers, the hub, a solver,
TRL.
"""

import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

import grpo_eval
import grpo_train
import sft_train
from errors import SettingError
from rewards import REWARD_SETS
from small_models import paid
from small_recipes import config_of, missing

ROOT = Path(__file__).parents[1]


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
@pytest.mark.usefixtures("undrawn")
def test_every_grpo_config_runs_from_start_to_evaluation(recipe, recipe_start, tmp_path):
    config = config_of(recipe, recipe_start, tmp_path / "out", grpo_train)
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


def test_the_math_recipe_goes_from_supervised_text_to_grpo(recipe_start, tmp_path):
    sft_train.train(
        config_of(
            "math_sft",
            recipe_start,
            tmp_path / "sft",
            sft_train,
            unique_train_examples=4,
            max_completion_length=64,
        )
    )
    settings = yaml.safe_load((tmp_path / "sft" / "run_config.yaml").read_text())
    assert settings["grading"] == "math"
    grpo_train.train(
        config_of("math_grpo", recipe_start, tmp_path / "grpo", grpo_train, model=str(tmp_path / "sft"))
    )
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "grpo").config.model_type == "llama"


def test_prompt_and_response_are_learnt_as_they_stand(recipe_start, tmp_path, tokenizer):
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
        recipe_start,
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


def test_a_solution_that_is_in_the_format_already_is_left_alone(recipe_start, tokenizer):
    config = sft_train.Config(model="tiny", dataset=str(recipe_start), answer_format="boxed", eval_every=0)
    problems, _, _ = sft_train.prepare_problems(config, tokenizer, responses=True)
    (_, ids), *_ = sft_train.responses(problems, tokenizer, config)
    assert tokenizer.decode(ids[:-1]) == "It is \\boxed{\\frac{1}{2}}."


def test_a_prompt_that_does_not_name_the_delimiter_is_refused(tmp_path):
    (tmp_path / "words.txt").write_text("Just answer.")
    with pytest.raises(SettingError, match="must name '</reasoning>'"):
        grpo_train.Config(system_prompt_file=str(tmp_path / "words.txt"))


@missing("trl")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted({f.__name__ for functions in REWARD_SETS.values() for f, _ in functions})
)
def test_our_rewards_run_unchanged_in_trl(name, recipe_start, tokenizer, tmp_path):
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
    small = dict(per_device_train_batch_size=4, num_generations=4, max_completion_length=8, max_steps=1)
    small |= dict(beta=0.0, use_cpu=True, bf16=False)
    quiet = dict(report_to="none", save_strategy="no", disable_tqdm=True)
    settings = GRPOConfig(output_dir=str(tmp_path), **small, **quiet)
    given = dict(args=settings, train_dataset=data, processing_class=tokenizer)
    GRPOTrainer(str(recipe_start / "model"), watched, **given).train()
    assert len(seen[0]) == 4
    assert all(isinstance(value, float) for value in seen[0])


@missing("trl")
def test_trl_s_own_rewards_run_unchanged_here(recipe_start, tmp_path):
    (tmp_path / "theirs.py").write_text(
        "from trl.rewards import accuracy_reward, get_soft_overlong_punishment, think_format_reward\n"
        "short = get_soft_overlong_punishment(20, 10)\n"
    )
    reward = [f"{tmp_path}/theirs.py:{name}" for name in ("accuracy_reward", "think_format_reward", "short")]
    grpo_train.train(config_of("oneshot", recipe_start, tmp_path / "out", grpo_train, reward=reward))
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

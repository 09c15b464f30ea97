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
from errors import RewardError, SettingError
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


def test_what_trl_tells_a_reward_is_told_here_and_what_it_logs_is_kept(recipe_start, tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    async def __call__(self, completions, subject, trainer_state, log_extra, log_metric, **k):\n"
        "        log_extra('subject', subject)\n"
        "        log_metric('progress', trainer_state.global_step / trainer_state.max_steps)\n"
        "        log_metric('passes', trainer_state.epoch)\n"
        "        return [float(i) for i in range(len(completions))]\n"
        "mine = Mine()\n"
    )
    settings = dict(reward=[f"{tmp_path}/mine.py:mine"], reward_weights=[2.0], dynamic_sampling=1)
    grpo_train.train(config_of("math_grpo", recipe_start, tmp_path / "out", grpo_train, **settings))
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [m["progress"] for m in metrics] == [0.0, 0.5]
    assert [m["passes"] for m in metrics] == [0.0, metrics[0]["epoch"]], "of the finished steps"
    drawn = [2 + m["replaced_groups"] for m in metrics]
    assert [m["epoch"] for m in metrics] == [drawn[0] / 9, sum(drawn) / 9], "12 problems, 3 held out"
    assert metrics[0]["reward/Mine"] == 3.5
    rollouts = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    for record in rollouts:
        number = int(record["question"].split()[2])
        assert record["extra"] == {"subject": ("Algebra", "Geometry")[number % 2]}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def mine(completions, tests, **kwargs):\n    return [0.0]\n", "mine needs tests"),
        ("def mine(log_metric, **kwargs):\n    log_metric('reward', 1)\n    return [0.0] * 8\n", "'reward'"),
    ],
)
def test_a_reward_that_asks_for_what_is_not_there_or_takes_a_name_ends_in_one_line(
    source, message, recipe_start, tmp_path
):
    (tmp_path / "mine.py").write_text(source)
    config = config_of(
        "math_grpo", recipe_start, tmp_path / "out", grpo_train, reward=[f"{tmp_path}/mine.py:mine"]
    )
    with pytest.raises((SettingError, RewardError), match=message):
        grpo_train.train(config)


@missing("trl")
def test_a_trl_reward_that_asks_for_the_worked_solution_gets_it(recipe_start, tmp_path):
    """`solution` was the bare answer, whatever the data had."""
    seen = []

    def looks(completions, solution, **kwargs):
        seen.extend(solution)
        return [0.0] * len(completions)

    how = dict(num_steps=1, reward_set=grpo_train.Config.reward_set)  # the recipe's own would be refused
    config = config_of("math_grpo", recipe_start, tmp_path / "out", grpo_train, **how)
    grpo_train.train(config, reward_functions=[(looks, 1.0)])
    assert all(text.startswith("It is \\boxed{") for text in seen)


def test_the_oneshot_recipe_is_that_of_its_package():
    """It was 500 steps of 8 problems without a checkpoint."""
    recipe = yaml.safe_load((ROOT / "configs" / "oneshot.yaml").read_text())
    package = dict(num_epochs=1, batch_size=4, num_generations=16, save_every=100)
    package |= dict(max_prompt_length=256, max_completion_length=200, adam_beta2=0.99, weight_decay=0.1)
    assert {name: recipe.get(name) for name in package} == package
    assert "num_steps" not in recipe


def test_each_recipe_of_another_script_has_an_output_dir_of_its_own():
    """One recipe after the other was refused: both wrote into grpo_finetuned_model."""
    names = ("m3po_paper", "multi_reward", "math_sft", "math_grpo", "oneshot")
    folders = [yaml.safe_load((ROOT / "configs" / f"{n}.yaml").read_text())["output_dir"] for n in names]
    assert len(set(folders)) == len(names)
    assert "grpo_finetuned_model" not in folders
    assert "output_dir" not in yaml.safe_load((ROOT / "configs" / "gsm8k.yaml").read_text())


def test_the_math_recipe_starts_from_the_model_of_its_script():
    recipe = yaml.safe_load((ROOT / "configs" / "math_sft.yaml").read_text())
    assert recipe["model"] == "Qwen/Qwen2.5-Math-1.5B-Instruct"

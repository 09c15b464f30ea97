"""Settings: flags, YAML, one line for a mistake."""

from pathlib import Path

import pytest

import grpo_train
from grpo_train import Config
from problems.prompts import template_kwargs
from small_runs import command

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num_generations", "1"], ["num_generations=1", "at least 2"]),
        (["--batch_size", "0"], ["batch_size=0", "at least 1"]),
        (["--learning_rate", "-1"], ["learning_rate=-1", "0 or more"]),
        (["--learning_rate", "nan"], ["learning_rate=nan"]),
        (["--learning_rate", "inf"], ["learning_rate=inf"]),
        (["--seed", "-1"], ["seed=-1"]),
        (["--num_epochs", "inf"], ["num_epochs=inf"]),
        (["--num_iterations=2", "--beta", "0"], ["num_iterations='2'"]),
        (["--config"], ["--config"]),
        (["--chat_template_kwargs", '{"tokenize": true}'], ["chat_template_kwargs", "tokenize"]),
        (["--temperature", "0"], ["temperature=0", "positive"]),
        (["--top_p", "0.9"], ["top_p", "evaluation only"]),
        (["--num_iterations", "3"], ["num_iterations", "outer_iterations or mu"]),
        (["--loss_type", "ppo"], ["loss_type='ppo'", "grpo, dapo, dr_grpo"]),
        (["--answer_format", "json"], ["answer_format='json'", "xml, hash, boxed, r1"]),
        (["--lora_r", "-1"], ["lora_r=-1", "full fine-tuning"]),
        (["--save_adapter", "true"], ["save_adapter=True", "lora_r"]),
        (["--optimizer", "sgd"], ["optimizer='sgd'", "adamw_8bit"]),
        (["--rollout_is", "sequence"], ["rollout_is='sequence'", "token"]),
        (["--reward", "nothing.py:f"], ["nothing.py"]),
        (["--reward_weights", "1"], ["reward_weights", "correctness_reward", "format_reward"]),
        (["--chat_template_kwargs", "{"], ["chat_template_kwargs", "JSON"]),
        (["--system_prompt_file", "/nothing"], ["system_prompt_file", "cannot be read"]),
        (["--batch", "3"], ["--batch"]),
        (["--config", "/nothing.yaml"], ["config", "/nothing.yaml"]),
        (["--eval_problems", "0"], ["eval_problems=0", "eval_every"]),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_what_would_do(flags, words):
    with pytest.raises(grpo_train.SettingError) as error:
        grpo_train.parse_config(Config, flags)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch_size: 2\nbatch_size: 3\n", ["repeated key batch_size"]),
        ("no_such: 2\n", ["no_such=2", "no such setting"]),
        ("learning_rat: 2\n", ["learning_rat=2", "did you mean learning_rate?"]),
        ("chat_template_kwargs: {a: 2024-01-01}\n", ["chat_template_kwargs=", "put it into quotes"]),
        ('system_prompt_file: "a\\0b"\n', ["system_prompt_file=", "cannot be read"]),
        ("chat_template_kwargs: {messages: 1}\n", ["chat_template_kwargs=", "are set here"]),
        ("batch_size: many\n", ["batch_size='many'", "int"]),
        ("model: a\nmodel_name_or_path: b\n", ["given twice"]),
        ("num_iterations: 2\n", ["num_iterations=2", "outer_iterations"]),
        ("- 1\n", ["key: value"]),
        ("lr_scheduler_type: cosin\n", ["lr_scheduler_type='cosin'", "cosine"]),
        ("reward_weights: [a, b]\n", ["reward_weights='a'"]),
        ("a: [\n", ["config="]),
    ],
)
def test_a_bad_yaml_file_is_refused(tmp_path, text, words):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(grpo_train.SettingError) as error:
        grpo_train.parse_config(Config, ["--config", str(tmp_path / "c.yaml")])
    assert all(word in str(error.value) for word in words), str(error.value)


def test_yaml_reads_5e_6_as_a_number_and_flags_win_over_it(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "learning_rate: 5e-6\nmodel_name_or_path: m\nnum_epochs: null\nepsilon_high: 1\nchat_template_kwargs: {enable_thinking: false}\n"
    )
    config = grpo_train.parse_config(
        Config, ["--config", str(tmp_path / "c.yaml"), "--model", "n", "--save_steps", "5"]
    )
    assert (config.learning_rate, config.model, config.save_every, config.epsilon_high) == (5e-6, "n", 5, 1.0)
    assert template_kwargs(config) == {"enable_thinking": False}


def test_every_shipped_config_is_read(monkeypatch):
    monkeypatch.setattr(
        "running.settings.find_spec", lambda name: name
    )  # as if peft and bitsandbytes were there
    for path in (ROOT / "configs").glob("*.yaml"):
        if "warm_start" in path.name:
            sft_train.Config(**grpo_train.settings_from_file(sft_train.Config, path))
        else:
            grpo_train.parse_config(Config, ["--config", str(path)])


@pytest.mark.parametrize(
    ("flags", "package"), [(["--lora_r", "8"], "peft"), (["--optimizer", "adamw_8bit"], "bitsandbytes")]
)
def test_a_package_that_is_missing_is_named_with_what_does_without_it(flags, package, monkeypatch):
    monkeypatch.setattr("running.settings.find_spec", lambda name: None)
    with pytest.raises(grpo_train.SettingError, match=f"pip install {package}, or say {flags[0]}"):
        grpo_train.parse_config(Config, flags)


def test_a_mistake_on_the_command_line_is_one_line_and_status_two():
    done = command(
        "grpo_train.py", "--model", "/no/such/model", "--dataset", "arithmetic", "--output_dir", "/tmp/never"
    )
    assert done.returncode == 2
    ours = [
        line for line in done.stderr.splitlines() if "kernels" not in line
    ]  # what bitsandbytes says where it is installed without a GPU
    assert len(ours) == 1
    assert ours[0].startswith("grpo_train.py: model='/no/such/model'")

"""Settings: flags, YAML, what a field says of itself, one line for a mistake."""

import subprocess
import sys
from pathlib import Path

import pytest

import grpo_train
import sft_train
from grpo_train import Config
from problems.prompts import template_kwargs
from reporting import page
from running.parsing import parse_config, run_main, settings_from_file
from running.settings import TrainConfig, free_on_resume, names_with

ROOT = Path(__file__).resolve().parents[1]

FREE = """output_dir overwrite_output_dir resume resume_anyway save_every keep_checkpoints stop_after
    max_minutes report_to project run_name push_to_hub hub_model_id hub_private save_adapter num_processes
    versions commit log_groups eval_every inspect_every reward_timeout warn_after check""".split()

NEVER = "model lora_r lora_target_modules optimizer".split()

INHERITED = """model dataset split question_column answer_column solution_column limit answer_format grading
    system_prompt_file system_prompt prompt_format chat_template_kwargs max_prompt_length
    max_completion_length micro_batch_tokens gradient_checkpointing bf16 eval_problems cpu_threads seed
    trust_remote_code torch_compile fsdp optimizer lora_r lora_alpha lora_target_modules
    num_processes""".split()

RECIPE = """answer_format reward_set reward batch_size num_generations max_completion_length temperature
    learning_rate lr_scheduler_type optimizer loss_type beta epsilon mu m3po_lambda m3po_temperature
    m3po_similarity lora_r lora_alpha num_epochs seed""".split()

OF_GRPO_ALONE = """log_groups inspect_every reward_timeout warn_after check reward_set reward num_generations
    temperature loss_type beta epsilon mu m3po_lambda m3po_temperature m3po_similarity""".split()


def test_the_fields_say_who_may_change_inherits_and_shows_them():
    """The lists of names that four files kept by hand, as they stood."""
    assert free_on_resume(Config) == set(FREE)
    assert set(names_with(Config, "resume", "never")) == set(NEVER)
    assert set(names_with(TrainConfig, "inherited")) == set(INHERITED)
    assert set(names_with(Config, "in_card")) == set(RECIPE)


def test_a_supervised_run_s_fields_say_the_same_where_they_have_another_default():
    left_out = set(OF_GRPO_ALONE)
    assert free_on_resume(sft_train.Config) == set(FREE) - left_out
    assert set(names_with(sft_train.Config, "resume", "never")) == set(NEVER)
    assert set(names_with(sft_train.Config, "inherited")) == set(INHERITED)
    assert set(names_with(sft_train.Config, "in_card")) == set(RECIPE) - left_out


def test_the_page_shows_settings_that_exist():
    assert set(page.SETTINGS) <= set(Config.__dataclass_fields__)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--num_generations 1", ["num_generations=1", "at least 2"]),
        ("--batch_size 0", ["batch_size=0", "at least 1"]),
        ("--learning_rate -1", ["learning_rate=-1", "0 or more"]),
        ("--learning_rate nan", ["learning_rate=nan"]),
        ("--learning_rate inf", ["learning_rate=inf"]),
        ("--seed -1", ["seed=-1"]),
        ("--num_epochs inf", ["num_epochs=inf"]),
        ("--num_iterations=2 --beta 0", ["num_iterations='2'"]),
        ("--config", ["--config"]),
        ('--chat_template_kwargs {"tokenize":true}', ["chat_template_kwargs", "tokenize"]),
        ("--temperature 0", ["temperature=0", "positive"]),
        ("--top_p 0.9", ["top_p='0.9'", "evaluation only"]),
        ("--num_iterations 3", ["num_iterations", "outer_iterations or mu"]),
        ("--num-iterations 3", ["num_iterations='3'", "outer_iterations or mu"]),
        ("--loss_type ppo", ["loss_type='ppo'", "grpo, dapo, dr_grpo"]),
        ("--answer_format json", ["answer_format='json'", "xml, hash, boxed, r1"]),
        ("--lora_r -1", ["lora_r=-1", "full fine-tuning"]),
        ("--save_adapter true", ["save_adapter=True", "lora_r"]),
        ("--optimizer sgd", ["optimizer='sgd'", "adamw_8bit"]),
        ("--rollout_is sequence", ["rollout_is='sequence'", "token"]),
        ("--reward nothing.py:f", ["nothing.py"]),
        ("--reward_weights 1", ["reward_weights", "correctness_reward", "format_reward"]),
        ("--reward_weights 1 none", ["reward_weights", "none stands alone"]),
        ("--chat_template_kwargs {", ["chat_template_kwargs", "JSON"]),
        ("--system_prompt_file /nothing", ["system_prompt_file", "cannot be read"]),
        ("--batch 3", ["--batch", "did you mean batch_size?"]),
        ("--batch_size many", ["--batch_size", "invalid int value: 'many'", "--help"]),
        ("--num_epochs many", ["--num_epochs", "invalid float value: 'many'"]),
        ("--bf16 maybe", ["--bf16", "'maybe' is neither true nor false"]),
        ("--lr_scheduler_type cosin", ["--lr_scheduler_type", "'cosin'", "cosine"]),
        ("--config /nothing.yaml", ["config", "/nothing.yaml"]),
        ("--eval_problems 0", ["eval_problems=0", "eval_every"]),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_what_would_do(flags, words):
    with pytest.raises(grpo_train.SettingError) as error:
        parse_config(Config, flags.split())
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--resume", dict(resume=True)),
        ("--resume true --bf16 no", dict(resume=True, bf16=False)),
        ("--no_bf16 --no-torch-compile", dict(bf16=False, torch_compile=False)),
        ("--batch-size 3 --save-steps 5 --model_name_or_path m", dict(batch_size=3, save_every=5, model="m")),
        ("--limit none --num-epochs null", dict(limit=None, num_epochs=None)),
        ("--num_epochs 2 --limit=7", dict(num_epochs=2.0, limit=7)),
        ("--lora_r 0 --report_to none --reward_weights none", dict(report_to=None, reward_weights=None)),
        ("--reward_weights 1 0.5 --mu 2", dict(reward_weights=[1.0, 0.5], mu=2)),
        ("--warm_start none --run_name none", dict(warm_start="none", run_name=None)),
    ],
)
def test_flags_are_read_in_all_their_spellings(flags, settings):
    config = parse_config(Config, flags.split())
    assert {name: getattr(config, name) for name in settings} == settings


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
        ("batch_size: true\n", ["batch_size=True", "int"]),
        ("batch_size: null\n", ["batch_size=None", "int"]),
        ("reward: 3\n", ["reward=3", "list"]),
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
        parse_config(Config, ["--config", str(tmp_path / "c.yaml")])
    assert all(word in str(error.value) for word in words), str(error.value)


def test_yaml_reads_5e_6_as_a_number_and_flags_win_over_it(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "learning_rate: 5e-6\nmodel_name_or_path: m\nnum_epochs: null\nepsilon_high: 1\n"
        "chat_template_kwargs: {enable_thinking: false}\n"
        "gradient_checkpointing: on\nreward: rewards.py:int_reward\n"
    )
    config = parse_config(Config, f"--model n --config {tmp_path / 'c.yaml'} --save_steps 5".split())
    assert (config.learning_rate, config.model, config.save_every, config.epsilon_high) == (5e-6, "n", 5, 1.0)
    assert (config.gradient_checkpointing, config.reward) == ("on", ["rewards.py:int_reward"])
    assert template_kwargs(config) == {"enable_thinking": False}


def test_every_shipped_config_is_read(monkeypatch):
    everything = lambda name: name  # noqa: E731  as if peft and bitsandbytes were there
    monkeypatch.setattr("running.settings.find_spec", everything)
    for path in (ROOT / "configs").glob("*.yaml"):
        if "warm_start" in path.name:
            sft_train.Config(**settings_from_file(sft_train.Config, path))
        else:
            parse_config(Config, ["--config", str(path)])


@pytest.mark.parametrize(
    ("flags", "package"), [("--lora_r 8", "peft"), ("--optimizer adamw_8bit", "bitsandbytes")]
)
def test_a_package_that_is_missing_is_named_with_what_does_without_it(flags, package, monkeypatch):
    monkeypatch.setattr("running.settings.find_spec", lambda name: None)
    with pytest.raises(grpo_train.SettingError, match=f"pip install {package}, or say {flags.split()[0]}"):
        parse_config(Config, flags.split())


def test_a_mistake_on_the_command_line_is_one_line_and_status_two(monkeypatch, capsys):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    flags = "--model /no/such/model --dataset arithmetic --output_dir /tmp/never"
    monkeypatch.setattr("sys.argv", ["grpo_train.py", *flags.split()])
    with pytest.raises(SystemExit) as ended:
        run_main(grpo_train.main)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("grpo_train.py: model='/no/such/model'")
    assert said.count("\n") == 1


def test_settings_are_read_without_torch():
    """A mistyped flag should answer at once; transformers' HfArgumentParser loads torch."""
    code = "import sys, running.parsing, running.settings\n"
    code += (
        "print([name for name in ('torch', 'transformers', 'accelerate', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

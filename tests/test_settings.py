"""Settings: flags, YAML, what a field says of itself, one line for a mistake."""

import dataclasses
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import yaml

import grpo_eval
import grpo_train
import sft_train
from errors import DataError, SettingError
from grpo_train import Config
from problems.prompts import template_kwargs
from problems.sources import GIVEN, load_problems
from reporting import page
from reporting.files import yaml_text
from running.launching import named_files
from running.parsing import (
    REFUSED,
    combined,
    parse_config,
    parse_early,
    run_main,
    settings_from_file,
    warn_of_idle,
)
from running.settings import FIRST, TrainConfig, free_on_resume, names_with, resolved
from running.sft_config import warm_start_settings
from running.study_file import Options, read_study
from running.versions import commit

ROOT = Path(__file__).resolve().parents[1]

FREE = """output_dir overwrite_output_dir resume resume_anyway save_every keep_checkpoints stop_after
    max_minutes max_wall_minutes report_to project run_name push_to_hub hub_model_id hub_private
    save_adapter num_processes versions commit log_groups eval_every inspect_every reward_timeout
    warn_after check verbose open warm_start_cache""".split()

NEVER = "model lora_r lora_target_modules load_in_4bit optimizer".split()

INHERITED = """model dataset split question_column answer_column solution_column limit answer_format grading
    system_prompt_file system_prompt prompt_format chat_template_kwargs max_prompt_length
    max_completion_length micro_batch_tokens gradient_checkpointing precision eval_problems cpu_threads seed
    trust_remote_code torch_compile fsdp optimizer lora_r lora_alpha lora_target_modules
    load_in_4bit num_processes max_wall_minutes""".split()

RECIPE = """answer_format reward_set reward batch_size num_generations max_completion_length temperature
    learning_rate lr_scheduler_type optimizer loss_type beta epsilon mu m3po_lambda m3po_temperature
    m3po_similarity lora_r lora_alpha load_in_4bit num_epochs seed ema_decay""".split()

OF_GRPO_ALONE = """log_groups inspect_every reward_timeout warn_after check verbose warm_start_cache
    reward_set reward num_generations temperature loss_type beta epsilon mu m3po_lambda m3po_temperature
    m3po_similarity ema_decay""".split()


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


SCRIPTS = {
    "grpo_train.py": ["--lerning_rate 1", "did you mean learning_rate?"],
    "sft_train.py": ["--confg x.yaml", "did you mean config?"],
    "grpo_eval.py": ["--num_samples 0", "num_samples=0: must be at least 1"],
    "grpo_study.py": ["configs/study_tiny.yaml --only_seed 3", "did you mean only_seeds?"],
}


@pytest.mark.parametrize(
    "script",
    [
        "grpo_train.py",
        "grpo_eval.py",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("sft_train.py", "grpo_study.py")),
    ],
)
def test_help_and_a_mistake_are_answered_before_torch_is_imported(script, tmp_path):
    """They took four seconds of CPU, for an import that neither needs."""
    for name in ("torch", "transformers", "accelerate", "datasets"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(99)\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    flags, words = SCRIPTS[script]

    def run(flags):
        how = dict(cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        return subprocess.run([sys.executable, script, *flags.split()], **how)

    shown, mistyped, versions = run("--help"), run(flags), run("--version")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"usage: {script} ")
    assert mistyped.returncode == 2
    assert words in mistyped.stderr
    assert (versions.returncode, versions.stderr) == (0, "")
    installed = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "datasets")]
    assert all(words in versions.stdout for words in installed), versions.stdout


def test_without_git_the_commit_is_unknown(monkeypatch):
    """On an image that has no git every run ended in a FileNotFoundError."""
    monkeypatch.setenv("PATH", "")
    commit.cache_clear()
    try:
        assert resolved(Config())["commit"] == "unknown"
    finally:
        commit.cache_clear()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(reward_set="math"), "reward_set=math pays otherwise than grading=number counts as right"),
        (dict(grading="math"), "reward_set=grpo_m3po pays otherwise than grading=math counts as right"),
        (dict(grading="math", reward_set="math"), None),
        (dict(grading="math", reward=[f"{__file__}:no_reward"]), None),
        (dict(grading="math", reward_set=GIVEN), None),
        (dict(mu=2, epsilon=0.2), None),
    ],
)
def test_a_reward_set_that_pays_by_another_rule_than_the_grading_is_remarked(settings, words):
    """--reward_set math paid by meaning, while right, held-out accuracy and evaluations counted numbers."""
    told = Config(**settings).remarks
    assert len(told) == (words is not None)
    assert words is None or words in told[0]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--seed 1 --seed 2", "seed=2: is given twice, first as 1 by --seed: leave one out"),
        (
            "--save_every 3 --seed 1 --save-steps=3",
            "save_every=3: is given twice, first as 3 by --save_every",
        ),
        (
            "--reward a.py:f --reward b.py:g",
            "reward=['b.py:g']: is given twice, first as ['a.py:f'] by --reward",
        ),
        ("--reward a.py:f --reward b.py:g", "put all values after one flag"),
        ("--no_torch_compile --torch_compile", "torch_compile=True: is given twice, first as False by --no_"),
        ("--bf16 no --no_bf16", "bf16=False: is given twice"),
        ("--check -v --verbose false", "verbose=False: is given twice, first as True by -v"),
        ("--config a.yaml --config b.yaml", "config='b.yaml': is given twice, first as 'a.yaml'"),
    ],
)
def test_a_flag_that_is_given_twice_is_refused(flags, line):
    """The last one was taken, and of two rewards only the second, without a word."""
    with pytest.raises(SettingError, match=re.escape(line)):
        parse_config(Config, flags.split())


@pytest.mark.parametrize("script", ["grpo_train.py", pytest.param("sft_train.py", marks=pytest.mark.slow)])
def test_a_folder_in_use_and_missing_data_are_refused_before_torch_is_imported(script, tmp_path):
    """The first line named a page that never came; the refusal came after ten seconds of imports."""
    (tmp_path / "torch.py").write_text("raise SystemExit(99)\n")
    used = tmp_path / "out"
    used.mkdir()
    for name in ("run_config.yaml", "finished.json"):
        (used / name).write_text("{}")
    words = [sys.executable, script, "--output_dir", str(used)]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "holds a run already: choose another" in done.stderr
    words = [sys.executable, script, "--output_dir", str(tmp_path / "new"), "--dataset"]
    for data, why in (
        ("gone.jsonl", "gone.jsonl: there is no such file"),
        ("docs", "docs: has no train.jsonl"),
    ):
        done = subprocess.run([*words, data], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert why in done.stderr


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("grpo_train.py --model ./gone", "model='./gone': there is no such folder"),
        ("sft_train.py --model ./gone", "model='./gone': there is no such folder"),
        ("grpo_eval.py --model ./gone", "model='./gone': there is no such folder"),
        ("grpo_eval.py", "model='grpo_finetuned_model': is not here yet: train it with"),
        ("grpo_eval.py --ask Why?", "model='grpo_finetuned_model': is not here yet: train it with"),
        ("grpo_eval.py --model tiny --dataset gone.csv", "gone.csv: there is no such file"),
        ("grpo_eval.py --model tiny --questions gone.txt", "questions='gone.txt': there is no such file"),
        (f"grpo_eval.py --model tiny --questions {'Why?' * 70}", "questions='Why?Why?"),
    ],
)
def test_what_is_not_there_is_refused_before_torch_is_imported(command, line, tmp_path):
    """An evaluation where nothing was trained yet took four seconds to say so."""
    (tmp_path / "torch.py").write_text("raise SystemExit(99)\n")
    script, *flags = command.split()
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *flags],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{script}: {line}")


def help_of(config_class, monkeypatch, capsys):
    """--help, one line an entry: {flag: its line}, and its whole text."""
    monkeypatch.setenv("COLUMNS", "5000")
    with pytest.raises(SystemExit):
        parse_config(config_class, ["--help"])
    text = capsys.readouterr().out
    entries = re.findall(r"^  (?:-\w(?: \S+)?, )?--(\w+)(.*(?:\n {8}.*)?)$", text, re.M)
    assert len(dict(entries)) == len(entries), "no setting twice"
    return dict(entries), text


@pytest.mark.parametrize("config_class", [Config, sft_train.Config, grpo_eval.Config])
def test_help_shows_each_setting_once_with_one_default_in_its_group(config_class, monkeypatch, capsys):
    """It showed 346 lines in the order of the code, `(default: epsilon) (default: None)` among them."""
    entries, text = help_of(config_class, monkeypatch, capsys)
    fields = config_class.__dataclass_fields__
    assert entries.keys() == {*fields, "config", "help", "version"}
    for name, field in fields.items():
        text_of_it = field.metadata["help"]
        tells = "default" in text_of_it
        assert entries[name].endswith(text_of_it) if tells else entries[name].count("(default") <= 1, name
    assert not re.search(r"--\w+-\w|--no_|None|default: True", text)
    used = [title for title, names in config_class.help_groups if fields.keys() & set(names.split())]
    titles = [line.strip()[:-1] for line in text.split("\n") if re.match(r"\S.*:$", line)]
    assert titles == ["options", *used, "this command"]
    assert all(set(names.split()) <= HELPED for _, names in config_class.help_groups)
    ten = text.partition(FIRST)[2].partition("\n\n")[0]
    assert ten.count("\n  --") == 10


HELPED = {*Config.__dataclass_fields__, *sft_train.Config.__dataclass_fields__}
HELPED |= {*grpo_eval.Config.__dataclass_fields__}
OF_THE_COMMAND = {"check", "verbose", "open", "trust_remote_code"}


def test_every_setting_of_training_has_a_group_of_help():
    grouped = {name for _, names in Config.help_groups for name in names.split()}
    assert Config.__dataclass_fields__.keys() - grouped <= OF_THE_COMMAND


@pytest.mark.parametrize("config_class", [Config, sft_train.Config, grpo_eval.Config])
def test_every_value_that_a_setting_may_have_is_in_its_help(config_class, monkeypatch):
    """A new loss type was taken, and --help did not say that there was one."""
    choices = {}
    for module in ("running.settings", "running.grpo_config", "running.sft_config", "running.eval_config"):
        taking = lambda config, name, values: choices.update({name: values})  # noqa: E731
        monkeypatch.setattr(f"{module}.check_one_of", taking, raising=False)
    config_class()
    assert choices
    for name, values in choices.items():
        field = config_class.__dataclass_fields__[name]
        text = field.metadata["help"] + " ".join(map(str, get_args(field.type)))  # --help lists a Literal's
        assert [value for value in values if value not in text] == [], name


def test_the_page_shows_settings_that_exist():
    assert set(page.SETTINGS) <= set(Config.__dataclass_fields__)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--num_generations 1", ["num_generations=1", "at least 2"]),
        ("--batch_size 0", ["batch_size=0", "at least 1"]),
        ("--learning_rate -1", ["learning_rate=-1", "0 or more"]),
        ("--learning_rate 1e30", ["learning_rate=1e+30", "at most 1"]),
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
        ("--reward_weights 0 0", ["reward_weights=[0.0, 0.0]", "have no weight but 0", "give one a weight"]),
        ("--reward rewards.py:int_reward=0", ["reward=['rewards.py:int_reward=0']", "have no weight but 0"]),
        ("--chat_template_kwargs {", ["chat_template_kwargs", "JSON"]),
        ("--system_prompt_file /nothing", ["system_prompt_file", "cannot be read"]),
        ("--batch 3", ["--batch", "did you mean batch_size?"]),
        ("batch_size=3", ["unrecognized", "did you mean --batch_size=3?"]),
        ("/", ["unrecognized", "did you mean --model /?"]),
        ("--resume out/checkpoint-5", ["--resume", "neither true nor false", "names no folder"]),
        ("--batch_size many", ["--batch_size", "invalid int value: 'many'", "--help"]),
        ("--num_epochs many", ["--num_epochs", "invalid float value: 'many'"]),
        ("--bf16 maybe", ["--bf16", "'maybe' is neither true nor false"]),
        ("--lr_scheduler_type cosin", ["--lr_scheduler_type", "'cosin'", "cosine"]),
        ("--config /nothing.yaml", ["config", "/nothing.yaml"]),
        ("--config tiny", ["config='tiny'", "did you mean configs/tiny.yaml?"]),
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
        ("--resume true --bf16 no", dict(resume=True, precision="fp32")),
        ("--no_bf16 --no-torch-compile", dict(precision="fp32", torch_compile=False)),
        ("--batch-size 3 --save-steps 5 --model_name_or_path m", dict(batch_size=3, save_every=5, model="m")),
        ("--limit none --num-epochs null", dict(limit=None, num_epochs=None)),
        ("--num_epochs 2 --limit=7", dict(num_epochs=2.0, limit=7)),
        ("--lora_r 0 --report_to none --reward_weights none", dict(report_to=None, reward_weights=None)),
        ("--lora_r 4 --lora_target_modules all-linear", dict(lora_target_modules=None)),
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
        ("reward: []\n", ["reward=[]", "must name at least one function"]),
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


@pytest.mark.parametrize("value", ["010", "1:30", "1:30.5", "08", "0_1"])
def test_what_yaml_1_1_reads_as_another_number_is_refused(value, tmp_path):
    """batch_size: 010 was 8, and max_minutes: 1:30 was 90."""
    (tmp_path / "c.yaml").write_text(f"max_minutes: {value}\n")
    with pytest.raises(SettingError, match=f"max_minutes='{value}': must be float"):
        settings_from_file(Config, tmp_path / "c.yaml")
    numbers = "batch_size: 0x10\nnum_steps: 1_000\nbeta: .5\nmax_prompt_length: +7\nm3po_lambda: 0\n"
    (tmp_path / "c.yaml").write_text(numbers)
    assert list(settings_from_file(Config, tmp_path / "c.yaml").values()) == [16, 1000, 0.5, 7, 0.0]
    saved = yaml_text({"run_name": value})
    (tmp_path / "c.yaml").write_text(saved)
    assert settings_from_file(Config, tmp_path / "c.yaml") == {"run_name": value}


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    """No shell sees it in a file or behind --output_dir=: the run went into a folder named ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text(
        "def pays(completions, **columns):\n    return [1.0] * len(completions)\n"
    )
    config = parse_config(
        Config, ["--output_dir=~/runs/a", "--model=~/model", "--reward", "~/mine.py:pays=0.5"]
    )
    assert (config.output_dir, config.model) == (f"{tmp_path}/runs/a", f"{tmp_path}/model")
    assert config.reward == [f"{tmp_path}/mine.py:pays=0.5"]
    assert Config(dataset="~/a.jsonl", system_prompt="~ </reasoning>").dataset == f"{tmp_path}/a.jsonl"
    evaluation = grpo_eval.Config(compare=["~/a,~/c", "b~"], output_dir="~/runs")
    assert (evaluation.compare, evaluation.output_dir) == (
        [f"{tmp_path}/a,{tmp_path}/c", "b~"],
        f"{tmp_path}/runs",
    )


def test_every_shipped_config_is_read(monkeypatch):
    everything = lambda name: name  # noqa: E731  as if peft and bitsandbytes were there
    monkeypatch.setattr("running.settings.find_spec", everything)
    recipes = [path for path in (ROOT / "configs").glob("*.yaml") if not path.name.startswith("study_")]
    for path in recipes:  # those of studies are read in test_study.py
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


def parsed(script, flags="", text=None, folder=None):
    """The settings that flags and the text of a YAML file make."""
    if text is not None:
        (folder / "c.yaml").write_text(text)
        flags = f"--config {folder / 'c.yaml'} {flags}"
    return parse_config(script.Config, flags.split())


@pytest.mark.parametrize(
    ("script", "flags", "text", "expected"),
    [
        (sft_train, "--num_steps 5", None, dict(num_steps=5, num_epochs=None)),
        (sft_train, "", "num_steps: 5\n", dict(num_steps=5, num_epochs=None)),
        (sft_train, "--num_steps 5", "num_epochs: 2\n", dict(num_steps=5, num_epochs=None)),
        (sft_train, "--num_epochs 1", "num_steps: 5\n", dict(num_steps=None, num_epochs=1.0)),
        (sft_train, "--num-epochs none", None, dict(num_steps=500, num_epochs=None)),
        (sft_train, "--num-epochs none", "num_epochs: 2\n", dict(num_steps=500, num_epochs=None)),
        (sft_train, "", "num_epochs: none\nnum_steps: 4\n", dict(num_steps=4, num_epochs=None)),
        (sft_train, "", None, dict(num_steps=None, num_epochs=1.0)),
        (grpo_train, "", None, dict(num_steps=500, num_epochs=None)),
        (grpo_train, "--num_steps 3", "num_epochs: 1\n", dict(num_steps=3, num_epochs=None)),
        (grpo_train, "--max_steps 3", "num_train_epochs: 1\n", dict(num_steps=3, num_epochs=None)),
        (grpo_train, "--num_epochs 1", "num_steps: 3\n", dict(num_steps=None, num_epochs=1.0)),
        (grpo_train, "--reward_set math", "reward: no.py:f\n", dict(reward=None, reward_set="math")),
        (grpo_train, "--reward_set math", "reward_weights: [1, 2]\n", dict(reward_weights=None)),
        (
            grpo_train,
            "--reward_weights 1 2 3",
            "reward_set: oneshot\nreward_weights: [3, 2, 1]\n",
            dict(reward_set="oneshot", reward_weights=[1.0, 2.0, 3.0]),
        ),
        (
            grpo_train,
            "--overwrite_output_dir",
            "resume: true\n",
            dict(resume=False, overwrite_output_dir=True),
        ),
        (
            grpo_train,
            "--resume",
            "overwrite_output_dir: true\n",
            dict(resume=True, overwrite_output_dir=False),
        ),
        (
            grpo_train,
            "--lora_r 0",
            "lora_r: 4\nlora_alpha: 8\nlora_target_modules: [q]\n",
            dict(lora_alpha=64),
        ),
        (grpo_train, "--lora_r 0", "lora_r: 4\nsave_adapter: true\n", dict(save_adapter=False)),
        (grpo_train, "--m3po_lambda 0", "m3po_similarity: mean\n", dict(m3po_similarity="distribution")),
        (grpo_train, "--eval_every 0", "keep_best: true\npatience: 3\n", dict(keep_best=False, patience=0)),
        (grpo_eval, "--ask a", "questions: b\n", dict(ask="a", questions=None)),
        (grpo_eval, "--temperature 0", "temperature: 1\ntop_p: 0.5\n", dict(top_p=1.0)),
    ],
)
def test_what_is_given_at_the_stronger_level_silences_the_other(script, flags, text, expected, tmp_path):
    """`sft_train.py --num_steps 5` ran 7,495 steps, since its default is an epoch."""
    config = parsed(script, flags, text, tmp_path)
    assert {name: getattr(config, name) for name in expected} == expected


def test_steps_given_from_python_or_for_a_warm_start_take_the_place_of_the_default_epoch(tmp_path):
    assert sft_train.Config(num_steps=5).num_epochs is None
    assert sft_train.Config(num_steps=5, num_epochs=None).num_steps == 5
    (tmp_path / "warm.yaml").write_text("num_steps: 6\nlora_r: 0\n")
    warm = sft_train.warm_start_settings(Config(warm_start=str(tmp_path / "warm.yaml")))
    assert (warm.num_steps, warm.num_epochs) == (6, None)


TOGETHER = [
    (sft_train, "num_steps 5 num_epochs 2"),
    (sft_train, "num_steps 500 num_epochs 1"),
    (grpo_train, "num_steps 5 num_epochs 1"),
    (grpo_train, "reward_set math reward no.py:f"),
    (grpo_train, "resume true overwrite_output_dir true"),
    (grpo_eval, "ask a questions b"),
    (grpo_eval, "ask a api http://localhost"),
    (grpo_eval, "m3po true ask a"),
    (grpo_eval, "limit 3 compare a"),
    (grpo_eval, "by level compare a"),
    (grpo_eval, "m3po true compare a"),
    (grpo_eval, "api http://localhost compare a"),
    (grpo_eval, "compare a ask b"),
    (grpo_eval, "compare a questions b"),
    (grpo_eval, "by level questions b"),
    (grpo_eval, "m3po true questions b"),
    (grpo_eval, "api http://localhost questions b"),
    (grpo_eval, "system_prompt a system_prompt_file b"),
]


@pytest.mark.parametrize(("script", "given"), TOGETHER)
@pytest.mark.parametrize("in_file", [True, False])
def test_two_settings_of_one_level_that_take_each_other_s_place_are_refused(script, given, in_file, tmp_path):
    words = given.split()
    pairs = list(zip(words[::2], words[1::2], strict=True))
    flags = " ".join(f"--{name} {value}" for name, value in pairs)
    text = "".join(f"{name}: {value}\n" for name, value in pairs)
    with pytest.raises(grpo_train.SettingError, match="give one of the two") as error:
        parsed(script, "", text, tmp_path) if in_file else parsed(script, flags)
    assert all(name in str(error.value) for name, _ in pairs)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (dict(learing_rate=1e-5), "=1e-05: no such setting in Config.*did you mean learning_rate"),
        (dict(num_iterations=2), "num_iterations=2: says two things.*use outer_iterations or mu"),
        (dict(max_steps=3, num_steps=2), "num_steps=2: given twice in Config"),
        (dict(learning_rate="1e-5"), "learning_rate='1e-5': must be float"),
        (dict(num_steps=1.5), "num_steps=1.5: must be int"),  # was a run without an end
        (dict(beta=True), "beta=True: must be float"),
        (dict(batch_size=None), "batch_size=None: must be int"),
        (dict(dataset=[{"question": "q", "answer": "a"}] * 99), r"\.\.\.: must be str; .*dataset=rows\)$"),
        (dict(resume=True, overwrite_output_dir=True), "beside resume=True: give one of the two"),
        (dict(reward=[len]), r"must be str; .*reward_functions=\[\.\.\.\]\)$"),
    ],
)
def test_a_name_or_value_from_python_is_refused_as_that_of_a_file(given, line):
    """Python's own TypeError named no remedy, and 1.5 steps never ended."""
    with pytest.raises(grpo_train.SettingError, match=line) as error:
        Config(**given)
    assert len(str(error.value)) < 300


def test_from_python_other_trainers_names_and_numbers_of_numpy_are_taken(tmp_path):
    given = dict(max_steps=np.int64(3), learning_rate=np.float32(0.5), reward_weights=(1, 2))
    config = Config(**given, output_dir=tmp_path, bf16=False, report_to="none", warm_start=None)
    assert (config.num_steps, config.learning_rate, config.reward_weights) == (3, 0.5, [1.0, 2.0])
    assert (type(config.num_steps), type(config.learning_rate)) == (int, float)
    assert (config.output_dir, config.precision) == (str(tmp_path), "fp32")
    assert (config.report_to, config.warm_start) == (None, "none")
    assert dataclasses.replace(config, seed=1) == Config(**vars(config) | {"seed": 1})


def test_the_signature_of_a_config_is_that_of_its_fields():
    """For the help of an editor or a notebook."""
    assert list(inspect.signature(Config).parameters) == [field.name for field in dataclasses.fields(Config)]


def test_an_empty_question_is_refused():
    """It was asked, and answered with what the model makes of nothing."""
    with pytest.raises(grpo_train.SettingError, match="ask='  ': is empty: give a question"):
        parse_config(grpo_eval.Config, ["--ask", "  "])


def test_the_help_of_supervised_training_tells_its_own_default_of_num_steps(capsys):
    """It said `500 where neither is given`, where an epoch is."""
    with pytest.raises(SystemExit):
        parse_config(sft_train.Config, ["--help"])
    assert "500" not in capsys.readouterr().out


def test_steps_and_epochs_from_python_are_refused_together():
    with pytest.raises(grpo_train.SettingError, match="num_epochs=2.*num_steps=5.*give one of the two"):
        sft_train.Config(num_steps=5, num_epochs=2)


@pytest.mark.parametrize(
    ("script", "flags", "needed"),
    [
        (grpo_train, "--lora_alpha 8", "lora_r=0"),
        (grpo_train, "--m3po_lambda 0 --m3po_temperature 0.5", "m3po_lambda=0.0"),
        (grpo_train, "--m3po_lambda 0 --m3po_similarity mean", "m3po_lambda=0.0"),
        (grpo_train, "--rollout_is_cap 3", "rollout_is='none'"),
        (grpo_train, "--hub_model_id me/mine", "push_to_hub=False"),
        (grpo_train, "--no_hub_private", "push_to_hub=False"),
        (sft_train, "--keep_best", "eval_every=0"),
        (grpo_eval, "--top_p 0.9", "temperature=0.0"),
        (grpo_eval, "--top_k 9", "temperature=0.0"),
        (grpo_eval, "--m3po_lambda 0.2", "m3po=False"),
        (grpo_eval, "--m3po_temperature 0.2", "m3po=False"),
        (grpo_eval, "--m3po_similarity mean", "m3po=False"),
        (grpo_eval, "--api_model a", "api=None"),
        (grpo_eval, "--api_at_once 2", "api=None"),
        (grpo_eval, "--api_timeout 2", "api=None"),
        (grpo_eval, "--ask a --num_samples 4 --temperature 1", "one answer"),
        (grpo_eval, "--ask a --num_samples 4", "one answer"),  # was told to set a temperature, then this
    ],
)
def test_a_setting_without_effect_is_refused_with_the_one_it_needs(script, flags, needed):
    with pytest.raises(grpo_train.SettingError) as error:
        parsed(script, flags)
    assert needed in str(error.value)


@pytest.mark.parametrize(
    ("script", "flags", "expected"),
    [
        (
            grpo_train,
            "--cross_path_lambda 0.2 --cross-path-temp 0.3",
            dict(m3po_lambda=0.2, m3po_temperature=0.3),
        ),
        (grpo_train, "--max_new_tokens 7 --max_steps 8", dict(max_completion_length=7, num_steps=8)),
        (
            grpo_train,
            "--model-name m --wandb-project p --report_to tensorboard",
            dict(model="m", project="p"),
        ),
        (
            grpo_train,
            "--n_grpo_steps 3 --group_size 4 --sampling_temperature 0.7 --sampling_max_tokens 9 "
            "--cliprange 0.2 --grad_clip 1.5 --val_every_steps 5 --val_samples 6 "
            "--lr_scheduler linear --save_dir o",
            dict(num_steps=3, num_generations=4, temperature=0.7, max_completion_length=9, epsilon=0.2)
            | dict(max_grad_norm=1.5, eval_every=5, eval_problems=6)
            | dict(lr_scheduler_type="linear", output_dir="o"),
        ),
        (
            sft_train,
            "--sft_data_path d --unique-train-examples all",
            dict(dataset="d", unique_train_examples=None),
        ),
        (sft_train, "--unique_train_examples 5 --lr 1e-4", dict(unique_train_examples=5, learning_rate=1e-4)),
        (
            grpo_eval,
            "--model_path m --max-new-tokens 7 --limit all",
            dict(max_completion_length=7, limit=None),
        ),
    ],
)
def test_flags_of_the_original_scripts_are_taken(script, flags, expected, tmp_path):
    config = parsed(script, flags)
    assert {name: getattr(config, name) for name in expected} == expected
    words = flags.split()
    lines = [f"{n[2:].replace('-', '_')}: {v}\n" for n, v in zip(words[::2], words[1::2], strict=True)]
    config = parsed(script, "", "".join(lines), tmp_path)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("script", "flags", "hint"),
    [
        (grpo_train, "--use-wandb", "--report_to wandb"),
        (grpo_train, "--enable_m3po", "m3po_lambda"),
        (grpo_train, "--m3po false", "m3po_lambda"),
        (grpo_train, "--enable_m3po true", "m3po_lambda"),
        (grpo_train, "--sft_data_path d", "sft_train.py"),
        (grpo_train, "--reward_funcs a b", "is reward here, FILE.py:function"),
        (grpo_train, "--resume_from_checkpoint d", "is --resume here"),
        (sft_train, "--use_wandb", "--report_to wandb"),
        (grpo_train, "--unique_train_examples all", "limit"),
    ],
)
def test_flags_of_the_original_scripts_that_say_something_else_are_refused_with_a_hint(script, flags, hint):
    with pytest.raises(grpo_train.SettingError) as error:
        parsed(script, flags)
    assert hint in str(error.value)


def test_weights_of_a_weaker_level_go_with_the_rewards_that_they_are_for():
    in_file = {"reward_weights": [1.0, 2.0], "reward": ["other.py:f", "other.py:g"]}
    assert combined(Config, in_file, {"reward": ["mine.py:f"]}) == {"reward": ["mine.py:f"]}


def test_two_weights_for_one_reward_are_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def mine(completions, **kwargs):\n    return [0.0]\n")
    with pytest.raises(grpo_train.SettingError, match="the weights stand in reward="):
        parsed(grpo_train, f"--reward {tmp_path}/mine.py:mine=0.5 --reward_weights 2")


def test_columns_named_for_generated_problems_are_refused():
    with pytest.raises(DataError, match="arithmetic is generated and has no columns"):
        load_problems("arithmetic", columns={"answer": "final"})


@pytest.mark.parametrize(
    ("script", "in_file", "flags", "settings"),
    [
        (
            Config,
            dict(system_prompt="a </reasoning>"),
            "--system_prompt_file FILE",
            dict(system_prompt="file"),
        ),
        (Config, dict(resume=True, resume_anyway=True), "--overwrite_output_dir", dict(resume_anyway=False)),
        (grpo_eval.Config, dict(api="http://x", api_model="m"), "--ask hi", dict(api=None, api_model=None)),
        (grpo_eval.Config, dict(limit=3, by=["level"]), "--ask hi", dict(limit=None, by=None)),
    ],
)
def test_what_is_given_silences_what_goes_with_what_it_silences(tmp_path, script, in_file, flags, settings):
    """A flag was refused because of what its file had beside the setting that the flag takes the place of."""
    words = tmp_path / "words.txt"
    words.write_text("file </reasoning>")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(in_file))
    given = ["--config", str(tmp_path / "c.yaml"), *flags.replace("FILE", str(words)).split()]
    config = parse_config(script, given)
    found = {name: getattr(config, name) for name in settings}
    assert found == {n: words.read_text() if v == "file" else v for n, v in settings.items()}


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        (Config, "--resume_anyway"),
        (grpo_eval.Config, "--questions q.txt --limit 5"),
        (grpo_eval.Config, "--ask hi --by level"),
    ],
)
def test_a_flag_without_an_effect_is_refused(script, flags):
    """All questions were answered where five were asked for."""
    with pytest.raises(grpo_train.SettingError, match=r"has no effect|cannot stand beside"):
        parse_config(script, flags.split())


@pytest.mark.parametrize(
    ("script", "flag", "words"),
    [
        (grpo_eval.Config, "--enable_m3po", "is --m3po here"),
        (grpo_eval.Config, "--use_wandb", "belongs to grpo_train.py"),
        (sft_train.Config, "--enable_m3po", "belongs to grpo_train.py"),
        (Config, "--use_wandb", "is --report_to wandb here"),
    ],
)
def test_a_hint_names_a_setting_of_its_script(script, flag, words):
    with pytest.raises(grpo_train.SettingError, match=words):
        parse_config(script, [flag])


@pytest.mark.parametrize("mode", ["--ask hi", "--questions q.txt", "--compare a b", "--api http://x"])
def test_what_a_way_of_using_the_evaluation_never_reads_is_refused(mode):
    """`--ask` beside `--dataset`, `--name` or `--batch_size` answered as if they had not been given."""
    given = (
        "model dataset split limit question_column grading answer_format max_prompt_length temperature seed "
    )
    given += "num_samples top_k batch_size precision output_dir name num_processes trust_remote_code m3po "
    given += "save_jsonl"
    values = dict.fromkeys(given.split(), "7") | {"model": "m", "dataset": "arithmetic", "split": "test"}
    values |= {"grading": "number", "answer_format": "xml", "precision": "fp32", "output_dir": "eval_runs"}
    values |= {"trust_remote_code": "true", "m3po": "true", "temperature": "1", "save_jsonl": "out.jsonl"}
    served, refused = set(), {}
    for name, value in values.items():
        needed = "--temperature 1" if name in ("num_samples", "top_k") and "compare" not in mode else ""
        try:
            config = parse_config(grpo_eval.Config, f"{mode} --{name} {value} {needed}".split())
            assert getattr(config, name) is not None
            served.add(name)
        except grpo_train.SettingError as error:
            refused[name] = str(error)
    assert all(f"{name}=" in line and "\n" not in line for name, line in refused.items()), refused
    asked = {"model", "answer_format", "temperature", "seed", "precision", "trust_remote_code"}
    expected = {
        "--ask hi": asked,
        "--questions q.txt": {*asked, "save_jsonl"},
        "--compare a b": {"output_dir", "name"},
        "--api http://x": {
            *"model dataset split limit question_column grading answer_format temperature".split(),
            *"seed num_samples output_dir name".split(),
        },
    }
    assert served == expected[mode]


@pytest.mark.parametrize(
    ("script", "text", "flags", "expected"),
    [
        (grpo_eval, "questions: q\nsave_jsonl: o\n", "--ask a", dict(questions=None, save_jsonl=None)),
        (grpo_eval, "save_jsonl: o\nbatch_size: 3\n", "--ask a", dict(save_jsonl=None, batch_size=None)),
        (grpo_eval, "name: x\nnum_samples: 8\ntemperature: 1\n", "--ask a", dict(name=None, num_samples=1)),
        (grpo_eval, "num_samples: 8\ntemperature: 1\n", "--temperature 0", dict(num_samples=1)),
        (
            grpo_eval,
            "num_samples: 8\ntemperature: 1\nm3po: true\nm3po_lambda: 0.5\n",
            "--temperature 0",
            dict(num_samples=1, m3po=False, m3po_lambda=0.1),
        ),
        (grpo_eval, "num_samples: 8\ntemperature: 1\nm3po: true\n", "--num_samples 1", dict(m3po=False)),
        (
            grpo_eval,
            "num_samples: 8\ntemperature: 1\nm3po: true\ntop_k: 5\nbf16: false\n",
            "--api http://x",
            dict(m3po=False, top_k=0, num_samples=8, precision="bf16"),
        ),
        (grpo_eval, "model: m\ntemperature: 1\ndataset: d\n", "--compare a b", dict(temperature=0.0)),
        (grpo_train, "fsdp: true\n", "--lora_r 4", dict(fsdp=False)),
        (grpo_train, "lora_r: 4\nlora_alpha: 8\n", "--fsdp", dict(fsdp=True, lora_r=0, lora_alpha=64)),
        (grpo_train, "optimizer: adamw_8bit\n", "--fsdp", dict(fsdp=True, optimizer="adamw")),
        (sft_train, "fsdp: true\n", "--optimizer adamw_8bit", dict(fsdp=False)),
        (grpo_train, "fsdp: true\noptimizer: adamw\n", "--optimizer adamw", dict(fsdp=True)),
        (grpo_train, "report_to: tensorboard\nrun_name: a\n", "--report_to none", dict(run_name=None)),
        (grpo_train, "inspect_every: 3\n", "--m3po_lambda 0", dict(inspect_every=10)),
        (grpo_train, "eval_problems: 30\n", "--eval_every 0", dict(eval_problems=0)),
        (grpo_train, "m3po_temperature: 0.5\n", "--m3po_similarity mean", dict(m3po_temperature=0.1)),
        (
            grpo_train,
            "chat_template_kwargs: {a: 1}\n",
            "--prompt_format raw",
            dict(chat_template_kwargs="{}"),
        ),
    ],
)
def test_the_command_line_silences_what_a_file_has_beside_it(script, text, flags, expected, tmp_path):
    """Each was refused, though the file alone and the flag alone were served."""
    config = parsed(script, flags, text, tmp_path)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("script", "text", "flags"),
    [
        (grpo_train, "", "--run_name mine"),
        (sft_train, "", "--project mine"),
        (grpo_train, "", "--m3po_lambda 0 --inspect_every 5"),
        (grpo_train, "", "--log_groups 0 --inspect_every 5"),
        (grpo_train, "eval_every: 0\n", "--eval_problems 50"),
        (grpo_train, "", "--m3po_similarity mean --m3po_temperature 0.5"),
        (grpo_train, "m3po_lambda: 0\n", "--m3po_temperature 0.1"),
        (sft_train, "", "--prompt_format raw --chat_template_kwargs {}"),
        (grpo_eval, "ask: hi\n", "--batch_size 4"),
        (grpo_eval, "", "--ask hi --split test"),
        (grpo_train, "fsdp: true\nlora_r: 4\n", ""),
    ],
)
def test_no_flag_is_given_for_nothing(script, text, flags, tmp_path):
    with pytest.raises(grpo_train.SettingError, match="has no effect with|cannot stand beside"):
        parsed(script, flags, text, tmp_path)


def test_held_out_problems_beside_no_evaluation_are_warned_of():
    with pytest.warns(UserWarning, match=r"eval_problems=50: has no effect with eval_every=0"):
        assert parsed(grpo_train, "--eval_every 0 --eval_problems 50").eval_problems == 0
    assert parsed(sft_train, "--eval_problems 50").eval_problems == 50, "which its GRPO run holds out too"


PYTHON_IDLE = (
    (grpo_train, dict(warm_start_cache="here"), "--warm_start_cache here"),
    (sft_train, dict(project="mine"), "--project mine"),
    (grpo_train, dict(m3po_lambda=0, m3po_control="noise"), "--m3po_lambda 0 --m3po_control noise"),
    (grpo_train, dict(rollout_is_cap=3), "--rollout_is_cap 3"),
    (
        grpo_train,
        dict(m3po_similarity="mean", m3po_temperature=0.2),
        "--m3po_similarity mean --m3po_temperature 0.2",
    ),
    (
        grpo_train,
        dict(reward=[f"{__file__}:no_reward"], reward_set="math"),
        f"--reward {__file__}:no_reward --reward_set math",
    ),
    (grpo_train, dict(hub_private=False), "--hub_private false"),
    (grpo_eval, dict(top_p=0.9), "--top_p 0.9"),
    (grpo_eval, dict(m3po_lambda=0.2), "--m3po_lambda 0.2"),
    (grpo_eval, dict(api_model="a"), "--api_model a"),
    (grpo_eval, dict(ask="hi", limit=3), "--ask hi --limit 3"),
)


def no_reward(completions, **_):
    return [0.0] * len(completions)


@pytest.mark.parametrize(("script", "given", "flags"), PYTHON_IDLE)
def test_of_a_config_made_in_python_is_said_what_the_command_line_says(script, given, flags):
    """Config(project="mine") named nothing without a word; the command line refuses it."""
    with pytest.raises(SettingError) as refusal:
        parsed(script, flags)
    config = script.Config(**given)
    for made in (config, dataclasses.replace(config, seed=7)):
        with pytest.warns(UserWarning, match=re.escape(str(refusal.value))):
            warn_of_idle(made)


@pytest.mark.parametrize(
    ("script", "given"),
    [
        (grpo_train, dict(lora_r=8, lora_alpha=32)),
        (grpo_train, dict(lora_r=0, lora_alpha=64, m3po_lambda=0, m3po_temperature=0.1)),  # the defaults
        (grpo_train, dict(reward=[f"{__file__}:no_reward"], num_epochs=2, eval_every=0)),
        (sft_train, dict(num_steps=3)),
        (grpo_eval, dict(temperature=1, top_p=0.9, num_samples=2)),
    ],
)
@pytest.mark.filterwarnings("error")
def test_nothing_is_said_of_settings_that_have_an_effect(script, given, tmp_path):
    (tmp_path / "prompt.txt").write_text("Think inside <reasoning> and </reasoning>, then <answer>.")
    config = script.Config(**given, system_prompt_file=str(tmp_path / "prompt.txt"))
    warn_of_idle(config)
    warn_of_idle(dataclasses.replace(config, seed=7))


@pytest.mark.filterwarnings("error")
def test_what_an_evaluation_takes_from_its_model_s_training_is_not_called_idle(tmp_path):
    (tmp_path / "run_config.yaml").write_text("m3po_lambda: 0.3\nm3po_temperature: 0.7\nseed: 5\n")
    config = grpo_eval.Config(model=str(tmp_path))
    assert config.m3po_temperature == 0.7
    warn_of_idle(config, {"m3po_lambda": 0.3, "m3po_temperature": 0.7, "seed": 5})


@pytest.mark.parametrize(
    ("script", "call"), [(grpo_train, "train"), (sft_train, "train"), (grpo_eval, "evaluate")]
)
def test_a_run_begun_in_python_says_which_settings_have_no_effect(script, call, monkeypatch):
    def begin(*_, **__):
        raise InterruptedError("begun")

    monkeypatch.setattr(script, "make_accelerator" if script is grpo_eval else "Run", begin)
    idle = dict(top_p=0.9) if script is grpo_eval else dict(project="mine")
    with pytest.warns(UserWarning, match="has no effect"), pytest.raises(InterruptedError):
        getattr(script, call)(script.Config(**idle))


@pytest.mark.parametrize(
    "given",
    [
        dict(lora_alpha=32),
        dict(lora_target_modules=["q_proj"]),
        dict(load_in_4bit=True),
        dict(save_adapter=True),
    ],
)
@pytest.mark.parametrize("config_class", [Config, sft_train.Config])
def test_a_setting_of_lora_is_refused_without_it_from_python_too(config_class, given, monkeypatch):
    """Config(lora_alpha=32) trained every weight, after a warning in the middle of a notebook's output."""
    monkeypatch.setattr("running.settings.find_spec", lambda name: name)  # as if bitsandbytes were there
    [(name, value)] = given.items()
    line = f"{name}={value!r}: has no effect with lora_r=0: set lora_r too"
    with pytest.raises(SettingError, match=re.escape(line)):
        config_class(**given)
    flags = [f"--{name}", *(value if isinstance(value, list) else [str(value)])]
    with pytest.raises(SettingError, match=re.escape(line)):
        parse_config(config_class, flags)


def test_a_warm_start_s_file_gives_nothing_without_effect(tmp_path):
    (tmp_path / "warm.yaml").write_text("lora_alpha: 8\n")
    with pytest.raises(grpo_train.SettingError, match="lora_alpha=8: has no effect with lora_r=0"):
        Config(warm_start=str(tmp_path / "warm.yaml"))


@pytest.mark.parametrize(
    ("script", "flags", "then", "expected"),
    [
        (grpo_train, "--eval_every 0", "", dict(eval_every=0, eval_problems=0)),
        (grpo_train, "--reward FILE:f --num_epochs 2", "", dict(num_epochs=2.0)),
        (grpo_train, "--reward FILE:f", "--reward_set math", dict(reward=None, reward_set="math")),
        (grpo_train, "--m3po_lambda 0 --num_steps 3", "--num_epochs 1", dict(num_steps=None)),
        (grpo_train, "--system_prompt_file WORDS", "", dict(system_prompt="a </reasoning>")),
        (sft_train, "--num_steps 3", "--seed 1", dict(num_steps=3, num_epochs=None)),
        (grpo_eval, "--dataset arithmetic --seed 3", "--limit 5", dict(limit=5, seed=3)),
        (grpo_eval, "--dataset arithmetic", "--ask hi", dict(ask="hi")),
    ],
)
def test_the_run_config_of_a_run_is_a_config(script, flags, then, expected, tmp_path):
    """It was refused for its `versions`, and for settings that it holds although they have no effect."""
    (tmp_path / "f.py").write_text("def f(completions, **kwargs):\n    return [0.0]\n")
    (tmp_path / "words.txt").write_text("a </reasoning>")
    flags = flags.replace("FILE", f"{tmp_path}/f.py").replace("WORDS", f"{tmp_path}/words.txt")
    saved = resolved(parsed(script, flags)) | {"answerer": "x"}
    config = parsed(script, then, yaml.safe_dump(saved, sort_keys=False), tmp_path)
    assert {name: getattr(config, name) for name in expected} == expected
    only_settings = {name: saved[name] for name in script.Config.__dataclass_fields__}
    assert parsed(script, then, yaml.safe_dump(only_settings), tmp_path) == config


def test_the_run_config_of_a_run_that_could_have_drawn_by_pass_rates_is_a_config_unless_it_did(tmp_path):
    gone = dict(problem_sampling="uniform", pass_rate_samples=4, pass_rate_power=4.0, pass_rate_floor=0.05)
    saved = resolved(parsed(grpo_train, "--mu 2"))
    assert parsed(grpo_train, "", yaml.safe_dump(saved | gone), tmp_path).mu == 2
    line = "problem_sampling='pass_rate': is gone, since it gained nothing: leave it out"
    gone["problem_sampling"] = "pass_rate"
    with pytest.raises(SettingError, match=line):
        parsed(grpo_train, "", yaml.safe_dump(saved | gone), tmp_path)
    with pytest.raises(SettingError, match=line):
        parsed(grpo_train, "--problem_sampling pass_rate")


@pytest.mark.parametrize("script", [grpo_train, sft_train, grpo_eval])
def test_no_hint_names_a_setting_that_the_script_lacks(script):
    """`grpo_eval.py --use_peft` was told of --lora_r."""
    everywhere = {f for s in (grpo_train, sft_train, grpo_eval) for f in s.Config.__dataclass_fields__}
    lacking = everywhere - set(script.Config.__dataclass_fields__)
    lacking = {name for name in lacking if "_" in name} | {f"--{name}" for name in lacking}
    for name in REFUSED.keys() - set(script.Config.__dataclass_fields__):
        with pytest.raises(grpo_train.SettingError) as error:
            parse_config(script.Config, [f"--{name}"])
        told = str(error.value).partition(": ")[2]
        assert not set(re.findall(r"(?:--)?\w+", told)) & lacking, told


@pytest.mark.parametrize("name", ["", " ", ".", "..", "../x", "a/../../x"])
def test_an_evaluation_stays_in_its_output_dir(name):
    """`--name ..` wrote the report beside eval_runs."""
    with pytest.raises(SettingError, match="is no name of a folder in output_dir"):
        grpo_eval.Config(model="tiny", dataset="arithmetic", name=name)
    assert grpo_eval.Config(model="tiny", dataset="arithmetic", name="a/b").name == "a/b"


def test_an_output_that_is_closed_is_replaced_before_anything_is_said(monkeypatch):
    """Started by a daemon without one, a run ended in AttributeError before it began."""
    monkeypatch.setattr(sys, "argv", "grpo_train.py --model tiny --dataset arithmetic".split())
    monkeypatch.setattr(sys, "stdout", None)
    assert parse_early(Config, None).model == "tiny"
    assert sys.stdout.write("said") == 4


def test_an_output_that_is_full_is_no_traceback(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", "grpo_train.py --model tiny --dataset arithmetic".split())
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))
    with pytest.raises(SystemExit) as ended:
        parse_early(Config, None)
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("grpo_train.py: the disk: No space left on device")


def test_machines_compare_the_shards_of_a_data_folder_too(tmp_path):
    for name in ("train-00000-of-00001.jsonl", "test.jsonl", "training.txt"):
        (tmp_path / name).write_text("{}\n")
    named = named_files(Config(dataset=str(tmp_path)))
    assert {Path(path).name for _, path in named} == {"train-00000-of-00001.jsonl"}


def test_the_recipes_of_the_project_are_found_from_any_folder(tmp_path, monkeypatch):
    """Run from elsewhere, a recipe was found by its whole path, and the warm start that it names was not."""
    monkeypatch.chdir(tmp_path)
    config = parse_config(Config, ["--config", "configs/tiny.yaml", "--eval_problems", "8"])
    start = warm_start_settings(config)
    assert start.learning_rate == settings_from_file(sft_train.Config, config.warm_start)["learning_rate"]
    assert {name for name, _ in named_files(config)} == {"warm_start"}
    study = read_study("configs/study_tiny.yaml", Config, sft_train.Config, warm_start_settings, Options())
    assert "An example of a study" in study.plan["text"]
    Path("configs").mkdir()
    Path("configs/tiny.yaml").write_text("num_steps: 7\n")
    assert settings_from_file(Config, "configs/tiny.yaml") == {"num_steps": 7}, "one's own comes first"


@pytest.mark.parametrize("script", [grpo_train, sft_train])
def test_settings_that_are_no_config_are_one_line(script):
    """A dict of settings, as other trainers take one, ended in vars() argument must have __dict__."""
    with pytest.raises(SettingError, match=r"must be a Config of this script: give Config\(\*\*settings\)"):
        script.train({"model": "tiny"})

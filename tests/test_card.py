"""The model card and the upload."""

import json
import shutil
import sys
from dataclasses import replace

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoModelForCausalLM, pipeline

import grpo_eval
import grpo_train
import sft_train
import solver
from errors import DataError, RunError, SettingError
from learning.models import load_tokenizer
from problems.problem import Problem
from problems.sources import GIVEN, load_problems
from reporting import card
from reporting.files import read_run_config
from running.parsing import parse_config
from small_recipes import config_of, missing


def test_the_card_tells_what_was_done_and_loads(recipe_run):
    card = ModelCard.load(recipe_run / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert "| `reward_set` | oneshot |" in card.text
    assert "problems held out" in card.text
    assert "lora_alpha" not in card.text
    low, high = (card.text.split("| after | ")[1].split("(")[1].split(")")[0].split(" to "))[:2]
    assert 0 <= float(low) < float(high) <= 1
    code = card.text.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")


def test_push_uploads_what_a_user_needs_and_nothing_else(recipe_start, tmp_path, monkeypatch, capsys):
    calls = []

    def create_repo(self, repository, **options):
        calls.append((repository, options))

    def upload_folder(self, folder_path, **options):
        shutil.copytree(folder_path, tmp_path / "hub")  # what the links point to
        calls.append(options)
        return "https://example.org/me/mine"

    monkeypatch.setattr(card.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(card.HfApi, "upload_folder", upload_folder)
    settings = dict(push_to_hub=True, hub_model_id="me/mine", save_every=1)
    (tmp_path / "mine.py").write_text("def mine(completions, **k):\n    return [0.0] * len(completions)\n")
    settings |= dict(reward=[f"{tmp_path}/mine.py:mine"], reward_set="grpo_m3po")
    config = config_of("oneshot", recipe_start, tmp_path / "out", grpo_train, **settings)
    grpo_train.train(config)
    (tmp_path / "out" / "wandb" / "run").mkdir(parents=True)
    (tmp_path / "out" / "wandb" / "run" / "tokenizer.json").write_text("{}")
    created, upload = calls
    assert created == ("me/mine", {"private": True, "exist_ok": True})
    files = [str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()]
    patterns = {name: upload[name] for name in ("allow_patterns", "ignore_patterns")}
    sent = set(filter_repo_objects(files, **patterns))
    needed = "README.md config.json model.safetensors tokenizer.json generation_config.json "
    needed += "run_config.yaml metrics.jsonl"
    assert set(needed.split()) <= sent
    assert not any("/" in name or name in ("rollouts.jsonl", "evaluations.jsonl") for name in sent), (
        "no checkpoint, no log of completions"
    )
    hub = tmp_path / "hub"
    assert sent == {str(path.relative_to(hub)) for path in hub.rglob("*")}
    machine = (str(tmp_path).encode(), str(recipe_start).encode())
    for path in hub.rglob("*"):
        assert not any(name in path.read_bytes() for name in machine), f"{path} holds a path of this machine"
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda model, name: str(hub / name))
    there = grpo_eval.Config(model="me/mine", dataset=str(recipe_start))
    assert (there.answer_format, there.max_completion_length) == ("xml", config.max_completion_length)
    assert any("checkpoint-1/" in name for name in files)
    assert "uploaded to https://example.org/me/mine" in capsys.readouterr().out

    def refuses(self, *args, **kwargs):
        raise OSError("401 unauthorized")

    monkeypatch.setattr(card.HfApi, "create_repo", refuses)
    reason = r"is saved in .*, but not uploaded \(OSError: 401 unauthorized\): .*--resume true uploads it"
    with pytest.raises(RunError, match=reason):
        card.push(tmp_path / "out", config.hub_model_id, config.hub_private)
    with pytest.raises(SettingError, match="hub_model_id"):
        parse_config(grpo_train.Config, "--push_to_hub true".split())


def test_the_saved_model_loads_in_a_plain_pipeline(recipe_run):
    ask = pipeline("text-generation", str(recipe_run))
    reply = ask([{"role": "user", "content": "What is 3 halves?"}], max_new_tokens=8, do_sample=False)[0][
        "generated_text"
    ][-1]
    assert reply["role"] == "assistant"


def test_a_hub_model_without_settings_or_a_hub_that_cannot_be_asked_gives_none(monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*_):
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    with pytest.warns(UserWarning, match="me/mine: the hub cannot be asked for its run_config.yaml"):
        assert read_run_config("me/mine") == {}
    assert read_run_config("a_folder_that_is_not_there") == {}


def test_a_folder_of_data_is_not_taken_for_a_data_set_of_the_hub(tmp_path, monkeypatch):
    """A model trained on one's own folder `math` was evaluated on MATH-500 once it was pushed."""
    (tmp_path / "data" / "math").mkdir(parents=True)
    shared = card.shared_settings({"dataset": str(tmp_path / "data" / "math")})
    assert shared == {"dataset": "./math"}
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda name, *args, **kwargs: asked.append(name) or [])
    with pytest.raises(DataError):
        load_problems(shared["dataset"], "test")
    assert asked == ["./math"]
    for name in ("math", "openai/gsm8k", "problems.jsonl"):
        assert card.shared_settings({"dataset": name}) == {"dataset": name}


def test_the_card_tells_what_came_before(tmp_path):
    """A supervised start is half of what the model knows, and the card was silent about it."""
    for name, model, steps in (("sft", "me/base", 7), ("out", str(tmp_path / "sft"), 3)):
        (tmp_path / name).mkdir()
        settings = dict(model=model, dataset="openai/gsm8k")
        (tmp_path / name / "run_config.yaml").write_text(yaml.safe_dump(settings))
        line = {"step": steps, "train_seconds": 60}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    shutil.copytree(tmp_path / "sft", tmp_path / "out" / "warm_start")
    settings = dict(lora_r=0, answer_format="xml", max_completion_length=8, num_generations=2)
    settings |= dict(versions={}, commit="c", dataset="d")
    chain = settings | dict(model=str(tmp_path / "sft"), warm_start="none")
    text = card.model_card(chain, tmp_path / "out", "s", "d", [])
    assert "sft was made: 7 steps of supervised fine-tuning on openai/gsm8k, from me/base." in text
    assert "base_model: me/base" in text
    warm = settings | dict(model="me/base", warm_start="warm.yaml")
    text = card.model_card(warm, tmp_path / "out", "s", "d", [])
    assert "A warm start came first: 7 steps of supervised fine-tuning on openai/gsm8k" in text
    plain = settings | dict(model="me/base", warm_start="none")
    assert "fine-tuning" not in card.model_card(plain, tmp_path / "out", "s", "d", [])


@pytest.mark.parametrize(
    ("settings", "rows", "time"),
    [
        (dict(reward=["/home/me/r.py:f=2"]), "| `reward` | ['r.py:f=2'] |", "12 seconds"),
        (dict(reward_set="math"), "| `reward_set` | math |", "12 seconds"),
        (dict(answer_format="/home/me/mine.py:mine"), "| `reward_set` | grpo_m3po |", "12 seconds"),
        (dict(reward_set=GIVEN), "| `reward_set` | given in Python |", "2 minutes"),
    ],
)
def test_the_recipe_of_the_card_is_what_was_used_and_has_no_path_of_the_machine(
    settings, rows, time, tmp_path
):
    """It had a reward_set beside the rewards that took its place, the folder of an answer format of the
    user's, and `0 minutes of training`."""
    seconds = {"12 seconds": 12.3, "2 minutes": 128}[time]
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 3, "train_seconds": seconds}))
    settings = dict(answer_format="xml", reward_set="grpo_m3po", reward=None) | settings
    settings |= dict(lora_r=0, max_completion_length=8, dataset="d", model="m", versions={}, commit="c")
    text = card.model_card(settings, tmp_path, "s", "d", ["answer_format", "reward_set", "reward"])
    table = text.partition("|---|---|\n")[2].partition("\n\n")[0]
    assert f", {time} of training." in text
    assert table.splitlines()[1:] == [rows]
    assert "/home" not in text


TOLD = [  # what a resumed run changed, and what the card says of it
    (("answer_format", "xml", "/home/me/mine.py:mine"), "`answer_format` xml before, `mine.py:mine` since"),
    (("dataset", "/home/me/a.jsonl", "openai/gsm8k"), "`dataset` a.jsonl before, gsm8k since"),
    (("reward", None, ["/home/me/r.py:f=2"]), "`reward` None before, `['r.py:f=2']` since"),
    (("system_prompt", None, "# So\n</reasoning>"), "`system_prompt` None before, `# So </reasoning>` since"),
    (("system_prompt", None, "Think. " * 20), "`system_prompt` (see run_config.yaml)"),
    (("data", "0a1b", "2c3d"), "the problems or their prompts"),
    (("world_size", 1, 2), "`world_size` 1 before, 2 since"),
]


@pytest.mark.parametrize(("change", "told"), TOLD)
def test_what_was_changed_on_the_way_goes_out_in_a_line_without_paths(change, told, tmp_path):
    """A text was a heading of the card, and what may be a path was not told at all."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "train_seconds": 60}')
    name, *pair = change
    changes = [{"after_step": 2, "changed": {name: pair, "warm_start": ["/home/a.yaml", "/home/me/a.yaml"]}}]
    settings = dict(lora_r=0, answer_format="xml", max_completion_length=8, dataset="d", model="me/base")
    settings |= dict(versions={}, commit="c", changes=changes, warm_start_cache="/home/me/cache")
    text = card.model_card(settings, tmp_path, "s", "d", [])
    assert f"\n\nChanged after step 2: {told}.\n\nVersions" in text
    assert "home" not in text + yaml.safe_dump(card.shared_settings(settings))


def test_the_card_of_a_finished_run_that_is_uploaded_has_the_settings_it_was_trained_with(
    recipe_start, tmp_path, monkeypatch
):
    """With --resume_anyway it had those of the last command, by which no step was taken."""
    config = config_of("oneshot", recipe_start, tmp_path / "out", grpo_train, learning_rate=1e-3)
    grpo_train.train(config)
    monkeypatch.setattr(card.HfApi, "create_repo", lambda *args, **kwargs: None)
    monkeypatch.setattr(card.HfApi, "upload_folder", lambda *args, **kwargs: "there")
    again = dict(resume=True, resume_anyway=True, push_to_hub=True, hub_model_id="me/mine")
    grpo_train.train(replace(config, learning_rate=0.5, **again))
    text = (tmp_path / "out" / "README.md").read_text()
    assert "| `learning_rate` | 0.001 |" in text
    assert 'pipeline("text-generation", "me/mine")' in text


def test_a_folder_that_reads_as_a_number_stays_a_name(recipe_start, tmp_path, monkeypatch):
    """The run_config.yaml of --output_dir 1e-5 was no --config, nor could its model be gone on with."""
    monkeypatch.chdir(tmp_path)
    config = config_of("oneshot", recipe_start, "1e-5", grpo_train)
    grpo_train.train(config)
    assert parse_config(grpo_train.Config, ["--config", "1e-5/run_config.yaml"]).output_dir == "1e-5"
    grpo_train.train(replace(config, model="1e-5", output_dir="2e-5"))
    assert "1e-5 was made: " in (tmp_path / "2e-5" / "README.md").read_text()


@pytest.mark.slow
@missing("peft")
def test_an_adapter_names_its_base_and_loads_with_peft_s_auto_classes(recipe_start, tmp_path):
    from peft import AutoPeftModelForCausalLM

    settings = dict(lora_r=4, save_adapter=True, learning_rate=0.1, eval_every=0, eval_problems=0)
    settings |= dict(max_completion_length=64)
    sft_train.train(config_of("math_sft", recipe_start, tmp_path / "out", sft_train, **settings))
    adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out" / "adapter", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(recipe_start / "model", dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        theirs, ours, before = (model(ids).logits for model in (adapted, merged, plain))
    assert torch.allclose(theirs, ours, atol=1e-4)
    assert not torch.allclose(before, ours, atol=1e-2)


def test_an_adapter_over_a_base_of_this_machine_is_not_uploaded(tmp_path):
    for name, base in (("hub", "me/base"), ("here", str(tmp_path))):
        (tmp_path / name / "adapter").mkdir(parents=True)
        settings = json.dumps({"base_model_name_or_path": base})
        (tmp_path / name / "adapter" / "adapter_config.json").write_text(settings)
        (tmp_path / f"{name}_staged").mkdir()
        card._stage(tmp_path / name, tmp_path / f"{name}_staged")
    assert (tmp_path / "hub_staged" / "adapter" / "adapter_config.json").exists()
    assert not (tmp_path / "here_staged" / "adapter").exists()


def test_the_card_and_the_help_ask_the_tiny_model_what_it_can_read(trained, fault_start):
    """They asked for the price of 14 pens: words of which its tokenizer knows two."""
    tokenizer, asked = load_tokenizer("tiny"), card.KNOWN["arithmetic"]
    assert f'"content": "{asked}"' in (trained / "README.md").read_text()
    assert f'--ask "{asked}"' in grpo_eval.__doc__
    assert f'"{asked}"' in solver.__doc__
    assert grpo_eval.unreadable(tokenizer, [Problem(asked, "17")]) == []
    unreadable = grpo_eval.unreadable(tokenizer, [Problem(card.ASKED, "42")])
    assert unreadable == ["A", "pen", "costs", "dollars.", "much", "do", "cost?"]
    assert grpo_eval.unreadable(load_tokenizer(str(fault_start / "model")), [Problem("☃", "")]) == []


def test_a_question_that_the_model_cannot_read_is_answered_with_a_note(trained, monkeypatch, capsys):
    words = [
        "grpo_eval.py",
        "--model",
        str(trained),
        "--ask",
        "Ann sees 3 zebras",
        "--max_completion_length",
        "4",
    ]
    monkeypatch.setattr(sys, "argv", words)
    grpo_eval.main()
    shown = capsys.readouterr()
    assert "note: the model's tokenizer has no token for sees, zebras: it reads <unk> there" in shown.err
    assert "note" not in shown.out

"""The model card and the upload."""

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects
from transformers import pipeline

import grpo_train
from errors import RunError, SettingError
from reporting import card
from running.parsing import parse_config
from small_recipes import config_of


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

    def upload_folder(self, **options):
        calls.append(options)
        return "https://example.org/me/mine"

    monkeypatch.setattr(card.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(card.HfApi, "upload_folder", upload_folder)
    settings = dict(push_to_hub=True, hub_model_id="me/mine", save_every=1)
    config = config_of("oneshot", recipe_start, tmp_path / "out", grpo_train, **settings)
    grpo_train.train(config)
    (tmp_path / "out" / "wandb" / "run").mkdir(parents=True)
    (tmp_path / "out" / "wandb" / "run" / "tokenizer.json").write_text("{}")
    created, upload = calls
    assert created == ("me/mine", {"private": True, "exist_ok": True})
    files = [str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()]
    patterns = {name: upload[name] for name in ("allow_patterns", "ignore_patterns")}
    sent = set(filter_repo_objects(files, **patterns))
    needed = "README.md config.json model.safetensors tokenizer.json generation_config.json"
    assert set(needed.split()) <= sent
    assert not any("/" in name or "jsonl" in name or "run_config" in name for name in sent), (
        "no checkpoint, no log, no path of this machine"
    )
    assert str(tmp_path) not in (tmp_path / "out" / "README.md").read_text()
    assert any("checkpoint-1/" in name for name in files)
    assert "uploaded to https://example.org/me/mine" in capsys.readouterr().out

    def refuses(self, *args, **kwargs):
        raise OSError("401 unauthorized")

    monkeypatch.setattr(card.HfApi, "create_repo", refuses)
    reason = r"the model is saved in .*, but not uploaded \(OSError: 401 unauthorized\)"
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

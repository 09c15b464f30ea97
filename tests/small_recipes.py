"""A small model, and the shipped recipes cut down to it."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

import grpo_train
from running.folder import save_model
from running.parsing import settings_from_file
from small_models import build_model, with_layers

ROOT = Path(__file__).resolve().parents[1]


def missing(*packages):
    return pytest.mark.skipif(
        any(importlib.util.find_spec(p) is None for p in packages), reason=f"needs {' and '.join(packages)}"
    )


@pytest.fixture(scope="session")
def recipe_start(tokenizer, tmp_path_factory):
    """A small random model and made-up problems with worked solutions, levels and subjects."""
    folder = tmp_path_factory.mktemp("start")
    model = with_layers(build_model("llama", tokenizer), 1)
    save_model(model, tokenizer, folder / "model", torch.float32)
    rows = []
    for i in range(1, 13):
        answer, subject = f"\\frac{{{i}}}{{2}}", ("Algebra", "Geometry")[i % 2]
        asked = {
            "problem": f"What is {i} halves?",
            "solution": f"It is \\boxed{{{answer}}}.",
            "answer": answer,
        }
        rows.append(asked | {"level": 1 + i % 3, "subject": subject})
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


SMALL = dict(
    num_steps=2,
    num_epochs=None,
    batch_size=2,
    max_completion_length=12,
    eval_every=2,
    eval_problems=3,
    report_to=None,
    cpu_threads=1,
    warmup_ratio=0.0,
)


def config_of(recipe, recipe_start, out, script, **settings):
    given = script.__dict__.get("settings_from_file") or settings_from_file
    small = {**SMALL, "num_generations": 4} if script is grpo_train else SMALL
    values = {
        **given(script.Config, ROOT / "configs" / f"{recipe}.yaml"),
        **small,
        "model": str(recipe_start / "model"),
        "dataset": str(recipe_start),
        "output_dir": str(out),
    }
    return script.Config(**{**values, **settings})


@pytest.fixture(scope="session")
def recipe_run(recipe_start, tmp_path_factory):
    out = tmp_path_factory.mktemp("recipe_run") / "my-model"
    grpo_train.train(config_of("oneshot", recipe_start, out, grpo_train, eval_every=2))
    return out

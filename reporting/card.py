"""The model card of a run, and the upload of a finished model to the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData
from scipy import stats

from errors import RunError
from problems.prompts import system_prompt
from problems.sources import HUB
from reporting.files import read_metrics
from running.settings import names_with, resolved

UPLOADED = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*", "*.jinja", "README.md", "adapter/*",
            "special_tokens_map.json", "vocab.*", "merges.txt", "*.model", "*.py"]  # fmt: skip


NOT_UPLOADED = [
    "checkpoint-*/*",
    "warm_start/*",
    "trackers/*",
    "wandb/*",
    "best/*",
    ".*",
]  # what of these lies in folders


def model_card(config, folder):
    """The card as text: what was trained on what and how, what came out with 95% intervals, how to load it; every number is the run's own."""
    lines, settings = read_metrics(folder), resolved(config)
    last = lines[-1]
    name = config.hub_model_id or Path(folder).resolve().name
    method = (
        ("GRPO with M3PO" if getattr(config, "m3po_lambda", 0) else "GRPO")
        if hasattr(config, "num_generations")
        else "supervised fine-tuning"
    )
    dataset = HUB.get(config.dataset, {"": (config.dataset, None)})[""][0]
    base = config.model if "/" in config.model and not Path(config.model).exists() else None
    data = ModelCardData(
        base_model=base, datasets=[dataset] if "/" in dataset and not Path(dataset).exists() else None, library_name="transformers",
        pipeline_tag="text-generation", tags=["grpo", "m3po"] if "M3PO" in method else [method.split()[0].lower()], model_name=name,
    )  # fmt: skip
    settings["reward"] = (
        [Path(spec).name for spec in settings["reward"]] if settings.get("reward") else None
    )  # no path of a machine goes out
    dataset = dataset if "/" not in dataset or not Path(dataset).exists() else Path(dataset).name
    recipe = "\n".join(
        f"| `{key}` | {settings[key]} |"
        for key in names_with(type(config), "in_card")
        if settings.get(key) is not None and (config.lora_r or not key.startswith("lora"))
    )
    text = f"""---
{data.to_yaml()}
---

# {name.rpartition("/")[2]}

{Path(config.model).name} after {last["step"]} steps of {method} on {dataset}, {last["train_seconds"] / 60:.0f} minutes of training.

{_results(lines)}
## Use

The model was trained with this system prompt, and answers in the format that it asks for (`{config.answer_format}`):

```python
from transformers import pipeline

system = {system_prompt(config)!r}
ask = pipeline("text-generation", "{name}")
chat = [{{"role": "system", "content": system}}, {{"role": "user", "content": "A pen costs 3 dollars. How much do 14 pens cost?"}}]
print(ask(chat, max_new_tokens={config.max_completion_length}, do_sample=False)[0]["generated_text"][-1]["content"])
```

## Recipe

| setting | value |
|---|---|
{recipe}

Versions: {", ".join(f"{k} {v}" for k, v in settings["versions"].items())}; commit `{settings["commit"]}`.
"""
    return ModelCard(text).content


def _results(lines):
    """The held-out accuracy before and after, as a table."""
    before = next((line["eval_accuracy_before"] for line in lines if "eval_accuracy_before" in line), None)
    evaluated = [line for line in lines if "eval_accuracy" in line]
    if not evaluated:
        return "No held-out problems were evaluated in the run.\n"
    count, rows = (
        evaluated[-1]["eval_questions"],
        [("before", before), ("after", evaluated[-1]["eval_accuracy"])],
    )
    what = (
        f"Greedy accuracy on {count} problems held out from the training split, with 95% intervals (Wilson)"
    )
    text = f"{what}:\n\n| | accuracy |\n|---|---|\n"
    for which, value in rows:
        if value is not None:
            low, high = stats.binomtest(round(value * count), count).proportion_ci(method="wilson")
            text += f"| {which} | {value:.3f} ({low:.3f} to {high:.3f}) |\n"
    return text


def push(config, folder):
    """Upload the finished directory, without checkpoints and logs of completions; returns its address."""
    api = HfApi()
    try:
        api.create_repo(config.hub_model_id, private=config.hub_private, exist_ok=True)
        return api.upload_folder(
            repo_id=config.hub_model_id, folder_path=str(folder), allow_patterns=UPLOADED, ignore_patterns=NOT_UPLOADED,
            commit_message=f"After {Path(folder).resolve().name}"
        )  # fmt: skip
    except Exception as error:  # the network, a login, a name: whatever it is, the model is there
        raise RunError(
            f"the model is saved in {folder}, but not uploaded ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        ) from error

"""The model card of a run, and the upload of a finished model to the Hugging Face hub."""

import json
import os
import shutil
import tempfile
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import filter_repo_objects

from errors import RunError, counted, one_line
from reporting.files import changes_of, read_metrics, read_run_config, yaml_text
from reporting.statistics import clopper_pearson

UPLOADED = (
    "*.safetensors *.safetensors.index.json config.json generation_config.json tokenizer* *.jinja README.md "
    "adapter/* special_tokens_map.json vocab.* merges.txt *.model *.py run_config.yaml metrics.jsonl"
).split()
# settings that may be paths
PATHS = "model dataset system_prompt_file answer_format warm_start warm_start_cache output_dir reward".split()
NOT_UPLOADED = "checkpoint-*/* warm_start/* trackers/* wandb/* best/* .*".split()  # though named above

CARD = """---
{header}
---

# {title}

{model} after {steps} of {method} on {dataset}, {time} of training.{start}

{results}
## Use

The model was trained with this system prompt, and answers in the format that it asks for (`{answer_format}`):

```python
from transformers import pipeline

system = {system_prompt!r}
ask = pipeline("text-generation", "{name}")
{use}
```

## Recipe

| setting | value |
|---|---|
{recipe}
{changes}
Versions: {versions}; commit `{commit}`.
"""


ASKED = "A pen costs 3 dollars. How much do 14 pens cost?"
# The tiny model knows the words of its task alone
KNOWN = {"arithmetic": "Ann has 12 pens and gets 5 more. How many pens does Ann have now?"}
USES = {
    "chat": """chat = [{{"role": "system", "content": system}}, {{"role": "user", "content": "{asked}"}}]
print(ask(chat, max_new_tokens={limit}, do_sample=False)[0]["generated_text"][-1]["content"])""",
    "raw": """prompt = system.replace("{{question}}", "{asked}")  # raw text, no chat template
print(ask(prompt, max_new_tokens={limit}, do_sample=False)[0]["generated_text"])""",
}


def model_card(settings, folder, system_prompt, dataset, recipe):
    """The card as text: what was trained on what and how, the held-out accuracy, how to load the model.

    settings: every setting of the run, with `versions` and `commit`; dataset: its address on the hub, or a
    path; recipe: the names of the settings to list.
    """
    lines = read_metrics(folder)
    use = USES[settings.get("prompt_format", "chat")]
    name = settings.get("hub_model_id") or Path(folder).resolve().name
    header = ModelCardData(
        base_model=_origin(settings["model"]),
        datasets=[dataset] if _is_hub_address(dataset) else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=_tags(settings),
        model_name=name,
    )
    text = CARD.format(
        header=header.to_yaml(),
        title=name.rpartition("/")[2],
        model=Path(settings["model"]).name,
        steps=counted(lines[-1]["step"], "step"),
        method=_method(settings),
        dataset=dataset if _is_hub_address(dataset) else Path(dataset).name or dataset,
        time=_time(lines[-1]["train_seconds"]),
        results=_results(lines),
        start=_start(settings, Path(folder) / "warm_start"),
        answer_format=Path(settings["answer_format"]).name,
        system_prompt=system_prompt,
        name=name,
        use=use.format(asked=KNOWN.get(settings["dataset"], ASKED), limit=settings["max_completion_length"]),
        recipe=_recipe_rows(settings, recipe),
        changes="".join(f"\n{line}\n" for line in changes_of({"changes": shared_changes(settings)})),
        versions=", ".join(f"{package} {version}" for package, version in settings["versions"].items()),
        commit=settings["commit"],
    )
    return ModelCard(text).content


def _is_hub_address(address):
    return "/" in address and not os.path.isabs(address) and not Path(address).exists()


def _origin(model):
    """The model on the hub that a chain of runs began with, or None."""
    seen = set()
    while not _is_hub_address(model) and model not in seen:
        seen.add(model)
        model = read_run_config(model).get("model", model)
    return model if _is_hub_address(model) else None


def _start(settings, warm_start):
    """What the model had learned before this run: its warm start, or the run that made it."""
    trained = settings["model"] if settings.get("warm_start", "none") == "none" else warm_start
    before = read_run_config(trained) if Path(trained).is_dir() else {}
    lines = read_metrics(trained) if before else []
    if not lines:
        return ""
    what = "A warm start came first" if trained == warm_start else f"{Path(trained).name} was made"
    data = before["dataset"] if _is_hub_address(before["dataset"]) else Path(before["dataset"]).name
    steps = f"{counted(lines[-1]['step'], 'step')} of {_method(before)} on {data}"
    return f"\n{what}: {steps}, from {_origin(before['model']) or Path(before['model']).name}."


def _method(settings):
    if "num_generations" not in settings:
        return "supervised fine-tuning"
    control = settings.get("m3po_control") or "none"
    if not settings.get("m3po_lambda"):
        return "GRPO"
    return "GRPO with M3PO" if control == "none" else f"GRPO with M3PO's control `{control}`"


def _tags(settings):
    if "num_generations" not in settings:
        return ["supervised"]
    return ["grpo", "m3po"] if _method(settings) == "GRPO with M3PO" else ["grpo"]


def _time(seconds):
    return counted(round(seconds), "second") if seconds < 90 else counted(round(seconds / 60), "minute")


def _recipe_rows(settings, names):
    """Rows of the card's table; paths are cut to names, since no path of a machine goes out.

    A reward_set is left out where rewards of the user's took its place.
    """
    shown = settings | {"answer_format": Path(settings["answer_format"]).name, "reward": None}
    if settings.get("reward"):
        shown |= {"reward": [Path(reward).name for reward in settings["reward"]], "reward_set": None}
    rows = []
    for name in names:
        value = shown.get(name)
        if value is not None and (settings["lora_r"] or not name.startswith("lora")):
            rows.append(f"| `{name}` | {value} |")
    return "\n".join(rows)


def _results(lines):
    """The table of the accuracies before and after training, with 95% intervals."""
    before = [line["eval_accuracy_before"] for line in lines if "eval_accuracy_before" in line]
    evaluated = [line for line in lines if "eval_accuracy" in line]
    if not evaluated:
        return "No held-out problems were evaluated in the run.\n"
    after, held_out = [evaluated[-1]["eval_accuracy"]], evaluated[-1]["eval_questions"]
    problems = f"{counted(held_out, 'problem')} held out from the training split"
    rows = [f"Greedy accuracy on {problems}, with exact 95% intervals:", "", "| | accuracy |", "|---|---|"]
    for when, accuracies in (("before", before[:1]), ("after", after)):
        for accuracy in accuracies:
            low, high = clopper_pearson(round(accuracy * held_out), held_out)
            rows.append(f"| {when} | {accuracy:.3f} ({low:.3f} to {high:.3f}) |")
    return "\n".join(rows) + "\n"


def shared_settings(settings):
    """The settings without the folders of this machine: a path is cut to its name."""
    shared = dict(settings)
    for name in PATHS:
        value = settings.get(name)
        if value is not None and not _is_hub_address(value):
            shared[name] = _file_names(value)
    if "changes" in shared:
        shared["changes"] = shared_changes(settings)
    if Path(settings["dataset"]).is_dir():  # not to be taken for a data set of the hub, gsm8k or math say
        shared["dataset"] = f"./{shared['dataset']}"
    return shared


def shared_changes(settings):
    """What a resumed run changed, each path cut to its name; what is the same then is left out."""
    shared = []
    for change in settings.get("changes") or ():
        pairs = {
            name: [_file_names(value) for value in pair] if name in PATHS else pair
            for name, pair in change["changed"].items()
        }
        shared.append(
            change | {"changed": {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}}
        )
    return shared


def _file_names(value):
    """A path, or each of several, without its folders; None stays."""
    if isinstance(value, list):
        return [Path(item).name for item in value]
    return value and Path(value).name


def _stage(folder, staging):
    """Links to what is uploaded, and run_config.yaml without paths of this machine.

    An adapter whose base is on this machine only stays here: nobody else could load it.
    """
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    for name in filter_repo_objects(files, allow_patterns=UPLOADED, ignore_patterns=NOT_UPLOADED):
        (staging / name).parent.mkdir(exist_ok=True)
        os.symlink((folder / name).resolve(), staging / name)
    settings = staging / "run_config.yaml"
    if settings.exists():
        settings.unlink()
        shared = yaml_text(shared_settings(read_run_config(folder)))
        settings.write_text(shared, encoding="utf-8")
    adapter = staging / "adapter" / "adapter_config.json"
    if adapter.exists():
        base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        if base is None or not _is_hub_address(base):
            shutil.rmtree(adapter.parent)


def push(folder, repository, private):
    """Upload the finished directory with its settings and metrics; returns its address.

    Checkpoints, logs of completions and paths of this machine stay here.
    """
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as staging:
            _stage(Path(folder), Path(staging))
            return api.upload_folder(
                repo_id=repository,
                folder_path=staging,
                allow_patterns=UPLOADED,
                ignore_patterns=NOT_UPLOADED,
                commit_message=f"After {Path(folder).resolve().name}",
            )
    except Exception as error:  # a network, a login, a name: whatever it is, the model is saved
        reason = f"{type(error).__name__}: {one_line(error)}"
        saved = f"the model is saved in {folder}, but not uploaded ({reason})"
        raise RunError(f"{saved}: when that is mended, --resume true uploads it") from error

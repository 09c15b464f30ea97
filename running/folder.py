"""The folder of a run: refused, made, locked, and the models saved into it."""

import contextlib
import copy
import json
import os
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

from safetensors import SafetensorError
from safetensors.torch import save_file

from answers.user_files import code_of
from errors import NoRoomError, SettingError
from learning.models import merged_state
from learning.parallel import raise_on_all, together
from problems.prompts import Prompting
from problems.sources import GIVEN, HUB
from reporting.card import model_card, push
from reporting.files import (
    FINISHED,
    LOGS,
    MODEL_FILES,
    STRANGERS,
    read_run_config,
    step_of,
    write_whole,
    yaml_text,
)
from running.contract import noted
from running.locks import forget, hold
from running.settings import names_with, refuse_folder, resolved

BEST = "best.json"  # in output_dir/best: the step and the held-out accuracy of the model there
# What a run leaves beside its logs and its model
DRAWN = ("curves.svg", "curves.png", "report.html")
FOLDERS = ("best", "adapter", "trackers", "wandb", ".saving")


def refuse_used(config):
    """Refuse an output_dir that holds a run, or that cannot be a folder, before any work is done."""
    refuse_folder(config)
    is_left = (Path(config.output_dir) / "run_config.yaml").exists() and not config.resume
    if config.overwrite_output_dir or is_left:
        _refuse_to_clear_inputs(config)


def lock_folder(folder, accelerator, named):
    """Make a folder and lock it for this run; returns the lock, which is to be closed in the end, or None.

    named: the setting that names it, and its value. Called last before the first step, so that a refused run
    leaves nothing. Every process must call it.
    """
    lock, problem = None, None
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            open(folder / ".lock", "a").close()
        except OSError as error:
            problem = f"cannot be written to ({error.strerror})"
        else:
            lock, problem = _lock(folder)
    raise_on_all(SettingError(*named, problem) if problem else None)
    return lock


def _lock(folder):
    """The lock, and why the folder is another run's or None; a file system without locks only warns."""
    try:
        return hold(folder / ".lock"), None
    except BlockingIOError:
        return None, "another run is writing there at this moment: wait for it, or choose another"
    except OSError as error:
        advice = "see to it that no other run writes there"
        warnings.warn(f"{folder} cannot be locked ({error.strerror}): {advice}", stacklevel=2)
    return None, None


def start_logs(run, state):
    """Write every setting into the folder; a run without a state begins anew, with nothing of an earlier one.

    A warm start that begins clears the folder of its run too, which is overwritten only after it.
    """
    config, folder, outer = run.config, run.folder, run.outer
    if run.accelerator.is_main_process:
        run.checkpoints.begin(state)
        if state is None:
            clear(config)
            if outer is not None and outer.config.overwrite_output_dir and not outer.config.resume:
                clear(outer.config)
            for name in LOGS:
                (folder / name).write_text("")
        changes = run.progress.changes
        recorded = resolved(config) | ({"changes": changes} if changes else {})
        write_whole(folder / "run_config.yaml", yaml_text(recorded))
    run.accelerator.wait_for_everyone()


def clear(config):
    """Delete what an earlier run left in output_dir; files of other names stay."""
    for path in _left_behind(config):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _left_behind(config):
    """The files and folders of an earlier run in output_dir, but for the run_config.yaml that shows it; or of
    the model that is there.
    """
    folder = Path(config.output_dir)
    warm_start = folder / "warm_start"
    is_left = (warm_start / "run_config.yaml").exists() and getattr(config, "warm_start", "none") == "none"
    others = [warm_start] if is_left and config.overwrite_output_dir else []
    if not (folder / "run_config.yaml").exists():  # another tool's model, which is overwritten only if asked
        names = (*MODEL_FILES, "README.md") if config.overwrite_output_dir else ()
        return others + [path for name in names for path in folder.glob(name)]
    names = (*MODEL_FILES, *LOGS, FINISHED, STRANGERS, "README.md", *DRAWN, *FOLDERS)
    names += ("warm_start.json", ".checkpoint.*")
    found = others + [path for name in names for path in folder.glob(name)]
    numbered = folder.glob("checkpoint-*")
    found += [path for path in numbered if step_of(path) is not None]
    return found


def _refuse_to_clear_inputs(config):
    """Refuse to overwrite a folder whose earlier run holds what this one reads."""
    left = [path.resolve() for path in _left_behind(config)]
    read = [("model", config.model), ("dataset", config.dataset), *code_of(config)]
    read += [(name, getattr(config, name, None)) for name in ("system_prompt_file", "warm_start")]
    for name, value in read:
        path = Path(value or "none").resolve()
        weights = (path / "config.json") if name == "model" else path
        if any(lost in (path, weights, *path.parents) for lost in left):
            remedy = (
                f"is of the run in {config.output_dir} that would be overwritten: choose another output_dir"
            )
            raise SettingError(name, value, remedy)


def save_best(run):
    """Save the policy into output_dir/best, with its step and accuracy. Every process must call it."""
    best, progress = run.folder / "best", run.progress
    (best / BEST).unlink(missing_ok=True)  # so that it never tells of other weights
    _save_policy(run, best)
    if run.accelerator.is_main_process:
        # grpo_eval.py reads the format from it
        shutil.copyfile(run.folder / "run_config.yaml", best / "run_config.yaml")
        note = {"step": progress.best_step, "eval_accuracy": progress.best}
        write_whole(best / BEST, json.dumps(note) + "\n")
    run.say(f"best so far: {_best_of(run)}")


def _best_of(run):
    """The best held-out accuracy of a run, its step, and where its model is."""
    step = "an earlier step" if run.progress.best_step is None else f"step {run.progress.best_step}"
    return f"held-out accuracy {run.progress.best:.3f} after {step}, kept in {run.folder / 'best'}"


def _save_policy(run, folder):
    """In the dtype that the model came in."""
    policy = run.learner.policy
    state = merged_state(policy, policy.source_dtype, keep=run.accelerator.is_main_process)
    with together():
        if run.accelerator.is_main_process:
            save_model(policy, run.learner.tokenizer, folder, policy.source_dtype, state)


def finish(run):
    """Save the trained model with its card, note the finished steps, and upload the model if that was asked
    for.

    Every process must call it; the upload comes last, when the others have nothing to wait for.
    """
    config, folder = run.config, run.folder
    with run.learner.as_saved():  # not around the upload: the end of it waits for all processes
        _save_policy(run, folder)
        if config.save_adapter and run.accelerator.is_main_process:
            save_adapter(run.learner.policy, folder / "adapter")
    note = {"step": run.progress.step}
    if run.accelerator.is_main_process:
        note |= {"files": files_of_model(folder), **noted(config, run.inputs)}
        write_whole(folder / "README.md", _card(config, folder))
        write_whole(folder / FINISHED, json.dumps(note) + "\n")
        forget(folder / ".lock")
        say_what_is_there(run)
    run.accelerator.wait_for_everyone()
    if config.push_to_hub:
        upload(run, note)


def say_what_is_there(run):
    """The last lines of a run."""
    folder = run.folder
    if run.outer is not None:
        return run.say(f"the warm start is made: {folder}")
    if run.of_study and run.few_lines:
        return None  # the start of a seed, whose folder goes when its arms are trained
    if run.config.keep_best and run.progress.best >= 0:  # else it was lost, see Run._forget_lost_best
        run.say(f"best: {_best_of(run)}")
    data = run.config.dataset
    is_all_seen = data == GIVEN or Path(data).is_file()  # grpo_eval.py refuses to ask what was trained on
    other = " --dataset OTHER_PROBLEMS.jsonl" if is_all_seen else ""
    if not run.of_study:
        run.say(f"saved {folder}: evaluate it with  python grpo_eval.py --model {folder}{other}")
    run.say(f"its page: {folder / 'report.html'}")


def upload(run, note):
    """Upload the finished model, and note that this was done: what fails is made up on the next start."""
    config, folder = run.config, run.folder
    run.end_at_once("uploading")
    if run.accelerator.is_main_process:
        write_whole(folder / "README.md", _card(config, folder))
        run.say(f"uploading it to {config.hub_model_id} (a signal ends this, and --resume true makes it up)")
        run.say(f"uploaded to {push(folder, config.hub_model_id, config.hub_private)}")
        write_whole(folder / FINISHED, json.dumps(note | {"uploaded": config.hub_model_id}) + "\n")


def _card(config, folder):
    """The card of the model in a folder. Its run's settings are those in there: a finished run that is only
    uploaded may be given others with --resume_anyway.
    """
    free = set(names_with(type(config), "resume", "free"))
    trained = {name: value for name, value in read_run_config(folder).items() if name not in free}
    settings = resolved(config) | trained
    named = f"problems {GIVEN}" if settings["dataset"] == GIVEN else settings["dataset"]
    address = HUB.get(named, {"": (named, None)})[""][0]
    recipe = names_with(type(config), "in_card")
    prompting = Prompting.of(SimpleNamespace(**settings))
    is_raw = prompting.prompt_format == "raw"
    asks_with = prompting.raw_template if is_raw else prompting.system_prompt
    return model_card(settings, folder, asks_with, address, recipe)


def files_of_model(folder):
    """{name: bytes} of the files of the model that is saved in a folder; 0 for those that may be edited."""
    paths = [path for name in MODEL_FILES for path in folder.glob(name)]
    return {path.name: path.stat().st_size if path.suffix == ".safetensors" else 0 for path in paths}


def save_adapter(model, folder):
    """Write the LoRA adapter alone, with the name of its base, as peft's Auto classes load it."""
    import peft

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = peft.get_peft_model_state_dict(model, adapter_name="default")
    # peft loads adapters into a PeftModel, which wraps the model and so puts this in front of each name
    state = {f"base_model.model.{name}": value.contiguous() for name, value in state.items()}
    weights = folder / "adapter_model.safetensors"
    save_file(state, weights)
    base, settings = model.name_or_path or None, copy.copy(model.peft_config["default"])
    is_folder = base is not None and Path(base).is_dir()
    settings.base_model_name_or_path = str(Path(base).resolve()) if is_folder else base
    settings.task_type = "CAUSAL_LM"
    settings.save_pretrained(folder)
    _share(weights, folder / "adapter_config.json")


def _share(file, other):
    """Who may read the other file may read this one: safetensors leaves weights to their owner alone."""
    with contextlib.suppress(OSError):  # some mounted storage knows no modes
        shutil.copymode(other, file)


def save_model(model, tokenizer, folder, dtype, state=None):
    """Write a folder that AutoModelForCausalLM.from_pretrained loads, weights in `dtype`.

    Files appear in place only when all are written. state: what `merged_state` gave in that dtype; needed
    where weights are sharded.
    """
    folder = Path(folder)
    temporary = folder / ".saving"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    state = merged_state(model, dtype) if state is None else state
    try:
        model.save_pretrained(temporary, state_dict=state)
        tokenizer.save_pretrained(temporary)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise NoRoomError(f"could not save the model to {folder}: {reason}") from error
    settings = json.loads((temporary / "config.json").read_text(encoding="utf-8"))
    settings["dtype"] = str(dtype).removeprefix("torch.")
    for path, value in getattr(model, "source_dropout", {}).items():  # 0 in training; saved as it came
        *above, name = path.split(".")
        owner = settings
        for part in above:
            owner = owner.get(part, {})
        if name in owner:
            owner[name] = value
    write_whole(temporary / "config.json", json.dumps(settings, indent=2, sort_keys=True) + "\n")
    # What another save left would be loaded in place of this one: a single file before shards, an adapter.
    new = {file.name for file in temporary.iterdir()}
    stale = [path for name in MODEL_FILES for path in folder.glob(name) if path.name not in new]
    if stale:
        (folder / "config.json").unlink(missing_ok=True)
    for path in stale:
        path.unlink(missing_ok=True)
    # config.json last: without it the folder is no model
    for file in sorted(temporary.iterdir(), key=lambda f: f.name == "config.json"):
        _share(file, temporary / "config.json")
        os.replace(file, folder / file.name)
    temporary.rmdir()

"""The folder of a run: refused, made, locked, and the models saved into it."""

import fcntl
import json
import os
import shutil
import warnings
from pathlib import Path

import yaml
from safetensors import SafetensorError
from safetensors.torch import save_file

from errors import RunError, SettingError
from learning.models import merged_state
from learning.parallel import first_over_processes
from problems.prompts import system_prompt
from problems.sources import HUB
from reporting.card import model_card, push
from reporting.files import FINISHED, LOGS, write_whole
from running.settings import names_with, resolved


def refuse_used(config):
    """Refuse an output_dir that holds a run, or that cannot be a folder, before any work is done."""
    remedy = _why_not(config, Path(config.output_dir))
    if remedy:
        raise SettingError("output_dir", config.output_dir[:100], remedy)


def _why_not(config, folder):
    """Why a run cannot write there, or None."""
    is_too_long = any(len(os.fsencode(part)) > 255 for part in folder.parts)
    if not config.output_dir.strip() or "\0" in config.output_dir or is_too_long:
        return "is no name of a folder"
    holds_a_run = (folder / "run_config.yaml").exists()
    others = [name for name in ("config.json", "README.md") if (folder / name).exists()]
    if others and not holds_a_run and not config.overwrite_output_dir:
        what = f"holds a {others[0]} that is no run's and would be written over"
        return f"{what}: choose another, or say --overwrite_output_dir true"
    if holds_a_run and not (config.overwrite_output_dir or config.resume):
        return "holds a run already: choose another, or say --resume true, or --overwrite_output_dir true"
    if any(part.exists() and not part.is_dir() for part in (folder, *folder.parents)):
        return "is a file, or lies under one: give a folder"
    files = (*LOGS, FINISHED, "run_config.yaml", "config.json", "model.safetensors")
    blocking = [name for name in files if (folder / name).is_dir()]
    blocking += [name for name in (".saving", "best") if (folder / name).is_file()]
    if blocking:
        what = f"holds a {blocking[0]} of another kind, which is in the way"
        return f"{what}: move it, or choose another folder"
    return None


def lock_folder(config, accelerator):
    """Make output_dir and lock it for this run; returns the folder and the lock, a file that must stay open.

    Called last before the first step, so that a refused run leaves nothing.
    """
    folder, lock, problem = Path(config.output_dir), None, None
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = open(folder / ".lock", "w")
        except OSError as error:
            problem = f"cannot be written to ({error.strerror})"
        else:
            problem = _lock(lock, folder)
    problem = first_over_processes(problem)
    if problem:
        raise SettingError("output_dir", config.output_dir, problem)
    return folder, lock


def _lock(file, folder):
    """Why the folder is another run's, or None; a file system without locks only warns."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "another run is writing there at this moment"
    except OSError as error:
        advice = "see to it that no other run writes there"
        warnings.warn(f"{folder} cannot be locked ({error.strerror}): {advice}", stacklevel=2)
    return None


def start_logs(run, anew):
    """Write every setting into the folder; a run that begins `anew` leaves nothing of an earlier one."""
    config, folder = run.config, run.folder
    if run.accelerator.is_main_process:
        if anew:
            (folder / FINISHED).unlink(missing_ok=True)
            for name in LOGS:
                (folder / name).write_text("")
        if anew and config.overwrite_output_dir and not config.resume:
            for path in folder.glob("checkpoint-*"):
                shutil.rmtree(path, ignore_errors=True)
        write_whole(folder / "run_config.yaml", yaml.safe_dump(resolved(config), sort_keys=False))
    run.accelerator.wait_for_everyone()


def save_best(run):
    """Save the policy into output_dir/best. Every process must call it."""
    _save_policy(run, run.folder / "best")
    if run.accelerator.is_main_process:
        # grpo_eval.py reads the format from it
        shutil.copy(run.folder / "run_config.yaml", run.folder / "best")


def _save_policy(run, folder):
    """In the dtype that the model came in."""
    policy = run.learner.policy
    state = merged_state(policy, policy.source_dtype, keep=run.accelerator.is_main_process)
    if run.accelerator.is_main_process:
        save_model(policy, run.learner.tokenizer, folder, policy.source_dtype, state)


def finish(run):
    """Save the trained model with its card, note the finished steps, and upload the model if that was asked
    for.

    Every process must call it; the upload comes last, when the others have nothing to wait for.
    """
    config, folder = run.config, run.folder
    _save_policy(run, folder)
    if run.accelerator.is_main_process:
        if config.save_adapter:
            save_adapter(run.learner.policy, folder / "adapter")
        write_whole(folder / "README.md", _card(config, folder))
        write_whole(folder / FINISHED, json.dumps({"step": run.progress.step}) + "\n")
        (folder / ".lock").unlink(missing_ok=True)
        run.say(f"saved {folder}: evaluate it with  python grpo_eval.py --model {folder}")
    run.accelerator.wait_for_everyone()
    if config.push_to_hub and run.accelerator.is_main_process:
        run.say(f"uploaded to {push(folder, config.hub_model_id, config.hub_private)}")


def _card(config, folder):
    address = HUB.get(config.dataset, {"": (config.dataset, None)})[""][0]
    recipe = names_with(type(config), "in_card")
    return model_card(resolved(config), folder, system_prompt(config), address, recipe)


def save_adapter(model, folder):
    """Write the LoRA adapter alone, as peft loads it."""
    import peft

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = peft.get_peft_model_state_dict(model, adapter_name="default")
    # peft loads adapters into a PeftModel, which wraps the model and so puts this in front of each name
    state = {f"base_model.model.{name}": value.contiguous() for name, value in state.items()}
    save_file(state, folder / "adapter_model.safetensors")
    model.peft_config["default"].save_pretrained(folder)


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
        raise RunError(f"could not save the model to {folder}: {reason}") from error
    settings = json.loads((temporary / "config.json").read_text())
    settings["dtype"] = str(dtype).removeprefix("torch.")
    for path, value in getattr(model, "source_dropout", {}).items():  # 0 in training; saved as it came
        *above, name = path.split(".")
        owner = settings
        for part in above:
            owner = owner.get(part, {})
        if name in owner:
            owner[name] = value
    write_whole(temporary / "config.json", json.dumps(settings, indent=2, sort_keys=True) + "\n")
    # config.json last: without it the folder is no model
    for file in sorted(temporary.iterdir(), key=lambda f: f.name == "config.json"):
        os.replace(file, folder / file.name)
    temporary.rmdir()

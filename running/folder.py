"""The directory of a run: refused, made, locked, and the models saved into it."""

import fcntl
import json
import os
import shutil
import warnings
from pathlib import Path

import yaml
from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import save_file

from errors import RunError, SettingError
from learning.models import merged_state
from problems.prompts import system_prompt
from problems.sources import HUB
from reporting.card import model_card, push
from reporting.files import FINISHED, LOGS, write_whole
from running.run import out_of_patience
from running.settings import resolved


def refuse_used(config):
    """Refuse an output_dir that holds a run, or that cannot be a folder, before any work is done."""
    folder = Path(config.output_dir)
    if (
        not config.output_dir.strip()
        or "\0" in config.output_dir
        or any(len(os.fsencode(part)) > 255 for part in folder.parts)
    ):
        raise SettingError("output_dir", config.output_dir[:100], "is no name of a folder")
    others = [name for name in ("config.json", "README.md") if (folder / name).exists()]
    if others and not (folder / "run_config.yaml").exists() and not config.overwrite_output_dir:
        remedy = f"holds a {others[0]} that is no run's and would be written over: choose another, or say --overwrite_output_dir true"
        raise SettingError("output_dir", config.output_dir, remedy)
    if (folder / "run_config.yaml").exists() and not (config.overwrite_output_dir or config.resume):
        raise SettingError(
            "output_dir",
            config.output_dir,
            "holds a run already: choose another, or say --resume true, or --overwrite_output_dir true",
        )
    if any(part.exists() and not part.is_dir() for part in (folder, *folder.parents)):
        raise SettingError("output_dir", config.output_dir, "is a file, or lies under one: give a folder")
    in_the_way = [
        name
        for name in (*LOGS, FINISHED, "run_config.yaml", "config.json", "model.safetensors")
        if (folder / name).is_dir()
    ]
    in_the_way += [name for name in (".saving", "best") if (folder / name).is_file()]
    if in_the_way:
        raise SettingError(
            "output_dir",
            config.output_dir,
            f"holds a {in_the_way[0]} of another kind, which is in the way: move it, or choose another folder",
        )


def open_output(config, accelerator):
    """Make output_dir and hold it for this run; called last before the first step, so that a refused run leaves nothing. Returns the folder and its lock."""
    folder, held, problem = Path(config.output_dir), None, None
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held = open(folder / ".lock", "w")
        except OSError as error:
            problem = f"cannot be written to ({error.strerror})"
        else:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                problem = "another run is writing there at this moment"
            except OSError as error:
                warnings.warn(
                    f"{folder} cannot be locked ({error.strerror}): see to it that no other run writes there",
                    stacklevel=2,
                )
    problem = next((p for p in gather_object([problem]) if p), None)
    if problem:
        raise SettingError("output_dir", config.output_dir, problem)
    return folder, held


def start_logs(config, folder, accelerator, anew):
    """Write every setting into the folder; a run that begins `anew` leaves nothing of an earlier one."""
    if accelerator.is_main_process:
        if anew:
            (folder / FINISHED).unlink(missing_ok=True)
            for path in (
                folder.glob("checkpoint-*") if config.overwrite_output_dir and not config.resume else ()
            ):
                shutil.rmtree(path, ignore_errors=True)
            for name in LOGS:
                (folder / name).write_text("")
        write_whole(folder / "run_config.yaml", yaml.safe_dump(resolved(config), sort_keys=False))
    accelerator.wait_for_everyone()


def keep_best(config, folder, accelerator, policy, tokenizer, evaluation, done):
    """Note a better held-out accuracy in `done`, and keep that model. Every process must call it; returns whether patience is at its end."""
    if evaluation is None:
        return False
    if evaluation["eval_accuracy"] <= done["best"]:
        done["since_best"] += 1
        return out_of_patience(config, done)
    done |= {"best": evaluation["eval_accuracy"], "since_best": 0}
    if config.keep_best:
        state = merged_state(policy, policy.source_dtype, keep=accelerator.is_main_process)
        if accelerator.is_main_process:
            save_model(policy, tokenizer, folder / "best", policy.source_dtype, state)
            shutil.copy(folder / "run_config.yaml", folder / "best")  # grpo_eval.py reads the format from it
    return False


def finish(config, folder, accelerator, policy, tokenizer, held_out, steps):
    """Save the trained model with its card, in the dtype that it came in, note the steps that were done, and upload it where that was asked for.

    Every process must call it; the upload comes last, when the others have nothing to wait for.
    """
    state = merged_state(policy, policy.source_dtype, keep=accelerator.is_main_process)
    if accelerator.is_main_process:
        save_model(policy, tokenizer, folder, policy.source_dtype, state)
        if config.save_adapter:
            save_adapter(policy, folder / "adapter")
        address = HUB.get(config.dataset, {"": (config.dataset, None)})[""][0]
        card = model_card(resolved(config), folder, held_out, system_prompt(config), address)
        write_whole(folder / "README.md", card)
        write_whole(folder / FINISHED, json.dumps({"step": steps}) + "\n")
        (folder / ".lock").unlink(missing_ok=True)
        print(f"saved {folder}: evaluate it with  python grpo_eval.py --model {folder}")
    accelerator.wait_for_everyone()
    if config.push_to_hub and accelerator.is_main_process:
        print(f"uploaded to {push(folder, config.hub_model_id, config.hub_private)}")


def save_adapter(model, folder):
    """Write the LoRA adapter alone, as peft loads it."""
    import peft

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = peft.get_peft_model_state_dict(model, adapter_name="default")
    state = {
        f"base_model.model.{name}": value.contiguous() for name, value in state.items()
    }  # as PeftModel, which wraps the model, calls them
    save_file(state, folder / "adapter_model.safetensors")
    model.peft_config["default"].save_pretrained(folder)


def save_model(model, tokenizer, folder, dtype, state=None):
    """Write a directory that AutoModelForCausalLM.from_pretrained loads, weights in `dtype`; files appear in place only when all are written.

    `state`: what `merged_state` gave in that dtype, where weights are sharded.
    """
    folder = Path(folder)
    temporary = folder / ".saving"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        model.save_pretrained(temporary, state_dict=merged_state(model, dtype) if state is None else state)
        tokenizer.save_pretrained(temporary)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(
            f"could not save the model to {folder}: {getattr(error, 'strerror', None) or error}"
        ) from error
    settings = json.loads((temporary / "config.json").read_text())
    settings["dtype"] = str(dtype).removeprefix("torch.")
    settings |= {
        key: value for key, value in getattr(model, "source_dropout", {}).items() if key in settings
    }  # as it came, not as it trained
    write_whole(temporary / "config.json", json.dumps(settings, indent=2, sort_keys=True) + "\n")
    for file in sorted(
        temporary.iterdir(), key=lambda f: f.name == "config.json"
    ):  # config.json last: without it nothing loads
        os.replace(file, folder / file.name)
    temporary.rmdir()

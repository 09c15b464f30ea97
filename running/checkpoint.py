"""Checkpoints that survive what happens to long runs, and going on from them.

A checkpoint is a folder checkpoint-<step> in output_dir: the policy as transformers loads it (float32),
moments and the rest in safetensors, the state in JSON, and a manifest with the size and sha256 of each file,
written last. It is made under one fixed temporary name, every file and folder is synced, and it appears under
its own name when it is whole. Nothing in it is ever unpickled.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from errors import NoRoomError, RunError, SettingError, counted, one_line, sized
from learning.memory import checkpoint_bytes
from learning.models import merged_state
from learning.parallel import first_over_processes, raise_on_all, together, whole
from reporting.files import FINISHED, LOGS, sha256_of, step_of
from running.contract import differences, finished_steps, lengthens, noted, refusal, shown
from running.folder import save_model
from running.launching import folder_of_first

MANIFEST, TEMPORARY, OLD = "manifest.json", ".checkpoint.part", ".checkpoint.old"
SYNCS_FOLDERS = os.name != "nt"
STATE, TENSORS = "training_state.json", "training_state.safetensors"


class Checkpoints:
    """Saves and restores what a step depends on: weights, moments, schedule, reference, progress, logs."""

    def __init__(self, run, inputs):
        self.run, self.learner, self.config, self.folder = run, run.learner, run.config, run.folder
        self.is_main, self.inputs = run.accelerator.is_main_process, inputs
        self.changed = None  # what a resumed run has otherwise, as Progress keeps it
        if self.config.save_every:
            self._refuse_little_disk()

    def _refuse_little_disk(self):
        """Before the first step: room for one checkpoint more than there are."""
        needed = checkpoint_bytes(self.learner.policy, self.learner.reference, self.config.moment_bytes)
        with together():
            if self.is_main and needed > (free := shutil.disk_usage(self.folder).free):
                sizes = f"{sized(needed)}, {sized(free)} are free in {self.folder}"
                raise SettingError("save_every", self.config.save_every, f"a checkpoint needs {sizes}")

    def save(self):
        """Write checkpoint-<step>, then delete those not to keep. Every process must call it."""
        policy, reference = self.learner.policy, self.learner.reference
        weights = merged_state(policy, torch.float32, keep=self.is_main)
        tensors, numbers = optimizer_state(self.learner.optimizer, keep=self.is_main)
        if self.config.lora_r:
            tensors |= _on_cpu("policy.", ((n, p) for n, p in policy.named_parameters() if p.requires_grad))
        if self.learner.average:
            tensors |= self.learner.average.state(keep=self.is_main)
        if reference is not None and self.is_main:
            tensors |= _on_cpu("reference.", reference.named_parameters())
        problem = self._try_to_write(weights, tensors, numbers) if self.is_main else None
        raise_on_all(NoRoomError(problem) if problem else None)

    def _try_to_write(self, weights, tensors, numbers):
        """None, or why the checkpoint could not be written."""
        step = self.run.progress.step
        try:
            self._write(step, weights, tensors, numbers)
        except (OSError, SafetensorError, RunError) as error:
            shutil.rmtree(self.folder / TEMPORARY, ignore_errors=True)
            needed = sum(t.numel() * t.element_size() for t in (*weights.values(), *tensors.values()))
            free = shutil.disk_usage(self.folder).free
            reason = getattr(error, "strerror", None) or one_line(error)
            sizes = f"it needs {sized(needed)}, {sized(free)} are free"
            return f"could not save checkpoint-{step} ({reason}): {sizes}; earlier ones are whole"
        return None

    def _write(self, step, weights, tensors, numbers):
        temporary, target = self.folder / TEMPORARY, self.folder / f"checkpoint-{step}"
        shutil.rmtree(temporary, ignore_errors=True)
        save_model(self.learner.policy, self.learner.tokenizer, temporary, torch.float32, weights)
        # transformers renames the experts of some models: save them under ours too
        if not self.config.lora_r:
            files = temporary.glob("*.safetensors")
            written = {name for file in files for name in safe_open(file, "pt").keys()}
            names = [name for name, _ in self.learner.policy.named_parameters() if name not in written]
            tensors |= {f"policy.{name}": weights[name] for name in names}
        save_file({name: t.contiguous() for name, t in tensors.items()}, temporary / TENSORS)
        (temporary / STATE).write_text(json.dumps(self._state(numbers), indent=1) + "\n", encoding="utf-8")
        # grpo_eval.py reads the format from it
        shutil.copyfile(self.folder / "run_config.yaml", temporary / "run_config.yaml")
        for name in LOGS:
            _sync(self.folder / name)
        seal(temporary)
        if target.exists():  # damaged, so that it was not resumed from
            target.rename(self.folder / OLD)
        temporary.rename(target)
        _sync(self.folder)
        shutil.rmtree(self.folder / OLD, ignore_errors=True)
        existing = checkpoints(self.folder)
        kept = [path for path in existing if step_of(path) <= step][: self.config.keep_checkpoints or None]
        for path in set(existing) - set(kept):  # older ones, and ones newer than the one resumed from
            shutil.rmtree(path, ignore_errors=True)

    def _state(self, numbers):
        """What JSON can hold of the state."""
        schedule = self.learner.schedule.state_dict()
        return {
            "progress": vars(self.run.progress),
            "budget": self.learner.budget.state(),
            "loss_scale": self.learner.loss_scale and self.learner.loss_scale.state(),
            "optimizer": numbers,
            "averaged_steps": self.learner.average and self.learner.average.steps,
            "schedule": {name: value for name, value in schedule.items() if name != "lr_lambdas"},
            **noted(self.config, self.inputs),
            "logs": {name: (self.folder / name).stat().st_size for name in LOGS},
        }

    def resume(self):
        """Restore the newest whole checkpoint; returns its state, or None where the run has none yet.

        No file is changed: `begin` does that, when everything has been checked.
        """
        path, finished = self.newest(), self.folder / FINISHED
        if path is not None:
            with folder_of_first(path, self.folder) as copy:
                state = self.restore(Path(copy))
            self.run.say(f"going on from {path}, after step {step_of(path)}")
            return state
        with together():
            if (finished.exists() or checkpoints(self.folder)) and not self.config.overwrite_output_dir:
                self._refuse_to_begin(finished)
        self.run.say(f"no checkpoint in {self.folder}: starting from the beginning")
        return None

    def _refuse_to_begin(self, finished):
        """The folder holds a run, and nothing to go on from where the first process looks."""
        what = "has no checkpoint that is whole"
        if finished.exists():
            what = f"finished {counted(finished_steps(finished), 'step')} and left no checkpoint"
        remedy = (
            "there is nothing to go on from; begin anew with --overwrite_output_dir true, "
            "and with --save_every N, which keeps the last step too"
        )
        if not self.is_main:
            what = "holds a run, and the first node has none"
            remedy = "start this node as the first (--node_rank 0), or move the folder away"
        raise SettingError("resume", str(self.folder), f"{what}: {remedy}")

    def newest(self):
        """The newest whole checkpoint, or None; damaged ones are named. The same on all processes."""
        chosen = None
        for path in checkpoints(self.folder) if self.is_main else ():
            reason = damage(path)
            if reason is None:
                chosen = path.name
                break
            self.run.say(f"passed over {path}: {reason}")
        chosen = first_over_processes(chosen)
        return None if chosen is None else self.folder / chosen

    def restore(self, path):
        """Load a checkpoint into the learner; returns its state."""
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        with together():
            self._refuse_other(path, state)
        tensors = load_file(path / TENSORS)
        weights = _with_prefix("policy.", tensors)
        if not self.config.lora_r:
            for file in sorted(set(path.glob("*.safetensors")) - {path / TENSORS}):
                weights = load_file(file) | weights
        self._copy(self.learner.policy, weights, path)
        if self.learner.reference is not None:
            self._copy(self.learner.reference, _with_prefix("reference.", tensors), path)
        load_optimizer(self.learner.optimizer, state["optimizer"], _with_prefix("optimizer.", tensors))
        if self.learner.average:
            load_average(self.learner.average, state, _with_prefix("average.", tensors))
        load_schedule(self.learner.schedule, state["schedule"])
        self.learner.budget.restore(state.get("budget"))
        if self.learner.loss_scale:
            self.learner.loss_scale.restore(state.get("loss_scale"))
        with together():
            if self.is_main:
                self._check_logs(state["logs"], path)
        return state

    def _check_logs(self, sizes, path):
        for name, size in sizes.items():
            file = self.folder / name
            if not file.exists() or file.stat().st_size < size:
                what = f"{file} is shorter than when {path.name} was written"
                raise RunError(f"{what}: it is not this run's any more")

    def begin(self, state):
        """What a crash left behind goes, and what the logs hold of steps after the checkpoint."""
        for name in (TEMPORARY, OLD):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for name in LOGS if state is not None else ():
            file = self.folder / name
            file.touch()  # the version that wrote the checkpoint may not have had this log
            os.truncate(file, state["logs"].get(name, 0))

    @torch.no_grad()
    def _copy(self, model, values, path):
        for name, parameter in model.named_parameters():
            if self.config.lora_r and not parameter.requires_grad and name not in values:
                continue  # frozen weights are not saved; they come from the base model
            if name not in values or values[name].shape != parameter.shape:
                raise RunError(f"{path}: {name} is missing, or not of shape {tuple(parameter.shape)}")
            parameter.copy_(_as_sharded(values[name], parameter))

    def _refuse_other(self, path, state):
        """Refuse to go on from a checkpoint of another run; a finished run may get longer."""
        problem = None
        if self.is_main:
            differ = differences(self.config, state, self.inputs)
            if "held_out" not in state:
                what = "held-out problems, rewards and the model's files are not compared"
                self.run.say(f"{path} is of an earlier version: {what}")
            is_last = finished_steps(self.folder / FINISHED) == step_of(path)
            if not (is_last and lengthens(self.config, differ)):
                problem = refusal(self.config, state, differ)
            if differ and not problem:
                self.changed = {
                    "after_step": step_of(path),
                    "changed": json.loads(json.dumps(differ, sort_keys=True)),
                }
                what = f"longer than the run was to be: {shown(differ)}; {self._of_rates()}"
                if self.config.resume_anyway:
                    what = f"although this is not what the run was: {shown(differ)}"
                self.run.say(f"going on {what}")
        raise_on_all(SettingError("resume", str(path), problem) if problem else None)

    def _of_rates(self):
        """What becomes of the schedule of a run that is made longer."""
        if self.config.lr_scheduler_type == "constant" and not self.config.warmup_ratio:
            return "the rate stays constant, so that it equals a run of that length from the start"
        return "the rates are from here those of the longer run"


def _on_cpu(prefix, named):
    return {f"{prefix}{name}": p.detach().cpu() for name, p in named}


def _with_prefix(prefix, tensors):
    """The tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _as_sharded(value, parameter):
    """A full tensor, moved and sharded like the parameter."""
    value = value.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value


def optimizer_state(optimizer, keep):
    """Moments as tensors named by the number of their weight, and all else as numbers that JSON can hold."""
    state, tensors = optimizer.state_dict(), {}
    numbers = {"groups": state["param_groups"], "state": {}}
    for index, values in state["state"].items():
        for key, value in _flat(values):
            if not torch.is_tensor(value):
                numbers["state"].setdefault(str(index), {})[key] = value
                continue
            value = whole(value)  # all processes take part
            if keep:
                tensors[f"optimizer.{index}.{key}"] = value.detach().cpu().clone()
    return tensors, numbers


def load_optimizer(optimizer, numbers, tensors):
    """Put back what `optimizer_state` gave, but for settings that --resume_anyway may change."""
    flat = {int(index): dict(values) for index, values in numbers["state"].items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, tensor in tensors.items():
        index, key = name.split(".", 1)
        parameter = parameters[int(index)]
        if tensor.shape == parameter.shape:
            tensor = _as_sharded(tensor, parameter)
        flat.setdefault(int(index), {})[key] = tensor
    state = {index: _nested(values) for index, values in flat.items()}
    groups = []
    for saved, group in zip(numbers["groups"], optimizer.param_groups, strict=True):
        groups.append(saved | {key: group[key] for key in ("weight_decay", "betas", "initial_lr")})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def load_average(average, state, tensors):
    """Go on with the average of a checkpoint; where it has none, a new one begins with the next step."""
    trained = average.trained
    average.averages = {name: _as_sharded(tensor, trained[name]) for name, tensor in tensors.items()}
    average.steps = state["averaged_steps"] if tensors else 0


def load_schedule(schedule, saved):
    """Go on at the saved step; `renew_rates` sets its rates, which are this run's."""
    rates = schedule.base_lrs
    schedule.load_state_dict({**saved, "base_lrs": rates, "lr_lambdas": [None] * len(rates)})


def _flat(values, above=""):
    """(path, value) of a dict that may hold dicts (bitsandbytes keeps its codes so)."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}/")
        else:
            yield f"{above}{key}", value


def _nested(flat):
    """The dict that `_flat` took apart."""
    values = {}
    for path, value in flat.items():
        *above, key = path.split("/")
        inner = values
        for name in above:
            inner = inner.setdefault(name, {})
        inner[key] = value
    return values


def checkpoints(output_dir):
    """The checkpoint folders of a run, newest first."""
    folders = Path(output_dir).glob("checkpoint-*")
    numbered = [path for path in folders if step_of(path) is not None]
    return sorted(numbered, key=step_of, reverse=True)


def seal(folder):
    """Sync every file of a folder and write the manifest that says what whole means."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    entries = {}
    for path in files:
        _sync(path)
        entries[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    (folder / MANIFEST).write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    _sync(folder / MANIFEST)
    _sync(folder)


def damage(folder):
    """What is wrong with a checkpoint, in a few words; None where it is whole."""
    try:
        entries = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "it has no manifest: its writing was cut off"
    if not isinstance(entries, dict) or not all(map(_is_entry, entries.values())):
        return "its manifest is not what was written"
    if missing := {STATE, TENSORS} - set(entries):
        return f"its manifest does not name {min(missing)}"
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {entry['bytes']}"
        if sha256_of(path) != entry["sha256"]:
            return f"{name} is not what was written (sha256)"
    return None


def _is_entry(entry):
    return isinstance(entry, dict) and {"bytes", "sha256"} <= set(entry)


def _sync(path):
    """Have a file or a folder on the disk; Windows knows no such thing of folders."""
    is_folder = path.is_dir()
    if is_folder and not SYNCS_FOLDERS:
        return
    handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)  # which Windows wants
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

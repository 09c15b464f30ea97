"""Checkpoints that survive what happens to long runs, and going on from them.

A checkpoint is a folder checkpoint-<step> in output_dir: the policy as transformers loads it (float32), moments and the rest in safetensors, the
state in JSON, and a manifest with the size and sha256 of each file, written last. It is made under one fixed temporary name, every file and folder
is synced, and it appears under its own name when it is whole. Nothing in it is ever unpickled.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from errors import RunError, SettingError
from learning.memory import checkpoint_bytes
from learning.models import merged_state
from learning.parallel import max_over_processes, whole
from reporting.files import FINISHED
from running.evaluation import held_out_accuracy
from running.folder import keep_best, save_model
from running.run import leave
from running.settings import free_on_resume, names_with, resolved

MANIFEST, TEMPORARY, OLD = "manifest.json", ".checkpoint.part", ".checkpoint.old"


def _sync(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(folder):
    """Sync every file of a folder and write the manifest that says what whole means."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    entries = {}
    for path in files:
        _sync(path)
        entries[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
    (folder / MANIFEST).write_text(json.dumps(entries, indent=1) + "\n")
    _sync(folder / MANIFEST)
    _sync(folder)


def damage(folder):
    """What is wrong with a checkpoint, in a few words; None where it is whole."""
    try:
        entries = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return "it has no manifest: its writing was cut off"
    if not isinstance(entries, dict) or not all(
        isinstance(entry, dict) and {"bytes", "sha256"} <= set(entry) for entry in entries.values()
    ):
        return "its manifest is not what was written"
    if missing := {"training_state.json", "training_state.safetensors"} - set(entries):
        return f"its manifest does not name {min(missing)}"
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {entry['bytes']}"
        if _digest(path) != entry["sha256"]:
            return f"{name} is not what was written (sha256)"
    return None


def finished_steps(path):
    """The steps that a finished run noted; 0 where there is no note."""
    if not path.exists():
        return 0
    try:
        return int(json.loads(path.read_text())["step"])
    except (ValueError, TypeError, KeyError) as error:
        raise RunError(
            f"{path} is damaged: delete it and the run goes on from its newest checkpoint"
        ) from error


def checkpoints(output_dir):
    """The checkpoint folders of a run, newest first."""
    found = [p for p in Path(output_dir).glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=_step_of, reverse=True)


def _step_of(path):
    return int(path.name.removeprefix("checkpoint-"))


def data_fingerprint(problems):
    """sha256 over the problems and their prompts, in their order."""
    digest = hashlib.sha256()
    for p in problems:
        digest.update(
            json.dumps(
                [p.prompt, p.problem.question, p.problem.answer, p.problem.solution, p.problem.response]
            ).encode()
        )
    return digest.hexdigest()


class Checkpoints:
    """Saves and restores everything that a step depends on: policy, moments, schedule, reference, the place in the data, logs."""

    def __init__(
        self,
        config,
        folder,
        accelerator,
        policy,
        optimizer,
        schedule,
        tokenizer,
        problems,
        held,
        reference=None,
        logs=(),
    ):
        self.config, self.folder, self.accelerator = config, folder, accelerator
        self.policy, self.optimizer, self.schedule, self.tokenizer, self.reference = (
            policy,
            optimizer,
            schedule,
            tokenizer,
            reference,
        )
        self.logs = logs  # names of files that grow by whole lines
        self.data, self.held = data_fingerprint(problems), held  # the lock of the folder
        if accelerator.is_main_process:
            for name in (TEMPORARY, OLD):  # litter of a crash
                shutil.rmtree(folder / name, ignore_errors=True)
        if config.save_every:
            self._refuse_little_disk()

    def _refuse_little_disk(self):
        """Before the first step: room for one checkpoint more than there are."""
        needed = checkpoint_bytes(self.policy, self.reference, self.config.moment_bytes)
        free = shutil.disk_usage(self.folder).free
        if max_over_processes(needed > free):
            remedy = (
                f"a checkpoint needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free in {self.folder}"
            )
            raise SettingError("save_every", self.config.save_every, remedy)

    def save(self, state):
        """Write checkpoint-<state["step"]>, then delete what keep_checkpoints does not keep. Every process must call it."""
        main = self.accelerator.is_main_process
        weights = merged_state(self.policy, torch.float32, keep=main)
        tensors, numbers = self._optimizer_state(main)
        if self.config.lora_r:
            tensors |= {
                f"policy.{name}": p.detach().cpu()
                for name, p in self.policy.named_parameters()
                if p.requires_grad
            }
        if self.reference is not None and main:
            tensors |= {
                f"reference.{name}": p.detach().cpu() for name, p in self.reference.named_parameters()
            }
        problem = None
        if main:
            try:
                self._write(
                    weights, tensors, {**state, "optimizer": numbers, "schedule": self._schedule_state()}
                )
            except (OSError, SafetensorError, RunError) as error:
                shutil.rmtree(self.folder / TEMPORARY, ignore_errors=True)
                needed = sum(t.numel() * t.element_size() for t in (*weights.values(), *tensors.values()))
                free = shutil.disk_usage(self.folder).free
                reason = (
                    error.strerror
                    if isinstance(error, OSError) and error.strerror
                    else " ".join(str(error).split())[:200]
                )
                sizes = f"it needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free"
                problem = (
                    f"could not save checkpoint-{state['step']} ({reason}): {sizes}; earlier ones are whole"
                )
        problem = next((p for p in gather_object([problem]) if p), None)
        if problem:
            raise RunError(problem)

    def _write(self, weights, tensors, state):
        temporary, target = self.folder / TEMPORARY, self.folder / f"checkpoint-{state['step']}"
        shutil.rmtree(temporary, ignore_errors=True)
        save_model(self.policy, self.tokenizer, temporary, torch.float32, weights)
        names = {
            name for file in temporary.glob("*.safetensors") for name in safe_open(file, "pt").keys()
        }  # transformers renames the experts of some models
        tensors |= {
            f"policy.{name}": weights[name]
            for name, _ in self.policy.named_parameters()
            if not self.config.lora_r and name not in names
        }
        save_file(
            {name: t.contiguous() for name, t in tensors.items()}, temporary / "training_state.safetensors"
        )
        state |= {"data": self.data, "world_size": self.accelerator.num_processes, "settings": resolved(self.config),
                  "logs": {name: (self.folder / name).stat().st_size for name in self.logs}}  # fmt: skip
        (temporary / "training_state.json").write_text(json.dumps(state, indent=1) + "\n")
        shutil.copy(self.folder / "run_config.yaml", temporary)  # grpo_eval.py reads the format from it
        for name in self.logs:
            _sync(self.folder / name)
        seal(temporary)
        if target.exists():  # a damaged one that was passed over
            target.rename(self.folder / OLD)
        temporary.rename(target)
        _sync(self.folder)
        shutil.rmtree(self.folder / OLD, ignore_errors=True)
        there = checkpoints(self.folder)
        kept = [path for path in there if _step_of(path) <= state["step"]][
            : self.config.keep_checkpoints or None
        ]
        for path in set(there) - set(
            kept
        ):  # older ones, and those of a time that this run has gone back behind
            shutil.rmtree(path, ignore_errors=True)

    def _optimizer_state(self, keep):
        """Moments as tensors named by the number of their weight, and all else that JSON can hold."""
        state, tensors = self.optimizer.state_dict(), {}
        numbers = {"groups": state["param_groups"], "state": {}}
        for index, values in state["state"].items():
            for key, value in _flat(values):
                if torch.is_tensor(value):
                    value = whole(value)
                    if keep:
                        tensors[f"optimizer.{index}.{key}"] = value.detach().cpu().clone()
                else:
                    numbers["state"].setdefault(str(index), {})[key] = value
        return tensors, numbers

    def _schedule_state(self):
        return {k: v for k, v in self.schedule.state_dict().items() if k != "lr_lambdas"}

    # Reading

    def resume(self, total, budget):
        """What is finished according to the newest whole checkpoint, which is restored; None where there is none; FINISHED where nothing is left to do."""
        finished, path = self.folder / FINISHED, self.newest()
        last = finished_steps(finished)
        if last >= total:
            self._say(f"nothing is left to do: {self.folder} finished its {last} steps")
            return FINISHED
        if (
            path is None
            and (finished.exists() or checkpoints(self.folder))
            and not self.config.overwrite_output_dir
        ):
            what = (
                f"finished {last} steps and left no checkpoint"
                if finished.exists()
                else "has no checkpoint that is whole"
            )
            raise SettingError(
                "resume",
                str(self.folder),
                f"{what}: there is nothing to go on from; begin anew with --overwrite_output_dir true",
            )
        if path is None:
            self._say(f"no checkpoint in {self.folder}: starting from the beginning")
            return None
        done = self.restore(path)
        budget.restore(done.get("budget"))
        self._say(f"going on from {path}, after step {done['step']}")
        return done

    def make_up_evaluation(self, decoder, held_out, stop, log, done):
        """The evaluation that a signal cut off, and the line of its step, which waited for it."""
        evaluation = held_out_accuracy(
            self.accelerator, decoder, held_out, self.config, stop, log, done["step"]
        )
        if evaluation is None:
            leave(stop, self, None)
        log.write(done.pop("metrics") | evaluation)
        keep_best(self.config, self.folder, self.accelerator, self.policy, self.tokenizer, evaluation, done)
        done["evaluate"] = False

    def _say(self, text):
        if self.accelerator.is_main_process:
            print(text, flush=True)

    def newest(self):
        """The newest whole checkpoint, or None; damaged ones are named and passed over. The same on all processes."""
        chosen = None
        if self.accelerator.is_main_process:
            for path in checkpoints(self.folder):
                reason = damage(path)
                if reason is None:
                    chosen = path.name
                    break
                print(f"passed over {path}: {reason}", flush=True)
        return next((self.folder / name for name in gather_object([chosen]) if name), None)

    def restore(self, path):
        """Put a checkpoint's state into policy, optimiser, schedule and reference, cut the logs back to it; returns its state."""
        state = json.loads((path / "training_state.json").read_text())
        self._refuse_other(path, state)
        tensors = load_file(path / "training_state.safetensors")
        named = dict(self.policy.named_parameters())
        if self.config.lora_r:
            self._copy(
                named,
                {n.removeprefix("policy."): t for n, t in tensors.items() if n.startswith("policy.")},
                path,
            )
        else:
            weights = {}
            for file in sorted(path.glob("*.safetensors")):
                if file.name != "training_state.safetensors":
                    weights |= load_file(file)
            weights |= {n.removeprefix("policy."): t for n, t in tensors.items() if n.startswith("policy.")}
            self._copy(named, {n: t for n, t in weights.items() if n in named}, path)
        if self.reference is not None:
            kept = {n.removeprefix("reference."): t for n, t in tensors.items() if n.startswith("reference.")}
            self._copy(dict(self.reference.named_parameters()), kept, path)
        self._load_optimizer(state["optimizer"], tensors)
        self._load_schedule(state["schedule"])
        if self.accelerator.is_main_process:
            for name in self.logs:
                file, size = (
                    self.folder / name,
                    state["logs"].get(name, 0),
                )  # 0: a log that the version which wrote this did not have
                if name not in state["logs"]:
                    file.touch()
                if not file.exists() or file.stat().st_size < size:
                    raise RunError(
                        f"{file} is shorter than when {path.name} was written: it is not this run's any more"
                    )
                os.truncate(file, size)
        self.accelerator.wait_for_everyone()
        return state

    def _copy(self, parameters, values, path):
        for name, parameter in parameters.items():
            if not parameter.requires_grad and name not in values and self.config.lora_r:
                continue  # the frozen base comes from where it came from
            if name not in values or values[name].shape != parameter.shape:
                raise RunError(f"{path}: {name} is missing, or not of shape {tuple(parameter.shape)}")
            with torch.no_grad():
                parameter.copy_(_like(parameter, values[name]))

    def _load_optimizer(self, numbers, tensors):
        flat = {int(index): dict(values) for index, values in numbers["state"].items()}
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, index, key = name.split(".", 2)
                shaped = tensor.shape == parameters[int(index)].shape
                flat.setdefault(int(index), {})[key] = (
                    _like(parameters[int(index)], tensor) if shaped else tensor
                )
        state = {index: _nested(values) for index, values in flat.items()}
        mine = [
            {k: group[k] for k in ("weight_decay", "betas", "initial_lr")}
            for group in self.optimizer.param_groups
        ]  # resume_anyway may change them
        groups = [group | own for group, own in zip(numbers["groups"], mine, strict=True)]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _load_schedule(self, saved):
        rates = self.schedule.base_lrs
        self.schedule.load_state_dict({**saved, "base_lrs": rates, "lr_lambdas": [None] * len(rates)})
        for group, rate, factor in zip(
            self.optimizer.param_groups, rates, self.schedule.lr_lambdas, strict=True
        ):
            group["lr"] = rate * factor(self.schedule.last_epoch)
        self.schedule._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _refuse_other(self, path, state):
        now, then = json.loads(json.dumps(resolved(self.config))), state["settings"]
        differ = {
            n: (then.get(n), now.get(n))
            for n in {*now, *then} - free_on_resume(type(self.config))
            if then.get(n) != now.get(n)
        }
        for name, value, other in (
            ("data", state["data"][:12], self.data[:12]),
            ("world_size", state["world_size"], self.accelerator.num_processes),
        ):
            if value != other:
                differ[name] = (value, other)
        never = names_with(type(self.config), "resume", "never")
        hard = {
            n: v for n, v in differ.items() if n in never or (n == "beta" and not v[0])
        }  # beta 0 kept no reference
        if not differ or (self.config.resume_anyway and not hard):
            return
        shown = ", ".join(
            f"{name} {then!r} there, {now!r} here" for name, (then, now) in sorted((hard or differ).items())
        )
        remedy = (
            "what is saved would not fit" if hard else "say --resume_anyway true to go on with the new values"
        )
        raise SettingError("resume", str(path), f"was written by another run: {shown}; {remedy}")


def _flat(values, above=""):
    """(path, value) of a dict that may hold dicts (bitsandbytes keeps its codes so)."""
    for key, value in values.items():
        yield from _flat(value, f"{above}{key}/") if isinstance(value, dict) else [(f"{above}{key}", value)]


def _nested(flat):
    values = {}
    for path, value in flat.items():
        *above, key = path.split("/")
        place = values
        for name in above:
            place = place.setdefault(name, {})
        place[key] = value
    return values


def _like(parameter, value):
    """A whole tensor as the parameter holds its own: sharded where that is."""
    value = value.to(parameter.device)
    return (
        distribute_tensor(value, parameter.device_mesh, parameter.placements)
        if isinstance(parameter, DTensor)
        else value
    )

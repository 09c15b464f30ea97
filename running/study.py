"""A study: arms x seeds, and the files that it leaves.

OUT/plan.json                     the study as it was first begun; it cannot change once there are runs
OUT/code/HASH.json                the files of the code that made runs
OUT/starts/SEED.json, SEED/       the model that all arms of a seed start from; its weights go in the end
OUT/runs/SEED/ARM/                run.json, run_config.yaml, metrics.jsonl, answers/EVALUATION-STEP.json.gz
"""

import ast
import functools
import hashlib
import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from answers.user_files import code_of, user_files
from errors import RunError, SettingError, one_line
from reporting.files import sha256_of, write_whole
from running.locks import hold

ROOT = Path(__file__).resolve().parents[1]
ENDED = ("finished", "collapsed", "refused")


@dataclass
class Study:
    """A checked study. configs: {arm: its grpo_train.Config}, with seed and start still to come."""

    plan: dict
    folder: Path
    base: object
    start: object | None  # the sft_train.Config of the warm start, or None
    configs: dict
    evaluations: list
    code: str  # a hash of `files`
    files: dict  # {file of the code: its digest}
    only_seeds: list | None = None

    @property
    def seeds(self):
        """The seeds to run by now: all, or as many as are certain before the look, then those it asks for."""
        seeds, look = self.plan["seeds"], self.folder / "look.json"
        if look.exists():
            count = read_json(look)["seeds"]
        else:
            count = self.plan["fewest_seeds"] if self.plan.get("look_after") else len(seeds)
        return [seed for seed in seeds[:count] if not self.only_seeds or seed in self.only_seeds]

    def arms_of(self, seed):
        """The names of a seed's arms, in the order in which they are run."""
        names = [arm["name"] for arm in self.plan["arms"] if seed in arm["seeds"]]
        random.Random(seed).shuffle(names)
        return names

    def run_folder(self, seed, arm):
        return self.folder / "runs" / str(seed) / arm

    def start_note(self, seed):
        return self.folder / "starts" / f"{seed}.json"

    def unfinished(self, seed):
        """The arms of a seed that have no result yet, in their order."""
        return [
            arm for arm in self.arms_of(seed) if read_note(self.run_folder(seed, arm))["status"] not in ENDED
        ]

    def notes(self):
        """{(seed, arm): run.json} of all runs that were begun."""
        found = {}
        for path in sorted(self.folder.glob("runs/*/*/run.json")):
            found[path.parts[-3], path.parts[-2]] = read_json(path)
        return found


def read_note(folder):
    """What run.json says of a run; an empty status where there is none."""
    path = folder / "run.json"
    return read_json(path) if path.exists() else {"status": "", "seconds": 0.0}


def read_json(path):
    """A file of the study; RunError where it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(
            f"{path} is damaged ({one_line(error, 80)}): delete it, and what it speaks of is made again"
        ) from error


def write_json(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(values, indent=1) + "\n")


# The code


def code_files(configs=()):
    """{file of the project: sha256} of all that a run imports, within functions too, and of the user's.

    Found by reading: which of them are loaded depends on the machine.
    """
    files = dict(imported_files("grpo_train.py", "running/answering.py"))
    for config in configs:
        for _, named in code_of(config):
            for path in user_files(named):
                files[path.name] = sha256_of(path)
    return files


@functools.cache
def imported_files(*names):
    """(file, sha256) of these files of the project and of all that they import, in a fixed order."""
    waiting, files = [ROOT / name for name in names], {}
    while waiting:
        path = waiting.pop()
        name = path.relative_to(ROOT).as_posix()
        if name not in files:
            files[name] = sha256_of(path)
            waiting += _imported(path)
    return tuple(sorted(files.items()))


def _imported(path):
    """The project's files that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    paths = [ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in names]
    return [file for file in paths if file.is_file()]


def code_hash(files):
    return hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()


# Beginning, or going on


def begin(study, resume_anyway=False):
    """Check what is there, then write plan.json; SettingError where the study cannot go on, nothing written.

    A plan can change as long as there are no runs.
    """
    plan_file, notes = study.folder / "plan.json", study.notes()
    if plan_file.exists() and notes:
        then = read_json(plan_file)
        if changed := list(_changes(then, study.plan)):
            path, there, here = changed[0]
            more = f" ({len(changed) - 1} more differ)" if len(changed) > 1 else ""
            remedy = f"is {_shown(here)} now{more}: its runs are of the old study; give another --output_dir"
            raise SettingError(path, _shown(there), f"in {plan_file}, which has runs, and {remedy}")
    _refuse_other_code(study, notes, resume_anyway)
    if plan_file.exists() and not notes and read_json(plan_file) != study.plan:
        shutil.rmtree(study.folder / "starts", ignore_errors=True)  # of the plan that was there before
    try:
        write_json(plan_file, study.plan)
        write_json(study.folder / "code" / f"{study.code[:12]}.json", study.files)
    except OSError as error:
        what = f"cannot be written to ({error.strerror})"
        raise SettingError("output_dir", str(study.folder), what) from error


def _refuse_other_code(study, notes, resume_anyway):
    others = [(seed, arm) for (seed, arm), note in notes.items() if note["code_hash"] != study.code]
    if not others or resume_anyway:
        return
    seed, arm = others[0]
    then = notes[seed, arm]["code_hash"]
    noted = study.folder / "code" / f"{then[:12]}.json"
    files = read_json(noted) if noted.exists() else {}
    changed = sorted(n for n in {*files, *study.files} if files.get(n) != study.files.get(n)) if files else []
    which = f" ({', '.join(changed[:4])}{' and more' if len(changed) > 4 else ''} changed)" if changed else ""
    what = f"run {arm} of seed {seed} was made by other code, {then[:12]} there and {study.code[:12]} here"
    remedy = f"{what}{which}: go back to it, or say --resume_anyway true"
    raise SettingError("resume_anyway", False, remedy)


def _changes(then, now, path=""):
    """(path, there, here) of each value in which two plans differ."""
    if isinstance(then, dict) and isinstance(now, dict):
        for name in dict.fromkeys((*then, *now)):
            inner = f"{path}.{name}" if path else name
            yield from _changes(then.get(name), now.get(name), inner)
    elif _are_named(then) and _are_named(now):
        yield from _changes({p["name"]: p for p in then}, {p["name"]: p for p in now}, path)
    elif then != now:
        yield path, then, now


def _are_named(values):
    return (
        isinstance(values, list) and bool(values) and all(isinstance(v, dict) and "name" in v for v in values)
    )


def _shown(value):
    return one_line(value, 60) if isinstance(value, str | dict) else value


def lock(study, seed):
    """A lock on a seed's start and runs, until it is closed; None where another process has it."""
    path = study.folder / "starts" / f".{seed}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return hold(path)
    except BlockingIOError:
        return None


def forget_weights(folder, patterns):
    """Delete what a run's folder holds beside its logs and answers."""
    for pattern in patterns:
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

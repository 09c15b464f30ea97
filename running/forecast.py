"""What a study will take: minutes, from runs that are there or a few measured steps, and room on the disk."""

import math
import shutil
from dataclasses import dataclass
from statistics import fmean

from errors import SettingError, counted, sized
from learning.models import size_of
from running.study import ENDED, read_json, read_note

PROMPT_BYTES, TOKEN_BYTES = 2500, 5  # of a completion's line in rollouts.jsonl: the prompt, and each token
ANSWER_BYTES = 4  # of one answer in an answers file


@dataclass
class Seconds:
    """What the parts of a study take, in seconds."""

    start: float  # a supervised start
    runs: dict  # {arm: a whole run, with its questions}
    source: str  # where the numbers come from


def disk_bytes(study, questions, processes=1):
    """Bytes that a study still needs: those that stay, and those that `processes` runs take while they go."""
    base = study.base
    count, each = size_of(base.model, base.trust_remote_code)
    going = each * count + max(_checkpoints_bytes(c, count, each) for c in study.configs.values())
    if study.start is not None:
        going += each * count
    stays = 0
    for seed in study.plan["seeds"]:
        for arm in study.unfinished(seed):
            config = study.configs[arm]
            steps = config.num_steps * config.outer_iterations
            completions = steps * config.batch_size * config.num_generations
            stays += completions * (PROMPT_BYTES + TOKEN_BYTES * config.max_completion_length)
            for q in questions:
                stays += len(q.problems) * q.evaluation.samples * len(q.evaluation.steps) * ANSWER_BYTES
    return stays, processes * going


def _checkpoints_bytes(config, count, each):
    """Bytes of the checkpoints that a run has at once, of a model of `count` weights."""
    state = 4 * count + (0 if config.lora_r else config.moment_bytes * count)
    checkpoint = state + (each * count if config.beta > 0 else 0)
    copies = min(config.keep_checkpoints or 2, 2) + 1 if config.save_every else 1  # one where it is stopped
    return copies * checkpoint


def refuse_little_disk(study, needed):
    free = shutil.disk_usage(_there(study.folder)).free
    if needed > free:
        sizes = f"the study needs {sized(needed)} there, {sized(free)} are free"
        raise SettingError("output_dir", str(study.folder), f"{sizes}: give another disk")


def _there(folder):
    folder = folder.resolve()
    while not folder.exists():
        folder = folder.parent
    return folder


def measured(study):
    """The Seconds of runs that are there; None where an arm has none, or a start is to come and none is."""
    runs, starts = {}, []
    for seed in study.plan["seeds"]:
        note = study.start_note(seed)
        if note.exists():
            starts.append(read_json(note)["seconds"])
        for arm in study.arms_of(seed):
            note = read_note(study.run_folder(seed, arm))
            if note["status"] in ENDED:
                runs.setdefault(arm, []).append(note["seconds"])
    if not runs or (study.start is not None and not starts):
        return None
    means = {arm: fmean(seconds) for arm, seconds in runs.items()}
    others = fmean(means.values())
    return Seconds(
        fmean(starts) if starts else 0.0,
        {arm: means.get(arm, others) for arm in study.configs},
        "runs that are there",
    )


def plan_lines(study, questions, seconds, needed, processes):
    """What `--check` prints."""
    plan, lines = study.plan, []
    total = sum(len(arm["seeds"]) for arm in plan["arms"])
    left = {seed: study.unfinished(seed) for seed in plan["seeds"]}
    done = total - sum(map(len, left.values()))
    lines.append(
        f"study {plan['name']} in {study.folder}: {total} runs, {done} of them done; code {study.code[:12]}"
    )
    for arm in plan["arms"]:
        settings = (
            ", ".join(f"{name} {value}" for name, value in arm["settings"].items()) or "the base recipe"
        )
        role = "" if arm["role"] == "confirmatory" else f" ({arm['role']})"
        minutes = f"{seconds.runs[arm['name']] / 60:.1f} minutes each"
        lines.append(f"arm {arm['name']}{role}: {settings}; {counted(len(arm['seeds']), 'seed')}, {minutes}")
    for seed in plan["seeds"]:
        lines.append(f"seed {seed}: {', '.join(study.arms_of(seed))}")
    if plan["look_after"]:
        numbers = f"{plan['fewest_seeds']} to {plan['most_seeds']}"
        lines.append(
            f"after {plan['look_after']} seeds their number is worked out, {numbers}; the plan shows all"
        )
    for q in questions:
        e = q.evaluation
        how = (
            "greedy"
            if e.temperature == 0
            else f"{counted(e.samples, 'sample')} at temperature {e.temperature:g}"
        )
        interacting = ", interacting" if e.interacts else ""
        steps = ", ".join(map(str, e.steps))
        asked = counted(len(q.problems), "question")
        lines.append(f"evaluation {e.name}: {asked}, {how}{interacting}, at steps {steps}")
    time = sum(seconds.runs[arm] for arms in left.values() for arm in arms)
    time += seconds.start * sum(bool(arms) for arms in left.values())
    beside = f" on {processes} processes" if processes > 1 else ""
    minutes = math.ceil(10 * time / 60 / processes) / 10
    lines.append(f"time: {minutes:.1f} minutes{beside} for what is left, from {seconds.source}")
    stays, going = needed
    lines.append(f"disk: {sized(stays)} that stay, and {sized(going)} while runs go on")
    return lines

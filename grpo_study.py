"""A study: which of several arms is better? Each is trained from the same starts, over several seeds.

    python grpo_study.py configs/study_tiny.yaml           two arms, two seeds, in minutes on a laptop
    python grpo_study.py configs/study_m3po.yaml --check   what it would do, and how long it would take

The same command goes on where a study was stopped or killed, on another machine too. It writes the study's
folder (docs/study.md); on several GPUs runs go side by side, one a card.
"""

from errors import end_on_interrupt

if __name__ == "__main__":
    end_on_interrupt()
    from running.parsing import told
    from running.study_file import study_of_command

    SETTINGS = told(study_of_command, __doc__)  # before torch is imported, which takes seconds

import contextlib
import dataclasses
import hashlib
import io
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import torch

import grpo_train
import sft_train
from answers.user_files import code_of, forget_files
from errors import (
    FORESEEN,
    NoRoomError,
    NotFiniteError,
    RewardError,
    RunError,
    SettingError,
    counted,
    is_out_of_memory,
    one_line,
)
from problems.prompts import problems_of
from reporting.files import FINISHED, MODEL_FILES, read_metrics, read_run_config
from reporting.study import told, write_study
from running.answering import Questions, RunOfStudy, load_questions
from running.checkpoint import checkpoints, damage
from running.contract import finished_steps, model_fingerprint
from running.forecast import Seconds, disk_bytes, measured, plan_lines, refuse_little_disk
from running.launching import PARENT, check_precision, end_with_parent, signals_to_hand_on
from running.loaded import Loaded
from running.parsing import run_main
from running.study import begin, forget_weights, lock, read_json, read_note, write_json
from running.study_file import WORKER, Options, study_of_command

WEIGHTS = (*MODEL_FILES, "checkpoint-*", ".checkpoint.*", ".saving", "best", "adapter", "README.md")
TRIED_STEPS, TRIED_QUESTIONS = 3, 16  # measured for --check


@dataclass
class Bench:
    """What this process needs for every run of its study."""

    study: object
    questions: list  # the Questions of each evaluation
    options: Options
    loaded: Loaded
    end: float  # of the time that was given, by time.monotonic()
    failed: list = field(default_factory=list)  # (seed, arm) of runs that an unexpected error ended
    failed_last: bool = False  # whether the last run was one of them

    def minutes_left(self):
        """For stop_after: None where there is no limit. Ends the script where the time is over."""
        if self.end == math.inf:
            return None
        left = (self.end - time.monotonic()) / 60
        if left <= 0:
            say("the time is over")
            sys.exit(128 + signal.SIGTERM)
        return left


def say(text):
    print(f"study: {text}", flush=True)


# One seed


def make_seed(bench, seed):
    """Its start, then each of its runs that is not finished; False where another process works on it.

    A run that an unexpected error ends is no result: it is left for the next time, unless two in a row fail.
    """
    study = bench.study
    held = lock(study, seed)
    if held is None:
        say(f"seed {seed} is left to the process that works on it")
        return False
    with held:
        if not study.unfinished(seed):
            return True
        start, note = make_start(bench, seed)
        arms = study.unfinished(seed)
        for i, arm in enumerate(arms, 1):
            say(f"seed {seed}, arm {arm}: {i} of {counted(len(arms), 'run')} that this seed still needs")
            try:
                make_run(bench, seed, arm, start, note)
                bench.failed_last = False
            except Exception as error:
                go_on_without(bench, seed, arm, error)
        if not study.unfinished(seed):
            shutil.rmtree(study.folder / "starts" / str(seed), ignore_errors=True)
    return True


def go_on_without(bench, seed, arm, error):
    """Note a run that an error ended which nobody foresaw; raises one that would meet the other runs too.

    That is one that a user can mend, one of the machine's, and the second in a row.
    """
    if isinstance(error, (*FORESEEN, OSError, MemoryError)) or is_out_of_memory(error):
        raise error
    reason = f"{type(error).__name__}: {one_line(error)}"
    note = bench.study.run_folder(seed, arm) / "run.json"
    if note.exists():
        write_json(note, read_json(note) | {"status": "failed", "reason": reason})
    line = f"arm {arm} of seed {seed} failed, which is no result: {reason}"
    if bench.failed_last:
        say(f"{line}; so did the run before it, and the study stops")
        raise error
    traceback.print_exception(error)
    say(f"{line}; the other runs go on")
    bench.failed.append((seed, arm))
    bench.failed_last = True
    bench.loaded = Loaded()  # what the error left there is not used again


def make_start(bench, seed):
    """The model that all arms of a seed start from, and what starts/SEED.json says of it.

    Where its weights are gone it is made anew, and so are all runs of the seed: arms with different starts
    are no pairs.
    """
    study, note_file = bench.study, bench.study.start_note(seed)
    note = read_json(note_file) if note_file.exists() else None
    if study.start is None:
        return base_start(study, seed, note)
    folder, runs = study.folder / "starts" / str(seed), study.folder / "runs" / str(seed)
    if note is not None and model_fingerprint(folder) == note["start_hash"]:
        return str(folder), note
    if any(runs.glob("*/run.json")):
        say(
            f"the start of seed {seed} is gone: its runs are made again from a new one, the finished ones too"
        )
    shutil.rmtree(runs, ignore_errors=True)
    if note is not None:
        note_file.unlink()
        shutil.rmtree(folder, ignore_errors=True)
    say(f"seed {seed}: the start of its arms")
    started = time.perf_counter()
    where = dict(output_dir=str(folder), resume=folder.is_dir(), overwrite_output_dir=False, seed=seed)
    config = dataclasses.replace(study.start, stop_after=bench.minutes_left(), **where)
    sft_train.train(config, of_study=True)
    seconds = round(time.perf_counter() - started, 2)
    note = start_note(study, seed, model_fingerprint(folder), seconds)
    write_json(note_file, note)
    return str(folder), note


def base_start(study, seed, note):
    """The base model as the start of a seed, where there is no supervised one."""
    model = study.base.model
    found = model_fingerprint(model) or hashlib.sha256(model.encode()).hexdigest()
    if note is not None and note["start_hash"] != found:
        hashes = f"{note['start_hash'][:12]} there, {found[:12]} here"
        raise SettingError("model", model, f"is not what the runs of seed {seed} started from: {hashes}")
    if note is None:
        note = start_note(study, seed, found, 0.0)
        write_json(study.start_note(seed), note)
    return model, note


def start_note(study, seed, start_hash, seconds):
    note = {"seed": seed, "start_hash": start_hash, "code_hash": study.code}
    return note | {"accuracy": None, "seconds": seconds}


# One run


def make_run(bench, seed, arm, start, start_note):
    """Train an arm from a seed's start, with the study's questions, and note in run.json what became of it.

    A run that was cut off goes on from its checkpoint, or begins anew where it has none.
    """
    study, folder = bench.study, bench.study.run_folder(seed, arm)
    run = run_of_study(bench, seed, folder, start_note)
    note = {"arm": arm, "seed": seed, "start_hash": start_note["start_hash"], "code_hash": study.code}
    if (folder / FINISHED).exists() and not run.missing():  # it ended before this could be noted
        conclude(folder, note, "finished", finished_steps(folder / FINISHED), read_note(folder)["seconds"])
        return
    goes_on = any(damage(path) is None for path in checkpoints(folder))
    goes_on = goes_on and read_run_config(folder).get("model") == start
    if not goes_on:
        shutil.rmtree(folder, ignore_errors=True)
    forget_files([path for config in study.configs.values() for _, path in code_of(config)])
    earlier, started = read_note(folder)["seconds"], time.perf_counter()
    unfinished = note | {"status": "running", "step": 0, "seconds": earlier, "reason": None}
    write_json(folder / "run.json", unfinished)
    try:
        status, reason = trained(run, config_of_run(bench, seed, arm, start, goes_on))
        if run.step:
            run.ask_for_the_rest()
    finally:
        seconds = round(earlier + time.perf_counter() - started, 2)
        write_json(folder / "run.json", unfinished | {"step": run.step, "seconds": seconds})
    if run.start_accuracy is not None:
        start_note["accuracy"] = run.start_accuracy
        write_json(study.start_note(seed), start_note)
    if reason:
        say(f"arm {arm} of seed {seed} {status} at step {run.step} and counts so: {reason}")
    conclude(folder, note, status, run.step, seconds, reason)


def trained(run, config):
    """Train a run of the study; returns what became of it, (status, reason).

    Raises what is no result of an arm: too little room on the machine, or a refusal before the run began.
    """
    try:
        grpo_train.train(config, study=run)
    except NoRoomError:
        raise
    except (RunError, RewardError) as error:
        if run.run is None:
            raise
        return "collapsed" if isinstance(error, NotFiniteError) else "refused", one_line(error, None)
    return "finished", None


def run_of_study(bench, seed, folder, start_note):
    """The RunOfStudy of a run; the first one of a seed asks the primary questions of the start, too."""
    primary = bench.study.plan["primary"]["evaluation"]
    first = next(q for q in bench.questions if q.evaluation.name == primary)
    first = first if start_note["accuracy"] is None else None
    return RunOfStudy(folder, seed, bench.loaded, bench.study.base.interaction, bench.questions, first)


def config_of_run(bench, seed, arm, start, goes_on):
    """The settings of a run: those of its arm, and what the study sets itself."""
    return dataclasses.replace(
        bench.study.configs[arm],
        model=start,
        warm_start="none",
        seed=seed,
        output_dir=str(bench.study.run_folder(seed, arm)),
        overwrite_output_dir=False,
        resume=goes_on,
        resume_anyway=goes_on and bench.options.resume_anyway,
        stop_after=bench.minutes_left(),
    )


def conclude(folder, note, status, step, seconds, reason=None):
    """Note what became of a run, then throw its weights away: its answers are written."""
    write_json(
        folder / "run.json", note | {"status": status, "step": step, "seconds": seconds, "reason": reason}
    )
    forget_weights(folder, WEIGHTS)


# All of them


def make_all(bench, cards):
    """Every run that is still to be made, then the results; with several cards in processes of their own."""
    study, left = bench.study, set()  # seeds of other processes, and of runs that failed
    if WORKER not in os.environ and not any(map(study.unfinished, study.seeds)):
        return write_results(study.folder)  # a kill may have come before them
    while seeds := [s for s in study.seeds if s not in left and study.unfinished(s)]:
        if cards > 1:
            run_on_cards(bench, cards)
            left = {s for s in study.seeds if study.unfinished(s)}
        else:
            left |= {seed for seed in seeds if not make_seed(bench, seed) or study.unfinished(seed)}
        if WORKER not in os.environ:
            write_results(study.folder)  # after it there may be more seeds to run
    if others := left - {seed for seed, _ in bench.failed}:
        say(f"seeds {sorted(others)} are being run elsewhere; the same command goes on when they are done")
    if bench.failed:
        runs = ", ".join(f"{arm} of seed {seed}" for seed, arm in bench.failed)
        raise RunError(f"runs that failed are missing: {runs}; the same command tries them again")


def write_results(folder):
    """Write study.json and study.html, and look.json where it is time for it, and say what came out."""
    for line in told(write_study(folder)):
        say(line)
    say(f"look at {folder / 'study.html'}")


def run_on_cards(bench, cards):
    """This command once for each card, each taking seeds that nobody works on.

    Ends the script with the status of the first that failed.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(cards)]
    left = bench.minutes_left()
    words = [sys.executable, *sys.argv]
    env = {**os.environ, WORKER: str(left), PARENT: str(os.getpid())}
    workers = [subprocess.Popen(words, env={**env, "CUDA_VISIBLE_DEVICES": name}) for name in names[:cards]]

    def hand_on(number, frame):
        for worker in workers:
            worker.send_signal(number)

    before = {name: signal.signal(getattr(signal, name), hand_on) for name in signals_to_hand_on()}
    statuses = wait_for_all(workers, names)
    for name, handler in before.items():
        signal.signal(getattr(signal, name), handler)
    failed = next((status for status in statuses if status), 0)
    if failed == 1:
        write_results(bench.study.folder)  # other runs went on
    if failed:
        sys.exit(failed if failed > 0 else 128 - failed)


def wait_for_all(workers, names):
    """The statuses of all; one that fails is told at once, since the others may go on for hours."""
    with ThreadPoolExecutor(len(workers)) as threads:
        ends = {threads.submit(worker.wait): name for worker, name in zip(workers, names, strict=False)}
        for n, end in enumerate(as_completed(ends), 1):
            if end.result() and end.result() < 128 and n < len(workers):
                say(f"the process of card {ends[end]} ended with status {end.result()}; the others go on")
    return [end.result() for end in ends]


# --check


def try_out(bench):
    """Seconds of a start and of a run of each arm, from a few steps of each in a folder that goes again."""
    study, loaded = bench.study, Loaded()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        start, start_seconds = study.base.model, 0.0
        if study.start is not None:
            config = short(study.start, Path(folder) / "start")
            start, steps = str(sft_train.train(config)), steps_of(study.start)
            start_seconds = a_step(start, "step_seconds") * steps
        runs = {}
        for arm, config in study.configs.items():
            run = RunOfStudy(Path(folder) / arm, 0, loaded, study.base.interaction, few(bench.questions))
            config = short(dataclasses.replace(config, model=start, warm_start="none"), run.folder)
            began = time.perf_counter()
            grpo_train.train(config, study=run)
            whole = study.configs[arm]
            training = a_step(run.folder, "rollout_seconds", "reward_seconds", "update_seconds")
            asked = sum(TRIED_QUESTIONS for _ in run.questions)
            wanted = sum(len(q.problems) * len(q.evaluation.steps) for q in bench.questions)
            around = time.perf_counter() - began - run.asking_seconds
            around -= read_metrics(run.folder)[-1]["train_seconds"]
            runs[arm] = training * whole.num_steps * whole.outer_iterations + around
            runs[arm] += run.asking_seconds / asked * wanted
    return Seconds(start_seconds, runs, f"{TRIED_STEPS} steps of each arm")


def short(config, folder):
    """A few steps of a run, into another folder."""
    how = dict(
        num_steps=TRIED_STEPS, num_epochs=None, eval_every=0, save_every=0, keep_best=False, patience=0
    )
    how |= dict(output_dir=str(folder), resume=False, overwrite_output_dir=True)
    return dataclasses.replace(config, **how)


def few(questions):
    """Some questions of each evaluation, asked after the last of a few steps."""
    return [
        Questions(dataclasses.replace(q.evaluation, steps=[TRIED_STEPS]), q.problems[:TRIED_QUESTIONS])
        for q in questions
    ]


def steps_of(start):
    if start.num_epochs is None:
        return start.num_steps
    return math.ceil(start.num_epochs * len(problems_of(start, responses=True)) / start.batch_size)


def a_step(folder, *names):
    """Mean seconds of the steps after the first, in which things are set up."""
    later = read_metrics(folder)[1:]
    return sum(metrics[name] for metrics in later for name in names) / len(later)


def main(given=None):
    end_with_parent()
    study, options = given or study_of_command(__doc__)
    for config in (study.base, *study.configs.values()):
        check_precision(config)
    questions = [load_questions(evaluation, study.base) for evaluation in study.evaluations]
    cards = 1 if WORKER in os.environ else max(1, torch.cuda.device_count())
    needed = disk_bytes(study, questions, cards)
    end = math.inf if options.stop_after is None else time.monotonic() + 60 * options.stop_after
    bench = Bench(study, questions, options, Loaded(), end)
    if options.check:
        seconds = measured(study) or try_out(bench)
        print("\n".join(plan_lines(study, questions, seconds, needed, cards)))
        return refuse_little_disk(study, sum(needed))
    refuse_little_disk(study, sum(needed))
    begin(study, options.resume_anyway)
    try:
        make_all(bench, cards)
    except SystemExit:  # a run that was told to stop has saved what is finished
        say("the same command goes on")
        raise


if __name__ == "__main__":
    run_main(main, SETTINGS)

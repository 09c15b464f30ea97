"""A run: its processes, signals, folder, log and checkpoints, and how far it has come."""

import math
import signal
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from accelerate.utils import gather_object
from tqdm import tqdm

from errors import Interrupted, NotFiniteError, RewardError, RunError, SettingError, Stopped, counted
from learning.learner import NOT_FINITE, renew_rates
from learning.parallel import first_over_processes, max_over_processes, raise_on_all, shard, together
from reporting.files import FINISHED, read_run_config
from running.checkpoint import Checkpoints, checkpoints
from running.contract import differences, finished_note, lengthens, refusal, shown
from running.folder import (
    BEST,
    files_of_model,
    finish,
    lock_folder,
    refuse_used,
    save_best,
    start_logs,
    upload,
)
from running.launching import folder_of_first, seconds_since_start, start_processes
from running.locks import forget
from running.log import MetricsLog, open_page
from running.progress import Progress
from running.stop import TIME_IS_OVER, Stop

TIME_LIMITS = ("max_minutes", "max_wall_minutes")
_TURN = threading.Lock()  # of the one training that a process has at a time


class Run:
    """What surrounds the steps: `with Run(...) as run`, `run.open(...)`, `for step in run.steps()`.

    On a signal of running/stop.py or at its time limit a run saves the finished steps and exits with 128 +
    the signal. shown: {metric: format} of a step's line. outer: the run that this one is the warm start of.
    few_lines: a step is a move of the bar, and has no line of its own. of_study: a study makes it, goes on
    with it by itself and throws its model away.
    """

    def __init__(self, config, shown, outer=None, few_lines=False, of_study=False):
        self.config, self.shown, self.outer, self.few_lines = config, shown, outer, few_lines
        self.of_study = of_study
        self.progress, self.saved_step = Progress(), 0
        self.has_begun = self.is_finished = False
        self.checkpoints = self.lock = self.log = self.metrics = self.first_evaluation = None
        self.copies = ExitStack()  # folders sent here from the first machine
        self.seconds = {}  # of the parts of this step
        self.problems_drawn = 0  # progress.problems_drawn, and this step's
        self.problems_of_a_pass = 1  # all of the training data; set when some are drawn
        self.steps_began = 0.0  # seconds on the clock of max_wall_minutes
        self.time_used = 0.0  # the share of the run's minutes that is over, of both limits the larger

    def __enter__(self):
        if self.outer is None and not _TURN.acquire(blocking=False):
            raise RunError(
                "another training goes on in this process, and would load, seed and set threads in the midst "
                "of this one: wait for its end, or start each in a process of its own"
            )
        try:
            return self._begin()
        except BaseException:
            self._let_others_run()
            raise

    def _let_others_run(self):
        if self.outer is None:
            _TURN.release()

    def _begin(self):
        self.threads_before = torch.get_num_threads()
        self.accelerator = start_processes(self.config)
        with together():
            if self.accelerator.is_main_process:
                refuse_used(self.config)
        self.stop = self.outer.stop if self.outer else Stop(self.config.stop_after)
        self.end_at_once("loading")
        return self

    def __exit__(self, kind, error, traceback):
        try:
            self._end(kind)
        finally:
            self._let_others_run()

    def _end(self, kind):
        try:
            if kind is Stopped:
                self.save_and_leave()
        finally:
            if torch.get_num_threads() != self.threads_before:  # the next run of this process may name none
                torch.set_num_threads(self.threads_before)
            self.copies.close()
            if self.outer is None:
                self.stop.restore()
            if self.lock is not None:
                if not (self.has_begun or self.had_lock):
                    forget(self.folder / ".lock")
                self.lock.close()
            if self.log is not None:
                self.log.let_go(failed=True)  # a run that came to its end has done it before

    def open(self, learner, inputs, evaluate, steps, total):
        """Lock the folder, check everything, then go on from its newest checkpoint or begin.

        inputs: what `inputs_of` gives. evaluate(): metrics on the held-out problems. steps: length of an
        outer iteration, of `total` steps in all. A run that is refused here has changed no file.
        """
        self.learner, self.evaluate, self.steps_per_iteration, self.total = learner, evaluate, steps, total
        self.inputs, self.had_lock = inputs, (Path(self.config.output_dir) / ".lock").exists()
        self.folder = Path(self.config.output_dir)
        self.lock = lock_folder(self.folder, self.accelerator, ("output_dir", self.config.output_dir))
        self.checkpoints = Checkpoints(self, inputs)
        note = None
        with together():
            if self.config.resume and self.accelerator.is_main_process:
                note = finished_note(self.folder / FINISHED)
        note = first_over_processes(note)
        if note is not None and self._is_done(note):
            self.is_finished = True
            page = self.folder / "report.html"
            steps = counted(note["step"], "step")
            self.say(f"nothing is left to do: {self.folder} finished its {steps}; see {page}")
            if self.config.open and self.accelerator.is_main_process:
                open_page(page, self.say)
            if self.config.push_to_hub and note.get("uploaded") != self.config.hub_model_id:
                upload(self, note)
            return
        state = self.checkpoints.resume() if self.config.resume else None
        if state is not None:
            self.progress = Progress.from_state(state)
            if self.checkpoints.changed:
                self.progress.changes.append(self.checkpoints.changed)
            self._forget_lost_best()
            self._note_training_time()
            renew_rates(learner.schedule, learner.optimizer)
        self.saved_step = self.progress.step
        self.has_begun = True
        start_logs(self, state)
        if not self.config.learning_rate:
            self.say("WARNING: learning_rate=0.0: every rate of this run is 0, and no weight will change")
        if self.config.fsdp and self.accelerator.num_processes == 1:
            self.say("note: fsdp shards nothing on one process")
        self.log = MetricsLog(self)
        self.stop.at_once = None  # a study asks its questions before the first step, too

    def _forget_lost_best(self):
        """keep_best: an accuracy whose model was not kept in best/ must not bar later ones."""
        best, progress = self.folder / "best", self.progress
        note = BEST if progress.best_step is not None else "config.json"  # earlier versions wrote no note
        was_kept = progress.best < 0 or (best / note).exists()
        is_lost = self.config.keep_best and not was_kept
        if first_over_processes(is_lost and self.accelerator.is_main_process):
            self.say("note: no earlier model was kept in best: keep_best keeps the best from here on")
            progress.best, progress.best_step = -1.0, None

    def _is_done(self, note):
        """Whether a finished run has nothing left to do; refused where it was another run.

        One that is asked for more goes on from the checkpoint of its last step, or is refused without one.
        """
        config, problem, goes_on = self.config, None, None
        if self.accelerator.is_main_process:
            then = note if "settings" in note else {"settings": read_run_config(self.folder)}
            differ = differences(config, then, self.inputs)
            limits = [(getattr(config, name), then["settings"].get(name)) for name in TIME_LIMITS]
            asks_for_time = note["step"] < self.total and any(now != before for now, before in limits)
            has_adapter = not config.save_adapter or (self.folder / "adapter").exists()
            there = files_of_model(self.folder)
            # earlier versions noted none; a study throws the model away
            is_whole = self.of_study or note.get("files", {}).items() <= there.items()
            goes_on = bool(differ) or asks_for_time or not has_adapter or not is_whole
            if not (lengthens(config, differ) and self.total > note["step"]):
                problem = refusal(config, then, differ)
            if not is_whole and not problem:
                self.say(f"the model in {self.folder} is not whole any more")
            if goes_on and not problem and differ and self.total <= note["step"]:
                self.say(f"although this is not what the run was: {shown(differ)}")
                goes_on = False
            if goes_on and not problem and not self._has_checkpoint_since(note["step"]):
                its_model = "" if is_whole else ", its model is not whole any more,"
                problem = (
                    f"finished {counted(note['step'], 'step')}{its_model} and left no checkpoint of the last "
                    "one to go on from (--save_every N keeps it, beforehand): "
                    "begin anew with --overwrite_output_dir true"
                )
        raise_on_all(SettingError("resume", str(self.folder), problem) if problem else None)
        return not max_over_processes(bool(goes_on))

    def _has_checkpoint_since(self, step):
        existing = checkpoints(self.folder)
        return bool(existing) and int(existing[0].name.removeprefix("checkpoint-")) >= step

    def find_folder(self, folder, setting=None):
        """Where this process finds a folder of the first process until the run ends; a hub id as it is."""
        return self.copies.enter_context(folder_of_first(folder, Path(self.config.output_dir), setting))

    def steps(self, evaluate_first=True):
        """Yield the number of each step that is left; evaluate before the very first, save after the last."""
        if self.is_finished:
            return
        self.raise_if_stopped()
        if self.progress.unlogged:  # stopped during this step's evaluation: redo it, then log the step
            self._log(self.progress.unlogged | self._evaluate())
            self.progress.unlogged = None
        if evaluate_first and self.config.eval_every and self.progress.step == 0:
            self.first_evaluation = self.evaluate()
            self.progress.best, self.progress.best_step = self.first_evaluation["eval_accuracy"], 0
            length = self.first_evaluation["eval_length"]
            self.say(f"before training: held-out accuracy {self.progress.best:.3f}, length {length:.0f}")
            if self.config.keep_best:  # the start is the best until something is better
                save_best(self)
        self._refuse_late_start()
        self.is_last = self.progress.step >= self.total or self._is_out_of_patience()
        while not self.is_last:
            self.seconds, self.problems_drawn = {}, self.progress.problems_drawn
            self.step_began = time.perf_counter()
            yield self.progress.step
        self.log.close()
        finish(self)
        if self.outer is not None:
            self.end_at_once("loading")
            self.raise_if_stopped()  # one that came while the model was saved would wait for the next to load

    def finish_step(self, metrics, batch):
        """Count a step; evaluate, log and save if it is time. batch: the step's problems, all processes'."""
        config, progress = self.config, self.progress
        progress.step += 1
        progress.problems_drawn = self.problems_drawn
        progress.train_seconds += sum(self.seconds.values())
        self.seconds.setdefault("step_seconds", time.perf_counter() - self.step_began)
        epoch = progress.problems_drawn / self.problems_of_a_pass
        metrics = {"step": progress.step, "epoch": epoch, **metrics, **self.seconds}
        metrics["train_seconds"] = progress.train_seconds
        is_bad = metrics.get("skipped") == NOT_FINITE
        progress.bad_steps = progress.bad_steps + 1 if is_bad else 0
        if is_bad:
            metrics["bad_examples"] = [p.problem.id for p in batch]
        if progress.step == 1 and self.first_evaluation:
            metrics["eval_accuracy_before"] = self.first_evaluation["eval_accuracy"]
            metrics["eval_length_before"] = self.first_evaluation["eval_length"]
        warning = progress.collapse_warning(metrics, config.warn_after) if "reward" in metrics else None
        self.is_last = progress.step == self.total or self._is_out_of_time()
        renew_rates(self.learner.schedule, self.learner.optimizer)
        if config.eval_every and (progress.step % config.eval_every == 0 or self.is_last):
            progress.unlogged = metrics
            metrics = metrics | self._evaluate()
            progress.unlogged = None
            self.is_last = self.is_last or self._is_out_of_patience()
        self._log(metrics)
        if warning:
            self.say(warning)
        self._refuse_bad_steps(metrics)
        if not self.is_last:
            self.raise_if_stopped()
        is_end_of_iteration = progress.step % self.steps_per_iteration == 0 or self.is_last
        if config.save_every and (progress.step % config.save_every == 0 or is_end_of_iteration):
            self.save_checkpoint()

    def _log(self, metrics):
        self.metrics = metrics
        self.log.write(metrics)

    def _evaluate(self):
        """Metrics on the held-out problems; the best model so far is kept."""
        progress = self.progress
        with self.learner.as_saved():
            evaluation = self.evaluate()
            progress.since_best += 1
            if evaluation["eval_accuracy"] > progress.best:
                progress.best, progress.since_best = evaluation["eval_accuracy"], 0
                progress.best_step = progress.step
                if self.config.keep_best:
                    save_best(self)
        if self._is_out_of_patience():
            count = counted(progress.since_best, "evaluation")
            self.say(f"no better held-out accuracy than {progress.best:.3f} in {count}: the run ends")
        return evaluation

    def _is_out_of_patience(self):
        return bool(self.config.patience) and self.progress.since_best >= self.config.patience

    def _is_out_of_time(self):
        """Whether the run's minutes are over; sets time_used, by which a falling learning rate falls."""
        minutes, wall_minutes = self.config.max_minutes, self.config.max_wall_minutes
        self._note_training_time()
        if minutes is not None and self.time_used >= 1:
            self.say(f"max_minutes={minutes:g} of training are over: the run ends")
            return True
        if wall_minutes is None:
            return False
        now = seconds_since_start()
        step_seconds = time.perf_counter() - self.step_began
        share = (now - self.steps_began) / (60 * wall_minutes - self.steps_began)
        # the next step is as long as this one
        after_next, step_seconds, share = max_over_processes((now + step_seconds, step_seconds, share))
        if self.outer is None:  # of a warm start the limit bounds more than the start
            self.time_used = max(self.time_used, share)
        if after_next < 60 * wall_minutes:
            return False
        if self.outer is not None and self.progress.step < self.total:  # half of a start is no start
            needed = after_next + (self.total - self.progress.step - 1) * step_seconds
            alone = f"the warm start alone needs about {math.ceil(needed / 6) / 10} minutes"
            raise SettingError("max_wall_minutes", wall_minutes, f"{alone}: give more, or shorten it")
        self.say(f"max_wall_minutes={wall_minutes:g} are over: the run ends")
        return True

    def _note_training_time(self):
        minutes = self.config.max_minutes
        self.time_used = 0.0
        if minutes is not None:
            self.time_used = max_over_processes(self.progress.train_seconds) / (60 * minutes)

    def _refuse_late_start(self):
        """Refuse max_wall_minutes that are over before the first step."""
        minutes = self.config.max_wall_minutes
        if minutes is None or self.progress.step >= self.total:
            return
        self.steps_began = seconds = max_over_processes(seconds_since_start())
        if seconds >= 60 * minutes:
            before = f"loading and what else comes before this run's first step took {seconds:.0f} s"
            more = math.ceil(seconds / 6 + 1) / 10
            raise SettingError("max_wall_minutes", minutes, f"{before}: give more than {more} minutes")

    def _refuse_bad_steps(self, metrics):
        count = self.progress.bad_steps
        if count >= self.config.max_bad_steps:
            or_bf16 = ", or say --precision bf16" if self.config.precision == "fp16" else ""
            raise NotFiniteError(
                f"{counted(count, 'step')} in a row had a loss or gradient that is not finite, the last on "
                f"problems {metrics['bad_examples']}; a pass that is not finite changes no weight: lower "
                f"learning_rate{or_bf16}, or go on from the last checkpoint with --resume true"
            )

    def save_checkpoint(self):
        self.checkpoints.save()
        self.saved_step = self.progress.step

    def save_and_leave(self):
        """Save what is not saved yet, and end with 128 + the signal. All processes must call it."""
        number = self.stop.agreed()
        kept = "nothing new to save"
        if self.checkpoints is not None and self.progress.step > self.saved_step:
            self.save_checkpoint()
            kept = f"saved checkpoint-{self.progress.step}"
        reason = f"stopped by {signal.Signals(number % TIME_IS_OVER).name}"
        if number >= TIME_IS_OVER:
            reason = f"stopped, since the time of stop_after={self.config.stop_after or 0:g} minutes is over"
        is_said = self.config.resume or self.of_study  # a study has no --resume
        go_on = "the same command again" if is_said else "--resume true"
        self.say(f"{reason}: {kept}; go on with {go_on}")
        if self.log is not None:
            self.log.close()  # the page has the last step, and trackers all of them
        self.accelerator.wait_for_everyone()
        sys.exit(128 + number % TIME_IS_OVER)

    def raise_if_stopped(self):
        """All processes must call it."""
        if self.stop.agreed():
            raise Stopped

    def interruptible(self, decoder, action):
        """What action() returns. Raises Stopped on all processes where one was told to stop in the meantime.

        All processes must call it, and no action may wait for another process.
        """
        decoder.interrupted = self.stop.asked
        try:
            result = action()
        except Interrupted:
            result = None
        finally:
            decoder.interrupted = None
        self.raise_if_stopped()
        return result

    def end_at_once(self, doing):
        """Let a signal end the run where it is while it does this, since there is nothing to save.

        Not one of several processes: another may wait for it within torch, where no signal is heard.
        """
        self.stop.at_once = doing if self.accelerator.num_processes == 1 else None

    def call_rewards(self, action):
        """What action(gather) returns, which calls users' functions, and then gather(values) once.

        gather gives the values of all processes. Raises Stopped on all of them where one was told to stop in
        the meantime: its function is broken off. All processes must call it.
        """

        def gather(values):
            self.stop.breaks_off = False  # from here on others may wait for this process
            self.raise_if_stopped()
            return gather_object(values)

        try:
            with self.stop.breaking_off():
                return action(gather)
        except (Interrupted, RewardError):
            if not self.stop.number:
                raise
            # a reward may fail since its own processes got the signal as well
            self.raise_if_stopped()

    @contextmanager
    def timed(self, name):
        """Add the seconds of a part of the step, the device's work included, to those it has taken so far."""
        self._wait_for_device()
        started = time.perf_counter()
        yield
        self._wait_for_device()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def _wait_for_device(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def device(self):
        return self.accelerator.device

    @property
    def local_groups(self):
        """The numbers of the groups of a batch that this process works on."""
        return range(self.config.batch_size)[shard(self.config.batch_size, self.accelerator)]

    @property
    def local_rows(self):
        """The slice of the rows of a batch that this process works on."""
        return shard(self.config.batch_size, self.accelerator, self.config.num_generations)

    @property
    def bar_name(self):
        """What stands in front of the bar of steps."""
        if self.outer is not None:
            return "warm start"
        if self.few_lines:
            return "supervised"
        return self.folder.name if self.of_study else None  # a study names the folders after its arms

    def say(self, text):
        """Print a line, above the progress bar; once for all processes."""
        if self.accelerator.is_main_process:
            tqdm.write(text)
            sys.stdout.flush()

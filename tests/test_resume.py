"""A run that is stopped and resumed equals one that was not, to the bit; and what happens to checkpoints
between.
"""

import contextlib
import fcntl
import functools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import grpo_train
import sft_train
from errors import Interrupted, RunError, SettingError
from learning import learner, precision
from learning.precision import LossScale
from problems.problem import EncodedProblem, Problem
from reporting.files import DIGESTS, read_run_config, sha256_of
from running import checkpoint, log
from running import folder as run_folder
from running.checkpoint import checkpoints, damage, seal
from running.contract import data_fingerprint, finished_steps, model_fingerprint
from running.launching import signals_to_hand_on
from running.parsing import parse_config
from running.progress import Progress
from running.run import Run
from running.settings import free_on_resume
from running.stop import Stop
from small_models import a_model_and_problems, build_model

ROOT = Path(__file__).parents[1]


PAYS = """
import os, signal, threading, time
from pathlib import Path

calls, told, late = 0, Path(__file__).with_name("told"), Path(__file__).with_name("late")

def pays(completions, **kwargs):
    return [float(len(c[0]["content"]) % 5) for c in completions]

def pays_some(completions, answer, **kwargs):
    global calls
    calls += 1
    # No signal for half of the problems.
    values = [0.0 if int(a) % 4 else value for a, value in zip(answer, pays(completions))]
    has_signals = all(int(a) % 4 == 0 for a in answer)
    if os.environ.get("RANK") == "1" and calls > 5 and has_signals and told.exists():
        told.write_text(str(Path(told.read_text(), "metrics.jsonl").read_text().count("\\n")))
        told.rename(told.with_name("steps"))
        # when it has returned
        threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGTERM)).start()
    return values

def pays_late(completions, trainer_state, **kwargs):
    if trainer_state.global_step == 2 and os.environ.get("RANK", "1") == "1" and late.exists():
        how = late.read_text()
        late.unlink()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(2)
            late.write_text("was waited for")
        except BaseException:
            if how == "fails":
                raise ValueError("its own processes are gone")
            if how == "waits":
                raise
    return pays(completions)
"""


@pytest.fixture(scope="session")
def start(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    a_model_and_problems(folder, "qwen2", tokenizer)
    (folder / "pays.py").write_text(PAYS)
    return folder


def settings_of(start, out, script=grpo_train, **more):
    """A run of four steps with a checkpoint after each: two outer iterations of GRPO, or supervised steps."""
    common = dict(model=str(start / "model"), dataset=str(start), output_dir=str(out), batch_size=3)
    common |= dict(eval_every=2, eval_problems=4, save_every=1, cpu_threads=1)
    common |= dict(learning_rate=1e-2, lr_scheduler_type="cosine", warmup_ratio=0.2)
    grpo = dict(num_steps=2, outer_iterations=2, mu=2, num_generations=4, max_completion_length=8)
    grpo |= dict(reward=[f"{start}/pays.py:pays"], beta=0.1, m3po_lambda=0.3, log_groups=2)
    supervised = dict(num_epochs=None, num_steps=4, max_completion_length=64)
    return script.Config(**{**common, **(grpo if script is grpo_train else supervised), **more})


def in_full(cases, fast):
    """All the cases for parametrize; those after the first `fast` are slow tests."""
    return [pytest.param(c, marks=[pytest.mark.slow] if n >= fast else []) for n, c in enumerate(cases)]


class Killed(BaseException):
    """SIGKILL, as far as a process can do it to itself without dying: nothing is saved or cleaned up."""


def run(config, kill_at=None, script=grpo_train, monkeypatch=None):
    """Train; with `kill_at` die when that step's line is written."""
    write = log.MetricsLog.write

    def dying(self, metrics):
        write(self, metrics)
        if metrics["step"] == kill_at:
            raise Killed

    with monkeypatch.context() if kill_at else contextlib.nullcontext() as patch:
        if kill_at:
            patch.setattr(log.MetricsLog, "write", dying)
            with pytest.raises(Killed):
                script.train(config)
        else:
            script.train(config)


def everything(out):
    """What a run leaves, without times."""
    model = load_file(out / "model.safetensors")
    metrics = [
        {k: v for k, v in json.loads(line).items() if "seconds" not in k and "per_s" not in k}
        for line in (out / "metrics.jsonl").read_text().splitlines()
    ]
    return model, metrics, (out / "rollouts.jsonl").read_text(), (out / "evaluations.jsonl").read_text()


def assert_same(a, b):
    (model, metrics, *logs), (other, other_metrics, *other_logs) = everything(a), everything(b)
    assert metrics == other_metrics
    assert logs == other_logs
    assert model.keys() == other.keys()
    for name, tensor in model.items():
        assert torch.equal(tensor, other[name]), name


VARIANTS = {
    "full": {},
    "lora": dict(lora_r=4, lora_alpha=8),
    "8bit": dict(optimizer="adamw_8bit"),
    "average": dict(ema_decay=0.7),
    "dynamic": dict(dynamic_sampling=1, beta=0.0, mu=1),
}


@pytest.fixture(scope="session")
def uninterrupted(start, tmp_path_factory):
    made = {}

    def of(variant):
        if variant not in made:
            made[variant] = tmp_path_factory.mktemp("whole") / variant
            run(settings_of(start, made[variant], **VARIANTS[variant]))
        return made[variant]

    return of


@pytest.mark.parametrize("variant", in_full(VARIANTS, 1))
def test_a_run_killed_twice_ends_like_one_that_was_not(variant, start, uninterrupted, tmp_path, monkeypatch):
    """I10, M3PO, mu 2, two outer iterations, the second killed too."""
    if variant == "lora":
        pytest.importorskip("peft")
    if variant == "8bit":
        pytest.importorskip("bitsandbytes")
    out = tmp_path / "out"
    config = dict(VARIANTS[variant])
    run(settings_of(start, out, **config), kill_at=2, monkeypatch=monkeypatch)
    run(settings_of(start, out, resume=True, **config), kill_at=4, monkeypatch=monkeypatch)
    run(settings_of(start, out, resume=True, **config))
    assert_same(out, uninterrupted(variant))


@pytest.mark.slow
def test_the_loss_scale_of_fp16_is_gone_on_with(start, tmp_path, monkeypatch):
    """Here the CPU's float32 is scaled, from what overflows it on; two good passes double a scale."""
    monkeypatch.setattr(learner, "compute_dtype", lambda *_: torch.float16)
    monkeypatch.setattr(learner, "LossScale", functools.partial(LossScale, 2.0**129))
    monkeypatch.setattr(precision, "GROWTH_STEPS", 2)
    run(settings_of(start, tmp_path / "whole"))
    run(settings_of(start, tmp_path / "cut"), kill_at=3, monkeypatch=monkeypatch)
    run(settings_of(start, tmp_path / "cut", resume=True))
    assert_same(tmp_path / "whole", tmp_path / "cut")
    state = json.loads((tmp_path / "whole" / "checkpoint-4" / "training_state.json").read_text())
    assert state["loss_scale"][0] < 2.0**128
    assert any("skipped" not in metrics for metrics in everything(tmp_path / "whole")[1])


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_that_had_bf16_is_gone_on_from(finished, start, cut, uninterrupted, tmp_path):
    if finished:
        shutil.copytree(uninterrupted("full"), cut, dirs_exist_ok=True)
    note = cut / ("finished.json" if finished else "checkpoint-2/training_state.json")
    for bf16 in (False, True):
        state = json.loads(note.read_text())
        state["settings"].pop("precision", None)
        note.write_text(json.dumps(state | {"settings": state["settings"] | {"bf16": bf16}}))
        checkpoint.seal(cut / "checkpoint-2")
        if not bf16:
            with pytest.raises(SettingError, match="precision 'fp32' there, 'bf16' here"):
                grpo_train.train(settings_of(start, cut, resume=True))
    run(settings_of(start, cut, resume=True))
    assert_same(cut, uninterrupted("full"))


# What versions that could draw problems by their pass rates noted of a run
PASS_RATES = dict(problem_sampling="uniform", pass_rate_samples=4, pass_rate_power=4.0, pass_rate_floor=0.05)


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_that_could_have_drawn_by_pass_rates_is_gone_on_from_unless_it_did(
    finished, start, cut, uninterrupted
):
    if finished:
        shutil.copytree(uninterrupted("full"), cut, dirs_exist_ok=True)
    note = cut / ("finished.json" if finished else "checkpoint-2/training_state.json")
    for drawn in ("pass_rate", "uniform"):
        state = json.loads(note.read_text())
        state["settings"] |= PASS_RATES | {"problem_sampling": drawn}
        if not finished:
            state["progress"]["pass_rates"] = None
        note.write_text(json.dumps(state))
        checkpoint.seal(cut / "checkpoint-2")
        if drawn == "pass_rate":
            with pytest.raises(SettingError, match="run: problem_sampling 'pass_rate' there, None here;"):
                grpo_train.train(settings_of(start, cut, resume=True))
    run(settings_of(start, cut, resume=True))
    assert_same(cut, uninterrupted("full"))


def with_columns(start, folder, more=1):
    """The data with a column that rewards read, in a folder of its own."""
    rows = [json.loads(line) for line in (start / "train.jsonl").read_text().splitlines()]
    rows = [row | {"hint": more} for row in rows]
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_from_every_checkpoint_a_run_goes_on_as_if_it_had_not_been_stopped(start, tmp_path):
    """With evaluations, dynamic sampling, M3PO and outer iterations: a fresh process has none of what an
    evaluation or a larger rollout left in the decoder.
    """
    rows = [json.loads(line) for line in (start / "train.jsonl").read_text().splitlines()]
    for i, row in enumerate(rows):
        row["question"] *= 1 + i % 6
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = dict(num_steps=3, outer_iterations=2, eval_every=2, eval_problems=12, save_every=1)
    settings |= dict(dynamic_sampling=1, mu=1, keep_checkpoints=0, batch_size=2)
    settings |= dict(reward=[f"{start}/pays.py:pays_some"], dataset=str(tmp_path / "data"))
    whole = tmp_path / "whole"
    run(settings_of(start, whole, **settings))
    extra = [
        json.loads(line)["extra_rollouts"] for line in (whole / "metrics.jsonl").read_text().splitlines()
    ]
    assert max(extra) > 0
    assert len(checkpoints(whole)) == 6
    for step in range(5, 0, -1):
        cut = Path(shutil.copytree(whole, tmp_path / f"from-{step}"))
        for path in checkpoints(cut):
            if int(path.name.removeprefix("checkpoint-")) > step:
                shutil.rmtree(path)
        for name in ("finished.json", "model.safetensors"):
            (cut / name).unlink()
        run(settings_of(start, cut, resume=True, **settings))
        assert_same(whole, cut)


def test_supervised_training_too(start, tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(settings_of(start, whole, sft_train), script=sft_train)
    run(settings_of(start, cut, sft_train), kill_at=3, script=sft_train, monkeypatch=monkeypatch)
    run(settings_of(start, cut, sft_train, resume=True), script=sft_train)
    assert_same(whole, cut)


def test_a_run_that_began_before_there_was_one_of_the_logs_goes_on(start, cut):
    """Its next checkpoint could not be written for want of evaluations.jsonl, and the run ended."""
    shutil.rmtree(cut / "checkpoint-2")
    (cut / "evaluations.jsonl").unlink()
    folder = cut / "checkpoint-1"
    state = json.loads((folder / "training_state.json").read_text())
    del state["logs"]["evaluations.jsonl"], state["settings"]["inspect_every"]
    (folder / "training_state.json").write_text(json.dumps(state))
    checkpoint.seal(folder)
    run(settings_of(start, cut, resume=True))
    steps = [json.loads(line)["step"] for line in (cut / "evaluations.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == [2, 4]


@pytest.mark.slow
def test_a_checkpoint_written_before_progress_had_its_names_is_gone_on_from(
    start, uninterrupted, tmp_path, monkeypatch
):
    """training_state.json of 2026-11-28: flat, with a `place` in the data, and the metrics of a step that is
    not logged yet.
    """
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "asked", asked_at(MOMENTS["evaluation of step 2"]))
        with pytest.raises(SystemExit):
            grpo_train.train(settings_of(start, out, save_every=0))
    folder = checkpoints(out)[0]
    state = json.loads((folder / "training_state.json").read_text())
    progress = state.pop("progress")
    assert progress["unlogged"]["step"] == 2, "a step waits for its evaluation"
    old = {name: progress[name] for name in ("step", "train_seconds", "bad_steps", "best", "since_best")}
    old |= {"place": progress["problems_drawn"], "evaluate": True, "metrics": progress["unlogged"]}
    (folder / "training_state.json").write_text(json.dumps(state | old))
    checkpoint.seal(folder)
    grpo_train.train(settings_of(start, out, save_every=0, resume=True))
    assert_same(out, uninterrupted("full"))


def test_the_progress_of_an_older_supervised_checkpoint_counts_the_problems_of_its_steps():
    state = dict(step=3, train_seconds=1.0, bad_steps=0, best=-1.0, since_best=0, evaluate=True)
    state |= dict(metrics={"step": 3}, settings={"batch_size": 5})
    assert Progress.from_state(state) == Progress(3, 15, 1.0, unlogged={"step": 3})


LEFT_OUT = {
    "moments": lambda state, tensors: [
        tensors.pop(k) for k in list(tensors) if "exp_avg." in k or k.endswith("exp_avg")
    ],
    "schedule": lambda state, tensors: state["schedule"].update(last_epoch=0, _step_count=1),
    "problems drawn": lambda state, tensors: state["progress"].update(problems_drawn=0),
    "reference": lambda state, tensors: [tensors[k].zero_() for k in tensors if k.startswith("reference.")],
}


@pytest.mark.parametrize("field", in_full(LEFT_OUT, 1))
def test_the_comparison_sees_each_part_of_the_state_that_is_left_out(field, start, uninterrupted, cut):
    shutil.rmtree(cut / "checkpoint-2")
    folder = cut / "checkpoint-1"
    state = json.loads((folder / "training_state.json").read_text())
    tensors = load_file(folder / "training_state.safetensors")
    LEFT_OUT[field](state, tensors)
    (folder / "training_state.json").write_text(json.dumps(state))
    save_file(tensors, folder / "training_state.safetensors")
    checkpoint.seal(folder)
    with contextlib.suppress(KeyError):  # an optimiser without one of its moments says so itself
        run(settings_of(start, cut, resume=True))
        with pytest.raises(AssertionError):
            assert_same(cut, uninterrupted("full"))


# How many times a run of `settings_of` has called `Stop.asked` when it is there.
MOMENTS = {"the beginning": 1, "first evaluation": 5, "second rollout": 24, "evaluation of step 2": 34}


def asked_at(moments):
    """A `Stop.asked` that says SIGTERM from its n-th call on."""
    calls = []

    def asked(self):
        calls.append(1)
        self.number = self.number or (int(signal.SIGTERM) if len(calls) >= moments else 0)
        return self.number

    return asked


@pytest.mark.parametrize("moment", in_full(MOMENTS, 2))
def test_stopped_at_any_moment_and_resumed_is_the_same_run(
    moment, start, uninterrupted, tmp_path, monkeypatch
):
    """Before the first step, in a rollout, in an evaluation: the last finished step is saved, the status is
    143.
    """
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "asked", asked_at(MOMENTS[moment]))
        with pytest.raises(SystemExit) as left:
            grpo_train.train(settings_of(start, out, save_every=0))
        assert left.value.code == 143
    grpo_train.train(settings_of(start, out, save_every=0, resume=True))
    whole, cut = everything(uninterrupted("full")), everything(out)
    assert whole[1:] == cut[1:]
    assert all(torch.equal(tensor, cut[0][name]) for name, tensor in whole[0].items())


def test_an_evaluation_that_was_cut_off_is_made_up_although_the_next_run_dies_as_well(
    start, uninterrupted, tmp_path, monkeypatch
):
    """The step's line waits for its evaluation; a log that was written to before would be cut in the middle
    of a line.
    """
    out, honest, calls = tmp_path / "out", grpo_train.held_out_accuracy, []

    def cut(run, *args):
        calls.append(1)
        if len(calls) == 2:
            run.stop.number = int(signal.SIGTERM)
        return honest(run, *args)

    with monkeypatch.context() as patch:
        patch.setattr(grpo_train, "held_out_accuracy", cut)
        with pytest.raises(SystemExit):
            grpo_train.train(settings_of(start, out, save_every=0))
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 1
    for kill in (2, 3):
        run(settings_of(start, out, save_every=0, resume=True), kill_at=kill, monkeypatch=monkeypatch)
    run(settings_of(start, out, save_every=0, resume=True))
    whole, made_up = everything(uninterrupted("full")), everything(out)
    assert whole[1:] == made_up[1:]
    assert all(torch.equal(tensor, made_up[0][name]) for name, tensor in whole[0].items())


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGHUP"])
def test_each_signal_that_a_cluster_warns_with_is_remembered(name):
    """SIGUSR2 and SIGXCPU, of SGE and of a limit of CPU time, killed the run without a checkpoint."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has switched it off
    stop = Stop()
    try:
        signal.raise_signal(getattr(signal, name))
        assert stop.asked() == getattr(signal, name)
    finally:
        stop.restore()
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("script", [grpo_train, sft_train])
def test_a_run_that_fails_leaves_the_signals_as_they_were(script, start, tmp_path, monkeypatch):
    """In a notebook Ctrl-C did nothing any more, the first time."""
    before = {name: signal.getsignal(name) for name in signal.valid_signals()}
    run(settings_of(start, tmp_path / "out", script), kill_at=1, script=script, monkeypatch=monkeypatch)
    assert {name: signal.getsignal(name) for name in signal.valid_signals()} == before


@pytest.mark.parametrize("how", in_full(["waits", "swallows", "fails"], 1))
def test_a_signal_breaks_off_a_reward_whose_step_is_done_again_alike(how, start, tmp_path):
    """It was waited for, for ever if need be: a model that judges takes minutes, a cluster kills after one.

    The reward may have an end of its own, go on after any exception, or lose processes to the same signal.
    """
    settings = dict(reward=[f"{start}/pays.py:pays_late"], save_every=0)
    run(settings_of(start, tmp_path / "whole", **settings))
    (start / "late").write_text(how)
    with pytest.raises(SystemExit) as left:
        grpo_train.train(settings_of(start, tmp_path / "cut", **settings))
    assert left.value.code == 143
    assert not (start / "late").exists()
    assert checkpoints(tmp_path / "cut")[0].name == "checkpoint-2"
    run(settings_of(start, tmp_path / "cut", resume=True, **settings))
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_a_signal_before_the_first_step_does_not_wait_for_what_is_loaded(start, tmp_path, monkeypatch, capfd):
    """A download of an hour was waited for without a word, and then nothing was there to be saved."""
    monkeypatch.setattr(grpo_train, "check_positions", lambda *_: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(grpo_train, "make_learner", lambda *_: pytest.fail("it went on"))
    with pytest.raises(SystemExit) as left:
        grpo_train.train(settings_of(start, tmp_path / "out"))
    assert left.value.code == 143
    assert ": stopped by SIGTERM while it was loading\n" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_signal_does_not_wait_for_the_threads_of_a_download():
    """Leaving the pool of threads that loads the files of a model waits for each that it has begun."""
    code = (
        "import signal, time\nfrom concurrent.futures import ThreadPoolExecutor\nfrom running import stop\n"
    )
    code += "stop.SECONDS_TO_UNWIND, it = 0.1, stop.Stop()\nit.at_once = 'loading'\n"
    code += "with ThreadPoolExecutor(1) as pool:\n    pool.submit(time.sleep, 60)\n"
    code += "    signal.raise_signal(signal.SIGTERM)\n"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stderr) == (143, "-c: stopped by SIGTERM while it was loading\n")


def test_a_signal_that_was_caught_while_loading_does_not_end_the_process_later():
    """As a notebook catches it."""
    stop = Stop()
    stop.at_once = "loading"
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)
    stop.restore()
    stop.last_resort.join(1)
    assert not stop.last_resort.is_alive()


def test_a_signal_between_loading_and_the_first_step_says_how_to_go_on(start, tmp_path, monkeypatch, capsys):
    """While a study asked its questions of the start it said `loading`, and processes did not agree."""
    monkeypatch.setattr(grpo_train, "say_plan", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as left:
        grpo_train.train(settings_of(start, tmp_path / "out"))
    assert left.value.code == 143
    said = capsys.readouterr().out
    assert "stopped by SIGTERM: nothing new to save; go on with --resume true" in said


def test_a_signal_just_before_a_reward_does_not_wait_for_it():
    """It was remembered, and nothing broke off the reward, which may take for ever."""
    stop = Stop()
    try:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted), stop.breaking_off():
            pytest.fail("the reward was called")
    finally:
        stop.restore()


@pytest.mark.parametrize(("processes", "doing"), [(1, "loading"), (2, None)])
def test_one_of_several_processes_does_not_leave_the_others_to_wait_for_it(processes, doing):
    """On GPUs they wait within NCCL, where they would hear no signal either."""
    run = SimpleNamespace(accelerator=SimpleNamespace(num_processes=processes), stop=SimpleNamespace())
    Run.end_at_once(run, "loading")
    assert run.stop.at_once == doing


def test_a_reward_s_own_handlers_do_not_keep_signals_from_the_run():
    stop = Stop()
    try:
        with stop.breaking_off():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked() == signal.SIGTERM
    finally:
        stop.restore()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_a_process_that_a_reward_forks_can_be_ended():
    """A reward that runs an answer's code in a process, and ends it after a while, waited for ever for its
    end: the process remembered SIGTERM, as the run does.
    """
    stop, fork = Stop(), multiprocessing.get_context("fork")
    is_there = fork.Event()

    def answer():
        is_there.set()
        time.sleep(60)

    try:
        process = fork.Process(target=answer)
        process.start()
        assert is_there.wait(5)
        process.terminate()
        process.join(5)
        ended = process.exitcode
        process.kill()
        assert (ended, stop.asked()) == (-signal.SIGTERM, 0)
    finally:
        stop.restore()


@pytest.mark.slow
def test_a_signal_in_the_reward_of_one_process_stops_both(start, tmp_path):
    words = dict(num_processes=2, num_steps=4, eval_every=0, save_every=0)
    words |= dict(reward=f"{start}/pays.py:pays_late")
    (start / "late").write_text("waits")
    cut = begin(words_of(start, tmp_path / "cut", **words))
    printed = cut.communicate(timeout=180)[0]
    assert cut.returncode == 143, printed
    assert "stopped by SIGTERM: saved checkpoint-2;" in printed


@pytest.mark.slow
def test_a_signal_in_an_extra_rollout_does_not_wait_for_the_step_which_is_done_again_alike(
    start, tmp_path, monkeypatch
):
    settings = dict(dynamic_sampling=2, reward=[f"{start}/pays.py:pays_some"], save_every=0)
    settings |= dict(num_steps=4, max_completion_length=16)
    honest, whole = grpo_train.sample, []
    run(settings_of(start, tmp_path / "whole", **settings))

    def told(run, decoder, batch, step, groups=None, retry=0):
        if step == 4 and retry:
            signal.raise_signal(signal.SIGTERM)
        sampled = honest(run, decoder, batch, step, groups, retry)
        whole.append((step, retry))
        return sampled

    with monkeypatch.context() as patch:
        patch.setattr(grpo_train, "sample", told)
        with pytest.raises(SystemExit) as left:
            grpo_train.train(settings_of(start, tmp_path / "cut", **settings))
    assert left.value.code == 143
    assert whole[-1] == (4, 0), "the extra rollout was broken off"
    assert checkpoints(tmp_path / "cut")[0].name == "checkpoint-4"
    run(settings_of(start, tmp_path / "cut", resume=True, **settings))
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_the_time_limit_stops_as_a_signal_does(start, tmp_path, capsys):
    """It said that SIGTERM had stopped the run, which nobody had sent."""
    with pytest.raises(SystemExit) as left:
        grpo_train.train(settings_of(start, tmp_path / "out", stop_after=1e-6))
    assert left.value.code == 143
    said = capsys.readouterr().out
    assert "stopped, since the time of stop_after=1e-06 minutes is over: nothing new to save; go on" in said
    assert "SIGTERM" not in said
    grpo_train.train(settings_of(start, tmp_path / "out", num_steps=1, eval_every=0))  # 0 steps are no run
    assert not (tmp_path / "out" / "finished.json").read_text().startswith('{"step": 0')


def test_a_run_needs_no_signal_and_no_folder_handle_that_windows_lacks(start, tmp_path, monkeypatch):
    """Simulated: there was no Windows to try it on."""
    for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGQUIT"):
        monkeypatch.delattr(signal, name)
    monkeypatch.setattr("running.stop.HANGUP", None)
    monkeypatch.setattr("running.checkpoint.SYNCS_FOLDERS", False)
    opened = os.open

    def as_on_windows(path, flags, *given, **how):
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *given, **how)

    monkeypatch.setattr(os, "open", as_on_windows)
    grpo_train.train(settings_of(start, tmp_path / "out", save_every=1, num_steps=2, outer_iterations=1))
    assert (tmp_path / "out" / "checkpoint-2" / "manifest.json").exists()
    assert signals_to_hand_on() == ["SIGTERM", "SIGINT"]


def test_nothing_is_done_where_nothing_is_left(start, uninterrupted, capsys):
    out = uninterrupted("full")
    before = everything(out)
    grpo_train.train(settings_of(start, out, resume=True))
    assert "nothing is left to do" in capsys.readouterr().out
    after = everything(out)
    assert before[1:] == after[1:]


def test_resuming_in_an_empty_folder_starts_afresh(start, tmp_path, capsys):
    grpo_train.train(settings_of(start, tmp_path / "new", resume=True, num_steps=1, outer_iterations=1))
    assert "starting from the beginning" in capsys.readouterr().out


def test_a_folder_with_a_model_that_is_no_run_s_is_refused_and_the_model_stays(start, tmp_path):
    """--output_dir the same as --model wrote the trained model over the one it came from."""
    shutil.copytree(start / "model", tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    with pytest.raises(
        SettingError, match="holds a config.json that is no run's and would be written over: choose another"
    ):
        grpo_train.train(settings_of(start, tmp_path / "model", model=str(tmp_path / "model")))
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "README.md").write_text("my data")
    with pytest.raises(SettingError, match="holds a README.md that is no run's"):
        grpo_train.train(settings_of(start, tmp_path / "data"))


def test_the_folder_of_the_project_is_never_overwritten(start):
    """--output_dir . --overwrite_output_dir put a model card in the place of the project's README."""
    project = Path(grpo_train.__file__).parent
    with pytest.raises(
        SettingError, match="is this project's own folder, whose README.md would be written over"
    ):
        grpo_train.train(settings_of(start, project, overwrite_output_dir=True))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "is no name"),
        ("a\0b", "is no name"),
        ("x" * 300, "is no name"),
        ("/proc/nothing", "cannot be written to"),
    ],
)
def test_a_folder_that_cannot_be_made_is_one_line(name, words, start):
    """An empty name filled the current folder; the others ended in a traceback, the last after the models
    were loaded.
    """
    with pytest.raises(SettingError, match=f"output_dir=.*{words}"):
        grpo_train.train(settings_of(start, name))


@pytest.mark.parametrize("script", [grpo_train, sft_train])
@pytest.mark.parametrize(
    ("name", "folder"), [("metrics.jsonl", True), ("model.safetensors", True), (".saving", False)]
)
def test_what_is_in_the_way_of_a_file_of_the_run_is_named_before_any_work(
    name, folder, script, start, tmp_path
):
    """The first ended in a traceback, the others in one at the end of the whole training, and there was no
    model.
    """
    (tmp_path / name).mkdir() if folder else (tmp_path / name).touch()
    with pytest.raises(SettingError, match=f"holds a {name} of another kind, which is in the way"):
        script.train(settings_of(start, tmp_path, script))


OTHERWISE = {
    "a rate": (dict(learning_rate=1e-3), "learning_rate 0.01 there, 0.001 here"),
    "a model": (dict(model="other"), "model .* there, .*other' here; what is saved would not fit"),
    "fewer steps": (dict(num_steps=1), "num_steps 2 there, 1 here"),
    "a seed": (dict(seed=1), "seed 42 there, 1 here"),
}


@pytest.mark.parametrize("kind", OTHERWISE)
def test_a_finished_run_is_not_taken_for_one_of_other_settings(kind, start, uninterrupted, tmp_path):
    """It ended with 0 and the old model."""
    other, words = OTHERWISE[kind]
    if "model" in other:
        other = {"model": str(shutil.copytree(start / "model", tmp_path / "other"))}
    out = uninterrupted("full")
    before = contents(out)
    with pytest.raises(SettingError, match=f"was written by another run: .*{words}"):
        grpo_train.train(settings_of(start, out, resume=True, **other))
    assert contents(out) == before


def test_a_finished_run_of_an_earlier_version_is_compared_by_its_settings(
    start, uninterrupted, tmp_path, capsys
):
    out = Path(shutil.copytree(uninterrupted("full"), tmp_path / "out"))
    (out / "finished.json").write_text('{"step": 4}\n')
    with pytest.raises(SettingError, match="seed 42 there, 1 here"):
        grpo_train.train(settings_of(start, out, resume=True, seed=1))
    grpo_train.train(settings_of(start, out, resume=True))
    assert "nothing is left to do" in capsys.readouterr().out
    grpo_train.train(settings_of(start, out, resume=True, resume_anyway=True, seed=1))
    assert "although this is not what the run was: seed 42 there, 1 here" in capsys.readouterr().out


@pytest.fixture(scope="module")
def with_hints(start, tmp_path_factory):
    """Two steps of a run with its own data, reward file and model, and its settings."""
    folder = tmp_path_factory.mktemp("hints")
    shutil.copytree(start / "model", folder / "model")
    pays = "def unused():\n    from beside import SEVEN\n\n\n" + (start / "pays.py").read_text()
    (folder / "pays.py").write_text(pays)
    (folder / "beside.py").write_text("SEVEN = 8\n")
    with_columns(start, folder / "data")
    settings = dict(num_steps=2, outer_iterations=1, mu=1, beta=0.0, lora_r=2, eval_problems=2)
    run(settings_of(folder, folder / "out", dataset=str(folder / "data"), **settings))
    return folder, settings


def another_column(folder):
    with_columns(folder / "data", folder / "data", more=2)


def another_held_out_answer(folder):
    path = folder / "data" / "train.jsonl"
    [*_, line] = (folder / "out" / "evaluations.jsonl").read_text().splitlines()
    answer = json.loads(line)["answer"]
    path.write_text(path.read_text().replace(f'#### {answer}"', f'#### {answer}0"'))


def another_reward_text(folder):
    (folder / "pays.py").write_text((folder / "pays.py").read_text().replace("% 5", "% 7"))


def another_base(folder):
    weights = load_file(folder / "model" / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, folder / "model" / "model.safetensors", {"format": "pt"})


def another_helper_text(folder):
    (folder / "beside.py").write_text("SEVEN = 7\n")


CHANGED_FILES = {
    "data": another_column,
    "held_out": another_held_out_answer,
    "rewards": another_reward_text,
    "rewards ": another_helper_text,
    "start": another_base,
}


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("name", CHANGED_FILES)
def test_a_file_that_a_run_read_may_not_change_under_it(name, finished, with_hints, tmp_path):
    """A column that rewards read, a held-out row, the reward's text, the base weights under an adapter: each
    was taken as it was, and a refused run had cut its log.
    """
    made, settings = with_hints
    folder = Path(shutil.copytree(made, tmp_path / "run"))
    note = json.loads((folder / "out" / "finished.json").read_text())
    for path in (*folder.glob("out/checkpoint-*/training_state.json"), folder / "out" / "finished.json"):
        state = json.loads(path.read_text())  # the copy's own paths
        state["settings"] = json.loads(json.dumps(note["settings"]).replace(str(made), str(folder)))
        path.write_text(json.dumps(state))
    for path in checkpoints(folder / "out"):
        checkpoint.seal(path)
    if not finished:
        (folder / "out" / "finished.json").unlink()
        shutil.rmtree(folder / "out" / "checkpoint-2")
    CHANGED_FILES[name](folder)
    before = contents(folder / "out")
    config = settings_of(folder, folder / "out", dataset=str(folder / "data"), resume=True, **settings)
    with pytest.raises(
        SettingError, match=rf"was written by another run: .*{DIGESTS[name.strip()]}.* changed since; say"
    ):
        grpo_train.train(config)
    assert contents(folder / "out") == before


def test_a_resume_that_is_refused_at_the_last_has_cut_no_log(start, cut):
    """metrics.jsonl was cut before the next log was looked at."""
    (cut / "rollouts.jsonl").write_text("")
    (cut / ".checkpoint.part").mkdir()
    before = contents(cut)
    with pytest.raises(RunError, match=r"rollouts\.jsonl is shorter"):
        grpo_train.train(settings_of(start, cut, resume=True))
    assert contents(cut) == before
    assert (cut / ".checkpoint.part").exists()


@pytest.mark.parametrize("deciding", [dict(patience=3), dict(keep_best=True)])
def test_evaluations_that_decide_may_not_come_at_other_steps(deciding, start, cut):
    with pytest.raises(SettingError, match="eval_every 2 there, 1 here"):
        grpo_train.train(settings_of(start, cut, resume=True, eval_every=1, resume_anyway=False, **deciding))


def test_a_finished_run_goes_on_for_more_steps_as_if_they_had_been_asked_for(start, tmp_path, capsys):
    settings = dict(lr_scheduler_type="constant", warmup_ratio=0.0, outer_iterations=1, eval_every=2)
    long, short = tmp_path / "long", tmp_path / "short"
    run(settings_of(start, long, **settings, num_steps=4))
    run(settings_of(start, short, **settings, num_steps=2))
    run(settings_of(start, short, **settings, num_steps=4, resume=True))
    assert "num_steps 2 there, 4 here; the rate stays constant" in capsys.readouterr().out
    assert_same(long, short)
    run(settings_of(start, short, **settings, num_steps=4, resume=True))
    assert "nothing is left to do" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_finished_run_whose_model_is_gone_is_not_done(name, start, uninterrupted, tmp_path):
    """It said that nothing is left to do, with status 0, and there was no model."""
    out = shutil.copytree(uninterrupted("full"), tmp_path / "out")
    config = settings_of(start, out, resume=True, **VARIANTS["full"])
    before = (out / "model.safetensors").read_bytes()
    (out / name).unlink()
    run(config)
    assert (out / name).exists()
    assert (out / "model.safetensors").read_bytes() == before
    (out / "model.safetensors").write_bytes(before[:-1])
    for path in checkpoints(out):
        shutil.rmtree(path)
    with pytest.raises(SettingError, match="its model is not whole any more, and left no checkpoint"):
        run(config)


def test_a_checkpoint_s_name_holds_a_number_as_int_reads_it(tmp_path):
    """`checkpoint-²` ended in a traceback: its digit is no decimal one."""
    for name in (
        "checkpoint-2",
        "checkpoint-10",
        "checkpoint-²",
        "checkpoint-x",
        "checkpoint-",
        "my-checkpoint-3",
    ):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-10", "checkpoint-2"]


def test_a_run_that_kept_no_last_checkpoint_says_what_to_set_beforehand(start, tmp_path):
    settings = dict(outer_iterations=1, save_every=0, eval_every=0, eval_problems=0)
    run(settings_of(start, tmp_path / "out", num_steps=1, **settings))
    before = contents(tmp_path / "out")
    with pytest.raises(
        SettingError, match=r"finished 1 step and left no checkpoint .*--save_every N keeps it"
    ):
        run(settings_of(start, tmp_path / "out", num_steps=2, resume=True, **settings))
    assert contents(tmp_path / "out") == before


def test_a_run_that_ended_by_the_clock_goes_on_when_it_gets_more_of_it(
    start, uninterrupted, tmp_path, monkeypatch
):
    """As one that ended by max_minutes does: it said that nothing was left to do."""
    clock = iter([0.0, 70.0])
    with monkeypatch.context() as patch:
        patch.setattr("running.run.seconds_since_start", lambda: next(clock))
        run(settings_of(start, tmp_path / "out", max_wall_minutes=1))
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 1
    run(settings_of(start, tmp_path / "out", max_wall_minutes=1000, resume=True))
    whole, made = everything(uninterrupted("full")), everything(tmp_path / "out")
    assert whole[2] == made[2]
    assert all(torch.equal(tensor, made[0][name]) for name, tensor in whole[0].items())


@pytest.mark.parametrize("limit", [dict(max_minutes=1e-9), dict(patience=1)])
def test_a_run_that_ended_before_its_last_step_is_done(limit, start, tmp_path, capsys, monkeypatch):
    """Started again it said that there was nothing to go on from, with status 2."""
    accuracy = {"eval_accuracy": 0.5, "eval_length": 1.0, "eval_questions": 4}
    monkeypatch.setattr(grpo_train, "held_out_accuracy", lambda *args: accuracy)
    settings = dict(save_every=0, eval_every=1, **limit)
    grpo_train.train(settings_of(start, tmp_path / "out", **settings))
    before = contents(tmp_path / "out")
    grpo_train.train(settings_of(start, tmp_path / "out", resume=True, **settings))
    assert "finished its 1 step" in capsys.readouterr().out
    assert contents(tmp_path / "out") == before


def test_an_upload_that_failed_is_made_up_on_the_next_start(start, uninterrupted, tmp_path, monkeypatch):
    """It was never made: the run was finished, and started again there was nothing left to do."""
    uploads, out = [], Path(shutil.copytree(uninterrupted("full"), tmp_path / "out"))

    def push(folder, repository, private):
        uploads.append(repository)
        if len(uploads) == 1:
            raise RunError("the model is saved, but not uploaded")
        return "https://example.org"

    monkeypatch.setattr(run_folder, "push", push)
    config = settings_of(start, out, resume=True, push_to_hub=True, hub_model_id="me/mine")
    with pytest.raises(RunError, match="not uploaded"):
        grpo_train.train(config)
    grpo_train.train(config)
    grpo_train.train(config)
    assert uploads == ["me/mine"] * 2
    assert json.loads((out / "finished.json").read_text())["uploaded"] == "me/mine"


def test_a_signal_ends_an_upload_where_it_is(start, uninterrupted, tmp_path, monkeypatch, capfd):
    """The hub's client waits without end for a hub that does not answer, and the signal was only noted."""
    out = Path(shutil.copytree(uninterrupted("full"), tmp_path / "out"))
    monkeypatch.setattr(run_folder, "push", lambda *_: signal.raise_signal(signal.SIGTERM))
    config = settings_of(start, out, resume=True, push_to_hub=True, hub_model_id="me/mine")
    with pytest.raises(SystemExit) as left:
        grpo_train.train(config)
    assert left.value.code == 143
    said = capfd.readouterr()
    assert "\nuploading it to me/mine" in said.out
    assert "stopped by SIGTERM while it was uploading" in said.err
    assert "uploaded" not in json.loads((out / "finished.json").read_text())


def test_a_warm_start_of_other_settings_or_data_is_not_gone_on_from(start, tmp_path):
    """It was used as it was, and the note of its settings was rewritten."""
    (tmp_path / "warm.yaml").write_text("num_epochs: null\nnum_steps: 1\nmax_completion_length: 64\n")
    data = with_columns(start, tmp_path / "data")
    settings = dict(warm_start=str(tmp_path / "warm.yaml"), dataset=data, eval_every=0, eval_problems=0)
    settings |= dict(num_steps=1, outer_iterations=1, save_every=0)
    out = tmp_path / "out"
    run(settings_of(start, out, **settings))
    before = contents(out)
    with_columns(start, tmp_path / "data", more=2)
    with pytest.raises(SettingError, match=r"warm_start.*: the problems or their prompts changed since"):
        run(settings_of(start, out, resume=True, **settings))
    with_columns(start, tmp_path / "data")
    (tmp_path / "warm.yaml").write_text("num_epochs: null\nnum_steps: 1\nmax_completion_length: 63\n")
    with pytest.raises(SettingError, match="warm_start.*max_completion_length 64 there, 63 here"):
        run(settings_of(start, out, resume=True, **settings))
    assert contents(out) == before


def test_a_signal_while_a_warm_start_is_saved_does_not_wait_for_what_is_loaded(start, tmp_path, monkeypatch):
    """It was remembered, and the models of the run were loaded first."""
    (tmp_path / "warm.yaml").write_text("num_epochs: null\nnum_steps: 1\nmax_completion_length: 64\n")
    settings = dict(warm_start=str(tmp_path / "warm.yaml"), eval_every=0, eval_problems=0)
    settings |= dict(num_steps=1, outer_iterations=1, save_every=0)

    def finish(run):
        run_folder.finish(run)
        signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr("running.run.finish", finish)
        patch.setattr(grpo_train, "make_learner", lambda *_: pytest.fail("it went on"))
        with pytest.raises(SystemExit) as left:
            grpo_train.train(settings_of(start, tmp_path / "out", **settings))
    assert left.value.code == 143
    run(settings_of(start, tmp_path / "out", resume=True, **settings))
    assert (tmp_path / "out" / "warm_start" / "warm_start.json").exists()


def test_a_rate_of_nothing_is_said(start, tmp_path, capsys):
    settings = dict(learning_rate=0.0, num_steps=1, outer_iterations=1, eval_every=0, eval_problems=0)
    run(settings_of(start, tmp_path / "out", save_every=0, **settings))
    assert "every rate of this run is 0, and no weight will change" in capsys.readouterr().out


def test_what_a_run_of_one_process_and_one_update_leaves_without_effect_is_said(start, tmp_path, capsys):
    once = dict(num_steps=1, outer_iterations=1, eval_every=0, eval_problems=0, save_every=0, mu=1)
    run(settings_of(start, tmp_path / "out", fsdp=True, epsilon_high=0.3, **once))
    said = capsys.readouterr().out
    assert "note: with mu=1 the ratio is always 1, so that epsilon and epsilon_high clip nothing" in said
    assert "note: fsdp shards nothing on one process" in said


def test_what_is_overwritten_leaves_nothing_behind_from_the_first_moment(start, tmp_path, monkeypatch):
    """A killed new run stood there with its predecessor's model, card, best model and curves."""
    out = tmp_path / "out"
    (tmp_path / "warm.yaml").write_text("num_epochs: null\nnum_steps: 1\nmax_completion_length: 64\n")
    old = dict(keep_best=True, lora_r=2, save_adapter=True, warm_start=str(tmp_path / "warm.yaml"))
    run(settings_of(start, out, num_steps=1, outer_iterations=1, **old))
    (out / "curves.svg").write_text("<svg/>")
    (out / "trackers").mkdir()
    (out / "model-00001-of-00002.safetensors").write_text("")
    (out / "model.safetensors.index.json").write_text("{}")
    assert {"best", "adapter", "warm_start", "README.md", "report.html"} <= {p.name for p in out.iterdir()}
    mine = {"notes.txt": "mine", "checkpoint-notes/a.txt": "mine", "data/train.jsonl": "{}"}
    for name, text in mine.items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(text)
    new = settings_of(start, out, overwrite_output_dir=True)
    monkeypatch.setattr(grpo_train, "say_plan", lambda *args: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        grpo_train.train(new)
    logs = ["metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl"]
    assert sorted(contents(out)) == sorted([*mine, *logs, ".lock", "run_config.yaml"])
    assert {name: (out / name).read_text() for name in mine} == mine
    assert not any((out / name).read_text() for name in logs)


def test_another_tools_model_that_is_overwritten_is_gone_from_the_first_moment(start, tmp_path, monkeypatch):
    """A killed new run left its run_config.yaml beside a model that it did not make, which was evaluated."""
    out = tmp_path / "out"
    shutil.copytree(start / "model", out)
    for name in ("README.md", "adapter_config.json", "notes.txt"):
        (out / name).write_text("{}")
    with pytest.raises(SettingError, match=r"model=.*would be overwritten: choose another output_dir"):
        grpo_train.train(settings_of(start, out, overwrite_output_dir=True, model=str(out)))
    monkeypatch.setattr(grpo_train, "say_plan", lambda *args: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        grpo_train.train(settings_of(start, out, overwrite_output_dir=True))
    logs = ["metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl"]
    assert sorted(contents(out)) == sorted([*logs, "notes.txt", ".lock", "run_config.yaml"])


@pytest.mark.parametrize("name", ["model", "reward"])
def test_a_run_that_reads_what_it_would_overwrite_is_refused(name, start, uninterrupted):
    out = uninterrupted("full")
    value = {"model": str(out / "checkpoint-4"), "reward": [f"{out}/trackers/pays.py:pays"]}[name]
    (out / "trackers").mkdir()
    shutil.copy(start / "pays.py", out / "trackers")
    before = contents(out)
    with pytest.raises(SettingError, match=f"{name}=.*of the run in .* that would be overwritten"):
        grpo_train.train(settings_of(start, out, overwrite_output_dir=True, **{name: value}))
    assert contents(out) == before
    shutil.rmtree(out / "trackers")


def test_a_save_leaves_no_weights_of_another_in_its_place(start, tokenizer, tmp_path):
    """A single file would be loaded before the shards beside it, and an adapter on top of the model."""
    model = build_model("qwen2", tokenizer)
    for name in ("model-00001-of-00009.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        (tmp_path / name).write_text("old")
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "mine.safetensors").write_text("mine")
    run_folder.save_model(model, tokenizer, tmp_path, torch.float32)
    weights = {path.name for path in tmp_path.iterdir() if path.suffix in (".safetensors", ".bin")}
    assert weights == {"model.safetensors", "mine.safetensors"}
    assert not (tmp_path / "model.safetensors.index.json").exists()
    assert not (tmp_path / "adapter_config.json").exists()


def test_who_may_read_a_models_settings_may_read_its_weights(tokenizer, tmp_path):
    """safetensors writes files of mode 0600: a colleague with the folder could not load the model."""
    run_folder.save_model(build_model("qwen2", tokenizer), tokenizer, tmp_path, torch.float32)
    (tmp_path / "mine").touch()
    modes = {path.name: path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"] == modes["mine"]


def test_a_model_is_saved_where_files_have_no_modes(tokenizer, tmp_path, monkeypatch):
    """As on mounted object stores: a run that was over lost its model."""

    def chmod(*given, **more):
        raise PermissionError(1, "Operation not permitted")

    model = build_model("qwen2", tokenizer)
    monkeypatch.setattr(os, "chmod", chmod)
    run_folder.save_model(model, tokenizer, tmp_path, torch.float32)
    assert AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("script", [grpo_train, sft_train])
def test_the_start_is_the_best_until_something_is_better(script, start, tmp_path, monkeypatch, capsys):
    """There was no best/ at all where nothing was better; of a supervised run it was the first evaluated."""
    accuracies = iter([0.5, 0.4, 0.5])
    accuracy = lambda *args: {"eval_accuracy": next(accuracies), "eval_length": 1.0, "eval_questions": 4}  # noqa: E731
    monkeypatch.setattr(script, "held_out_accuracy", accuracy)
    settings = dict(eval_every=1, keep_best=True, save_every=0, num_steps=2)
    if script is grpo_train:
        config = settings_of(start, tmp_path / "out", outer_iterations=1, **settings)
    else:
        settings |= dict(
            model=str(start / "model"), dataset="arithmetic", limit=40, max_completion_length=200
        )
        config = sft_train.Config(output_dir=str(tmp_path / "out"), eval_problems=4, **settings)
    script.train(config)
    best, model = (load_file(f / "model.safetensors") for f in (tmp_path / "out" / "best", start / "model"))
    assert all(torch.equal(tensor, best[name]) for name, tensor in model.items())
    assert json.loads((tmp_path / "out" / "best" / "best.json").read_text()) == START_IS_BEST
    said = capsys.readouterr().out
    kept = f"held-out accuracy 0.500 after step 0, kept in {tmp_path / 'out' / 'best'}\n"
    assert said.count(f"best so far: {kept}") == said.count(f"best: {kept}") == 1


START_IS_BEST = {"step": 0, "eval_accuracy": 0.5}


@pytest.mark.parametrize("left", ["run_config.yaml", "metrics.jsonl", "rollouts.jsonl", "best"])
def test_a_folder_of_0_steps_is_no_run(left, start, tmp_path):
    """A run that was killed before its first step, and had to be overwritten or gone on with."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "run_config.yaml").write_text("num_steps: 3\n")
    if left == "best":
        shutil.copytree(start / "model", out / "best")
        (out / "metrics.jsonl").write_text('{"step": 1, "rew')
    elif left != "run_config.yaml":
        (out / left).write_text("")
    grpo_train.train(settings_of(start, out, num_steps=1, outer_iterations=1, eval_every=0))
    assert (out / "finished.json").exists()
    assert not (out / "best").exists()


def test_a_model_among_what_a_run_of_0_steps_left_is_not_cleared_away(start, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(start / "model", out / "best")
    (out / "run_config.yaml").write_text("num_steps: 3\n")
    with pytest.raises(SettingError, match="model=.*of the run in .* that would be overwritten"):
        grpo_train.train(settings_of(start, out, model=str(out / "best"), eval_every=0))
    assert (out / "best" / "config.json").exists()


def test_a_used_folder_without_resume_is_refused(start, uninterrupted):
    with pytest.raises(SettingError, match="holds a run already: choose another, or say --resume true"):
        grpo_train.train(settings_of(start, uninterrupted("full")))


@pytest.fixture(scope="module")
def cut_once(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut") / "out"
    with pytest.MonkeyPatch.context() as patch:
        run(settings_of(start, folder), kill_at=3, monkeypatch=patch)
    assert [p.name for p in checkpoints(folder)] == ["checkpoint-2", "checkpoint-1"]
    return folder


@pytest.fixture
def cut(cut_once, tmp_path):
    """A run killed at step 3, with checkpoints after 1 and 2."""
    return Path(shutil.copytree(cut_once, tmp_path / "out"))


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a byte of the moments": (lambda p: flip(p / "training_state.safetensors"), "sha256"),
    "a byte of the weights": (lambda p: flip(p / "model.safetensors"), "sha256"),
    "a file cut off": (lambda p: os.truncate(p / "model.safetensors", 1000), "has 1000 bytes"),
    "a file gone": (lambda p: (p / "training_state.json").unlink(), "training_state.json is missing"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "its writing was cut off"),
}


def contents(folder):
    """Every file below a folder: {its name: its bytes}."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", in_full(DAMAGES, 1))
def test_a_damaged_checkpoint_is_named_and_passed_over(kind, start, cut, uninterrupted, capsys):
    do, words = DAMAGES[kind]
    do(cut / "checkpoint-2")
    grpo_train.train(settings_of(start, cut, resume=True))
    printed = capsys.readouterr().out
    assert f"passed over {cut / 'checkpoint-2'}" in printed
    assert words in printed
    assert "checkpoint-1, after step 1" in printed
    assert damage(cut / "checkpoint-4") is None
    assert_same(cut, uninterrupted("full"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("null", "not what was written"),
        ('{"config.json": {}}', "not what was written"),
        ("{}", "does not name training_s"),
    ],
)
def test_a_manifest_of_another_shape_is_none(text, words, cut):
    (cut / "checkpoint-2" / "manifest.json").write_text(text)
    assert words in damage(cut / "checkpoint-2")


def test_a_damaged_note_of_a_finished_run_is_named(start, cut):
    """Each ended in a traceback that said nothing about the file."""
    for text in ("", "[]", "{}", '{"step": "x"}', '{"step": null}', '{"step": 8'):
        (cut / "finished.json").write_text(text)
        with pytest.raises(RunError, match=r"finished\.json is damaged: delete it"):
            finished_steps(cut / "finished.json")
    with pytest.raises(RunError, match=r"finished\.json is damaged: delete it"):
        grpo_train.train(settings_of(start, cut, resume=True))


def test_litter_of_a_save_that_was_cut_off_is_swept(start, cut):
    (cut / checkpoint.TEMPORARY).mkdir()
    (cut / checkpoint.TEMPORARY / "model.safetensors").write_bytes(b"half")
    grpo_train.train(settings_of(start, cut, resume=True))
    assert not (cut / checkpoint.TEMPORARY).exists()


def test_the_newest_are_kept_and_an_old_one_goes_only_when_the_new_one_is_whole(start, cut, monkeypatch):
    seen = []
    rename = Path.rename

    def watched(self, target):
        if Path(target).name.startswith("checkpoint-"):
            seen.append((Path(target).name, damage(self), sorted(p.name for p in checkpoints(cut))))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watched)
    grpo_train.train(settings_of(start, cut, resume=True))
    assert seen == [
        ("checkpoint-3", None, ["checkpoint-1", "checkpoint-2"]),
        ("checkpoint-4", None, ["checkpoint-2", "checkpoint-3"]),
    ]
    assert [p.name for p in checkpoints(cut)] == ["checkpoint-4", "checkpoint-3"]


def test_a_full_disk_says_what_it_needs_and_leaves_the_earlier_checkpoint_whole(start, cut, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    why = r"\(No space left on device\): it needs \S+ [kMG]B, \S+ [kMG]B are free; earlier ones are whole"
    with pytest.raises(RunError, match=f"could not save checkpoint-3 {why}"):
        grpo_train.train(settings_of(start, cut, resume=True))
    assert damage(cut / "checkpoint-2") is None
    assert not (cut / checkpoint.TEMPORARY).exists()


def test_too_little_disk_is_refused_before_the_first_step(start, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        checkpoint.shutil, "disk_usage", lambda path: type(usage)(usage.total, usage.total - 1000, 1000)
    )
    with pytest.raises(
        SettingError, match=r"save_every=1: a checkpoint needs \d+(\.\d+)? [kM]B, \S+ kB are free"
    ):
        grpo_train.train(settings_of(start, tmp_path / "out"))
    assert (tmp_path / "out" / "metrics.jsonl").exists() is False


REFUSED = {
    "seed": dict(seed=7),
    "batch_size": dict(batch_size=4),
    "learning_rate": dict(learning_rate=1e-3),
    "num_generations": dict(num_generations=5),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_run_s_checkpoint_is_refused_with_both_values(name, start, cut):
    with pytest.raises(
        SettingError, match=rf"was written by another run: .*{name} .* there, .* here; say --resume_anyway"
    ):
        grpo_train.train(settings_of(start, cut, resume=True, **REFUSED[name]))


def test_no_setting_that_changes_a_weight_may_differ_without_a_word():
    algorithm = """seed batch_size num_generations temperature mu beta epsilon epsilon_high loss_type
        scale_rewards learning_rate weight_decay max_grad_norm adam_beta1 adam_beta2 warmup_ratio
        lr_scheduler_type num_steps num_epochs outer_iterations max_completion_length max_prompt_length
        precision rollout_is rollout_is_cap mask_truncated_completions reward reward_set reward_weights
        answer_format eval_problems dataset limit optimizer dynamic_sampling m3po_lambda m3po_temperature
        m3po_similarity lora_r lora_alpha model warm_start"""
    names = set(algorithm.split())
    assert names <= set(grpo_train.Config.__dataclass_fields__)
    assert not names & free_on_resume(grpo_train.Config)


def test_the_files_of_a_model_are_read_once_and_again_when_they_have_changed(tmp_path, monkeypatch):
    """A run with a warm start read the gigabytes of the model it starts from twice."""
    read = []
    monkeypatch.setattr("running.contract.sha256_of", lambda path: read.append(path.name) or sha256_of(path))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"12345")
    first = model_fingerprint(tmp_path)
    assert model_fingerprint(tmp_path) == first
    assert read == ["model.safetensors"]
    (tmp_path / "new").write_bytes(b"12354")
    os.replace(tmp_path / "new", weights)
    assert model_fingerprint(tmp_path) != first
    os.utime(weights, ns=(0, 0))
    weights.write_bytes(b"12345")
    assert model_fingerprint(tmp_path) == first


def test_the_fingerprint_of_the_data_is_of_prompts_problems_and_their_order():
    a, b = (EncodedProblem(Problem(q, "1"), f"prompt {q}", [1]) for q in "ab")
    other = EncodedProblem(
        Problem("a", "1"), "another prompt a", [1]
    )  # a system_prompt_file with other text in it
    assert len({data_fingerprint(problems) for problems in ([a, b], [b, a], [other, b], [a])}) == 4


def test_other_data_is_refused_and_so_is_another_model_whatever_is_said(start, cut, tmp_path, tokenizer):
    other = tmp_path / "other"
    shutil.copytree(start, other)
    lines = (other / "train.jsonl").read_text().splitlines()
    (other / "train.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    with pytest.raises(SettingError, match=r"the problems or their prompts .*changed since; say"):
        grpo_train.train(
            settings_of(other, cut, resume=True, model=str(start / "model"), reward=[f"{start}/pays.py:pays"])
        )
    with pytest.raises(SettingError, match="model .* there, .* here; what is saved would not fit"):
        grpo_train.train(settings_of(start, cut, resume=True, resume_anyway=True, model=str(other / "model")))
    grpo_train.train(settings_of(start, cut, resume=True, resume_anyway=True, learning_rate=1e-4))
    rates = [json.loads(line)["learning_rate"] for line in (cut / "metrics.jsonl").read_text().splitlines()]
    assert max(rates[:2]) > 1e-3
    assert 0 < max(rates[2:]) <= 1e-4, "the new rate is used"


def test_a_resumed_run_says_what_it_does_otherwise(start, cut, capsys):
    """With resume_anyway it went on without a word of the settings that were not the checkpoint's."""
    grpo_train.train(settings_of(start, cut, resume=True, resume_anyway=True, weight_decay=0.5))
    assert "not what the run was: weight_decay 0.0 there, 0.5 here\n" in capsys.readouterr().out
    grpo_train.train(settings_of(start, cut, resume=True, weight_decay=0.5))
    assert "not what the run was" not in capsys.readouterr().out


def test_a_best_model_that_was_not_kept_bars_none_of_the_later_ones(start, tmp_path, monkeypatch, capsys):
    """A run resumed with keep_best named the best of its steps without it, in a folder that was not there."""
    accuracies = iter([0.9, 0.8, 0.5, 0.6, 0.7])
    accuracy = lambda *args: {"eval_accuracy": next(accuracies), "eval_length": 1.0, "eval_questions": 4}  # noqa: E731
    monkeypatch.setattr(grpo_train, "held_out_accuracy", accuracy)
    out, more = tmp_path / "out", dict(eval_every=1, outer_iterations=1, num_steps=3)
    run(settings_of(start, out, **more), kill_at=2, monkeypatch=monkeypatch)
    run(settings_of(start, out, **more, keep_best=True, resume=True, resume_anyway=True))
    assert json.loads((out / "best" / "best.json").read_text()) == {"step": 3, "eval_accuracy": 0.7}
    assert (out / "best" / "model.safetensors").exists()
    assert "no earlier model was kept in best" in capsys.readouterr().out


def test_a_best_model_of_an_earlier_version_is_kept(start, tmp_path, monkeypatch, capsys):
    """They wrote no best.json, and so the next model took its place, however bad."""
    accuracies = iter([0.9, 0.8, 0.5, 0.6, 0.7])
    accuracy = lambda *args: {"eval_accuracy": next(accuracies), "eval_length": 1.0, "eval_questions": 4}  # noqa: E731
    monkeypatch.setattr(grpo_train, "held_out_accuracy", accuracy)
    out, more = tmp_path / "out", dict(eval_every=1, outer_iterations=1, num_steps=3, keep_best=True)
    run(settings_of(start, out, **more), kill_at=2, monkeypatch=monkeypatch)
    file = out / "checkpoint-1" / "training_state.json"
    state = json.loads(file.read_text())
    state["progress"]["best_step"] = None
    file.write_text(json.dumps(state))
    seal(file.parent)
    (out / "best" / "best.json").unlink()
    run(settings_of(start, out, **more, resume=True))
    said = capsys.readouterr().out
    assert "no earlier model was kept" not in said
    assert "best: held-out accuracy 0.900 after an earlier step" in said
    assert not (out / "best" / "best.json").exists()


def test_a_lost_best_model_is_not_named_where_nothing_is_left_to_do(start, tmp_path, monkeypatch, capsys):
    """The last line said: best: held-out accuracy -1.000."""
    out, more = tmp_path / "out", dict(eval_every=1, outer_iterations=1, num_steps=1, keep_best=True)

    def dying(run):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("running.run.finish", dying)
        with pytest.raises(Killed):
            grpo_train.train(settings_of(start, out, **more))
    shutil.rmtree(out / "best")
    run(settings_of(start, out, **more, resume=True))
    assert "best: held-out" not in capsys.readouterr().out


def test_another_number_of_processes_is_refused(start, cut):
    state = json.loads((cut / "checkpoint-2" / "training_state.json").read_text())
    (cut / "checkpoint-2" / "training_state.json").write_text(json.dumps(state | {"world_size": 2}))
    checkpoint.seal(cut / "checkpoint-2")
    with pytest.raises(SettingError, match="world_size 2 there, 1 here"):
        grpo_train.train(settings_of(start, cut, resume=True))


def test_resume_anyway_decays_with_the_new_value(start, cut, monkeypatch):
    """An optimiser's state brings its old settings along."""
    made, honest = [], learner.make_optimizer
    monkeypatch.setattr(learner, "make_optimizer", lambda *args: made.append(honest(*args)) or made[-1])
    grpo_train.train(settings_of(start, cut, resume=True, resume_anyway=True, weight_decay=0.5))
    assert [group["weight_decay"] for group in made[0][0].param_groups] == [0.5, 0.0]


def test_what_resume_anyway_changed_is_told_by_the_folder_the_card_and_the_page(start, cut):
    """The card of a run whose rate was changed on the way gave the last rate as that of all steps."""
    changed = dict(weight_decay=0.5, learning_rate=2e-4)
    grpo_train.train(settings_of(start, cut, resume=True, resume_anyway=True, **changed))
    [change] = read_run_config(cut)["changes"]
    assert change == {"after_step": 2, "changed": {"learning_rate": [0.01, 2e-4], "weight_decay": [0.0, 0.5]}}
    line = "Changed after step 2: `learning_rate` 0.01 before, 0.0002 since, "
    line += "`weight_decay` 0.0 before, 0.5 since."
    assert line in (cut / "README.md").read_text()
    assert line.replace("`", "") in (cut / "report.html").read_text()
    config = parse_config(grpo_train.Config, ["--config", str(cut / "run_config.yaml")])
    assert config.learning_rate == 2e-4, "it is a --config, as ever"


def test_a_run_without_a_reference_cannot_go_on_with_one(start, tmp_path):
    out, settings = tmp_path / "free", dict(outer_iterations=1, resume_anyway=True)
    grpo_train.train(settings_of(start, out, beta=0.0, num_steps=1, **settings))
    with pytest.raises(SettingError, match="beta 0.0 there, 0.1 here; what is saved would not fit"):
        grpo_train.train(settings_of(start, out, beta=0.1, num_steps=2, resume=True, **settings))


def test_nothing_is_ever_unpickled(start, cut):
    files = {p.suffix for p in (cut / "checkpoint-2").rglob("*") if p.is_file()}
    assert files <= {".safetensors", ".json", ".jinja", ".yaml"}
    for name in ("running/checkpoint.py", "learning/models.py", "running/folder.py"):
        text = (ROOT / name).read_text()
        assert "torch.load" not in text
        assert "pickle" not in text.replace("unpickled", "")


def test_two_runs_in_one_folder_are_refused(start, tmp_path):
    (tmp_path / "out").mkdir()
    code = f"import fcntl, time; f = open({str(tmp_path / 'out' / '.lock')!r}, 'w'); "
    code += "fcntl.flock(f, fcntl.LOCK_EX); print('locked', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(SettingError, match="another run is writing there"):
            grpo_train.train(settings_of(start, tmp_path / "out"))
    finally:
        holder.kill()
        holder.wait()


def test_steps_that_are_not_finite_change_nothing_and_end_the_run(start, tmp_path, monkeypatch):
    losses = grpo_train.grpo_loss

    def broken(logp, *args, **kwargs):
        loss, terms = losses(logp, *args, **kwargs)
        return loss * float("nan"), terms

    monkeypatch.setattr(grpo_train, "grpo_loss", broken)
    with pytest.raises(
        RunError,
        match=r"3 steps in a row had a loss or gradient that is not finite, the last on problems \['train-",
    ):
        grpo_train.train(settings_of(start, tmp_path / "out", mu=1))
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [m["loss"] for m in metrics] == [None] * 3
    assert all(len(m["bad_examples"]) == 3 for m in metrics)
    before = load_file(start / "model" / "model.safetensors")
    after = load_file(tmp_path / "out" / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_supervised_steps_that_are_not_finite_are_counted_too(start, tmp_path, monkeypatch):
    monkeypatch.setattr(learner, "within_memory", lambda *args: [(torch.tensor(float("nan")), {})])
    with pytest.raises(RunError, match="3 steps in a row had a loss or gradient that is not finite"):
        sft_train.train(settings_of(start, tmp_path / "out", sft_train, eval_every=0))


def words_of(start, out, *more, **settings):
    flags = dict(config="configs/tiny.yaml", warm_start="none", model=start / "model", dataset=start)
    flags |= dict(output_dir=out, reward=f"{start}/pays.py:pays", batch_size=4, num_generations=4)
    flags |= dict(num_steps=60, max_completion_length=16, eval_every=20, eval_problems=4, save_every=5)
    flags |= dict(beta=0.1, mu=2, learning_rate=1e-3, seed=3)
    return [sys.executable, "grpo_train.py", *(f"--{k}={v}" for k, v in {**flags, **settings}.items()), *more]


def begin(words):
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def steps_in(out):
    path = out / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.fixture(scope="session")
def left_alone(start, tmp_path_factory):
    made = {}

    def of(processes):
        if processes not in made:
            made[processes] = tmp_path_factory.mktemp("alone") / str(processes)
            run = begin(words_of(start, made[processes], num_processes=processes))
            printed = run.communicate(timeout=180)[0]
            assert run.returncode == 0, printed
        return made[processes]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("name", "processes"), [("SIGINT", 1), ("SIGUSR1", 2), ("SIGTERM", 2)])
def test_a_signal_in_the_middle_saves_and_a_resumed_run_equals_one_that_was_left_alone(
    name, processes, start, left_alone, tmp_path
):
    run = begin(words_of(start, tmp_path / "cut", num_processes=processes))
    while steps_in(tmp_path / "cut") < 7:
        assert run.poll() is None, run.stdout.read()
        time.sleep(0.02)
    run.send_signal(getattr(signal, name))
    printed = run.communicate(timeout=60)[0]
    assert run.returncode == 128 + getattr(signal, name), printed
    assert f"stopped by {name}: saved checkpoint-" in printed
    again = begin(words_of(start, tmp_path / "cut", "--resume", num_processes=processes))
    printed = again.communicate(timeout=180)[0]
    assert again.returncode == 0, printed
    assert "going on from" in printed
    assert_same(left_alone(processes), tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.parametrize("why", ["was written by another run", "another run is writing there"])
def test_several_processes_refuse_a_folder_in_one_line(why, start, uninterrupted, tmp_path):
    """Each process printed it."""
    out = Path(shutil.copytree(uninterrupted("full"), tmp_path / "out"))
    with open(out / ".lock", "a") as lock:
        if why == "another run is writing there":
            fcntl.flock(lock, fcntl.LOCK_EX)
        refused = begin(words_of(start, out, "--resume", num_processes=2))
        printed = refused.communicate(timeout=60)[0]
    assert refused.returncode == 2, printed
    assert printed.count(why) == 1, printed


@pytest.mark.slow
def test_a_signal_to_a_process_that_has_nothing_to_sample_again_breaks_off_what_the_other_samples(
    start, tmp_path
):
    """Every group of process 1 has a signal when it is told to stop, none is its to sample, and process 0
    must not wait for it for ever.
    """
    words = dict(
        num_processes=2,
        num_steps=12,
        eval_every=0,
        save_every=0,
        reward=f"{start}/pays.py:pays_some",
        dynamic_sampling=3,
    )
    whole = begin(words_of(start, tmp_path / "whole", **words))
    printed = whole.communicate(timeout=180)[0]
    assert whole.returncode == 0, printed
    (start / "told").write_text(str(tmp_path / "cut"))
    cut = begin(words_of(start, tmp_path / "cut", **words))
    printed = cut.communicate(timeout=180)[0]
    assert cut.returncode == 143, printed
    steps = int((start / "steps").read_text())
    assert f"stopped by SIGTERM: saved checkpoint-{steps};" in printed, "the step was not finished"
    assert (
        json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[steps])["extra_rollouts"]
        > 0
    )
    again = begin(words_of(start, tmp_path / "cut", "--resume", **words))
    printed = again.communicate(timeout=180)[0]
    assert again.returncode == 0, printed
    assert_same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
def test_weights_and_moments_in_shards_are_gone_on_with_to_the_bit(start, tmp_path):
    """FSDP2 on two processes, gone on with from a checkpoint in the middle."""
    words, (whole, cut) = (
        dict(num_processes=2, fsdp=True, num_steps=4, save_every=2, keep_checkpoints=3),
        (tmp_path / "whole", tmp_path / "cut"),
    )
    run = begin(words_of(start, whole, **words))
    printed = run.communicate(timeout=180)[0]
    assert run.returncode == 0, printed
    shutil.copytree(whole, cut)
    newest, *older = checkpoints(cut)
    assert older
    shutil.rmtree(newest)
    for name in ("finished.json", "model.safetensors"):
        (cut / name).unlink()
    again = begin(words_of(start, cut, "--resume", **words))
    printed = again.communicate(timeout=180)[0]
    assert again.returncode == 0, printed
    assert f"going on from {older[0]}" in printed
    assert_same(whole, cut)


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_the_weights_are_those_of_a_run_left_alone(
    start, left_alone, tmp_path
):
    """The short version of benchmarks/kill.py."""
    from benchmarks.kill import killed_and_resumed

    kills = killed_and_resumed(
        words_of(start, tmp_path / "cut", "--resume"), tmp_path / "cut", kills=4, seed=1
    )
    assert len(kills) == 4
    assert_same(left_alone(1), tmp_path / "cut")


@pytest.mark.slow
def test_killed_in_the_warm_start_or_after_it_too(start, tmp_path):
    from benchmarks.kill import killed_and_resumed

    (tmp_path / "warm.yaml").write_text(
        "num_epochs: null\nnum_steps: 40\nbatch_size: 8\n"
        "max_completion_length: 64\nsave_every: 3\nlearning_rate: 1e-3\n"
    )
    words = dict(warm_start=tmp_path / "warm.yaml", num_steps=12, eval_every=0, save_every=2)
    whole = begin(words_of(start, tmp_path / "whole", **words))
    printed = whole.communicate(timeout=180)[0]
    assert whole.returncode == 0, printed
    killed = killed_and_resumed(
        words_of(start, tmp_path / "cut", "--resume", **words), tmp_path / "cut", kills=5, seed=1
    )
    assert killed[0] == "warm start"
    for folder in (".", "warm_start"):
        assert_same(tmp_path / "whole" / folder, tmp_path / "cut" / folder)


def test_the_best_model_is_kept_and_a_run_without_progress_ends(start, tmp_path, monkeypatch, capsys):
    accuracies = iter([0.1, 0.4, 0.2, 0.4, 0.9])
    monkeypatch.setattr(
        grpo_train,
        "held_out_accuracy",
        lambda *args: {"eval_accuracy": next(accuracies), "eval_length": 1.0, "eval_questions": 10},
    )
    seen = {}
    save = run_folder.save_model

    def watched(model, tokenizer, folder, dtype, state=None):
        seen[Path(folder).name] = {k: v.clone() for k, v in state.items()}
        save(model, tokenizer, folder, dtype, state)

    monkeypatch.setattr(run_folder, "save_model", watched)
    grpo_train.train(
        settings_of(start, tmp_path / "out", eval_every=1, keep_best=True, patience=2, save_every=0)
    )
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [m["eval_accuracy"] for m in metrics] == [0.4, 0.2, 0.4]
    assert "no better held-out accuracy than 0.400 in 2 evaluations" in capsys.readouterr().out
    best = load_file(tmp_path / "out" / "best" / "model.safetensors")
    assert all(torch.equal(tensor, seen["best"][name]) for name, tensor in best.items())
    assert not all(torch.equal(tensor, seen["out"][name]) for name, tensor in best.items())
    assert (tmp_path / "out" / "best" / "run_config.yaml").exists()


@pytest.mark.parametrize("script", [grpo_train, sft_train])
def test_a_run_stopped_in_the_evaluation_that_ends_it_ends_with_it(script, start, tmp_path, monkeypatch):
    """It went on to the next evaluation, with steps that the run that was not stopped does not have."""
    evaluated, calls = script is grpo_train, []  # it evaluates before the first step as well

    def accuracy(run, *args):
        step = run.progress.step
        calls.append(step)
        if step == 2 and calls.count(2) == 1:
            run.stop.number = int(signal.SIGTERM)
            run.raise_if_stopped()
        return {"eval_accuracy": 0.5 if step <= 1 else 0.1, "eval_length": 1.0, "eval_questions": 4}

    monkeypatch.setattr(script, "held_out_accuracy", accuracy)
    more = dict(eval_every=1, patience=2 if evaluated else 1, save_every=0)
    with pytest.raises(SystemExit):
        script.train(settings_of(start, tmp_path / "out", script, **more))
    script.train(settings_of(start, tmp_path / "out", script, **more, resume=True))
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "out" / "finished.json").exists()


def test_patience_without_evaluations_is_refused():
    with pytest.raises(SettingError, match="keep_best and patience need evaluations"):
        grpo_train.Config(eval_every=0, patience=3)


def test_logs_are_not_thrown_away_where_there_is_nothing_to_go_on_from(start, cut):
    before = (cut / "metrics.jsonl").read_text()
    for path in checkpoints(cut):
        (path / "manifest.json").unlink()
    reason = "has no checkpoint that is whole: there is nothing to go on from"
    with pytest.raises(SettingError, match=f"{reason}; begin anew with --overwrite_output_dir"):
        grpo_train.train(settings_of(start, cut, resume=True))
    assert (cut / "metrics.jsonl").read_text() == before


def test_a_checkpoint_of_a_time_that_the_run_has_gone_back_behind_goes(start, cut, monkeypatch):
    """It was passed over once for its damage. It must not be gone on from when the disk has recovered, as the
    steps that led to it have been replaced by others.
    """
    (cut / "checkpoint-2").rename(cut / "checkpoint-3")
    (cut / "checkpoint-3" / "manifest.json").unlink()
    run(settings_of(start, cut, resume=True, keep_checkpoints=5), kill_at=3, monkeypatch=monkeypatch)
    assert [p.name for p in checkpoints(cut)] == ["checkpoint-2", "checkpoint-1"]


def test_a_damaged_checkpoint_of_a_later_step_is_not_kept_in_place_of_a_new_one(start, cut):
    (cut / "checkpoint-2" / "manifest.json").unlink()
    grpo_train.train(settings_of(start, cut, resume=True, keep_checkpoints=1))
    assert [p.name for p in checkpoints(cut)] == ["checkpoint-4"]


def test_a_warm_start_that_a_killed_run_left_alone_is_overwritten_too(start, tmp_path, monkeypatch):
    """Its run had no run_config.yaml yet, so that it was taken for somebody's files."""
    out = tmp_path / "out"
    (out / "warm_start").mkdir(parents=True)
    (out / "warm_start" / "run_config.yaml").write_text("model: m\n")
    (out / "warm_start" / "model.safetensors").write_text("")
    monkeypatch.setattr(grpo_train, "say_plan", lambda *args: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        grpo_train.train(settings_of(start, out, overwrite_output_dir=True))
    logs = ["metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl"]
    assert sorted(contents(out)) == sorted([*logs, ".lock", "run_config.yaml"])


def test_a_run_that_measured_nothing_yet_misses_no_best_model(start, tmp_path, monkeypatch, capsys):
    out, more = tmp_path / "out", dict(outer_iterations=1, num_steps=3)
    run(settings_of(start, out, **more, eval_every=0), kill_at=2, monkeypatch=monkeypatch)
    run(settings_of(start, out, **more, eval_every=1, keep_best=True, resume=True, resume_anyway=True))
    assert "no earlier model was kept" not in capsys.readouterr().out
    assert (out / "best" / "best.json").exists()

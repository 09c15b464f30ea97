"""Rewards that hang or pay nothing, a check before money is spent, and settings thrown at random."""

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import errors
import grpo_train
from answers import user_files
from decoding.decoder import GroupDecoder
from errors import DataError, RunError, SettingError, end_on_interrupt, require_packages, too_old
from running import parsing
from running.parsing import parse_config, run_main
from small_faults import settings_of
from small_models import paid

ROOT = Path(grpo_train.__file__).parent


def test_a_reward_that_hangs_is_named_with_its_limit_and_ends_the_process():
    code = "import time, rewards\ndef sleeps(completions, **kwargs):\n    time.sleep(30)\n    print('woke')\n"
    code += "columns = dict(prompts=[None] * 2, completions=['a', 'b'])\n"
    code += "rewards.compute_rewards([(sleeps, 1.0)], columns, step=4, timeout=0.2)"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    took = "reward function sleeps at step 4 took longer than reward_timeout=0.2 s for 2 completions"
    assert f"{took}, the first of them completion 'a'" in done.stderr
    assert "Traceback" not in done.stderr
    assert "woke" not in done.stdout, "it was not waited for"


def test_a_reward_that_is_quick_enough_gives_what_it_gives_without_a_limit():
    def pays(completions, **kwargs):
        return [float(len(c)) for c in completions]

    assert paid([(pays, 2.0)], [None] * 2, ["a", "bc"], timeout=5) == paid(
        [(pays, 2.0)], [None] * 2, ["a", "bc"]
    )


FLAT = {
    "0.0": "no completion has earned anything for 2 steps",
    "0.8": "all completions of each group earned the same, and none was right",
}


@pytest.mark.parametrize(("paid", "words"), FLAT.items())
def test_rewards_that_say_nothing_are_warned_of_once(fault_start, tmp_path, capsys, paid, words):
    (tmp_path / "flat.py").write_text(
        f"def flat(completions, **kwargs):\n    return [{paid}] * len(completions)\n"
    )
    grpo_train.train(
        settings_of(
            fault_start, tmp_path / "out", reward=[f"{tmp_path}/flat.py:flat"], warn_after=2, num_steps=4
        )
    )
    printed = capsys.readouterr().out
    assert printed.count("WARNING") == 1
    assert words in printed


def test_a_reward_that_switches_gradients_off_switches_off_its_own(fault_start, tmp_path):
    """The update ended in a traceback of torch's: there was nothing to take a gradient of."""
    (tmp_path / "off.py").write_text(
        "import torch\ntorch.set_grad_enabled(False)\n"
        "def off(completions, **kwargs):\n    return list(range(len(completions)))\n"
    )
    try:
        grpo_train.train(
            settings_of(fault_start, tmp_path / "out", reward=[f"{tmp_path}/off.py:off"], num_steps=1)
        )
    finally:
        torch.set_grad_enabled(True)
    assert json.loads((tmp_path / "out" / "metrics.jsonl").read_text())["grad_norm"] > 0


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_no_memory_for_a_rollout_is_one_line(error, fault_start, tmp_path, monkeypatch, capsys):
    """Only the update said what would do; 100,000 problems a step ended in a traceback."""

    def rollout(*args, **kwargs):
        raise error

    monkeypatch.setattr(GroupDecoder, "rollout", rollout)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: grpo_train.train(settings_of(fault_start, tmp_path / "out")))
    signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 1
    assert "emory" in (said := capsys.readouterr().err)
    assert "try a lower batch_size" in said


def test_a_run_whose_output_nobody_reads_any_more_says_so_in_one_line():
    code = "from running.parsing import run_main\ndef main():\n"
    code += "    while True:\n        print('x' * 99, flush=True)\n"
    piped = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = subprocess.Popen([sys.executable, "-c", code + "run_main(main)"], cwd=ROOT, **piped)
    first.stdout.readline()
    first.stdout.close()
    gone = "-c: the program that read the output is gone: Broken pipe"
    assert first.stderr.read() == f"{gone}; go on with --resume true when it can be written to again\n"
    assert first.wait() == 1


@pytest.mark.parametrize(("end", "status"), [("pass", 0), ("sys.exit(3)", 3), ("sys.exit(143)", 143)])
def test_a_script_that_cannot_end_for_a_reward_s_threads_says_so(end, status):
    """It hung without a word when all was saved; stopped by a signal it waited for them until the kill."""
    code = "import sys, threading, time; from running import parsing; parsing.SECONDS_OF_SILENCE = 0.1\n"
    seconds = 60 if status == 143 else 0.6
    code += f"def main():\n    threading.Thread(target=time.sleep, args=({seconds},), name='judge').start()\n"
    code += f"    {end}\n"
    command = [sys.executable, "-c", code + "parsing.run_main(main)"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    said = "-c: waiting for what was started and has not ended: judge; Ctrl-C ends it\n"
    assert (ended.returncode, ended.stderr) == (status, "" if status == 143 else said)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_a_stopped_script_leaves_no_process_of_a_reward_s_pool_behind():
    """Workers wait for work for ever, since each holds the pipe open for the others."""
    code = "import multiprocessing, os, sys\nfrom concurrent.futures import ProcessPoolExecutor\n"
    code += "from running.parsing import run_main\nfork = multiprocessing.get_context('fork')\n"
    code += "pool = ProcessPoolExecutor(2, mp_context=fork)\n"
    code += "def main():\n    pool.submit(os.getpid).result()\n    sys.exit(143)\nrun_main(main)"
    command = [sys.executable, "-c", code]
    script = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True)
    try:
        script.communicate(timeout=10)  # the pipe closes when the last process that has it ends
        assert script.returncode == 143
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)


def test_a_first_step_that_is_not_taken_brings_no_warning_of_torch_s(fault_start, tmp_path, recwarn):
    """It said that the schedule was called in the wrong order, in two lines that look like a traceback."""
    (tmp_path / "flat.py").write_text(
        "def flat(completions, **kwargs):\n    return [1.0] * len(completions)\n"
    )
    grpo_train.train(
        settings_of(fault_start, tmp_path / "out", reward=[f"{tmp_path}/flat.py:flat"], num_steps=1)
    )
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


VALUES = {
    int: [0, 1, 2, 3, -1, 10**6, "x"],
    float: [0.0, 0.5, 1.0, 1.5, 1e-9, 1e9, -1.0, "nan", "inf", ""],
    bool: [True, False, "perhaps"],
    str: ["", "none", "xml", "grpo", "no such"],
}

GIVEN = """model dataset output_dir cpu_threads warm_start num_processes report_to max_prompt_length num_steps
    outer_iterations mu num_epochs num_generations batch_size max_completion_length dynamic_sampling lora_r
    fsdp push_to_hub check save_every log_groups stop_after""".split()


def random_value(draw, default):
    """Of the field's own kind, half of the time what it is anyway."""
    kind = type(default) if type(default) in VALUES else draw.choice(list(VALUES))
    return default if draw.random() < 0.5 and default is not None else draw.choice(VALUES[kind])


def one_step(words):
    """None where the run went through, the line that refuses it else; anything else is a fault."""
    try:
        grpo_train.train(parse_config(grpo_train.Config, words))
    except (SettingError, DataError, RunError) as error:
        return str(error)
    return None


@pytest.mark.slow
def test_500_random_settings_run_a_step_or_are_refused_in_one_line(fault_start, tmp_path):
    draw, messages = random.Random(0), []
    fields = grpo_train.Config.__dataclass_fields__
    names = [name for name in fields if name not in GIVEN]
    small = f"--model {fault_start / 'model'} --dataset {fault_start} --batch_size 1 --num_steps 1 "
    small += "--num_generations 2 --max_completion_length 4 --cpu_threads 1 --output_dir"
    for i in range(500):
        chosen = draw.sample(names, 3)
        words = [*small.split(), str(tmp_path / str(i % 7))]
        if not {"eval_every", "eval_problems"} & set(chosen):
            words += ["--eval_every", "0"]
        if "overwrite_output_dir" not in chosen:
            words += ["--overwrite_output_dir", "true"]
        for name in chosen:
            words += [f"--{name}", str(random_value(draw, fields[name].default))]
        messages.append(one_step(words))
        assert "\n" not in (messages[-1] or ""), words
    ran = messages.count(None)
    assert ran > 50
    assert len(messages) - ran > 50


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EROFS, errno.EIO])
def test_a_disk_that_cannot_be_written_to_any_more_ends_a_run_in_one_line(number, capsys):
    """A quota on the size of files, or a file system that turned read-only, ended in a traceback."""

    def main():
        raise OSError(number, os.strerror(number), "out/metrics.jsonl")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run_main(main)
    signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 1
    assert f"out/metrics.jsonl: {os.strerror(number)}; go on with --resume true" in capsys.readouterr().err


@pytest.mark.parametrize(("has_others", "code", "status"), [(1, 143, 143), (1, 2, None), (0, 143, None)])
def test_one_of_several_processes_that_a_signal_stops_leaves_no_threads_to_abort_it(
    has_others, code, status, monkeypatch
):
    """Now and then gloo's threads aborted a process that was done, and its status was SIGABRT's, not 143."""
    left = []
    monkeypatch.setattr(parsing, "_has_others", lambda: has_others)
    monkeypatch.setattr(os, "_exit", left.append)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: sys.exit(code))
    signal.signal(signal.SIGTERM, before)
    assert (ended.value.code, left) == (code, [status] if status else [])


def test_a_warning_is_one_line_without_the_code_that_gives_it(monkeypatch):
    """`/.../problems/prompts.py:341: UserWarning: eval_problems=100: ...`, and the line of code below it."""
    monkeypatch.setattr(warnings, "formatwarning", None)
    parsing.told(lambda: None)
    line = warnings.formatwarning("be careful", UserWarning, str(ROOT / "problems" / "sources.py"), 3)
    assert line == f"{Path(sys.argv[0]).name}: warning: be careful\n"
    other = warnings.formatwarning("of torch", UserWarning, "/lib/torch/x.py", 3)
    assert other == "/lib/torch/x.py:3: UserWarning: of torch\n"


def test_a_name_longer_than_any_file_s_is_refused_in_one_line(capsys):
    """`OSError: [Errno 36] File name too long` and 20 lines of code, of whoever looked first."""
    with pytest.raises(SystemExit) as ended:
        parsing.told(lambda: Path("a" * 300).exists())
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "a name of 300 characters, longer than any file's: 'aaa" in line


def test_letters_that_the_locale_lacks_are_shown_by_their_numbers(tmp_path):
    """In Latin-1 or a Windows code page a folder's name, or a completion in Chinese, ended the run."""
    code = "import sys; sys.argv[0] = 'grpo_train.py'; from running.grpo_config import Config; "
    code += "from running.parsing import parse_early; parse_early(Config, '')"
    words = [sys.executable, "-c", code, "--model", "tiny", "--output_dir", f"{tmp_path}/\u82f9"]
    env = os.environ | {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "1"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u82f9" in done.stdout


@pytest.mark.parametrize("script", ["grpo_train.py", "sft_train.py", "grpo_eval.py"])
def test_ctrl_c_while_python_imports_is_one_line(script, tmp_path):
    """It was a traceback through torch. The torch of this Python presses Ctrl-C when it is imported."""
    (tmp_path / "torch.py").write_text("import os, signal\n\nos.kill(os.getpid(), signal.SIGINT)\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, script, "--model", "tiny"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, f"{script}: stopped by SIGINT while it was loading\n")
    assert done.stdout.count("\n") == 1, "something is said before torch is there"


OLD = {"transformers": "4.57.1", "numpy": "1.26.4.dev0+local"}
NEEDS = f"needs transformers>=5.17 (4.57.1 there): pip install -r {ROOT / 'requirements.txt'}"


@pytest.fixture
def old_packages(tmp_path):
    """The environment of a Python that says it has them, and no torch that could be imported."""
    for name, version in OLD.items():
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (tmp_path / "torch.py").write_text("raise SystemExit('it was imported')\n")
    return os.environ | {"PYTHONPATH": str(tmp_path)}


@pytest.mark.parametrize("words", ["grpo_train.py", "grpo_eval.py --help", "grpo_study.py", "-m reporting"])
def test_a_package_that_is_too_old_is_one_line_before_it_is_imported(words, old_packages):
    """It was `cannot import name 'PreTrainedConfig' from 'transformers'`, below a traceback."""
    how = dict(cwd=ROOT, env=old_packages, capture_output=True, text=True, check=False)
    done = subprocess.run([sys.executable, *words.split()], **how)
    name = words.split()[-1 if "-m" in words else 0]
    assert (done.returncode, done.stderr) == (2, f"{name}: {NEEDS}\n")


def test_a_notebook_is_told_by_an_import_error(old_packages):
    how = dict(cwd=ROOT, env=old_packages, capture_output=True, text=True, check=False)
    done = subprocess.run([sys.executable, "-c", "from solver import load_solver"], **how)
    assert done.stderr.splitlines()[-1] == f"ImportError: {NEEDS}"


def test_packages_are_missing_too_old_or_there(monkeypatch):
    there = {"torch": "2.13.0+cpu", "numpy": "2.0rc1", "tqdm": "4.9", "scipy": "1.11"}

    def version(name):
        if name not in there:
            raise errors.metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(errors.metadata, "version", version)
    monkeypatch.setattr(errors, "find_spec", lambda name: "by hand" if name == "accelerate" else None)
    found = {name: there for name, _, there in too_old("requirements.txt")}
    assert found["tqdm"] == "4.9", "4.9 comes before 4.66"
    assert found["transformers"] is None
    assert not found.keys() & {"torch", "numpy", "scipy", "accelerate"}
    with pytest.raises(
        ImportError, match=r"^needs transformers>=5.17 \(not there\), datasets>=4.0 \(not there"
    ):
        require_packages()
    monkeypatch.setattr(errors, "too_old", lambda file: [])
    monkeypatch.setattr(errors.sys, "version_info", (3, 10, 4))
    with pytest.raises(ImportError, match=r"^needs Python>=3.11 \(.* there\)"):
        require_packages()


def test_a_setting_whose_package_is_too_old_is_refused(monkeypatch):
    """peft 0.17 cannot be imported beside transformers 5, and 0.18 not read an adapter."""
    version = errors.metadata.version
    monkeypatch.setattr(
        errors.metadata, "version", lambda name: "0.17.1" if name == "peft" else version(name)
    )
    words = r"lora_r=4: needs peft>=0.19 \(0.17.1 there\): pip install -U peft, or say --lora_r 0"
    with pytest.raises(SettingError, match=words):
        grpo_train.Config(lora_r=4)


def test_ctrl_c_is_an_interrupt_again_when_a_script_has_begun(monkeypatch):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        end_on_interrupt()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        begun = []
        run_main(lambda: begun.append(signal.getsignal(signal.SIGINT)))
        assert begun == [signal.default_int_handler]
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])


CHANGES = """import os, torch
torch.set_default_dtype(torch.float64)
os.chdir({folder!r})

def f(completions, **kwargs):
    assert os.getcwd() == {folder!r} and torch.get_default_dtype() == torch.float64
    torch.set_default_device("meta")
    torch.set_num_threads(3)
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    return list(range(len(completions)))
"""


def test_what_a_reward_changes_of_the_process_it_finds_again_and_the_run_does_not(
    fault_start, tmp_path, monkeypatch
):
    """One that changed the directory ended the run, or moved its logs; another dtype broke the sampling, and
    products of float32 that are rounded to bf16 changed what the run learnt.
    """
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "changes.py").write_text(CHANGES.format(folder=str(tmp_path / "there")))
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(user_files, "_theirs", {})
    threads = torch.get_num_threads()
    grpo_train.train(settings_of(fault_start, "out", reward=[f"{tmp_path}/changes.py:f"], num_steps=2))
    assert len((tmp_path / "here" / "out" / "metrics.jsonl").read_text().splitlines()) == 2
    assert list((tmp_path / "there").iterdir()) == []
    assert torch.get_default_dtype() == torch.float32
    assert (str(torch.get_default_device()), torch.get_num_threads()) == ("cpu", threads)
    assert torch.is_grad_enabled(), "a study's next warm start takes gradients"
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.are_deterministic_algorithms_enabled()


def test_products_that_a_reward_rounds_by_torch_s_newer_settings_are_the_run_s_again_too(monkeypatch):
    """Whoever asks the older one after them gets a RuntimeError."""
    monkeypatch.setattr(user_files, "_theirs", {})
    for _ in range(2):
        with user_files.in_their_process():
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"

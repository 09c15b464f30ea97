"""Several processes: shares, the launcher, signals, the same run whatever their number."""

import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import families
from decoding.rollout import joined
from decoding.tokens import arithmetic_tokenizer
from errors import SettingError
from grpo_train import Config
from learning import parallel
from learning.parallel import owners, shard
from running import launching
from running.launching import check_shares, signals_to_hand_on, starts_processes
from running.parsing import LAUNCHER_S, STARTED, started_processes
from small_runs import SHORT, command, given_once, lines, run_short
from small_update import small_update

ROOT = Path(__file__).resolve().parents[1]


def test_the_processes_shares_are_the_whole_batch_in_order_and_alike_in_size():
    """7 problems on 2 processes are 3 and 4 of them; with 12 rows each, 36 and 48."""
    for count, world in [(7, 2), (12, 8), (5, 5), (3, 1)]:
        ranks = [SimpleNamespace(process_index=rank, num_processes=world) for rank in range(world)]
        shares = [list(range(count))[shard(count, rank)] for rank in ranks]
        assert [i for share in shares for i in share] == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert [shard(count, rank, 12) for rank in ranks] == [
            slice(share[0] * 12, share[-1] * 12 + 12) for share in shares
        ]


def test_groups_are_shared_by_their_tokens():
    assert owners([9, 1, 1, 1], [0, 0, 1, 1], 2) == [0, 1, 1, 1]
    assert owners([5, 5, 5, 5], [0, 0, 1, 1], 2) == [0, 0, 1, 1]
    assert owners([100, 98, 99, 101], [0, 0, 1, 1], 2) == [0, 0, 1, 1], "nothing moves for one percent"
    assert owners([4, 4, 0, 0], [0, 0, 1, 1], 2) == [0, 1, 1, 1], "what costs nothing stays"
    assert owners([0, 0, 0], [0, 1, 2], 3) == [0, 1, 2]
    draw = random.Random(0)
    for _ in range(200):
        world = draw.randint(2, 5)
        holders = sorted([*range(world), *(draw.randrange(world) for _ in range(draw.randint(0, 20)))])
        tokens = [draw.choice([0, draw.randint(1, 500)]) for _ in holders]
        chosen = owners(tokens, holders, world)
        loads = [sum(t for t, c in zip(tokens, chosen, strict=True) if c == rank) for rank in range(world)]
        assert set(chosen) == set(range(world)), "nobody is left without a group"
        assert max(loads) <= max(max(tokens), 1.34 * sum(tokens) / world)


def test_a_group_costs_its_prompt_and_those_of_its_completions_that_are_computed(
    tokenizer, prompts, monkeypatch
):
    small = small_update(tokenizer, prompts[:3])
    small.rollout.mask[:] = torch.arange(16) < torch.arange(1, 13)[:, None]  # row n has n + 1 tokens
    learner = dataclasses.replace(small.learner, accelerator=SimpleNamespace(num_processes=2))
    monkeypatch.setattr(
        "learning.learner.balanced", lambda accelerator, rollout, advantages, tokens, pad: tokens
    )
    scored = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]], dtype=torch.bool).flatten()
    first, _, third = map(len, prompts[:3])
    assert learner.share_evenly(small.rollout, None, scored) == [first + 10, 0, third + 22]


def test_moved_groups_bring_all_that_was_recorded_of_them(tokenizer, prompts, monkeypatch):
    """Two processes, as two threads."""
    small = small_update(tokenizer, prompts)
    halves, advantages = (
        [small.rollout.groups(i) for i in ([0, 1, 2], [3, 4])],
        torch.arange(20.0).split([12, 8]),
    )
    said, barrier, ranks = [None, None], threading.Barrier(2), {}

    def gather(value):
        said[ranks[threading.get_ident()]] = value
        barrier.wait(20)
        everything = [thing for part in said for thing in part]
        barrier.wait(20)
        return everything

    def work(rank):
        ranks[threading.get_ident()] = rank
        place, tokens = SimpleNamespace(process_index=rank, num_processes=2), ([30, 31, 32], [5, 6])
        return parallel.balanced(place, halves[rank], advantages[rank], tokens[rank], 0)

    monkeypatch.setattr(parallel, "gather_object", gather)
    with ThreadPoolExecutor(2) as threads:
        (one, first), (two, second) = threads.map(work, range(2))
    order = [prompts.index(prompt) for prompt in (*one.prompts, *two.prompts)]
    assert order == [2, 3, 4, 0, 1], "32 + 5 + 6 tokens, and 30 + 31"
    assert torch.cat([first, second]).tolist() == [4.0 * i + n for i in order for n in range(4)]
    whole, again = joined([one, two], 0), small.rollout.groups(order)
    for name in ("ids", "mask", "logp", "ended", "thinking", "mix", "input_change"):
        assert torch.equal(getattr(whole, name), getattr(again, name)), name


def test_signals_that_are_switched_off_are_not_handed_on():
    """nohup's SIGHUP would end what nohup was to keep."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        assert signals_to_hand_on() == [
            name
            for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR2", "SIGXCPU")
            if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN
        ]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_every_process_has_a_problem_of_the_batch():
    check_shares(Config(batch_size=2), 2)
    with pytest.raises(SettingError, match="must give each of the 3 processes a problem"):
        check_shares(Config(batch_size=2), 3)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "problems"), [(2, 7), (2, 8), (4, 8), (8, 8), (4, 9)])
def test_many_processes_give_the_run_that_one_gives(processes, problems, warm, tmp_path):
    """I3, I10: seven problems do not divide by two processes, nor nine by four.

    TRL PR#2824 sampled the same texts on each process.
    """
    flags = f"--batch_size {problems} --max_grad_norm 0.1 --beta 0.04 --micro_batch_tokens 300 "
    flags += "--max_completion_length 24 --log_groups 5 --cpu_threads 1"
    words = given_once(f"{SHORT} --warm_start none --model {warm} --output_dir {tmp_path / 'many'} {flags}")
    done = command("grpo_train.py", *words, nproc=processes)
    assert done.returncode == 0, done.stderr[-2000:]
    run_short(warm, tmp_path / "one", flags)
    one, many = (lines(tmp_path / name / "rollouts.jsonl") for name in ("one", "many"))
    assert [(r["step"], r["example_id"], r["completion"], r["reward"]) for r in one] == [
        (r["step"], r["example_id"], r["completion"], r["reward"]) for r in many
    ]
    assert [sum("mix" in r for r in records) for records in (one, many)] == [3 * 5 * 4] * 2
    numbers = "loss grad_norm kl entropy reward completion_length thinking_paths frac_reward_zero_std".split()
    metrics = [lines(tmp_path / name / "metrics.jsonl") for name in ("one", "many")]
    for a, b in zip(*metrics, strict=True):
        for name in numbers:
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-6), name
    weights = [AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "many")]
    assert max(float((weights[0][k] - weights[1][k]).abs().max()) for k in weights[0]) < 1e-5


PAYS_SOME = """
def pays(completions, answer, **kwargs):
    # no signal for half of the problems: now and then for none, or for all, of a process
    return [0.0 if int(a) % 2 else float(len(c[0]["content"]) % 5) for a, c in zip(answer, completions)]
"""


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", ["false", "true"])
def test_a_process_without_a_row_that_counts_keeps_step(fsdp, warm, tmp_path):
    """Without a KL such rows are left out, and DDP waits for every process's backward."""
    (tmp_path / "pays.py").write_text(PAYS_SOME)
    flags = f"--batch_size 2 --beta 0 --mu 2 --reward {tmp_path}/pays.py:pays --cpu_threads 1 --num_steps 6 "
    flags += "--max_completion_length 24 --micro_batch_tokens 100 --seed 3"
    for name, processes in (("one", None), ("many", 2)):
        start = f"{SHORT} --warm_start none --model {warm} --output_dir {tmp_path / name} {flags}"
        more = ["--fsdp", fsdp] if processes else []
        done = command("grpo_train.py", *given_once(start), *more, nproc=processes)
        assert done.returncode == 0, done.stderr[-2000:]
    one, many = (lines(tmp_path / name / "metrics.jsonl") for name in ("one", "many"))
    assert any(0 < m["scored_completions"] <= 4 for m in many), "in some step one process has none"
    for a, b in zip(one, many, strict=True):
        for name in ("loss", "grad_norm", "entropy", "logp_diff", "scored_completions"):
            assert a.get(name, 0) == pytest.approx(b.get(name, 0), rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_a_supervised_run_of_two_processes_is_that_of_one(warm, tmp_path):
    """I3: the loss is a mean over the tokens of all processes, here of seven rows in uneven micro-batches."""
    flags = f"--model {warm} --dataset arithmetic --limit 60 --batch_size 7 --num_epochs null --num_steps 3 "
    flags += "--cpu_threads 1 --learning_rate 1e-3 --max_grad_norm 0.1 --eval_problems 8 --eval_every 3 "
    flags += "--micro_batch_tokens 200"
    for name, processes in (("one", None), ("many", 2)):
        done = command("sft_train.py", *flags.split(), "--output_dir", tmp_path / name, nproc=processes)
        assert done.returncode == 0, done.stderr[-2000:]
    metrics = [lines(tmp_path / name / "metrics.jsonl") for name in ("one", "many")]
    for a, b in zip(*metrics, strict=True):
        for name in ("loss", "grad_norm", "tokens", "learning_rate"):
            assert a[name] == pytest.approx(b[name], rel=1e-5), name
        assert a.get("eval_accuracy") == b.get("eval_accuracy")
    weights = [AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "many")]
    assert max(float((weights[0][k] - weights[1][k]).abs().max()) for k in weights[0]) < 1e-4


LAUNCHED = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=localhost MASTER_PORT=29500"
LEFT_OVER = {
    "WORLD_SIZE=2": "WORLD_SIZE='2': stands there without RANK: unset it",
    "LOCAL_RANK=0": "LOCAL_RANK='0': stands there without RANK: unset it",
    "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0": "RANK='0': stands there without MASTER_ADDR",
    "WORLD_SIZE=two": "WORLD_SIZE='two': is no whole number",
    LAUNCHED.replace("RANK=1", "RANK=2", 1): "RANK='2': is none of WORLD_SIZE=2",
    "ACCELERATE_USE_FSDP=true": "ACCELERATE_USE_FSDP='true': is not used: --fsdp true shards here",
    "ACCELERATE_USE_DEEPSPEED=true": "ACCELERATE_USE_DEEPSPEED='true': is not used",
    "ACCELERATE_DYNAMO_BACKEND=INDUCTOR": "--torch_compile says here what is compiled",
}
STARTED_BY_NONE = ("", "RANK=0", "LOCAL_RANK=-1", "ACCELERATE_USE_FSDP=false ACCELERATE_DYNAMO_BACKEND=NO")


def set_environment(monkeypatch, words):
    for name in (*STARTED, *LAUNCHER_S):
        monkeypatch.delenv(name, raising=False)
    for word in words.split():
        monkeypatch.setenv(*word.split("="))


@pytest.mark.parametrize("words", LEFT_OVER)
def test_what_a_launcher_left_over_or_cannot_have_is_one_line(words, monkeypatch):
    """It was a traceback out of torch or accelerate, or another sharding than this project's."""
    set_environment(monkeypatch, words)
    with pytest.raises(SettingError, match=re.escape(LEFT_OVER[words])):
        started_processes()


def test_what_launchers_set_and_what_says_that_there_is_none_is_taken(monkeypatch):
    set_environment(monkeypatch, LAUNCHED)
    assert started_processes() == 2
    for words in STARTED_BY_NONE:
        set_environment(monkeypatch, words)
        assert started_processes() == 1


def test_a_process_that_was_started_by_a_launcher_starts_none(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert starts_processes(Config()) == 4
    assert starts_processes(Config(num_processes=2)) == 2
    assert starts_processes(Config(num_processes=1)) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SettingError, match="this machine has 4 GPUs"):
        starts_processes(Config(num_processes=5))
    for variable in ("RANK", "ACCELERATE_MIXED_PRECISION"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "0")
            assert starts_processes(Config()) is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert starts_processes(Config(num_processes=2)) is None
    with pytest.warns(UserWarning, match="num_processes=4 has no effect: the launcher has started 2"):
        assert starts_processes(Config(num_processes=4)) is None


def state_and_parent(pid):
    """The letter of a process's state, and the process that started it; None where there is none."""
    with contextlib.suppress(OSError):
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        return state, int(parent)
    return None


def children_of(pid):
    """Processes of this machine that are alive and that `pid` started."""
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [child for child in pids if alive(child) and (state_and_parent(child) or (0, 0))[1] == pid]


def alive(pid):
    known = state_and_parent(pid)
    return known is not None and known[0] != "Z"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "status"),
    [("SIGTERM", 143), ("SIGUSR1", 138), ("SIGUSR2", 140), ("SIGINT SIGINT", 130), ("SIGKILL", -9)],
)
def test_a_signal_to_the_one_that_was_started_ends_them_all(tmp_path, signals, status):
    """No orphan holds a card, whatever ended the parent; a second Ctrl-C does not cut off a save."""
    flags = f"{SHORT} --warm_start none --model tiny --num_processes 2 --num_steps 100000 --eval_every 0 "
    flags += f"--output_dir {tmp_path / 'out'}"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "grpo_train.py", *given_once(flags)]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    parent = subprocess.Popen(words, cwd=ROOT, env=env, **quiet)
    metrics = tmp_path / "out" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
    children = children_of(parent.pid)
    assert len(children) == 2
    for name in signals.split():
        parent.send_signal(getattr(signal, name))
        time.sleep(0.05)
    assert parent.wait(timeout=PATIENCE) == status
    wait_for(lambda: not any(map(alive, children)))


IMPATIENT = """
import datetime, runpy, sys
from torch.distributed import distributed_c10d

distributed_c10d._get_default_timeout = lambda backend: datetime.timedelta(seconds=4)
sys.argv[0] = "grpo_train.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""

SLOW_REWARD = """
import os, time

def slow(completions, **kwargs):
    time.sleep(8 * int(os.environ["RANK"]))
    return [float(i % 2) for i in range(len(completions))]
"""


@pytest.mark.slow
def test_a_process_may_be_slower_than_torch_has_patience(tmp_path, monkeypatch):
    """On GPUs all ended where one had a reward or a save of more than 10 minutes; here of 4 seconds."""
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    (tmp_path / "slow.py").write_text(SLOW_REWARD)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    flags = f"{SHORT} --warm_start none --num_steps 1 --eval_every 0 --output_dir {tmp_path / 'out'} "
    flags += f"--reward {tmp_path / 'slow.py'}:slow"
    done = command(tmp_path / "impatient.py", *given_once(flags), nproc=2, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


STUBBORN = """
import os, signal, time
from running import launching
from running.parsing import run_main

def main():
    if "RANK" not in os.environ:
        launching.launch(2)
    launching.end_with_parent()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    print("ready", flush=True)
    time.sleep(1000)

run_main(main)
"""


@pytest.mark.slow
def test_the_third_ctrl_c_ends_processes_that_do_not_end_by_themselves(tmp_path):
    """The first asks them to save and waits, the second asks again, the third leaves and they end with it."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    words = [sys.executable, str(tmp_path / "stubborn.py")]
    parent = subprocess.Popen(
        words, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    )
    assert [parent.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    children = children_of(parent.pid)
    assert len(children) == 2
    for _ in range(2):
        parent.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert all(map(alive, children))
    parent.send_signal(signal.SIGINT)
    assert parent.wait(timeout=PATIENCE) == 130
    wait_for(lambda: not any(map(alive, children)))


PATIENCE = 120  # seconds after which a process that should have moved is taken to hang


def wait_for(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


@pytest.mark.slow
def test_the_script_starts_its_processes_and_ends_with_the_first_that_fails(warm, tmp_path):
    """open-r1#620: the others waited 30 minutes for the one that had died."""
    flags = given_once(f"{SHORT} --warm_start none --model {warm} --num_processes 2 --num_steps 2")
    done = command("grpo_train.py", *flags, "--output_dir", tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert "on 2 cpu processes" in done.stdout
    (tmp_path / "fails.py").write_text(
        "import os\ndef reward(completions, **kwargs):\n    if os.environ['RANK'] == '1':\n"
        "        raise ValueError('boom')\n    return [0.0] * len(completions)\n"
    )
    reward = f"{tmp_path / 'fails.py'}:reward"
    flags += ["--output_dir", tmp_path / "failed", "--reward", reward]
    done = command("grpo_train.py", *flags, timeout=PATIENCE)
    assert done.returncode == 1
    assert "boom" in done.stderr
    assert "process 1 ended with status 1" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", ["false", "true"])
def test_a_vision_tower_that_text_never_reaches_trains_on_two_processes(fsdp, tmp_path):
    """DDP waited for its gradients and ended in torch's traceback."""
    start, out, words = tmp_path / "start", tmp_path / "out", arithmetic_tokenizer()
    families.build(*families.SHAPES["Gemma-3, multimodal"], words).save_pretrained(start)
    words.save_pretrained(start)
    flags = f"{SHORT} --warm_start none --model {start} --num_processes 2 --mu 2 --beta 0.04 --fsdp {fsdp}"
    done = command("grpo_train.py", *flags.split(), "--output_dir", out)
    assert done.returncode == 0, done.stderr
    before, after = load_file(start / "model.safetensors"), load_file(out / "model.safetensors")
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert after.keys() == before.keys()
    assert {name for name in before if "vision" in name or "multi_modal" in name} <= same
    assert len(same) < len(before)


@pytest.mark.slow
def test_sharded_weights_train_as_whole_ones_do(warm, tmp_path):
    """FSDP2 against DDP on two processes, the average of the weights too.

    Seven problems, so that one of them has fewer micro-batches, which must not hang the other.
    """
    flags = f"{SHORT} --warm_start none --model {warm} --num_processes 2 --batch_size 7 "
    flags += "--micro_batch_tokens 300 --beta 0.04 --save_every 2 --ema_decay 0.9"
    weights, metrics = {}, {}
    for fsdp in ("false", "true"):
        out = tmp_path / fsdp
        done = command("grpo_train.py", *given_once(flags), "--fsdp", fsdp, "--output_dir", out)
        assert done.returncode == 0, done.stderr
        weights[fsdp], metrics[fsdp] = load_file(out / "model.safetensors"), lines(out / "metrics.jsonl")
        assert (out / "checkpoint-2" / "model.safetensors").exists()
    whole, sharded = weights["false"], weights["true"]
    assert set(whole) == set(sharded)
    assert all(torch.allclose(whole[name], sharded[name], atol=1e-5) for name in whole)
    for a, b in zip(metrics["false"], metrics["true"], strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)


@pytest.mark.slow
def test_sharded_layers_are_compiled_once_and_train_as_whole_ones_do(tokenizer, tmp_path):
    """FSDP2 with compiled layers, as on a card; one graph with gradients, one of the reference without."""
    tokenizer.save_pretrained(tmp_path)
    made = {}
    for mode in ("whole", "sharded", "compiled"):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        script = [ROOT / "tests" / "small_sharded.py", mode, tmp_path]
        where = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
        done = subprocess.run(
            [sys.executable, *launcher, *script], capture_output=True, text=True, env=where, check=False
        )
        assert done.returncode == 0, done.stderr
        made[mode] = json.loads(done.stdout.splitlines()[-1])
    assert [made[mode]["graphs"] for mode in made] == [0, 0, 2]
    for mode in ("sharded", "compiled"):
        assert made[mode]["loss"] == pytest.approx(made["whole"]["loss"], rel=1e-5)
        assert made[mode]["weights"] == pytest.approx(made["whole"]["weights"], rel=2e-5)


@pytest.mark.parametrize(
    ("device", "asked", "threads"), [("cuda", None, 1), ("cuda", 2, 2), ("cpu", None, 3)]
)
def test_beside_a_gpu_torch_has_one_thread_unless_the_settings_say_more(monkeypatch, device, asked, threads):
    accelerator = SimpleNamespace(device=torch.device(device), num_processes=1)
    monkeypatch.setattr(launching, "make_accelerator", lambda *_: accelerator)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        launching.start_processes(Config(model="tiny", cpu_threads=asked))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)

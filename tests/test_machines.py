"""Several machines without a shared disk: what the first has is sent, what differs is refused on all."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_resume import assert_same

from errors import DataError, SettingError, SharedError
from learning import parallel
from running import launching
from running.launching import folder_of_first, model_files
from running.parsing import run_main
from small_runs import lines

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 240  # seconds after which a node is taken to hang


def gathered_with(others):
    """gather_object of a process whose peers, on a second node, have these values at the same place."""
    return lambda mine: mine + [(("1", "far"), value) for value in others]


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(parallel, "_node", lambda: ("0", "near"))
    return lambda *others: monkeypatch.setattr(parallel, "gather_object", gathered_with(others))


def test_an_error_of_another_node_is_raised_here_with_its_line_and_status(here):
    """The first node waited for ever, or lost its connection, while the second said why."""
    here(("no such file", 2))
    with pytest.raises(SharedError, match=r"^node 1 \(far\): no such file$") as raised, parallel.together():
        pass
    assert raised.value.status == 2


def test_an_error_of_this_node_has_the_same_line_there_and_here(here):
    here(None)
    with pytest.raises(SharedError, match=r"^node 0 \(near\): row 3 is bad$") as raised, parallel.together():
        raise DataError("row 3\nis bad")
    assert raised.value.status == 2


def test_an_error_of_all_nodes_names_none_and_one_process_alone_keeps_its_own(here):
    here(("x=1: is bad", 2))
    with pytest.raises(SharedError, match=r"^x=1: is bad$"), parallel.together():
        raise SettingError("x", 1, "is bad")
    here()
    with pytest.raises(SettingError), parallel.together():
        raise SettingError("x", 1, "is bad")


def test_what_the_first_process_refuses_for_all_is_one_line_that_names_none(here, monkeypatch, capsys):
    """Each process of a second node printed it, behind its own number."""
    refusal = SettingError("resume", "out", "was written by another run")
    monkeypatch.setattr(parallel, "gather_object", lambda mine: [(str(refusal), 2), None])
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("sys.argv", ["grpo_train.py"])
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: parallel.raise_on_all(None))
    assert (ended.value.code, capsys.readouterr().err) == (2, f"grpo_train.py: {refusal}\n")
    monkeypatch.setattr(parallel, "gather_object", lambda mine: mine)
    parallel.raise_on_all(None)
    with pytest.raises(SettingError):
        parallel.raise_on_all(refusal)


def test_what_no_user_can_mend_keeps_its_traceback_where_it_was_raised(here):
    here(None)
    with pytest.raises(KeyError), parallel.together():
        raise KeyError("oops")


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ({("reward", "r.py"): "b"}, r"reward='r.py': is another on node 1 \(far\)"),
        ({}, r"reward='r.py': is missing on node 1 \(far\)"),
        ({("reward", "r.py"): "a", ("config", "c"): "d"}, r"config='c': is on node 1 \(far\), and not"),
    ],
)
def test_what_differs_is_named_with_its_node(here, there, words):
    here(there)
    with pytest.raises(SharedError, match=words) as raised:
        parallel.refuse_unlike({("reward", "r.py"): "a"})
    assert raised.value.status == 2
    here({("reward", "r.py"): "a"})
    parallel.refuse_unlike({("reward", "r.py"): "a"})


@pytest.fixture
def second_of_two(monkeypatch):
    """This process as the first of the second node; the function takes the first node's folder."""

    def be(first):
        state = SimpleNamespace(
            num_processes=2, process_index=1, is_main_process=False, device=torch.device("cpu")
        )
        sent = iter([(first / name).read_bytes() for name in model_files(first)])
        rest = {}

        def receive(part):
            rest["data"] = rest.get("data") or next(sent)
            part.copy_(torch.frombuffer(bytearray(rest["data"][: len(part)]), dtype=torch.uint8))
            rest["data"] = rest["data"][len(part) :]

        monkeypatch.setattr(launching, "PartialState", lambda: state)
        monkeypatch.setattr(launching, "broadcast_object_list", lambda _: [model_files(first)])
        monkeypatch.setattr(launching, "broadcast", receive)

    return be


def test_a_folder_that_only_the_first_node_has_is_copied_whole_and_goes_at_the_end(
    tmp_path, second_of_two, monkeypatch
):
    """In parts, hidden files, logs and other models of the run left out."""
    monkeypatch.setattr(launching, "BYTES_AT_ONCE", 5)
    first = tmp_path / "first"
    for name in (
        "config.json",
        "model.safetensors",
        "metrics.jsonl",
        ".lock",
        "best/config.json",
        "t/a.jinja",
    ):
        (first / name).parent.mkdir(parents=True, exist_ok=True)
        (first / name).write_text(f"the text of {name}")
    second_of_two(first)
    monkeypatch.chdir(tmp_path)
    with folder_of_first("out", tmp_path / "spare") as copy:
        assert model_files(copy) == model_files(first)
        assert set(model_files(copy)) == {"config.json", "model.safetensors", "t/a.jinja"}
    assert not (tmp_path / "spare").exists()
    with folder_of_first(first, tmp_path / "spare") as same:  # a shared disk
        assert same == str(first)


def test_another_model_of_the_same_name_is_refused(tmp_path, second_of_two, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "config.json").write_text(folder.name)
    second_of_two(first)
    there = {("model", f"{second}/config.json"): model_files(first)["config.json"]}
    monkeypatch.setattr(
        parallel,
        "gather_object",
        lambda mine: [*mine, (("1", "far"), there if isinstance(mine[0][1], dict) else None)],
    )
    with (
        pytest.raises(SharedError, match=r"config.json': is another on node 1"),
        folder_of_first(second, tmp_path, "model"),
    ):
        pass


def test_a_disk_that_does_not_take_the_copy_is_one_line(tmp_path, second_of_two):
    first = tmp_path / "first"
    first.mkdir()
    (first / "config.json").write_text("x")
    second_of_two(first)
    (tmp_path / "spare").write_text("a file is in the way")
    with pytest.raises(launching.RunError, match="kB of the first node are copied there"):
        folder_of_first("out", tmp_path / "spare").__enter__()


# With processes


def start_nodes(folders, script, *words):
    """`torchrun --nnodes N` with a process a node, each in a folder of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    nodes = []
    for rank, folder in enumerate(folders):
        launcher = f"-m torch.distributed.run --nnodes {len(folders)} --node_rank {rank} --nproc_per_node 1 "
        launcher += f"--master_addr 127.0.0.1 --master_port {port} {ROOT / script}"
        command = [sys.executable, *launcher.split(), *map(str, words)]
        with open(folder / "printed", "w") as out:
            process = subprocess.Popen(
                command, cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        nodes.append(process)
    return nodes


def wait_for(nodes, folders):
    """What each node printed; a node that hangs fails the test, and leaves no process."""
    try:
        for node in nodes:
            node.wait(timeout=PATIENCE)
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
    return [(folder / "printed").read_text() for folder in folders]


@pytest.fixture
def two(tmp_path):
    """Two machines' folders, each with the data and the reward."""
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in folders:
        folder.mkdir()
        (folder / "pays.py").write_text(
            "def pays(completions, **kwargs):\n"
            "    return [float(len(c[0]['content']) % 5) for c in completions]\n"
        )
        (folder / "warm.yaml").write_text(
            "num_epochs: null\nnum_steps: 3\nbatch_size: 4\nlearning_rate: 1e-3\nmax_completion_length: 48\n"
        )
    return folders


FLAGS = "--model tiny --dataset arithmetic --warm_start warm.yaml --reward pays.py:pays --limit 40 --seed 0 "
FLAGS += (
    "--batch_size 3 --num_generations 2 --max_completion_length 16 --num_steps 8 --beta 0.04 --log_groups 3 "
)
FLAGS += "--eval_every 2 --eval_problems 4 --save_every 2 --cpu_threads 1 --learning_rate 1e-3 --keep_best "
FLAGS += "--output_dir out"


def stop_one(nodes, folders, how):
    """SIGTERM or kill -9 to the launcher of the second node, once this start has taken a step or three."""
    metrics = folders[0] / "out" / "metrics.jsonl"
    before = len(lines(metrics)) if metrics.exists() else 2
    end = time.monotonic() + PATIENCE
    while not metrics.exists() or len(lines(metrics)) <= before:
        assert all(node.poll() is None for node in nodes), "a node ended"
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    nodes[1].send_signal(how)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--lora_r 4", "--fsdp true"])
def test_two_nodes_killed_and_resumed_end_like_one_machine_of_two_processes(more, two, tmp_path):
    """Only the first node's disk has the run; warm start, checkpoints and model are sent from there."""
    words = [*FLAGS.split(), *more.split()]
    one = tmp_path / "one"
    shutil.copytree(two[0], one)
    launcher = "-m torch.distributed.run --standalone --nproc_per_node 2".split()
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    alone = subprocess.run(
        [sys.executable, *launcher, ROOT / "grpo_train.py", *words], cwd=one, env=env, capture_output=True
    )
    assert alone.returncode == 0, alone.stderr[-2000:]
    for how in (signal.SIGKILL, signal.SIGTERM):
        nodes = start_nodes(two, "grpo_train.py", *words, "--resume")
        stop_one(nodes, two, how)
        printed = wait_for(nodes, two)
        assert all(node.returncode for node in nodes), printed
        if how == signal.SIGTERM:
            assert "stopped by SIGTERM: " in printed[0], printed
            assert "exitcode  : 143" in printed[0], printed
        else:
            break_at = len(lines(two[0] / "out" / "metrics.jsonl"))
            assert break_at < 8, "it was over before it was killed"
            continue
    nodes = start_nodes(two, "grpo_train.py", *words, "--resume")
    printed = wait_for(nodes, two)
    assert [node.returncode for node in nodes] == [0, 0], printed
    assert_same(one / "out", two[0] / "out")
    assert not (two[1] / "out").exists() or not any((two[1] / "out").iterdir()), (
        "only the first node keeps it"
    )
    nodes = start_nodes(two, "grpo_eval.py", "--model", "out", "--limit", "5", "--name", "e")
    printed = wait_for(nodes, two)
    assert [node.returncode for node in nodes] == [0, 0], printed
    report = json.loads((two[0] / "eval_runs" / "e" / "report.json").read_text())
    assert report["questions"] == 5
    assert report["dataset"] == "arithmetic", "the settings are those of the first node's model"
    assert [path.name for path in (two[1] / "eval_runs" / "e").iterdir()] == ["run_config.yaml"]


@pytest.mark.slow
def test_a_file_that_the_second_node_lacks_ends_both_with_the_same_line(two):
    (two[1] / "pays.py").unlink()
    nodes = start_nodes(two, "grpo_train.py", *FLAGS.split())
    printed = wait_for(nodes, two)
    refused = (
        f"grpo_train.py: reward='pays.py': is missing on node 1 ({socket.gethostname()}): give every node"
    )
    assert all(refused in text and "exitcode  : 2" in text for text in printed), printed
    assert not (two[0] / "out").exists()


@pytest.mark.slow
def test_a_run_that_lies_on_another_node_than_the_first_is_not_begun_anew(two):
    (two[1] / "out" / "checkpoint-2").mkdir(parents=True)
    flags = FLAGS.replace("--warm_start warm.yaml", "--resume")
    nodes = start_nodes(two, "grpo_train.py", *flags.split())
    printed = wait_for(nodes, two)
    assert all("holds a run, and the first node has none: start this node as" in text for text in printed), (
        printed
    )

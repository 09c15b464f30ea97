"""Short runs of the whole job, made once a session."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import grpo_train
import sft_train
from grpo_train import Config
from learning.models import load_model, load_tokenizer
from problems import sources
from running.folder import save_model
from running.parsing import parse_config, settings_from_file
from small_models import with_layers

ROOT = Path(__file__).resolve().parents[1]


SHORT = "--config configs/tiny.yaml --num_steps 3 --eval_every 3 --batch_size 3 --num_generations 4 "
SHORT += "--limit 100 --eval_problems 12 --max_completion_length 32"


@pytest.fixture(scope="session", autouse=True)
def made_once():
    """30,000 generated problems, which each run makes anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "arithmetic_problems", functools.cache(sources.arithmetic_problems))
        yield


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """A warm start of 20 steps of the tiny model's first layer, shared by the tests that need one."""
    start, folder = tmp_path_factory.mktemp("start") / "model", tmp_path_factory.mktemp("warm") / "sft"
    tokenizer = load_tokenizer("tiny")
    model = with_layers(load_model("tiny", tokenizer, torch.float32, "cpu"), 1)
    save_model(model, tokenizer, start, torch.float32)
    settings = settings_from_file(sft_train.Config, ROOT / "configs" / "tiny_warm_start.yaml")
    settings |= dict(model=str(start), dataset="arithmetic", limit=400, batch_size=16, num_steps=20)
    settings |= dict(max_completion_length=48, cpu_threads=1, output_dir=str(folder))
    sft_train.train(sft_train.Config(**settings))
    return folder


def given_once(flags):
    """The words of a command in which a later flag takes the place of the same one before it."""
    values = {}
    for word in flags.split():
        if word.startswith("--"):
            name, *rest = word.split("=", 1)
            values[name] = rest
        else:
            values[name].append(word)
    return [word for name, rest in values.items() for word in (name, *rest)]


def run_short(warm, out, flags=""):
    """Three GRPO steps from the warm start; returns the folder of the run."""
    words = given_once(f"{SHORT} --warm_start none --model {warm} --output_dir {out} {flags}")
    return grpo_train.train(parse_config(Config, words)).folder


@pytest.fixture(scope="session")
def trained(warm, tmp_path_factory):
    return run_short(warm, tmp_path_factory.mktemp("run") / "out", "--save_every 2 --beta 0.04")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(metrics):
    return [{k: v for k, v in m.items() if "seconds" not in k and "per_s" not in k} for m in metrics]


def command(*words, nproc=None, timeout=None):
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc)] if nproc else []
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *launcher, *map(str, words)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )

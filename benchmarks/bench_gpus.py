"""The step on several GPUs of one host, by plain `python grpo_train.py`, and what a cost model makes of it.

    python benchmarks/bench_gpus.py [--gpus 1 2] [--cases 1.5b-8x8 3b-fsdp]

Random weights at real sizes, prompts of 128 tokens, the same work on each GPU: 8 prompts x 8 completions of
256 tokens, or the original recipe's 7 x 12 of 400. Seconds are medians over the steps after the first two;
gathering the rewards is in reward_seconds. Measured alone: an all-reduce of the gradients, and a gathering.
The cost model, from one GPU and two: gradients (4 bytes a weight) go over a ring, 2 (n - 1) / n of them
through each GPU at the measured rate of an all-reduce, after the backward of the last micro-batch where
nothing hides them; the rest of a step is that of one GPU.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from bench_generation import REAL, build, synthetic_tokenizer
from tokenizers import pre_tokenizers
from transformers import LlamaConfig

from common import ROOT, run_script, write_results

P, STEPS = 128, 6
CASES = {  # shape, prompts a GPU, generations, completion tokens, flags
    "1.5b-8x8": ("1.5b", 8, 8, 256, []),
    "original-recipe": ("1.5b", 7, 12, 400, []),
    "3b-fsdp": ("3b", 8, 8, 256, ["--fsdp", "true"]),
}
REWARD = """
import zlib

def chance(completions, **kwargs):
    return [zlib.crc32(str(c).encode()) % 1000 / 1000 for c in completions]
"""
COLLECTIVES = """
import os, time, torch, torch.distributed as dist
cuda = torch.cuda.is_available()
if cuda: torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if cuda else "gloo")
x = torch.ones(2**28 if cuda else 2**20, device="cuda" if cuda else "cpu")
for turn in range(2):
    if cuda: torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(5): dist.all_reduce(x.fill_(1.0))
    if cuda: torch.cuda.synchronize()
rate = 4 * x.numel() / (time.perf_counter() - start) * 5
rewards, everyone = [0.5] * 64, [None] * dist.get_world_size()
for turn in range(2):
    start = time.perf_counter()
    for _ in range(20): dist.all_gather_object(everyone, rewards)
if dist.get_rank() == 0: print(rate, (time.perf_counter() - start) / 20)
dist.destroy_process_group()
"""


def prepare(shape, folder):
    """A directory with random weights of that shape, problems of 128 tokens, and rewards drawn from the text;
    returns the number of parameters.
    """
    tokenizer = synthetic_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    # transformers would read a Qwen2 directory with Qwen2's own tokenizer
    model = build(shape, kind=LlamaConfig)
    model.save_pretrained(folder / shape)
    tokenizer.save_pretrained(folder / shape)
    generator = torch.Generator().manual_seed(0)
    rows = (
        {
            "question": " ".join(f"t{i}" for i in torch.randint(1, REAL, (P,), generator=generator).tolist()),
            "answer": "1",
        }
        for _ in range(512)
    )
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return sum(p.numel() for p in model.parameters())


def one_run(case, gpus, folder, steps, emit):
    """One training; returns the medians of its steps' parts."""
    shape, B, G, T, flags = CASES[case]
    out, seen = folder / f"{case}-{gpus}", []
    work = {
        "batch_size": B * gpus,
        "num_generations": G,
        "max_completion_length": T,
        "max_prompt_length": P,
        "num_steps": steps,
        "num_processes": gpus,
    }
    rest = {
        "beta": 0.04,
        "eval_every": 0,
        "save_every": 0,
        "warn_after": 0,
        "reward": f"{folder / 'reward.py'}:chance",
    }
    where = {"model": folder / shape, "dataset": folder / "problems.jsonl", "output_dir": out}
    run_script(
        "grpo_train.py",
        *(word for name, value in (where | work | rest).items() for word in (f"--{name}", value)),
        *flags,
        seen=seen,
    )
    parts = ("rollout_seconds", "reward_seconds", "update_seconds")
    lines = [json.loads(line) for line in open(out / "metrics.jsonl")][2:]
    middle = {name: statistics.median(line[name] for line in lines) for name in parts}
    moments = [moment for moment, line in seen if line.startswith("step ")][1:]
    middle["step_seconds"] = statistics.median(
        after - before for before, after in itertools.pairwise(moments)
    )  # by the clock, logging and all
    middle["completions_per_s"] = B * gpus * G / middle["step_seconds"]
    middle["peak_gib"] = max(line.get("peak_gib", 0.0) for line in lines)
    for name, value in middle.items():
        emit(
            f"{case} on {gpus}",
            name,
            value,
            {"completions_per_s": "completions/s", "peak_gib": "GiB"}.get(name, "s"),
        )
    return middle


def collectives(gpus):
    """Bytes of gradients that an all-reduce over that many GPUs gets done in a second, and seconds of a
    gathering of 64 rewards from each.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(COLLECTIVES)
        script.flush()
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={gpus}",
            script.name,
        ]
        printed = subprocess.run(
            command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=True
        ).stdout
        return tuple(map(float, printed.split()[-2:]))


def cost_model(case, runs, parameters, rate, emit):
    """Seconds of a step on n GPUs from the run on one and the all-reduce's rate on two."""
    gradients, ring = 4 * parameters, rate * 2 * (2 - 1) / 2  # bytes through each GPU a second
    for n in (2, 4, 8):
        exchange = gradients * 2 * (n - 1) / n / ring
        emit(f"{case} on {n}", "all_reduce_seconds_predicted", exchange, "s")
        emit(
            f"{case} on {n}",
            "speedup_predicted",
            n * runs[1]["step_seconds"] / (runs[1]["step_seconds"] + exchange),
            "",
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--gpus",
        type=int,
        nargs="+",
        default=[n for n in (1, 2, 4, 8) if n <= max(1, torch.cuda.device_count())],
    )
    parser.add_argument("--cases", nargs="+", default=["1.5b-8x8"], choices=CASES)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    rows = []

    def emit(case, metric, value, unit):
        rows.append((case, metric, round(value, 4) if isinstance(value, float) else value, unit))
        print(*rows[-1], flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rates = {}
        for gpus in sorted({2, *args.gpus} - {1}) if max(args.gpus) > 1 else ():
            rates[gpus], gather = collectives(gpus)
            emit(f"{gpus} GPUs", "all_reduce_rate", rates[gpus] / 1e9, "GB/s of gradients")
            emit(f"{gpus} GPUs", "gather_seconds", gather, "s")
        for case in args.cases:
            parameters, runs = prepare(CASES[case][0], folder), {}
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            for gpus in (n for n in args.gpus if n > 1 or "--fsdp" not in CASES[case][4]):
                runs[gpus] = one_run(case, gpus, folder, args.steps, emit)
                if gpus > 1 and "--fsdp" not in CASES[case][4]:  # which scatters them instead
                    emit(f"{case} on {gpus}", "all_reduce_seconds", 4 * parameters / rates[gpus], "s")
                if 1 in runs and gpus > 1:
                    emit(
                        f"{case} on {gpus}",
                        "speedup",
                        runs[gpus]["completions_per_s"] / runs[1]["completions_per_s"],
                        "",
                    )
            if rates and 1 in runs:
                cost_model(case, runs, parameters, rates[2], emit)
            write_results("bench_gpus", rows, gpus=torch.cuda.device_count())


if __name__ == "__main__":
    main()

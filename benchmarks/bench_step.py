"""One whole GRPO step, rewards ready to rollout copy refreshed and all, and TRL's trainer on the same work in
the same call.

    python benchmarks/bench_step.py [--cases 1.5b-8x8 original-recipe ...] [--trl false]
    python benchmarks/bench_step.py --cases 0.5b-gsm8k 0.5b-gsm8k-dead --model DIR --data FOLDER --before OLD

Random weights at real sizes, prompts of 128 tokens, temperature 1, no row ends before the limit; rewards are
drawn at random, so that every group carries a signal. Update arithmetic: (6 + 2 where there is a reference) x
parameters, tied ones once, x unpadded prompt and completion tokens; `needed` counts a prompt once a group.

The `long` cases: prompts of 512 tokens, and one step, behind the trial by which `--check` predicts its peak.
`step_over_floor` is of the last decode steps, where every row has its full length: their median time over
that of reading the bf16 weights, each row's keys and values and one pass of bf16 logits at the copy rate.

The cases with a model: real prompts of GSM8K, 64 x 8, and its worked solutions as completions, so that their
lengths are real. `--before` names a checkout of an earlier commit, whose update is timed in the same call.
"""

import argparse
import collections
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import CODE, ROOT, run_script, write_results

sys.path.insert(0, str(CODE))
import torch
from accelerate import Accelerator
from bench_generation import REAL, build, card_rates, synthetic_tokenizer, wait

import grpo_train
from answers.formats import ANSWER_FORMATS
from decoding.decoder import GroupDecoder
from decoding.rollout import Rollout, Sampling, pad_right, rollout_uniforms
from grpo_train import Config, group_advantages, update
from learning.learner import make_learner
from learning.models import add_adapters, load_models, load_tokenizer, refresh
from problems.prompts import Prompting
from problems.sources import load_problems

P, LONG_P = 128, 512
RECOMPUTE = dict(beta=0.04, gradient_checkpointing="on")
CASES = {  # shape, prompts, generations, completion tokens, settings
    "1.5b-8x8": ("1.5b", 8, 8, 256, dict(beta=0.04)),
    "original-recipe": ("1.5b", 7, 12, 400, dict(beta=0.04)),
    "original-recipe-8bit": ("1.5b", 7, 12, 400, dict(optimizer="adamw_8bit", **RECOMPUTE)),
    "original-recipe-lora": ("1.5b", 7, 12, 400, dict(lora_r=32, **RECOMPUTE)),
    "7b-lora": ("7b", 8, 8, 256, dict(lora_r=32, **RECOMPUTE)),
    "1.5b-long-4k": ("1.5b", 8, 8, 4096, dict(beta=0.04)),
    "1.5b-long-8k": ("1.5b", 8, 8, 8192, dict(beta=0.04)),
}


def predict_peak(case, config, learner, decoder, prompts, emit):
    """What --check says of this case, by its trial, which warms up everything that the step will use."""
    from running.preflight import predicted_peak  # that of an earlier commit, --before, has none

    emit(case, "predicted_peak_gib", predicted_peak(config, learner, decoder, prompts) / 2**30, "GiB")


def last_steps(engine, count=64):
    """Let the engine note the end of each decode step; returns the latest of these CUDA events."""
    step, events = engine.step, collections.deque(maxlen=count)

    def noted(n, last):
        step(n, last)
        if not last:  # the last one forwards nothing
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()

    engine.step = noted
    return events


def memory_floor(model, rows, tokens, rate):
    """Seconds that reading weights, keys and values of `rows` rows of `tokens` tokens, and logits takes."""
    config, parameters = model.config, sum(p.numel() for p in model.parameters())
    width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    cache = rows * tokens * config.num_hidden_layers * 2 * width
    return 2 * (parameters + cache + rows * config.vocab_size) / rate


def our_case(case, steps, args, rates, emit):
    shape, B, G, T, settings = CASES[case]
    is_long = "long" in case
    asked, warm_up, steps = (LONG_P, 0, 1) if is_long else (P, 2, steps)
    settings |= dict(batch_size=B, num_generations=G, max_completion_length=T, eval_every=0)
    settings |= dict(micro_batch_tokens=args.micro_batch_tokens, torch_compile=args.compiled == "true")
    config = Config(model="random", **settings)
    policy = build(shape, torch.bfloat16 if config.lora_r else torch.float32).train()
    sampler, reference = (build(shape).requires_grad_(False) for _ in range(2))
    if config.lora_r:
        add_adapters(policy, config)
    decoder = GroupDecoder(sampler, synthetic_tokenizer(), "</reasoning>", config.interaction)
    learner = make_learner(config, Accelerator(), policy, reference, decoder, 1000)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, REAL, (B, asked), generator=generator).tolist()
    sampling = Sampling(T, G, temperature=1.0)
    laps, torch_peak = [], 0
    if is_long:
        predict_peak(case, config, learner, decoder, prompts, emit)
        events = last_steps(decoder.engine)
    for step in range(steps + warm_up):
        torch.cuda.reset_peak_memory_stats()
        wait()
        start = time.perf_counter()
        uniforms = rollout_uniforms(0, step, 0, B * G, T).clamp(min=1e-3)
        rollout = decoder.rollout(prompts, sampling, uniforms)
        wait()
        sampled = time.perf_counter()
        rewards = torch.rand(B * G, generator=generator, dtype=torch.float64)
        metrics = update(learner, rollout, group_advantages(rewards, G).cuda(), config)
        refresh(sampler, policy)
        wait()
        done = time.perf_counter()
        seconds = f"rollout {sampled - start:.3f} s, update {done - sampled:.3f} s"
        print(f"  {case} step {step}: {seconds}, grad norm {metrics['grad_norm']:.3g}", flush=True)
        if step >= warm_up:
            laps.append((sampled - start, done - sampled))
            torch_peak = max(torch_peak, torch.cuda.max_memory_allocated())
    rollout_seconds, update_seconds = (statistics.median(x) for x in zip(*laps, strict=True))
    parameters = sum(p.numel() for name, p in policy.named_parameters() if ".lora_" not in name)
    each = (6 if config.lora_r else 8) * parameters  # a frozen weight has no gradient
    operations, needed = each * B * G * (asked + T), each * B * (asked + G * T)
    emit(case, "step_seconds", statistics.median(map(sum, laps)), "s")
    emit(case, "rollout_seconds", rollout_seconds, "s")
    emit(case, "update_seconds", update_seconds, "s")
    emit(case, "update_share_of_matmul", operations / update_seconds / rates[1], "")
    emit(case, "update_share_of_matmul_needed", needed / update_seconds / rates[1], "")
    emit(case, "peak_gib", torch_peak / 2**30, "GiB")
    emit(case, "reserved_gib", torch.cuda.max_memory_reserved() / 2**30, "GiB")
    emit(case, "micro_batch_tokens", learner.budget.tokens, "tokens")
    if is_long:
        seconds = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) / 1e3
        floor = memory_floor(sampler, B * G, asked + T, rates[0])
        emit(case, "floor_ms_per_step", 1e3 * floor, "ms")
        emit(case, "ms_per_step", 1e3 * seconds, "ms")
        emit(case, "step_over_floor", seconds / floor, "")


GSM8K = {"0.5b-gsm8k": dict(beta=0.005), "0.5b-gsm8k-dead": dict(beta=0.0)}
DEAD = 0.35  # share of the groups whose rewards are all equal, in 0.5b-gsm8k-dead


def solved_rollout(tokenizer, data, B, G):
    """Real prompts, and as their completions B * G worked solutions of GSM8K, each with its EOS."""
    xml = ANSWER_FORMATS["xml"]
    problems = load_problems(data, "train")
    asked, _ = Prompting("xml", xml.system_prompt).encode(tokenizer, problems[:B], 512)
    pairs = [p.solution.rpartition("####")[::2] for p in problems[B : B + B * G]]
    texts = [xml.write(reasoning.strip(), answer.strip()) for reasoning, answer in pairs]
    rows = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]
    ids, mask = (x.cuda() for x in pad_right(rows, tokenizer.pad_token_id))
    blank, ended = torch.zeros(ids.shape, device="cuda"), mask.any(-1)
    return Rollout([p.ids for p in asked], ids, mask, blank, ended, blank.bool(), G, 1.0)


def update_case(case, args):
    """Seconds of an update, and the tokens of its rows: {metric: value}."""
    B, G = 64, 8
    config = Config(model=args.model, batch_size=B, num_generations=G, eval_every=0, **GSM8K[case])
    tokenizer, device = load_tokenizer(args.model), torch.device("cuda")
    policy, sampler, reference = load_models(config, args.model, tokenizer, device)
    decoder = GroupDecoder(sampler, tokenizer, "</reasoning>", config.interaction)
    learner = make_learner(config, Accelerator(), policy, reference, decoder, 1000)
    rollout = solved_rollout(tokenizer, args.data, B, G)
    advantages = torch.randn(B * G, generator=torch.Generator().manual_seed(0)).cuda()
    if case.endswith("dead"):
        advantages[: round(DEAD * B) * G] = 0.0
    seconds = []
    for _ in range(8):
        wait()
        started = time.perf_counter()
        update(learner, rollout, advantages, config)
        wait()
        seconds.append(time.perf_counter() - started)
    prompts, completions = rollout.sizes
    return {
        "update_seconds": statistics.median(seconds[3:]),
        "first_update_seconds": seconds[0],
        "mean_prompt": statistics.fmean(prompts),
        "mean_completion": statistics.fmean(completions),
        "micro_batch_tokens": learner.budget.tokens,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def gsm8k_case(case, args, emit):
    """The update of this code, and that of the code before, in processes of their own, one after the other;
    the faster of each counts, since a host that is busy elsewhere only adds to it.
    """
    code = {"": str(ROOT)} | ({"_before": args.before} if args.before else {})
    best = {}
    for suffix, folder in [*code.items()] * args.rounds:
        command = [sys.executable, __file__, "--cases", case, "--model", args.model, "--data", args.data]
        environment = {**os.environ, "BENCH_CODE": folder}
        made = subprocess.run(
            [*command, "--one"], env=environment, capture_output=True, text=True, check=False
        )
        if made.returncode:
            raise SystemExit(made.stderr)
        one = json.loads(made.stdout.splitlines()[-1])
        print(f"  {case}{suffix}: {one['update_seconds']:.4f} s", flush=True)
        best[suffix] = min(best.get(suffix, one), one, key=lambda m: m["update_seconds"])
    for suffix, one in best.items():
        for metric, value in one.items():
            emit(case, metric + suffix, value, "s" if metric.endswith("seconds") else "")
    if args.before:
        emit(case, "update_speedup", best["_before"]["update_seconds"] / best[""]["update_seconds"], "times")
    if args.start and GSM8K[case]["beta"]:
        for suffix, m3po_lambda in (("", 0), ("_m3po", 0.1)):
            whole_steps(case, suffix, m3po_lambda, args, emit)


def whole_steps(case, suffix, m3po_lambda, args, emit):
    """A real run from a supervised start: what a step takes, and the share that is no rollout or update."""
    with tempfile.TemporaryDirectory() as folder:
        settings = dict(model=args.start, dataset=args.data, output_dir=folder, overwrite_output_dir="true")
        settings |= dict(batch_size=64, num_generations=8, num_steps=30, max_completion_length=256, mu=1)
        settings |= dict(temperature=1, epsilon=0.2, loss_type="dapo", learning_rate=2e-6, eval_every=0)
        settings |= dict(GSM8K[case], m3po_lambda=m3po_lambda, save_every=0)
        words = [word for key, value in settings.items() for word in (f"--{key}", value)]
        run_script("grpo_train.py", *words, echo=False)
        steps = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()][10:]
    middle = {name: statistics.median(m[name] for m in steps) for name in ("step_seconds", "rollout_seconds")}
    middle["update_seconds"] = statistics.median(m["update_seconds"] for m in steps)
    left = [1 - (m["rollout_seconds"] + m["update_seconds"]) / m["step_seconds"] for m in steps]
    emit(case, f"completions_per_s{suffix}", 512 / middle["step_seconds"], "completions/s")
    for name, value in middle.items():
        emit(case, f"whole_{name}{suffix}", value, "s")
    emit(case, f"share_of_neither{suffix}", statistics.median(left), "")
    emit(
        case, f"completion_length{suffix}", statistics.fmean(m["completion_length"] for m in steps), "tokens"
    )
    emit(case, f"dead_groups{suffix}", statistics.fmean(m["frac_reward_zero_std"] for m in steps), "")


def trl_case(case, steps, emit):
    """TRL's GRPOTrainer with `generate` on the same shape, prompts and lengths: bf16 weights, micro-batches
    of 16.
    """
    from datasets import Dataset
    from tokenizers import pre_tokenizers
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    shape, B, G, T, settings = CASES[case]
    tokenizer, seconds = synthetic_tokenizer(), []
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    generator = torch.Generator().manual_seed(0)
    prompts = [
        " ".join(f"t{i}" for i in torch.randint(1, REAL, (P,), generator=generator).tolist())
        for _ in range(B * (steps + 2))
    ]

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            wait()
            self.start = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            wait()
            seconds.append(time.perf_counter() - self.start)

    def reward(completions, **kwargs):
        return torch.rand(len(completions), generator=generator).tolist()

    with tempfile.TemporaryDirectory() as folder:
        build(shape).save_pretrained(folder)  # it loads the reference from where the policy came
        tokenizer.save_pretrained(folder)
        sizes = dict(num_generations=G, max_completion_length=T, generation_kwargs=dict(min_new_tokens=T))
        sizes |= dict(per_device_train_batch_size=16, gradient_accumulation_steps=B * G // 16)
        training = dict(beta=settings["beta"], max_steps=steps + 1, temperature=1.0, learning_rate=5e-6)
        training |= dict(bf16=True, model_init_kwargs=dict(dtype="bfloat16"), gradient_checkpointing=False)
        quiet = dict(report_to="none", save_strategy="no", logging_steps=1000, disable_tqdm=True)
        config = GRPOConfig(output_dir=folder, use_vllm=False, **sizes, **training, **quiet)
        data = Dataset.from_dict({"prompt": prompts})
        torch.cuda.reset_peak_memory_stats()
        GRPOTrainer(
            folder, reward, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()]
        ).train()
    emit(case, "trl_step_seconds", statistics.median(seconds[1:]), "s")
    emit(case, "trl_peak_gib", torch.cuda.max_memory_allocated() / 2**30, "GiB")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=[*CASES, *GSM8K])
    parser.add_argument("--model", help="of the cases with GSM8K's prompts")
    parser.add_argument("--data", help="folder with GSM8K's train.jsonl")
    parser.add_argument("--start", help="a model of sft_train.py, for whole steps of 0.5b-gsm8k")
    parser.add_argument("--before", help="a checkout of an earlier commit, to compare with")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each code in those cases")
    parser.add_argument("--one", action="store_true", help="this code's update alone, as a line of JSON")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--micro_batch_tokens", type=int, help="default: what memory holds")
    parser.add_argument("--compiled", default="true", choices=["true", "false"])
    parser.add_argument("--trl", default="true", choices=["true", "false"])
    parser.add_argument("--name", default="bench_step", help="of the result file")
    args = parser.parse_args()
    assert Path(grpo_train.__file__).parent == CODE, "two commits in one process"
    if args.one:
        return print(json.dumps(update_case(args.cases[0], args)))
    rows = []

    def emit(case, metric, value, unit):
        rows.append((case, metric, round(value, 4) if isinstance(value, float) else value, unit))
        print(*rows[-1], flush=True)

    rates = card_rates()
    emit("card", "copy_rate", rates[0] / 1e12, "TB/s")
    emit("card", "matrix_rate", rates[1] / 1e12, "TFLOP/s")
    for case in args.cases:
        if case in GSM8K:
            gsm8k_case(case, args, emit)
            write_results(args.name, rows)
            continue
        our_case(case, args.steps, args, rates, emit)
        torch._dynamo.reset()  # a case has its own compiled layers, as a run has
        gc.collect()
        torch.cuda.empty_cache()
        if args.trl == "true" and case == "1.5b-8x8":
            trl_case(case, args.steps, emit)
            gc.collect()
            torch.cuda.empty_cache()
        write_results(args.name, rows)


if __name__ == "__main__":
    main()

"""One whole GRPO step, rewards ready to rollout copy refreshed and all, and TRL's trainer on the same work in
the same call.

    python benchmarks/bench_step.py [--cases 1.5b-8x8 original-recipe ...] [--trl false]

Random weights at real sizes, prompts of 128 tokens, temperature 1, no row ends before the limit; rewards are
drawn at random, so that every group carries a signal. Update arithmetic: (6 + 2 where there is a reference) x
parameters, tied ones once, x unpadded prompt and completion tokens.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time

from bench_generation import REAL, build, card_rates, synthetic_tokenizer, wait

from common import ROOT, write_results

sys.path.insert(0, str(ROOT))
import torch
from accelerate import Accelerator

from decoding.decoder import GroupDecoder
from decoding.rollout import Sampling, rollout_uniforms
from grpo_train import Config, group_advantages, update
from learning.learner import make_learner
from learning.models import add_adapters, refresh

P = 128
RECOMPUTE = dict(beta=0.04, gradient_checkpointing="on")
CASES = {  # shape, prompts, generations, completion tokens, settings
    "1.5b-8x8": ("1.5b", 8, 8, 256, dict(beta=0.04)),
    "original-recipe": ("1.5b", 7, 12, 400, dict(beta=0.04)),
    "original-recipe-8bit": ("1.5b", 7, 12, 400, dict(optimizer="adamw_8bit", **RECOMPUTE)),
    "original-recipe-lora": ("1.5b", 7, 12, 400, dict(lora_r=32, **RECOMPUTE)),
    "7b-lora": ("7b", 8, 8, 256, dict(lora_r=32, **RECOMPUTE)),
}


def our_case(case, steps, args, rates, emit):
    shape, B, G, T, settings = CASES[case]
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
    prompts = torch.randint(1, REAL, (B, P), generator=generator).tolist()
    sampling = Sampling(T, G, temperature=1.0)
    laps, torch_peak = [], 0
    for step in range(steps + 2):
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
        if step >= 2:
            laps.append((sampled - start, done - sampled))
            torch_peak = max(torch_peak, torch.cuda.max_memory_allocated())
    rollout_seconds, update_seconds = (statistics.median(x) for x in zip(*laps, strict=True))
    parameters = sum(p.numel() for name, p in policy.named_parameters() if ".lora_" not in name)
    operations = (6 if config.lora_r else 8) * parameters * B * G * (P + T)  # a frozen weight has no gradient
    emit(case, "step_seconds", statistics.median(map(sum, laps)), "s")
    emit(case, "rollout_seconds", rollout_seconds, "s")
    emit(case, "update_seconds", update_seconds, "s")
    emit(case, "update_share_of_matmul", operations / update_seconds / rates[1], "")
    emit(case, "peak_gib", torch_peak / 2**30, "GiB")
    emit(case, "reserved_gib", torch.cuda.max_memory_reserved() / 2**30, "GiB")
    emit(case, "micro_batch_tokens", learner.budget.tokens, "tokens")


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
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--micro_batch_tokens", type=int, help="default: what memory holds")
    parser.add_argument("--compiled", default="true", choices=["true", "false"])
    parser.add_argument("--trl", default="true", choices=["true", "false"])
    parser.add_argument("--name", default="bench_step", help="of the result file")
    args = parser.parse_args()
    rows = []

    def emit(case, metric, value, unit):
        rows.append((case, metric, round(value, 4) if isinstance(value, float) else value, unit))
        print(*rows[-1], flush=True)

    rates = card_rates()
    emit("card", "copy_rate", rates[0] / 1e12, "TB/s")
    emit("card", "matrix_rate", rates[1] / 1e12, "TFLOP/s")
    for case in args.cases:
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

"""Rollouts against their peers and against the memory floor, on one card and in one run; on a machine without
one, against `generate` on the CPU.

    python benchmarks/bench_generation.py [--model DIR --data FOLDER] [--peers false] [--vllm true]

On a GPU: random weights at real sizes, prompts of 128 tokens, 256 new ones, temperature 1, bf16; the card's
own copy and matrix rates give the floor. `--model` and `--data` (a folder with test.jsonl) add the evaluation
of a real model. The tokenizer's first id is EOS and a draw of 0 picks the first id: that is how a row is made
to end at a length given beforehand, without a change to the decoder. `--vllm true` has vLLM do the same work
(bench_vllm.py), once in the trainer's process and once in its default mode, an engine process; the better of
the two is its best mode. On the CPU: the embedded model, and `--model` where it is given, in float32.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import CODE, write_results

sys.path.insert(0, str(CODE))
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen2Config

from decoding.decoder import GroupDecoder
from decoding.rollout import Interaction, Sampling, pad_left, rollout_uniforms
from learning.models import load_model, load_tokenizer
from problems.prompts import Prompting
from problems.sources import load_problems
from rewards import ANSWER_FORMATS

P, T = 128, 256
SHAPES = {
    "1.5b": dict(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
    ),
    "0.5b": dict(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
    ),
    "3b": dict(
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
    ),
    "7b": dict(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    ),
}
VOCABULARY, REAL = 151936, 151665  # Qwen2.5's head, and the ids its tokenizer has


def synthetic_tokenizer():
    vocabulary = {"<eos>": 0} | {f"t{i}": i for i in range(1, REAL)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>")),
        eos_token="<eos>",
        pad_token="<eos>",
    )


def build(shape, dtype=torch.bfloat16, kind=Qwen2Config):
    torch.manual_seed(0)
    more = dict(vocab_size=VOCABULARY, max_position_embeddings=4096, eos_token_id=0, pad_token_id=0)
    config = kind(**{"tie_word_embeddings": True, **SHAPES[shape], **more})
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def clock(function, repeat=3):
    """Median seconds of `repeat` warm calls."""
    seconds = []
    for _ in range(repeat):
        wait()
        started = time.perf_counter()
        function()
        wait()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def wait():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def card_rates():
    """Bytes a second of a copy (read and written both counted) and bf16 operations a second of a matrix
    product.
    """
    source, size = torch.empty(2**31, dtype=torch.uint8, device="cuda"), 8192
    target, a = torch.empty_like(source), torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    target.copy_(source), a @ a
    copy = 2 * source.numel() / clock(lambda: [target.copy_(source) for _ in range(10)]) * 10
    matrix = 2 * size**3 / clock(lambda: [a @ a for _ in range(10)]) * 10
    return copy, matrix


def floor_seconds(model, rows, rates):
    """The least a decode step can take: weights, the cache at its final length and one pass of float32
    logits, plus the arithmetic.
    """
    config, parameters = model.config, sum(p.numel() for p in model.parameters())
    cache = (
        rows
        * (P + T)
        * config.num_hidden_layers
        * 2
        * config.num_key_value_heads
        * config.hidden_size
        // config.num_attention_heads
        * 2
    )
    return (2 * parameters + cache + rows * VOCABULARY * 4) / rates[0] + 2 * parameters * rows / rates[1]


def rollout_case(name, decoder, prompts, G, rates, peers, emit):
    rows = prompts * G
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, REAL, (prompts, P), generator=generator)
    asked, sampling, first_token = ids.tolist(), Sampling(T, G, 1.0), Sampling(1, G, 1.0)
    uniforms = rollout_uniforms(0, 0, 0, rows, T).clamp(min=1e-3)
    floor = floor_seconds(decoder.model, rows, rates)
    emit(name, "floor_ms_per_step", 1e3 * floor, "ms")
    for suffix, interact in (("", False), ("_m3po", True)):
        started = time.perf_counter()
        decoder.rollout(asked, sampling, uniforms, interact)
        torch.cuda.synchronize()
        first = time.perf_counter() - started
        torch.cuda.reset_peak_memory_stats()
        seconds = clock(lambda: decoder.rollout(asked, sampling, uniforms, interact), 5)  # noqa: B023
        prefill = clock(lambda: decoder.rollout(asked, first_token, uniforms[:, :1], interact))  # noqa: B023
        step = (seconds - prefill) / (T - 1)
        emit(name, f"first_call_extra_seconds{suffix}", first - seconds, "s")
        emit(name, f"tokens_per_s{suffix}", rows * T / seconds, "tokens/s")
        emit(name, f"ms_per_step{suffix}", 1e3 * step, "ms")
        emit(name, f"step_over_floor{suffix}", step / floor, "")
        emit(name, f"prefill_ms{suffix}", 1e3 * prefill, "ms")
        emit(name, f"peak_gib{suffix}", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    if peers:
        peers_case(name, decoder.model, ids, G, emit)


def peers_case(name, model, ids, G, emit):
    repeated = ids.cuda().repeat_interleave(G, 0)

    def generate(length):
        settings = dict(
            max_new_tokens=length, min_new_tokens=length, do_sample=True, top_k=0, top_p=1.0, temperature=1.0
        )
        return model.generate(repeated, attention_mask=torch.ones_like(repeated), **settings)

    generate(8)
    torch.cuda.reset_peak_memory_stats()
    seconds = clock(lambda: generate(T), 1)
    emit(name, "generate_tokens_per_s", len(repeated) * T / seconds, "tokens/s")
    emit(name, "generate_peak_gib", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    config = GenerationConfig(
        max_new_tokens=T, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, eos_token_id=-1, pad_token_id=0
    )
    requests = repeated.tolist()
    seconds = clock(lambda: model.generate_batch(inputs=requests, generation_config=config), 1)
    emit(name, "continuous_batching_tokens_per_s", len(repeated) * T / seconds, "tokens/s")


def drawn_lengths(rows, limit, generator=None):
    """Lengths like those of GSM8K's completions, (rows,)."""
    generator = generator or torch.Generator().manual_seed(2)
    return torch.exp(4.670 + 0.628 * torch.randn(rows, generator=generator)).round().clamp(1, limit).long()


def lengths_case(name, decoder, prompts, G, emit):
    """Rows that end like GSM8K's completions: log-normal lengths of mean 130 and 95th percentile 300, cut at
    400.
    """
    rows, limit = prompts * G, 400
    generator = torch.Generator().manual_seed(2)
    lengths = drawn_lengths(rows, limit, generator)
    asked = torch.randint(1, REAL, (prompts, P), generator=generator).tolist()
    sampling, equal = Sampling(limit, G, 1.0), Sampling(130, G, 1.0)
    uniforms = rollout_uniforms(0, 0, 0, rows, limit).clamp(min=1e-3)
    ending = uniforms.scatter(1, lengths[:, None] - 1, 0.0)
    emit(name, "mean_length", float(lengths.float().mean()), "tokens")
    emit(name, "percentile_95_length", float(lengths.float().quantile(0.95)), "tokens")
    for suffix, interact in (("", False), ("_m3po", True)):
        out = decoder.rollout(asked, sampling, ending, interact)
        assert torch.equal(out.lengths.cpu(), lengths), "every row ends where it should"
        seconds = clock(lambda: decoder.rollout(asked, sampling, ending, interact), 5)  # noqa: B023
        same = clock(lambda: decoder.rollout(asked, equal, uniforms[:, :130], interact), 5)  # noqa: B023
        emit(name, f"useful_tokens_per_s{suffix}", int(lengths.sum()) / seconds, "tokens/s")
        emit(name, f"useful_share{suffix}", int(lengths.sum()) / seconds / (rows * 130 / same), "")


def gsm8k_prompts(folder, data):
    """A model's tokenizer, and the prompts of the test split, as ids."""
    tokenizer, xml = load_tokenizer(folder), ANSWER_FORMATS["xml"]
    asked, _ = Prompting("xml", xml.system_prompt).encode(tokenizer, load_problems(data, "test"), 512)
    return tokenizer, [p.ids for p in asked]


def gsm8k_case(name, folder, data, emit):
    tokenizer, prompts = gsm8k_prompts(folder, data)
    model = load_model(folder, tokenizer, torch.bfloat16, torch.device("cuda")).eval()
    decoder, greedy = GroupDecoder(model, tokenizer), Sampling(300)
    started = time.perf_counter()
    decoder.complete(prompts[:600], greedy)
    first = time.perf_counter() - started
    answers = []
    torch.cuda.reset_peak_memory_stats()
    seconds = clock(lambda: answers.append(decoder.complete(prompts, greedy)), 2)
    emit(name, "questions", len(prompts), "questions")
    emit(name, "seconds", seconds, "s")
    emit(name, "tokens_per_s", sum(len(completion.ids) for [completion] in answers[0]) / seconds, "tokens/s")
    emit(name, "setup_seconds", decoder.setup_seconds, "s")
    emit(name, "first_600_questions_seconds", first, "s")
    emit(name, "peak_gib", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    plain = GroupDecoder(model, tokenizer, fast=False)
    some = prompts[::10]
    agreement(name, decoder, plain, some, emit)


@torch.no_grad()
def agreement(name, fast, plain, prompts, emit):
    """Greedy tokens of the fast path against the plain one's, up to the first that differs; how near a tie
    that was, by the plain path's log-probs.
    """
    ours, theirs = (d.complete(prompts, Sampling(300)) for d in (fast, plain))
    same, total, gaps = 0, 0, []
    for prompt, [(a, *_)], [(b, *_)] in zip(prompts, ours, theirs, strict=True):
        k = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), None)
        same, total = same + (len(b) if k is None else k), total + (len(b) if k is None else k + 1)
        if k is not None:
            logp = (
                plain.model(torch.tensor([prompt + b[:k]], device="cuda"))
                .logits[0, -1]
                .float()
                .log_softmax(-1)
            )
            gaps.append(float((logp[b[k]] - logp[a[k]]).abs()))
    emit(name, "greedy_agreement_with_plain", same / total, "")
    emit(name, "divergences", len(gaps), f"of {len(prompts)}")
    emit(name, "largest_gap_at_divergence", max(gaps, default=0.0), "nats")


def cpu_case(case, name, prompts, G, length, threads, emit):
    """float32 on the CPU: ours with and without M3PO, and `generate` on the same rows."""
    torch.set_num_threads(threads)
    tokenizer = load_tokenizer(name)
    model = load_model(name, tokenizer, torch.float32, torch.device("cpu")).eval()
    generator = torch.Generator().manual_seed(0)
    lengths = [24 + 8 * (i % 4) for i in range(prompts)]
    asked = [torch.randint(5, 50, (size,), generator=generator).tolist() for size in lengths]
    ids, mask = pad_left(asked, tokenizer.pad_token_id)
    rows, our_sampling = prompts * G, Sampling(length, G, 1.0)
    uniforms = rollout_uniforms(0, 0, 0, rows, length)
    decoder = GroupDecoder(model, tokenizer, "</reasoning>", Interaction(0.1, 0.1))
    decoder.tables.is_eos[:] = False  # every row goes on to the limit
    repeated, kept = ids.repeat_interleave(G, 0), mask.repeat_interleave(G, 0).long()
    sampling = dict(
        max_new_tokens=length, min_new_tokens=length, do_sample=True, top_k=0, top_p=1.0, temperature=1.0
    )
    ways = {
        "tokens_per_s": lambda: decoder.rollout(asked, our_sampling, uniforms, interact=False),
        "tokens_per_s_m3po": lambda: decoder.rollout(asked, our_sampling, uniforms),
        "generate_tokens_per_s": lambda: model.generate(input_ids=repeated, attention_mask=kept, **sampling),
    }
    for metric, way in ways.items():
        way()
        emit(case, metric, rows * length / clock(way), "tokens/s")


def gpu_cases(args, emit):
    rates = card_rates()
    emit("card", "copy_rate", rates[0] / 1e12, "TB/s")
    emit("card", "matrix_rate", rates[1] / 1e12, "TFLOP/s")
    for shape, prompts, name in (("1.5b", 8, "1.5b-8x8"), ("0.5b", 64, "0.5b-64x8")):
        gc.collect()
        torch.cuda.empty_cache()
        decoder = GroupDecoder(
            build(shape),
            synthetic_tokenizer(),
            "</reasoning>",
            Interaction(0.1, 0.1),
            compiled=args.compiled == "true",
        )
        rollout_case(name, decoder, prompts, 8, rates, args.peers == "true", emit)
        if shape == "0.5b":
            lengths_case(f"{name}-lengths", decoder, prompts, 8, emit)
        emit(name, "setup_seconds", decoder.setup_seconds, "s")
        del decoder
    if args.model:
        gsm8k_case("gsm8k-test", args.model, args.data, emit)
    if args.vllm == "true":
        gc.collect()
        torch.cuda.empty_cache()
        for case in ("1.5b-8x8", "0.5b-64x8", *(["gsm8k-test"] if args.model else [])):
            vllm_case(case, args, emit)


def vllm_case(case, args, emit):
    """What vLLM makes of a case in each of its modes, and of each number the better mode's.

    A mode that fails says why in its own words, and the other one counts.
    """
    script, found = Path(__file__).with_name("bench_vllm.py"), {}
    for mode in ("in_process", "engine_process"):
        words = [sys.executable, str(script), "--case", case, "--mode", mode]
        words += ["--model", args.model, "--data", args.data] if args.model else []
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(f"vLLM, {mode}, on {case}: ended with status {done.returncode}", flush=True)
        for line in done.stdout.splitlines():
            if line.startswith("vllm "):
                name, metric, value, unit = json.loads(line.removeprefix("vllm "))
                emit(name, f"vllm_{metric}_{mode}", value, unit)
                found.setdefault((name, metric, unit), {})[mode] = value
    for (name, metric, unit), values in found.items():
        if metric != "setup_seconds":
            best = min if metric == "seconds" else max
            mode = best(values, key=values.get)
            emit(name, f"vllm_{metric}", values[mode], unit)
            emit(name, f"vllm_{metric}_best_mode", mode, "")


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--data")
    parser.add_argument("--peers", default="true", choices=["true", "false"])
    parser.add_argument("--vllm", default="false", choices=["true", "false"])
    parser.add_argument("--compiled", default="true", choices=["true", "false"])
    args = parser.parse_args()
    rows = []

    def emit(case, metric, value, unit):
        rows.append((case, metric, round(value, 4) if isinstance(value, float) else value, unit))
        print(*rows[-1], flush=True)

    if torch.cuda.is_available():
        gpu_cases(args, emit)
        write_results("bench_generation", rows)
    else:
        cpu_case("cpu-tiny-32x8", "tiny", 32, 8, 40, 1, emit)
        if args.model:
            cpu_case(f"cpu-{Path(args.model).name}-4x8", args.model, 4, 8, 64, os.cpu_count(), emit)
        write_results("bench_generation_cpu", rows)


if __name__ == "__main__":
    main()

"""vLLM on the rollouts and the evaluation of bench_generation.py, which starts this script for each mode.

    python benchmarks/bench_vllm.py --case 0.5b-64x8 --mode engine_process [--model DIR --data FOLDER]

in_process is how TRL's colocate mode runs it. engine_process is its default: an engine in a process of its
own, with asynchronous scheduling. Without log-probs, and with those of the sampled tokens (`logprobs=0`), for
which a trainer asks. Graphs are captured at every multiple of 8 rows up to those of the case; the prefix
cache is cleared before each timed call, since the weights of a trainer have changed by then. Prints a line of
JSON a number.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from bench_generation import REAL, SHAPES, VOCABULARY, P, T, clock, drawn_lengths
from transformers import Qwen2Config

MODES = {"in_process": "0", "engine_process": "1"}
MARK = "vllm "


def engine(model, longest, rows, **more):
    from vllm import LLM

    sizes = list(range(8, rows + 1, 8))
    how = dict(dtype="bfloat16", seed=0, max_model_len=longest, max_num_seqs=rows, gpu_memory_utilization=0.5)
    return LLM(model=str(model), compilation_config={"cudagraph_capture_sizes": sizes}, **how, **more)


def timed(llm, prompts, params):
    """Median seconds of warm calls, and the outputs of one. prompts: lists of ids."""
    requests, made = [{"prompt_token_ids": ids} for ids in prompts], []

    def once():
        llm.reset_prefix_cache()
        made[:] = llm.generate(requests, params, use_tqdm=False)

    once()
    return clock(once), made


def random_case(name, shape, prompts, G, emit):
    """Random weights at a real size, as bench_generation.rollout_case and lengths_case have it."""
    import torch
    from vllm import SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        more = dict(vocab_size=VOCABULARY, max_position_embeddings=4096, eos_token_id=0, pad_token_id=0)
        config = Qwen2Config(**{"tie_word_embeddings": True, **SHAPES[shape], **more})
        config.architectures = ["Qwen2ForCausalLM"]
        config.save_pretrained(folder)
        started = time.perf_counter()
        llm = engine(folder, P + 400 + 1, prompts * G, load_format="dummy", skip_tokenizer_init=True)
        emit(name, "setup_seconds", time.perf_counter() - started, "s")
        generator = torch.Generator().manual_seed(1)
        asked = torch.randint(1, REAL, (prompts, P), generator=generator).tolist()
        common = dict(temperature=1.0, top_p=1.0, ignore_eos=True, detokenize=False)
        for suffix, logprobs in (("", None), ("_logprobs", 0)):
            params = SamplingParams(n=G, max_tokens=T, logprobs=logprobs, **common)
            seconds, made = timed(llm, asked, params)
            assert all(len(output.token_ids) == T for one in made for output in one.outputs)
            emit(name, f"tokens_per_s{suffix}", prompts * G * T / seconds, "tokens/s")
            if shape == "0.5b":
                lengths = drawn_lengths(prompts * G, 400).tolist()
                each = [SamplingParams(max_tokens=n, logprobs=logprobs, **common) for n in lengths]
                rows = [ids for ids in asked for _ in range(G)]
                seconds, _ = timed(llm, rows, each)
                emit(f"{name}-lengths", f"tokens_per_s{suffix}", sum(lengths) / seconds, "tokens/s")


def gsm8k_case(name, folder, data, emit):
    from bench_generation import gsm8k_prompts
    from vllm import SamplingParams

    started = time.perf_counter()
    llm = engine(folder, 512 + 300, 512)
    emit(name, "setup_seconds", time.perf_counter() - started, "s")
    prompts = gsm8k_prompts(folder, data)[1]
    seconds, made = timed(llm, prompts, SamplingParams(temperature=0.0, max_tokens=300, detokenize=False))
    tokens = sum(len(one.outputs[0].token_ids) for one in made)
    emit(name, "seconds", seconds, "s")
    emit(name, "tokens_per_s", tokens / seconds, "tokens/s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--case", choices=["1.5b-8x8", "0.5b-64x8", "gsm8k-test"], required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data")
    args = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": MODES[args.mode], "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"

    def emit(case, metric, value, unit):
        print(MARK + json.dumps([case, metric, value, unit]), flush=True)

    if args.case == "gsm8k-test":
        return gsm8k_case(args.case, args.model, args.data, emit)
    shape, _, sizes = args.case.partition("-")
    prompts, G = map(int, sizes.split("x"))
    random_case(args.case, shape, prompts, G, emit)


if __name__ == "__main__":
    main()

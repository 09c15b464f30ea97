"""What M3PO and its controls cost beside plain sampling, and how far scoring is from it, on the same rows.

    python benchmarks/controls.py

On a GPU: random weights at the size of Qwen2.5-0.5B, 64 prompts of 128 tokens x 8, 256 new ones, bf16. On the
CPU: the embedded model, 16 x 8, 40 new ones, float32. The cases take turns, so that none has a cooler card or a
quieter machine than another. `logp_diff` is the mean difference of the sampler's log-probs from those of a
scorer that rebuilds its inputs, on one group.
"""

import functools
import statistics
import sys

from bench_generation import REAL, build, clock, synthetic_tokenizer

from common import CODE, write_results

sys.path.insert(0, str(CODE))
import torch

from decoding.controls import Strangers, row_keys
from decoding.decoder import GroupDecoder
from decoding.names import CONTROLS
from decoding.rollout import Interaction, Sampling, rollout_uniforms
from learning.log_probs import Scorer
from learning.models import load_model, load_tokenizer

G, ROUNDS = 8, 9


def cases(model, tokenizer, prompts, length, emit):
    """Milliseconds a decode step, prefill included, of plain sampling, of M3PO and of each control."""
    N = len(prompts) * G
    generator = torch.Generator().manual_seed(0)
    strangers = torch.randint(5, 60, (512, length), generator=generator)
    sampling, uniforms = Sampling(length, G, 1.0), rollout_uniforms(0, 0, 0, N, length).clamp(min=1e-3)
    keys = row_keys(0, 0, 0, N)
    rollouts, differences = {}, {}
    for control in (None, *CONTROLS):
        interaction = Interaction(0.1 if control else 0.0, control=control or "none")
        decoder = GroupDecoder(model, tokenizer, "</reasoning>", interaction)
        decoder.tables.is_eos[:] = False  # every row goes on to the limit
        decoder.hear_strangers(Strangers(strangers, torch.full((512,), length)))
        rollout = decoder.rollout(prompts, sampling, uniforms, keys=keys)  # compiles and captures, on CUDA
        logp, _ = Scorer(model, decoder.tables, model.dtype)(rollout.groups([0]), list(range(G)))
        case = "plain" if control is None else f"m3po_{control}".removesuffix("_none")
        rollouts[case] = functools.partial(decoder.rollout, prompts, sampling, uniforms, keys=keys)
        differences[case] = float((logp - rollout.logp[:G]).abs().mean())
    rounds = [{case: clock(rollout, 1) / length for case, rollout in rollouts.items()} for _ in range(ROUNDS)]
    for case, difference in differences.items():
        emit(case, "ms_per_step", 1e3 * statistics.median(steps[case] for steps in rounds), "ms")
        emit(case, "over_plain", statistics.median(steps[case] / steps["plain"] - 1 for steps in rounds), "")
        emit(case, "logp_diff", difference, "nats")


@torch.no_grad()
def main():
    rows = []

    def emit(case, metric, value, unit):
        rows.append((case, metric, round(value, 8), unit))
        print(*rows[-1], flush=True)

    if torch.cuda.is_available():
        ids = torch.randint(1, REAL, (64, 128), generator=torch.Generator().manual_seed(1))
        cases(build("0.5b"), synthetic_tokenizer(), ids.tolist(), 256, emit)
        write_results("controls", rows)
    else:
        torch.set_num_threads(1)
        tokenizer = load_tokenizer("tiny")
        model = load_model("tiny", tokenizer, torch.float32, torch.device("cpu")).eval()
        ids = torch.randint(5, 50, (16, 24), generator=torch.Generator().manual_seed(1))
        cases(model, tokenizer, ids.tolist(), 40, emit)
        write_results("controls_cpu", rows)


if __name__ == "__main__":
    main()

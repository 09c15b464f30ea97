"""Three updates of a small policy on two processes; run by torch's launcher with `whole`, `sharded` or
`compiled`, which is sharded and has its layers compiled, and the folder of a tokenizer. The first process
prints what the weights became.
"""

import functools
import json
import os
import sys

import torch
import torch.nn as nn
from accelerate import Accelerator

from decoding.decoder import GroupDecoder
from decoding.rollout import Interaction, Sampling, rollout_uniforms
from grpo_train import Config, update
from learning import log_probs
from learning.learner import make_learner
from learning.models import load_tokenizer
from learning.parallel import whole
from small_models import build_model


def main(mode, tokenizer):
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    if mode == "compiled":  # as on a card, without the seconds that its code generator takes
        nn.Module.compile = functools.partialmethod(nn.Module.compile, backend="aot_eager")
        make = log_probs.Scorer
        log_probs.Scorer = lambda *given, compiled=None: make(*given, compiled=compiled is not None)
    config = Config(
        num_generations=4,
        batch_size=4,
        max_completion_length=16,
        micro_batch_tokens=70,
        learning_rate=0.01,
        beta=0.1,
        fsdp=mode != "whole",
    )
    policy, sampler, reference = (build_model("qwen2", tokenizer, seed) for seed in (0, 0, 1))
    decoder = GroupDecoder(sampler, tokenizer, "e", Interaction(0.3))
    prompts = [[5, 6, 7], [9] * 12, [20, 21], [30, 31, 32, 33, 34, 35]][2 * rank : 2 * rank + 2]
    uniforms = rollout_uniforms(0, 0, 0, 16, 16)[8 * rank : 8 * rank + 8]
    rollout = decoder.rollout(prompts, Sampling(16, 4, 1.0), uniforms)
    learner = make_learner(config, accelerator, policy.train(), reference, decoder, 100)
    for step in range(3):
        advantages = torch.randn(16, generator=torch.Generator().manual_seed(step))[8 * rank : 8 * rank + 8]
        metrics = update(learner, rollout, advantages, config)
    weights = [whole(p.detach()).double().norm().item() for p in policy.parameters()]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if rank == 0:
        print(json.dumps(dict(weights=weights, loss=metrics["loss"], graphs=graphs)), flush=True)
    accelerator.wait_for_everyone()
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads may abort a process that is done


if __name__ == "__main__":
    main(sys.argv[1], load_tokenizer(sys.argv[2]))

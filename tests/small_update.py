"""A small policy with a rollout of it and an optimiser."""

import torch
from accelerate import Accelerator

import grpo_train
from decoding.decoder import GroupDecoder
from decoding.rollout import Interaction, pad_left, rollout_uniforms
from grpo_train import Config
from learning.learner import make_optimizer
from learning.log_probs import Scorer
from learning.memory import TokenBudget
from small_models import build_model


def setup(tokenizer, prompts, lam=0.3, **settings):
    """A small policy with its optimiser, a rollout of it, and a scorer of a reference that is elsewhere."""
    config = Config(
        **{
            **dict(
                num_generations=4,
                max_completion_length=16,
                learning_rate=0.01,
                max_grad_norm=1.0,
                beta=0.0,
                eval_every=0,
            ),
            **settings,
        }
    )
    model, other = build_model("qwen2", tokenizer), build_model("qwen2", tokenizer, seed=1)
    decoder = GroupDecoder(model, tokenizer, "e", Interaction(lam))
    decoder.tables.is_eos[3::25] = True
    ids, mask = pad_left(prompts, decoder.tables.pad_id)
    N = len(prompts) * 4
    out = decoder.rollout(ids, mask, 4, 16, rollout_uniforms(0, 0, 0, N, 16), config.temperature)
    optimizer, schedule = make_optimizer(model, config, 100)
    ref = Scorer(other, decoder.tables) if config.beta else None
    return (
        config,
        model,
        out,
        [Accelerator(cpu=True), Scorer(model, decoder.tables), ref, optimizer, schedule],
    )


def advantages_for(out):
    return torch.randn(len(out.ids), generator=torch.Generator().manual_seed(2))


def update(parts, out, advantages, config):
    return grpo_train.update(*parts, out, advantages, config, TokenBudget(config, parts[1].model))

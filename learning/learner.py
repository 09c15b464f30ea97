"""The optimiser, its schedule, and the step that is taken only when loss and gradient are finite."""

import functools
import math

import torch
from transformers import get_scheduler

from errors import RunError
from learning.memory import REMEDIES
from learning.parallel import whole


def make_optimizer(model, config, total_steps):
    """AdamW over the weights that are trained, decay on matrices only, and its schedule over `total_steps` optimiser steps."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, others = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    kind = functools.partial(torch.optim.AdamW, fused=trained[0].device.type == "cuda")
    if config.optimizer == "adamw_8bit":
        import bitsandbytes

        kind = (
            bitsandbytes.optim.AdamW8bit
        )  # moments in blocks of 8-bit codes; of weights under 4,096 numbers in float32
    optimizer = kind(
        [g for g in groups if g["params"]],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
    )
    warmup = math.ceil(config.warmup_ratio * total_steps)
    name = "constant_with_warmup" if config.lr_scheduler_type == "constant" else config.lr_scheduler_type
    return optimizer, get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total_steps)


def guarded_step(accelerator, scorer, optimizer, schedule, losses, max_grad_norm):
    """Clip, then step; a loss or gradient that is not finite, on any process, changes nothing. The schedule goes on in either case.

    Returns (stepped, gradient norm before clipping). Gradients are spent.
    """
    norm = whole(torch.nn.utils.clip_grad_norm_(scorer.parameters(), max_grad_norm or math.inf))
    bad = ~(torch.isfinite(norm) & torch.isfinite(losses).all())
    stepped = float(accelerator.reduce(bad.float(), "sum")) == 0  # device sync
    if stepped:
        try:
            optimizer.step()
        except torch.OutOfMemoryError as error:
            raise RunError(f"out of memory for the optimiser's moments: {REMEDIES}") from error
    optimizer.zero_grad(set_to_none=True)
    schedule.step()
    return stepped, float(norm)

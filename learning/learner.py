"""The learner: the policy with everything that an optimiser step needs; a step is taken only when it is
finite.
"""

import contextlib
import functools
import math
import warnings
from dataclasses import dataclass

import torch

from decoding.engine import say
from errors import NoRoomError, is_out_of_memory
from learning.averaging import WeightAverage
from learning.log_probs import make_scorer
from learning.memory import REMEDIES, TokenBudget, within_memory
from learning.parallel import balanced, distribute, whole
from learning.precision import LossScale, compute_dtype

NOT_FINITE = "loss or gradient not finite"  # why an optimiser step was not taken


@dataclass
class Learner:
    """The policy, and what scores it, steps it and bounds its memory. No reference without a KL."""

    accelerator: object
    policy: torch.nn.Module
    reference: torch.nn.Module | None
    tokenizer: object  # saved with the policy
    scorer: torch.nn.Module  # the policy's, as data parallelism runs it
    reference_scorer: torch.nn.Module | None
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    budget: TokenBudget
    max_grad_norm: float
    loss_scale: LossScale | None = None  # of fp16 alone
    average: WeightAverage | None = None
    why_skipped: str = ""  # the latest step that was not taken

    def share_evenly(self, rollout, advantages, scored):
        """The rollout and advantages (N,) that this process works on, so that all compute as many tokens.

        scored: (N,) bool, the rows that are computed. Whole groups move between processes.
        """
        if self.accelerator.num_processes == 1:
            return rollout, advantages
        G, tokens = rollout.num_generations, []
        for group, counts in enumerate(scored.view(-1, G).tolist()):  # device sync
            rows = [group * G + path for path, is_scored in enumerate(counts) if is_scored]
            tokens.append(self.budget.count(rollout, rows) if rows else 0)
        return balanced(self.accelerator, rollout, advantages, tokens, self.tokenizer.pad_token_id)

    def accumulate_gradients(self, rollout, loss_of_rows, rows=None):
        """Gradients of loss_of_rows(rows) -> (loss, sums) over micro-batches that fit into memory; returns
        its results, at least one. Only `rows` of the rollout count, by default all.

        The loss is a sum over the global batch: DDP averages gradients, so it is multiplied by the number of
        processes. In fp16 gradients are those of the scaled loss; `step` divides them again.
        """
        scale = self.accelerator.num_processes * (self.loss_scale.value if self.loss_scale else 1.0)

        def one_batch(rows, counts):
            loss, sums = loss_of_rows(rows)
            (loss * (counts * scale)).backward()
            return loss.detach() * counts, {name: value * counts for name, value in sums.items()}

        return within_memory(self.accelerator, self.scorer, rollout, self.budget, one_batch, rows)

    def step(self, losses):
        """Clip the gradients, then step; returns (whether it stepped, gradient norm before clipping).

        A loss or gradient that is not finite, on any process, changes no weight, and `why_skipped` says why;
        in fp16 it halves the loss scale. The schedule goes on either way, and the gradients are cleared.
        """
        if self.loss_scale:
            self.loss_scale.unscale(self.scorer.parameters())
        norm = torch.nn.utils.clip_grad_norm_(self.scorer.parameters(), self.max_grad_norm or math.inf)
        norm = whole(norm)
        is_bad = ~(torch.isfinite(norm) & torch.isfinite(torch.stack(losses)).all())
        has_stepped = float(self.accelerator.reduce(is_bad.float(), "sum")) == 0  # device sync
        if has_stepped:
            try:
                self.optimizer.step()
                if self.average:
                    self.average.count_step()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                kept = "the optimiser's moments" + (" and the average of the weights" if self.average else "")
                raise NoRoomError(f"out of memory for {kept}: {REMEDIES}") from error
        self.optimizer.zero_grad(set_to_none=True)
        if has_stepped:
            self.schedule.step()
        else:  # not in each step: Python forgets then which warnings it has shown
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Detected call of")  # where it is the first step of all
                self.schedule.step()
        self._note_step(has_stepped)
        return has_stepped, float(norm)

    def _note_step(self, has_stepped):
        """Adapt the loss scale; an overflow is no bad step as long as a smaller scale may help."""
        if has_stepped:
            if self.loss_scale:
                self.loss_scale.count_good_step()
        elif self.loss_scale and self.loss_scale.halve():
            self.why_skipped = f"fp16 overflow, loss scale now {self.loss_scale.value:.0f}"
        else:
            self.why_skipped = NOT_FINITE

    def as_saved(self):
        """While this lasts, policy and sampler have what is evaluated and saved: the average, if one is kept.

        Every process must call it.
        """
        return self.average.in_use() if self.average else contextlib.nullcontext()

    def scale_metrics(self):
        """The loss scale of the next step, in fp16."""
        return {"loss_scale": self.loss_scale.value} if self.loss_scale else {}

    def sum_over_processes(self, *values):
        """The sums of some 0-d tensors over all processes, as numbers."""
        return self.accelerator.reduce(torch.stack(values), "sum").tolist()  # device sync


def make_learner(config, accelerator, policy, reference, decoder, total_steps, time_used=lambda: 0.0):
    """The Learner of a run of `total_steps` optimiser steps; the decoder knows the tokenizer and the sampler.

    time_used(): the share of the run's minutes that is over, where they are limited.
    """
    scorer = make_scorer(policy, decoder.tables, config)
    reference_scorer = None if reference is None else make_scorer(reference, decoder.tables, config)
    remarks = [made.remark for made in (scorer, reference_scorer) if made is not None]
    for remark in dict.fromkeys(filter(None, remarks)):  # once where both have the same
        say(remark)
    scorer = distribute(accelerator, scorer, config)
    optimizer, schedule = make_optimizer(policy, config, total_steps, time_used)  # after sharding
    is_fp16 = compute_dtype(config.precision, policy.device) == torch.float16
    ema_decay = getattr(config, "ema_decay", 0)  # a supervised run has none
    budget = TokenBudget(config, policy)
    budget.bytes_to_come = decoder.engine.bytes_to_come
    return Learner(
        accelerator=accelerator,
        policy=policy,
        reference=reference,
        tokenizer=decoder.tokenizer,
        scorer=scorer,
        reference_scorer=reference_scorer,
        optimizer=optimizer,
        schedule=schedule,
        budget=budget,
        max_grad_norm=config.max_grad_norm,
        loss_scale=LossScale() if is_fp16 else None,
        average=WeightAverage(policy, decoder.model, ema_decay) if ema_decay else None,
    )


def make_optimizer(model, config, total_steps, time_used=lambda: 0.0):
    """AdamW over the trained weights, decay on matrices only, and its schedule over `total_steps` steps."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay}
    others = {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}
    kind = functools.partial(torch.optim.AdamW, fused=trained[0].device.type == "cuda")
    if config.optimizer == "adamw_8bit":
        import bitsandbytes

        # moments in blocks of 8-bit codes; those of weights with fewer than 4,096 numbers in float32
        kind = bitsandbytes.optim.AdamW8bit
    groups = [group for group in (matrices, others) if group["params"]]
    optimizer = kind(groups, lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2))
    curve = rate_curve(config.lr_scheduler_type, config.warmup_ratio, total_steps, time_used)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, curve)


def rate_curve(kind, warmup_ratio, total, time_used=lambda: 0.0):
    """The share of the rate at a step, counted from 0: 1/n, 2/n, ..., 1 in a warm-up of n steps, then 1, or
    down to 0 at `total`, where no step is taken any more, or at the end of the time, whichever is nearer.
    """
    warmup = math.ceil(warmup_ratio * total)

    def curve(step):
        if step < warmup:
            return (step + 1) / warmup
        left = max(0.0, min((total - step) / max(1, total - warmup), 1 - time_used()))
        if kind == "linear":
            return left
        return 0.5 * (1 - math.cos(math.pi * left)) if kind == "cosine" else 1.0

    return curve


def renew_rates(schedule, optimizer):
    """Set the rates of the next step by its curve, which may be another than when the schedule went on."""
    for group, rate, curve in zip(
        optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
    ):
        group["lr"] = rate * curve(schedule.last_epoch)
    schedule._last_lr = [group["lr"] for group in optimizer.param_groups]

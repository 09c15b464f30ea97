"""Fitting the update into memory: micro-batches of a number of tokens that is found by trial, and halved where it does not fit after all."""

import contextlib

import torch
from torch.distributed.fsdp import FSDPModule

from config import RunError
from processes import largest

MOST_TOKENS = 16384  # that go through the model at once where nobody says: larger products are no faster
ENOUGH_TOKENS = 4096  # with fewer than these at once, recomputing activations is the better bargain
REMEDIES = "try --gradient_checkpointing on, --optimizer adamw_8bit, --lora_r 32, or a lower max_completion_length"


def micro_batches(rollout, token_budget):
    """Row indices in batches of at most `token_budget` tokens, padding in, rows of like length together; one row goes whatever its length."""
    prompt_lengths = rollout.prompt_mask.sum(-1).repeat_interleave(rollout.num_generations)
    lengths = (prompt_lengths + rollout.lengths).tolist()  # device sync
    batches, longest_first = [], sorted(range(len(lengths)), key=lambda n: -lengths[n])
    for n in longest_first:
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > token_budget:
            batches.append([])
        batches[-1].append(n)
    return [torch.tensor(rows, device=rollout.ids.device) for rows in batches]


def longest_row(rollout):
    """Tokens of the longest prompt and the longest completion together."""
    return int(rollout.prompt_mask.sum(-1).max() + rollout.lengths.max())


class TokenBudget:
    """How many tokens, padding in, go through the model at once in the update of `policy`; None until the first rollout to train on is there."""

    def __init__(self, config, policy, optimizer):
        self.tokens, self.policy, self.optimizer = config.micro_batch_tokens, policy, optimizer
        self.recomputes = config.gradient_checkpointing == "on"
        self.may_recompute = config.gradient_checkpointing == "auto"
        if self.recomputes:
            recompute_activations(policy)
        if self.tokens is None and next(policy.parameters()).device.type != "cuda":
            self.tokens = MOST_TOKENS

    def find(self, accelerator, scorer, rollout):
        """What the free memory of the card holds, by a forward and backward whose gradients are dropped; `auto` recomputes where that is little."""
        self.tokens = self._try(accelerator, scorer, rollout)
        if self.may_recompute and self.tokens < ENOUGH_TOKENS:
            self.recomputes = True
            recompute_activations(self.policy)
            self.tokens = self._try(accelerator, scorer, rollout)
        self.tokens = min(MOST_TOKENS, self.tokens)
        if accelerator.is_main_process:
            print(f"{self.tokens} tokens at once in the update{', with gradient checkpointing' if self.recomputes else ''}", flush=True)

    def _try(self, accelerator, scorer, rollout):
        wanted, sharded = ENOUGH_TOKENS, isinstance(scorer, FSDPModule)
        while True:
            rows = micro_batches(rollout, wanted)[0]
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            try:
                with contextlib.nullcontext() if sharded else accelerator.no_sync(scorer):
                    scorer(rollout, rows)[0].sum().backward()
                needed = torch.cuda.max_memory_allocated() - before
            except torch.OutOfMemoryError:
                if len(rows) == 1 or sharded:
                    return 1
                needed, wanted = None, min(wanted, len(rows) * longest_row(rollout)) // 2
            scorer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            if needed is not None:
                return max(1, int(0.85 * self._free() / needed * len(rows) * longest_row(rollout)))

    def _free(self):
        """Bytes that activations may take: what is free now, less gradients, and moments where there are none yet."""
        trained = [getattr(p, "_local_tensor", p) for p in self.policy.parameters() if p.requires_grad]
        moments = 0 if self.optimizer.state else (8 if isinstance(self.optimizer, torch.optim.AdamW) else 2)
        return torch.cuda.mem_get_info()[0] - sum(p.numel() * (p.element_size() + moments) for p in trained)


def recompute_activations(policy):
    policy.gradient_checkpointing_enable({"use_reentrant": False})


def within_memory(accelerator, scorer, rollout, budget, one_batch):
    """one_batch(rows, counts) for the micro-batches of one optimiser step; returns what it returned. `counts` is 1, or 0 where nothing may count.

    DDP exchanges gradients in the last backward only. FSDP works together in every forward and backward, so a process with fewer micro-batches
    goes through one of its own again, which counts for nothing.
    Out of memory: what there is of gradients is dropped, and the step begun again with half the budget, to the same result (I3).
    """
    if budget.tokens is None:
        budget.find(accelerator, scorer, rollout)
    asked, sharded = budget.tokens, isinstance(scorer, FSDPModule)
    while True:
        batches, results, last = micro_batches(rollout, budget.tokens), [], False
        turns = largest(len(batches)) if sharded else len(batches)
        try:
            for i in range(turns):
                rows, counts = (batches[i], 1.0) if i < len(batches) else (batches[-1][-1:], 0.0)
                last = i == turns - 1
                with contextlib.nullcontext() if last or sharded else accelerator.no_sync(scorer):
                    results.append(one_batch(rows, counts))
            if budget.tokens < asked:
                print(f"out of memory in the update: micro_batch_tokens went from {asked} to {budget.tokens}, the result is the same", flush=True)
            return results[: len(batches)]
        except torch.OutOfMemoryError as error:
            if max(map(len, batches)) == 1:
                raise RunError(f"out of memory on one sequence of {longest_row(rollout)} tokens: {REMEDIES}") from error
            if sharded or (last and accelerator.num_processes > 1):  # the other processes wait for this one
                raise RunError(f"out of memory at micro_batch_tokens={budget.tokens} on process {accelerator.process_index}: lower it") from error
        scorer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        budget.tokens = min(budget.tokens, max(map(len, batches)) * longest_row(rollout)) // 2

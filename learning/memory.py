"""Fitting the update into memory: micro-batches of a number of tokens that is found by trial, and halved where it does not fit after all."""

import bisect
import contextlib
import gc

import torch
from torch.distributed.fsdp import FSDPModule

from errors import RunError
from learning.parallel import max_over_processes

MOST_TOKENS = 6144  # that go through a model of FULL_SIZE at once where nobody says: more are a little faster, and take their memory


FULL_SIZE = (
    1.5e9  # parameters; a smaller model is done with so many tokens before the next kernels are launched
)


ENOUGH_TOKENS = 4096  # with fewer than these at once, recomputing activations is the better bargain


REMEDIES = (
    "try --gradient_checkpointing on, --optimizer adamw_8bit, --lora_r 32, or a lower max_completion_length"
)


def row_lengths(rollout):
    """Tokens of each row, prompt and completion together: a list of N."""
    return [prompt + completion for prompt, completion in zip(*rollout.sizes, strict=True)]


def micro_batches(rollout, token_budget):
    """Row indices, lists, in batches of at most `token_budget` tokens, padding in; one row goes whatever its length.

    Rows of like length are together, and batches about as large as each other: as many as the budget asks for, under the least budget that asks for no more.
    """
    lengths = row_lengths(rollout)
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])

    def cut(budget):
        batches = []
        for n in order:
            if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > budget:
                batches.append([])
            batches[-1].append(n)
        return batches

    fewest = len(cut(token_budget))
    return cut(bisect.bisect_left(range(token_budget), -fewest, key=lambda budget: -len(cut(budget))))


class TokenBudget:
    """How many tokens, padding in, go through the model at once in the update of `policy`; `tokens` is None until there is a rollout to try it on."""

    def __init__(self, config, policy):
        self.tokens, self.policy, self.moment_bytes = config.micro_batch_tokens, policy, config.moment_bytes
        self.recomputes, self.may_recompute = False, config.gradient_checkpointing == "auto"
        if config.gradient_checkpointing == "on":
            self.recompute()

    def recompute(self):
        """From now on activations are computed again in the backward (every dropout is 0, so no random state has to be kept)."""
        self.recomputes = True
        enable = (
            getattr(self.policy, "activation_checkpointing_enable", None)
            or self.policy.gradient_checkpointing_enable
        )  # its older name
        enable({"use_reentrant": False, "preserve_rng_state": False})

    @property
    def most(self):
        """Tokens at once that are worth their memory: more for a small model, and twice as many where activations are computed again."""
        on_card = next(self.policy.parameters()).device.type == "cuda"
        smaller = (
            FULL_SIZE / sum(p.numel() for p in self.policy.parameters()) if on_card else 1
        )  # a CPU launches nothing
        return int(MOST_TOKENS * min(max(smaller, 1), 10)) * (1 + self.recomputes)

    def state(self):
        """What a resumed run needs to cut its batches alike."""
        return [self.tokens, self.recomputes]

    def restore(self, state):
        if state:
            self.tokens = self.tokens or state[0]
            if state[1] and not self.recomputes:
                self.recompute()

    def find(self, accelerator, scorer, rollout):
        """What the free memory of the card holds, by forwards and backwards whose gradients are dropped; `auto` recomputes where that is little."""
        if accelerator.device.type != "cuda":
            self.tokens = self.most
            return
        enough = max_over_processes(min(ENOUGH_TOKENS, sum(row_lengths(rollout))))
        fits = self._try(accelerator, scorer, rollout)
        if self.may_recompute and not self.recomputes and fits < enough:
            self.recompute()
            fits = self._try(accelerator, scorer, rollout)
        if fits < 1:
            raise RunError(
                f"out of memory: nothing is left for the update beside weights, gradients and moments: {REMEDIES}"
            )
        self.tokens = min(self.most, fits)
        if accelerator.is_main_process:
            print(
                f"{self.tokens} tokens at once in the update{', with gradient checkpointing' if self.recomputes else ''}",
                flush=True,
            )

    def _try(self, accelerator, scorer, rollout):
        """Tokens that fit, the fewest of any process; 0 where one row does not. Activations grow with the tokens, copies of weights do not: two sizes tell."""
        lengths, fits, trained = (
            row_lengths(rollout),
            None,
            [p for p in self.policy.parameters() if p.requires_grad],
        )
        wanted = (
            ENOUGH_TOKENS if isinstance(scorer, FSDPModule) else self.most
        )  # layers are compiled for what they will see
        while fits is None:
            many = micro_batches(rollout, wanted)[0]
            few = many[: max(1, len(many) * 7 // 10)]
            for p in trained:
                p.grad = torch.zeros_like(p)  # they are there in the real update too
            try:
                (fewer, low), (more, high) = (
                    (len(rows) * lengths[rows[0]], self._peak(accelerator, scorer, rollout, rows))
                    for rows in (few, many)
                )
                torch.cuda.empty_cache()
                free = 0.85 * (torch.cuda.mem_get_info()[0] - self._moments(trained))
                each = (high - low) / (more - fewer) if more > fewer and high > low else high / more
                fits = max(0, int((free - (high - each * more)) / each))
            except torch.OutOfMemoryError:
                fits, wanted = 0 if len(many) == 1 or isinstance(scorer, FSDPModule) else None, wanted // 2
            scorer.zero_grad(set_to_none=True)
            free_memory()
        return -max_over_processes(-fits)

    def _peak(self, accelerator, scorer, rollout, rows):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with contextlib.nullcontext() if isinstance(scorer, FSDPModule) else accelerator.no_sync(scorer):
            scorer(rollout, rows)[0].sum().backward()
        return torch.cuda.max_memory_allocated() - before

    def _moments(self, trained):
        """Bytes of the optimiser's moments, which its first step will take."""
        local = [p.to_local() if hasattr(p, "to_local") else p for p in trained]
        return sum(p.numel() for p in local) * self.moment_bytes


def peak_gib():
    """GiB that tensors of this process took on the card at the most since this was last asked."""
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return peak


def free_memory():
    if torch.cuda.is_available():
        gc.collect()  # graphs that an error left in cycles
        torch.cuda.empty_cache()


def within_memory(accelerator, scorer, rollout, budget, one_batch):
    """one_batch(rows, counts) for the micro-batches of one optimiser step; returns what it returned. `counts` is 1, or 0 where nothing may count.

    DDP exchanges gradients in the last backward only. FSDP works together in every forward and backward, so a process with fewer micro-batches
    goes through one of its own again, which counts for nothing.
    Out of memory: what there is of gradients is dropped, and the step begun again with half the budget, to the same result (I3).
    """
    if budget.tokens is None:
        budget.find(accelerator, scorer, rollout)
    asked, sharded, alone = budget.tokens, isinstance(scorer, FSDPModule), accelerator.num_processes == 1
    who = "" if alone else f"process {accelerator.process_index}: "
    while True:
        batches, results, last = micro_batches(rollout, budget.tokens), [], False
        turns = max_over_processes(len(batches)) if sharded else len(batches)
        try:
            for i in range(turns):
                rows, counts = (batches[i], 1.0) if i < len(batches) else (batches[-1][-1:], 0.0)
                last = i == turns - 1
                with contextlib.nullcontext() if last or sharded else accelerator.no_sync(scorer):
                    results.append(one_batch(rows, counts))
            if budget.tokens < asked:
                print(
                    f"{who}out of memory in the update: from {asked} tokens at once to {budget.tokens}, the result is the same",
                    flush=True,
                )
            return results[: len(batches)]
        except torch.OutOfMemoryError as error:
            if sharded or (last and not alone):  # the other processes wait for this one
                raise RunError(
                    f"{who}out of memory with {budget.tokens} tokens at once: set --micro_batch_tokens lower, or {REMEDIES}"
                ) from error
            longest, rows = max(row_lengths(rollout)), max(map(len, batches))
            if rows == 1 and (budget.recomputes or not budget.may_recompute):
                raise RunError(
                    f"{who}out of memory on one sequence of {longest} tokens: {REMEDIES}"
                ) from error
        scorer.zero_grad(set_to_none=True)
        free_memory()
        if rows == 1:
            budget.recompute()
        else:
            budget.tokens = min(budget.tokens, rows * longest) // 2

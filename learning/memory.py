"""Fitting the update into memory: micro-batches of as many tokens as a trial shows to fit.

Where they do not fit after all, they are halved.
"""

import bisect
import contextlib
import gc

import torch
from torch.distributed.fsdp import FSDPModule

from errors import NoRoomError, is_out_of_memory
from learning.packing import is_packed
from learning.parallel import max_over_processes

# Tokens that a model of FULL_SIZE parameters gets at once on a card by default: more are a little faster and
# take their memory. A smaller one is through with them before the next kernels are launched: it gets more.
MOST_TOKENS, FULL_SIZE = 10240, 1.5e9
MOST_ON_CPU = 6144
ENOUGH_TOKENS = 4096  # where fewer fit, recomputing activations is the better bargain
REMEDIES = (
    "try --gradient_checkpointing on, --optimizer adamw_8bit, --lora_r 32, or a lower max_completion_length"
)


def row_lengths(rollout):
    """Tokens of each row, prompt and completion together: a list of N."""
    return [prompt + completion for prompt, completion in zip(*rollout.sizes, strict=True)]


def batch_tokens(rollout, rows, packed):
    """Tokens of some rows that go through the model: packed, the prompt of each group once; else padded."""
    prompts, completions = rollout.sizes
    if not packed:
        return len(rows) * max(prompts[n] + completions[n] for n in rows)
    firsts = {n // rollout.num_generations: n for n in rows}.values()
    return sum(completions[n] for n in rows) + sum(prompts[n] for n in firsts)


def micro_batches(rollout, token_budget, rows=None, packed=False):
    """Lists of row indices (by default of all rows), each of at most `token_budget` tokens as `batch_tokens`
    counts them; a longer row goes alone.

    Packed rows stay in their order: a group whose rows are in two batches pays for its prompt in both. Others
    lie with rows of like length. Among the cuts with the fewest batches, the most even one is taken.
    """
    rows = list(range(len(rollout.sizes[0]))) if rows is None else rows
    if not packed:
        lengths = row_lengths(rollout)
        rows = sorted(rows, key=lambda n: -lengths[n])
    (prompts, completions), G = rollout.sizes, rollout.num_generations

    def grown(batch, size, n):
        """Tokens of a batch of `size` tokens with one row more."""
        if not packed:
            return (len(batch) + 1) * lengths[batch[0] if batch else n]
        return size + completions[n] + (0 if batch and batch[-1] // G == n // G else prompts[n])

    def cut(budget):
        batches, size = [], budget
        for n in rows:
            size = grown(batches[-1], size, n) if batches else budget + 1
            if size > budget:
                batches.append([])
                size = grown([], 0, n)
            batches[-1].append(n)
        return batches

    fewest = len(cut(token_budget))
    least = bisect.bisect_left(range(token_budget), -fewest, key=lambda budget: -len(cut(budget)))
    return cut(least)  # the least budget that needs no more batches fills them evenly


class TokenBudget:
    """How many tokens, as `batch_tokens` counts them, go through the policy at once in the update.

    `tokens` is None until there is a rollout to try it on.
    """

    def __init__(self, config, policy):
        self.tokens = config.micro_batch_tokens
        self.policy = policy
        self.moment_bytes = config.moment_bytes
        self.recomputes = False
        self.bytes_to_come = lambda: 0  # of storage that longer rollouts will take
        self.may_recompute = config.gradient_checkpointing == "auto"
        if config.gradient_checkpointing == "on":
            self.recompute()

    def cut(self, rollout, rows=None):
        """The micro-batches of one optimiser step."""
        return micro_batches(rollout, self.tokens, rows, is_packed(self.policy))

    def count(self, rollout, rows):
        """Tokens of some rows that go through the model at once."""
        return batch_tokens(rollout, rows, is_packed(self.policy))

    def recompute(self):
        """From now on activations are computed again in the backward."""
        self.recomputes = True
        enable = getattr(self.policy, "activation_checkpointing_enable", None)
        enable = enable or self.policy.gradient_checkpointing_enable  # its older name
        enable({"use_reentrant": False, "preserve_rng_state": False})  # every dropout is 0: nothing is random

    @property
    def most(self):
        """Tokens at once that are worth their memory; twice as many where activations are recomputed."""
        most = MOST_ON_CPU
        if next(self.policy.parameters()).device.type == "cuda":
            times = FULL_SIZE / sum(p.numel() for p in self.policy.parameters())
            most = int(MOST_TOKENS * min(max(times, 1), 10))
        return most * (1 + self.recomputes)

    def state(self):
        """What a resumed run needs to cut its batches alike."""
        return [self.tokens, self.recomputes]

    def restore(self, state):
        if state:
            tokens, recomputes = state
            self.tokens = self.tokens or tokens
            if recomputes and not self.recomputes:
                self.recompute()

    def find(self, accelerator, scorer, rollout):
        """Set `tokens` to what the free memory of the card holds; `auto` recomputes where that is little."""
        if accelerator.device.type != "cuda":
            self.tokens = self.most
            return
        enough = max_over_processes(min(ENOUGH_TOKENS, self.count(rollout, range(len(rollout.ids)))))
        fits = self._tokens_that_fit(accelerator, scorer, rollout)
        if self.may_recompute and not self.recomputes and fits < enough:
            self.recompute()
            fits = self._tokens_that_fit(accelerator, scorer, rollout)
        if fits < 1:
            problem = "nothing is left for the update beside weights, gradients and moments"
            raise NoRoomError(f"out of memory: {problem}: {REMEDIES}")
        self.tokens = min(self.most, fits)
        if accelerator.is_main_process:
            how = ", with gradient checkpointing" if self.recomputes else ""
            print(f"{self.tokens} tokens at once in the update{how}", flush=True)

    def lower(self, rollout, batches):
        """Halve the tokens after these micro-batches did not fit; recompute where rows go alone already.

        Returns False where neither is left to do.
        """
        if max(map(len, batches), default=1) > 1:
            self.tokens = min(self.tokens, max(self.count(rollout, rows) for rows in batches)) // 2
        elif self.may_recompute and not self.recomputes:
            self.recompute()
        else:
            return False
        return True

    def _tokens_that_fit(self, accelerator, scorer, rollout):
        """The fewest of any process, by a trial whose gradients are dropped; 0 where not one row fits."""
        trained = [p for p in self.policy.parameters() if p.requires_grad]
        sharded = isinstance(scorer, FSDPModule)
        # as in the run: layers are compiled for what they see
        wanted = ENOUGH_TOKENS if sharded else self.most
        fits = None
        while fits is None:
            rows = micro_batches(rollout, wanted, packed=is_packed(self.policy))[0]
            for p in trained:
                p.grad = torch.zeros_like(p)  # they take memory in the real update too
            try:
                fits = self._extrapolate(accelerator, scorer, rollout, rows, trained)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                wanted //= 2
                if len(rows) == 1 or sharded:
                    fits = 0
            scorer.zero_grad(set_to_none=True)
            free_memory()
        return -max_over_processes(-fits)

    def _extrapolate(self, accelerator, scorer, rollout, rows, trained):
        """Tokens for which memory is free, from the peaks of these rows and of seven tenths of them.

        Activations grow with the tokens, copies of weights do not: two sizes tell them apart.
        """
        fewer_rows = rows[: max(1, len(rows) * 7 // 10)]
        low = self._peak(accelerator, scorer, rollout, fewer_rows)
        high = self._peak(accelerator, scorer, rollout, rows)
        torch.cuda.empty_cache()
        left = torch.cuda.mem_get_info()[0] - self._moments(trained)
        # half of it at most is for longer rollouts: a limit that nothing reaches must not end the run
        free = 0.85 * (left - min(self.bytes_to_come(), left / 2))
        fewer, more = (self.count(rollout, some) for some in (fewer_rows, rows))
        each = (high - low) / (more - fewer) if more > fewer and high > low else high / more
        fixed = high - each * more
        return max(0, int((free - fixed) / each))

    def _peak(self, accelerator, scorer, rollout, rows):
        """Bytes that a forward and backward of these rows take at their peak."""
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with _no_exchange(accelerator, scorer):
            scorer(rollout, rows)[0].sum().backward()
        return torch.cuda.max_memory_allocated() - before

    def _moments(self, trained):
        """Bytes of the optimiser's moments on this process, which its first step will take."""
        local = [p.to_local() if hasattr(p, "to_local") else p for p in trained]
        return sum(p.numel() for p in local) * self.moment_bytes


def _no_exchange(accelerator, scorer):
    """A backward in which DDP exchanges no gradients; FSDP exchanges them always."""
    return contextlib.nullcontext() if isinstance(scorer, FSDPModule) else accelerator.no_sync(scorer)


def peak_gib():
    """GiB that tensors of this process took on the card at their peak since this was last called."""
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return peak


def free_memory():
    if torch.cuda.is_available():
        gc.collect()  # an error can leave graphs in reference cycles
        torch.cuda.empty_cache()


def checkpoint_bytes(policy, reference, moment_bytes):
    """Bytes of a checkpoint: float32 weights, adapters merged in; moments of what is trained; reference."""
    weights = sum(p.numel() for name, p in policy.named_parameters() if ".lora_" not in name)
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    kept = () if reference is None else reference.parameters()
    return 4 * weights + moment_bytes * trained + sum(p.numel() * p.element_size() for p in kept)


def within_memory(accelerator, scorer, rollout, budget, one_batch, rows=None):
    """one_batch(rows, counts) for the micro-batches of one optimiser step; returns a list of its results.

    `rows`: those that count, all by default, or none where another process has some. `counts` is 1, or 0 for
    a micro-batch that is only there to keep step with other processes. Out of memory:
    the gradients so far are dropped and the step begins again with half the budget, to the same result.
    """
    if budget.tokens is None:
        budget.find(accelerator, scorer, rollout)
    asked, alone = budget.tokens, accelerator.num_processes == 1
    who = "" if alone else f"process {accelerator.process_index}: "
    while True:
        batches, results = budget.cut(rollout, rows), []
        try:
            _run_micro_batches(accelerator, scorer, batches, one_batch, results)
            break
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            in_last = len(results) >= len(batches) - 1
            # the other processes wait for this one
            if isinstance(scorer, FSDPModule) or (in_last and not alone):
                problem = f"{who}out of memory with {budget.tokens} tokens at once"
                raise NoRoomError(f"{problem}: set --micro_batch_tokens lower, or {REMEDIES}") from error
            if not budget.lower(rollout, batches):
                problem = f"{who}out of memory on one sequence of {max(row_lengths(rollout))} tokens"
                raise NoRoomError(f"{problem}: {REMEDIES}") from error
        scorer.zero_grad(set_to_none=True)
        free_memory()
    if budget.tokens < asked:
        change = f"from {asked} tokens at once to {budget.tokens}, the result is the same"
        print(f"{who}out of memory in the update: {change}", flush=True)
    return results


def _run_micro_batches(accelerator, scorer, batches, one_batch, results):
    """Append each micro-batch's result to `results`.

    DDP exchanges gradients in the last backward only. FSDP's processes work together in every forward and
    backward, so one with fewer micro-batches than another repeats a row, which counts for nothing. So does a
    process that has none.
    """
    turns = max_over_processes(len(batches)) if isinstance(scorer, FSDPModule) else max(1, len(batches))
    for turn in range(turns):
        last = turn == turns - 1
        with contextlib.nullcontext() if last else _no_exchange(accelerator, scorer):
            if turn < len(batches):
                results.append(one_batch(batches[turn], 1.0))
            else:
                idle = one_batch(batches[-1][-1:] if batches else [0], 0.0)
                results += [] if results else [idle]

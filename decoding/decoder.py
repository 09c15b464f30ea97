"""The group decoder: prompts in; sampled ids, log-probs and mixing weights out, for any causal model.

Axes: B prompts, G generations a prompt, N = B*G sequences in group-major order, T completion tokens. A decode
is a prefill of the prompts and decode steps of n rows; a row whose sequence has ended is given to a prompt
that waits, or left out. This file says which sequence is in which row; engine.py runs the steps.
"""

import warnings
from collections import deque
from typing import NamedTuple

import torch

from decoding.any_model import check_finite
from decoding.engine import CHUNK, Engine
from decoding.rollout import PLAIN_GRPO, Completion, Rollout, rollout_uniforms, to_device, widened
from decoding.tokens import token_tables, unwritten_ids
from errors import Interrupted, SettingError


class GroupDecoder:
    """Samples groups of completions from `model`, whose weights may change in place between calls.

    Callers keep one for the life of a process. `fast` False takes the plain path; `compiled` False leaves
    torch.compile out: set-up is shorter, steps are longer.
    """

    def __init__(self, model, tokenizer, think_end=None, interaction=PLAIN_GRPO, fast=True, compiled=True):
        self.model, self.tokenizer, self.interaction = model, tokenizer, interaction
        self.tables = token_tables(tokenizer, model, think_end)
        self.unwritten = unwritten_ids(tokenizer, think_end)
        self.engine = Engine(model, self.tables, interaction, fast, compiled)
        self.interrupted = None  # a function that says whether to stop in the middle, asked between steps

    @property
    def setup_seconds(self):
        """Seconds that capturing steps has taken so far, and compiling them."""
        return self.engine.setup_seconds

    def interact_as(self, interaction):
        """From the next rollout on, paths interact so; steps that were captured for another are kept."""
        self.interaction = self.engine.interaction = interaction

    def hear_strangers(self, strangers):
        """Whom paths hear in the place of their peers from now on, in the control of this name."""
        self.engine.hear_strangers(strangers)

    def choose_path(self):
        """Choose the path, fast or plain, and test it: refuses a model that neither serves.

        The first decode does it too; here it is done before anything else is.
        """
        self.engine.choose_backbone()

    @torch.no_grad()
    def rollout(self, prompts, sampling, uniforms=None, interact=True, keys=None):
        """Sample G completions for each of B prompts (lists of ids).

        uniforms (N, max_new_tokens), or None where sampling is greedy. keys (N,), of `row_keys`: what the
        controls `noise` and `strangers` draw from. The distribution is the softmax over the tokenizer's real
        ids; of the model's generation_config only the EOS ids are used.
        """
        G, lambda_blend = sampling.num_generations, self.interaction.lambda_blend
        interacts = interact and lambda_blend > 0 and G > 1
        control = self.interaction.control if interacts else "none"
        assert control not in ("noise", "strangers") or keys is not None, "this control needs the rows' keys"
        assert control != "strangers" or self.engine.strangers is not None, "hear_strangers comes first"
        draws = uniforms, keys
        decode = Decode(self.engine, prompts, sampling, draws, interacts, batch_rows=len(prompts) * G)
        out = decode.run(self.interrupted)
        used = max(1, int(out.t.max()))  # device sync
        recorded = (x[:, :used].contiguous() for x in (out.scale, out.heard_ids, out.heard_probs))
        return Rollout(
            prompts=prompts,
            ids=out.ids[:, :used].contiguous(),
            mask=torch.arange(used, device=self.engine.device) < out.t[:, None],
            logp=out.logp[:, :used].contiguous(),
            ended=out.ended,
            thinking=out.thinking[:, :used].contiguous(),
            num_generations=G,
            temperature=sampling.temperature or 1.0,
            mix=self.engine.mixing_weights(len(prompts), used, G) if interacts else None,
            lambda_blend=lambda_blend if interacts else 0.0,
            input_change=out.input_change[:, :used].contiguous() if interacts else None,
            control=control,
            **self.heard_instead(control, keys, *recorded),
        )

    def heard_instead(self, control, keys, scale, ids, probs):
        """What a Rollout has of a control that records its scale (N, T); ids and probs (N, T, K) of `own`."""
        if control == "own":
            return {"scale": scale, "heard_ids": ids, "heard_probs": probs}
        if control not in ("noise", "strangers"):
            return {}
        keys = to_device(keys, self.engine.device)
        made = {"scale": scale, "keys": keys}
        if control == "strangers":
            positions = torch.arange(scale.shape[1], device=keys.device)
            made["heard_ids"] = self.engine.strangers.tokens(keys[:, None], positions)
        return made

    def check_logp(self, logp, must_be_finite):
        """Refuse, or else warn of, log-probs of completions that are not finite: what was drawn there is
        nothing that the model says. Damaged weights and an overflow of fp16 may show in some prompts only.
        """
        try:
            check_finite(logp, self.model.dtype, self.model.config.name_or_path)
        except SettingError as error:
            if must_be_finite:
                raise
            warnings.warn(f"{error}; some answers are not what the model says", stacklevel=2)

    def completions(self, rollout):
        """The N Completions of a rollout."""
        ended = rollout.ended.tolist()
        return [self._completion(*row) for row in zip(rollout.completion_ids(), ended, strict=True)]

    def text(self, ids, ended):
        """The text of a completion, a list of ids up to its end: no EOS, no clean-up, of special tokens only
        tags.
        """
        written = [i for i in ids[: len(ids) - int(ended)] if i not in self.unwritten]
        return self.tokenizer.decode(written, clean_up_tokenization_spaces=False)

    def _completion(self, ids, ended):
        return Completion(ids, self.text(ids, ended), ended)

    @torch.no_grad()
    def complete(
        self, prompts, sampling, seed=0, batch_rows=None, indices=None, keep=None, must_be_finite=False
    ):
        """Decode prompts (lists of ids) as single paths; returns for each a list of G Completions.

        `batch_rows` rows are decoded at once. A completion depends on its prompt's index and `seed`, not on
        what is decoded beside it; give `indices` where these prompts are some of more. `keep(index,
        completions)` is called for each prompt, in the order in which they end. must_be_finite: see
        `check_logp`.
        """
        if not prompts:
            return []
        G, T = sampling.num_generations, sampling.max_new_tokens
        indices, uniforms = list(range(len(prompts)) if indices is None else indices), None
        if not sampling.greedy:
            uniforms = rollout_uniforms(seed, 0, 0, (max(indices) + 1) * G, T)
            uniforms = uniforms.view(-1, G, T)[indices].flatten(0, 1)
        completions = [None] * len(prompts)

        def read(whole, sequences):
            rows = to_device([i * G + j for i in whole for j in range(G)], self.engine.device)
            of_rows = sequences.logp[rows]
            after = torch.arange(of_rows.shape[1], device=rows.device) >= sequences.t[rows, None]
            self.check_logp(of_rows.masked_fill(after, 0), must_be_finite)
            columns = (sequences.ids, sequences.t, sequences.ended)
            ids, lengths, ended = (column[rows].tolist() for column in columns)  # device sync
            ids = [row[:length] for row, length in zip(ids, lengths, strict=True)]
            made = [self._completion(*row) for row in zip(ids, ended, strict=True)]
            for n, i in enumerate(whole):
                completions[i] = made[n * G : (n + 1) * G]
                if keep is not None:
                    keep(indices[i], completions[i])

        draws = uniforms, None
        decode = Decode(self.engine, prompts, sampling, draws, False, batch_rows, read if keep else None)
        sequences = decode.run(self.interrupted)
        if keep is None:
            read(range(len(prompts)), sequences)
        return completions


class Assignment(NamedTuple):
    """What a row decodes: which sequence, from which prompt slot, as which path of its group, since when."""

    sequence: int
    slot: int
    path: int
    begun: int  # the number of steps that were taken before


class Sequences(NamedTuple):
    """Columns of Rows for sequences that have left their rows, in the order of the prompts.

    They are as wide as the longest needs, up to a chunk.
    """

    ids: torch.Tensor  # (N, tokens)
    logp: torch.Tensor  # (N, tokens)
    thinking: torch.Tensor  # (N, tokens)
    input_change: torch.Tensor  # (N, tokens)
    scale: torch.Tensor  # (N, tokens)
    heard_ids: torch.Tensor  # (N, tokens, K)
    heard_probs: torch.Tensor  # (N, tokens, K)
    ended: torch.Tensor  # (N,) by EOS
    t: torch.Tensor  # (N,) tokens sampled


class Decode:
    """One decode of some prompts: who sits in which row, as far as the host knows.

    draws: uniforms (N, T) and keys (N,), or None for either. `on_whole(prompts, sequences)` is told the
    indices of prompts whose sequences have all been collected.
    """

    def __init__(self, engine, prompts, sampling, draws, interacts, batch_rows, on_whole=None):
        G, T = sampling.num_generations, sampling.max_new_tokens
        assert T >= 1, "a completion must have room for a token"
        assert all(prompts), "a prompt must have a token"
        assert sampling.greedy or draws[0] is not None, "draws are needed at a temperature above 0"
        self.engine, self.prompts, self.draws, self.on_whole = engine, prompts, draws, on_whole
        self.G, self.limit = G, T
        self.batch, self.slots = engine.prepare(prompts, sampling, interacts, batch_rows)
        order = range(len(prompts))  # the mixing weights of group b are those of slot b
        if not interacts:
            order = sorted(order, key=lambda i: -len(prompts[i]))
        self.waiting = deque(order)
        self.uncollected = [G] * len(prompts)  # sequences of each prompt
        self.assigned = []  # of each row: its Assignment, or None
        self.finished = []  # of each row: whether it is finished or free, by the last answer of the device
        self.answers = deque()  # functions that wait for what the device was asked
        self.step, self.end = 0, 0  # by step `end` every row is finished
        rows = engine.rows
        columns = (rows.ids, rows.logp, rows.thinking, rows.input_change, rows.scale)
        columns += (rows.heard_ids, rows.heard_probs)
        self.in_rows = Sequences(*(column[:, :T] for column in columns), rows.ended, rows.t)
        total = len(prompts) * G
        first = (x[:, :CHUNK] if x.dim() > 1 else x for x in self.in_rows)
        self.sequences = Sequences(*(x.new_zeros(total, *x.shape[1:]) for x in first))

    def run(self, interrupted=None):
        """Decode to the end; returns the Sequences."""
        while self.waiting or not all(self.finished):
            if interrupted is not None and interrupted():
                raise Interrupted
            self.reassign_rows()
            self.take_steps()
        self.collect()
        out, device = self.sequences, self.engine.device
        # What lies in a row after the end of its sequence is of an earlier one.
        after = torch.arange(out.ids.shape[1], device=device) >= out.t[:, None]
        out.ids.masked_fill_(after, self.engine.tables.pad_id)
        for column in (out.logp, out.thinking, out.input_change, out.scale, out.heard_ids, out.heard_probs):
            column.masked_fill_(after if column.dim() == 2 else after[..., None], 0)
        return out

    def reassign_rows(self):
        """Give free rows to prompts that wait; where none waits, leave finished rows out."""
        n, free = len(self.finished), self.finished.count(True)
        if not self.waiting:
            if (fewer := self.engine.step_rows(n - free)) < n:
                self.shrink(fewer)
        elif free == n or (self.engine.backbone.refills and free >= max(self.G, n // 8)):
            self.collect()
            self.admit()

    def collect(self):
        """Copy finished sequences out of their rows, which are then free."""
        rows = [r for r, a in enumerate(self.assigned) if a is not None and self.finished[r]]
        sequences = [self.assigned[r].sequence for r in rows]
        source, target = (to_device(x, self.engine.device) for x in (rows, sequences))
        width = self.widen(max((self.step - self.assigned[row].begun for row in rows), default=0))
        for column, in_rows in zip(self.sequences, self.in_rows, strict=True):
            column[target] = in_rows[source, :width] if column.dim() > 1 else in_rows[source]
        for row, sequence in zip(rows, sequences, strict=True):
            self.assigned[row] = None
            self.uncollected[sequence // self.G] -= 1
        whole = sorted({s // self.G for s in sequences if self.uncollected[s // self.G] == 0})
        if whole and self.on_whole is not None:
            self.on_whole(whole, self.sequences)

    def widen(self, longest):
        """Make room for sequences of `longest` tokens; returns how many there is room for."""
        width = self.sequences.ids.shape[1]
        more = min(self.limit, -(-longest // CHUNK) * CHUNK) - width
        if more > 0:
            wider = (widened(x, width + more, 0) if x.dim() > 1 else x for x in self.sequences)
            self.sequences, width = Sequences(*wider), width + more
        return width

    def admit(self):
        """Begin prompts that wait, as many as there are free rows and prompt slots for."""
        if all(self.finished):
            n = self.engine.step_rows(min(self.batch, len(self.waiting) * self.G))
            self.assigned, self.finished = [None] * n, [True] * n
        busy = {a.slot for a, finished in zip(self.assigned, self.finished, strict=True) if not finished}
        slots = [slot for slot in range(self.slots) if slot not in busy]
        free = [row for row, finished in enumerate(self.finished) if finished]
        count = min(len(self.waiting), len(slots), len(free) // self.G)
        if count == 0:
            return
        chosen = [self.waiting.popleft() for _ in range(count)]
        paths = [(i, slot, path) for i, slot in zip(chosen, slots, strict=False) for path in range(self.G)]
        new = {}
        for row, (i, slot, path) in zip(free, paths, strict=False):
            new[row] = self.assigned[row] = Assignment(i * self.G + path, slot, path, self.step)
            self.finished[row] = False
        sequences = [assignment.sequence for assignment in new.values()]
        draws = (None if of_rows is None else of_rows[sequences] for of_rows in self.draws)
        self.engine.admit([self.prompts[i] for i in chosen], new, *draws)
        self.engine.find_paths(self.assigned)
        self.answers.clear()  # they are about the sequences that these rows had
        self.end = self.step + self.limit

    def shrink(self, n):
        """Go on with n rows, those that are not finished first."""
        self.collect()
        self.answers.clear()
        kept = sorted(range(len(self.finished)), key=lambda row: self.finished[row])[:n]
        self.assigned = [self.assigned[row] for row in kept]
        self.finished = [self.finished[row] for row in kept]
        self.engine.select_rows(kept, min(self.step, self.limit))
        self.engine.find_paths(self.assigned)

    def take_steps(self):
        """Take a few steps and ask the device which rows are finished.

        On CUDA the answer is read one round late, so that the device never waits for the host.
        """
        on_cuda, n = self.engine.on_cuda, len(self.finished)
        going = (a.begun for a, finished in zip(self.assigned, self.finished, strict=True) if not finished)
        begun = min(going, default=self.step)
        for _ in range(min(2 if on_cuda else 1, self.end - self.step)):
            self.step += 1
            # rows of which the device has not yet said that they are finished may seem longer than the limit
            self.engine.grow(min(self.step - begun, self.limit))
            self.engine.step(n, last=self.step == self.end)
        self.answers.append(self.engine.ask_finished(n))
        unread = 1 if on_cuda and self.step < self.end else 0
        while len(self.answers) > unread:
            self.finished = self.answers.popleft()()

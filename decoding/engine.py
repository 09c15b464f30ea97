"""The engine of the decoder: storage of rows, prompt slots and mixing weights, and one decode step.

B groups of G paths, n of R rows being decoded, T completion tokens, E embedding width. Nothing in a step
waits for the device. On CUDA a step is captured once for each kind and number of rows, and replayed. Storage
stays between calls and grows when a call needs more; that of keys, values and mixing weights grows between
steps, with what is said.
"""

import functools
import os
import time
from types import SimpleNamespace
from typing import NamedTuple

import torch

from decoding.any_model import PlainBackbone, UncachedBackbone, far_apart
from decoding.controls import LIKELIEST, Strangers, directions, likeliest, mean_embedding
from decoding.fast_model import CHUNK, FastBackbone, kernels, why_not
from decoding.rollout import Sampling, to_device
from decoding.self_test import (
    NEW,
    PROMPTS,
    does_what_its_kernel_does,
    one_line_of,
    probe_rows,
    uncached_logits,
)
from decoding.step import Rows, StepKind, by_group, control_step, mix_step, real_scores, sample_step
from decoding.tokens import LOGIT_BLOCK
from errors import SettingError
from m3po_module import cross_path_weights


class Sizes(NamedTuple):
    """How much storage there is, or is needed."""

    rows: int = 0
    slots: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    groups: int = 0
    paths: int = 0
    mixed_tokens: int = 0  # latest tokens whose mixing weights are there to be written
    likeliest: int = 0  # tokens of its own that a row hears, in the control `own`

    def holds(self, needed):
        return all(have >= need for have, need in zip(self, needed, strict=True))

    def joined(self, needed):
        """Sizes that hold both; `needed` where that takes over twice the keys and values of either."""
        both = Sizes(*map(max, self, needed))
        completions = max(self.rows * self.new_tokens, needed.rows * needed.new_tokens)
        prompts = max(self.slots * self.prompt_tokens, needed.slots * needed.prompt_tokens)
        if both.rows * both.new_tokens > 2 * completions or both.slots * both.prompt_tokens > 2 * prompts:
            return needed
        return both


class Engine:
    """Runs decode steps of `model` over rows that the caller fills; `prepare` comes first."""

    def __init__(self, model, tables, interaction, fast, compiled):
        self.model, self.tables, self.interaction = model, tables, interaction
        self.device, self.on_cuda = model.device, model.device.type == "cuda"
        self.fast, self.compiled = fast, compiled
        self.unreal = (~tables.real).nonzero().flatten()  # ids that no token has
        self.strangers = None  # whom paths hear in the place of their peers, in the control of this name
        self.backbone, self.reserved, self.graphs, self.setup_seconds = None, Sizes(), {}, 0.0
        self.has_kernel_of = {}  # by Interaction

    def prepare(self, prompts, sampling, interacts, max_rows=None):
        """Make model path, storage and captured steps ready, as far as they are not; then every row is free.

        Returns how many rows to decode at once, and how many prompt slots there are.
        """
        started = time.perf_counter()
        self.choose_backbone()
        self.backbone.reclaim_weights()
        G, limit, longest = sampling.num_generations, sampling.max_new_tokens, max(map(len, prompts))
        total = len(prompts) * G
        batch = min(max_rows or self._default_rows(longest + limit), total) // G * G or G
        # Use every captured row while prompts wait.
        batch = min(self.step_rows(batch), total) // G * G
        slots = batch // G * (1 if G == 1 or batch == total else 2)
        # Captured steps look up groups only where paths interact.
        self.grouped = interacts or not self.captures
        groups, paths = (slots, G) if self.grouped else (1, 1)
        prompt_tokens, mixed_tokens = -(-longest // 64) * 64, min(limit, CHUNK) if interacts else 0
        own = LIKELIEST if interacts and self.interaction.control == "own" else 0
        needed = Sizes(self.step_rows(batch), slots, prompt_tokens, limit, groups, paths, mixed_tokens, own)
        if not self.reserved.holds(needed):
            self._reserve(self.reserved.joined(needed))
        self._reset(slots, sampling)
        interaction = self.interaction if interacts else None
        self.kind = StepKind(sampling.greedy, sampling.top_k, sampling.top_p, interacts, interaction)
        if self.captures and self.kind not in self.graphs:
            self._capture(started)
        return batch, slots

    def hear_strangers(self, strangers):
        """Set the Strangers of the control of this name; captured steps go on where they fit into the old."""
        new, old = Strangers(*(x.to(self.device) for x in (strangers.ids, strangers.lengths))), self.strangers
        if old is not None and old.ids.shape == new.ids.shape:
            old.ids.copy_(new.ids)
            old.lengths.copy_(new.lengths)
        else:
            self.strangers = new
            self.graphs = {kind: graphs for kind, graphs in self.graphs.items() if not kind.interacts}

    def choose_backbone(self):
        """Take the fastest path that gives what an uncached forward of the model gives; once is enough."""
        if self.backbone is not None:
            return
        reason = why_not(self.model) if self.fast else ""
        if reason is None:
            self._take(FastBackbone(self.model, self.compiled and self.on_cuda))
            reason = "its forward is not what its config says" if self._differs() else None
        if reason is not None:
            self._take(PlainBackbone(self.model))
            if wrong := self._wrong_with_cache():
                self._take(UncachedBackbone(self.model))
                reason = f"without a cache: {wrong}"
                with one_line_of(self.model.name_or_path, "cannot be decoded step by step"):
                    if self._differs():
                        what = "gives other logits when it is decoded step by step: take another family"
                        raise SettingError("model", self.model.name_or_path, what)
        if reason:
            say(f"decoder: the plain path, which is slower ({reason})")

    def _take(self, backbone):
        self.backbone, self.captures = backbone, self.on_cuda and backbone.refills
        self.compiled = self.compiled and self.captures

    def _wrong_with_cache(self):
        """What is wrong with the model's own cache, or None."""
        try:
            with one_line_of("", "its own cache fails"):
                before = loose_tensors(self.model)
                differs = self._differs()
                # in bf16 the states of other rows may change logits by no more than rounding does
                if any(tensor is not before.get(key) for key, tensor in loose_tensors(self.model).items()):
                    return "it keeps states outside its own cache"
                return "with its own cache it gives other logits" if differs else None
        except SettingError as error:
            return str(error).removeprefix("model='': ").partition(": take")[0]

    @torch.no_grad()
    def _differs(self):
        """Whether a prefill, and steps between which rows leave, differ from uncached forwards on ids."""
        G, sequences = 8 if self.on_cuda else 2, probe_rows(self.model)
        prompts = [row[:length] for row, length in zip(sequences, PROMPTS, strict=True)]
        first, second = (row[length:] for row, length in zip(sequences, PROMPTS, strict=True))
        # The first and the last row go on as the probe rows do; all others go on otherwise.
        written = [first, *[second] * (G - 1), *[first] * (G - 1), second]
        assigned = [SimpleNamespace(slot=slot, path=path) for slot in range(2) for path in range(G)]
        self.grouped, watched = True, [0, 2 * G - 1]
        self._reserve(Sizes(2 * G, 2, 64, NEW, 2, G))
        self._reset(2, Sampling(NEW, G))
        self.admit(prompts, dict(enumerate(assigned)), None)
        self.find_paths(assigned)
        made = [self.rows.logits[watched].clone()]
        for t in range(NEW):
            rows = self.rows.first(len(assigned))
            rows.t.add_(1)
            tokens = to_device([ids[t] for ids in written], self.device)
            self.backbone.grow(t + 1)
            self.backbone.decode(self.backbone.embed(tokens), rows, self.row_of_path)
            made.append(rows.logits[watched].clone())
            if t == 1:
                kept = [watched[1], *range(1, G - 1), watched[0]]
                self.select_rows(kept, longest=2)
                written, assigned = ([column[row] for row in kept] for column in (written, assigned))
                self.find_paths(assigned)
                watched = [G - 1, 0]
        self.reserved = Sizes()  # the first call reserves what it needs
        theirs = uncached_logits(self.model)
        wanted = torch.stack([x[length - 1 :] for x, length in zip(theirs, PROMPTS, strict=True)])
        made = torch.stack(made, 1)[..., : wanted.shape[-1]]
        # weights that broke since they were loaded are no fault of the path
        return bool(wanted.isfinite().all()) and far_apart(made, wanted)

    def _default_rows(self, tokens):
        """How many rows to decode at once by default; on CUDA those that half of the free memory holds.

        Those that there is storage for are kept, where it can grow to that many tokens of each.
        """
        if not self.captures:
            return 256 if self.on_cuda else 32
        free, _ = torch.cuda.mem_get_info(self.device)
        each, there = self.backbone.row_bytes(tokens), self.reserved.rows
        # what torch keeps for itself is free for it, and so is the storage that would be let go
        usable = free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        usable += self.backbone.storage_bytes() if there else 0
        rows = max(there, int(free / 2 / each)) if there * each <= usable else int(usable / 2 / each)
        return max(8, min(512, rows))

    def step_rows(self, n):
        """How many rows a step has that decodes n: where steps are captured, one of a few numbers."""
        return sizes_up_to(n)[-1] if self.captures else n

    def _reserve(self, sizes):
        """Let the old storage go, then take the new."""
        self.reserved, self.graphs = Sizes(), {}
        self.rows = self.row_of_path = self.mix = self.all_row_of_path = self.all_mix = None
        R, B, G, T = sizes.rows, sizes.groups, sizes.paths, sizes.new_tokens
        of_tokens = {"ids": torch.long, "thinking": torch.bool}
        of_tokens |= dict.fromkeys(("logp", "input_change", "scale", "uniforms"), torch.float32)
        of_rows = {"ended": torch.bool, "finished": torch.bool}
        of_rows |= dict.fromkeys(("t", "state", "prompt_len", "slot", "path", "key", "cache_row"), torch.long)
        zeros = functools.partial(torch.zeros, device=self.device)
        heard = (R, T + 1, sizes.likeliest)
        self.rows = Rows(
            **{name: zeros(R, T + 1, dtype=dtype) for name, dtype in of_tokens.items()},
            **{name: zeros(R, dtype=dtype) for name, dtype in of_rows.items()},
            heard_ids=zeros(*heard, dtype=torch.long),
            heard_probs=zeros(*heard, dtype=torch.float32),
            logits=zeros(R, self.backbone.width, dtype=self.backbone.logit_dtype),
        )
        self.all_row_of_path = zeros(B, G, dtype=torch.long)
        self.all_mix = zeros(B, sizes.mixed_tokens, G, G, dtype=torch.float32)
        self.temperature = torch.ones((), device=self.device)
        self.limit = torch.zeros((), dtype=torch.long, device=self.device)
        self.backbone.reserve(R, sizes.slots, sizes.prompt_tokens, T)
        self.reserved = sizes

    def _reset(self, slots, sampling):
        """Free every row. A step reads free rows too, so nothing of an earlier call may be left in them."""
        self.row_of_path, self.mix = self.all_row_of_path, self.all_mix
        if not self.captures:
            paths = sampling.num_generations
            self.row_of_path = self.row_of_path[:slots, :paths]
            self.mix = self.mix[:slots, :, :paths, :paths]
        self.backbone.forget(sampling.max_new_tokens)
        rows = self.rows
        torch.arange(len(rows.cache_row), out=rows.cache_row)
        self.earlier_mix = []
        recorded = (rows.input_change, rows.scale, rows.heard_ids, rows.heard_probs)  # not of a last token
        for tensor in (rows.t, rows.slot, rows.path, *recorded, self.mix):
            tensor.zero_()
        rows.finished.fill_(True)
        self.temperature.fill_(sampling.temperature or 1.0)
        self.limit.fill_(sampling.max_new_tokens)

    def _capture(self, started):
        """CUDA graphs of the step for each number of rows; every row is free, so it changes only scratch."""
        self.row_of_path.fill_(0)
        sizes = sizes_up_to(self.reserved.rows)
        graphs, pool, stream = {}, None, torch.cuda.Stream(self.device)
        for n in reversed(sizes):
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                self._run(n)  # compiles, where it must
            torch.cuda.current_stream(self.device).wait_stream(stream)
            graphs[n] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[n], pool=pool, stream=stream):
                self._run(n)
            pool = pool or graphs[n].pool()
        self.graphs[self.kind] = graphs
        self.rows.t.zero_()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        self.setup_seconds += seconds
        how = "compiled and captured" if self.compiled else "captured"
        say(f"decoder: {how} for {len(sizes)} numbers of rows up to {sizes[-1]}, {seconds:.1f} s")

    def admit(self, prompts, assignments, uniforms, keys=None):
        """Begin sequences: {row: Assignment}, whole groups in the order of `prompts`; uniforms and keys, or
        None.
        """
        rows, into = self.rows, to_device(list(assignments), self.device)
        sequences = list(assignments.values())
        G = len(sequences) // len(prompts)
        for tensor in (rows.t, rows.state, rows.ended, rows.finished):
            tensor[into] = 0
        lengths = to_device([len(prompt) for prompt in prompts], self.device)
        rows.prompt_len[into] = lengths.repeat_interleave(G)
        rows.slot[into] = to_device([a.slot for a in sequences], self.device)
        rows.path[into] = to_device([a.path for a in sequences], self.device)
        if uniforms is not None:
            rows.uniforms[into, : uniforms.shape[1]] = to_device(uniforms.float(), self.device)
        if keys is not None:
            rows.key[into] = to_device(keys, self.device)
        slots = [a.slot for a in sequences[::G]]
        self.backbone.prefill(prompts, slots, rows.logits, into, G)

    def select_rows(self, kept, longest):
        """Rows `kept` become the first ones and the only ones in use; none has more than `longest` tokens."""
        order = to_device(kept, self.device)
        for tensor in self.rows:
            tensor[: len(kept)] = tensor[order]
        self.backbone.select_rows(order, longest)

    def find_paths(self, assigned):
        """Note in which row each path of each group is; a path that has none gets the number of rows.

        assigned[row] is an Assignment or None.
        """
        if not self.grouped:
            return
        slots, paths = self.row_of_path.shape
        row_of_path = [[len(assigned)] * paths for _ in range(slots)]
        for row, assignment in enumerate(assigned):
            if assignment is not None:
                row_of_path[assignment.slot][assignment.path] = row
        self.row_of_path.copy_(to_device(row_of_path, self.device))

    def ask_finished(self, n):
        """Which of the first n rows are finished by now: returns a function that waits for the answer."""
        if not self.on_cuda:
            answer = self.rows.finished[:n].tolist()
            return lambda: answer
        flags, event = torch.empty(n, dtype=torch.bool, pin_memory=True), torch.cuda.Event()
        flags.copy_(self.rows.finished[:n], non_blocking=True)
        event.record()
        return lambda: (event.synchronize(), flags.tolist())[1]  # device sync

    def grow(self, longest):
        """Make room for one more token, which makes the longest rows `longest` tokens long."""
        self.backbone.grow(longest)
        if self.kind.interacts and longest > 1 and (longest - 1) % self.mix.shape[1] == 0:
            self.earlier_mix.append(self.mix.clone())
            self.mix.zero_()

    def bytes_to_come(self):
        """Memory that keys and values will still take where rows get as long as there is a place for."""
        return self.backbone.bytes_to_come() if self.reserved.rows else 0

    def mixing_weights(self, groups, tokens, paths):
        """What paths gave to each other (B, T, G, G) in the first T tokens."""
        mix = torch.cat([*self.earlier_mix, self.mix], 1) if self.earlier_mix else self.mix
        return mix[:groups, :tokens, :paths, :paths].clone()

    def step(self, n, last):
        """One decode step of the first n rows, after `grow`; after the last nothing is forwarded."""
        if self.captures and not last:
            self.graphs[self.kind][n].replay()
        else:
            self._run(n, last)

    def _run(self, n, last=False):
        rows, kind = self.rows.first(n), self.kind
        sampled_from = (rows, self.tables, self.temperature, self.limit)
        block_tops = None
        if self.captures and kind.top_k == 0 and kind.top_p == 1:
            if kind.interacts and self.interaction.control == "own":
                block_tops = torch.empty(n, rows.logits.shape[1] // LOGIT_BLOCK, device=self.device)
            tokens, thinking, top = kernels.sample(*sampled_from, kind.greedy, block_tops)
        else:
            tokens, thinking, top = sample_step(*sampled_from, kind)
        if last or (not self.on_cuda and bool(rows.finished.all())):
            return
        if kind.interacts:
            inputs = self._interact(tokens, rows, thinking, top, block_tops)
        else:
            inputs = self.backbone.embed(tokens)
        self.backbone.decode(inputs, rows, self.row_of_path)

    @property
    def has_kernel(self):
        """Whether there is a kernel of what paths do to each other; anything else is done in plain torch."""
        interaction, known = self.interaction, self.has_kernel_of
        if interaction.similarity != "distribution":
            return False
        if interaction not in known:
            known[interaction] = does_what_its_kernel_does(interaction)
            if not known[interaction]:
                what = "m3po_module.py does not do what its kernel (decoding/kernels.py) does"
                say(f"decoder: {what}: paths interact in plain torch, which is slower")
        return known[interaction]

    def _interact(self, tokens, rows, thinking, top, block_tops=None):
        """The inputs (n, E) of paths that look at each other, which have sampled tokens (n,).

        top (n,): each row's largest logit; block_tops: of each block of them, where it is there already.
        """
        interaction, real = self.interaction, self.tables.real
        similarity, recorded = interaction.similarity, (self.row_of_path, rows, self.mix, interaction)
        if self.captures and self.has_kernel:
            alike = kernels.group_products(rows.logits, top, real, self.row_of_path, thinking)
            heard = self._heard_by_kernels(rows, block_tops)
            return kernels.mix((self.backbone.table, tokens), alike, thinking, *recorded, heard)
        embeds = self.backbone.embed(tokens)
        if similarity == "distribution":
            # Probabilities up to a factor, which a cosine ignores.
            features = (real_scores(rows.logits, 1.0, real) - top[:, None]).exp()
        elif similarity == "embedding":
            features = embeds
        else:
            assert similarity == "mean", similarity
            features = torch.ones_like(embeds[:, :1])
        features, thinks = (by_group(x, self.row_of_path) for x in (features, thinking))
        weights = cross_path_weights(features, thinks, interaction.temperature)
        if not interaction.records_scale:
            return mix_step(embeds, weights, thinking, *recorded)
        heard = self._heard_instead(rows, embeds.shape[-1])
        return control_step(embeds, heard, weights, *recorded)

    def _heard_by_kernels(self, rows, block_tops):
        """What a control lets paths hear, as `kernels.mix` takes it."""
        table, control = self.backbone.table, self.interaction.control
        if control == "strangers":
            return table, kernels.stranger_tokens(rows, self.strangers)
        if control != "own":
            return None
        if block_tops is None:
            return self._heard_instead(rows, table.shape[1])
        return kernels.mean_embedding(table, *kernels.likeliest(rows, self.tables.real, block_tops))

    def _heard_instead(self, rows, width):
        """What a control lets paths hear of each row in the place of its embedding, (n, E)."""
        token, control = (rows.t - 1).clamp(min=0), self.interaction.control
        if control == "noise":
            return directions(rows.key, token, width)
        if control == "strangers":
            return self.backbone.embed(self.strangers.tokens(rows.key, token))
        ids, probs = likeliest(rows.logits, self.unreal)
        at = token[:, None, None].expand(-1, 1, ids.shape[1])
        rows.heard_ids.scatter_(1, at, ids[:, None])
        rows.heard_probs.scatter_(1, at, probs[:, None])
        return mean_embedding(self.backbone.embed(ids), probs)


def loose_tensors(model):
    """{(module, attribute): tensor} of what modules hold beside parameters and buffers."""
    held = (
        (name, key, value) for name, module in model.named_modules() for key, value in vars(module).items()
    )
    return {(name, key): value for name, key, value in held if isinstance(value, torch.Tensor)}


def sizes_up_to(n):
    """Numbers of rows that steps are captured for, up to the first that holds n.

    Above 64 rows a step has at most a quarter more rows than are in use.
    """
    sizes = [8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, *range(256, max(n, 256) + 32, 32)]
    return sizes[: next(i for i, size in enumerate(sizes) if size >= n) + 1]


def say(text):
    if int(os.environ.get("RANK", 0)) == 0:
        print(text, flush=True)

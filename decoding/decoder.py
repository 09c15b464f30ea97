"""The group decoder: prompts in; sampled ids, log-probs and mixing weights out. It runs on any causal model that transformers loads.

Axes: B prompts, G generations a prompt, N = B*G rows in group-major order, P prompt tokens, T completion tokens, V real ids, E embedding width,
W logits of a row (V padded to whole blocks). n of R rows are being decoded: rows that have ended leave, and prompts that wait take their place.
A rollout is a prefill of the prompts and decode steps; one step is: sample, end of thinking, end of text, mixing weights, blend, embed, forward.
Nothing in a step waits for the device. On CUDA a step is captured once for each number of rows, and replayed.
"""

import os
import time
from collections import deque
from typing import NamedTuple

import torch
import torch.nn.functional as F

from decoding.any_model import PlainBackbone, send
from decoding.fast_model import FastBackbone, kernels, why_not
from decoding.rollout import Interaction, Rollout, rollout_uniforms
from decoding.step import How, Rows, _scores, mix_step, sample_step
from decoding.tokens import token_tables
from errors import Interrupted
from m3po_module import products


class Lane(NamedTuple):
    """What the host knows of a row: which sequence it decodes, from which prompt slot, as which path."""

    sequence: int
    slot: int
    path: int


class GroupDecoder:
    """Samples groups of completions from `model`. Callers keep one for the life of a process; the model's weights may change in place between calls.

    `fast` False takes the plain path; `compiled` False leaves torch.compile out: set-up is shorter, steps are longer. On CUDA the storage stays
    between calls and grows when a call needs more.
    """

    def __init__(self, model, tokenizer, think_end=None, interaction=Interaction(), fast=True, compiled=True):
        self.model, self.tokenizer, self.interaction, self.device = (
            model,
            tokenizer,
            interaction,
            model.device,
        )
        self.tables = token_tables(tokenizer, model, think_end)
        self.on_cuda, self.fast, self.compiled = model.device.type == "cuda", fast, compiled
        self.check_every = 2 if self.on_cuda else 1  # steps between looks at who is done
        self.interrupted = None  # a function that says whether to stop in the middle, looked at between steps
        self.backbone, self.reserved, self.graphs, self.setup_seconds = None, (0,) * 7, {}, 0.0

    @torch.no_grad()
    def rollout(
        self,
        prompt_ids,
        prompt_mask,
        num_generations=1,
        max_new_tokens=256,
        uniforms=None,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        interact=True,
    ):
        """Sample `num_generations` completions for each of B prompts; uniforms (N, max_new_tokens) or None for greedy decoding.

        Softmax over the tokenizer's real ids at `temperature`; nothing of the model's generation_config but its EOS ids is used.
        """
        G, device = num_generations, self.device
        interacts = interact and self.interaction.lambda_blend > 0 and G > 1
        prompts = [
            ids[mask].tolist() for ids, mask in zip(prompt_ids.cpu(), prompt_mask.cpu().bool(), strict=True)
        ]
        out, lengths = self._decode(
            prompts,
            G,
            max_new_tokens,
            uniforms,
            temperature,
            How(uniforms is None, top_k, top_p, interacts),
            len(prompts) * G,
        )
        used = max(1, int(lengths.max()))
        ids, logp, thinking, input_change = (out[name][:, :used].contiguous() for name in COLUMNS)
        return Rollout(
            prompt_ids=prompt_ids.to(device),
            prompt_mask=prompt_mask.to(device),
            ids=ids,
            mask=torch.arange(used, device=device) < lengths[:, None],
            logp=logp,
            ended=out["ended"],
            thinking=thinking,
            num_generations=G,
            temperature=temperature,
            mix=self.mix[: len(prompts), :used, :G, :G].clone() if interacts else None,
            lambda_blend=self.interaction.lambda_blend if interacts else 0.0,
            input_change=input_change if interacts else None,
        )

    def text(self, ids, ended):
        """The text of one completion, a list of ids up to its end: without EOS, special tokens or clean-up."""
        return self.tokenizer.decode(
            ids[: len(ids) - int(ended)], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    @torch.no_grad()
    def complete(
        self,
        prompts,
        max_new_tokens,
        samples=1,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        seed=0,
        batch_rows=None,
        places=None,
        keep=None,
    ):
        """Decode many prompts (lists of ids), single paths: returns for each prompt `samples` pairs (ids, ended), ids with their EOS.

        Temperature 0 is greedy. `batch_rows` rows are decoded at once, and prompts that wait take the place of those that have ended. A sample
        depends on its prompt's place and `seed`, not on what is decoded beside it; `places` where these prompts are some of more. `keep(place,
        pairs)` is called for each prompt, in the order in which they end.
        """
        if not prompts:
            return []
        places, answers = range(len(prompts)) if places is None else places, [None] * len(prompts)
        uniforms = None
        if temperature > 0:
            uniforms = (
                rollout_uniforms(seed, 0, 0, (max(places) + 1) * samples, max_new_tokens)
                .view(-1, samples, max_new_tokens)[list(places)]
                .flatten(0, 1)
            )

        def over(which, out, lengths):
            rows = send([i * samples + j for i in which for j in range(samples)], self.device)
            found = zip(
                *(column[rows].tolist() for column in (out["ids"], lengths, out["ended"])), strict=True
            )  # device sync
            pairs = [(ids[:length], ended) for ids, length, ended in found]
            for n, i in enumerate(which):
                answers[i] = pairs[n * samples : (n + 1) * samples]
                if keep is not None:
                    keep(places[i], answers[i])

        how = How(uniforms is None, top_k, top_p, False)
        columns = self._decode(
            prompts,
            samples,
            max_new_tokens,
            uniforms,
            temperature or 1.0,
            how,
            batch_rows,
            over if keep else None,
        )
        if keep is None:
            over(range(len(prompts)), *columns)
        return answers

    def _decode(self, prompts, samples, limit, uniforms, temperature, how, max_rows=None, over=None):
        """Decode `samples` rows for each prompt. Returns the columns of Rows, and `ended`, over all sequences in order, and lengths (sequences,).

        `over(prompts, columns, lengths)` is called with the numbers of prompts whose rows have all ended.
        """
        assert limit >= 1, "a completion must have room for a token"
        assert all(prompts), "a prompt must have a token"
        slots = self._prepare(prompts, samples, limit, temperature, how, max_rows)
        total, rows = len(prompts) * samples, self.rows
        out = {name: getattr(rows, name).new_zeros(total, limit) for name in COLUMNS} | {
            "ended": rows.ended.new_zeros(total)
        }
        lengths, left = rows.t.new_zeros(total), [samples] * len(prompts)
        order = (
            range(len(prompts))
            if how.interacts
            else sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        )
        waiting, lanes, done, asked, step, end = deque(order), [], [], deque(), 0, 0

        def collect():
            """Carry what the done rows have said into `out`; nobody's rows they are then."""
            finished = [r for r, lane in enumerate(lanes) if lane is not None and done[r]]
            sequences = [lanes[r].sequence for r in finished]
            source, target = send(finished, self.device), send(sequences, self.device)
            for name in COLUMNS:
                out[name][target] = getattr(rows, name)[source, :limit]
            out["ended"][target], lengths[target] = rows.ended[source], rows.t[source]
            for r, sequence in zip(finished, sequences, strict=True):
                lanes[r] = None
                left[sequence // samples] -= 1
            if over is not None and (
                which := sorted({s // samples for s in sequences if left[s // samples] == 0})
            ):
                over(which, out, lengths)

        while waiting or not all(done):
            if self.interrupted is not None and self.interrupted():
                raise Interrupted
            free = done.count(True)
            if waiting and (all(done) or (self.backbone.refills and free >= max(samples, len(done) // 8))):
                collect()
                if all(done):
                    n = self._size(min(self.batch, len(waiting) * samples))
                    lanes, done = [None] * n, [True] * n
                if self._admit(prompts, samples, waiting, lanes, done, slots, uniforms):
                    asked.clear()
                    end = step + limit
            elif not waiting and (smaller := self._size(len(done) - free)) < len(done):
                collect()
                asked.clear()
                keep = sorted(range(len(done)), key=lambda r: done[r])[:smaller]
                lanes, done = [lanes[r] for r in keep], [done[r] for r in keep]
                self._shrink(keep, lanes, min(step, limit))
            for _ in range(min(self.check_every, end - step)):
                step += 1
                self._step(len(done), how, last=step == end)
            asked.append(self._ask(len(done)))
            while len(asked) > (
                self.on_cuda and step < end
            ):  # on CUDA one answer late: the device never waits for the host
                done = asked.popleft()()
        collect()
        after = torch.arange(limit, device=self.device) >= lengths[:, None]  # what an earlier call left there
        for name in COLUMNS:
            out[name].masked_fill_(after, self.tables.pad_id if name == "ids" else 0)
        return out, lengths

    def _ask(self, n):
        """Which of n rows are done by now: returns a function that waits for the answer."""
        if not self.on_cuda:
            answer = self.rows.done[:n].tolist()
            return lambda: answer
        flags, event = torch.empty(n, dtype=torch.bool, pin_memory=True), torch.cuda.Event()
        flags.copy_(self.rows.done[:n], non_blocking=True)
        event.record()
        return lambda: (event.synchronize(), flags.tolist())[1]  # device sync

    def _admit(self, prompts, samples, waiting, lanes, done, slots, uniforms):
        """Let waiting prompts into rows that are free, as far as there are prompt slots; returns how many."""
        busy = {lane.slot for lane, over in zip(lanes, done, strict=True) if not over}
        free_slots, free_rows = (
            [s for s in range(slots) if s not in busy],
            [r for r, over in enumerate(done) if over],
        )
        count = min(len(waiting), len(free_slots), len(free_rows) // samples)
        chosen, free_slots, free_rows = (
            [waiting.popleft() for _ in range(count)],
            free_slots[:count],
            free_rows[: count * samples],
        )
        for k, r in enumerate(free_rows):
            lanes[r], done[r] = (
                Lane(chosen[k // samples] * samples + k % samples, free_slots[k // samples], k % samples),
                False,
            )
        if count:
            into, rows = send(free_rows, self.device), self.rows
            for name in ("t", "state", "ended", "done"):
                getattr(rows, name)[into] = 0
            rows.prompt_len[into] = send([len(prompts[i]) for i in chosen], self.device).repeat_interleave(
                samples
            )
            rows.slot[into] = send([lanes[r].slot for r in free_rows], self.device)
            rows.path[into] = send([lanes[r].path for r in free_rows], self.device)
            if uniforms is not None:
                rows.uniforms[into, : uniforms.shape[1]] = send(
                    uniforms[[lanes[r].sequence for r in free_rows]].float(), self.device
                )
            self.backbone.prefill([prompts[i] for i in chosen], free_slots, rows.logits, into, samples)
            self._place(lanes)
        return count

    def _shrink(self, keep, lanes, longest):
        """Rows `keep` become the first ones, and the only ones; none of them has said more than `longest` tokens."""
        order = send(keep, self.device)
        for tensor in self.rows:
            tensor[: len(keep)] = tensor[order]
        self.backbone.keep(order, longest)
        self._place(lanes)

    def _place(self, lanes):
        """Where the paths of each group are; the number of rows where one has gone."""
        if not self.grouped:
            return
        slots, paths = self.place.shape
        place = [[len(lanes)] * paths for _ in range(slots)]
        for r, lane in enumerate(lanes):
            if lane is not None:
                place[lane.slot][lane.path] = r
        self.place.copy_(send(place, self.device))

    def _size(self, n):
        """How many rows to decode n in: where steps are captured, one of a few numbers."""
        return sizes_up_to(n)[-1] if self.captures else n

    def _prepare(self, prompts, samples, limit, temperature, how, max_rows):
        """What is not there yet of backbone, storage and captured steps; returns the number of prompt slots."""
        started = time.perf_counter()
        if self.backbone is None:
            self._choose_backbone()
        self.backbone.hold()
        longest, total = max(map(len, prompts)), len(prompts) * samples
        batch = min(max_rows or self._default_rows(longest + limit), total) // samples * samples or samples
        self.batch = batch = (
            min(self._size(batch), total) // samples * samples
        )  # no row that is captured stands empty while prompts wait
        slots = batch // samples * (1 if samples == 1 or batch == total else 2)
        self.grouped = grouped = (
            how.interacts or not self.captures
        )  # captured steps need the groups' places for the interaction only
        groups = (slots, samples) if grouped else (1, 1)
        needed = (
            self._size(batch),
            slots,
            -(-longest // 64) * 64,
            limit,
            *groups,
            limit if how.interacts else 0,
        )
        if any(have < need for have, need in zip(self.reserved, needed, strict=True)):
            both, ways = (
                tuple(map(max, self.reserved, needed)),
                ((0, 3), (1, 2)),
            )  # rows x completions, slots x prompts
            wasteful = any(
                both[a] * both[b] > 2 * max(self.reserved[a] * self.reserved[b], needed[a] * needed[b])
                for a, b in ways
            )
            self._reserve(needed if wasteful else both)
        self.place, self.mix = self.all_places, self.all_mix
        if not self.captures:
            self.place, self.mix = self.place[:slots, :samples], self.mix[:slots, :, :samples, :samples]
        rows = self.rows
        torch.arange(len(rows.home), out=rows.home)
        for tensor in (
            rows.t,
            rows.slot,
            rows.path,
            rows.input_change,
            self.mix,
        ):  # nothing of an earlier call, in nobody's rows too
            tensor.zero_()
        rows.done.fill_(True)
        self.temperature.fill_(temperature)
        self.limit.fill_(limit)
        if self.captures and how not in self.graphs:
            self.place.fill_(0)
            sizes = sizes_up_to(self.reserved[0])
            self.graphs[how] = self._capture(how, sizes)
            self.rows.t.zero_()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            self.setup_seconds += seconds
            _say(
                f"decoder: {'compiled and ' if self.compiled else ''}captured for {len(sizes)} numbers of rows up to {sizes[-1]}, {seconds:.1f} s"
            )
        return slots

    def _choose_backbone(self):
        reason, self.backbone = why_not(self.model) if self.fast else "", None
        if reason is None:
            self.backbone = FastBackbone(self.model, self.compiled and self.on_cuda)
            reason = "its forward is not what its config says" if self.backbone.differs() else None
        if reason:
            _say(f"decoder: the plain path, which is slower ({reason})")
        if reason is not None:
            self.backbone = PlainBackbone(self.model)
        self.captures = self.on_cuda and self.backbone.refills
        self.compiled = self.compiled and self.captures

    def _default_rows(self, tokens):
        """Rows to decode at once where nobody says: what half of the free memory holds, 512 at most on CUDA; 32 on the CPU."""
        if not self.captures:
            return 256 if self.on_cuda else 32
        return max(
            8,
            min(
                512,
                max(
                    self.reserved[0],
                    int(torch.cuda.mem_get_info(self.device)[0] / 2 / self.backbone.row_bytes(tokens)),
                ),
            ),
        )

    def _reserve(self, sizes):
        """Storage for R rows, S prompt slots, P prompt and T completion tokens, B groups of G that interact for M tokens; the old is let go first."""
        self.reserved, self.graphs, self.rows = (0,) * 7, {}, None
        self.place = self.mix = self.all_places = self.all_mix = None
        R, S, P, T, B, G, M = sizes
        device, W = self.device, self.backbone.width
        kinds = dict(ids=torch.long, logp=torch.float32, thinking=torch.bool, input_change=torch.float32, uniforms=torch.float32, t=torch.long,
                     state=torch.long, ended=torch.bool, done=torch.bool, prompt_len=torch.long, slot=torch.long, path=torch.long, home=torch.long,
                     logits=self.backbone.logit_dtype)  # fmt: skip
        widths = dict.fromkeys((*COLUMNS, "uniforms"), (T + 1,)) | {"logits": (W,)}
        self.rows = Rows(
            **{
                name: torch.zeros(R, *widths.get(name, ()), dtype=kind, device=device)
                for name, kind in kinds.items()
            }
        )
        self.all_places, self.all_mix = (
            torch.zeros(B, G, dtype=torch.long, device=device),
            torch.zeros(B, M, G, G, device=device),
        )
        self.temperature, self.limit = (
            torch.ones((), device=device),
            torch.zeros((), dtype=torch.long, device=device),
        )
        self.backbone.reserve(R, S, P, T)
        self.reserved = sizes

    def _capture(self, how, sizes):
        """CUDA graphs of the step for each number of rows; nobody's rows are decoded, so nothing changes but scratch."""
        graphs, pool, stream = {}, None, torch.cuda.Stream(self.device)
        for n in reversed(sizes):
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                self._run(n, how)  # compiles, where it must
            torch.cuda.current_stream(self.device).wait_stream(stream)
            graphs[n] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[n], pool=pool, stream=stream):
                self._run(n, how)
            pool = pool or graphs[n].pool()
        return graphs

    def _step(self, n, how, last):
        """One decode step of the first n rows; after the last nothing is forwarded."""
        if self.captures and not last:
            self.graphs[how][n].replay()
        else:
            self._run(n, how, last)

    def _run(self, n, how, last=False):
        rows, tables = (
            self.rows.first(n),
            (self.tables.next_state, self.tables.is_eos, self.tables.real, self.tables.pad_id),
        )
        if self.captures and how.top_k == 0 and how.top_p == 1:
            tokens, thinking, top = kernels.sample(rows, tables, self.temperature, self.limit, how.greedy)
        else:
            tokens, thinking, top = sample_step(rows, tables, self.temperature, self.limit, how)
        if last or (not self.on_cuda and bool(rows.done.all())):
            return
        inputs = self.backbone.embed(tokens)
        if how.interacts:
            inputs = self._interact(inputs, rows, thinking, top)
        self.backbone.decode(inputs, rows, rows.logits, self.place)

    def _interact(self, embeds, rows, thinking, top):
        """The inputs (n, E) of paths that look at each other."""
        kind, tau, lam = (
            self.interaction.similarity,
            self.interaction.temperature,
            self.interaction.lambda_blend,
        )
        if self.captures and kind == "distribution":
            alike = kernels.group_products(rows.logits, top, self.tables.real, self.place, thinking)
            return kernels.mix(
                embeds, alike, thinking, self.place, rows.t, self.mix, rows.input_change, tau, lam
            )
        if kind == "distribution":  # a cosine does not see the scale
            alike = self._products((_scores(rows.logits, 1.0, self.tables.real) - top[:, None]).exp())
        else:
            alike = self._products(embeds if kind == "embedding" else torch.ones_like(embeds[:, :1]))
        return mix_step(embeds, thinking, alike, self.place, rows, self.mix, tau, lam)

    def _products(self, features):
        return products(F.pad(features, (0, 0, 0, 1))[self.place])


COLUMNS = ("ids", "logp", "thinking", "input_change")


def sizes_up_to(n):
    """Numbers of rows that steps are captured for, up to the first that holds n: at most a fifth more than the rows there are, above 16."""
    sizes = [8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, *range(256, max(n, 256) + 32, 32)]
    return sizes[: next(i for i, size in enumerate(sizes) if size >= n) + 1]


def _say(text):
    if int(os.environ.get("RANK", 0)) == 0:
        print(text, flush=True)

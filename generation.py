"""The group decoder: prompts in; sampled ids, log-probs and mixing weights out. It runs on any causal model that transformers loads.

Axes: B prompts, G generations a prompt, N = B*G rows in group-major order, P prompt tokens (left-padded), T completion tokens, V real ids.
A rollout is a prefill of the B prompts, whose cache is then replicated to N rows, and decode steps; one step is: sample, end-of-text, end of
thinking, mixing weights, blend, embed, forward. Nothing in a step waits for the device.
"""

import inspect
import json
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from data import pad_left
from m3po_module import blend, cross_path_weights, path_features


@dataclass(frozen=True)
class Interaction:
    """How the paths of a group interact while they think; `lambda_blend` 0 is plain GRPO."""

    lambda_blend: float = 0.0
    temperature: float = 0.1
    similarity: str = "distribution"


@dataclass
class Rollout:
    """What was sampled, and all that scoring it again needs."""

    prompt_ids: torch.Tensor  # (B, P) left-padded
    prompt_mask: torch.Tensor  # (B, P) bool
    ids: torch.Tensor  # (N, T) pad after a row's end
    mask: torch.Tensor  # (N, T) bool, up to and including the first EOS
    logp: torch.Tensor  # (N, T) float32 at the sampling temperature, 0 where masked
    ended: torch.Tensor  # (N,) bool, False where the limit cut the row off
    thinking: torch.Tensor  # (N, T) bool, whether the path still thinks after this token
    num_generations: int
    temperature: float
    mix: torch.Tensor | None = None  # (B, T, G, G) float32, who listened to whom in the input of token t
    lambda_blend: float = 0.0
    input_change: torch.Tensor | None = None  # (N, T) float32, |h - e| / |e|

    @property
    def lengths(self):
        return self.mask.sum(-1)  # (N,)

    def completions(self):
        """N pairs (ids up to and including EOS, whether EOS came)."""
        rows = [row[:length] for row, length in zip(self.ids.tolist(), self.lengths.tolist(), strict=True)]
        return list(zip(rows, self.ended.tolist(), strict=True))


# Models: what the decoder and the trainer both need of one


def model_body(model):
    """The part of a causal model before its head."""
    return model.base_model


def vocab_logits(model, hidden, tables=None):
    """Float32 logits over the tokenizer's real ids: hidden (..., E) -> (..., V); over the whole head without `tables`.

    Ids past the tokenizer do not exist, in sampling and in scoring alike (NeMo-RL#237).
    """
    logits = model.get_output_embeddings()(hidden)
    logits = (logits if tables is None else logits[..., : tables.num_real]).float()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    logits = torch.tanh(logits / cap) * cap if cap else logits
    if tables is None or tables.missing is None:
        return logits
    return logits.masked_fill(tables.missing, -1e30)  # finite: p * log p must not become 0 * inf


@torch.no_grad()
def check_head(model):
    """Refuse a model whose logits are not what `vocab_logits` computes (a family that scales them in its own way)."""
    ids = torch.arange(4, device=model.device).view(1, 4)
    own = vocab_logits(model, model_body(model)(input_ids=ids, use_cache=False).last_hidden_state)
    if not torch.allclose(own, model(input_ids=ids, use_cache=False).logits.float(), atol=1e-2, rtol=1e-2):
        raise ValueError(f"model type {model.config.model_type}: its head does more than a matrix product; add it to vocab_logits in generation.py")


# Tokens: which exist, which end a text, which end the thinking


def token_bytes(tokenizer, count):
    """The bytes that each id adds to a decoded text; a special token adds none (texts are decoded with skip_special_tokens)."""
    decoder = json.dumps(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"])
    added = tokenizer.added_tokens_decoder
    pieces = tokenizer.convert_ids_to_tokens(list(range(count)))
    byte_of_char = _byte_level_alphabet()

    def content(token_id, piece):
        if token_id in added:
            return b"" if added[token_id].special else added[token_id].content.encode()
        if piece is None:
            return b""
        if "ByteLevel" in decoder:
            return bytes(byte_of_char[c] for c in piece if c in byte_of_char)
        if "ByteFallback" in decoder and len(piece) == 6 and piece.startswith("<0x"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode() if "▁" in decoder else piece.encode()

    return [content(token_id, piece) for token_id, piece in enumerate(pieces)]


def _byte_level_alphabet():
    """GPT-2's printable stand-ins for the 256 bytes: {character: byte}."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def delimiter_automaton(pieces, delimiter):
    """next_state (S, V): follows `delimiter` through text that arrives as tokens; state = matched length, S - 1 = seen (and stays so).

    Exact however the tokenizer splits the delimiter or merges its ends with other text. `pieces`: the bytes of each token.
    """
    pattern = delimiter.encode()
    final = len(pattern)
    byte_step = np.zeros((final + 1, 256), dtype=np.int64)  # Knuth-Morris-Pratt as a table
    for state in range(final):
        for byte in range(256):
            text = pattern[:state] + bytes([byte])
            byte_step[state, byte] = next(k for k in range(min(len(text), final), -1, -1) if text.endswith(pattern[:k]))
    byte_step[final] = final
    states = np.repeat(np.arange(final + 1)[:, None], len(pieces), axis=1)
    active, position = [i for i, piece in enumerate(pieces) if piece], 0
    while active:  # one byte of every token that still has one
        states[:, active] = byte_step[states[:, active], np.array([pieces[i][position] for i in active])]
        position += 1
        active = [i for i in active if len(pieces[i]) > position]
    return torch.from_numpy(states)


@dataclass
class TokenTables:
    """What the decoder knows of a tokenizer, as tensors on the model's device."""

    num_real: int  # ids at or past this are in the embedding only
    pad_id: int
    eos_ids: list[int]
    is_eos: torch.Tensor  # (V,) bool
    missing: torch.Tensor | None  # (V,) bool, ids below num_real that no token has
    next_state: torch.Tensor  # (S, V)


def eos_token_ids(tokenizer, model):
    """The union of the EOS ids of tokenizer, config and generation config: any of them ends a completion (TRL PR#7039)."""
    sources = [tokenizer.eos_token_id, model.config.get_text_config().eos_token_id]
    sources.append(model.generation_config.eos_token_id if model.generation_config is not None else None)
    ids = {i for s in sources if s is not None for i in (s if isinstance(s, list | tuple) else [s])}
    if not ids:
        raise ValueError("neither the tokenizer nor the model's configs name an EOS token: set tokenizer.eos_token")
    return sorted(ids)


def token_tables(tokenizer, model, think_end=None):
    """Read tokenizer and model once. `think_end`: the delimiter that ends thinking, or None where nobody asks."""
    table_size = model.get_input_embeddings().weight.shape[0]
    known = set(tokenizer.get_vocab().values())
    if max(known) >= table_size:
        raise ValueError(f"the tokenizer has ids up to {max(known)}, the model embeds only {table_size}: they do not belong together")
    num_real, device = max(known) + 1, model.device
    eos_ids = [i for i in eos_token_ids(tokenizer, model) if i < num_real]
    is_eos = torch.zeros(num_real, dtype=torch.bool)
    is_eos[eos_ids] = True
    missing = torch.tensor([i not in known for i in range(num_real)]) if len(known) < num_real else None
    pieces = token_bytes(tokenizer, num_real) if think_end else [b""] * num_real
    return TokenTables(
        num_real=num_real,
        pad_id=eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        eos_ids=eos_ids,
        is_eos=is_eos.to(device),
        missing=None if missing is None else missing.to(device),
        next_state=delimiter_automaton(pieces, think_end or "").to(device) if think_end else torch.zeros(2, num_real, dtype=torch.long, device=device),
    )


# Sampling


def rollout_uniforms(seed, step, retry, rows, length):
    """The draws of one rollout, (rows of all processes, length) in [0, 1): a function of (seed, step, retry) alone, on the CPU (I10)."""
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence((seed, step, retry)).generate_state(1, np.uint64)[0] >> 1))
    return torch.rand(rows, length, generator=generator)


def inverse_cdf(probs, uniforms, block=512):
    """The first id whose cumulative probability passes u: probs (N, V), uniforms (N,) -> (N,). Never an id of probability 0.

    In two levels, sums of blocks and then inside one block: one pass over V, and float32 sums stay short.
    """
    rows, size = probs.shape
    blocks = F.pad(probs, (0, -size % block)).view(rows, -1, block)
    sums = blocks.sum(-1)
    which, rest = _first_beyond(sums, uniforms[:, None])
    inside = blocks.gather(1, which[..., None].expand(-1, -1, block)).squeeze(1)
    return (which * block + _first_beyond(inside, rest)[0]).squeeze(1)


def _first_beyond(weights, fraction):
    """Index (N, 1) of the first weight whose running sum passes fraction (N, 1) of the whole, and how far into that weight it lies."""
    ends = weights.cumsum(-1)
    target = fraction * ends[:, -1:]
    last = (torch.arange(weights.shape[-1], device=weights.device) * (weights > 0)).amax(-1, keepdim=True)
    index = torch.minimum((ends <= target).sum(-1, keepdim=True), last)  # rounding can carry u * sum to the sum itself
    here = weights.gather(-1, index)
    return index, ((target - (ends.gather(-1, index) - here)) / here).clamp(0, 1)


def keep_top(logits, top_k, top_p):
    """Evaluation only: -inf outside the top_k ids (0: all) and outside the smallest set of probability top_p (1: all)."""
    if top_k > 0:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, logits.shape[-1])).values[..., -1:], -torch.inf)
    if top_p < 1:
        values, order = logits.sort(descending=True)
        before = values.softmax(-1).cumsum(-1) - values.softmax(-1)
        logits = logits.masked_fill(torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= top_p), -torch.inf)
    return logits


# The decoder


class GroupDecoder:
    """Samples groups of completions from `model`. Callers keep one for the life of a process; the model's weights may change between calls."""

    def __init__(self, model, tokenizer, think_end=None, interaction=Interaction()):
        self.model, self.tokenizer, self.interaction = model, tokenizer, interaction
        self.tables = token_tables(tokenizer, model, think_end)
        self.cache_name = "cache" if "cache" in inspect.signature(model_body(model).forward).parameters else "past_key_values"
        self.check_every = 8 if model.device.type == "cuda" else 1  # steps between looks at "all ended", a device sync

    @torch.no_grad()
    def rollout(self, prompt_ids, prompt_mask, num_generations=1, max_new_tokens=256, uniforms=None, temperature=1.0, top_k=0, top_p=1.0, interact=True):
        """Sample `num_generations` completions for each of B prompts; uniforms (N, max_new_tokens) or None for greedy decoding.

        Softmax over the tokenizer's real ids at `temperature`; nothing of the model's generation_config but its EOS ids is used.
        """
        device, G = self.model.device, num_generations
        prompt_ids, prompt_mask = prompt_ids.to(device), prompt_mask.to(device)
        N, T = len(prompt_ids) * G, max_new_tokens
        mixes = interact and self.interaction.lambda_blend > 0 and G > 1
        out = Rollout(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            ids=torch.full((N, T), self.tables.pad_id, device=device),
            mask=torch.zeros(N, T, dtype=torch.bool, device=device),
            logp=torch.zeros(N, T, device=device),
            ended=torch.zeros(N, dtype=torch.bool, device=device),
            thinking=torch.zeros(N, T, dtype=torch.bool, device=device),
            num_generations=G,
            temperature=temperature,
            mix=torch.zeros(N // G, T, G, G, device=device) if mixes else None,
            lambda_blend=self.interaction.lambda_blend if mixes else 0.0,
            input_change=torch.zeros(N, T, device=device) if mixes else None,
        )
        uniforms = None if uniforms is None else uniforms.to(device, torch.float32)
        state = torch.zeros(N, dtype=torch.long, device=device)
        cache, attention, positions, logits = self._prefill(prompt_ids, prompt_mask, G, T)
        for t in range(T):
            probs, tokens = self._sample(t, logits, out, None if uniforms is None else uniforms[:, t], top_k, top_p)
            state = self.tables.next_state[state, tokens]
            out.thinking[:, t] = (state < len(self.tables.next_state) - 1) & ~out.ended
            steps = t + 1
            if steps == T or (steps % self.check_every == 0 and bool(out.ended.all())):  # device sync
                break
            embeds = self._interact(t, logits, probs, tokens, out) if mixes else self.model.get_input_embeddings()(tokens)
            logits = self._forward(embeds[:, None], attention[:, : prompt_ids.shape[1] + steps], positions + t, cache)
        return _trim(out)

    def _prefill(self, prompt_ids, prompt_mask, num_generations, max_new_tokens):
        """Each prompt once, then its cache for every path. A DynamicCache without a config: Gemma-3's sliding layers keep all keys."""
        cache = DynamicCache()
        positions = (prompt_mask.long().cumsum(-1) - 1).clamp(min=0)
        embeds = self.model.get_input_embeddings()(prompt_ids)
        logits = self._forward(embeds, prompt_mask, positions, cache)
        cache.batch_repeat_interleave(num_generations)
        grown = F.pad(prompt_mask, (0, max_new_tokens), value=True)
        rows = torch.arange(len(prompt_ids), device=prompt_ids.device).repeat_interleave(num_generations)
        return cache, grown[rows], positions[rows, -1:] + 1, logits[rows]

    def _forward(self, embeds, attention, positions, cache):
        """Next-token logits (N, V) after inputs (N, Q, E)."""
        out = model_body(self.model)(inputs_embeds=embeds, attention_mask=attention, position_ids=positions, use_cache=True, **{self.cache_name: cache})
        return vocab_logits(self.model, out.last_hidden_state[:, -1], self.tables)

    def _sample(self, t, logits, out, uniforms, top_k, top_p):
        """Record token t of every row that has not ended: logits (N, V) -> probabilities at the sampling temperature (N, V), tokens (N,)."""
        logp = torch.log_softmax(keep_top(logits / out.temperature, top_k, top_p), dim=-1)
        probs = logp.exp()
        tokens = logits.argmax(-1) if uniforms is None else inverse_cdf(probs, uniforms)
        going = ~out.ended
        tokens = torch.where(going, tokens, self.tables.pad_id)
        out.ids[:, t] = tokens
        out.mask[:, t] = going
        out.logp[:, t] = torch.where(going, logp.gather(-1, tokens[:, None]).squeeze(-1), 0.0)
        out.ended = out.ended | self.tables.is_eos[tokens]
        return probs, tokens

    def _interact(self, t, logits, probs, tokens, out):
        """M3PO: the next inputs (N, E), each a blend of its own token's embedding with those of the thinking peers."""
        G = out.num_generations
        embeds = self.model.get_input_embeddings()(tokens)
        probs = probs if out.temperature == 1 else logits.softmax(-1)  # p_i is at temperature 1, however the paths are sampled
        features = path_features(self.interaction.similarity, probs, embeds)
        weights = cross_path_weights(features.view(-1, G, features.shape[-1]), out.thinking[:, t].view(-1, G), self.interaction.temperature)
        inputs = blend(embeds.view(-1, G, embeds.shape[-1]), weights, self.interaction.lambda_blend).view_as(embeds)
        out.mix[:, t] = weights
        out.input_change[:, t] = (inputs - embeds).float().norm(dim=-1) / embeds.float().norm(dim=-1).clamp(min=1e-9)
        return inputs

    def text(self, ids, ended):
        """The text of one completion, a list of ids up to its end: without EOS, special tokens or clean-up."""
        return self.tokenizer.decode(ids[: len(ids) - int(ended)], skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def complete(self, prompts, max_new_tokens, samples=1, temperature=0.0, top_k=0, top_p=1.0, seed=0, batch_rows=None, progress=None):
        """Decode many prompts (lists of ids), single paths: returns for each prompt `samples` pairs (ids, ended), ids with their EOS.

        Temperature 0 is greedy. Prompts go in order of length; a sample depends on its prompt's place and `seed`, not on the batch.
        """
        batch_rows = batch_rows or (256 if self.model.device.type == "cuda" else 32)
        uniforms = rollout_uniforms(seed, 0, 0, len(prompts) * samples, max_new_tokens) if temperature > 0 else None
        answers = [None] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        per_batch = max(1, batch_rows // samples)
        for start in range(0, len(order), per_batch):
            chosen = order[start : start + per_batch]
            ids, mask = pad_left([prompts[i] for i in chosen], self.tables.pad_id)
            draws = None if uniforms is None else uniforms.view(len(prompts), samples, -1)[chosen].flatten(0, 1)
            out = self.rollout(ids, mask, samples, max_new_tokens, draws, temperature or 1.0, top_k, top_p, interact=False)
            pairs = out.completions()
            for place, i in enumerate(chosen):
                answers[i] = pairs[place * samples : (place + 1) * samples]
            if progress is not None:
                progress(len(chosen))
        return answers


def _trim(out):
    """Cut the columns that no row reached."""
    used = max(1, int(out.mask.any(0).sum()))
    for name in ("ids", "mask", "logp", "thinking", "input_change"):
        value = getattr(out, name)
        setattr(out, name, None if value is None else value[:, :used].contiguous())
    out.mix = None if out.mix is None else out.mix[:, :used].contiguous()
    return out

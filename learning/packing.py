"""Rows packed behind each other: each prompt goes through the model once, for all of its completions.

A token's matrix products do not depend on its neighbours, so the G completions of a prompt need it only where
they attend to it, and no place is padded. g groups, n rows, M tokens in all: the prompts of the groups, then
the completions of the rows, without their last tokens, which predict nothing. A segment is a prompt or a
completion: its queries are its own tokens; its keys are these, and before them, for a completion, its
prompt's. H query heads, K key heads of width D.
"""

from typing import NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from decoding.any_model import known_family
from decoding.rollout import to_device

# transformers makes no mask for a name that it does not know, and takes one with "flash" in it for its own
FLASH, MASKED = "packed_varlen", "packed_masked"


class Segments(NamedTuple):
    """How packed tokens attend to each other, as the flash kernel asks for it, or padded for sdpa."""

    source: torch.Tensor  # which of the M tokens each key is, segment after segment
    queries: torch.Tensor | None = None  # (segments + 1,) int32, where each begins and the last ends
    keys: torch.Tensor | None = None  # the same of keys
    longest: int = 0  # keys of a segment
    query_grid: torch.Tensor | None = None  # (segments, queries of the longest), index of a token
    key_grid: torch.Tensor | None = None  # (segments, keys of the longest), index of a key
    mask: torch.Tensor | None = None  # (segments, 1, queries, keys) bool, True where a query may look
    places: torch.Tensor | None = None  # (M,) where each token is in the query grid


class Packing(NamedTuple):
    """Where the tokens of some rows are, all on the device."""

    segments: Segments
    positions: torch.Tensor  # (1, M)
    prompt_source: torch.Tensor  # which of the ids of rollout.prompt_ids, flattened, each prompt token is
    last: torch.Tensor  # (n,) the last token of each row's prompt, which predicts the row's first
    row: torch.Tensor  # which of the rows each packed completion token is in
    token: torch.Tensor  # which token of it


def pack(rollout, rows, is_flash):
    """The Packing of some rows, a tensor of indices on the CPU; the host knows all sizes and waits for
    nothing.

    In NumPy: torch hands arrays of this length to threads, and waking them can take longer than the update.
    """
    rows = rows.numpy()
    groups, group = np.unique(rows // rollout.num_generations, return_inverse=True)
    sizes = np.array(rollout.sizes)
    prompts, completions = sizes[0, groups * rollout.num_generations], sizes[1, rows] - 1
    lengths = np.concatenate([prompts, completions])
    ends = lengths.cumsum()
    starts, count = ends - lengths, len(groups)
    # a completion's keys: its prompt's tokens, then its own; one of a single token has no token to read
    before = prompts[group] * (completions > 0)
    pieces = np.stack([starts[group], starts[count:]], 1), np.stack([before, completions], 1)
    source = np.concatenate([np.arange(prompts.sum()), ranges(*(piece.flatten() for piece in pieces))])
    keys = np.concatenate([prompts, before + completions])
    width = rollout.prompt_ids.shape[1]
    places = (
        ranges(np.concatenate([np.zeros(count, dtype=np.int64), prompts[group]]), lengths)[None],
        ranges((groups + 1) * width - prompts, prompts),
        (ends[:count] - 1)[group],
        np.arange(len(rows)).repeat(completions),
        ranges(np.zeros_like(completions), completions),
    )
    segments = segments_of(source, lengths[lengths > 0], keys[lengths > 0], is_flash)

    def moved(x):
        return to_device(torch.from_numpy(x), rollout.ids.device)

    segments = Segments(*(moved(x) if isinstance(x, np.ndarray) else x for x in segments))
    return Packing(segments, *map(moved, places))


def ranges(starts, lengths):
    """The whole numbers start, start + 1, ... of each start, as many as its length, behind each other."""
    ends = lengths.cumsum()
    return (starts - ends + lengths).repeat(lengths) + np.arange(lengths.sum())


def segments_of(source, queries, keys, is_flash):
    """Segments of so many queries and keys each, all of them arrays."""
    query_ends, key_ends = queries.cumsum(), keys.cumsum()
    if is_flash:
        ends = (np.pad(x, (1, 0)).astype(np.int32) for x in (query_ends, key_ends))
        return Segments(source, *ends, longest=int(keys.max()))
    query, key = np.arange(queries.max()), np.arange(keys.max())
    return Segments(
        source,
        query_grid=((query_ends - queries)[:, None] + query).clip(max=query_ends[-1] - 1),
        key_grid=((key_ends - keys)[:, None] + key).clip(max=len(source) - 1),
        mask=(key <= (keys - queries)[:, None, None] + query[:, None])[:, None],
        places=ranges(np.arange(len(queries)) * len(query), queries),
    )


def packed_attention(module, query, key, value, attention_mask, scaling=None, segments=None, **kwargs):
    """Attention of a layer as transformers asks for it: (1, heads, M, D) -> (1, M, H, D).

    Without segments it is causal attention of rows that are not padded on the left.
    """
    if segments is None:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (M, heads, D)
    # in float32, since the gradients of a prompt's keys are sums over its completions
    k, v = (x.float().index_select(0, segments.source).to(x.dtype) for x in (k, v))
    if segments.mask is None:
        return flash(q, k, v, segments, scaling)[None], None
    grids = segments.query_grid, segments.key_grid, segments.key_grid
    q, k, v = (on_grid(x, grid).transpose(1, 2) for x, grid in zip((q, k, v), grids, strict=True))
    out, _ = sdpa_attention_forward(module, q, k, v, segments.mask, scaling=scaling)
    return out.flatten(0, 1).index_select(0, segments.places)[None], None


def on_grid(x, grid):
    """(M, ...) -> (segments, longest, ...), by the indices of a grid; its backward adds and does not sort."""
    return x.index_select(0, grid.flatten()).unflatten(0, grid.shape)


def flash(q, k, v, segments, scale):
    """FlashAttention-2 over segments of any length: q (M, H, D), k and v (keys, K, D) -> (M, H, D).

    Its causal mask lets the last query of a segment see all of its keys: a completion sees its whole prompt.
    """
    ends, longest = (segments.queries, segments.keys), (segments.longest, segments.longest)
    return torch.ops.aten._flash_attention_forward(q, k, v, *ends, *longest, 0.0, True, False, scale=scale)[0]


def why_not_flash(model, dtype):
    """Why the flash kernel cannot serve this model's heads in `dtype`, or None."""
    if model.device.type != "cuda" or dtype == torch.float32:
        return "it needs bf16 or fp16 on CUDA"
    config = model.config.get_text_config()
    D = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    q = torch.randn(4, config.num_attention_heads, D, dtype=dtype, device=model.device, requires_grad=True)
    k = torch.randn(4, config.num_key_value_heads, D, dtype=dtype, device=model.device, requires_grad=True)
    ends = torch.tensor([0, 4], dtype=torch.int32, device=model.device)
    try:
        flash(q, k, k, Segments(None, ends, ends, 4), 1.0).sum().backward()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


def why_not_packed(model):
    """Why each row of this model goes through it whole, its prompt included; None where rows are packed."""
    config = model.config.get_text_config()
    if not known_family(config):
        return f"model type {config.model_type}, or layers that do not see all before them"
    if model.config._attn_implementation != "sdpa":
        return f"{model.config._attn_implementation} attention"
    return None


def is_packed(model):
    """Whether this model attends over packed rows."""
    return model.config._attn_implementation in (FLASH, MASKED)


def attend_packed(model, dtype):
    """Let a model, in place, attend over packed rows, where it can; from then on it only scores rollouts.

    `dtype`: of queries and keys. Returns what there is to say of it, or None.
    """
    if reason := why_not_packed(model):
        return do_not_pack(model, reason)
    reason = why_not_flash(model, dtype)
    AttentionInterface.register(FLASH, packed_attention)
    AttentionInterface.register(MASKED, packed_attention)
    model.set_attn_implementation(MASKED if reason else FLASH)
    if reason and model.device.type == "cuda":
        return f"update: attention with a mask, which is slower than the flash kernel ({reason})"
    return None


def do_not_pack(model, reason):
    """Leave rows whole, prompt and padding included; returns what there is to say of it."""
    if is_packed(model):
        model.set_attn_implementation("sdpa")
    return f"update: each prompt goes through the model once a completion, not once a group ({reason})"

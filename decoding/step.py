"""One decode step in plain torch: sample, end of thinking, end of text, mixing weights, blend.

kernels.py does the same in Triton. n of R rows are being decoded; B groups of G paths, T completion tokens, V
real ids, W logits of a row (V padded to whole blocks), E embedding width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from decoding.controls import controlled, scaled_mean_weights
from decoding.tokens import IMPOSSIBLE, LOGIT_BLOCK
from m3po_module import blend


def draw(logits, uniforms, temperature=1.0, real=None, top_k=0, top_p=1.0, block=LOGIT_BLOCK):
    """Draw a token of softmax(logits / temperature) over the `real` ids.

    Inverse-CDF sampling; a token of probability 0 is never drawn. logits (n, W) of any float
    type; uniforms (n,), or None for the likeliest. Returns tokens (n,), their log-probs (n,), and each row's
    largest logit (n,) at temperature 1. Sums over blocks give the block, then sums within it the token: one
    pass over the logits.
    """
    if logits.shape[-1] % block:
        lowest = max(IMPOSSIBLE, torch.finfo(logits.dtype).min)  # fp16 has no such number
        logits = F.pad(logits, (0, -logits.shape[-1] % block), value=lowest)
    given_temperature = temperature
    if top_k > 0 or top_p < 1:
        logits, temperature = keep_top(real_scores(logits, temperature, real), top_k, top_p), 1.0
    blocks = real_scores(logits, temperature, real).view(logits.shape[0], -1, block)
    block_top = blocks.amax(-1)
    top = block_top.amax(-1, keepdim=True)
    block_mass = (blocks - block_top[..., None]).exp().sum(-1)
    mass = block_mass * (block_top - top).exp()  # (n, W / block), where the likeliest token counts 1
    if uniforms is None:
        chosen_block = block_top.argmax(-1, keepdim=True)
    else:
        chosen_block, rest = _first_beyond(mass, uniforms[:, None])
    ids = chosen_block * block + torch.arange(block, device=logits.device)  # (n, block)
    inside = real_scores(logits.gather(1, ids), temperature, None if real is None else real[ids])
    if uniforms is None:
        index = inside.argmax(-1, keepdim=True)
    else:
        index, _ = _first_beyond((inside - inside.amax(-1, keepdim=True)).exp(), rest)
    logp = inside.gather(1, index) - top - mass.sum(-1, keepdim=True).log()
    return ids.gather(1, index).squeeze(1), logp.squeeze(1), (top * given_temperature).squeeze(1)


def real_scores(logits, temperature, real):
    """Float32 logits / temperature, impossible where an id is not `real`."""
    scores = logits.float() / temperature
    return scores if real is None else torch.where(real, scores, IMPOSSIBLE)


def _first_beyond(weights, fraction):
    """The first weight whose running sum passes fraction (n, 1) of the whole.

    Returns its index (n, 1), and how far into it that is, from 0 to 1.
    """
    ends = weights.cumsum(-1)
    target = fraction * ends[:, -1:]
    index = torch.arange(weights.shape[-1], device=weights.device)
    # Rounding can carry u * sum to the sum itself: then the last weight above 0 is taken.
    last = torch.where(weights > 0, index, 0).amax(-1, keepdim=True)
    # Running sums made in parallel are not quite monotone: one may pass the target at a weight of 0.
    first = torch.where((ends > target) & (weights > 0), index, last).amin(-1, keepdim=True)
    weight = weights.gather(-1, first)
    return first, ((target - (ends.gather(-1, first) - weight)) / weight).clamp(0, 1)


def keep_top(logits, top_k, top_p):
    """Keep the top_k ids (0: all) and the smallest set of mass top_p (evaluation only)."""
    if top_k > 0:
        lowest = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < lowest, IMPOSSIBLE)
    if top_p < 1:
        values, order = logits.sort(descending=True)
        before = values.softmax(-1).cumsum(-1) - values.softmax(-1)
        outside = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(outside, IMPOSSIBLE)
    return logits


class Rows(NamedTuple):
    """What is known of the R rows. Column t of the first eight belongs to completion token t."""

    ids: torch.Tensor  # (R, T + 1)
    logp: torch.Tensor  # (R, T + 1)
    thinking: torch.Tensor  # (R, T + 1)
    input_change: torch.Tensor  # (R, T + 1)
    scale: torch.Tensor  # (R, T + 1) of a control that records it
    heard_ids: torch.Tensor  # (R, T + 1, K) in the control `own`, else K is 0
    heard_probs: torch.Tensor  # (R, T + 1, K)
    uniforms: torch.Tensor  # (R, T + 1)
    t: torch.Tensor  # (R,) tokens sampled so far
    state: torch.Tensor  # (R,) of the automaton that looks for the end of thinking
    ended: torch.Tensor  # (R,) by EOS
    finished: torch.Tensor  # (R,) by EOS or by the limit; True of a row that is not in use
    prompt_len: torch.Tensor  # (R,)
    slot: torch.Tensor  # (R,) of its prompt, which is also the number of its group
    path: torch.Tensor  # (R,) its number within the group
    key: torch.Tensor  # (R,) of a control's random numbers
    cache_row: torch.Tensor  # (R,) the row of the cache that holds its keys and values
    logits: torch.Tensor  # (R, W)

    def first(self, n):
        return Rows(*(tensor[:n] for tensor in self))


class StepKind(NamedTuple):
    """What a step is specialised on: on CUDA each kind is captured separately."""

    greedy: bool
    top_k: int
    top_p: float
    interacts: bool
    interaction: object = None  # the Interaction, where paths interact


def sample_step(rows, tables, temperature, limit, kind):
    """Sample a token for each row, record it, and note which rows still think and which are finished.

    Returns tokens (n,), thinking (n,) and each row's largest logit (n,).
    """
    column, going = rows.t[:, None], ~rows.finished
    uniforms = None if kind.greedy else rows.uniforms.gather(1, column).squeeze(1)
    tokens, logp, top = draw(rows.logits, uniforms, temperature, tables.real, kind.top_k, kind.top_p)
    tokens = torch.where(going, tokens, tables.pad_id)
    state = tables.next_state[rows.state, tokens]
    eos = going & tables.is_eos[tokens]
    thinking = going & ~eos & (state < tables.next_state.shape[0] - 1)
    rows.ids.scatter_(1, column, tokens[:, None])
    rows.logp.scatter_(1, column, torch.where(going, logp, 0.0)[:, None])
    rows.thinking.scatter_(1, column, thinking[:, None])
    rows.state.copy_(state)
    rows.t.add_(going)
    rows.ended.logical_or_(eos)
    rows.finished.logical_or_(eos | (rows.t >= limit))
    return tokens, thinking, top


def norm_shrink(dtype):
    """What x times an RMS norm's weight is multiplied by until it is divided by the norm.

    fp16 holds nothing above 65504, which a residual stream may come near to; a power of two rounds nothing.
    """
    return 1 / 16 if dtype == torch.float16 else 1.0


def by_group(values, row_of_path):
    """(n, ...) -> (B, G, ...), zeros where a path has no row: there row_of_path (B, G) holds n."""
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, 1))[row_of_path]


NO_SIZE = 1e-9  # an embedding as short as this is none


def mix_step(embeds, weights, thinking, row_of_path, rows, mix, interaction):
    """M3PO: the next inputs (n, E), each its own token's embedding blended with those of the thinking peers.

    weights (B, G, G) that the paths give each other. rows.input_change records how far the inputs moved, and
    mix (B, C, G, G) the weights of the latest C tokens: those of token t at t % C.
    """
    grouped = by_group(embeds, row_of_path)
    if interaction.control == "scaled_mean":
        weights = scaled_mean_weights(grouped, weights, by_group(thinking, row_of_path))
    blended = blend(grouped, weights, interaction.lambda_blend)
    return _recorded(embeds, blended, weights, rows, mix)


def control_step(embeds, heard, weights, row_of_path, rows, mix, interaction):
    """The same in a control that records its scale: heard (n, E) of each row, weights (B, G, G) of M3PO."""
    grouped, instead = by_group(embeds, row_of_path), by_group(heard, row_of_path)
    moved, scale = controlled(interaction.control, grouped, instead, weights, None, interaction.lambda_blend)
    token = (rows.t - 1).clamp(min=0)
    rows.scale.scatter_(1, token[:, None], scale[rows.slot, rows.path][:, None])
    return _recorded(embeds, moved, weights, rows, mix)


def _recorded(embeds, blended, weights, rows, mix):
    """The inputs (n, E) among those by group, recorded with their weights."""
    inputs = blended[rows.slot, rows.path]
    token, alone = (rows.t - 1).clamp(min=0), embeds.float()
    moved, size = (inputs.float() - alone).norm(dim=-1), alone.norm(dim=-1)
    # of a token without an embedding of its own, such as padding, all that is read comes from others
    change = torch.where(size > NO_SIZE, moved / size.clamp(min=NO_SIZE), (moved > 0).float())
    rows.input_change.scatter_(1, token[:, None], change[:, None])
    # all paths that still think are at the same token
    mix.index_copy_(1, token.max()[None] % mix.shape[1], weights[:, None])
    return inputs

"""One decode step in plain torch: sample, end of thinking, end of text, mixing weights, blend. kernels.py is its twin in Triton.

n of R rows are being decoded; T completion tokens, V real ids, W logits of a row (V padded to whole blocks), E embedding width."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from decoding.tokens import IMPOSSIBLE, LOGIT_BLOCK
from m3po_module import blend, cosines, weights_from_similarity


def draw(logits, uniforms, temperature=1.0, real=None, top_k=0, top_p=1.0, block=LOGIT_BLOCK):
    """Draw a token of softmax(logits / temperature) over the `real` ids: the first whose cumulative probability passes u, never one of probability 0.

    logits (n, W) of any float type; uniforms (n,), or None for the likeliest. Returns tokens (n,), their log-probs (n,),
    and each row's largest logit (n,) at temperature 1. In two levels, sums of blocks and then inside one block: one pass over the logits.
    """
    if logits.shape[-1] % block:
        logits = F.pad(logits, (0, -logits.shape[-1] % block), value=IMPOSSIBLE)
    sharpness = temperature
    if top_k > 0 or top_p < 1:
        logits, temperature = keep_top(_scores(logits, temperature, real), top_k, top_p), 1.0
    blocks = _scores(logits, temperature, real).view(logits.shape[0], -1, block)
    block_top = blocks.amax(-1)
    top = block_top.amax(-1, keepdim=True)
    mass = (blocks - block_top[..., None]).exp().sum(-1) * (
        block_top - top
    ).exp()  # (n, W / block), of the largest probability as 1
    which, rest = (
        (block_top.argmax(-1, keepdim=True), None)
        if uniforms is None
        else _first_beyond(mass, uniforms[:, None])
    )
    ids = which * block + torch.arange(block, device=logits.device)  # (n, block)
    inside = _scores(logits.gather(1, ids), temperature, None if real is None else real[ids])
    place = (
        inside.argmax(-1, keepdim=True)
        if uniforms is None
        else _first_beyond((inside - inside.amax(-1, keepdim=True)).exp(), rest)[0]
    )
    logp = inside.gather(1, place) - top - mass.sum(-1, keepdim=True).log()
    return ids.gather(1, place).squeeze(1), logp.squeeze(1), (top * sharpness).squeeze(1)


def _scores(logits, temperature, real):
    scores = logits.float() / temperature
    return scores if real is None else torch.where(real, scores, IMPOSSIBLE)


def _first_beyond(weights, fraction):
    """Index (n, 1) of the first weight whose running sum passes fraction (n, 1) of the whole, and how far into that weight it lies."""
    ends = weights.cumsum(-1)
    target = fraction * ends[:, -1:]
    place = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, place, 0).amax(
        -1, keepdim=True
    )  # rounding can carry u * sum to the sum itself
    # sums made in parallel are not quite monotone: one may pass the target at a weight of 0
    index = torch.where((ends > target) & (weights > 0), place, last).amin(-1, keepdim=True)
    here = weights.gather(-1, index)
    return index, ((target - (ends.gather(-1, index) - here)) / here).clamp(0, 1)


def keep_top(logits, top_k, top_p):
    """Evaluation only: impossible outside the top_k ids (0: all) and outside the smallest set of probability top_p (1: all)."""
    if top_k > 0:
        logits = logits.masked_fill(
            logits < logits.topk(min(top_k, logits.shape[-1])).values[..., -1:], IMPOSSIBLE
        )
    if top_p < 1:
        values, order = logits.sort(descending=True)
        before = values.softmax(-1).cumsum(-1) - values.softmax(-1)
        logits = logits.masked_fill(
            torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= top_p), IMPOSSIBLE
        )
    return logits


class Rows(NamedTuple):
    """What is known of the R rows; `first(n)` are views. Column t of the first five belongs to completion token t."""

    ids: torch.Tensor  # (R, T + 1)
    logp: torch.Tensor  # (R, T + 1)
    thinking: torch.Tensor  # (R, T + 1)
    input_change: torch.Tensor  # (R, T + 1)
    uniforms: torch.Tensor  # (R, T + 1)
    t: torch.Tensor  # (R,) tokens said so far
    state: torch.Tensor  # (R,) of the automaton that looks for the end of thinking
    ended: torch.Tensor  # (R,) by EOS
    done: torch.Tensor  # (R,) by EOS or by the limit, or nobody's row
    prompt_len: torch.Tensor  # (R,)
    slot: torch.Tensor  # (R,) of its prompt, which is its group
    path: torch.Tensor  # (R,) its number within the group
    home: torch.Tensor  # (R,) where its keys are kept
    logits: torch.Tensor  # (R, W)

    def first(self, n):
        return Rows(*(tensor[:n] for tensor in self))


class How(NamedTuple):
    """What a step is specialised on."""

    greedy: bool
    top_k: int
    top_p: float
    interacts: bool


def sample_step(rows, tables, temperature, limit, how):
    """Sample, record, and see which rows think on and which are done. Returns tokens (n,), thinking (n,) and each row's largest logit (n,)."""
    next_state, is_eos, real, pad_id = tables
    at, going = rows.t[:, None], ~rows.done
    uniforms = None if how.greedy else rows.uniforms.gather(1, at).squeeze(1)
    tokens, logp, top = draw(rows.logits, uniforms, temperature, real, how.top_k, how.top_p)
    tokens = torch.where(going, tokens, pad_id)
    state = next_state[rows.state, tokens]
    eos = going & is_eos[tokens]
    thinking = going & ~eos & (state < next_state.shape[0] - 1)
    for column, value in (
        (rows.ids, tokens),
        (rows.logp, torch.where(going, logp, 0.0)),
        (rows.thinking, thinking),
    ):
        column.scatter_(1, at, value[:, None])
    rows.state.copy_(state)
    rows.t.add_(going)
    rows.ended.logical_or_(eos)
    rows.done.logical_or_(eos | (rows.t >= limit))
    return tokens, thinking, top


def mix_step(embeds, thinking, products, place, rows, mix, temperature, lambda_blend):
    """M3PO: the next inputs (n, E), each a blend of its own token's embedding with those of the thinking peers; records who heard whom.

    products (B, G, G) of what the paths are compared by; place (B, G): the row of each path, n where it has none any more.
    """
    weights = weights_from_similarity(cosines(products), F.pad(thinking, (0, 1))[place], temperature)
    inputs = blend(F.pad(embeds, (0, 0, 0, 1))[place], weights, lambda_blend)[rows.slot, rows.path]
    said, own = (rows.t - 1).clamp(min=0), embeds.float()
    change = (inputs.float() - own).norm(dim=-1) / own.norm(dim=-1).clamp(min=1e-9)
    rows.input_change.scatter_(1, said[:, None], change[:, None])
    mix.index_copy_(
        1, said.max()[None], weights[:, None]
    )  # whoever still thinks has said the same number of tokens
    return inputs

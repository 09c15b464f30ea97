"""Two Triton kernels of the decode step on CUDA. Each has its plain torch twin: `attend` in fast_path.py, `cosines` in m3po_module.py.

Letters as in generation.py; H query heads and K key heads of width D, S prompt slots, W logits of a row.
"""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def _attend_to(q, top, total, acc, keys, values, count, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Online softmax (FlashAttention) of the queries of one key head over `count` keys that lie one after another."""
    column = tl.arange(0, WIDTH)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < count
        at = place[:, None] * D + column[None, :]
        there = inside[:, None] & (column[None, :] < D)
        key = tl.load(keys + at, mask=there, other=0.0)
        scores = tl.where(inside[None, :], tl.dot(q, tl.trans(key), input_precision="ieee"), float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        value = tl.load(values + at, mask=there, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = higher
    return top, total, acc


@triton.jit
def _decode_attention(q_ptr, k_ptr, v_ptr, v_stride, prompt_k, prompt_v, own_k, own_v, slot, prompt_len, own_len, done, out_ptr, scale, P, T,
                      HEADS: tl.constexpr, K: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    query, column = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    real = (query[:, None] < HEADS) & (column[None, :] < D)
    at = (row * K + head) * HEADS * D + query[:, None] * D + column[None, :]
    if tl.load(done + row):
        tl.store(out_ptr + at, tl.zeros((QUERIES, WIDTH), out_ptr.dtype.element_ty), mask=real)
        return
    q = tl.load(q_ptr + at, mask=real, other=0.0)
    own, seen = tl.load(own_len + row), tl.load(prompt_len + row)
    own_base = (row.to(tl.int64) * K + head) * T * D
    prompt_base = (tl.load(slot + row).to(tl.int64) * K + head) * P * D
    k = tl.load(k_ptr + (row * K + head) * D + column, mask=column < D, other=0.0)
    v = tl.load(v_ptr + row * v_stride + head * D + column, mask=column < D, other=0.0)
    tl.store(own_k + own_base + own * D + column, k, mask=column < D)
    tl.store(own_v + own_base + own * D + column, v, mask=column < D)
    # the token itself opens the softmax: its key is in registers, not yet in the cache
    q = (q.to(tl.float32) * scale).to(q.dtype)
    top = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1)
    total = tl.full((QUERIES,), 1.0, tl.float32)
    acc = tl.zeros((QUERIES, WIDTH), tl.float32) + v.to(tl.float32)[None, :]
    top, total, acc = _attend_to(q, top, total, acc, prompt_k + prompt_base, prompt_v + prompt_base, seen, D, WIDTH, BLOCK)
    top, total, acc = _attend_to(q, top, total, acc, own_k + own_base, own_v + own_base, own, D, WIDTH, BLOCK)
    tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=real)


def decode_attention(q, k, v, prompt, own, slot, prompt_len, own_len, done, scale):
    """One new token a row over its prompt and what it has said: q (n, H, D), k and v (n, K, D), prompt (2, S, K, P, D), own (2, R, K, T, D) -> (n, H*D).

    The token's own key and value are written to `own` at own_len. Keys are read once for the H / K query heads that share them, and only as
    many as a row has; rows of one group read the same prompt, which then comes from the cache of the card. A row that is done reads nothing.
    """
    n, H, D = q.shape
    K = k.shape[1]
    out = torch.empty(n, H * D, dtype=q.dtype, device=q.device)
    _decode_attention[(n, K)](
        q, k, v, v.stride(0), prompt[0], prompt[1], own[0], own[1], slot, prompt_len, own_len, done, out, scale * LOG2_E, prompt.shape[3], own.shape[3],
        HEADS=H // K, K=K, D=D, QUERIES=max(16, triton.next_power_of_2(H // K)), WIDTH=max(16, triton.next_power_of_2(D)), BLOCK=64, num_warps=4,
        num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _group_products(logits, stride, top, real, place, thinking, rows, out_ptr, W, SPAN,
                    G: tl.constexpr, PATHS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    group, part = tl.program_id(0), tl.program_id(1)
    path = tl.arange(0, PATHS)
    row = tl.load(place + group * G + path, mask=path < G, other=0)
    counts = (path < G) & (tl.load(thinking + group * G + path, mask=path < G, other=0) != 0) & (row < rows)
    sums = tl.zeros((PATHS, PATHS), tl.float32)
    if tl.sum(counts.to(tl.int32)) > 1:
        highest = tl.load(top + row, mask=counts, other=0.0)
        for start in range(part * SPAN, tl.minimum((part + 1) * SPAN, W), BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = (column < W) & (tl.load(real + column, mask=column < W, other=0) != 0)
            value = tl.load(logits + row.to(tl.int64)[:, None] * stride + column[None, :], mask=counts[:, None] & inside[None, :], other=float("-inf"))
            p = tl.exp(value.to(tl.float32) - highest[:, None])
            sums = tl.dot(p, tl.trans(p), sums, input_precision="tf32x3")
    at = ((group * tl.num_programs(1) + part) * PATHS + path[:, None]) * PATHS + path[None, :]
    tl.store(out_ptr + at, sums)


def group_products(logits, top, real, place, thinking):
    """sum_v exp(x_iv - top_i) exp(x_jv - top_j) for the thinking paths of a group: logits (n, W), top (n,), place and thinking (B, G) -> (B, G, G).

    One pass over the logits; no distribution is ever written. Scaling a path's probabilities does not change a cosine, so `top`, the largest
    logit of each row, may stand where log-sum-exp would.
    """
    B, G = place.shape
    paths, parts, W = max(16, triton.next_power_of_2(G)), 16, logits.shape[1]
    out = torch.empty(B, parts, paths, paths, dtype=torch.float32, device=logits.device)
    span = triton.cdiv(triton.cdiv(W, parts), 128) * 128
    _group_products[(B, parts)](logits, logits.stride(0), top, real, place, thinking, len(logits), out, W, span, G=G, PATHS=paths, BLOCK=128, num_warps=4)
    return out.sum(1)[:, :G, :G]

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
def _rotated(ptr, at, partner, cos, sin, real):
    """Rotary position embedding: each number with its partner, half a head away."""
    return tl.load(ptr + at, mask=real, other=0.0).to(tl.float32) * cos + tl.load(ptr + partner, mask=real, other=0.0).to(tl.float32) * sin


@triton.jit
def _decode_attention(q_ptr, k_ptr, v_ptr, q_stride, k_stride, v_stride, cos_ptr, sin_ptr, prompt_k, prompt_v, own_k, own_v, slot, home, prompt_len, own_len,
                      done, out_ptr, scale, P, T, HEADS: tl.constexpr, K: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr,
                      BLOCK: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    query, column = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    wide = column < D
    real = (query[:, None] < HEADS) & wide[None, :]
    out = (row * K + head) * HEADS * D + query[:, None] * D + column[None, :]
    if tl.load(done + row):
        tl.store(out_ptr + out, tl.zeros((QUERIES, WIDTH), out_ptr.dtype.element_ty), mask=real)
        return
    own, seen = tl.load(own_len + row), tl.load(prompt_len + row)
    own_base = (tl.load(home + row) * K + head) * T * D
    prompt_base = (tl.load(slot + row) * K + head) * P * D
    partner = tl.where(column < D // 2, column + D // 2, column - D // 2)
    cos = tl.load(cos_ptr + (seen + own) * D + column, mask=wide, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + (seen + own) * D + column, mask=wide, other=0.0).to(tl.float32)
    sin = tl.where(column < D // 2, -sin, sin)
    kind = own_k.dtype.element_ty
    q_row = row * q_stride + head * HEADS * D + query[:, None] * D
    q = (_rotated(q_ptr, q_row + column[None, :], q_row + partner[None, :], cos[None, :], sin[None, :], real).to(kind).to(tl.float32) * scale).to(kind)
    k_row = row * k_stride + head * D
    k = _rotated(k_ptr, k_row + column, k_row + partner, cos, sin, wide).to(kind)
    v = tl.load(v_ptr + row * v_stride + head * D + column, mask=wide, other=0.0)
    tl.store(own_k + own_base + own * D + column, k, mask=wide)
    tl.store(own_v + own_base + own * D + column, v, mask=wide)
    # the token itself opens the softmax: its key is in registers, not yet in the cache
    top = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1)
    total = tl.full((QUERIES,), 1.0, tl.float32)
    acc = tl.zeros((QUERIES, WIDTH), tl.float32) + v.to(tl.float32)[None, :]
    top, total, acc = _attend_to(q, top, total, acc, prompt_k + prompt_base, prompt_v + prompt_base, seen, D, WIDTH, BLOCK)
    top, total, acc = _attend_to(q, top, total, acc, own_k + own_base, own_v + own_base, own, D, WIDTH, BLOCK)
    tl.store(out_ptr + out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=real)


def decode_attention(q, k, v, cos, sin, prompt, own, slot, home, prompt_len, own_len, done, scale, block=64, warps=4, stages=3):
    """One new token a row over its prompt and what it has said: q (n, H, D), k and v (n, K, D), not yet rotated -> (n, H*D).

    prompt (2, S, K, P, D) and own (2, R, K, T, D) are read at slot (n,) and home (n,), as far as prompt_len and own_len say; cos and sin are rotary
    tables. The token's own key and value are written to `own`. Keys are read once for the H / K query heads that share them; rows of one group
    read the same prompt, which then comes from the cache of the card. A row that is done reads nothing.
    """
    n, H, D = q.shape
    K = k.shape[1]
    out = torch.empty(n, H * D, dtype=q.dtype, device=q.device)
    _decode_attention[(n, K)](
        q, k, v, q.stride(0), k.stride(0), v.stride(0), cos, sin, prompt[0], prompt[1], own[0], own[1], slot, home, prompt_len, own_len, done, out,
        scale * LOG2_E, prompt.shape[3], own.shape[3], HEADS=H // K, K=K, D=D, QUERIES=max(16, triton.next_power_of_2(H // K)),
        WIDTH=max(16, triton.next_power_of_2(D)), BLOCK=block, num_warps=warps, num_stages=stages,
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
            high = p.to(tl.bfloat16)  # a float32 product on the bf16 units: high parts, and what they leave over
            low = (p - high.to(tl.float32)).to(tl.bfloat16)
            sums += tl.dot(high, tl.trans(high)) + tl.dot(high, tl.trans(low)) + tl.dot(low, tl.trans(high))
    at = ((group * tl.num_programs(1) + part) * PATHS + path[:, None]) * PATHS + path[None, :]
    tl.store(out_ptr + at, sums)


def group_products(logits, top, real, place, thinking, parts=64, block=64, warps=1):
    """sum_v exp(x_iv - top_i) exp(x_jv - top_j) for the thinking paths of a group: logits (n, W), top (n,), place and thinking (B, G) -> (B, G, G).

    One pass over the logits; no distribution is ever written. Scaling a path's probabilities does not change a cosine, so `top`, the largest
    logit of each row, may stand where log-sum-exp would.
    """
    B, G = place.shape
    paths, W = max(16, triton.next_power_of_2(G)), logits.shape[1]
    out = torch.empty(B, parts, paths, paths, dtype=torch.float32, device=logits.device)
    span = triton.cdiv(triton.cdiv(W, parts), block) * block
    _group_products[(B, parts)](logits, logits.stride(0), top, real, place, thinking, len(logits), out, W, span, G=G, PATHS=paths, BLOCK=block, num_warps=warps)
    return out.sum(1)[:, :G, :G]

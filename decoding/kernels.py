"""The Triton kernels of the decode step on CUDA: attention, products of few rows, the sampler, cosines and blending of the paths.

Each has its twin in plain torch, with which a test compares it: `attend`, `into_attention` and `out_of_attention` in fast_model.py, `sample_step` and
`mix_step` in step.py, `products` in m3po_module.py. Where a sum is cut into parts, they are added in one order, whichever is done last.
Letters as in step.py; H query heads and K key heads of width D, S prompt slots, W logits of a row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from decoding.tokens import LOGIT_BLOCK

LOG2_E = 1.4426950408889634


ON_CARD = torch.cuda.is_available()


# From Hopper on a kernel may be started before the one ahead of it has ended, and wait for it then (programmatic dependent launch).
EARLY = ON_CARD and torch.cuda.get_device_capability()[0] >= 9


@triton.jit
def _attend_to(
    q, top, total, acc, keys, values, first, last, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Online softmax (FlashAttention) of the queries of one key head over keys `first` to `last` that lie one after another."""
    column = tl.arange(0, WIDTH)
    for start in range(first, last, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < last
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
    return (
        tl.load(ptr + at, mask=real, other=0.0).to(tl.float32) * cos
        + tl.load(ptr + partner, mask=real, other=0.0).to(tl.float32) * sin
    )


@triton.jit
def _decode_attention(q_ptr, k_ptr, v_ptr, q_stride, k_stride, v_stride, cos_ptr, sin_ptr, prompt_k, prompt_v, own_k, own_v, slot, home,
                      prompt_len, own_len, done, out_ptr, part_acc, part_sum, counter, scale, P, T, HEADS: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
                      QUERIES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query, column = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    wide = column < D
    real = (query[:, None] < HEADS) & wide[None, :]
    out = (row * K + head) * HEADS * D + query[:, None] * D + column[None, :]
    is_done = tl.load(done + row)
    own, seen = tl.load(own_len + row), tl.load(prompt_len + row)
    own_base = (tl.load(home + row) * K + head) * T * D
    prompt_base = (tl.load(slot + row) * K + head) * P * D
    partner = tl.where(column < D // 2, column + D // 2, column - D // 2)
    cos = tl.load(cos_ptr + (seen + own) * D + column, mask=wide, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + (seen + own) * D + column, mask=wide, other=0.0).to(tl.float32)
    sin = tl.where(column < D // 2, -sin, sin)
    if EARLY:  # nothing read so far changes within a step
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    if is_done:
        if part == 0:
            tl.store(out_ptr + out, tl.zeros((QUERIES, WIDTH), out_ptr.dtype.element_ty), mask=real)
        return
    kind = own_k.dtype.element_ty
    q_row = row * q_stride + head * HEADS * D + query[:, None] * D
    q = (
        _rotated(q_ptr, q_row + column[None, :], q_row + partner[None, :], cos[None, :], sin[None, :], real)
        .to(kind)
        .to(tl.float32)
        * scale
    ).to(kind)
    top = tl.full((QUERIES,), -1e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, WIDTH), tl.float32)
    if part == 0:  # the token itself opens the softmax: its key is in registers, not yet in the cache
        k_row = row * k_stride + head * D
        k = _rotated(k_ptr, k_row + column, k_row + partner, cos, sin, wide).to(kind)
        v = tl.load(v_ptr + row * v_stride + head * D + column, mask=wide, other=0.0)
        tl.store(own_k + own_base + own * D + column, k, mask=wide)
        tl.store(own_v + own_base + own * D + column, v, mask=wide)
        top = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1)
        total += 1.0
        acc += v.to(tl.float32)[None, :]
    share = tl.cdiv(tl.cdiv(seen + own, PARTS), BLOCK) * BLOCK
    first, last = part * share, tl.minimum((part + 1) * share, seen + own)
    top, total, acc = _attend_to(
        q,
        top,
        total,
        acc,
        prompt_k + prompt_base,
        prompt_v + prompt_base,
        first,
        tl.minimum(last, seen),
        D,
        WIDTH,
        BLOCK,
    )
    top, total, acc = _attend_to(
        q,
        top,
        total,
        acc,
        own_k + own_base,
        own_v + own_base,
        tl.maximum(first, seen) - seen,
        last - seen,
        D,
        WIDTH,
        BLOCK,
    )
    if PARTS > 1:  # the last part to finish joins them, always in the same order
        unit = row * K + head
        tl.store(part_sum + (unit * PARTS + part) * 2 * QUERIES + query, top)
        tl.store(part_sum + ((unit * PARTS + part) * 2 + 1) * QUERIES + query, total)
        tl.store(part_acc + ((unit * PARTS + part) * QUERIES + query[:, None]) * WIDTH + column[None, :], acc)
        tl.debug_barrier()
        if tl.atomic_add(counter + unit, 1) < PARTS - 1:
            return
        tl.store(counter + unit, 0)
        tl.debug_barrier()
        top = tl.full((QUERIES,), -1e30, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        acc = tl.zeros((QUERIES, WIDTH), tl.float32)
        for other in range(PARTS):
            its_top = tl.load(part_sum + (unit * PARTS + other) * 2 * QUERIES + query, cache_modifier=".cg")
            its_total = tl.load(
                part_sum + ((unit * PARTS + other) * 2 + 1) * QUERIES + query, cache_modifier=".cg"
            )
            its_acc = tl.load(
                part_acc + ((unit * PARTS + other) * QUERIES + query[:, None]) * WIDTH + column[None, :],
                cache_modifier=".cg",
            )
            higher = tl.maximum(top, its_top)
            mine, its = tl.exp2(top - higher), tl.exp2(its_top - higher)
            acc = acc * mine[:, None] + its_acc * its[:, None]
            total = total * mine + its_total * its
            top = higher
    tl.store(out_ptr + out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=real)


def decode_attention(
    q, k, v, cos, sin, prompt, own, slot, home, prompt_len, own_len, done, counter, scale, parts=None
):
    """One new token a row over its prompt and what it has said: q (n, H, D), k and v (n, K, D), not yet rotated -> (n, H*D).

    prompt (2, S, K, P, D) and own (2, R, K, T, D) are read at slot (n,) and home (n,), as far as prompt_len and own_len say; cos and sin are rotary
    tables. The token's own key and value are written to `own`. Keys are read once for the H / K query heads that share them; rows of one group
    read the same prompt, which then comes from the cache of the card. A row that is done reads nothing. Where rows are few, the keys of each
    are cut into `parts` (FlashDecoding); `counter` (R * K,) int32 is zero, and is left so.
    """
    n, H, D = q.shape
    K = k.shape[1]
    parts = parts or (4 if n * K <= 64 else 2 if n * K <= 256 else 1)
    block, warps, stages = (64, 2, 2) if n * K <= 64 else (32, 1 if D <= 64 else 2, 3)  # by trial on an H100
    queries, width = max(16, triton.next_power_of_2(H // K)), max(16, triton.next_power_of_2(D))
    out = torch.empty(n, H * D, dtype=q.dtype, device=q.device)
    part_acc, part_sum = (torch.empty(n * K * parts, queries, size, device=q.device) for size in (width, 2))
    _decode_attention[(n, K, parts)](
        q, k, v, q.stride(0), k.stride(0), v.stride(0), cos, sin, prompt[0], prompt[1], own[0], own[1], slot, home, prompt_len, own_len, done, out, part_acc,
        part_sum, counter, scale * LOG2_E, prompt.shape[3], own.shape[3], HEADS=H // K, K=K, D=D, QUERIES=queries, WIDTH=width, BLOCK=block, PARTS=parts,
        EARLY=EARLY, num_warps=warps, num_stages=stages, launch_pdl=EARLY,
    )  # fmt: skip
    return out


@triton.jit
def _rows_of(ptr, row, column, n, E):
    return tl.load(
        ptr + row[:, None] * E + column[None, :], mask=(row[:, None] < n) & (column[None, :] < E), other=0.0
    )


@triton.jit(do_not_specialize=["n", "tiles_of_squares"])
def _linear(a_ptr, weight_ptr, bias_ptr, squares_ptr, tiles_of_squares, x_ptr, norm_ptr, out_ptr, scaled_ptr, new_squares_ptr, part_ptr,
            counter, n, F, E, eps, NORMED: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, SQUARES: tl.constexpr,
            ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr, AT_ONCE: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    tile, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, column = block * ROWS + tl.arange(0, ROWS), tile * COLUMNS + tl.arange(0, COLUMNS)
    kind = a_ptr.dtype.element_ty
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    other = tl.zeros((ROWS, COLUMNS), tl.float32)
    share = tl.cdiv(tl.cdiv(E, PARTS), SPAN) * SPAN
    if AT_ONCE:  # the weight depends on nothing: it is on its way before the kernel ahead has ended
        k = tl.arange(0, SPAN)
        weight = tl.load(
            weight_ptr + column[:, None] * E + k[None, :],
            mask=(column[:, None] < F) & (k[None, :] < E),
            other=0.0,
        )
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    if AT_ONCE:
        product = tl.dot(_rows_of(a_ptr, row, k, n, E), tl.trans(weight), product, input_precision="ieee")
    else:
        for start in range(part * share, tl.minimum((part + 1) * share, E), SPAN):
            k = start + tl.arange(0, SPAN)
            a = _rows_of(a_ptr, row, k, n, E)
            at, there = column[:, None] * E + k[None, :], (column[:, None] < F) & (k[None, :] < E)
            product = tl.dot(
                a, tl.trans(tl.load(weight_ptr + at, mask=there, other=0.0)), product, input_precision="ieee"
            )
            if GATED:
                other = tl.dot(
                    a,
                    tl.trans(tl.load(weight_ptr + F * E + at, mask=there, other=0.0)),
                    other,
                    input_precision="ieee",
                )
    if PARTS > 1:  # the last part to finish adds them up, always in the same order
        unit = block * tl.num_programs(0) + tile
        inner = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        tl.store(part_ptr + (unit * PARTS + part) * ROWS * COLUMNS + inner, product)
        tl.debug_barrier()
        if tl.atomic_add(counter + unit, 1) < PARTS - 1:
            return
        tl.store(counter + unit, 0)
        tl.debug_barrier()
        product = tl.zeros((ROWS, COLUMNS), tl.float32)
        for which in range(PARTS):
            product += tl.load(
                part_ptr + (unit * PARTS + which) * ROWS * COLUMNS + inner, cache_modifier=".cg"
            )
    if NORMED:
        which = tl.arange(0, SQUARES)[None, :]
        squares = tl.load(
            squares_ptr + row[:, None] * tiles_of_squares + which,
            mask=(row[:, None] < n) & (which < tiles_of_squares),
            other=0.0,
        )
        size = tl.rsqrt(tl.sum(squares, 1) / E + eps)[:, None]
        product, other = product * size, other * size
    if BIAS:
        product += tl.load(bias_ptr + column, mask=column < F, other=0.0).to(tl.float32)[None, :]
        if GATED:
            other += tl.load(bias_ptr + F + column, mask=column < F, other=0.0).to(tl.float32)[None, :]
    if GATED:
        product = product * tl.sigmoid(product) * other
    at, there = row[:, None] * F + column[None, :], (row[:, None] < n) & (column[None, :] < F)
    if RESIDUAL:
        total = (
            tl.load(x_ptr + at, mask=there, other=0.0).to(tl.float32) + product.to(kind).to(tl.float32)
        ).to(kind)
        tl.store(out_ptr + at, total, mask=there)
        wide = total.to(tl.float32)
        tl.store(
            scaled_ptr + at,
            (wide * tl.load(norm_ptr + column, mask=column < F, other=0.0).to(tl.float32)[None, :]).to(kind),
            mask=there,
        )
        tl.store(new_squares_ptr + row * tl.num_programs(0) + tile, tl.sum(wide * wide, 1), mask=row < n)
    else:
        tl.store(out_ptr + at, product.to(kind), mask=there)


class Normed(NamedTuple):
    """Rows x of the residual stream on their way through an RMS norm: times its weight, but not yet divided by the rows' own sizes."""

    x: torch.Tensor  # (n, E)
    scaled: torch.Tensor  # (n, E)
    squares: torch.Tensor  # (n, parts), sums of squares of x


def few_rows_linear(a, weight, bias, counter, gated=False, residual=None, norm=None, eps=0.0, parts=None):
    """a @ weight.T + bias for few rows, with what stands before and behind it: a (n, E) or Normed, weight (F, E) -> (n, F), or Normed (n, F).

    A norm divides each row by one number, which can stand behind the product. `gated`: the weight is gate and up, one below the other, and the
    result silu(gate) * up, half as wide. `residual` (n, F): the result is added to it, and prepared for the norm of weight `norm` that follows.
    Each weight is read once, and where its rows are few for the card their length is cut into `parts`; `counter` is int32, zero, and is left so.
    """
    normed = isinstance(a, Normed)
    squares, a = (a.squares, a.scaled) if normed else (weight, a)
    n, E = a.shape
    F = weight.shape[0] // (2 if gated else 1)
    rows = 16 if n <= 16 else 32 if n <= 32 else 64
    at_once = rows <= 32 and E <= 1024 and not gated
    columns, span, stages = (
        (32 if rows == 16 else 64, 64, 5) if gated else (16, triton.next_power_of_2(E) if at_once else 128, 4)
    )  # by trial on an H100
    tiles, blocks = triton.cdiv(F, columns), triton.cdiv(n, rows)
    parts = 1 if gated or at_once else parts or max(1, min(4, E // (2 * span)))
    out = torch.empty(n, F, dtype=a.dtype, device=a.device)
    scaled = torch.empty_like(out) if residual is not None else out
    new_squares = torch.empty(n, tiles if residual is not None else 1, device=a.device)
    scratch = torch.empty(parts * tiles * blocks * rows * columns if parts > 1 else 1, device=a.device)
    _linear[(tiles, blocks, parts)](
        a, weight, weight if bias is None else bias, squares, squares.shape[1], a if residual is None else residual, weight if norm is None else norm, out,
        scaled, new_squares, scratch, counter, n, F, E, eps, NORMED=normed, BIAS=bias is not None, GATED=gated, RESIDUAL=residual is not None,
        SQUARES=triton.next_power_of_2(triton.cdiv(E, 16)) if normed else 1, ROWS=rows, COLUMNS=columns, SPAN=span, PARTS=parts, AT_ONCE=at_once, EARLY=EARLY,
        num_warps=4, num_stages=stages, launch_pdl=EARLY,
    )  # fmt: skip
    return out if residual is None else Normed(out, scaled, new_squares)


@triton.jit
def _group_products(logits, stride, top, real, place, thinking, rows, out_ptr, W, SPAN, B,
                    G: tl.constexpr, SLOTS: tl.constexpr, PATHS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, PATHS)
    group, path = tile * (PATHS // SLOTS) + lane // SLOTS, lane % SLOTS
    counts = (path < G) & (group < B)
    row = tl.load(place + group * G + path, mask=counts, other=rows)
    counts = counts & (row < rows)
    counts = counts & (tl.load(thinking + row, mask=counts, other=0) != 0)
    sums = tl.zeros((PATHS, PATHS), tl.float32)
    if tl.sum(counts.to(tl.int32)) > 1:
        highest = tl.load(top + row, mask=counts, other=0.0)
        for start in range(part * SPAN, tl.minimum((part + 1) * SPAN, W), BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = tl.load(real + column) != 0
            value = tl.load(
                logits + row.to(tl.int64)[:, None] * stride + column[None, :],
                mask=counts[:, None] & inside[None, :],
                other=float("-inf"),
            )
            p = tl.exp(value.to(tl.float32) - highest[:, None])
            high = p.to(
                tl.bfloat16
            )  # a float32 product on the bf16 units: high parts, and what they leave over
            low = (p - high.to(tl.float32)).to(tl.bfloat16)
            sums += tl.dot(high, tl.trans(high)) + tl.dot(high, tl.trans(low)) + tl.dot(low, tl.trans(high))
    at = ((tile * tl.num_programs(1) + part) * PATHS + lane[:, None]) * PATHS + lane[None, :]
    tl.store(out_ptr + at, sums)


def group_products(logits, top, real, place, thinking):
    """sum_v exp(x_iv - top_i) exp(x_jv - top_j) for the thinking paths of each group: logits (n, W), top and thinking (n,), place (B, G).

    Returns parts still to be added, (tiles, parts, lanes, lanes) float32: groups lie side by side in tiles, G up to a power of two lanes each. One pass
    over the logits; no distribution is ever written. Scaling a path's probabilities does not change a cosine, so `top`, the largest logit of each
    row, may stand where log-sum-exp would.
    """
    (B, G), (n, W) = place.shape, logits.shape
    parts, block = 256, 32  # by trial on an H100; W is a multiple of LOGIT_BLOCK
    slots = triton.next_power_of_2(G)
    lanes = max(16, slots)
    tiles, span = triton.cdiv(B, lanes // slots), triton.cdiv(triton.cdiv(W, parts), block) * block
    out = torch.empty(tiles, parts, lanes, lanes, dtype=torch.float32, device=logits.device)
    _group_products[(tiles, parts)](
        logits, logits.stride(0), top, real, place, thinking, n, out, W, span, B, G=G, SLOTS=slots, PATHS=lanes, BLOCK=block, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _mix(parts_ptr, place, thinking, t, inputs, mix, input_change, n, T, columns, E, temperature, lam,
         G: tl.constexpr, SLOTS: tl.constexpr, PATHS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    group = tl.program_id(0)
    path, other = tl.arange(0, SLOTS)[:, None], tl.arange(0, SLOTS)[None, :]
    row = tl.load(place + group * G + path, mask=path < G, other=n)
    here = row < n
    thinks = (tl.load(thinking + row, mask=here, other=0) != 0) & here  # (SLOTS, 1)
    said = tl.maximum(tl.load(t + row, mask=here, other=1) - 1, 0)
    e = tl.arange(0, WIDTH)[None, :]
    listens = thinks & (tl.sum(thinks.to(tl.int32)) > 1)
    if tl.sum(thinks.to(tl.int32)) > 1:
        tile, first = group // (PATHS // SLOTS), group % (PATHS // SLOTS) * SLOTS
        sums = tl.zeros((SLOTS, SLOTS), tl.float32)
        for part in range(0, PARTS, 32):
            which = part + tl.arange(0, 32)[:, None, None]
            at = (
                ((tile * PARTS + which) * PATHS + first + path[None, :, :]) * PATHS
                + first
                + other[None, :, :]
            )
            sums += tl.sum(tl.load(parts_ptr + at), 0)
        size = tl.rsqrt(tl.maximum(tl.sum(tl.where(path == other, sums, 0.0), 1), 1e-24))
        across = tl.rsqrt(tl.maximum(tl.sum(tl.where(path == other, sums, 0.0), 0), 1e-24))
        peer_row = tl.load(place + group * G + other, mask=other < G, other=n)
        peer = (tl.load(thinking + peer_row, mask=peer_row < n, other=0) != 0) & (peer_row < n)  # (1, SLOTS)
        allowed = thinks & peer & (path != other)
        scores = tl.where(allowed, sums * size[:, None] * across[None, :] / temperature, -1e30)
        weights = tl.where(allowed, tl.exp(scores - tl.max(scores, 1)[:, None]), 0.0)
        weights = weights / tl.maximum(tl.sum(weights, 1), 1e-30)[:, None]
        tl.store(
            mix + ((group * T + tl.max(tl.where(thinks, said, 0))) * G + path) * G + other,
            weights,
            mask=(path < G) & (other < G),
        )
        inside = here & (e < E)
        own = tl.load(inputs + row * E + e, mask=inside, other=0.0)
        heard = (1 - lam) * own.to(tl.float32)
        for j in range(0, G):
            weight = tl.sum(tl.where(other == j, weights, 0.0), 1)[:, None]
            its_row = tl.load(place + group * G + j)
            its = tl.load(inputs + its_row * E + e, mask=(e < E) & (its_row < n), other=0.0).to(tl.float32)
            heard += lam * weight * its
        new = tl.where(listens, heard.to(own.dtype), own)
        moved, size = new.to(tl.float32) - own.to(tl.float32), own.to(tl.float32)
        change = tl.sqrt(tl.sum(moved * moved, 1)) / tl.maximum(tl.sqrt(tl.sum(size * size, 1)), 1e-9)
        tl.debug_barrier()  # every input is read before one is written
        tl.store(inputs + row * E + e, new, mask=inside & listens)
        tl.store(input_change + row * columns + said, change[:, None], mask=here)
    else:
        tl.store(input_change + row * columns + said, tl.zeros((SLOTS, 1), tl.float32), mask=here)


def mix(inputs, products, thinking, place, t, mix, input_change, temperature, lambda_blend):
    """`mix_step` of step.py in one kernel, a group a program: inputs (n, E) are changed in place, mix (B, T, G, G) and input_change recorded.

    products: what `group_products` gave.
    """
    (n, E), (B, G), (_, parts, lanes, _) = inputs.shape, place.shape, products.shape
    _mix[(B,)](
        products, place, thinking, t, inputs, mix, input_change, n, mix.shape[1], input_change.shape[1], E, temperature, lambda_blend, G=G,
        SLOTS=triton.next_power_of_2(G), PATHS=lanes, PARTS=parts, WIDTH=triton.next_power_of_2(E), num_warps=8,
    )  # fmt: skip
    return inputs


@triton.jit
def _scores(logits, real, id, there, temperature):
    score = tl.load(logits + id, mask=there, other=0.0).to(tl.float32) / temperature
    return tl.where(tl.load(real + id, mask=there, other=0) != 0, score, -1e30)


@triton.jit
def _block_sums(
    logits, stride, real, temperature, top_ptr, mass_ptr, blocks, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    row, block = tl.program_id(0), tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    id = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    score = _scores(
        logits + row.to(tl.int64) * stride, real, id, block[:, None] < blocks, tl.load(temperature)
    )
    top = tl.max(score, 1)
    tl.store(top_ptr + row * blocks + block, top, mask=block < blocks)
    tl.store(mass_ptr + row * blocks + block, tl.sum(tl.exp(score - top[:, None]), 1), mask=block < blocks)


@triton.jit
def _first_beyond(weights, index, fraction):
    """The first place whose running sum passes `fraction` of the whole, how far into it that lies; never one of weight 0."""
    ends = tl.cumsum(weights, 0)
    target = fraction * tl.max(ends, 0)
    last = tl.max(tl.where(weights > 0, index, 0), 0)
    place = tl.min(tl.where((ends > target) & (weights > 0), index, last), 0)
    here, end = (
        tl.sum(tl.where(index == place, weights, 0.0), 0),
        tl.sum(tl.where(index == place, ends, 0.0), 0),
    )
    return place, tl.minimum(tl.maximum((target - (end - here)) / here, 0.0), 1.0)


@triton.jit
def _pick(logits, stride, real, temperature_ptr, block_top, block_mass, uniforms, next_state, is_eos, limit, ids, logps, thinkings, t_ptr, state_ptr, ended_ptr,
          done_ptr, tokens, thinks, tops, blocks, columns, states, V, pad_id, GREEDY: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    index, inner = tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    temperature, t, done = tl.load(temperature_ptr), tl.load(t_ptr + row), tl.load(done_ptr + row) != 0
    block_tops = tl.load(block_top + row * blocks + index, mask=index < blocks, other=-1e30)
    top = tl.max(block_tops, 0)
    mass = tl.load(block_mass + row * blocks + index, mask=index < blocks, other=0.0) * tl.exp(
        block_tops - top
    )
    if GREEDY:
        which, rest = (
            tl.minimum(tl.min(tl.where(block_tops == top, index, WIDTH - 1), 0), blocks - 1),
            0.0,
        )  # nowhere, where all is NaN
    else:
        which, rest = _first_beyond(mass, index, tl.load(uniforms + row * columns + t))
    id = which * BLOCK + inner
    score = _scores(logits + row.to(tl.int64) * stride, real, id, inner < BLOCK, temperature)
    inside_top = tl.max(score, 0)
    if GREEDY:
        place = tl.min(tl.where(score == inside_top, inner, BLOCK - 1), 0)
    else:
        place, rest = _first_beyond(tl.exp(score - inside_top), inner, rest)
    token = tl.where(done, pad_id, tl.minimum(which * BLOCK + place, V - 1)).to(tl.int64)
    logp = tl.where(
        done, 0.0, tl.sum(tl.where(inner == place, score, 0.0), 0) - top - tl.log(tl.sum(mass, 0))
    )
    state = tl.load(next_state + tl.load(state_ptr + row) * V + token)
    eos = (tl.load(is_eos + token) != 0) & (done == 0)
    thinking = (done == 0) & (eos == 0) & (state < states - 1)
    at = row * columns + t
    tl.store(ids + at, token)
    tl.store(logps + at, logp)
    tl.store(thinkings + at, thinking)
    tl.store(state_ptr + row, state)
    t += (done == 0).to(tl.int64)
    tl.store(t_ptr + row, t)
    tl.store(ended_ptr + row, (tl.load(ended_ptr + row) != 0) | eos)
    tl.store(done_ptr + row, done | eos | (t >= tl.load(limit)))
    tl.store(tokens + row, token)
    tl.store(thinks + row, thinking)
    tl.store(tops + row, top * temperature)


def sample(rows, tables, temperature, limit, greedy):
    """`sample_step` of step.py in two kernels: one pass over the logits, then a program a row."""
    (next_state, is_eos, real, pad_id), block = tables, LOGIT_BLOCK
    n, blocks = len(rows.logits), rows.logits.shape[1] // block
    block_top, block_mass = torch.empty(2, n, blocks, device=real.device)
    tokens, thinking, top = (
        torch.empty_like(rows.t),
        torch.empty_like(rows.done),
        torch.empty(n, device=real.device),
    )
    stride = rows.logits.stride(0)
    _block_sums[(n, triton.cdiv(blocks, 16))](
        rows.logits,
        stride,
        real,
        temperature,
        block_top,
        block_mass,
        blocks,
        BLOCKS=16,
        BLOCK=block,
        num_warps=4,
    )
    _pick[(n,)](
        rows.logits, stride, real, temperature, block_top, block_mass, rows.uniforms, next_state, is_eos, limit, rows.ids, rows.logp, rows.thinking, rows.t,
        rows.state, rows.ended, rows.done, tokens, thinking, top, blocks, rows.ids.shape[1], len(next_state), next_state.shape[1], pad_id, GREEDY=greedy,
        BLOCK=block, WIDTH=triton.next_power_of_2(blocks), num_warps=4,
    )  # fmt: skip
    return tokens, thinking, top

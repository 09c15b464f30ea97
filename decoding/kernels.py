"""The Triton kernels of the decode step: attention, products of few rows, sampling, cosines, blending.

Each has its twin in plain torch, with which a test compares it: `attend`, `into_attention` and
`out_of_attention` in fast_model.py, `sample_step`, `mix_step` and `control_step` in step.py, `products` in
m3po_module.py, `directions`, `likeliest`, `mean_embedding` and `Strangers.tokens` in controls.py.
Where a sum is cut into parts, they are always added in the same order, whichever is done last. Letters as in
step.py; H query heads and K key heads of width D, S prompt slots, W logits of a row.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra import cuda

from decoding.step import by_group, norm_shrink
from decoding.tokens import LOGIT_BLOCK
from m3po_module import products

LOG2_E = tl.constexpr(math.log2(math.e))

# From Hopper on a kernel may start before the one ahead of it has ended, and then wait for it
# (programmatic dependent launch).
EARLY = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9

# A cache that can hold more keys a row than SHORT is cut into more parts, until there are so many programs: 8
# for each multiprocessor of an H100. By a trial of their shared memory, about 5 of them run there at a time.
SHORT, PROGRAMS, MOST_PARTS = 1024, 8 * 132, 32
LEAST_KEYS = 256  # of such a part: a row that has said little is cut into fewer


@triton.jit
def _attend_to(
    q, top, total, acc, keys, values, first, last, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Online softmax (FlashAttention) of the queries of one key head over keys `first` to `last`."""
    column = tl.arange(0, WIDTH)
    for start in range(first, last, BLOCK):
        position = start + tl.arange(0, BLOCK)
        inside = position < last
        offset = position[:, None] * D + column[None, :]
        valid = inside[:, None] & (column[None, :] < D)
        key = tl.load(keys + offset, mask=valid, other=0.0)
        scores = tl.where(inside[None, :], tl.dot(q, tl.trans(key), input_precision="ieee"), float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        value = tl.load(values + offset, mask=valid, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = higher
    return top, total, acc


@triton.jit
def _chunk(chunks, number, side, dtype):
    """Where a chunk's keys (side 0) or values (1) are: a captured step finds those that came later, too."""
    address = tl.load(chunks + 2 * number + side).to(tl.pointer_type(dtype))
    return tl.multiple_of(address, 16)  # else it would be read two bytes at a time


@triton.jit
def _rotated(ptr, offset, partner, cos, sin, valid):
    """Rotary position embedding: each number with its partner, half a head away."""
    number = tl.load(ptr + offset, mask=valid, other=0.0).to(tl.float32)
    return number * cos + tl.load(ptr + partner, mask=valid, other=0.0).to(tl.float32) * sin


@triton.jit
def _decode_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    q_stride,
    k_stride,
    v_stride,
    cos_ptr,
    sin_ptr,
    prompt_k,
    prompt_v,
    chunks,
    slot,
    cache_row,
    prompt_len,
    past_len,
    finished,
    out_ptr,
    part_acc,
    part_sum,
    counter,
    scale,
    P,
    C,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query, column = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    wide = column < D
    valid = (query[:, None] < HEADS) & wide[None, :]
    out = (row * K + head) * HEADS * D + query[:, None] * D + column[None, :]
    is_finished = tl.load(finished + row)
    past, prompt = tl.load(past_len + row), tl.load(prompt_len + row)
    chunk_base = (tl.load(cache_row + row) * K + head) * C * D
    prompt_base = (tl.load(slot + row) * K + head) * P * D
    partner = tl.where(column < D // 2, column + D // 2, column - D // 2)
    cos = tl.load(cos_ptr + (prompt + past) * D + column, mask=wide, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + (prompt + past) * D + column, mask=wide, other=0.0).to(tl.float32)
    sin = tl.where(column < D // 2, -sin, sin)
    if EARLY:  # nothing read so far changes within a step
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    if is_finished:
        if part == 0:
            tl.store(out_ptr + out, tl.zeros((QUERIES, WIDTH), out_ptr.dtype.element_ty), mask=valid)
        return
    share = tl.maximum(tl.cdiv(tl.cdiv(prompt + past, PARTS), BLOCK) * BLOCK, LEAST)
    used = tl.cdiv(prompt + past, share)  # parts that have keys
    if part >= used:
        return
    dtype = prompt_k.dtype.element_ty
    q_row = row * q_stride + head * HEADS * D + query[:, None] * D
    q = _rotated(q_ptr, q_row + column[None, :], q_row + partner[None, :], cos[None, :], sin[None, :], valid)
    q = (q.to(dtype).to(tl.float32) * scale).to(dtype)
    top = tl.full((QUERIES,), -1e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, WIDTH), tl.float32)
    if part == 0:  # the token itself opens the softmax: its key is in registers, not yet in the cache
        k_row = row * k_stride + head * D
        k = _rotated(k_ptr, k_row + column, k_row + partner, cos, sin, wide).to(dtype)
        v = tl.load(v_ptr + row * v_stride + head * D + column, mask=wide, other=0.0)
        own = chunk_base + past % C * D + column
        tl.store(_chunk(chunks, past // C, 0, dtype) + own, k, mask=wide)
        tl.store(_chunk(chunks, past // C, 1, dtype) + own, v, mask=wide)
        top = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1)
        total += 1.0
        acc += v.to(tl.float32)[None, :]
    first, last = part * share, tl.minimum((part + 1) * share, prompt + past)
    keys, values, end = prompt_k + prompt_base, prompt_v + prompt_base, tl.minimum(last, prompt)
    top, total, acc = _attend_to(q, top, total, acc, keys, values, first, end, D, WIDTH, BLOCK)
    begin, end = tl.maximum(first, prompt) - prompt, last - prompt
    for chunk in range(begin // C, tl.cdiv(end, C)):
        keys = _chunk(chunks, chunk, 0, dtype) + chunk_base
        values = _chunk(chunks, chunk, 1, dtype) + chunk_base
        left, right = tl.maximum(begin - chunk * C, 0), tl.minimum(end - chunk * C, C)
        top, total, acc = _attend_to(q, top, total, acc, keys, values, left, right, D, WIDTH, BLOCK)
    if PARTS > 1:  # the last part to finish joins them, always in the same order
        unit = row * K + head
        tops, accs = part_sum + unit * PARTS * 2 * QUERIES + query, part_acc + unit * PARTS * QUERIES * WIDTH
        inner = query[:, None] * WIDTH + column[None, :]
        tl.store(tops + part * 2 * QUERIES, top)
        tl.store(tops + (part * 2 + 1) * QUERIES, total)
        tl.store(accs + part * QUERIES * WIDTH + inner, acc, mask=valid)
        tl.debug_barrier()
        if tl.atomic_add(counter + unit, 1) < used - 1:
            return
        tl.store(counter + unit, 0)
        tl.debug_barrier()
        top = tl.full((QUERIES,), -1e30, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        acc = tl.zeros((QUERIES, WIDTH), tl.float32)
        for other in tl.range(0, used, loop_unroll_factor=4):
            other_top = tl.load(tops + other * 2 * QUERIES, cache_modifier=".cg")
            other_total = tl.load(tops + (other * 2 + 1) * QUERIES, cache_modifier=".cg")
            other_acc = tl.load(
                accs + other * QUERIES * WIDTH + inner, mask=valid, other=0.0, cache_modifier=".cg"
            )
            higher = tl.maximum(top, other_top)
            shrink, other_shrink = tl.exp2(top - higher), tl.exp2(other_top - higher)
            acc = acc * shrink[:, None] + other_acc * other_shrink[:, None]
            total = total * shrink + other_total * other_shrink
            top = higher
    tl.store(out_ptr + out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=valid)


def cut_keys(units, keys):
    """Into how many parts a row's keys are cut at most, and how many keys a part has at least.

    For `units` pairs of row and key head, whose storage holds `keys` keys when it is full. A power of two
    where keys may be many, so that few kernels are compiled.
    """
    few = 4 if units <= 64 else 2 if units <= 256 else 1
    if keys <= SHORT:
        return few, 1
    many = 1 << max(1, PROGRAMS // units).bit_length() - 1
    return max(few, min(many, MOST_PARTS)), LEAST_KEYS


def decode_attention(q, k, v, cache, rows, past_len, counter, scale, parts=None):
    """One new token a row over its prompt and its completion so far.

    q (n, H, D), k and v (n, K, D), not yet rotated -> (n, H*D). The prompt's keys and values are read at
    rows.slot, the completion's at rows.cache_row of each chunk, as far as rows.prompt_len and past_len (n,)
    say; those of the new token are written behind them. Chunks are found by their addresses.
    Keys are read once for the H / K query heads that share them; rows of one group read the same prompt,
    which then comes from the cache of the card. A finished row reads nothing. Where rows are few or long, the
    keys of each are cut into `parts` (FlashDecoding); `counter` (R * K,) int32 is zero, and is left so.
    """
    n, H, D = q.shape
    K, P, C = k.shape[1], cache.prompt.shape[3], cache.chunks[0].shape[3]
    most, least = cut_keys(n * K, P + C * len(cache.addresses)) if parts is None else (parts, 1)
    block, warps, stages = (64, 2, 2) if n * K <= 64 else (32, 1 if D <= 64 else 2, 3)  # by trial on an H100
    queries, width = max(16, triton.next_power_of_2(H // K)), max(16, triton.next_power_of_2(D))
    out = torch.empty(n, H * D, dtype=q.dtype, device=q.device)
    part_acc, part_sum = (torch.empty(n * K * most, queries, size, device=q.device) for size in (width, 2))
    token = (q, k, v, q.stride(0), k.stride(0), v.stride(0), cache.cos, cache.sin)
    keys_and_values = (cache.prompt[0], cache.prompt[1], cache.addresses)
    where = (rows.slot, rows.cache_row, rows.prompt_len, past_len, rows.finished)
    results = (out, part_acc, part_sum, counter, scale * LOG2_E.value, P, C)
    sizes = dict(HEADS=H // K, K=K, D=D, QUERIES=queries, WIDTH=width, BLOCK=block, PARTS=most)
    sizes |= dict(LEAST=max(least, block), EARLY=EARLY)
    launch = dict(num_warps=warps, num_stages=stages, launch_pdl=EARLY)
    _decode_attention[(n, K, most)](*token, *keys_and_values, *where, *results, **sizes, **launch)
    return out


@triton.jit
def _rows_of(ptr, row, column, n, E):
    offset, valid = row[:, None] * E + column[None, :], (row[:, None] < n) & (column[None, :] < E)
    return tl.load(ptr + offset, mask=valid, other=0.0)


@triton.jit(do_not_specialize=["n", "tiles_of_squares"])
def _linear(
    a_ptr,
    weight_ptr,
    bias_ptr,
    squares_ptr,
    tiles_of_squares,
    x_ptr,
    norm_ptr,
    out_ptr,
    scaled_ptr,
    new_squares_ptr,
    part_ptr,
    counter,
    n,
    F,
    E,
    eps,
    NORMED: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SQUARES: tl.constexpr,
    SHRINK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):
    tile, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, column = block * ROWS + tl.arange(0, ROWS), tile * COLUMNS + tl.arange(0, COLUMNS)
    dtype = a_ptr.dtype.element_ty
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    share = tl.cdiv(tl.cdiv(E, PARTS), SPAN) * SPAN
    if AT_ONCE:  # the weight depends on nothing: it is on its way before the kernel ahead has ended
        k = tl.arange(0, SPAN)
        weight = _rows_of(weight_ptr, column, k, F, E)
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    if AT_ONCE:
        product = tl.dot(_rows_of(a_ptr, row, k, n, E), tl.trans(weight), product, input_precision="ieee")
    else:
        for start in range(part * share, tl.minimum((part + 1) * share, E), SPAN):
            k = start + tl.arange(0, SPAN)
            a = _rows_of(a_ptr, row, k, n, E)
            weight = _rows_of(weight_ptr, column, k, F, E)
            product = tl.dot(a, tl.trans(weight), product, input_precision="ieee")
            if GATED:
                weight = _rows_of(weight_ptr + F * E, column, k, F, E)
                up = tl.dot(a, tl.trans(weight), up, input_precision="ieee")
    if PARTS > 1:  # the last part to finish adds them up, always in the same order
        unit = block * tl.num_programs(0) + tile
        inner = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        parts = part_ptr + unit * PARTS * ROWS * COLUMNS + inner
        tl.store(parts + part * ROWS * COLUMNS, product)
        tl.debug_barrier()
        if tl.atomic_add(counter + unit, 1) < PARTS - 1:
            return
        tl.store(counter + unit, 0)
        tl.debug_barrier()
        product = tl.zeros((ROWS, COLUMNS), tl.float32)
        for other in range(PARTS):
            product += tl.load(parts + other * ROWS * COLUMNS, cache_modifier=".cg")
    if NORMED:
        squares = _rows_of(squares_ptr, row, tl.arange(0, SQUARES), n, tiles_of_squares)
        size = tl.rsqrt(tl.sum(squares, 1) / E + eps)[:, None]
        if SHRINK != 1:
            size = size / SHRINK
        product, up = product * size, up * size
    if BIAS:
        product += tl.load(bias_ptr + column, mask=column < F, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + F + column, mask=column < F, other=0.0).to(tl.float32)[None, :]
    if GATED:
        product = product * tl.sigmoid(product) * up
    offset, valid = row[:, None] * F + column[None, :], (row[:, None] < n) & (column[None, :] < F)
    if RESIDUAL:
        x = tl.load(x_ptr + offset, mask=valid, other=0.0).to(tl.float32)
        total = (x + product.to(dtype).to(tl.float32)).to(dtype)
        tl.store(out_ptr + offset, total, mask=valid)
        wide = total.to(tl.float32)
        norm = tl.load(norm_ptr + column, mask=column < F, other=0.0).to(tl.float32)[None, :]
        if SHRINK != 1:
            norm = norm * SHRINK
        tl.store(scaled_ptr + offset, (wide * norm).to(dtype), mask=valid)
        tl.store(new_squares_ptr + row * tl.num_programs(0) + tile, tl.sum(wide * wide, 1), mask=row < n)
    else:
        tl.store(out_ptr + offset, product.to(dtype), mask=valid)


class Normed(NamedTuple):
    """Rows x halfway through an RMS norm: times its weight, not yet divided by their root mean squares."""

    x: torch.Tensor  # (n, E)
    scaled: torch.Tensor  # (n, E), times `norm_shrink`
    squares: torch.Tensor  # (n, parts), sums of squares of x


def few_rows_linear(a, weight, bias, counter, gated=False, residual=None, norm=None, eps=0.0, parts=None):
    """a @ weight.T + bias for few rows: a (n, E) or Normed, weight (F, E) -> (n, F), or Normed (n, F).

    A norm divides each row by one number, which can be done after the product. `gated`: the weight is gate
    and up, one below the other, and the result silu(gate) * up, half as wide. `residual` (n, F): the result
    is added to it, and prepared for the norm of weight `norm` that follows. Each weight is read once, and
    where its rows are few for the card their length is cut into `parts`; `counter` is int32, zero, and is
    left so.
    """
    normed, adds = isinstance(a, Normed), residual is not None
    squares, a = (a.squares, a.scaled) if normed else (weight, a)
    n, E = a.shape
    F = weight.shape[0] // (2 if gated else 1)
    rows = 16 if n <= 16 else 32 if n <= 32 else 64
    at_once = rows <= 32 and E <= 1024 and not gated
    if gated:  # sizes by trial on an H100
        columns, span, stages = 32 if rows == 16 else 64, 64, 5
    else:
        columns, span, stages = 16, triton.next_power_of_2(E) if at_once else 128, 4
    tiles, blocks = triton.cdiv(F, columns), triton.cdiv(n, rows)
    parts = 1 if gated or at_once else parts or max(1, min(4, E // (2 * span)))
    out = torch.empty(n, F, dtype=a.dtype, device=a.device)
    scaled = torch.empty_like(out) if adds else out
    new_squares = torch.empty(n, tiles if adds else 1, device=a.device)
    scratch = torch.empty(parts * tiles * blocks * rows * columns if parts > 1 else 1, device=a.device)
    # A kernel must be given a tensor for each pointer, also where it reads none.
    inputs = (a, weight, weight if bias is None else bias, squares, squares.shape[1])
    after = (residual if adds else a, weight if norm is None else norm)
    results = (out, scaled, new_squares, scratch, counter)
    kind = dict(
        NORMED=normed, BIAS=bias is not None, GATED=gated, RESIDUAL=adds, AT_ONCE=at_once, EARLY=EARLY
    )
    kind["SHRINK"] = norm_shrink(a.dtype)
    kind["SQUARES"] = triton.next_power_of_2(triton.cdiv(E, 16)) if normed else 1
    sizes = dict(ROWS=rows, COLUMNS=columns, SPAN=span, PARTS=parts)
    launch = dict(num_warps=4, num_stages=stages, launch_pdl=EARLY)
    _linear[(tiles, blocks, parts)](*inputs, *after, *results, n, F, E, eps, **kind, **sizes, **launch)
    return Normed(out, scaled, new_squares) if adds else out


@triton.jit
def _exp2(x):
    """2 ** x, 0 below the smallest normal number. Called impure, it is computed once for all its users."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, False, 1)


@triton.jit
def _in_two(p):
    """A float32 as the sum of two bf16, but for 2**-16 of it."""
    bits = p.to(tl.int32, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, (p - (bits & -65536).to(tl.float32, bitcast=True)).to(tl.bfloat16)


@triton.jit
def _group_products(
    logits,
    stride,
    top,
    real,
    row_of_path,
    thinking,
    rows,
    out_ptr,
    W,
    SPAN,
    B,
    G: tl.constexpr,
    SLOTS: tl.constexpr,
    PATHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    lane = tl.arange(0, PATHS)
    group, path = tile * (PATHS // SLOTS) + lane // SLOTS, lane % SLOTS
    counts = (path < G) & (group < B)
    row = tl.load(row_of_path + group * G + path, mask=counts, other=rows)
    counts = counts & (row < rows)
    counts = counts & (tl.load(thinking + row, mask=counts, other=0) != 0)
    sums, rest = tl.zeros((PATHS, PATHS), tl.float32), tl.zeros((PATHS, PATHS), tl.float32)
    if tl.sum(counts.to(tl.int32)) > 1:
        highest = tl.load(top + row, mask=counts, other=float("inf")) * LOG2_E
        row_logits = logits + row.to(tl.int64)[:, None] * stride
        for start in range(part * SPAN, tl.minimum((part + 1) * SPAN, W), BLOCK):
            column = start + tl.arange(0, BLOCK)
            nothing = tl.where(tl.load(real + column) != 0, 0.0, float("-inf"))
            # a mask that differed between columns would have each loaded alone
            value = tl.load(row_logits + column[None, :], mask=counts[:, None], other=0.0).to(tl.float32)
            p = _exp2(value * LOG2_E + (nothing[None, :] - highest[:, None]))
            high, low = _in_two(p)  # a float32 product on the bf16 units
            sums += tl.dot(high, tl.trans(high))
            rest += tl.dot(low, tl.trans(high))
    sums += rest + tl.trans(rest)
    pair = ((group * parts + part) * SLOTS + path)[:, None] * SLOTS + path[None, :]
    of_one_group = (group[:, None] == group[None, :]) & (group < B)[:, None]
    tl.store(out_ptr + pair, sums, mask=of_one_group)


def group_products(logits, top, real, row_of_path, thinking):
    """sum_v exp(x_iv - top_i) exp(x_jv - top_j) for the thinking paths i and j of each group.

    logits (n, W), top and thinking (n,), row_of_path (B, G). Returns parts still to be added, float32
    (B, parts, G, G) with G up to a power of two. One pass over the logits, groups side by side in tiles of 64
    rows; no distribution is ever written. Scaling a path's probabilities does not change a cosine, so `top`,
    the largest logit of each row, takes the place of log-sum-exp.
    """
    (B, G), (n, W) = row_of_path.shape, logits.shape
    parts, block = 128, 64  # W is a multiple of LOGIT_BLOCK
    slots = triton.next_power_of_2(G)
    if slots > 128:  # more pairs than a multiprocessor holds
        features = torch.where(real & thinking[:, None], logits.float() - top[:, None], -torch.inf).exp()
        return F.pad(products(by_group(features, row_of_path)), (0, slots - G) * 2)[:, None]
    lanes = max(64, slots)
    tiles, span = triton.cdiv(B, lanes // slots), triton.cdiv(triton.cdiv(W, parts), block) * block
    out = torch.empty(B, parts, slots, slots, dtype=torch.float32, device=logits.device)
    tensors = (logits, logits.stride(0), top, real, row_of_path, thinking, n, out)
    sizes = dict(G=G, SLOTS=slots, PATHS=lanes, BLOCK=block)
    _group_products[(tiles, parts)](*tensors, W, span, B, **sizes, num_warps=4 if lanes == 64 else 8)
    return out


@triton.jit
def _hashed(x):
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _sum_of_bytes(x):
    pairs = (x & 0x00FF00FF00FF00FF) + ((x >> 8) & 0x00FF00FF00FF00FF)
    return ((pairs * 0x0001000100010001) >> 48).to(tl.int32)


@triton.jit
def _noise(key, position, e, E):
    """`directions` of controls.py for one row: key and position are numbers, e (WIDTH,) -> (WIDTH,)."""
    seed, counter = _hashed(key.to(tl.uint64) ^ position.to(tl.uint64)), 2 * e.to(tl.uint64)
    noise = _sum_of_bytes(_hashed(seed ^ counter)) + _sum_of_bytes(_hashed(seed ^ (counter + 1))) - 2040
    noise = tl.where(e < E, noise, 0)
    squares = tl.sum((noise * noise).to(tl.int64), 0)
    return (noise.to(tl.float64) / tl.sqrt(squares.to(tl.float64))).to(tl.float32)


@triton.jit
def _picked(values, picks):
    return tl.sum(tl.where(picks, values[None, :], 0), 1)[:, None]


@triton.jit
def _length(x):
    return tl.sqrt(tl.sum(x * x, 0))


@triton.jit
def _mix(
    parts_ptr,
    row_of_path,
    thinking,
    slots,
    paths,
    t,
    table,
    tokens,
    inputs,
    mix,
    input_change,
    heard,
    heard_ids,
    scales,
    keys,
    n,
    T,
    columns,
    E,
    temperature,
    lambda_blend,
    G: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CONTROL: tl.constexpr,
):
    row = tl.program_id(0)
    group, path = tl.load(slots + row), tl.load(paths + row)
    e, other = tl.arange(0, WIDTH), tl.arange(0, SLOTS)
    embed = tl.load(table + tl.load(tokens + row) * E + e, mask=e < E, other=0.0)
    column = tl.maximum(tl.load(t + row) - 1, 0)
    peer = tl.load(row_of_path + group * G + other, mask=other < G, other=n)
    thinks = (tl.load(thinking + peer, mask=peer < n, other=0) != 0) & (peer < n)
    itself = (other == path) & (peer == row)  # nowhere for a row that is free
    allowed = thinks & (other != path)
    listens = (tl.sum((thinks & itself).to(tl.int32)) > 0) & (tl.sum(allowed.to(tl.int32)) > 0)
    if listens:
        alike, squares = tl.zeros((SLOTS,), tl.float32), tl.zeros((SLOTS,), tl.float32)
        for start in tl.static_range(0, PARTS, PARTS_AT_ONCE):
            part, beside = group * PARTS + start + tl.arange(0, PARTS_AT_ONCE)[:, None], other[None, :]
            alike += tl.sum(tl.load(parts_ptr + (part * SLOTS + path) * SLOTS + beside), 0)
            squares += tl.sum(tl.load(parts_ptr + (part * SLOTS + beside) * SLOTS + beside), 0)
        size = tl.rsqrt(tl.maximum(squares, 1e-24))
        cosine = alike * size * tl.sum(tl.where(itself, size, 0.0))
        scores = tl.where(allowed, cosine / temperature, -1e30)
        weights = tl.where(allowed, tl.exp(scores - tl.max(scores)), 0.0)
        weights = weights / tl.sum(weights)
        mean = allowed.to(tl.float32) / tl.sum(allowed.to(tl.float32))
        ids = tl.load(tokens + peer, mask=allowed, other=0)
        if CONTROL == "strangers":
            their_ids = tl.load(heard_ids + peer, mask=allowed, other=0)
        before = embed.to(tl.float32)
        change, instead = tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.float32)  # what is heard
        for start in tl.static_range(0, SLOTS, AT_ONCE):
            picks = other[None, :] == start + tl.arange(0, AT_ONCE)[:, None]
            inside = (_picked(allowed.to(tl.int32), picks) > 0) & (e < E)[None, :]
            peers = tl.load(table + _picked(ids, picks) * E + e[None, :], mask=inside, other=0.0)
            weight, peers = _picked(weights, picks), peers.to(tl.float32)
            change += tl.sum(weight * peers, 0)
            if CONTROL == "scaled_mean":
                instead += tl.sum(_picked(mean, picks) * peers, 0)
            elif CONTROL == "strangers":
                theirs = tl.load(heard + _picked(their_ids, picks) * E + e[None, :], mask=inside, other=0.0)
                instead += tl.sum(weight * theirs.to(tl.float32), 0)
        if CONTROL == "none":
            blended = (1 - lambda_blend) * before + lambda_blend * change
        else:
            change -= before
            if CONTROL == "noise":
                direction = _noise(tl.load(keys + row), column, e, E)
            elif CONTROL == "own":
                direction = tl.load(heard + row * E + e, mask=e < E, other=0.0).to(tl.float32) - before
            else:
                direction = instead - before
            length = _length(direction)
            is_rounding = length <= 1e-5 * _length(before)  # ROUNDING in controls.py
            scale = tl.where(is_rounding, 0.0, _length(change) / tl.maximum(length, 1e-30))
            blended = before + lambda_blend * scale * direction
            if CONTROL == "scaled_mean":
                weights = scale * mean + (1 - scale) * itself.to(tl.float32)
            else:
                tl.store(scales + row * columns + column, scale)
        # all paths that still think are at the same token
        tl.store(mix + ((group * T + column % T) * G + path) * G + other, weights, mask=other < G)
        new = blended.to(embed.dtype)
        moved, size = _length(new.to(tl.float32) - before), _length(before)
        # 1e-9 is NO_SIZE in step.py
        moved = tl.where(size > 1e-9, moved / tl.maximum(size, 1e-9), tl.where(moved > 0, 1.0, 0.0))
        tl.store(inputs + row * E + e, new, mask=e < E)
        tl.store(input_change + row * columns + column, moved)
    else:
        tl.store(inputs + row * E + e, embed, mask=e < E)
        here = tl.sum(itself.to(tl.int32)) > 0
        tl.store(input_change + row * columns + column, 0.0, mask=here)
        if CONTROL != "none" and CONTROL != "scaled_mean":
            tl.store(scales + row * columns + column, 0.0, mask=here)


def mix(said, products, thinking, row_of_path, rows, mix, interaction, heard=None):
    """`mix_step` and `control_step` of step.py in one kernel, a program a row: the next inputs (n, E).

    said: the embeddings as (table, ids (n,)), read where they are; products: what `group_products` gave;
    heard: those of strangers in the same form, or (n, E) of `own`. `mix` is to hold zeros at this token;
    weights of paths that hear nobody are left so.
    """
    (table, tokens), (theirs, their_ids) = said, heard if isinstance(heard, tuple) else (heard, None)
    n, E, G, parts = len(tokens), table.shape[1], row_of_path.shape[1], products.shape[1]
    inputs = torch.empty(n, E, dtype=table.dtype, device=table.device)
    of_rows = (thinking, rows.slot, rows.path, rows.t, table, tokens, inputs, mix, rows.input_change)
    # in the place of what there is none of stands any tensor
    others = (theirs, their_ids, rows.scale, rows.key)
    others = [rows.t if tensor is None else tensor for tensor in others]
    numbers = (n, mix.shape[1], rows.input_change.shape[1], E)
    numbers += (interaction.temperature, interaction.lambda_blend)
    slots, width = triton.next_power_of_2(G), triton.next_power_of_2(E)
    sizes = dict(G=G, SLOTS=slots, PARTS=parts, WIDTH=width, CONTROL=interaction.control)
    sizes["PARTS_AT_ONCE"] = min(parts, max(16, 2048 // slots))
    sizes["AT_ONCE"] = min(slots, max(1, 8192 // width))
    sizes["num_warps"] = 4 if width <= 1024 else 8
    _mix[(n,)](products, row_of_path, *of_rows, *others, *numbers, **sizes)
    return inputs


@triton.jit
def _real_scores(logits, real, id, valid, temperature):
    score = tl.load(logits + id, mask=valid, other=0.0).to(tl.float32) / temperature
    return tl.where(tl.load(real + id, mask=valid, other=0) != 0, score, -1e30)


@triton.jit
def _block_sums(
    logits,
    stride,
    real,
    temperature,
    top_ptr,
    mass_ptr,
    raw_top_ptr,
    blocks,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    RAW: tl.constexpr,
):
    row, block = tl.program_id(0), tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    id = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    row_logits, valid = logits + row.to(tl.int64) * stride, block < blocks
    raw, heat = _real_scores(row_logits, real, id, valid[:, None], 1.0), tl.load(temperature)
    raw_top = tl.max(raw, 1)
    if RAW:
        tl.store(raw_top_ptr + row * blocks + block, raw_top, mask=valid)
    # a division keeps the order: the largest is that of the largest, where any id is real
    tl.store(top_ptr + row * blocks + block, tl.where(raw_top > -1e30, raw_top / heat, -1e30), mask=valid)
    mass = tl.sum(_exp2((raw - raw_top[:, None]) * (LOG2_E / heat)), 1)
    tl.store(mass_ptr + row * blocks + block, mass, mask=valid)


@triton.jit
def _first_beyond(weights, index, fraction):
    """The first index whose running sum passes `fraction` of the whole, and how far into its weight that is.

    Never one of weight 0.
    """
    ends = tl.cumsum(weights, 0)
    target = fraction * tl.max(ends, 0)
    last = tl.max(tl.where(weights > 0, index, 0), 0)
    first = tl.min(tl.where((ends > target) & (weights > 0), index, last), 0)
    weight = tl.sum(tl.where(index == first, weights, 0.0), 0)
    end = tl.sum(tl.where(index == first, ends, 0.0), 0)
    return first, tl.minimum(tl.maximum((target - (end - weight)) / weight, 0.0), 1.0)


@triton.jit
def _pick(
    logits,
    stride,
    real,
    temperature_ptr,
    block_top,
    block_mass,
    uniforms,
    next_state,
    is_eos,
    limit,
    ids,
    logps,
    thinkings,
    t_ptr,
    state_ptr,
    ended_ptr,
    finished_ptr,
    tokens,
    thinks,
    tops,
    blocks,
    columns,
    states,
    V,
    pad_id,
    GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0)
    index, inner = tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    temperature, t, finished = (
        tl.load(temperature_ptr),
        tl.load(t_ptr + row),
        tl.load(finished_ptr + row) != 0,
    )
    block_tops = tl.load(block_top + row * blocks + index, mask=index < blocks, other=-1e30)
    top = tl.max(block_tops, 0)
    mass = tl.load(block_mass + row * blocks + index, mask=index < blocks, other=0.0)
    mass = mass * tl.exp(block_tops - top)
    if GREEDY:
        first = tl.min(tl.where(block_tops == top, index, WIDTH - 1), 0)
        block, rest = tl.minimum(first, blocks - 1), 0.0  # where all is NaN, none equals the largest
    else:
        block, rest = _first_beyond(mass, index, tl.load(uniforms + row * columns + t))
    id = block * BLOCK + inner
    score = _real_scores(logits + row.to(tl.int64) * stride, real, id, inner < BLOCK, temperature)
    inside_top = tl.max(score, 0)
    if GREEDY:
        chosen = tl.min(tl.where(score == inside_top, inner, BLOCK - 1), 0)
    else:
        chosen, rest = _first_beyond(tl.exp(score - inside_top), inner, rest)
    token = tl.where(finished, pad_id, tl.minimum(block * BLOCK + chosen, V - 1)).to(tl.int64)
    logp = tl.sum(tl.where(inner == chosen, score, 0.0), 0) - top - tl.log(tl.sum(mass, 0))
    logp = tl.where(finished, 0.0, logp)
    state = tl.load(next_state + tl.load(state_ptr + row) * V + token)
    eos = (tl.load(is_eos + token) != 0) & (finished == 0)
    thinking = (finished == 0) & (eos == 0) & (state < states - 1)
    column = row * columns + t
    tl.store(ids + column, token)
    tl.store(logps + column, logp)
    tl.store(thinkings + column, thinking)
    tl.store(state_ptr + row, state)
    t += (finished == 0).to(tl.int64)
    tl.store(t_ptr + row, t)
    tl.store(ended_ptr + row, (tl.load(ended_ptr + row) != 0) | eos)
    tl.store(finished_ptr + row, finished | eos | (t >= tl.load(limit)))
    tl.store(tokens + row, token)
    tl.store(thinks + row, thinking)
    tl.store(tops + row, top * temperature)


def sample(rows, tables, temperature, limit, greedy, block_tops=None):
    """`sample_step` of step.py in two kernels: one pass over the logits, then a program a row.

    block_tops (n, W / LOGIT_BLOCK) float32: where the largest logits of each block go, for `likeliest`.
    """
    real, next_state, logits, stride = tables.real, tables.next_state, rows.logits, rows.logits.stride(0)
    n, blocks = len(logits), logits.shape[1] // LOGIT_BLOCK
    block_top, block_mass = torch.empty(2, n, blocks, device=real.device)
    tokens, thinking, top = (
        torch.empty_like(rows.t),
        torch.empty_like(rows.finished),
        torch.empty(n, device=real.device),
    )
    sums, raw = (block_top, block_mass), block_tops is not None
    given = (logits, stride, real, temperature, *sums, block_tops if raw else block_top, blocks)
    _block_sums[(n, triton.cdiv(blocks, 16))](*given, BLOCKS=16, BLOCK=LOGIT_BLOCK, RAW=raw, num_warps=4)
    inputs = (logits, stride, real, temperature, *sums, rows.uniforms, next_state, tables.is_eos, limit)
    recorded = (rows.ids, rows.logp, rows.thinking, rows.t, rows.state, rows.ended, rows.finished)
    numbers = (blocks, rows.ids.shape[1], *next_state.shape, tables.pad_id)
    sizes = dict(GREEDY=greedy, BLOCK=LOGIT_BLOCK, WIDTH=triton.next_power_of_2(blocks))
    _pick[(n,)](*inputs, *recorded, tokens, thinking, top, *numbers, **sizes, num_warps=4)
    return tokens, thinking, top


@triton.jit
def _ranks(values, ids):
    """Whole numbers in the order of float32 values, among equal ones of the lower id first."""
    bits = values.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _id_of(rank):
    return 0x7FFFFFFF - (rank & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _likeliest(
    logits,
    stride,
    real,
    block_top,
    t_ptr,
    heard_ids,
    heard_probs,
    ids,
    probs,
    blocks,
    columns,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, none = tl.program_id(0), -9223372036854775808
    index, slot = tl.arange(0, WIDTH), tl.arange(0, K)
    tops = tl.load(block_top + row * blocks + index, mask=index < blocks, other=0.0)
    ranks = tl.where(index < blocks, _ranks(tops, index), none)
    chosen = tl.full((K,), blocks, tl.int32)  # `blocks` stands for none, where there are fewer
    for k in range(K):
        best = tl.max(ranks, 0)
        chosen = tl.where((slot == k) & (best > none), _id_of(best), chosen)
        ranks = tl.where(ranks == best, none, ranks)
    id = tl.reshape(chosen[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], (K * BLOCK,))
    there = id < blocks * BLOCK
    value = _real_scores(logits + row.to(tl.int64) * stride, real, id, there, 1.0)
    ranks = tl.where(there, _ranks(value, id), none)
    ordered, best_ids = tl.zeros((K,), tl.int32), tl.zeros((K,), tl.int32)
    for k in range(K):
        best = tl.max(ranks, 0)
        ordered = tl.where(slot == k, (best >> 32).to(tl.int32), ordered)
        best_ids = tl.where(slot == k, _id_of(best), best_ids)
        ranks = tl.where(ranks == best, none, ranks)
    values = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    mass = tl.exp(values - tl.max(values, 0))
    mass = mass / tl.sum(mass, 0)
    at = (row * columns + tl.maximum(tl.load(t_ptr + row) - 1, 0)) * K + slot
    tl.store(heard_ids + at, best_ids.to(tl.int64))
    tl.store(heard_probs + at, mass)
    tl.store(ids + row * K + slot, best_ids.to(tl.int64))
    tl.store(probs + row * K + slot, mass)


def likeliest(rows, real, block_tops):
    """`likeliest` of controls.py for every row, a program each: ids and probabilities (n, K).

    They are recorded for the token that was sampled last. block_tops: what `sample` wrote there.
    """
    (n, blocks), (_, columns, K) = block_tops.shape, rows.heard_ids.shape
    ids = torch.empty(n, K, dtype=torch.long, device=real.device)
    probs = torch.empty(n, K, device=real.device)
    tensors = (block_tops, rows.t, rows.heard_ids, rows.heard_probs, ids, probs)
    sizes = dict(K=K, BLOCK=LOGIT_BLOCK, WIDTH=triton.next_power_of_2(blocks))
    logits = rows.logits
    _likeliest[(n,)](logits, logits.stride(0), real, *tensors, blocks, columns, **sizes, num_warps=2)
    return ids, probs


@triton.jit
def _mean_embedding(table, ids, probs, out, E, K: tl.constexpr, WIDTH: tl.constexpr):
    row, e, k = tl.program_id(0), tl.arange(0, WIDTH)[None, :], tl.arange(0, K)[:, None]
    id, prob = tl.load(ids + row * K + k), tl.load(probs + row * K + k)
    embed = tl.load(table + id * E + e, mask=e < E, other=0.0).to(tl.float32)
    tl.store(out + row * E + e, tl.sum(prob * embed, 0)[None, :], mask=e < E)


def mean_embedding(table, ids, probs):
    """`mean_embedding` of controls.py, of the rows ids (n, K) of a table: probs (n, K) -> (n, E) float32."""
    (n, K), E = ids.shape, table.shape[1]
    out = torch.empty(n, E, device=table.device)
    _mean_embedding[(n,)](table, ids, probs, out, E, K=K, WIDTH=triton.next_power_of_2(E), num_warps=4)
    return out


@triton.jit
def _stranger_tokens(keys, t_ptr, ids, lengths, tokens, n, count, longest, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    key = tl.load(keys + row, mask=inside, other=0)
    which = _hashed((key ^ -1).to(tl.uint64)).to(tl.int64) % count
    which = tl.where(which < 0, which + count, which)  # the remainder as torch has it
    position = tl.maximum(tl.load(t_ptr + row, mask=inside, other=1) - 1, 0)
    position = position % tl.load(lengths + which, mask=inside, other=1)
    token = tl.load(ids + which * longest + position, mask=inside, other=0)
    tl.store(tokens + row, token, mask=inside)


def stranger_tokens(rows, strangers):
    """`Strangers.tokens` of controls.py for the token that each row sampled last: ids (n,)."""
    n, tokens = len(rows.key), torch.empty_like(rows.key)
    of_rows, bank = (rows.key, rows.t), (strangers.ids, strangers.lengths)
    _stranger_tokens[(triton.cdiv(n, 128),)](*of_rows, *bank, tokens, n, *strangers.ids.shape, BLOCK=128)
    return tokens

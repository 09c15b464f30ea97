"""The two formulas of log_probs.TokenScores in Triton: each reads the logits once.

m tokens, V the tokenizer's real ids, W logits of the whole head.
"""

import torch
import triton
import triton.language as tl

from decoding.tokens import IMPOSSIBLE

BLOCK = 4096
IMPOSSIBLE_SCORE = tl.constexpr(IMPOSSIBLE)


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _scores_of(raw, row, id, V, W, temperature, cap, missing, CAPPED: tl.constexpr, MISSING: tl.constexpr):
    """Logits at the sampling temperature, as log_probs._logits has them."""
    x = tl.load(raw + row * W + id, mask=id < V, other=0.0).to(tl.float32)
    if CAPPED:
        x = _tanh(x / cap) * cap
    x = x / temperature
    real = id < V
    if MISSING:
        real = real & (tl.load(missing + id, mask=id < V, other=1) == 0)
    return tl.where(real, x, IMPOSSIBLE_SCORE)


@triton.jit
def _token_scores(
    raw,
    targets,
    temperature_ptr,
    cap_ptr,
    missing,
    logp,
    entropy,
    log_norm,
    V,
    W,
    CAPPED: tl.constexpr,
    MISSING: tl.constexpr,
    SPAN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature, cap = tl.load(temperature_ptr), tl.load(cap_ptr)
    top, total, weighted = -1e30, 0.0, 0.0  # sums of exp(x - top), and of it times (x - top)
    for start in range(0, V, SPAN):
        id = start + tl.arange(0, SPAN)
        x = _scores_of(raw, row, id, V, W, temperature, cap, missing, CAPPED, MISSING)
        higher = tl.maximum(top, tl.max(x, 0))
        shrink, mass = tl.exp(top - higher), tl.exp(x - higher)
        weighted = (weighted + total * (top - higher)) * shrink + tl.sum(mass * (x - higher), 0)
        total = total * shrink + tl.sum(mass, 0)
        top = higher
    norm = top + tl.log(total)
    target = tl.load(targets + row) + tl.arange(0, 1)
    x = _scores_of(raw, row, target, V, W, temperature, cap, missing, CAPPED, MISSING)
    tl.store(logp + row, tl.sum(x, 0) - norm)
    tl.store(entropy + row, tl.log(total) - weighted / total)
    tl.store(log_norm + row, norm)


@triton.jit
def _logits_gradient(
    raw,
    targets,
    temperature_ptr,
    cap_ptr,
    missing,
    log_norm,
    grad,
    out,
    V,
    W,
    CAPPED: tl.constexpr,
    MISSING: tl.constexpr,
    SPAN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    id = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    temperature, cap = tl.load(temperature_ptr), tl.load(cap_ptr)
    x = _scores_of(raw, row, id, V, W, temperature, cap, missing, CAPPED, MISSING)
    probs = tl.exp(x - tl.load(log_norm + row))
    gradient = (tl.where(id == tl.load(targets + row), 1.0, 0.0) - probs) * (
        tl.load(grad + row) / temperature
    )
    if CAPPED:
        bent = tl.maximum(x * temperature / cap, -1.0)  # what is impossible has no gradient anyway
        gradient = gradient * (1.0 - bent * bent)
    tl.store(out + row * W + id, tl.where(id < V, gradient, 0.0).to(out.dtype.element_ty), mask=id < W)


def _arguments(raw, targets, head):
    """What both kernels are given first; a kernel must be given a tensor for each pointer."""
    cap = head.temperature if head.cap is None else head.cap
    missing = targets if head.missing is None else head.missing.view(torch.uint8)
    kind = dict(CAPPED=head.cap is not None, MISSING=head.missing is not None, SPAN=BLOCK, num_warps=8)
    return (raw, targets, head.temperature, cap, missing), kind


def token_scores(raw, targets, head):
    """log_probs.token_scores: raw (m, W), targets (m,) -> log-probs, entropies and log-normalisers (m,)."""
    raw = raw.contiguous()
    results = torch.empty(3, len(raw), device=raw.device).unbind()
    given, kind = _arguments(raw, targets, head)
    _token_scores[(len(raw),)](*given, *results, head.num_real, raw.shape[1], **kind)
    return results


def logits_gradient(raw, targets, log_norm, grad, head):
    """log_probs.logits_gradient: log_norm and grad (m,) -> (m, W) in the dtype of raw."""
    raw = raw.contiguous()
    out = torch.empty_like(raw)
    given, kind = _arguments(raw, targets, head)
    grid = len(raw), triton.cdiv(raw.shape[1], BLOCK)
    _logits_gradient[grid](*given, log_norm, grad, out, head.num_real, raw.shape[1], **kind)
    return out

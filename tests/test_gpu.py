"""What only a GPU can show: kernels, captured steps, bf16, and a run resumed on the card. `pytest -m gpu`"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from safetensors.torch import load_file

from decoding.controls import LIKELIEST, Strangers, directions, likeliest, mean_embedding, row_keys
from decoding.decoder import GroupDecoder
from decoding.fast_model import LayerCache, attend, enter_norm, leave_norm, rms_norm
from decoding.rollout import Interaction, Sampling, rollout_uniforms
from decoding.step import Rows, StepKind, by_group, control_step, mix_step, sample_step
from decoding.tokens import IMPOSSIBLE, LOGIT_BLOCK
from grpo_train import Config, update
from learning import log_probs
from learning.learner import make_learner
from learning.log_probs import Head, Scorer, make_scorer
from learning.models import refresh
from learning.packing import Segments, is_packed, pack, packed_attention, segments_of
from m3po_module import cosines, cross_path_weights, products
from running.preflight import predicted_peak
from small_models import build_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = Path(__file__).parents[1]
T = 32


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "gpt2"])
@torch.no_grad()
def test_greedy_decoding_in_float32_equals_generate_on_the_card(family, tokenizer, prompts):
    model = build_model(family, tokenizer).cuda()
    decoder = GroupDecoder(model, tokenizer)
    for [completion], prompt in zip(decoder.complete(prompts, Sampling(T)), prompts, strict=True):
        beyond = list(range(len(tokenizer), model.config.vocab_size))
        row = torch.tensor([prompt], device="cuda")
        made = model.generate(
            input_ids=row,
            attention_mask=torch.ones_like(row),
            max_new_tokens=T,
            do_sample=False,
            suppress_tokens=beyond,
        )[0, len(prompt) :].tolist()
        end = next((i + 1 for i, token in enumerate(made) if token in decoder.tables.eos_ids), len(made))
        assert completion.ids == made[:end]


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 0.03), (torch.float16, 0.01)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "gpt2"])
@torch.no_grad()
def test_scoring_in_half_precision_is_close_to_sampling_in_it_and_far_from_scoring_plain_ids(
    family, dtype, rounding, tokenizer, prompts
):
    """Packed rows, where a family can be packed, no less than whole ones."""
    policy = build_model(family, tokenizer).cuda()
    sampler = build_model(family, tokenizer, dtype=dtype).cuda()
    refresh(sampler, policy)
    decoder = GroupDecoder(sampler, tokenizer, "e", Interaction(0.3))
    out = sampled(decoder, prompts)
    rows, whole = list(range(len(out.ids))), Scorer(policy, decoder.tables, dtype)
    before = (whole(out, rows)[0] - out.logp).abs()[out.mask].mean()
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    scorer = make_scorer(policy, decoder.tables, Config(torch_compile=False, precision=precision))
    assert is_packed(policy) == (family in ("llama", "qwen2", "qwen3"))
    close = (scorer(out, rows)[0] - out.logp).abs()[out.mask].mean()
    out.mix = None
    assert close < min(rounding, 1.5 * before)
    assert (scorer(out, rows)[0] - out.logp).abs()[out.mask].mean() > 5 * close


@pytest.mark.parametrize("D", [64, 128])
def test_the_flash_kernel_gives_what_the_mask_does(D, tokenizer, prompts):
    """Prompts and completions that end within a block and past one; GQA. It has no float32, so that its
    distance from float32 may be that of sdpa in bf16, and the masked layout is within 1e-4 of plain rows.
    """
    H, K, G = 6, 2, 3
    generator = torch.Generator().manual_seed(0)
    sizes = [[300] * G + [5] * G + [64] * G, [200, 1, 129, 7, 64, 65, 1, 1, 2]]
    rollout = SimpleNamespace(
        sizes=sizes, num_generations=G, prompt_ids=torch.zeros(3, 300), ids=torch.zeros(9, 200).cuda()
    )
    flashed, masked = (pack(rollout, torch.arange(9), is_flash).segments for is_flash in (True, False))
    M = 369 + sum(size - 1 for size in sizes[1])
    wide = [torch.randn(1, heads, M, D, generator=generator).cuda() for heads in (H, K, K)]
    pull = torch.randn(1, M, H, D, generator=generator).cuda()

    def attended(segments, dtype):
        inputs = [x.clone().to(dtype).requires_grad_() for x in wide]
        module = SimpleNamespace(num_key_value_groups=H // K, is_causal=True)
        out, _ = packed_attention(module, *inputs, None, scaling=D**-0.5, segments=segments)
        out.backward(pull.to(dtype))
        return [out.detach().float(), *(x.grad.float() for x in inputs)]

    exact, rounded, ours = (
        attended(masked, torch.float32),
        attended(masked, torch.bfloat16),
        attended(flashed, torch.bfloat16),
    )
    for a, b, c in zip(exact, rounded, ours, strict=True):
        assert (c - a).norm() < 1.2 * (b - a).norm() + 1e-4 * a.norm()
        assert (c - a).abs().max() < 0.03 * a.abs().max()
    starts = [0, 300, 305, 369]  # prompts, then completions; by hand, one row alone in float32
    q, k, v = (x.transpose(1, 2)[0] for x in wide)
    own = slice(starts[3] + 199, starts[3] + 199 + 128)  # the third row: 129 tokens after a prompt of 300
    keys = torch.cat([torch.arange(300), torch.arange(own.start, own.stop)]).cuda()
    rows = [x[keys].repeat_interleave(H // K, 1).transpose(0, 1)[None] for x in (k, v)]
    queries = q[keys].transpose(0, 1)[None]
    plain = F.scaled_dot_product_attention(queries, *rows, is_causal=True)[0].transpose(0, 1)[300:]
    assert (exact[0][0, own] - plain).abs().max() < 1e-4


def test_the_gradient_of_a_prompt_is_summed_over_its_completions_in_float32():
    """A prompt of one token, and 598 completions that attend to it and themselves alike: its value gets 1 of
    itself and 598 halves. Summed in bf16, a half is lost from 128 on.
    """
    count, D = 598, 64
    own = range(1, count + 1)
    source = torch.tensor([0, *(key for i in own for key in (0, i))]).cuda()
    queries, keys = np.ones(count + 1, dtype=np.int64), np.array([1] + [2] * count)
    segments = segments_of(source, queries, keys, is_flash=True)
    ends = (torch.from_numpy(x).cuda() for x in (segments.queries, segments.keys))
    segments = Segments(source, *ends, longest=segments.longest)
    query, key = (torch.zeros(1, 1, count + 1, D, dtype=torch.bfloat16).cuda() for _ in range(2))
    value = torch.randn(1, 1, count + 1, D).to("cuda", torch.bfloat16).requires_grad_()
    module = SimpleNamespace(num_key_value_groups=1, is_causal=True)
    packed_attention(module, query, key, value, None, scaling=1.0, segments=segments)[0].sum().backward()
    assert (value.grad[0, 0, 0] == 1 + count / 2).all()
    assert (value.grad[0, 0, 1:] == 0.5).all()


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernels_of_the_head_give_what_the_formulas_do(dtype, cap):
    """Logits of any dtype, soft caps, ids that no token has, a head wider than the tokenizer."""
    generator = torch.Generator().manual_seed(0)
    raw = (8 * torch.randn(50, 9001, generator=generator)).to("cuda", dtype)
    targets = torch.randint(0, 100, (50,), generator=generator).cuda()
    grad = torch.randn(50, generator=generator).cuda()
    missing = torch.arange(8990, device="cuda") % 7 == 5
    missing[targets] = False
    scalars = [None if x is None else torch.tensor(x, device="cuda") for x in (0.7, cap)]
    for head in (Head(*scalars, 8990, missing), Head(*scalars, 9001, None)):
        theirs, ours = (
            module.token_scores(raw, targets, head) for module in (log_probs, log_probs.head_kernels)
        )
        for a, b in zip(theirs, ours, strict=True):
            assert torch.allclose(a, b, atol=2e-5, rtol=1e-5)
        a, b = (
            f(raw, targets, ours[2], grad, head)
            for f in (log_probs.logits_gradient, log_probs.head_kernels.logits_gradient)
        )
        assert a.dtype == b.dtype == dtype
        assert (a.float() - b.float()).abs().max() <= (
            5e-6 if dtype == torch.float32 else 0.01
        ) * a.abs().max()


def test_the_host_waits_for_nothing_while_it_scores(tokenizer, prompts):
    """The host knows all sizes: asking the card for one would cost as long as the kernels under way."""
    policy, sampler = build_model("qwen2", tokenizer).cuda().train(), build_model("qwen2", tokenizer).cuda()
    decoder = GroupDecoder(sampler, tokenizer, "e", Interaction(0.3), compiled=False)
    scorer, out = make_scorer(policy, decoder.tables, Config(torch_compile=False)), sampled(decoder, prompts)
    for _ in range(2):
        scorer(out, [0, 3, 9])[0].sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        scorer(out, [0, 3, 9])[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sampled(decoder, prompts, G=8, length=T, seed=0, **kwargs):
    uniforms = rollout_uniforms(seed, 0, 0, G * len(prompts), length)
    return decoder.rollout(prompts, Sampling(length, G, temperature=1.0), uniforms, **kwargs)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_captured_steps_give_the_samples_of_the_plain_path(family, compiled, tokenizer, prompts):
    """float32: the same tokens and log-probs, rows leaving on the way, M3PO on and off."""
    model = build_model(family, tokenizer).cuda()
    for lambda_blend in (0.0, 0.3):
        fast = GroupDecoder(model, tokenizer, "e", Interaction(lambda_blend), compiled=compiled)
        plain = GroupDecoder(model, tokenizer, "e", Interaction(lambda_blend), fast=False)
        a, b = sampled(fast, prompts, length=120), sampled(plain, prompts, length=120)
        assert a.ended.float().mean() > 0.3, "rows must leave for this to say something"
        assert (a.ids == b.ids).float().mean() > 0.99, "an edge of the distribution may move a draw"
        same = (a.ids == b.ids).all(-1)
        assert torch.allclose(a.logp[same], b.logp[same], atol=2e-3)
        assert torch.equal(a.thinking[same], b.thinking[same])


@pytest.mark.parametrize("similarity", ["distribution", "embedding", "mean"])
@torch.no_grad()
def test_rows_that_stand_empty_in_a_captured_step_hold_nothing_of_an_earlier_call(
    similarity, tokenizer, prompts
):
    """20 rows are decoded in 24: four are free, and kept the prompt slots of an evaluation before."""
    model = build_model("llama", tokenizer).cuda()
    decoder = GroupDecoder(model, tokenizer, "e", Interaction(0.3, 0.1, similarity), compiled=False)
    first = sampled(decoder, prompts, G=4)
    decoder.complete(prompts * 6, Sampling(12))
    again = sampled(decoder, prompts, G=4)
    plain = sampled(
        GroupDecoder(model, tokenizer, "e", Interaction(0.3, 0.1, similarity), fast=False), prompts, G=4
    )
    assert torch.equal(first.ids, again.ids)
    assert torch.equal(first.input_change, again.input_change)
    assert (first.ids == plain.ids).float().mean() > 0.99


@torch.no_grad()
def test_weights_changed_in_place_are_seen_by_the_next_captured_rollout(tokenizer, prompts):
    model = build_model("qwen2", tokenizer).cuda()
    decoder = GroupDecoder(model, tokenizer, "e", Interaction(0.3))
    before = sampled(decoder, prompts)
    refresh(model, build_model("qwen2", tokenizer, seed=1).cuda())
    after = sampled(decoder, prompts)
    assert not torch.equal(before.ids, after.ids)
    assert torch.equal(
        after.ids,
        sampled(
            GroupDecoder(build_model("qwen2", tokenizer, seed=1).cuda(), tokenizer, "e", Interaction(0.3)),
            prompts,
        ).ids,
    )


@torch.no_grad()
def test_rollouts_of_random_sizes_leave_memory_flat_and_count_nothing_after_the_end(tokenizer, prompts):
    decoder = GroupDecoder(
        build_model("llama", tokenizer).cuda(), tokenizer, "e", Interaction(0.3), compiled=False
    )
    generator = torch.Generator().manual_seed(0)
    used = []
    for trial in range(300):
        B, G, length = (
            int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 6), (1, 9), (1, 40))
        )
        out = sampled(decoder, prompts[:B], G, length, seed=trial, interact=bool(trial % 2))
        eos = decoder.tables.is_eos[out.ids] & out.mask
        assert (eos.sum(-1) == out.ended).all()
        assert (out.lengths[out.ended] - 1 == eos.long().argmax(-1)[out.ended]).all()
        used.append(torch.cuda.memory_allocated())
    assert max(used[150:]) <= max(used[:150]) + 2**20


def in_chunks(completion, tokens):
    """(2, R, K, T, D) as chunks of so many tokens, and their addresses."""
    chunks = [chunk.contiguous() for chunk in completion.split(tokens, 3)]
    addresses = [[side.data_ptr() for side in chunk] for chunk in chunks]
    return chunks, torch.tensor(addresses, device="cuda")


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.float16, 5e-3)])
@pytest.mark.parametrize("tokens", [160, 32, 5])
@pytest.mark.parametrize(
    ("heads", "key_heads", "width"), [(14, 2, 64), (12, 2, 128), (4, 4, 16), (9, 3, 64), (4, 1, 8)]
)
@torch.no_grad()
def test_the_attention_kernel_equals_plain_torch(heads, key_heads, width, tokens, dtype, close):
    """Completions lie in chunks of so many tokens, and rows are cut into parts."""
    from decoding.kernels import decode_attention

    def random(*shape):
        return torch.randn(*shape, device="cuda").to(dtype)

    torch.manual_seed(0)
    S, G, P, L = 3, 4, 192, 160
    n = S * G
    q, k, v = (random(n, h, width) for h in (heads, key_heads, key_heads))
    prompt, completion = (random(2, rows, key_heads, length, width) for rows, length in ((S, P), (n, L)))
    number = torch.arange(n, device="cuda")
    slot_len, past = torch.tensor([1, 70, 192], device="cuda"), torch.randint(0, L, (n,), device="cuda")
    past[0], past[1], past[2], past[3] = 0, L - 1, tokens - 1, min(tokens, L - 1)
    cos, sin = random(2, P + L, width)
    finished, slot = number == 5, number // G
    rows = Rows(*[None] * len(Rows._fields))._replace(
        t=past + 1, slot=slot, path=number % G, prompt_len=slot_len[slot], finished=finished
    )
    # clone: float() of float32 is no copy, and `attend` writes into it
    plain = LayerCache(prompt.float(), [completion.float().clone()], None, slot_len, cos.float(), sin.float())
    expected = attend(*(x.float() for x in (q, k, v)), plain, rows, number.view(S, G), width**-0.5)
    rows = rows._replace(cache_row=number.flip(0))
    chunks, addresses = in_chunks(completion[:, rows.cache_row], tokens)
    cache = LayerCache(prompt, chunks, addresses, slot_len, cos, sin)
    counter = torch.zeros(n * key_heads, dtype=torch.int32, device="cuda")
    for parts in (1, 2, 8, 32, None):
        got = decode_attention(q, k, v, cache, rows, past, counter, width**-0.5, parts=parts)
        assert got.dtype == dtype
        assert torch.allclose(got[~finished].float(), expected[~finished], atol=close)
        assert not got[5].any()
        assert not counter.any()
    going = number[~finished]
    written = torch.cat(cache.chunks, 3)[:, rows.cache_row[going]].float()
    assert torch.allclose(written, plain.chunks[0][:, going], atol=close if dtype == torch.float16 else 1e-5)


@torch.no_grad()
def test_long_rows_are_cut_into_as_many_parts_as_keep_the_memory_busy_and_short_ones_as_before():
    """Two parts a row of a 1.5B model, 64 rows: too few programs for the memory's rate at 8,192 tokens."""
    from decoding.kernels import cut_keys, decode_attention

    for units, parts in ((16, 4), (64, 4), (128, 2), (256, 2), (1024, 1)):
        assert cut_keys(units, 1024) == (parts, 1)
    for units, parts in ((16, 32), (64, 16), (128, 8), (256, 4), (512, 2), (1024, 1)):
        assert cut_keys(units, 8704)[0] == parts
    torch.manual_seed(0)
    S, G, P, L, H, K, D = 2, 4, 512, 4096, 12, 2, 128
    n = S * G
    q, k, v = (torch.randn(n, h, D, device="cuda", dtype=torch.bfloat16) for h in (H, K, K))
    prompt, completion = (
        torch.randn(2, rows, K, length, D, device="cuda", dtype=torch.bfloat16)
        for rows, length in ((S, P), (n, L))
    )
    number, slot_len = torch.arange(n, device="cuda"), torch.tensor([37, 512], device="cuda")
    past = torch.tensor([4095, 0, 511, 512, 2000, 3, 1023, 4000], device="cuda")
    cos, sin = torch.randn(2, P + L, D, device="cuda", dtype=torch.bfloat16)
    rows = Rows(*[None] * len(Rows._fields))._replace(
        t=past + 1, slot=number // G, path=number % G, prompt_len=slot_len[number // G]
    )
    rows = rows._replace(finished=number == 7, cache_row=number)
    chunks, addresses = in_chunks(completion, 512)
    cache = LayerCache(prompt, chunks, addresses, slot_len, cos, sin)
    wide = LayerCache(prompt.float(), [completion.float()], None, slot_len, cos.float(), sin.float())
    expected = attend(q.float(), k.float(), v.float(), wide, rows, number.view(S, G), D**-0.5)
    counter = torch.zeros(n * K, dtype=torch.int32, device="cuda")
    one, many = (decode_attention(q, k, v, cache, rows, past, counter, D**-0.5, parts=p) for p in (1, None))
    for got in (one, many):
        assert torch.allclose(got[:7].float(), expected[:7], atol=0.05)
    assert torch.allclose(one.float(), many.float(), atol=0.02)
    assert not counter.any()


@pytest.mark.parametrize("similarity", ["distribution", "mean"])
@torch.no_grad()
def test_storage_that_grew_after_steps_were_captured_is_read_by_them(
    similarity, tokenizer, prompts, monkeypatch
):
    model = build_model("llama", tokenizer).cuda()
    made = []
    for tokens in (512, 16):
        for file in ("fast_model", "engine", "decoder"):
            monkeypatch.setattr(f"decoding.{file}.CHUNK", tokens)
        decoder = GroupDecoder(
            model, tokenizer, "</reasoning>", Interaction(0.3, 0.1, similarity), compiled=False
        )
        decoder.tables.is_eos[:] = False  # every row goes on to the limit
        made.append([sampled(decoder, prompts, G=4, length=100) for _ in range(2)])
        grown = len(decoder.engine.backbone.chunks)
        made[-1].append(decoder.complete(prompts * 3, Sampling(60), batch_rows=8))
    (whole, _, answers), (first, again, grown_answers) = made
    assert grown == 7, "of 15 tokens each, one of which was there when the steps were captured"
    assert torch.equal(first.ids, again.ids)
    assert torch.equal(first.mix, again.mix)
    assert (first.ids == whole.ids).float().mean() > 0.99, "an edge of the distribution may move a draw"
    same = (first.ids == whole.ids).view(-1, 4, 100).all(-1).all(-1)
    assert torch.allclose(first.mix[same], whole.mix[same], atol=1e-3)
    assert first.mix[:, 90].any()
    same_answers = [a[0].ids == b[0].ids for a, b in zip(answers, grown_answers, strict=True)]
    assert sum(same_answers) >= 0.9 * len(same_answers)


@torch.no_grad()
def test_the_kernel_of_the_paths_cosines_equals_plain_torch():
    from decoding.kernels import group_products

    torch.manual_seed(0)
    logits, real = torch.randn(20, 1408, device="cuda") * 3, torch.ones(1408, dtype=torch.bool, device="cuda")
    real[5::7] = False
    row_of_path = torch.tensor([[0, 1, 2, 3, 4], [9, 8, 20, 6, 5], [20, 20, 20, 20, 10]], device="cuda")
    thinking = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 0, 1, 1], [0, 0, 0, 0, 1]], device="cuda").bool()
    rows = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1] + 9 * [1], device="cuda").bool()
    parts = group_products(logits, logits.amax(-1), real, row_of_path, rows)
    distributions = logits.masked_fill(~real, -torch.inf).softmax(-1)
    p = by_group(distributions, row_of_path) * thinking[..., None]
    assert torch.allclose(cosines(parts.sum(1)[:2, :5, :5]), cosines(products(p))[:2], atol=1e-5)


@pytest.mark.parametrize("G", [1, 8, 64, 100, 130])
@torch.no_grad()
def test_the_kernel_of_the_paths_cosines_takes_groups_of_any_size(G):
    from decoding.kernels import group_products

    torch.manual_seed(0)
    n, W = 9 * G, 1408
    logits, real = (2 * torch.randn(n, W, device="cuda")).bfloat16(), torch.rand(W, device="cuda") < 0.95
    row_of_path, thinking = torch.randperm(n, device="cuda").view(9, G), torch.rand(n, device="cuda") < 0.9
    parts = group_products(logits, logits.float().amax(-1), real, row_of_path, thinking)
    p = logits.float().masked_fill(~real, -torch.inf).softmax(-1) * thinking[:, None]
    ours, theirs = cosines(parts.sum(1)[:, :G, :G]), cosines(products(p[row_of_path]))
    at_least_two = thinking[row_of_path].sum(-1) > 1
    assert torch.allclose(ours[at_least_two], theirs[at_least_two], atol=1e-5)


@pytest.mark.parametrize(
    ("n", "width", "out", "bias"), [(5, 96, 80, True), (64, 896, 1152, True), (100, 1024, 384, False)]
)
@torch.no_grad()
def test_the_kernel_for_few_rows_equals_plain_torch_with_what_stands_before_and_behind_it(
    n, width, out, bias
):
    from decoding.kernels import Normed, few_rows_linear

    torch.manual_seed(0)
    linear = torch.nn.functional.linear
    x, residual, weight = (
        torch.randn(n, width, device="cuda"),
        torch.randn(n, 2 * out, device="cuda"),
        torch.randn(2 * out, width, device="cuda") / width**0.5,
    )
    norm, following = torch.rand(width, device="cuda") + 0.5, torch.rand(2 * out, device="cuda") + 0.5
    b, counter = (
        torch.randn(2 * out, device="cuda") if bias else None,
        torch.zeros(4096, dtype=torch.int32, device="cuda"),
    )
    prepared = Normed(x, x * norm, x.pow(2).view(n, 2, -1).sum(-1))
    plain, normed = linear(x, weight, b), linear(rms_norm(x, norm, 1e-6), weight, b)
    for parts in (1, 2, None):
        close = dict(atol=1e-4, rtol=1e-4)
        assert torch.allclose(few_rows_linear(x, weight, b, counter, parts=parts), plain, **close)
        assert torch.allclose(
            few_rows_linear(prepared, weight, b, counter, eps=1e-6, parts=parts), normed, **close
        )
        added = few_rows_linear(x, weight, b, counter, residual=residual, norm=following, parts=parts)
        assert torch.allclose(added.x, residual + plain, **close)
        assert torch.allclose(added.scaled, (residual + plain) * following, **close)
        assert torch.allclose(added.squares.sum(-1), (residual + plain).pow(2).sum(-1), rtol=1e-4)
        assert not counter.any()
    gate, up = normed.chunk(2, -1)
    gated = few_rows_linear(prepared, weight, b, counter, gated=True, eps=1e-6)
    assert torch.allclose(gated, torch.nn.functional.silu(gate) * up, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_kernel_for_few_rows_holds_a_residual_stream_near_the_end_of_fp16():
    """60,000 times a norm's weight of 3 is no number of fp16, but the normed stream is."""
    from decoding.kernels import Normed, few_rows_linear

    torch.manual_seed(0)
    x, residual = torch.randn(5, 96, device="cuda"), torch.randn(5, 160, device="cuda")
    x[:, 3], residual[:, 5] = 60000.0, 60000.0
    weight, norm = torch.randn(160, 96, device="cuda") / 10, torch.rand(96, device="cuda") + 2.5
    x, residual, weight, norm = (tensor.half() for tensor in (x, residual, weight, norm))
    following, counter = norm.repeat(2)[:160], torch.zeros(4096, dtype=torch.int32, device="cuda")

    def apart(a, b):
        return float((a.float() - b).norm() / b.norm())

    for parts in (1, 2, None):
        got = few_rows_linear(Normed(x, *enter_norm(x, norm)), weight, None, counter, eps=1e-6, parts=parts)
        wanted = rms_norm(x.float(), norm.float(), 1e-6) @ weight.float().T
        assert apart(got, wanted) < 2e-3
        small, behind = x / 60000, dict(residual=residual, norm=following)
        added = few_rows_linear(small, weight, None, counter, **behind, parts=parts)
        wanted = residual.float() + small.float() @ weight.float().T
        wanted = rms_norm(wanted, following.float(), 1e-6)
        assert apart(leave_norm(added.scaled, added.squares, 1e-6), wanted) < 2e-3


@pytest.mark.parametrize("greedy", [False, True])
@torch.no_grad()
def test_the_kernels_of_the_sampler_equal_plain_torch(greedy):
    from decoding.kernels import sample

    torch.manual_seed(0)
    n, W, T = 30, 1408, 9
    real = torch.ones(W, dtype=torch.bool, device="cuda")
    real[5::7], real[1300:] = False, False
    is_eos = torch.zeros(1300, dtype=torch.bool, device="cuda")
    is_eos[::3] = True
    next_state = torch.randint(0, 4, (4, 1300), device="cuda")
    tables = SimpleNamespace(next_state=next_state, is_eos=is_eos, real=real, pad_id=11)
    temperature, limit = torch.tensor(0.7, device="cuda"), torch.tensor(6, device="cuda")

    def rows():
        torch.manual_seed(1)
        wide = dict(ids=torch.long, logp=torch.float32, thinking=torch.bool, input_change=torch.float32)
        columns = {name: torch.zeros(n, T + 1, dtype=dtype, device="cuda") for name, dtype in wide.items()}
        columns["t"] = torch.randint(0, 6, (n,), device="cuda")
        columns["state"] = torch.randint(0, 4, (n,), device="cuda")
        columns["ended"] = torch.zeros(n, dtype=torch.bool, device="cuda")
        columns["finished"] = torch.rand(n, device="cuda") < 0.2
        columns["uniforms"] = torch.rand(n, T + 1, device="cuda")
        columns["logits"] = 3 * torch.randn(n, W, device="cuda")
        return Rows(*[None] * len(Rows._fields))._replace(**columns)

    a, b = rows(), rows()
    tokens, thinking, top = sample(a, tables, temperature, limit, greedy)
    expected = sample_step(b, tables, temperature, limit, StepKind(greedy, 0, 1.0, False))
    assert torch.equal(tokens, expected[0])
    assert torch.equal(thinking, expected[1])
    assert torch.allclose(top, expected[2], atol=1e-5)
    for name in ("ids", "thinking", "t", "state", "ended", "finished"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert torch.allclose(a.logp, b.logp, atol=1e-5)
    assert a.finished.float().mean() > 0.3
    assert thinking.any()


@torch.no_grad()
def test_the_kernel_that_blends_equals_plain_torch():
    from decoding import kernels

    torch.manual_seed(0)
    n, E, T, B, G = 20, 96, 7, 3, 5
    row_of_path = torch.tensor([[0, 1, 2, 3, 4], [9, 8, n, 6, 5], [n, n, 11, n, 10]], device="cuda")
    thinking = torch.rand(n, device="cuda") < 0.8
    thinking[11] = False
    logits, real = 2 * torch.randn(n, 512, device="cuda"), torch.ones(512, dtype=torch.bool, device="cuda")
    embeds, t = torch.randn(n, E, device="cuda"), torch.full((n,), 3, device="cuda")
    slot, path = torch.zeros(2, n, dtype=torch.long, device="cuda")
    for b, g in (row_of_path < n).nonzero().tolist():
        slot[row_of_path[b, g]], path[row_of_path[b, g]] = b, g
    made = []
    for kernel in (True, False):
        mix, change = torch.zeros(B, T, G, G, device="cuda"), torch.full((n, T + 1), 9.0, device="cuda")
        rows = Rows(*[None] * len(Rows._fields))._replace(input_change=change, t=t, slot=slot, path=path)
        recorded = (thinking, row_of_path, rows, mix, Interaction(0.2, 0.3))
        if kernel:
            alike = kernels.group_products(logits, logits.amax(-1), real, row_of_path, thinking)
            inputs = kernels.mix((embeds, torch.arange(n, device="cuda")), alike, *recorded)
        else:
            features, thinks = (by_group(x, row_of_path) for x in (logits.softmax(-1), thinking))
            inputs = mix_step(embeds, cross_path_weights(features, thinks, 0.3), *recorded)
        made.append((inputs, mix, change))
    used = row_of_path[row_of_path < n]
    assert torch.allclose(made[0][0][used], made[1][0][used], atol=1e-5)
    assert torch.allclose(made[0][1], made[1][1], atol=1e-5)
    assert torch.allclose(made[0][2][used], made[1][2][used], atol=1e-5)
    assert (made[0][1].sum(-1) > 0).sum() >= 6
    assert not torch.equal(made[0][0], embeds)


@pytest.mark.parametrize("control", ["scaled_mean", "noise", "strangers", "own"])
def test_the_kernel_of_a_control_gives_what_plain_torch_does(control):
    from decoding import kernels

    B, G, E = 3, 5, 48
    torch.manual_seed(0)
    n = B * G
    row_of_path = torch.randperm(n, device="cuda").view(B, G)
    row_of_path[1, 2] = n
    thinking = torch.rand(n, device="cuda") < 0.8
    thinking[row_of_path[0, :3]] = True
    logits, real = 2 * torch.randn(n, 512, device="cuda"), torch.ones(512, dtype=torch.bool, device="cuda")
    embeds, heard = torch.randn(2, n, E, device="cuda")
    embeds[3] = 0.0  # of padding, say
    slot, path = torch.zeros(2, n, dtype=torch.long, device="cuda")
    for b, g in (row_of_path < n).nonzero().tolist():
        slot[row_of_path[b, g]], path[row_of_path[b, g]] = b, g
    made, interaction = [], Interaction(0.2, 0.3, control=control)
    for kernel in (True, False):
        mix, (change, scale) = torch.zeros(B, 7, G, G, device="cuda"), torch.zeros(2, n, 8, device="cuda")
        rows = Rows(*[None] * len(Rows._fields))._replace(
            input_change=change,
            scale=scale,
            t=torch.full((n,), 3, device="cuda"),
            slot=slot,
            path=path,
            key=row_keys(0, 0, 0, n).cuda(),
        )
        recorded = (row_of_path, rows, mix, interaction)
        features, thinks = (by_group(x, row_of_path) for x in (logits.softmax(-1), thinking))
        weights = cross_path_weights(features, thinks, 0.3)
        if kernel:
            parts = kernels.group_products(logits, logits.amax(-1), real, row_of_path, thinking)
            said = embeds, torch.arange(n, device="cuda")
            theirs = (heard, said[1]) if control == "strangers" else heard
            inputs = kernels.mix(said, parts, thinking, *recorded, theirs)
        elif control == "scaled_mean":
            inputs = mix_step(embeds, weights, thinking, *recorded)
        else:
            instead = directions(rows.key, rows.t - 1, E) if control == "noise" else heard
            inputs = control_step(embeds, instead, weights, *recorded)
        made.append((inputs, mix, change, scale))
    used = row_of_path[row_of_path < n]
    for n_th, (ours, theirs) in enumerate(zip(*made, strict=True)):
        ours, theirs = (x if n_th == 1 else x[used] for x in (ours, theirs))
        assert torch.allclose(ours, theirs, atol=1e-4)
    assert not torch.equal(made[0][0], embeds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_own_and_strangers_let_paths_hear_is_that_of_plain_torch(dtype):
    """The same ids and tokens; the largest logits of a block come from the pass that samples."""
    from decoding import kernels

    torch.manual_seed(0)
    n, V, W, K, E = 9, 5083, 5120, LIKELIEST, 96
    logits = (2 * torch.randn(n, W, device="cuda")).to(dtype)
    logits[:, 1000:1030] = 9.0  # more equal ones than are kept
    real = torch.arange(W, device="cuda") < V
    real[5:9] = False
    expected = torch.where(real, logits.float(), IMPOSSIBLE).unflatten(1, (-1, LOGIT_BLOCK)).amax(-1)

    def zeros(*shape, dtype=torch.float32):
        return torch.zeros(n, *shape, dtype=dtype, device="cuda")

    next_state = torch.zeros(2, V, dtype=torch.long, device="cuda")
    is_eos = torch.zeros(V, dtype=torch.bool, device="cuda")
    tables = SimpleNamespace(next_state=next_state, is_eos=is_eos, real=real, pad_id=0)
    rows = Rows(*[None] * len(Rows._fields))._replace(
        logits=logits,
        key=row_keys(1, 2, 3, n).cuda(),
        t=torch.randint(0, 7, (n,), device="cuda"),
        state=zeros(dtype=torch.long),
        ended=zeros(dtype=torch.bool),
        finished=zeros(dtype=torch.bool),
        ids=zeros(8, dtype=torch.long),
        thinking=zeros(8, dtype=torch.bool),
        logp=zeros(8),
        uniforms=zeros(8),
        heard_ids=zeros(8, K, dtype=torch.long),
        heard_probs=zeros(8, K),
    )
    block_tops = torch.empty_like(expected)
    temperature, limit = torch.tensor(0.7, device="cuda"), torch.tensor(8, device="cuda")
    kernels.sample(rows, tables, temperature, limit, False, block_tops)
    assert torch.equal(block_tops, expected)
    ids, probs = kernels.likeliest(rows, real, block_tops)
    their_ids, their_probs = likeliest(logits.clone(), (~real).nonzero().flatten())
    assert torch.equal(ids, their_ids)
    assert torch.allclose(probs, their_probs, atol=1e-6)
    now = torch.arange(n, device="cuda"), rows.t - 1
    assert torch.equal(rows.heard_ids[now], ids)
    assert torch.equal(rows.heard_probs[now], probs)
    table = torch.randn(W, E, device="cuda").to(dtype)
    ours = kernels.mean_embedding(table, ids, probs)
    assert torch.allclose(ours, mean_embedding(table[ids], probs), atol=1e-5)
    strangers = Strangers(torch.randint(0, V, (11, 9)).cuda(), torch.randint(1, 10, (11,)).cuda())
    assert torch.equal(kernels.stranger_tokens(rows, strangers), strangers.tokens(rows.key, rows.t - 1))


def test_noise_is_the_same_on_the_card_to_the_bit():
    keys, positions = row_keys(1, 2, 0, 300)[:, None], torch.arange(20)
    on_card = directions(keys.cuda(), positions.cuda(), 96)
    assert torch.equal(on_card.cpu(), directions(keys, positions, 96))


@pytest.mark.parametrize("control", ["scaled_mean", "noise", "strangers", "own"])
@torch.no_grad()
def test_a_control_in_captured_steps_is_that_of_plain_ones_and_is_scored_as_it_was_sampled(
    control, tokenizer, prompts
):
    model = build_model("llama", tokenizer).cuda()

    def rollout(**how):
        decoder = GroupDecoder(model, tokenizer, "e", Interaction(0.3, control=control), **how)
        decoder.hear_strangers(Strangers.of([[7, 8, 9], [20, 21], [30] * 9], 32))
        made = []
        N = 4 * len(prompts)
        for _ in range(2):  # the second call replays what the first captured
            draws = dict(uniforms=rollout_uniforms(0, 0, 0, N, T), keys=row_keys(0, 0, 0, N))
            made.append(decoder.rollout(prompts, Sampling(T, 4, 1.0), **draws))
        assert torch.equal(made[0].ids, made[1].ids)
        return decoder, made[1]

    decoder, fast = rollout(compiled=False)
    _, plain = rollout(fast=False)
    assert (fast.ids == plain.ids).float().mean() > 0.99, "an edge of the distribution may move a draw"
    same = (fast.ids == plain.ids).view(len(prompts), -1).all(-1)
    assert torch.allclose(fast.mix[same], plain.mix[same], atol=1e-3)
    logp, _ = Scorer(model, decoder.tables)(fast, list(range(len(fast.ids))))
    assert torch.allclose(logp, fast.logp, atol=1e-3)


@torch.no_grad()
def test_one_decoder_with_captured_steps_goes_from_control_to_control(tokenizer, prompts):
    """As in a study: an arm after an arm, with longer evaluations between them, in any order."""
    model, N = build_model("llama", tokenizer).cuda(), 4 * len(prompts)

    def decoder_of(control):
        decoder = GroupDecoder(model, tokenizer, "e", Interaction(0.3, control=control), compiled=False)
        decoder.hear_strangers(Strangers.of([[7, 8, 9], [20, 21], [30] * 9], 32))
        return decoder

    def rollout(decoder, length=T):
        draws = dict(uniforms=rollout_uniforms(0, 0, 0, N, length), keys=row_keys(0, 0, 0, N))
        return decoder.rollout(prompts, Sampling(length, 4, 1.0), **draws)

    held, order = decoder_of("none"), ("none", "own", "noise", "own", "scaled_mean", "none", "strangers")
    for n, control in enumerate(order):
        held.interact_as(Interaction(0.3, control=control))
        ours, theirs = rollout(held), rollout(decoder_of(control))
        assert torch.equal(ours.ids, theirs.ids), control
        for name in ("logp", "mix", "scale", "heard_ids", "heard_probs"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert a is b is None or torch.equal(a, b), f"{name} of {control}"
        rollout(held, length=T + 9 * n)


def test_the_predicted_peak_is_within_a_tenth_of_that_of_steps_that_reach_the_limit(
    tokenizer, prompts, monkeypatch
):
    """--check said `before activations, which take what is left`."""
    for file in ("fast_model", "engine", "decoder"):
        monkeypatch.setattr(f"decoding.{file}.CHUNK", 64)
    settings = dict(num_generations=8, max_completion_length=300, beta=0.1, eval_every=0)
    settings |= dict(micro_batch_tokens=4000, torch_compile=False)
    config = Config(batch_size=len(prompts), **settings)
    policy = build_model("qwen2", tokenizer).cuda().train()
    sampler, reference = (build_model("qwen2", tokenizer, dtype=torch.bfloat16).cuda() for _ in range(2))
    decoder = GroupDecoder(sampler, tokenizer, "e", Interaction(0.3), compiled=False)
    decoder.tables.is_eos[:] = False
    learner = make_learner(config, Accelerator(), policy, reference, decoder, 10)
    predicted = predicted_peak(config, learner, decoder, prompts)
    advantages = torch.randn(8 * len(prompts), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    for step in range(2):
        update(learner, sampled(decoder, prompts, length=300, seed=step), advantages, config)
        refresh(sampler, policy)
    assert predicted == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.1)


PAYS = """
import os, signal
from pathlib import Path

calls, told = 0, Path(__file__).with_name("told")

def pays(completions, **kwargs):  # where there is a file `told`, the fourth step is the last
    global calls
    calls += 1
    if calls == 4 and told.exists():
        told.unlink()
        os.kill(os.getpid(), signal.SIGTERM)
    return [float(len(c[0]["content"]) % 5) for c in completions]
"""


FLAGS = (
    "--config=configs/tiny.yaml --warm_start=none --model=tiny --num_processes=1 --num_steps=6 --eval_every=0"
    " --batch_size=4 --num_generations=4 --max_completion_length=24 --beta=0.1 --mu=2"
)


def stopped_and_left_alone(folder, *flags):
    """How far runs are apart, as the mean difference of a weight, on any device.

    Returns that of two runs that were left alone, and that of a stopped and resumed one from the nearer of
    the two.
    """
    (folder / "pays.py").write_text(PAYS)

    def trained(name, *more, status=0):
        words = [sys.executable, "grpo_train.py", *FLAGS.split(), *flags, *more]
        words += [f"--reward={folder}/pays.py:pays", f"--output_dir={folder / name}"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return None if status else load_file(folder / name / "model.safetensors")

    def apart(a, b):
        return float(torch.cat([(a[name] - b[name]).abs().flatten() for name in a]).mean())

    alone = [trained("first"), trained("second")]
    (folder / "told").touch()
    trained("cut", status=143)
    resumed = trained("cut", "--resume")
    return apart(*alone), min(apart(resumed, other) for other in alone)


@pytest.mark.parametrize(("compiled", "least"), [("false", 0.0), ("true", 1e-6)])
def test_a_run_stopped_and_resumed_on_the_card_is_as_near_to_one_left_alone_as_two_of_those(
    compiled, least, tmp_path
):
    """In float32, where the last bit seldom moves a draw.

    A resumed run compiles for the sizes that it sees first; a step moves a weight by 1e-4 and more.
    """
    noise, resumed = stopped_and_left_alone(tmp_path, "--bf16=false", f"--torch_compile={compiled}")
    assert resumed <= max(4 * noise, least)


@pytest.mark.parametrize("more", ["", "--lora_r=4", "--torch_compile=false", "--optimizer=adamw_8bit"])
def test_a_run_in_fp16_scales_its_loss_and_scores_what_it_sampled(more, tmp_path):
    """The difference of the log-probs is that of bf16, or less by far; few steps overflow."""
    if "8bit" in more:
        pytest.importorskip("bitsandbytes")
    means = {}
    for precision in ("bf16", "fp16"):
        words = [sys.executable, "grpo_train.py", *FLAGS.split(), *more.split(), f"--precision={precision}"]
        (tmp_path / "pays.py").write_text(PAYS)
        words += [f"--reward={tmp_path}/pays.py:pays", f"--output_dir={tmp_path / precision}"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (tmp_path / precision / "metrics.jsonl").read_text().splitlines()
        metrics = [json.loads(line) for line in lines]
        means[precision] = sum(m["logp_diff"] for m in metrics) / len(metrics)
        assert all(("loss_scale" in m) == (precision == "fp16") for m in metrics)
        assert sum("skipped" in m for m in metrics) <= 3, metrics
    assert means["fp16"] < means["bf16"] / 2


def test_without_a_c_compiler_a_run_goes_on_without_kernels_and_says_so_in_one_line(tmp_path):
    (tmp_path / "pays.py").write_text(PAYS)
    words = [sys.executable, "grpo_train.py", *FLAGS.split(), f"--reward={tmp_path}/pays.py:pays"]
    env = os.environ | {"CC": "/bin/false", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    how = dict(cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    done = subprocess.run([*words, f"--output_dir={tmp_path / 'run'}"], **how)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if "Triton builds no kernels: install gcc" in line]
    assert len(said) == 1
    assert said[0].startswith("decoder: the plain path, which is slower (")

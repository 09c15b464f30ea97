"""Each prompt once a group: the packed update against one that takes every row whole."""

import copy
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from decoding.decoder import GroupDecoder
from decoding.rollout import Interaction, Sampling, rollout_uniforms
from decoding.tokens import token_tables
from grpo_train import Config, update
from learning.learner import make_learner
from learning.log_probs import Scorer, compile_layers, make_scorer, pack_rows
from learning.memory import batch_tokens, micro_batches
from learning.models import add_adapters
from learning.packing import attend_packed, is_packed, pack, packed_attention, ranges
from small_models import build_model
from small_update import FLAGS, small_update

KNOWN = ["llama", "qwen2", "qwen3"]
G, T = 3, 24


def sampled(family, tokenizer, prompts, lam=0.3, lora=False):
    """A policy with its decoder and a rollout in which some rows say one token, and some all."""
    model = build_model(family, tokenizer)
    decoder = GroupDecoder(model, tokenizer, "e", Interaction(lam))
    decoder.tables.is_eos[3::25] = True
    rollout = decoder.rollout(prompts, Sampling(T, G, 1.0), rollout_uniforms(0, 0, 0, len(prompts) * G, T))
    rollout.mask[4, 1:], rollout.mask[6, 1:] = False, False  # as if they had ended at once
    assert {1, T} <= set(rollout.sizes[1])
    if lora:
        add_adapters(model, Config(lora_r=4, **FLAGS))
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
    return copy.deepcopy(model), decoder.tables, rollout


def gradients(model, tables, rollout, batches):
    """Gradients of a loss with a different weight for every token, and the log-probs and entropies."""
    model.zero_grad(set_to_none=True)
    weights = torch.rand(rollout.logp.shape, generator=torch.Generator().manual_seed(3)) * rollout.mask
    scores = torch.zeros(2, *rollout.logp.shape)
    for rows in batches:
        logp, entropy = Scorer(model, tables)(rollout, rows)
        (logp * weights[rows]).sum().backward()
        scores[0, rows], scores[1, rows] = logp.detach(), entropy
    return [p.grad.clone() for p in model.parameters() if p.requires_grad], scores


def assert_alike(ours, theirs):
    """The largest difference over each tensor's largest entry, and the norm of the whole."""
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()
    whole = [torch.cat([g.flatten() for g in gradients]) for gradients in (ours, theirs)]
    assert (whole[0] - whole[1]).norm() <= 1e-6 * whole[1].norm()


@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize(("lam", "lora"), [(0.0, False), (0.3, False), (0.3, True)])
def test_packed_rows_have_the_scores_and_gradients_of_whole_rows(family, lam, lora, tokenizer, prompts):
    """Cut anyhow: through the middle of groups, one row alone, rows that pull on their own."""
    model, tables, rollout = sampled(family, tokenizer, prompts, lam, lora)
    everything = list(range(len(rollout.ids)))
    whole, scores = gradients(model, tables, rollout, [[n] for n in everything])
    attend_packed(model, torch.float32)
    assert is_packed(model)
    for batches in (
        [everything],
        [everything[:4], everything[4:5], everything[5:]],
        micro_batches(rollout, 90, packed=True),
    ):
        packed, ours = gradients(model, tables, rollout, batches)
        assert (ours - scores).abs().max() < 1e-5
        assert lora or (ours[0] - rollout.logp * rollout.mask).abs().max() < 3e-5, "scoring equals sampling"
        assert_alike(packed, whole)


def test_a_prompt_goes_through_the_model_once_and_no_place_is_padded(tokenizer, prompts):
    model, tables, rollout = sampled("qwen2", tokenizer, prompts)
    attend_packed(model, torch.float32)
    shapes = []
    model.model.layers[0].mlp.register_forward_hook(lambda _, inputs, out: shapes.append(inputs[0].shape[:2]))
    Scorer(model, tables)(rollout, list(range(len(rollout.ids))))
    read = [length - 1 for length in rollout.sizes[1]]  # a last token predicts nothing
    assert shapes == [(1, sum(map(len, prompts)) + sum(read))]


def test_nothing_reaches_a_completion_but_its_prompt_and_itself(tokenizer, prompts):
    """Another prompt, or another completion of the same prompt, changes no score by one bit of rounding."""
    model, tables, rollout = sampled("llama", tokenizer, prompts, lam=0.0)
    attend_packed(model, torch.float32)
    rows = list(range(len(rollout.ids)))
    before = Scorer(model, tables)(rollout, rows)[0]
    rollout.ids[1] = torch.where(rollout.mask[1], (rollout.ids[1] + 1) % 200, rollout.ids[1])
    changed = dataclasses.replace(rollout, prompts=[*prompts[:4], [5] * len(prompts[4])])
    after = Scorer(model, tables)(changed, rows)[0]
    same = [n for n in rows if n != 1 and n < 4 * G]
    assert torch.equal(before[same], after[same])
    assert not torch.equal(before[1], after[1])
    assert not torch.equal(before[4 * G :], after[4 * G :])


def test_the_segments_of_the_flash_kernel_hold_what_the_mask_allows(tokenizer, prompts):
    """By hand, as the kernel reads them: a query sees the keys of its segment up to its own place from the
    end."""
    _, _, rollout = sampled("llama", tokenizer, prompts)
    rows = torch.tensor([1, 2, 6, 7, 8, 13])
    flash, masked = (pack(rollout, rows, is_flash).segments for is_flash in (True, False))
    seen = {}
    for i in range(len(flash.queries) - 1):
        queries = range(*flash.queries[i : i + 2].tolist())
        keys = flash.source[slice(*flash.keys[i : i + 2].tolist())].tolist()
        assert len(keys) <= flash.longest
        for t, query in enumerate(queries):
            seen[query] = keys[: len(keys) - len(queries) + t + 1]
    assert sorted(seen) == list(range(len(masked.places)))
    for query, place in enumerate(masked.places.tolist()):
        segment, t = divmod(place, masked.query_grid.shape[1])
        assert masked.query_grid[segment, t] == query
        allowed = masked.key_grid[segment][masked.mask[segment, 0, t]]
        assert masked.source[allowed].tolist() == seen[query]


@pytest.mark.parametrize("is_packed_here", [True, False])
def test_packed_attention_is_plain_attention_at_the_scale_of_the_model(is_packed_here, tokenizer, prompts):
    """Some models scale by other than 1 / sqrt(D)."""
    _, _, rollout = sampled("llama", tokenizer, prompts)
    segments = pack(rollout, torch.tensor([1, 2, 6]), False).segments if is_packed_here else None
    M = len(segments.places) if is_packed_here else 6
    q, k, v = torch.randn(3, 1, 2, M, 8, generator=torch.Generator().manual_seed(0))
    seen = [list(range(m + 1)) for m in range(M)]
    for query, place in enumerate(segments.places.tolist() if is_packed_here else ()):
        segment, t = divmod(place, segments.query_grid.shape[1])
        seen[query] = segments.source[segments.key_grid[segment][segments.mask[segment, 0, t]]].tolist()
    out, _ = packed_attention(torch.nn.Module(), q, k, v, None, scaling=0.9, segments=segments)
    for m, keys in enumerate(seen):
        weights = (0.9 * q[0, :, m, None] * k[0][:, keys]).sum(-1).softmax(-1)  # (heads, keys)
        wanted = (weights[..., None] * v[0][:, keys]).sum(1)
        assert torch.allclose(out[0, m], wanted, atol=1e-5)


def test_ranges_lie_behind_each_other():
    assert ranges(np.array([5, 9, 2]), np.array([2, 0, 3])).tolist() == [5, 6, 2, 3, 4]


@pytest.mark.parametrize("settings", [dict(beta=0.1, mu=2), dict(beta=0.1, mu=2, lora_r=4), dict(beta=0.0)])
def test_an_update_is_that_of_whole_rows(settings, tokenizer, prompts, monkeypatch):
    """Policy and reference, the KL, two passes; rows that do not pull are in no batch."""

    def gradient(packs):
        if not packs:
            monkeypatch.setattr("learning.log_probs.attend_packed", lambda model, dtype: None)
        small = small_update(tokenizer, prompts, max_grad_norm=1e-6, micro_batch_tokens=120, **settings)
        monkeypatch.undo()
        assert is_packed(small.policy) == packs
        grads = []
        small.learner.optimizer.register_step_pre_hook(
            lambda *_: grads.append([p.grad.clone() for p in small.policy.parameters() if p.requires_grad])
        )
        advantages = small.advantages
        advantages[4:8] = 0.0
        return grads, small.update(advantages)

    packed, metrics = gradient(True)
    whole, whole_metrics = gradient(False)
    assert len(packed) == settings.get("mu", 1)
    for ours, theirs in zip(packed, whole, strict=True):
        assert_alike(ours, theirs)
    assert metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-6)


def test_packed_micro_batches_hold_every_row_once_within_the_budget(tokenizer, prompts):
    _, _, rollout = sampled("llama", tokenizer, prompts)
    prompt, completion = rollout.sizes
    some = [0, 2, 3, 7, 8, 9, 14]
    for rows in (None, some):
        for budget in (1, 60, 100, 10**6):
            batches = micro_batches(rollout, budget, rows, packed=True)
            assert [n for batch in batches for n in batch] == (rows or list(range(len(rollout.ids))))
            for batch in batches:
                firsts = {n // G: n for n in batch}
                tokens = sum(completion[n] for n in batch) + sum(prompt[n] for n in firsts.values())
                assert batch_tokens(rollout, batch, packed=True) == tokens
                assert len(batch) == 1 or tokens <= budget, "a row alone may be longer"
    assert len(micro_batches(rollout, 10**6, packed=True)) == 1


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_a_model_that_cannot_be_packed_is_trained_whole_and_that_is_said_once(
    family, tokenizer, prompts, capsys
):
    policy, reference = build_model(family, tokenizer), build_model(family, tokenizer)
    decoder, config = GroupDecoder(policy, tokenizer), Config(**{**FLAGS, "beta": 0.1})
    learner = make_learner(config, Accelerator(cpu=True), policy, reference, decoder, 10)
    assert not is_packed(policy)
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("update:")]
    assert "once a completion" in line
    rollout = decoder.rollout(prompts, Sampling(8, 4, 1.0), rollout_uniforms(0, 0, 0, len(prompts) * 4, 8))
    assert update(learner, rollout, torch.randn(len(rollout.ids)), config)["grad_norm"] > 0


@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_no_reason_not_to_pack(family, dtype, tokenizer):
    """Float32 weights under autocast, as on a card: the states come out of the last norm in float32."""
    model = build_model(family, tokenizer)
    scorer = Scorer(model, token_tables(tokenizer, model), dtype)
    scorer.autocast["enabled"] = True
    pack_rows(scorer)
    assert is_packed(model)


def test_a_model_that_an_earlier_run_packed_stays_packed(llama):
    """Its attention has a name of its own by then, which looked at again is none that can be packed."""
    model = copy.deepcopy(llama)
    tables = SimpleNamespace(num_real=model.config.vocab_size, missing=None)
    remarks = [make_scorer(model, tables, Config(**FLAGS)).remark for _ in range(2)]
    assert is_packed(model)
    assert remarks == [None, None]


def test_attention_that_somebody_chose_stays_that(llama):
    """Packed attention is sdpa's: eager attention is kept, and that it costs time is said."""
    model = copy.deepcopy(llama)
    model.set_attn_implementation("eager")
    tables = SimpleNamespace(num_real=model.config.vocab_size, missing=None)
    assert "eager attention" in pack_rows(Scorer(model, tables))
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("packs", [False, True])
def test_under_autocast_the_body_gets_half_precision_from_its_first_layer_on(packs, tokenizer, prompts):
    """As the sampler does: else the residual stream is float32 in the update and bf16 in the rollout."""
    model, tables, rollout = sampled("llama", tokenizer, prompts)
    if packs:
        attend_packed(model, torch.bfloat16)
    scorer, seen = Scorer(model, tables, torch.bfloat16), []
    scorer.autocast["enabled"] = True  # as on a card
    model.model.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    scorer(rollout, [0, 1, 2, 3])
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("breaks", [False, True])
def test_a_model_that_packs_wrongly_is_trained_whole(breaks, tokenizer, prompts):
    """Code of a hub's model may call itself llama and lose what it is given for its layers."""
    model = build_model("llama", tokenizer)
    decoder, config = GroupDecoder(model, tokenizer), Config(**FLAGS)
    rollout = decoder.rollout(prompts, Sampling(8, 4, 1.0), rollout_uniforms(0, 0, 0, len(prompts) * 4, 8))
    scored = copy.deepcopy(model)
    body = scored.model.forward
    if breaks:

        def lost(*args, segments=None, **kwargs):
            assert segments is None, "what is this?"
            return body(*args, **kwargs)
    else:

        def lost(*args, position_ids=None, **kwargs):
            return body(*args, **kwargs)

    scored.model.forward = lost
    scorer = make_scorer(scored, decoder.tables, config)
    assert not is_packed(scored)
    assert ("what is this?" if breaks else "other states") in scorer.remark
    logp = scorer(rollout, list(range(len(rollout.ids))))[0]
    assert (logp - rollout.logp).abs().max() < 1e-5


def test_a_reference_that_goes_a_slower_way_than_the_policy_is_said_too(
    tokenizer, prompts, monkeypatch, capsys
):
    remarks = iter([None, "update: the reference is slow"])
    monkeypatch.setattr("learning.log_probs.pack_rows", lambda scorer: next(remarks))
    small_update(tokenizer, prompts, beta=0.1)
    assert capsys.readouterr().out.splitlines() == ["update: the reference is slow"]


def test_layers_of_a_model_that_is_used_again_are_not_compiled_twice(llama):
    model = copy.deepcopy(llama)
    compile_layers(model)
    compiled = [layer._compiled_call_impl for layer in model.model.layers]
    assert all(compiled)
    compile_layers(model)
    assert [layer._compiled_call_impl for layer in model.model.layers] == compiled


def test_an_adapters_scaling_is_a_constant_of_compiled_layers(llama):
    compile_layers(copy.deepcopy(llama))

    class Adapter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scaling = {"default": 0.3}

        def forward(self, x):
            return x * self.scaling["default"]

    given = []

    def backend(graph, inputs):
        given.extend(inputs)
        return graph.forward

    torch.compile(Adapter(), dynamic=True, backend=backend)(torch.ones(3))
    assert [x.dtype for x in given if isinstance(x, torch.Tensor)] == [torch.float32]  # no double of the CPU

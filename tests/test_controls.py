"""Controls of M3PO: what is heard instead, how far inputs move, scoring as sampling, and nothing else."""

import base64
import dataclasses
import functools
import json
import math

import numpy as np
import pytest
import torch

import grpo_eval
import grpo_train
from decoding.controls import (
    Strangers,
    controlled,
    directions,
    hashed,
    likeliest,
    normals,
    row_keys,
    scaled_mean_weights,
)
from decoding.decoder import GroupDecoder
from decoding.rollout import Interaction, Sampling, joined, rollout_uniforms
from errors import RunError, SettingError
from learning.log_probs import Scorer, make_scorer
from problems.problem import EncodedProblem
from reporting.files import write_records, write_whole
from running.log import _token_record
from running.parsing import parse_config
from running.preflight import _made_up_rollout
from running.strangers import read_strangers
from small_models import a_model_and_problems, build_model
from small_runs import SHORT, command, given_once, lines, run_short, without_times

G, T, LAMBDA = 3, 24, 0.3
CONTROLS = ("scaled_mean", "noise", "strangers", "own")


def some_strangers():
    ids = torch.randint(5, 250, (11, T), generator=torch.Generator().manual_seed(1))
    return Strangers(ids, torch.arange(1, 12))


def decoder_of(model, tokenizer, control, think_end="e", **kwargs):
    decoder = GroupDecoder(model, tokenizer, think_end, Interaction(LAMBDA, 0.1, control=control), **kwargs)
    if think_end == "e":
        decoder.tables.is_eos[3::25] = True  # more ends than two ids would give in so few tokens
    if control == "strangers":
        decoder.hear_strangers(some_strangers())
    return decoder


def sampled(decoder, prompts, rows=slice(None), step=0, length=T):
    N = len(prompts) * G if rows == slice(None) else 5 * G
    uniforms, keys = rollout_uniforms(0, step, 0, N, length)[rows], row_keys(0, step, 0, N)[rows]
    return decoder.rollout(prompts, Sampling(length, G, 1.0), uniforms, keys=keys)


@pytest.fixture(scope="module")
def made(llama, tokenizer, prompts):
    """The decoder of a control and what it sampled for all prompts, once."""

    @functools.cache
    def of(control):
        decoder = decoder_of(llama, tokenizer, control)
        return decoder, sampled(decoder, prompts)

    return of


def python_hash(x):
    """splitmix64 in Python's own integers."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def python_key(seed, step, retry, row):
    key = 0
    for number in (seed, step, retry, row):
        key = python_hash(key ^ number)
    return key


def python_noise(key, position, width):
    """The direction of noise, a byte at a time."""
    seed, noise = python_hash(key ^ position), []
    for column in range(width):
        words = [python_hash(seed ^ (2 * column + half)) for half in (0, 1)]
        noise.append(sum(sum(word.to_bytes(8, "little")) for word in words) - 2040)
    length = math.sqrt(sum(n * n for n in noise))
    return torch.tensor([n / length for n in noise])


def slow_log_probs(model, out, control, group, prompt, strangers):
    """Log-probs of a group's tokens by the letter: no cache, M3PO's weights at each step, then the control.

    Also |h - e|, lambda |c - e| and |d| of each input that was moved. The tokenizer has 320 ids.
    """
    embed, real = model.get_input_embeddings(), 320
    rows = range(group * G, group * G + G)
    inputs = [embed(torch.tensor([prompt])) for _ in rows]
    logps, sizes = [[] for _ in rows], []
    for t in range(max(int(out.lengths[n]) for n in rows)):
        logits = [model(inputs_embeds=x).logits[0, -1, :real] for x in inputs]
        p = [torch.softmax(x, -1) for x in logits]
        e = [embed(out.ids[n, t]) for n in rows]
        for i, n in enumerate(rows):
            logps[i].append(float(p[i].log()[out.ids[n, t]]))
        for i, n in enumerate(rows):
            peers = [j for j in range(G) if j != i and out.thinking[rows[j], t]]
            h = e[i]
            if out.thinking[n, t] and peers:
                alike = torch.stack([torch.cosine_similarity(p[i], p[j], dim=0) for j in peers])
                weights = torch.softmax(alike / 0.1, 0)
                c = sum(w * e[j] for w, j in zip(weights, peers, strict=True))
                size = (c - e[i]).norm()
                if control == "scaled_mean":
                    d = sum(e[j] for j in peers) / len(peers) - e[i]
                elif control == "own":
                    likely = sorted(range(real), key=lambda v: -float(p[i][v]))[:16]
                    q = p[i][likely] / p[i][likely].sum()
                    d = sum(w * embed(torch.tensor(v)) for w, v in zip(q, likely, strict=True)) - e[i]
                elif control == "noise":
                    d = python_noise(python_key(0, 0, 0, n), t, len(e[i]))
                else:
                    which = [python_hash(~python_key(0, 0, 0, rows[j]) & (2**64 - 1)) for j in peers]
                    signed = [x - 2**64 if x >= 2**63 else x for x in which]
                    heard = [strangers.ids[x % 11, t % (x % 11 + 1)] for x in signed]
                    d = sum(w * embed(x) for w, x in zip(weights, heard, strict=True)) - e[i]
                h = e[i] + LAMBDA * (size / d.norm() * d if d.norm() > 1e-6 else 0 * d)
                sizes.append((float((h - e[i]).norm()), LAMBDA * float(size), float(d.norm())))
            inputs[i] = torch.cat([inputs[i], h[None, None]], 1)
    return logps, sizes


@pytest.mark.parametrize("control", CONTROLS)
@torch.no_grad()
def test_a_control_moves_inputs_its_own_way_and_as_far_as_m3po_would(llama, tokenizer, prompts, control):
    decoder = decoder_of(llama, tokenizer, control, "</reasoning>")
    out = sampled(decoder, prompts[:3], length=12)
    logps, sizes = slow_log_probs(llama, out, control, 2, prompts[2], some_strangers())
    for i, n in enumerate(range(2 * G, 3 * G)):
        length = int(out.lengths[n])
        assert torch.allclose(out.logp[n, :length], torch.tensor(logps[i][:length]), atol=3e-5)
    assert len(sizes) > 20, "the test is about paths that are moved"
    assert all(moved == pytest.approx(wanted, abs=1e-5) for moved, wanted, length in sizes if length > 1e-5)
    m3po = sampled(decoder_of(llama, tokenizer, "none", "</reasoning>"), prompts[:3], length=12)
    assert not torch.equal(out.ids, m3po.ids)
    # until something is heard, paths are the same
    assert torch.equal(out.ids[:, 0], m3po.ids[:, 0])
    assert torch.allclose(out.input_change[:, 0], m3po.input_change[:, 0], atol=1e-5)


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
@torch.no_grad()
def test_scoring_equals_sampling_in_every_control(family, control, tokenizer, prompts):
    """I1, for rows that are packed and for whole ones; Gemma scales what its table gives."""
    model = build_model(family, tokenizer)
    decoder = decoder_of(model, tokenizer, control)
    out = sampled(decoder, prompts)
    assert out.ended.any()
    assert not out.ended.all()
    rows = list(range(len(out.ids)))
    whole, _ = Scorer(model, decoder.tables)(out, rows)
    assert torch.allclose(whole, out.logp, atol=3e-5)
    packed = make_scorer(build_model(family, tokenizer), decoder.tables, grpo_train.Config())
    assert torch.allclose(packed(out, [7, 1, 2])[0], out.logp[[7, 1, 2]], atol=3e-5)
    plain, _ = Scorer(model, decoder.tables)(dataclasses.replace(out, mix=None), rows)
    assert (plain - out.logp).abs().max() > 0.05, "plain ids are another policy"
    peerless, _ = Scorer(model, decoder.tables)(dataclasses.replace(out, control="none", scale=None), rows)
    assert (control == "scaled_mean") == torch.allclose(peerless, out.logp, atol=1e-3)


@pytest.mark.parametrize("control", CONTROLS)
@torch.no_grad()
def test_a_group_of_a_control_is_the_same_alone_and_among_others(llama, tokenizer, prompts, control, made):
    """I10: who sits beside whom, rows that have left, and the path of the decoder count for nothing."""
    (decoder, whole), rows = made(control), slice(2 * G, 4 * G)
    plain = sampled(decoder_of(llama, tokenizer, control, fast=False), prompts)
    assert torch.equal(plain.ids, whole.ids)
    assert torch.allclose(plain.logp, whole.logp, atol=1e-5)
    part = sampled(decoder, prompts[2:4], rows)
    width = part.ids.shape[1]
    assert torch.equal(part.ids, whole.ids[rows, :width])
    assert torch.allclose(part.logp, whole.logp[rows, :width], atol=1e-5)
    other = sampled(decoder, prompts, step=1)
    assert not torch.equal(other.ids, whole.ids)
    assert control in ("scaled_mean", "own") or not torch.equal(other.keys, whole.keys)


@pytest.mark.parametrize("order", [("none", *CONTROLS), (*reversed(CONTROLS), "none", "own")])
@torch.no_grad()
def test_a_decoder_that_goes_from_control_to_control_samples_as_a_new_one(
    llama, tokenizer, prompts, order, made
):
    """Seeds of a study stopped at `own`: the storage of the arm before it had no room for what it hears."""
    decoder = decoder_of(llama, tokenizer, order[0])
    decoder.hear_strangers(some_strangers())
    for control in order:
        decoder.interact_as(Interaction(LAMBDA, 0.1, control=control))
        ours, (_, theirs) = sampled(decoder, prompts), made(control)
        for name in ("ids", "logp", "mix", "scale", "heard_ids", "heard_probs"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert a is b is None or torch.equal(a, b), f"{name} of {control}"


@torch.no_grad()
def test_a_rollout_holds_nothing_that_an_earlier_one_heard(llama, tokenizer, prompts):
    """At a row's last token nothing is heard: there stood what the row had heard in the rollout before."""
    kept, new = (decoder_of(llama, tokenizer, "own") for _ in range(2))
    sampled(kept, prompts)
    ours, theirs = (sampled(decoder, prompts[:2], length=2) for decoder in (kept, new))
    assert torch.equal(ours.heard_ids, theirs.heard_ids)
    assert torch.equal(ours.heard_probs, theirs.heard_probs)


@pytest.mark.parametrize("control", CONTROLS)
@torch.no_grad()
def test_storage_that_grows_keeps_what_is_recorded(llama, tokenizer, prompts, control, made, monkeypatch):
    _, whole = made(control)
    for file in ("fast_model", "engine", "decoder"):
        monkeypatch.setattr(f"decoding.{file}.CHUNK", 7)
    grown = sampled(decoder_of(llama, tokenizer, control), prompts)
    assert whole.ids.shape[1] > 14
    assert torch.equal(grown.ids, whole.ids)
    for name in ("mix", "scale", "heard_ids", "heard_probs"):
        ours, theirs = getattr(grown, name), getattr(whole, name)
        assert ours is theirs is None or torch.allclose(ours, theirs, atol=1e-5), name


@pytest.mark.parametrize("control", ["noise", "strangers"])
def test_what_a_row_hears_follows_from_its_number_in_the_batch(llama, tokenizer, prompts, control):
    """Whoever samples it; an extra rollout and another step draw anew."""
    decoder = decoder_of(llama, tokenizer, control)
    config = grpo_train.Config(num_generations=G, max_completion_length=T, eval_every=0)
    batch = [EncodedProblem(None, "", ids) for ids in prompts]
    whole = grpo_train.sample_groups(config, decoder, batch, 2, range(5))
    part = grpo_train.sample_groups(config, decoder, batch, 2, range(2, 4))
    assert part.texts == whole.texts[2 * G : 4 * G]
    keys = row_keys(config.seed, 2, 0, 5 * G)
    assert torch.equal(whole.rollout.keys, keys)
    assert torch.equal(part.rollout.keys, keys[2 * G : 4 * G])
    for other in (dict(step=2, retry=1), dict(step=3)):
        again = grpo_train.sample_groups(config, decoder, batch, groups=range(5), **other)
        assert not set(again.rollout.keys.tolist()) & set(keys.tolist())


@pytest.mark.parametrize("control", CONTROLS)
def test_the_trial_of_a_check_scores_what_a_control_records(llama, prompts, control, made):
    (decoder, real), keys = made(control), row_keys(0, 0, 0, 2 * G)
    trial = _made_up_rollout(decoder, prompts[:2], Sampling(9, G, 1.0), keys)
    for name in ("mix", "scale", "keys", "heard_ids", "heard_probs"):
        ours, theirs = getattr(trial, name), getattr(real, name)
        assert (ours is None) == (theirs is None), name
        assert ours is None or (ours.dtype, ours.shape[2:]) == (theirs.dtype, theirs.shape[2:]), name
    assert Scorer(llama, decoder.tables)(trial, [0, 4])[0].isfinite().all()


@pytest.mark.parametrize("control", CONTROLS)
@torch.no_grad()
def test_groups_that_move_bring_what_their_control_needs(llama, control, made):
    decoder, out = made(control)
    moved = joined([out.groups([3]), out.groups([4, 0])], 0).to("cpu").with_groups([1], out.groups([2]), 0)
    assert moved.control == control
    logp, _ = Scorer(llama, decoder.tables)(moved, list(range(3 * G)))
    assert torch.allclose(logp, moved.logp, atol=3e-5)


def test_a_rollout_goes_to_another_device_whole(made):
    """Groups that another process sampled come from the CPU; what is left there cannot be scored."""
    for control in CONTROLS:
        _, out = made(control)
        moved = vars(out.to("meta"))
        tensors = {name for name, value in vars(out).items() if torch.is_tensor(value)} - {"prompt_ids"}
        assert {name for name in tensors if moved[name].device.type != "meta"} == set()


@torch.no_grad()
def test_the_reference_moves_its_own_embeddings_by_the_scale_that_was_recorded(tokenizer, made):
    other = build_model("llama", tokenizer, seed=1)
    table = other.get_input_embeddings().weight
    for control in CONTROLS:
        decoder, out = made(control)
        moved = Scorer(other, decoder.tables)._completion_inputs(out, torch.tensor([4]), 2)[0, 1]
        own, peers = table[out.ids[4, 1]], table[out.ids[3:6, 1]]
        if control == "scaled_mean":
            heard = out.mix[1, 1, 1] @ peers - own
        elif control == "own":
            heard = out.scale[4, 1] * (out.heard_probs[4, 1] @ table[out.heard_ids[4, 1]] - own)
        elif control == "noise":
            heard = out.scale[4, 1] * python_noise(python_key(0, 0, 0, 4), 1, len(own))
        else:
            heard = out.scale[4, 1] * (out.mix[1, 1, 1] @ table[out.heard_ids[3:6, 1]] - own)
        assert out.mix[1, 1, 1].sum() == pytest.approx(1, abs=1e-5)
        assert torch.allclose(moved, own + LAMBDA * heard, atol=1e-5)


def test_noise_is_normal_uncorrelated_and_no_row_shares_it():
    keys = row_keys(3, 5, 0, 600)
    assert keys.tolist()[:2] == [
        x - 2**64 if x >= 2**63 else x for x in (python_key(3, 5, 0, n) for n in (0, 1))
    ]
    others = (row_keys(4, 5, 0, 600), row_keys(3, 6, 0, 600), row_keys(3, 5, 1, 600))
    assert len(set(torch.cat([keys, *others]).tolist())) == 2400
    assert torch.equal(row_keys(3, 5, 0, 7), keys[:7]), "fewer rows are the first of more"
    noise = directions(keys[:, None], torch.arange(20), 48)
    assert torch.equal(noise[5, 3], python_noise(python_key(3, 5, 0, 5), 3, 48)), (
        "rounded once: on any device"
    )
    assert torch.equal(noise[5, 3], directions(keys[5], torch.tensor(3), 48)), "however many are made at once"
    assert torch.allclose(noise.norm(dim=-1), torch.ones(()), atol=1e-6)
    alike = noise.flatten(0, 1)[:2000] @ noise.flatten(0, 1)[:2000].T
    assert alike.fill_diagonal_(0).abs().max() < 6 / math.sqrt(48), "4 million pairs"
    assert alike.mean().abs() < 1e-3
    values = normals(hashed(torch.arange(2 * 10**5).view(-1, 2))).double()
    values = values / math.sqrt(16 * (256**2 - 1) / 12)
    moments = [float(values.pow(k).mean()) for k in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3 - 1.2 / 16], abs=0.1)


def test_strangers_follow_from_the_row_and_begin_anew_when_their_reasoning_is_over():
    strangers = Strangers.of([[1, 2, 3], [4, 5], list(range(10, 20))], width=6)
    assert strangers.lengths.tolist() == [3, 2, 6]
    heard = strangers.tokens(row_keys(0, 0, 0, 3000)[:, None], torch.arange(7))
    assert {tuple(row) for row in heard.tolist()} == {
        (1, 2, 3, 1, 2, 3, 1), (4, 5, 4, 5, 4, 5, 4), (10, 11, 12, 13, 14, 15, 10)
    }  # fmt: skip
    assert all(900 < int((heard[:, 0] == first).sum()) < 1100 for first in (1, 4, 10))


def test_the_scaled_mean_by_hand():
    """Path 0 at the origin hears (3, 0) alone in M3PO; the mean of its peers is (1.5, 2), 2.5 away. The
    last path has ended. All peers of path 2's twin say the same: no direction, and no change.
    """
    embeds = torch.tensor([[[0.0, 0], [3, 0], [0, 4], [9, 9]]])
    thinking, weights = torch.tensor([[True, True, True, False]]), torch.zeros(1, 4, 4)
    weights[0, 0, 1] = weights[0, 1, 0] = weights[0, 2, 1] = 1.0
    [made] = scaled_mean_weights(embeds, weights, thinking)
    assert made[0].tolist() == pytest.approx([1 - 1.2, 0.6, 0.6, 0], abs=1e-6)
    far = 5 / math.hypot(1.5, 4)  # |(3, -4)| over the distance from (0, 4) to (1.5, 0)
    assert made[2].tolist() == pytest.approx([far / 2, far / 2, 1 - far, 0], abs=1e-6)
    assert not made[3].any()
    same = torch.ones(1, 4, 2)
    [made] = scaled_mean_weights(same, weights, thinking)
    assert torch.equal(made[:3], torch.eye(4)[:3]), "a mean that is the path's own embedding moves nothing"


def moves_by_hand():
    """Four paths of a group with what each hears of its own, and the scale and next inputs by hand.

    In M3PO path 0 would go from (3, 4) to (6, 8), a way of 5: here 0.01 to the right is made as long. Path 1
    hears its own embedding but for rounding, and path 3 has no peer. Everything is 100,000 times smaller.
    """
    embeds = torch.tensor([[3.0, 4], [3, 4], [6, 8], [3, 4]]) / 1e5
    heard = torch.tensor([[3.01, 4], [3 + 1e-6, 4], [6, 7], [50, 50]]) / 1e5
    weights = torch.zeros(4, 4)
    weights[0, 2] = weights[1, 2] = weights[2, 0] = 1.0
    wanted = torch.tensor([[3 + 0.1 * 5, 4], [3, 4], [6, 8 - 0.1 * 5], [3, 4]]) / 1e5
    return embeds, heard, weights, [500, 0, 5, 0], wanted


def test_the_scale_of_a_control_by_hand():
    embeds, heard, weights, scales, wanted = moves_by_hand()
    inputs, scale = controlled("own", embeds, heard, weights, None, 0.1)
    assert scale.tolist() == pytest.approx(scales, rel=1e-3)
    assert torch.allclose(inputs, wanted, rtol=1e-4, atol=0)
    assert torch.equal(inputs[[1, 3]], embeds[[1, 3]]), "bit for bit"


def test_a_control_computes_in_float32_and_returns_the_dtype_of_its_embeddings():
    """The sampler does so without autocast, the update within it."""
    embeds, heard, weights, _, _ = moves_by_hand()
    embeds, heard = embeds.bfloat16(), heard.bfloat16()
    weights[2] = torch.tensor([0.3, 0, 0, 0.7])  # no numbers of bf16
    alone = controlled("strangers", embeds, heard, weights, None, 0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = controlled("strangers", embeds, heard, weights, None, 0.1)
    assert [x.dtype for x in under] == [torch.bfloat16, torch.float32]
    assert all(torch.equal(a, b) for a, b in zip(alone, under, strict=True))


@torch.no_grad()
def test_a_path_without_thinking_peers_is_moved_in_no_control(made):
    """I2: neither when its peers have stopped thinking nor when it has itself."""
    for control in CONTROLS:
        _, out = made(control)
        has_peers = out.mix.transpose(1, 2).flatten(0, 1).any(-1)  # (B, T, G, G) -> (N, T)
        assert (out.thinking & ~has_peers).any(), "some think alone"
        assert not out.input_change[~has_peers].any()
        assert (out.input_change[has_peers] > 0).float().mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_likeliest_tokens_are_those_of_a_sort_the_lower_id_first_among_equals(dtype):
    """bf16 has few numbers: most of the largest logits are equal to others. Some ids are no token's. Logits
    may all be below 0, and lie in more blocks than there are tokens to find.
    """
    generator = torch.Generator().manual_seed(0)
    for width in (128, 18 * 128):
        logits = (3 * torch.randn(7, width, generator=generator)).to(dtype)
        logits[1] = 0.5
        logits[2, 5:40] = 9.0
        logits[4] -= 100
        unreal = torch.tensor([0, 6, 7, *range(width - 50, width)])
        logits[:, unreal] += 20
        allowed = [v for v in range(width) if v not in unreal.tolist()]
        wanted = [sorted(allowed, key=lambda v: (-float(row[v]), v))[:16] for row in logits]
        values = torch.stack([row[ids] for row, ids in zip(logits, wanted, strict=True)]).float()
        ids, probs = likeliest(logits.clone(), unreal)
        assert ids.tolist() == wanted
        assert torch.allclose(probs, torch.softmax(values, -1), atol=1e-6)
        assert torch.equal(likeliest(logits[3:4].clone(), unreal)[0], ids[3:4])


def test_what_a_control_hears_is_recorded_where_it_is_its_peers(tokenizer, made):
    """A byte holds neither a negative weight nor one above 1."""
    with torch.no_grad():
        for control in CONTROLS:
            _, out = made(control)
            record = _token_record(tokenizer, out, 7, out.ids[7].tolist())
            json.dumps(record)
            if control == "scaled_mean":
                assert record["mix_dtype"] == "float16"
                read = np.frombuffer(base64.b64decode(record["mix"]), dtype=np.float16).reshape(-1, G)
                assert np.allclose(read, out.mix[2, :, 1].numpy(), atol=2e-3)
                assert (out.mix.min() < -0.01, out.mix.max() > 0.9) == (True, True)
            else:
                assert "mix" not in record, "nobody heard a peer"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--m3po_lambda 0 --m3po_control noise", "m3po_control='noise'.*has no effect with m3po_lambda=0"),
        (
            "--m3po_control nois",
            "m3po_control='nois': must be one of none, scaled_mean, noise, strangers, own",
        ),
        ("--m3po_control scaled_mean --m3po_similarity mean", "m3po_control='scaled_mean': is M3PO itself"),
        ("--m3po_control scaled_mean --num_generations 2", "m3po_control='scaled_mean': is M3PO itself"),
    ],
)
def test_a_control_that_is_none_is_refused(flags, why):
    with pytest.raises(SettingError, match=why):
        parse_config(grpo_train.Config, flags.split())


def test_an_interaction_of_unknown_words_is_refused():
    """An unknown similarity was taken for `mean` without a word."""
    for name in ("similarity", "control"):
        with pytest.raises(ValueError, match=f"{name}='nois': must be one of"):
            Interaction(0.1, **{name: "nois"})


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        ((1.5, 0.1), "lambda_blend=1.5: must be between 0 and 1"),
        ((0.1, 0.0), "temperature=0.0: must be positive and finite"),
    ],
)
def test_an_interaction_of_impossible_numbers_is_refused(numbers, why):
    with pytest.raises(ValueError, match=why):
        Interaction(*numbers)


FLAGS = "--m3po_control strangers --save_every 1 --m3po_lambda 0.5 --eval_every 0 "


def everything(folder):
    names = ("rollouts.jsonl", "strangers.jsonl")
    return [(folder / name).read_text() for name in names] + without_times(lines(folder / "metrics.jsonl"))


@pytest.mark.slow
def test_strangers_are_sampled_once_from_the_start_and_found_again_on_resume(warm, tmp_path, monkeypatch):
    """A file that was lost is made again from the start, not from the checkpoint's weights."""
    monkeypatch.setattr("running.strangers.PROBLEMS", 6)
    run_short(warm, tmp_path / "whole", FLAGS)
    records = lines(tmp_path / "whole" / "strangers.jsonl")
    assert len(records) == 6 * 8
    assert len({r["example_id"] for r in records}) == 6
    assert len({tuple(r["ids"]) for r in records}) > 20
    run_short(warm, tmp_path / "part", FLAGS + "--num_steps 1")
    for is_lost in (False, True):
        if is_lost:
            (tmp_path / "part" / "strangers.jsonl").unlink()
        run_short(warm, tmp_path / "part", FLAGS + f"--num_steps {2 + is_lost} --resume true")
    assert everything(tmp_path / "part") == everything(tmp_path / "whole")
    other = FLAGS + "--num_steps 1 --seed 7 --overwrite_output_dir true"
    run_short(warm, tmp_path / "part", other)
    assert lines(tmp_path / "part" / "strangers.jsonl") != records, "another run's are not taken"


@pytest.mark.parametrize("text", ["", "{}\n", '{"ids": []}\n', "half a li"])
def test_a_damaged_file_of_strangers_is_one_line(text, tmp_path):
    (tmp_path / "strangers.jsonl").write_text(text)
    with pytest.raises(RunError, match=r"strangers.jsonl is damaged: delete it"):
        read_strangers(tmp_path / "strangers.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("how", [*CONTROLS, "none --m3po_credit 2", "none --m3po_scoring plain"])
def test_a_control_is_the_same_run_on_two_processes(how, warm, tmp_path):
    """Groups move between processes with what was recorded of them: with beta 0 not all rows are computed."""
    beta = 0.0 if "credit" in how else 0.04
    flags = FLAGS.replace("strangers", how) + f"--beta {beta} --cpu_threads 1 --dynamic_sampling 1"
    run_short(warm, tmp_path / "one", flags)
    words = f"{SHORT} --warm_start none --model {warm} --output_dir {tmp_path / 'two'} {flags}"
    done = command("grpo_train.py", *given_once(words), nproc=2)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (lines(tmp_path / name / "rollouts.jsonl") for name in ("one", "two"))
    keys = ("step", "example_id", "generation", "completion", "reward")
    assert [[r[key] for key in keys] for r in one] == [[r[key] for key in keys] for r in two]
    logged = {"loss", "grad_norm", "kl", "input_change", "gate_entropy", "gate_mean_cosine", "credit_size"}
    for a, b in zip(*(lines(tmp_path / name / "metrics.jsonl") for name in ("one", "two")), strict=True):
        assert a.keys() == b.keys()
        for name in logged & a.keys():
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-6), name
        assert ("credit_size" in a, "kl" in a) == (beta == 0, beta > 0)
        assert (a["logp_diff_max"] > 1e-3) == ("plain" in how)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_an_evaluation_lets_paths_interact_as_they_were_trained(tokenizer, tmp_path):
    """With the settings of the run, whose control went unnoticed: the paths heard each other."""
    a_model_and_problems(tmp_path, "llama", tokenizer)
    model, texts = tmp_path / "model", {}
    settings = dict(model=str(model), dataset=str(tmp_path), split="train", limit=3, num_samples=3)
    settings |= dict(temperature=1.0, m3po=True, max_completion_length=12, output_dir=str(tmp_path))
    for control in ("none", *CONTROLS):
        write_whole(model / "run_config.yaml", f"m3po_lambda: 0.5\nm3po_control: {control}\nseed: 3\n")
        if control == "strangers":
            with pytest.raises(SettingError, match="m3po_control='strangers': needs the strangers.jsonl"):
                grpo_eval.evaluate(grpo_eval.Config(**settings, name="lost"))
            write_records(model / "strangers.jsonl", [{"ids": [7, 8, 9]}])
        _, folder = grpo_eval.evaluate(grpo_eval.Config(**settings, name=control))
        texts[control] = (folder / "samples_m3po.jsonl").read_text()
    assert len(set(texts.values())) == 5

"""The decoder against transformers' `generate` and a slow reference without cache, padding or batch."""

import copy
import itertools
import math
import re

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from decoding import fast_model
from decoding.any_model import UncachedBackbone, check_head, vocab_logits
from decoding.decoder import GroupDecoder
from decoding.engine import Sizes
from decoding.fast_model import why_not
from decoding.rollout import Interaction, Sampling, pad_left, rollout_uniforms
from decoding.step import Rows, StepKind, _first_beyond, draw, keep_top, mix_step, sample_step
from decoding.tokens import (
    TokenTables,
    arithmetic_tokenizer,
    delimiter_automaton,
    eos_token_ids,
    token_bytes,
    token_tables,
)
from errors import Interrupted, SettingError
from m3po_module import cross_path_weights
from problems.arithmetic import arithmetic_problems
from small_models import build_model, with_layers

T = 16


def sampled(decoder, prompts, G=3, length=T, temperature=1.0, seed=0, **kwargs):
    uniforms = rollout_uniforms(seed, 0, 0, len(prompts) * G, length)
    return decoder.rollout(prompts, Sampling(length, G, temperature), uniforms, **kwargs)


def slow_group(decoder, prompt, uniforms, temperature, closes):
    """M3PO by the letter for one group: paths recomputed from their first token at each step, weights in
    plain Python.

    `closes(ids)` says whether the text of the ids has ended the thinking. Returns ids and log-probs (lists a
    path), and mix[t][i][j].
    """
    model, interaction, tau = decoder.model, decoder.interaction, decoder.interaction.temperature
    num_real, eos, lambda_blend = len(decoder.tokenizer), decoder.tables.eos_ids, interaction.lambda_blend
    embed, G = model.get_input_embeddings(), len(uniforms)
    inputs = [embed(torch.tensor([prompt])) for _ in range(G)]
    ids, logps, mixes, done = [[] for _ in range(G)], [[] for _ in range(G)], [], [False] * G
    for t in range(uniforms.shape[1]):
        logits = [model(inputs_embeds=x).logits[0, -1, :num_real] for x in inputs]
        for i in range(G):
            if done[i]:
                continue
            p = torch.softmax(logits[i] / temperature, -1).double()
            token = min(int((p.cumsum(-1) <= uniforms[i, t].double() * p.sum()).sum()), num_real - 1)
            ids[i].append(token)
            logps[i].append(float(p[token].log()))
            done[i] = token in eos
        if all(done):
            break
        thinks = [not done[i] and not closes(ids[i]) for i in range(G)]
        vectors = [
            torch.softmax(x, -1) if interaction.similarity == "distribution" else embed(torch.tensor(y[-1]))
            for x, y in zip(logits, ids, strict=True)
        ]
        mix = [[0.0] * G for _ in range(G)]
        for i in range(G):
            peers = [j for j in range(G) if j != i and thinks[j] and thinks[i]]
            cosines = [float(torch.cosine_similarity(vectors[i], vectors[j], dim=0)) for j in peers]
            if interaction.similarity == "mean":
                cosines = [1.0] * len(peers)
            scores = [math.exp(cosine / tau) for cosine in cosines]
            for j, s in zip(peers, scores, strict=True):
                mix[i][j] = s / sum(scores)
        mixes.append(mix)
        embeds = [embed(torch.tensor([y[-1]])) for y in ids]
        for i in range(G):
            if not done[i]:
                peers = sum((mix[i][j] * embeds[j] for j in range(G)), torch.zeros_like(embeds[i]))
                h = (1 - lambda_blend) * embeds[i] + lambda_blend * peers if any(mix[i]) else embeds[i]
                inputs[i] = torch.cat([inputs[i], h[None]], 1)
    return ids, logps, mixes


@pytest.mark.parametrize("similarity", ["distribution", "embedding", "mean"])
@torch.no_grad()
def test_paths_that_interact_are_sampled_as_the_formulas_say(model, tokenizer, prompts, similarity):
    decoder = GroupDecoder(model, tokenizer, "5", Interaction(0.3, 0.1, similarity))
    out = sampled(decoder, prompts[:2], temperature=0.9)
    uniforms = rollout_uniforms(0, 0, 0, 6, T)
    heard = 0

    def closes(ids):
        return "5" in tokenizer.decode(ids, skip_special_tokens=True)

    for b, prompt in enumerate(prompts[:2]):
        ids, logps, mixes = slow_group(decoder, prompt, uniforms[3 * b : 3 * b + 3], 0.9, closes)
        for i in range(3):
            n = 3 * b + i
            assert out.ids[n][out.mask[n]].tolist() == ids[i]
            assert torch.allclose(out.logp[n][out.mask[n]], torch.tensor(logps[i]), atol=1e-4)
        for t, mix in enumerate(mixes[: out.mix.shape[1] - 1]):
            assert torch.allclose(out.mix[b, t], torch.tensor(mix), atol=1e-4)
            heard += int(torch.tensor(mix).sum() > 0)
    assert heard > 20, "the test is about paths that listen"


@torch.no_grad()
def test_lambda_zero_is_plain_sampling_token_for_token(model, tokenizer, prompts):
    plain = sampled(GroupDecoder(model, tokenizer), prompts)
    zero = sampled(GroupDecoder(model, tokenizer, "</reasoning>", Interaction(0.0)), prompts)
    assert zero.mix is None
    assert torch.equal(plain.ids, zero.ids)
    assert torch.equal(plain.logp, zero.logp)


@torch.no_grad()
def test_a_group_that_has_stopped_thinking_is_plain_sampling_bit_for_bit(llama, tokenizer, prompts):
    plain = sampled(GroupDecoder(llama, tokenizer), prompts)
    decoder = GroupDecoder(llama, tokenizer, "</reasoning>", Interaction(0.5))
    decoder.tables.next_state[:] = len(decoder.tables.next_state) - 1  # every token closes the reasoning
    stopped = sampled(decoder, prompts)
    assert torch.equal(plain.ids, stopped.ids)
    assert torch.equal(plain.logp, stopped.logp)
    assert not stopped.mix.any()
    assert not stopped.input_change.any()


def test_a_step_of_mixing_by_hand_with_a_path_that_has_ended():
    """Two paths with five tokens listen to each other, the third ended after two."""
    rows = Rows(*[None] * len(Rows._fields))._replace(
        t=torch.tensor([5, 5, 2]),
        slot=torch.tensor([0, 0, 0]),
        path=torch.tensor([0, 1, 2]),
        input_change=torch.zeros(3, 8),
    )
    embeds, mix = torch.tensor([[3.0, 4.0], [0.0, 10.0], [7.0, 7.0]]), torch.zeros(1, 8, 3, 3)
    thinking, row_of_path = torch.tensor([True, True, False]), torch.tensor([[0, 1, 2]])
    weights = torch.tensor([[[0.0, 1, 0], [1, 0, 0], [0, 0, 0]]])
    inputs = mix_step(embeds, weights, thinking, row_of_path, rows, mix, Interaction(0.5, 0.1))
    assert inputs.tolist() == [[1.5, 7.0], [1.5, 7.0], [7.0, 7.0]]
    assert mix[0, 4].tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 0]]
    assert not mix[0, [0, 1, 2, 3, 5, 6, 7]].any()
    moved = math.sqrt(1.5**2 + 3**2)
    assert rows.input_change[:2, 4].tolist() == pytest.approx([moved / 5, moved / 10], abs=1e-6)
    assert not rows.input_change[2].any()
    embeds[0] = 0.0  # a token without an embedding, padding say: the change was 10^8 times nothing
    mix_step(embeds, weights, thinking, row_of_path, rows, mix, Interaction(0.5, 0.1))
    assert rows.input_change[:2, 4].tolist() == pytest.approx([1.0, 0.5])


def test_a_similarity_that_the_decoder_does_not_know_is_not_taken_for_another(
    llama, tokenizer, prompts, monkeypatch
):
    """A new name in decoding/names.py alone was sampled as `mean`, without a word."""
    monkeypatch.setattr("decoding.rollout.SIMILARITIES", ("new",))
    with pytest.raises(AssertionError, match="new"):
        sampled(GroupDecoder(llama, tokenizer, "e", Interaction(0.3, 0.1, "new")), prompts)


@pytest.mark.parametrize("temperature", [1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 2.0, 1e4])
def test_a_changed_m3po_module_is_not_passed_over_by_its_kernel(
    llama, tokenizer, monkeypatch, capsys, temperature
):
    """On CUDA a change to m3po_module.py alone changed nothing that was sampled, without a word."""

    def has_kernel(similarity="distribution"):
        interaction = Interaction(0.1, temperature, similarity)
        return GroupDecoder(llama, tokenizer, "e", interaction).engine.has_kernel

    assert has_kernel()
    assert not has_kernel("embedding")
    assert not capsys.readouterr().out
    changes = {
        "cross_path_weights": lambda *given: cross_path_weights(*given) * 0.9,
        "blend": lambda embeds, weights, share: embeds + share * (weights @ embeds),
    }
    for name, changed in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(f"decoding.self_test.{name}", changed)
            assert not has_kernel()
        assert "paths interact in plain torch, which is slower" in capsys.readouterr().out


def test_the_decoder_weighs_paths_by_the_formula_of_m3po_module(llama, tokenizer, prompts, monkeypatch):
    """Whoever changed `cross_path_weights` changed nothing that was sampled."""
    given = []

    def weights_of(features, thinking, temperature):
        given.append(cross_path_weights(features, thinking, temperature) / 2)
        return given[-1]

    monkeypatch.setattr("decoding.engine.cross_path_weights", weights_of)
    mix = sampled(GroupDecoder(llama, tokenizer, "e", Interaction(0.3)), prompts).mix
    assert float(mix.sum(-1).max()) == pytest.approx(0.5)
    assert given


@torch.no_grad()
def test_two_paths_are_a_group_too(llama, tokenizer, prompts):
    """Each has the other alone to listen to, with weight 1, while both think."""
    out = sampled(GroupDecoder(llama, tokenizer, "e", Interaction(0.3)), prompts, G=2)
    both = out.thinking.view(-1, 2, out.thinking.shape[1]).all(1)[:, :-1]  # (B, T)
    assert both.any()
    assert torch.allclose(out.mix[:, :-1], both[:, :, None, None] * torch.tensor([[0.0, 1.0], [1.0, 0.0]]))


def test_a_text_ends_before_its_eos_and_has_no_special_tokens_and_no_clean_up(llama, tokenizer):
    decoder, ids = GroupDecoder(llama, tokenizer), tokenizer("pens , 12 .")["input_ids"]
    assert (
        decoder.text([tokenizer.convert_tokens_to_ids("<|im_start|>"), *ids, tokenizer.eos_token_id], True)
        == "pens , 12 ."
    )
    last = tokenizer.decode(ids[-1:])
    assert decoder.text(ids, True) == "pens , 12 .".removesuffix(last), (
        "an EOS that generation_config names need not be a special token"
    )
    assert decoder.text(ids, False) == "pens , 12 ."


@pytest.mark.parametrize("think_end", ["</reasoning>", "####"])
def test_tags_that_a_tokenizer_calls_special_are_text_and_end_the_thinking(llama, tokenizer, think_end):
    """They were stripped before grading (accuracy 0.000), and no path ever stopped thinking."""
    tagged = copy.deepcopy(tokenizer)
    tagged.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>", think_end, "<|x|>"]})
    model = build_model("llama", tokenizer)
    model.resize_token_embeddings(len(tagged))
    decoder = GroupDecoder(model, tagged, think_end)
    text = f"so {think_end}<answer>17</answer>"
    ids = tagged(f"<|im_start|>so {think_end}<answer>17</answer><|x|>")["input_ids"]
    assert decoder.text([*ids, tagged.eos_token_id], True) == text
    state = 0
    for i in ids[: ids.index(tagged.convert_tokens_to_ids(think_end)) + 1]:
        assert state < len(think_end)
        state = int(decoder.tables.next_state[state, i])
    assert state == len(think_end)


def test_a_tokenizer_s_own_tokens_are_no_text_though_they_look_like_tags(llama, tokenizer):
    named = copy.deepcopy(tokenizer)
    named.add_special_tokens({"bos_token": "<s>", "unk_token": "<unk>"})
    model = build_model("llama", tokenizer)
    assert GroupDecoder(model, named).text(named("<s>17<unk>")["input_ids"], False) == "17"


@torch.no_grad()
def test_groups_never_see_each_other(llama, tokenizer, prompts):
    decoder = GroupDecoder(llama, tokenizer, "</reasoning>", Interaction(0.3))
    together = sampled(decoder, prompts[:2])
    uniforms = rollout_uniforms(0, 0, 0, 6, T)
    alone = decoder.rollout(prompts[1:2], Sampling(T, 3, 1.0), uniforms[3:])
    assert together.completion_ids()[3:] == alone.completion_ids()


@torch.no_grad()
def test_the_token_that_closes_the_reasoning_neither_gives_nor_receives(llama, tokenizer, prompts):
    decoder = GroupDecoder(llama, tokenizer, "e", Interaction(0.3))
    out = sampled(decoder, prompts, G=4)
    closed = 0
    for n in range(len(out.ids)):
        b, i = divmod(n, 4)
        for t in range(out.mix.shape[1] - 1):
            text = tokenizer.decode(out.ids[n][: t + 1][out.mask[n][: t + 1]], skip_special_tokens=True)
            thinks = (
                "e" not in text and bool(out.mask[n, t]) and int(out.ids[n, t]) not in decoder.tables.eos_ids
            )
            assert bool(out.thinking[n, t]) == thinks
            if not thinks:
                closed += 1
                assert not out.mix[b, t, i].any()
                assert not out.mix[b, t, :, i].any()
    assert closed > 20


@torch.no_grad()
def test_greedy_decoding_equals_generate_in_every_family(model, tokenizer, prompts):
    decoder = GroupDecoder(model, tokenizer)
    ours = [completion.ids for [completion] in decoder.complete(prompts, Sampling(T))]
    alone = [generate(model, tokenizer, [prompt], decoder)[0] for prompt in prompts]
    assert ours == alone, "a row in a ragged batch, against generate on the row alone"
    again = [completion.ids for [completion] in decoder.complete(prompts, Sampling(T))]
    assert again == generate(model, tokenizer, prompts, decoder), (
        "against generate on the same left-padded batch"
    )


def generate(model, tokenizer, prompts, decoder):
    """transformers' greedy completions, lists of ids with their EOS, without the ids past the tokenizer."""
    ids, mask = pad_left(prompts, tokenizer.pad_token_id)
    beyond = list(range(len(tokenizer), model.config.vocab_size))
    made = model.generate(
        input_ids=ids, attention_mask=mask.long(), max_new_tokens=T, do_sample=False, suppress_tokens=beyond
    )[:, ids.shape[1] :]
    rows = []
    for row in made.tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in decoder.tables.eos_ids), len(row))
        rows.append(row[:end])
    return rows


@torch.no_grad()
def test_a_sample_does_not_depend_on_its_batch(model, tokenizer, prompts):
    decoder = GroupDecoder(model, tokenizer)
    two = Sampling(T, 2, 0.8)
    at_once = decoder.complete(prompts, two, seed=3, batch_rows=100)
    assert at_once == decoder.complete(prompts, two, seed=3, batch_rows=1)
    some = decoder.complete(prompts[2:4], two, seed=3, indices=[2, 3])
    assert at_once[2:4] == some, "some of more have the draws of their indices"
    assert at_once != decoder.complete(prompts, two, seed=4)


@torch.no_grad()
def test_nothing_counts_after_the_first_eos(model, tokenizer, prompts):
    decoder = GroupDecoder(model, tokenizer)
    out = sampled(decoder, prompts, G=8, length=60)
    assert out.ended.any()
    for n in range(len(out.ids)):
        eos = [
            t for t, token in enumerate(out.ids[n][out.mask[n]].tolist()) if token in decoder.tables.eos_ids
        ]
        assert out.mask[n].long().diff().le(0).all(), "the mask is a prefix"
        assert eos == ([int(out.mask[n].sum()) - 1] if out.ended[n] else []), (
            "EOS is the last counted token and the only one"
        )


@torch.no_grad()
def test_both_eos_ids_end_a_completion(llama, tokenizer, prompts):
    out = sampled(GroupDecoder(llama, tokenizer), prompts, G=60, length=40)
    last = {int(out.ids[n][out.mask[n]][-1]) for n in range(len(out.ids)) if out.ended[n]}
    assert last == {
        tokenizer.convert_tokens_to_ids("<|im_end|>"),
        tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    }


def test_eos_is_the_union_of_tokenizer_config_and_generation_config(tokenizer):
    model = build_model("llama", tokenizer)
    model.config.eos_token_id, model.generation_config.eos_token_id = 7, [9, 11]
    assert eos_token_ids(tokenizer, model) == sorted({tokenizer.eos_token_id, 7, 9, 11})


def test_an_eos_that_is_a_usual_token_is_told(tokenizer, recwarn):
    """A config that names none has transformers' own, 2 of Llama, say: completions ended on any `%`."""
    model = build_model("llama", tokenizer)
    token_tables(tokenizer, model)
    assert not recwarn
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, 7]
    with pytest.warns(
        UserWarning, match=r"name eos_token_id 7, which is the usual token '%'; completions end"
    ):
        token_tables(tokenizer, model)


def test_a_model_whose_eos_ids_are_all_unknown_to_the_tokenizer_is_refused(tokenizer):
    model, other = build_model("llama", tokenizer), copy.deepcopy(tokenizer)
    model.config.eos_token_id, model.generation_config.eos_token_id, other.eos_token = (
        -1,
        [len(tokenizer) + 5],
        None,
    )
    with pytest.raises(SettingError, match="no EOS id of tokenizer"):
        token_tables(other, model)


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(tokenizer):
    model = build_model("llama", tokenizer)
    model.resize_token_embeddings(100)
    with pytest.raises(ValueError, match="do not belong together"):
        token_tables(tokenizer, model)


@torch.no_grad()
def test_an_id_in_the_middle_that_no_token_has_is_neither_sampled_nor_scored(tokenizer, llama, prompts):
    """Vocabularies have holes; the head gives them logits all the same."""
    vocabulary = tokenizer.get_vocab()
    hole = vocabulary.pop("e")
    tables = token_tables(Holed(tokenizer, vocabulary), llama)
    assert tables.num_real == len(tokenizer), "the largest id and one, not the number of ids"
    assert tables.real.nonzero().flatten().tolist() == [i for i in range(len(tokenizer)) if i != hole]
    assert vocab_logits(llama, torch.randn(2, 32), tables)[:, hole].max() < -1e29
    model = build_model("llama", tokenizer)
    model.resize_token_embeddings(len(tokenizer) - 1)
    with pytest.raises(ValueError, match="do not belong together"):
        token_tables(tokenizer, model)


class Holed:
    """A tokenizer with fewer tokens in its vocabulary."""

    def __init__(self, tokenizer, vocabulary):
        self.tokenizer, self.vocabulary = tokenizer, vocabulary

    def get_vocab(self):
        return self.vocabulary

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


def test_the_bytes_of_a_sentencepiece_tokenizer_are_its_spaces_words_and_single_bytes():
    """Llama's kind writes a space as U+2581; escaped in the decoder's JSON, it hid every delimiter with a
    space.
    """
    vocabulary = {"<unk>": 0, "\u2581pens": 1, "s": 2, "<0xC3>": 3, "<0xA9>": 4}
    raw = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")
    assert token_bytes(made, 5) == [b"", b" pens", b"s", b"\xc3", b"\xa9"]
    assert b"".join(token_bytes(made, 5)).decode() == made.decode([1, 2, 3, 4]) == " penss\u00e9"


@torch.no_grad()
def test_an_id_the_tokenizer_does_not_have_is_never_sampled(tokenizer, prompts):
    """NeMo-RL#237: an embedding wider than the tokenizer, here with a head that prefers the ids past it."""
    model = build_model("gpt2", tokenizer)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
    model.lm_head.bias[len(tokenizer) :] = 50.0
    decoder = GroupDecoder(model, tokenizer)
    assert int(sampled(decoder, prompts, G=8).ids.max()) < len(tokenizer)
    greedy = decoder.complete(prompts, Sampling(T))
    assert max(max(completion.ids) for [completion] in greedy) < len(tokenizer)


@torch.no_grad()
def test_generation_config_cannot_narrow_the_distribution(tokenizer, prompts):
    """TRL#5783: the model's own temperature, top_k and penalties leaked into sampling."""
    model = build_model("llama", tokenizer)
    before = sampled(GroupDecoder(model, tokenizer), prompts)
    model.generation_config.update(
        temperature=0.01, top_k=1, top_p=0.1, repetition_penalty=5.0, do_sample=True, min_p=0.9
    )
    assert torch.equal(before.ids, sampled(GroupDecoder(model, tokenizer), prompts).ids)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@torch.no_grad()
def test_frequencies_are_those_of_the_softmax_at_the_temperature(llama, tokenizer, prompts, temperature):
    """Each count is within 5 standard deviations of the binomial's, and the chi-square over all is not
    extreme.
    """
    decoder, draws = GroupDecoder(llama, tokenizer), 20000
    uniforms = rollout_uniforms(5, 0, 0, draws, 1)
    out = decoder.rollout(prompts[:1], Sampling(1, draws, temperature), uniforms)
    logits = llama(input_ids=torch.tensor(prompts[:1])).logits[0, -1, : len(tokenizer)].double() / temperature
    p = logits.softmax(-1)
    counts = torch.bincount(out.ids[:, 0], minlength=len(tokenizer)).double()
    assert ((counts - draws * p).abs() <= 5 * (draws * p * (1 - p)).sqrt() + 1).all()
    often = p * draws >= 5
    chi2 = ((counts - draws * p) ** 2 / (draws * p))[often].sum()
    assert chi2 < often.sum() + 5 * math.sqrt(2 * often.sum())
    assert torch.allclose(out.logp[:, 0].double(), p.log()[out.ids[:, 0]], atol=1e-5)


def test_a_draw_is_the_first_id_whose_running_sum_passes_u():
    logits = torch.tensor([[0.0, 0.25, 0.25, 0.0, 0.5, 0.0]]).log().clamp(min=-1e30)
    for u, expected in [
        (0.0, 1),
        (0.2499, 1),
        (0.2501, 2),
        (0.4999, 2),
        (0.5001, 4),
        (0.999, 4),
        (1 - 2**-24, 4),
        (1.0, 4),
    ]:
        for block in (1, 2, 3, 512):
            token, logp, top = draw(logits, torch.tensor([u]), block=block)
            assert int(token) == expected, (u, block)
            assert float(logp) == pytest.approx(float(logits[0, expected]), abs=1e-6)
            assert float(top) == pytest.approx(math.log(0.5))
    for block in (1, 2, 4):
        edges = [
            int(draw(torch.zeros(1, 4), torch.tensor([u]), block=block)[0]) for u in (0.0, 0.25, 0.5, 0.75)
        ]
        assert edges == [0, 1, 2, 3], (
            "a sum that is u does not pass it, or id 0 would have 2^-24 too much and the last too little"
        )


def test_draws_agree_with_a_float64_search_and_never_pick_an_impossible_id():
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(4000, 1337, generator=generator)
    real = torch.ones(1337, dtype=torch.bool)
    real[5::7] = False
    u = torch.rand(4000, generator=generator)
    u[:10], u[10:20] = 0.0, 1 - 2**-24
    padded = torch.nn.functional.pad(logits, (0, 71))
    got, logp, _ = draw(padded, u, 0.7, torch.nn.functional.pad(real, (0, 71)))
    probs = (logits / 0.7).double().masked_fill(~real, -torch.inf).softmax(-1)
    exact = torch.searchsorted(probs.cumsum(-1), (u.double() * probs.sum(-1))[:, None], right=True).squeeze(1)
    assert real[got].all()
    assert torch.allclose(logp.double(), probs.gather(1, got[:, None]).squeeze(1).log(), atol=1e-5)
    assert (got == exact.clamp(max=1336)).float().mean() > 0.998, (
        "float32 rounding may move a draw that lies on an edge"
    )
    assert torch.equal(draw(padded, None, 0.7, torch.nn.functional.pad(real, (0, 71)))[0], probs.argmax(-1))


def test_a_row_that_is_finished_records_nothing_more_while_others_go_on():
    """Its tokens are padding, which is EOS for many tokenizers: a row that the limit had cut off would have
    ended after all, and been paid for stopping.
    """
    rows, T, eos = 4, 6, 3  # of ids 0 to 4; the delimiter is the id 4
    next_state = torch.tensor([[0, 0, 0, 0, 1], [1, 1, 1, 1, 1]])
    tables = TokenTables(5, eos, [eos], torch.arange(5) == eos, None, torch.arange(128) < 5, next_state)
    likeliest = torch.tensor([2, 4, eos, 1])
    state = Rows(*[None] * len(Rows._fields))._replace(
        ids=torch.full((rows, T + 1), 7),
        logp=torch.full((rows, T + 1), 7.0),
        thinking=torch.ones(rows, T + 1, dtype=torch.bool),
        t=torch.tensor([1, 2, 3, 4]),
        state=torch.zeros(rows, dtype=torch.long),
        ended=torch.zeros(rows, dtype=torch.bool),
        finished=torch.tensor([False, False, False, True]),  # the last by the limit
        logits=F.one_hot(likeliest, 128).float() * 3,
    )
    tokens, thinking, top = sample_step(
        state, tables, 1.0, torch.tensor([2, 9, 9, 4]), StepKind(True, 0, 1.0, False)
    )
    assert tokens.tolist() == [2, 4, eos, eos]
    assert thinking.tolist() == [True, False, False, False]
    assert top.tolist() == [3.0] * 4
    columns = torch.tensor([[1], [2], [3], [4]])
    assert state.ids.gather(1, columns).flatten().tolist() == [2, 4, eos, eos]
    logp = 3 - math.log(math.exp(3) + 4)
    assert state.logp.gather(1, columns).flatten().tolist() == pytest.approx([logp, logp, logp, 0.0])
    assert state.thinking.gather(1, columns).flatten().tolist() == [True, False, False, False]
    assert (state.ids == 7).sum() == rows * T, "one token of each row"
    assert state.t.tolist() == [2, 3, 4, 4]
    assert state.state.tolist() == [0, 1, 0, 0]
    assert state.ended.tolist() == [False, False, True, False]
    assert state.finished.tolist() == [True, False, True, True]


def test_a_draw_is_never_of_weight_zero_and_its_top_is_that_of_temperature_one():
    logits = torch.full((3, 256), -1e30)
    logits[:, 10], logits[:, 200] = 10.0, 10.0
    for u in (0.0, 0.4999999, 0.5, 0.5000001, 1.0):
        tokens, logp, top = draw(logits, torch.full((3,), u), 0.5, top_p=0.99)
        assert set(tokens.tolist()) <= {10, 200}
        assert torch.allclose(logp, torch.tensor(0.5).log())
        assert torch.allclose(top, torch.tensor(10.0)), "which M3PO compares distributions by"


def test_no_two_rows_share_draws_and_the_draws_depend_on_seed_step_and_retry():
    """TRL PR#2824: every process drew the same completions."""
    first = rollout_uniforms(1, 2, 0, 64, 32)
    assert len({tuple(row) for row in first.tolist()}) == 64
    for other in [(2, 2, 0), (1, 3, 0), (1, 2, 1), (3, 2, 0), (2, 1, 0), (0, 3, 0)]:
        assert not torch.equal(first, rollout_uniforms(*other, 64, 32))
    assert torch.equal(first, rollout_uniforms(1, 2, 0, 64, 32))
    assert float(first.min()) >= 0
    assert float(first.max()) < 1


def test_top_k_and_top_p_keep_what_they_say():
    logits = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log()
    assert keep_top(logits, 1, 1.0).exp().gt(0).tolist() == [[True, False, False, False]]
    assert keep_top(logits, 0, 0.6).exp().gt(0).sum() == 2
    assert torch.equal(keep_top(logits, 0, 1.0), logits)


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (1, 1.0), (3, 1.0), (0, 0.3), (0, 0.8), (20, 0.9), (10**6, 0.5)]
)
def test_a_draw_is_of_the_top_that_was_asked_for(top_k, top_p):
    """By sorting, in Python: evaluations with --top_p drew from everything, and no test saw it.

    The nucleus is of what top_k has left, at the temperature, over the tokenizer's ids.
    """
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)) * 2
    real = torch.arange(256) < 150
    u = torch.arange(0.01, 1, 0.07)
    for row in logits.tolist():
        weights = {i: math.exp(x / 0.7) for i, x in enumerate(row[:150])}
        ranked = sorted(weights, key=weights.get, reverse=True)[: top_k or None]
        total, mass, kept = sum(weights[i] for i in ranked), 0.0, []
        for i in ranked:  # the smallest set of at least this mass
            if mass < top_p * total:
                kept.append(i)
            mass += weights[i]
        whole = sum(weights[i] for i in kept)
        expected = []
        for share in u.tolist():  # ids in their own order
            ends = zip(sorted(kept), itertools.accumulate(weights[i] for i in sorted(kept)), strict=True)
            expected.append(next(i for i, end in ends if end > share * whole))
        rows = torch.tensor([row[:150] + [50.0] * 50]).repeat(len(u), 1)
        tokens, logp, top = draw(rows, u, 0.7, real, top_k, top_p)
        assert tokens.tolist() == expected
        assert logp.tolist() == pytest.approx([math.log(weights[i] / whole) for i in expected], abs=1e-5)
        assert top.tolist() == pytest.approx([max(row[:150])] * len(u))
    rows = logits.repeat_interleave(2, 0)  # each row has a top of its own
    padded = F.pad(rows, (0, 56), value=-1e30)
    together = draw(rows, torch.full((6,), 0.6), 0.7, real, top_k, top_p)
    alone = [draw(one[None], torch.tensor([0.6]), 0.7, real, top_k, top_p) for one in padded]
    assert together[0].tolist() == [int(tokens) for tokens, *_ in alone]


@pytest.mark.parametrize("delimiter", ["</reasoning>", "####", "\\boxed{", "aab", "</think>"])
def test_the_automaton_sees_the_delimiter_where_the_text_has_it(tokenizer, delimiter):
    """However the text is cut into tokens: all ways a byte-level tokenizer may split or merge it."""
    pieces = token_bytes(tokenizer, len(tokenizer))
    table = delimiter_automaton(pieces, delimiter)
    generator = torch.Generator().manual_seed(1)
    alphabet = [
        i for i, piece in enumerate(pieces) if piece and all(chr(b) in delimiter + " \n" for b in piece)
    ]
    seen = 0
    for trial in range(400):
        ids = [alphabet[int(k)] for k in torch.randint(len(alphabet), (12,), generator=generator)]
        if trial % 2:
            ids[4:4] = tokenizer(delimiter)["input_ids"]
        state = 0
        for k, token in enumerate(ids):
            state = int(table[state, token])
            assert (state == len(table) - 1) == (
                delimiter in tokenizer.decode(ids[: k + 1], skip_special_tokens=True)
            )
        seen += state == len(table) - 1
    assert seen >= 200


def test_the_bytes_of_tokens_make_the_decoded_text(tokenizer):
    pieces = token_bytes(tokenizer, len(tokenizer))
    text = "Ann's naïve café </reasoning>\n#### 17 日本 \\boxed{½}"
    ids = tokenizer(text)["input_ids"]
    assert b"".join(pieces[i] for i in ids).decode() == text == tokenizer.decode(ids)
    assert pieces[tokenizer.eos_token_id] == b"", "special tokens are not part of a text"


@pytest.mark.parametrize("lambda_blend", [0.0, 0.3])
@torch.no_grad()
def test_weights_changed_in_place_are_seen_by_the_very_next_rollout(tokenizer, prompts, lambda_blend):
    """Nothing else of the rollout before is left: columns, cache and states are those of a new decoder."""
    model, other = build_model("qwen2", tokenizer), build_model("qwen2", tokenizer, seed=1)
    decoder = GroupDecoder(model, tokenizer, "e", Interaction(lambda_blend))
    decoder.complete(prompts * 3, Sampling(50))
    before = sampled(decoder, prompts, length=40)
    assert torch.equal(before.ids, sampled(decoder, prompts, length=40).ids)
    for target, source in zip(model.parameters(), other.parameters(), strict=True):
        target.copy_(source)
    after, fresh = (
        sampled(decoder, prompts),
        sampled(GroupDecoder(other, tokenizer, "e", Interaction(lambda_blend)), prompts),
    )
    assert not torch.equal(before.ids[:, :8], after.ids[:, :8])
    for name in (
        "ids",
        "logp",
        "mask",
        "thinking",
        "ended",
        *(("mix", "input_change") if lambda_blend else ()),
    ):
        assert torch.equal(getattr(after, name), getattr(fresh, name)), name


@torch.no_grad()
def test_a_parameter_given_other_storage_is_taken_over(tokenizer, prompts):
    """The fast path makes parameters views of its storage; `parameter.data = new` must not leave it the old
    values.
    """
    model, other = build_model("llama", tokenizer), build_model("llama", tokenizer, seed=1)
    decoder = GroupDecoder(model, tokenizer)
    sampled(decoder, prompts)
    for target, source in zip(model.parameters(), other.parameters(), strict=True):
        target.data = source.data.clone()
    assert torch.equal(sampled(decoder, prompts).ids, sampled(GroupDecoder(other, tokenizer), prompts).ids)


def columns(out):
    return {
        name: getattr(out, name)
        for name in ("ids", "mask", "logp", "ended", "thinking", "mix", "input_change")
    }


@pytest.mark.parametrize("similarity", ["distribution", "embedding", "mean"])
@pytest.mark.parametrize(
    "family", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen2")), "qwen3"]
)
@torch.no_grad()
def test_the_fast_path_gives_the_samples_of_the_plain_one(family, similarity, tokenizer, prompts):
    """Everything that a rollout records: rows leave on the way, paths stop thinking, a temperature is set."""
    model = build_model(family, tokenizer)
    for lambda_blend in (0.0, 0.3):
        decoders = [
            GroupDecoder(model, tokenizer, "e", Interaction(lambda_blend, 0.1, similarity), fast=fast)
            for fast in (True, False)
        ]
        for decoder in decoders:
            decoder.tables.is_eos[3::25] = True  # more ends than two ids would give
        fast, plain = (columns(sampled(d, prompts, G=6, length=24, temperature=0.9)) for d in decoders)
        assert [d.engine.backbone.refills for d in decoders] == [True, False]
        assert 0.3 < fast["ended"].float().mean() < 1 or fast["mask"].sum(-1).float().std() > 5, (
            "rows must leave at different times"
        )
        for name, value in fast.items():
            assert (value is None) == (plain[name] is None), name
            assert value is None or torch.allclose(value.float(), plain[name].float(), atol=1e-5), name


@pytest.mark.slow
@torch.no_grad()
def test_prompts_that_are_given_the_rows_of_ended_ones_are_answered_as_if_alone(llama, tokenizer, prompts):
    many = [p[: 1 + i % len(p)] for i in range(5) for p in prompts]
    fast, plain = GroupDecoder(llama, tokenizer), GroupDecoder(llama, tokenizer, fast=False)
    for decoder in (fast, plain):
        decoder.tables.is_eos[3::9] = True
    done = []
    for sampling in (Sampling(30), Sampling(30, 3, 0.8)):
        expected = plain.complete(many, sampling, 2, batch_rows=len(many) * 3)
        answers = fast.complete(many, sampling, 2, batch_rows=9, keep=lambda *kept: done.append(kept))
        assert answers == expected
        assert fast.complete(many, sampling, 2, batch_rows=1) == expected
        lengths = {len(completion.ids) for completions in expected for completion in completions}
        assert len(lengths) > 5, "rows must end at different times"
        assert sorted(done) == list(enumerate(expected)), "each is handed over once, as it ends"
        assert done != sorted(done), "and before those before it have ended"
        done.clear()
        some = [3, 4, 12, 20]
        answers = fast.complete([many[i] for i in some], sampling, 2, indices=some)
        assert answers == [expected[i] for i in some], "by their indices among all"


@pytest.mark.parametrize(
    ("family", "reason"),
    [("gemma3", "model type gemma3_text"), ("gpt2", "model type gpt2"), ("llama", None), ("odd", "forward")],
)
@torch.no_grad()
def test_a_model_that_the_fast_path_cannot_serve_says_so_in_one_line(
    family, reason, tokenizer, prompts, capsys
):
    model = build_model("llama" if family == "odd" else family, tokenizer)
    if family == "odd":  # what its config does not tell
        model.model.layers[1].mlp.act_fn = torch.nn.GELU()
    decoder = GroupDecoder(model, tokenizer)
    sampled(decoder, prompts)
    sampled(decoder, prompts)
    printed = capsys.readouterr().out.splitlines()
    if reason is None:
        assert printed == []
    else:
        [line] = printed
        assert "plain path" in line
        assert reason in line


def test_the_fast_path_is_for_models_that_it_computes_and_says_why_not(tokenizer):
    """Some differ from it only in long texts, which the trial of eight tokens does not reach."""

    def reason(change):
        model = build_model("llama", tokenizer)
        change(model)
        return why_not(model)

    assert reason(lambda m: None) is None
    assert (
        reason(lambda m: setattr(m.config, "layer_types", ["sliding_attention", "full_attention"]))
        == "sliding-window attention"
    )
    assert "activation gelu" in reason(lambda m: setattr(m.config, "hidden_act", "gelu"))
    assert "dynamic, which changes" in reason(lambda m: m.config.rope_parameters.update(rope_type="dynamic"))
    plain = "layers that are not plain matrix products"
    assert (
        reason(lambda m: setattr(m.lm_head, "bias", torch.nn.Parameter(torch.zeros(len(m.lm_head.weight)))))
        == plain
    )
    assert (
        reason(
            lambda m: setattr(
                m.model.layers[0].self_attn, "q_proj", torch.nn.Sequential(m.model.layers[0].self_attn.q_proj)
            )
        )
        == plain
    )


def test_a_head_that_does_more_than_multiply_is_refused(tokenizer):
    """Cohere scales its logits: sampling and scoring would agree with each other and not with the model."""
    model = build_model("llama", tokenizer)
    check_head(model, "cohere")
    model.register_forward_hook(lambda _module, _inputs, out: out.__setitem__("logits", out.logits * 0.25))
    with pytest.raises(ValueError, match="a llama model's head does more than a matrix product"):
        check_head(model, "cohere")


@torch.no_grad()
def test_a_prefill_in_parts_is_the_whole_one(llama, tokenizer, prompts, monkeypatch):
    whole = sampled(GroupDecoder(llama, tokenizer), prompts)
    monkeypatch.setattr(fast_model, "PREFILL_TOKENS", 2 * max(map(len, prompts)))  # five prompts, two at once
    assert torch.equal(sampled(GroupDecoder(llama, tokenizer), prompts).ids, whole.ids)


@torch.no_grad()
def test_a_model_is_saved_whole_after_its_weights_became_views(tokenizer, prompts, tmp_path):
    for family in ("llama", "qwen2", "qwen3"):
        model = build_model(family, tokenizer)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        sampled(GroupDecoder(model, tokenizer), prompts)
        model.save_pretrained(tmp_path / family)
        again = type(model).from_pretrained(tmp_path / family).state_dict()
        assert set(again) == set(before)
        assert all(torch.equal(again[name], value) for name, value in before.items())


def random_batches(decoder, prompts, count):
    """Rollouts of random sizes; yields the bytes of this process after each."""
    generator = torch.Generator().manual_seed(0)
    for trial in range(count):
        B, G, length = (int(torch.randint(1, high, (), generator=generator)) for high in (6, 7, 24))
        out = sampled(decoder, prompts[:B], G, length, seed=trial, interact=bool(trial % 2))
        eos = decoder.tables.is_eos[out.ids] & out.mask
        assert (eos.sum(-1) == out.ended).all(), "EOS is counted once, and only in rows that ended"
        assert (out.lengths[out.ended] - 1 == eos.long().argmax(-1)[out.ended]).all(), (
            "and it is the last token that counts"
        )
        assert (out.lengths[~out.ended] == length).all()
        with open("/proc/self/statm", encoding="ascii") as file:
            yield int(file.read().split()[1]) * 4096


@pytest.mark.slow
@torch.no_grad()
def test_rollouts_of_random_sizes_count_nothing_after_the_end(llama, tokenizer, prompts):
    decoder = GroupDecoder(llama, tokenizer, "e", Interaction(0.3))
    decoder.tables.is_eos[3::25] = True
    assert len(list(random_batches(decoder, prompts, 30))) == 30


@pytest.mark.slow
@torch.no_grad()
def test_two_thousand_rollouts_of_random_sizes_leave_memory_flat(llama, tokenizer, prompts):
    decoder = GroupDecoder(llama, tokenizer, "e", Interaction(0.3))
    decoder.tables.is_eos[3::25] = True
    used = list(random_batches(decoder, prompts, 2000))
    assert max(used[1000:]) <= max(used[200:1000]) + 2**20


@torch.no_grad()
def test_what_is_not_written_in_a_rollout_is_zero_and_not_of_the_one_before(llama, tokenizer, prompts):
    """The last token of a row that the limit cuts off is never an input, so it has no weights."""
    decoder = GroupDecoder(llama, tokenizer, "</reasoning>", Interaction(0.3))
    decoder.tables.is_eos[:] = False
    before = sampled(decoder, prompts, length=20)
    assert before.mix[:, 9].any()
    assert before.input_change[:, 9].any()
    after = sampled(decoder, prompts, length=10)
    assert not after.mix[:, 9].any()
    assert not after.input_change[:, 9].any()


def longer(decoder, prompts):
    return sampled(decoder, [prompt * 3 for prompt in prompts[:3]], G=4, length=12)


def stopped(decoder, prompts):
    """A rollout that is broken off after a few steps."""
    asked = iter([False] * 4 + [True])
    decoder.interrupted = lambda: next(asked)
    with pytest.raises(Interrupted):
        longer(decoder, prompts)
    decoder.interrupted = None


EARLIER_WORK = {
    "longer prompts": longer,
    "more and longer rows": lambda decoder, prompts: sampled(decoder, prompts, G=5, length=19),
    "fewer and shorter rows": lambda decoder, prompts: sampled(decoder, prompts[:1], G=2, length=3),
    "an evaluation": lambda decoder, prompts: decoder.complete([p * 3 for p in prompts * 2], Sampling(12)),
    "a rollout that was interrupted": stopped,
}


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma3", marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_used_decoder_gives_the_bits_of_a_new_one(family, tokenizer, prompts):
    """A resumed run has a new one. The longest prompt was taken over all slots, those that an evaluation had
    filled included, so that a run resumed after an evaluation was another run.
    """
    model = with_layers(build_model(family, tokenizer), 1)

    def new():
        return GroupDecoder(model, tokenizer, "e", Interaction(0.3))

    def everything(decoder):
        out = sampled(decoder, prompts[:3], length=12)
        columns = (out.ids, out.mask, out.logp, out.ended, out.thinking, out.mix, out.input_change)
        return columns, decoder.complete(prompts, Sampling(6, temperature=1.0), seed=3, batch_rows=3)

    expected, answers = everything(new())
    used = new()
    for name, work in EARLIER_WORK.items():
        decoder = new()
        work(decoder, prompts)
        work(used, prompts)
        columns, completions = everything(decoder)
        assert all(torch.equal(a, b) for a, b in zip(columns, expected, strict=True)), name
        assert completions == answers, name
    columns, completions = everything(used)
    assert all(torch.equal(a, b) for a, b in zip(columns, expected, strict=True))
    assert completions == answers


def test_sums_that_are_not_quite_monotone_draw_nothing_impossible(monkeypatch):
    """Made in parallel, a running sum may rise a little over a weight of 0, here at the third token."""
    monkeypatch.setattr(
        torch.Tensor,
        "cumsum",
        lambda self, dim: torch.tensor([[0.25, 0.5, 0.500001, 1.0]]).expand(len(self), 4),
    )
    index, _ = _first_beyond(torch.tensor([[0.25, 0.25, 0.0, 0.5]]), torch.tensor([[0.5000005]]))
    assert int(index) == 3


@torch.no_grad()
def test_nothing_to_say_or_to_ask_is_an_error_and_no_prompts_are_no_answers(llama, tokenizer, prompts):
    decoder = GroupDecoder(llama, tokenizer)
    assert decoder.complete([], Sampling(5)) == []
    with pytest.raises(AssertionError, match="room for a token"):
        decoder.complete(prompts, Sampling(0))
    with pytest.raises(AssertionError, match="prompt must have a token"):
        decoder.complete([*prompts, []], Sampling(5))


@torch.no_grad()
def test_storage_that_could_not_be_had_is_asked_for_again(llama, tokenizer, prompts, monkeypatch):
    decoder = GroupDecoder(llama, tokenizer)
    expected = decoder.complete(prompts, Sampling(8))

    def fails(*sizes):
        raise torch.OutOfMemoryError("no")

    with monkeypatch.context() as patch:
        patch.setattr(decoder.engine.backbone, "reserve", fails)
        with pytest.raises(torch.OutOfMemoryError):
            decoder.complete(prompts, Sampling(30))
    assert decoder.complete(prompts, Sampling(8)) == expected
    fresh = GroupDecoder(llama, tokenizer).complete(prompts, Sampling(30))
    assert decoder.complete(prompts, Sampling(30)) == fresh


@torch.no_grad()
def test_storage_serves_calls_alike_and_is_not_the_product_of_calls_that_differ(llama, tokenizer, prompts):
    decoder = GroupDecoder(llama, tokenizer)
    decoder.complete(prompts * 20, Sampling(8), batch_rows=100)
    decoder.complete(prompts * 20, Sampling(10), batch_rows=60)
    assert decoder.engine.reserved.rows == 100, "what is there is kept where it serves"
    assert decoder.engine.reserved.new_tokens == 10
    decoder.complete(prompts[:1], Sampling(400))
    assert decoder.engine.reserved.rows * decoder.engine.reserved.new_tokens <= 2 * 1000


def grow_by(tokens, monkeypatch):
    """Let storage grow by so few tokens that short rows cross its borders."""
    for file in ("fast_model", "engine", "decoder"):
        monkeypatch.setattr(f"decoding.{file}.CHUNK", tokens)
    monkeypatch.setattr(UncachedBackbone, "more", tokens)


@torch.no_grad()
def test_storage_is_what_is_said_and_not_what_the_limit_allows(llama, tokenizer, prompts, monkeypatch):
    """Keys, values and mixing weights stood at rows x limit: 15 GB for a 1.5B model, 64 rows and 8,192."""
    grow_by(8, monkeypatch)
    decoder = GroupDecoder(llama, tokenizer, "</reasoning>", Interaction(0.3))
    decoder.tables.is_eos[:] = False
    decoder.tables.is_eos[3::9] = True
    out = sampled(decoder, prompts, length=160)
    longest, engine = int(out.lengths.max()), decoder.engine
    assert 16 < longest <= 160 / 3, "the test is about a limit that nothing reaches"
    whole, rows = -(-longest // 8) * 8, len(out.ids)
    layers, K, D = 2, 2, 8
    taken = sum(chunk.nbytes for chunk in engine.backbone.chunks)
    assert taken == layers * 2 * rows * K * whole * D * 4
    assert taken + engine.bytes_to_come() == layers * 2 * rows * K * 160 * D * 4
    assert engine.mix.shape[1] + sum(mix.shape[1] for mix in engine.earlier_mix) == whole
    there = [chunk.data_ptr() for chunk in engine.backbone.chunks]
    again = sampled(decoder, prompts, length=160)
    assert torch.equal(again.ids, out.ids)
    assert [chunk.data_ptr() for chunk in engine.backbone.chunks] == there, "what there is serves again"
    sampled(decoder, prompts, G=8, length=6)
    assert len(engine.backbone.chunks) == 1, "other storage is taken, and what it had grown to is let go"
    answers = decoder.complete(prompts * 4, Sampling(160), batch_rows=4)
    longest = max(len(completion.ids) for [completion] in answers)
    assert len(engine.backbone.chunks) == max(1, -(-longest // 8)), "rows in use bound it, not steps"


@pytest.mark.parametrize(("before", "length"), [(36, 30), (70, 30)])
@torch.no_grad()
def test_chunks_of_a_longer_limit_change_no_bit_of_a_call(
    llama, tokenizer, prompts, before, length, monkeypatch
):
    """Storage of 1,100 tokens lay in chunks of 367, of 500 tokens in one of 500, which rounds otherwise: an
    evaluation of longer answers changed the rollouts after it.
    """
    grow_by(32, monkeypatch)

    def decoder():
        made = GroupDecoder(llama, tokenizer, "</reasoning>", Interaction(0.3))
        made.tables.is_eos[:] = False
        return made

    kept = decoder()
    sampled(kept, prompts[:2], length=before)
    ours, theirs = (sampled(made, prompts[:2], length=length) for made in (kept, decoder()))
    assert torch.equal(ours.ids, theirs.ids)
    assert torch.equal(ours.logp, theirs.logp)


@torch.no_grad()
def test_what_was_not_finite_in_an_earlier_call_reaches_no_later_one(tokenizer, prompts):
    """0 times the inf that an arm's last weights had left there made nonsense of the next arm's answers."""
    model = build_model("llama", tokenizer)
    v = model.model.layers[1].self_attn.v_proj.weight
    good = v.clone()

    def decoder():
        made = GroupDecoder(model, tokenizer)
        made.tables.is_eos[3::25] = True  # rows end, and others that begin beside those that go on
        made.tables.is_eos[0] = False  # rows of NaN sample it, and go on
        return made

    def answers(decoder):
        return decoder.complete(prompts * 3, Sampling(T, 1, 1.0), batch_rows=5)

    kept = decoder()
    v.fill_(3e38)
    answers(kept)
    v.copy_(good)
    assert answers(kept) == answers(decoder())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_rows_that_cross_the_borders_of_their_storage_are_scored_as_one_uncached_forward_does(
    family, tokenizer, prompts, monkeypatch
):
    model = build_model(family, tokenizer)
    rollouts = []
    for tokens in (512, 7):
        grow_by(tokens, monkeypatch)
        decoder = GroupDecoder(model, tokenizer, "</reasoning>", Interaction(0.3))
        decoder.tables.is_eos[3::25] = True  # rows leave, and those that stay are moved
        rollouts.append(
            (sampled(decoder, prompts, G=4, length=30), sampled(decoder, prompts, interact=False))
        )
    (mixed, _), (crossed, plain) = rollouts
    for name, value in columns(crossed).items():
        assert torch.allclose(value.float(), columns(mixed)[name].float(), atol=1e-5), name
    assert len(decoder.engine.earlier_mix) == 0
    assert int(crossed.lengths.max()) > 21, "borders must be crossed for this to say something"
    assert crossed.mix[:, 14:].any()
    for n, ids in enumerate(plain.completion_ids()):
        prompt = prompts[n // 3]
        logits = vocab_logits(model, model.model(torch.tensor([prompt + ids])).last_hidden_state)[0]
        logp = logits.log_softmax(-1)[len(prompt) - 1 : -1, : len(tokenizer)]
        logp = logp - logp.logsumexp(-1, keepdim=True)
        expected = logp.gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert torch.allclose(plain.logp[n, : len(ids)], expected, atol=1e-4)


@torch.no_grad()
def test_rows_that_are_given_to_other_prompts_cross_the_borders_of_their_storage(
    llama, tokenizer, prompts, monkeypatch
):
    many = [p[: 1 + i % len(p)] for i in range(4) for p in prompts]
    sampling = Sampling(30, 2, 0.8)
    plain = GroupDecoder(llama, tokenizer, fast=False)
    plain.tables.is_eos[3::9] = True
    expected = plain.complete(many, sampling, 2, batch_rows=len(many) * 2)
    grow_by(3, monkeypatch)
    fast = GroupDecoder(llama, tokenizer)
    fast.tables.is_eos[3::9] = True
    for rows in (6, 1, 100):
        assert fast.complete(many, sampling, 2, batch_rows=rows) == expected
    longest = max(len(completion.ids) for completions in expected for completion in completions)
    assert len({len(c.ids) // 3 for group in expected for c in group}) > 2, "in different chunks at once"
    assert len(fast.engine.backbone.chunks) == -(-longest // 3)


@torch.no_grad()
def test_a_row_without_a_cache_grows_with_what_it_says(tokenizer, prompts, monkeypatch):
    grow_by(3, monkeypatch)
    model = build_model("gpt2", tokenizer)
    decoder = GroupDecoder(model, tokenizer, fast=False)
    expected = decoder.complete(prompts, Sampling(T))
    decoder.engine._take(UncachedBackbone(model))
    assert decoder.complete(prompts, Sampling(T)) == expected
    longest = max(len(completion.ids) for [completion] in expected)
    assert decoder.engine.backbone.inputs.shape[1] < max(map(len, prompts)) + longest + 3


@torch.no_grad()
def test_a_rollout_that_storage_cannot_grow_for_fails_and_the_next_one_does_not(
    llama, tokenizer, prompts, monkeypatch
):
    grow_by(4, monkeypatch)
    decoder = GroupDecoder(llama, tokenizer, "e", Interaction(0.3))
    expected = sampled(decoder, prompts)
    decoder = GroupDecoder(llama, tokenizer, "e", Interaction(0.3))
    decoder.choose_path()
    grow = decoder.engine.backbone.grow

    def fails(longest):
        if longest > 9:
            raise torch.OutOfMemoryError("no")
        grow(longest)

    with monkeypatch.context() as patch:
        patch.setattr(decoder.engine.backbone, "grow", fails)
        with pytest.raises(torch.OutOfMemoryError):
            sampled(decoder, prompts)
    after = sampled(decoder, prompts)
    for name, value in columns(after).items():
        assert torch.equal(value, columns(expected)[name]), name


@pytest.mark.parametrize(
    ("reserved", "stored", "tokens", "rows"),
    [
        (0, 0, 10, 50),  # half of what the driver has free
        (90, 300, 10, 90),  # there are 90 rows, and storage that can grow to 10 tokens of each
        (90, 300, 40, 21),  # not to 40 of each: half of all that could be had
        (90, 3000, 40, 90),
    ],
)
def test_rows_are_kept_only_as_long_as_their_storage_can_grow_to_the_limit(
    reserved, stored, tokens, rows, llama, tokenizer, monkeypatch
):
    """It is not there before it is needed: rows of an earlier call may be too many for a longer limit."""
    engine = GroupDecoder(llama, tokenizer).engine
    engine.choose_backbone()
    engine.captures, engine.reserved = True, Sizes(rows=reserved)
    monkeypatch.setattr(engine.backbone, "row_bytes", lambda tokens: tokens)
    monkeypatch.setattr(engine.backbone, "storage_bytes", lambda: stored)
    answers = dict(mem_get_info=(1000, 9000), memory_reserved=900, memory_allocated=500)
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    assert engine._default_rows(tokens) == rows


@torch.no_grad()
def test_a_prompt_is_computed_once_for_its_paths_and_a_row_no_longer_than_it_speaks(
    llama, tokenizer, prompts, monkeypatch
):
    """What the fast path saves: seen in the tokens that go through the model."""
    decoder = GroupDecoder(llama, tokenizer, "e", Interaction(0.3))
    decoder.tables.is_eos[3::25] = True
    sampled(decoder, prompts)
    prefilled, decoded = [], []
    backbone = decoder.engine.backbone
    prefill, decode = backbone.prefill, backbone.decode

    def count_prefill(asked, *rest):
        prefilled.extend(map(len, asked))
        prefill(asked, *rest)

    def count_decode(x, *rest):
        decoded.append(len(x))
        decode(x, *rest)

    monkeypatch.setattr(backbone, "prefill", count_prefill)
    monkeypatch.setattr(backbone, "decode", count_decode)
    out = sampled(decoder, prompts, G=8, length=60)
    assert sorted(prefilled) == sorted(map(len, prompts))
    assert sum(decoded) <= out.lengths.sum()
    decoded.clear()
    answers = decoder.complete(prompts * 8, Sampling(60, temperature=1.0), batch_rows=8)
    assert max(decoded) == 8
    used = sum(len(completion.ids) for [completion] in answers)
    assert sum(decoded) <= used, "prompts that wait are given the rows that have ended"


def test_the_arithmetic_tokenizer_knows_every_word_of_the_generated_problems():
    """It has a list of words of its own: a new name or item in the problems would come out as <unk>."""
    tokenizer = arithmetic_tokenizer()
    problems = arithmetic_problems("train", 32_166) + arithmetic_problems("test", 2_138)  # all there are
    texts = [
        f"{p.question}\n<reasoning>\n{p.solution}\n</reasoning>\n<answer>{p.answer}</answer>"
        for p in problems
    ]
    texts = list({re.sub(r"\d", "", text): text for text in texts}.values())  # one of each wording
    assert len(texts) == 8 * 8 * 4 * 2, "names, items, verbs, and the right and the wrong operation"
    rows = tokenizer(texts)["input_ids"]
    assert not any(tokenizer.unk_token_id in ids for ids in rows)
    assert tokenizer.batch_decode(rows) == texts

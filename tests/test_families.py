"""Model families: a loaded model gives what an uncached forward on ids gives, or is refused in one line."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import families
from decoding.any_model import PlainBackbone, UncachedBackbone
from decoding.decoder import GroupDecoder
from decoding.engine import Engine
from decoding.fast_model import FastBackbone
from decoding.rollout import Sampling
from decoding.self_test import check_model, check_train_mode
from decoding.tokens import arithmetic_tokenizer
from errors import SettingError
from learning.log_probs import Scorer
from learning.models import (
    _adapted_weights,
    add_adapters,
    load_frozen,
    load_model,
    load_policy,
    merged_state,
    refresh,
)
from running.folder import save_model

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def words():
    return arithmetic_tokenizer()


@pytest.fixture(scope="module")
def start(words, tmp_path_factory):
    """start(shape): the folder of a tiny random model of that family, made once."""
    made = {}

    def make(shape):
        if shape not in made:
            kind, settings = families.SHAPES[shape]
            made[shape] = str(tmp_path_factory.mktemp("shape"))
            families.build(kind, settings, words).save_pretrained(made[shape])
        return made[shape]

    return make


def settings(**given):
    common = dict(lora_r=0, lora_alpha=8, lora_target_modules=None, load_in_4bit=False)
    common |= dict(seed=0, precision="fp32", trust_remote_code=False)
    return SimpleNamespace(**common | given)


def loaded(start, words, shape):
    return load_model(start(shape), words, torch.float32, CPU).eval()


@pytest.mark.slow
@pytest.mark.parametrize("shape", families.SHAPES)
def test_every_shape_is_what_the_table_says(shape, words):
    rows = json.loads((ROOT / "benchmarks" / "results" / "families.json").read_text())["rows"]
    [wanted] = [row["value"] for row in rows if row["case"] == shape]
    made = families.outcome(shape, words)
    assert made.partition("(")[0] == wanted.partition("(")[0]
    assert not made.startswith("FAULT")


def test_the_table_has_fifty_shapes_and_no_fault():
    rows = json.loads((ROOT / "benchmarks" / "results" / "families.json").read_text())["rows"]
    assert [row["case"] for row in rows] == list(families.SHAPES)
    assert len(rows) >= 50
    kinds = ("equal to plain transformers", "slower path: ", "refused: ")
    assert all(row["value"].startswith(kinds) for row in rows)


@torch.no_grad()
@pytest.mark.parametrize(
    ("shape", "backbone"),
    [("Qwen3.5", PlainBackbone), ("Mamba", PlainBackbone), ("RecurrentGemma", UncachedBackbone)],
)
def test_states_are_kept_by_the_cache_that_the_config_asks_for(start, words, shape, backbone):
    """Linear attention and state spaces ended in a traceback at the first decode step."""
    model = loaded(start, words, shape)
    decoder = GroupDecoder(model, words)
    decoder.choose_path()
    assert type(decoder.engine.backbone) is backbone
    plain = AutoModelForCausalLM.from_pretrained(start(shape)).eval()
    ours = [completion.ids for [completion] in decoder.complete(families.PROMPTS[:2], Sampling(6))]
    greedy = [families.plain_greedy(plain, words, prompt)[:6] for prompt in families.PROMPTS[:2]]
    assert ours == greedy


@pytest.mark.parametrize(
    ("shape", "words_of_it"),
    [
        ("Gemma-4, text", "per-layer embeddings"),
        ("XLNet", "not causal"),
        ("RWKV", "changes its own weights"),
        ("BERT as a decoder", "head does more than a matrix product"),
    ],
)
def test_what_cannot_be_served_is_one_line(start, words, shape, words_of_it):
    with pytest.raises(SettingError, match=words_of_it) as error:
        load_model(start(shape), words, torch.float32, CPU)
    assert "\n" not in str(error.value)


@pytest.fixture
def with_forward(start, words, monkeypatch):
    """Let Qwen3's body run change(its own forward, the body, input_ids, inputs_embeds, ...) instead."""

    def give(change):
        body = type(loaded(start, words, "Qwen3").model)
        honest = body.forward

        def forward(self, input_ids=None, inputs_embeds=None, **more):
            return change(honest, self, input_ids, inputs_embeds, **more)

        monkeypatch.setattr(body, "forward", forward)

    return give


def test_embeddings_that_are_scaled_for_ids_alone_are_refused(start, words, with_forward):
    """Training on embeddings agreed with sampling on them, and with nobody else."""

    def scaled(honest, body, input_ids, inputs_embeds, **more):
        if input_ids is not None:
            inputs_embeds = 2 * body.embed_tokens(input_ids)
        return honest(body, inputs_embeds=inputs_embeds, **more)

    with_forward(scaled)
    with pytest.raises(SettingError, match="other logits for ids than for their embeddings"):
        load_model(start("Qwen3"), words, torch.float32, CPU)


def test_a_model_that_reads_no_embeddings_but_those_of_tokens_is_refused(start, words, with_forward):
    """With M3PO its inputs are blended; Gemma-4 ended in a traceback at the first decode step."""

    def of_tokens_only(honest, body, input_ids, inputs_embeds, **more):
        table = body.embed_tokens.weight
        if inputs_embeds is not None and not (inputs_embeds[..., None, :] == table).all(-1).any(-1).all():
            raise KeyError("no token has this embedding")
        return honest(body, input_ids=input_ids, inputs_embeds=inputs_embeds, **more)

    with_forward(of_tokens_only)
    with pytest.raises(SettingError, match="on their embeddings alone .*no token has this embedding"):
        load_model(start("Qwen3"), words, torch.float32, CPU)


def test_a_model_that_scores_otherwise_in_train_mode_is_refused(start, words, with_forward):
    """Not random, so that two scorings agree; the update would train another model than the one sampled."""

    def otherwise(honest, body, input_ids, inputs_embeds, **more):
        embeds = body.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        noise = 0.1 if body.training else 0.0
        return honest(body, inputs_embeds=embeds + noise * embeds.flip(-1), **more)

    with_forward(otherwise)
    with pytest.raises(SettingError, match="other logits in train mode than in evaluation"):
        load_policy(settings(), start("Qwen3"), words, CPU)


@pytest.mark.parametrize(("noise", "is_refused"), [(2**-8, False), (0.5, True)])
def test_a_model_that_rounds_otherwise_in_train_mode_is_trained(
    start, words, with_forward, noise, is_refused
):
    """As Falcon-H1 and Mamba-2 do, by the fused kernels that they have in train mode alone. LoRA in bf16 was
    held to float32's tolerance there.
    """

    def otherwise(honest, body, input_ids, inputs_embeds, **more):
        embeds = body.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return honest(body, inputs_embeds=embeds + noise * body.training * embeds.flip(-1), **more)

    with_forward(otherwise)
    model = load_model(start("Qwen3"), words, torch.bfloat16, CPU)
    with pytest.raises(SettingError, match="in train mode") if is_refused else nullcontext():
        check_train_mode(model.train(), "falcon")


def test_whatever_a_models_own_code_raises_is_one_line(start, words, monkeypatch):
    body = type(loaded(start, words, "Qwen3").model)
    monkeypatch.setattr(body, "forward", lambda self, **_: 1 / 0)
    with pytest.raises(SettingError, match="ZeroDivisionError"):
        load_model(start("Qwen3"), words, torch.float32, CPU)


def test_a_fast_path_that_is_wrong_after_the_prefill_is_not_taken(start, words, monkeypatch, capsys):
    """The check of old looked at the prefill alone."""
    honest = FastBackbone.decode
    monkeypatch.setattr(FastBackbone, "decode", lambda self, x, *more: honest(self, 1.1 * x, *more))
    decoder = GroupDecoder(loaded(start, words, "Qwen3"), words)
    decoder.choose_path()
    assert type(decoder.engine.backbone) is PlainBackbone
    assert "its forward is not what its config says" in capsys.readouterr().out


def test_weights_that_broke_since_they_were_loaded_are_no_fault_of_the_path(start, words):
    """A step that was not finite would be reported as another family's model."""
    model = loaded(start, words, "Qwen3")
    model.model.norm.weight.data.fill_(float("nan"))
    decoder = GroupDecoder(model, words)
    decoder.choose_path()
    assert type(decoder.engine.backbone) is FastBackbone


def test_a_path_on_which_leaving_rows_mix_up_is_not_taken(start, words, monkeypatch, capsys):
    honest = PlainBackbone.select_rows
    turned = lambda self, order, longest: honest(self, order.flip(0), longest)  # noqa: E731
    monkeypatch.setattr(PlainBackbone, "select_rows", turned)
    monkeypatch.setattr(UncachedBackbone, "select_rows", turned)
    decoder = GroupDecoder(loaded(start, words, "Granite"), words)
    with pytest.raises(SettingError, match="decoded step by step"):
        decoder.choose_path()


def test_the_self_tests_draw_nothing_and_reserve_nothing(start, words):
    model = loaded(start, words, "Phi-3.5 MoE")
    before, decoder = torch.get_rng_state(), GroupDecoder(model, words)
    check_model(model, "phi")
    decoder.choose_path()
    with pytest.raises(SettingError, match="two scorings of one row differ"):
        check_train_mode(model.train(), "phi")
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(decoder.engine.reserved)
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_jitter_of_routers_is_zero_in_training_and_saved_as_it_came(start, words, tmp_path):
    """Two scorings of one row differed by 0.36 to 1.4 nats: it is not called dropout."""
    raw = AutoModelForCausalLM.from_pretrained(start("Mixtral")).train()
    ids = torch.arange(20).view(1, 20)
    assert not torch.equal(raw(ids).logits, raw(ids).logits)
    policy = load_policy(settings(), start("Mixtral"), words, CPU)
    assert torch.equal(policy(ids).logits, policy(ids).logits)
    save_model(policy, words, tmp_path, torch.float32)
    assert json.loads((tmp_path / "config.json").read_text())["router_jitter_noise"] == 0.1


def test_randomness_that_cannot_be_silenced_is_refused_in_training_alone(start, words):
    """PhiMoE's jitter is a threshold in evaluation too: at 0 it would be another model."""
    plain = AutoModelForCausalLM.from_pretrained(start("Phi-3.5 MoE")).eval()
    ids = torch.arange(20).view(1, 20)
    assert torch.equal(loaded(start, words, "Phi-3.5 MoE")(ids).logits, plain(ids).logits)
    with pytest.raises(SettingError, match="random in train mode"):
        load_policy(settings(), start("Phi-3.5 MoE"), words, CPU)


@pytest.mark.slow
def test_weights_that_text_never_reaches_are_frozen_and_saved_unchanged(start, words, capsys):
    """DDP waited for the gradients of a vision tower and ended in torch's traceback."""
    policy = load_policy(settings(), start("Gemma-3, multimodal"), words, CPU)
    assert "text never reaches them: model.multi_modal_projector" in capsys.readouterr().out
    ids = torch.arange(20).view(1, 20)
    policy(ids).logits.sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in policy.parameters())
    frozen = {name for name, p in policy.named_parameters() if not p.requires_grad}
    assert frozen
    assert all("vision" in name or "multi_modal" in name for name in frozen)
    plain = AutoModelForCausalLM.from_pretrained(start("Gemma-3, multimodal")).state_dict()
    state = merged_state(policy, torch.float32)
    assert all(torch.equal(state[name], plain[name]) for name in frozen)
    adapted = load_policy(settings(lora_r=2), start("Gemma-3, multimodal"), words, CPU)
    assert not any("vision" in name for name, _ in adapted.named_parameters() if ".lora_" in name)


EXPERTS = ["gate_up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("shape", "targets"),
    [
        ("DeepSeek-V3", None),
        ("Qwen3 MoE", EXPERTS),
        ("Qwen3 MoE", None),
        ("GPT-OSS", ["q_proj", *EXPERTS]),
        ("Llama", ["embed_tokens", "lm_head", "q_proj"]),
        ("GPT-2", ["c_attn", "c_fc"]),
    ],
)
@torch.no_grad()
def test_merged_names_are_the_plain_models_and_values_base_plus_delta(start, words, tmp_path, shape, targets):
    """peft wraps fused experts otherwise than linear layers: the saved model was unchanged, or could not be
    loaded.
    """
    config = settings(lora_r=4, lora_target_modules=targets)
    policy, sampler = (load(config, start(shape), words, CPU) for load in (load_policy, load_frozen))
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    ids = torch.arange(20).view(1, 20)
    wanted = policy(ids).logits
    assert not torch.allclose(sampler(ids).logits, wanted, atol=1e-2)
    refresh(sampler, policy)
    assert torch.allclose(sampler(ids).logits, wanted, atol=1e-4)
    save_model(policy, words, tmp_path, torch.float32)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.allclose(again.eval()(ids).logits, wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "targets"),
    [
        ("Qwen3 MoE", EXPERTS),
        ("GPT-OSS", ["q_proj", *EXPERTS]),
        ("Llama-4, text", ["q_proj", *EXPERTS]),
        ("Mamba", ["x_proj"]),
    ],
)
def test_whatever_is_named_gets_an_adapter(start, words, shape, targets):
    """peft passes by names of fused experts beside others that it finds: they stayed frozen in silence."""
    policy = load_policy(settings(lora_r=4, lora_target_modules=targets), start(shape), words, CPU)
    adapted = {weight.removesuffix(".weight").rpartition(".")[2] for weight, _ in _adapted_weights(policy)}
    assert adapted == set(targets)


def test_a_name_of_no_layer_is_refused_beside_others(start, words):
    config = settings(lora_r=4, lora_target_modules=["q_proj", "wrong_proj"])
    with pytest.raises(SettingError, match="no layer called wrong_proj"):
        load_policy(config, start("Llama"), words, CPU)


def test_named_layers_that_peft_passes_by_are_said(start, words, capsys):
    """Of DeepSeek it takes the names of an MLP's layers to mean the experts alone."""
    names = ["gate_proj", "up_proj", "down_proj"]
    load_policy(settings(lora_r=4, lora_target_modules=names), start("DeepSeek-V3"), words, CPU)
    said = capsys.readouterr().out
    assert "stay frozen: layers.*.mlp.down_proj.weight" in said
    assert "self_attn" not in said


def test_experts_that_stay_frozen_are_named(start, words, capsys):
    """The README says every matrix; fused experts got no adapter without a word."""
    load_policy(settings(lora_r=4), start("Qwen3 MoE"), words, CPU)
    said = capsys.readouterr().out
    assert "mlp.experts.gate_up_proj" in said
    assert "stay frozen" in said


@pytest.mark.parametrize("factor", [2, 1.3])
def test_adapters_that_cannot_be_merged_are_refused_before_the_first_step(factor, start, words, monkeypatch):
    from peft.tuners.lora.layer import ParamWrapper

    honest = ParamWrapper.get_delta_weight
    monkeypatch.setattr(ParamWrapper, "get_delta_weight", lambda *given: factor * honest(*given))
    with pytest.raises(SettingError, match="with them merged"):
        load_policy(settings(lora_r=4, lora_target_modules=EXPERTS), start("Qwen3 MoE"), words, CPU)


@pytest.mark.parametrize("targets", [None, ["k_proj"]])
def test_adapters_that_bf16_rounds_apart_are_trained(words, targets):
    """As in Qwen2.5-0.5B, whose keys have large biases; LoRA was refused on every such model on a card."""
    kind, given = families.SHAPES["Qwen2"]
    model = families.build(kind, given | dict(num_hidden_layers=16, hidden_size=64), words).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):
            parameter.data = 100 * torch.randn(parameter.shape, generator=generator).to(parameter)
    add_adapters(model, settings(lora_r=4, lora_target_modules=targets))
    assert any(parameter.requires_grad for parameter in model.parameters())


def test_a_router_is_no_matrix_product(start, words):
    """PhiMoE's is a subclass of nn.Linear that gives two tensors."""
    config = settings(lora_r=4, lora_target_modules=["router"])
    with pytest.raises(SettingError, match=r"lora_target_modules=\['router'\]"):
        load_policy(config, start("Phi-3.5 MoE"), words, CPU)


@torch.no_grad()
@pytest.mark.parametrize("shape", ["Granite", "Cohere", "Falcon-H1", "xLSTM"])
def test_heads_that_scale_or_cap_are_scored_as_they_are(start, words, shape):
    model = loaded(start, words, shape)
    decoder = GroupDecoder(model, words)
    out = families.sampled(decoder)
    plain = AutoModelForCausalLM.from_pretrained(start(shape)).eval()
    assert families.furthest(plain, words, out, out.logp) < 1e-4
    logp, _ = Scorer(model, decoder.tables)(out, torch.arange(len(out.ids)))
    assert torch.allclose(logp, out.logp, atol=1e-4)


@pytest.mark.parametrize("shape", ["Mamba", "Mamba-2", "Falcon-Mamba"])
def test_states_that_stay_float32_in_bf16_reach_the_head(start, words, shape):
    """Their residual stream is float32 in a model of any dtype; on a card every such model was refused."""
    model = load_model(start(shape), words, torch.bfloat16, CPU)
    out = families.sampled(GroupDecoder(model, words))
    add_adapters(model, settings(lora_r=2))
    logp, _ = Scorer(model, GroupDecoder(model, words).tables)(out, torch.arange(len(out.ids)))
    assert float((logp.detach() - out.logp).abs().max()) < 0.2
    logp.sum().backward()
    assert any(p.grad is not None and p.grad.any() for n, p in model.named_parameters() if ".lora_B" in n)


def test_states_outside_the_cache_are_found_in_bf16(start, words):
    """RecurrentGemma's stay in its modules when rows leave or repeat: a fault of 0.13 of the logits, which
    passed for rounding in bf16. Sampling was another policy than the one that was scored.
    """
    for dtype in (torch.float32, torch.bfloat16):
        decoder = GroupDecoder(load_model(start("RecurrentGemma"), words, dtype, CPU), words)
        decoder.choose_path()
        assert type(decoder.engine.backbone) is UncachedBackbone


def test_the_path_is_chosen_once(start, words, monkeypatch):
    decoder = GroupDecoder(loaded(start, words, "Qwen3"), words)
    decoder.choose_path()
    monkeypatch.setattr(Engine, "_differs", None)
    decoder.choose_path()
    decoder.complete([[1, 2]], Sampling(2))

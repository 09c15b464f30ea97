"""Which model families are served: shapes of transformers' own configs, tiny and random, against plain
transformers.

    python benchmarks/families.py [SHAPE ...]

Each shape is equal to plain transformers (greedy tokens and log-probs against uncached forwards on ids, saved
and reloaded, LoRA merged), on a slower path, or refused with the reason that a user is told. Anything else is
a fault.
"""

import contextlib
import dataclasses
import io
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

from common import ROOT, write_results

sys.path.insert(0, str(ROOT))

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from decoding.any_model import PlainBackbone, UncachedBackbone
from decoding.decoder import GroupDecoder
from decoding.rollout import Interaction, Sampling, rollout_uniforms
from decoding.tokens import arithmetic_tokenizer
from errors import SettingError
from learning.log_probs import Scorer
from learning.models import load_frozen, load_policy, refresh
from running.folder import save_model

LAYERS = 2
COMMON = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    initializer_range=0.15,
)
MOE = dict(
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    n_group=1,
    topk_group=1,
)
MLA = dict(
    MOE,
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
)
DELTA = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
MAMBA = dict(
    mamba_n_heads=8,
    mamba_d_head=8,
    mamba_d_state=8,
    mamba_n_groups=1,
    mamba_chunk_size=8,
    mamba_d_ssm=64,
    mamba_d_conv=4,
)
STATES = dict(num_heads=8, head_dim=8, state_size=8, n_groups=1, chunk_size=8)
SLIDING = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
BERT = dict(is_decoder=True)
TEXT = {**COMMON, **SLIDING}

# {shape: (model type, settings beside COMMON)}
SHAPES = {
    "Llama": ("llama", {}),
    "Llama, tied head": ("llama", dict(tie_word_embeddings=True)),
    "Qwen2": ("qwen2", {}),
    "Qwen2, sliding window": ("qwen2", dict(SLIDING, use_sliding_window=True)),
    "Qwen3": ("qwen3", {}),
    "Mistral": ("mistral", dict(sliding_window=8)),
    "Ministral": ("ministral", SLIDING),
    "Mixtral": ("mixtral", dict(MOE, router_jitter_noise=0.1)),
    "Gemma": ("gemma", {}),
    "Gemma-2": ("gemma2", SLIDING),
    "Gemma-3, text": ("gemma3_text", SLIDING),
    "Gemma-3, multimodal": ("gemma3", {}),
    "Gemma-3n, text": ("gemma3n_text", dict(SLIDING, num_kv_shared_layers=0)),
    "Gemma-4, text": ("gemma4_text", dict(SLIDING, hidden_size_per_layer_input=8, num_kv_shared_layers=0)),
    "Gemma-4, text, no per-layer embeddings": (
        "gemma4_text",
        dict(SLIDING, hidden_size_per_layer_input=0, num_kv_shared_layers=0),
    ),
    "GPT-2": ("gpt2", {}),
    "GPT-BigCode": ("gpt_bigcode", {}),
    "GPT-J": ("gptj", dict(rotary_dim=8)),
    "GPT-Neo": ("gpt_neo", dict(attention_types=[[["global", "local"], 1]], window_size=8)),
    "GPT-NeoX": ("gpt_neox", {}),
    "GPT-OSS": ("gpt_oss", dict(MOE, **SLIDING)),
    "OpenAI GPT": ("openai-gpt", {}),
    "CodeGen": ("codegen", dict(rotary_dim=8)),
    "OPT": ("opt", dict(ffn_dim=48, word_embed_proj_dim=16, do_layer_norm_before=True)),
    "BLOOM (ALiBi)": ("bloom", {}),
    "MPT (ALiBi)": ("mpt", {}),
    "Falcon": ("falcon", dict(num_kv_heads=2)),
    "Falcon, ALiBi": ("falcon", dict(alibi=True, new_decoder_architecture=False)),
    "Phi": ("phi", {}),
    "Phi-3": ("phi3", dict(pad_token_id=0)),
    "Phi-3.5 MoE": ("phimoe", dict(MOE, router_jitter_noise=0.1, input_jitter_noise=0.1)),
    "StableLM": ("stablelm", {}),
    "StarCoder-2": ("starcoder2", {}),
    "Granite": ("granite", dict(logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.5)),
    "Granite MoE": ("granitemoe", dict(MOE, logits_scaling=4.0)),
    "Granite hybrid": ("granitemoehybrid", dict(MOE, **MAMBA, layer_types=["mamba", "attention"])),
    "Cohere": ("cohere", dict(logit_scale=0.25)),
    "Cohere-2": ("cohere2", dict(SLIDING, logit_scale=0.25)),
    "OLMo": ("olmo", {}),
    "OLMo-2": ("olmo2", {}),
    "OLMo-3": ("olmo3", SLIDING),
    "OLMoE": ("olmoe", MOE),
    "OLMo hybrid": ("olmo_hybrid", DELTA),
    "SmolLM-3": ("smollm3", {}),
    "Seed-OSS": ("seed_oss", {}),
    "ERNIE-4.5": ("ernie4_5", {}),
    "EXAONE-4": ("exaone4", SLIDING),
    "GLM": ("glm", {}),
    "GLM-4": ("glm4", {}),
    "GLM-4 MoE": ("glm4_moe", dict(MOE, first_k_dense_replace=1)),
    "Helium": ("helium", {}),
    "Nemotron": ("nemotron", {}),
    "Nemotron-H": (
        "nemotron_h",
        dict(hybrid_override_pattern="M*", mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=8),
    ),
    "NanoChat": ("nanochat", {}),
    "Hunyuan": ("hunyuan_v1_dense", {}),
    "Arcee": ("arcee", {}),
    "Apertus": ("apertus", {}),
    "BitNet": ("bitnet", {}),
    "DiffLlama": ("diffllama", {}),
    "Llama-4, text": ("llama4_text", dict(MOE, attention_chunk_size=8, intermediate_size_mlp=48)),
    "Qwen2 MoE": ("qwen2_moe", MOE),
    "Qwen3 MoE": ("qwen3_moe", MOE),
    "Qwen3-Next": ("qwen3_next", dict(MOE, **DELTA)),
    "Qwen3.5": ("qwen3_5_text", DELTA),
    "Qwen3.5 MoE": ("qwen3_5_moe_text", dict(MOE, **DELTA)),
    "DeepSeek-V2": ("deepseek_v2", dict(MLA, first_k_dense_replace=1, topk_method="greedy")),
    "DeepSeek-V3": ("deepseek_v3", dict(MLA, first_k_dense_replace=1)),
    "MiniMax": ("minimax", dict(MOE, layer_types=["linear_attention", "full_attention"], block_size=8)),
    "JetMoe": ("jetmoe", dict(MOE, kv_channels=8, num_key_value_heads=4)),
    "DBRX": (
        "dbrx",
        dict(
            d_model=32,
            ffn_config=dict(ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2, moe_jitter_eps=0.1),
            attn_config=dict(kv_n_heads=2, rope_theta=10000.0, clip_qkv=8.0),
        ),
    ),
    "LFM2": ("lfm2", dict(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)),
    "Mamba": ("mamba", STATES),
    "Mamba-2": ("mamba2", STATES),
    "Falcon-Mamba": ("falcon_mamba", STATES),
    "Bamba": ("bamba", dict(MAMBA, attn_layer_indices=[1])),
    "Falcon-H1": ("falcon_h1", dict(MAMBA, lm_head_multiplier=0.5)),
    "Jamba": (
        "jamba",
        dict(MOE, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, use_mamba_kernels=False),
    ),
    "Zamba-2": (
        "zamba2",
        dict(
            num_hidden_layers=3,
            layers_block_type=["mamba", "mamba", "hybrid"],
            hybrid_layer_ids=[2],
            mamba_headdim=8,
            n_mamba_heads=8,
            mamba_d_state=8,
            chunk_size=8,
            num_key_value_heads=4,
        ),
    ),
    "RecurrentGemma": (
        "recurrent_gemma",
        dict(
            lru_width=32,
            attention_window_size=8,
            block_types=["recurrent", "attention"],
            num_key_value_heads=1,
        ),
    ),
    "RWKV": ("rwkv", dict(attention_hidden_size=32, rescale_every=1)),
    "xLSTM": ("xlstm", dict(num_heads=4, embedding_dim=32, num_blocks=2)),
    "BART, decoder": ("bart", dict(decoder_layers=2, decoder_ffn_dim=48, decoder_attention_heads=4)),
    "XGLM": ("xglm", dict(ffn_dim=48)),
    "BERT as a decoder": ("bert", BERT),
    "BERT, not a decoder": ("bert", dict(is_decoder=False)),
    "RoBERTa as a decoder": ("roberta", BERT),
    "ModernBERT decoder": (
        "modernbert-decoder",
        dict(local_attention=8, **dict.fromkeys(("bos_token_id", "cls_token_id", "sep_token_id"), 1)),
    ),
    "BioGPT": ("biogpt", {}),
    "T5 (encoder and decoder)": ("t5", {}),
    "XLNet": ("xlnet", dict(d_head=8)),
    "CTRL": ("ctrl", {}),
}

PROMPTS = [[5, 9, 14, 3, 22, 17, 8], [11, 4], [7, 30, 12, 25], [19, 6, 28, 2, 31, 13, 10, 21, 16, 9, 5]]
G, T = 3, 14


def build(kind, settings, tokenizer):
    """A tiny random model of a family, whose logits are lively enough to give varied text."""
    config_class = CONFIG_MAPPING[kind]
    ids = dict(eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=tokenizer.pad_token_id)
    if kind == "gemma3":
        text = dict(TEXT, vocab_size=len(tokenizer) + 3, **ids)
        vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        vision |= dict(image_size=8, patch_size=4)
        config = config_class(
            text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=1, **ids
        )
    else:
        known = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
        given = {name: value for name, value in COMMON.items() if name in known}
        config = config_class(**given | dict(vocab_size=len(tokenizer) + 3, **ids) | settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    with torch.no_grad():  # biases and the like begin at 0, where many faults do not show
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def plain_logp(model, tokenizer, prompt, completion):
    """Log-probs (len(completion),) by one uncached forward on ids, over the tokenizer's ids."""
    logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0].float()
    logp = logits[:, : len(tokenizer)].log_softmax(-1)[len(prompt) - 1 : -1]
    return logp.gather(-1, torch.tensor(completion)[:, None])[:, 0]


@torch.no_grad()
def plain_greedy(model, tokenizer, prompt):
    ids = list(prompt)
    for _ in range(T):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1, : len(tokenizer)]
        ids.append(int(logits.argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return ids[len(prompt) :]


def furthest(model, tokenizer, rollout, logp):
    """The largest difference of log-probs (N, T) from plain ones; the paths do not interact."""
    far = 0.0
    for n, completion in enumerate(rollout.completion_ids()):
        wanted = plain_logp(model, tokenizer, rollout.prompts[n // G], completion)
        far = max(far, float((logp[n, : len(completion)] - wanted).abs().max()))
    return far


def sampled(decoder, interact=False):
    uniforms = rollout_uniforms(0, 0, 0, len(PROMPTS) * G, T)
    return decoder.rollout(PROMPTS, Sampling(T, G, 1.0), uniforms, interact=interact)


def scored(policy, decoder, rollout):
    return Scorer(policy, decoder.tables)(rollout, torch.arange(len(rollout.ids)))[0]


def faults_of(name, plain, tokenizer, work):
    """(path, faults): how a saved model is decoded, and what is not as plain transformers has it."""
    settings = dict(lora_r=0, lora_alpha=8, lora_target_modules=None, load_in_4bit=False, seed=0)
    config = SimpleNamespace(precision="fp32", trust_remote_code=False, **settings)
    policy, sampler = (
        load(config, name, tokenizer, torch.device("cpu")) for load in (load_policy, load_frozen)
    )
    decoder = GroupDecoder(sampler, tokenizer, "5", Interaction(0.3))
    decoder.choose_path()
    faults = []
    ours = [completion.ids for [completion] in decoder.complete(PROMPTS, Sampling(T))]
    if ours != [plain_greedy(plain, tokenizer, prompt) for prompt in PROMPTS]:
        faults.append("greedy tokens")
    rollout, mixed = sampled(decoder), sampled(decoder, interact=True)
    if furthest(plain, tokenizer, rollout, rollout.logp) > 1e-3:
        faults.append("sampled log-probs")
    logp = scored(policy, decoder, rollout)
    if furthest(plain, tokenizer, rollout, logp.detach()) > 1e-3:
        faults.append("scored log-probs")
    if (scored(policy, decoder, mixed).detach() - mixed.logp).abs().max() > 1e-3:
        faults.append("scored log-probs of paths that interact")
    logp.sum().backward()
    idle = [
        n for n, p in policy.named_parameters() if p.requires_grad and p.grad is None and "expert" not in n
    ]
    if idle:
        faults.append(f"no gradient of {idle[0]}")
    faults += saved_otherwise(policy, plain, tokenizer, work / "saved", rollout, logp.detach())
    config.lora_r = 4
    adapted = load_policy(config, name, tokenizer, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    refresh(sampler, adapted)
    moved = sampled(decoder)
    logp = scored(adapted, decoder, moved).detach()
    if (logp - moved.logp).abs().max() > 1e-3:
        faults.append("LoRA merged into the sampler")
    faults += saved_otherwise(adapted, plain, tokenizer, work / "merged", moved, logp)
    if float((scored(policy, decoder, moved).detach() - logp).abs().max()) < 1e-2:
        faults.append("LoRA changes nothing")
    kinds = {PlainBackbone: "plain path", UncachedBackbone: "plain path without a cache"}
    return kinds.get(type(decoder.engine.backbone), "fast path"), faults


def saved_otherwise(policy, plain, tokenizer, folder, rollout, logp):
    """What is wrong with a saved policy, by plain transformers."""
    save_model(policy, tokenizer, folder, torch.float32)
    again, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    if info["missing_keys"] or info["unexpected_keys"]:
        return [f"names of {folder.name} weights"]
    if [n for n, _ in again.named_parameters()] != [n for n, _ in plain.named_parameters()]:
        return [f"names of {folder.name} weights"]
    return (
        [f"log-probs of the {folder.name} model"]
        if furthest(again.eval(), tokenizer, rollout, logp) > 1e-3
        else []
    )


def outcome(shape, tokenizer):
    """What becomes of a shape: a line for the table."""
    kind, settings = SHAPES[shape]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(folder)
        start = folder / "start"
        try:
            build(kind, settings, tokenizer).save_pretrained(start)
        except ValueError as error:
            if "AutoModelForCausalLM" not in str(error):
                raise
            CONFIG_MAPPING[kind]().save_pretrained(start)  # no causal model: its weights are not asked for
        tokenizer.save_pretrained(start)
        try:
            plain = AutoModelForCausalLM.from_pretrained(start).eval()
        except ValueError:
            plain = None
        try:
            path, faults = faults_of(str(start), plain, tokenizer, folder)
        except SettingError as error:
            return "refused: " + str(error).partition(": ")[2].replace(str(folder), "").replace("start", "")
        if faults:
            return "FAULT: " + ", ".join(faults)
    if path == "fast path":
        return "equal to plain transformers, fast path"
    return "equal to plain transformers" if path == "plain path" else f"slower path: {path}"


def main():
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    tokenizer, rows = arithmetic_tokenizer(), []
    for shape in sys.argv[1:] or SHAPES:
        result = outcome(shape, tokenizer)
        print(f"{shape}: {result}", flush=True)
        rows.append((shape, "outcome", result, SHAPES[shape][0]))
    if not sys.argv[1:]:
        write_results("families", rows)
    sys.exit(any(row[2].startswith("FAULT") for row in rows))


if __name__ == "__main__":
    main()

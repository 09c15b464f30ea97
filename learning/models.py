"""Models and tokenizers: loaded, given adapters, merged and copied."""

import re

import torch
import torch.nn as nn
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.pytorch_utils import Conv1D

from decoding.any_model import check_head, model_body
from decoding.tokens import arithmetic_tokenizer
from errors import SettingError
from learning.parallel import whole


def rollout_dtype(config):
    """bf16 on CUDA, unless bf16 is off; float32 on the CPU."""
    return torch.bfloat16 if config.bf16 and torch.cuda.is_available() else torch.float32


def load_tokenizer(name, trust_remote_code=False):
    """The tokenizer of a model directory or hub id, padding on the left; `tiny` is the embedded one."""
    if name == "tiny":
        return arithmetic_tokenizer()
    tokenizer = _from_pretrained(AutoTokenizer, name, trust_remote_code=trust_remote_code)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(name, tokenizer, dtype, device, trust_remote_code=False):
    """A causal model in `dtype` with every dropout probability 0 (I11: a log-prob that enters a ratio must not be random).

    `tiny` is a fresh Llama-shaped model of about 200,000 parameters for the arithmetic problems.
    """
    if name == "tiny":
        ids = dict(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None
        )
        shape = dict(
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            initializer_range=0.1,
        )
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **shape, **ids), dtype=dtype
        )
        model.source_dtype, model.source_dropout = torch.float32, {}
        return model.to(device)
    settings = _from_pretrained(AutoConfig, name, trust_remote_code=trust_remote_code)
    source_dtype = settings.dtype or torch.float32
    text = settings.get_text_config()
    dropout = {
        key: value
        for key, value in text.to_dict().items()
        if re.search("drop", key) and isinstance(value, float)
    }
    for key in dropout:
        setattr(text, key, 0.0)
    load = dict(config=settings, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True)
    model, found = _from_pretrained(AutoModelForCausalLM, name, **load)
    if found["missing_keys"]:  # transformers would draw them at random, with a table on standard error
        absent = sorted(found["missing_keys"])
        raise SettingError(
            "model",
            name,
            f"lacks {len(absent)} of its weights, {absent[0]} among them: it is half a model, or its config.json is another's",
        )
    model = model.to(device)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.source_dtype = (
        source_dtype if isinstance(source_dtype, torch.dtype) else getattr(torch, source_dtype)
    )
    model.source_dropout = dropout
    check_head(model, name)
    return model


def _from_pretrained(kind, name, **kwargs):
    try:
        return kind.from_pretrained(name, **kwargs)
    except (
        OSError,
        ValueError,
        RuntimeError,
        SafetensorError,
        TypeError,
        KeyError,
    ) as error:  # the last two: JSON of another shape
        reason = " ".join(str(error).split())[:200]
        raise SettingError(
            "model",
            name,
            f"cannot be loaded as a {kind.__name__[4:]}; give a directory or a hub id that can be reached ({reason})",
        ) from error


def check_positions(model, problems, config):
    """Refuse prompts and completions that together reach past the positions the model has."""
    positions, longest = (
        getattr(model.config.get_text_config(), "max_position_embeddings", None),
        max(len(p.ids) for p in problems),
    )
    if positions is not None and longest + config.max_completion_length > positions:
        remedy = f"with the longest prompt of {longest} tokens it passes the model's {positions} positions: lower it, or max_prompt_length"
        raise SettingError("max_completion_length", config.max_completion_length, remedy)


def load_models(config, name, tokenizer, device):
    """Policy, sampler and reference (None where beta is 0) of a GRPO run, all with the weights of `name`."""
    policy = load_policy(config, name, tokenizer, device)
    sampler = load_frozen(config, name, tokenizer, device)
    reference = load_frozen(config, name, tokenizer, device) if config.beta > 0 else None
    return policy, sampler, reference


def load_policy(config, name, tokenizer, device):
    """The model that is trained: float32, or with LoRA a frozen base in the sampler's dtype and float32 adapters.

    In train mode: gradient checkpointing needs it; every dropout is 0 (I11).
    """
    dtype = rollout_dtype(config) if config.lora_r else torch.float32
    policy = load_model(name, tokenizer, dtype, device, config.trust_remote_code)
    if config.lora_r:
        torch.manual_seed(config.seed)  # the adapters do not depend on what was drawn before
        add_adapters(policy, config)
    return policy.train()


def load_frozen(config, name, tokenizer, device):
    """A copy that samples, or that the KL is measured against: in the dtype of rollouts, without gradients."""
    model = load_model(name, tokenizer, rollout_dtype(config), device, config.trust_remote_code)
    return model.eval().requires_grad_(False)


def add_adapters(model, config):
    """Put LoRA adapters into the model, in place, and freeze the rest (https://arxiv.org/abs/2106.09685)."""
    import peft

    wanted = config.lora_target_modules
    settings = peft.LoraConfig(
        r=config.lora_r, lora_alpha=config.lora_alpha, target_modules=wanted or "all-linear", lora_dropout=0.0
    )
    if wanted is None:  # every layer of the body that multiplies by a matrix
        kinds = (nn.Linear, Conv1D)
        body = model_body(model)
        settings.target_modules = {
            name.rsplit(".", 1)[-1] for name, module in body.named_modules() if isinstance(module, kinds)
        }
    try:
        peft.inject_adapter_in_model(settings, model)
    except ValueError as error:
        raise SettingError(
            "lora_target_modules", wanted, f"does not fit the model ({' '.join(str(error).split())[:200]})"
        ) from error
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if (
        any(hasattr(end, "base_layer") for end in ends)
        and len({getattr(end, "base_layer", end).weight.data_ptr() for end in ends}) == 1
    ):
        raise SettingError(
            "lora_target_modules",
            wanted,
            "this model's embedding and head are one matrix: an adapter on one of them would split it",
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def merged_parameters(model):
    """Name and value of each parameter as the model without adapters has it: theirs added to what they belong to."""
    modules = dict(model.named_modules())
    for name, value in model.named_parameters():
        owner = name.removesuffix(".base_layer.weight")
        if owner != name:
            yield f"{owner}.weight", value.float() + modules[owner].get_delta_weight("default").float()
        elif ".lora_" not in name:
            yield name.replace(".base_layer.", "."), value


@torch.no_grad()
def merged_state(model, dtype, keep=True):
    """The state dict as a plain model has it, on the CPU in `dtype`: adapters merged, shards put together, a tied weight one tensor with two names.

    Every process must call it where weights are sharded; those that do not `keep` it get nothing. One tensor at a time goes through the device.
    """
    made = {}
    for parameter, (_, value) in zip(model_weights(model), merged_parameters(model), strict=True):
        value = whole(value)
        made[id(parameter)] = value.to(dtype).cpu() if keep else None
    if not keep:
        return None
    state = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if ".lora_" not in name:
            state[name.replace(".base_layer.", ".")] = made[id(parameter)]
    for name, value in model.state_dict().items():
        plain = name.replace(".base_layer.", ".")
        if ".lora_" not in name and plain not in state:  # buffers
            state[plain] = value.to(dtype).cpu() if value.is_floating_point() else value.cpu()
    return state


def model_weights(model):
    """The parameters that a model without adapters has, in the order of `merged_parameters`."""
    return [parameter for name, parameter in model.named_parameters() if ".lora_" not in name]


@torch.no_grad()
def refresh(copy, policy):
    """Overwrite `copy` (any dtype, fixed storage) with the policy's weights, adapters merged; returns the share of its values that changed (0-d).

    Rounding to bf16 hides small updates from the sampler for a while: this share says how much of an update it sees. It is taken over every 257th
    value of each tensor, a prime, so that all columns are met: comparing all of them takes several times as long as the copying.
    """

    def looked_at():
        return torch.cat([target.flatten()[::257] for target in copy.parameters()])

    before = looked_at()
    for target, (_, source) in zip(copy.parameters(), merged_parameters(policy), strict=True):
        target.copy_(whole(source.detach()))
    return (looked_at() != before).float().mean()

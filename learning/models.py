"""Models and tokenizers: loaded, given adapters, merged and copied."""

import hashlib

import torch
import torch.nn as nn
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.pytorch_utils import Conv1D

from decoding.any_model import check_head, model_body
from decoding.tokens import arithmetic_tokenizer
from errors import SettingError, one_line
from learning.parallel import whole


def rollout_dtype(config):
    """bf16 on CUDA, unless bf16 is off; float32 on the CPU."""
    return torch.bfloat16 if config.bf16 and torch.cuda.is_available() else torch.float32


def load_tokenizer(name, trust_remote_code=False):
    """The tokenizer of a model directory or hub id; `tiny` is the embedded one."""
    if name == "tiny":
        return arithmetic_tokenizer()
    tokenizer = _from_pretrained(AutoTokenizer, name, trust_remote_code=trust_remote_code)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(name, tokenizer, dtype, device, trust_remote_code=False):
    """A causal model in `dtype` without dropout: log-probs that enter a ratio must not be random.

    It remembers its source_dtype and source_dropout, in which it is saved. `tiny` is a fresh Llama-shaped
    model of about 200,000 parameters for the arithmetic problems.
    """
    if name == "tiny":
        return _tiny_model(tokenizer, dtype).to(device)
    config = _from_pretrained(AutoConfig, name, trust_remote_code=trust_remote_code)
    source_dtype, text_config = config.dtype or torch.float32, config.get_text_config()
    dropout = {
        key: value
        for key, value in text_config.to_dict().items()
        if "drop" in key and isinstance(value, float)
    }
    for key in dropout:
        setattr(text_config, key, 0.0)
    how = dict(config=config, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True)
    model, loading_info = _from_pretrained(AutoModelForCausalLM, name, **how)
    # transformers draws them at random and prints a table
    if missing := sorted(loading_info["missing_keys"]):
        what = f"lacks {len(missing)} of its weights, {missing[0]} among them"
        raise SettingError("model", name, f"{what}: it is half a model, or its config.json is another's")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    is_name = isinstance(source_dtype, str)
    model.source_dtype = getattr(torch, source_dtype) if is_name else source_dtype
    model.source_dropout = dropout
    model = model.to(device)
    check_head(model, name)
    return model


def _tiny_model(tokenizer, dtype):
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.1,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.source_dtype, model.source_dropout = torch.float32, {}
    return model


def _from_pretrained(kind, name, **how):
    """from_pretrained, whose many errors become one line. TypeError, KeyError: malformed config.json."""
    try:
        return kind.from_pretrained(name, **how)
    except ImportError as error:  # of quantised weights, of code that comes with a model
        raise SettingError("model", name, f"needs a package that is missing: {one_line(error)}") from error
    except (OSError, ValueError, RuntimeError, SafetensorError, TypeError, KeyError) as error:
        what = f"cannot be loaded as a {kind.__name__.removeprefix('Auto')}"
        remedy = "give a directory or a hub id that can be reached"
        raise SettingError("model", name, f"{what}; {remedy} ({one_line(error)})") from error


def check_positions(model, problems, config):
    """Refuse prompts and completions that together reach past the positions the model has."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(len(p.ids) for p in problems)
    if positions is not None and longest + config.max_completion_length > positions:
        what = f"with the longest prompt of {longest} tokens it passes the model's {positions} positions"
        remedy = f"{what}: lower it, or max_prompt_length"
        raise SettingError("max_completion_length", config.max_completion_length, remedy)


def load_models(config, name, tokenizer, device):
    """Policy, sampler and reference (None where beta is 0) of a GRPO run, all with the weights of `name`."""
    policy = load_policy(config, name, tokenizer, device)
    sampler = load_frozen(config, name, tokenizer, device)
    reference = load_frozen(config, name, tokenizer, device) if config.beta > 0 else None
    return policy, sampler, reference


def load_policy(config, name, tokenizer, device):
    """The model that is trained: float32, or with LoRA a frozen base in the sampler's dtype and float32
    adapters.

    In train mode: gradient checkpointing needs it; every dropout is 0.
    """
    dtype = rollout_dtype(config) if config.lora_r else torch.float32
    policy = load_model(name, tokenizer, dtype, device, config.trust_remote_code)
    if config.lora_r:
        torch.manual_seed(config.seed)  # the adapters do not depend on what was drawn before
        add_adapters(policy, config)
    return policy.train()


def load_frozen(config, name, tokenizer, device):
    """A copy that samples, or that the KL is measured against: in the rollouts' dtype, without gradients."""
    model = load_model(name, tokenizer, rollout_dtype(config), device, config.trust_remote_code)
    return model.eval().requires_grad_(False)


def add_adapters(model, config):
    """Put LoRA adapters into the model, in place, and freeze the rest (https://arxiv.org/abs/2106.09685)."""
    import peft

    wanted = config.lora_target_modules
    how = dict(r=config.lora_r, lora_alpha=config.lora_alpha, lora_dropout=0.0)
    settings = peft.LoraConfig(target_modules=wanted or "all-linear", **how)
    if wanted is None:  # every layer of the body that multiplies by a matrix
        layers = model_body(model).named_modules()
        matrices = (name for name, module in layers if isinstance(module, (nn.Linear, Conv1D)))
        settings.target_modules = {name.rsplit(".", 1)[-1] for name in matrices}
    try:
        peft.inject_adapter_in_model(settings, model)
    except ValueError as error:
        remedy = f"does not fit the model ({one_line(error)})"
        raise SettingError("lora_target_modules", wanted, remedy) from error
    if _splits_tied_weights(model):
        remedy = "this model's embedding and head are one matrix: an adapter on one of them would split it"
        raise SettingError("lora_target_modules", wanted, remedy)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _splits_tied_weights(model):
    """Whether the embedding or the head has an adapter, and both are one matrix."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    bases = [getattr(end, "base_layer", end) for end in ends]
    has_adapter = any(base is not end for base, end in zip(bases, ends, strict=True))
    return has_adapter and bases[0].weight.data_ptr() == bases[1].weight.data_ptr()


def merged_parameters(model):
    """Name and value of each parameter of the plain model, adapters added to the weights they belong to."""
    modules = dict(model.named_modules())
    for name, value in model.named_parameters():
        owner = name.removesuffix(".base_layer.weight")
        if owner != name:
            yield f"{owner}.weight", value.float() + modules[owner].get_delta_weight("default").float()
        elif ".lora_" not in name:
            yield name.replace(".base_layer.", "."), value


@torch.no_grad()
def merged_state(model, dtype, keep=True):
    """The state dict of the plain model, on the CPU in `dtype`: adapters merged, shards put together.

    A tied weight is one tensor with two names. Every process must call it where weights are sharded; those
    that do not `keep` it get None. One tensor at a time goes through the device.
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
    """Overwrite `copy` with the policy's weights, adapters merged; returns the share of its values that
    changed (0-d).

    `copy` has any dtype and keeps its storage. Rounding to bf16 hides small updates from the sampler for a
    while: the share says how much of an update it sees. It is taken over every 257th value of each tensor,
    since comparing all takes several times as long as copying; 257 is a prime, so that all columns are met.
    """

    def every_257th():
        return torch.cat([target.flatten()[::257] for target in copy.parameters()])

    before = every_257th()
    for target, (_, source) in zip(copy.parameters(), merged_parameters(policy), strict=True):
        target.copy_(whole(source.detach()))
    return (every_257th() != before).float().mean()


def fingerprint(model):
    """A hash of a thousand or two values of each weight: it tells models saved in the same folder apart."""
    digest = hashlib.sha256()
    for weight in model.parameters():
        values = weight.detach().flatten()[:: max(1, weight.numel() // 1000)]
        digest.update(values.float().cpu().numpy().tobytes())
    return digest.hexdigest()

"""Models and tokenizers: loaded, given adapters, merged and copied."""

import hashlib
import json
import threading
import warnings
from pathlib import Path

import torch
import torch.nn as nn
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    PreTrainedConfig,
)
from transformers.pytorch_utils import Conv1D

from decoding.any_model import far_apart, head_output, model_body
from decoding.engine import say
from decoding.self_test import (
    check_autocast,
    check_model,
    check_train_mode,
    one_line_of,
    probe_rows,
    scored,
    uncached_logits,
)
from decoding.tokens import arithmetic_tokenizer
from errors import OR_OFFLINE, SettingError, counted, is_path, one_line, telling_if_slow
from learning.parallel import whole
from learning.precision import compute_dtype

LOADING = threading.RLock()  # while a thread loads, transformers leaves new weights undrawn in all of them
# State-space models whose kernels read the weight of out_proj without calling it; peft refuses it there.
READ_UNCALLED = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
# Of adapters that are tried out; the next where one does not show
ADAPTER_NOISE = [0.01 * 2**i for i in range(8)]
IS_ADAPTER = "holds a LoRA adapter, which counts on top of another model: give the merged model"
IS_ADAPTER += " (for output_dir/adapter that is output_dir itself), or merge the two with peft first"


# What a config.json with a wrong value raises
MALFORMED = (TypeError, KeyError, AttributeError, ArithmeticError, StrictDataclassError)


def load_tokenizer(name, trust_remote_code=False):
    """The tokenizer of a model directory or hub id; `tiny` is the embedded one."""
    if name == "tiny":
        return arithmetic_tokenizer()
    tokenizer = _from_pretrained(AutoTokenizer, name, trust_remote_code=trust_remote_code)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(name, tokenizer, dtype, device, trust_remote_code=False, is_checked=False, in_4bit=False):
    """A causal model in `dtype` without dropout or noise: log-probs that enter a ratio must not be random.

    It remembers its source_dtype and source_dropout, in which it is saved, and has passed `check_model`, now
    or, where it `is_checked`, when the same weights were loaded before. `in_4bit`: its linear layers, less
    the head, keep their weights as 4-bit NormalFloat and compute in `dtype`.
    `tiny` is a fresh Llama-shaped model of about 200,000 parameters for the arithmetic problems.
    """
    if name == "tiny":
        return _tiny_model(tokenizer, dtype).to(device)
    config = _from_pretrained(AutoConfig, name, trust_remote_code=trust_remote_code)
    if getattr(config.get_text_config(), "num_hidden_layers", 1) == 0:
        raise SettingError("model", name, "its config.json gives it no layers: num_hidden_layers is 0")
    source_dtype, dropout = config.dtype or torch.float32, {}
    for path, owner, key in random_settings(config, ("drop",)):
        dropout[path] = getattr(owner, key)
        setattr(owner, key, 0.0)
    how = dict(config=config, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True)
    if in_4bit:
        how |= dict(quantization_config=four_bit(dtype), device_map={"": device})
    model, loading_info = _from_pretrained(AutoModelForCausalLM, name, **how)
    if model._hf_peft_config_loaded:  # of a model on the hub; transformers puts its layers into the model
        raise SettingError("model", name, IS_ADAPTER)
    # transformers draws them at random and prints a table
    if missing := sorted(loading_info["missing_keys"]):
        what = f"lacks {len(missing)} of its weights, {missing[0]} among them"
        raise SettingError("model", name, f"{what}: it is half a model, or its config.json is another's")
    if (left_out := sorted(loading_info["unexpected_keys"])) and not is_checked:
        what = (
            f"left out {counted(len(left_out), 'weight')} of its files that its config.json has no place for"
        )
        warnings.warn(f"model={name}: {what}, {left_out[0]} among them", stacklevel=2)
    _check_generation_config(name)
    _settle(model)
    model.source_dtype = _as_dtype(name, source_dtype)
    model = model if in_4bit else model.to(device)
    with one_line_of(name, f"a {config.model_type} model cannot be run on ids"):
        model.source_dropout = dropout | silence_noise(model)
    if in_4bit:
        check_4bit(model)
    if not is_checked:
        check_model(model, name)
    return model


def _as_dtype(model, name):
    """The dtype that a model's config.json names, in which it is saved again."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise SettingError("model", model, f"its config.json names the dtype {name!r}, which no weights have")
    return dtype


def _check_generation_config(name):
    """Refuse one that is damaged: transformers goes on without it, and its tokens would end no answer."""
    path = Path(name) / "generation_config.json"
    try:
        is_read = not path.exists() or isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
    except (OSError, ValueError):
        is_read = False
    if not is_read:
        raise SettingError("model", name, "its generation_config.json is damaged: mend it, or delete it")


def _settle(model):
    """Nothing in its modules is random, and packed weights stay as they were loaded."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if hasattr(
            module, "support_avx512bf16_for_cpu"
        ):  # bitsandbytes would pack them anew, for a bf16 kernel
            module.support_avx512bf16_for_cpu = False


def four_bit(dtype):
    """QLoRA's storage: 4-bit NormalFloat whose scales are quantised, too (https://arxiv.org/abs/2305.14314)."""
    how = dict(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
    return BitsAndBytesConfig(load_in_4bit=True, **how)


def policy_bytes(model, config):
    """Bytes of the policy's weights, adapters left out, for a model that is loaded as the sampler is."""
    count = sum(p.numel() for p in model.parameters())
    if not config.lora_r:
        return 4 * count
    head = model.get_output_embeddings()
    layers = (layer for layer in model.modules() if is_matrix_product(layer) and layer is not head)
    packed = sum(layer.weight.numel() for layer in layers) if config.load_in_4bit else 0
    # a block of 64 has a scale of 8 bits, 256 of these one of 32
    return int(model.dtype.itemsize * (count - packed) + packed * (0.5 + 1 / 64 + 4 / (64 * 256)))


def in_4_bits(weight):
    """Whether bitsandbytes has packed a weight."""
    return hasattr(weight, "quant_state")


def dense(parameter):
    """The values of a weight, as its layer multiplies by them: 4-bit ones unpacked, any other as it is."""
    if not in_4_bits(parameter):
        return parameter
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, parameter.quant_state)


def check_4bit(model):
    """Refuse a model none of whose layers was packed, or whose layers bitsandbytes turns into others.

    Otherwise it is from now on saved as any model is, by its config and the weights it is given.
    """
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in type(model)(model.config).named_parameters()}
    packed = {name: p.quant_state.shape for name, p in model.named_parameters() if in_4_bits(p)}
    if not packed or any(shape != shapes.get(name) for name, shape in packed.items()):
        kind = f"the layers of a {model.config.model_type} model are none that bitsandbytes keeps in 4 bits"
        raise SettingError("load_in_4bit", True, f"{kind}: leave it out, or take another model")
    model.hf_quantizer = None  # it would write what is packed, adapters apart
    del model.config.quantization_config


def size_of(name, trust_remote_code=False):
    """How many weights a model has, and in how many bytes each is saved, without loading them."""
    if name == "tiny":
        model = _tiny_model(arithmetic_tokenizer(), torch.float32)
        return sum(p.numel() for p in model.parameters()), 4
    config = _from_pretrained(AutoConfig, name, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    dtype = getattr(torch, str(config.dtype or "float32").removeprefix("torch."))
    return sum(p.numel() for p in model.parameters()), dtype.itemsize


def random_settings(config, words, above=""):
    """(dotted path, owner, key) of each number of a config, and of those within it, that has such a name."""
    for key, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from random_settings(value, words, f"{above}{key}.")
        elif isinstance(value, float) and any(word in key for word in words):
            yield f"{above}{key}", config, key


def silence_noise(model):
    """Set the noise that a model adds in train mode (router jitter) to 0; returns the config's {path: value}.

    PhiMoE's jitter is a threshold in evaluation, too: what changes the logits there stays as it is.
    """
    words = "jitter", "noise"
    places = list(random_settings(model.config, words))
    for module in model.modules():
        numbers = [key for key, value in vars(module).items() if isinstance(value, float)]
        places += [("", module, key) for key in numbers if any(word in key for word in words)]
    given = [getattr(owner, key) for _, owner, key in places]
    if not any(given):
        return {}
    before = uncached_logits(model)
    for _, owner, key in places:
        setattr(owner, key, 0.0)
    if not all(map(torch.equal, before, uncached_logits(model))):
        for (_, owner, key), value in zip(places, given, strict=True):
            setattr(owner, key, value)
    return {path: value for (path, *_), value in zip(places, given, strict=True) if path}


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
    with LOADING:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.source_dtype, model.source_dropout = torch.float32, {}
    return model


def _from_pretrained(kind, name, **how):
    """from_pretrained, whose many errors become one line."""
    if (Path(name) / "adapter_config.json").exists():
        raise SettingError("model", name, IS_ADAPTER)
    try:
        with telling_if_slow(f"still loading {name}{'' if Path(name).exists() else OR_OFFLINE}"), LOADING:
            return kind.from_pretrained(name, **how)
    except ImportError as error:  # of quantised weights, of code that comes with a model
        raise SettingError("model", name, f"needs a package that is missing: {one_line(error)}") from error
    except (OSError, ValueError, RuntimeError, SafetensorError, *MALFORMED) as error:
        what = f"cannot be loaded as a {kind.__name__.removeprefix('Auto')}"
        remedy = "give a directory or a hub id that can be reached"
        if not Path(name).exists():
            what = "there is no such folder" if is_path(name) else "there is no folder of this name here"
        elif not (Path(name) / "config.json").exists():
            what = "holds no config.json, and so no model"
        raise SettingError("model", name, f"{what}; {remedy} ({one_line(error)})") from error


def check_positions(model, problems, config):
    """Refuse prompts and completions that together reach past the positions the model has."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(len(p.ids) for p in problems)
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):  # they change where a text passes this length
        positions = rope.get("original_max_position_embeddings") or positions
    if positions is not None and longest + config.max_completion_length > positions:
        what = f"with the longest prompt of {longest} tokens it passes the model's {positions} positions"
        remedy = f"{what}: lower it, or max_prompt_length"
        raise SettingError("max_completion_length", config.max_completion_length, remedy)


def load_models(config, name, tokenizer, device):
    """Policy, sampler and reference (None where beta is 0) of a GRPO run, all with the weights of `name`."""
    policy = load_policy(config, name, tokenizer, device)
    sampler = load_frozen(config, name, tokenizer, device)
    reference = load_frozen(config, name, tokenizer, device, is_checked=True) if config.beta > 0 else None
    return policy, sampler, reference


def load_policy(config, name, tokenizer, device):
    """The model that is trained: float32, or with LoRA a frozen base in the sampler's dtype, or in 4 bits,
    and float32 adapters.

    In train mode: gradient checkpointing needs it; every dropout is 0.
    """
    computed_in = compute_dtype(config.precision, device)
    dtype = computed_in if config.lora_r else torch.float32
    how = dict(in_4bit=config.load_in_4bit)
    policy = load_model(name, tokenizer, dtype, device, config.trust_remote_code, **how)
    if (computed_in, policy.source_dtype) == (torch.float16, torch.bfloat16):
        policy.source_dtype = computed_in  # bf16 would round three bits away of what was sampled with
    freeze_unreached(policy)
    if config.lora_r:
        torch.manual_seed(config.seed)  # the adapters do not depend on what was drawn before
        add_adapters(policy, config)
    check_train_mode(policy.train(), name)
    check_autocast(policy, name, computed_in)
    return policy


def load_frozen(config, name, tokenizer, device, is_checked=False):
    """A copy that samples, or that the KL is measured against: in the rollouts' dtype, without gradients."""
    dtype = compute_dtype(config.precision, device)
    model = load_model(name, tokenizer, dtype, device, config.trust_remote_code, is_checked)
    return model.eval().requires_grad_(False)


@torch.enable_grad()
def freeze_unreached(model):
    """Freeze, in place, the weights that text never reaches: a vision tower's, keys that no layer reads.

    DDP waits for the gradients of all others. Experts stay as they are: which of them text reaches depends on
    the text.
    """
    ids = torch.tensor([probe_rows(model)[0]], device=model.device)
    states = model_body(model)(inputs_embeds=model.get_input_embeddings()(ids), use_cache=False)
    reached = set(leaves(head_output(model, states.last_hidden_state).grad_fn))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    frozen = [(name, p) for name, p in trained if id(p) not in reached and "expert" not in name]
    for _, parameter in frozen:
        parameter.requires_grad_(False)
    if frozen:
        say(f"frozen, since text never reaches them: {patterns(name for name, _ in frozen)}")


def leaves(function):
    """The ids of the weights that a result depends on, by its grad_fn."""
    seen, waiting = set(), [function]
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        waiting.extend(above for above, _ in function.next_functions)
        if hasattr(function, "variable"):
            yield id(function.variable)


def patterns(names, most=6):
    """Names of weights in one line, their layers' numbers left out."""
    kinds = {".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names}
    shown = ", ".join(sorted(kinds)[:most])
    return f"{shown} and {len(kinds) - most} more" if len(kinds) > most else shown


def add_adapters(model, config):
    """Put LoRA adapters into the model, in place, and freeze the rest (https://arxiv.org/abs/2106.09685)."""
    import peft

    wanted, plain = config.lora_target_modules, [name for name, _ in model.named_parameters()]
    layers, names = [name for name, _ in model.named_modules()], wanted or ()
    # a name may be that of layers and of fused experts; one that is nothing's is refused below
    fused = {name for name in names if _called(name, plain)}
    named = [name for name in names if name not in fused or _called(name, layers)]
    how = dict(r=config.lora_r, lora_alpha=config.lora_alpha, lora_dropout=0.0)
    settings = peft.LoraConfig(target_modules=named or None, target_parameters=fused or None, **how)
    if wanted is None:
        settings.target_modules = linear_layers(model)
    try:
        peft.inject_adapter_in_model(settings, model)
    except ValueError as error:
        remedy = f"does not fit the model ({one_line(error)})"
        raise SettingError("lora_target_modules", wanted, remedy) from error
    if _splits_tied_weights(model):
        remedy = "this model's embedding and head are one matrix: an adapter on one of them would split it"
        raise SettingError("lora_target_modules", wanted, remedy)
    adapted = dict(_adapted_weights(model, wanted))
    left = settings.target_modules or ()
    if fused != set(settings.target_parameters or ()):  # peft made gate_up_proj of gate_proj and up_proj
        names = [name for name in names if name in fused or name in left]
    if unknown := [name for name in names if not _called(name, map(_layer_of, adapted))]:
        raise SettingError("lora_target_modules", wanted, f"the model has no layer called {unknown[0]}")
    if sorted(plain) != sorted(plain_name(n) for n, _ in model.named_parameters() if ".lora_" not in n):
        raise SettingError("lora_target_modules", wanted, "peft wraps layers that cannot be merged again")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    with one_line_of(model.name_or_path, f"adapters on lora_target_modules={wanted} cannot be run"):
        freeze_unreached(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise SettingError("lora_target_modules", wanted, "text reaches none of these layers")
        _check_merging(model, adapted, wanted)
    _say_what_stays_frozen(model, adapted, wanted)


@torch.no_grad()
def _check_merging(model, adapted, wanted):
    """Refuse adapters that do not give what the plain model gives with them merged; leaves all as it was.

    One layer of each kind is tried, alone: with noise in several, rounding in bf16 grows to anything.
    """
    weights = {plain_name(name): p for name, p in model.named_parameters()}
    plain = torch.cat(scored(model))  # new adapters give nothing yet
    for name in {patterns([name]): name for name in reversed(adapted)}.values():
        layer = adapted[name]
        # those of its own: a layer of fused experts wraps another
        adapters = [p for n, p in layer.named_parameters() if not n.startswith("base_layer.")]
        if not any(parameter.requires_grad for parameter in adapters):
            continue
        given = [parameter.clone() for parameter in adapters]
        is_merged = _is_merged(model, layer, weights[name], adapters, plain)
        for parameter, value in zip(adapters, given, strict=True):
            parameter.copy_(value)
        if not is_merged:
            what = "the model with adapters on these layers is not the plain one with them merged"
            raise SettingError("lora_target_modules", wanted, f"{what}: name other layers")


def _is_merged(model, layer, weight, adapters, plain):
    """Whether noise in a layer's adapters gives what the plain model gives with it merged.

    The noise is doubled until it shows in the logits, and there the two must differ by at most half of what
    it changed; in float32 also by no more than rounding. Not in float32 it may be doubled further until they
    do: rounding hides a small change, as of keys with a large bias. plain: logits (L, V) without noise.
    """
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(parameter.shape, generator=generator) for parameter in adapters]
    is_heard = False
    for scale in ADAPTER_NOISE:
        for parameter, value in zip(adapters, noise, strict=True):
            parameter.copy_(scale * value)
        ours = torch.cat(scored(model))
        owner, attribute, given = weight, "data", weight.data
        merged = merged_weight(weight, layer).to(model.dtype)
        if is_4bit(layer):  # which would round it
            owner, attribute, given = layer, "base_layer", layer.base_layer
            merged = linear(merged, given.bias)
        setattr(owner, attribute, merged)
        for parameter in adapters:
            parameter.zero_()
        theirs = torch.cat(scored(model)).to(model.dtype)
        setattr(owner, attribute, given)
        if far_apart(ours.to(model.dtype), plain.to(model.dtype)) and far_apart(theirs, plain):
            is_heard, changed = True, min((ours - plain).norm(), (theirs - plain).norm())
            is_near = bool((ours - theirs).norm() <= changed / 2)
            if model.dtype == torch.float32:
                return is_near and not far_apart(ours, theirs)
            if is_near:
                return True
    return not is_heard and not far_apart(ours, theirs)


def linear(weight, bias):
    """A layer of these weights."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made.weight, made.bias = nn.Parameter(weight, requires_grad=False), bias
    return made


def is_matrix_product(layer):
    """A router may be a subclass of nn.Linear, and give more than a product."""
    is_linear = isinstance(layer, nn.Linear) and type(layer).__name__.endswith(("Linear", "Linear4bit"))
    return is_linear or isinstance(layer, Conv1D)


def linear_layers(model):
    """The default of lora_target_modules: every layer of the body that is a matrix product, by last names.

    By whole names where others are called so, too.
    """
    body = set(model_body(model).modules())
    named = [(name, layer) for name, layer in model.named_modules() if name]
    matrices = [(name, layer) for name, layer in named if layer in body and is_matrix_product(layer)]
    names = {name for name, layer in matrices if layer.weight.requires_grad or in_4_bits(layer.weight)}
    if model.config.model_type in READ_UNCALLED:
        names = {name for name in names if not name.endswith(".out_proj")}
    last = {name.rsplit(".", 1)[-1] for name in names}
    return last if {name for name, _ in named if name.rsplit(".", 1)[-1] in last} == names else names


def _called(name, paths):
    """Those of the layers or weights that a name of lora_target_modules means."""
    return [path for path in paths if f".{path}".endswith(f".{name}")]


def _layer_of(weight):
    return weight.removesuffix(".weight")


def _say_what_stays_frozen(model, adapted, wanted):
    """Say which matrices of the body have no adapter, of all or of those `wanted`; embeddings never have one
    by default.
    """
    tables = [m.weight for m in model_body(model).modules() if isinstance(m, nn.Embedding)]
    others = {id(weight) for weight in (*tables, model.get_output_embeddings().weight)}
    names = {
        plain_name(n) for n, p in model_body(model).named_parameters() if p.ndim >= 2 and id(p) not in others
    }
    without = {name for name in names if ".lora_" not in name and not any(a.endswith(name) for a in adapted)}
    remedy = "name layers with --lora_target_modules to train others"
    if wanted is not None:
        without = {weight for weight in without if any(_called(name, [_layer_of(weight)]) for name in wanted)}
        remedy = "peft takes their names to mean others"
    if without:
        say(f"LoRA: these matrices get no adapter and stay frozen: {patterns(without)}; {remedy}")


def _splits_tied_weights(model):
    """Whether the embedding or the head has an adapter, and both are one matrix."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    bases = [getattr(end, "base_layer", end) for end in ends]
    has_adapter = any(base is not end for base, end in zip(bases, ends, strict=True))
    return has_adapter and bases[0].weight.data_ptr() == bases[1].weight.data_ptr()


def plain_name(name):
    """The name that a weight has in the model without adapters."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def _adapted_weights(model, wanted=None):
    """(plain name, tuner layer) of each weight that has an adapter."""
    from peft.tuners.lora import layer as kinds

    for path, layer in model.named_modules():
        if isinstance(layer, kinds.ParamWrapper):
            yield f"{plain_name(path)}.{layer.parameter_name}", layer
        elif isinstance(layer, (kinds.Linear, kinds.Embedding, kinds._ConvNd)) or is_4bit(layer):
            yield f"{plain_name(path)}.weight", layer
        elif isinstance(layer, kinds.LoraLayer):
            remedy = f"{path} becomes a {type(layer).__name__} of peft, whose adapter cannot be merged here"
            raise SettingError("lora_target_modules", wanted, remedy)


def is_4bit(layer):
    """Whether this is an adapted linear layer whose own weights are in 4 bits."""
    base = getattr(layer, "base_layer", None)
    return isinstance(base, nn.Linear) and in_4_bits(base.weight)


def merged_weight(value, layer):
    return dense(value).float() + layer.get_delta_weight("default").float()


def merged_parameters(model):
    """(name, parameter, value) of each weight of the plain model; its value has the adapters added.

    In no fixed order: peft takes a wrapped weight out of its module and puts it back in each forward.
    """
    adapted = dict(_adapted_weights(model)) if hasattr(model, "peft_config") else {}
    for name, parameter in model.named_parameters():
        plain = plain_name(name)
        if ".lora_" in name:
            continue
        value = merged_weight(parameter, adapted[plain]) if plain in adapted else dense(parameter)
        yield plain, parameter, value


@torch.no_grad()
def merged_state(model, dtype, keep=True):
    """The state dict of the plain model, on the CPU in `dtype`: adapters merged, shards put together.

    A tied weight is one tensor with two names. Every process must call it where weights are sharded; those
    that do not `keep` it get None. One tensor at a time goes through the device.
    """
    made = {}
    for _, parameter, value in merged_parameters(model):
        value = whole(value)
        made[id(parameter)] = value.to(dtype).cpu() if keep else None
    if not keep:
        return None
    state = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if ".lora_" not in name:
            state[plain_name(name)] = made[id(parameter)]
    buffers = dict(model.named_buffers())
    for name, value in model.state_dict().items():  # less what is not saved, and the scales of 4-bit weights
        plain = plain_name(name)
        if name in buffers and ".lora_" not in name and plain not in state:
            state[plain] = value.to(dtype).cpu() if value.is_floating_point() else value.cpu()
    return state


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

    before, targets = every_257th(), dict(copy.named_parameters())
    for name, _, source in merged_parameters(policy):
        targets.pop(name).copy_(whole(source.detach()))
    assert not targets, f"the policy lacks {min(targets)}"
    return (every_257th() != before).float().mean()


def fingerprint(model):
    """A hash of a thousand or two values of each weight: it tells models saved in the same folder apart."""
    digest = hashlib.sha256()
    for weight in model.parameters():
        values = weight.detach().flatten()[:: max(1, weight.numel() // 1000)]
        digest.update(values.float().cpu().numpy().tobytes())
    return digest.hexdigest()

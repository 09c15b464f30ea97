"""Any causal model that transformers loads: its body, its head, and decoding by its own forward."""

import inspect

import torch
import torch.nn.functional as F
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from decoding.rollout import pad_left, pad_right, to_device
from decoding.tokens import IMPOSSIBLE, whole_blocks
from errors import SettingError

FAMILIES = ("llama", "qwen2", "qwen3")


def model_body(model):
    """The part of a causal model before its head."""
    # Llama-4's text model says that its body is called language_model
    return model.model if model.base_model is model else model.base_model


def vocab_logits(model, hidden, tables=None):
    """Float32 logits over the tokenizer's real ids: hidden (..., E) -> (..., V).

    Over the whole head without `tables`. Ids past the tokenizer do not exist, in sampling and in scoring
    alike (NeMo-RL#237).
    """
    num_real, missing = (None, None) if tables is None else (tables.num_real, tables.missing)
    return real_logits(head_output(model, hidden), softcap(model), num_real, missing)


def head_output(model, hidden):
    """What the head gives (..., W), times the constant by which some families scale it."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    if hidden.dtype == torch.float32:  # as Mamba's is in a model of any dtype
        hidden = hidden.to(head.weight.dtype)
    raw = head(hidden)
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale = scale * (getattr(config, "lm_head_multiplier", None) or 1.0)  # Falcon-H1
    scale = scale / (getattr(config, "logits_scaling", None) or 1.0)  # Granite
    return raw if scale == 1 else raw * scale


def softcap(model):
    config = model.config.get_text_config()
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # Gemma's, xLSTM's
    return next((cap for name in names if (cap := getattr(config, name, None))), None)


def real_logits(logits, cap, num_real=None, missing=None):
    """What a head gives (..., W) -> float32 (..., num_real), as `vocab_logits` has it."""
    logits = logits[..., :num_real].float()
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    return logits if missing is None else logits.masked_fill(missing, IMPOSSIBLE)


def far_apart(ours, theirs):
    """Whether two tensors of logits (..., V) differ by more than rounding."""
    # on an H200: up to 1e-5 in float32 and 0.05 in bf16 for right paths, above 0.3 for wrong ones; fp16
    # rounds finer, but a token that goes to another expert moves as much
    tolerance = 1e-4 if theirs.dtype == torch.float32 else 0.25
    ours, theirs = (logits.float() - logits.float().mean(-1, keepdim=True) for logits in (ours, theirs))
    return not bool((ours - theirs).norm() <= tolerance * theirs.norm() + 1e-6)  # True where NaN


def check_finite(logits, dtype, name):
    """Refuse a model that has such logits when it computes in this dtype."""
    if logits.isfinite().all():
        return
    what = "its weights are damaged"
    if dtype == torch.float16:
        what = "fp16 holds no number above 65504: say --precision bf16"
    raise SettingError("model", name, f"gives logits that are not finite: {what}")


@torch.no_grad()
def check_head(model, name):
    """Refuse a model whose logits are not those of `vocab_logits`: some families scale them."""
    ids = torch.arange(4, device=model.device).view(1, 4)
    ours = vocab_logits(model, model_body(model)(input_ids=ids, use_cache=False).last_hidden_state)
    theirs = model(input_ids=ids, use_cache=False).logits.float()
    check_finite(theirs, model.dtype, name)
    if far_apart(ours.to(model.dtype), theirs.to(model.dtype)):
        remedy = (
            f"a {model.config.model_type} model's head does more than a matrix product;"
            " add it to vocab_logits in decoding/any_model.py"
        )
        raise SettingError("model", name, remedy)


def known_family(config):
    """Whether a text model's config is of a known family and each of its layers sees everything before it."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return config.model_type in FAMILIES and kinds == {"full_attention"}


def own_cache(config):
    """An empty cache as the model's config asks for it.

    A plain one, in which sliding layers keep all keys, where every layer is attention; layers with states of
    another kind (convolutions, state spaces) need their own.
    """
    cache = DynamicCache(config=config)
    is_attention = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    return DynamicCache() if is_attention else cache


class PlainBackbone:
    """Any model, by its own forward and the growing cache that its config asks for.

    Prompts are padded on the left, and all rows are at the same step. No prompt can be admitted while others
    go on.
    """

    refills, logit_dtype = False, torch.float32

    def __init__(self, model):
        self.model, self.embed = model, model.get_input_embeddings()
        self.width = whole_blocks(len(self.embed.weight))
        self.names = inspect.signature(model_body(model).forward).parameters
        known = ("cache", "past_key_values", "cache_params")
        self.cache_name = next((name for name in known if name in self.names), None)

    def reclaim_weights(self):
        pass

    def forget(self, limit):
        pass  # a prefill begins a cache of its own

    def reserve(self, rows, slots, prompt, length):
        self.length = length

    def grow(self, longest):
        pass  # the cache grows by itself

    def bytes_to_come(self):
        return 0  # nothing is known of a cache of the model's own

    def prefill(self, prompts, slots, logits, rows, repeat):
        """Each prompt once, then its cache for every path."""
        ids, mask = (to_device(x, self.model.device) for x in pad_left(prompts, 0))
        self.cache, self.steps = own_cache(self.model.config), ids.shape[1]
        made = self._forward(self.embed(ids), mask, (mask.long().cumsum(-1) - 1).clamp(min=0))
        self.cache.reorder_cache(torch.arange(len(ids), device=ids.device).repeat_interleave(repeat))
        self.attention = F.pad(mask, (0, self.length), value=True).repeat_interleave(repeat, 0)
        # states know nothing of padding, and their layers would take the mask for that of the new token
        self.has_keys = any(isinstance(layer, DynamicLayer) for layer in self.cache.layers)
        logits[rows, : made.shape[1]] = made.repeat_interleave(repeat, 0)

    def decode(self, x, rows, row_of_path):
        """One step of n rows: inputs (n, E) -> rows.logits (n, W), written in place."""
        self.steps += 1
        positions = (rows.prompt_len + rows.t - 1)[:, None]
        attention = self.attention[:, : self.steps] if self.has_keys else None
        made = self._forward(x[:, None], attention, positions)
        rows.logits[:, : made.shape[1]] = made

    def _forward(self, embeds, attention, positions):
        inputs = {"attention_mask": attention, "position_ids": positions, "use_cache": True}
        inputs = {name: value for name, value in inputs.items() if name in self.names}
        out = model_body(self.model)(inputs_embeds=embeds, **inputs, **{self.cache_name: self.cache})
        return vocab_logits(self.model, out.last_hidden_state[:, -1])

    def select_rows(self, order, longest):
        self.cache.reorder_cache(order)
        self.attention = self.attention[order]


class UncachedBackbone(PlainBackbone):
    """Any model, without a cache: each step reads its rows from their first token, as the update does.

    For models whose own cache does not give what an uncached forward gives on padded prompts.
    """

    more = 512  # tokens that the inputs grow by

    def prefill(self, prompts, slots, logits, rows, repeat):
        ids, mask = (to_device(x, self.model.device) for x in pad_right(prompts, 0))
        embeds = self.embed(ids)
        made = self._forward(embeds, mask.sum(-1) - 1)
        self.inputs = embeds.repeat_interleave(repeat, 0)  # (n, tokens, E)
        logits[rows, : made.shape[1]] = made.repeat_interleave(repeat, 0)

    def decode(self, x, rows, row_of_path):
        last = rows.prompt_len + rows.t - 1
        longest = int(last.max()) + 1  # device sync
        if longest > self.inputs.shape[1]:
            self.inputs = F.pad(self.inputs, (0, 0, 0, self.more))
        self.inputs[torch.arange(len(x), device=x.device), last] = x
        made = self._forward(self.inputs[:, :longest], last)
        rows.logits[:, : made.shape[1]] = made

    def _forward(self, embeds, last):
        """Logits after token `last` (n,) of each row; what follows it does not reach it."""
        states = model_body(self.model)(inputs_embeds=embeds, use_cache=False).last_hidden_state
        return vocab_logits(self.model, states[torch.arange(len(last), device=last.device), last])

    def select_rows(self, order, longest):
        self.inputs = self.inputs[order]

"""Any causal model that transformers loads: its body, its head, and decoding by its own forward."""

import inspect

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from decoding.rollout import pad_left, to_device
from decoding.tokens import IMPOSSIBLE, whole_blocks
from errors import SettingError

FAMILIES = ("llama", "qwen2", "qwen3")


def model_body(model):
    """The part of a causal model before its head."""
    return model.base_model


def vocab_logits(model, hidden, tables=None):
    """Float32 logits over the tokenizer's real ids: hidden (..., E) -> (..., V).

    Over the whole head without `tables`. Ids past the tokenizer do not exist, in sampling and in scoring
    alike (NeMo-RL#237).
    """
    num_real, missing = (None, None) if tables is None else (tables.num_real, tables.missing)
    return real_logits(model.get_output_embeddings()(hidden), softcap(model), num_real, missing)


def softcap(model):
    return getattr(model.config.get_text_config(), "final_logit_softcapping", None) or None


def real_logits(logits, cap, num_real=None, missing=None):
    """What a head gives (..., W) -> float32 (..., num_real), as `vocab_logits` has it."""
    logits = logits[..., :num_real].float()
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    return logits if missing is None else logits.masked_fill(missing, IMPOSSIBLE)


@torch.no_grad()
def check_head(model, name):
    """Refuse a model whose logits are not those of `vocab_logits`: some families scale them."""
    ids = torch.arange(4, device=model.device).view(1, 4)
    ours = vocab_logits(model, model_body(model)(input_ids=ids, use_cache=False).last_hidden_state)
    theirs = model(input_ids=ids, use_cache=False).logits.float()
    if not theirs.isfinite().all():
        raise SettingError("model", name, "gives logits that are not finite: its weights are damaged")
    if not torch.allclose(ours, theirs, atol=1e-2, rtol=1e-2):
        remedy = (
            f"a {model.config.model_type} model's head does more than a matrix product;"
            " add it to vocab_logits in decoding/any_model.py"
        )
        raise SettingError("model", name, remedy)


def known_family(config):
    """Whether a text model's config is of a known family and each of its layers sees everything before it."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return config.model_type in FAMILIES and kinds == {"full_attention"}


def attend_without_mask(model):
    """Let a model of a known family, in place, attend without a mask: its rows are not padded on the left.

    To find out by itself transformers compares the positions of each forward, and the host waits for the
    answer before it can launch the next kernel.
    """
    if known_family(model.config.get_text_config()) and model.config._attn_implementation == "sdpa":
        # transformers makes no mask for an attention that it does not know by name
        AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)
        model.set_attn_implementation("sdpa_without_mask")


class PlainBackbone:
    """Any model, by its own forward and a growing cache.

    Prompts are padded on the left, and all rows are at the same step. No prompt can be admitted while others
    go on. A DynamicCache without a config: Gemma-3's sliding layers keep all keys.
    """

    refills, logit_dtype = False, torch.float32

    def __init__(self, model):
        self.model, self.embed = model, model.get_input_embeddings()
        self.width = whole_blocks(len(self.embed.weight))
        names = inspect.signature(model_body(model).forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"

    def reclaim_weights(self):
        pass

    def forget(self):
        pass  # a prefill begins a cache of its own

    def reserve(self, rows, slots, prompt, length):
        self.length = length

    def prefill(self, prompts, slots, logits, rows, repeat):
        """Each prompt once, then its cache for every path."""
        ids, mask = (to_device(x, self.model.device) for x in pad_left(prompts, 0))
        self.cache, self.steps = DynamicCache(), ids.shape[1]
        made = self._forward(self.embed(ids), mask, (mask.long().cumsum(-1) - 1).clamp(min=0))
        self.cache.batch_repeat_interleave(repeat)
        self.attention = F.pad(mask, (0, self.length), value=True).repeat_interleave(repeat, 0)
        logits[rows, : made.shape[1]] = made.repeat_interleave(repeat, 0)

    def decode(self, x, rows, row_of_path):
        """One step of n rows: inputs (n, E) -> rows.logits (n, W), written in place."""
        self.steps += 1
        positions = (rows.prompt_len + rows.t - 1)[:, None]
        made = self._forward(x[:, None], self.attention[:, : self.steps], positions)
        rows.logits[:, : made.shape[1]] = made

    def _forward(self, embeds, attention, positions):
        inputs = dict(inputs_embeds=embeds, attention_mask=attention, position_ids=positions)
        out = model_body(self.model)(**inputs, use_cache=True, **{self.cache_name: self.cache})
        return vocab_logits(self.model, out.last_hidden_state[:, -1])

    def select_rows(self, order, longest):
        self.cache.batch_select_indices(order)
        self.attention = self.attention[order]

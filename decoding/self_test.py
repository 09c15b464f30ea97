"""What a model must show when it is loaded: our paths give what one uncached forward on its ids gives.

A handful of tokens each. L tokens of a row, V ids, E embedding width.
"""

from contextlib import contextmanager

import torch
import torch.nn.functional as F

from decoding.any_model import check_finite, check_head, far_apart, model_body, vocab_logits
from decoding.rollout import Rollout, pad_right, to_device
from errors import SettingError, one_line
from m3po_module import blend, cross_path_weights

PROMPTS, NEW = (9, 5), 4  # tokens of two prompts, and of what is written after each


def probe_rows(model):
    """Two rows of different ids, none of them special: PROMPTS + NEW tokens long."""
    special = set()
    for config in (model.config, model.config.get_text_config()):
        ids = [value for key, value in config.to_dict().items() if key.endswith(("_id", "_ids", "_index"))]
        special |= {id for value in ids for id in (value if isinstance(value, list) else [value])}
    usual = [id for id in range(len(model.get_input_embeddings().weight)) if id not in special]
    count = sum(PROMPTS) + 2 * NEW
    ids = [usual[i * max(1, len(usual) // count) % len(usual)] for i in range(count)]
    return ids[: PROMPTS[0] + NEW], ids[PROMPTS[0] + NEW :]


def probe_rollout(model):
    """Two groups of two paths made of the probe rows, as if the model had sampled them."""
    a, b = ([row[:n], row[n:]] for row, n in zip(probe_rows(model), PROMPTS, strict=True))
    ids = torch.tensor([a[1], b[1], b[1], a[1]], device=model.device)
    blank, all_of_them = torch.zeros(ids.shape, device=model.device), torch.ones_like(ids, dtype=torch.bool)
    return Rollout([a[0], b[0]], ids, all_of_them, blank, all_of_them[:, 0], blank.bool(), 2, 1.0)


def does_what_its_kernel_does(interaction):
    """Whether m3po_module.py, which somebody may have changed alone, is what decoding/kernels.py computes.

    The kernel's formulas by the letter, on a made-up group of 12 paths of which 3 do not think.
    """
    generator, G = torch.Generator().manual_seed(0), 12
    features, embeds = torch.rand(2, 1, G, 16, generator=generator)
    thinking, itself = torch.arange(G)[None] % 4 > 0, torch.eye(G, dtype=torch.bool)
    allowed = thinking[:, :, None] & thinking[:, None, :] & ~itself
    cosine = F.cosine_similarity(features[:, :, None], features[:, None], dim=-1)
    weights = (cosine / interaction.temperature).masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
    share = interaction.lambda_blend * thinking[..., None]
    inputs = (1 - share) * embeds + share * (weights @ embeds)
    ours = cross_path_weights(features, thinking, interaction.temperature)
    made = blend(embeds, ours, interaction.lambda_blend)
    return torch.allclose(ours, weights, atol=1e-3) and torch.allclose(made, inputs, atol=1e-3)


@torch.no_grad()
def uncached_logits(model):
    """The model's own logits (L, V) of each probe row, by one forward on its ids, in the model's dtype."""
    rows = [torch.tensor([row], device=model.device) for row in probe_rows(model)]
    return [model(input_ids=row, use_cache=False).logits[0].to(model.dtype) for row in rows]


@contextmanager
def one_line_of(name, what):
    """Whatever a model's own code raises becomes one line; nothing random is drawn from the run's draws."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    except (SettingError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model's code, and that of a hub's model, may raise anything
        remedy = f"{what} ({type(error).__name__}: {one_line(error)}): take a model of another family"
        raise SettingError("model", name, remedy) from error


def scored(model, dtype=None):
    """Logits (L, V) of each probe row from its embeddings, padded at the right, as the update reads it.

    A third row of blended embeddings, as M3PO makes them, must only be read. dtype: of the embeddings, the
    model's own by default.
    """
    rows = probe_rows(model)
    ids, _ = pad_right(rows, 0)
    embeds = model.get_input_embeddings()(to_device(ids, model.device))
    embeds = embeds if dtype is None else embeds.to(dtype)
    embeds = torch.cat([embeds, embeds.mean(0, keepdim=True)])
    states = model_body(model)(inputs_embeds=embeds, use_cache=False).last_hidden_state
    return [vocab_logits(model, states[i, : len(row)]) for i, row in enumerate(rows)]


@torch.no_grad()
def check_model(model, name):
    """Refuse a model whose embeddings, heads or padded rows do not give what its ids give."""
    kind, text_config = f"a {model.config.model_type} model", model.config.get_text_config()
    if getattr(text_config, "hidden_size_per_layer_input", 0):
        remedy = (
            f"{kind} reads ids beside their embeddings (per-layer embeddings), which are all that we give"
        )
        raise SettingError("model", name, f"{remedy}: take a model of another family")
    versions = [parameter._version for parameter in model.parameters()]
    with one_line_of(name, f"{kind} cannot be run on ids and on their embeddings alone"):
        check_head(model, name)
        theirs, ours = uncached_logits(model), scored(model)
        for logits in theirs:
            check_finite(logits, model.dtype, name)
        if any(map(far_apart, ours, theirs)):
            embeds = [
                model.get_input_embeddings()(torch.tensor([row], device=model.device))
                for row in probe_rows(model)
            ]
            states = [model_body(model)(inputs_embeds=x, use_cache=False).last_hidden_state for x in embeds]
            alone = [vocab_logits(model, x[0]) for x in states]
            what = "gives other logits for ids than for their embeddings"
            if not any(map(far_apart, alone, theirs)):
                what = "lets what follows a token change its logits: it is not causal"
            raise SettingError("model", name, f"{kind} {what}: take a model of another family")
    if versions != [parameter._version for parameter in model.parameters()]:
        remedy = f"the forward of {kind} changes its own weights: take a model of another family"
        raise SettingError("model", name, remedy)


@torch.no_grad()
def check_train_mode(model, name):
    """Refuse a model in train mode that scores a row otherwise the second time, or otherwise than in eval
    mode."""
    with one_line_of(name, f"a {model.config.model_type} model cannot be run in train mode"):
        once, again = scored(model), scored(model)
        difference = max(float((a - b).abs().max()) for a, b in zip(once, again, strict=True))
        if difference > (1e-5 if model.dtype == torch.float32 else 0.05):
            what = f"is random in train mode: two scorings of one row differ by {difference:.2g}"
            raise SettingError("model", name, f"{what}: set what is random to 0 in its config.json")
        # in the model's dtype: some families have other kernels in train mode, which round otherwise
        wanted = [logits.to(model.dtype) for logits in scored(model.eval())]
        model.train()
        if any(map(far_apart, once, wanted)):
            raise SettingError("model", name, "gives other logits in train mode than in evaluation")


@torch.no_grad()
def check_autocast(model, name, dtype):
    """Refuse a model of float32 weights that passes the range of fp16, where the update computes in that."""
    if dtype == torch.float16 and model.dtype == torch.float32:
        kind = f"a {model.config.model_type} model cannot be run under autocast"
        with one_line_of(name, kind), torch.autocast(model.device.type, dtype):
            for logits in scored(model, dtype):
                check_finite(logits, dtype, name)

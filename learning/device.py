"""Which device computes: CUDA, a Mac's GPU (mps) where it passes a self-test, else the CPU."""

import functools

import torch

from decoding.decoder import GroupDecoder
from decoding.engine import say
from decoding.rollout import Interaction, Sampling, rollout_uniforms
from errors import one_line
from learning.models import load_model, load_tokenizer

CLOSE = 1e-3  # log-probs and gradients of the tiny model on two devices, in float32


@functools.cache
def choose_device():
    """The torch.device of this process; one line says why it is not the mps that there is."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if not torch.backends.mps.is_available():
        return torch.device("cpu")
    fault = fault_of(torch.device("mps"))
    if fault is None:
        return torch.device("mps")
    say(f"mps does not pass the self-test ({fault}): the CPU computes")
    return torch.device("cpu")


def cpu_threads(config, device):
    """Threads that torch gets on the CPU, None for its own choice.

    One beside a GPU: there the CPU has only short work left, and to wake threads takes longer than that.
    """
    return config.cpu_threads or (1 if device.type == "cuda" else None)


def fault_of(device):
    """What a device does otherwise than the CPU, in a few words; None where it passes.

    The tiny model samples a group whose paths interact, and its gradient is taken, on both.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            ours, theirs = _tried(torch.device("cpu")), _tried(device)
    except Exception as error:  # an operation that the device lacks may raise anything
        return f"{type(error).__name__}: {one_line(error, 100)}"
    for name, value in ours.items():
        if value.shape != theirs[name].shape or not torch.allclose(value, theirs[name], atol=CLOSE):
            return f"other {name} than on the CPU"
    return None


def _tried(device):
    """{name: tensor} of what the tiny model gives on a device."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer("tiny")
    model = load_model("tiny", tokenizer, torch.float32, torch.device("cpu")).to(device)
    decoder = GroupDecoder(model.eval(), tokenizer, "</reasoning>", Interaction(0.1), compiled=False)
    ids = tokenizer("Ann has 12 pens and gets 5 more.")["input_ids"]
    rollout = decoder.rollout([ids], Sampling(8, 4, 1.0), rollout_uniforms(0, 0, 0, 4, 8))
    read = torch.tensor([ids], device=device)
    model(input_ids=read, labels=read).loss.backward()
    found = {"tokens": rollout.ids, "log-probs": rollout.logp, "weights of M3PO": rollout.mix}
    found["gradients"] = model.get_input_embeddings().weight.grad
    return {name: value.detach().cpu().float() for name, value in found.items()}

"""Which device computes: CUDA, a Mac's GPU (mps) where it passes a self-test, else the CPU."""

import functools
import os
import shutil
from pathlib import Path

import torch

from decoding.decoder import GroupDecoder
from decoding.engine import say
from decoding.rollout import Interaction, Sampling, rollout_uniforms
from errors import one_line
from learning.models import load_model, load_tokenizer

CLOSE = 1e-3  # log-probs and gradients of the tiny model on two devices, in float32


@functools.cache
def choose_device():
    """The torch.device of this process; one line says why it is not the GPU that there is."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if not torch.backends.mps.is_available():
        if has_nvidia_card():
            say(f"note: torch cannot use the NVIDIA card that is here ({why_no_cuda()}): the CPU computes")
        return torch.device("cpu")
    fault = fault_of(torch.device("mps"))
    if fault is None:
        return torch.device("mps")
    say(f"mps does not pass the self-test ({fault}): the CPU computes")
    return torch.device("cpu")


def has_nvidia_card():
    """Whether there is a card that nobody has hidden, whatever torch thinks of it."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def why_no_cuda():
    """Why torch finds no CUDA device, in a few words."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install one that is built with it"
    try:
        torch.cuda.init()
    except Exception as error:  # a driver that is too old, say
        return one_line(error, 150)
    return "it finds no device"


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

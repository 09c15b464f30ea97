"""What a process has loaded, for its next run: tokenizer, problems, models and decoder.

Loading checks a model in several ways, and a decoder compiles and captures its steps, which takes far longer
than copying the weights that the next run starts from into the models that are there.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file

from decoding.decoder import GroupDecoder
from learning.memory import free_memory
from learning.models import load_models, load_policy, load_tokenizer, refresh
from problems.prompts import prepare_problems
from reporting.files import MODEL_FILES, WEIGHT_FILES, sha256_of
from running.settings import TrainConfig, names_with


class Loaded:
    """Each part is used again where all that it depends on is the same, and loaded anew elsewhere."""

    def __init__(self):
        self.tokenizer = self.problems = self.models = self.decoder = None
        self.keys = {}  # {part: what it depends on}

    def read(self, config, start, problems=None):
        """The tokenizer of a start model, and what `prepare_problems` gives with it."""
        settings, files = _settings(config), _files(start)
        if not self._is_there("tokenizer", (settings, files)):
            self.tokenizer = load_tokenizer(start, config.trust_remote_code)
        self.keys["tokenizer"] = settings, files
        key = (settings, config.seed, files) if problems is None else None
        if not self._is_there("problems", key):
            self.problems = prepare_problems(config, self.tokenizer, problems=problems)
        self.keys["problems"] = key
        return self.tokenizer, self.problems

    def load(self, config, start, tokenizer, device):
        """Policy, sampler and reference as `load_models` gives them."""
        key = _settings(config), config.beta > 0, _files(start)
        free_memory()  # an earlier run's moments may be in reference cycles
        if not (self._is_there("models", key) and self._begin_again(config, start, tokenizer, device)):
            self.models = self.decoder = None
            free_memory()
            self.models = load_models(config, start, tokenizer, device)
        self.keys["models"] = key
        return self.models

    def _begin_again(self, config, start, tokenizer, device):
        """Give the models the weights of a start model; False where that cannot be done in place."""
        policy, *copies = self.models
        self.models = None
        if config.lora_r:  # its adapters are drawn anew
            policy = None
            free_memory()  # for two of them there may be no room
            policy = load_policy(config, start, tokenizer, device)
        elif not overwrite(policy, start):
            return False
        keep_activations(policy)
        for copy in filter(None, copies):
            if not config.load_in_4bit:
                refresh(copy, policy)
            elif not overwrite(copy, start):  # which has them as they were before the policy's were rounded
                return False
        self.models = (policy, *copies)
        return True

    def decode_with(self, config, sampler, tokenizer):
        """The decoder of a run, whose path is chosen."""
        is_there = self.decoder is not None and self.decoder.model is sampler
        if is_there and self.decoder.tokenizer is tokenizer:
            self.decoder.interact_as(config.interaction)
            return self.decoder
        self.decoder, compiled = None, config.torch_compile
        decoder = GroupDecoder(sampler, tokenizer, config.think_end, config.interaction, compiled=compiled)
        decoder.choose_path()  # fast, plain or uncached: the first that gives what uncached forwards do
        self.decoder = decoder
        return decoder

    def _is_there(self, part, key):
        """Whether a part is there, of this key; a key without files, or none, is never the same."""
        return self.keys.pop(part, None) == key and key is not None and key[-1] is not None


def _settings(config):
    """The settings that tokenizer, problems, models and decoder depend on: those that a warm start inherits.

    Without the seed, and with the files of a start model in the place of its name.
    """
    names = [name for name in names_with(TrainConfig, "inherited") if name not in ("model", "seed")]
    return tuple(repr(getattr(config, name)) for name in (*names, "eval_every"))


def _files(start):
    """Digests of a model's files, its weights left out; None for what is no folder."""
    if not Path(start).is_dir():
        return None
    paths = {path for pattern in MODEL_FILES for path in Path(start).glob(pattern)}
    paths -= {path for pattern in WEIGHT_FILES for path in Path(start).glob(pattern)}
    return tuple((path.name, sha256_of(path)) for path in sorted(paths))


@torch.no_grad()
def overwrite(policy, folder):
    """Give a policy the weights that a folder holds, as if it had been loaded from there just now.

    Returns False, for a model that must be loaded, where the folder has them under other names or in other
    shapes, or has other buffers, or weights that are not finite and would be refused.
    """
    saved = {}
    for file in sorted(Path(folder).glob("model*.safetensors")):
        saved |= load_file(file)
    parameters, buffers = dict(policy.named_parameters()), dict(policy.named_buffers())
    if any(name not in saved or saved[name].shape != p.shape for name, p in parameters.items()):
        return False
    if not all(torch.equal(saved[n].to(buffers[n]), buffers[n]) for n in saved.keys() & buffers.keys()):
        return False
    for name, parameter in parameters.items():
        parameter.copy_(saved[name])
        parameter.grad = None
    return all(parameter.isfinite().all() for parameter in parameters.values())


def keep_activations(model):
    """Switch gradient checkpointing off, in place: memory may have been short in an earlier run only."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        disable = getattr(model, "activation_checkpointing_disable", None)
        (disable or model.gradient_checkpointing_disable)()  # its older name

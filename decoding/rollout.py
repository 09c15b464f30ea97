"""What a rollout is, how its completions are drawn, and the random numbers that they are drawn with."""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from m3po_module import check_interaction


@dataclass(frozen=True)
class Interaction:
    """How the paths of a group interact while they think; `lambda_blend` 0 is plain GRPO."""

    lambda_blend: float = 0.0
    temperature: float = 0.1
    similarity: str = "distribution"

    def __post_init__(self):
        check_interaction(self.lambda_blend, self.temperature)


PLAIN_GRPO = Interaction()


@dataclass(frozen=True)
class Sampling:
    """How many completions each prompt gets, and how their tokens are drawn.

    Temperature 0 is greedy; top_k 0 and top_p 1 keep every token.
    """

    max_new_tokens: int
    num_generations: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def greedy(self):
        return self.temperature == 0


class Completion(NamedTuple):
    ids: list  # up to and including EOS
    text: str  # without EOS, special tokens or clean-up
    ended: bool  # by EOS; False where the limit cut it off


@dataclass
class Rollout:
    """What was sampled, and all that scoring it again needs."""

    prompts: list  # B lists of ids
    ids: torch.Tensor  # (N, T) pad after a row's end
    mask: torch.Tensor  # (N, T) bool, up to and including the first EOS
    logp: torch.Tensor  # (N, T) float32 at the sampling temperature, 0 where masked
    ended: torch.Tensor  # (N,) bool, False where the limit cut the row off
    thinking: torch.Tensor  # (N, T) bool, whether the path still thinks after this token
    num_generations: int
    temperature: float
    # (B, T, G, G) float32, [b, t, i, j]: weight of path j in path i's input after token t
    mix: torch.Tensor | None = None
    lambda_blend: float = 0.0
    input_change: torch.Tensor | None = None  # (N, T) float32, |h - e| / |e|

    @property
    def lengths(self):
        return self.mask.sum(-1)  # (N,)

    @functools.cached_property
    def sizes(self):
        """Tokens of each row's prompt and completion: two lists of N; one device sync."""
        prompts = [len(prompt) for prompt in self.prompts for _ in range(self.num_generations)]
        return prompts, self.lengths.tolist()

    @functools.cached_property
    def prompt_ids(self):
        """(B, P) on the device, padded on the left."""
        return to_device(pad_left(self.prompts, 0)[0], self.ids.device)

    def completion_ids(self):
        """N lists of ids, up to and including EOS."""
        return [row[:length] for row, length in zip(self.ids.tolist(), self.sizes[1], strict=True)]

    def with_groups(self, indices, other, pad_id):
        """This rollout with its groups `indices` taken from another, in the other's order."""
        G, groups = self.num_generations, torch.tensor(indices, device=self.ids.device)
        rows = (groups[:, None] * G + torch.arange(G, device=groups.device)).flatten()
        width = max(self.ids.shape[1], other.ids.shape[1])

        def joined(name, where, pad=0):
            old, new = (_widened(getattr(r, name), width, pad) for r in (self, other))
            return old.index_copy(0, where, new)

        prompts = list(self.prompts)
        for i, prompt in zip(indices, other.prompts, strict=True):
            prompts[i] = prompt
        columns = {name: joined(name, rows) for name in ("mask", "logp", "thinking")}
        if self.mix is not None:
            columns |= {"input_change": joined("input_change", rows), "mix": joined("mix", groups)}
        ended = self.ended.index_copy(0, rows, other.ended)
        return replace(self, prompts=prompts, ids=joined("ids", rows, pad_id), ended=ended, **columns)


def _widened(tensor, width, value):
    """Dimension 1, the tokens, padded to `width`."""
    gap = width - tensor.shape[1]
    return F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, gap), value=value)


def rollout_uniforms(seed, step, retry, rows, length):
    """The draws of one rollout, (rows of all processes, length) in [0, 1), made on the CPU.

    A function of (seed, step, retry) and the length; fewer rows are the first ones of more.
    """
    generator = torch.Generator().manual_seed(
        int(np.random.SeedSequence((seed, step, retry)).generate_state(1, np.uint64)[0] >> 1)
    )
    return torch.rand(rows, length, generator=generator)


def pad_left(rows, pad_id):
    """Lists of ids -> ids (B, P) and mask (B, P) bool, padded on the left: all go on from the last column."""
    return _pad(rows, pad_id, left=True)


def pad_right(rows, pad_id):
    """Lists of ids -> ids (B, T) and mask (B, T) bool, padded on the right."""
    return _pad(rows, pad_id, left=False)


def _pad(rows, pad_id, left):
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), pad_id), torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        columns = slice(width - len(row), width) if left else slice(len(row))
        ids[i, columns] = torch.tensor(list(row), dtype=torch.long)
        mask[i, columns] = True
    return ids, mask


def to_device(values, device):
    """A list of whole numbers, or a CPU tensor, on the device, without a device sync."""
    tensor = torch.as_tensor(values, dtype=None if torch.is_tensor(values) else torch.long)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

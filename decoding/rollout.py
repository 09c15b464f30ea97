"""What a rollout is, how its completions are drawn, and the random numbers that they are drawn with."""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from decoding.names import CONTROLS, SIMILARITIES
from m3po_module import check_interaction


@dataclass(frozen=True)
class Interaction:
    """How the paths of a group interact while they think; `lambda_blend` 0 is plain GRPO.

    control: what is heard in the place of the peers, see decoding/controls.py; "none" is M3PO.
    """

    lambda_blend: float = 0.0
    temperature: float = 0.1
    similarity: str = "distribution"
    control: str = "none"

    def __post_init__(self):
        check_interaction(self.lambda_blend, self.temperature)
        for name, known in (("similarity", SIMILARITIES), ("control", CONTROLS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(known)}")

    @property
    def records_scale(self):
        """Whether what is heard is not a matter of weights over the paths alone."""
        return self.control not in ("none", "scaled_mean")


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
    # Of a control; where it records a scale, `mix` is what M3PO's own weights would have been.
    control: str = "none"
    scale: torch.Tensor | None = None  # (N, T) float32, how far inputs are moved in the control's direction
    keys: torch.Tensor | None = None  # (N,) of the rows, from which their noise follows
    # (N, T) what is heard in the place of each row's tokens, or (N, T, K) what it hears of its own
    heard_ids: torch.Tensor | None = None
    heard_probs: torch.Tensor | None = None  # (N, T, K) float32

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

    def groups(self, indices):
        """The rollout of some of its groups, in the order of `indices`."""
        G, device = self.num_generations, self.ids.device
        where = torch.tensor(indices, dtype=torch.long, device=device)
        rows = (where[:, None] * G + torch.arange(G, device=device)).flatten()
        of_rows = {name: getattr(self, name)[rows] for name in OF_ROWS if getattr(self, name) is not None}
        mix = None if self.mix is None else self.mix[where]
        return replace(self, prompts=[self.prompts[i] for i in indices], mix=mix, **of_rows)

    def to(self, device):
        tensors = {name: getattr(self, name) for name in (*OF_ROWS, "mix")}
        return replace(self, **{name: x.to(device) for name, x in tensors.items() if x is not None})

    def with_groups(self, indices, other, pad_id):
        """This rollout with its groups `indices` taken from another, in the other's order."""
        order = list(range(len(self.prompts)))
        for n, i in enumerate(indices):
            order[i] = len(self.prompts) + n
        return joined([self, other], pad_id).groups(order)


# tensors (N, ...) of a Rollout
OF_ROWS = ("ids", "mask", "logp", "ended", "thinking", "input_change", "scale", "keys", "heard_ids")
OF_ROWS += ("heard_probs",)


def joined(rollouts, pad_id):
    """One Rollout of the groups of several, in their order."""
    width = max(rollout.ids.shape[1] for rollout in rollouts)

    def column(name):
        values = [getattr(rollout, name) for rollout in rollouts]
        if values[0] is None or values[0].dim() == 1:
            return None if values[0] is None else torch.cat(values)
        return torch.cat([widened(value, width, pad_id if name == "ids" else 0) for value in values])

    prompts = [prompt for rollout in rollouts for prompt in rollout.prompts]
    return replace(rollouts[0], prompts=prompts, **{name: column(name) for name in (*OF_ROWS, "mix")})


def widened(tensor, width, value):
    """Dimension 1, the tokens, padded to `width`."""
    gap = width - tensor.shape[1]
    return F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, gap), value=value)


def rollout_uniforms(seed, step, retry, rows, length):
    """The draws of one rollout, (rows of all processes, length) in [0, 1), made on the CPU.

    A function of (seed, step, retry) and the length; fewer rows are the first ones of more.
    """
    generator = torch.Generator().manual_seed(
        int(np.random.SeedSequence((seed, step, retry)).generate_state(1, np.uint64)[0]) >> 1
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
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

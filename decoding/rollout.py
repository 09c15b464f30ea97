"""What a rollout is, and the random numbers that it is drawn with."""

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Interaction:
    """How the paths of a group interact while they think; `lambda_blend` 0 is plain GRPO."""

    lambda_blend: float = 0.0
    temperature: float = 0.1
    similarity: str = "distribution"


@dataclass
class Rollout:
    """What was sampled, and all that scoring it again needs."""

    prompt_ids: torch.Tensor  # (B, P) left-padded
    prompt_mask: torch.Tensor  # (B, P) bool
    ids: torch.Tensor  # (N, T) pad after a row's end
    mask: torch.Tensor  # (N, T) bool, up to and including the first EOS
    logp: torch.Tensor  # (N, T) float32 at the sampling temperature, 0 where masked
    ended: torch.Tensor  # (N,) bool, False where the limit cut the row off
    thinking: torch.Tensor  # (N, T) bool, whether the path still thinks after this token
    num_generations: int
    temperature: float
    mix: torch.Tensor | None = None  # (B, T, G, G) float32, who listened to whom in the input of token t
    lambda_blend: float = 0.0
    input_change: torch.Tensor | None = None  # (N, T) float32, |h - e| / |e|

    @property
    def lengths(self):
        return self.mask.sum(-1)  # (N,)

    @functools.cached_property
    def sizes(self):
        """Tokens of each row's prompt and of each row's completion: two lists of N; the host asks the device for them once."""
        return self.prompt_mask.sum(-1).repeat_interleave(
            self.num_generations
        ).tolist(), self.lengths.tolist()

    def completions(self):
        """N pairs (ids up to and including EOS, whether EOS came)."""
        rows = [row[:length] for row, length in zip(self.ids.tolist(), self.sizes[1], strict=True)]
        return list(zip(rows, self.ended.tolist(), strict=True))

    def with_groups(self, places, other, pad_id):
        """This rollout with its groups `places` taken from another, group by group."""
        P, T = (
            max(self.prompt_ids.shape[1], other.prompt_ids.shape[1]),
            max(self.ids.shape[1], other.ids.shape[1]),
        )
        G, places = self.num_generations, torch.tensor(places, device=self.ids.device)
        rows = (places[:, None] * G + torch.arange(G, device=places.device)).flatten()
        joined = {"ended": self.ended.index_copy(0, rows, other.ended)}
        for names, width, where in (
            (("prompt_ids", "prompt_mask"), P, places),
            (("ids", "mask", "logp", "thinking", "input_change"), T, rows),
        ):
            for name in names if self.mix is not None else [n for n in names if n != "input_change"]:
                old, new = (
                    _widened(getattr(r, name), width, where is places, pad_id if name.endswith("ids") else 0)
                    for r in (self, other)
                )
                joined[name] = old.index_copy(0, where, new)
        if self.mix is not None:
            old, new = (F.pad(r.mix, (0, 0, 0, 0, 0, T - r.mix.shape[1])) for r in (self, other))
            joined["mix"] = old.index_copy(0, places, new)
        return replace(self, **joined)


def _widened(tensor, width, on_the_left, value):
    gap = width - tensor.shape[1]
    return F.pad(tensor, (gap, 0) if on_the_left else (0, gap), value=value)


def rollout_uniforms(seed, step, retry, rows, length):
    """The draws of one rollout, (rows of all processes, length) in [0, 1): a function of (seed, step, retry) alone, on the CPU (I10)."""
    generator = torch.Generator().manual_seed(
        int(np.random.SeedSequence((seed, step, retry)).generate_state(1, np.uint64)[0] >> 1)
    )
    return torch.rand(rows, length, generator=generator)


def pad_left(rows, pad_id):
    """Lists of ids -> ids (B, P) and mask (B, P) bool, padding on the left: prompts, so that all go on from the last column."""
    return _pad(rows, pad_id, left=True)


def pad_right(rows, pad_id):
    """Lists of ids -> ids (B, T) and mask (B, T) bool, padding on the right: completions."""
    return _pad(rows, pad_id, left=False)


def _pad(rows, pad_id, left):
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), pad_id), torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(len(row))
        ids[i, place], mask[i, place] = torch.tensor(list(row), dtype=torch.long), True
    return ids, mask

"""Controls of M3PO: what a path hears is replaced by something else, at the size of change that M3PO makes.

B groups of G paths, E embedding width. e_i is the embedding of the token that path i sampled, A its weights
in M3PO and c_i = sum_j A_ij e_j what it hears there. A control moves its next input in another direction d_i,
by as much:

    h_i = e_i + lambda s_i d_i        s_i = |c_i - e_i| / |d_i|

    scaled_mean   d_i = mean_j e_j - e_i over the other thinking paths j
    noise         d_i is Gaussian noise, scaled to length 1: s_i is the size itself
    strangers     d_i = sum_j A_ij f_j - e_i, f_j the embedding of a stranger's token in path j's place
    own           d_i = sum_k q_k f_k - e_i over the 16 likeliest tokens of the path's own distribution, of
                  probabilities q that sum to 1

`scaled_mean` is a matter of weights alone, and needs no s_i beside them. With the others the decoder records
s_i, so that policy and reference find d_i with their own embeddings and move by s_i of it.
"""

from dataclasses import dataclass

import torch

from decoding.tokens import IMPOSSIBLE, LOGIT_BLOCK
from m3po_module import weights_from_similarity

AT_ONCE = 4096  # directions that are made together: integers of 8 bytes, E of each
LIKELIEST = 16  # tokens of a path's own distribution that it hears in the control `own`
ROUNDING = 1e-5  # a change this short, beside the length of its embedding, is none but for rounding


def change_towards(heard, weights, embeds):
    """sum_j A_ij f_j - e_i for a row of weights that sums to 1, 0 for a row of zeros.

    heard f and embeds e (..., G, E), weights A (..., G, G) -> (..., G, E) float32.
    """
    return weights @ heard.float() - weights.sum(-1, keepdim=True) * embeds.float()


def scale_of(direction, weights, embeds):
    """s: by what each direction (..., G, E) is multiplied to be as long as M3PO's change: (..., G) float32.

    0 where the direction is no longer than rounding, and where nobody is heard.
    """
    size = change_towards(embeds, weights, embeds).norm(dim=-1)
    length, least = direction.norm(dim=-1), ROUNDING * embeds.float().norm(dim=-1)
    return torch.where(length > least, size / length.clamp(min=1e-30), 0.0)


def scaled_mean_weights(embeds, weights, thinking):
    """Weights of `scaled_mean` (B, G, G): s / peers on each thinking peer, and 1 - s on the path itself.

    embeds (B, G, E), weights of M3PO (B, G, G), thinking (B, G). s may be above 1. A row of zeros stays.
    """
    mean = weights_from_similarity(torch.zeros_like(weights), thinking, 1.0)
    scale = scale_of(change_towards(embeds, mean, embeds), weights, embeds)[..., None]
    itself = torch.eye(weights.shape[-1], device=weights.device)
    return torch.where(mean.sum(-1, keepdim=True) > 0, scale * mean + (1 - scale) * itself, 0.0)


def controlled(control, embeds, heard, weights, scale, lambda_blend):
    """The next inputs h (..., G, E) of a control that records its scale (..., G), and that scale.

    heard (..., G, E): the noise, the strangers' embeddings, or the mean of the path's own likeliest tokens.
    scale None: it is chosen here, by the decoder.
    Computed in float32, returned in the dtype of `embeds`. Where the scale is 0 an embedding stays as it is,
    bit for bit. Gradients reach every embedding, and neither weights nor scale.
    """
    with torch.autocast(embeds.device.type, enabled=False):
        if control == "strangers":
            direction = change_towards(heard, weights, embeds)
        else:
            direction = heard if control == "noise" else heard - embeds.float()
        if scale is None:
            scale = scale_of(direction, weights, embeds)
        return (embeds.float() + lambda_blend * scale[..., None] * direction).to(embeds.dtype), scale


def likeliest(logits, unreal):
    """The LIKELIEST tokens (n, K) of softmax(logits) and their probabilities, which are made to sum to 1.

    logits (n, W) in whole blocks; those of the ids `unreal`, which no token has, are overwritten. Of equal
    logits the lower id comes first, on every device and beside any rows. The tokens are in the K blocks with
    the largest logits: one pass over all, and nothing of their size is made.
    """
    logits.index_fill_(1, unreal, max(IMPOSSIBLE, torch.finfo(logits.dtype).min))
    blocks = logits.unflatten(1, (-1, LOGIT_BLOCK))
    _, best = _largest(blocks.amax(-1), torch.arange(blocks.shape[1], device=logits.device))
    ids = (best[..., None] * LOGIT_BLOCK + torch.arange(LOGIT_BLOCK, device=logits.device)).flatten(1)
    values, ids = _largest(logits.gather(1, ids), ids)
    return ids, torch.softmax(values, -1)


def _largest(values, ids):
    """The LIKELIEST largest of values (n, m), the one with the lower id first among equals.

    ids (m,) or (n, m), below 2**31. Returns them in float32, and their ids.
    """
    bits = values.float().contiguous().view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # whole numbers in the order of the values
    ranks = (ordered << 32) | (2**31 - 1 - ids)
    index = ranks.topk(min(LIKELIEST, values.shape[1])).indices
    return values.float().gather(1, index), ids.expand_as(values).gather(1, index)


def mean_embedding(embeds, probs):
    """sum_k q_k f_k: embeds (..., K, E), probs (..., K) -> (..., E) float32."""
    return (probs[..., None] * embeds.float()).sum(-2)


# Random numbers that depend on a row, a position and a dimension alone. Integers of 64 bits wrap around, and
# give the same on every device, in a captured graph too.


def signed(number):
    """An unsigned integer of 64 bits as torch has it."""
    return number - 2**64 if number >= 2**63 else number


# the finaliser of splitmix64, and its increment
FACTORS = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)
INCREMENT = signed(0x9E3779B97F4A7C15)
BYTES, LANES = 0x00FF00FF00FF00FF, 0x0001000100010001


def shifted(x, bits):
    """x >> bits, filled with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def hashed(x):
    """A bijection of int64 whose every bit depends on all of x."""
    x = x + INCREMENT
    x = (x ^ shifted(x, 30)) * FACTORS[0]
    x = (x ^ shifted(x, 27)) * FACTORS[1]
    return x ^ shifted(x, 31)


def row_keys(seed, step, retry, rows):
    """A key for each row of a rollout of all processes, (rows,) int64 on the CPU."""
    key = torch.zeros((), dtype=torch.long)
    for number in (seed, step, retry):
        key = hashed(key ^ number)
    return hashed(key ^ torch.arange(rows))


def normals(bits):
    """Whole numbers that are close to normally distributed, around 0: the sum of the 16 bytes of two int64,
    bits (..., 2) -> (...).
    """
    pairs = (bits & BYTES) + (shifted(bits, 8) & BYTES)
    return shifted(pairs * LANES, 48).sum(-1) - 16 * 255 // 2


def directions(keys, positions, width):
    """Gaussian noise of length 1, a function of each row's key and position: both (...) -> (..., width)
    float32, the same on every device.
    """
    counters = torch.arange(2 * width, device=keys.device).view(width, 2)

    def some(seeds):
        noise = normals(hashed(seeds[:, None, None] ^ counters)).double()  # rounded once, at the end
        return (noise / noise.square().sum(-1, keepdim=True).sqrt()).float()

    seeds = hashed(keys ^ positions)
    made = torch.cat([some(part) for part in seeds.flatten().split(AT_ONCE)])
    return made.view(*seeds.shape, width)


@dataclass
class Strangers:
    """Completions of other problems, whose tokens are heard in the place of the peers'."""

    ids: torch.Tensor  # (S, tokens), those of the reasoning first
    lengths: torch.Tensor  # (S,) how many may be heard, at least 1

    @classmethod
    def of(cls, completions, width):
        """From lists of ids, of which `width` are kept at most."""
        kept = [ids[:width] for ids in completions]
        padded = [ids + [0] * (width - len(ids)) for ids in kept]
        return cls(torch.tensor(padded), torch.tensor([len(ids) for ids in kept]))

    def tokens(self, keys, positions):
        """Ids that are heard in the place of rows with these keys at these positions: (...) -> (...).

        A row's key says which stranger stands for it. One whose reasoning is over begins anew.
        """
        which = hashed(~keys) % len(self.lengths)
        return self.ids[which, positions % self.lengths[which]]

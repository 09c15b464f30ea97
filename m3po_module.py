"""Cross-path interaction of M3PO: the paths of a group look at each other, and their inputs are blended.

Pure functions of tensors, for the decoder in plain torch (decoding/kernels.py does the same on CUDA) and for
the training forward, which blends all steps at once. B groups (one a prompt), G paths a group, F features of
a path, E embedding width. p_i is the next-token distribution of path i, e_i the embedding of the token it
sampled, h_i its next input:

    S_ij = cos(p_i, p_j)
    A_i. = softmax over the other thinking paths j of S_ij / tau
    h_i = (1 - lambda) e_i + lambda sum_j A_ij e_j

The M3PO paper writes a zero for a left-out pair *before* the softmax, where exp(0) would still give it
weight. Its stated intention is no contribution, and that is done here: such a pair has weight 0.
"""

import math

import torch


def products(features):
    """Inner products of the paths of a group in float32: (B, G, F) -> (B, G, G)."""
    return features.float() @ features.float().mT


def cosines(products):
    """Cosine similarities from inner products, both (B, G, G)."""
    inverse_norm = products.diagonal(dim1=1, dim2=2).clamp(min=1e-24).rsqrt()
    return products * inverse_norm[:, :, None] * inverse_norm[:, None, :]


def weights_from_similarity(similarity, thinking, temperature):
    """Softmax of similarities (B, G, G) over the *other thinking* paths (B, G) -> (B, G, G) float32."""
    others = ~torch.eye(thinking.shape[-1], dtype=torch.bool, device=thinking.device)
    allowed = thinking[:, None, :] & thinking[:, :, None] & others
    scores = torch.where(allowed, similarity / temperature, torch.finfo(torch.float32).min)
    # Where no pair of a row is allowed the softmax is uniform over all of them; the mask makes it 0.
    return torch.softmax(scores, dim=-1) * allowed


def check_interaction(lambda_blend, temperature):
    """ValueError for what is no blend or no softmax: temperature 0 would give NaN or nobody any weight."""
    if not 0 <= lambda_blend <= 1:
        raise ValueError(f"lambda_blend={lambda_blend}: must be between 0 and 1")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature}: must be positive and finite")


def cross_path_weights(features, thinking, temperature):
    """Weights [b, i, j] that path i gives to path j: features (B, G, F), thinking (B, G) bool -> (B, G, G).

    A row sums to 1, or to 0 where its path does not think or no other path does. The diagonal is 0.
    ValueError where the temperature is not positive.
    """
    check_interaction(0, temperature)
    assert features.shape[:2] == thinking.shape, "features (B, G, F) and thinking (B, G) must agree"
    return weights_from_similarity(cosines(products(features)), thinking, temperature)


def blend(embeds, weights, lambda_blend):
    """h = (1 - lambda) e + lambda A e: embeds (..., G, E), weights (..., G, G) -> (..., G, E).

    Computed in float32, returned in the dtype of `embeds`. A zero row of weights leaves its embedding
    unchanged, bit for bit. Gradients reach every embedding and no weight.
    """
    with torch.autocast(embeds.device.type, enabled=False):
        weights, wide = weights.detach().float(), embeds.float()
        blended = (1 - lambda_blend) * wide + lambda_blend * (weights @ wide)
        listens = weights.sum(-1, keepdim=True) > 0
        return torch.where(listens, blended.to(embeds.dtype), embeds)


def gate_measures(weights, thinking, ids, embeds):
    """How M3PO's weights choose: four tensors (..., G) of what each path hears with its token.

    weights (..., G, G), thinking (..., G) bool, ids (..., G) of the tokens, embeds (..., G, E) of them.
    Returns whether the path could choose (it thinks beside two thinking peers at least; the others count only
    there), the entropy of its weights over the largest there is, the weight on peers that said the same
    token, and the cosine between what it heard and the plain mean of its peers.
    """
    others = ~torch.eye(thinking.shape[-1], dtype=torch.bool, device=thinking.device)
    peers = (thinking[..., None] & thinking[..., None, :] & others).float()
    count, wide = peers.sum(-1), embeds.float()
    alike = wide @ wide.mT  # all that the cosine needs: of sums over paths, not of sums of embeddings
    could_choose = (count >= 2) & (weights.sum(-1) > 0)
    entropy = torch.special.entr(weights).sum(-1) / count.clamp(min=2).log()
    same = (weights * (ids[..., None] == ids[..., None, :])).sum(-1)
    heard, plain = weights @ alike, peers @ alike
    squares = (heard * weights).sum(-1).clamp(min=0) * (plain * peers).sum(-1).clamp(min=0)
    cosine = (heard * peers).sum(-1) / squares.sqrt().clamp(min=1e-8)
    return could_choose, entropy, same, cosine


def apply_cross_path_interaction(current_embeds, is_thinking, lambda_blend=0.1, temperature=0.1):
    """One group, paths compared by their embeddings: (G, E), G booleans -> (G, E)."""
    return apply_cross_path_interaction_batch(
        current_embeds, len(current_embeds), is_thinking, lambda_blend, temperature
    )


def apply_cross_path_interaction_batch(
    current_embeds, num_generations, thinking_mask=None, lambda_blend=0.1, temperature=0.1
):
    """Groups side by side, (B*G, E) in group-major order -> (B*G, E); without a mask every path thinks.

    ValueError for rows that do not make whole groups, and for a lambda or temperature that cannot be.
    """
    check_interaction(lambda_blend, temperature)
    rows, width = current_embeds.shape
    if rows % num_generations:
        raise ValueError(f"{rows} embeddings do not make whole groups of num_generations={num_generations}")
    if thinking_mask is None:
        thinking_mask = torch.ones(rows)
    thinking = torch.as_tensor(thinking_mask, dtype=torch.bool).to(current_embeds.device)
    embeds = current_embeds.view(-1, num_generations, width)
    weights = cross_path_weights(embeds, thinking.view(-1, num_generations), temperature)
    return blend(embeds, weights, lambda_blend).view(rows, width)

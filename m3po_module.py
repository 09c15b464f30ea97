"""Cross-path interaction of M3PO: the paths of a group look at each other's next-token distributions, and their inputs are blended.

Pure functions of tensors, used alike by the decoder (one step at a time) and by the training forward (all steps at once).

B groups (one a prompt), G paths a group, F features of a path, E embedding width.
    S_ij = cos(p_i, p_j)    A_i. = softmax over the other thinking paths j of S_ij / tau    h_i = (1 - lambda) e_i + lambda sum_j A_ij e_j

The M3PO paper writes a zero for a left-out pair *before* the softmax, where exp(0) would still give it weight. Its stated intention,
no contribution, is what is built: a left-out pair has weight 0.
"""

import torch

SIMILARITIES = ("distribution", "embedding", "mean")


def products(features):
    """Inner products of the paths of a group in float32: (B, G, F) -> (B, G, G)."""
    return features.float() @ features.float().mT


def cosines(products):
    """Cosine similarities from inner products, both (B, G, G)."""
    size = products.diagonal(dim1=1, dim2=2).clamp(min=1e-24).rsqrt()
    return products * size[:, :, None] * size[:, None, :]


def weights_from_similarity(similarity, thinking, temperature):
    """Softmax of the similarities (B, G, G) over the *other thinking* paths: thinking (B, G) bool -> (B, G, G) float32."""
    group = thinking.shape[-1]
    allowed = (
        thinking[:, None, :]
        & thinking[:, :, None]
        & ~torch.eye(group, dtype=torch.bool, device=thinking.device)
    )
    scores = torch.where(allowed, similarity / temperature, torch.finfo(torch.float32).min)
    return (
        torch.softmax(scores, dim=-1) * allowed
    )  # a row with nobody to listen to is uniform over nobody: all zero


def cross_path_weights(features, thinking, temperature):
    """How much each path listens to each other path of its group: features (B, G, F), thinking (B, G) bool -> (B, G, G) float32.

    A row sums to 1, or to 0 where its path does not think or no other path does. The diagonal is 0.
    """
    assert features.shape[:2] == thinking.shape, "features (B, G, F) and thinking (B, G) must agree"
    return weights_from_similarity(cosines(products(features)), thinking, temperature)


def blend(embeds, weights, lambda_blend):
    """h = (1 - lambda) e + lambda A e, in float32, returned in the dtype of `embeds`: (..., G, E), (..., G, G) -> (..., G, E).

    A zero row of weights leaves its embedding unchanged, bit for bit. Gradients reach every embedding and no weight.
    """
    with torch.autocast(embeds.device.type, enabled=False):
        weights = weights.detach().float()
        own = embeds.float()
        heard = (1 - lambda_blend) * own + lambda_blend * (weights @ own)
        listens = weights.sum(-1, keepdim=True) > 0
        return torch.where(listens, heard.to(embeds.dtype), embeds)


def apply_cross_path_interaction(current_embeds, is_thinking, lambda_blend=0.1, temperature=0.1):
    """One group, paths compared by their embeddings: (G, E), G booleans -> (G, E)."""
    return apply_cross_path_interaction_batch(
        current_embeds, len(current_embeds), is_thinking, lambda_blend, temperature
    )


def apply_cross_path_interaction_batch(
    current_embeds, num_generations, thinking_mask=None, lambda_blend=0.1, temperature=0.1
):
    """Groups side by side, (B*G, E) in group-major order -> (B*G, E); without a mask every path thinks."""
    rows, width = current_embeds.shape
    if rows % num_generations:
        raise ValueError(f"{rows} embeddings do not make whole groups of num_generations={num_generations}")
    thinking = (
        torch.ones(rows, dtype=torch.bool)
        if thinking_mask is None
        else torch.as_tensor(thinking_mask, dtype=torch.bool)
    )
    embeds = current_embeds.view(-1, num_generations, width)
    weights = cross_path_weights(embeds, thinking.to(embeds.device).view(-1, num_generations), temperature)
    return blend(embeds, weights, lambda_blend).view(rows, width)

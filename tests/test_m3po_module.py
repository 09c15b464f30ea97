"""Cross-path weights and blending, on numbers worked by hand."""

import math

import pytest
import torch

from decoding.rollout import Interaction
from m3po_module import (
    apply_cross_path_interaction,
    apply_cross_path_interaction_batch,
    blend,
    cross_path_weights,
    gate_measures,
    products,
    weights_from_similarity,
)

# Three paths: 0 and 1 at a right angle, 2 at 45 degrees to both: cosines 0, sqrt(1/2), sqrt(1/2).
FEATURES = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]]])
ALL = torch.ones(1, 3, dtype=torch.bool)


def test_weights_are_the_softmax_of_cosines_over_the_other_paths():
    weights = cross_path_weights(FEATURES, ALL, temperature=0.5)[0]
    a = math.exp(math.sqrt(0.5) / 0.5)  # against exp(0 / 0.5) = 1
    expected = torch.tensor([[0, 1 / (1 + a), a / (1 + a)], [1 / (1 + a), 0, a / (1 + a)], [0.5, 0.5, 0]])
    assert torch.allclose(weights, expected, atol=1e-6)


def test_a_left_out_pair_has_weight_zero_and_not_exp_zero():
    """The paper's formula writes 0 before the softmax; its intention is no contribution."""
    weights = cross_path_weights(FEATURES, torch.tensor([[True, True, False]]), temperature=0.1)[0]
    assert weights.tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("thinking", [[True, False, False], [False, False, False]])
def test_a_path_without_thinking_peers_has_a_zero_row_and_keeps_its_embedding_bit_for_bit(thinking):
    weights = cross_path_weights(FEATURES, torch.tensor([thinking]), temperature=0.1)
    assert not weights.any()
    embeds = torch.randn(1, 3, 5).bfloat16()
    assert torch.equal(blend(embeds, weights, 0.3), embeds)


def test_weights_are_finite_where_cosines_are_far_over_the_temperature_or_a_feature_is_zero():
    features = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]])
    weights = cross_path_weights(features, ALL, temperature=1e-4)
    assert torch.isfinite(weights).all()
    assert torch.allclose(weights.sum(-1), torch.ones(1, 3))


def test_mean_similarity_is_uniform_over_thinking_peers():
    weights = weights_from_similarity(torch.ones(1, 4, 4), torch.tensor([[True, True, False, True]]), 0.1)[0]
    assert torch.allclose(weights[0], torch.tensor([0, 0.5, 0, 0.5]))


def test_blend_is_one_minus_lambda_of_its_own_and_lambda_of_its_peers():
    embeds = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [4.0, 4.0]]])
    weights = torch.tensor([[[0, 0.25, 0.75], [0, 0, 0], [1.0, 0, 0]]])
    expected = torch.tensor([[[0.8 + 0.2 * 3.0, 0.2 * (0.25 + 3.0)], [0.0, 1.0], [0.8 * 4 + 0.2, 0.8 * 4]]])
    assert torch.allclose(blend(embeds, weights, 0.2), expected)


def test_halves_are_multiplied_and_blended_in_float32_under_autocast_too():
    """The sampler blends without autocast and the update within it; 256 x 256 + 1 is 65536 in bf16."""
    assert products(torch.tensor([[[256.0, 1.0]]]).bfloat16()).item() == 65537
    embeds, weights = torch.randn(1, 3, 8), cross_path_weights(FEATURES, ALL, 0.5)
    alone = blend(embeds, weights, 0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(blend(embeds, weights, 0.3), alone)


def test_gradients_reach_the_embeddings_of_all_peers_and_no_weight():
    embeds = torch.randn(1, 3, 4, requires_grad=True)
    weights = cross_path_weights(FEATURES, ALL, 0.1).requires_grad_()
    blend(embeds, weights, 0.5)[0, 0].sum().backward()
    assert torch.allclose(
        embeds.grad[0], (torch.tensor([0.5, 0, 0]) + 0.5 * weights[0, 0].detach())[:, None].expand(3, 4)
    )
    assert weights.grad is None


def test_blend_does_not_write_into_its_arguments():
    embeds, weights = torch.randn(1, 3, 4), cross_path_weights(FEATURES, ALL, 0.1)
    before = embeds.clone(), weights.clone()
    blend(embeds, weights, 0.5)
    assert torch.equal(embeds, before[0])
    assert torch.equal(weights, before[1])


def test_the_two_functions_with_the_original_names_agree_and_keep_groups_apart():
    embeds = torch.randn(6, 5)
    mask = [True, True, False, True, True, True]
    batch = apply_cross_path_interaction_batch(embeds, 3, mask, lambda_blend=0.2, temperature=0.3)
    single = torch.cat(
        [apply_cross_path_interaction(embeds[i : i + 3], mask[i : i + 3], 0.2, 0.3) for i in (0, 3)]
    )
    assert torch.allclose(batch, single)
    assert torch.equal(batch[2], embeds[2])
    other = embeds.clone()
    other[3:] = 7.0
    assert torch.equal(apply_cross_path_interaction_batch(other, 3, mask, 0.2, 0.3)[:3], batch[:3])
    assert torch.equal(
        apply_cross_path_interaction_batch(embeds, 3),
        apply_cross_path_interaction_batch(embeds, 3, torch.ones(6, dtype=torch.bool)),
    )


def test_rows_that_do_not_make_whole_groups_are_refused():
    with pytest.raises(ValueError, match="num_generations=4"):
        apply_cross_path_interaction_batch(torch.randn(6, 5), 4)


@pytest.mark.parametrize("temperature", [0, 0.0, -0.1, float("nan"), float("inf")])
def test_a_temperature_that_is_no_softmax_is_refused(temperature):
    """At 0 every weight was NaN or 0, and the paths went on alone without a word."""
    embeds = torch.eye(2)
    with pytest.raises(ValueError, match="temperature=.*: must be positive and finite"):
        apply_cross_path_interaction(embeds, [True, True], temperature=temperature)
    with pytest.raises(ValueError, match="temperature=.*: must be positive and finite"):
        cross_path_weights(embeds[None], torch.ones(1, 2).bool(), temperature)
    with pytest.raises(ValueError, match="temperature=.*: must be positive and finite"):
        Interaction(0.1, temperature)
    with pytest.raises(ValueError, match=r"lambda_blend=1\.5: must be between 0 and 1"):
        apply_cross_path_interaction_batch(embeds, 2, lambda_blend=1.5)
    everything = apply_cross_path_interaction(embeds, [True, True], lambda_blend=1)
    assert torch.equal(everything, embeds.flip(0)), "lambda 1: each path hears its one peer alone"


def test_how_the_weights_choose_by_hand():
    """Path 0 gives 3/4 to the peer that said its own token; path 1 hears its two peers alike; the last path
    has ended, and beside one peer alone nobody can choose.
    """
    embeds = torch.tensor([[[1.0, 0], [1, 0], [0, 2], [5, 5]]])
    ids, thinking = torch.tensor([[7, 7, 8, 7]]), torch.tensor([[True, True, True, False]])
    weights = torch.tensor([[[0, 0.75, 0.25, 0], [0.5, 0, 0.5, 0], [0, 1, 0, 0], [0, 0, 0, 0]]])
    could_choose, entropy, same, cosine = gate_measures(weights, thinking, ids, embeds)
    assert could_choose.tolist() == [[True, True, True, False]]
    bits = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    assert entropy[0, :3].tolist() == pytest.approx([bits, 1, 0])
    assert same[0, :3].tolist() == [0.75, 0.5, 0]
    # (0.75, 0.5) beside the mean (0.5, 1) of paths 1 and 2
    near = (0.375 + 0.5) / (math.hypot(0.75, 0.5) * math.hypot(0.5, 1))
    assert cosine[0, :3].tolist() == pytest.approx([near, 1, 1])
    thinking[0, 2] = False
    assert not gate_measures(weights, thinking, ids, embeds)[0].any()
    assert not gate_measures(torch.zeros(1, 4, 4), torch.ones(1, 4).bool(), ids, embeds)[0].any(), "not mixed"

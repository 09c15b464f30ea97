"""The formulas on numbers worked by hand, and the update on a small model."""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import grpo_train
import sft_train
from decoding.decoder import GroupDecoder
from decoding.rollout import Interaction
from errors import SettingError
from grpo_train import (
    Config,
    all_equal,
    group_advantages,
    grpo_loss,
    k3_divergence,
    listeners_credit,
    token_advantages,
    token_weights,
)
from learning.inspection import gate_sums
from learning.log_probs import Scorer
from problems.problem import EncodedProblem
from running.grpo_config import LOSS_TYPES
from running.parsing import parse_config
from running.settings import names_with
from small_models import build_model
from small_update import small_update

ROOT = Path(__file__).resolve().parents[1]


NAN = math.nan
CLIP = (0.9, 1.1)


def test_advantages_are_centred_and_divided_by_the_sample_deviation():
    got = group_advantages(torch.tensor([2.0, 0.0, 0.0, 2.0, 1.0, 2.0, 3.0, 6.0]), 4)
    first, second = math.sqrt(4 / 3), math.sqrt(14 / 3)  # means 1 and 3, squares 4 and 14
    expected = [1 / (first + 1e-4), -1 / (first + 1e-4), -1 / (first + 1e-4), 1 / (first + 1e-4)]
    expected += [v / (second + 1e-4) for v in (-2, -1, 0, 3)]
    assert torch.allclose(got, torch.tensor(expected), atol=1e-6)
    assert torch.allclose(
        group_advantages(torch.tensor([2.0, 0.0, 0.0, 2.0]), 4, "none"), torch.tensor([1.0, -1, -1, 1])
    )


def test_equal_rewards_have_advantage_exactly_zero_even_where_their_mean_rounds():
    """0.1 + 0.1 + 0.1 is not 0.3: a test on the deviation would find a signal."""
    for value in (0.1, 0.7, 1 / 3, 1e8 + 1, 0.0):
        for size in (3, 7, 12):
            assert not group_advantages(torch.full((size,), value, dtype=torch.float64), size).any(), (
                "as the loop has them"
            )
    assert group_advantages(torch.tensor([0.1, 0.1, 0.1 + 1e-7]), 3).any()


def test_a_reward_nobody_could_give_is_left_out_of_its_group():
    """TRL PR#5773: one None poisoned the group; a single scorable member gave NaN."""
    got = group_advantages(torch.tensor([1.0, NAN, 3.0, 2.0, NAN, NAN, NAN, 5.0]), 4)
    assert torch.allclose(got, torch.tensor([-1 / 1.0001, 0, 1 / 1.0001, 0, 0, 0, 0, 0]), atol=1e-6)
    assert all_equal(torch.tensor([[1.0, NAN, 1.0], [NAN, NAN, NAN], [1.0, NAN, 2.0]])).tolist() == [
        True,
        True,
        False,
    ]


MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()


def test_token_weights_of_the_three_loss_types():
    assert torch.allclose(
        token_weights(MASK, "grpo", 6, 10, 8)[:, 0], torch.tensor([1 / 4 / 6, 1 / 2 / 6, 0])
    )
    assert torch.allclose(token_weights(MASK, "dapo", 6, 10, 8)[:, 0], torch.tensor([0.1, 0.1, 0]))
    assert torch.allclose(token_weights(MASK, "dr_grpo", 6, 10, 8)[:, 0], torch.tensor([1 / 48, 1 / 48, 0]))
    for kind in LOSS_TYPES:
        assert not token_weights(MASK, kind, 6, 10, 8)[~MASK].any()
        assert torch.isfinite(token_weights(torch.zeros(2, 3).bool(), kind, 2, 0, 8)).all(), (
            "everything truncated and masked is not 0 / 0"
        )


def test_the_clipped_loss_by_hand():
    ratios = torch.tensor([[0.5, 1.0, 1.5, 1.25]]).repeat(2, 1)
    old, advantages = torch.full((2, 4), -1.0), torch.tensor([2.0, -1.0])
    loss, clipped = grpo_loss(old + ratios.log(), old, advantages, torch.ones(2, 4), clip_range=(0.8, 1.3))
    positive = -2 * (0.5 + 1.0 + 1.3 + 1.25)  # min(ratio, clipped) A: only above 1.3 is cut
    negative = 0.8 + 1.0 + 1.5 + 1.25  # below 0.8 is cut
    assert float(loss) == pytest.approx(positive + negative, abs=1e-5)
    assert clipped["clip_high"].tolist() == [[False, False, True, False], [False] * 4]
    assert clipped["clip_low"].tolist() == [[False] * 4, [True, False, False, False]]


def test_the_kl_is_k3_inside_the_same_mean():
    logp, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    kl = k3_divergence(logp, ref)
    loss, _ = grpo_loss(logp, logp, torch.zeros(1), torch.full((1, 2), 0.5), CLIP, kl_penalty=0.4 * kl)
    k3 = [math.exp(-0.5) + 0.5 - 1, math.exp(1.0) - 1.0 - 1]
    assert kl[0].tolist() == pytest.approx(k3, abs=1e-6)
    assert float(loss) == pytest.approx(0.4 * sum(k3) / 2, abs=1e-6)


def test_a_far_reference_does_not_make_the_loss_infinite():
    """torchforge#664: a KL of billions from a few tokens."""
    logp = torch.tensor([[-200.0]])
    kl = k3_divergence(logp, torch.zeros(1, 1))
    loss, _ = grpo_loss(logp, logp, torch.ones(1), torch.ones(1, 1), CLIP, kl_penalty=kl)
    assert math.isfinite(float(loss))
    assert float(kl) == pytest.approx(math.exp(20) - 21, rel=1e-6), "cut at a log-ratio of 20"
    assert float(k3_divergence(logp.new_zeros(1), logp[0])) == pytest.approx(math.exp(-20) + 19, rel=1e-6)


def test_the_first_step_has_loss_zero_and_a_gradient():
    """TRL#2703: users read a loss of 0.0 as a broken run."""
    logp = torch.tensor([[-1.0], [-2.0]], requires_grad=True)
    loss, _ = grpo_loss(logp, logp.detach(), torch.tensor([1.0, -1.0]), torch.full((2, 1), 0.5), CLIP)
    loss.backward()
    assert float(loss) == 0
    assert logp.grad.tolist() == [[-0.5], [0.5]]


def test_a_masked_token_far_from_its_old_log_prob_changes_nothing():
    """exp(100) overflows, and inf * 0 is NaN: the whole step was refused."""
    old, A = torch.tensor([[-1.0, -101.0]]), torch.tensor([-1.0])
    logp = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    loss, clipped = grpo_loss(logp, old, A, torch.tensor([[1.0, 0.0]]), CLIP)
    loss.backward()
    assert float(loss) == 1.0
    assert logp.grad.tolist() == [[1.0, 0.0]]
    assert not any(bool(tokens.any()) for tokens in clipped.values())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_an_update_does_not_depend_on_its_micro_batches(tokenizer, prompts, loss_type):
    """I3, through the loop's own update: mu 2, KL, truncated completions masked, groups cut. TRL#3021."""

    def gradient(micro_batch_tokens):
        settings = dict(loss_type=loss_type, beta=0.1, mask_truncated_completions=True, max_grad_norm=1e-6)
        small = small_update(tokenizer, prompts, micro_batch_tokens=micro_batch_tokens, **settings)
        grads = []
        small.learner.optimizer.register_step_pre_hook(
            lambda *_: grads.extend(p.grad.clone() / 1e-6 for p in small.policy.parameters())
        )
        return grads, small.update()

    whole, metrics = gradient(10**6)
    cut, cut_metrics = gradient(50)
    largest = max(float((a - b).abs().max()) for a, b in zip(whole, cut, strict=True))
    assert largest < 1e-5, "of a gradient of norm 1"
    for name in ("loss", "kl", "entropy", "grad_norm", "logp_diff_max"):
        assert metrics[name] == pytest.approx(cut_metrics[name], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_normalisers_are_those_of_all_processes(tokenizer, prompts, monkeypatch, loss_type):
    """I3: of two processes with as many rows and tokens each, a row counts half as much as of one.

    A count of the process's own rows passed every test that starts no second process.
    """
    norms = []
    for processes in (1, 2):
        small = small_update(tokenizer, prompts, loss_type=loss_type)
        counted = partial(lambda n, *values: [n * float(value) for value in values], processes)
        monkeypatch.setattr(small.learner, "sum_over_processes", counted)
        norms.append(small.update()["grad_norm"])
    assert norms[1] == pytest.approx(norms[0] / 2, rel=1e-4)


def test_rows_without_an_advantage_are_left_out_of_the_same_gradient(tokenizer, prompts, monkeypatch):
    """Groups of equal rewards went through the policy to be multiplied by 0. With a KL they count."""

    def gradient(beta, is_left_out=True):
        small = small_update(tokenizer, prompts, beta=beta, mu=2, max_grad_norm=1e-6)
        computed, grads = [], []
        forward, accumulate = small.learner.scorer.forward, small.learner.accumulate_gradients
        monkeypatch.setattr(
            small.learner.scorer, "forward", lambda r, rows: computed.extend(rows) or forward(r, rows)
        )
        if not is_left_out:
            monkeypatch.setattr(small.learner, "accumulate_gradients", lambda *a: accumulate(*a[:2]))
        small.learner.optimizer.register_step_pre_hook(
            lambda *_: grads.extend(p.grad.clone() / 1e-6 for p in small.policy.parameters())
        )
        advantages = small.advantages
        advantages[4:12] = 0.0
        return grads, small.update(advantages), sorted(computed)

    rows = len(prompts) * 4
    left_out, metrics, computed = gradient(0.0)
    whole, whole_metrics, all_rows = gradient(0.0, is_left_out=False)
    assert computed == sorted([*range(4), *range(12, rows)] * 2)
    assert all_rows == sorted([*range(rows)] * 2)
    assert max(float((a - b).abs().max()) for a, b in zip(left_out, whole, strict=True)) < 1e-6
    assert metrics["loss"] == pytest.approx(whole_metrics["loss"], abs=1e-7)
    assert metrics["scored_completions"] == rows - 8
    assert metrics["entropy"] == pytest.approx(math.log(300), rel=0.1), "a mean over the tokens computed"
    assert gradient(0.1)[2] == all_rows


def test_the_update_computes_the_groups_that_its_share_leaves_it(tokenizer, prompts, monkeypatch):
    """Of several processes each takes groups of others, by their tokens."""
    small = small_update(tokenizer, prompts)

    def share(rollout, advantages, scored):
        assert scored.tolist() == [True] * 4 + [False] * 4 + [True] * (len(prompts) * 4 - 8)
        return rollout.groups([0, 3]), advantages.view(-1, 4)[[0, 3]].flatten()

    monkeypatch.setattr(small.learner, "share_evenly", share)
    advantages = small.advantages
    advantages[4:8] = 0.0
    assert small.update(advantages)["scored_completions"] == 8


def test_importance_weights_reach_the_loss(tokenizer, prompts):
    """The sampler's log-probs are lower than the update's: with the ratio counted, the gradient grows."""
    norms = {}
    for kind in ("none", "token"):
        small = small_update(tokenizer, prompts, rollout_is=kind, max_grad_norm=1e-6)
        small.rollout.logp = small.rollout.logp - 0.5
        norms[kind] = small.update()["grad_norm"]
    assert norms["token"] == pytest.approx(norms["none"] * math.exp(0.5), rel=1e-3)


def test_truncated_importance_weights_scale_each_token_s_gradient():
    old, sampler = torch.tensor([[0.0, -1.0, -3.0]]), torch.tensor([[0.0, -2.0, -1.0]])
    weights = grpo_train.importance_weights(old, sampler, 2.0)
    assert torch.allclose(weights, torch.tensor([[1.0, 2.0, math.exp(-2)]]))
    logp = old.clone().requires_grad_()
    loss, _ = grpo_loss(logp, old, torch.tensor([3.0]), torch.ones(1, 3), (0.8, 1.2), importance=weights)
    loss.backward()
    assert torch.allclose(logp.grad, -3 * weights)


def test_the_ratio_is_one_at_mu_one_and_moves_at_mu_two(tokenizer, prompts):
    small = small_update(tokenizer, prompts, mu=1)
    first = small.update()
    assert first["clip_low"] == first["clip_high"] == 0
    assert first["logp_diff_max"] < 1e-4
    small = small_update(tokenizer, prompts, mu=3, learning_rate=0.05)
    again = small.update()
    assert again["clip_low"] + again["clip_high"] > 0
    assert small.learner.schedule.last_epoch == 3


def loss_by_the_letter(rows, kind, num_sequences, max_length, clip, beta=0.0, cap=None):
    """The clipped loss token by token; a row is a list of tokens (logp, old, sampler, ref, advantage).

    Returns it with sums over the tokens: clipped below, clipped above, k3.
    """
    num_tokens, loss, sums = sum(map(len, rows)), 0.0, [0, 0, 0.0]
    for row in rows:
        for logp, old, sampler, ref, advantage in row:
            ratio = math.exp(logp - old)
            clipped = min(max(ratio, clip[0]), clip[1])
            term = -min(ratio * advantage, clipped * advantage)
            if cap is not None:
                term *= min(math.exp(old - sampler), cap)
            k3 = math.exp(ref - logp) - (ref - logp) - 1
            divisor = {
                "grpo": len(row) * num_sequences,
                "dapo": num_tokens,
                "dr_grpo": num_sequences * max_length,
            }
            loss += (term + beta * k3) / divisor[kind]
            sums[0] += ratio < clip[0] and advantage < 0
            sums[1] += ratio > clip[1] and advantage > 0
            sums[2] += k3
    return loss, *sums


@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_the_loss_with_kl_and_importance_is_the_one_by_the_letter(kind):
    """Rows of 5, 1, 0 and 3 tokens; a loss of the KL alone had passed every test of a loss with a KL."""
    lengths, generator = [5, 1, 0, 3], torch.Generator().manual_seed(0)
    logp, old, sampler, ref = torch.randn(4, 4, 5, generator=generator).double() / 2 - 2
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    A = torch.tensor([-1.5, 0.5, 3.0, 1.0]).double()
    weights = token_weights(mask, kind, 7, sum(lengths), 6)
    kl, importance = 0.3 * k3_divergence(logp, ref), grpo_train.importance_weights(old, sampler, 1.5)
    loss, clipped = grpo_loss(logp, old, A, weights, (0.8, 1.3), kl, importance)
    tokens = torch.stack([logp, old, sampler, ref, A[:, None].expand(4, 5)], -1).tolist()
    rows = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    expected, low, high, _ = loss_by_the_letter(rows, kind, 7, 6, (0.8, 1.3), 0.3, 1.5)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert (int((clipped["clip_low"] * mask).sum()), int((clipped["clip_high"] * mask).sum())) == (low, high)
    assert low > 0 < high


def test_a_ratio_on_the_edge_and_a_token_without_advantage_are_not_counted_as_clipped():
    ratio = torch.tensor([[0.5, 2.0, 0.25, 4.0]])
    for A, low, high in ((1.0, 0, 1), (-1.0, 1, 0), (0.0, 0, 0)):
        _, clipped = grpo_loss(
            ratio.log(), torch.zeros(1, 4), torch.tensor([A]), torch.ones(1, 4), (0.5, 2.0)
        )
        assert (int(clipped["clip_low"].sum()), int(clipped["clip_high"].sum())) == (low, high)


def scored_by_the_letter(small, rows):
    """(logp, entropy, ref) of some rows before an update, token by token in Python."""
    with torch.no_grad():
        logp, entropy = small.learner.scorer(small.rollout, rows)
        ref = logp
        if small.learner.reference_scorer is not None:
            ref = small.learner.reference_scorer(small.rollout, rows)[0]
    return logp.tolist(), entropy.tolist(), ref.tolist()


@pytest.mark.parametrize(
    ("settings", "silent"),
    [
        (dict(beta=0.2, rollout_is="token", rollout_is_cap=1.2, mask_truncated_completions=True), 0),
        (dict(loss_type="dapo", beta=0.2, micro_batch_tokens=60), 8),
        (dict(loss_type="dr_grpo"), 8),
    ],
)
def test_two_passes_of_an_update_are_those_by_the_letter(tokenizer, prompts, settings, silent):
    """What is logged, and that the second pass compares with the policy that the first one scored.

    The first `silent` rows have no advantage: without a KL they are left out, of the means that are logged
    too.
    """
    how = dict(settings, learning_rate=0.02, epsilon=0.1, epsilon_high=0.2)
    one, two = (small_update(tokenizer, prompts, mu=mu, **how) for mu in (1, 2))
    noise = torch.rand(one.rollout.logp.shape, generator=torch.Generator().manual_seed(0))
    for small in (one, two):
        small.rollout.logp = small.rollout.logp - noise
    config, rollout, advantages = two.config, one.rollout, one.advantages
    advantages[:silent] = 0.0
    mask = rollout.mask & (rollout.ended[:, None] | (not config.mask_truncated_completions))
    scored = range(silent if config.beta == 0 else 0, len(mask))
    first = scored_by_the_letter(one, list(scored))
    one.update(advantages)
    passes, sums = (first, scored_by_the_letter(one, list(scored))), torch.zeros(5).double()
    largest = total = 0.0
    for logp, entropy, ref in passes:
        rows = [[] for _ in scored]
        for at, n in enumerate(scored):
            for t in range(mask.shape[1]):
                if mask[n, t]:
                    old, sampler = first[0][at][t], float(rollout.logp[n, t])
                    rows[at].append((logp[at][t], old, sampler, ref[at][t], float(advantages[n])))
                    sums[3] += entropy[at][t] / 2
                    sums[4] += abs(old - sampler) / 2
                    largest = max(largest, abs(old - sampler))
        if config.loss_type == "dapo":
            assert len(rows) == len(mask), "all tokens count in its divisor"
        cap = config.rollout_is_cap if config.rollout_is == "token" else None
        loss, *counts = loss_by_the_letter(
            rows, config.loss_type, len(mask), 16, config.clip_range, config.beta, cap
        )
        total += loss / 2
        sums[:3] += torch.tensor(counts) / 2
    tokens = sum(int(mask[n].sum()) for n in scored)
    metrics = two.update(advantages)
    assert metrics["loss"] == pytest.approx(total, rel=1e-4, abs=1e-6)
    assert metrics["clip_low"] + metrics["clip_high"] > 0
    for name, value in zip(("clip_low", "clip_high", "kl", "entropy", "logp_diff"), sums, strict=True):
        if name != "kl" or config.beta:
            assert metrics[name] == pytest.approx(float(value) / tokens, rel=1e-3, abs=1e-6), name
    assert metrics["logp_diff_max"] == pytest.approx(largest, rel=1e-4)
    assert "skipped" not in metrics
    assert metrics["scored_completions"] == sum(bool(mask[n].any()) or config.beta > 0 for n in scored)
    assert ("kl" in metrics, "masked_completions" in metrics) == (
        config.beta > 0,
        config.mask_truncated_completions,
    )


def test_without_signal_and_without_kl_no_weight_moves_by_one_bit(tokenizer, prompts):
    """I4: Adam's momentum alone would move them."""
    small = small_update(tokenizer, prompts)
    small.update()
    before = small.weights()
    metrics = small.update(torch.zeros(len(small.rollout.ids)))
    assert metrics == {"skipped": "no group carries a signal", "grad_norm": 0.0, "scored_completions": 0}
    assert small.has_weights(before)
    assert small.learner.schedule.last_epoch == 2, "the schedule goes on"


def test_gradients_that_a_reward_file_has_switched_off_are_taken_all_the_same(tokenizer, prompts):
    usual, switched_off = small_update(tokenizer, prompts), small_update(tokenizer, prompts)
    usual.update()
    with torch.no_grad():
        switched_off.update()
    assert usual.has_weights(switched_off.weights())


def test_a_signal_in_masked_rows_only_is_none_and_the_schedule_goes_on_by_mu(tokenizer, prompts):
    small = small_update(tokenizer, prompts, mask_truncated_completions=True, mu=3)
    assert not small.rollout.ended.all()
    before = small.weights()
    metrics = small.update(torch.where(small.rollout.ended, 0.0, 1.0))
    assert metrics["skipped"] == "no group carries a signal"
    assert metrics["masked_completions"] == int((~small.rollout.ended).sum()) > 0
    assert small.has_weights(before)
    assert small.learner.schedule.last_epoch == 3
    assert small.update()["masked_completions"] == metrics["masked_completions"]


def test_the_reference_reads_what_the_sampler_saw_so_that_a_copy_of_the_policy_is_no_way_off(
    tokenizer, prompts
):
    """Scored on plain ids, the same weights are another distribution, and the KL a number of its own."""
    small = small_update(tokenizer, prompts, beta=0.1)
    small.learner.reference_scorer = Scorer(build_model("qwen2", tokenizer), small.learner.scorer.tables)
    assert small.update()["kl"] == pytest.approx(0, abs=1e-7)


def test_metrics_of_several_passes_are_means_and_the_sampler_is_compared_with_the_first(tokenizer, prompts):
    """A rate at which nothing moves: three passes give what one gives."""
    one, three = {}, {}
    for mu, metrics in ((1, one), (3, three)):
        small = small_update(tokenizer, prompts, mu=mu, learning_rate=1e-12, beta=0.1)
        small.rollout.logp = small.rollout.logp - 0.5
        metrics |= small.update()
    assert three == pytest.approx(one, rel=1e-4, abs=1e-6)
    assert one["logp_diff"] == pytest.approx(0.5, abs=1e-4)
    small = small_update(tokenizer, prompts, mu=3, learning_rate=0.05)
    assert small.update()["logp_diff_max"] < 1e-4


def test_the_upper_edge_of_the_clipping_is_its_own_setting(tokenizer, prompts):
    found = []
    for edge in (None, 1e6):
        small = small_update(tokenizer, prompts, mu=3, learning_rate=0.05, epsilon=0.01, epsilon_high=edge)
        found.append(small.update())
    assert found[0]["clip_high"] > 0
    assert found[1]["clip_high"] == 0 < found[1]["clip_low"]


def test_the_credit_of_listeners_by_hand():
    """Path 0 hears path 1 alone, path 1 the two others alike, and path 2 path 0."""
    mix = torch.tensor([[0, 1.0, 0], [0.5, 0, 0.5], [1, 0, 0]])[None, None]
    credit = listeners_credit(mix, torch.tensor([3.0, -1, -2]))
    assert credit.flatten().tolist() == [-0.5 - 2 + 1.5 * 3 / 2, 3 - 1 / 2, -0.5 - 0.5 * 2 / 2]
    assert not listeners_credit(torch.zeros(1, 4, 3, 3), torch.tensor([3.0, -1, -2])).any(), "nobody listens"


def test_the_size_of_the_credit_is_that_over_the_tokens_which_count():
    """The rows of truncated completions are masked, and neither their credit nor their advantage counts."""
    mix = torch.tensor([[0, 1.0, 0], [0.5, 0, 0.5], [1, 0, 0]])[None, None]
    rollout = SimpleNamespace(mix=mix)
    learner = SimpleNamespace(sum_over_processes=lambda *sums: [float(one) for one in sums])
    mask = torch.tensor([[True], [True], [False]])
    size = grpo_train.credit_size(learner, rollout, torch.tensor([3.0, -1, -2]), mask, 2.0)
    assert size == pytest.approx(2 * (0.25 + 2.5) / (3 + 1))  # |-0.5 - 2 + 2.25| and |3 - 0.5|


def test_paths_that_all_hear_each_other_alike_give_no_credit_at_all():
    """Two groups of five paths, three tokens: exactly 0, since the advantages of a group sum to 0."""
    alike = (1 - torch.eye(5)).div(4).expand(2, 3, 5, 5)
    assert not listeners_credit(alike, torch.tensor([4.0, -1, -1, -1, -1, 0.5, 0.5, -3, 1, 1])).any()
    rewards = torch.randn(10, generator=torch.Generator().manual_seed(0)).double()
    assert listeners_credit(alike, group_advantages(rewards, 5)).abs().max() < 1e-6


def test_without_credit_the_update_is_grpos_to_the_bit(tokenizer, prompts):
    """Also where an advantage of each token is the same number T times."""
    small = small_update(tokenizer, prompts)
    advantages = small.advantages
    assert token_advantages(small.rollout, advantages, 0.0) is advantages
    logp, old_logp, weights = torch.randn(3, 20, 16, generator=torch.Generator().manual_seed(0))
    by_row = grpo_loss(logp, old_logp, advantages, weights.abs(), CLIP)
    by_token = grpo_loss(logp, old_logp, advantages[:, None].expand(20, 16), weights.abs(), CLIP)
    assert torch.equal(by_row[0], by_token[0])
    assert "credit_size" not in small.update()


def test_a_row_whose_own_advantage_is_0_pulls_by_what_its_listeners_earn(tokenizer, prompts):
    """With beta 0 rows without an advantage are left out of the update; groups without a signal still are."""
    small = small_update(tokenizer, prompts, m3po_credit=2.0, loss_type="dapo")
    advantages = torch.tensor([0.0, 2, -2, 0] * 4 + [0.0] * 4)
    rollout, policy = small.rollout, small.policy
    mix, in_tokens = rollout.mix, advantages[:, None].repeat(1, 16)
    for n in range(20):  # by the letter
        b, i, group = n // 4, n % 4, advantages[n - n % 4 : n - n % 4 + 4]
        for t in range(16):
            m = sum(float(mix[b, t, j, i]) for j in range(4))
            earned = sum(float(mix[b, t, j, i] * group[j]) for j in range(4))
            in_tokens[n, t] += 2 * (earned + m * float(group[i]) / 3)
    logp, _ = Scorer(policy, small.learner.scorer.tables)(rollout, list(range(20)))
    loss = -(torch.exp(logp - logp.detach()) * in_tokens * rollout.mask).sum() / rollout.mask.sum()
    gradients = torch.autograd.grad(loss, list(policy.parameters()))
    metrics = small.update(advantages)
    assert metrics["grad_norm"] == pytest.approx(
        float(torch.stack([g.norm() for g in gradients]).norm()), rel=1e-4
    )
    pulls = (in_tokens * rollout.mask != 0).any(-1)
    assert metrics["scored_completions"] == int(pulls.sum())
    assert (advantages != 0).sum() < pulls.sum() <= 16
    own = (advantages[:, None].abs() * rollout.mask).sum()
    added = ((in_tokens - advantages[:, None]).abs() * rollout.mask).sum()
    assert metrics["credit_size"] == pytest.approx(float(added / own), rel=1e-5)
    assert small_update(tokenizer, prompts, m3po_credit=2.0).update(0 * advantages)["skipped"]


def test_plain_scoring_scores_the_ids_alone(tokenizer, prompts):
    """What the published scripts do: another policy than the one that sampled, and the log shows it."""
    small = small_update(tokenizer, prompts, m3po_scoring="plain", beta=0.1)
    mix, small.rollout.mix = small.rollout.mix, None
    with torch.no_grad():
        logp, _ = Scorer(small.policy, small.learner.scorer.tables)(small.rollout, list(range(20)))
    wanted = (logp - small.rollout.logp).abs()[small.rollout.mask].mean()
    small.rollout.mix = mix
    assert small.update()["logp_diff"] == pytest.approx(float(wanted), rel=1e-4)
    assert wanted > 0.01
    assert small.rollout.mix is mix, "what is logged of the rollout stays"
    assert small_update(tokenizer, prompts, beta=0.1).update()["logp_diff"] < 1e-5


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--m3po_lambda 0 --m3po_scoring plain", "m3po_scoring='plain'.*no effect with m3po_lambda=0"),
        ("--m3po_lambda 0 --m3po_credit 1", "m3po_credit=1.0.*no effect with m3po_lambda=0"),
        ("--m3po_control noise --m3po_credit 1", "m3po_credit=1.0.*no effect with m3po_control='noise'"),
        ("--m3po_credit 1 --num_generations 2", "m3po_credit=1.0: has no effect with num_generations=2"),
        ("--m3po_credit -1", "m3po_credit=-1.0: must be finite and not negative"),
        ("--m3po_scoring ids", "m3po_scoring='ids': must be one of blended, plain"),
    ],
)
def test_what_would_not_change_what_is_learnt_is_refused(flags, why):
    with pytest.raises(SettingError, match=why):
        parse_config(Config, flags.split())


def test_reward_weights_are_those_of_the_settings():
    pairs = grpo_train.chosen_rewards(Config(reward_weights=[0.5, 3.0]))
    assert [weight for _, weight in pairs] == [0.5, 3.0]


def test_a_row_is_drawn_by_its_number_in_the_batch_whoever_samples_it(tokenizer, llama, prompts):
    """I10, and at the temperature of the settings; an extra rollout draws anew."""
    decoder = GroupDecoder(llama, tokenizer, "e", Interaction(0.3))
    config = Config(num_generations=3, max_completion_length=16, temperature=0.7, eval_every=0)
    batch = [EncodedProblem(None, "", ids) for ids in prompts]
    whole = grpo_train.sample_groups(config, decoder, batch, 2, range(5))
    part = grpo_train.sample_groups(config, decoder, batch, 2, range(2, 4))
    again = grpo_train.sample_groups(config, decoder, batch, 2, range(2, 4), retry=1)
    assert part.texts == whole.texts[6:12]
    assert part.problems == batch[2:4]
    assert part.texts != again.texts
    assert whole.rollout.temperature == 0.7


def test_deviations_of_rewards_are_logged_within_groups_and_over_all(tokenizer, prompts):
    """Groups (0, 0, 0, 4) and (5, 5, 5, 5): deviations 2 and 0, mean 1; of all eight the square root of 44 /
    7.
    """
    small, right = small_update(tokenizer, prompts[:2]), [True] + [False] * 7
    metrics = small.metrics(["a", "a", "b", "c"] * 2, right, [0.0, 0, 0, 4, 5, 5, 5, 5])
    assert metrics["reward_std_in_group"] == pytest.approx(1)
    assert metrics["reward_std"] == pytest.approx(math.sqrt(44 / 7)), "squares 9, 9, 9, 1, 4, 4, 4, 4"
    names = ("reward", "correct", "unique_completions", "frac_reward_zero_std")
    assert [metrics[name] for name in names] == [3.0, 0.125, 0.75, 0.5]


@pytest.mark.parametrize(("rewards", "std"), [([NAN] * 8, NAN), ([NAN] * 7 + [3.0], 0.0)])
def test_the_deviation_of_one_reward_is_0_and_of_none_unknown_and_torch_warns_of_nothing(
    rewards, std, tokenizer, prompts, recwarn
):
    metrics = small_update(tokenizer, prompts[:2]).metrics(["a"] * 8, [True] * 8, rewards)
    assert metrics["reward_std"] == pytest.approx(std, nan_ok=True)
    assert not recwarn


def test_undecided_answers_are_logged_apart_and_are_not_correct(tokenizer, prompts):
    small, right = small_update(tokenizer, prompts[:2], grading="math"), [True, None] + [False] * 6
    metrics = small.metrics(["a"] * 8, right, [1.0, NAN] + [0.0] * 6)
    assert (metrics["undecided"], metrics["correct"], metrics["unscored"]) == (0.125, 0.125, 1)
    metrics = small.metrics(["a"] * 8, [None] * 8, [NAN] * 8)
    assert (metrics["undecided"], metrics["frac_reward_zero_std"], metrics["unscored"]) == (1.0, 1.0, 8)
    assert math.isnan(metrics["reward"])


def test_the_change_of_inputs_is_a_mean_over_all_processes_however_few_have_listened(
    tokenizer, prompts, monkeypatch
):
    """One input of one of two processes was blended: it counted half."""
    small = small_update(tokenizer, prompts[:2])
    rollout = small.rollout
    rollout.mix, rollout.input_change = torch.zeros_like(rollout.mix), torch.zeros_like(rollout.input_change)
    rollout.mix[0, 0, 0, 1], rollout.input_change[0, 0] = 1.0, 0.25

    def two(values):
        other = {**values[0], "thinking": [0], "alive": [0], "change": [0.0], "listening": [0]}
        return [*values, other]

    monkeypatch.setattr(grpo_train, "gather_object", two)
    metrics = small.metrics(["a"] * 8, [True] * 8, [float(i) for i in range(8)])
    assert metrics["input_change"] == pytest.approx(0.25)


def test_how_much_the_gate_chooses_is_a_mean_over_tokens_with_which_a_path_could(
    tokenizer, prompts, monkeypatch
):
    """Over all processes; null where no path could, as in groups of two."""
    small = small_update(tokenizer, prompts)
    sums, rollout = gate_sums(small.policy, small.rollout), small.rollout
    count, values = 0, torch.zeros(3, dtype=torch.double)
    embeds = small.policy.get_input_embeddings()(rollout.ids)
    for n in range(20):
        group, i = slice(n // 4 * 4, n // 4 * 4 + 4), n % 4
        for t in range(rollout.ids.shape[1]):
            w = rollout.mix[n // 4, t, i]
            peers = [j for j in range(4) if j != i and rollout.thinking[group][j, t]]
            if rollout.thinking[n, t] and len(peers) >= 2 and w.any():
                e, count = embeds[group, t], count + 1
                values[0] += float(-(w[peers] * w[peers].log()).sum()) / math.log(len(peers))
                values[1] += sum(float(w[j]) for j in peers if rollout.ids[group][j, t] == rollout.ids[n, t])
                values[2] += float(torch.cosine_similarity(w @ e, e[peers].mean(0), dim=0))
    assert count > 20
    assert sums["choosing"] == [count]
    names = ("gate_entropy", "gate_same_token", "gate_mean_cosine")
    assert [sums[name][0] for name in names] == pytest.approx(values.tolist(), rel=1e-4)
    monkeypatch.setattr("learning.inspection.GATES_AT_ONCE", 1)
    assert gate_sums(small.policy, rollout)["gate_entropy"] == pytest.approx(sums["gate_entropy"])
    other = {name: [value[0] * 3] for name, value in sums.items()} | {"gate_entropy": [0.0]}
    monkeypatch.setattr(grpo_train, "gather_object", lambda x: [x[0], {**x[0], **other}])
    how = (["a"] * 20, [True] * 20, [float(i) for i in range(20)])
    metrics = small.metrics(*how, sums)
    assert metrics["gate_entropy"] == pytest.approx(float(values[0]) / (4 * count), rel=1e-4)
    assert metrics["gate_same_token"] == pytest.approx(float(values[1]) / count, rel=1e-4)
    rollout.thinking[:] = False
    none = gate_sums(small.policy, rollout)
    other.update({name: [0.0] for name in sums})
    assert all(math.isnan(small.metrics(*how, none)[name]) for name in names)
    rollout.control = "scaled_mean"
    assert gate_sums(small.policy, rollout) == {}, "its weights are no gate's"
    rollout.mix, rollout.control = None, "none"
    assert gate_sums(small.policy, rollout) == {}
    assert "gate_entropy" not in small.metrics(*how, {})


def test_with_kl_a_step_without_signal_still_pulls_to_the_reference(tokenizer, prompts):
    small = small_update(tokenizer, prompts, beta=0.5)
    before = small.weights()
    metrics = small.update(torch.zeros(len(small.rollout.ids)))
    assert metrics["kl"] > 0
    assert not small.has_weights(before)


def test_a_nan_anywhere_in_the_update_changes_no_weight_and_is_logged(tokenizer, prompts):
    small = small_update(tokenizer, prompts)
    poisoned = small.advantages
    poisoned[3] = NAN
    before = small.weights()
    metrics = small.update(poisoned)
    assert metrics["skipped"] == "loss or gradient not finite"
    assert small.has_weights(before)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_step_in_which_every_completion_was_cut_off_and_masked_moves_no_weight(tokenizer, prompts, beta):
    """TRL PR#3700: 0 / 0 there; here the gradient was 0 and Adam's momentum still moved the weights."""
    small = small_update(tokenizer, prompts, mask_truncated_completions=True, beta=beta)
    small.update()
    small.rollout.ended[:] = False
    before = small.weights()
    assert "cut off" in small.update()["skipped"]
    assert small.has_weights(before)


def test_a_warm_start_never_sees_the_problems_that_are_held_out(tokenizer):
    """Held-out accuracy before GRPO was measured on what the warm start had learned."""
    grpo = Config(model="tiny", dataset="arithmetic", limit=300, eval_problems=40)
    shared = {name: getattr(grpo, name) for name in names_with(Config, "inherited")}
    _, held_out, _ = sft_train.prepare_problems(grpo, sft_train.load_tokenizer("tiny"))
    learned, _, _ = sft_train.prepare_problems(sft_train.Config(**shared), sft_train.load_tokenizer("tiny"))
    assert len(held_out) == 40
    assert not {p.prompt for p in held_out} & {p.prompt for p in learned}

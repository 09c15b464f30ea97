"""The formulas on numbers worked by hand, the update on a small model, and the whole job through its command."""

import base64
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo_eval
import grpo_train
from conftest import build_model
from decoding.decoder import GroupDecoder
from decoding.rollout import Interaction, pad_left, rollout_uniforms
from errors import RewardError, RunError, SettingError
from grpo_train import Config, all_equal, group_advantages, grpo_loss, token_weights
from learning import inspection
from learning.learner import make_optimizer
from learning.log_probs import Scorer
from learning.memory import TokenBudget, micro_batches, row_lengths
from learning.parallel import shard
from problems.prompts import encode_prompts, problems_of, template_kwargs
from problems.sources import load_problems
from running.launching import check_shares, heeded, starts_processes
from running.run import problem_batch

ROOT = Path(__file__).resolve().parents[1]
NAN = math.nan


# Advantages


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


# Loss

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()


def test_token_weights_of_the_three_loss_types():
    assert torch.allclose(
        token_weights(MASK, "grpo", 6, 10, 8)[:, 0], torch.tensor([1 / 4 / 6, 1 / 2 / 6, 0])
    )
    assert torch.allclose(token_weights(MASK, "dapo", 6, 10, 8)[:, 0], torch.tensor([0.1, 0.1, 0]))
    assert torch.allclose(token_weights(MASK, "dr_grpo", 6, 10, 8)[:, 0], torch.tensor([1 / 48, 1 / 48, 0]))
    for kind in ("grpo", "dapo", "dr_grpo"):
        assert not token_weights(MASK, kind, 6, 10, 8)[~MASK].any()
        assert torch.isfinite(token_weights(torch.zeros(2, 3).bool(), kind, 2, 0, 8)).all(), (
            "everything truncated and masked is not 0 / 0"
        )


def test_the_clipped_loss_by_hand():
    ratios = torch.tensor([[0.5, 1.0, 1.5, 1.25]]).repeat(2, 1)
    old, advantages = torch.full((2, 4), -1.0), torch.tensor([2.0, -1.0])
    loss, terms = grpo_loss(
        old + ratios.log(), old, advantages, torch.ones(2, 4), epsilon=0.2, epsilon_high=0.3
    )
    positive = -2 * (0.5 + 1.0 + 1.3 + 1.25)  # min(ratio, clipped) A: only above 1.3 is cut
    negative = 0.8 + 1.0 + 1.5 + 1.25  # below 0.8 is cut
    assert float(loss) == pytest.approx(positive + negative, abs=1e-5)
    assert terms["clip_high"].tolist() == [[False, False, True, False], [False] * 4]
    assert terms["clip_low"].tolist() == [[False] * 4, [True, False, False, False]]


def test_the_kl_is_k3_inside_the_same_mean():
    logp, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    loss, terms = grpo_loss(
        logp,
        logp,
        torch.zeros(1),
        torch.full((1, 2), 0.5),
        epsilon=0.1,
        epsilon_high=0.1,
        beta=0.4,
        ref_logp=ref,
    )
    k3 = [math.exp(-0.5) + 0.5 - 1, math.exp(1.0) - 1.0 - 1]
    assert terms["kl"][0].tolist() == pytest.approx(k3, abs=1e-6)
    assert float(loss) == pytest.approx(0.4 * sum(k3) / 2, abs=1e-6)


def test_a_far_reference_does_not_make_the_loss_infinite():
    """torchforge#664: a KL of billions from a few tokens."""
    loss, _ = grpo_loss(
        torch.tensor([[-200.0]]),
        torch.tensor([[-200.0]]),
        torch.ones(1),
        torch.ones(1, 1),
        epsilon=0.1,
        epsilon_high=0.1,
        beta=1.0,
        ref_logp=torch.zeros(1, 1),
    )
    assert math.isfinite(float(loss))


def test_the_first_step_has_loss_zero_and_a_gradient():
    """TRL#2703: users read a loss of 0.0 as a broken run."""
    logp = torch.tensor([[-1.0], [-2.0]], requires_grad=True)
    loss, _ = grpo_loss(
        logp, logp.detach(), torch.tensor([1.0, -1.0]), torch.full((2, 1), 0.5), epsilon=0.1, epsilon_high=0.1
    )
    loss.backward()
    assert float(loss) == 0
    assert logp.grad.tolist() == [[-0.5], [0.5]]


# Who works on what


def test_the_processes_shares_are_the_whole_batch_in_order_and_alike_in_size():
    """7 problems on 2 processes are 3 and 4 of them; with 12 rows each, 36 and 48."""
    for count, world in [(7, 2), (12, 8), (5, 5), (3, 1)]:
        ranks = [SimpleNamespace(process_index=rank, num_processes=world) for rank in range(world)]
        shares = [list(range(count))[shard(count, rank)] for rank in ranks]
        assert [i for share in shares for i in share] == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert [shard(count, rank, 12) for rank in ranks] == [
            slice(share[0] * 12, share[-1] * 12 + 12) for share in shares
        ]


# The update


def setup(tokenizer, prompts, lam=0.3, **settings):
    """A small policy with its optimiser, a rollout of it, and a scorer of a reference that is elsewhere."""
    config = Config(
        **{
            **dict(
                num_generations=4,
                max_completion_length=16,
                learning_rate=0.01,
                max_grad_norm=1.0,
                beta=0.0,
                eval_every=0,
            ),
            **settings,
        }
    )
    model, other = build_model("qwen2", tokenizer), build_model("qwen2", tokenizer, seed=1)
    decoder = GroupDecoder(model, tokenizer, "e", Interaction(lam))
    decoder.tables.is_eos[3::25] = True
    ids, mask = pad_left(prompts, decoder.tables.pad_id)
    N = len(prompts) * 4
    out = decoder.rollout(ids, mask, 4, 16, rollout_uniforms(0, 0, 0, N, 16), config.temperature)
    optimizer, schedule = make_optimizer(model, config, 100)
    ref = Scorer(other, decoder.tables) if config.beta else None
    return (
        config,
        model,
        out,
        [Accelerator(cpu=True), Scorer(model, decoder.tables), ref, optimizer, schedule],
    )


def advantages_for(out):
    return torch.randn(len(out.ids), generator=torch.Generator().manual_seed(2))


def update(parts, out, advantages, config):
    return grpo_train.update(*parts, out, advantages, config, TokenBudget(config, parts[1].model))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_an_update_does_not_depend_on_its_micro_batches(tokenizer, prompts, loss_type):
    """I3, through the loop's own update: mu 2, KL, truncated completions masked, groups cut. TRL#3021."""

    def gradient(micro_batch_tokens):
        settings = dict(
            loss_type=loss_type,
            mu=1,
            beta=0.1,
            mask_truncated_completions=True,
            micro_batch_tokens=micro_batch_tokens,
            max_grad_norm=1e-6,
        )
        config, model, out, parts = setup(tokenizer, prompts, **settings)
        grads = []
        parts[3].register_step_pre_hook(
            lambda *_: grads.extend(p.grad.clone() / 1e-6 for p in model.parameters())
        )
        metrics = update(parts, out, advantages_for(out), config)
        return grads, metrics

    whole, metrics = gradient(10**6)
    cut, cut_metrics = gradient(50)
    assert (
        max(float((a - b).abs().max()) for a, b in zip(whole, cut, strict=True)) < 1e-5
    )  # of a gradient of norm 1
    for name in ("loss", "kl", "entropy", "grad_norm", "logp_diff_max"):
        assert metrics[name] == pytest.approx(cut_metrics[name], rel=1e-4, abs=1e-5)


class SmallMemory(Scorer):
    """Runs out of memory on more than `rows` rows, or now and then in the middle of a backward."""

    rows = 3

    def forward(self, rollout, rows):
        logp, entropy = super().forward(rollout, rows)
        if len(rows) > self.rows and torch.is_grad_enabled():
            logp.register_hook(self.fail)
        return logp, entropy

    def fail(self, _):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_out_of_memory_halves_the_micro_batches_and_changes_no_gradient(tokenizer, prompts, capsys):
    results = []
    for kind in (Scorer, SmallMemory):
        config, model, out, parts = setup(tokenizer, prompts, mu=2, beta=0.1, micro_batch_tokens=10**6)
        parts[1] = kind(model, parts[1].tables)
        metrics = update(parts, out, advantages_for(out), config)
        results.append(([p.detach().clone() for p in model.parameters()], metrics))
    (whole, metrics), (halved, halved_metrics) = results
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(whole, halved, strict=True))
    assert metrics == pytest.approx(halved_metrics, rel=1e-3, abs=1e-5)
    lines = [line for line in capsys.readouterr().out.splitlines() if "out of memory" in line]
    assert len(lines) == 1, "said once, and not again in the second pass"


def test_one_sequence_that_does_not_fit_is_an_error_that_says_what_would_help(tokenizer, prompts):
    config, model, out, parts = setup(tokenizer, prompts)
    parts[1] = SmallMemory(model, parts[1].tables)
    parts[1].rows = 0
    with pytest.raises(RunError, match=r"one sequence of \d+ tokens: try --gradient_checkpointing"):
        update(parts, out, advantages_for(out), config)


class Card:
    """Memory of a GPU as `TokenBudget.find` asks for it: a fixed part, and so much for each token that is there, a third of it where it recomputes."""

    def __init__(self, monkeypatch, scorer, free, fixed, each):
        self.scorer, self.peak, self.fixed, self.each = scorer, 0, fixed, each
        self.free, self.room = free, free
        for name, answer in dict(
            memory_allocated=lambda: 100, reset_peak_memory_stats=lambda: None, max_memory_allocated=lambda: 100 + self.peak, empty_cache=lambda: None,
            mem_get_info=self.info,
        ).items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, answer)
        self.forward, scorer.forward = scorer.forward, self.watched

    def info(self):
        held = sum(p.grad.numel() * 4 for p in self.scorer.parameters() if p.grad is not None)
        return self.free - held, self.free

    def watched(self, rollout, rows):
        lengths = (rollout.prompt_mask.sum(-1).repeat_interleave(rollout.num_generations) + rollout.lengths)[
            rows
        ]
        each = self.each / (3 if self.scorer.model.is_gradient_checkpointing else 1)
        self.peak = self.fixed + int(len(rows) * int(lengths.max()) * each)
        if self.peak > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.forward(rollout, rows)


@pytest.mark.parametrize(
    ("room", "checkpointing", "recomputes"),
    [(300, "auto", True), (300, "off", False), (5000, "auto", False), (300, "on", True)],
)
def test_the_token_budget_is_what_the_free_memory_holds(
    tokenizer, prompts, monkeypatch, room, checkpointing, recomputes
):
    """Beside gradients, moments and a part that does not grow with the tokens; the longest prompt and the longest completion are of different rows."""
    config, model, out, parts = setup(tokenizer, prompts, gradient_checkpointing=checkpointing)
    model.train()
    budget, weights, each, fixed = (
        TokenBudget(config, model),
        sum(p.numel() for p in model.parameters()),
        30_000,
        4_000_000,
    )
    Card(monkeypatch, parts[1], 12 * weights + int((fixed + room * each) / 0.85), fixed, each)
    monkeypatch.setattr(Accelerator, "device", torch.device("cuda"), raising=False)
    budget.find(parts[0], parts[1], out)
    assert budget.recomputes == model.is_gradient_checkpointing == recomputes
    assert budget.tokens == pytest.approx(room * (3 if recomputes else 1), rel=0.01)
    assert all(p.grad is None for p in model.parameters()), "the trial leaves nothing"


def test_a_trial_that_does_not_fit_leaves_no_gradient_behind(tokenizer, prompts, monkeypatch):
    config, model, out, parts = setup(tokenizer, prompts, gradient_checkpointing="off")
    card = Card(monkeypatch, parts[1], 10**9, 1000, 1000)
    card.room = 1000 + 2500 * max(row_lengths(out))  # a row or two fit, all of them do not
    monkeypatch.setattr(Accelerator, "device", torch.device("cuda"), raising=False)
    budget = TokenBudget(config, model)
    budget.find(parts[0], parts[1], out)
    assert budget.tokens > 1
    assert all(p.grad is None for p in model.parameters())
    card.room = 0
    with pytest.raises(RunError, match="nothing is left for the update"):
        TokenBudget(config, model).find(parts[0], parts[1], out)
    assert all(p.grad is None for p in model.parameters())


def test_auto_recomputes_before_it_gives_up(tokenizer, prompts):
    """With a number of tokens given, too."""
    config, model, out, parts = setup(tokenizer, prompts, gradient_checkpointing="auto", micro_batch_tokens=1)
    advantages, first = advantages_for(out), []

    class Tight(Scorer):
        def forward(self, rollout, rows):
            if not self.model.is_gradient_checkpointing:
                first.append(len(rows))
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(rollout, rows)

    parts[1] = Tight(model.train(), parts[1].tables)
    metrics = update(parts, out, advantages, config)
    assert first == [1]
    assert metrics["grad_norm"] > 0


def test_importance_weights_reach_the_loss(tokenizer, prompts):
    """The sampler's log-probs are made lower than the update's: with the ratio counted, the gradient grows."""
    norms = {}
    for kind in ("none", "token"):
        config, _, out, parts = setup(tokenizer, prompts, rollout_is=kind, max_grad_norm=1e-6)
        out.logp = out.logp - 0.5
        norms[kind] = update(parts, out, advantages_for(out), config)["grad_norm"]
    assert norms["token"] == pytest.approx(norms["none"] * math.exp(0.5), rel=1e-3)


def test_truncated_importance_weights_scale_each_token_s_gradient():
    old, sampler = torch.tensor([[0.0, -1.0, -3.0]]), torch.tensor([[0.0, -2.0, -1.0]])
    weights = grpo_train.importance_weights(old, sampler, 2.0)
    assert torch.allclose(weights, torch.tensor([[1.0, 2.0, math.exp(-2)]]))
    logp = old.clone().requires_grad_()
    loss, _ = grpo_train.grpo_loss(
        logp, old, torch.tensor([3.0]), torch.ones(1, 3), epsilon=0.2, epsilon_high=0.2, importance=weights
    )
    loss.backward()
    assert torch.allclose(logp.grad, -3 * weights)


def test_the_ratio_is_one_at_mu_one_and_moves_at_mu_two(tokenizer, prompts):
    config, _, out, parts = setup(tokenizer, prompts, mu=1)
    first = update(parts, out, advantages_for(out), config)
    assert first["clip_low"] == first["clip_high"] == 0
    assert first["logp_diff_max"] < 1e-4
    config, _, out, parts = setup(tokenizer, prompts, mu=3, learning_rate=0.05)
    again = update(parts, out, advantages_for(out), config)
    assert again["clip_low"] + again["clip_high"] > 0
    assert parts[4].last_epoch == 3


def test_without_signal_and_without_kl_no_weight_moves_by_one_bit(tokenizer, prompts):
    """I4: Adam's momentum alone would move them."""
    config, model, out, parts = setup(tokenizer, prompts)
    update(parts, out, advantages_for(out), config)
    before = [p.clone() for p in model.parameters()]
    metrics = update(parts, out, torch.zeros(len(out.ids)), config)
    assert metrics["skipped"] == "no group carries a signal"
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert parts[4].last_epoch == 2, "the schedule goes on"


def test_a_signal_in_masked_rows_only_is_none_and_the_schedule_goes_on_by_mu(tokenizer, prompts):
    config, model, out, parts = setup(tokenizer, prompts, mask_truncated_completions=True, mu=3)
    assert not out.ended.all()
    before = [p.clone() for p in model.parameters()]
    metrics = update(parts, out, torch.where(out.ended, 0.0, 1.0), config)
    assert metrics["skipped"] == "no group carries a signal"
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert parts[4].last_epoch == 3


def test_the_reference_reads_what_the_sampler_saw_so_that_a_copy_of_the_policy_is_no_way_off(
    tokenizer, prompts
):
    """Scored on plain ids, the same weights are another distribution, and the KL a number of its own."""
    config, model, out, parts = setup(tokenizer, prompts, beta=0.1)
    parts[2] = Scorer(build_model("qwen2", tokenizer), parts[1].tables)
    assert update(parts, out, advantages_for(out), config)["kl"] == pytest.approx(0, abs=1e-7)


def test_metrics_of_several_passes_are_means_and_the_sampler_is_compared_with_the_first(tokenizer, prompts):
    """A rate at which nothing moves: three passes give what one gives."""
    one, three = {}, {}
    for mu, metrics in ((1, one), (3, three)):
        config, _, out, parts = setup(tokenizer, prompts, mu=mu, learning_rate=1e-12, beta=0.1)
        out.logp = out.logp - 0.5
        metrics |= update(parts, out, advantages_for(out), config)
    assert three == pytest.approx(one, rel=1e-4, abs=1e-6)
    assert one["logp_diff"] == pytest.approx(0.5, abs=1e-4)
    config, _, out, parts = setup(tokenizer, prompts, mu=3, learning_rate=0.05)
    assert update(parts, out, advantages_for(out), config)["logp_diff_max"] < 1e-4


def test_the_upper_edge_of_the_clipping_is_its_own_setting(tokenizer, prompts):
    found = []
    for edge in (None, 1e6):
        config, _, out, parts = setup(
            tokenizer, prompts, mu=3, learning_rate=0.05, epsilon=0.01, epsilon_high=edge
        )
        found.append(update(parts, out, advantages_for(out), config))
    assert found[0]["clip_high"] > 0
    assert found[1]["clip_high"] == 0 < found[1]["clip_low"]


def test_reward_weights_are_those_of_the_settings():
    assert [weight for _, weight in grpo_train.reward_functions(Config(reward_weights=[0.5, 3.0]))] == [
        0.5,
        3.0,
    ]


def test_a_row_is_drawn_by_its_place_in_the_batch_whoever_samples_it(tokenizer, llama, prompts):
    """I10, and at the temperature of the settings; an extra rollout draws anew."""
    decoder = GroupDecoder(llama, tokenizer, "e", Interaction(0.3))
    config, batch = (
        Config(num_generations=3, max_completion_length=16, temperature=0.7, eval_every=0),
        [SimpleNamespace(ids=ids) for ids in prompts],
    )
    whole, own = (
        grpo_train.sample(decoder, batch, range(5), config, 2),
        grpo_train.sample(decoder, batch, range(2, 4), config, 2),
    )
    assert own.texts == whole.texts[6:12]
    assert own.problems == batch[2:4]
    assert own.texts != grpo_train.sample(decoder, batch, range(2, 4), config, 2, retry=1).texts
    assert whole.rollout.temperature == 0.7


def test_deviations_of_rewards_are_logged_within_groups_and_over_all(tokenizer, prompts):
    """Groups (0, 0, 0, 4) and (5, 5, 5, 5): deviations 2 and 0, mean 1; of all eight the square root of 44 / 7."""
    config, _, out, parts = setup(tokenizer, prompts[:2])
    rewards = torch.tensor([0.0, 0, 0, 4, 5, 5, 5, 5], dtype=torch.float64)
    found = grpo_train.rollout_metrics(
        parts[0],
        out,
        ["a", "a", "b", "c"] * 2,
        [True] + [False] * 7,
        rewards,
        {"r": rewards.tolist()},
        config,
    )
    assert found["reward_std_in_group"] == pytest.approx(1)
    assert found["reward_std"] == pytest.approx(math.sqrt(44 / 7)), "squares 9, 9, 9, 1, 4, 4, 4, 4"
    assert (
        found["reward"],
        found["correct"],
        found["unique_completions"],
        found["frac_reward_zero_std"],
    ) == (3.0, 0.125, 0.75, 0.5)


def test_the_change_of_inputs_is_a_mean_over_all_processes_however_few_have_listened(
    tokenizer, prompts, monkeypatch
):
    """One input of one of two processes was blended: it counted half."""
    config, _, out, parts = setup(tokenizer, prompts[:2])
    out.mix, out.input_change = torch.zeros_like(out.mix), torch.zeros_like(out.input_change)
    out.mix[0, 0, 0, 1], out.input_change[0, 0] = 1.0, 0.25

    def two(values):
        other = {**values[0], "thinking": [0], "alive": [0], "change": [0.0], "listening": [0]}
        return [*values, other]

    monkeypatch.setattr(grpo_train, "gather_object", two)
    rewards = torch.arange(8, dtype=torch.float64)
    found = grpo_train.rollout_metrics(
        parts[0], out, ["a"] * 8, [True] * 8, rewards, {"r": rewards.tolist()}, config
    )
    assert found["input_change"] == pytest.approx(0.25)


def test_signals_that_are_switched_off_are_not_handed_on():
    """nohup's SIGHUP would end what nohup was to keep."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        assert heeded() == [
            name
            for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
            if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN
        ]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_batch_that_fills_the_budget_is_not_cut_and_a_resumed_run_has_its_budget():
    assert [len(rows) for rows in micro_batches(SimpleNamespace(sizes=([4] * 10, [6] * 10)), 50)] == [5, 5]
    for given, expected in ((None, 77), (50, 50)):
        budget = TokenBudget(Config(micro_batch_tokens=given), None)
        budget.restore([77, False])
        assert budget.tokens == expected


def test_with_kl_a_step_without_signal_still_pulls_to_the_reference(tokenizer, prompts):
    config, model, out, parts = setup(tokenizer, prompts, beta=0.5)
    before = [p.clone() for p in model.parameters()]
    metrics = update(parts, out, torch.zeros(len(out.ids)), config)
    assert metrics["kl"] > 0
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_nan_anywhere_in_the_update_changes_no_weight_and_is_logged(tokenizer, prompts):
    config, model, out, parts = setup(tokenizer, prompts)
    poisoned = advantages_for(out)
    poisoned[3] = NAN
    before = [p.clone() for p in model.parameters()]
    metrics = update(parts, out, poisoned, config)
    assert metrics["skipped"] == "loss or gradient not finite"
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_step_in_which_every_completion_was_cut_off_and_masked_moves_no_weight(tokenizer, prompts, beta):
    """TRL PR#3700: 0 / 0 there; here the gradient was 0 and Adam's momentum still moved the weights."""
    config, model, out, parts = setup(tokenizer, prompts, mask_truncated_completions=True, beta=beta)
    update(parts, out, advantages_for(out), config)
    out.ended[:] = False
    before = [p.clone() for p in model.parameters()]
    assert "cut off" in update(parts, out, advantages_for(out), config)["skipped"]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_warm_start_never_sees_the_problems_that_are_held_out(tokenizer):
    """Held-out accuracy before GRPO was measured on what the warm start had learned."""
    grpo = Config(model="tiny", dataset="arithmetic", limit=300, eval_problems=40)
    shared = {name: getattr(grpo, name) for name in grpo_train.sft_train.INHERITED}
    _, held_out, _ = grpo_train.prepare_problems(grpo, grpo_train.load_tokenizer("tiny"))
    learned, _, _ = grpo_train.prepare_problems(
        grpo_train.sft_train.Config(**shared), grpo_train.load_tokenizer("tiny")
    )
    assert len(held_out) == 40
    assert not {p.prompt for p in held_out} & {p.prompt for p in learned}


def test_each_step_has_problems_of_its_own_until_all_were_met(trained):
    rows = [json.loads(line) for line in (trained / "rollouts.jsonl").read_text().splitlines()]
    batches = [{row["example_id"] for row in rows if row["step"] == step} for step in (1, 2, 3)]
    assert [len(batch) for batch in batches] == [3, 3, 3]
    assert len(set.union(*batches)) == 9


def test_groups_that_give_way_give_way_to_problems_that_nobody_has_met(warm, tmp_path):
    """No group carries a signal: of six problems a step four are drawn for nothing, and the next step begins behind them."""
    (tmp_path / "same.py").write_text(
        "def same(completions, **kwargs):\n    return [1.0] * len(completions)\n"
    )
    flags = (
        "--reward",
        f"{tmp_path}/same.py:same",
        "--dynamic_sampling",
        "2",
        "--batch_size",
        "2",
        "--num_steps",
        "3",
        "--eval_every",
        "0",
        "--limit",
        "40",
    )
    out = run_short(warm, tmp_path / "out", *flags)
    rows = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    config = grpo_train.parse_config(Config, [*SHORT, *flags])
    ids = [p.id for p in problems_of(config)]
    order = [ids[i] for i in problem_batch(40, 18, 0, config.seed)]
    assert [
        list(dict.fromkeys(row["example_id"] for row in rows if row["step"] == step)) for step in (1, 2, 3)
    ] == [order[4:6], order[10:12], order[16:18]]


def test_the_entropy_is_what_sampling_at_that_temperature_is_surprised_by_on_average(trained):
    """-log p of the samples has the entropy as its mean; one group of the first step is logged, 4 rows of up to 48 tokens."""
    rows = [json.loads(line) for line in (trained / "rollouts.jsonl").read_text().splitlines()]
    surprise = [-p for row in rows if "logps" in row for p in row["logps"]]
    entropy = [json.loads(line)["entropy"] for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert sum(entropy) / len(entropy) == pytest.approx(sum(surprise) / len(surprise), rel=0.3)


def test_a_warm_start_leaves_the_held_out_out_and_is_made_again_for_other_settings(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        grpo_train.sft_train,
        "train",
        lambda config, stop: (
            made.append(config) or Path(config.output_dir).mkdir(parents=True, exist_ok=True)
        ),
    )
    for flags in (
        (),
        (),
        ("--eval_problems", "9"),
        ("--eval_problems", "9", "--eval_every", "30"),
        ("--seed", "3"),
    ):
        config = grpo_train.parse_config(
            Config, ["--config", "configs/tiny.yaml", "--output_dir", str(tmp_path / "out"), *flags]
        )
        grpo_train.warm_start(config, Accelerator(), None)
    assert [(sft.eval_problems, sft.seed) for sft in made] == [(200, 0), (9, 0), (200, 3)]


def test_every_process_has_a_problem_of_the_batch():
    check_shares(Config(batch_size=2), 2)
    with pytest.raises(SettingError, match="must give each of the 3 processes a problem"):
        check_shares(Config(batch_size=2), 3)


def test_a_refused_run_leaves_no_output_directory(warm, tmp_path):
    (tmp_path / "model").mkdir()
    for file in warm.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model" / "model.safetensors").write_bytes((warm / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(grpo_train.SettingError, match="model="):
        run_short(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Settings


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num_generations", "1"], ["num_generations=1", "at least 2"]),
        (["--batch_size", "0"], ["batch_size=0", "at least 1"]),
        (["--learning_rate", "-1"], ["learning_rate=-1", "0 or more"]),
        (["--learning_rate", "nan"], ["learning_rate=nan"]),
        (["--learning_rate", "inf"], ["learning_rate=inf"]),
        (["--seed", "-1"], ["seed=-1"]),
        (["--num_epochs", "inf"], ["num_epochs=inf"]),
        (["--num_iterations=2", "--beta", "0"], ["num_iterations='2'"]),
        (["--config"], ["--config"]),
        (["--chat_template_kwargs", '{"tokenize": true}'], ["chat_template_kwargs", "tokenize"]),
        (["--temperature", "0"], ["temperature=0", "positive"]),
        (["--top_p", "0.9"], ["top_p", "evaluation only"]),
        (["--num_iterations", "3"], ["num_iterations", "outer_iterations or mu"]),
        (["--loss_type", "ppo"], ["loss_type='ppo'", "grpo, dapo, dr_grpo"]),
        (["--answer_format", "json"], ["answer_format='json'", "xml, hash, boxed, r1"]),
        (["--lora_r", "-1"], ["lora_r=-1", "full fine-tuning"]),
        (["--save_adapter", "true"], ["save_adapter=True", "lora_r"]),
        (["--optimizer", "sgd"], ["optimizer='sgd'", "adamw_8bit"]),
        (["--rollout_is", "sequence"], ["rollout_is='sequence'", "token"]),
        (["--reward", "nothing.py:f"], ["nothing.py"]),
        (["--reward_weights", "1"], ["reward_weights", "correctness_reward", "format_reward"]),
        (["--chat_template_kwargs", "{"], ["chat_template_kwargs", "JSON"]),
        (["--system_prompt_file", "/nothing"], ["system_prompt_file", "cannot be read"]),
        (["--batch", "3"], ["--batch"]),
        (["--config", "/nothing.yaml"], ["config", "/nothing.yaml"]),
        (["--eval_problems", "0"], ["eval_problems=0", "eval_every"]),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_what_would_do(flags, words):
    with pytest.raises(grpo_train.SettingError) as error:
        grpo_train.parse_config(Config, flags)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch_size: 2\nbatch_size: 3\n", ["repeated key batch_size"]),
        ("no_such: 2\n", ["no_such=2", "no such setting"]),
        ("learning_rat: 2\n", ["learning_rat=2", "did you mean learning_rate?"]),
        ("chat_template_kwargs: {a: 2024-01-01}\n", ["chat_template_kwargs=", "put it into quotes"]),
        ('system_prompt_file: "a\\0b"\n', ["system_prompt_file=", "cannot be read"]),
        ("chat_template_kwargs: {messages: 1}\n", ["chat_template_kwargs=", "are set here"]),
        ("batch_size: many\n", ["batch_size='many'", "int"]),
        ("model: a\nmodel_name_or_path: b\n", ["given twice"]),
        ("num_iterations: 2\n", ["num_iterations=2", "outer_iterations"]),
        ("- 1\n", ["key: value"]),
        ("lr_scheduler_type: cosin\n", ["lr_scheduler_type='cosin'", "cosine"]),
        ("reward_weights: [a, b]\n", ["reward_weights='a'"]),
        ("a: [\n", ["config="]),
    ],
)
def test_a_bad_yaml_file_is_refused(tmp_path, text, words):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(grpo_train.SettingError) as error:
        grpo_train.parse_config(Config, ["--config", str(tmp_path / "c.yaml")])
    assert all(word in str(error.value) for word in words), str(error.value)


def test_yaml_reads_5e_6_as_a_number_and_flags_win_over_it(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "learning_rate: 5e-6\nmodel_name_or_path: m\nnum_epochs: null\nepsilon_high: 1\nchat_template_kwargs: {enable_thinking: false}\n"
    )
    config = grpo_train.parse_config(
        Config, ["--config", str(tmp_path / "c.yaml"), "--model", "n", "--save_steps", "5"]
    )
    assert (config.learning_rate, config.model, config.save_every, config.epsilon_high) == (5e-6, "n", 5, 1.0)
    assert template_kwargs(config) == {"enable_thinking": False}


def test_every_shipped_config_is_read(monkeypatch):
    monkeypatch.setattr(
        "running.settings.find_spec", lambda name: name
    )  # as if peft and bitsandbytes were there
    for path in (ROOT / "configs").glob("*.yaml"):
        if "warm_start" in path.name:
            grpo_train.sft_train.Config(**grpo_train.settings_from_file(grpo_train.sft_train.Config, path))
        else:
            grpo_train.parse_config(Config, ["--config", str(path)])


@pytest.mark.parametrize(
    ("flags", "package"), [(["--lora_r", "8"], "peft"), (["--optimizer", "adamw_8bit"], "bitsandbytes")]
)
def test_a_package_that_is_missing_is_named_with_what_does_without_it(flags, package, monkeypatch):
    monkeypatch.setattr("running.settings.find_spec", lambda name: None)
    with pytest.raises(grpo_train.SettingError, match=f"pip install {package}, or say {flags[0]}"):
        grpo_train.parse_config(Config, flags)


# The whole job

SHORT = [
    "--config",
    "configs/tiny.yaml",
    "--num_steps",
    "3",
    "--eval_every",
    "3",
    "--eval_problems",
    "20",
    "--batch_size",
    "3",
    "--num_generations",
    "4",
    "--limit",
    "600",
]


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """A warm start of 20 steps, shared by the tests that need one."""
    folder = tmp_path_factory.mktemp("warm") / "sft"
    settings = grpo_train.settings_from_file(
        grpo_train.sft_train.Config, ROOT / "configs" / "tiny_warm_start.yaml"
    )
    settings |= dict(
        model="tiny",
        dataset="arithmetic",
        num_steps=20,
        max_completion_length=48,
        output_dir=str(folder),
        cpu_threads=1,
    )
    grpo_train.sft_train.train(grpo_train.sft_train.Config(**settings))
    return folder


def run_short(warm, out, *flags):
    return grpo_train.train(
        grpo_train.parse_config(
            Config, [*SHORT, "--warm_start", "none", "--model", str(warm), "--output_dir", str(out), *flags]
        )
    )


@pytest.fixture(scope="session")
def trained(warm, tmp_path_factory):
    return run_short(warm, tmp_path_factory.mktemp("run") / "out", "--save_every", "2", "--beta", "0.04")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(metrics):
    return [{k: v for k, v in m.items() if "seconds" not in k and "per_s" not in k} for m in metrics]


def test_the_warm_start_lowers_its_loss(warm):
    losses = [m["loss"] for m in lines(warm / "metrics.jsonl")]
    assert losses[-1] < 0.5 * losses[0]


def test_a_run_leaves_what_the_readme_promises(trained):
    names = {p.name for p in trained.iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "generation_config.json",
        "metrics.jsonl",
        "rollouts.jsonl",
        "run_config.yaml",
        "checkpoint-2",
    } <= names
    assert not [n for n in names if n.startswith(".") or n.endswith(".part")]
    assert "versions" in (trained / "run_config.yaml").read_text()
    assert AutoModelForCausalLM.from_pretrained(trained / "checkpoint-2").dtype == torch.float32
    assert grpo_eval.Config(model=str(trained / "checkpoint-2")).dataset == "arithmetic", (
        "a checkpoint is evaluated as it was trained"
    )


def test_each_step_logs_every_metric_of_the_glossary(trained):
    metrics = lines(trained / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3]
    glossary = (ROOT / "README.md").read_text().split("## Metrics")[1].split("\n## ")[0]
    for name in set().union(*metrics):
        assert f"`{name}`" in glossary or name.startswith("reward/"), f"{name} is not explained in the README"
    for m in metrics:
        assert {"reward", "reward_std", "reward/correctness_reward", "reward/format_reward", "correct", "frac_reward_zero_std", "unique_completions", "kl",
                "completion_length", "completion_length_min", "completion_length_max", "truncated", "clip_low", "clip_high", "entropy", "grad_norm",
                "learning_rate", "logp_diff_max", "rollout_seconds", "update_seconds", "rollout_tokens_per_s", "update_tokens_per_s", "thinking_paths",
                "input_change", "update_shown"} <= set(m)  # fmt: skip
        assert m["logp_diff_max"] < 1e-3
        assert m["reward"] == pytest.approx(m["reward/correctness_reward"] + m["reward/format_reward"])
    assert "eval_accuracy" in metrics[-1]
    assert "eval_accuracy_before" in metrics[0]


def test_rollout_records_hold_the_group_and_who_listened_to_whom(trained):
    records = lines(trained / "rollouts.jsonl")
    assert len(records) == 3 * 3 * 4
    for r in records[:4]:
        weights = np.frombuffer(base64.b64decode(r["mix"]), dtype=np.uint8).reshape(r["length"], 4)
        assert not weights[:, r["generation"]].any(), "a path does not listen to itself"
        assert abs(int(weights[0].sum()) - 255) <= 4
        assert len(r["tokens"]) == len(r["logps"]) == r["length"]
        assert r["stop_condition"] in ("eos", "length")
        assert r["reward"] == sum(r["rewards"].values())
    assert "tokens" not in records[4]
    assert sum(r["advantage"] for r in records[:4]) == pytest.approx(0, abs=1e-4)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(warm, trained, tmp_path):
    same = run_short(warm, tmp_path / "same", "--beta", "0.04", "--micro_batch_tokens", "100")
    other = run_short(warm, tmp_path / "other", "--beta", "0.04", "--seed", "7")
    a, b, c = (lines(folder / "rollouts.jsonl") for folder in (trained, same, other))
    assert [r["completion"] for r in a] == [r["completion"] for r in b], "micro-batches change nothing (I10)"
    assert [r["completion"] for r in a] != [r["completion"] for r in c]


def test_each_reuse_of_a_rollout_is_an_optimiser_step_but_no_step_of_the_log(warm, tmp_path):
    """open-r1#583: four times the steps, with nobody knowing why."""
    out = run_short(
        warm,
        tmp_path / "mu",
        "--mu",
        "4",
        "--learning_rate",
        "3e-4",
        "--lr_scheduler_type",
        "linear",
        "--warmup_ratio",
        "0",
        "--gradient_checkpointing",
        "true",
    )
    metrics = lines(out / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert max(m["logp_diff"] for m in metrics) < 1e-4, (
        "of the first pass: later ones move away from the sampler"
    )
    assert [m["learning_rate"] for m in metrics] == pytest.approx(
        [3e-4 * (12 - done) / 12 for done in (0, 4, 8)]
    )


def test_lambda_zero_runs_plain_grpo(warm, tmp_path):
    metrics = lines(run_short(warm, tmp_path / "plain", "--m3po_lambda", "0") / "metrics.jsonl")
    assert "thinking_paths" not in metrics[0]
    assert "kl" not in metrics[0], "beta 0 has no reference"


def test_the_reference_is_the_policy_again_when_an_outer_iteration_begins(warm, tmp_path):
    flags = (
        "--num_steps",
        "2",
        "--outer_iterations",
        "2",
        "--beta",
        "0.1",
        "--learning_rate",
        "1e-3",
        "--lr_scheduler_type",
        "constant",
        "--warmup_ratio",
        "0",
    )
    kl = [m["kl"] for m in lines(run_short(warm, tmp_path / "outer", *flags) / "metrics.jsonl")]
    assert kl[0] < 1e-7 > kl[2]
    assert min(kl[1], kl[3]) > 1e-6


def test_a_saved_run_gives_plain_transformers_the_same_greedy_answers(trained, tmp_path):
    config = grpo_eval.Config(
        model=str(trained), limit=12, output_dir=str(tmp_path), name="e", max_completion_length=30
    )
    report, folder = grpo_eval.evaluate(config)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(trained), AutoTokenizer.from_pretrained(trained)
    for record in lines(folder / "samples.jsonl"):
        ids = tokenizer(record["prompt"], return_tensors="pt", add_special_tokens=False).input_ids
        made = model.generate(input_ids=ids, max_new_tokens=30, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(made, skip_special_tokens=True) == record["resps"][0]
    assert report["questions"] == 12
    assert report["dataset"] == "arithmetic", "what training used, without being told"


def test_a_used_output_directory_is_refused(warm, trained):
    with pytest.raises(grpo_train.SettingError, match="holds a run already"):
        run_short(warm, trained)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise KeyError('x')", ["KeyError"]),
        ("return [float('nan')] * len(completions)", ["nan", "finite"]),
        ("return [1.0]", ["1 values for 12"]),
        ("return [None] * len(completions)", ["None for all"]),
        ("return None", ["NoneType"]),
    ],
)
def test_a_reward_function_that_fails_is_named_with_its_step_and_saves_nothing(warm, tmp_path, body, words):
    """TRL#6533: one value was silently broadcast."""
    (tmp_path / "mine.py").write_text(f"def mine(completions, **kwargs):\n    {body}\n")
    with pytest.raises(RewardError) as error:
        run_short(warm, tmp_path / "out", "--reward", f"{tmp_path}/mine.py:mine", "--eval_every", "0")
    assert all(word in str(error.value) for word in ("mine", "step 1", *words)), str(error.value)
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_users_reward_gets_the_columns_that_trl_gives(warm, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def mine(prompts, completions, completion_ids, answer, solution, **kwargs):\n"
        "    assert completions[0][0]['role'] == 'assistant' and prompts[0][-1]['role'] == 'user' and answer == solution\n"
        "    return [None if i % 4 == 0 else float(len(ids)) for i, ids in enumerate(completion_ids)]\n"
    )
    metrics = lines(
        run_short(warm, tmp_path / "out", "--reward", f"{tmp_path}/mine.py:mine=0.5") / "metrics.jsonl"
    )
    assert metrics[0]["unscored"] == 3
    assert metrics[0]["reward"] == pytest.approx(0.5 * metrics[0]["reward/mine"])


def test_debug_changes_no_result_and_says_who_listened(warm, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("M3PO_DEBUG", "1")
    out = run_short(warm, tmp_path / "debug", "--beta", "0.04")
    printed = capsys.readouterr().out
    assert "path 0: heard somebody at" in printed
    assert "did it matter?" in printed
    strip = without_times(lines(trained / "metrics.jsonl")), without_times(lines(out / "metrics.jsonl"))
    assert strip[0] == strip[1]


def test_debug_looks_with_the_weights_that_sampled(warm, tmp_path, monkeypatch, capsys):
    """Scored after a large update, tokens "would have been others" for a reason that is not the paths."""
    monkeypatch.setenv("M3PO_DEBUG", "1")
    run_short(
        warm,
        tmp_path / "debug",
        "--m3po_lambda",
        "1e-7",
        "--learning_rate",
        "3e-2",
        "--warmup_ratio",
        "0",
        "--eval_every",
        "0",
    )
    answers = [line for line in capsys.readouterr().out.splitlines() if line.startswith("did it matter?")]
    assert [line.split()[3] for line in answers] == ["0"] * 3


def test_every_nth_step_tells_which_tokens_listening_changed(warm, tmp_path):
    """Beside the sampled token stands what the same draw gives with nobody heard; nowhere without M3PO, or where inspect_every says 0."""
    out = run_short(
        warm,
        tmp_path / "out",
        "--inspect_every",
        "2",
        "--m3po_lambda",
        "0.9",
        "--log_groups",
        "2",
        "--eval_every",
        "0",
    )
    records = lines(out / "rollouts.jsonl")
    read_again = {(r["step"], r["generation"]) for r in records if "alone" in r}
    assert {step for step, _ in read_again} == {1, 3}
    assert len(read_again) == sum("alone" in r for r in records), "the first group of a step only"
    turned = [(r, int(t)) for r in records for t in r.get("alone", {})]
    assert turned
    assert all(r["pieces"][t] != r["alone"][str(t)] for r, t in turned)
    for flags in (("--m3po_lambda", "0"), ("--inspect_every", "0")):
        out = run_short(warm, tmp_path / flags[0], "--eval_every", "0", *flags)
        assert not any("alone" in r for r in lines(out / "rollouts.jsonl"))


def test_no_memory_to_look_inside_ends_no_run(warm, tmp_path, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(inspection, "interaction_effect", full)
    with pytest.warns(UserWarning, match="--inspect_every 0 leaves it out"):
        out = run_short(warm, tmp_path / "out", "--inspect_every", "1", "--eval_every", "0")
    assert len(lines(out / "metrics.jsonl")) == 3


def test_a_group_that_gave_way_is_read_again_with_its_own_draws(warm, tmp_path):
    """With next to nothing heard no token may be another one; with the draws of the group that it replaced most would be."""
    (tmp_path / "mine.py").write_text(
        "calls = []\ndef mine(completions, **kwargs):\n    calls.append(1)\n    return [float(i * (len(calls) % 2 == 0)) for i in range(len(completions))]\n"
    )
    flags = (
        "--reward",
        f"{tmp_path}/mine.py:mine",
        "--dynamic_sampling",
        "1",
        "--inspect_every",
        "1",
        "--m3po_lambda",
        "1e-7",
        "--eval_every",
        "0",
    )
    out = run_short(warm, tmp_path / "out", *flags)
    assert all(m["replaced_groups"] for m in lines(out / "metrics.jsonl"))
    told = [r["alone"] for r in lines(out / "rollouts.jsonl") if "alone" in r]
    assert told
    assert not any(told)


def test_a_model_that_breaks_leaves_a_log_that_any_json_reader_reads(tokenizer, prompts, tmp_path):
    """Its log-probs are NaN, and report.html said no word of just that run."""
    config, model, _, (accelerator, scorer, *_) = setup(tokenizer, prompts, batch_size=2)
    model.model.norm.weight.data[0] = NAN
    decoder = GroupDecoder(model, tokenizer, "e", Interaction(0.3))
    batch = encode_prompts(load_problems("arithmetic", limit=2), tokenizer, "", 200)[0]
    sampled = grpo_train.sample(decoder, batch, range(2), config, 0)
    grpo_train.score(grpo_train.reward_functions(config), sampled, config, 0)
    grpo_train.log_rollouts(accelerator, tmp_path, 0, tokenizer, sampled, [False] * 8, torch.zeros(8), config)
    records = [json.loads(line, parse_constant=pytest.fail) for line in open(tmp_path / "rollouts.jsonl")]
    assert records[0]["logps"] == [None] * records[0]["length"]


def test_each_evaluation_leaves_its_answers(trained):
    metrics, answers = lines(trained / "metrics.jsonl"), lines(trained / "evaluations.jsonl")
    for step, accuracy in [
        (0, metrics[0]["eval_accuracy_before"]),
        *((m["step"], m["eval_accuracy"]) for m in metrics if "eval_accuracy" in m),
    ]:
        rows = [row for row in answers if row["step"] == step]
        assert sum(row["right"] for row in rows) / len(rows) == pytest.approx(accuracy)
        assert len({row["example_id"] for row in rows}) == len(rows)
    assert (trained / "report.html").exists()


def test_an_evaluation_on_the_one_file_a_model_was_trained_on_is_refused(warm, tmp_path):
    rows = [{"question": p.question, "answer": p.answer} for p in load_problems("arithmetic", limit=60)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = run_short(warm, tmp_path / "out", "--dataset", str(tmp_path / "mine.jsonl"), "--eval_every", "0")
    with pytest.raises(grpo_train.SettingError, match="one file this model was trained on"):
        grpo_eval.Config(model=str(out))
    assert grpo_eval.Config(model=str(out), split="train").dataset == str(tmp_path / "mine.jsonl")


def test_all_prompts_too_long_is_an_error_that_says_what_to_set(warm, tmp_path):
    with pytest.raises(ValueError, match="max_prompt_length=3"):
        run_short(warm, tmp_path / "out", "--max_prompt_length", "3")
    assert not (tmp_path / "out").exists()


def command(*words, nproc=None):
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc)] if nproc else []
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *launcher, *map(str, words)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_mistake_on_the_command_line_is_one_line_and_status_two():
    done = command(
        "grpo_train.py", "--model", "/no/such/model", "--dataset", "arithmetic", "--output_dir", "/tmp/never"
    )
    assert done.returncode == 2
    ours = [
        line for line in done.stderr.splitlines() if "kernels" not in line
    ]  # what bitsandbytes says where it is installed without a GPU
    assert len(ours) == 1
    assert ours[0].startswith("grpo_train.py: model='/no/such/model'")


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "problems"), [(2, 7), (2, 8), (4, 8), (8, 8), (4, 9)])
def test_many_processes_give_the_run_that_one_gives(processes, problems, warm, tmp_path):
    """I3, I10: seven problems do not divide by two processes, nor nine by four; TRL PR#2824 sampled the same texts on each."""
    flags = ("--batch_size", problems, "--max_grad_norm", "0.1", "--beta", "0.04", "--micro_batch_tokens", "300", "--max_completion_length", "24",
             "--log_groups", "5", "--cpu_threads", "1")  # fmt: skip
    done = command(
        "grpo_train.py",
        *SHORT,
        "--warm_start",
        "none",
        "--model",
        warm,
        "--output_dir",
        tmp_path / "many",
        *flags,
        nproc=processes,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    run_short(warm, tmp_path / "one", *map(str, flags))
    one, many = (lines(tmp_path / name / "rollouts.jsonl") for name in ("one", "many"))
    assert [(r["step"], r["example_id"], r["completion"], r["reward"]) for r in one] == [
        (r["step"], r["example_id"], r["completion"], r["reward"]) for r in many
    ]
    assert [sum("mix" in r for r in records) for records in (one, many)] == [3 * 5 * 4] * 2
    for a, b in zip(
        lines(tmp_path / "one" / "metrics.jsonl"), lines(tmp_path / "many" / "metrics.jsonl"), strict=True
    ):
        for name in (
            "loss",
            "grad_norm",
            "kl",
            "entropy",
            "reward",
            "completion_length",
            "thinking_paths",
            "frac_reward_zero_std",
        ):
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-6), name
    weights = [AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "many")]
    assert max(float((weights[0][k] - weights[1][k]).abs().max()) for k in weights[0]) < 1e-5


@pytest.mark.slow
def test_a_supervised_run_of_two_processes_is_that_of_one(warm, tmp_path):
    """I3: the loss is a mean over the tokens of all processes, seven rows on two of them, in micro-batches of uneven number."""
    flags = (
        "--model", warm, "--dataset", "arithmetic", "--limit", "60", "--batch_size", "7", "--num_epochs", "null", "--num_steps", "3", "--cpu_threads", "1",
        "--learning_rate", "1e-3", "--max_grad_norm", "0.1", "--eval_problems", "8", "--eval_every", "3", "--micro_batch_tokens", "200",
    )  # fmt: skip
    for name, processes in (("one", None), ("many", 2)):
        done = command("sft_train.py", *flags, "--output_dir", tmp_path / name, nproc=processes)
        assert done.returncode == 0, done.stderr[-2000:]
    for a, b in zip(
        lines(tmp_path / "one" / "metrics.jsonl"), lines(tmp_path / "many" / "metrics.jsonl"), strict=True
    ):
        for name in ("loss", "grad_norm", "tokens", "learning_rate"):
            assert a[name] == pytest.approx(b[name], rel=1e-5), name
        assert a.get("eval_accuracy") == b.get("eval_accuracy")
    weights = [AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "many")]
    assert max(float((weights[0][k] - weights[1][k]).abs().max()) for k in weights[0]) < 1e-4


def accuracy_after(folder, argv):
    grpo_train.train(grpo_train.parse_config(Config, argv))
    metrics = lines(folder / "metrics.jsonl")
    return metrics[0]["eval_accuracy_before"], metrics[-1]["eval_accuracy"]


@pytest.mark.slow
def test_the_tiny_job_learns_from_its_reward_and_learns_nothing_from_shuffled_advantages(
    tmp_path, monkeypatch
):
    """The whole of configs/tiny.yaml, and a shorter copy of it in which every advantage goes to a wrong completion."""
    argv = ["--config", "configs/tiny.yaml", "--output_dir"]
    before, after = accuracy_after(tmp_path / "honest", [*argv, str(tmp_path / "honest")])
    assert 0.35 < before < 0.65
    assert after > before + 0.25
    honest, generator = group_advantages, torch.Generator().manual_seed(0)
    monkeypatch.setattr(
        grpo_train,
        "group_advantages",
        lambda *a: (x := honest(*a))[torch.randperm(len(x), generator=generator)],
    )
    start = ["--warm_start", "none", "--model", str(tmp_path / "honest" / "warm_start"), "--num_steps", "120"]
    before, after = accuracy_after(tmp_path / "shuffled", [*argv, str(tmp_path / "shuffled"), *start])
    assert after <= before + 0.1  # 200 problems: 0.07 is two standard deviations of a difference


def test_a_process_that_was_started_by_a_launcher_starts_none(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert starts_processes(Config()) == 4
    assert starts_processes(Config(num_processes=2)) == 2
    assert starts_processes(Config(num_processes=1)) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SettingError, match="there are 4 GPUs"):
        starts_processes(Config(num_processes=5))
    for variable in ("RANK", "ACCELERATE_MIXED_PRECISION"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "0")
            assert starts_processes(Config()) is None


def children_of(pid):
    """Processes of this machine that are alive and that `pid` started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            found += [int(folder.name)] if int(parent) == pid and state != "Z" else []
    return found


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "status"),
    [(("SIGTERM",), 143), (("SIGUSR1",), 138), (("SIGINT", "SIGINT"), 130), (("SIGKILL",), -9)],
)
def test_a_signal_to_the_one_that_was_started_ends_them_all(tmp_path, signals, status):
    """No orphan holds a card, whatever ended the parent; the second of two signals does not wait."""
    words = [
        *SHORT,
        "--warm_start",
        "none",
        "--model",
        "tiny",
        "--num_processes",
        "2",
        "--num_steps",
        "100000",
        "--eval_every",
        "0",
        "--output_dir",
        tmp_path / "out",
    ]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    parent = subprocess.Popen(
        [sys.executable, "grpo_train.py", *map(str, words)],
        cwd=ROOT,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics = tmp_path / "out" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, 60)
    children = children_of(parent.pid)
    assert len(children) == 2
    for name in signals:
        parent.send_signal(getattr(signal, name))
        time.sleep(0.05)
    assert parent.wait(timeout=20) == status
    wait_for(lambda: not any(map(alive, children)), 20)


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


@pytest.mark.slow
def test_the_script_starts_its_processes_and_ends_with_the_first_that_fails(warm, tmp_path):
    """open-r1#620: the others waited 30 minutes for the one that had died."""
    flags = [*SHORT, "--warm_start", "none", "--model", warm, "--num_processes", "2", "--num_steps", "2"]
    done = command("grpo_train.py", *flags, "--output_dir", tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert "on 2 cpu process(es)" in done.stdout
    (tmp_path / "fails.py").write_text(
        "import os\ndef reward(completions, **kwargs):\n    if os.environ['RANK'] == '1':\n        raise ValueError('boom')\n"
        "    return [0.0] * len(completions)\n"
    )
    started = time.perf_counter()
    done = command(
        "grpo_train.py",
        *flags,
        "--output_dir",
        tmp_path / "failed",
        "--reward",
        f"{tmp_path / 'fails.py'}:reward",
    )
    assert done.returncode == 1
    assert "boom" in done.stderr
    assert "process 1 ended with status 1" in done.stderr
    assert time.perf_counter() - started < 60


@pytest.mark.slow
def test_sharded_weights_train_as_whole_ones_do(warm, tmp_path):
    """FSDP2 against DDP on two processes: seven problems, so that one of them has fewer micro-batches, which must not hang the other."""
    flags = [
        *SHORT,
        "--warm_start",
        "none",
        "--model",
        warm,
        "--num_processes",
        "2",
        "--batch_size",
        "7",
        "--micro_batch_tokens",
        "300",
        "--beta",
        "0.04",
    ]
    states = []
    for fsdp in ("false", "true"):
        done = command(
            "grpo_train.py", *flags, "--fsdp", fsdp, "--save_every", "2", "--output_dir", tmp_path / fsdp
        )
        assert done.returncode == 0, done.stderr
        states.append(
            (
                load_file(tmp_path / fsdp / "model.safetensors"),
                [json.loads(line) for line in open(tmp_path / fsdp / "metrics.jsonl")],
            )
        )
        assert (tmp_path / fsdp / "checkpoint-2" / "model.safetensors").exists()
    (whole, metrics), (sharded, sharded_metrics) = states
    assert set(whole) == set(sharded)
    assert all(torch.allclose(whole[name], sharded[name], atol=1e-5) for name in whole)
    for a, b in zip(metrics, sharded_metrics, strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)

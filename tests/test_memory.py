"""Micro-batches and how many tokens fit, on a card that is made up."""

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from decoding.engine import Engine
from errors import NoRoomError, RunError
from grpo_train import Config
from learning.log_probs import Scorer
from learning.memory import TokenBudget, batch_tokens, checkpoint_bytes, micro_batches, row_lengths
from learning.packing import is_packed
from small_update import small_update


class SmallMemory(Scorer):
    """Runs out of memory on more than `rows` rows, or now and then in the middle of a backward."""

    rows, error = 3, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def forward(self, rollout, rows):
        logp, entropy = super().forward(rollout, rows)
        if len(rows) > self.rows and torch.is_grad_enabled():
            logp.register_hook(self.fail)
        return logp, entropy

    def fail(self, _):
        raise self.error


CUDNN = "Expected mha_graph.execute(handle, variant_pack, workspace_ptr.get()).is_good() to be true"


@pytest.mark.parametrize(
    "error", [SmallMemory.error, pytest.param(RuntimeError(CUDNN), marks=pytest.mark.slow)]
)
def test_out_of_memory_halves_the_micro_batches_and_changes_no_gradient(
    error, tokenizer, prompts, capsys, monkeypatch
):
    """cuDNN says it so; seen where four runs shared a card, after 33 steps of one of them."""
    results = []
    monkeypatch.setattr(SmallMemory, "error", error)
    for kind in (Scorer, SmallMemory):
        small = small_update(tokenizer, prompts, mu=2, beta=0.1, micro_batch_tokens=10**6)
        small.learner.scorer = kind(small.policy, small.learner.scorer.tables)
        metrics = small.update()
        results.append(([p.detach().clone() for p in small.policy.parameters()], metrics))
    (whole, metrics), (halved, halved_metrics) = results
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(whole, halved, strict=True))
    assert metrics == pytest.approx(halved_metrics, rel=1e-3, abs=1e-5)
    lines = [line for line in capsys.readouterr().out.splitlines() if "out of memory" in line]
    assert len(lines) == 1, "said once, and not again in the second pass"


def test_one_sequence_that_does_not_fit_is_an_error_that_says_what_would_help(tokenizer, prompts):
    small = small_update(tokenizer, prompts)
    small.learner.scorer = SmallMemory(small.policy, small.learner.scorer.tables)
    small.learner.scorer.rows = 0
    with pytest.raises(RunError, match=r"one sequence of \d+ tokens: try --gradient_checkpointing"):
        small.update()


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (SmallMemory.error, NoRoomError, "out of memory for the optimiser's moments: try"),
        (RuntimeError("a fault"), RuntimeError, "^a fault$"),
    ],
)
def test_a_first_step_without_room_for_its_moments_says_so_and_other_errors_are_themselves(
    error, kind, words, tokenizer, prompts, monkeypatch
):
    small = small_update(tokenizer, prompts)

    def step():
        raise error

    monkeypatch.setattr(small.learner.optimizer, "step", step)
    with pytest.raises(kind, match=words):
        small.update()


def summed_gradients(small, rows, processes=1):
    """Gradients of a sum of log-probs as one of several processes takes them, and what is logged of it."""
    asked = SimpleNamespace(
        num_processes=processes, process_index=0, no_sync=lambda _: contextlib.nullcontext()
    )
    learner = dataclasses.replace(small.learner, accelerator=asked)

    def loss_of_rows(rows):
        logp, entropy = learner.scorer(small.rollout, rows)
        return logp.sum(), {"entropy": entropy.sum()}

    small.policy.zero_grad()
    [(loss, sums)] = learner.accumulate_gradients(small.rollout, loss_of_rows, rows)
    assert not loss.requires_grad, "a graph that is kept is memory"
    return torch.cat([p.grad.flatten() for p in small.policy.parameters()]), loss, sums["entropy"]


def test_the_average_over_processes_is_the_gradient_of_the_whole_loss(tokenizer, prompts):
    """DDP divides by their number. A process none of whose rows counts takes part, and adds nothing."""
    small = small_update(tokenizer, prompts, micro_batch_tokens=10**6)
    alone, loss, entropy = summed_gradients(small, [0, 1, 2])
    of_three, same_loss, same_entropy = summed_gradients(small, [0, 1, 2], processes=3)
    assert alone.norm() > 1
    assert (of_three - 3 * alone).norm() < 1e-5 * alone.norm()
    assert (loss, entropy) == (same_loss, same_entropy)
    idle, *logged = summed_gradients(small, [], processes=3)
    assert not idle.any()
    assert logged == [0, 0]


class Card:
    """Memory of a GPU as `TokenBudget.find` asks for it: a fixed part, and a part for each token.

    A token takes a third of it where activations are recomputed.
    """

    def __init__(self, monkeypatch, scorer, free, fixed, each):
        self.scorer, self.peak, self.fixed, self.each = scorer, 0, fixed, each
        self.free, self.room = free, free
        answers = {
            "memory_allocated": lambda: 100,
            "reset_peak_memory_stats": lambda: None,
            "max_memory_allocated": lambda: 100 + self.peak,
            "empty_cache": lambda: None,
            "mem_get_info": self.info,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        self.forward, scorer.forward = scorer.forward, self.watched

    def info(self):
        gradients = sum(p.grad.numel() * 4 for p in self.scorer.parameters() if p.grad is not None)
        return self.free - gradients, self.free

    def watched(self, rollout, rows):
        each = self.each / (3 if self.scorer.model.is_gradient_checkpointing else 1)
        self.peak = self.fixed + int(batch_tokens(rollout, rows, is_packed(self.scorer.model)) * each)
        if self.peak > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.forward(rollout, rows)


@pytest.mark.parametrize(
    ("room", "checkpointing", "recomputes"),
    [(150, "auto", True), (150, "off", False), (5000, "auto", False), (150, "on", True)],
)
def test_the_token_budget_is_what_the_free_memory_holds(
    tokenizer, prompts, monkeypatch, room, checkpointing, recomputes
):
    """Beside gradients, moments and a part that does not grow with the tokens.

    The longest prompt and the longest completion are of different rows.
    """
    small = small_update(tokenizer, prompts, gradient_checkpointing=checkpointing)
    small.policy.train()
    budget = TokenBudget(small.config, small.policy)
    weights = sum(p.numel() for p in small.policy.parameters())
    each, fixed = 30_000, 4_000_000
    Card(monkeypatch, small.learner.scorer, 12 * weights + int((fixed + room * each) / 0.85), fixed, each)
    monkeypatch.setattr(Accelerator, "device", torch.device("cuda"), raising=False)
    budget.find(small.learner.accelerator, small.learner.scorer, small.rollout)
    assert budget.recomputes == small.policy.is_gradient_checkpointing == recomputes
    assert budget.tokens == pytest.approx(room * (3 if recomputes else 1), rel=0.01)
    assert all(p.grad is None for p in small.policy.parameters()), "the trial leaves nothing"


@pytest.mark.parametrize(("to_come", "tokens"), [(7_000_000, 150), (10**12, 107)])
def test_the_token_budget_leaves_room_for_the_storage_of_longer_rollouts(
    to_come, tokens, tokenizer, prompts, monkeypatch
):
    """It grows with what is said, and the trial is behind the first rollout; half of the memory at most is
    left for it, where the limit is one that no card could hold.
    """
    small = small_update(tokenizer, prompts, gradient_checkpointing="off")
    assert small.learner.budget.bytes_to_come() == 0, "one chunk holds its 16 tokens"
    monkeypatch.setattr(Engine, "bytes_to_come", lambda self: to_come)
    small = small_update(tokenizer, prompts, gradient_checkpointing="off")
    budget, weights = small.learner.budget, sum(p.numel() for p in small.policy.parameters())
    free = 12 * weights + 7_000_000 + int((4_000_000 + 150 * 30_000) / 0.85)
    Card(monkeypatch, small.learner.scorer, free, 4_000_000, 30_000)
    monkeypatch.setattr(Accelerator, "device", torch.device("cuda"), raising=False)
    budget.find(small.learner.accelerator, small.learner.scorer, small.rollout)
    assert budget.tokens == pytest.approx(tokens, rel=0.01)


def test_a_trial_that_does_not_fit_leaves_no_gradient_behind(tokenizer, prompts, monkeypatch):
    small = small_update(tokenizer, prompts, gradient_checkpointing="off")
    card = Card(monkeypatch, small.learner.scorer, 10**9, 1000, 1000)
    card.room = 1000 + 2500 * max(row_lengths(small.rollout))  # a row or two fit, all of them do not
    monkeypatch.setattr(Accelerator, "device", torch.device("cuda"), raising=False)
    budget = TokenBudget(small.config, small.policy)
    budget.find(small.learner.accelerator, small.learner.scorer, small.rollout)
    assert budget.tokens > 1
    assert all(p.grad is None for p in small.policy.parameters())
    card.room = 0
    with pytest.raises(RunError, match="nothing is left for the update"):
        TokenBudget(small.config, small.policy).find(
            small.learner.accelerator, small.learner.scorer, small.rollout
        )
    assert all(p.grad is None for p in small.policy.parameters())


def test_auto_recomputes_before_it_gives_up(tokenizer, prompts):
    """With a number of tokens given, too."""
    small = small_update(tokenizer, prompts, gradient_checkpointing="auto", micro_batch_tokens=1)
    advantages, first = small.advantages, []

    class Tight(Scorer):
        def forward(self, rollout, rows):
            if not self.model.is_gradient_checkpointing:
                first.append(len(rows))
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(rollout, rows)

    small.learner.scorer = Tight(small.policy.train(), small.learner.scorer.tables)
    metrics = small.update(advantages)
    assert first == [1]
    assert metrics["grad_norm"] > 0


def test_a_batch_that_fills_the_budget_is_not_cut_and_a_resumed_run_has_its_budget():
    assert [
        len(rows)
        for rows in micro_batches(SimpleNamespace(sizes=([4] * 10, [6] * 10), num_generations=1), 50)
    ] == [5, 5]
    for given, expected in ((None, 77), (50, 50)):
        budget = TokenBudget(Config(micro_batch_tokens=given), None)
        budget.restore([77, False])
        assert budget.tokens == expected


def test_a_checkpoint_s_bytes_are_counted_as_it_is_written():
    """Float32 weights, two float32 moments of what is trained, a bf16 reference."""
    policy, reference = torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(10, 10, bias=False).bfloat16()
    assert checkpoint_bytes(policy, None, moment_bytes=8) == 100 * 4 + 100 * 8
    assert checkpoint_bytes(policy, reference, moment_bytes=2) == 100 * 4 + 100 * 2 + 100 * 2
    policy.requires_grad_(False)
    assert checkpoint_bytes(policy, reference, moment_bytes=8) == 100 * 4 + 100 * 2

"""Dynamic sampling: groups without a signal give way to fresh problems."""

import contextlib
import itertools
import json
from types import SimpleNamespace

import pytest
import torch

import grpo_train
from decoding.any_model import vocab_logits
from decoding.decoder import GroupDecoder
from decoding.rollout import Completion, Interaction, Sampling, rollout_uniforms
from decoding.step import draw
from learning import inspection
from learning.inspection import interaction_effect
from learning.log_probs import Scorer
from rewards import RewardLog
from small_models import build_model
from small_recipes import config_of
from small_runs import command, lines


def sampled(tokenizer, prompts, G, length, seed=0):
    decoder = GroupDecoder(build_model("qwen2", tokenizer), tokenizer, "e", Interaction(0.3))
    uniforms = rollout_uniforms(seed, 0, 0, len(prompts) * G, length)
    return decoder, decoder.rollout(prompts, Sampling(length, G, 1.0), uniforms)


def test_a_rollout_with_groups_of_another_is_scored_as_both_were_sampled(tokenizer, prompts):
    """Other prompt lengths, other completion lengths, M3PO on: the groups keep what was recorded of them."""
    decoder, rollout = sampled(tokenizer, prompts[:3], 4, 12)
    _, other = sampled(tokenizer, [prompts[3], prompts[0] + prompts[1]], 4, 20, seed=1)
    joined = rollout.with_groups([2, 0], other, pad_id=7)
    assert (joined.ids[4:8, rollout.ids.shape[1] :] == 7).all()
    rows = torch.arange(12)
    logp, _ = Scorer(decoder.model, decoder.tables)(joined, rows)
    assert torch.allclose(logp, joined.logp, atol=1e-4)
    width = other.ids.shape[1]
    assert torch.equal(joined.ids[8:, :width], other.ids[:4])
    assert torch.equal(joined.ids[:4, :width], other.ids[4:])
    assert torch.equal(joined.ids[4:8, :12], rollout.ids[4:8, :12])
    assert torch.equal(
        joined.mask.sum(-1), torch.cat([other.lengths[4:], rollout.lengths[4:8], other.lengths[:4]])
    )


def test_groups_that_give_way_take_everything_of_theirs_along(tokenizer, prompts):
    """Texts, rewards, each function's own values and what it logs: the old ones stood in the log beside the
    new completions.
    """
    decoder, rollout = sampled(tokenizer, prompts[:3], 2, 6)
    _, other = sampled(tokenizer, prompts[3:], 2, 6, seed=1)

    def of(rollout, problems, name, retry):
        rows = [f"{name}{n}" for n in range(2 * len(problems))]
        completions = [Completion([], text, True) for text in rows]
        log = RewardLog([{"column": text} for text in rows], {"seen": [name]})
        parts = {"one": list(rows), "two": [text.upper() for text in rows]}
        retries = [retry] * len(problems)
        return grpo_train.Sampled([], problems, rollout, completions, retries, rows, parts, logged=log)

    old, new = of(rollout, ["p", "q", "r"], "a", 0), of(other, ["s", "t"], "b", 1)
    old.take_groups([2, 0], new, decoder.tables.pad_id)
    rows = ["b2", "b3", "a2", "a3", "b0", "b1"]
    assert old.problems == ["t", "q", "s"]
    assert (old.texts, old.rewards, old.parts["one"]) == (rows, rows, rows)
    assert old.parts["two"] == [text.upper() for text in rows]
    assert [row["column"] for row in old.logged.rows] == rows
    assert old.logged.metrics == {"seen": ["a", "b"]}
    assert old.retries == [1, 0, 1]
    assert old.rollout.prompts == [prompts[4], prompts[1], prompts[3]]


def test_silent_groups_give_way_on_every_process_until_none_is_left(monkeypatch):
    """The second of two processes, with groups 2 and 3 of four: it scores its own alone, and stops with the
    other one as soon as all groups carry a signal.
    """
    others = iter([[1.0, 0, 1, 1], [1.0, 0, 1, 0]])  # rewards of the first process, after each rollout
    fresh, asked, taken = iter("abc"), [], []
    run = SimpleNamespace(
        config=SimpleNamespace(dynamic_sampling=5, num_generations=2),
        progress=SimpleNamespace(step=3),
        local_groups=range(2, 4),
        timed=lambda name: contextlib.nullcontext(),
        call_rewards=lambda action: action(lambda own: next(others) + own),
    )
    sampled = SimpleNamespace(batch=["p", "q", "r", "s"], rewards=[0.0, 0, 1, 0])

    def take_groups(groups, new, pad_id):
        taken.append((groups, new, pad_id))
        sampled.rewards[:2] = [0.0, 1.0]

    def sample(run, decoder, batch, step, groups, retry):
        asked.append((list(batch), step, groups, retry))
        return "new" if groups else None

    sampled.take_groups = take_groups
    monkeypatch.setattr(grpo_train, "next_problems", lambda p, n, run: [next(fresh) for _ in range(n)])
    monkeypatch.setattr(grpo_train, "sample", sample)
    monkeypatch.setattr(grpo_train, "_score_rows", lambda *_, **__: None)
    decoder = SimpleNamespace(tables=SimpleNamespace(pad_id=9))
    rewards = torch.tensor([1.0, 0, 1, 1, 0, 0, 1, 0])
    rewards, metrics = grpo_train.replace_silent_groups(run, decoder, [], [], sampled, rewards)
    assert asked == [(["p", "a", "b", "s"], 3, [2], 1), (["p", "c", "b", "s"], 3, [], 2)]
    assert taken == [([0], "new", 9)]
    assert rewards.tolist() == [1, 0, 1, 0, 0, 1, 1, 0]
    assert metrics == {"extra_rollouts": 2, "replaced_groups": 3}


PAYS_SOME = """
def pays(prompts, completions, **kwargs):  # no signal for half of the problems
    lengths = [(len(p[0]["content"]), len(c[0]["content"])) for p, c in zip(prompts, completions)]
    return [float(said % 3) * (asked % 2) for asked, said in lengths]
"""


def test_groups_without_a_signal_give_way_to_fresh_problems(recipe_start, tmp_path):
    (tmp_path / "pays.py").write_text(PAYS_SOME)
    runs = {}
    for extra in (0, 3):
        config = config_of(
            "oneshot",
            recipe_start,
            tmp_path / str(extra),
            grpo_train,
            reward=[f"{tmp_path}/pays.py:pays"],
            dynamic_sampling=extra,
            batch_size=4,
            eval_every=0,
        )
        grpo_train.train(config)
        runs[extra] = [
            json.loads(line) for line in (tmp_path / str(extra) / "metrics.jsonl").read_text().splitlines()
        ]
    assert runs[0][0]["frac_reward_zero_std"] > 0
    assert all(m["frac_reward_zero_std"] < runs[0][0]["frac_reward_zero_std"] for m in runs[3][:1])
    assert runs[3][0]["extra_rollouts"] >= 1
    assert runs[3][0]["replaced_groups"] >= 1
    assert "extra_rollouts" not in runs[0][0]


def test_fresh_problems_are_the_next_ones_and_are_not_drawn_again_in_the_next_step(
    recipe_start, tmp_path, monkeypatch
):
    (tmp_path / "pays.py").write_text(PAYS_SOME)
    drawn, honest = [], grpo_train.next_problems

    def watched(problems, count, run):
        drawn.append((run.problems_drawn, count))
        return honest(problems, count, run)

    monkeypatch.setattr(grpo_train, "next_problems", watched)
    settings = dict(
        reward=[f"{tmp_path}/pays.py:pays"], dynamic_sampling=2, batch_size=4, eval_every=0, num_steps=3
    )
    grpo_train.train(config_of("oneshot", recipe_start, tmp_path / "out", grpo_train, **settings))
    assert len(drawn) > 3, "some groups gave way"
    assert all(first + size == following for (first, size), (following, _) in itertools.pairwise(drawn))


def test_what_listening_changed_is_asked_with_the_draws_of_the_group_that_stayed(
    recipe_start, tmp_path, monkeypatch
):
    """A group that gave way was drawn anew, and was read again with the draws of the one before it: nearly
    every token "would have been another".
    """
    (tmp_path / "pays.py").write_text(PAYS_SOME)
    again = []

    def spy(scorer, rollout, uniforms):
        for g in range(rollout.num_generations):
            logits = (
                vocab_logits(scorer.model, scorer.hidden(rollout, [g])[0], scorer.tables)
                / rollout.temperature
            )
            again.append(
                draw(logits, uniforms[g, : len(logits)])[0].tolist() == rollout.ids[g, : len(logits)].tolist()
            )
        return interaction_effect(scorer, rollout, uniforms)

    monkeypatch.setattr(inspection, "interaction_effect", spy)
    settings = dict(
        reward=[f"{tmp_path}/pays.py:pays"],
        dynamic_sampling=2,
        batch_size=2,
        eval_every=0,
        num_steps=4,
        inspect_every=1,
        m3po_lambda=0.3,
    )
    grpo_train.train(config_of("oneshot", recipe_start, tmp_path / "out", grpo_train, **settings))
    assert len(again) == 4 * 4
    assert all(again)


@pytest.mark.slow
def test_dynamic_sampling_is_the_same_on_two_processes(recipe_start, tmp_path):
    (tmp_path / "pays.py").write_text(PAYS_SOME)
    flags = f"--config configs/oneshot.yaml --model {recipe_start / 'model'} --dataset {recipe_start} "
    flags += f"--reward {tmp_path}/pays.py:pays --report_to none --dynamic_sampling 3 --batch_size 5 "
    flags += (
        "--num_generations 4 --num_steps 2 --max_completion_length 16 --eval_every 0 --learning_rate 1e-4"
    )
    keys, first_steps = ("step", "example_id", "generation", "completion", "reward"), []
    for processes in ("1", "2"):
        where = f"--num_processes {processes} --output_dir {tmp_path / processes}"
        done = command("grpo_train.py", *flags.split(), *where.split())
        assert done.returncode == 0, done.stderr
        rows = [row for row in lines(tmp_path / processes / "rollouts.jsonl") if row["step"] == 1]
        first_steps.append(sorted(tuple(row[key] for key in keys) for row in rows))
    assert first_steps[0] == first_steps[1]

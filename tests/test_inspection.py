"""M3PO_DEBUG and the group that is read again with nobody heard."""

import pytest
import torch
from test_learning import G, T, rollout_of

from decoding.rollout import rollout_uniforms
from learning import inspection
from learning.inspection import Group, ListeningEffect, describe_interaction, interaction_effect
from learning.log_probs import Scorer
from small_models import build_model
from small_runs import lines, run_short, without_times


def test_debug_changes_no_result_and_says_who_listened(warm, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("M3PO_DEBUG", "1")
    out = run_short(warm, tmp_path / "debug", "--beta 0.04")
    printed = capsys.readouterr().out
    assert "path 0: heard somebody at" in printed
    assert "did it matter?" in printed
    strip = without_times(lines(trained / "metrics.jsonl")), without_times(lines(out / "metrics.jsonl"))
    assert strip[0] == strip[1]


def test_debug_looks_with_the_weights_that_sampled(warm, tmp_path, monkeypatch, capsys):
    """Scored after a large update, tokens "would have been others" for a reason that is not the paths."""
    monkeypatch.setenv("M3PO_DEBUG", "1")
    flags = "--m3po_lambda 1e-7 --learning_rate 3e-2 --warmup_ratio 0 --eval_every 0 --num_steps 2"
    run_short(warm, tmp_path / "debug", flags)
    answers = [line for line in capsys.readouterr().out.splitlines() if line.startswith("did it matter?")]
    assert [line.split()[3] for line in answers] == ["0"] * 2


def test_every_nth_step_tells_which_tokens_listening_changed(warm, tmp_path):
    """Beside the sampled token stands what the same draw gives with nobody heard; nowhere without M3PO, or
    where inspect_every says 0.
    """
    flags = "--inspect_every 2 --m3po_lambda 0.9 --log_groups 2 --eval_every 0"
    out = run_short(warm, tmp_path / "out", flags)
    records = lines(out / "rollouts.jsonl")
    read_again = {(r["step"], r["generation"]) for r in records if "alone" in r}
    assert {step for step, _ in read_again} == {1, 3}
    assert len(read_again) == sum("alone" in r for r in records), "the first group of a step only"
    turned = [(r, int(t)) for r in records for t in r.get("alone", {})]
    assert turned
    assert all(r["pieces"][t] != r["alone"][str(t)] for r, t in turned)
    metrics = lines(out / "metrics.jsonl")
    assert [m["step"] for m in metrics if any(name.startswith("listening_") for name in m)] == [1, 3]
    for step in (1, 3):
        group = [r for r in records if r["step"] == step and "alone" in r]
        told = {name: v for name, v in metrics[step - 1].items() if name.startswith("listening_")}
        assert told["listening_tokens"] == sum(r["length"] for r in group)
        assert told["listening_changed_tokens"] == sum(len(r["alone"]) for r in group)
        verdicts = [(r["right"], r.get("alone_right", r["right"])) for r in group]
        assert told["listening_became_right"] == verdicts.count((True, False))
        assert told["listening_became_wrong"] == verdicts.count((False, True))
    changed = {r["generation"]: r for r in records if r["step"] == 1 and r.get("alone")}
    for flags in ("--m3po_lambda 0", "--inspect_every 0"):
        out = run_short(warm, tmp_path / flags.split()[0], f"--eval_every 0 --num_steps 1 {flags}")
        others = lines(out / "rollouts.jsonl")
        assert not any("alone" in r for r in others)
        assert not any("listening_tokens" in m for m in lines(out / "metrics.jsonl"))
        if "lambda" in flags:  # nobody listens here; weights and draws of the first step are the same
            plain = {r["generation"]: r for r in others[:4]}
            for g, record in changed.items():
                there = [plain[g][name] for name in ("completion", "extracted", "right")]
                assert [record[f"alone_{name}"] for name in ("completion", "extracted", "right")] == there
            assert any(record["completion"] != record["alone_completion"] for record in changed.values())


def test_no_memory_to_look_inside_ends_no_run(warm, tmp_path, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(inspection, "interaction_effect", full)
    with pytest.warns(UserWarning, match="--inspect_every 0 leaves it out"):
        out = run_short(warm, tmp_path / "out", "--inspect_every 1 --eval_every 0 --num_steps 2")
    assert len(lines(out / "metrics.jsonl")) == 2


def test_a_group_that_gave_way_is_read_again_with_its_own_draws(warm, tmp_path):
    """With next to nothing heard no token may be another one; with the draws of the group that it replaced
    most would be.
    """
    (tmp_path / "mine.py").write_text(
        "calls = []\ndef mine(completions, **kwargs):\n    calls.append(1)\n"
        "    return [float(i * (len(calls) % 2 == 0)) for i in range(len(completions))]\n"
    )
    flags = f"--reward {tmp_path}/mine.py:mine --dynamic_sampling 1 --inspect_every 1 --m3po_lambda 1e-7 "
    flags += "--eval_every 0 --num_steps 2"
    out = run_short(warm, tmp_path / "out", flags)
    assert all(m["replaced_groups"] for m in lines(out / "metrics.jsonl"))
    told = [r["alone"] for r in lines(out / "rollouts.jsonl") if "alone" in r]
    assert told
    assert not any(told)


def test_the_effect_of_interaction_is_nothing_without_it_and_something_with_it(llama, tokenizer, prompts):
    decoder, out = rollout_of(llama, tokenizer, prompts[:1], lam=0.6)
    uniforms = rollout_uniforms(0, 0, 0, G, T)
    effect = interaction_effect(Scorer(llama, decoder.tables), out, uniforms)
    sampled = out.completion_ids()
    assert effect.alone != sampled
    assert effect.divergence.max() > 1e-3
    assert torch.allclose(
        effect.similarity.diagonal(dim1=1, dim2=2), torch.ones(len(effect.steps), G), atol=1e-5
    )
    decoder, out = rollout_of(llama, tokenizer, prompts[:1], lam=0.0)
    out.mix, sampled = torch.zeros(1, out.ids.shape[1], G, G), out.completion_ids()
    effect = interaction_effect(Scorer(llama, decoder.tables), out, uniforms)
    assert effect.alone == sampled, (
        "the same draws give the same tokens: scoring really sees what the sampler saw"
    )
    assert effect.divergence.abs().max() < 1e-5


def test_rounding_is_not_taken_for_listening(tokenizer, prompts):
    """In bf16 the sampler and the scoring round otherwise: 3 of 130 draws came out as another token, and were
    put down to the peers.
    """
    model = build_model("gpt2", tokenizer, dtype=torch.bfloat16)
    decoder, out = rollout_of(model, tokenizer, prompts[:1], lam=1e-9, length=400)
    effect = interaction_effect(Scorer(model, decoder.tables), out, rollout_uniforms(0, 0, 0, G, 400))
    assert effect.alone == out.completion_ids()


def test_the_effect_of_interaction_is_found_a_few_tokens_at_a_time(llama, tokenizer, prompts, monkeypatch):
    """All logits of a path at once, several times over, are 20 GB for 4,096 tokens of a large vocabulary."""
    decoder, out = rollout_of(llama, tokenizer, prompts[:1], lam=0.6)
    rest = Scorer(llama, decoder.tables), out, rollout_uniforms(0, 0, 0, G, T)
    whole, honest, most = interaction_effect(*rest), inspection.vocab_logits, []
    monkeypatch.setattr(inspection, "LOGITS_AT_ONCE", 5)
    monkeypatch.setattr(
        inspection, "STATES_AT_ONCE", 3 * (len(prompts[0]) + T)
    )  # three paths, and then what is left
    monkeypatch.setattr(
        inspection,
        "vocab_logits",
        lambda model, hidden, tables: most.append(len(hidden)) or honest(model, hidden, tables),
    )
    parts = interaction_effect(*rest)
    assert max(most) <= 5
    assert parts.alone == whole.alone
    assert torch.allclose(parts.divergence, whole.divergence, atol=1e-5)


def test_the_debug_text_says_who_was_heard_and_which_tokens_turned():
    mix = torch.zeros(2, 2, 2)
    mix[0] = torch.tensor([[0, 1.0], [1.0, 0]])
    group = Group(mix, torch.ones(2, 2).bool(), torch.full((2, 2), 0.125))
    effect = ListeningEffect([0], torch.ones(1, 2, 2), None, torch.zeros(2))
    text = describe_interaction([["a", "x"], ["b", "y"]], [["a", "z"], ["b", "y"]], group, effect)
    assert "path 0: heard somebody at 1 of 2 tokens; 1 (1.00); inputs moved by 12.5%" in text
    assert "1 of 4 tokens would have been others" in text
    assert "path 0, token 2: 'x' instead of 'z', having heard: path 1 said 'b' (1.00)" in text

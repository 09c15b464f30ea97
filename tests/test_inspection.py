"""M3PO_DEBUG and the group that is read again with nobody heard."""

import pytest
import torch

from learning import inspection
from small_runs import lines, run_short, without_times


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

"""The average of the weights: what it is, and that a run evaluates and saves it while it samples from and
trains the last weights.
"""

import contextlib
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from errors import RunError, SettingError, Stopped
from grpo_train import Config
from learning.averaging import WeightAverage
from learning.models import load_model
from running import folder
from running.answering import RunOfStudy
from small_runs import lines, run_short


@pytest.mark.parametrize("decay", [0.5, 0.75, 0.99])
def test_it_is_the_mean_of_the_first_steps_and_then_forgets(decay):
    policy, sampler = nn.Linear(3, 2), nn.Linear(3, 2)
    policy.bias.requires_grad_(False)
    average, expected = WeightAverage(policy, sampler, decay), None
    for step in range(1, 11):
        with torch.no_grad():
            policy.weight.normal_(generator=torch.Generator().manual_seed(step))
        average.count_step()
        new = policy.weight.detach().double()
        if step <= 1 / (1 - decay):
            expected = new if expected is None else expected + (new - expected) / step
        else:
            expected = decay * expected + (1 - decay) * new
        torch.testing.assert_close(average.averages["weight"].double(), expected, rtol=1e-5, atol=1e-6)
    assert set(average.averages) == {"weight"}  # what is frozen has none


def test_it_is_lent_to_policy_and_sampler_and_given_back_to_the_bit():
    policy, sampler = nn.Linear(3, 2), nn.Linear(3, 2)
    average = WeightAverage(policy, sampler, 0.9)
    with average.in_use():  # before the first step there is nothing to lend
        pass
    average.count_step()
    with torch.no_grad():
        policy.weight.add_(1.0)
    average.count_step()
    last, mean = policy.weight.detach().clone(), average.averages["weight"].clone()
    with contextlib.suppress(Stopped), average.in_use():
        assert torch.equal(policy.weight, mean)
        assert torch.equal(sampler.weight, mean)
        raise Stopped
    assert torch.equal(policy.weight, last)
    assert torch.equal(sampler.weight, last)
    assert torch.equal(average.averages["weight"], mean)
    for _ in range(2):  # a study asks its other questions after one that failed
        with contextlib.suppress(RunError), average.in_use():
            assert torch.equal(policy.weight, mean)
            assert torch.equal(sampler.weight, mean)
            raise RunError


AVERAGED = "--save_every 1 --keep_checkpoints 0 --keep_best true --ema_decay 0.9 --eval_every 1"


@pytest.fixture(scope="module")
def averaged(warm, tmp_path_factory):
    return run_short(warm, tmp_path_factory.mktemp("averaged") / "out", AVERAGED)


def weights_of(out, of="model.safetensors"):
    return load_file(out / of)


def test_the_saved_model_is_the_mean_of_the_last_steps_and_training_is_that_of_the_last_weights(
    averaged, warm, tmp_path
):
    plain = run_short(warm, tmp_path / "out", AVERAGED.replace("0.9", "0"))
    after = [weights_of(averaged / f"checkpoint-{step}") for step in (1, 2, 3)]
    for step, weights in enumerate(after, 1):
        for name, weight in weights_of(plain / f"checkpoint-{step}").items():
            assert torch.equal(weight, weights[name]), name
    saved, has_moved = weights_of(averaged), False
    for name, value in saved.items():
        torch.testing.assert_close(value, sum(w[name] for w in after) / 3)
        has_moved = has_moved or not torch.equal(value, after[-1][name])
    assert has_moved


def test_no_process_waits_for_the_average_while_another_uploads(warm, tmp_path, monkeypatch):
    """Giving sharded weights back takes all of them, and torch waits minutes at most."""
    happened, exchange = [], WeightAverage._exchange

    def seen(self):
        happened.append("exchange")
        exchange(self)

    monkeypatch.setattr(WeightAverage, "_exchange", seen)
    monkeypatch.setattr(folder, "push", lambda *_: happened.append("upload"))
    run_short(warm, tmp_path / "out", "--ema_decay 0.9 --push_to_hub true --hub_model_id me/mine")
    assert happened == ["exchange"] * 4 + ["upload"]  # of the evaluation and of what is saved


def test_held_out_problems_are_asked_of_what_is_saved(averaged, warm, tmp_path):
    """Asked of the saved model before a run of its own, which answers greedily too."""
    then = {r["example_id"]: r["completion"] for r in lines(averaged / "evaluations.jsonl") if r["step"] == 3}
    of_the_last = run_short(averaged / "checkpoint-3", tmp_path / "last", "--eval_every 3")
    of_the_saved = run_short(averaged, tmp_path / "saved", "--eval_every 3")
    now = {
        out: {r["example_id"]: r["completion"] for r in lines(out / "evaluations.jsonl") if r["step"] == 0}
        for out in (of_the_last, of_the_saved)
    }
    assert now[of_the_saved] == then
    assert now[of_the_last] != then


def test_a_resumed_run_goes_on_with_its_average(averaged, warm, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(averaged, out)
    for name in ("checkpoint-3", "finished.json"):
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    (out / "model.safetensors").unlink()
    run_short(warm, out, f"{AVERAGED} --resume true")
    for name, value in weights_of(averaged).items():
        assert torch.equal(value, weights_of(out)[name]), name


def test_a_run_that_kept_none_begins_one_when_it_goes_on(trained, warm, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(trained, out)
    how = "--save_every 2 --beta 0.04 --num_steps 5 --ema_decay 0.9 --resume true --resume_anyway true"
    run_short(warm, out, how)
    last, saved = weights_of(out / "checkpoint-5"), weights_of(out)
    before = weights_of(out / "checkpoint-4")
    for name, value in saved.items():
        torch.testing.assert_close(value, (before[name] + last[name]) / 2)


def test_adapters_are_averaged_before_they_are_merged(warm, tmp_path):
    pytest.importorskip("peft")
    out = run_short(warm, tmp_path / "out", "--lora_r 4 --ema_decay 0.9 --save_every 1 --save_adapter true")
    state = load_file(out / "checkpoint-3" / "training_state.safetensors")
    adapter = load_file(out / "adapter" / "adapter_model.safetensors")
    for name, value in adapter.items():
        here = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        assert torch.equal(value, state[f"average.{here}"]), name
        assert not torch.equal(value, state[f"policy.{here}"]), name
    assert load_model(str(out), None, torch.float32, "cpu") is not None


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan")])
def test_a_decay_that_is_none_is_refused(decay):
    with pytest.raises(SettingError, match="ema_decay"):
        Config(ema_decay=decay)


def test_a_study_asks_what_would_be_saved(tmp_path, monkeypatch):
    is_lent, asked = [], []

    @contextlib.contextmanager
    def as_saved():
        is_lent.append(True)
        yield
        is_lent.pop()

    def answers(self, questions, step, through):
        asked.append((step, bool(is_lent)))
        return {}

    monkeypatch.setattr(RunOfStudy, "_answers", answers)
    progress, learner = SimpleNamespace(step=2), SimpleNamespace(as_saved=as_saved)
    run = SimpleNamespace(progress=progress, learner=learner, is_finished=False, interruptible=None)
    questions = SimpleNamespace(evaluation=SimpleNamespace(name="greedy", steps=[2, 4]))
    study = RunOfStudy(Path(tmp_path), 0, None, None, [questions])
    study.ask(run, None)
    progress.step = 3
    study.ask_for_the_rest()
    assert asked == [(2, True), (3, True)]

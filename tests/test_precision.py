"""What is computed in which precision, and fp16's loss scale."""

import functools
import json
import math
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState

import grpo_eval
import grpo_train
import sft_train
import solver
from decoding.fast_model import enter_norm, leave_norm, rms_norm
from decoding.self_test import check_autocast
from decoding.step import draw
from errors import RunError, SettingError
from grpo_train import Config
from learning import learner, precision
from learning.models import load_model, load_policy
from learning.parallel import distribute
from learning.precision import LossScale, compute_dtype
from reporting.files import read_run_config
from running.folder import save_model
from running.launching import make_accelerator
from running.parsing import parse_config, run_main, settings_from_file
from running.settings import resolved
from small_models import build_model
from small_runs import ROOT, SHORT, command, given_once
from small_update import small_update

SCRIPTS = [grpo_train, sft_train, grpo_eval]
OVERFLOW = "fp16 overflow, loss scale now "


# The setting


def parsed(script, flags="", text=None, folder=None):
    """The settings that flags and the text of a YAML file make."""
    if text is not None:
        (folder / "c.yaml").write_text(text)
        flags = f"--config {folder / 'c.yaml'} {flags}"
    return parse_config(script.Config, flags.split())


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("flags", "text", "expected"),
    [
        ("", None, "bf16"),
        ("--precision fp16", None, "fp16"),
        ("--bf16 false", None, "fp32"),
        ("--no-bf16", None, "fp32"),
        ("--bf16", None, "bf16"),
        ("--bf16 true --precision bf16", None, "bf16"),
        ("", "bf16: false\n", "fp32"),
        ("", "bf16: true\n", "bf16"),
        ("", "bf16: no\nprecision: fp32\n", "fp32"),
        ("--bf16 true", "precision: fp16\n", "bf16"),
        ("--precision fp16", "bf16: false\n", "fp16"),
    ],
)
def test_bf16_is_another_name_of_two_precisions_and_flags_win(script, flags, text, expected, tmp_path):
    assert parsed(script, flags, text, tmp_path).precision == expected


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("flags", "text", "words"),
    [
        ("--bf16 true --precision fp16", None, ["bf16=True", "precision='fp16'", "one of the two"]),
        ("--precision bf16 --no_bf16", None, ["bf16=False", "precision='bf16'", "one of the two"]),
        ("", "bf16: true\nprecision: fp32\n", ["bf16=True", "precision='fp32'", "one of the two"]),
        ("", "precision: bf16\nbf16: false\n", ["bf16=False", "precision='bf16'", "one of the two"]),
        ("", "bf16: maybe\n", ["bf16='maybe'", "must be bool"]),
        ("", "bf16: fp16\n", ["bf16='fp16'", "must be bool"]),
        ("", "precision: 16\n", ["precision=16", "must be str"]),
        ("", "precision: half\n", ["precision='half'", "bf16, fp16, fp32"]),
        ("--precision half", None, ["precision", "'half'", "fp16"]),
        ("--bf16 maybe", None, ["--bf16", "'maybe' is neither true nor false"]),
    ],
)
def test_a_contradiction_or_another_word_is_refused(script, flags, text, words, tmp_path):
    with pytest.raises(SettingError) as error:
        parsed(script, flags, text, tmp_path)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("flags", ["--fp16", "--fp16 true", "--mixed_precision fp16"])
def test_the_names_that_other_trainers_have_for_it_are_refused_with_a_hint(flags):
    with pytest.raises(SettingError, match="is (--)?precision"):
        parsed(grpo_train, flags)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(("bf16", "expected"), [(True, "bf16"), (False, "fp32")])
def test_the_settings_of_a_run_that_had_bf16_are_read(script, bf16, expected, tmp_path):
    saved = resolved(script.Config())
    del saved["precision"]
    (tmp_path / "run_config.yaml").write_text(yaml.safe_dump(saved | {"bf16": bf16}))
    assert settings_from_file(script.Config, tmp_path / "run_config.yaml")["precision"] == expected
    assert read_run_config(tmp_path)["precision"] == expected
    assert grpo_eval.Config(model=str(tmp_path)).precision == expected, "what asks it computes alike"
    (tmp_path / "run_config.yaml").write_text(f"bf16: {not bf16}\nprecision: {expected}\n")
    with pytest.raises(SettingError, match=f"bf16={not bf16}: cannot stand beside precision='{expected}'"):
        grpo_eval.Config(model=str(tmp_path))


def test_a_warm_start_inherits_the_precision_or_has_its_own(tmp_path):
    (tmp_path / "warm.yaml").write_text("num_steps: 6\n")
    (tmp_path / "other.yaml").write_text("num_steps: 6\nbf16: true\n")
    given = dict(precision="fp32")
    assert (
        sft_train.warm_start_settings(Config(warm_start=f"{tmp_path}/warm.yaml", **given)).precision == "fp32"
    )
    assert (
        sft_train.warm_start_settings(Config(warm_start=f"{tmp_path}/other.yaml", **given)).precision
        == "bf16"
    )


def test_the_dtypes_of_the_precisions():
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    for name, dtype in dtypes.items():
        assert compute_dtype(name, "cuda") == compute_dtype(name, torch.device("cuda", 1)) == dtype
    assert compute_dtype("bf16", "mps") == compute_dtype("fp32", "mps") == torch.float32, "no CUDA there"
    assert compute_dtype("bf16", "cpu") == compute_dtype("fp32", torch.device("cpu")) == torch.float32
    with pytest.raises(SettingError, match="precision=True: must be one of bf16, fp16, fp32"):
        solver.load_solver("/nowhere", precision=True)


@pytest.mark.parametrize(("bf16", "goes_on"), [(True, True), (False, False)])
def test_a_warm_start_made_when_there_was_bf16_is_reused(bf16, goes_on, tmp_path, monkeypatch):
    """What is whole is not trained again, and its note says bf16."""
    (tmp_path / "warm.yaml").write_text("num_steps: 6\n")
    (tmp_path / "data.jsonl").write_text('{"question": "2 and 3?", "answer": "5 #### 5"}\n' * 9)
    data = dict(dataset=f"{tmp_path}/data.jsonl", output_dir=str(tmp_path))
    config = Config(warm_start=f"{tmp_path}/warm.yaml", **data)
    main = SimpleNamespace(is_main_process=True, num_processes=1, wait_for_everyone=lambda: None)
    run, trained = SimpleNamespace(accelerator=main, find_folder=str), []
    monkeypatch.setattr(sft_train, "train", lambda *_: trained.append(1))
    note = tmp_path / "warm_start" / "warm_start.json"
    note.parent.mkdir()
    for _ in range(2):
        sft_train.warm_start(config, run)
    assert trained == [1], "the second time it is there"
    noted = json.loads(note.read_text())
    del noted["precision"]
    note.write_text(json.dumps(noted | {"bf16": bf16}))
    sft_train.warm_start(config, run)
    assert (trained == [1]) == goes_on


def test_an_unfinished_evaluation_of_when_there_was_bf16_is_gone_on_with(tmp_path):
    saved = resolved(grpo_eval.Config()) | {"answerer": "it"}
    del saved["precision"]
    (tmp_path / "answers-0.jsonl").write_text("{}\n")
    asked = SimpleNamespace(folder=tmp_path, identity="it", precision="bf16")
    (tmp_path / "run_config.yaml").write_text(yaml.safe_dump(saved | {"bf16": False}))
    with pytest.raises(SettingError, match="precision 'fp32' there, 'bf16' here"):
        grpo_eval.begin(asked, grpo_eval.Config())
    (tmp_path / "run_config.yaml").write_text(yaml.safe_dump(saved | {"bf16": True}))
    grpo_eval.begin(asked, grpo_eval.Config())
    assert yaml.safe_load((tmp_path / "run_config.yaml").read_text())["precision"] == "bf16"


@pytest.fixture
def no_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


REFUSAL = "precision='fp16': needs a CUDA device, .* say --precision fp32"


def test_fp16_on_a_cpu_is_refused_before_anything_is_loaded(no_card, tmp_path):
    nowhere = dict(model=str(tmp_path / "nowhere"), precision="fp16")
    out = dict(output_dir=str(tmp_path / "out"))
    for train in (
        lambda: grpo_train.train(Config(**nowhere, **out)),
        lambda: sft_train.train(sft_train.Config(**nowhere, **out)),
        lambda: grpo_eval.evaluate(grpo_eval.Config(**nowhere, **out)),
        lambda: solver.load_solver(nowhere["model"], precision="fp16"),
    ):
        with pytest.raises(SettingError, match=REFUSAL):
            train()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        (grpo_train, "--num_processes 1"),
        (grpo_train, "--num_processes 2"),
        (grpo_train, "--check"),
        (sft_train, "--num_processes 2"),
        (grpo_eval, "--num_processes 2"),
        (grpo_eval, "--ask hi"),
    ],
)
def test_a_script_refuses_fp16_on_a_cpu_in_one_line(script, flags, no_card, monkeypatch, capsys):
    """Not once for each of the processes that it starts."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("sys.argv", ["script.py", *f"--precision fp16 --model /nowhere {flags}".split()])
    with pytest.raises(SystemExit) as ended:
        run_main(script.main)
    assert ended.value.code == 2
    told, said = capsys.readouterr()
    assert not told
    assert said.startswith("script.py: precision='fp16': needs a CUDA device")
    assert said.count("\n") == 1


def test_a_launcher_s_mixed_precision_does_not_count_and_that_is_said(monkeypatch):
    """`accelerate launch --mixed_precision bf16` put the scorer under autocast, on a CPU too."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    AcceleratorState._reset_state()
    try:
        with pytest.warns(UserWarning, match="mixed_precision=bf16 has no effect: --precision is fp32"):
            accelerator = make_accelerator(Config(precision="fp32"))
        scorer = distribute(accelerator, torch.nn.Linear(40, 1), Config(precision="fp32"))
        numbers = torch.rand(3, 40)
        assert scorer(numbers).equal(torch.nn.functional.linear(numbers, scorer.weight, scorer.bias))
    finally:
        AcceleratorState._reset_state()


# A model in fp16


def large_model(tokenizer, size, folder):
    """A model whose residual stream is about `size` large, in a folder."""
    model = build_model("llama", tokenizer)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(size)
    save_model(model, tokenizer, folder, torch.float32)
    return str(folder)


def test_a_model_that_passes_the_range_of_fp16_is_refused_when_it_is_loaded(tokenizer, tmp_path):
    small, large = (large_model(tokenizer, size, tmp_path / str(size)) for size in (1, 1e6))
    assert load_model(small, tokenizer, torch.float16, "cpu").dtype == torch.float16
    with pytest.raises(
        SettingError, match="not finite: fp16 holds no number above 65504: say --precision bf16"
    ):
        load_model(large, tokenizer, torch.float16, "cpu")
    policy = load_model(large, tokenizer, torch.float32, "cpu")
    check_autocast(policy, large, torch.bfloat16)
    with pytest.raises(SettingError, match="say --precision bf16"):
        check_autocast(policy, large, torch.float16)
    check_autocast(load_model(small, tokenizer, torch.float32, "cpu"), small, torch.float16)


def test_logits_of_any_width_are_drawn_from_in_fp16():
    """They are padded to whole blocks by a number that fp16 does not have."""
    logits, uniforms = torch.randn(50, 300), torch.rand(50)
    tokens, logp, _ = draw(logits.half(), uniforms)
    expected = draw(logits.half().float(), uniforms)
    assert torch.equal(tokens, expected[0])
    assert torch.equal(logp, expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_in_two_parts_is_the_whole_one_also_near_the_end_of_the_range(dtype):
    """60,000 times a weight of 3 is no number of fp16."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 64), torch.rand(64) + 2.5
    x[:, 5], x[3] = 60000.0, x[3] / 100
    x, weight = x.to(dtype), weight.to(dtype)
    scaled, squares = enter_norm(x, weight)
    wanted = rms_norm(x.float(), weight.float(), 1e-6)
    close = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert torch.allclose(leave_norm(scaled, squares, 1e-6).float(), wanted, rtol=close, atol=close / 100)


# The loss scale


def test_the_scale_is_halved_down_to_1_and_doubled_after_many_good_steps(monkeypatch):
    monkeypatch.setattr(precision, "GROWTH_STEPS", 3)
    scale, values = LossScale(4.0), []
    for good in (True, True, False, *[True] * 6, *[False] * 5, True):
        values.append(scale.count_good_step() if good else scale.halve())
        values[-1] = (scale.value, values[-1])
    assert [value for value, _ in values] == [4, 4, 2, 2, 2, 4, 4, 4, 8, 4, 2, 1, 1, 1, 1]
    assert [helps for _, helps in values if helps is not None] == [True, True, True, True, False, False]
    assert LossScale().value == 16384
    again = LossScale()
    again.restore(json.loads(json.dumps(scale.state())))
    assert again == scale
    again.restore(None)
    assert again == scale, "a checkpoint of another precision has none"


@pytest.mark.parametrize("settings", [dict(mu=2, beta=0.1), dict(micro_batch_tokens=60)])
def test_a_scaled_step_is_the_plain_one_to_the_bit(settings, tokenizer, prompts):
    plain, scaled = (small_update(tokenizer, prompts, **settings) for _ in range(2))
    scaled.learner.loss_scale = LossScale()
    metrics = plain.update()
    assert "loss_scale" not in metrics, "float32 needs none"
    assert scaled.update() == metrics | {"loss_scale": 16384.0}
    assert scaled.has_weights(plain.weights())
    assert scaled.learner.loss_scale.good_steps == settings.get("mu", 1)


def half_update(tokenizer, prompts, scale, **settings):
    """A small update under the autocast to fp16 that the CPU has, too."""
    small = small_update(tokenizer, prompts, **settings)
    small.learner.scorer.autocast = dict(device_type="cpu", dtype=torch.float16, enabled=True)
    small.learner.loss_scale = LossScale(scale)
    return small


def test_a_gradient_that_overflows_fp16_skips_the_step_and_halves_the_scale(tokenizer, prompts):
    small, plain = half_update(tokenizer, prompts, 2.0**22), small_update(tokenizer, prompts)
    before, skipped = small.weights(), 0
    while "skipped" in (metrics := small.update()):
        skipped += 1
        assert metrics["skipped"] == f"{OVERFLOW}{2 ** (22 - skipped)}"
        assert metrics["loss_scale"] == 2.0 ** (22 - skipped)
        assert math.isfinite(metrics["loss"])
        assert small.has_weights(before)
        assert not small.learner.optimizer.state
    assert 1 < skipped < 16
    assert small.learner.schedule.last_epoch == skipped + 1, "the schedule goes on"
    assert metrics["grad_norm"] == pytest.approx(plain.update()["grad_norm"], rel=0.01)
    assert not small.has_weights(before)


def test_without_a_scale_small_gradients_are_lost_in_fp16(tokenizer, prompts):
    """A loss of 1e-5 a token: what the scale is for."""
    norms = {}
    for scale in (1.0, 2.0**16):
        small = half_update(tokenizer, prompts, scale)
        norms[scale] = small.update(1e-6 * small.advantages)["grad_norm"]
    wanted = 1e-6 * small_update(tokenizer, prompts).update()["grad_norm"]
    assert norms[2.0**16] == pytest.approx(wanted, rel=0.02)
    assert abs(norms[1.0] - wanted) > 0.1 * wanted


@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_is_an_overflow_until_the_scale_is_1(
    poison, tokenizer, prompts, monkeypatch
):
    losses = grpo_train.grpo_loss

    def broken(*args, **kwargs):
        loss, terms = losses(*args, **kwargs)
        return loss * poison, terms

    monkeypatch.setattr(grpo_train, "grpo_loss", broken)
    small = small_update(tokenizer, prompts)
    before, small.learner.loss_scale = small.weights(), LossScale(4.0)
    said = [small.update()["skipped"] for _ in range(4)]
    assert said == [f"{OVERFLOW}2", f"{OVERFLOW}1", learner.NOT_FINITE, learner.NOT_FINITE]
    assert small.has_weights(before)


def test_one_of_two_passes_that_overflows_is_said_and_the_other_is_taken(tokenizer, prompts):
    small = half_update(tokenizer, prompts, 2.0**16, mu=2)
    before, honest = small.weights(), small.learner.accumulate_gradients

    def accumulate(*args):
        results = honest(*args)
        if small.learner.loss_scale.value == 2.0**16:
            next(small.policy.parameters()).grad[0, 0] = math.inf
        return results

    small.learner.accumulate_gradients = accumulate
    metrics = small.update()
    assert (metrics["skipped"], metrics["loss_scale"]) == (f"{OVERFLOW}32768", 32768.0)
    assert not small.has_weights(before)


def scaled_runs(monkeypatch, value=2.0**16):
    """Runs on the CPU in float32 that scale their loss as one in fp16 does, from this value on."""
    monkeypatch.setattr(learner, "compute_dtype", lambda *_: torch.float16)
    monkeypatch.setattr(learner, "LossScale", functools.partial(LossScale, value))


def run_of(warm, out, script=grpo_train, **settings):
    how = dict(
        model=str(warm), dataset="arithmetic", limit=100, output_dir=str(out), batch_size=3, num_steps=8
    )
    how |= dict(num_epochs=None, eval_every=0, cpu_threads=1, max_completion_length=48)
    how |= dict(num_generations=4, max_completion_length=12) if script is grpo_train else {}
    script.train(script.Config(**how | settings))
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("script", [grpo_train, sft_train])
def test_a_run_outlives_overflows_that_a_smaller_scale_ends(script, warm, tmp_path, monkeypatch):
    """Float32 ends at 2^128: more steps in a row overflow than are allowed to be not finite."""
    scaled_runs(monkeypatch, 2.0**132)
    metrics = run_of(warm, tmp_path / "out", script)
    has_stepped = ["skipped" not in m for m in metrics]
    first = has_stepped.index(True)
    assert first > Config.max_bad_steps
    assert [m["loss_scale"] for m in metrics[:first]] == [2.0 ** (131 - n) for n in range(first)]
    assert metrics[first]["loss_scale"] == metrics[first - 1]["loss_scale"]
    assert all(m["skipped"].startswith(OVERFLOW) for m in metrics if "skipped" in m)
    assert not any("bad_examples" in m for m in metrics)


def test_overflows_without_end_end_the_run(warm, tmp_path, monkeypatch):
    scaled_runs(monkeypatch, 2.0)
    monkeypatch.setattr(learner, "within_memory", lambda *args: [(torch.tensor(math.inf), {})])
    with pytest.raises(RunError, match="3 steps in a row had a loss or gradient that is not finite"):
        run_of(warm, tmp_path / "out", sft_train)
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [m["skipped"] for m in metrics] == [f"{OVERFLOW}1", *[learner.NOT_FINITE] * 3]


ON_ONE_PROCESS = """
import json, sys

import torch

import grpo_train
from learning import learner
from running.parsing import run_main

learner.compute_dtype = lambda *_: torch.float16
step, seen = learner.Learner.step, []

def overflowing(self, losses):
    rank = self.accelerator.process_index
    if rank == 1 and len(seen) in (0, 2):
        losses = [*losses, losses[0] * float("inf")]
    has_stepped, _ = step(self, losses)
    weights = [learner.whole(p).double().sum() for p in self.policy.parameters()]
    seen.append([has_stepped, self.loss_scale.state(), float(torch.stack(weights).sum())])
    with open(sys.argv[0] + f".{rank}", "w") as file:
        file.write(json.dumps(seen))
    return has_stepped, 0.0

learner.Learner.step = overflowing
run_main(grpo_train.main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", ["false", "true"])
def test_two_processes_agree_on_an_overflow_that_one_of_them_had(fsdp, warm, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + ON_ONE_PROCESS)
    flags = f"{SHORT} --warm_start none --model {warm} --output_dir {tmp_path / 'out'} --num_steps 4 "
    flags += f"--fsdp {fsdp} --beta 0.1 --eval_every 0 --cpu_threads 1 --learning_rate 1e-3"
    done = command(script, *given_once(flags), nproc=2)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (json.loads((tmp_path / f"script.py.{rank}").read_text()) for rank in range(2))
    assert one == two
    assert [(has_stepped, *scale) for has_stepped, scale, _ in one] == [
        (False, 8192.0, 0), (True, 8192.0, 1), (False, 4096.0, 0), (True, 4096.0, 1)
    ]  # fmt: skip
    sums = [total for *_, total in one]
    assert sums[1] == sums[2]
    assert len(set(sums)) == 3
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [m.get("skipped") for m in metrics] == [f"{OVERFLOW}8192", None, f"{OVERFLOW}4096", None]


@pytest.mark.parametrize(
    ("source", "saved"), [(torch.bfloat16, torch.float16), (torch.float32, torch.float32)]
)
def test_what_was_sampled_in_fp16_is_not_saved_in_bf16(source, saved, tokenizer, tmp_path, monkeypatch):
    """bf16 has three bits fewer; float32 holds both."""
    save_model(build_model("llama", tokenizer), tokenizer, tmp_path / "m", source)
    monkeypatch.setattr("learning.models.compute_dtype", lambda *given: torch.float16)
    config = SimpleNamespace(precision="fp16", lora_r=0, load_in_4bit=False, trust_remote_code=False)
    assert load_policy(config, str(tmp_path / "m"), tokenizer, "cpu").source_dtype == saved


def computed_in(monkeypatch, kind, model, **given):
    """What an evaluation and a solver of a saved model compute in on such a device."""
    seen, device = [], torch.device(kind)

    def compute(precision, device):
        seen.append(compute_dtype(precision, device))
        raise InterruptedError  # what comes next needs a device of this kind

    for module in (grpo_eval, solver):
        monkeypatch.setattr(module, "compute_dtype", compute)
    monkeypatch.setattr(solver, "choose_device", lambda: device)
    with pytest.raises(InterruptedError):
        grpo_eval.LocalModel(
            grpo_eval.Config(model=str(model), dataset="arithmetic", limit=3, **given), str(model), device
        )
    with pytest.raises(InterruptedError):
        solver.load_solver(str(model), **given)
    return seen


@pytest.mark.parametrize("line", ["precision: fp16\n", "precision: fp32\n", "", "bf16: false\n"])
def test_a_model_is_asked_in_what_it_was_trained_in(line, warm, tmp_path, monkeypatch):
    """Every model was asked in bf16, which rounds three bits of a model away that was trained in fp16."""
    model = tmp_path / "model"
    shutil.copytree(warm, model)
    saved = (model / "run_config.yaml").read_text()
    (model / "run_config.yaml").write_text(re.sub("(?m)^precision: .*\n", line, saved))
    asked = torch.float16 if "fp16" in line else torch.float32 if line else torch.bfloat16
    assert computed_in(monkeypatch, "cuda", model) == [asked] * 2
    assert computed_in(monkeypatch, "cpu", model) == [torch.float32] * 2
    assert computed_in(monkeypatch, "cuda", model, precision="bf16") == [torch.bfloat16] * 2


def test_a_model_that_was_trained_in_fp16_is_asked_on_a_cpu_and_fp16_by_name_is_refused(
    warm, tmp_path, no_card
):
    model = tmp_path / "model"
    shutil.copytree(warm, model)
    saved = (model / "run_config.yaml").read_text()
    (model / "run_config.yaml").write_text(saved.replace("precision: bf16", "precision: fp16"))
    how = dict(model=str(model), dataset="arithmetic", limit=3, output_dir=str(tmp_path / "eval"))
    report, folder = grpo_eval.evaluate(grpo_eval.Config(**how))
    assert report["questions"] == 3
    noted = settings_from_file(grpo_eval.Config, folder / "run_config.yaml")
    assert noted["precision"] == "fp32", "what was computed in; as --config it is not refused here"
    with pytest.raises(SettingError, match=REFUSAL):
        grpo_eval.evaluate(grpo_eval.Config(**how, precision="fp16"))


def test_where_there_was_bf16_its_model_is_asked_in_that(tmp_path):
    (tmp_path / "run_config.yaml").write_text("bf16: false\n")
    assert grpo_eval.Config(model=str(tmp_path)).precision == "fp32"

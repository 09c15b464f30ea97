"""The speedrun, its peer, its variations, and bf16 beside fp16: what scripts work out."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_benchmarks import benchmark_module  # noqa: F401

import grpo_train
from running.parsing import settings_from_file

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def speedrun(benchmark_module):  # noqa: F811
    return benchmark_module("speedrun")


@pytest.mark.parametrize(("trained", "evaluated"), [("precision: fp32\n", "fp32"), (None, "bf16")])
def test_a_model_is_evaluated_in_the_precision_it_was_trained_in(
    trained, evaluated, speedrun, tmp_path, monkeypatch
):
    """--train_flags --precision reached the training alone. A peer's folder has no settings of ours."""
    asked = []
    monkeypatch.setattr(speedrun, "evaluate", lambda *given: asked.append(given))
    if trained:
        (tmp_path / "run_config.yaml").write_text(trained)
    args = SimpleNamespace(data="d", answer_tokens=300, precision="bf16", questions=None, work=tmp_path)
    assert list(speedrun.evaluations(tmp_path, "m", args)) == ["greedy", "mean4"]
    assert {how[how.index("--precision") + 1] for how in asked} == {evaluated}


def test_sampled_over_trained_counts_the_extra_rollouts(speedrun):
    """Two steps of 4 x 8, and three groups that gave way: 88 sampled, 30 + 14 computed."""
    steps = [
        {"replaced_groups": 1, "scored_completions": 30},
        {"replaced_groups": 2, "scored_completions": 14},
    ]
    assert speedrun.sampled_over_trained(steps, (4, 8)) == 2.0


def test_the_curve_says_until_when_its_problems_are_new(speedrun):
    assert speedrun.new_until([30.0, 60.0, 90.0], [0.5, 1.0, 1.5]) == 1.0
    assert speedrun.new_until([30.0, 60.0, 90.0], [0.1, 0.2, 0.3]) == 1.5, "still new at the end"
    assert speedrun.new_until([30.0, 60.0], [1.2, 2.4]) == 0.0, "a step had more problems than there are"


def test_the_curve_is_over_the_minutes_of_the_clock(speedrun):
    seconds, right = [30.0, 33.0, 36.0, 39.0, 60.0, 63.0, 90.0], [0.1, 0.1, 0.2, 0.2, 0.4, 0.3, 0.5]
    assert speedrun.curve(seconds, right) == [[1.0, 0.2], [1.5, 0.4]]


def test_a_run_whose_first_step_has_nothing_right_is_stopped(speedrun, tmp_path):
    """The supervised steps before it do not count, nor what its line rounds to 0."""
    program = "print('step 1  loss 0.5'); print('step 1  reward 0.2  right 0.00', flush=True); "
    program += "import time; time.sleep({})"
    (tmp_path / "metrics.jsonl").write_text('{"correct": 0.0}\n')
    with pytest.raises(SystemExit, match="the pass rate after the warm start is 0, and GRPO has nothing"):
        speedrun.run_by_the_clock(["-c", program.format(600)], tmp_path / "log", tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"correct": 0.002}\n')
    status, seconds, moments = speedrun.run_by_the_clock(
        ["-c", program.format(0)], tmp_path / "log", tmp_path
    )
    assert status == 0
    assert 0 < moments[1] <= seconds


def options(tmp_path, **more):
    return SimpleNamespace(minutes=1.0, saving=10.0, work=tmp_path, **more)


def test_minutes_that_are_too_short_say_what_is_needed(speedrun, tmp_path):
    words = [
        "-c",
        "import sys; sys.exit('grpo_train.py: max_wall_minutes=0.8: loading took 90 s: give more than 1.6')",
    ]
    with pytest.raises(
        SystemExit, match=r"give more than 1.6\n--minutes 1 is too short: give that, and 10 s"
    ):
        speedrun.once(words, tmp_path / "out", options(tmp_path), [])
    with pytest.raises(SystemExit, match=r"took 61.0 s of 60: what comes after the last step .* --saving 10"):
        speedrun.once(["-c", ""], tmp_path / "out", options(tmp_path), [], lambda: 61.0)
    assert not (tmp_path / "out.json").exists(), "neither counts as a run"


def test_no_minutes_left_beside_saving_are_refused_at_once(speedrun, capsys):
    words = ["--model", "m", "--data", "d", "--minutes", "0.1", "--saving", "12"]
    with pytest.raises(SystemExit):
        speedrun.checked(speedrun.arguments(""), words)
    assert "--minutes 0.1: 12 s of them are for saving; give more" in capsys.readouterr().err


def test_a_run_of_another_recipe_is_not_taken_for_this_one_s(speedrun, tmp_path):
    made = speedrun.once(["-c", ""], tmp_path / "out", options(tmp_path), ["lr: 1"])
    assert speedrun.once(["-c", ""], tmp_path / "out", options(tmp_path), ["lr: 1"]) == made
    with pytest.raises(SystemExit, match="is of another command or recipe"):
        speedrun.once(["-c", ""], tmp_path / "out", options(tmp_path), ["lr: 2"])


def test_means_over_the_seeds_stand_beside_each(speedrun):
    reports = {
        seed: {"greedy": {"accuracy": value, "questions": 10}, "mean4": {"accuracy": value / 2}}
        for seed, value in ((0, 0.5), (1, 0.25))
    }
    runs = {seed: [("steps", steps, "steps")] for seed, steps in ((0, 10), (1, 20))}
    found = {metric: value for _, metric, value, _ in speedrun.result_rows("case", reports, runs)}
    assert (found["greedy"], found["mean4"], found["steps"]) == (0.375, 0.1875, 15)
    assert (found["greedy_1"], found["steps_0"], found["seeds"]) == (0.25, 10, 2)


# The variations


@pytest.fixture
def tune(benchmark_module):  # noqa: F811
    return benchmark_module("speedrun_tune")


def tune_options(tmp_path, **more):
    how = dict(model="m", work=tmp_path, seed=1, recipe="configs/speedrun.yaml", minutes=5.0, name="tune")
    how |= dict(questions=512, steps=None)
    return SimpleNamespace(**{**how, **more})


def test_every_variation_is_a_recipe_and_differs_from_the_first(tune, tmp_path):
    seen = []
    for name, settings in tune.SETTINGS.items():
        given = {key: value for key, value in settings.items() if key != "start"}
        config, start = tune.config_of(tune_options(tmp_path), given), None
        if config.warm_start != "none":
            changed = settings.get("start", {})
            steps = dict(num_steps=None) if "num_epochs" in changed else {}
            start = tune.dataclasses.replace(tune.warm_start_settings(config), **steps, **changed)
        assert (config, start) not in seen, name
        seen.append((config, start))


def test_the_warm_up_of_a_variation_is_as_long_as_the_recipe_s(tune, tmp_path):
    recipe = settings_from_file(grpo_train.Config, ROOT / "configs" / "speedrun.yaml")
    config = tune.config_of(tune_options(tmp_path), {})
    steps = recipe["warmup_ratio"] * recipe["num_steps"]
    assert config.warmup_ratio * config.num_steps == pytest.approx(steps) == pytest.approx(8)
    config = tune.config_of(tune_options(tmp_path, steps=345), {"lr_scheduler_type": "cosine"})
    assert (config.num_steps, config.warmup_ratio * 345) == (345, pytest.approx(8))


def test_an_average_is_a_variation_of_its_own(tune, tmp_path):
    """That of two steps of the trial's policy, asked of policy and sampler while it is lent."""
    policy, sampler = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
    questions = SimpleNamespace(evaluation=SimpleNamespace(name="greedy", steps=[]))
    trial = tune.Trial(tmp_path, 0, None, None, [questions], averages={0.9: None})
    trial._answers = lambda *_: {"right": [[int(sampler.weight[0, 0] == 2.0)]]}
    run = SimpleNamespace(learner=SimpleNamespace(policy=policy), is_finished=False)
    run.progress, run.metrics = (
        SimpleNamespace(step=0, train_seconds=0.0),
        dict.fromkeys(("rollout_seconds", "reward_seconds", "update_seconds"), 1.0),
    )
    for step, weight in ((0, 9.0), (1, 1.0), (2, 3.0)):
        run.progress.step = step
        with torch.no_grad():
            policy.weight.fill_(weight)
        trial.ask(run, SimpleNamespace(model=sampler))
    assert trial.answers_of(0.9) == {"greedy": (1.0, "accuracy")}
    assert policy.weight[0, 0] == 3.0


def test_the_peer_s_recipe_is_ours_but_for_what_is_its_own(tune):
    ours, peer = (
        settings_from_file(grpo_train.Config, ROOT / path)
        for path in ("configs/speedrun.yaml", "benchmarks/speedrun_trl.yaml")
    )
    differ = {name for name in {**ours, **peer} if ours.get(name) != peer.get(name)}
    assert differ == {"batch_size", "learning_rate", "ema_decay"}


def test_a_recipe_whose_average_the_peer_cannot_keep_is_refused(
    benchmark_module,  # noqa: F811
    tmp_path,
    monkeypatch,
    capsys,
):
    """It saved the last weights, and the result file said that the recipe had an average."""
    peer = benchmark_module("speedrun_trl")
    words = "--sampler vllm --model m --data d --recipe configs/speedrun.yaml --work".split()
    monkeypatch.setattr("sys.argv", ["speedrun_trl.py", *words, str(tmp_path)])
    monkeypatch.setattr(peer, "once", lambda *_: pytest.fail("it began"))
    with pytest.raises(SystemExit) as ended:
        peer.main()
    assert ended.value.code == 2
    assert "TRL keeps no average of the weights: leave out ema_decay" in capsys.readouterr().err


def test_the_peer_s_rewards_are_told_the_answer_format(benchmark_module):  # noqa: F811
    """TRL hands a reward function columns and completions as keywords, and no answer_format."""
    peer = benchmark_module("speedrun_trl")
    completions = [[{"role": "assistant", "content": text}] for text in ("It is \\boxed{7}.", "It is 7.")]
    boxed = peer.told_format(peer.right, "boxed")
    assert boxed(prompts=["", ""], completions=completions, completion_ids=None, answer=["7", "7"]) == [
        1.0,
        0.0,
    ]
    assert boxed.__name__ == "right", "TRL logs a reward by its function's name"


def test_the_peer_s_rate_falls_as_ours_does_to_0_at_the_end_of_the_minutes(benchmark_module, monkeypatch):  # noqa: F811
    peer = benchmark_module("speedrun_trl")
    clock = SimpleNamespace(now=60.0)
    monkeypatch.setattr("running.launching.seconds_since_start", lambda: clock.now)
    config = grpo_train.Config(warmup_ratio=0.02, lr_scheduler_type="linear")
    trainer = peer.with_our_rates(SimpleTrainer, config, end=240.0)()
    schedule = trainer.create_scheduler(100)
    assert trainer.create_scheduler(100) is schedule, "TRL asks for it more than once"
    rates = [schedule.get_last_lr()[0]]
    for now in (60.0, 120.0, 180.0, 240.0):
        clock.now = now
        trainer.optimizer.step()
        schedule.step()
        rates += schedule.get_last_lr()
    assert rates == [0.5, 1.0, 0.5, 0.25, 0.0]


class SimpleTrainer:
    """What transformers' Trainer has when it makes its scheduler."""

    def __init__(self):
        self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        self.lr_scheduler = None


def test_the_set_up_of_the_first_step_does_not_count(tune, tmp_path):
    """A first step of 30 s, with 2 s of a second: 28 s of them were compiling."""
    trial = tune.Trial(tmp_path, 0, None, None, [])
    progress = SimpleNamespace(step=1, train_seconds=30.0)
    run = SimpleNamespace(progress=progress, is_finished=False)
    run.metrics = {"rollout_seconds": 20.0, "reward_seconds": 1.0, "update_seconds": 9.0}
    trial.ask(run, None)
    progress.step, progress.train_seconds = 2, 32.0
    run.metrics = {"rollout_seconds": 1.0, "reward_seconds": 0.5, "update_seconds": 0.5}
    trial.ask(run, None)
    assert progress.train_seconds == 4.0


def test_variations_of_several_calls_add_up_and_those_of_another_recipe_do_not(tune, tmp_path, monkeypatch):
    common = importlib.import_module("common")
    monkeypatch.setattr(tune, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    args = tune_options(tmp_path)
    first = {"recipe": {"mean8": (0.3, "accuracy")}, "kl": {"failed": ("diverged", "")}}
    tune.write(args, first, {"recipe": {}, "kl": {"beta": 1.0}})
    assert tune.tried_before(args) == first
    tune.write(args, {"g-4": {"mean8": (0.4, "accuracy")}}, {"g-4": {}})  # as another process does
    made = json.loads((tmp_path / "tune.json").read_text())
    assert made["settings"] == {"g-4": {}, "recipe": {}, "kl": {"beta": 1.0}}
    rows = made["rows"]
    assert rows[0]["value"] == 3
    assert [row["case"] for row in rows[1:]] == ["g-4", "recipe", "kl"], "the best first"
    with pytest.raises(SystemExit, match="is of another recipe, seed or length"):
        tune.tried_before(tune_options(tmp_path, minutes=3.0))
    with pytest.raises(SystemExit, match="is of another recipe, seed or length"):
        tune.tried_before(tune_options(tmp_path, steps=345))


def test_a_queue_is_read_again_before_each_variation(tune, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune, "RESULTS", tmp_path)
    monkeypatch.setattr(tune, "tried_before", lambda args: {"kl": {}})
    args, refused = tune_options(tmp_path, queue=tmp_path / "queue"), set()
    args.queue.write_text('kl\nunknown\nbroken {"beta": }\nlist [1]\nmisspelt {"bta": 1}\ng-16\n')
    found = tune.variations(args, refused)
    assert next(found) == ("g-16", tune.SETTINGS["g-16"])
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == ["unknown", "broken", "list", "misspelt"]
    args.queue.write_text('longer {"max_completion_length": 320}\nend\n')
    assert next(found) == ("longer", {"max_completion_length": 320})
    refused.add("longer")
    assert next(found, "the end") == "the end"


# bf16 beside fp16


def test_the_study_of_precision_is_the_recipe_in_both(benchmark_module, tmp_path):  # noqa: F811
    precision = benchmark_module("precision")
    (tmp_path / "data").mkdir()
    args = SimpleNamespace(recipe="configs/speedrun.yaml", model="m", steps=30, work=tmp_path, seeds=[1, 2])
    precision.write(args)
    from grpo_study import Options
    from running import sft_config
    from running.study_file import read_study

    start = sft_config.Config, sft_config.warm_start_settings
    study = read_study(tmp_path / "study.yaml", grpo_train.Config, *start, Options(output_dir=str(tmp_path)))
    one, other = study.configs["bf16"], study.configs["fp16"]
    assert (one.precision, other.precision) == ("bf16", "fp16")
    assert one.num_steps == other.num_steps == 30
    assert one.batch_size == other.batch_size == 64
    [greedy] = study.plan["secondary"]
    assert greedy["evaluation"] == "greedy", "else study.json has no such accuracy"


# Tables, and vLLM


def result(rows, **more):
    names = ("case", "metric", "value", "unit")
    made = {"script": "s.py", "card": "NVIDIA H200", "versions": {"torch": "2", "transformers": "5"}}
    return (
        made
        | {
            "date": "d",
            "cards": ["GPU-1", "GPU-1"],
            "recipe": (ROOT / "configs" / "speedrun.yaml").read_text().splitlines(),
            "rows": [dict(zip(names, row, strict=True)) for row in rows],
        }
        | more
    )


def test_a_table_of_variations_says_what_the_recipe_had_then(benchmark_module):  # noqa: F811
    tables = benchmark_module("tables")
    now = (ROOT / "configs" / "speedrun.yaml").read_text()
    assert tables._recipe_then(now.splitlines()) == ""
    then = now.replace("batch_size: 64", "batch_size: 32").replace("mu: 1\n", "") + "top_k: 5\n"
    said = "batch_size 32, top_k 5, mu not set"
    assert tables._recipe_then(then.splitlines()) == said


def test_tables_say_what_is_there_and_what_is_not_yet(benchmark_module, speedrun, tmp_path, monkeypatch):  # noqa: F811
    tables = benchmark_module("tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.speedrun().startswith("ours: not measured yet. TRL with vLLM: not measured yet.")
    assert tables.speedrun_tune().startswith("Not measured yet")
    reports = {0: {"start": {"accuracy": 0.28}, "greedy": {"accuracy": 0.43, "questions": 9}}}
    reports[0]["mean4"] = {"accuracy": 0.4}
    names = "seconds warm_start_seconds seconds_to_first_step steps completions_per_s dead_groups".split()
    runs = {0: [(name, value, "") for name, value in zip(names, (299, 60, 90, 140, 400, 0.1), strict=True)]}
    rows = speedrun.result_rows("speedrun-5min", reports, runs)
    (tmp_path / "speedrun.json").write_text(json.dumps(result(rows)))
    lines = tables.speedrun().splitlines()
    assert lines[2] == "| ours | 5min | 1 | 0.280 | 0.430 | 0.400 | 299 | 60 | 90 | 140 | 400 | 10% |"
    assert "TRL with vLLM: not measured yet." in lines[-1]
    assert "d, card GPU-1`." in lines[-1]


def test_the_better_mode_of_vllm_counts_for_each_number(benchmark_module, monkeypatch):  # noqa: F811
    generation, emitted = benchmark_module("bench_generation"), {}
    said = {
        "in_process": [["c", "tokens_per_s", 20.0, "tokens/s"], ["t", "seconds", 9.0, "s"]],
        "engine_process": [["c", "tokens_per_s", 17.0, "tokens/s"], ["t", "seconds", 7.0, "s"]],
    }

    def run(words, **_):
        lines = [
            "INFO of its own",
            *("vllm " + json.dumps(row) for row in said[words[words.index("--mode") + 1]]),
        ]
        return SimpleNamespace(returncode=0, stdout="\n".join(lines))

    monkeypatch.setattr(generation.subprocess, "run", run)
    args = SimpleNamespace(model=None, data=None)
    generation.vllm_case("c", args, lambda case, metric, value, unit: emitted.update({(case, metric): value}))
    assert emitted["c", "vllm_tokens_per_s"] == 20.0
    assert emitted["c", "vllm_tokens_per_s_best_mode"] == "in_process"
    assert emitted["t", "vllm_seconds"] == 7.0
    assert emitted["t", "vllm_seconds_best_mode"] == "engine_process"
    assert emitted["c", "vllm_tokens_per_s_engine_process"] == 17.0
    tables = benchmark_module("tables")
    numbers = {f"vllm_tokens_per_s{s}": v for s, v in (("", 20584.0), ("_logprobs", 13624.0))}
    numbers |= {
        "vllm_tokens_per_s_best_mode": "in_process",
        "vllm_tokens_per_s_logprobs_best_mode": "engine_process",
    }
    assert "20,584 tokens/s (in process), 13,624 with the log-probs" in tables._vllm_note("1.5b-8x8", numbers)


def test_the_peer_s_adapters_are_where_the_recipe_s_are(benchmark_module):  # noqa: F811
    """They were on every linear layer, whatever lora_target_modules said."""
    pytest.importorskip("peft")
    peer = benchmark_module("speedrun_trl")
    made = peer.adapters(grpo_train.Config(lora_r=4, lora_target_modules=["q_proj"]))
    assert (made.r, made.lora_alpha, made.target_modules) == (4, 64, {"q_proj"})
    assert peer.adapters(grpo_train.Config(lora_r=4)).target_modules == "all-linear"


# Whole runs

RECIPE = """
model: tiny
dataset: arithmetic
warm_start: {folder}/warm.yaml
max_wall_minutes: 1
num_steps: 3
batch_size: 4
num_generations: 4
max_completion_length: 48
beta: 0
m3po_lambda: 0
warmup_ratio: 0.0
limit: 100
eval_every: 0
cpu_threads: 1
"""
WARM = "batch_size: 64\nnum_epochs: null\nnum_steps: 100\nlearning_rate: 3e-3\n"


@pytest.fixture
def small_recipe(tmp_path):
    """A recipe of the tiny model, and arithmetic problems as a folder with both splits."""
    from problems.sources import load_problems

    (tmp_path / "recipe.yaml").write_text(RECIPE.format(folder=tmp_path))
    (tmp_path / "warm.yaml").write_text(WARM)
    for split, count in (("train", 900), ("test", 20)):
        rows = [
            {"question": p.question, "answer": p.answer, "solution": p.solution}
            for p in load_problems("arithmetic", split)[:count]
        ]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def benchmark(script, folder, *words):
    """Run a script of benchmarks/ on the small recipe; returns its rows as {(case, metric): value}."""
    command = [sys.executable, f"benchmarks/{script}", "--model", "tiny", "--data", str(folder)]
    command += ["--recipe", str(folder / "recipe.yaml"), "--work", str(folder / "work"), *words]
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "BENCH_RESULTS": str(folder / "results"),
    }
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = next(json.loads(line) for line in reversed(done.stdout.splitlines()) if line.startswith("[{"))
    return {(row["case"], row["metric"]): row["value"] for row in rows}


@pytest.mark.slow
def test_the_speedrun_goes_from_a_model_to_an_evaluated_one(small_recipe):
    words = "--minutes 4 --seeds 0 1 --answer_tokens 48".split()
    found = benchmark("speedrun.py", small_recipe, *words)
    case = "speedrun-4min"
    assert (found[case, "steps_0"], found[case, "seeds"], found[case, "questions"]) == (3, 2, 20)
    assert found[case, "greedy"] == pytest.approx(
        (found[case, "greedy_0"] + found[case, "greedy_1"]) / 2, abs=1e-4
    )
    kept = json.loads((small_recipe / "results" / "speedrun.json").read_text())
    assert [len(curve) for curve in kept["curves"].values()] == [1, 1], "a point for three steps"


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "lora_r: 4\n"])
def test_the_peer_does_the_same_work_with_generate(small_recipe, more):
    trl = pytest.importorskip("trl")
    recipe = small_recipe / "recipe.yaml"
    recipe.write_text(recipe.read_text() + more)
    words = "--sampler generate --cpu --minutes 4 --answer_tokens 48".split()
    found = benchmark("speedrun_trl.py", small_recipe, *words)
    assert found["speedrun-4min", "steps_0"] == 3
    assert found["speedrun-4min", "questions"] == 20
    [weights] = (small_recipe / "work" / "speedrun_trl_generate_0").glob("*.safetensors")
    assert not any("lora_" in name for name in load_file(weights)), "merged"
    peer = importlib.import_module("speedrun_trl")
    config = grpo_train.Config(**settings_from_file(grpo_train.Config, ROOT / "configs" / "speedrun.yaml"))
    args = SimpleNamespace(sampler="vllm", cpu=True, trl_settings=["per_device_train_batch_size=128"])
    settings = peer.trl_settings(config, args)
    assert set(settings) <= {field.name for field in fields(trl.GRPOConfig)}
    assert settings["per_device_train_batch_size"] == 128


@pytest.mark.slow
def test_variations_are_tried_on_held_out_questions(small_recipe):
    warm = small_recipe / "warm.yaml"
    warm.write_text(warm.read_text().replace("num_steps: 100", "num_steps: 10"))
    words = "--minutes 0.6 --setup 10 --only recipe temperature-1.2 --seed 1 --questions 16".split()
    found = benchmark("speedrun_tune.py", small_recipe, *words)
    steps = benchmark(
        "speedrun_tune.py", small_recipe, *"--steps 3 --only cosine --questions 16 --name in_steps".split()
    )
    assert steps["cosine", "steps"] == 3
    assert found["all", "configurations_tried"] == 2
    assert {case for case, metric in found if metric == "mean8"} == {"recipe", "temperature-1.2"}

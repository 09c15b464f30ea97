"""The whole job: what a run does and what it leaves."""

import base64
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo_eval
import grpo_train
import sft_train
from decoding.decoder import GroupDecoder
from decoding.rollout import Interaction
from errors import RewardError, SettingError
from grpo_train import Config, group_advantages
from problems.prompts import Prompting, problems_of
from problems.sources import load_problems
from running.log import log_rollouts
from running.parsing import parse_config
from running.progress import Progress, next_problems
from small_runs import SHORT, given_once, lines, run_short
from small_update import small_update

ROOT = Path(__file__).resolve().parents[1]
NAN = math.nan


def test_each_step_has_problems_of_its_own_until_all_were_met(trained):
    rows = [json.loads(line) for line in (trained / "rollouts.jsonl").read_text().splitlines()]
    batches = [{row["example_id"] for row in rows if row["step"] == step} for step in (1, 2, 3)]
    assert [len(batch) for batch in batches] == [3, 3, 3]
    assert len(set.union(*batches)) == 9


def test_groups_that_give_way_give_way_to_problems_that_nobody_has_met(warm, tmp_path):
    """No group carries a signal: of six problems a step four are drawn for nothing, and the next step begins
    behind them.
    """
    (tmp_path / "same.py").write_text(
        "def same(completions, **kwargs):\n    return [1.0] * len(completions)\n"
    )
    flags = f"--reward {tmp_path}/same.py:same --dynamic_sampling 2 --batch_size 2 --num_steps 2 "
    flags += "--eval_every 0 --limit 40 --max_completion_length 8"
    out = run_short(warm, tmp_path / "out", flags)
    rows = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    config = parse_config(Config, given_once(f"{SHORT} {flags}"))
    ids = [p.id for p in problems_of(config)]
    order = next_problems(ids, 12, SimpleNamespace(problems_drawn=0, config=config))
    for step, first in ((1, 4), (2, 10)):
        asked = list(dict.fromkeys(row["example_id"] for row in rows if row["step"] == step))
        assert asked == order[first : first + 2]


def test_the_entropy_is_what_sampling_at_that_temperature_is_surprised_by_on_average(trained):
    """-log p of the samples has the entropy as its mean. One group of each step is logged: 4 rows of up to 32
    tokens.
    """
    rows = [json.loads(line) for line in (trained / "rollouts.jsonl").read_text().splitlines()]
    surprise = [-p for row in rows if "logps" in row for p in row["logps"]]
    entropy = [json.loads(line)["entropy"] for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert sum(entropy) / len(entropy) == pytest.approx(sum(surprise) / len(surprise), rel=0.3)


@pytest.mark.slow
def test_a_warm_start_leaves_the_held_out_out_and_is_made_again_for_other_settings(tmp_path, monkeypatch):
    made = []

    def train(config, run):
        made.append(config)
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(sft_train, "train", train)
    run = SimpleNamespace(accelerator=Accelerator(), find_folder=lambda folder: str(folder))
    for flags in ("", "", "--eval_problems 9", "--eval_problems 9 --eval_every 30", "--seed 3"):
        words = f"--config configs/tiny.yaml --output_dir {tmp_path / 'out'} {flags}".split()
        sft_train.warm_start(parse_config(Config, words), run)
    assert [(sft.eval_problems, sft.seed) for sft in made] == [(200, 0), (9, 0), (200, 3)]


def test_a_refused_run_leaves_no_output_directory(warm, tmp_path):
    (tmp_path / "model").mkdir()
    for file in warm.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model" / "model.safetensors").write_bytes((warm / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(SettingError, match="model="):
        run_short(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


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


LOGGED = """reward reward_std reward/correctness_reward reward/format_reward correct frac_reward_zero_std
    unique_completions kl completion_length completion_length_min completion_length_max truncated clip_low
    clip_high entropy grad_norm learning_rate logp_diff_max rollout_seconds update_seconds
    rollout_tokens_per_s update_tokens_per_s thinking_paths input_change update_shown"""


def test_each_step_logs_every_metric_of_the_glossary(trained):
    metrics = lines(trained / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3]
    glossary = (ROOT / "docs" / "metrics.md").read_text()
    for name in set().union(*metrics):
        assert f"`{name}`" in glossary or name.startswith("reward/"), (
            f"{name} is not explained in docs/metrics.md"
        )
    for m in metrics:
        assert set(LOGGED.split()) <= set(m)
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
    rewards = torch.tensor([r["reward"] for r in records], dtype=torch.float64)
    advantages = group_advantages(rewards, 4)
    assert [r["advantage"] for r in records] == pytest.approx(advantages.tolist(), abs=1e-6)
    assert advantages.any()


def test_the_same_seed_gives_the_same_run_and_another_seed_another(warm, trained, tmp_path):
    same = run_short(warm, tmp_path / "same", "--beta 0.04 --micro_batch_tokens 300")
    other = run_short(warm, tmp_path / "other", "--beta 0.04 --seed 7 --num_steps 1 --eval_every 0")
    folders = {"trained": trained, "same": same, "other": other}
    texts = {k: [r["completion"] for r in lines(v / "rollouts.jsonl")] for k, v in folders.items()}
    assert texts["same"] == texts["trained"], "micro-batches change nothing (I10)"
    assert texts["other"] != texts["trained"][: len(texts["other"])]


def test_each_reuse_of_a_rollout_is_an_optimiser_step_but_no_step_of_the_log(warm, tmp_path):
    """open-r1#583: four times the steps, with nobody knowing why."""
    flags = "--mu 4 --learning_rate 3e-4 --lr_scheduler_type linear --warmup_ratio 0 --num_steps 2 "
    flags += "--eval_every 0 --gradient_checkpointing true"
    metrics = lines(run_short(warm, tmp_path / "mu", flags) / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2]
    assert max(m["logp_diff"] for m in metrics) < 1e-4, (
        "of the first pass: later ones move away from the sampler"
    )
    assert [m["learning_rate"] for m in metrics] == pytest.approx([3e-4, 3e-4 * 4 / 8])


def test_lambda_zero_runs_plain_grpo(warm, tmp_path):
    metrics = lines(run_short(warm, tmp_path / "plain", "--m3po_lambda 0 --num_steps 1") / "metrics.jsonl")
    assert "thinking_paths" not in metrics[0]
    assert "kl" not in metrics[0], "beta 0 has no reference"


def test_the_reference_is_the_policy_again_when_an_outer_iteration_begins(warm, tmp_path):
    flags = "--num_steps 2 --outer_iterations 2 --beta 0.1 --learning_rate 1e-3 --lr_scheduler_type constant "
    flags += "--warmup_ratio 0 --eval_every 0 --max_completion_length 16"
    kl = [m["kl"] for m in lines(run_short(warm, tmp_path / "outer", flags) / "metrics.jsonl")]
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
    with pytest.raises(SettingError, match="holds a run already"):
        run_short(warm, trained)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise KeyError('x')", ["KeyError"]),
        ("return [float('nan')] * len(completions)", ["nan", "finite"]),
        ("return [1.0]", ["1 value for 12"]),
        ("return [None] * len(completions)", ["None for all"]),
        ("return None", ["NoneType"]),
    ],
)
def test_a_reward_function_that_fails_is_named_with_its_step_and_saves_nothing(warm, tmp_path, body, words):
    """TRL#6533: one value was silently broadcast."""
    (tmp_path / "mine.py").write_text(f"def mine(completions, **kwargs):\n    {body}\n")
    flags = f"--reward {tmp_path}/mine.py:mine --eval_every 0 --max_completion_length 8"
    with pytest.raises(RewardError) as error:
        run_short(warm, tmp_path / "out", flags)
    assert all(word in str(error.value) for word in ("mine", "step 1", *words)), str(error.value)
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_users_reward_gets_the_columns_that_trl_gives(warm, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def mine(prompts, completions, completion_ids, answer, solution, **kwargs):\n"
        "    assert completions[0][0]['role'] == 'assistant' and prompts[0][-1]['role'] == 'user'\n"
        "    assert answer == solution\n"
        "    return [None if i % 4 == 0 else float(len(ids)) for i, ids in enumerate(completion_ids)]\n"
    )
    flags = f"--reward {tmp_path}/mine.py:mine=0.5 --num_steps 1 --eval_every 0"
    metrics = lines(run_short(warm, tmp_path / "out", flags) / "metrics.jsonl")
    assert metrics[0]["unscored"] == 3
    assert metrics[0]["reward"] == pytest.approx(0.5 * metrics[0]["reward/mine"])


def test_a_model_that_breaks_leaves_a_log_that_any_json_reader_reads(tokenizer, prompts, tmp_path):
    """Its log-probs are NaN, and report.html said no word of just that run."""
    small, records = small_update(tokenizer, prompts, batch_size=2), []
    small.policy.model.norm.weight.data[0] = NAN
    decoder = GroupDecoder(small.policy, tokenizer, "e", Interaction(0.3))
    batch, _ = Prompting("xml", "").encode(tokenizer, load_problems("arithmetic", limit=2), 200)
    sampled = grpo_train.sample_groups(small.config, decoder, batch, 0, range(2))
    run = SimpleNamespace(
        config=small.config, learner=small.learner, progress=Progress(), local_rows=slice(0, 8)
    )
    run.call_rewards = lambda action: action(list)
    grpo_train.score(run, grpo_train.chosen_rewards(small.config), sampled, 0)
    run.log = SimpleNamespace(write_rollouts=records.extend)
    log_rollouts(run, sampled, [False] * 8, torch.zeros(8))
    records = [json.loads(json.dumps(record), parse_constant=pytest.fail) for record in records]
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
    flags = f"--dataset {tmp_path / 'mine.jsonl'} --eval_every 0 --num_steps 1 --max_completion_length 8"
    out = run_short(warm, tmp_path / "out", flags)
    with pytest.raises(SettingError, match="one file this model was trained on"):
        grpo_eval.Config(model=str(out))
    assert grpo_eval.Config(model=str(out), split="train").dataset == str(tmp_path / "mine.jsonl")


def test_all_prompts_too_long_is_an_error_that_says_what_to_set(warm, tmp_path):
    with pytest.raises(ValueError, match="max_prompt_length=3"):
        run_short(warm, tmp_path / "out", "--max_prompt_length 3")
    assert not (tmp_path / "out").exists()


def accuracy_after(folder, flags):
    grpo_train.train(
        parse_config(Config, f"--config configs/tiny.yaml --output_dir {folder} {flags}".split())
    )
    metrics = lines(folder / "metrics.jsonl")
    return metrics[0]["eval_accuracy_before"], metrics[-1]["eval_accuracy"]


@pytest.mark.slow
def test_the_tiny_job_learns_from_its_reward_and_learns_nothing_from_shuffled_advantages(
    tmp_path, monkeypatch
):
    """The whole of configs/tiny.yaml, and a shorter copy of it in which every advantage goes to a wrong
    completion.
    """
    before, after = accuracy_after(tmp_path / "honest", "")
    assert 0.35 < before < 0.65
    assert after > before + 0.25
    generator = torch.Generator().manual_seed(0)

    def shuffled(*args):
        advantages = group_advantages(*args)
        return advantages[torch.randperm(len(advantages), generator=generator)]

    monkeypatch.setattr(grpo_train, "group_advantages", shuffled)
    start = f"--warm_start none --model {tmp_path / 'honest' / 'warm_start'} --num_steps 120"
    before, after = accuracy_after(tmp_path / "shuffled", start)
    assert after <= before + 0.1, "200 problems: 0.07 is two standard deviations of a difference"

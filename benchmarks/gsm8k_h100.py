"""A small model on GSM8K on one GPU: zero-shot, supervised training, then minutes of GRPO; before and after,
on the same questions, paired.

    python benchmarks/gsm8k_h100.py --case smollm2-135m --model DIR --data FOLDER --work FOLDER
        [--stage warm_start] ...

Cases: qwen-coder-0.5b, a supervised epoch and 6.5 minutes of GRPO with M3PO; smollm2-135m, three epochs and 4
minutes; qwen-multi-reward, an epoch and 4 minutes with the five rewards of configs/multi_reward.yaml. Each
stage leaves its state in --work and is not done again, so the stages may run in calls of their own. The last
stage reloads the saved directory by plain transformers in a process of its own, in float32, and compares
greedy completions.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from common import RESULTS, ROOT, evaluate, run_script, write_results

sys.path.insert(0, str(ROOT))
from reporting.comparison import compare

STAGES = ("zero_shot", "warm_start", "before", "train", "after", "reload")
COMMON = dict(answer_format="xml", batch_size=64, num_generations=8, max_completion_length=256)
COMMON |= dict(num_steps=400, warmup_ratio=0.02, beta=0.005, epsilon=0.2, loss_type="dapo", eval_every=0)
COMMON |= dict(micro_batch_tokens=16384, seed=0)
CASES = {  # settings of sft_train.py beside configs/gsm8k_warm_start.yaml, and of grpo_train.py beside COMMON
    "qwen-coder-0.5b": ({}, {"max_minutes": 6.5, "learning_rate": 2e-6, "m3po_lambda": 0.1}),
    "smollm2-135m": (
        {"num_epochs": 3, "learning_rate": 5e-4, "max_minutes": 1.5},
        {"max_minutes": 4, "learning_rate": 5e-6, "m3po_lambda": 0.1},
    ),
    "qwen-multi-reward": (
        {},
        {"max_minutes": 4, "learning_rate": 2e-6, "m3po_lambda": 0, "reward_set": "multi_reward"}
        | {"adam_beta2": 0.99, "weight_decay": 0.1, "max_grad_norm": 0.1}
        | {"num_generations": 16, "batch_size": 32},
    ),
}

RELOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.backends.cuda.matmul.allow_tf32 = False
folder, samples, out, limit = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
same, records = 0, [json.loads(line) for line in open(samples)]
records = [record for record in records if not record.get("skipped")]
for record in records:
    ids = tokenizer(record["prompt"], return_tensors="pt", add_special_tokens=False).to(model.device)
    made = model.generate(**ids, max_new_tokens=int(limit), do_sample=False)[0, ids.input_ids.shape[1]:]
    same += tokenizer.decode(made, skip_special_tokens=True) == record["resps"][0]
json.dump({"same": same, "of": len(records)}, open(out, "w"))
"""


def flags(settings):
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="qwen-coder-0.5b", choices=CASES)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="folder with train.jsonl and test.jsonl of GSM8K")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--stage", nargs="*", default=STAGES, choices=STAGES)
    parser.add_argument("--questions", type=int, default=1319)
    parser.add_argument("--reload_questions", type=int, default=40)
    parser.add_argument(
        "--train_flags",
        nargs=argparse.REMAINDER,
        default=[],
        help="flags for grpo_train.py beside the recipe, last on the line",
    )
    args = parser.parse_args()
    evals, start, out = args.work / "eval", args.work / "warm_start", args.work / "grpo"
    supervised, recipe = CASES[args.case][0], COMMON | CASES[args.case][1]
    common = flags(
        {
            "dataset": args.data,
            "split": "test",
            "limit": args.questions,
            "answer_format": "xml",
            "max_completion_length": 300,
        }
    )
    sampling = ("--num_samples", 4, "--temperature", 1)
    if "zero_shot" in args.stage:
        evaluate(args.model, "zero_shot", evals, *common)
    if "warm_start" in args.stage and not (start / "config.json").exists():
        where = dict(model=args.model, dataset=args.data, output_dir=start, overwrite_output_dir="true")
        recipe_file = ("--config", "configs/gsm8k_warm_start.yaml")
        given = flags(where | {"micro_batch_tokens": 16384} | supervised)
        run_script("sft_train.py", *recipe_file, *given, echo=False)
    if "before" in args.stage:
        evaluate(start, "before", evals, *common)
        evaluate(start, "before_sampled", evals, *common, *sampling)
    if "train" in args.stage and not (out / "config.json").exists():
        where = dict(model=start, dataset=args.data, output_dir=out, overwrite_output_dir="true")
        run_script("grpo_train.py", *flags(where | recipe), *args.train_flags)
    if "after" in args.stage:
        evaluate(out, "after", evals, *common)
        evaluate(out, "after_sampled", evals, *common, *sampling)
    if "reload" in args.stage:
        few = (
            "--dataset",
            args.data,
            "--split",
            "test",
            "--limit",
            args.reload_questions,
            "--answer_format",
            "xml",
            "--max_completion_length",
            300,
        )
        evaluate(out, "reload_fp32", evals, *few, "--precision", "fp32")
        words = [
            sys.executable,
            "-c",
            RELOAD,
            str(out),
            str(evals / "reload_fp32" / "samples.jsonl"),
            str(args.work / "reload.json"),
            "300",
        ]
        subprocess.run(words, check=True, cwd=ROOT)
        report(args, evals, start, out, recipe)


def report(args, evals, start, out, recipe):
    """The rows, from what the stages left."""
    before, before_sampled, after, after_sampled = (
        json.loads((evals / name / "report.json").read_text())
        for name in ("before", "before_sampled", "after", "after_sampled")
    )
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    warm = [json.loads(line) for line in (start / "metrics.jsonl").read_text().splitlines()]
    reload = json.loads((args.work / "reload.json").read_text())
    rows = []
    if (evals / "zero_shot").exists():
        zero = json.loads((evals / "zero_shot" / "report.json").read_text())
        rows = [
            ("exact_zero_shot", zero["accuracy"], "accuracy"),
            ("last_number_zero_shot", zero["accuracy_last_number"], "accuracy"),
        ]
    for name, sides in (("exact", ("before", "after")), ("sampled", ("before_sampled", "after_sampled"))):
        found = compare([str(evals / side) for side in sides])[1][0]
        rows += [
            (f"{name}_{key}", found[key], "")
            for key in ("difference", "difference_ci95", "p", "gained", "lost")
        ]
    for name, first, then in (("exact", before, after), ("sampled", before_sampled, after_sampled)):
        rows += [
            (f"{name}_before", first["accuracy"], "accuracy"),
            (f"{name}_before_ci95", first["accuracy_ci95"], "accuracy"),
            (f"{name}_after", then["accuracy"], "accuracy"),
            (f"{name}_after_ci95", then["accuracy_ci95"], "accuracy"),
            (f"{name}_gain", round(then["accuracy"] - first["accuracy"], 4), "accuracy"),
        ]
    middle = steps[len(steps) // 2]
    rows += [
        ("questions", after["questions"], "questions"),
        ("warm_start_seconds", round(warm[-1]["train_seconds"], 1), "s"),
        ("train_seconds", round(steps[-1]["train_seconds"], 1), "s"),
        ("train_steps", len(steps), "steps"),
        ("bad_steps", sum("skipped" in s for s in steps + warm), "steps"),
        ("rollout_seconds_mid_run", round(middle["rollout_seconds"], 2), "s"),
        ("update_seconds_mid_run", round(middle["update_seconds"], 2), "s"),
        ("logp_diff_mean_last_step", round(steps[-1]["logp_diff"], 5), "nats"),
        ("logp_diff_max", round(max(s["logp_diff_max"] for s in steps), 3), "nats"),
        ("update_shown_mid_run", round(middle["update_shown"], 4), "share of weights"),
        ("reloaded_same_completions", f"{reload['same']} of {reload['of']}", "completions"),
    ]
    result = "gsm8k_h100" if args.case == "qwen-coder-0.5b" else f"gsm8k_{args.case}"
    shutil.copy(out / "metrics.jsonl", RESULTS / f"{result}_metrics.jsonl")
    write_results(
        result, [(args.case, *row) for row in rows], recipe=" ".join(map(str, flags(recipe))), seed=0
    )


if __name__ == "__main__":
    main()

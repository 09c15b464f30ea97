"""bf16 and fp16 beside each other: GRPO with M3PO on GSM8K from one supervised start, on one GPU; how far the
update's log-probs are from the sampler's, how long a step takes, and how often the loss scale was too large.

    python benchmarks/precision.py --model DIR --data FOLDER [--steps 200] [--work FOLDER]

What is whole in --work is not made again. accuracy: greedy, on training questions that were held out.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from common import run_script, write_results

PRECISIONS = ("bf16", "fp16")
RECIPE = dict(answer_format="xml", batch_size=64, num_generations=8, max_completion_length=256, seed=0)
RECIPE |= dict(learning_rate=2e-6, warmup_ratio=0.02, beta=0.005, epsilon=0.2, loss_type="dapo")
RECIPE |= dict(eval_problems=256, log_groups=0)
FIRST = 20  # steps in which the scale may still be found


def flags(settings):
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def summary(metrics):
    """(metric, value, unit) of a run's metrics, one dict a step."""

    def of(name):
        return [line[name] for line in metrics if line.get(name) is not None]

    skipped = ["skipped" in line for line in metrics]
    return [
        ("logp_diff", round(statistics.fmean(of("logp_diff")), 5), "nats"),
        ("logp_diff_max", round(max(of("logp_diff_max")), 3), "nats"),
        ("update_seconds", round(statistics.median(of("update_seconds")), 3), "s"),
        ("rollout_seconds", round(statistics.median(of("rollout_seconds")), 3), "s"),
        ("completion_length", round(statistics.fmean(of("completion_length")), 1), "tokens"),
        ("skipped_first_20", sum(skipped[:FIRST]), "steps"),
        ("skipped_after", sum(skipped[FIRST:]), "steps"),
        ("eval_accuracy", of("eval_accuracy")[-1], "accuracy"),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="folder with train.jsonl of GSM8K")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--work", type=Path, help="where the runs go (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        start = work / "start"
        where = dict(dataset=args.data, overwrite_output_dir="true")
        if not (start / "finished.json").exists():
            recipe = ("--config", "configs/gsm8k_warm_start.yaml")
            run_script("sft_train.py", *recipe, *flags(where | dict(model=args.model, output_dir=start)))
        rows = []
        for precision in PRECISIONS:
            out = work / precision
            if not (out / "finished.json").exists():
                how = RECIPE | where | dict(model=start, output_dir=out, precision=precision)
                how |= dict(num_steps=args.steps, eval_every=args.steps)
                run_script("grpo_train.py", *flags(how))
            metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            rows += [(f"0.5b-gsm8k-{precision}", *row) for row in summary(metrics)]
    write_results("precision", rows, recipe=RECIPE, steps=args.steps)


if __name__ == "__main__":
    main()

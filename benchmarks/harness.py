"""The same questions and prompts by EleutherAI's lm-evaluation-harness, which loads the saved directory as
any other model, against grpo_eval.py.

    python benchmarks/harness.py --model DIR --dataset FOLDER [--limit 100]

Greedy, float32. The harness gets our prompts through a local task file; it decodes by `generate` and grades
by its own filters (regular expressions and equal text). Every question on which the two disagree is printed
with what each saw.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from common import ROOT, write_results

sys.path.insert(0, str(ROOT))
import torch
import yaml

import grpo_eval


def last_match(name, pattern):
    return {
        "name": name,
        "filter": [
            {"function": "regex", "regex_pattern": pattern, "group_select": -1},
            {"function": "take_first"},
        ],
    }


TASK = {
    "task": "same_prompts",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{prompt}}",
    "doc_to_target": "{{target}}",
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    "filter_list": [
        last_match("strict-match", r"<answer>\s*([^<]*?)\s*</answer>"),
        last_match("flexible-extract", r"(-?[0-9][0-9,]*(?:\.[0-9]+)?)"),
    ],
}


def by_harness(model, records, length, folder):
    """{doc id: {filter: (score, what it extracted)}, and the text} of the harness."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    data, task = folder / "data.jsonl", folder / "task.yaml"
    data.write_text(
        "".join(
            json.dumps({"prompt": r["prompt"], "target": r["target"], "doc": r["doc_id"]}) + "\n"
            for r in records
        )
    )
    settings = {
        **TASK,
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "generation_kwargs": {"until": ["\0"], "max_gen_toks": length, "do_sample": False},
    }
    task.write_text(yaml.safe_dump(settings))
    loaded = HFLM(
        pretrained=model,
        dtype="float32",
        batch_size=32,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    out = simple_evaluate(
        model=loaded,
        tasks=["same_prompts"],
        task_manager=TaskManager(include_path=str(folder)),
        log_samples=True,
        bootstrap_iters=0,
    )
    found = {}
    for sample in out["samples"]["same_prompts"]:
        extracted = sample["filtered_resps"][0]
        found.setdefault(sample["doc"]["doc"], {"text": sample["resps"][0][0]})[sample["filter"]] = (
            float(sample["exact_match"]),
            extracted,
        )
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--length", type=int, default=256)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = grpo_eval.Config(
            model=args.model,
            dataset=args.dataset,
            limit=args.limit,
            max_completion_length=args.length,
            precision="fp32",
            output_dir=temporary,
            name="ours",
        )
        report, ours = grpo_eval.evaluate(config)
        records = [json.loads(line) for line in (ours / "samples.jsonl").read_text().splitlines()]
        records = [
            record for record in records if not record["skipped"]
        ]  # the harness would cut their prompts
        theirs = by_harness(args.model, records, args.length, folder)
    case, rows, same_text = f"{Path(args.model).name}-{Path(args.dataset).name}", [], 0
    for name in ("strict-match", "flexible-extract"):
        agree = 0
        for r in records:
            mine, (score, extracted) = r["exact_match"][name][0], theirs[r["doc_id"]][name]
            agree += mine == score
            if mine != score:
                is_same = r["resps"][0].strip() == theirs[r["doc_id"]]["text"].strip()
                graded = f"ours {mine} ({r['filtered_resps'][name][0]!r}), harness {score} ({extracted!r})"
                texts = "the same text" if is_same else "texts differ"
                print(f"{name}, {r['doc_id']}: {graded}, reference {r['target']!r}; {texts}")
        rows += [
            (case, f"agreement_{name}", agree, f"of {len(records)}"),
            (
                case,
                f"ours_{name}",
                round(sum(r["exact_match"][name][0] for r in records) / len(records), 4),
                "",
            ),
            (case, f"harness_{name}", round(sum(t[name][0] for t in theirs.values()) / len(records), 4), ""),
        ]
    same_text = sum(r["resps"][0].strip() == theirs[r["doc_id"]]["text"].strip() for r in records)
    rows.append((case, "same_texts", same_text, f"of {len(records)}"))
    for row in rows:
        print(*row)
    write_results(f"harness_{Path(args.model).name}", rows)


if __name__ == "__main__":
    main()

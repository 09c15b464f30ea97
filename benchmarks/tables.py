"""Write the README's tables from benchmarks/results/*.json, between the markers `<!-- NAME -->` and `<!-- end -->`; --check only compares.

python benchmarks/tables.py [--check]
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def values(name):
    """{case: {metric: value}} of a result file, and the file."""
    result = json.loads((RESULTS / f"{name}.json").read_text())
    cases = {}
    for row in result["rows"]:
        cases.setdefault(row["case"], {})[row["metric"]] = row["value"]
    return cases, result


def number(value, interval=None):
    return f"{value:.3f}" if interval is None else f"{value:.3f} ({interval[0]:.3f}–{interval[1]:.3f})"


def table(header, rows):
    return "\n".join(
        [
            "| " + " | ".join(header) + " |",
            "|" + "---|" * len(header),
            *("| " + " | ".join(map(str, r)) + " |" for r in rows),
        ]
    )


def where(result):
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items() if k in ("torch", "transformers"))
    return f"{result['script']}, {result['card'] if result['card'] != 'none' else result['cpu']}, {versions}, {result['date']}"


def both(m, kind):
    """Before -> after of one kind of decoding."""
    return [number(m[f"{kind}_{when}"], m[f"{kind}_{when}_ci95"]) for when in ("before", "after")]


def tiny_job():
    cases, result = values("tiny_job")
    rows = [
        [case, *both(m, "greedy"), *both(m, "sampled"), f"{m['seconds']:.0f}"] for case, m in cases.items()
    ]
    header = ["case", "greedy before", "greedy after", "sampled before", "sampled after", "seconds"]
    questions = next(iter(cases.values()))["problems"]
    return (
        table(header, rows)
        + f"\n\n{questions} held-out problems, 95% intervals; `{where(result)}`; {result['parallel']} run(s) at a time, one core each."
    )


def gsm8k_h100():
    """The three cases: each a table row for greedy and one for sampled completions, and a sentence."""
    rows, texts = [], []
    for name in ("gsm8k_h100", "gsm8k_smollm2-135m", "gsm8k_qwen-multi-reward"):
        cases, result = values(name)
        [(case, m)] = cases.items()
        for kind, label, zero in (
            ("exact", "greedy", "exact_zero_shot"),
            ("sampled", "mean of 4 samples", None),
        ):
            paired = f"{kind}_difference" in m
            difference = (
                "{:+.3f} ({:+.3f} to {:+.3f})".format(m[f"{kind}_difference"], *m[f"{kind}_difference_ci95"])
                if paired
                else ""
            )
            rows.append([case, label, number(m[zero]) if zero in m else "", *both(m, kind), difference])
        texts.append(
            f"{case}: warm start {m['warm_start_seconds']:.0f} s, GRPO {m['train_seconds']:.0f} s = {m['train_steps']} steps, {m['bad_steps']} refused steps; "
            f"reloaded by plain transformers in another process, float32, {m['reloaded_same_completions']} greedy completions the same (`{where(result)}`)."
        )
    header = ["case", "accuracy", "zero-shot", "after the warm start", "after GRPO", "difference, paired"]
    return (
        table(header, rows)
        + f"\n\n{m['questions']} test questions, one seed, 95% intervals. "
        + " ".join(texts)
    )


def scoring():
    rows = []
    for name in ("scoring_cpu", "scoring_gpu"):
        cases, result = values(name)
        for case, m in cases.items():
            ours, plain = (
                f"{m[f'largest_difference{end}']:.2g} / {m[f'mean_difference{end}']:.2g}"
                for end in ("", "_plain_ids")
            )
            rows.append([case, m["sequences"], m["tokens"], ours, plain, f"`{where(result)}`"])
    return table(
        ["case", "sequences", "tokens", "ours: largest / mean", "plain ids: largest / mean", "made by"], rows
    )


def bench_step():
    cases, result = values("bench_step")
    card = cases.pop("card")
    rows = [
        [
            case,
            f"{m['step_seconds']:.2f}",
            f"{m['rollout_seconds']:.2f}",
            f"{m['update_seconds']:.2f}",
            f"{m['update_share_of_matmul']:.2f}",
            f"{m['peak_gib']:.1f}",
        ]
        for case, m in cases.items()
    ]
    trl = cases["1.5b-8x8"]
    text = table(["case", "step, s", "rollout, s", "update, s", "share of the matrix rate", "peak GiB"], rows)
    return text + (
        f"\n\nTRL's trainer with `generate` on the work of 1.5b-8x8, in the same call: {trl['trl_step_seconds']:.2f} s a step "
        f"({trl['trl_step_seconds'] / trl['step_seconds']:.1f} times ours), {trl['trl_peak_gib']:.1f} GiB with bf16 weights and moments. "
        f"The card multiplies {card['matrix_rate']:.0f} TFLOP/s. `{where(result)}`."
    )


def bench_gpus():
    cases, result = values("bench_gpus")
    rows = [
        [
            case, f"{m['step_seconds']:.2f}", f"{m['completions_per_s']:.1f}", f"{m['speedup']:.3f}" if "speedup" in m else "",
            f"{m['speedup_predicted']:.2f}" if "speedup_predicted" in m else "", f"{m['peak_gib']:.1f}",
        ] if "step_seconds" in m else [case, "", "", "", f"{m['speedup_predicted']:.2f}", ""]
        for case, m in cases.items() if " on " in case
    ]  # fmt: skip
    rate = next(m["all_reduce_rate"] for m in cases.values() if "all_reduce_rate" in m)
    text = table(["case, GPUs", "step, s", "completions/s", "speedup", "predicted", "peak GiB"], rows)
    return text + f"\n\nAn all-reduce over two cards moves {rate:.0f} GB/s of gradients. `{where(result)}`."


def bench_generation_cpu():
    cases, result = values("bench_generation_cpu")
    rows = [
        [case, *(f"{m[k]:,.0f}" for k in ("tokens_per_s", "tokens_per_s_m3po", "generate_tokens_per_s"))]
        for case, m in cases.items()
    ]
    return table(["tokens a second", "ours", "ours, M3PO", "`generate`"], rows) + f"\n\n`{where(result)}`."


def bench_generation():
    """Of our own numbers both: without and with M3PO."""
    cases, result = values("bench_generation")
    rates, rollouts = cases["card"], {case: m for case, m in cases.items() if "floor_ms_per_step" in m}
    rows = []
    for case, m in rollouts.items():
        ours = [f"{m[k]:,.0f} / {m[f'{k}_m3po']:,.0f}" for k in ("tokens_per_s",)] + [
            f"{m[k]:.2f} / {m[f'{k}_m3po']:.2f}" for k in ("ms_per_step", "step_over_floor")
        ]
        peers = [
            f"{m[k]:,.0f}" if k in m else ""
            for k in ("generate_tokens_per_s", "continuous_batching_tokens_per_s")
        ]
        rows.append([case, *ours, f"{m['floor_ms_per_step']:.2f}", *peers, f"{m['peak_gib']:.1f}"])
    header = [
        "case",
        "tokens/s",
        "ms a step",
        "step over floor",
        "floor, ms",
        "`generate` tokens/s",
        "continuous batching tokens/s",
        "peak GiB",
    ]
    text = table(header, rows) + "\n\nEach of ours without / with M3PO."
    for case, m in cases.items():
        if "useful_share" in m:
            text += (
                f" `{case}`: with lengths like GSM8K's (mean {m['mean_length']:.0f}, 95th percentile {m['percentile_95_length']:.0f}, limit 400) "
                f"{m['useful_tokens_per_s']:,.0f} / {m['useful_tokens_per_s_m3po']:,.0f} useful tokens a second, {m['useful_share']:.2f} / "
                f"{m['useful_share_m3po']:.2f} of what the same rows give when all are 130 long."
            )
        if case == "gsm8k-test":
            text += (
                f" `{case}`: {m['questions']} questions, greedy, limit 300, Qwen2.5-Coder-0.5B-Instruct, {m['seconds']:.1f} s; "
                f"{m['greedy_agreement_with_plain']:.4f} of the tokens up to the first difference are those of the plain path, and where they differ "
                f"the two candidates were at most {m['largest_gap_at_divergence']:.2f} nats apart."
            )
    setup = ", ".join(
        f"{m['setup_seconds']:.0f} s ({case})" for case, m in cases.items() if "setup_seconds" in m
    )
    return text + (
        f" Set-up once a process: {setup}. The card copies {rates['copy_rate']:.2f} TB/s and multiplies {rates['matrix_rate']:.0f} TFLOP/s. `{where(result)}`."
    )


def kill():
    lines = []
    for path in sorted(RESULTS.glob("kill*.json")):
        cases, result = values(path.stem)
        for m in cases.values():
            run = f"a run of {m['lines']} steps"
            run += (
                f" with a warm start ({m['kills_in_warm_start']} of the kills in it)"
                if m.get("kills_in_warm_start")
                else ""
            )
            equal = (
                "equal those of a run left alone, to the bit"
                if m["weights_equal"]
                else "DIFFER from those of a run left alone"
            )
            lines.append(
                f"{m['kills']} times kill -9 at random moments of {run}, then the same command: the weights {equal}. `{where(result)}`."
            )
    return "\n\n".join(lines)


def harness():
    """Our evaluation against lm-evaluation-harness on the same questions and prompts."""
    lines = []
    for path in sorted(RESULTS.glob("harness_*.json")):
        cases, result = values(path.stem)
        for case, m in cases.items():
            shown = ", ".join(
                f"{name} ours {m[f'ours_{name}']:.2f}, harness {m[f'harness_{name}']:.2f}"
                for name in ("strict-match", "flexible-extract")
            )
            agree = f"{m['agreement_strict-match']} and {m['agreement_flexible-extract']} of 100 questions graded alike, {m['same_texts']} texts the same"
            lines.append(f"{case}: {shown}; {agree}. `{where(result)}`.")
    return "\n\n".join(lines)


TABLES = {
    f.__name__: f
    for f in (
        tiny_job,
        gsm8k_h100,
        scoring,
        bench_generation,
        bench_generation_cpu,
        bench_step,
        bench_gpus,
        kill,
        harness,
    )
}


def rendered(readme):
    def fill(match):
        return f"<!-- {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", fill, readme, flags=re.DOTALL)


if __name__ == "__main__":
    readme = (ROOT / "README.md").read_text()
    if sys.argv[1:] == ["--check"]:
        sys.exit(
            0
            if rendered(readme) == readme
            else "README.md differs from benchmarks/results: run  python benchmarks/tables.py"
        )
    (ROOT / "README.md").write_text(rendered(readme))

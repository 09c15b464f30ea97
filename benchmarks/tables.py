"""Write the tables of README.md, docs/ and benchmarks/README.md from benchmarks/results/*.json.

    python benchmarks/tables.py [--check]

A table stands between the markers `<!-- NAME -->` and `<!-- end -->`. --check only compares.
"""

import json
import re
import sys
from collections import Counter

import yaml

from common import RESULTS, ROOT

sys.path.insert(0, str(ROOT))
from reporting.study import CURVES, result_rows

PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GRADING_SHARES = ("refused", "paid_wrongly", "undecided_share")
SPEEDRUNS = {
    "speedrun": "ours",
    "speedrun_trl_vllm": "TRL with vLLM",
    "speedrun_trl_generate": "TRL with `generate`",
}
RECIPES = dict.fromkeys(SPEEDRUNS, "benchmarks/speedrun_trl.yaml") | {"speedrun": "configs/speedrun.yaml"}


def values(name):
    """{case: {metric: value}} of a result file, and the file."""
    result = json.loads((RESULTS / f"{name}.json").read_text())
    cases = {}
    for row in result["rows"]:
        cases.setdefault(row["case"], {})[row["metric"]] = row["value"]
    return cases, result


def number(value, interval=None):
    return f"{value:.3f}" if interval is None else f"{value:.3f} ({interval[0]:.3f}–{interval[1]:.3f})"


def span(numbers):
    """The lowest and the highest, or the one number where they are shown alike."""
    low, high = number(min(numbers)), number(max(numbers))
    return low if low == high else f"{low}–{high}"


def table(header, rows):
    first, *lines = ("| " + " | ".join(map(str, row)) + " |" for row in (header, *rows))
    return "\n".join([first, "|" + "---|" * len(header), *lines])


def machine(result):
    return result["cpu"] if result["card"] == "none" else result["card"]


def short_machine(result):
    """A card without its memory: NVIDIA H100."""
    return result["cpu"] if result["card"] == "none" else " ".join(result["card"].split()[:2])


def where(result):
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("torch", "transformers"))
    return f"{result['script']}, {machine(result)}, {versions}, {result['date']}"


def both(m, kind):
    """Before and after, of one kind of decoding."""
    return [number(m[f"{kind}_{when}"], m[f"{kind}_{when}_ci95"]) for when in ("before", "after")]


def learned():
    """The tiny job: what each kind of run got to, over its seeds."""
    cases, result = values("tiny_job")
    kinds = {"grpo": "GRPO", "m3po": "GRPO with M3PO", "shuffled": "advantages shuffled on purpose"}
    rows = []
    for kind, label in kinds.items():
        runs = [m for case, m in cases.items() if case.split("-")[1] == kind]
        columns = ("greedy_before", "greedy_after", "sampled_before", "sampled_after")
        rows.append([label, len(runs), *(span([m[column] for m in runs]) for column in columns)])
    header = ["run", "seeds", "greedy before", "after", "sampled before", "after"]
    questions = cases["tiny-m3po-seed0"]["problems"]
    return f"{table(header, rows)}\n\n{questions} held-out problems; `{where(result)}`."


def peers():
    """Ours beside what others do with the same work on the same card."""
    steps, step_result = values("bench_step")
    rollouts, rollout_result = values("bench_generation")
    m = steps["1.5b-8x8"]
    work = f"a GRPO step, 1.5B model, 64 completions of 256 tokens, {short_machine(step_result)}"
    rows = [[work, f"{m['step_seconds']:.2f} s", f"TRL with `generate` {m['trl_step_seconds']:.2f} s"]]
    for case, what in (("1.5b-8x8", "1.5B model, 64"), ("0.5b-64x8", "0.5B model, 512")):
        m = rollouts[case]
        names = {"vllm": "vLLM", "generate": "`generate`", "continuous_batching": "continuous batching"}
        rates = {label: m.get(f"{name}_tokens_per_s") for name, label in names.items()}
        other = ", ".join(f"{label} {rate:,.0f}" for label, rate in rates.items() if rate)
        work = f"sampling, {what} rows, {short_machine(rollout_result)}"
        rows.append([work, f"{m['tokens_per_s']:,.0f} tokens/s", other])
    came_to, had = {}, ""
    for name, label in SPEEDRUNS.items():
        if (RESULTS / f"{name}.json").exists():
            cases, result = values(name)
            [m] = cases.values()
            had = had or _recipe_then(result["recipe"], RECIPES[name])
            came_to[label] = f"{number(m['start'])} to {number(m['greedy'])} in {m['steps']:.0f} steps"
    own, *others = came_to.items()
    [case], result = values("speedrun")
    minutes = case.removeprefix("speedrun-").removesuffix("min")
    work = f"GSM8K by the clock, 0.5B model, {minutes} minutes, {short_machine(result)}: greedy accuracy"
    work += " (an earlier recipe)" if had else ""
    rows.append([work, own[1], ", ".join(f"{label} {text}" for label, text in others)])
    return table(["work", "ours", "peers"], rows)


def rungs():
    """Minutes and accuracy to expect of the README's three commands."""
    tiny, tiny_result = values("tiny_job")
    clock, clock_result = values("speedrun")
    gpus, gpus_result = values("bench_gpus")
    m = tiny["tiny-m3po-seed0"]
    earlier = ", an earlier recipe" if _recipe_then(clock_result["recipe"]) else ""
    laptop = [f"{m['seconds'] / 60:.0f}", number(m["greedy_before"]), number(m["greedy_after"])]
    [m] = clock.values()
    card = [f"{m['seconds'] / 60:.0f}", number(m["start"]) if "start" in m else "", number(m["greedy"])]
    steps = yaml.safe_load((ROOT / "configs" / "gsm8k.yaml").read_text())["num_steps"]
    step = gpus["original-recipe on 4"]["step_seconds"]
    box = [f"{steps * step / 60:.0f} ({steps} steps of {step:.2f} s)", "", "not measured yet"]
    rows = [
        [f"a laptop ({short_machine(tiny_result)})", *laptop],
        [f"one GPU ({short_machine(clock_result)}{earlier})", *card],
        [f"a box (4 x {short_machine(gpus_result)})", *box],
    ]
    return table(["rung", "minutes", "greedy accuracy before GRPO", "after"], rows)


def tiny_job():
    cases, result = values("tiny_job")
    rows = [
        [case, *both(m, "greedy"), *both(m, "sampled"), f"{m['seconds']:.0f}"] for case, m in cases.items()
    ]
    header = ["case", "greedy before", "greedy after", "sampled before", "sampled after", "seconds"]
    questions = next(iter(cases.values()))["problems"]
    note = f"{questions} held-out problems, 95% intervals; `{where(result)}`"
    return f"{table(header, rows)}\n\n{note}; {result['parallel']} run(s) at a time, one core each."


def learning_rates():
    """Mean of 8 samples by learning rate, with M3PO and without: the mean over the seeds, and each."""
    cases, result = values("learning_rates")
    rows = []
    for case, m in cases.items():
        arm, _, rate = case.partition("_")
        each = [number(value) for metric, value in m.items() if metric.startswith("mean8_")]
        label = {"grpo": "GRPO", "m3po": "GRPO with M3PO"}.get(arm, "the supervised start")
        rows.append([label, f"{float(rate):g}" if rate else "", number(m["mean8"]), ", ".join(each)])
    header = ["run", "learning rate", "mean accuracy of 8 samples", "each seed"]
    note = f"{result['questions']} held-out training questions, {result['recipe']['num_steps']} steps"
    return f"{table(header, rows)}\n\n{note}; `{where(result)}`."


def scoring():
    rows = []
    for name in ("scoring_cpu", "scoring_gpu"):
        cases, result = values(name)
        for case, m in cases.items():
            ours = f"{m['largest_difference']:.2g} / {m['mean_difference']:.2g}"
            plain = f"{m['largest_difference_plain_ids']:.2g} / {m['mean_difference_plain_ids']:.2g}"
            rows.append([case, m["sequences"], m["tokens"], ours, plain, f"`{where(result)}`"])
    header = ["case", "sequences", "tokens", "ours: largest / mean", "plain ids: largest / mean", "made by"]
    return table(header, rows)


def precision():
    """bf16 beside fp16, once that was measured."""
    if not (RESULTS / "precision.json").exists():
        return "Not measured yet: `python benchmarks/precision.py --model DIR --data FOLDER`."
    cases, result = values("precision")
    rows, note = [], f"{len(result['seeds'])} seeds, {result['steps']} steps, medians of seconds, "
    note += f"{result['questions']} held-out questions"
    for case, m in cases.items():
        seconds = [f"{m[name]:.2f}" for name in ("update_seconds", "rollout_seconds")]
        skipped = f"{m['skipped_first_20']} / {m['skipped_after']}"
        apart = [f"{m['logp_diff']:.4f}", f"{m['logp_diff_max']:.2f}"]
        rows.append([case, number(m["mean8"]), number(m["greedy"]), *apart, *seconds, skipped])
        if "difference" in m:
            low, high = (100 * end for end in m["difference_ci95"])
            note += f"; {case} minus the other, samples: {100 * m['difference']:+.1f} points "
            note += f"(95% interval {low:+.1f} to {high:+.1f}, p = {m['p']:.2g})"
    header = ["precision", "mean of 8 samples", "greedy", "difference of log-probs, nats: mean", "largest"]
    header += ["update, s", "rollout, s", "steps skipped: first 20 / after"]
    return f"{table(header, rows)}\n\n{note}. `{where(result)}`."


def speedrun():
    """Ours and the peer on one card: means over the seeds, once they were measured."""
    rows, texts, each = [], [], []
    for name, label in SPEEDRUNS.items():
        if not (RESULTS / f"{name}.json").exists():
            texts.append(f"{label}: not measured yet.")
            continue
        cases, result = values(name)
        for case, m in cases.items():
            row = [label, case.removeprefix("speedrun-"), m["seeds"]]
            row += [number(m[kind]) if kind in m else "" for kind in ("start", "greedy", "mean4")]
            row += [f"{m[part]:.0f}" for part in ("seconds", "warm_start_seconds", "seconds_to_first_step")]
            rows.append(
                [*row, f"{m['steps']:.0f}", f"{m['completions_per_s']:.0f}", f"{m['dead_groups']:.0%}"]
            )
            values_of = [f"{m[f'{kind}_{seed}']:.3f}" for kind in ("greedy", "mean4") for seed in _seeds(m)]
            each.append(f"{label}, each seed, greedy then samples: {', '.join(values_of)}")
            had = _recipe_then(result["recipe"], RECIPES[name])
            had = f" The recipe then had {had}." if had else ""
            texts.append(f"`{where(result)}, {_cards(result)}`.{had}")
    header = ["trainer", "minutes", "seeds", "greedy before GRPO", "after", "mean of 4 samples", "seconds"]
    header += ["supervised, s", "until the first step, s", "steps", "completions/s", "dead groups"]
    shown = [table(header, rows), f"{'; '.join(each)}."] if rows else []
    return "\n\n".join([*shown, " ".join(texts)])


def _cards(result):
    """Which cards the seeds ran on."""
    ids = sorted({*result["cards"]})
    return f"{'card' if len(ids) == 1 else 'cards'} {', '.join(ids)}"


def _seeds(m):
    return [metric.removeprefix("greedy_") for metric in m if metric.startswith("greedy_")]


def speedrun_tune():
    """The variations of the recipe that were tried, a table for each length, the best first."""
    files = sorted(RESULTS.glob("speedrun_tune_*.json"))
    if not files:
        return "Not measured yet: `python benchmarks/speedrun_tune.py --model DIR --data FOLDER`."
    return "\n\n".join(_variations(file.stem) for file in files)


def _variations(name):
    cases, result = values(name)
    count, rows = cases.pop("all")["configurations_tried"], []
    for case, m in cases.items():
        given = result["settings"][case]
        of_start = {f"the start's {key}": value for key, value in given.get("start", {}).items()}
        changed = {key: value for key, value in given.items() if key != "start"} | of_start
        settings = ", ".join(f"{key} {value}" for key, value in changed.items())
        if "failed" in m:
            rows.append([case, settings, m["failed"], "", "", "", "", ""])
            continue
        row = [case, settings, number(m["mean8"]), number(m["greedy"]), m["steps"]]
        entropy = f"{m['entropy']:.2f}" if "entropy" in m else ""
        rows.append([*row, entropy, f"{m['dead_groups']:.0%}", f"{m['sampled_over_trained']:.2f}"])
    header = ["variation", "settings", "mean of 8 samples", "greedy", "steps", "entropy, nats", "dead groups"]
    header += ["sampled over trained"]
    note = f"{count} configurations tried, each once; {result['questions']} held-out training questions"
    note += f", {result['steps']} steps" if result.get("steps") else f", {result['minutes']:g} minutes"
    had = _recipe_then(result["recipe"])
    note += f"; the recipe that they vary had {had}" if had else ""
    return f"{table(header, rows)}\n\n{note}; `{where(result)}`."


def _recipe_then(lines, path=RECIPES["speedrun"]):
    """What the recipe of a result had in the place of today's; "" where it is the same."""
    then = yaml.safe_load("\n".join(lines))
    now = yaml.safe_load((ROOT / path).read_text())
    differ = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    return ", ".join(f"{key} {then[key]}" if key in then else f"{key} not set" for key in differ)


def bench_step():
    cases, result = values("bench_step")
    card, trl = cases.pop("card"), cases["1.5b-8x8"]
    text = _steps_table(cases)
    return (
        f"{text}\n\nTRL's trainer with `generate` on the work of 1.5b-8x8, in the same call: "
        f"{trl['trl_step_seconds']:.2f} s a step ({trl['trl_step_seconds'] / trl['step_seconds']:.1f} times "
        f"ours), {trl['trl_peak_gib']:.1f} GiB with bf16 weights and moments. "
        f"The card multiplies {card['matrix_rate']:.0f} TFLOP/s. `{where(result)}`."
    )


def controls():
    """Milliseconds a decode step of M3PO and of each control, and what that is over plain sampling."""
    cases, result = values("controls")
    rows = [
        [f"`{case}`", f"{m['ms_per_step']:.2f}", f"{m['over_plain']:.1%}" if m["over_plain"] else ""]
        for case, m in cases.items()
    ]
    return f"{table(['case', 'ms a step', 'over plain'], rows)}\n\n`{where(result)}`."


def _steps_table(cases):
    seconds = ("step_seconds", "rollout_seconds", "update_seconds", "update_share_of_matmul_needed")
    rows = [
        [case, *(f"{m[name]:.2f}" for name in seconds), f"{m['peak_gib']:.1f}"] for case, m in cases.items()
    ]
    header = ["case", "step, s", "rollout, s", "update, s", "share of the matrix rate", "peak GiB"]
    return table(header, rows)


def bench_step_long():
    cases, result = values("bench_step_long")
    cases.pop("card")
    decode = [
        f"{case}: a decode step at full length {m['ms_per_step']:.1f} ms, {m['step_over_floor']:.2f} times "
        f"the floor; `--check` predicted {m['predicted_peak_gib']:.1f} GiB"
        for case, m in cases.items()
    ]
    return f"{_steps_table(cases)}\n\n{'. '.join(decode)}. `{where(result)}`."


def bench_step_gsm8k():
    """The update of an earlier commit beside this one's."""
    cases, result = values("bench_step_gsm8k")
    cases.pop("card")
    rows = [
        [case, *(f"{m[name]:.2f}" for name in ("update_seconds_before", "update_seconds", "update_speedup"))]
        for case, m in cases.items()
    ]
    header = ["case", "update before, s", "now, s", "times faster"]
    m = next(iter(cases.values()))
    lengths = (
        f"Prompts of {m['mean_prompt']:.0f} tokens and completions of {m['mean_completion']:.0f}, on average"
    )
    return f"{table(header, rows)}\n\n{lengths}. `{where(result)}`."


def bench_gpus():
    cases, result = values("bench_gpus")
    rows = [_gpus_row(case, m) for case, m in cases.items() if " on " in case]
    rate = next(m["all_reduce_rate"] for m in cases.values() if "all_reduce_rate" in m)
    text = table(["case, GPUs", "step, s", "completions/s", "speedup", "predicted", "peak GiB"], rows)
    return f"{text}\n\nAn all-reduce over two cards moves {rate:.0f} GB/s of gradients. `{where(result)}`."


def _gpus_row(case, m):
    formats = {
        "step_seconds": ".2f",
        "completions_per_s": ".1f",
        "speedup": ".3f",
        "speedup_predicted": ".2f",
        "peak_gib": ".1f",
    }
    return [case, *(format(m[name], spec) if name in m else "" for name, spec in formats.items())]


def bench_generation_cpu():
    cases, result = values("bench_generation_cpu")
    names = ("tokens_per_s", "tokens_per_s_m3po", "generate_tokens_per_s")
    rows = [[case, *(f"{m[name]:,.0f}" for name in names)] for case, m in cases.items()]
    return f"{table(['tokens a second', 'ours', 'ours, M3PO', '`generate`'], rows)}\n\n`{where(result)}`."


def bench_generation():
    """Of our own numbers both: without and with M3PO."""
    cases, result = values("bench_generation")
    rollouts = {case: m for case, m in cases.items() if "floor_ms_per_step" in m}
    header = ["case", "tokens/s", "ms a step", "step over floor", "floor, ms", "`generate` tokens/s"]
    header += ["continuous batching tokens/s", "peak GiB"]
    notes = ["Each of ours without / with M3PO."]
    for case, m in cases.items():
        if "useful_share" in m:
            notes.append(_lengths_note(case, m))
        if case == "gsm8k-test":
            notes.append(_evaluation_note(case, m))
    notes += [_vllm_note(case, m) for case, m in cases.items() if "vllm_tokens_per_s" in m]
    setups = [f"{m['setup_seconds']:.0f} s ({case})" for case, m in cases.items() if "setup_seconds" in m]
    notes.append(f"Set-up once a process: {', '.join(setups)}.")
    rates = cases["card"]
    speed = f"{rates['copy_rate']:.2f} TB/s and multiplies {rates['matrix_rate']:.0f} TFLOP/s"
    notes.append(f"The card copies {speed}. `{where(result)}`.")
    rows = [_generation_row(case, m) for case, m in rollouts.items()]
    return "\n\n".join([table(header, rows), " ".join(notes)])


def _generation_row(case, m):
    peers = [m.get("generate_tokens_per_s"), m.get("continuous_batching_tokens_per_s")]
    return [
        case,
        f"{m['tokens_per_s']:,.0f} / {m['tokens_per_s_m3po']:,.0f}",
        f"{m['ms_per_step']:.2f} / {m['ms_per_step_m3po']:.2f}",
        f"{m['step_over_floor']:.2f} / {m['step_over_floor_m3po']:.2f}",
        f"{m['floor_ms_per_step']:.2f}",
        *("" if rate is None else f"{rate:,.0f}" for rate in peers),
        f"{m['peak_gib']:.1f}",
    ]


def _lengths_note(case, m):
    return (
        f"`{case}`: with lengths like GSM8K's (mean {m['mean_length']:.0f}, 95th percentile "
        f"{m['percentile_95_length']:.0f}, limit 400) {m['useful_tokens_per_s']:,.0f} / "
        f"{m['useful_tokens_per_s_m3po']:,.0f} useful tokens a second, {m['useful_share']:.2f} / "
        f"{m['useful_share_m3po']:.2f} of what the same rows give when all are 130 long."
    )


def _vllm_note(case, m):
    """vLLM's best mode on a case of the table, which may be another one with log-probs."""
    if "vllm_seconds" in m:
        mode = m["vllm_seconds_best_mode"].replace("_", " ")
        return f"vLLM takes {m['vllm_seconds']:.1f} s for `{case}` ({mode})."
    modes = [m[f"vllm_tokens_per_s{suffix}_best_mode"].replace("_", " ") for suffix in ("", "_logprobs")]
    plain, with_logprobs = (f"{m[f'vllm_tokens_per_s{suffix}']:,.0f}" for suffix in ("", "_logprobs"))
    best = (
        f"{plain} tokens/s ({modes[0]}), {with_logprobs} with the log-probs that a trainer needs ({modes[1]})"
    )
    return f"vLLM in its best mode on `{case}`: {best}."


def _evaluation_note(case, m):
    return (
        f"`{case}`: {m['questions']} questions, greedy, limit 300, Qwen2.5-Coder-0.5B-Instruct, "
        f"{m['seconds']:.1f} s; {m['greedy_agreement_with_plain']:.4f} of the tokens up to the first "
        f"difference are those of the plain path, and where they differ the two candidates were at most "
        f"{m['largest_gap_at_divergence']:.2f} nats apart."
    )


def kill():
    lines = []
    for path in sorted(RESULTS.glob("kill*.json")):
        cases, result = values(path.stem)
        for m in cases.values():
            run = f"a run of {m['lines']} steps"
            if m.get("kills_in_warm_start"):
                run += f" with a warm start ({m['kills_in_warm_start']} of the kills in it)"
            equal = "equal those of a run left alone, to the bit"
            if not m["weights_equal"]:
                equal = "DIFFER from those of a run left alone"
            lines.append(
                f"{m['kills']} times kill -9 at random moments of {run}, then the same command: "
                f"the weights {equal}. `{where(result)}`."
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
            strict, flexible = m["agreement_strict-match"], m["agreement_flexible-extract"]
            agree = f"{strict} and {flexible} of 100 questions graded alike, {m['same_texts']} texts the same"
            lines.append(f"{case}: {shown}; {agree}. `{where(result)}`.")
    return "\n\n".join(lines)


def cpu_example():
    """What a real model learns on a CPU, once it was measured."""
    if not (RESULTS / "cpu_example.json").exists():
        return "Not measured yet: `python benchmarks/cpu_example.py --model DIR`."
    cases, result = values("cpu_example")
    m = cases["smollm2-135m"]
    share = f"{m['accuracy_before']:.2f} right before, {m['accuracy_after']:.2f} after {m['steps']} steps"
    minutes = f"{m['seconds'] / 60:.0f} minutes from Enter to the end"
    return f"{m['held_out']} held-out problems: {share}; {minutes}; `{where(result)}`."


def suite():
    """What the fast tests cost, once they were measured."""
    if not (RESULTS / "suite.json").exists():
        return "Not measured yet: `python benchmarks/suite.py`."
    cases, result = values("suite")
    m = cases["fast suite"]
    return (
        f"{m['tests']} tests: {m['user_s']:.0f} s user, {m['system_s']:.0f} s system, "
        f"{m['wall_s']:.0f} s on the clock; `{result['script']}, {result['cpu']}, {result['date']}`."
    )


def math_grading():
    """How MATH answers are graded, ours and the peers', once that was measured."""
    if not (RESULTS / "math_grading.json").exists():
        return "Not measured yet: `python benchmarks/math_grading.py --data FOLDER --peers 1000`."
    cases, result = values("math_grading")
    rows = []
    for case, m in cases.items():
        corpus, _, grader = case.partition(" ")
        shares = [f"{100 * m[name]:.2f}%" if name in m else "" for name in GRADING_SHARES]
        rows.append([corpus, grader or "ours", m["pairs"], *shares, f"{m['pairs_per_s']:,.0f}"])
    header = ["corpus", "grader", "pairs", "refused", "paid wrongly", "undecided", "pairs a second"]
    rows.sort(key=lambda row: list(cases).index(row[0]))  # the graders of a case below each other
    versions = ", ".join(f"{name} {version}" for name, version in result["graders"].items())
    made_by = f"{result['script']}, {result['cpu']}, {versions}, {result['date']}"
    return f"{table(header, rows)}\n\n`{made_by}`."


def families():
    """What becomes of each shape, and how often."""
    cases, result = values("families")
    outcomes = [m["outcome"] for m in cases.values()]
    rows = [[case, outcome.replace("|", "/")] for case, outcome in zip(cases, outcomes, strict=True)]
    kinds = ("equal to plain transformers", "slower path", "refused")
    counts = ", ".join(f"{sum(o.startswith(kind) for o in outcomes)} {kind}" for kind in kinds)
    return f"{table(['shape', 'outcome'], rows)}\n\n{len(rows)} shapes: {counts}. `{where(result)}`."


def coverage():
    """How often the intervals of an evaluation hold the truth, by measure and number of questions."""
    cases, result = values("coverage")
    rows, tests = {}, []
    for case, m in cases.items():
        if "false_positives" in m:
            tests.append(f"{case}: {m['false_positives']:.1%}")
            continue
        measure, questions = case.rsplit(", ", 1)
        cells = rows.setdefault(measure, {})
        cells[questions] = f"{m['coverage_min']:.3f} / {m['coverage_mean']:.3f}"
    columns = list(next(iter(rows.values())))
    lines = [[measure, *(cells.get(column, "") for column in columns)] for measure, cells in rows.items()]
    return f"{table(['interval', *columns], lines)}\n\n{'; '.join(tests)}. `{where(result)}`."


def study_checks():
    """How often the tests of a study are right, on simulated studies."""
    cases, result = values("study_checks")
    rows = []
    for case, m in cases.items():
        if "coverage" in m:
            row = [f"{m[name]:.1%}" for name in ("false_positives", "coverage")]
            row += [f"{m[name]:.1%} / {m[f'{name}_computed']:.1%}" for name in ("power", "equivalent")]
            rows.append([case, *row, f"{m['equivalent_at_margin']:.1%}"])
    header = ["simulated", "t: false positives", "coverage of 95%", "t: power, found / computed"]
    header += ["TOST: power, found / computed", "TOST: false positives at the margin"]
    return f"{table(header, rows)}\n\n{result['studies']:,} studies each. `{where(result)}`."


def study_verdicts():
    """How often each verdict is given where the truth is known, the most frequent first."""
    cases, result = values("study_checks")
    rows = []
    for case, m in cases.items():
        if "coverage" not in m:
            given = [f"*{words}* {share:.0%}" for words, share in m.items() if share >= 0.005]
            rows.append([case, "; ".join(given)])
    text = table(["simulated", "verdicts"], rows)
    return f"{text}\n\n{result['studies']:,} studies each. `{where(result)}`."


ARMS = {
    "grpo": "nothing (GRPO)",
    "m3po": "its peers, by M3PO's weights",
    "scaled_mean": "the plain mean of its peers",
    "noise": "Gaussian noise",
    "strangers": "answers to other problems",
}
VERDICTS = {
    "hurts": "It hurts: models trained with M3PO answer worse than models trained by plain GRPO",
    "no useful effect": "No, not here: models trained with M3PO answer as well as models trained by plain "
    "GRPO, to within one point",
    "helps": "It helps: models trained with M3PO answer better than models trained by plain GRPO, and better "
    "than with noise or with strangers' words in their peers' place",
    "acts as noise": "It helps no more than noise does: models trained with M3PO answer better than models "
    "trained by plain GRPO, and so do those whose paths hear noise, or strangers, at that size",
    "undecided": "Undecided: the study could not tell",
}
ALIKE = 0.95  # a cosine from which on what a path hears is nearly the plain mean of its peers
ENDPOINTS = {
    "mean8 mean@8": "mean of 8",
    "greedy": "greedy",
    "mean8 maj@8": "maj@8",
    "mean8 pass@8": "pass@8",
    "interacting mean@8": "mean of 8, listening",
    "math500 mean@8": "MATH-500, mean of 8",
}
SECOND_PARTS = {
    None: ".",
    "and choosing matters": "; choosing matters, since the plain mean of all peers does less.",
    "and averaging is enough": "; the plain mean of all peers does as well as choosing.",
    "undecided which": "; whether it chooses or averages could not be told.",
}


def study():
    """The verdict of the study in plain words, with its numbers and arms; before that, how far it is."""
    found = json.loads((RESULTS / "study_m3po" / "study.json").read_text())
    link, log = "[study](studies/m3po_gsm8k.md)", "[log](studies/m3po_gsm8k_log.md)"
    if not found["complete"]:
        there = Counter(run["seed"] for run in found["runs"] if run["arm"] in ARMS)
        whole = sum(count == len(ARMS) for count in there.values())
        return (
            f"We do not know yet. A {link}, written down beforehand, is under way ({log}): {whole} of "
            f"{'' if found['look'] else 'at most '}{len(found['seeds'])} seeds are there, and no mean is "
            "looked at before the last."
        )
    verdict, first = found["verdict"], found["comparisons"][0]
    text = VERDICTS[verdict["words"]] + SECOND_PARTS[verdict["second"]]
    low, high = (f"{100 * end:+.1f}" for end in first["difference_ci95"])
    text += (
        f" On GSM8K, with Qwen2.5-Coder-0.5B and {first['seeds']} seeds, M3PO's share of right answers minus "
        f"GRPO's is {100 * first['difference']:+.1f} points (95% interval {low} to {high}, "
        f"p = {first['p']:#.2g}; within one point: p = {first['tost_p']:#.2g}); the {link} was written down "
        f"beforehand ({log})."
    )
    if verdict["words"] == "undecided":
        effect = 100 * first["smallest_effect"]
        text += f" A true difference of {effect:.1f} points would have been found four times in five."
    header = ["a path hears", "seeds", "mean of 8 samples", "greedy", "difference from GRPO, points", "p"]
    return f"{text}\n\n{table(header, _arm_rows(found))}\n\n{_what_the_gate_does(found)}"


def _gate(found):
    """Entropy of the treatment's weights over its maximum, their share on peers with the same token, and the
    cosine of what is heard and the plain mean; of the last tenth of its steps."""
    trained = next(arm["training"] for arm in found["arms"] if arm["name"] == found["treatment"])
    return [trained[CURVES[f"gate_{name}"]]["mean"] for name in ("entropy", "same_token", "mean_cosine")]


def _what_the_gate_does(found):
    """Whether M3PO's weights choose on the trained model."""
    entropy, _, cosine = _gate(found)
    reading = "choose" if cosine < ALIKE else "hardly choose: what a path hears is nearly the plain mean"
    return (
        f"On the trained model M3PO's weights {reading}. Their entropy is {entropy:.2f} of the largest there "
        f"is, and the cosine of what is heard and the plain mean is {cosine:.2f}. "
        f"{_what_choosing_does(found)}"
    )


def _what_choosing_does(found):
    """M3PO against the plain mean of the peers, in the primary endpoint."""
    pair = found["treatment"], "scaled_mean"
    row = next(row for row in found["comparisons"] if (row["arm"], row["other"]) == pair)
    matters = "Whether choosing matters could not be told"
    if row["tost_p"] < found["alpha"]:
        matters = f"Choosing makes less than {_whole_points(found['margin'])} of difference"
    elif row["p"] < found["alpha"]:
        matters = "Choosing matters"
    return (
        f"{matters}: M3PO minus the plain mean is {_points(row)} points (within "
        f"{_whole_points(found['margin'])}: p = {row['tost_p']:#.2g})."
    )


def _whole_points(margin):
    return "one point" if margin == 0.01 else f"{100 * margin:g} points"


def _points(row):
    """A difference and its interval, in points."""
    low, high = (100 * end for end in row["difference_ci95"])
    return f"{100 * row['difference']:+.2f} ({low:+.2f} to {high:+.2f})"


def study_arms():
    """Every arm of the study, those too that were named exploratory, in each of its accuracies."""
    found = _whole_study()
    if found is None:
        return "The study is not complete."
    rows, beside = [], {row["arm"]: row for row in found["comparisons"] if _is_primary(found, row)}
    for arm in found["arms"]:
        means = [number(arm["outcomes"][name]["mean"]) for name in ENDPOINTS]
        difference = _points(beside[arm["name"]]) if arm["name"] in beside else ""
        rows.append([f"`{arm['name']}`", len(arm["seeds"]), *means, difference])
    header = ["arm", "seeds", *ENDPOINTS.values(), "difference from `grpo`, points"]
    effects = [100 * row["smallest_effect"] for row in beside.values() if row["role"] == "shown"]
    return f"{table(header, rows)}\n\n" + (
        "The difference is that of the first column. In the exploratory arms a true one "
        f"of {min(effects):.1f} to {max(effects):.1f} points would have been found four times in five. "
        f"In the last tenth of `m3po`'s steps {_gate(found)[1]:.0%} of the weight lay on peers that said the "
        "same token."
    )


def study_endpoints():
    """M3PO against GRPO in every accuracy of the study."""
    found = _whole_study()
    if found is None:
        return "The study is not complete."
    rows = []
    for row in found["comparisons"]:
        if row["role"] in ("primary", "secondary") and _is_against_baseline(found, row):
            holm = f"{row['p_holm']:#.2g}" if "p_holm" in row else ""
            rows.append(
                [ENDPOINTS[row["endpoint"]], _points(row), f"{row['p']:#.2g}", holm, f"{row['tost_p']:#.2g}"]
            )
    return table(["endpoint", "M3PO minus GRPO, points", "p", "p after Holm", "TOST p"], rows)


def _whole_study():
    found = json.loads((RESULTS / "study_m3po" / "study.json").read_text())
    return found if found["complete"] else None


def _is_primary(found, row):
    return row["endpoint"] == found["comparisons"][0]["endpoint"] and row["other"] == found["baseline"]


def _is_against_baseline(found, row):
    return (row["arm"], row["other"]) == (found["treatment"], found["baseline"])


def _arm_rows(found):
    cases = {}
    for case, metric, value, _ in result_rows(found):
        cases.setdefault(case, {})[metric] = value
    for arm, label in ARMS.items():
        m = cases[arm]
        difference = p = ""
        if "difference" in m:
            difference, p = _points(m), f"{m['p']:#.2g}"
        yield [label, m["seeds"], number(m["mean8"]), number(m["greedy"]), difference, p]


TABLES = {
    make.__name__: make
    for make in (
        *(study, learned, peers, rungs, tiny_job, learning_rates, scoring, precision, suite),
        cpu_example,
        math_grading,
        *(bench_generation, bench_generation_cpu, controls, bench_step, bench_step_long, bench_step_gsm8k),
        *(bench_gpus, kill, harness, families, coverage, study_checks, study_verdicts),
        *(speedrun, speedrun_tune, study_arms, study_endpoints),
    )
}


def rendered(text):
    """The text of a page with its tables as the result files have them."""

    def fill(match):
        return f"<!-- {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def main():
    differing = [page for page in PAGES if rendered(page.read_text()) != page.read_text()]
    if sys.argv[1:] == ["--check"]:
        names = ", ".join(page.relative_to(ROOT).as_posix() for page in differing)
        message = f"{names}: differs from benchmarks/results: run  python benchmarks/tables.py"
        sys.exit(message if differing else 0)
    for page in differing:
        page.write_text(rendered(page.read_text()))


if __name__ == "__main__":
    main()

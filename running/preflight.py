"""`python grpo_train.py --check`: what a run would do, measured and printed before anything is paid for; nothing is trained and nothing is kept."""

import math
import os
import shutil
import statistics
import time
from pathlib import Path

import torch
import yaml

from answers.formats import ANSWER_FORMATS
from decoding.any_model import vocab_logits
from decoding.decoder import GroupDecoder
from decoding.rollout import pad_left, rollout_uniforms
from errors import SettingError
from learning.models import check_positions, load_model, load_tokenizer, rollout_dtype
from problems.prompts import prepare_problems, system_prompt
from rewards import compute_rewards, reward_columns, right_answers
from running.folder import refuse_used
from running.progress import steps_to_do
from running.settings import resolved

PROMPTS = 32


def report(config, functions):
    """Print the check; raises SettingError where training cannot work."""
    print(
        yaml.safe_dump(
            {k: v for k, v in resolved(config).items() if k not in ("versions", "commit")}, sort_keys=False
        )
    )
    pending = (
        config.warm_start != "none"
        and not (Path(config.output_dir) / "warm_start" / "warm_start.json").exists()
    )
    start = (
        config.model
        if config.warm_start == "none" or pending
        else str(Path(config.output_dir) / "warm_start")
    )
    tokenizer = load_tokenizer(start, config.trust_remote_code)
    problems, held_out, skipped = prepare_problems(config, tokenizer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    refuse_used(config)
    model = load_model(start, tokenizer, rollout_dtype(config), device, config.trust_remote_code).eval()
    check_positions(model, problems + held_out, config)
    chosen = ANSWER_FORMATS[config.answer_format]
    decoder = GroupDecoder(model, tokenizer, chosen.think_end, compiled=False)
    eos = tokenizer.convert_ids_to_tokens(decoder.tables.eos_ids)
    width = vocab_logits(
        model, torch.zeros(1, model.config.get_text_config().hidden_size, dtype=model.dtype, device=device)
    ).shape[-1]
    _print("sampling", f"temperature {config.temperature}, the whole distribution over the tokenizer's {decoder.tables.num_real} ids; "
                       f"{width - decoder.tables.num_real} ids of the head are beyond it and never sampled; generation_config is not used")  # fmt: skip
    _print("a completion ends on", f"{eos} or after {config.max_completion_length} tokens")
    _template(problems[0], tokenizer, config, chosen)
    lengths = [len(p.ids) for p in problems]
    spread = f"{min(lengths)} to {max(lengths)} tokens, median {statistics.median(lengths):.0f}"
    _print("prompts", f"{len(problems)} to train on, {len(held_out)} held out, {skipped} skipped; {spread}")
    total, rows = (
        steps_to_do(config, len(problems)) * config.outer_iterations,
        config.batch_size * config.num_generations,
    )
    tokens = rows * (statistics.fmean(lengths) + config.max_completion_length)
    _print(
        "a step",
        f"{config.batch_size} problems x {config.num_generations} = {rows} completions, at most {tokens:,.0f} tokens, {config.mu} optimiser step(s)",
    )
    _print(
        "the run",
        f"{total} steps = {total * rows:,} completions, {total * config.batch_size / len(problems):.2f} passes over the problems",
    )
    _memory(model, config, device)
    _disk(model, config)
    _gold(problems, functions, config, chosen)
    if pending:
        _print("pass rate", "a warm start comes first: check again after it, on output_dir/warm_start")
    else:
        _pass_rate(decoder, problems, config)


def _print(name, text):
    print(f"{name}: {text}", flush=True)


def _template(problem, tokenizer, config, chosen):
    words = system_prompt(config).strip().splitlines()[0]
    agrees = (
        "the system prompt is in it"
        if words in problem.prompt
        else "the chat template leaves the system prompt out: the model must know the format already"
    )
    opened = (
        " it ends inside a <think> block, which the answer format does not expect;"
        if problem.prompt.rstrip().endswith("<think>") and config.answer_format != "r1"
        else ""
    )
    _print(
        "prompt",
        f"{agrees};{opened} thinking ends at {chosen.think_end!r}; the first prompt:\n{problem.prompt}",
    )


def _memory(model, config, device):
    count = sum(p.numel() for p in model.parameters())
    trained = count if not config.lora_r else 0
    parts = {
        "policy": count * (model.dtype.itemsize if config.lora_r else 4), "gradients": 4 * trained, "moments": config.moment_bytes * trained,
        "sampler": count * model.dtype.itemsize,
        "reference": count * model.dtype.itemsize if config.beta > 0 else 0,
    }  # fmt: skip
    free = (torch.cuda.mem_get_info()[0] if device.type == "cuda" else _available()) + parts[
        "sampler"
    ]  # which is loaded already
    needed = sum(parts.values())
    shown = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
    _print(
        "memory, GiB",
        f"{shown} = {needed / 2**30:.2f} before activations, which take what is left; {free / 2**30:.2f} are free",
    )
    if needed > free and not config.fsdp:
        raise SettingError(
            "model",
            config.model,
            f"needs {needed / 2**30:.1f} GiB before activations, {free / 2**30:.1f} are free: try --lora_r 32, or --fsdp true on several GPUs",
        )


def _available():
    """Memory of the machine that programs can have, in bytes."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])


def _disk(model, config):
    count = sum(p.numel() for p in model.parameters())
    bytes_each = count * (
        4 + (0 if config.lora_r else config.moment_bytes) + (model.dtype.itemsize if config.beta > 0 else 0)
    )
    folder = Path(config.output_dir).resolve()
    while not folder.exists():
        folder = folder.parent
    trial, data = folder / ".trial.part", os.urandom(min(bytes_each, 2**26))
    try:
        started = time.perf_counter()
        with open(trial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        rate = len(data) / (time.perf_counter() - started)
    except OSError as error:
        raise SettingError(
            "output_dir", config.output_dir, f"cannot be written to ({error.strerror})"
        ) from error
    finally:
        trial.unlink(missing_ok=True)
    free, copies = shutil.disk_usage(folder).free, (config.keep_checkpoints or 1) + 1
    seconds = bytes_each / rate
    _print("a checkpoint", f"{bytes_each / 1e9:.2f} GB, {seconds:.0f} s at {rate / 1e6:.0f} MB/s: a job needs about {2 * seconds + 30:.0f} s of grace; "
                           f"{copies} of them take {copies * bytes_each / 1e9:.1f} GB, {free / 1e9:.1f} are free")  # fmt: skip
    if config.save_every and copies * bytes_each > free:
        raise SettingError(
            "keep_checkpoints",
            config.keep_checkpoints,
            f"{copies * bytes_each / 1e9:.1f} GB of checkpoints do not fit into {free / 1e9:.1f} GB",
        )


def _gold(problems, functions, config, chosen):
    """What the reference answers, written in the format, earn: all must earn the same, and more than near misses do."""
    some = problems[:500]
    texts = [chosen.write("So it is.", p.problem.answer) for p in some]
    totals = _paid(functions, some, texts, config)
    best = max(t for t in totals if not math.isnan(t))  # NaN: all rewards abstain
    missed = [
        (p.problem.id, p.problem.answer, t) for p, t in zip(some, totals, strict=True) if not t >= best - 1e-9
    ]
    right = right_answers(texts, [p.problem.answer for p in some], config.answer_format, config.grading)
    _print(
        "gold answers",
        f"{len(some) - len(missed)} of {len(some)} earn {best:.3g}, {sum(right)} count as right",
    )
    for problem, answer, paid in missed[:10]:
        print(f"    {problem}: {answer!r} earns {paid:.3g}")
    p = next(p for p, t in zip(some, totals, strict=True) if not math.isnan(t))
    gold = p.problem.answer
    answers = {
        "the gold answer": gold,
        "another answer": gold + "7",
        "with a word": f"{gold} apples",
        "with a stop": f"{gold}.",
        "two answers": f"{gold} or 7",
    }
    near = {name: chosen.write("So it is.", answer) for name, answer in answers.items()} | {
        "without its format": gold,
        "nothing": "",
    }
    paid = _paid(functions, [p] * len(near), list(near.values()), config)
    _print(
        "near misses of " + repr(gold),
        ", ".join(f"{name} {value:.3g}" for name, value in zip(near, paid, strict=True)),
    )
    if not any(right) or best <= paid[-1]:
        raise SettingError(
            "answer_format",
            config.answer_format,
            "no reference answer of this data is right in this format: see --grading and the columns of the data",
        )


def _paid(functions, problems, texts, config):
    columns = reward_columns(
        [p.problem for p in problems], texts, [[0] * 8 for _ in texts], config.answer_format
    )
    totals, _ = compute_rewards(functions, columns, timeout=config.reward_timeout)
    return totals


def _pass_rate(decoder, problems, config):
    """Pass rate of the model as it stands, and what share of groups will carry no signal."""
    asked, G = problems[:PROMPTS], config.num_generations
    ids, mask = pad_left([p.ids for p in asked], decoder.tables.pad_id)
    started = time.perf_counter()
    out = decoder.rollout(
        ids,
        mask,
        G,
        config.max_completion_length,
        rollout_uniforms(config.seed, 0, 0, len(asked) * G, config.max_completion_length),
        config.temperature,
    )
    seconds = time.perf_counter() - started
    texts = [decoder.text(*pair) for pair in out.completions()]
    right = right_answers(
        texts, [p.problem.answer for p in asked for _ in range(G)], config.answer_format, config.grading
    )
    rates = [statistics.fmean(right[i : i + G]) for i in range(0, len(right), G)]
    mean, silent = statistics.fmean(rates), statistics.fmean(rate in (0, 1) for rate in rates)
    _print("pass rate", f"{mean:.3f} on {len(asked)} problems x {G} (single paths, {seconds:.1f} s); {statistics.fmean(~out.ended.cpu().numpy()):.2f} cut off; "
                        f"{silent:.2f} of the groups carry no signal from right and wrong alone")  # fmt: skip
    if mean == 0:
        print(
            "    nothing is right: GRPO has nothing to start from but the format. Begin with --warm_start, an easier data set, or a stronger model"
        )
    elif silent > 0.5 and mean > 0.8:
        print("    most problems are solved already: harder ones, or a higher temperature, would teach more")
    elif silent > 0.5:
        print(
            "    most groups are all wrong: a warm start, easier problems, more num_generations, or --dynamic_sampling 2 would help"
        )

"""`python grpo_train.py --check`: what a run would do, measured and printed before anything is paid for.

Nothing is trained and nothing is kept. What somebody should act on comes first. Paying reference answers and
sampling end after some seconds, so that a small machine is done in about a minute.
"""

import dataclasses
import math
import os
import shutil
import statistics
import time
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from tqdm import tqdm

from answers.formats import answer_format_named
from decoding.any_model import vocab_logits
from decoding.controls import LIKELIEST, Strangers, row_keys
from decoding.decoder import GroupDecoder
from decoding.rollout import Rollout, Sampling, rollout_uniforms
from decoding.tokens import end_answers_on
from errors import Interrupted, SettingError, counted, is_out_of_memory, one_line, sized
from learning.device import choose_device
from learning.learner import make_learner
from learning.memory import checkpoint_bytes, free_memory, row_lengths
from learning.models import (
    check_positions,
    load_frozen,
    load_model,
    load_policy,
    load_tokenizer,
    policy_bytes,
)
from learning.precision import compute_dtype
from problems.prompts import Prompting, prepare_problems, problems_of, responses
from reporting.files import yaml_text
from rewards import (
    RewardLog,
    check_rewards,
    compute_rewards,
    is_built_in,
    reward_columns,
    right_answers,
)
from running.folder import refuse_used
from running.progress import steps_to_do, trainer_state
from running.settings import why_in_use
from running.sft_config import warm_start_settings
from running.warm_starts import cache_folder, kept_at, key_of, read_inputs

PROMPTS = 32  # on which the pass rate is measured
GOLD_ANSWERS = 500  # that are paid
SECONDS, GOLD_SECONDS = 45, 10  # from the start until sampling ends; for paying reference answers
TAIL = 80  # characters of the first prompt's end that are shown


@dataclass
class Report:
    """What the check has to say: what somebody should act on, and the rest."""

    config: object
    findings: list = field(default_factory=list)
    lines: list = field(default_factory=list)
    is_whole: bool = False  # nothing was refused

    def say(self, name, text):
        self.lines.append(f"{name}: {text}")

    def find(self, text):
        self.findings.append(text)

    def show(self):
        if self.findings:
            print("\n  ".join([f"findings ({len(self.findings)}):", *self.findings]))
        elif self.is_whole:
            print("findings: none")
        if self.lines:
            print("\n".join(["", *self.lines]))
        if self.config.verbose:
            print("\n" + yaml_text(dataclasses.asdict(self.config)))
        print(end="", flush=True)


def report(config, functions):
    """Print the check; raises SettingError where training cannot work, after what was found until then."""
    said = Report(config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            _check(said, functions, time.monotonic() + SECONDS)
            said.is_whole = True
        finally:
            of_ours = (w for w in caught if Path(w.filename).is_relative_to(Path(__file__).parents[1]))
            said.findings[:0] = dict.fromkeys(str(warning.message) for warning in of_ours)
            said.show()


def _check(said, functions, end):
    """Fill the Report; end: when sampling is over, by time.monotonic()."""
    config = said.config
    in_use = why_in_use(config)
    if in_use:  # the run would be refused; what it would do elsewhere can be said all the same
        said.find(f"output_dir={config.output_dir!r} {in_use}")
    start, warm_start_is_pending = _start(config, is_new=in_use is not None)
    tokenizer = load_tokenizer(start, config.trust_remote_code)
    problems, held_out, skipped = prepare_problems(config, tokenizer)
    check_rewards(config, functions, problems[0].problem)
    if warm_start_is_pending:
        _check_warm_start(config)
    device = choose_device()
    if not in_use:
        refuse_used(config)
    dtype = compute_dtype(config.precision, device)
    model = load_model(start, tokenizer, dtype, device, config.trust_remote_code).eval()
    model.requires_grad_(not config.lora_r)  # adapters would be trained instead; they are small
    check_positions(model, problems + held_out, config)
    end_answers_on(Prompting.of(config).eos_id(tokenizer), tokenizer, model)
    answer_format = answer_format_named(config.answer_format)
    decoder = GroupDecoder(model, tokenizer, answer_format.think_end, config.interaction, compiled=False)
    decoder.choose_path()
    _check_prompt(said, problems, tokenizer)
    _check_sampling(said, model, decoder)
    completions = _check_work(said, problems, held_out, skipped)
    free = _check_memory(said, model)
    _check_peak(said, start, decoder, problems, held_out, free)
    _check_checkpoints(said, model)
    _check_gold(said, problems[:GOLD_ANSWERS], functions, decoder)
    if warm_start_is_pending:
        said.find("the pass rate is not measured: a warm start comes first; check again when it is made")
    else:
        _check_pass_rate(said, decoder, problems[:PROMPTS], end, completions if device.type == "cpu" else 0)


def _start(config, is_new):
    """The model that training starts from, or the one that a warm start which is still to come does.

    is_new: the run will need another output_dir, whose warm start is not that of this one.
    """
    warm_start = Path(config.output_dir) / "warm_start"
    if config.warm_start == "none":
        return config.model, False
    if (warm_start / "warm_start.json").exists() and not is_new:
        return str(warm_start), False
    kept = _kept_warm_start(config)
    return (config.model, True) if kept is None else (str(kept), False)


def _kept_warm_start(config):
    """The warm start that the run would find and not make, or None."""
    cache, settings = cache_folder(config), warm_start_settings(config)
    if cache is None or not cache.exists():
        return None
    device = choose_device()
    processes = max(1, config.num_processes or torch.cuda.device_count())
    inputs = read_inputs(settings, problems_of(settings, responses=True))
    return kept_at(cache, key_of(settings, inputs, device, processes))


def _check_warm_start(config):
    """Refuse data that the warm start which is still to come cannot learn from."""
    settings = warm_start_settings(config)
    tokenizer = load_tokenizer(settings.model, settings.trust_remote_code)
    problems, _, _ = prepare_problems(settings, tokenizer, responses=True)
    responses(problems, tokenizer, settings)


def _check_sampling(said, model, decoder):
    config = said.config
    hidden = torch.zeros(
        1, model.config.get_text_config().hidden_size, dtype=model.dtype, device=model.device
    )
    real = decoder.tables.num_real
    unused = vocab_logits(model, hidden).shape[-1] - real
    said.say(
        "sampling",
        f"temperature {config.temperature}, the whole distribution over the tokenizer's {real} ids; {unused} "
        "ids of the head are beyond it and never sampled; generation_config is not used",
    )
    eos = decoder.tokenizer.convert_ids_to_tokens(decoder.tables.eos_ids)
    said.say("a completion ends on", f"{eos} or after {config.max_completion_length} tokens")


def _check_prompt(said, problems, tokenizer):
    config, prompt = said.config, problems[0].prompt
    is_given = config.prompt_format == "raw" and problems[0].problem.is_prompt
    whose = "it is the prompt of the data as it stands" if is_given else "the system prompt is in it"
    remarks = Prompting.of(config).remarks(tokenizer, problems)
    said.findings += remarks
    remarks = [] if remarks else [whose]
    if problems[0].opening:
        remarks.append(f"it opens the answer with {problems[0].opening!r}, which counts as the answer's")
    remarks.append(f"thinking ends at {answer_format_named(config.answer_format).think_end!r}")
    said.say("prompt", "; ".join(remarks))
    if config.verbose:
        said.lines.append(f"the first prompt:\n{prompt}")
    tail = prompt if len(prompt) <= TAIL else f"...{prompt[-TAIL:]}"
    said.say("the first prompt ends in", repr(tail))


def _check_work(said, problems, held_out, skipped):
    """Prompts, what a step samples, and what the run does; returns how many completions that are."""
    config = said.config
    lengths = [len(p.ids) for p in problems]
    spread = f"{min(lengths)} to {max(lengths)} tokens, median {statistics.median(lengths):.0f}"
    said.say("prompts", f"{len(problems)} to train on, {len(held_out)} held out, {skipped} skipped; {spread}")
    if skipped:
        longer = f"longer than max_prompt_length={config.max_prompt_length} and are skipped"
        said.find(f"{skipped} of the {skipped + len(problems) + len(held_out)} prompts are {longer}")
    B, G = config.batch_size, config.num_generations
    tokens = B * G * (statistics.fmean(lengths) + config.max_completion_length)
    sampled = f"{counted(B, 'problem')} x {G} = {B * G} completions, at most {tokens:,.0f} tokens"
    said.say("a step", f"{sampled}, {counted(config.mu, 'optimiser step')}")
    total = steps_to_do(config, len(problems)) * config.outer_iterations
    passes = total * B / len(problems)
    sampled = f"{counted(total, 'step')} = {total * B * G:,} completions"
    said.say("the run", f"{sampled}, {passes:.2f} passes over the problems")
    said.findings += config.remarks
    if not config.learning_rate:
        said.find("every learning rate is 0, and no weight will change")
    return total * B * G


def _check_memory(said, model):
    config = said.config
    count = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    copy = count * model.dtype.itemsize
    parts = {
        "policy": policy_bytes(model, config),
        "gradients": 4 * trained,
        "moments and average" if config.ema_decay else "moments": config.moment_bytes * trained,
        "sampler": copy,
        "reference": copy if config.beta > 0 else 0,
    }
    free = copy + (torch.cuda.mem_get_info()[0] if model.device.type == "cuda" else _free_memory())
    needed = sum(parts.values())
    shown = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
    needs = f"{shown} = {needed / 2**30:.2f} before activations, which take what is left"
    said.say("memory, GiB", f"{needs}; {free / 2**30:.2f} are free")  # the sampler is loaded already
    if needed > free and not config.fsdp:
        needs = f"needs {needed / 2**30:.1f} GiB before activations, {free / 2**30:.1f} are free"
        raise SettingError("model", config.model, f"{needs}: try --lora_r 32, or --fsdp true on several GPUs")
    return free


def _check_peak(said, start, decoder, problems, held_out, free):
    """The most memory that the run takes on a card, where every completion reaches the limit."""
    config = said.config
    processes = max(1, config.num_processes or torch.cuda.device_count())
    longest_first = sorted((p.ids for p in problems), key=len, reverse=True)
    prompts = longest_first[: -(-config.batch_size // processes)]
    if config.fsdp or decoder.model.device.type != "cuda":
        reason, stored = "with --fsdp true" if config.fsdp else "without a GPU", ""
        if decoder.engine.backbone.refills:
            each = decoder.engine.backbone.row_bytes(len(prompts[0]) + config.max_completion_length)
            rows = len(prompts) * config.num_generations
            stored = f"; keys and values of {rows} rows take {rows * each / 2**30:.2f} GiB at their limit"
        return said.say("peak", f"not measured {reason}{stored}")
    asked = [p.ids for p in held_out][: -(-len(held_out) // processes)]
    try:
        peak = _trial(start, decoder, prompts, asked, config, processes) / 2**30
        needs = f"{peak:.2f} GiB predicted, {free / 2**30:.2f} are free"
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        needs = f"more than the {free / 2**30:.2f} GiB that are free ({one_line(error)})"
        said.find(f"a step at full length needs {needs}")
    free_memory()  # the trial's models
    needs += ", where every completion reaches max_completion_length; shorter ones take less"
    left_out = "" if decoder.engine.backbone.refills else "; the cache of the plain path is not counted"
    said.say("peak", needs + left_out)


def _trial(start, decoder, prompts, asked, config, processes):
    """Bytes at the peak of a trial with a policy, and a reference where there is a KL."""
    tokenizer, device = decoder.tokenizer, decoder.model.device
    policy, reference = load_policy(config, start, tokenizer, device), None
    if config.beta > 0:
        reference = load_frozen(config, start, tokenizer, device, is_checked=True)
    learner = make_learner(config, Accelerator(), policy, reference, decoder, total_steps=1)
    buckets = sum(p.numel() for p in policy.parameters() if p.requires_grad) if processes > 1 else 0
    return predicted_peak(config, learner, decoder, prompts, asked) + 4 * buckets  # DDP's, of the gradients


def predicted_peak(config, learner, decoder, prompts, held_out=()):
    """Bytes that tensors take at their peak where every completion reaches the limit: peak_gib of the log.

    prompts: those of a step, lists of ids; held_out: those of an evaluation, or none. Takes storage as a run
    does, the optimiser's moments too, and computes the largest micro-batch of an update of completions that
    are made up. The weights are changed by their decay alone.
    """
    limit, G = config.max_completion_length, config.num_generations
    torch.cuda.reset_peak_memory_stats()
    if held_out:
        _begin(decoder, limit, lambda: decoder.complete(held_out, Sampling(limit)))
    sampling = Sampling(limit, G, config.temperature)
    uniforms = rollout_uniforms(config.seed, 0, 0, len(prompts) * G, limit)
    keys = row_keys(config.seed, 0, 0, len(prompts) * G)
    if decoder.interaction.control == "strangers":
        decoder.hear_strangers(Strangers.of(prompts, limit))
    _begin(decoder, limit, lambda: decoder.rollout(prompts, sampling, uniforms, keys=keys))
    rollout = _made_up_rollout(decoder, prompts, sampling, keys)
    trained = [p for p in learner.policy.parameters() if p.requires_grad]
    smallest, batches = min(trained, key=torch.Tensor.numel), []

    def remember(rows):
        batches.append(rows)
        return 0.0 * smallest.sum(), {}

    def score(rows):
        logp = learner.scorer(rollout, rows)[0]
        if learner.reference_scorer is not None:
            with torch.no_grad():
                learner.reference_scorer(rollout, rows)
        return logp.sum(), {}

    with torch.enable_grad():
        learner.accumulate_gradients(rollout, remember)  # finds how many tokens fit, as the first step does
        for p in trained:
            p.grad = torch.zeros_like(p)
        learner.step([torch.zeros((), device=rollout.ids.device)])  # takes the moments
        lengths = row_lengths(rollout)
        largest = max(batches, key=lambda rows: sum(lengths[n] for n in rows))
        for _ in batches[:2]:  # the second of a step finds the gradients of the first
            learner.accumulate_gradients(rollout, score, largest)
    peak = torch.cuda.max_memory_allocated()
    learner.optimizer.zero_grad(set_to_none=True)
    free_memory()
    return peak


def _begin(decoder, limit, decode):
    """The first steps of a decode, then storage as for its last."""
    asked = iter([False, True])
    decoder.interrupted = lambda: next(asked)
    try:
        decode()
    except Interrupted:
        pass
    finally:
        decoder.interrupted = None
    decoder.engine.backbone.grow(limit)


def _made_up_rollout(decoder, prompts, sampling, keys):
    """A Rollout whose completions all reach the limit, of random ids."""
    G, T, N = sampling.num_generations, sampling.max_new_tokens, len(prompts) * sampling.num_generations
    device, lambda_blend = decoder.engine.device, decoder.interaction.lambda_blend
    interacts = lambda_blend > 0 and G > 1
    real = decoder.tables.real.nonzero().flatten()
    blank = torch.zeros(N, T, device=device)
    control = decoder.interaction.control if interacts else "none"
    heard = torch.zeros(N, T, LIKELIEST if control == "own" else 0, device=device)
    return Rollout(
        prompts=prompts,
        ids=real[torch.randint(len(real), (N, T), device=device)],
        mask=blank == 0,
        logp=blank,
        ended=torch.zeros(N, dtype=torch.bool, device=device),
        thinking=blank == 0,
        num_generations=G,
        temperature=sampling.temperature or 1.0,
        mix=torch.full((len(prompts), T, G, G), 1 / G, device=device) if interacts else None,
        lambda_blend=lambda_blend if interacts else 0.0,
        input_change=blank if interacts else None,
        control=control,
        **decoder.heard_instead(control, keys, blank, heard.long(), heard),
    )


def _free_memory():
    """Memory of the machine that programs can have, in bytes."""
    return psutil.virtual_memory().available


def _check_checkpoints(said, model):
    """The size of a checkpoint, how long writing one takes, and whether those to be kept fit on the disk."""
    config = said.config
    size = checkpoint_bytes(model, model if config.beta > 0 else None, config.moment_bytes)
    folder = Path(config.output_dir).resolve()
    while not folder.exists():
        folder = folder.parent
    try:
        rate = _bytes_a_second(folder, min(size, 2**26))
    except OSError as error:
        raise SettingError(
            "output_dir", config.output_dir, f"cannot be written to ({error.strerror})"
        ) from error
    free, copies = shutil.disk_usage(folder).free, (config.keep_checkpoints or 1) + 1
    seconds = size / rate
    written = f"{sized(size)}, {seconds:.0f} s at {rate / 1e6:.0f} MB/s"
    grace = f"a job needs about {2 * seconds + 30:.0f} s of grace"
    kept = f"{copies} of them take {sized(copies * size)}, {sized(free)} are free"
    said.say("a checkpoint", f"{written}: {grace}; {kept}")
    if config.save_every and copies * size > free:
        remedy = f"{sized(copies * size)} of checkpoints do not fit into {sized(free)}"
        raise SettingError("keep_checkpoints", config.keep_checkpoints, remedy)


def _bytes_a_second(folder, size):
    """How fast the disk of a folder writes, by a file of `size` bytes that is deleted again."""
    trial, data = folder / ".trial.part", os.urandom(size)
    try:
        started = time.perf_counter()
        with open(trial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return size / (time.perf_counter() - started)
    finally:
        trial.unlink(missing_ok=True)


def _check_gold(said, problems, functions, decoder):
    """What reference answers, written in the format, earn: all the same, and more than near misses do.

    They are what the tokenizer gives back of them, as a model that writes them would be read.
    """
    config = said.config
    answer_format = answer_format_named(config.answer_format)

    def as_read(text, p):
        ids = decoder.tokenizer(answer_format.after_opening(text, p.opening), add_special_tokens=False)
        return p.opening + decoder.text(ids["input_ids"], ended=False)

    write = partial(answer_format.write, "So it is.")
    texts = [as_read(write(p.problem.answer), p) for p in problems]
    totals, parts = _paid(functions, problems, texts, config)
    problems, texts = problems[: len(totals)], texts[: len(totals)]
    golds = [p.problem.answer for p in problems]
    best = max(total for total in totals if not math.isnan(total))  # NaN: every reward abstained
    paid = list(zip(problems, totals, strict=True))
    missed = [(p.problem, total) for p, total in paid if not total >= best - 1e-9]
    right = right_answers(texts, golds, config.answer_format, config.grading)
    earn = f"{len(golds) - len(missed)} of {len(golds)} earn {best:.3g}"
    said.say("gold answers", f"{earn}, {sum(map(bool, right))} count as right{_undecided(right)}")
    uneven = [name for name, values in parts.items() if len(set(values)) > 1]
    if missed and (uneven := _told_by_the_problem(uneven, functions, problems, texts, totals, config)):
        earn = f"{len(missed)} of {len(golds)} reference answers earn less than {best:.3g}, or nothing"
        said.find(f"{earn}: {' and '.join(uneven)} does not pay them alike" if len(functions) > 1 else earn)
        for problem, total in missed[:10]:
            asked = one_line(repr(problem.question), 60)
            said.lines.append(f"    {problem.id} ({asked}): {problem.answer!r} earns {total:.3g}")
    scored = next(p for p, total in paid if not math.isnan(total))
    gold = scored.problem.answer
    near = {
        "the gold answer": write(gold),
        "another answer": write(gold + "7"),
        "with a word": write(f"{gold} apples"),
        "with a stop": write(f"{gold}."),
        "two answers": write(f"{gold} or 7"),
        "without its format": gold,
        "nothing": "",
    }
    near_texts = [as_read(text, scored) for text in near.values()]
    totals, parts = _rewards(functions, [scored] * len(near), near_texts, config)
    near = dict(zip(near, totals, strict=True))
    said.say(f"near misses of {gold!r}", ", ".join(f"{name} {total:.3g}" for name, total in near.items()))
    for (function, _), (name, values) in zip(functions, parts.items(), strict=True):
        is_constant = len(set(values)) == 1 and values[0] is not None
        if is_constant and len(functions) > 1 and not is_built_in(function):
            alike = f"the reward {name} pays {values[0]:g} for right, wrong and empty texts alike"
            said.find(f"{alike}: does it read the text, which is completion[0]['content']?")
    if near["another answer"] >= best > near["nothing"]:
        said.find(f"the answer {gold + '7'!r} earns as much as {gold!r}: the rewards do not tell them apart")
    if not any(right):
        wrong = "no reference answer of this data is right in this format"
        read = f"the first one reads {one_line(repr(texts[0]), 150)}, as the tokenizer can write it"
        remedy = f"{wrong}: see --grading and the columns of the data ({read})"
        raise SettingError("answer_format", config.answer_format, remedy)
    if best <= near["nothing"]:
        paid = ["reward", config.reward] if config.reward else ["reward_set", config.reward_set]
        earned = f"a right answer earns {best:.3g}, and an empty completion {near['nothing']:.3g}"
        raise SettingError(*paid, f"{earned}: the rewards teach nothing")


def _told_by_the_problem(names, functions, problems, texts, totals, config):
    """Those of the rewards that pay texts otherwise where they answer another problem.

    One that reads the text alone, such as its length, need not pay all reference answers alike. Asked of the
    texts that earn least and most; where all have the same answer nothing tells, and all names are given.
    """
    order = sorted(range(len(texts)), key=lambda i: -math.inf if math.isnan(totals[i]) else totals[i])
    chosen = list(dict.fromkeys(order[:4] + order[-4:]))
    asked = [problems[i] for i in chosen]
    if len({p.problem.answer for p in asked}) == 1:
        return names
    texts, may_abstain = [texts[i] for i in chosen], dict(gather=lambda values: [])
    paid, others = (
        _rewards(functions, ps, texts, config, **may_abstain)[1] for ps in (asked, asked[1:] + asked[:1])
    )
    return [name for name in names if paid[name] != others[name]]


def _paid(functions, problems, texts, config):
    """Rewards of the first texts: of as many as can be paid in GOLD_SECONDS, in parts that double.

    The totals, and the values of each function by name.
    """
    totals, parts, size, began = [], {}, 8, time.monotonic()
    while not totals or (len(totals) < len(texts) and time.monotonic() - began < GOLD_SECONDS):
        part = slice(len(totals), len(totals) + size)
        earned, values = _rewards(functions, problems[part], texts[part], config, gather=lambda values: [])
        totals += earned
        parts = {name: [*parts.get(name, ()), *paid] for name, paid in values.items()}
        size *= 2
    if all(map(math.isnan, totals)):  # refused in the words of the rewards
        _rewards(functions, problems[: len(totals)], texts[: len(totals)], config)
    return totals, parts


def _undecided(right):
    """How many verdicts are None, which counts as not right; nothing where none is."""
    count = sum(verdict is None for verdict in right)
    return f", {count} undecided" if count else ""


def _rewards(functions, problems, texts, config, gather=list):
    """As compute_rewards, with its gather; one that gives an empty list lets every function abstain."""
    ids = [[0] * 8 for _ in texts]  # no completion was sampled
    columns = reward_columns([p.problem for p in problems], texts, ids, config.answer_format)
    columns["trainer_state"] = trainer_state()
    log = RewardLog([{} for _ in texts])
    how = dict(timeout=config.reward_timeout, log=log, gather=gather)
    return compute_rewards(functions, columns, **how)


def _sampled_until(end, decoder, problems, config):
    """The Completions of the first problems, G each: of as many as are sampled before the time `end`.

    In parts that double, with the draws that all problems at once would have.
    """
    G, T = config.num_generations, config.max_completion_length
    uniforms = rollout_uniforms(config.seed, 0, 0, len(problems) * G, T).view(-1, G, T)
    sampling, completions, size = Sampling(T, G, config.temperature), [], 1
    decoder.interrupted = lambda: time.monotonic() >= end
    try:
        with tqdm(total=len(problems), desc="pass rate", unit="problem", disable=None, leave=False) as bar:
            while (done := len(completions) // G) < len(problems):
                part = slice(done, done + size)
                prompts, draws = [p.ids for p in problems[part]], uniforms[part].flatten(0, 1)
                completions += decoder.completions(decoder.rollout(prompts, sampling, draws, interact=False))
                bar.update(len(prompts))
                size *= 2
    except Interrupted:
        pass
    finally:
        decoder.interrupted = None
    return completions


def _check_pass_rate(said, decoder, problems, end, of_the_run):
    """Pass rate of the model as it stands, and what share of groups will carry no signal.

    of_the_run: how many completions the run samples; 0 where their time does not follow from a few.
    """
    config, G, started = said.config, said.config.num_generations, time.monotonic()
    completions = _sampled_until(end, decoder, problems, config)
    seconds = time.monotonic() - started
    _check_sampling_time(said, len(completions), seconds, of_the_run)
    if not completions:
        limit = f"{G} completions of {config.max_completion_length} tokens"
        return said.find(
            f"the pass rate is not measured: {limit} take this machine more than {seconds:.0f} s"
        )
    problems = problems[: len(completions) // G]
    rows = [p for p in problems for _ in range(G)]
    texts = [p.answered(c).text for p, c in zip(rows, completions, strict=True)]
    answers = [p.problem.answer for p in rows]
    right = right_answers(texts, answers, config.answer_format, config.grading)
    rates = [statistics.fmean(map(bool, right[i : i + G])) for i in range(0, len(right), G)]
    mean = statistics.fmean(rates)
    silent = statistics.fmean(rate in (0, 1) for rate in rates)
    cut_off = statistics.fmean(not completion.ended for completion in completions)
    asked = f"{counted(len(problems), 'problem')} x {G} (single paths, {seconds:.1f} s)"
    silence = f"{silent:.2f} of the groups carry no signal from right and wrong alone"
    said.say("pass rate", f"{mean:.3f} on {asked}; {cut_off:.2f} cut off{_undecided(right)}; {silence}")
    if advice := _advice(mean, silent):
        said.find(f"pass rate {mean:.3f}: {advice}")
    if cut_off > 0.2:
        remedy = f"--max_completion_length {config.max_completion_length} is short, or the model does not end"
        said.find(f"{cut_off:.2f} of the completions are cut off: {remedy}")


def _check_sampling_time(said, sampled, seconds, of_the_run):
    """What the run's sampling takes on a CPU, where many rows at once are hardly faster than a few."""
    minutes = seconds / 60 * of_the_run / (sampled or said.config.num_generations)
    told = f"{minutes:,.0f} minutes" if minutes < 100 else f"{minutes / 60:,.0f} hours"
    takes = f"sampling alone takes this CPU {'about' if sampled else 'more than'} {told}"
    if minutes >= 100:
        said.find(f"{takes}: fewer num_steps, shorter completions, a smaller model, or a GPU")
    elif of_the_run:
        said.say("time", takes)


def _advice(mean, silent):
    """What to change for this pass rate and share of groups without a signal; nothing where both are good."""
    if mean == 0:
        return (
            "nothing is right: GRPO has nothing to start from but the format. "
            "Begin with --warm_start, an easier data set, or a stronger model"
        )
    if silent <= 0.5:
        return ""
    if mean > 0.8:
        return "most problems are solved already: harder ones, or a higher temperature, would teach more"
    return (
        "most groups are all wrong: a warm start, easier problems, more num_generations, "
        "or --dynamic_sampling 2 would help"
    )

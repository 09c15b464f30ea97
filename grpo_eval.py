"""Evaluate a model on a whole split: batched decoding of single paths, graded as the rewards grade.

    python grpo_eval.py                                     grpo_finetuned_model, on the test split of what it was trained on
    python grpo_eval.py --model DIR --dataset gsm8k --limit 200 --num_samples 4
    python grpo_eval.py --ask "A pen costs 3 dollars. How much do 14 pens cost?"

Writes eval_runs/<name>/report.json, samples.jsonl, curves.svg and .png; the last line it prints is the report as one JSON object. Until the report is there
the folder holds the answers so far, a line a question, and the same command with the same --name goes on from them.
"""

import hashlib
import json
import math
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from tqdm import tqdm

from answers.formats import ANSWER_FORMATS, extract_answer
from answers.numbers import last_number, parse_number
from decoding.decoder import GroupDecoder
from decoding.rollout import Interaction, pad_left, rollout_uniforms
from decoding.server import complete, connect
from errors import DataError, SettingError
from learning.models import check_positions, load_model, load_tokenizer, rollout_dtype
from learning.parallel import shard
from m3po_module import SIMILARITIES
from problems.problem import EncodedProblem
from problems.prompts import Prompting, problems_of, system_prompt
from problems.sources import QUESTION
from reporting.comparison import Side, compare, compare_two
from reporting.files import read_yaml, write_whole
from reporting.plots import draw_comparison, draw_evaluation, or_warn
from reporting.statistics import over_questions, sampled_statistics
from rewards import combined_reward, right_answers
from running.launching import end_with_parent, launch, starts_processes
from running.parsing import parse_config, run_main
from running.settings import check, check_prompting, resolved, setting
from solver import load_solver, readable, solve

# Settings that decide what the model reads: taken from the run_config.yaml beside the model, unless they are given.
FROM_TRAINING = {"dataset": "gsm8k", "answer_format": "xml", "grading": "number", "system_prompt_file": None,
                 "chat_template_kwargs": "{}", "question_column": None,
                 "answer_column": None, "solution_column": None, "max_prompt_length": 512, "max_completion_length": 400, "seed": 42,
                 "m3po_lambda": 0.1, "m3po_temperature": 0.1, "m3po_similarity": "distribution"}  # fmt: skip


# Settings that do not change what is answered: an interrupted evaluation may go on with others.
FREE = {
    "output_dir",
    "name",
    "batch_size",
    "num_processes",
    "torch_compile",
    "api",
    "api_at_once",
    "api_timeout",
    "trust_remote_code",
    "versions",
    "commit",
}


@dataclass(frozen=True)
class Config:
    """Settings of an evaluation. What is left out is read from MODEL/run_config.yaml, which training writes there."""

    model: str = setting("grpo_finetuned_model", "directory or hub id")
    dataset: str | None = setting(None, "as for grpo_train.py")
    split: str = setting("test", "split to evaluate on")
    limit: int | None = setting(None, "the first N problems only")
    question_column: str | None = setting(None, "column of the question")
    answer_column: str | None = setting(None, "column of the answer")
    solution_column: str | None = setting(None, "column of the worked solution")
    answer_format: str | None = setting(None, "how answers are written: " + ", ".join(ANSWER_FORMATS))
    grading: str | None = setting(None, "what is right: number or math, as for grpo_train.py")
    system_prompt_file: str | None = setting(
        None, "a text file to use instead of the format's own system prompt"
    )
    chat_template_kwargs: str | None = setting(None, "JSON object handed to the chat template")
    by: list[str] | None = setting(
        None, "columns of the data to report accuracy by, beside subject and level"
    )
    max_prompt_length: int | None = setting(
        None, "longer prompts are skipped and counted; they count as wrong"
    )
    max_completion_length: int | None = setting(None, "tokens an answer may have")
    ask: str | None = setting(None, "answer this one question instead, readably")
    questions: str | None = setting(
        None, "answer every question of a file instead: one a line, or JSON lines with a question or prompt"
    )
    save_jsonl: str | None = setting(
        None,
        "with --questions: write prompts and answers there, one JSON object a line, as sft_train.py reads them",
    )
    compare: list[str] | None = setting(
        None,
        "compare evaluations instead: folders of this script, the first against the others; a,b: seeds of one side",
    )
    num_samples: int = setting(1, "answers a question, with a temperature above 0")
    api: str | None = setting(
        None,
        "ask an OpenAI-compatible server at this base URL instead of loading a model; its key from OPENAI_API_KEY",
    )
    api_model: str | None = setting(None, "name of the model there (default: the only one it has)")
    api_at_once: int = setting(32, "requests in flight")
    api_timeout: float = setting(300.0, "seconds one request may take")
    m3po: bool = setting(
        False,
        "also decode the samples of each question as paths that interact, as in training, with the same draws",
    )
    m3po_lambda: float | None = setting(None, "with m3po: as for grpo_train.py")
    m3po_temperature: float | None = setting(None, "with m3po: as for grpo_train.py")
    m3po_similarity: str | None = setting(None, "with m3po: as for grpo_train.py")
    temperature: float = setting(0.0, "0: greedy")
    top_p: float = setting(1.0, "sample from the smallest set of tokens of this probability")
    top_k: int = setting(0, "sample from the k likeliest tokens; 0: all")
    batch_size: int | None = setting(
        None, "answers decoded at once (default: 32 on the CPU, on CUDA as many as fit, 512 at most)"
    )
    seed: int | None = setting(None, "seeds the draws of sampling")
    bf16: bool = setting(True, "bf16 on CUDA")
    torch_compile: bool = setting(
        True,
        "on CUDA: compile the decoder's step (half a minute, then faster); false pays for a few questions only",
    )
    output_dir: str = setting("eval_runs", "the run goes into a folder of its own in here")
    name: str | None = setting(None, "name of that folder (default: model, data set, split and time)")
    num_processes: int | None = setting(
        None, "processes to start on this machine (default: one a visible GPU, one on the CPU)"
    )
    trust_remote_code: bool = setting(False, "run code that comes with a model")

    def __post_init__(self):
        settings = Path(self.model) / "run_config.yaml"
        trained = read_yaml(settings) if settings.exists() else {}
        for name, default in FROM_TRAINING.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, trained.get(name, default))
        if (
            Path(self.dataset).is_file()
            and self.dataset == trained.get("dataset")
            and self.split != trained.get("split")
        ):
            raise SettingError(
                "dataset",
                self.dataset,
                "is the one file this model was trained on: give another --dataset, or --split train to mean it",
            )
        check(self, "seed", lambda v: 0 <= v < 2**31, "must be from 0 to 2147483647")
        check(
            self,
            "max_prompt_length max_completion_length num_samples",
            lambda v: v >= 1,
            "must be at least 1",
        )
        check(self, "limit batch_size num_processes", lambda v: v is None or v >= 1, "must be at least 1")
        check(self, "temperature top_k", lambda v: 0 <= v < math.inf, "must be finite and not negative")
        check(self, "top_p", lambda v: 0 < v <= 1, "must be above 0 and at most 1")
        if self.compare is not None and len(self.compare) < 2:
            raise SettingError("compare", self.compare, "needs two evaluations at least")
        if self.save_jsonl and not self.questions:
            raise SettingError("save_jsonl", self.save_jsonl, "goes with --questions FILE")
        if self.save_jsonl and (
            Path(self.save_jsonl).is_dir() or not Path(self.save_jsonl).absolute().parent.is_dir()
        ):
            raise SettingError("save_jsonl", self.save_jsonl, "must be a file in a folder that is there")
        if self.m3po and self.api:
            raise SettingError("m3po", True, "paths of a server cannot interact: load the model instead")
        check(self, "api_at_once", lambda v: v >= 1, "must be at least 1")
        check(
            self, "api_timeout", lambda v: 0 < v <= 86400, "must be positive, and a day (86400) at the most"
        )
        if self.m3po and self.num_samples < 2:
            raise SettingError(
                "m3po", True, "paths need each other: set --num_samples 8 --temperature 1, or the like"
            )
        check(self, "m3po_lambda", lambda v: 0 <= v <= 1, "must be between 0 and 1")
        check(self, "m3po_temperature", lambda v: 1e-6 <= v < math.inf, "must be positive")
        check(
            self, "m3po_similarity", lambda v: v in SIMILARITIES, "must be one of " + ", ".join(SIMILARITIES)
        )
        if self.num_samples > 1 and self.temperature == 0:
            raise SettingError(
                "num_samples",
                self.num_samples,
                "greedy answers are all the same: set a temperature, such as --temperature 1",
            )
        check_prompting(self)


def check_columns(config, problems):
    there = {column for p in problems for column in p.more}
    if missing := [name for name in config.by or () if name not in there]:
        raise SettingError(
            "by",
            missing,
            f"the data has no such column; beside those that are read anyway there are: {', '.join(sorted(there)) or 'none'}",
        )


def as_texts(pairs, decoder):
    """Triples (text, tokens, whether it ended) of pairs (ids, whether EOS came)."""
    return [(decoder.text(ids, ended), len(ids), ended) for ids, ended in pairs]


def prompt_hash(problem):
    return hashlib.sha256(problem.prompt.encode()).hexdigest()


def grade(problems, answers, answer_format, grading="number", by=None):
    """One record a problem, with lm-evaluation-harness's names; answers: for each problem triples (text, tokens, whether it ended)."""
    written = [[text for text, _, _ in triples] for triples in answers]
    flat = [
        (text, problem.problem.answer)
        for problem, texts in zip(problems, written, strict=True)
        for text in texts
    ]
    scores = iter(right_answers(*map(list, zip(*flat, strict=True)), answer_format, grading))
    right = ([float(next(scores)) for _ in texts] for texts in written)
    records = []
    for problem, triples, texts in zip(problems, answers, written, strict=True):
        truth = [problem.problem.answer] * len(texts)
        strict = [extract_answer(text, answer_format) for text in texts]
        flexible = [last_number(text) for text in texts]
        target = parse_number(problem.problem.answer)
        records.append({
            "doc_id": problem.problem.id, "prompt_hash": prompt_hash(problem), "prompt": problem.prompt,
            "target": problem.problem.answer,
            "subject": problem.problem.subject, "level": problem.problem.level, "by": {name: problem.problem.more.get(name) for name in by or ()},
            "resps": texts,
            "filtered_resps": {"strict-match": strict, "flexible-extract": flexible},
            "exact_match": {
                "strict-match": next(right),
                "flexible-extract": [float(target is not None and number is not None and parse_number(number) == target) for number in flexible],
            },
            "reward": combined_reward(None, texts, truth, answer_format=answer_format),
            "length": [length for _, length, _ in triples], "stop_condition": ["eos" if ended else "length" for _, _, ended in triples],
        })  # fmt: skip
    return records


def summarise(records, skipped):
    """The report's numbers. A question whose prompt was too long to ask counts as wrong."""
    missed = [0.0] * skipped
    report = {
        "questions": len(records) + skipped,
        "skipped": skipped,
        "samples_per_question": len(records[0]["resps"]),
    }
    for name, key in (("accuracy", "strict-match"), ("accuracy_last_number", "flexible-extract")):
        scores = [statistics.fmean(r["exact_match"][key]) for r in records] + missed
        report |= {name: round(statistics.fmean(scores), 4), f"{name}_ci95": over_questions(scores)[1:]}
    for field in ("subject", "level", *records[0].get("by", ())):
        groups = {}
        for r in records:
            value = r["by"][field] if field in r.get("by", ()) else r.get(field)
            groups.setdefault("" if value is None else str(value), []).append(
                statistics.fmean(r["exact_match"]["strict-match"])
            )
        if any(groups):
            named = sorted(groups.items())
            report[f"accuracy_by_{field}"] = {
                v or "none": {
                    "accuracy": round(statistics.fmean(s), 4),
                    "ci95": over_questions(s)[1:],
                    "questions": len(s),
                }
                for v, s in named
            }
    if report["samples_per_question"] > 1:
        report |= sampled_statistics(records)
    every = {k: [v for r in records for v in r[k]] for k in ("length", "stop_condition", "reward")}
    parsed = [answer not in (None, "") for r in records for answer in r["filtered_resps"]["strict-match"]]
    return report | {
        "parsable": round(statistics.fmean(parsed), 4),
        "truncated": round(statistics.fmean(s == "length" for s in every["stop_condition"]), 4),
        "mean_length": round(statistics.fmean(every["length"]), 2),
        "mean_reward": round(statistics.fmean(every["reward"]), 4),
    }


def interacting(decoder, asked, places, config, keep):
    """For the questions at `places` `num_samples` completions of paths that look at each other, kept batch by batch; the draws are the single paths'."""
    G, T, together = (
        config.num_samples,
        config.max_completion_length,
        max(1, (config.batch_size or 256) // config.num_samples),
    )
    uniforms = rollout_uniforms(config.seed, 0, 0, len(asked) * G, T).view(len(asked), G, T)
    for batch in (places[i : i + together] for i in range(0, len(places), together)):
        ids, mask = pad_left([asked[i].ids for i in batch], decoder.tables.pad_id)
        pairs = decoder.rollout(
            ids, mask, G, T, uniforms[batch].flatten(0, 1), config.temperature, config.top_k, config.top_p
        ).completions()
        for n, i in enumerate(batch):
            keep(i, as_texts(pairs[n * G : (n + 1) * G], decoder))


def fingerprint(model):
    """A hash of a thousand or two values of each weight: another model that was saved in the same place has another."""
    digest = hashlib.sha256()
    for weight in model.parameters():
        digest.update(
            weight.detach().flatten()[:: max(1, weight.numel() // 1000)].float().cpu().numpy().tobytes()
        )
    return digest.hexdigest()


def kept(kind, folder, asked):
    """{place: triples} of the questions that an interrupted evaluation has answered; a line that is not whole is as good as none."""
    found = {}
    for path in folder.glob(f"{kind}-*.jsonl"):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            place = row["question"]
            if place >= len(asked) or row["prompt_hash"] != prompt_hash(asked[place]):
                raise SettingError(
                    "name", folder.name, f"{path} answers other questions or prompts: give another --name"
                )
            found[place] = row["answers"]
    return found


def answered(kind, folder, asked, accelerator, decode):
    """For each question triples (text, tokens, whether it ended): those kept in the folder, and what decode(places, keep) makes of the others.

    Each process appends to a file of its own as questions end, so that a kill costs what is being decoded and no more. The report's seconds are those of
    the last run.
    """
    found, own = kept(kind, folder, asked), []
    if found and accelerator.is_main_process:
        print(f"{folder}: {len(found)} of {len(asked)} questions are answered already", flush=True)
    accelerator.wait_for_everyone()  # nobody writes while another still reads
    rest = [place for place in range(len(asked)) if place not in found]
    mine = rest[shard(len(rest), accelerator)]
    with (
        open(folder / f"{kind}-{accelerator.process_index}.jsonl", "a", encoding="utf-8") as file,
        tqdm(total=len(mine), unit="question", disable=None if accelerator.is_main_process else True) as bar,
    ):
        file.write("\n" if file.tell() else "")  # what a kill has cut off ends here

        def keep(place, triples):
            own.append((place, triples))
            file.write(
                json.dumps({"question": place, "prompt_hash": prompt_hash(asked[place]), "answers": triples})
                + "\n"
            )
            file.flush()
            bar.update()

        decode(mine, keep)
    found |= dict(gather_object(own))
    return [found[place] for place in range(len(asked))]


def evaluate(config):
    """Decode, grade, write; returns the report. Each process decodes its part, and all grade; only the first writes."""
    end_with_parent()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    device = accelerator.device
    tokenizer = load_tokenizer(config.model, config.trust_remote_code)
    problems = problems_of(config)
    check_columns(config, problems)
    asked, skipped = Prompting.of(config).encode(tokenizer, problems, config.max_prompt_length)
    folder = new_folder(config, config.model)
    model = load_model(
        config.model, tokenizer, rollout_dtype(config), device, config.trust_remote_code
    ).eval()
    check_positions(model, asked, config)
    begin(folder, config, fingerprint(model), accelerator)
    interaction = Interaction(config.m3po_lambda, config.m3po_temperature, config.m3po_similarity)
    decoder = GroupDecoder(
        model,
        tokenizer,
        ANSWER_FORMATS[config.answer_format].think_end,
        interaction,
        compiled=config.torch_compile,
    )
    sampling = dict(
        samples=config.num_samples,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=config.seed,
    )

    def single(places, keep):
        prompts = [asked[i].ids for i in places]
        decoder.complete(prompts, config.max_completion_length, batch_rows=config.batch_size, places=places,
                         keep=lambda i, pairs: keep(i, as_texts(pairs, decoder)), **sampling)  # fmt: skip

    def interact(places, keep):
        interacting(decoder, asked, places, config, keep)

    started = time.perf_counter()
    answers = answered("answers", folder, asked, accelerator, single)
    together = answered("answers_m3po", folder, asked, accelerator, interact) if config.m3po else None
    seconds = time.perf_counter() - started
    records = grade(asked, answers, config.answer_format, config.grading, config.by)
    report = {"model": config.model, "dataset": config.dataset, "split": config.split, "answer_format": config.answer_format,
              **summarise(records, skipped), "seconds": round(seconds, 2)}  # fmt: skip
    if together is not None:
        found = grade(asked, together, config.answer_format, config.grading, config.by)
        report["m3po"] = summarise(found, skipped) | {
            "against_single_paths": compare_two(
                Side("single paths", [records]), Side("interacting", [found])
            )[0]
        }
    if accelerator.is_main_process:
        write_evaluation(
            folder, report, {"samples": records} | ({"samples_m3po": found} if config.m3po else {})
        )
    return report, folder


def evaluate_server(config):
    """The same evaluation of a server's model: it gets the messages, and its own chat template makes the prompt of them."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    problems = problems_of(config)
    check_columns(config, problems)
    server = connect(config.api, config.api_model, os.environ.get("OPENAI_API_KEY", ""), config.api_timeout)
    folder = new_folder(config, server.model)
    system = [{"role": "system", "content": system_prompt(config)}]
    chats = [[*system, {"role": "user", "content": p.question}] for p in problems]
    asked = [EncodedProblem(p, json.dumps(chat), []) for p, chat in zip(problems, chats, strict=True)]
    begin(folder, config, server.model, accelerator)
    sampling = (
        config.num_samples,
        config.max_completion_length,
        config.temperature,
        config.top_p,
        config.seed,
        config.api_at_once,
    )

    def ask(places, keep):
        complete(server, [chats[i] for i in places], *sampling, places, keep)

    started = time.perf_counter()
    answers = answered("answers", folder, asked, accelerator, ask)
    records = grade(asked, answers, config.answer_format, config.grading, config.by)
    report = {"model": server.model, "api": config.api, "dataset": config.dataset, "split": config.split, "answer_format": config.answer_format,
              **summarise(records, 0), "seconds": round(time.perf_counter() - started, 2)}  # fmt: skip
    if accelerator.is_main_process:
        write_evaluation(folder, report, {"samples": records})
    return report, folder


def new_folder(config, model):
    """Where this evaluation goes; refused where a finished one is already."""
    name = (
        config.name
        or f"{Path(model).name}-{Path(config.dataset).name}-{config.split}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    folder = Path(config.output_dir) / broadcast_object_list([name])[0]  # the clocks of processes differ
    if (folder / "report.json").exists():
        raise SettingError("name", folder.name, f"{folder} holds an evaluation already: give another --name")
    return folder


def make_folder(folder):
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError("output_dir", str(folder), f"cannot be made ({error.strerror})") from error


def begin(folder, config, answerer, accelerator):
    """Write run_config.yaml; refused where answers of other settings, or of another model (`answerer` says which it is), are kept in the folder."""
    settings = resolved(config) | {"answerer": answerer}
    if any(path.stat().st_size for path in folder.glob("answers*-*.jsonl")):
        then = read_yaml(folder / "run_config.yaml")
        differ = [
            f"{name} {then.get(name)!r} there, {value!r} here"
            for name, value in settings.items()
            if name not in FREE and then.get(name) != value
        ]
        if differ:
            raise SettingError(
                "name",
                folder.name,
                f"{folder} holds an unfinished evaluation of another kind ({', '.join(differ)}): give another --name",
            )
    if accelerator.is_main_process:
        make_folder(folder)
        write_whole(folder / "run_config.yaml", yaml.safe_dump(settings, sort_keys=False))


def write_evaluation(folder, report, samples):
    for name, records in samples.items():
        write_whole(folder / f"{name}.jsonl", "".join(json.dumps(r) + "\n" for r in records))
    write_whole(folder / "report.json", json.dumps(report, indent=2) + "\n")
    for path in folder.glob("answers*-*.jsonl"):  # all of them are in samples.jsonl now
        path.unlink()
    or_warn(draw_evaluation, report, samples["samples"], folder)


def answer(config):
    """`--ask` and `--questions`: print answers, or write them as JSON lines."""
    questions = [config.ask] if config.ask is not None else read_questions(config.questions)
    solver = load_solver(
        config.model,
        Prompting.of(config),
        config.max_completion_length,
        config.bf16,
        config.trust_remote_code,
        torch_compile=len(questions) > 100 and config.torch_compile,
    )
    solutions = solve(questions, solver, config.temperature, config.seed)
    if config.save_jsonl is None:
        print(
            "\n\n".join(
                (f"Question: {s.question}\n\n" if len(solutions) > 1 else "") + readable(s) for s in solutions
            )
        )
        return
    rows = [
        {
            "prompt": s.question,
            "response": s.completion,
            "reasoning": s.reasoning,
            "answer": s.answer,
            "finished": s.finished,
        }
        for s in solutions
    ]
    write_whole(config.save_jsonl, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(
        f"{len(rows)} answers in {config.save_jsonl}, {sum(row['answer'] is None for row in rows)} of them without an answer in the format"
    )


def read_questions(path):
    """The questions of a text file, one a line, or of JSON lines."""
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("questions", path, f"cannot be read ({type(error).__name__})") from error
    found = []
    for number, line in enumerate(lines, 1):
        if line and Path(path).suffix == ".jsonl":
            try:
                row = json.loads(line)
                line = next(row[key] for key in QUESTION if isinstance(row.get(key), str))
            except (json.JSONDecodeError, AttributeError, StopIteration) as error:
                raise DataError(
                    f"{path} line {number}: is not a JSON object with a {' or '.join(QUESTION)}"
                ) from error
        found += [line] if line else []
    if not found:
        raise DataError(f"{path}: holds no question")
    return found


def main():
    config = parse_config(Config, description=__doc__.splitlines()[0])
    if config.compare:
        text, found = compare(config.compare)
        print(text)
        folder = Path(config.output_dir)
        make_folder(folder)
        or_warn(draw_comparison, found, folder, config.name or "compare")
        print(f"drawn in {folder / (config.name or 'compare')}.svg and .png")
        print(json.dumps(found))
        return
    if config.ask is not None or config.questions is not None:
        return answer(config)
    if config.api is None and (processes := starts_processes(config)):
        launch(processes)
        return
    report, folder = evaluate(config) if config.api is None else evaluate_server(config)
    if int(os.environ.get("RANK", 0)) > 0:
        return
    low, high = report["accuracy_ci95"]
    print(
        f"{report['questions']} questions in {report['seconds']} s; completions in {folder / 'samples.jsonl'}"
    )
    print(f"accuracy {report['accuracy']:.3f} (95% interval {low:.3f} to {high:.3f}); by the last number in the text {report['accuracy_last_number']:.3f}; "
          f"parsable {report['parsable']:.3f}; cut off {report['truncated']:.3f}; mean length {report['mean_length']}")  # fmt: skip
    if "m3po" in report:
        pair = report["m3po"]["against_single_paths"]
        print(f"interacting paths {pair['accuracy_b']:.3f}, single paths {pair['accuracy_a']:.3f}: difference {pair['difference']:+.3f} "
              f"(95% interval {pair['difference_ci95'][0]:+.3f} to {pair['difference_ci95'][1]:+.3f}), mean of {config.num_samples} samples")  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    run_main(main)

"""Evaluate a model on a whole split: batched decoding of single paths, graded as the rewards grade.

    python grpo_eval.py                                   grpo_finetuned_model, on the test split of its data
    python grpo_eval.py --model DIR --dataset gsm8k --limit 200 --num_samples 4
    python grpo_eval.py --ask "Ann has 12 pens and gets 5 more. How many pens does Ann have now?"

Writes eval_runs/<name>/report.html, report.json, samples.jsonl, curves.svg and .png, and prints a table.
With --json, or where it prints into a pipe or a file, the last line is the report as one JSON object. Until
the report is there the folder holds the answers so far, a line a question, and the same command with the same
--name goes on from them.
"""

from errors import end_on_interrupt

if __name__ == "__main__":
    end_on_interrupt()
    from running.eval_config import Config, refuse_at_once
    from running.parsing import parse_early

    SETTINGS = parse_early(Config, __doc__, refuse_at_once)  # before torch is imported, which takes seconds

import hashlib
import json
import os
import sys
import time
import uuid
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from accelerate.utils import broadcast_object_list, gather_object
from tqdm import tqdm

from answers.formats import answer_format_named, extract_answer
from answers.numbers import last_number, parse_number
from decoding.decoder import GroupDecoder
from decoding.rollout import Interaction
from decoding.server import complete, connect
from decoding.tokens import end_answers_on
from errors import DataError, SettingError, counted
from learning.device import choose_device
from learning.models import check_positions, fingerprint, load_model, load_tokenizer
from learning.parallel import is_first_of_node, shard, together
from learning.precision import compute_dtype
from problems.problem import EncodedProblem, Problem
from problems.prompts import (
    Prompting,
    problems_of,
    template_kwargs,
)
from problems.sources import COLUMNS, EXTRA, data_files, split_held_out
from reporting.comparison import (
    Side,
    compare_sides,
    compare_two,
    sides_of,
    write_comparison,
    write_comparison_page,
)
from reporting.evaluation import forget_answers, skipped_record, summarise, told, write_evaluation
from reporting.files import read_records, read_run_config, write_records, write_whole, yaml_text
from reporting.plots import draw_comparison, or_warn
from rewards import combined_reward, equal_by_meaning, lost_answers, lost_remarks, right_answers
from running.eval_config import Config, refuse_untrained
from running.evaluation import complete_interacting
from running.folder import lock_folder
from running.launching import (
    end_with_parent,
    folder_of_first,
    launch,
    make_accelerator,
    parse_on_all,
    refuse_other_start,
    starts_processes,
)
from running.locks import forget
from running.parsing import run_main, warn_of_idle
from running.settings import (
    free_on_resume,
    resolved,
)
from running.strangers import strangers_of
from solver import load_solver, read_questions, readable, solve, training_row

TRAINED_WITH = (
    "seed model warm_start dataset split limit eval_problems batch_size num_generations max_prompt_length "
    "max_completion_length"
).split()


MOST_TO_READ_AGAIN = 2**29  # bytes of training data, to find its questions among others: seconds


class Answer(NamedTuple):
    """One answer to a question, as it is kept and graded."""

    text: str
    tokens: int
    ended: bool  # False where the limit cut it off


def read_problems(config):
    """The problems to ask; a column of --by that none of them has is refused.

    Columns that the model's own data had are looked for in other data too, before the usual ones.
    """
    problems = problems_of(config, also=read_run_config(config.model))
    columns = {column for problem in problems for column in problem.more}
    missing = [name for name in config.by or () if name not in columns]
    if missing:
        read = {*EXTRA, *(name for names in COLUMNS.values() for name in names)}
        known = ", ".join(sorted(columns - read)) or "none"
        remedy = f"the data has no such column; beside those that are read anyway there are: {known}"
        raise SettingError("by", missing, remedy)
    return problems


def trained_on(config, questions):
    """A remark on questions that the model was trained on, as far as its data lies in files here."""
    trained = read_run_config(config.model)
    dataset, split = trained.get("dataset"), trained.get("split")
    read = {name: trained.get(name) for name in ("limit", *(f"{field}_column" for field in COLUMNS))}
    try:
        files = data_files(dataset, split) if dataset and split else []
        if not 0 < sum(file.stat().st_size for file in files) < MOST_TO_READ_AGAIN:
            return []
        with warnings.catch_warnings(action="ignore"):  # they were told in training
            settings = SimpleNamespace(dataset=dataset, split=split, seed=0, **read)
            problems = problems_of(settings, responses=True)
            seen, _ = split_held_out(problems, trained.get("eval_problems") or 0)
    except (DataError, OSError):  # it is gone, or was changed
        return []
    asked = {problem.question for problem in seen}
    count = sum(question.problem.question in asked for question in questions)
    what = f"{count} of {counted(len(questions), 'question')} are among those that the model was trained on"
    return [f"{what} ({dataset}, split {split})"] if count else []


def trained_with(model):
    """What the seeds of two methods share if they are pairs: start, order of the problems and draws.

    {"trained": settings}; empty where the model says nothing of a training.
    """
    trained = read_run_config(model)
    return {"trained": {name: trained.get(name) for name in TRAINED_WITH}} if "seed" in trained else {}


class LocalModel:
    """A model loaded here from `start`, and the questions as it is asked them; `skipped` are too long for it.

    `identity` tells whether an interrupted evaluation goes on with the same model.
    """

    def __init__(self, config, start, device):
        refuse_untrained(config, start)
        tokenizer = load_tokenizer(start, config.trust_remote_code)
        self.config, self.report = config, {"model": config.model} | trained_with(config.model)
        prompting, longest, problems = Prompting.of(config), config.max_prompt_length, read_problems(config)
        self.questions, _ = prompting.encode(tokenizer, problems, longest)
        asked = {id(question.problem) for question in self.questions}
        skipped = [problem for problem in problems if id(problem) not in asked]
        self.skipped = prompting.encoded(tokenizer, skipped)
        self.remarks = prompting.remarks(tokenizer, self.questions) + trained_on(config, self.questions)
        self.remarks += lost_remarks(config, lost_answers(config, problems), problems)
        self.precision = config.precision_on(device)
        dtype = compute_dtype(self.precision, device)
        model = load_model(start, tokenizer, dtype, device, config.trust_remote_code).eval()
        end_answers_on(prompting.eos_id(tokenizer), tokenizer, model)
        check_positions(model, self.questions, config)
        self.identity = fingerprint(model)
        think_end = answer_format_named(config.answer_format).think_end
        of_pairs = (config.m3po_temperature, config.m3po_similarity)
        interaction = Interaction(config.m3po_lambda, *of_pairs, config.m3po_control)
        compiled = config.torch_compile
        self.decoder = GroupDecoder(model, tokenizer, think_end, interaction, compiled=compiled)
        if config.m3po and interaction.control == "strangers":
            self.decoder.hear_strangers(strangers_of(config.model, config.max_completion_length))
        self.decoder.choose_path()

    def ask(self, indices, keep):
        """Answer the questions at these indices, and call keep(index, answers) as each one ends."""
        prompts = [self.questions[i].ids for i in indices]
        how = dict(seed=self.config.seed, batch_rows=self.config.batch_size, indices=indices)
        keep_answers = lambda i, made: keep(i, self._answers(i, made))  # noqa: E731
        how |= dict(keep=keep_answers, must_be_finite=True)
        self.decoder.complete(prompts, self.config.sampling, **how)

    def _answers(self, i, completions):
        """The answers to question i, what its prompt opened of them included."""
        return answers_of([self.questions[i].answered(completion) for completion in completions])

    def ask_interacting(self, indices, keep):
        """The same with the samples of a question as paths that interact, from the single paths' draws."""
        prompts, config = [self.questions[i].ids for i in indices], self.config
        how = config.sampling, config.seed, indices, config.batch_size
        for i, completions in complete_interacting(self.decoder, prompts, *how, must_be_finite=True):
            keep(i, self._answers(i, completions))


def answers_of(completions):
    return [Answer(c.text, len(c.ids), c.ended) for c in completions]


class ServerModel:
    """A server's model: it gets the messages, and its own chat template makes the prompt of them.

    With prompt_format raw it gets the prompt as text.
    """

    skipped = ()

    def __init__(self, config):
        problems = read_problems(config)
        self.remarks = lost_remarks(config, lost_answers(config, problems), problems)
        self.precision = config.precision  # which is the server's to choose
        key = os.environ.get("OPENAI_API_KEY", "")
        self.config = config
        kwargs = template_kwargs(config)
        self.server = connect(config.api, config.api_model, key, config.api_timeout, kwargs)
        self.identity = self.server.model
        self.report = {"model": self.server.model, "api": config.api}
        prompting = Prompting.of(config)
        ask, opening_of = prompting.messages, answer_format_named(config.answer_format).opening
        if config.prompt_format == "raw":
            ask = prompting.raw_prompt
        self.chats = [ask(problem) for problem in problems]
        texts = [chat if isinstance(chat, str) else json.dumps(chat) for chat in self.chats]
        pairs = zip(problems, texts, strict=True)
        self.questions = [EncodedProblem(problem, text, [], opening_of(text)) for problem, text in pairs]

    def ask(self, indices, keep):
        """As LocalModel.ask."""
        config = self.config

        def keep_answers(i, answers):
            opening = self.questions[i].opening
            keep(i, [Answer(opening + text, tokens, ended) for text, tokens, ended in answers])

        complete(
            self.server,
            [self.chats[i] for i in indices],
            config.sampling,
            config.seed,
            config.api_at_once,
            indices,
            keep_answers,
        )


def new_folder(config, model):
    """Where this evaluation goes; refused where a finished one is already."""
    parts = (Path(model).name, Path(config.dataset).name, config.split, time.strftime("%Y%m%d-%H%M%S"))
    parts += (uuid.uuid4().hex[:6],)  # two evaluations may start in the same second
    [name] = broadcast_object_list([config.name or "-".join(parts)])  # the clocks of processes differ
    folder = Path(config.output_dir) / name
    with together():
        refuse_whole(folder)
    return folder


def refuse_whole(folder):
    """Refuse a folder in which an evaluation is finished."""
    if (folder / "report.json").exists():
        problem = f"{folder} holds an evaluation already: give another --name"
        raise SettingError("name", folder.name, problem)


def make_folder(folder):
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError("output_dir", str(folder), f"cannot be made ({error.strerror})") from error


def begin(asked, config):
    """Write run_config.yaml; refused where the folder keeps answers of other settings or of another model.

    On each machine, since the folder may be another one there.
    """
    folder = asked.folder
    settings = resolved(config) | {"precision": asked.precision, "answerer": asked.identity}
    refuse_whole(folder)  # another one may have finished there since
    if any(path.stat().st_size for path in folder.glob("answers*-*.jsonl")):
        then = read_run_config(folder)
        free = free_on_resume(Config)
        differ = [
            f"{name} {then.get(name)!r} there, {value!r} here"
            for name, value in settings.items()
            if name not in free and then.get(name) != value
        ]
        if differ:
            kind = f"holds an unfinished evaluation of another kind ({', '.join(differ)})"
            raise SettingError("name", folder.name, f"{folder} {kind}: give another --name")
    if is_first_of_node():
        make_folder(folder)
        write_whole(folder / "run_config.yaml", yaml_text(settings))


def prompt_hash(question):
    return hashlib.sha256(question.prompt.encode()).hexdigest()


def kept_answers(kind, asked):
    """{index: answers} of the questions that an interrupted evaluation has answered."""
    kept = {}
    for path in asked.folder.glob(f"{kind}-*.jsonl"):
        for row in read_records(path, broken="skip"):
            index = row["question"]
            others = index >= len(asked.questions)
            if others or row["prompt_hash"] != prompt_hash(asked.questions[index]):
                remedy = f"{path} answers other questions or prompts: give another --name"
                raise SettingError("name", asked.folder.name, remedy)
            kept[index] = [Answer(*answer) for answer in row["answers"]]
    return kept


def answer_all(kind, asked, accelerator, ask):
    """For each question its answers: those in the folder, and what ask(indices, keep) gives for the rest.

    Each process appends to its file as questions end, so that a kill costs only what is being decoded.
    """
    questions, kept, new = asked.questions, {}, []
    with together():
        local = kept_answers(kind, asked) if is_first_of_node() else {}
    for answers in gather_object([local]):  # also: no process writes while another still reads
        kept |= answers
    if kept and accelerator.is_main_process:
        print(
            f"{asked.folder}: {len(kept)} of {counted(len(questions), 'question')} answered already",
            flush=True,
        )
    open_questions = [index for index in range(len(questions)) if index not in kept]
    indices = open_questions[shard(len(open_questions), accelerator)]
    hidden = None if accelerator.is_main_process else True  # None: shown in a terminal only
    with (
        open(asked.folder / f"{kind}-{accelerator.process_index}.jsonl", "a", encoding="utf-8") as file,
        tqdm(total=len(indices), unit="question", disable=hidden) as bar,
    ):
        file.write("\n" if file.tell() else "")  # ends the line that a kill may have cut off

        def keep(index, answers):
            new.append((index, answers))
            row = {"question": index, "prompt_hash": prompt_hash(questions[index]), "answers": answers}
            file.write(json.dumps(row) + "\n")
            file.flush()
            bar.update()

        ask(indices, keep)
    kept |= dict(gather_object(new))
    return [kept[index] for index in range(len(questions))]


def grade(questions, answers, answer_format, grading="number", by=None):
    """One record a question, with lm-evaluation-harness's names; answers: a list of Answers a question.

    A grade is 1.0, 0.0, or None where the grader did not decide.
    """
    texts = [answer.text for row in answers for answer in row]
    references = [q.problem.answer for q, row in zip(questions, answers, strict=True) for _ in row]
    right = iter(right_answers(texts, references, answer_format, grading))
    records = []
    for question, row in zip(questions, answers, strict=True):
        verdicts = [next(right) for _ in row]
        strict = [None if verdict is None else float(verdict) for verdict in verdicts]
        records.append(record_of(question, row, strict, answer_format, by or ()))
    return records


def asked_of(question, by):
    """What a record says of its question."""
    problem = question.problem
    return {
        "doc_id": problem.id,
        "prompt_hash": prompt_hash(question),
        "prompt": question.prompt,
        "question": problem.question,
        "target": problem.answer,
        "subject": problem.subject,
        "level": problem.level,
        "by": {name: problem.more.get(name) for name in by},
    }


def record_of(question, answers, strict, answer_format, by):
    """The record of one question; strict: the grades of its answers in the format."""
    problem, texts = question.problem, [answer.text for answer in answers]
    target, last_numbers = parse_number(problem.answer), [last_number(text) for text in texts]
    return asked_of(question, by) | {
        "skipped": False,
        "resps": texts,
        "filtered_resps": {
            "strict-match": [extract_answer(text, answer_format) for text in texts],
            "flexible-extract": last_numbers,
        },
        "exact_match": {
            "strict-match": strict,
            "flexible-extract": [is_number(number, target) for number in last_numbers],
        },
        "reward": combined_reward(None, texts, [problem.answer] * len(texts), answer_format=answer_format),
        "length": [answer.tokens for answer in answers],
        "stop_condition": ["eos" if answer.ended else "length" for answer in answers],
    }


def is_number(text, target):
    """1.0 where a text is the number `target`, 0.0 elsewhere; either may be None."""
    return float(text is not None and target is not None and parse_number(text) == target)


def evaluate(config):
    """Ask, grade, write; returns the report and its folder, which is locked meanwhile.

    Each process asks its part of the questions, and all grade; only the first writes. The report's seconds
    are those of the last start.
    """
    warn_of_idle(config, read_run_config(config.model))
    end_with_parent()
    accelerator = make_accelerator(config)
    asked = ask_for(config, accelerator.device)
    with together():
        if accelerator.is_main_process:
            make_folder(asked.folder)
    lock = lock_folder(asked.folder, accelerator, ("name", asked.folder.name))
    try:
        return evaluate_locked(config, asked, accelerator)
    finally:
        if lock is not None:
            forget(asked.folder / ".lock")
            lock.close()


def evaluate_locked(config, asked, accelerator):
    """As `evaluate`, in a folder that no other evaluation writes into."""
    with together():
        begin(asked, config)
    if accelerator.is_main_process:
        for remark in asked.remarks:
            print(f"note: {remark}", flush=True)
    started = time.perf_counter()
    answers = {"samples": answer_all("answers", asked, accelerator, asked.ask)}
    if config.m3po:
        answers["samples_m3po"] = answer_all("answers_m3po", asked, accelerator, asked.ask_interacting)
    seconds = round(time.perf_counter() - started, 2)
    format_and_grading = (config.answer_format, config.grading, config.by)
    skipped = [skipped_record(config.num_samples) | asked_of(p, config.by or ()) for p in asked.skipped]
    records = {
        name: grade(asked.questions, rows, *format_and_grading) + skipped for name, rows in answers.items()
    }
    equal = equal_by_meaning(config.grading)
    report = {
        **asked.report,
        **{name: getattr(config, name) for name in ("dataset", "split", "answer_format")},
        **summarise(records["samples"], equal=equal),
        "seconds": seconds,
    }
    if config.m3po:
        sides = Side("single paths", [records["samples"]]), Side("interacting", [records["samples_m3po"]])
        against, _ = compare_two(*sides)
        report["m3po"] = summarise(records["samples_m3po"], equal=equal) | {"against_single_paths": against}
    with together():
        if accelerator.is_main_process:
            write_evaluation(asked.folder, report, records)
    if is_first_of_node():
        forget_answers(asked.folder)
    return report, asked.folder


def ask_for(config, device):
    """The LocalModel or ServerModel of the settings, with the folder of its evaluation."""
    if config.api is not None:
        with together():
            asked = ServerModel(config)
        asked.folder = new_folder(config, asked.identity)
        return asked
    folder = new_folder(config, config.model)
    with folder_of_first(config.model, folder, "model") as start:
        with together():
            asked = LocalModel(config, start, device)
        refuse_other_start(config, asked.questions, asked.decoder.model)
    asked.folder = folder
    return asked


def answer(config):
    """`--ask` and `--questions`: print answers, or write them as JSON lines."""
    refuse_untrained(config, config.model)
    questions = [Problem(config.ask, "")] if config.ask is not None else read_questions(config.questions)
    solver = load_solver(
        config.model,
        Prompting.of(config),
        config.max_completion_length,
        config.precision_on(choose_device()),
        config.trust_remote_code,
        torch_compile=len(questions) > 100 and config.torch_compile,
    )
    if words := unreadable(solver.decoder.tokenizer, questions):
        what = f"the model's tokenizer has no token for {', '.join(words)}: it reads <unk> there"
        print(f"note: {what}", file=sys.stderr, flush=True)
    solutions = solve(questions, solver, config.temperature, config.seed)
    if config.save_jsonl is None:
        texts = [readable(solution) for solution in solutions]
        if len(texts) > 1:
            texts = [f"Question: {s.question}\n\n{text}" for s, text in zip(solutions, texts, strict=True)]
        print("\n\n".join(texts))
        return
    columns = [question_column(problem, config) for problem in questions]
    rows = [
        training_row(solution, column) | ({column: list(problem.messages)} if problem.messages else {})
        for solution, column, problem in zip(solutions, columns, questions, strict=True)
    ]
    write_records(config.save_jsonl, rows, ensure_ascii=False)
    without = sum(row["answer"] is None for row in rows)
    where = f"{counted(len(rows), 'answer')} in {config.save_jsonl}"
    print(f"{where}, {without} of them without an answer in the format")


def unreadable(tokenizer, questions, most=8):
    """The first words of the questions that the tokenizer cannot read."""
    words = dict.fromkeys(word for problem in questions for word in problem.question.split())
    ids = ((word, tokenizer(word, add_special_tokens=False)["input_ids"]) for word in words)
    unknown = tokenizer.unk_token_id
    return [] if unknown is None else [word for word, read in ids if unknown in read][:most]


def question_column(problem, config):
    """The column in which a problem is asked again from the same prompt: raw prompts stand as they are."""
    return "prompt" if problem.is_prompt or config.prompt_format == "chat" else "question"


def compare_evaluations(config):
    """`--compare`: print what changed, keep it and draw it."""
    sides = sides_of(config.compare)
    text, results = compare_sides(sides)
    folder = Path(config.output_dir)
    make_folder(folder)
    name = write_comparison(results, folder, config.name)
    print(text)
    or_warn(draw_comparison, results, folder, name)
    or_warn(write_comparison_page, sides, results, folder, name)
    print(f"every question with its answers: {folder / name}.html")
    print(f"kept in {folder / name}.json")
    print(f"drawn in {folder / name}.svg and .png")
    print_json(results, config)


def print_json(found, config):
    """The last line, as one JSON object: where it is asked for, or no person reads."""
    if config.json or not sys.stdout.isatty():
        print(json.dumps(found))


def main(given=None):
    config = parse_on_all(Config, __doc__, given)
    if config.compare:
        compare_evaluations(config)
    elif config.ask is not None or config.questions is not None:
        answer(config)
    elif config.api is None and (processes := starts_processes(config)):
        launch(processes)
    else:
        report, folder = evaluate(config)
        if int(os.environ.get("RANK", 0)) == 0:
            print("\n".join(told(report, folder)))
            print_json(report, config)


if __name__ == "__main__":
    run_main(main, SETTINGS)

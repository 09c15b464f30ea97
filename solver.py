"""A trained model as a solver: one question or many, with the prompt and the format that it was trained on.

from solver import load_solver, solve
solver = load_solver("grpo_finetuned_model")
print(solve("Ann has 12 pens and gets 5 more. How many pens does Ann have now?", solver).answer)
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

from answers.formats import answer_format_named
from decoding.decoder import GroupDecoder
from decoding.rollout import Sampling
from decoding.tokens import end_answers_on
from errors import DataError, SettingError
from learning.device import choose_device
from learning.models import check_positions, load_model, load_tokenizer
from learning.precision import compute_dtype
from problems.problem import Problem
from problems.prompts import Prompting, saved_system_prompt, system_prompt_text
from problems.sources import COLUMNS, SUFFIXES, file_rows, question_of
from reporting.files import read_run_config


@dataclass(frozen=True)
class Solution:
    """`answer` is None where the completion holds none in the format; a cut-off one is not `finished`."""

    question: str
    reasoning: str
    answer: str | None
    completion: str
    finished: bool


@dataclass(frozen=True)
class Solver:
    """A loaded model with what it was trained to read."""

    decoder: GroupDecoder
    prompting: Prompting
    max_completion_length: int


def load_solver(
    model="grpo_finetuned_model",
    prompting=None,
    max_completion_length=None,
    precision=None,
    trust_remote_code=False,
    torch_compile=False,
):
    """Load a directory or hub id.

    What is not given of prompting, max_completion_length and precision is read from the run_config.yaml
    beside the model. precision: bf16, fp16 or fp32, on CUDA; the CPU computes in float32.
    """
    trained = read_run_config(model)
    if prompting is None:
        settings = SimpleNamespace(
            answer_format=trained.get("answer_format", "xml"),
            **saved_system_prompt(trained),
            prompt_format=trained.get("prompt_format", "chat"),
            chat_template_kwargs=trained.get("chat_template_kwargs") or "{}",
        )
        settings.system_prompt = system_prompt_text(settings)
        prompting = Prompting.of(settings)
    device = choose_device()
    if precision is None:
        precision = trained.get("precision", "bf16") if device.type == "cuda" else "fp32"
    dtype = compute_dtype(precision, device)
    tokenizer = load_tokenizer(model, trust_remote_code)
    loaded = load_model(model, tokenizer, dtype, device, trust_remote_code).eval()
    end_answers_on(prompting.eos_id(tokenizer), tokenizer, loaded)
    think_end = answer_format_named(prompting.answer_format).think_end
    decoder = GroupDecoder(loaded, tokenizer, think_end, compiled=torch_compile)
    decoder.choose_path()
    return Solver(decoder, prompting, max_completion_length or trained.get("max_completion_length", 400))


def solve(question, solver, temperature=0.0, seed=0):
    """A Solution of one question (a text), or a list of them of several (a list); temperature 0 is greedy.

    Among several there may be Problems.
    """
    questions = [question] if isinstance(question, str) else list(question)
    problems = [Problem(asked, "") if isinstance(asked, str) else asked for asked in questions]
    decoder, prompting, limit = solver.decoder, solver.prompting, solver.max_completion_length
    asked = prompting.encoded(decoder.tokenizer, problems)
    check_positions(decoder.model, asked, solver)
    sampling, prompts = Sampling(limit, temperature=temperature), [p.ids for p in asked]
    answers = decoder.complete(prompts, sampling, seed, must_be_finite=True)
    solutions = []
    for p, [completion] in zip(asked, answers, strict=True):
        text = p.answered(completion).text
        solutions.append(solution_of(p.problem.question, text, completion.ended, prompting.answer_format))
    return solutions[0] if isinstance(question, str) else solutions


def solution_of(question, completion, finished, answer_format):
    """A completion told apart into reasoning, without the format's tags, and answer."""
    chosen = answer_format_named(answer_format)
    reasoning = completion.partition(chosen.think_end)[0]
    for tag in chosen.tags:
        reasoning = reasoning.replace(tag, "")
    return Solution(question, reasoning.strip(), chosen.extract(completion), completion, finished)


def read_questions(path):
    """The questions of a text file, one a line, or of a data file's rows, as Problems."""
    try:
        if Path(path).suffix in SUFFIXES:
            problems = [_asked(where, row) for where, row in file_rows(Path(path))]
        else:
            lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # not at U+2028 and the like
            problems = [Problem(line.strip(), "") for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("questions", path, f"cannot be read ({type(error).__name__})") from error
    if not problems:
        raise DataError(f"{path}: holds no question")
    return problems


def _asked(where, row):
    """The question in a row of data, as a Problem."""
    names = COLUMNS["question"]
    column = next((name for name in names if isinstance(row, dict) and row.get(name)), None)
    question, asked, _ = question_of(where, row, column) if column else ("", {}, "")
    if not question.strip():
        there = f" (columns: {', '.join(map(str, row))})" if isinstance(row, dict) else ""
        raise DataError(f"{where}: has no question in a column {' or '.join(names)}{there}")
    return Problem(question, "", id=where, **asked)


def training_row(solution, column="prompt"):
    """A solution as sft_train.py reads it, the question in a column of this name."""
    row = asdict(solution)
    return {column: row.pop("question"), "response": row.pop("completion"), **row}


def readable(solution):
    """A solution as somebody would want to read it."""
    answer = solution.answer
    if answer is None:
        answer = "none in the format" if solution.finished else "none (cut off by max_completion_length)"
    return f"{solution.reasoning}\n\nAnswer: {answer}"

"""A trained model as a solver: one question or many, with the prompt and the format that it was trained on.

from solver import load_solver, solve
solver = load_solver("grpo_finetuned_model")
print(solve("A pen costs 3 dollars. How much do 14 pens cost?", solver).answer)
"""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from answers.formats import ANSWER_FORMATS
from decoding.decoder import GroupDecoder
from errors import SettingError
from learning.models import check_positions, load_model, load_tokenizer
from problems.prompts import Prompting
from reporting.files import read_yaml


@dataclass(frozen=True)
class Solution:
    """`answer` is None where the completion holds none; `finished` is False where the limit cut it off."""

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
    bf16=True,
    trust_remote_code=False,
    torch_compile=False,
):
    """Load a directory or hub id; what is left out is read from its run_config.yaml, as grpo_eval.py does."""
    file = Path(model) / "run_config.yaml"
    trained = read_yaml(file) if file.exists() else {}
    prompting = prompting or _trained_prompting(trained)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(model, trust_remote_code)
    dtype = torch.bfloat16 if bf16 and device.type == "cuda" else torch.float32
    decoder = GroupDecoder(
        load_model(model, tokenizer, dtype, device, trust_remote_code).eval(),
        tokenizer,
        compiled=torch_compile,
    )
    return Solver(decoder, prompting, max_completion_length or trained.get("max_completion_length", 400))


def _trained_prompting(trained):
    """What a run's settings say of prompts, with the defaults of training where they say nothing."""
    name = trained.get("answer_format", "xml")
    if name not in ANSWER_FORMATS:
        raise SettingError("answer_format", name, "must be one of " + ", ".join(ANSWER_FORMATS))
    kwargs = trained.get("chat_template_kwargs") or "{}"
    file = trained.get("system_prompt_file")
    return Prompting.of(
        SimpleNamespace(answer_format=name, system_prompt_file=file, chat_template_kwargs=kwargs)
    )


def solve(question, solver, temperature=0.0, seed=0):
    """Answer one question (a text) or several (a list) with a Solution or a list; temperature 0 is greedy."""
    questions = [question] if isinstance(question, str) else list(question)
    tokenizer, chosen = solver.decoder.tokenizer, ANSWER_FORMATS[solver.prompting.answer_format]
    prompts = [solver.prompting.build(tokenizer, q) for q in questions]
    ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    check_positions(solver.decoder.model, [SimpleNamespace(ids=row) for row in ids], solver)
    answers = solver.decoder.complete(ids, solver.max_completion_length, temperature=temperature, seed=seed)
    solutions = []
    for q, [(row, ended)] in zip(questions, answers, strict=True):
        text = solver.decoder.text(row, ended)
        thought = text.partition(chosen.think_end)[0]
        for tag in chosen.tags:
            thought = thought.replace(tag, "")
        solutions.append(Solution(q, thought.strip(), chosen.extract(text), text, ended))
    return solutions[0] if isinstance(question, str) else solutions


def readable(solution):
    """A solution as somebody would want to read it."""
    answer = (
        solution.answer
        if solution.answer is not None
        else "none" + ("" if solution.finished else " (cut off by max_completion_length)")
    )
    return f"{solution.reasoning}\n\nAnswer: {answer}"

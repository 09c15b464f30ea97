"""Prompts: what the chat template makes of a question, as text and as ids."""

import json
import math
import warnings
from pathlib import Path

from jinja2 import TemplateError

from answers.formats import ANSWER_FORMATS
from errors import DataError, SettingError
from problems.problem import EncodedProblem
from problems.sources import load_problems, split_held_out


def template_kwargs(config):
    """chat_template_kwargs as a dict."""
    try:
        value = json.loads(config.chat_template_kwargs)
    except json.JSONDecodeError as error:
        raise SettingError(
            "chat_template_kwargs", config.chat_template_kwargs, f"is not JSON ({error.msg})"
        ) from error
    if not isinstance(value, dict):
        raise SettingError("chat_template_kwargs", config.chat_template_kwargs, "must be a JSON object")
    if {"tokenize", "add_generation_prompt", "conversation", "messages"} & set(value):
        remedy = "must not hold tokenize, add_generation_prompt, conversation or messages, which are set here"
        raise SettingError("chat_template_kwargs", config.chat_template_kwargs, remedy)
    return value


def system_prompt(config):
    """The system prompt: the format's, or the user's file, which must name the delimiter that the format waits for."""
    chosen = ANSWER_FORMATS[config.answer_format]
    if config.system_prompt_file is None:
        return chosen.system_prompt
    try:
        text = Path(config.system_prompt_file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        raise SettingError(
            "system_prompt_file", config.system_prompt_file, f"cannot be read ({type(error).__name__})"
        ) from error
    if chosen.think_end not in text:
        raise SettingError(
            "system_prompt_file",
            config.system_prompt_file,
            f"must name {chosen.think_end!r}, which answer_format={chosen.name} waits for",
        )
    return text


PLAIN_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}\n\n{% elif m['role'] == 'user' %}Question: {{ m['content'] }}\n"
    "{% else %}Answer: {{ m['content'] }}{{ eos_token }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}Answer: {% endif %}"
)


def build_prompt(tokenizer, question, system_prompt, chat_template_kwargs=None, response=None):
    """The text that the model's chat template makes of a question, ready for an answer; with `response`, of the whole dialogue.

    A tokenizer without a chat template gets PLAIN_TEMPLATE, with a warning. A template that refuses a system message gets its text before
    the question.
    """
    if tokenizer.chat_template is None:
        warnings.warn(
            f"{tokenizer.name_or_path or 'the tokenizer'} has no chat template: using a plain one (Question: ... Answer: ...)",
            stacklevel=2,
        )
        tokenizer.chat_template = PLAIN_TEMPLATE
    answer = [] if response is None else [{"role": "assistant", "content": response}]

    def render(messages):
        return tokenizer.apply_chat_template(
            messages + answer,
            tokenize=False,
            add_generation_prompt=response is None,
            **(chat_template_kwargs or {}),
        )

    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    try:
        return render([*system, {"role": "user", "content": question}])
    except (TemplateError, TypeError, ValueError):
        try:
            return render(
                [{"role": "user", "content": f"{system_prompt}\n\n{question}" if system_prompt else question}]
            )
        except (TemplateError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise DataError(
                f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} cannot be filled in: {reason}"
            ) from error


def chat_eos_id(tokenizer, chat_template_kwargs=None):
    """The id that the chat template writes after an answer (what supervised training must teach); the tokenizer's EOS if it writes none."""
    mark = "The answer is 42"
    after = build_prompt(tokenizer, "What is it?", "", chat_template_kwargs, response=mark).rpartition(mark)[
        2
    ]
    special = {
        *tokenizer.all_special_ids,
        *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special),
    }  # Gemma's <end_of_turn>
    return next(
        (i for i in tokenizer(after, add_special_tokens=False)["input_ids"] if i in special),
        tokenizer.eos_token_id,
    )


def encode_prompts(problems, tokenizer, system_prompt, max_prompt_length, chat_template_kwargs=None):
    """The problems with their prompts, and how many were left out because theirs is longer than max_prompt_length tokens (none is ever cut).

    Templates write their own BOS, so none is added. Raises DataError where every prompt is too long, or one has no tokens.
    """
    kept, shortest = [], math.inf
    for problem in problems:
        prompt = build_prompt(tokenizer, problem.question, system_prompt, chat_template_kwargs)
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if not ids:
            raise DataError(
                f"the tokenizer makes no token of the prompt {prompt[:60]!r}: it does not belong to this model"
            )
        shortest = min(shortest, len(ids))
        if len(ids) <= max_prompt_length:
            kept.append(EncodedProblem(problem, prompt, ids))
    if (
        kept
        and all(p.prompt == kept[0].prompt for p in kept)
        and any(p.problem.question != kept[0].problem.question for p in kept)
    ):
        raise DataError("the chat template leaves the question out: all prompts are the same")
    if not kept:
        raise DataError(
            f"every prompt is longer than max_prompt_length={max_prompt_length}: the shortest has {shortest} tokens; raise it"
        )
    return kept, len(problems) - len(kept)


def problems_of(config, **how):
    """The problems that the settings of a training or an evaluation name."""
    columns = dict(
        question_column=config.question_column,
        answer_column=config.answer_column,
        solution_column=config.solution_column,
    )
    return load_problems(config.dataset, config.split, limit=config.limit, seed=config.seed, **columns, **how)


def prepare_problems(config, tokenizer, responses=False):
    """Training and held-out problems with their prompts, and how many prompts were too long to use; problems without an answer are not held out."""
    problems = problems_of(config, responses=responses)
    train, held_out = split_held_out(problems, config.eval_problems)  # a warm start leaves out the same ones
    encode = dict(
        system_prompt=system_prompt(config),
        max_prompt_length=config.max_prompt_length,
        chat_template_kwargs=template_kwargs(config),
    )
    train, skipped = encode_prompts(train, tokenizer, **encode)
    held_out, skipped_too = encode_prompts(held_out, tokenizer, **encode) if held_out else ([], 0)
    return train, held_out, skipped + skipped_too

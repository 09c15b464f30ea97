"""Prompts: what the chat template makes of a question, as text and as ids."""

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import TemplateError

from answers.formats import ANSWER_FORMATS
from errors import DataError, SettingError, one_line
from problems.problem import EncodedProblem
from problems.sources import load_problems, split_held_out

PLAIN_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] }}\n\n"
    "{% elif m['role'] == 'user' %}Question: {{ m['content'] }}\n"
    "{% else %}Answer: {{ m['content'] }}{{ eos_token }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Answer: {% endif %}"
)
SET_HERE = {"tokenize", "add_generation_prompt", "conversation", "messages"}


def template_kwargs(config):
    """chat_template_kwargs as a dict."""
    text = config.chat_template_kwargs
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingError("chat_template_kwargs", text, f"is not JSON ({error.msg})") from error
    if not isinstance(value, dict):
        raise SettingError("chat_template_kwargs", text, "must be a JSON object")
    if SET_HERE & set(value):
        remedy = "must not hold tokenize, add_generation_prompt, conversation or messages, which are set here"
        raise SettingError("chat_template_kwargs", text, remedy)
    return value


def system_prompt(config):
    """The format's system prompt, or the user's file, which must name the text that ends the reasoning."""
    chosen = ANSWER_FORMATS[config.answer_format]
    file = config.system_prompt_file
    if file is None:
        return chosen.system_prompt
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        raise SettingError("system_prompt_file", file, f"cannot be read ({type(error).__name__})") from error
    if chosen.think_end not in text:
        remedy = f"must name {chosen.think_end!r}, which answer_format={chosen.name} waits for"
        raise SettingError("system_prompt_file", file, remedy)
    return text


@dataclass(frozen=True)
class Prompting:
    """What turns a question into a prompt, beside the tokenizer with its chat template."""

    answer_format: str
    system_prompt: str
    chat_template_kwargs: dict = field(default_factory=dict)

    @classmethod
    def of(cls, config):
        """The one that the settings name; raises SettingError where they cannot be used."""
        if config.answer_format not in ANSWER_FORMATS:
            known = ", ".join(ANSWER_FORMATS)
            raise SettingError("answer_format", config.answer_format, f"must be one of {known}")
        kwargs = template_kwargs(config)
        return cls(config.answer_format, system_prompt(config), kwargs)

    def build(self, tokenizer, question, response=None):
        """The text that the chat template makes of a question, ready for an answer; with `response`, of both.

        A tokenizer without a chat template gets PLAIN_TEMPLATE, with a warning. Where the template refuses a
        system message, its text is put before the question.
        """
        name = tokenizer.name_or_path or "the tokenizer"
        if tokenizer.chat_template is None:
            message = f"{name} has no chat template: using a plain one (Question: ... Answer: ...)"
            warnings.warn(message, stacklevel=2)
            tokenizer.chat_template = PLAIN_TEMPLATE
        user = {"role": "user", "content": question}
        ways = [[user]]
        if self.system_prompt:
            system = {"role": "system", "content": self.system_prompt}
            merged = {"role": "user", "content": f"{self.system_prompt}\n\n{question}"}
            ways = [[system, user], [merged]]
        answer = [] if response is None else [{"role": "assistant", "content": response}]
        for messages in ways:
            try:
                return tokenizer.apply_chat_template(
                    messages + answer,
                    tokenize=False,
                    add_generation_prompt=response is None,
                    **self.chat_template_kwargs,
                )
            except (TemplateError, TypeError, ValueError) as error:
                refusal = error
        raise DataError(f"the chat template of {name} cannot be filled in: {one_line(refusal)}") from refusal

    def encode(self, tokenizer, problems, max_prompt_length):
        """The problems with their prompts, and how many were left out because theirs has too many tokens.

        No prompt is ever cut. Templates write their own BOS, so none is added. Raises DataError where every
        prompt is too long, one has no tokens, or the template leaves the question out.
        """
        encoded = [self._encoded(tokenizer, problem) for problem in problems]
        kept = [p for p in encoded if len(p.ids) <= max_prompt_length]
        if not kept:
            shortest = min((len(p.ids) for p in encoded), default=0)
            raise DataError(
                f"every prompt is longer than max_prompt_length={max_prompt_length}: "
                f"the shortest has {shortest} tokens; raise it"
            )
        questions = {p.problem.question for p in kept}
        if len(questions) > 1 and len({p.prompt for p in kept}) == 1:
            raise DataError("the chat template leaves the question out: all prompts are the same")
        return kept, len(encoded) - len(kept)

    def _encoded(self, tokenizer, problem):
        prompt = self.build(tokenizer, problem.question)
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if not ids:
            raise DataError(
                f"the tokenizer makes no token of the prompt {prompt[:60]!r}: "
                f"it does not belong to this model"
            )
        return EncodedProblem(problem, prompt, ids)

    def eos_id(self, tokenizer):
        """The id that the chat template writes after an answer, which supervised training must teach.

        The tokenizer's EOS where the template writes none.
        """
        mark = "The answer is 42"
        after = self.build(tokenizer, "What is it?", response=mark).rpartition(mark)[2]
        special = set(tokenizer.all_special_ids)
        added = tokenizer.added_tokens_decoder.items()
        special |= {i for i, token in added if token.special}  # Gemma's <end_of_turn>
        ids = tokenizer(after, add_special_tokens=False)["input_ids"]
        return next((i for i in ids if i in special), tokenizer.eos_token_id)


def problems_of(config, responses=False):
    """The problems that the settings of a training or an evaluation name."""
    columns = dict(
        question=config.question_column, answer=config.answer_column, solution=config.solution_column
    )
    return load_problems(
        config.dataset, config.split, columns, limit=config.limit, seed=config.seed, responses=responses
    )


def prepare_problems(config, tokenizer, responses=False, problems=None):
    """Training and held-out problems with their prompts, and how many prompts were too long to use.

    problems: instead of those that the settings name. A warm start holds out the same ones as its GRPO run.
    """
    prompting = Prompting.of(config)
    problems = problems_of(config, responses) if problems is None else problems
    train, held_out = split_held_out(problems, config.eval_problems)
    train, skipped = prompting.encode(tokenizer, train, config.max_prompt_length)
    if held_out:
        held_out, more_skipped = prompting.encode(tokenizer, held_out, config.max_prompt_length)
        skipped += more_skipped
    return train, held_out, skipped

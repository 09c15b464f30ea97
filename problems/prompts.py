"""Prompts: what the chat template makes of a question, as text and as ids."""

import json
import re
import unicodedata
import warnings
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import TemplateError

from answers.formats import answer_format_named
from errors import DataError, SettingError, one_line
from problems.problem import EncodedProblem, Problem
from problems.sources import load_problems, split_held_out

PLAIN_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] }}\n\n"
    "{% elif m['role'] == 'user' %}Question: {{ m['content'] }}\n"
    "{% else %}Answer: {{ m['content'] }}{{ eos_token }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Answer: {% endif %}"
)
PROMPT_FORMATS = ("chat", "raw")
SYSTEM_ROLES = ("system", "developer")
QUESTION_PLACE = "{question}"
AT_ONCE = 1000  # texts that are tokenised at once
REMARKED = 50  # so many prompts are looked at for what the template changes
MARK = "31415926"  # an answer that no template writes in another way
# Templates that ask for the date are told this one, in every run: prompts with today's date would differ from
# yesterday's. Llama 3's own template falls back to it.
FIXED_DAY = datetime(2024, 7, 26, tzinfo=UTC)
_DIRECTIVES = [f"%{flag}{letter}" for letter in "aAbBcdDeFHIjmMpSTuUwWxXyYZ" for flag in ("", "-")]
_WRITTEN = {directive: FIXED_DAY.strftime(directive) for directive in _DIRECTIVES}
FIXED_CLOCK = (
    "{%- macro strftime_now(format) -%}{%- set made = namespace(text=format) -%}"
    f"{{%- for directive, text in {_WRITTEN}.items() -%}}"
    "{%- set made.text = made.text.replace(directive, text) -%}"
    "{%- endfor -%}{{ made.text }}{%- endmacro %}\n"
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
    """The user's text, else the format's own; the user's must name what ends the reasoning."""
    chosen, text = answer_format_named(config.answer_format), config.system_prompt
    if text is None:
        return (config.prompt_format == "raw" and chosen.raw_prompt) or chosen.system_prompt
    if chosen.think_end not in text:
        remedy = f"must name {chosen.think_end!r}, which answer_format={chosen.name} waits for"
        name = "system_prompt" if config.system_prompt_file is None else "system_prompt_file"
        raise SettingError(name, getattr(config, name), remedy)
    return text


def saved_system_prompt(trained):
    """system_prompt and system_prompt_file of a run_config.yaml; a file only where no text is saved."""
    text = trained.get("system_prompt")
    file = trained.get("system_prompt_file") if text is None else None
    return {"system_prompt": text, "system_prompt_file": file}


def system_prompt_text(config):
    """The text of system_prompt, or that of system_prompt_file; None where neither is given.

    Read once, when a Config is made: the file may change while a run goes on.
    """
    text, file = config.system_prompt, config.system_prompt_file
    if file is None:
        return text
    try:
        read = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        if text is not None:  # read before, when the file was there
            return text
        raise SettingError("system_prompt_file", file, f"cannot be read ({type(error).__name__})") from error
    if text is not None and text != read:
        raise SettingError("system_prompt_file", file, "says something else than system_prompt: give one")
    return read


@dataclass(frozen=True)
class Prompting:
    """What turns a question into a prompt, beside the tokenizer with its chat template."""

    answer_format: str
    system_prompt: str
    chat_template_kwargs: dict = field(default_factory=dict)
    prompt_format: str = "chat"

    @classmethod
    def of(cls, config):
        """The one that the settings name; raises SettingError where they cannot be used."""
        try:
            answer_format_named(config.answer_format)
        except ValueError as error:
            problem = str(error).removeprefix(f"answer_format {config.answer_format!r} ")
            raise SettingError("answer_format", config.answer_format, problem) from error
        if config.prompt_format not in PROMPT_FORMATS:
            known = ", ".join(PROMPT_FORMATS)
            raise SettingError("prompt_format", config.prompt_format, f"must be one of {known}")
        kwargs = template_kwargs(config)
        return cls(config.answer_format, system_prompt(config), kwargs, config.prompt_format)

    def messages(self, problem):
        """The chat that asks a problem: the data's own, or the question; the system prompt goes before it."""
        asked = list(problem.messages) or [{"role": "user", "content": problem.question}]
        if self.system_prompt and asked[0]["role"] not in SYSTEM_ROLES:
            asked = [{"role": "system", "content": self.system_prompt}, *asked]
        return asked

    def build(self, tokenizer, asked, response=None):
        """The prompt of a question or Problem as text, ready for an answer; with `response`, of both.

        In a chat it is what the chat template makes of it. Where the template refuses a system message, its
        text is put before the question.
        """
        problem = Problem(asked, "") if isinstance(asked, str) else asked
        if self.prompt_format == "raw":
            return self.raw_prompt(problem) + (response or "")
        name = tokenizer.name_or_path or "the tokenizer"
        messages = self.messages(problem)
        ways = [messages]
        if messages[0]["role"] in SYSTEM_ROLES and len(messages) > 1:
            system, first, *others = messages
            ways.append([{**first, "content": f"{system['content']}\n\n{first['content']}"}, *others])
        answer = [] if response is None else [{"role": "assistant", "content": response}]
        how = dict(tokenize=False, add_generation_prompt=response is None)
        if response is None and messages[-1]["role"] == "assistant":  # the data begins the answer
            how = dict(tokenize=False, add_generation_prompt=False, continue_final_message=True)
        for messages in ways:
            try:
                settle_template(tokenizer, self.chat_template_kwargs)
                kwargs = {k: v for k, v in self.chat_template_kwargs.items() if k != "chat_template"}
                return tokenizer.apply_chat_template(messages + answer, **how, **kwargs)
            except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
                refusal = error
        raise DataError(f"the chat template of {name} cannot be filled in: {one_line(refusal)}") from refusal

    def raw_prompt(self, problem):
        """The prompt without a chat template: a `prompt` column as it stands, else the system prompt with the
        question in the place of its {question}, or behind it.
        """
        if problem.messages:
            what = f"problem {problem.id} asks by chat messages"
            raise DataError(f"{what}, for which prompt_format raw has no template: say prompt_format chat")
        if problem.is_prompt:
            return problem.question
        return self.raw_template.replace(QUESTION_PLACE, problem.question)

    @property
    def raw_template(self):
        """The system prompt with a place for the question, which is behind it where it names none."""
        if QUESTION_PLACE in self.system_prompt:
            return self.system_prompt
        before = f"{self.system_prompt}\n\n" if self.system_prompt else ""
        return f"{before}Question: {QUESTION_PLACE}\nAnswer: "

    def ids(self, tokenizer, prompts):
        """The ids of each prompt. Chat templates write their own BOS; a raw prompt gets the tokenizer's."""
        before = ids_before(tokenizer) if self.prompt_format == "raw" else []
        ids = ids_of(tokenizer, prompts)
        return [own if own[: len(before)] == before else before + own for own in ids]

    def encode(self, tokenizer, problems, max_prompt_length):
        """The problems with their prompts, and how many were left out because theirs has too many tokens.

        No prompt is ever cut. Raises DataError where every prompt is too long, one has no tokens, or the
        template leaves the question out.
        """
        encoded = self.encoded(tokenizer, problems)
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
        if self.build(tokenizer, kept[0].problem) != kept[0].prompt:
            raise DataError("the chat template gives another prompt each time: no run could be repeated")
        return kept, len(encoded) - len(kept)

    def encoded(self, tokenizer, problems):
        """The problems with their prompts."""
        prompts = [self.build(tokenizer, problem) for problem in problems]
        encoded = []
        for problem, prompt, ids in zip(problems, prompts, self.ids(tokenizer, prompts), strict=True):
            if not ids:
                raise DataError(
                    f"the tokenizer makes no token of the prompt {prompt[:60]!r}: "
                    f"it does not belong to this model"
                )
            encoded.append(EncodedProblem(problem, prompt, ids, self.opening(problem, prompt)))
        return encoded

    def opening(self, problem, prompt):
        """The end of a prompt that belongs to the answer: what the data begins of it, or a tag it opens."""
        chosen, last = answer_format_named(self.answer_format), (problem.messages or [{"role": ""}])[-1]
        begun = last["content"] if last["role"] == "assistant" else ""
        if any(tag in begun for tag in chosen.tags) and begun in prompt:
            return prompt[prompt.rindex(begun) :]
        return chosen.opening(prompt)

    def eos_id(self, tokenizer):
        """The id that the chat template writes after an answer: training teaches it, decoding waits for it.

        The tokenizer's EOS where the template writes none, and for raw prompts.
        """
        if self.prompt_format == "raw":
            return tokenizer.eos_token_id
        text = self.build(tokenizer, "What is it?", response=MARK)
        after = text.rpartition(MARK)[2] if MARK in text else ""
        ends = set(tokenizer.all_special_ids)
        added = tokenizer.added_tokens_decoder.items()
        ends |= {i for i, token in added if token.content.strip()}  # Gemma's <end_of_turn>; not its "\n\n"
        ids = tokenizer(after, add_special_tokens=False)["input_ids"]
        return next((i for i in ids if i in ends), tokenizer.eos_token_id)

    def remarks(self, tokenizer, encoded):
        """Sentences on what somebody should know of these prompts before paying for a run; none is usual."""
        prompt, ids, opening = encoded[0].prompt, encoded[0].ids, encoded[0].opening
        said = self._unread(tokenizer, encoded)
        if self.prompt_format == "chat":
            said += [f"the chat template {fault}" for fault in self._faults(encoded[:REMARKED])]
            said += self._header_left_out(tokenizer, encoded[0])
        answer_format = answer_format_named(self.answer_format)
        think_end = answer_format.think_end
        said += _without_tokens(tokenizer, encoded, answer_format) or _not_kept(
            tokenizer, encoded[:REMARKED], answer_format
        )
        if think_end in opening:
            said.append(f"the prompt ends in {think_end!r}: no path of M3PO will be seen to end its thinking")
        closed = (tag for tag in answer_format.tags if tag.startswith("</"))
        if tag := next((tag for tag in closed if prompt.rstrip().endswith(tag)), None):
            said.append(f"the prompt ends in {tag} already, which the answer format writes once more")
        if prompt.rstrip().endswith("<think>") and not opening:
            said.append("the prompt ends inside a <think> block, which the answer format does not expect")
        before = ids_before(tokenizer)
        if before and ids[: len(before)] != before:
            text = tokenizer.decode(before)
            said.append(f"the tokenizer puts {text!r} in front of a text, and the chat template does not")
        return said

    def _unread(self, tokenizer, encoded):
        """What is set without effect: kwargs that the template lacks, a system prompt beside the data's."""
        said, template = [], ""
        if self.chat_template_kwargs and self.prompt_format == "chat":
            template = tokenizer.get_chat_template(self.chat_template_kwargs.get("chat_template"))
        for name, value in self.chat_template_kwargs.items() if template else ():
            text = template.replace(_default(name, value), "")
            if name != "chat_template" and not re.search(rf"\b{re.escape(name)}\b", text):
                said.append(f"the chat template does not read {name} of chat_template_kwargs")
        chosen, problems = answer_format_named(self.answer_format), [p.problem for p in encoded]
        if self.prompt_format == "raw":
            bring = sum(problem.is_prompt for problem in problems)
        else:
            bring = sum(bool(p.messages) and p.messages[0]["role"] in SYSTEM_ROLES for p in problems)
        if bring and self.system_prompt not in (chosen.system_prompt, chosen.raw_prompt):
            what = f"{bring} of {len(problems)} problems bring their own"
            said.append(f"the system prompt that was given is not read where the data has one: {what}")
        return said

    def _header_left_out(self, tokenizer, encoded):
        """What stands before an answer, where the template does not end a prompt with it."""
        if self.messages(encoded.problem)[-1]["role"] == "assistant":
            return []
        text = self.build(tokenizer, encoded.problem, response=MARK)
        header = text.removeprefix(encoded.prompt).partition(MARK)[0].strip()
        if MARK not in text or not text.startswith(encoded.prompt) or not header or "think" in header:
            return []
        what = f"writes {header!r} before an answer, and does not end a prompt with it"
        return [f"the chat template {what}: the model must write it itself"]

    def _faults(self, encoded):
        """What the template does to the messages, said once each."""
        faults = {}
        for p in encoded:
            for message in self.messages(p.problem):
                text, role = message["content"].strip(), message["role"]
                if text in p.prompt:
                    continue
                what = "system prompt" if role in SYSTEM_ROLES else f"message of the {role}"
                if _letters(text) in _letters(p.prompt):
                    faults[f"changes the {what}: the model reads it in other letters or spaces"] = None
                elif role in SYSTEM_ROLES:
                    faults[
                        f"leaves the {what} out: training alone teaches the format, as it does for `tiny`"
                    ] = None
                else:
                    faults[f"changes the {what}, or leaves parts of it out"] = None
        return list(faults)


def _letters(text):
    """A text without what upper case and spaces change."""
    return "".join(text.casefold().split())


def ids_of(tokenizer, texts):
    """The ids of each text. The tokenizer gets many at once, for its threads, but not all: until it is
    through it keeps much more of a text than its ids.
    """
    ids = []
    for i in range(0, len(texts), AT_ONCE):
        ids += tokenizer(texts[i : i + AT_ONCE], add_special_tokens=False)["input_ids"]
    return ids


def ids_before(tokenizer):
    """The ids, such as BOS, that the tokenizer puts before a text by itself."""
    whole = tokenizer("1")["input_ids"]
    alone = tokenizer("1", add_special_tokens=False)["input_ids"]
    starts = (n for n in range(len(whole)) if alone and whole[n : n + len(alone)] == alone)
    return whole[: next(starts, 0)]


def settle_template(tokenizer, kwargs):
    """Make the tokenizer's chat template, in place, one that gives the same prompts anywhere and on any day.

    One that asks for the date gets a fixed one; the settings' chat_template_kwargs become its defaults. It is
    saved so with the model. A tokenizer without a template gets PLAIN_TEMPLATE, with a warning.
    """
    if tokenizer.chat_template is None and "chat_template" not in kwargs:
        name = tokenizer.name_or_path or "the tokenizer"
        message = f"{name} has no chat template: using a plain one (Question: ... Answer: ...)"
        warnings.warn(message, stacklevel=2)
        before = ids_before(tokenizer)
        tokenizer.chat_template = (tokenizer.decode(before) if before else "") + PLAIN_TEMPLATE
    template = tokenizer.get_chat_template(kwargs.get("chat_template"))
    settled = template
    if "strftime_now" in template and FIXED_CLOCK not in template:
        settled = FIXED_CLOCK + settled
    others = {k: v for k, v in kwargs.items() if k != "chat_template" and k.isidentifier()}
    defaults = "".join(_default(*pair) for pair in others.items())
    if defaults and defaults not in settled:
        settled = f"{defaults}\n{settled}"
    if settled != template or "chat_template" in kwargs:
        named = tokenizer.chat_template
        tokenizer.chat_template = {**named, "default": settled} if isinstance(named, dict) else settled


def _default(name, value):
    """Jinja that sets a variable where it is not given."""
    return f"{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}{{%- endif %}}"


def columns_of(config):
    """The columns that the settings name, None where they name none."""
    return {name: getattr(config, f"{name}_column") for name in ("question", "answer", "solution")}


def problems_of(config, responses=False, also=None):
    """The problems that the settings of a training or an evaluation name.

    also: the settings of another run, whose columns are read where the data has them and none are named here.
    """
    columns = columns_of(config)
    also = {field: (also or {}).get(f"{field}_column") for field in columns}
    how = dict(limit=config.limit, seed=config.seed, responses=responses)
    return load_problems(config.dataset, config.split, columns, also=also, **how)


def prepare_problems(config, tokenizer, responses=False, problems=None):
    """Training and held-out problems with their prompts, and how many prompts were too long to use.

    problems: instead of those that the settings name. A warm start holds out the same ones as its GRPO run.
    """
    prompting = Prompting.of(config)
    problems = problems_of(config, responses) if problems is None else problems
    train, held_out = split_held_out(problems, config.eval_problems)
    if config.eval_every and not held_out:
        remedy = "name its column with --answer_column, or set eval_every 0"
        raise DataError(f"none of {len(problems)} problems has an answer to evaluate by: {remedy}")
    train, skipped = prompting.encode(tokenizer, train, config.max_prompt_length)
    if held_out:
        held_out, more_skipped = prompting.encode(tokenizer, held_out, config.max_prompt_length)
        skipped += more_skipped
    return train, held_out, skipped


def responses(problems, tokenizer, config):
    """Pairs of a problem and the ids to learn, which go on from the prompt and end on the EOS of the chat
    template.

    Longer responses than max_completion_length are left out.
    """
    answer_format, eos = answer_format_named(config.answer_format), Prompting.of(config).eos_id(tokenizer)
    if eos is None:
        remedy = "the tokenizer names no EOS token, and the chat template writes none: set eos_token"
        raise SettingError("model", config.model, f"{remedy} in tokenizer_config.json")
    texts = [
        answer_format.after_opening(
            p.problem.response or _worked_answer(p.problem, answer_format, config), p.opening
        )
        for p in problems
    ]
    kept = []
    for p, ids in zip(problems, ids_of(tokenizer, texts), strict=True):
        ids += [eos] if ids[-1:] != [eos] else []  # some data ends its responses on it already
        if len(ids) <= config.max_completion_length:
            kept.append((p, ids))
    if not kept:
        limit = f"max_completion_length={config.max_completion_length} tokens"
        raise DataError(f"{config.dataset}: no response fits into {limit}; raise it")
    return kept[: config.unique_train_examples]


def _worked_answer(problem, answer_format, config):
    """The worked solution in the answer format; unchanged where it is in that format already."""
    reasoning, marker, answer = problem.solution.rpartition("####")
    if not marker:
        what = f"problem {problem.id} has no worked solution ending in `#### answer`"
        remedy = "add a `solution` column, or leave the warm start out with --warm_start none"
        raise DataError(f"{config.dataset}: {what}, which supervised training needs: {remedy}")
    reasoning, answer = reasoning.strip(), answer.strip()
    if answer_format.extract(reasoning) == answer:  # as MATH's solutions have it in boxed
        return reasoning
    return answer_format.write(reasoning, answer)


def _not_kept(tokenizer, encoded, answer_format):
    """What a tokenizer without a token for the unknown leaves out or changes, as by NFKC; not spaces."""

    def read(ids):
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text, _in_one_form(text)

    said, parts = [], dict.fromkeys((answer_format.think_end, *answer_format.tags))
    kept = lambda part: _in_one_form(part) in read(ids_of(tokenizer, [part])[0])[1]  # noqa: E731
    if missing := [part for part in parts if not kept(part)]:
        what = f"the tokenizer does not keep {', '.join(map(repr, missing))}"
        said.append(f"{what}: no completion can have the answer format {answer_format.name!r}")
    pairs = [(p.prompt, *read(p.ids)) for p in encoded]
    changed = [(_in_one_form(prompt), form) for prompt, _, form in pairs if _in_one_form(prompt) not in form]
    if changed:
        prompt, form = changed[0]
        at = next((i for i, (a, b) in enumerate(zip(prompt, form, strict=False)) if a != b), 0)
        shown = (text[max(0, at - 5) : at + 15] for text in (prompt, form))
        words = "{!r} becomes {!r}".format(*shown)
        said.append(f"the tokenizer changes {len(changed)} of {len(encoded)} prompts: {words}, spaces apart")
    if any("\n" in prompt and "\n" not in text for prompt, text, _ in pairs):
        said.append("the tokenizer keeps no line breaks: the model neither reads nor writes any")
    return said


def _in_one_form(text):
    """A text without spaces, its letters composed: what tokenizers may change without harm."""
    return "".join(unicodedata.normalize("NFC", text).split())


def _without_tokens(tokenizer, encoded, answer_format):
    """Parts of the answer format and words of prompts that a tokenizer, such as that of `tiny`, lacks."""
    unknown = tokenizer.unk_token_id
    if unknown in (None, tokenizer.eos_token_id, tokenizer.bos_token_id):
        return []
    said, parts = [], dict.fromkeys((answer_format.think_end, *answer_format.tags))
    missing = [part for part in parts if unknown in tokenizer(part, add_special_tokens=False)["input_ids"]]
    if missing:
        what = f"the tokenizer has no tokens for {', '.join(map(repr, missing))}"
        said.append(f"{what}: no completion can have the answer format {answer_format.name!r}")
    if count := sum(unknown in p.ids for p in encoded):
        what = f"the tokenizer has no tokens for some words of {count} of {len(encoded)} prompts"
        said.append(f"{what}: the model reads {tokenizer.unk_token} there")
    return said

"""`[--config FILE.yaml] [--FIELD VALUE ...]` into a dataclass of settings; one line for a user's mistake.

Loads no torch, so that argparse and not transformers' HfArgumentParser reads the flags.
"""

import argparse
import dataclasses
import errno
import json
import os
import re
import signal
import sys
import threading
import time
import warnings
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, get_args, get_origin, get_type_hints

from errors import (
    DataError,
    RewardError,
    RunError,
    SettingError,
    SharedError,
    is_out_of_memory,
    one_line,
    raise_on_interrupt,
    show_all_letters,
    tell_after,
)
from reporting.files import read_yaml, without_switch
from running.versions import version_line

# Names that other trainers give to these settings: transformers and TRL, OneShotGRPO, H3PO, the MATH scripts.
ALIASES = {
    "model_name_or_path": "model", "model_name": "model", "model_path": "model",
    "dataset_name": "dataset", "data_path": "dataset",
    "save_steps": "save_every", "save_total_limit": "keep_checkpoints", "save_dir": "output_dir",
    "max_steps": "num_steps", "n_grpo_steps": "num_steps", "num_train_epochs": "num_epochs",
    "max_new_tokens": "max_completion_length", "sampling_max_tokens": "max_completion_length",
    "eval_steps": "eval_every", "val_every_steps": "eval_every", "val_samples": "eval_problems",
    "lr": "learning_rate", "lr_scheduler": "lr_scheduler_type", "grad_clip": "max_grad_norm",
    "optim": "optimizer", "lora_rank": "lora_r", "group_size": "num_generations",
    "sampling_temperature": "temperature", "cliprange": "epsilon",
    "cross_path_lambda": "m3po_lambda", "cross_path_temp": "m3po_temperature",
    "system_prompt_path": "system_prompt_file", "hub_private_repo": "hub_private",
    "wandb_project": "project", "wandb_run_name": "run_name",
}  # fmt: skip

BATCH = "batch_size counts the problems of a step over all processes, micro_batch_tokens bounds memory"
M3PO_SWITCH = (
    "is m3po_lambda here: M3PO is on where it is above 0 (default 0.1), and --m3po_lambda 0 is plain GRPO"
)
REFUSED = {
    "num_iterations": "says two things (outer iterations here, mu in TRL): use outer_iterations or mu",
    "top_p": "belongs to evaluation only: a nucleus of the new policy can exclude a token that was sampled",
    "top_k": "belongs to evaluation only: the policy's top k can exclude a token that was sampled",
    "min_p": "truncates the sampling distribution, which the loss does not: leave it out",
    "gradient_accumulation_steps": f"follows from the rest: {BATCH}",
    "per_device_train_batch_size": f"is not needed: {BATCH}",
    "rollout_batch_size": f"counts completions: {BATCH}",
    "train_batch_size": f"counts completions: {BATCH}",
    "generation_batch_size": f"counts completions: {BATCH}",
    "load_best_model_at_end": "is keep_best here, which leaves the best model in output_dir/best",
    "resume_from_checkpoint": "is --resume here: it goes on from the newest whole checkpoint",
    "enable_m3po": M3PO_SWITCH,
    "m3po": M3PO_SWITCH,
    "enable_cross_path": M3PO_SWITCH,
    "use_wandb": "is --report_to wandb here",
    "wandb_entity": "is not needed: wandb reads it from the environment, WANDB_ENTITY",
    "wandb_tags": "is not needed: wandb reads them from the environment, WANDB_TAGS",
    "hub_token": "is not needed: log in with `hf auth login`, or set HF_TOKEN",
    "hub_strategy": "is not needed: the finished model is uploaded once, with --push_to_hub",
    "sft_data_path": "names supervised data, which sft_train.py takes; here it is dataset",
    "unique_train_examples": "belongs to sft_train.py; here it is limit, the first N problems",
    "reward_funcs": "is reward here, FILE.py:function[=weight], or reward_set for the built-in ones",
    "fp16": "is --precision fp16 here",
    "mixed_precision": "is precision here: bf16, fp16 or fp32",
    "use_vllm": "is not needed: the trainer samples by itself (see decoding/)",
    "use_peft": "is --lora_r here: above 0 trains LoRA adapters",
    "load_in_8bit": "is not supported: try --lora_r 32 --load_in_4bit true, or --optimizer adamw_8bit",
    "max_seq_length": "is two settings here: max_prompt_length and max_completion_length",
    "max_length": "is two settings here: max_prompt_length and max_completion_length",
    "warmup_steps": "is warmup_ratio here, a share of all steps",
    "logging_steps": "is not needed: every step is logged",
    "problem_sampling": "is gone, since it gained nothing: leave it out",
}
NAMED = re.compile(r"--(\w+)|\b([a-z]+(?:_[a-z]+)+)\b(?!\.py)")  # the settings that a hint names
ROOT = Path(__file__).resolve().parents[1]
SECONDS_OF_SILENCE = 5  # after which a process that cannot end says why
THIS_COMMAND = "this command"  # the last group of --help
SHOWN_AS = {int: "N", float: "X"}  # the value of a flag in --help
GIVEN_TO_TRAIN = {  # what a setting names, and Python gives as it is
    "dataset": "; rows are given to train(config, dataset=rows)",
    "reward": "; functions are given to train(config, reward_functions=[...])",
}
OF_TRL = {  # arguments of TRL's trainers, and what a script's train() has in their place
    "args": "is config here: give train(Config(...))",
    "train_dataset": "is a setting here: give Config(dataset=...)",
    "eval_dataset": "is not needed: Config(eval_problems=...) holds problems of the data out",
    "processing_class": "is not needed: the tokenizer is the model's own",
    "tokenizer": "is not needed: the tokenizer is the model's own",
    "peft_config": "is settings here: give Config(lora_r=..., lora_alpha=...)",
    "optimizers": "is settings here: give Config(optimizer=..., learning_rate=...)",
    "callbacks": "is not needed: the loop of the script is there to be changed",
    "reward_processing_classes": "is not needed: a reward is a function, which may hold a model",
}
BESIDE = ("versions", "commit", "answerer", "changes")  # what a run_config.yaml holds beside settings
GONE = {  # settings of earlier versions, and the values with which a run was as it is without them
    "problem_sampling": "uniform", "pass_rate_samples": 4, "pass_rate_power": 4.0, "pass_rate_floor": 0.05,
}  # fmt: skip


def _at_home(value):
    """A path, or each of a list, with the folder that ~ stands for; what is no path as it is.

    In a list, as of --compare, a,b are several.
    """
    if isinstance(value, list):
        return [",".join(map(_at_home, one.split(","))) if isinstance(one, str) else one for one in value]
    return os.path.expanduser(value) if isinstance(value, str) else value


def _hint(name, hints):
    """Why a name is refused; a script that lacks a setting which its hint names says less."""
    if REFUSED[name] == M3PO_SWITCH and "m3po" in hints:
        return "is --m3po here, which decodes the samples as paths that interact too"
    named = {flag or word for flag, word in NAMED.findall(REFUSED[name])}
    if named <= set(hints):
        return REFUSED[name]
    what = REFUSED[name].partition(":")[0]
    return what if what.startswith("is not") else "belongs to grpo_train.py: there is nothing like it here"


def settings_from_file(config_class, path):
    """The settings of a YAML file, names checked against the class and values against its types.

    The run_config.yaml of a run is one: of its settings, which are all there are, those without effect go.
    """
    return checked_settings(config_class, read_yaml(path), path)


def checked_settings(config_class, read, where):
    """`settings_from_file` for a mapping that is read already; `where`: what an error says of its place."""
    is_saved = read.keys() >= get_type_hints(config_class).keys() or "versions" in read
    if is_saved:
        read = {key: value for key, value in without_gone(read).items() if key not in BESIDE}
    settings = named_and_typed(config_class, read, where)
    return _with_effect(config_class, settings) if is_saved else settings


def named_and_typed(config_class, given, where):
    """{setting: value} of names and values that a file or a Python caller gave.

    Further names of a setting are taken; what is no setting, or has another type, is refused.
    """
    hints, settings, aliases = get_type_hints(config_class), {}, _aliases(config_class)
    switches = {switch for switch, *_ in _switches(config_class)}
    for key, value in given.items():
        name = aliases.get(key, key)
        if name in switches:
            settings[name] = _typed(name, bool, value)
            continue
        if name in REFUSED and name not in hints:
            raise SettingError(key, value, _hint(name, hints))
        if name not in hints:
            meant = _did_you_mean(str(key), hints)
            listed = "--help" if hasattr(config_class, "usage") else "docs/study.md"  # keys of a study's file
            raise SettingError(key, value, f"no such setting in {where}; {listed} lists them{meant}")
        if name in settings:
            raise SettingError(key, value, f"given twice in {where} (it is another name of {name})")
        field = config_class.__dataclass_fields__[name]
        if value is None and field.default == "none":
            value = "none"
        value = _typed(name, hints[name], value, _none_words(field))
        settings[name] = _at_home(value) if field.metadata.get("is_path") else value
    return _without_switches(config_class, settings)


def _with_effect(config_class, settings):
    """Settings of one level without those that others of them take the place of, or leave without effect."""
    left = dict(settings)
    for field in dataclasses.fields(config_class):
        if left.get(field.name):
            for other in field.metadata.get("instead_of", ()):
                if _is_on(other, left):
                    left.pop(_name(other))
        if _idle_beside(field, settings):
            left.pop(field.name, None)
    return left


def _aliases(config_class):
    """{another name: setting} of a script; a field may have names that only its script takes."""
    fields = dataclasses.fields(config_class)
    names = {field.name for field in fields}
    aliases = {alias: name for alias, name in ALIASES.items() if name in names}
    return aliases | {alias: field.name for field in fields for alias in field.metadata.get("aliases", ())}


def _switches(config_class):
    """(switch, setting, its values where the switch is on and off) of a script; see `setting`."""
    for field in dataclasses.fields(config_class):
        for switch, values in field.metadata.get("switches", {}).items():
            yield switch, field.name, values


def _without_switches(config_class, given):
    """The settings of one level without the script's switches: `bf16: false` becomes `precision: fp32`."""
    for switch, name, values in _switches(config_class):
        given = without_switch(given, switch, name, values)
    return given


def without_gone(saved):
    """The settings of a run, maybe of an earlier version, without those that are gone and changed nothing."""
    return {name: value for name, value in saved.items() if name not in GONE or value != GONE[name]}


def _none_words(field):
    """The words that stand for None where a field may be None."""
    return ("none", "null", *field.metadata.get("none_words", ()))


def _typed(name, hint, value, none_words=("none", "null")):
    """A value in the type of its field: an int serves as a float, a mapping as JSON text.

    So do numpy's numbers, which a sweep in Python gives, and a path serves as text.
    """
    kind, optional = _kind(hint)
    if optional and (value is None or str(value).lower() in none_words):
        return None
    if get_origin(kind) is list:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list | tuple):
            return [_typed(name, get_args(kind)[0], item) for item in items]
    if isinstance(value, bool) and name == "gradient_checkpointing":  # YAML reads on and off as booleans
        return str(value)
    if isinstance(value, dict) and kind is str:
        try:
            return json.dumps(value)
        except TypeError as error:  # YAML reads 2024-01-01 as a date
            remedy = f"must hold what JSON can ({error}); put it into quotes"
            raise SettingError(name, value, remedy) from error
    number = {int: Integral, float: Real}.get(kind)
    if number and isinstance(value, number) and not isinstance(value, bool):
        return kind(value)
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    plain = str if get_origin(kind) is Literal else get_origin(kind) or kind
    if type(value) is not plain:
        raise SettingError(name, value, f"must be {plain.__name__}{GIVEN_TO_TRAIN.get(name, '')}")
    return value


def _kind(hint):
    """A field's type without its None, and whether None is allowed."""
    if not isinstance(hint, UnionType):
        return hint, False
    return next(part for part in get_args(hint) if part is not NoneType), True


def _did_you_mean(name, known):
    """The name that a misspelt one is nearest to, for the end of a message; nothing where none is near."""
    near = get_close_matches(name.replace("-", "_"), known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def parse_config(config_class, argv=None, description=None):
    """`[--config FILE.yaml] [--FIELD VALUE ...]` -> config_class.

    The command line wins over the file, the file over the defaults; see `combined`.
    """
    argv = sys.argv[1:] if argv is None else argv
    path = _parser(config_class, description).parse_args(argv).config  # its --help shows the defaults
    in_file = settings_from_file(config_class, path) if path else {}
    flags = vars(_parser(config_class, description, only_given=True).parse_args(argv))
    flags.pop("config", None)
    for name, value in flags.items():
        if isinstance(value, list) and None in value:
            if len(value) > 1:
                raise SettingError(name, value, "none stands alone")
            flags[name] = None
    flags = _without_switches(config_class, flags)
    settings = combined(config_class, in_file, flags)
    config = config_class(**settings)
    refuse_idle(config, settings, flags)
    return config


def _parser(config_class, description, only_given=False):
    """A parser of the settings' flags, with their defaults or `only_given` flags in what it returns."""
    hints, aliases = get_type_hints(config_class), _aliases(config_class)
    doc, usage = (description or "").partition("\n")[0], getattr(config_class, "usage", None)
    parser = _Parser(usage=usage, description=doc, allow_abbrev=False, formatter_class=_HelpFormatter)
    parser.names = [*hints, *aliases, "config", "help", "version"]
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    for title, names in _groups(config_class).items():
        group = parser.add_argument_group(title)
        if title == THIS_COMMAND:
            is_usual = "--config" in (usage or "--config")  # a study's own file comes first
            text = "YAML file of settings; flags beside it win" if is_usual else argparse.SUPPRESS
            group.add_argument("--config", metavar="FILE", help=text, action=_Once)
            version = "print the commit and the versions of the packages, and end"
            unset = dict(default=argparse.SUPPRESS, nargs=0)
            group.add_argument("--version", action=_Version, **unset, help=version)
        for name in names:
            default = argparse.SUPPRESS if only_given else fields[name].default
            parser.add_setting(group, fields[name], hints[name], aliases, default)
    for switch, *_ in _switches(config_class):
        parser.add_switch(switch)
    for name in REFUSED.keys() - hints - aliases.keys():
        options = dict(nargs="?", default=argparse.SUPPRESS, action=_Refuse, help=argparse.SUPPRESS)
        parser.add_argument(*_flags(name), **options)
    return parser


def _groups(config_class):
    """{title: names of settings} of --help: those that people change first, each group, and what is left."""
    left = [field.name for field in dataclasses.fields(config_class)]
    groups = {}
    for title, names in (*getattr(config_class, "help_groups", ()), (THIS_COMMAND, "")):
        groups[title] = [name for name in names.split() if name in left]
        left = [name for name in left if name not in groups[title]]
    groups[THIS_COMMAND] += left
    return {title: names for title, names in groups.items() if names or title == THIS_COMMAND}


def combined(config_class, *levels):
    """The settings of several levels, {name: value} each, the weaker first.

    A stronger level wins, and silences at a weaker one what its settings take the place of (instead_of), and
    what has no effect beside them (goes_with, idle_beside). Two settings of one level that take each other's
    place are refused.
    """
    settings = {}
    for given in levels:
        for name in _silenced(config_class, given):
            settings.pop(name, None)
        settings |= given
    return settings


def _silenced(config_class, given):
    """Names of settings that are not to be taken from a weaker level than that of the `given` ones."""
    names = set()
    for field in dataclasses.fields(config_class):
        for other in field.metadata.get("instead_of", ()):
            name = _name(other)
            if given.get(field.name) and _is_on(other, given):
                what = f"cannot stand beside {name}={given[name]!r}"
                raise SettingError(field.name, given[field.name], f"{what}: give one of the two")
            names |= {name} if given.get(field.name) else set()
            names |= {field.name} if _is_on(other, given) else set()
        if _idle_beside(field, given) or given.keys() & set(field.metadata.get("belongs_to", ())):
            names.add(field.name)
    silenced = names - given.keys()
    for field in dataclasses.fields(config_class):  # what goes with a silenced one goes with it
        if _name(field.metadata.get("goes_with", "")) in silenced:
            silenced |= {field.name} - given.keys()
    return silenced


def _name(condition):
    return condition.partition("=")[0]


def _is_on(condition, settings):
    """Whether a setting is on, or for `name=value` has this value."""
    name, is_value, value = condition.partition("=")
    found = settings.get(name)
    return str(found) == value if is_value else bool(found) and found != "none"


def _idle_beside(field, settings):
    """The name of one of these settings beside which a field has no effect, or None."""
    needed = field.metadata.get("goes_with")
    if needed and _name(needed) in settings and not _is_on(needed, settings):
        return _name(needed)
    others = field.metadata.get("idle_beside", ())
    return next((_name(other) for other in others if _is_on(other, settings)), None)


def refuse_idle(config, settings, flags=()):
    """Refuse what the settings that made a config give, and what has no effect beside the others.

    Nothing is asked for by None, by 0, nor outside the `flags` of the command line by a default.
    """
    for field in dataclasses.fields(config):
        name, default = field.name, field.default
        value = settings.get(name)
        is_given = value is not None and (value != default or name in flags)
        asks_for_nothing = not value and default is not True
        beside = _idle_beside(field, vars(config))
        if is_given and not asks_for_nothing and beside:
            needed = _name(field.metadata.get("goes_with", ""))
            remedy = f": set {needed} too" if beside == needed else ""
            beside_it = f"has no effect with {beside}={vars(config)[beside]!r}{remedy}"
            error = SettingError(name, value, beside_it)
            if not ({name, beside} <= set(flags) and "both_given" in field.metadata):
                raise error
            warnings.warn(str(error), stacklevel=2)


def check_config(config, config_class):
    """Refuse what is no config of this script, such as a dict of its settings."""
    if not isinstance(config, config_class):
        made = "Config(**settings)" if isinstance(config, dict) else "Config(...)"
        raise SettingError("config", config, f"must be a Config of this script: give {made}")


def refuse_arguments(given, config_class, renamed=None):
    """Refuse arguments that a script's train() does not have, such as those of TRL's trainers.

    renamed: {another name: argument} of those that it has under a name of its own.
    """
    aliases, renamed = _aliases(config_class), renamed or {}
    for name, value in given.items():
        hint = f"no such argument of train(){_did_you_mean(name, ('config', *renamed.values()))}"
        hint = OF_TRL.get(name, hint)
        setting = aliases.get(name, name)
        if setting in config_class.__dataclass_fields__:
            hint = f"is a setting: give Config({setting}=...)"
        if name in renamed:
            hint = f"is {renamed[name]} here"
        raise SettingError(name, value, hint)


def warn_of_idle(config, trained=None):
    """Warn, in its words, of what the command line refuses in a config that was made in Python.

    trained: settings that an evaluation took from its model's training. What stands at its default, or comes
    from there, asks for nothing; nor does what a Config makes 0 itself.
    """
    given, trained = dict(vars(config)), trained or {}
    for field in dataclasses.fields(config):
        unasked = (None, field.default, field.metadata.get("from_training"), trained.get(field.name))
        if given[field.name] in unasked or "both_given" in field.metadata:
            del given[field.name]
    if given.get("system_prompt_file"):
        given.pop("system_prompt", None)  # its text; a Config refuses another one
    try:
        combined(type(config), given)
        refuse_idle(config, given)
    except SettingError as error:
        warnings.warn(str(error), stacklevel=3)


class _Parser(argparse.ArgumentParser):
    """argparse whose flags are fields of a dataclass, and whose errors are SettingErrors."""

    def __init__(self, **how):
        super().__init__(**how)
        self.given = {}  # of each setting the value that it has got, and the flag

    def add_setting(self, group, field, hint, aliases, default):
        """`--field VALUE` under all its names, and `--no_field` where it is a bool that is on by default.

        --help shows the first name alone.
        """
        name, options = field.name, _flag_options(hint, _none_words(field))
        short = [f"-{letter}" for letter in field.metadata.get("short", "")]
        text = field.metadata["help"]
        group.add_argument(*short, f"--{name}", **options, default=default, help=text, action=_Once)
        unshown = dict(dest=name, default=default, help=argparse.SUPPRESS, action=_Once)
        others = [alias for alias, real in aliases.items() if real == name]
        for flag in [flag for other in (name, *others) for flag in _flags(other) if flag != f"--{name}"]:
            self.add_argument(flag, **options, **unshown)
        if field.default is True:
            self.add_argument(*_flags(f"no_{name}"), nargs=0, const=False, **unshown)

    def add_switch(self, name):
        """`--name [true|false]` and `--no_name`, which --help leaves to the setting that they stand for."""
        unshown = dict(dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, action=_Once)
        self.add_argument(*_flags(name), **_flag_options(bool, ()), **unshown)
        self.add_argument(*_flags(f"no_{name}"), nargs=0, const=False, **unshown)

    def error(self, message):
        given = re.match(r"unrecognized arguments: (-*)([^\s=]+)", message)
        meant = ""
        if given and given[2].endswith((".yaml", ".yml")):
            meant = f"; did you mean --config {given[2]}?"
        elif given and given[1]:
            meant = _did_you_mean(given[2], self.names)
        elif given and f"{given[2]}=" in message and given[2] in self.names:  # as hydra takes settings
            meant = f"; did you mean --{message.split(': ', 1)[1]}?"
        elif given and "model" in self.names and Path(given[2]).is_dir():
            meant = f"; did you mean --model {given[2]}?"
        elif message.startswith("argument --resume:"):
            meant = "; --resume names no folder: it goes on from the newest whole checkpoint in output_dir"
        raise SettingError("command line", message, "--help lists every flag" + meant)


class _HelpFormatter(argparse.HelpFormatter):
    """A default is shown where the text does not tell it, and is not that nothing is done."""

    def _get_help_string(self, action):
        is_nothing = any(action.default is value for value in (None, False, "", argparse.SUPPRESS))
        is_told = is_nothing or "default" in action.help
        return action.help if is_told else f"{action.help} (default: {_as_given(action.default)})"


def _as_given(default):
    """A default as somebody would write it on the command line."""
    return "true" if default is True else str(default).replace("%", "%%")


class _Once(argparse.Action):
    """Takes the value of a flag; given twice, under another name too, one would be dropped without a word."""

    def __call__(self, parser, namespace, values, option_string=None):
        taken = self.const if self.nargs == 0 else values
        if self.dest in parser.given:
            remedy = "put all values after one flag" if self.nargs == "+" else "leave one out"
            value, flag = parser.given[self.dest]
            raise SettingError(self.dest, taken, f"is given twice, first as {value!r} by {flag}: {remedy}")
        parser.given[self.dest] = taken, option_string
        setattr(namespace, self.dest, taken)


class _Version(argparse.Action):
    """Print what the project is made of, without loading any of it, and end."""

    def __call__(self, parser, namespace, values, option_string=None):
        print(version_line())
        parser.exit()


class _Refuse(argparse.Action):
    """A flag of other trainers that is refused with a hint."""

    def __call__(self, parser, namespace, values, option_string=None):
        raise SettingError(self.dest, values or "", _hint(self.dest, parser.names))


def _flags(name):
    """The flag as it is written here, and with hyphens."""
    return [f"--{name}", f"--{name.replace('_', '-')}"] if "_" in name else [f"--{name}"]


def _flag_options(hint, none_words):
    """What argparse is told of a field of this type."""
    kind, optional = _kind(hint)
    if kind is bool:
        return dict(type=_to_bool, nargs="?", const=True, metavar="true|false")
    if get_origin(kind) is Literal:
        return dict(choices=get_args(kind))
    is_list = get_origin(kind) is list
    one = get_args(kind)[0] if is_list else kind
    options = dict(type=_or_none(one, none_words) if optional else one, metavar=SHOWN_AS.get(one, "TEXT"))
    return options | (dict(nargs="+") if is_list else {})


def _or_none(kind, none_words):
    """`kind` for argparse, where some words stand for None."""

    def convert(text):
        return None if text.lower() in none_words else kind(text)

    convert.__name__ = kind.__name__  # which argparse shows for a value that is not of that kind
    return convert


def _to_bool(text):
    if text.lower() in ("yes", "true", "t", "y", "1"):
        return True
    if text.lower() in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


UNWRITABLE = {
    errno.EPIPE: "the program that read the output is gone",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO), "the disk"),
}


# What `accelerate launch` may ask for that is not done as it would do it, and what is
LAUNCHER_S = {
    "ACCELERATE_USE_FSDP": "--fsdp true shards here",
    "ACCELERATE_USE_DEEPSPEED": "--fsdp true shards here",
    "ACCELERATE_USE_MEGATRON_LM": "--fsdp true shards here",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "--fsdp true shards here",
    "ACCELERATE_DYNAMO_BACKEND": "--torch_compile says here what is compiled",
}
STARTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # all set by a launcher


def started_processes():
    """How many processes a launcher has started, this one included.

    Refuses what a launcher asks for and cannot have, and a part of its variables left over in a shell.
    """
    for name, instead in LAUNCHER_S.items():
        if (value := os.environ.get(name, "no")).lower() not in ("", "no", "false", "0"):
            raise SettingError(
                name, value, f"is not used: {instead}; launch without it (see accelerate config)"
            )
    remedy = "unset it, or start with torchrun or accelerate launch"
    counts = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": -1}  # -1: there is no launcher
    for name in counts:
        try:
            counts[name] = int(os.environ.get(name, counts[name]))
        except ValueError:
            raise SettingError(name, os.environ[name], f"is no whole number: {remedy}") from None
    given = {name: os.environ[name] for name in STARTED if name in os.environ}
    missing = [name for name in STARTED if name not in given]
    is_started = counts["WORLD_SIZE"] != 1 or counts["LOCAL_RANK"] != -1 or counts["RANK"] != 0
    if is_started and missing:
        raise SettingError(*next(iter(given.items())), f"stands there without {missing[0]}: {remedy}")
    if not 0 <= counts["RANK"] < counts["WORLD_SIZE"]:
        raise SettingError("RANK", given["RANK"], f"is none of WORLD_SIZE={counts['WORLD_SIZE']}: {remedy}")
    return counts["WORLD_SIZE"]


def parse_early(config_class, doc, refuse=None):
    """The settings of a script's command, and its first line; called before the script imports torch.

    None for one of several processes, of which the first reads the settings for all. refuse: raises an error
    for settings that cannot be served here, such as a folder in use.
    """
    for name in ("stdout", "stderr"):  # closed by who started it: `>&-`, a daemon
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
    show_all_letters()
    if told(started_processes) > 1:
        return None
    config = told(parse_config, config_class, None, doc)
    if refuse is not None:
        told(refuse, config)
    out = sys.stderr if config.answers_on_stdout else sys.stdout
    told(lambda: print(config.first_line, file=out, flush=True))
    return config


def run_main(main, *given):
    """Call main(*given) for a script: 0, or one line on standard error and the status of the error."""
    if transformers := sys.modules.get("transformers"):
        transformers.utils.logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    raise_on_interrupt()
    try:
        told(main, *given)
    except SystemExit as end:  # by a signal, with everything saved
        is_stopped = isinstance(end.code, int) and end.code > 128
        if is_stopped and (_has_others() or _left_running()):
            _end_children()
            _exit_at_once(end.code)
        _tell_what_is_waited_for()
        raise
    if _leave_the_others():
        _exit_at_once(0)
    _tell_what_is_waited_for()


def _left_running():
    """The names of threads and processes that Python waits for when it ends, such as those of a reward."""
    names = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    if started := sys.modules.get("multiprocessing"):
        names += [process.name for process in started.active_children() if not process.daemon]
    return names


def _end_children():
    """End what multiprocessing started, as Python's own end would: workers of a pool outlive a parent."""
    if started := sys.modules.get("multiprocessing"):
        children, end = started.active_children(), time.monotonic() + 1
        for process in children:
            process.terminate()
        for process in children:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()  # one that was just forked may have lost the signal


def _tell_what_is_waited_for():
    """Say after a while what keeps this process from ending; signals end it then."""
    if not (names := _left_running()):
        return
    what = f"waiting for what was started and has not ended: {one_line(', '.join(names), 120)}"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    tell_after(SECONDS_OF_SILENCE, f"{Path(sys.argv[0]).name}: {what}; Ctrl-C ends it")


def told(action, *given):
    """What action(*given) returns; an error that a user can mend ends the script with one line.

    A warning of the project's is one line, too.
    """
    warnings.formatwarning = _warning_line
    try:
        return action(*given)
    except (SettingError, DataError, RunError, RewardError) as error:
        _exit(error, error.status)
    except SharedError as error:
        _exit_together(error, _leave_the_others())
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            name = str(error.filename)
            _exit(f"a name of {len(name)} characters, longer than any file's: {name[:60]!r} ...", 2)
        if error.errno not in UNWRITABLE:
            raise
        if error.errno == errno.EPIPE:
            sys.stdout = open(os.devnull, "w")  # a buffered rest would raise once more when Python exits
        what = error.filename or UNWRITABLE[error.errno]
        again = {"grpo_eval": "the same --name", "grpo_study": "the same command"}
        how = again.get(Path(sys.argv[0]).stem, "--resume true")
        _exit(f"{what}: {error.strerror}; go on with {how} when it can be written to again", 1)
    except RuntimeError as error:
        _explain_torch_error(error)
        raise
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _warning_line(message, category, filename, *rest, plain=warnings.formatwarning):
    """A warning as it is printed: what users are told without the place in the code that tells it."""
    if category is UserWarning and Path(filename).is_relative_to(ROOT):
        return f"{Path(sys.argv[0]).name}: warning: {message}\n"
    return plain(message, category, filename, *rest)


def _leave_the_others():
    """End the process group, if there is one: its threads can abort a process that exits with them.

    All processes end here. Returns whether there was one.
    """
    has_others = _has_others()
    if has_others:
        sys.modules["torch"].distributed.destroy_process_group()
    return has_others


def _has_others():
    torch = sys.modules.get("torch")
    return bool(torch and torch.distributed.is_initialized())


def _explain_torch_error(error):
    """Exit with one line where torch ran out of memory or lost another process, else return."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if is_out_of_memory(error):
        remedy = "try a lower batch_size or max_completion_length, fewer completions, or a smaller model"
        _exit(f"out of memory ({one_line(error)}): {remedy}", 1)
    if isinstance(error, torch.distributed.DistError) or "gloo" in str(error):
        lost = "lost its connection to the others; the process that ended says why"
        print(f"process {os.environ.get('RANK', 0)}: {lost}", file=sys.stderr, flush=True)
        time.sleep(5)  # so that the launcher sees the status of the process that failed first
        sys.exit(1)


def _exit_together(error, has_others):
    """The line that all processes end with, once on each machine."""
    if int(os.environ.get("LOCAL_RANK", 0)):
        time.sleep(1)  # so that the launcher does not stop the one that prints it
    else:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
    if has_others:
        _exit_at_once(error.status)
    sys.exit(error.status)


def _exit_at_once(status):
    """Without Python's own end, in which threads of gloo now and then abort a process that is done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _exit(error, status):
    """One line on standard error: the script, the process where it is not the first, and the error."""
    rank = os.environ.get("RANK", "0")
    process = "" if rank == "0" else f"process {rank}: "
    print(f"{Path(sys.argv[0]).name}: {process}{error}", file=sys.stderr, flush=True)
    sys.exit(status)

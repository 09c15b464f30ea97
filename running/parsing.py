"""`[--config FILE.yaml] [--FIELD VALUE ...]` into a dataclass of settings; one line for a user's mistake."""

import argparse
import copy
import errno
import json
import os
import re
import signal
import sys
import time
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, get_args, get_origin, get_type_hints

import torch
from transformers import HfArgumentParser
from transformers.utils import logging as transformers_logging

from errors import DataError, RewardError, RunError, SettingError
from reporting.files import read_yaml

ALIASES = {"model_name_or_path": "model", "save_steps": "save_every", "dataset_name": "dataset"}


REFUSED = {
    "num_iterations": "says two things (outer iterations here, mu in TRL): use outer_iterations or mu",
    "top_p": "belongs to evaluation only: a nucleus of the new policy can exclude a token that was sampled",
    "top_k": "belongs to evaluation only: the policy's top k can exclude a token that was sampled",
    "min_p": "truncates the sampling distribution, which the loss does not: leave it out",
    "gradient_accumulation_steps": "follows from the rest: batch_size counts the problems of a whole step, micro_batch_tokens bounds memory",
    "per_device_train_batch_size": "is not needed: batch_size counts the problems of a step over all processes, micro_batch_tokens bounds memory",
    "load_best_model_at_end": "is keep_best here, which leaves the best model in output_dir/best",
}


def settings_from_file(config_class, path):
    """The settings of a YAML file, names checked against the class and values against its types."""
    fields = get_type_hints(
        config_class
    )  # not dataclasses.fields(): HfArgumentParser rewrites the types there
    settings = {}
    for key, value in read_yaml(path).items():
        name = ALIASES.get(key, key)
        if name in REFUSED and name not in fields:
            raise SettingError(key, value, REFUSED[name])
        if name not in fields:
            raise SettingError(
                key, value, f"no such setting in {path}; --help lists them{_meant(str(key), fields)}"
            )
        if name in settings:
            raise SettingError(key, value, f"given twice in {path} (it is another name of {name})")
        settings[name] = _typed(name, fields[name], value)
    return settings


def _meant(name, known):
    """The name that a misspelt one is nearest to, for the end of a message; nothing where none is near."""
    near = get_close_matches(name.replace("-", "_"), known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _typed(name, hint, value):
    """A YAML value in the type of its field; an int serves as a float, a mapping as JSON text."""
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kinds = [get_origin(p) or p for p in parts if p is not NoneType]
    kinds = [str if kind is Literal else kind for kind in kinds]
    if isinstance(value, bool) and name == "gradient_checkpointing":  # YAML reads on and off so
        return str(value)
    if isinstance(value, dict) and str in kinds:
        try:
            return json.dumps(value)
        except TypeError as error:  # YAML reads 2024-01-01 as a date
            raise SettingError(
                name, value, f"must hold what JSON can ({error}); put it into quotes"
            ) from error
    if value is None and NoneType in parts:
        return None
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if list in kinds and isinstance(value, str):
        return [value]
    if isinstance(value, list) and list in kinds:
        item = next(get_args(p)[0] for p in parts if get_origin(p) is list)
        return [_typed(name, item, v) for v in value]
    if type(value) not in kinds:
        raise SettingError(name, value, "must be " + " or ".join(k.__name__ for k in kinds))
    return value


def parse_config(config_class, argv=None, description=None):
    """`[--config FILE.yaml] [--FIELD VALUE ...]` -> config_class. The command line wins over the file, the file over the defaults."""
    argv = list(sys.argv[1:] if argv is None else argv)
    fields = get_type_hints(config_class)
    for i, word in enumerate(argv):
        name = word.removeprefix("--").split("=")[0].replace("-", "_") if word.startswith("--") else ""
        if name in REFUSED and name not in fields:
            raise SettingError(name, word.partition("=")[2] or " ".join(argv[i + 1 : i + 2]), REFUSED[name])
        if name in ALIASES:
            argv[i] = "--" + ALIASES[name] + word[2 + len(name) :]
    parser = _FlagParser(config_class, description=description, allow_abbrev=False)
    parser.add_argument("--config", help="YAML file of settings; flags given beside it win")
    parser.error = lambda message: _usage_error(message, fields)
    known = _config_only(argv)
    if known is not None:
        parser.set_defaults(**settings_from_file(config_class, known))
    optional = {name for name, hint in fields.items() if NoneType in get_args(hint)}
    emptied = [
        i
        for i in range(len(argv) - 1)
        if argv[i].removeprefix("--") in optional and argv[i + 1].lower() in ("none", "null")
    ]
    rest = [word for i, word in enumerate(argv) if i not in emptied and i - 1 not in emptied]
    values = vars(parser.parse_args(rest)) | {argv[i].removeprefix("--"): None for i in emptied}
    values.pop("config")
    return config_class(**values)


class _FlagParser(HfArgumentParser):
    """Reads the help text of a field, and nothing of its other metadata."""

    @staticmethod
    def _parse_dataclass_field(parser, field):
        field = copy.copy(field)
        field.metadata = {"help": field.metadata["help"]}
        HfArgumentParser._parse_dataclass_field(parser, field)


def _config_only(argv):
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    first.error = _usage_error
    return first.parse_known_args(argv)[0].config


def _usage_error(message, fields=()):
    flag = re.match(r"unrecognized arguments: --([\w-]+)", message)
    raise SettingError(
        "command line", message, "--help lists every flag" + (_meant(flag[1], fields) if flag else "")
    )


def run_main(main):
    """Call main() for a script: 0, or one line on standard error and 2 (a bad setting or bad data) or 1 (a failed run)."""
    transformers_logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        main()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # threads of it that outlive the interpreter can abort the process
    except (SettingError, DataError) as error:
        sys.exit(_last_words(error, 2))
    except (RunError, RewardError) as error:
        sys.exit(_last_words(error, 1))
    except OSError as error:
        who = {errno.EPIPE: "the program that read the output is gone"} | dict.fromkeys(
            (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO), "the disk"
        )
        if error.errno not in who:
            raise
        if error.errno == errno.EPIPE:
            sys.stdout = open(os.devnull, "w")  # what is left to be written there would fail again at the end
        sys.exit(
            _last_words(
                f"{error.filename or who[error.errno]}: {error.strerror}; go on with --resume true when it can be written to again",
                1,
            )
        )
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(
            error
        ):  # on a card, on the CPU; the update says what it can do itself
            remedy = "try a lower batch_size, num_generations or max_completion_length, or a smaller model"
            sys.exit(_last_words(f"out of memory ({' '.join(str(error).split())[:200]}): {remedy}", 1))
        if not (isinstance(error, torch.distributed.DistError) or "gloo" in str(error)):
            raise
        print(
            f"process {os.environ.get('RANK', 0)}: lost its connection to the others; the process that ended says why",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(5)  # so that the launcher sees the other's status first
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _last_words(error, status):
    rank = os.environ.get("RANK", "0")
    print(
        f"{Path(sys.argv[0]).name}: {'' if rank == '0' else f'process {rank}: '}{error}",
        file=sys.stderr,
        flush=True,
    )
    return status

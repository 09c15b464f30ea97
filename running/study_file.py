"""A study's command and its YAML file: what they may hold, read and checked as a whole before anything is
begun. Loads no torch, so that --help and a mistake are answered at once.
"""

import dataclasses
import json
import math
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

from answers.formats import answer_format_named
from errors import SettingError
from reporting.files import here_or_ours, read_yaml
from rewards import GRADINGS
from running import grpo_config, sft_config
from running.parsing import (
    checked_settings,
    combined,
    parse_config,
    refuse_idle,
    settings_from_file,
    started_processes,
)
from running.settings import check, check_one_of, free_on_resume, setting
from running.study import Study, code_files, code_hash

# Set in the processes that grpo_study.py starts, one for each card: the minutes left of stop_after, or None
WORKER = "GRPO_STUDY_WORKER"
# What a study sets itself in each run
OF_THE_STUDY = (
    "check fsdp hub_model_id hub_private max_wall_minutes model num_processes output_dir "
    "overwrite_output_dir push_to_hub resume resume_anyway run_name seed stop_after warm_start"
).split()
MEASURES = ("mean", "maj", "pass", "length")
ROLES = ("confirmatory", "exploratory")


@dataclass(frozen=True)
class Arm:
    """One of the methods that a study compares."""

    name: str = setting("", "a short name, which is a folder's")
    settings: dict | None = setting(None, "settings of grpo_train.py that differ from the base recipe's")
    role: str = setting("confirmatory", "confirmatory, or exploratory: named beforehand and not tested")
    first_seeds: int | None = setting(None, "the first N seeds of the study only (default: all)")


@dataclass(frozen=True)
class Evaluation:
    """Questions that each run is asked at some of its steps. What is None is the base recipe's."""

    name: str = setting("", "a short name, which is part of a file's")
    steps: list[int] = setting(None, "asked after these steps; 0 is the start")
    samples: int = setting(8, "answers a question")
    temperature: float = setting(1.0, "of sampling; 0 is greedy, with one sample")
    interacts: bool = setting(False, "samples are paths that interact, as the base recipe's do in training")
    dataset: str | None = setting(None, "as for grpo_train.py", is_path=True)
    split: str = setting("test", "split of it")
    limit: int | None = setting(None, "the first N questions")
    answer_format: str | None = setting(None, "how answers are written", is_path=True)
    grading: str | None = setting(None, "number or math")
    max_completion_length: int | None = setting(None, "tokens an answer may have")

    def __post_init__(self):
        what = "must be a list of different numbers of steps, from 0 on"
        check(self, "steps", lambda v: v and len(set(v)) == len(v) and min(v) >= 0, what)
        check(self, "samples", lambda v: v >= 1, "must be at least 1")
        check(self, "temperature", lambda v: 0 <= v < math.inf, "must be finite and not negative")
        check(self, "samples", lambda v: v == 1 or self.temperature > 0, "greedy answers are all the same")
        optional = "limit max_completion_length"
        check(self, optional, lambda v: v is None or v >= 1, "must be at least 1")
        alone = "paths need each other: set samples 8 and a temperature"
        check(self, "interacts", lambda v: not v or self.samples > 1, alone)


@dataclass(frozen=True)
class Secondary:
    """A further comparison of treatment and baseline."""

    evaluation: str = setting("", "name of an evaluation")
    measure: str = setting("mean", "of its samples: " + ", ".join(MEASURES))
    steps: dict | None = setting(None, "{treatment: step, baseline: step}, instead of the mean over all")

    def __post_init__(self):
        check_one_of(self, "measure", MEASURES)


@dataclass(frozen=True)
class Tests:
    """What the analysis needs to know beforehand."""

    margin: float = setting(0.01, "differences below it are of no use (TOST)")
    alpha: float = setting(0.05, "level of the tests")
    effect: float = setting(0.015, "difference that the study should see")
    power: float = setting(0.8, "how often it should see it")
    fewest_seeds: int | None = setting(None, "seeds at the least, where a look decides (default: all)")
    most_seeds: int | None = setting(None, "and at the most")
    look_after: int | None = setting(
        None, "after so many seeds the number of seeds is worked out, means hidden (default: no look)"
    )

    def __post_init__(self):
        check(self, "margin effect", lambda v: 0 < v < 1, "must be between 0 and 1")
        check(self, "alpha power", lambda v: 0 < v < 1, "must be between 0 and 1")


@dataclass(frozen=True)
class StudyFile:
    """The YAML file of a study."""

    name: str = setting("", "name of the study")
    text: str = setting("", "a Markdown file that says what is compared, how, and what will count as what")
    output_dir: str | None = setting(None, "its folder (default: studies/runs/NAME)", is_path=True)
    base: dict | None = setting(None, "the recipe that all arms share: `config`, a file, and settings")
    warm_start: dict | None = setting(None, "settings of sft_train.py; `config`: a file of them")
    seeds: list[int] = setting(None, "in the order in which they are run")
    arms: list[dict] = setting(None, "see Arm")
    baseline: str = setting("", "the arm that is compared with")
    treatment: str = setting("", "the arm that is compared")
    evaluations: list[dict] = setting(None, "see Evaluation")
    primary: str = setting("", "name of the evaluation that decides")
    secondary: list[dict] | None = setting(None, "see Secondary")
    tests: dict | None = setting(None, "see Tests")
    verdict: dict | None = setting(
        None, "{controls: [arm, ..], averaging: arm}, for the words of the verdict"
    )


@dataclass(frozen=True)
class Options:
    """What the command line says beside the study's file."""

    check: bool = setting(False, "print runs, minutes and gigabytes; make nothing that stays")
    output_dir: str | None = setting(None, "the study's folder, instead of the file's own", is_path=True)
    only_seeds: list[int] | None = setting(None, "run these seeds only: other machines run the others")
    local: list[str] | None = setting(
        None, "NAME=DIR ...: folders in the place of models and data sets that the file names"
    )
    resume_anyway: bool = setting(False, "go on although runs were made by other code, which is recorded")
    stop_after: float | None = setting(
        None, "minutes after which to save and stop, for jobs with a time limit"
    )

    usage = """%(prog)s STUDY.yaml [--FIELD VALUE ...]

STUDY.yaml names the arms, the seeds and what is asked: docs/study.md lists its keys,
configs/study_tiny.yaml is one."""

    def __post_init__(self):
        check(self, "stop_after", lambda v: v is None or 0 < v < math.inf, "must be positive and finite")


def parse(argv, doc=None):
    """The study's file, which comes first, and the Options."""
    if argv and argv[0] in ("-h", "--help", "--version"):
        argv = ["", *argv]
    if not argv or argv[0].startswith("-"):
        remedy = "give the study's file first: python grpo_study.py configs/study_tiny.yaml"
        raise SettingError("command line", " ".join(argv), remedy)
    path, *flags = argv
    return path, parse_config(Options, flags, doc)


def study_of_command(doc):
    """The Study and the Options of the command line; loads no torch."""
    path, options = parse(sys.argv[1:], doc)
    if started_processes() > 1:
        raise SettingError("command line", "torchrun", "a study starts its processes itself: say python")
    study = read_study(path, grpo_config.Config, sft_config.Config, sft_config.warm_start_settings, options)
    if WORKER in os.environ:
        left = os.environ[WORKER]
        options = dataclasses.replace(options, stop_after=None if left == "None" else float(left))
    else:
        print(f"study: {len(study.configs)} arms, {len(study.seeds)} seeds, in {study.folder}", flush=True)
    return study, options


def read_study(path, train_config, start_config, start_settings, options):
    """The Study of a YAML file; SettingError for all that cannot be run.

    train_config, start_config: those of grpo_train.py and sft_train.py. start_settings(base, given): the
    start_config of a warm start before the base recipe.
    options: output_dir, only_seeds and local of the command line. The plan has names as the file has them,
    and the configs the folders that are given for them.
    """
    file = _made(StudyFile, read_yaml(path), path)
    for name in ("name", "baseline", "treatment", "primary"):
        check(file, name, bool, f"is missing in {path}")
    recipe = "say base: {config: configs/gsm8k.yaml}, or {} for the defaults of grpo_train.py"
    check(file, "base", lambda v: v is not None, f"is missing in {path}: {recipe}")
    check(file, "seeds arms evaluations", bool, f"is missing in {path}: give a list")
    check(
        file,
        "name",
        lambda v: v.strip(".") and Path(v).name == v,
        "must be a name, and no path: it is its folder's",
    )
    check(file, "seeds", lambda v: len(v) > 1, "an interval over seeds needs at least 2")
    check(file, "seeds", lambda v: len(set(v)) == len(v), f"seed {_repeated(file.seeds)} is there twice")
    check(file, "seeds", lambda v: all(0 <= s < 2**31 for s in v), "must be from 0 to 2147483647")
    base, base_given = _base(file, train_config)
    arms = [_made(Arm, values, f"arms of {path}") for values in file.arms]
    evaluations = [_made(Evaluation, values, f"evaluations of {path}") for values in file.evaluations]
    evaluations = [_completed(e, base) for e in evaluations]
    for kind, parts in (("arms", arms), ("evaluations", evaluations)):
        _check_names(kind, [part.name for part in parts])
    configs = {arm.name: _arm_config(arm, base_given, train_config) for arm in arms}
    _refuse_equal_arms(arms, configs, train_config)
    for arm in arms:
        _check_steps(arm.name, configs[arm.name], evaluations)
    start = _start(file, base, start_config, start_settings)
    plan = _plan(file, base, start, arms, evaluations)
    folder = Path(options.output_dir or file.output_dir or f"studies/runs/{file.name}")
    files = code_files(configs.values())
    only = options.only_seeds
    if only and set(only) - set(file.seeds):
        raise SettingError("only_seeds", only, f"the study has the seeds {file.seeds}")
    folders = _folders(options.local)
    return Study(
        plan=plan,
        folder=folder,
        base=_placed(base, folders),
        start=_placed(start, folders),
        configs={name: _placed(config, folders) for name, config in configs.items()},
        evaluations=[_placed(evaluation, folders) for evaluation in evaluations],
        code=code_hash(files),
        files=files,
        only_seeds=only,
    )


def _folders(local):
    """{name: folder} of `--local NAME=DIR ...`."""
    folders = {}
    for text in local or ():
        name, _, folder = text.partition("=")
        if not (name and Path(folder).exists() and folder):
            raise SettingError(
                "local", text, "must be NAME=DIR, a name of the study's file and what is there"
            )
        folders[name] = folder
    return folders


def _placed(config, folders):
    """Settings that read a folder in the place of a name."""
    if config is None:
        return None
    named = {name: getattr(config, name, None) for name in ("model", "dataset")}
    return dataclasses.replace(config, **{k: folders[v] for k, v in named.items() if v in folders})


def _made(kind, values, where):
    """A dataclass of the study from a mapping of its file."""
    return kind(**checked_settings(kind, values, where))


def _repeated(values):
    return next((value for value in values if values.count(value) > 1), None)


def _check_names(kind, names):
    """Names are those of files and folders, and each is there once."""
    for name in names:
        is_above = not name.strip(".")  # .. is a folder's name, too
        if is_above or not name.replace("-", "_").replace(".", "_").isidentifier():
            raise SettingError("name", name, f"of {kind}: must be letters, digits, _, - and .")
    if twice := _repeated(names):
        raise SettingError("name", twice, f"is there twice in {kind}: give each a name of its own")


def _level(given, config_class, where):
    """A mapping of settings in which `config` names a file of weaker ones: (those of the file, its own)."""
    given = dict(given)
    path = given.pop("config", None)
    in_file = settings_from_file(config_class, path) if path else {}
    return in_file, checked_settings(config_class, given, where)


def _base(file, train_config):
    """The Config of the recipe that all arms share, and the settings that are given for it."""
    in_file, given = _level(file.base, train_config, "base")
    _refuse_owned("base", given, but=("model",))
    settings = combined(train_config, in_file, given)
    if file.warm_start is not None:
        settings.pop("warm_start", None)
    base = train_config(**settings)
    refuse_idle(base, settings)
    if base.num_epochs is not None:
        raise SettingError("num_epochs", base.num_epochs, "a study asks at steps: give num_steps in base")
    return base, settings


def _refuse_owned(where, given, but=()):
    for name in OF_THE_STUDY:
        if name in given and name not in but:
            raise SettingError(name, given[name], f"in {where}: the study sets it, for all arms alike")


def _arm_config(arm, base_given, train_config):
    """The Config of an arm; what it cannot be is told with its name."""
    where = f"arm {arm.name}"
    check_one_of(arm, "role", ROLES)
    try:
        given = checked_settings(train_config, arm.settings or {}, where)
        _refuse_owned(where, given)
        settings = combined(train_config, {**base_given, "warm_start": "none"}, given)
        config = train_config(**settings)
        refuse_idle(config, settings)
        if config.num_epochs is not None:
            raise SettingError("num_epochs", config.num_epochs, "a study asks at steps: give num_steps")
    except SettingError as error:
        raise SettingError("arms", arm.name, str(error)) from error
    return config


def _results_of(config):
    """The settings that a run's result depends on."""
    free = free_on_resume(type(config)) | set(OF_THE_STUDY)
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in free}


def _refuse_equal_arms(arms, configs, train_config):
    seen = {}
    for arm in arms:
        key = json.dumps(_results_of(configs[arm.name]), sort_keys=True, default=str)
        if key in seen:
            what = f"differs in nothing from arm {seen[key]} that could change a result: leave one out"
            raise SettingError("arms", arm.name, what)
        seen[key] = arm.name


def _check_steps(arm, config, evaluations):
    total = config.num_steps * config.outer_iterations
    for evaluation in evaluations:
        if max(evaluation.steps) > total:
            what = f"of evaluation {evaluation.name} are past the {total} steps of arm {arm}"
            raise SettingError("steps", evaluation.steps, what)


def _completed(evaluation, base):
    """An evaluation with the base recipe's settings where it has none."""
    other_data = evaluation.dataset not in (None, base.dataset)
    names = "dataset answer_format grading max_completion_length".split()
    given = {name: getattr(base, name) for name in names if getattr(evaluation, name) is None}
    made = dataclasses.replace(evaluation, **given)
    try:
        answer_format_named(made.answer_format)
    except ValueError as error:
        problem = f"of evaluation {made.name}: {error}"
        raise SettingError("answer_format", made.answer_format, problem) from error
    check_one_of(made, "grading", GRADINGS)
    if made.interacts and (base.m3po_lambda == 0 or made.answer_format != base.answer_format):
        remedy = "paths interact as in the base recipe, which needs m3po_lambda above 0 and its answer_format"
        raise SettingError("interacts", True, f"of evaluation {made.name}: {remedy}")
    if made.interacts and base.m3po_control == "strangers":
        what = "whose m3po_control=strangers has strangers of its own in each run: set the control in an arm"
        raise SettingError("interacts", True, f"of evaluation {made.name}: as in the base recipe, {what}")
    if not other_data and Path(made.dataset).is_file() and made.split != base.split:
        what = f"of evaluation {made.name} is the one file that the runs train on: give another"
        raise SettingError("dataset", made.dataset, what)
    if not other_data and made.split == base.split:
        what = f"evaluation {made.name} asks split {made.split}, which the runs train on"
        warnings.warn(f"{what}: its accuracy is not that on new problems", stacklevel=2)
    return made


def _start(file, base, start_config, start_settings):
    """The Config of the supervised start, None where runs start from the base model."""
    if file.warm_start is None:
        return None if base.warm_start == "none" else start_settings(base, None)
    in_file, given = _level(file.warm_start, start_config, "warm_start")
    _refuse_owned("warm_start", given)
    return start_settings(base, combined(start_config, in_file, given))


def _plan(file, base, start, arms, evaluations):
    """What plan.json holds; refuses endpoints and tests that name what is not there."""
    names, asked = [arm.name for arm in arms], {e.name: e for e in evaluations}
    for role in ("baseline", "treatment"):
        check_one_of(file, role, names)
    check(file, "treatment", lambda v: v != file.baseline, "is the baseline: name another arm")
    check_one_of(file, "primary", asked)
    secondary = [_made(Secondary, values, "secondary") for values in file.secondary or ()]
    for one in secondary:
        _check_secondary(one, asked)
    tests = _tests(_made(Tests, file.tests or {}, "tests"), file.seeds)
    verdict = _verdict(file, names)
    try:
        text = here_or_ours(file.text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = f"cannot be read ({type(error).__name__})" if file.text else "is left out"
        what = (
            f"{why}: write what is compared, and what will count as what, into a Markdown file, and name it"
        )
        raise SettingError("text", file.text, what) from error
    planned = []
    for arm in arms:
        check(arm, "first_seeds", lambda v: v is None or 1 <= v <= len(file.seeds), "must be of the seeds")
        of_it = {"name": arm.name, "settings": arm.settings or {}, "role": arm.role}
        planned.append(of_it | {"seeds": file.seeds[: arm.first_seeds]})
    plan = {
        "schema": 1,
        "name": file.name,
        "text": text,
        "baseline": file.baseline,
        "treatment": file.treatment,
        "arms": planned,
        "seeds": file.seeds,
        "evaluations": [dataclasses.asdict(e) for e in evaluations],
        "primary": {"evaluation": file.primary},
        "secondary": [{k: v for k, v in vars(one).items() if v is not None} for one in secondary],
        **tests,
        "verdict": verdict,
        "base": {**_results_of(base), "model": base.model},
        "start": None if start is None else _results_of(start),
    }
    return json.loads(json.dumps(plan))


def _check_secondary(one, asked):
    check_one_of(one, "evaluation", asked)
    evaluation = asked[one.evaluation]
    if one.measure in ("maj", "pass") and evaluation.samples < 2:
        raise SettingError("measure", one.measure, f"needs several samples, {one.evaluation} has one")
    if one.steps is not None:
        sides = {"treatment", "baseline"}
        if set(one.steps) != sides or not set(one.steps.values()) <= set(evaluation.steps):
            remedy = f"must give treatment and baseline a step of {evaluation.steps} each"
            raise SettingError("steps", one.steps, remedy)


def _tests(tests, seeds):
    """The tests as the plan has them, the numbers of seeds checked."""
    look, fewest = tests.look_after, tests.fewest_seeds or len(seeds)
    most = tests.most_seeds or len(seeds)
    if look is not None and not 2 <= look <= fewest:
        raise SettingError("look_after", look, f"must be from 2 to fewest_seeds={fewest}")
    if not 2 <= fewest <= most <= len(seeds):
        numbers = f"2 <= fewest_seeds={fewest} <= most_seeds={most} <= {len(seeds)} seeds"
        raise SettingError("fewest_seeds", fewest, f"must be {numbers}")
    hidden = {} if look is None else {"hide_means": True}
    return {**vars(tests), "fewest_seeds": fewest, "most_seeds": most, **hidden}


def _verdict(file, names):
    if file.verdict is None:
        return None
    verdict = dict(treatment=file.treatment, baseline=file.baseline, controls=[], averaging=None)
    if unknown := set(file.verdict) - {"controls", "averaging"}:
        raise SettingError("verdict", min(unknown), "there are controls and averaging")
    verdict |= file.verdict
    for name in (*verdict["controls"], *filter(None, [verdict["averaging"]])):
        if name not in names:
            raise SettingError("verdict", name, f"is no arm: there are {', '.join(names)}")
    return verdict

"""The strangers of a run: completions of other problems, which paths hear in the control of this name."""

import random
from pathlib import Path

from accelerate.utils import gather_object

from decoding.controls import Strangers
from decoding.rollout import Sampling, rollout_uniforms
from errors import RunError, SettingError, counted
from learning.parallel import first_over_processes, shard, together
from reporting.files import STRANGERS, read_records, write_records

PROBLEMS, GENERATIONS = 64, 8
RETRY = 2**31  # of their draws: no step tries so often


def hear_strangers(run, decoder, problems):
    """Tell the decoder who the strangers of a run are, where its paths hear any.

    They are sampled once, as single paths, from the weights that the run starts from, and kept in its folder,
    where a resumed run finds them. The sampler must still have these weights; every process must call it.
    """
    interaction = decoder.interaction
    if interaction.control != "strangers" or interaction.lambda_blend == 0 or run.is_finished:
        return
    path, records = run.folder / STRANGERS, None
    with together():
        if run.accelerator.is_main_process and run.progress.step > 0 and path.exists():
            records = read_strangers(path)
    records = first_over_processes(records)
    if records is None:
        records = _sampled(run, decoder, problems)
        with together():
            if run.accelerator.is_main_process:
                write_records(path, records)
        run.say(f"strangers: {counted(len(records), 'completion')}, sampled from the start into {path}")
    decoder.hear_strangers(Strangers.of([r["ids"] for r in records], run.config.max_completion_length))


def strangers_of(model, width):
    """The Strangers of the run that trained a model, from its folder, `width` tokens of each at most."""
    places = Path(model), Path(model).parent  # of a run, or of its best model or a checkpoint
    path = next((place / STRANGERS for place in places if (place / STRANGERS).exists()), None)
    if path is None:
        remedy = f"needs the {STRANGERS} of the model's run in its folder; --m3po_control none is M3PO itself"
        raise SettingError("m3po_control", "strangers", remedy)
    return Strangers.of([record["ids"] for record in read_strangers(path)], width)


def read_strangers(path):
    """The lines of a run's file of strangers; RunError where it is damaged."""
    try:
        records = list(read_records(path, broken="raise"))
        if records and all(record["ids"] for record in records):
            return records
    except (ValueError, KeyError, TypeError):
        pass
    raise RunError(f"{path} is damaged: delete it, and --resume true samples it again from the start")


def _sampled(run, decoder, problems):
    """The strangers as lines of their file: example_id, generation, and the ids of the reasoning."""
    config, count = run.config, min(PROBLEMS, len(problems))
    T, G = config.max_completion_length, GENERATIONS
    chosen, local = random.Random(config.seed).sample(problems, count), shard(count, run.accelerator)
    asked, uniforms = chosen[local], rollout_uniforms(config.seed, 0, RETRY, count * G, T).view(count, G, T)
    uniforms = uniforms[local]
    at_once = max(1, len(run.local_groups) * config.num_generations // G)  # as many rows as in a step

    def sample():
        rows = []
        for i in range(0, len(asked), at_once):
            part, draws = asked[i : i + at_once], uniforms[i : i + at_once].flatten(0, 1)
            sampling = Sampling(T, G, config.temperature)
            rollout = decoder.rollout([p.ids for p in part], sampling, draws, interact=False)
            thinking = rollout.thinking.sum(-1).tolist()
            rows += [ids[: max(1, n)] for ids, n in zip(rollout.completion_ids(), thinking, strict=True)]
        return rows

    rows = run.interruptible(decoder, sample)
    names = [(p.problem.id, generation) for p in asked for generation in range(G)]
    return gather_object(
        [{"example_id": i, "generation": g, "ids": ids} for (i, g), ids in zip(names, rows, strict=True)]
    )

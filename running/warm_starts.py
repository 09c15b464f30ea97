"""Whole warm starts, kept for every run that would make the same one.

Each is a folder CACHE/KEY with the files that sft_train.py wrote. The key is a digest of all that its weights
depend on. A folder gets its name when it is whole, and each file is compared with its sha256 when it is
copied out, so that no run starts from half of one. Where all together take more than LIMIT, the ones that
were not used for longest go. Whoever deletes CACHE loses nothing but time.
"""

import hashlib
import json
import os
import platform
import shutil
import time
import uuid
from pathlib import Path

import torch
from transformers import AutoConfig

from answers.user_files import code_of, user_files
from decoding.engine import say
from learning.device import cpu_threads
from reporting.files import sha256_of, write_whole, yaml_text
from running.contract import model_fingerprint, problems_fingerprint
from running.folder import clear
from running.settings import free_on_resume, resolved
from running.study import imported_files

LIMIT = 20e9  # bytes of all that are kept
MANIFEST, OWN = "warm_start_files.json", ("warm_start.json", ".lock")
UNUSED = ("m3po_module.py", "reporting/")  # code that no supervised step depends on
LITTER_SECONDS = 86400  # after which what a killed process left half written is deleted


def cache_folder(config):
    """Where warm starts are kept, or None."""
    name = config.warm_start_cache
    if name == "default":
        name = os.environ.get("GRPO_M3PO_CACHE", "")
    if name == "none":
        return None
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(name) if name else home / "grpo-m3po" / "warm_starts"


def read_inputs(settings, problems):
    """Digests of the data and the model that a warm start reads."""
    return {"data": problems_fingerprint(problems), "start": model_fingerprint(settings.model)}


def key_of(settings, inputs, device, processes):
    """The name of the warm start of these settings, inputs and machine.

    None where it would not be the same each time: of a model without a digest, or where a clock ends it.
    """
    start = inputs["start"] or _revision(settings)
    if start is None or settings.max_minutes is not None:
        return None
    everything, free = resolved(settings), free_on_resume(type(settings)) - {"versions"}
    if settings.patience:
        free.remove("eval_every")  # evaluations decide where it ends
    is_on_gpu = device.type == "cuda"
    code = {name: digest for name, digest in imported_files("sft_train.py") if not name.startswith(UNUSED)}
    of_the_user = [sha256_of(file) for _, path in code_of(settings) for file in user_files(path)]
    depends_on = {
        "settings": {name: value for name, value in everything.items() if name not in free},
        "inputs": inputs | {"start": start},
        "code": [code, of_the_user],
        "machine": [platform.system(), platform.machine(), torch.backends.cpu.get_cpu_capability()],
        "device": torch.cuda.get_device_name(device) if is_on_gpu else device.type,
        "threads": cpu_threads(settings, device) or torch.get_num_threads(),
        "processes": processes,
    }
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:32]


def _revision(settings):
    """The commit of a model on the hub; a word for the embedded one, whose weights follow from the code."""
    if settings.model == "tiny":
        return "tiny"
    try:
        return AutoConfig.from_pretrained(
            settings.model, trust_remote_code=settings.trust_remote_code
        )._commit_hash
    except (OSError, ValueError):  # refused in the words of whoever loads it
        return None


def kept_at(cache, key):
    """The folder of the kept warm start of a key; None where there is none."""
    is_kept = cache is not None and key is not None and (cache / key / MANIFEST).exists()
    return cache / key if is_kept else None


def copy_out(cache, key, settings):
    """Fill the warm start's output_dir with the kept one of this key; False where there is none."""
    kept, folder = kept_at(cache, key), Path(settings.output_dir)
    if kept is None:
        return False
    clear(settings)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name, digest in json.loads((kept / MANIFEST).read_text(encoding="utf-8")).items():
            copy = folder / f"{name}.part"
            shutil.copyfile(kept / name, copy)
            if sha256_of(copy) != digest:
                raise ValueError(f"{name} has changed")
            os.replace(copy, folder / name)
        os.utime(kept)  # used just now
        made = time.strftime("%Y-%m-%d", time.localtime((kept / MANIFEST).stat().st_mtime))
    except (OSError, ValueError) as error:  # damaged, or deleted meanwhile
        say(f"the warm start in {kept} is not whole ({error}): it is made again")
        clear(settings)
        _delete(kept)
        return False
    write_whole(folder / "run_config.yaml", yaml_text(resolved(settings)))
    say(f"warm start: the one of {made} in {kept}, which is the same to the bit (docs/files.md)")
    return True


def keep(cache, key, settings):
    """Keep the whole warm start in its output_dir under a key. What stands in the way is only said."""
    if cache is None or key is None:
        return
    folder, part = Path(settings.output_dir), cache / f".part-{uuid.uuid4().hex}"
    files = [path for path in folder.iterdir() if path.is_file() and path.name not in OWN]
    if folder / "config.json" not in files:
        return
    size = sum(path.stat().st_size for path in files)
    try:
        if size > LIMIT:
            raise OSError(f"it takes {size / 1e9:.1f} GB of {LIMIT / 1e9:.0f}")
        part.mkdir(parents=True)
        for path in files:
            shutil.copyfile(path, part / path.name)
        manifest = {path.name: sha256_of(part / path.name) for path in files}
        write_whole(part / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        if not (cache / key).exists():
            part.rename(cache / key)  # fails where another run was quicker, which is as good
        make_room(cache, but=key)
        say(f"warm start: kept for other runs in {cache / key} (docs/files.md)")
    except OSError as error:
        if not (cache / key).exists():
            say(f"the warm start is not kept for other runs in {cache}: {error.strerror or error}")
    finally:
        shutil.rmtree(part, ignore_errors=True)


def make_room(cache, but):
    """Delete the warm starts that were not used for longest until all take at most LIMIT, and old litter."""
    for path in cache.glob(".*-*"):
        if time.time() - path.stat().st_mtime > LITTER_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
    kept = [path for path in cache.iterdir() if (path / MANIFEST).exists()]
    sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in kept}
    for path in sorted(kept, key=lambda path: path.stat().st_mtime):
        if sum(sizes.values()) > LIMIT and path.name != but:
            _delete(path)
            del sizes[path]


def _delete(path):
    """Delete a warm start, which loses its name first: nobody finds half of one."""
    gone = path.with_name(f".gone-{uuid.uuid4().hex}")
    try:
        path.rename(gone)
    except OSError:  # another process was quicker
        return
    shutil.rmtree(gone, ignore_errors=True)

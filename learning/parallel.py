"""Several processes: the rows that each works on, what they agree on over all machines, DDP or FSDP2."""

import os
import socket
from contextlib import contextmanager

import torch
from accelerate.utils import gather_object
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from decoding.rollout import joined
from errors import SettingError, SharedError, one_line
from learning.precision import compute_dtype


def distribute(accelerator, scorer, config):
    """The scorer as data parallelism runs it.

    Whole on each process (DDP), or with float32 weights, gradients and moments in shards (FSDP2).
    """
    if not config.fsdp or accelerator.num_processes == 1:
        return accelerator.prepare_model(scorer)
    device = accelerator.device.type
    mesh = init_device_mesh(device, (accelerator.num_processes,))
    dtype = compute_dtype(config.precision, accelerator.device)
    half = None if dtype == torch.float32 else dtype
    precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
    blocks = set(scorer.model._no_split_modules or ())
    for module in scorer.model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh, mp_policy=precision)
    return fully_shard(scorer, mesh=mesh, mp_policy=precision)


def whole(tensor):
    """A sharded tensor put together (every process must call it), any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard(count, accelerator, rows_each=1):
    """The slice of `count` items of `rows_each` rows, in order, that this process works on.

    The numbers of items of two processes differ by one at most.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    return slice(count * rank // world * rows_each, count * (rank + 1) // world * rows_each)


def owners(tokens, holders, world):
    """Which of `world` processes should work on each group: all get about the same number of tokens.

    tokens: of each group; holders: the processes that have them now. The longest go first, each to the
    process with the least so far, its own among equals. A group that costs nothing stays, and so do all
    where the fullest process has at most 5% too many.
    """
    now = [sum(t for t, h in zip(tokens, holders, strict=True) if h == rank) for rank in range(world)]
    if max(now) * world <= 1.05 * sum(now):
        return list(holders)
    loads, chosen = [0] * world, list(holders)
    for i in sorted(filter(tokens.__getitem__, range(len(tokens))), key=lambda i: -tokens[i]):
        chosen[i] = min(range(world), key=lambda rank: (loads[rank], rank != holders[i]))
        loads[chosen[i]] += tokens[i]
    return chosen


def balanced(accelerator, rollout, advantages, tokens, pad_id):
    """The groups that this process should work on, and their advantages; every process must call it.

    tokens: of each of its groups, what they cost it. Whole groups move: a blend still finds its peers.
    """
    rank, G, device = accelerator.process_index, rollout.num_generations, rollout.ids.device
    costs = [(cost, holder) for holder, own in enumerate(gather_object([tokens])) for cost in own]
    everywhere, holders = map(list, zip(*costs, strict=True))
    chosen = owners(everywhere, holders, accelerator.num_processes)
    if chosen == holders:
        return rollout, advantages
    first = holders.index(rank)
    here = range(first, first + len(tokens))
    leaving = [i for i in here if chosen[i] != rank]
    staying = [i - first for i in here if chosen[i] == rank]
    rows = advantages.view(-1, G)
    sent = {i: (rollout.groups([i - first]).to("cpu"), rows[[i - first]].cpu()) for i in leaving}
    received = {i: pair for part in gather_object([sent]) for i, pair in part.items() if chosen[i] == rank}
    pairs = [(rollout.groups(staying), rows[staying])] if staying else []
    for _, (moved, their_rows) in sorted(received.items()):
        pairs.append((moved.to(device), their_rows.to(device)))
    rollouts, rows = zip(*pairs, strict=True)
    return joined(rollouts, pad_id), torch.cat(rows).flatten()


def max_over_processes(value):
    """The largest value that any process has; every process must call it."""
    return max(gather_object([value]))


def first_over_processes(value):
    """The value of the first process that has one, None where none has; the same on all processes."""
    return next((v for v in gather_object([value]) if v), None)


def raise_on_all(error):
    """Raise on all processes the error that one of them has, if any; every process must call it.

    Its line is told once on each machine.
    """
    failures = gather_object([None if error is None else _line_and_status(error)])
    failure = next(filter(None, failures), None)
    if failure is not None:
        raise error if len(failures) == 1 else SharedError(*failure)


def is_first_of_node():
    """Whether this process writes the files of its machine."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def _node():
    """What tells the machines apart: two launchers on one host are two of them."""
    return os.environ.get("GROUP_RANK"), socket.gethostname()


def of_first_of_node(value):
    """The value that the first process of this machine has; every process must call it."""
    gathered = gather_object([(_node(), is_first_of_node(), value)])
    return next(value for node, is_first, value in gathered if is_first and node == _node())


def gather_with_nodes(value):
    """[(node, value)] of all processes, in their order; a node is its number, from 0, and its host's name."""
    gathered = gather_object([(_node(), value)])
    nodes = list(dict.fromkeys(node for node, _ in gathered))
    return [((nodes.index(node), node[1]), value) for node, value in gathered]


@contextmanager
def together():
    """An error that one process raises inside is raised on all of them, as one line that names its node.

    Nothing inside may wait for another process, and every process must call it.
    """
    error = None
    try:
        yield
    except Exception as caught:  # the others must learn of any error, or they would wait for ever
        error = caught
    failure = None if error is None else _line_and_status(error)
    outcomes = gather_with_nodes(failure)
    failed = [rank for rank, (_, failure) in enumerate(outcomes) if failure]
    if not failed:
        return
    if error is not None and (len(outcomes) == 1 or not hasattr(error, "status")):
        raise error  # with its traceback where no user can mend it
    (number, host), (line, status) = outcomes[failed[0]]
    if len({failure for _, failure in outcomes}) > 1:  # not all processes fail alike
        has_nodes = len({node for node, _ in outcomes}) > 1
        line = f"node {number} ({host}): {line}" if has_nodes else f"process {failed[0]}: {line}"
    raise SharedError(line, status) from error


def _line_and_status(error):
    """An error as one line, and the exit status of a script that ends with it."""
    if hasattr(error, "status"):
        return one_line(error, None), error.status
    return f"{type(error).__name__}: {one_line(error)}", 1


def refuse_unlike(values):
    """Refuse, on all processes, what one of them has otherwise than the first; every process must call it.

    values: {(setting, its value): what must be the same}, without those that a process does not have.
    """
    (_, first), *others = gather_with_nodes(values)
    for (number, host), there in others:
        for key in {**first, **there}:
            if first.get(key) == there.get(key):
                continue
            what = f"is another on node {number} ({host}) than on the first node"
            if key not in there:
                what = f"is missing on node {number} ({host})"
            elif key not in first:
                what = f"is on node {number} ({host}), and not on the first node"
            refusal = SettingError(*key, f"{what}: give every node the same")
            raise SharedError(str(refusal), refusal.status)

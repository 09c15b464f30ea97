"""Several processes: the rows that each works on, numbers they agree on, DDP or FSDP2."""

import torch
from accelerate.utils import gather_object
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def distribute(accelerator, scorer, config):
    """The scorer as data parallelism runs it.

    Whole on each process (DDP), or with float32 weights, gradients and moments in shards (FSDP2).
    """
    if not config.fsdp or accelerator.num_processes == 1:
        return accelerator.prepare_model(scorer)
    device = accelerator.device.type
    mesh = init_device_mesh(device, (accelerator.num_processes,))
    half = torch.bfloat16 if config.bf16 and device == "cuda" else None
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


def max_over_processes(value):
    """The largest value that any process has; every process must call it."""
    return max(gather_object([value]))


def first_over_processes(value):
    """The value of the first process that has one, None where none has; the same on all processes."""
    return next((v for v in gather_object([value]) if v), None)

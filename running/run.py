"""What surrounds a step: stopping, time, the order of the problems."""

import math
import os
import signal
import sys
import time

import torch

from errors import RunError
from learning.parallel import max_over_processes


class Stop:
    """Remembers that a signal came, or that the time is over. The handler sets a flag and does nothing else; a later Ctrl-C leaves at once.

    The same signal can come twice, from a cluster to every process and from the one that started this: only a Ctrl-C a second later is a second one.
    `with` puts the handlers back that were there before, however the training ends.
    """

    def __init__(self, minutes=None):
        self.number, self.since, self.end = (
            0,
            0.0,
            None if minutes is None else time.monotonic() + 60 * minutes,
        )
        self.before = {
            name: signal.signal(name, self._came) for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        }
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            self.before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._came)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for name, handler in self.before.items():
            signal.signal(name, handler)

    def _came(self, number, frame):
        if self.number and number == signal.SIGINT and time.monotonic() - self.since > 1.0:
            os._exit(128 + number)
        if not self.number:
            self.number, self.since = number, time.monotonic()

    def asked(self):
        """The signal to stop for, 0 where there is none; at the time limit SIGTERM's."""
        over = self.end is not None and time.monotonic() >= self.end
        return self.number or (int(signal.SIGTERM) if over else 0)

    def agreed(self):
        """The same on all processes, which must all call it: a signal may reach one of them only."""
        return max_over_processes(self.asked())


def check_bad_steps(config, bad, metrics):
    """Stop after too many steps in a row that could not be taken."""
    if bad >= config.max_bad_steps:
        raise RunError(
            f"{bad} steps in a row had a loss or gradient that is not finite, the last on problems {metrics['bad_examples']}; no weight was changed by them: "
            "lower learning_rate, or go on from the last checkpoint with --resume true"
        )


def leave(stop, checkpoints, done):
    """Save what is finished and is not saved yet, and end with 128 + the signal. All processes must call it."""
    number = stop.agreed()
    if done is not None:
        checkpoints.save(done)
    if checkpoints.accelerator.is_main_process:
        kept = f"saved checkpoint-{done['step']}" if done is not None else "nothing new to save"
        print(f"stopped by {signal.Signals(number).name}: {kept}; go on with --resume true", flush=True)
    checkpoints.accelerator.wait_for_everyone()
    if checkpoints.held is not None:
        checkpoints.held.close()
    sys.exit(128 + number)


def problem_batch(count, size, first, seed):
    """Indices of `size` problems from place `first` on, in an order that each pass over the data draws anew from (seed, pass)."""
    indices, orders = [], {}
    for place in range(first, first + size):
        passed, offset = divmod(place, count)
        if passed not in orders:
            generator = torch.Generator().manual_seed((seed << 20) + passed)
            orders[passed] = torch.randperm(count, generator=generator).tolist()
        indices.append(orders[passed][offset])
    return indices


def steps_to_do(config, count):
    """Steps of one outer iteration."""
    return (
        config.num_steps
        if config.num_epochs is None
        else math.ceil(config.num_epochs * count / config.batch_size)
    )


class Stopwatch:
    """Seconds since the last lap, the device's work included."""

    def __init__(self, device):
        self.device = device
        self.lap()

    def lap(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        elapsed, self.last = now - getattr(self, "last", now), now
        return elapsed


def out_of_patience(config, done):
    """Whether the evaluations since the best are as many as the run waits for: it ends, or was stopped or killed when it was to end."""
    return bool(config.patience) and done["since_best"] >= config.patience

"""Stopping: on a signal, or when the time that was given is over."""

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from pathlib import Path

from errors import Interrupted
from learning.parallel import max_over_processes

# Clusters warn of a kill by one of the last four; Windows lacks them
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGHUP")
HANGUP = getattr(signal, "SIGHUP", None)


SECONDS_TO_UNWIND = 5.0  # for what is loaded to let go
TIME_IS_OVER = 1024  # added to the signal that ends a run at its time limit: more than any signal


class Stop:
    """Remembers that a signal came, or that the time is over; a second Ctrl-C leaves at once.

    A second signal within one second is ignored: a cluster and the launcher may both send it. `restore` puts
    back the handlers that were there before. In another thread than the main one no signal is heard: Python
    gives them all to that, and whoever has it decides.
    """

    def __init__(self, minutes=None):
        self.number, self.received_at = 0, 0.0
        self.at_once = None  # what a signal ends where it is, since there is nothing to save
        self.breaks_off = False  # a signal raises Interrupted where it finds the main thread
        self.last_resort = None
        self.end = None if minutes is None else time.monotonic() + 60 * minutes
        self.names = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
        if HANGUP in self.names and signal.getsignal(HANGUP) is signal.SIG_IGN:  # nohup switches it off
            self.names.remove(HANGUP)
        if threading.current_thread() is not threading.main_thread():
            self.names = []
        _free_forked_processes()
        self.handlers_before = self._take()

    def _take(self):
        return {name: signal.signal(name, self._remember) for name in self.names}

    def restore(self):
        if self.last_resort is not None:
            self.last_resort.cancel()
        for name, handler in self.handlers_before.items():
            signal.signal(name, handler)

    def _remember(self, number, frame):
        name = signal.Signals(number).name
        if self.number and number == signal.SIGINT and time.monotonic() - self.received_at > 1.0:
            _tell("left at once, without saving")
            os._exit(128 + number)
        if self.number:
            return
        self.number, self.received_at = number, time.monotonic()
        if self.at_once:
            _tell(f"stopped by {name} while it was {self.at_once}")
            # a download waits for its own threads, each with gigabytes to come
            self.last_resort = threading.Timer(SECONDS_TO_UNWIND, os._exit, [128 + number])
            self.last_resort.daemon = True
            self.last_resort.start()
            sys.exit(128 + number)
        _tell(f"{name}: stopping (Ctrl-C again leaves at once, without saving)")
        if self.breaks_off:
            raise Interrupted

    @contextlib.contextmanager
    def breaking_off(self):
        """Around a user's function, which may take minutes or for ever: a signal raises Interrupted in it.

        Handlers of its own go afterwards: a signal that they took would not stop the run.
        """
        self.breaks_off = True
        try:
            if self.number:  # it came after the last look, when nothing was broken off yet
                raise Interrupted
            yield
        finally:
            self.breaks_off = False
            self._take()

    def asked(self):
        """The signal to stop for, 0 where there is none; SIGTERM + TIME_IS_OVER at the time limit."""
        is_over = self.end is not None and time.monotonic() >= self.end
        return self.number or (TIME_IS_OVER + int(signal.SIGTERM) if is_over else 0)

    def agreed(self):
        """The same on all processes, which must all call it: a signal may reach only one of them."""
        return max_over_processes(self.asked())


def _tell(line):
    """Write a line from a handler of signals: the signal may have come within a print."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError):  # closed by who started it
            os.write(2, f"{Path(sys.argv[0]).name}: {line}\n".encode())


@functools.cache
def _free_forked_processes():
    """Let a forked process end on signals: a reward may run an answer's code in one, and wait for its end."""

    def free():
        for name in map(signal.Signals, signal.valid_signals()):
            if getattr(signal.getsignal(name), "__func__", None) is Stop._remember:
                signal.signal(name, signal.SIG_DFL)

    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=free)

"""Stopping: on a signal, or when the time that was given is over."""

import os
import signal
import time

from learning.parallel import max_over_processes

# Clusters warn of a kill by one of the last four; Windows lacks them
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGHUP")
HANGUP = getattr(signal, "SIGHUP", None)


TIME_IS_OVER = 1024  # added to the signal that ends a run at its time limit: more than any signal


class Stop:
    """Remembers that a signal came, or that the time is over; a second Ctrl-C leaves at once.

    A second signal within one second is ignored: a cluster and the launcher may both send it. `restore` puts
    back the handlers that were there before.
    """

    def __init__(self, minutes=None):
        self.number, self.received_at = 0, 0.0
        self.end = None if minutes is None else time.monotonic() + 60 * minutes
        names = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
        if HANGUP in names and signal.getsignal(HANGUP) is signal.SIG_IGN:  # nohup switches it off
            names.remove(HANGUP)
        self.handlers_before = {name: signal.signal(name, self._remember) for name in names}

    def restore(self):
        for name, handler in self.handlers_before.items():
            signal.signal(name, handler)

    def _remember(self, number, frame):
        if self.number and number == signal.SIGINT and time.monotonic() - self.received_at > 1.0:
            os._exit(128 + number)
        if not self.number:
            self.number, self.received_at = number, time.monotonic()

    def asked(self):
        """The signal to stop for, 0 where there is none; SIGTERM + TIME_IS_OVER at the time limit."""
        is_over = self.end is not None and time.monotonic() >= self.end
        return self.number or (TIME_IS_OVER + int(signal.SIGTERM) if is_over else 0)

    def agreed(self):
        """The same on all processes, which must all call it: a signal may reach only one of them."""
        return max_over_processes(self.asked())

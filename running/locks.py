"""Files that one process at a time holds, on any system. Loads no torch."""

import contextlib
from contextlib import ExitStack

from filelock import FileLock, Timeout


def hold(path):
    """Lock a file, which is made where there is none; returns an ExitStack, whose close() lets go of it.

    BlockingIOError where another process holds it; another OSError where there can be no lock.
    """
    lock, held = FileLock(path, timeout=0), ExitStack()
    try:
        lock.acquire()
    except Timeout as error:
        raise BlockingIOError(f"{path} is held by another process") from error
    except NotImplementedError as error:  # a file system without locks
        raise OSError(None, "no locks on this file system") from error
    held.callback(lock.release)
    return held


def forget(path):
    """Delete the file of a lock that is held; where a file in use cannot be deleted (Windows) it stays."""
    with contextlib.suppress(PermissionError):
        path.unlink(missing_ok=True)

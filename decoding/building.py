"""Building kernels: whether Triton can on this machine, and the processes that compile for torch.compile."""

import contextlib
import functools
import signal

import torch

from errors import one_line


@functools.cache
def why_no_kernels():
    """Why there are no kernels here, in a few words; None where Triton builds them."""
    if not torch.cuda.is_available():
        return "no CUDA"  # a torch without CUDA comes without triton
    try:
        from triton.runtime import driver

        driver.active  # noqa: B018 - built when it is first asked for, with the C compiler that kernels need
    except ImportError:
        return "triton is not installed"
    except Exception as error:  # a compiler ends in many ways
        why = one_line(error, 150)
        return f"Triton builds no kernels: install gcc and Python's headers, or set CC: {why}"
    return None


@functools.cache
def start_compile_workers():
    """Start the processes that torch.compile hands kernels to, so that they are ready when it does.

    Left to itself torch starts them at the first compilation, and compiles in this process until they are
    there. A signal that stops a run (SIGTERM, SIGUSR1, ...) often goes to the whole group of processes. These
    processes do not take it: torch would wait for them without end, and the run could not save and stop.
    """
    # private names: a torch without them starts its own
    with contextlib.suppress(ImportError, AttributeError):
        from torch._inductor.async_compile import AsyncCompile

        with _signals_held_back():
            AsyncCompile.use_process_pool()


@contextlib.contextmanager
def _signals_held_back():
    """Signals come after this block; processes that are started in it never get those that can be blocked."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

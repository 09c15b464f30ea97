"""Whether Triton can build kernels on this machine; it needs a C compiler and Python's headers."""

import functools

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

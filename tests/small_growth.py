"""How the cost of a call grows with its input, whatever else the machine does."""

import math
import time


def growth(call, small, large, limit):
    """CPU time of call(large) divided by that of call(small): the least of a few repetitions of each.

    Stops as soon as the ratio is below `limit`.
    """
    call(small)  # caches fill
    least_small = least_large = math.inf
    for _ in range(7):
        least_small = min(least_small, cpu_seconds(call, small))
        least_large = min(least_large, cpu_seconds(call, large))
        if least_large < limit * least_small:
            break
    return least_large / max(least_small, 1e-9)


def cpu_seconds(call, argument):
    started = time.process_time()
    call(argument)
    return time.process_time() - started

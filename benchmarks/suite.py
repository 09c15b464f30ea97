"""What the fast tests cost: user and system time of the suite and of all it starts, and seconds on the clock.

python benchmarks/suite.py
"""

import re
import resource
import subprocess
import sys
import time

from common import ROOT, write_results

COMMAND = ["-m", "pytest", "-n", "2", "-m", "not gpu and not slow", "-p", "no:cacheprovider"]


def main():
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *COMMAND], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    wall = time.perf_counter() - started
    print(done.stdout)
    if done.returncode:
        sys.exit(done.returncode)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    case = "fast suite"
    write_results(
        "suite",
        [
            (case, "tests", passed, "tests"),
            (case, "user_s", round(used.ru_utime, 1), "s"),
            (case, "system_s", round(used.ru_stime, 1), "s"),
            (case, "wall_s", round(wall, 1), "s"),
        ],
    )


if __name__ == "__main__":
    main()

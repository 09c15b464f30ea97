"""What a run is made with: the versions of the packages, and the project's commit. Loads none of them."""

import functools
import subprocess
import sys
from importlib import metadata
from pathlib import Path

NEEDED = ("torch", "transformers", "accelerate", "datasets")
PACKAGES = (*NEEDED, "numpy", "peft", "bitsandbytes", "mpmath", "triton")


def versions(names=PACKAGES):
    """{name: version} of Python and of those of the packages that are there."""
    there = {"python": sys.version.split()[0], **{name: _version(name) for name in names}}
    return {name: version for name, version in there.items() if version}


@functools.cache
def commit():
    """The commit of the clone that this is; "unknown" where it is none, or where there is no git."""
    git = ["git", "rev-parse", "--verify", "-q", "HEAD"]
    try:
        done = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:  # small images have no git
        return "unknown"
    return done.stdout.strip() or "unknown"


def version_line():
    """What --version prints: the project has no versions of its own, but commits."""
    packages = ", ".join(f"{name} {version}" for name, version in versions(NEEDED).items())
    return f"commit {commit()}; {packages}"


@functools.cache
def _version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

"""What a user is told in one line; each error has the exit status of the script that prints it."""


class SettingError(ValueError):
    """A bad setting: names the field, the value and what would do. The scripts print it as one line and exit with 2."""

    def __init__(self, name, value, remedy):
        super().__init__(f"{name}={value!r}: {remedy}")


class DataError(ValueError):
    """Data that cannot be trained on: one line that names the file and the row."""


class RunError(RuntimeError):
    """A run that cannot go on, said in one line; the scripts exit with 1."""


class RewardError(RuntimeError):
    """A reward function raised, or returned something that cannot be trained on; one line that names it."""


class Interrupted(Exception):
    """Somebody asked for the end while rows were being decoded; what they have said so far is lost, and nothing else."""


class Stopped(Exception):
    """All processes agreed to stop. Run saves what is finished and ends with 128 + the signal."""

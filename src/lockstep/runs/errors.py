"""The errors whose message is written for the user, and the exit codes that scripts rely on."""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_NOT_UPLOADED = 3  # training finished, but the best checkpoint never reached the bucket
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL: a checkpoint was saved, starting again goes on


class UserError(Exception):
    """An error that the user can mend: one sentence that names what is wrong and what would work.

    A script prints it without a traceback and ends with exit code 2.
    """


class Interrupted(Exception):
    """Raised on every rank at the same step boundary once a stop was asked for and the checkpoint is complete."""

    agreed = False  # every rank raises it at this step
    elsewhere = False  # only ranks of other nodes were asked


class Diverged(Exception):
    """The loss or a weight became nan or inf; raised on every rank at the same step."""

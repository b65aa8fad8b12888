"""The one exception that a user's mistake raises."""

from __future__ import annotations


class MarsError(ValueError):
    """A user's mistake, told in one sentence: what was wrong, what was expected, what to do.

    Commands print it without a stack trace and exit with `exit_code`; a server answers it with a 4xx.
    """

    exit_code = 2

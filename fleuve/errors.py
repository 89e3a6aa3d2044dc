"""The one error that is the user's to mend: the command line prints its message and exits with code 2."""


class UserError(Exception):
    """Bad input. The message is one line: what is wrong, where, and the nearest right thing."""

"""The one error users see: something they wrote cannot be used."""


class UserError(ValueError):
    """Bad input: names the field or file and says what would be accepted.

    Command lines print it as a single line and exit with status 2; nothing else is caught.
    """


def first_line(error: Exception) -> str:
    """The first line of what `error` says, at most 200 characters; its kind if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__

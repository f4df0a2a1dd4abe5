"""The one error users see: something they wrote cannot be used."""


class UserError(ValueError):
    """Bad input: names the field or file and says what would be accepted.

    Command lines print it as a single line and exit with status 2; nothing else is caught.
    """

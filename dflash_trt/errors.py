"""The one exception that the command line turns into a sentence and exit status 2."""


class InputError(ValueError):
    """Something the user gave cannot be used; the message names it and says what to do."""

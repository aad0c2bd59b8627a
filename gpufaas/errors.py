"""What can go wrong in a command.

CommandError             a value that the command cannot work with, or something it lacks
"""


class CommandError(Exception):
    """Said to the person in one line, with exit code 2."""

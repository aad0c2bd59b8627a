"""What can go wrong in a command.

CommandError             a value that the command cannot work with, or something it lacks
└── EtcdFailed           no etcd could be started
"""


class CommandError(Exception):
    """Said to the person in one line, with exit code 2."""


class EtcdFailed(CommandError):
    """There is no etcd here, or it did not start; the text says why."""

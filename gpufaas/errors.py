"""What can go wrong in a command.

CommandError             a value that the command cannot work with, or something it lacks
├── EtcdFailed           no etcd could be started
├── AlreadyUp            a stack is up in this folder
└── StackFailed          a part of the stack did not come up
"""


class CommandError(Exception):
    """Said to the person in one line, with exit code 2."""


class EtcdFailed(CommandError):
    """There is no etcd here, or it did not start; the text says why."""


class AlreadyUp(CommandError):
    """Another process runs a stack in this folder."""

    def __init__(self, folder: str, who: str) -> None:
        super().__init__(f"a stack is up already, {who} in {folder}: gpufaas down, or --state DIR")


class StackFailed(CommandError):
    """A part of the stack ended, or was not ready in time."""

    def __init__(self, part: str, what: str, last_words: str) -> None:
        said = f"; it said:\n{last_words}" if last_words else ""
        super().__init__(f"{part} did not come up: it {what}{said}")

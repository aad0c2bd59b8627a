"""Errors of commands.

CommandError             an unusable value, or a missing program, package or server
├── EtcdFailed           no etcd could be started
│   └── PortTaken        another program listens on its port
├── AlreadyUp            a stack is up in this folder
└── StackFailed          a part of the stack did not come up
"""


class CommandError(Exception):
    """Shown on standard error in one line; the exit code is 2."""


class EtcdFailed(CommandError):
    """No etcd is installed, or it did not start; the text says why."""


class PortTaken(EtcdFailed):
    """Another program listens on the port that etcd was given."""


class AlreadyUp(CommandError):
    """Another process runs a stack in this folder."""

    def __init__(self, folder: str, holder: str) -> None:
        super().__init__(
            f"a stack is up already, {holder} in {folder}: gpufaas down, or --state DIR"
        )


class StackFailed(CommandError):
    """A part of the stack ended, or was not ready in time."""

    def __init__(self, part: str, failure: str, last_words: str) -> None:
        super().__init__(f"{part} did not come up: it {failure}; {last_words}")

"""What can go wrong in the scheduler.

SchedulerError
├── UnknownPolicy        no policy of that name
├── BadParameter         a policy parameter that does not exist, or a value it cannot take
├── BadEvent             an event about something that this core was never told of
└── BadWorkload          a workload or trace that cannot be simulated
"""


class SchedulerError(Exception):
    """Base of every error that the scheduler raises."""


class UnknownPolicy(SchedulerError):
    """No policy answers to this name."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        self.name = name
        self.known = known
        super().__init__(f"unknown policy {name!r}; known: {', '.join(known)}")


class BadParameter(SchedulerError):
    """A policy has no such parameter, or the value is outside its range."""

    def __init__(self, policy: str, parameter: str, detail: str) -> None:
        self.policy = policy
        self.parameter = parameter
        super().__init__(f"policy {policy!r}, parameter {parameter!r}: {detail}")


class BadEvent(SchedulerError):
    """The driver reported something about a slot, GPU or lease that does not exist."""

    def __init__(self, what: str, identity: object) -> None:
        self.what = what
        self.identity = identity
        super().__init__(f"no {what} {identity!r}")


class BadWorkload(SchedulerError):
    """The workload or its trace file is wrong; the text says where and why."""

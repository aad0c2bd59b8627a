"""What can be wrong with a workflow.

WorkflowError
├── BadWorkflow     a graph that no run could follow to its end
├── BadProfile      measured times that the search cannot use
└── SloTooShort     a deadline that even the fastest configurations miss
"""


class WorkflowError(Exception):
    """Base of every error about a workflow."""


class BadWorkflow(WorkflowError):
    """The graph of a workflow has a defect; `stage` is where, if it is one stage's."""

    def __init__(self, workflow: str, reason: str, stage: str = "") -> None:
        super().__init__(f"workflow {workflow}: {reason}")
        self.workflow = workflow
        self.reason = reason
        self.stage = stage


class BadProfile(WorkflowError):
    """A stage's profile is empty, or has a time or batch that is not positive."""


class SloTooShort(WorkflowError):
    """No choice of configurations ends within the deadline."""

    def __init__(self, workflow: str, slo_s: float, fastest_s: float) -> None:
        super().__init__(
            f"workflow {workflow} cannot end within {slo_s:g} s: the fastest takes {fastest_s:g} s"
        )
        self.workflow = workflow
        self.slo_s = slo_s
        self.fastest_s = fastest_s

"""What workflows raise, below the gateway's errors."""

from collections.abc import Sequence

from gateway_ext.errors import BadRequest, Busy, GatewayError, OwnStatus, Unknown


class BadWorkflowFile(BadRequest):
    """A workflow's file is invalid; the text has a line for each problem."""


class UnknownWorkflow(Unknown):
    """No such workflow."""

    def __init__(self, namespace: str, name: str) -> None:
        super().__init__(f"workflow {name} is not deployed in {namespace}")


class WorkflowsBusy(Busy):
    """The gateway has as many workflows under way as it takes, or as much of their data."""

    def __init__(self, why: str) -> None:
        GatewayError.__init__(self, why)
        self.retry_after_s = 1.0


class StageFailed(OwnStatus):
    """A stage failed. `status`, `headers` and `body` are the workflow's answer.

    If the call was `refused` for now, its function was not called. `called`: something was computed
    for the workflow, by this stage's function or by those before it.
    """

    def __init__(
        self,
        stage: str,
        status: int,
        why: str,
        *,
        headers: Sequence[tuple[bytes, bytes]] = (),
        body: bytes | None = None,
        refused: bool = False,
        called: bool = False,
    ) -> None:
        super().__init__(status, f"stage {stage}: {why}")
        self.stage = stage
        self.headers = headers
        self.body = body
        self.refused = refused
        self.called = called

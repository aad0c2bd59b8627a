"""The services that a manager's connections use."""

from dataclasses import dataclass

from gpu_manager.credentials import FunctionCredentials
from gpu_manager.node.node import GpuNode
from gpu_manager.runtimes.preparation import Preparation
from gpu_manager.server.connection_limits import ConnectionLimits
from gpu_manager.sessions.acquiring import Acquiring
from gpu_manager.sessions.administration import NodeAdministration
from gpu_manager.sessions.data_requests import NodeData
from gpu_manager.sessions.sessions import ClientSessions
from gpu_manager.sessions.weight_requests import Library


@dataclass(frozen=True, slots=True)
class Services:
    """The services of one manager; a new connection has `hello_s` to send HELLO."""

    node: GpuNode
    credentials: FunctionCredentials
    sessions: ClientSessions
    library: Library
    acquiring: Acquiring
    administration: NodeAdministration
    limits: ConnectionLimits
    preparation: Preparation
    data: NodeData
    hello_s: float

"""What every connection of a manager works with."""

from dataclasses import dataclass

from gpu_manager.acquiring import Acquiring
from gpu_manager.administration import Administration
from gpu_manager.credentials import Credentials
from gpu_manager.node import Node
from gpu_manager.sessions import Sessions
from gpu_manager.weight_requests import Library


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of one manager; a stranger has `hello_s` to say who it is."""

    node: Node
    credentials: Credentials
    sessions: Sessions
    library: Library
    acquiring: Acquiring
    administration: Administration
    hello_s: float

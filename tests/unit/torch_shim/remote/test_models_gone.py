"""What needs the weights of a model that is gone, while results of it are not."""

from typing import Any

import pytest
import torch

from torch_shim.capture.roots import root_of_module
from torch_shim.errors import NoWeights, RemoteFailure
from torch_shim.leases.leasing import ModelLeases, SessionLease
from torch_shim.remote.operators_there import run_there
from torch_shim.remote.recomputation import RememberedCall
from torch_shim.remote.values import Bound
from torch_shim.weights import ModelImage
from torch_shim.wire.protocol import FailureKind

nothing: Any = None


class NoLeases(ModelLeases):
    """For no weights."""

    def lease_for(self, _: int) -> SessionLease:
        raise NoWeights


def gone(*_: object) -> list[Any]:
    raise NoWeights


def test_weights_of_a_module_that_is_gone_are_none() -> None:
    module = torch.nn.Linear(2, 2)
    root = root_of_module(module)
    assert len([*root.tensors()]) == 2
    del module
    assert not [*root.tensors()]


def test_operator_runs_here_when_the_weights_are_gone() -> None:
    assert run_there(NoLeases(nothing, nothing), torch.Tensor.clone, (1,), None) is None


def test_bytes_are_lost_when_the_weights_are_gone_that_would_compute_them_again() -> None:
    bound = Bound([], ModelImage("d", {}), frozenset())
    with pytest.raises(RemoteFailure, match="the model that it was computed with is gone") as found:
        RememberedCall(gone, bound, [], 1).run([], {})
    assert found.value.failure == FailureKind.LOST

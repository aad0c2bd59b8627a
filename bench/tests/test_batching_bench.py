"""The calls of the comparison of batching: every system gets the same, and answers are checked."""

import json

import pytest
import torch

from bench.measure.peers.four_models import NAMES, answers, bodies, input_of, made
from bench.merging.batch_functions import OwnWay, deployment, name_of
from bench.merging.batching_systems import SETTINGS
from gateway_ext.model import Deployment, FunctionId
from gateway_ext.openfaas import function_options


@pytest.mark.parametrize("name", NAMES)
def test_list_is_answered_as_its_calls_are_alone(name: str) -> None:
    requests = [json.loads(body) for body in bodies(name, 3)]
    assert len({request["data"] for request in requests}) == 3
    model = made(name)
    together = answers(model, name, requests)
    alone = [answers(model, name, [request])[0] for request in requests]
    found, expected = (
        torch.tensor([each["scores"] for each in some]) for some in (together, alone)
    )
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(input_of(name, requests[0]), input_of(name, json.loads(bodies(name, 1)[0])))


@pytest.mark.parametrize("way", OwnWay)
def test_deployments_ask_for_what_they_are_named_after(way: OwnWay) -> None:
    given = deployment("mobilenet_v3_small", way)
    annotations = given["annotations"]
    assert isinstance(annotations, dict)
    function = FunctionId("openfaas-fn", name_of("mobilenet_v3_small", way))
    options = function_options.of(Deployment(function, "image", annotations=annotations))
    assert options.gpu
    assert bool(options.batches.most) == (way is OwnWay.LISTS)


def test_programs_of_peers_name_five_parts() -> None:
    assert all(setting.program.count(":") == 4 for setting in SETTINGS)

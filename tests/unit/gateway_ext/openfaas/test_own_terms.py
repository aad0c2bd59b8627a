"""The share and the quotas that a function asks for by its annotations."""

import pytest

from gateway_ext.errors import BadDeployment
from gateway_ext.model import Deployment, FunctionId
from gateway_ext.openfaas import function_options
from scheduler.model.owner_terms import OwnerTerms


def terms(**given: str) -> OwnerTerms | None:
    annotations = {f"com.gpufaas.{key.replace('_', '-')}": given[key] for key in given}
    deployment = Deployment(FunctionId("openfaas-fn", "f"), "image", annotations=annotations)
    return function_options.of(deployment).terms


def test_function_has_no_terms_of_its_own_without_annotations() -> None:
    assert terms() is None
    assert terms(priority="3", memory="2Gi") is None
    assert terms(weight="1") is None


def test_annotations_are_read() -> None:
    assert terms(
        weight="2.5", gpu_seconds="30", gpu_window="5m", memory_quota="2Gi", leases="3", waiting="9"
    ) == OwnerTerms(2.5, 0, 30.0, 300.0, 2 << 30, 3, 9)
    assert terms(gpu_seconds="1m30s") == OwnerTerms(gpu_s=90.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight", "0"),
        ("weight", "nan"),
        ("weight", "much"),
        ("gpu_seconds", "0"),
        ("gpu_seconds", "-3"),
        ("memory_quota", "2 bananas"),
        ("memory_quota", "0"),
        ("leases", "0"),
        ("leases", "1.5"),
        ("leases", "9" * 400),
        ("waiting", "-1"),
        ("waiting", "many"),
    ],
)
def test_deployment_is_refused_by_the_annotations_name(name: str, value: str) -> None:
    with pytest.raises(BadDeployment, match=rf"com\.gpufaas\.{name.replace('_', '-')}: '"):
        terms(**{name: value})


@pytest.mark.parametrize("window", ["0", "2d", "48h"])
def test_window_is_refused_when_it_is_out_of_bounds(window: str) -> None:
    with pytest.raises(BadDeployment, match=r"com\.gpufaas\.gpu-window"):
        terms(gpu_seconds="30", gpu_window=window)


def test_window_is_refused_when_there_is_no_limit_on_gpu_time() -> None:
    with pytest.raises(BadDeployment, match="gpu-seconds"):
        terms(gpu_window="60")

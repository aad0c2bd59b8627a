"""Limits of builds, as the gateway's settings name them."""

from pathlib import Path

import pytest

from gateway_ext.errors import BadRequest
from gateway_ext.providers.making import make_provider
from gateway_ext.settings import GatewaySettings


@pytest.mark.parametrize(
    "wrong",
    [{"builds_at_once": 0}, {"build_timeout_s": 0.0}, {"build_memory_bytes": 0},
     {"build_disk_bytes": 0}],
)  # fmt: skip
def test_gateway_does_not_start_when_no_build_could_run(
    tmp_path: Path, wrong: dict[str, float]
) -> None:
    settings = GatewaySettings(state_dir=str(tmp_path), **wrong)  # type: ignore[arg-type]  # numbers
    with pytest.raises(BadRequest, match="more than 0 is expected"):
        make_provider(settings)

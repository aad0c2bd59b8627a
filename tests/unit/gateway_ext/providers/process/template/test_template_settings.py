"""Settings of templates, as the gateway's settings name them."""

import math
from pathlib import Path

import pytest

from gateway_ext.errors import BadRequest
from gateway_ext.providers.making import make_provider
from gateway_ext.settings import GatewaySettings


@pytest.mark.parametrize(
    "wrong", [{"template_idle_s": -1.0}, {"template_idle_s": math.nan}, {"template_bytes": -1}]
)
def test_gateway_does_not_start_when_a_bound_is_no_amount(
    tmp_path: Path, wrong: dict[str, float]
) -> None:
    settings = GatewaySettings(state_dir=str(tmp_path), **wrong)  # type: ignore[arg-type]  # numbers
    with pytest.raises(BadRequest, match="template_idle_s, template_bytes"):
        make_provider(settings)

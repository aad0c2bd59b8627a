"""The shim's settings, read from the environment."""

import pytest

from torch_shim.errors import InvalidShimSetting
from torch_shim.settings import ShimSettings


def test_settings_have_defaults_when_the_environment_is_empty() -> None:
    settings = ShimSettings.from_environment({})
    assert settings == ShimSettings()
    assert settings.capture


def test_settings_are_read_when_the_environment_has_them() -> None:
    settings = ShimSettings.from_environment(
        {
            "GPUFAAS_ADDRESS": "unix:/run/gpufaas",
            "GPUFAAS_CREDENTIAL": "secret",
            "GPUFAAS_GPU_MEMORY": "1024",
            "GPUFAAS_GPU_NAME": "H200",
            "GPUFAAS_TRACING": "wait",
            "GPUFAAS_STATS": "3",
            "GPUFAAS_CAPTURE": "0",
            "PATH": "/bin",
        }
    )
    assert settings == ShimSettings(
        address="unix:/run/gpufaas",
        credential="secret",
        gpu_memory_bytes=1024,
        gpu_name="H200",
        tracing="wait",
        stats="3",
        capture=False,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GPUFAAS_CAPTURE", "2"),
        ("GPUFAAS_GPU_MEMORY", "0"),
        ("GPUFAAS_GPU_MEMORY", "80GiB"),
        ("GPUFAAS_TRACING", "never"),
    ],
)
def test_settings_raise_when_a_value_means_nothing(name: str, value: str) -> None:
    with pytest.raises(InvalidShimSetting, match=name) as caught:
        ShimSettings.from_environment({name: value})
    assert caught.value.value == value

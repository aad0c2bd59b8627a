"""What all tests share: profiles of hypothesis, folders, an Engine, who runs what, `--rewrite`."""

import asyncio
import gc
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer

from tests.kit.collected_warnings import CollectedWarnings
from tests.kit.engines.docker_base_image import base_image
from tests.kit.engines.docker_engine import Engine, engine
from tests.kit.fakes.sealed_images import drop_images, images_left
from tests.kit.scheduling import LongestFirst

# Threads of OpenMP otherwise spin while they wait for each other. Where more processes compute than
# there are cores, they spin until their turn is over, while others have work for the core.
# It comes before torch is imported, here and in all that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]

# What is imported and collected stays: without the garbage collector that takes a third less, and
# without those objects before it the collector takes a tenth off every test after that.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    # Else pytest-asyncio asks for one, which Python makes then, and nobody closes.
    asyncio.set_event_loop(None)
    found = CollectedWarnings(config)
    found.install()
    config.pluginmanager.register(found)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


settings.register_profile(
    "ci", max_examples=60, deadline=None, derandomize=True, suppress_health_check=_QUIET
)
# `make test-long` has it, for what the core and its policies do.
settings.register_profile(
    "thorough", max_examples=1500, deadline=None, suppress_health_check=_QUIET
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write what the core does now into tests/scenarios/*.txt, for you to review",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LongestFirst:
    return LongestFirst(config, log)


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pytest's own, without the test's name in it: Unix sockets lie in it, with bounded paths."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture(scope="session")
def environment() -> Mapping[str, str]:
    """This process's, without what settles gpufaas's own affairs."""
    return {key: value for key, value in os.environ.items() if not key.startswith("GPUFAAS_")}


@pytest.fixture(scope="module", autouse=True)
def no_image_is_left() -> Iterator[None]:
    """A module closes the images that it opened: later ones count those that are open."""
    yield
    left = images_left()
    if left:
        drop_images()
    assert not left, f"tests of this module left {left} images open"


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[Engine]:
    """The Docker Engine in which this worker has images of ours, with the one they are built on."""
    with engine() as found:
        base_image(found)
        yield found

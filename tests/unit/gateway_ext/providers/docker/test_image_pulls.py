"""Images: present, missing, late, removed."""

import json
from pathlib import Path

import pytest

from gateway_ext.errors import (
    BadDeployment,
    GatewayError,
    ProviderFailed,
)
from tests.kit.fakes.fake_engine import IMAGE
from tests.unit.gateway_ext.providers.docker.docker_world import world


@pytest.mark.parametrize(
    ("answer", "content", "kind"),
    [
        ((404, "pull access denied for x"), "pull access denied", BadDeployment),
        ((404, "manifest for x:1 not found"), "not found", BadDeployment),
        ((500, "Get https://r.io: no such host"), "no such host", ProviderFailed),
    ],
)
async def test_image_that_cannot_be_pulled_is_reported(
    tmp_path: Path, answer: tuple[int, str], content: str, kind: type[GatewayError]
) -> None:
    async with world(tmp_path) as there:
        there.engine.failing["POST images/create"] = answer
        with pytest.raises(kind, match=f"image x:1 cannot be pulled: .*{content}"):
            await there.deploy("x:1")
        assert await there.provider.functions("openfaas-fn") == []


async def test_pull_that_breaks_off_midway_is_reported(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        there.engine.pulls = [{"status": "Pulling"}, {"error": "unauthorized: no"}]
        with pytest.raises(BadDeployment, match="unauthorized: no"):
            await there.deploy("x:1")


async def test_image_is_pulled_with_the_registrys_credentials(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"auths": {"r.io": {"auth": "bTpw"}}}))

    async with world(tmp_path) as there:
        await there.provider.close()
        await there.another(docker_config=str(tmp_path / "config.json")).start(there.heard)
        there.engine.pulled = {"r.io/x": IMAGE}
        await there.deploy("r.io/x")
        await there.ready()
        at = there.engine.asked.index("POST images/create")
        assert there.engine.queries[at] == {"fromImage": "r.io/x:latest"}
        assert there.engine.headers[at]["X-Registry-Auth"]


async def test_image_that_is_there_is_used_when_a_newer_one_cannot_be_had(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        await there.provider.close()
        await there.another(docker_pull="always").start(there.heard)
        there.engine.failing["POST images/create"] = (500, "registry away")
        await there.deploy()
        await there.ready()
        with pytest.raises(ProviderFailed, match="registry away"):
            await there.deploy("x:1", update=True)


async def test_image_is_not_asked_for_when_none_is_to_be_pulled(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        await there.provider.close()
        await there.another(docker_pull="never").start(there.heard)
        with pytest.raises(BadDeployment, match="none is to be pulled"):
            await there.deploy("x:1")
        assert "POST images/create" not in there.engine.asked


async def test_image_that_is_long_on_its_way_is_shown_in_the_status(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        await there.provider.close()
        await there.another(pull_answer_s=0.0).start(there.heard)
        there.engine.failing["POST images/create"] = (404, "manifest unknown")
        await there.deploy("x:1")
        await there.trouble("image x:1 cannot be pulled: manifest unknown")
        there.engine.failing.clear()
        there.engine.pulled = {"x:1": IMAGE}
        await there.deploy("x:1", update=True)
        await there.ready()


async def test_image_is_had_again_when_another_program_removed_it(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        await there.deploy()
        (first,) = await there.ready()
        del there.engine.images["f:1"]
        there.engine.failing["POST containers/create"] = (404, "No such image: sha256:1")
        there.engine.dies(first)
        await there.trouble("cannot be started: image f:1 was pulled, and is not there")
        there.engine.pulled = {"f:1": IMAGE}
        there.engine.failing.clear()
        await there.ready()

"""What the real faas-cli does with a gateway, in five flows that need all of its commands."""

import pytest

from tests.kit.stacks.drivers import CliDriver, Refused, Wanted
from tests.kit.stacks.handlers import GREETING, PLAIN, SECRET, write
from tests.kit.stacks.listening import listening
from tests.kit.stacks.stack import Rest, Stack
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.faas_cli


def test_new_function_of_the_template_runs_after_faas_cli_up(cli: CliDriver, rest: Rest) -> None:
    cli.new("fresh")
    cli.up("fresh")
    rest.ready("fresh")
    said = cli.invoke("fresh", "12345")
    assert '"device": "cuda"' in said
    assert '"bytes": 5' in said
    cli.remove("fresh")


def test_function_is_deployed_changed_listed_and_removed(
    cli: CliDriver, up: Stack, rest: Rest
) -> None:
    annotations = {**write(up.work, "shown", GREETING), **PLAIN}
    cli.deploy(Wanted("shown", "e2e/shown:7", annotations))
    rest.ready("shown")
    assert cli.listed()["shown"] == 1
    described = cli.describe("shown")
    assert "e2e/shown:7" in described
    assert "com.gpufaas.path" in described
    assert cli.invoke("shown", "you") == "hello you"
    with listening() as callback:
        cli.invoke_later("shown", "you", callback.url)
        posted = callback.next()
    assert (posted.body, posted.headers["X-Function-Status"]) == (b"hello you", "200")
    cli.deploy(Wanted("shown", "e2e/shown:7", annotations, {"GREETING": "good day"}))
    wait_until(lambda: cli.invoke("shown", "you") == "good day you", "the new one answers")
    cli.remove("shown")
    wait_until(lambda: "shown" not in cli.listed(), "removed")
    for refused in (cli.describe, cli.remove, lambda name: cli.invoke(name, "you")):
        with pytest.raises(Refused, match=r"404|No such function|No existing function"):
            refused("shown")


def test_build_is_deployed_by_its_image_and_its_logs_are_read(cli: CliDriver, rest: Rest) -> None:
    (cli.new("built") / "handler.py").write_text(GREETING)
    cli.build("built")
    cli.deploy(Wanted("talks", "registry.example:5000/me/built:latest", PLAIN))
    rest.ready("talks")
    for who in ("one", "two", "three"):
        assert cli.invoke("talks", who) == f"hello {who}"

    def heard() -> bool:
        return cli.logs("talks", 2) == ["called with two", "called with three"]

    wait_until(heard, "the last two lines", instead=lambda: str(cli.logs("talks", 2)))
    cli.remove("talks")
    with pytest.raises(Refused, match=r"400.*there is no build of .*elsewhere/nothing"):
        cli.deploy(Wanted("nothing", "elsewhere/nothing:1"))


def test_secret_is_seen_by_the_function_until_it_is_removed(
    cli: CliDriver, up: Stack, rest: Rest
) -> None:
    annotations = {**write(up.work, "knows", SECRET), **PLAIN}
    wanted = Wanted("knows", "e2e/knows:1", annotations, secrets=("cli-key",))
    with pytest.raises(Refused, match="cli-key"):
        cli.deploy(wanted)
    cli.create_secret("cli-key", "first")
    assert "cli-key" in cli.secrets()
    cli.deploy(wanted)
    rest.ready("knows")
    assert cli.invoke("knows", "cli-key") == "first"
    cli.update_secret("cli-key", "second")
    cli.deploy(wanted)
    wait_until(lambda: cli.invoke("knows", "cli-key") == "second", "the new value is seen")
    cli.remove("knows")
    cli.remove_secret("cli-key")
    assert "cli-key" not in cli.secrets()
    with pytest.raises(Refused, match=r"(?i)404|unable to find"):
        cli.remove_secret("cli-key")


def test_function_lives_in_its_namespace_and_strangers_are_refused(
    cli: CliDriver, up: Stack, rest: Rest
) -> None:
    assert "gpufaas" in cli.version()
    assert rest.ask("POST", "/system/namespace/", {"name": "cli-team"}).status_code == 201
    assert {"openfaas-fn", "cli-team"} <= set(cli.namespaces())
    annotations = {**write(up.work, "ours", GREETING), **PLAIN}
    cli.deploy(Wanted("ours", "e2e/ours:7", annotations, namespace="cli-team"))
    wait_until(lambda: cli.listed("cli-team").get("ours") == 1, "deployed")
    assert cli.invoke("ours", "you", "cli-team") == "hello you"
    assert "ours" not in cli.listed()
    cli.remove("ours", "cli-team")
    wait_until(lambda: not cli.listed("cli-team"), "removed")
    assert rest.ask("DELETE", "/system/namespace/cli-team", {"name": "cli-team"}).status_code == 202
    with pytest.raises(Refused, match=r"401|incorrect"):
        cli.login("wrong")

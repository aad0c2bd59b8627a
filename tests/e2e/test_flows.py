"""What people do with functions, by plain REST; test_faas_cli.py has it by the real faas-cli."""

from urllib.parse import urlencode

import pytest

from tests.kit.programs.own_names import IMPORTS, write_own_names
from tests.kit.stacks.drivers import Refused, RestDriver, Wanted
from tests.kit.stacks.handlers import GREETING, ON_GPU, PLAIN, SECRET, write
from tests.kit.stacks.listening import listening
from tests.kit.stacks.stack import Rest, Stack
from tests.kit.waiting import wait_until


def greeting(up: Stack, name: str, **how: object) -> Wanted:
    annotations = {**write(up.work, name, GREETING), **PLAIN}
    return Wanted(name, f"e2e/{name}:7", annotations, **how)  # type: ignore[arg-type]  # its own fields


def test_login_is_refused_when_the_password_is_wrong(driver: RestDriver, up: Stack) -> None:
    driver.login(up.password)
    with pytest.raises(Refused, match="401"):
        driver.login("wrong")


def test_new_function_of_the_template_runs_when_built_and_deployed(
    driver: RestDriver, rest: Rest
) -> None:
    driver.new("fresh")
    driver.up("fresh")
    rest.ready("fresh")
    said = driver.invoke("fresh", "12345")
    assert '"device": "cuda"' in said
    assert '"bytes": 5' in said
    driver.remove("fresh")


def test_function_has_folders_of_our_names(rest: Rest, up: Stack) -> None:
    annotations = write(up.work, "own-names", IMPORTS + ON_GPU + IMPORTS)
    write_own_names(up.work / annotations["com.gpufaas.path"])
    rest.deploy("own-names", annotations={**annotations, "com.gpufaas.enabled": "true"})
    rest.ready("own-names")
    assert rest.call("own-names").json()["device"] == "cuda:0"
    rest.remove("own-names")


def test_function_is_listed_and_described_until_it_is_removed(
    driver: RestDriver, up: Stack, rest: Rest
) -> None:
    driver.deploy(greeting(up, "shown"))
    rest.ready("shown")
    assert driver.listed()["shown"] == 1
    described = driver.describe("shown")
    assert "e2e/shown:7" in described
    assert "com.gpufaas.path" in described
    assert driver.invoke("shown", "you") == "hello you"
    driver.remove("shown")
    wait_until(lambda: "shown" not in driver.listed(), "removed")
    with pytest.raises(Refused, match="404"):
        driver.invoke("shown", "you")
    with pytest.raises(Refused, match="404"):
        driver.describe("shown")


def test_handler_of_a_build_is_found_by_the_name_of_the_image(
    driver: RestDriver, rest: Rest
) -> None:
    (driver.new("built") / "handler.py").write_text(GREETING)
    driver.build("built")
    driver.deploy(Wanted("renamed", "registry.example:5000/me/built:latest", PLAIN))
    rest.ready("renamed")
    assert driver.invoke("renamed", "you") == "hello you"
    driver.remove("renamed")


def test_deployment_changes_the_function_when_it_is_there_already(
    driver: RestDriver, up: Stack, rest: Rest
) -> None:
    driver.deploy(greeting(up, "again"))
    rest.ready("again")
    driver.deploy(greeting(up, "again", environment={"GREETING": "good day"}))
    wait_until(lambda: driver.invoke("again", "you") == "good day you", "the new one answers")
    driver.remove("again")


def test_result_is_posted_to_the_callback_when_invoked_later(
    driver: RestDriver, up: Stack, rest: Rest
) -> None:
    driver.deploy(greeting(up, "later"))
    rest.ready("later")
    with listening() as callback:
        driver.invoke_later("later", "you", callback.url)
        posted = callback.next()
    assert posted.body == b"hello you"
    assert posted.headers["X-Function-Status"] == "200"
    assert posted.headers["X-Function-Name"].startswith("later")
    assert posted.headers["X-Call-Id"]
    driver.remove("later")


def test_logs_have_what_the_handler_printed(driver: RestDriver, up: Stack, rest: Rest) -> None:
    driver.deploy(greeting(up, "talks"))
    rest.ready("talks")
    for who in ("one", "two", "three"):
        driver.invoke("talks", who)

    def heard() -> bool:
        return driver.logs("talks", 2) == ["called with two", "called with three"]

    wait_until(heard, "the last two lines", instead=lambda: str(driver.logs("talks", 2)))
    driver.remove("talks")


def test_secret_is_seen_by_the_function_until_it_is_removed(
    driver: RestDriver, up: Stack, rest: Rest
) -> None:
    driver.create_secret("api-key", "first")
    assert "api-key" in driver.secrets()
    annotations = {**write(up.work, "knows", SECRET), **PLAIN}
    wanted = Wanted("knows", "e2e/knows:1", annotations, secrets=("api-key",))
    driver.deploy(wanted)
    rest.ready("knows")
    assert driver.invoke("knows", "api-key") == "first"
    driver.update_secret("api-key", "second")
    driver.deploy(wanted)
    wait_until(lambda: driver.invoke("knows", "api-key") == "second", "the new value is seen")
    driver.remove("knows")
    driver.remove_secret("api-key")
    assert "api-key" not in driver.secrets()
    with pytest.raises(Refused, match="404"):
        driver.remove_secret("api-key")


def test_deployment_is_refused_when_its_secret_is_unknown(driver: RestDriver, up: Stack) -> None:
    with pytest.raises(Refused, match="nobody-knows"):
        driver.deploy(greeting(up, "unsecret", secrets=("nobody-knows",)))
    assert "unsecret" not in driver.listed()


def test_function_lives_in_the_namespace_that_it_was_deployed_to(
    driver: RestDriver, up: Stack, rest: Rest
) -> None:
    assert "openfaas-fn" in driver.namespaces()
    assert rest.ask("POST", "/system/namespace/", {"name": "team"}).status_code == 201
    assert "team" in driver.namespaces()
    driver.deploy(greeting(up, "ours", namespace="team"))
    wait_until(lambda: driver.listed("team").get("ours") == 1, "deployed")
    assert driver.invoke("ours", "you", "team") == "hello you"
    assert "ours" not in driver.listed()
    driver.remove("ours", "team")
    wait_until(lambda: not driver.listed("team"), "removed")
    assert rest.ask("DELETE", "/system/namespace/team", {"name": "team"}).status_code == 202
    assert "team" not in driver.namespaces()


def test_version_names_the_provider(driver: RestDriver) -> None:
    assert "gpufaas" in driver.version()


def test_invocation_is_refused_when_nobody_knows_the_function(driver: RestDriver) -> None:
    with pytest.raises(Refused, match=r"404.*nobody is not deployed"):
        driver.invoke("nobody", "")


def test_removal_is_refused_when_nobody_knows_the_function(driver: RestDriver) -> None:
    with pytest.raises(Refused, match="404"):
        driver.remove("nobody")


def test_deployment_says_where_it_looked_when_there_is_no_such_image(driver: RestDriver) -> None:
    with pytest.raises(Refused, match=r"400.*there is no build of .*elsewhere/nothing"):
        driver.deploy(Wanted("nothing", "elsewhere/nothing:1"))
    assert "nothing" not in driver.listed()


def test_function_scales_to_two_to_none_and_wakes_when_called(up: Stack, rest: Rest) -> None:
    annotations = {**write(up.work, "scaled", GREETING), **PLAIN}
    rest.deploy("scaled", annotations=annotations)

    def scale(replicas: int) -> None:
        said = {"serviceName": "scaled", "replicas": replicas}
        assert rest.ask("POST", "/system/scale-function/scaled", said).status_code == 202

    scale(2)
    rest.ready("scaled", 2)
    assert len(up.instances("scaled")) == 2
    scale(0)
    wait_until(lambda: rest.status("scaled").get("replicas", 0) == 0, "none wanted")
    wait_until(lambda: not up.instances("scaled"), "no process")
    answer = rest.call("scaled", "again")
    assert (answer.status_code, answer.text) == (200, "hello again")
    assert rest.status("scaled")["replicas"] == 1
    rest.remove("scaled")


def test_logs_are_followed_and_begin_where_since_says(up: Stack, rest: Rest) -> None:
    rest.deploy("tells", annotations={**write(up.work, "tells", GREETING), **PLAIN})
    rest.call("tells", "before")
    wait_until(lambda: "before" in rest.ask("GET", "/system/logs?name=tells").text, "written")
    lines = rest.ask("GET", "/system/logs?name=tells&tail=1").json()
    after = {"name": "tells", "follow": "1", "since": lines["timestamp"]}
    with rest.stream("GET", f"/system/logs?{urlencode(after)}") as followed:
        rest.call("tells", "now")
        heard = next(line for line in followed.iter_lines() if "now" in line)
    assert "called with now" in heard
    found = rest.ask("GET", "/system/logs?name=tells&since=2100-01-01T00:00:00Z")
    assert (found.status_code, found.text) == (200, "")
    rest.remove("tells")

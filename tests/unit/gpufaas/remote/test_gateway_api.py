"""Requests to a gateway: logins in URLs are used, and appear in no message."""

import argparse
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from gpufaas.errors import CommandError
from gpufaas.remote.gateway_api import GatewayApi, gateway_api
from gpufaas.remote.http_request import http_url


def options(tmp_path: Any, gateway: str) -> argparse.Namespace:
    environment = {"XDG_STATE_HOME": str(tmp_path), "GPUFAAS_STATE": str(tmp_path)}
    return argparse.Namespace(gateway=gateway, secrets_dir=None, environment=environment)


def test_login_of_the_url_is_not_shown_when_no_gateway_answers(tmp_path: Any) -> None:
    api = gateway_api(options(tmp_path, "http://admin:s3cret@127.0.0.1:9"))
    with pytest.raises(
        CommandError, match=r"no gateway answers at http://127\.0\.0\.1:9"
    ) as caught:
        api.get("/system/info")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("url", ["admin:s3cret@host", "http://admin:s3/cret@host", "ftp://a:s3c@h"])
def test_login_of_the_url_is_not_shown_when_the_url_is_invalid(tmp_path: Any, url: str) -> None:
    with pytest.raises(CommandError) as caught:
        gateway_api(options(tmp_path, url))
    assert "s3" not in str(caught.value)


def test_login_of_the_url_is_sent_as_authorization() -> None:
    url = http_url("http://admin:s%40cret@host:8080/prefix", "gateway")
    assert url.authorization == "Basic " + b64encode(b"admin:s@cret").decode()
    assert (str(url), url.host, url.port) == ("http://host:8080/prefix", "host", 8080)
    assert GatewayApi(url, url.authorization).url is url


def test_no_stack_is_looked_for_when_gateway_and_login_are_named(tmp_path: Path) -> None:
    (tmp_path / "basic-auth-user").write_text("admin")
    (tmp_path / "basic-auth-password").write_text("s3cret")
    named = options(tmp_path, "http://host")
    named.environment["GPUFAAS_STATE"] = "/dev/null"
    with pytest.raises(CommandError, match="/dev/null/lock: Not a directory"):
        gateway_api(named)
    named.secrets_dir = str(tmp_path)
    assert str(gateway_api(named).url) == "http://host"
    named.gateway, named.secrets_dir = "http://admin:s3cret@host", None
    assert str(gateway_api(named).url) == "http://host"

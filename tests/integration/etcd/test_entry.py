"""An etcd that lets only some in: users with passwords, TLS, and certificates for both sides."""

import asyncio
import logging
import shutil
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aetcd import rpc  # type: ignore[import-untyped]  # ships no types

from common.time_limits import time_limit
from gpufaas.cli import EXIT_BAD_USE
from gpufaas.commands.scheduler import etcd_settings
from gpufaas.options.configuration import read_settings
from gpufaas.stack.held_ports import HeldPort
from gpufaas.stack.own_etcd import etcd_server
from scheduler.model.errors import DatastoreError, StoreUnavailable
from scheduler.store.etcd_channel import EtcdChannel, EtcdSettings
from scheduler.store.etcd_store import EtcdStore
from tests.kit.engines.real_etcd import EtcdWorld, an_etcd, needs_etcd, patiently
from tests.kit.places import ROOT
from tests.kit.waiting import PATIENCE_S

pytestmark = [pytest.mark.etcd, needs_etcd]

LOG = logging.getLogger("tests.entry")
needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs the openssl program, to make certificates"
)


async def let_only_root_in(world: EtcdWorld) -> EtcdSettings:
    """Switch on users; the settings of the one that there is."""
    return await only_root_at(world.url)


# Neither a disk that syncs slowly nor an expensive hash is what these tests are about.
QUICK = ("--unsafe-no-fsync", "--bcrypt-cost=4")

# As docs/etcd.md has it: a user with the keys under our prefix, and nothing else.
PREFIXED = (
    ("RoleAdd", rpc.AuthRoleAddRequest(name="gpufaas")),
    (
        "RoleGrantPermission",
        rpc.AuthRoleGrantPermissionRequest(
            name="gpufaas",
            perm=rpc.Permission(
                permType=rpc.Permission.READWRITE, key=b"/gpufaas/", range_end=b"/gpufaas0"
            ),
        ),
    ),
    ("UserAdd", rpc.AuthUserAddRequest(name="gpufaas", password="ours alone")),
    ("UserGrantRole", rpc.AuthUserGrantRoleRequest(user="gpufaas", role="gpufaas")),
)


async def only_root_at(url: str, more: Iterable[tuple[str, Any]] = ()) -> EtcdSettings:
    """The same of any etcd that still lets everybody in, with more users perhaps."""
    channel = EtcdChannel(EtcdSettings((url,)), LOG)
    root = {"name": "root", "password": "open sesame"}
    for method, request in (
        ("UserAdd", rpc.AuthUserAddRequest(**root)),
        ("RoleAdd", rpc.AuthRoleAddRequest(name="root")),
        ("UserGrantRole", rpc.AuthUserGrantRoleRequest(user="root", role="root")),
        *more,
        ("AuthEnable", rpc.AuthEnableRequest()),
    ):
        await channel.call("auth", method, request, timeout_s=PATIENCE_S)
    await channel.close()
    return EtcdSettings((url,), user="root", password=root["password"])


async def test_a_user_is_let_in_when_the_password_is_right_and_else_not(tmp_path: Path) -> None:
    async with an_etcd(tmp_path, options=QUICK) as world:
        settings = await let_only_root_in(world)
        async with EtcdStore(settings, LOG) as store:
            await keeps(store)
        for wrong in (EtcdSettings((world.url,)), replace(settings, password="guess")):
            store = EtcdStore(wrong, LOG)
            with pytest.raises(DatastoreError):
                await store.put("a", b"2")
            await store.close()


async def test_a_user_is_let_in_again_when_etcd_has_forgotten_the_pass(tmp_path: Path) -> None:
    async with an_etcd(tmp_path, options=QUICK) as world:
        store = EtcdStore(await let_only_root_in(world), LOG)
        await patiently(lambda: store.put("a", b"1"))
        await world.kill()  # passes are in its memory
        await world.start()
        assert await patiently(lambda: store.get("a")) == b"1"
        await store.close()


async def test_a_connection_is_private_when_the_endpoint_is_https(tmp_path: Path) -> None:
    plain, private = HeldPort().keep(), HeldPort().keep()
    urls = f"http://127.0.0.1:{plain},https://127.0.0.1:{private}"
    options = [*QUICK, "--auto-tls", f"--listen-client-urls={urls}"]
    async with etcd_server(tmp_path, LOG, port=plain, options=options):
        certificate = tmp_path / "data" / "fixtures" / "client" / "cert.pem"
        settings = EtcdSettings((f"https://127.0.0.1:{private}",), ca_file=certificate)
        async with EtcdStore(settings, LOG) as store:
            await keeps(store)
        store = EtcdStore(replace(settings, ca_file=None), LOG)
        with pytest.raises(StoreUnavailable):  # nobody vouches for this certificate
            await store.get("a")
        await store.close()


@needs_openssl
async def test_etcd_takes_only_clients_with_a_certificate_and_the_password_that_settings_name(
    tmp_path: Path,
) -> None:
    """What an administrator would write: https, a certificate of our own, and a user."""

    made = certificates(tmp_path)
    plain, private = HeldPort().keep(), HeldPort().keep()
    options = [
        *QUICK,
        f"--listen-client-urls=http://127.0.0.1:{plain},https://127.0.0.1:{private}",
        f"--cert-file={made['server.pem']}",
        f"--key-file={made['server.key']}",
        f"--trusted-ca-file={made['ca.pem']}",
        "--client-cert-auth",
    ]
    async with etcd_server(tmp_path / "etcd", LOG, port=plain, options=options) as server:
        await only_root_at(server.url, PREFIXED)
        password = tmp_path / "password"
        password.write_text("ours alone\n")
        url = f"https://127.0.0.1:{private}"
        text = "[etcd]\n" + "".join(
            f"{name} = '{value}'\n"
            for name, value in {
                "endpoints": url,
                "ca": made["ca.pem"],
                "cert": made["client.pem"],
                "key": made["client.key"],
                "user": "gpufaas",
                "password_file": password,
            }.items()
        )
        config = tmp_path / "gpufaas.toml"
        config.write_text(text)
        settings = etcd_settings(read_settings(str(config), {}, {}).etcd)
        await works(settings)
        await lets_no_stranger_in(settings, made)


async def works(settings: EtcdSettings) -> None:
    """All that a scheduler does there, under its prefix and nowhere else."""
    async with EtcdStore(settings, LOG) as store:
        await keeps(store)
        seen = store.watch("")
        assert (await anext(seen)).values["a"] == b"1"
        await seen.aclose()
        outside = EtcdChannel(settings, LOG)
        request = rpc.PutRequest(key=b"/others/a", value=b"1")
        with pytest.raises(DatastoreError, match="permission denied"):
            await outside.call("kv", "Put", request, timeout_s=PATIENCE_S)
        await outside.close()


async def keeps(store: EtcdStore) -> None:
    """It is let in, writes and reads: a call takes 2 s at most, the entry may take longer."""
    await patiently(lambda: store.put("a", b"1"))
    assert await patiently(lambda: store.get("a")) == b"1"
    lease = await patiently(lambda: store.grant(60))
    assert await patiently(lambda: store.refresh(lease))


async def lets_no_stranger_in(settings: EtcdSettings, made: dict[str, Path]) -> None:
    """A client that lacks one of our credentials is refused."""
    strangers = {
        "without a certificate": replace(settings, cert_file=None, key_file=None),
        "with another authority's": replace(
            settings, cert_file=made["other.pem"], key_file=made["other.key"]
        ),
        "who trusts another authority": replace(settings, ca_file=made["other.pem"]),
        "with a wrong password": replace(settings, password="guess"),
        "without a user": replace(settings, user=""),
    }
    for who, stranger in strangers.items():
        store = EtcdStore(stranger, LOG)
        with pytest.raises(DatastoreError):
            assert await store.get("a") != b"1", who
        await store.close()


@needs_openssl
async def test_a_connection_is_made_anew_with_the_certificates_of_old_when_a_file_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = certificates(tmp_path)
    settings = EtcdSettings(("https://127.0.0.1:9",), ca_file=made["ca.pem"])
    channel = EtcdChannel(settings, LOG)
    made["ca.pem"].unlink()
    channel.reopen()
    assert "keeping the old certificates for etcd" in caplog.text
    await channel.close()
    with pytest.raises(DatastoreError, match="No such file"):
        EtcdChannel(settings, LOG)


async def test_scheduler_ends_with_one_line_when_etcd_does_not_let_it_in(tmp_path: Path) -> None:
    async with an_etcd(tmp_path / "etcd", options=QUICK) as world:
        await let_only_root_in(world)
        (tmp_path / "guess").write_text("guess")
        scheduler = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gpufaas", "scheduler", "--listen", "127.0.0.1:0"),
            *("--secret-file", str(tmp_path / "secret"), "--etcd", world.url),
            *("--etcd-user", "root", "--etcd-password-file", str(tmp_path / "guess")),
            stderr=PIPE,
            cwd=ROOT,
        )
        try:
            async with time_limit(PATIENCE_S):
                said = (await scheduler.communicate())[1].decode()
        finally:
            if scheduler.returncode is None:
                scheduler.kill()
                await scheduler.wait()
        assert scheduler.returncode == EXIT_BAD_USE
        assert said.splitlines()[-1].startswith("gpufaas scheduler: etcd: ")
        assert "Traceback" not in said


def certificates(folder: Path) -> dict[str, Path]:
    """An authority, a server's and a client's certificate of it, and a stranger's of its own."""
    day = ["-days", "1", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for name in ("ca", "other"):
        own = ["req", "-x509", *day, "-subj", f"/CN={name}"]
        openssl(folder, *own, "-keyout", f"{name}.key", "-out", f"{name}.pem")
    by_ca = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "1"]
    for name, extension in (
        ("server", "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth"),
        ("client", "extendedKeyUsage=clientAuth"),
    ):
        (folder / f"{name}.ext").write_text(extension)
        request = ["req", *day[2:], "-subj", f"/CN={name}"]
        openssl(folder, *request, "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ["x509", "-req", "-in", f"{name}.csr", *by_ca, "-extfile", f"{name}.ext"]
        openssl(folder, *signed, "-out", f"{name}.pem")
    return {path.name: path for path in folder.iterdir()}


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

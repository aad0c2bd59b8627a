"""Certificates that tests make for themselves, with the openssl program."""

import subprocess
from pathlib import Path

from tests.kit import needs


def self_signed(folder: Path, name: str = "node") -> tuple[Path, Path]:
    """A certificate for a day and its key."""
    needs.command("openssl", "openssl")
    key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    where = ["-subj", f"/CN={name}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", "req", "-x509", *curve, *where], check=True, capture_output=True)
    return certificate, key

"""Writes what an image consists of, its packages of Debian and Python, as CycloneDX 1.5.

It runs in the image, with nothing but its Python (deploy/docker/sbom.sh):

    docker run --rm -i --network none --entrypoint python3 IMAGE - NAME < deploy/docker/sbom.py
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

_DEBIAN = "${db:Status-Abbrev}\t${Package}\t${Version}\t${Architecture}\t${Maintainer}\n"


def bill(name: str, moment: datetime) -> dict[str, Any]:
    """The whole document about the image of this name."""
    components = {each["bom-ref"]: each for each in (*_of_debian(), *_of_python())}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {"type": "container", "name": name, "bom-ref": name},
            "tools": {"components": [{"type": "application", "name": "gpufaas sbom.py"}]},
        },
        "components": [_system(), *(components[key] for key in sorted(components))],
    }


def _system() -> dict[str, Any]:
    said = dict(
        line.partition("=")[::2] for line in _text(Path("/etc/os-release")).splitlines() if line
    )
    found = {"type": "operating-system", "name": said.get("ID", "unknown").strip('"')}
    return {**found, "version": said.get("VERSION_ID", "").strip('"')}


def _of_debian() -> Iterator[dict[str, Any]]:
    """Packages that are installed; none in an image without dpkg."""
    if shutil.which("dpkg-query") is None:
        return
    command = ["dpkg-query", "--show", f"--showformat={_DEBIAN}"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    system = _system()["name"]
    for line in listed.splitlines():
        status, name, version, architecture, maintainer = line.split("\t")
        if status.startswith("ii"):
            where = f"pkg:deb/{system}/{name}@{quote(version)}?arch={architecture}"
            yield {**_component(name, version, where), "supplier": {"name": maintainer}}


def _of_python() -> Iterator[dict[str, Any]]:
    """Packages of every environment in the image: the system's own and those below /opt."""
    places = {*sys.path, *map(str, Path("/opt").glob("*/lib/python3*/site-packages"))}
    for each in distributions(path=sorted(place for place in places if place)):
        name = re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower()
        found = _component(name, each.version, f"pkg:pypi/{name}@{quote(each.version)}")
        said = _licence(each)
        yield {**found, "licenses": [{"license": {"name": said}}]} if said else found


def _component(name: str, version: str, where: str) -> dict[str, Any]:
    return {"type": "library", "name": name, "version": version, "purl": where, "bom-ref": where}


def _licence(package: Distribution) -> str:
    """Its name, where the package says it in a word; some bring the whole text instead."""
    fields = package.metadata.json
    said = str(fields.get("license_expression") or fields.get("license") or "")
    return said if "\n" not in said else ""


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


if __name__ == "__main__":
    json.dump(bill(sys.argv[1], datetime.now(UTC)), sys.stdout, indent=2)
    sys.stdout.write("\n")

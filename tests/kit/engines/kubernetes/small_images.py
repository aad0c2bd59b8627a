"""Images of one static program, made without an engine."""

import hashlib
import io
import json
import tarfile
from pathlib import Path


def program_image(made: Path, name: str, program: Path, *words: str) -> None:
    """An archive with an image of this name that runs the program with these words."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as files:
        files.add(program.resolve(), program.name)
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": [f"/{program.name}", *words]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    listed = [{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(made, "w") as image:
        for path, content in (
            (config_name, config),
            ("layer.tar", layer.getvalue()),
            ("manifest.json", json.dumps(listed).encode()),
        ):
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            image.addfile(entry, io.BytesIO(content))

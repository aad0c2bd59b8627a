"""The page's static files: none is loaded from elsewhere, and browsers cache them."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from common.http.asgi import Header

STATIC = Path(__file__).parent / "static"
PAGE = "index.html"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".webmanifest": "application/manifest+json",
}

# No content from elsewhere, no inline code, no frame around the page, and no referrer.
SAFE: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "font-src 'self'; connect-src 'self'; manifest-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
SAFE_HEADERS: tuple[Header, ...] = tuple(
    (name.encode(), value.encode()) for name, value in SAFE.items()
)


class StaticFile(NamedTuple):
    """One file as it is sent; `tag` changes with its content."""

    content: bytes
    kind: str
    tag: str


class StaticFiles:
    """The files of one folder, read once for each time that they change."""

    def __init__(self, folder: Path = STATIC) -> None:
        self._folder = folder.resolve()
        self._read: dict[Path, tuple[tuple[int, int], StaticFile]] = {}

    def get(self, name: str) -> StaticFile | None:
        """The file of this name below the folder; None if there is no such file to serve."""
        kind = _TYPES.get(Path(name).suffix)
        if kind is None or "\0" in name or name.endswith("/"):
            return None
        path = (self._folder / name).resolve()
        if not path.is_relative_to(self._folder):
            return None
        try:
            found = path.stat()
            stamp = (found.st_mtime_ns, found.st_size)
            kept = self._read.get(path)
            if kept is not None and kept[0] == stamp:
                return kept[1]
            content = path.read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None
        file = StaticFile(content, kind, f'"{hashlib.sha256(content).hexdigest()[:20]}"')
        self._read[path] = (stamp, file)
        return file

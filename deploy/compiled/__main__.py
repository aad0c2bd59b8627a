"""`python -m deploy.compiled`: build what `common/compiled_modules.py` prefers to the sources."""

import argparse
import os
import sys
from pathlib import Path

from common import compiled_modules
from deploy.compiled.compilation import FailedBuild, MissingCompiler, copy_build, link_build, made


def main() -> int:
    """Build, or say why not: then the sources run as they are."""
    parser = argparse.ArgumentParser(prog="deploy.compiled", description=__doc__)
    parser.add_argument(
        "--into", type=Path, help="a folder for a copy, as in an image; else this checkout uses it"
    )
    parser.add_argument(
        "--optional", action="store_true", help="say what went wrong, and succeed all the same"
    )
    options = parser.parse_args()
    base = os.environ.get("XDG_CACHE_HOME")
    cache = (Path(base) if base else Path.home() / ".cache") / "gpufaas" / "compiled"
    try:
        build = made(cache)
    except (MissingCompiler, FailedBuild) as error:
        print(f"The core runs as Python: {error}", file=sys.stderr)
        return 0 if options.optional else 1
    if options.into is not None:
        copy_build(build, options.into)
    else:
        link_build(build, compiled_modules.FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main())

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
    options = parser.parse_args()
    base = os.environ.get("XDG_CACHE_HOME")
    cache = (Path(base) if base else Path.home() / ".cache") / "gpufaas" / "compiled"
    try:
        build = made(cache)
    except (MissingCompiler, FailedBuild) as error:
        print(f"The core stays Python: {error}", file=sys.stderr)
        return 1
    if options.into is not None:
        copy_build(build, options.into)
    else:
        link_build(build, compiled_modules.FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main())

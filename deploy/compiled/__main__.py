"""`python -m deploy.compiled`: build what `common/compiled_modules.py` prefers to the sources."""

import argparse
import os
import sys
from pathlib import Path

from common import compiled_modules
from deploy.compiled.compilation import MissingCompiler, build_into


def main() -> int:
    """Build, or say why there is nothing to build with: then the sources run as they are."""
    parser = argparse.ArgumentParser(prog="deploy.compiled", description=__doc__)
    parser.add_argument(
        "--into", type=Path, default=compiled_modules.FOLDER, help="where the extensions go"
    )
    parser.add_argument(
        "--optional", action="store_true", help="without a compiler say so, and succeed"
    )
    options = parser.parse_args()
    base = os.environ.get("XDG_CACHE_HOME")
    cache = (Path(base) if base else Path.home() / ".cache") / "gpufaas" / "compiled"
    try:
        print(build_into(options.into, cache))
    except MissingCompiler as error:
        print(f"The core runs as Python: {error}.", file=sys.stderr)
        return 0 if options.optional else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/bin/sh
# Prints what an image consists of as CycloneDX JSON: deploy/docker/sbom.sh gpufaas/control:0.1.0 > sbom.json
# The image needs a python3; the list is made inside it, without network, rights or a place to write.
set -eu
[ $# = 1 ] || { echo "usage: sbom.sh IMAGE" >&2; exit 2; }
exec docker run --rm --interactive --network none --read-only --cap-drop ALL \
  --security-opt no-new-privileges --user 65534:65534 --entrypoint python3 "$1" - "$1" \
  <"$(dirname "$0")/sbom.py"

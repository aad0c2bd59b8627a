"""Images of a small web server."""

from pathlib import Path

from tests.kit import needs
from tests.kit.engines.kubernetes.kubernetes_node import KubernetesNode
from tests.kit.engines.kubernetes.small_images import program_image

WEB = "gpufaas-test/web:1"


def web_image(node: KubernetesNode, folder: Path, *names: str) -> None:
    """Images of a small web server, which has no shell and nothing else."""
    busybox = needs.command("busybox", "busybox-static")
    for name in names:
        archive = folder / "web.tar"
        program_image(archive, name, busybox, "httpd", "-f", "-p", "8080", "-h", "/")
        node.import_images(archive)

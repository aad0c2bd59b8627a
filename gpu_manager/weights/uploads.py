"""Images that arrive in pieces, from another node."""

from collections.abc import Callable

from gpu_manager.errors import BadImage
from gpu_manager.weights.sealed_images import Buffer, ImageWriter


class WeightsUpload:
    """The upload of one image into the weight store; its room is reserved until the end."""

    def __init__(
        self, writer: ImageWriter, keep: Callable[[int], str], ended: Callable[[], None]
    ) -> None:
        """`keep` takes ownership of the sealed memory and returns its digest.

        `ended` is called once, at the end of the upload.
        """
        self.table = writer.table
        self._writer: ImageWriter | None = writer
        self._keep = keep
        self._ended = ended

    def write(self, offset: int, data: Buffer) -> None:
        """Append bytes for `offset`, which must be the end of the previous bytes."""
        writer = self._open_writer()
        if offset != writer.written_bytes:
            raise BadImage(f"bytes for offset {offset}, expected {writer.written_bytes}")
        writer.write(data)

    def finish(self) -> str:
        """Hash and store the image, return its digest; raise BadImage if it is incomplete."""
        writer = self._open_writer()
        try:
            if writer.written_bytes != self.table.total_bytes:
                written, total = writer.written_bytes, self.table.total_bytes
                raise BadImage(f"{written} of {total} bytes were received")
            descriptor = writer.seal()
        finally:
            self.close()
        return self._keep(descriptor)

    def close(self) -> None:
        """Discard the bytes received; do nothing after `finish`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            self._ended()

    def _open_writer(self) -> ImageWriter:
        if self._writer is None:
            raise BadImage("this upload has ended")
        return self._writer

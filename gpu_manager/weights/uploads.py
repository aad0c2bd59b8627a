"""Images that arrive in pieces, from another node."""

from collections.abc import Callable

from gpu_manager.errors import BadImage
from gpu_manager.weights.sealed_images import Buffer, ImageWriter


class WeightsUpload:
    """One image on its way into the weight store; its room is reserved until it has ended."""

    def __init__(
        self, writer: ImageWriter, keep: Callable[[int], str], ended: Callable[[], None]
    ) -> None:
        """`keep` takes the sealed memory over and gives its digest; `ended` is called once."""
        self.table = writer.table
        self._writer: ImageWriter | None = writer
        self._keep = keep
        self._ended = ended

    def write(self, offset: int, data: Buffer) -> None:
        """Append bytes that belong at `offset`, which must be where the last ones ended."""
        writer = self._open_writer()
        if offset != writer.written_bytes:
            raise BadImage(f"bytes for offset {offset}, expected {writer.written_bytes}")
        writer.write(data)

    def finish(self) -> str:
        """Keep what came and give its digest (hashes, may spill); BadImage if some is missing."""
        writer = self._open_writer()
        try:
            if writer.written_bytes != self.table.total_bytes:
                raise BadImage(f"{writer.written_bytes} of {self.table.total_bytes} bytes came")
            descriptor = writer.seal()
        finally:
            self.close()
        return self._keep(descriptor)

    def close(self) -> None:
        """Drop what came so far; after `finish`, nothing."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            self._ended()

    def _open_writer(self) -> ImageWriter:
        if self._writer is None:
            raise BadImage("this upload has ended")
        return self._writer

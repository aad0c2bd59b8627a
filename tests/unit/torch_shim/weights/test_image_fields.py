"""An image's fields in a frame: packed sizes, or the rows that older managers read."""

from gpu_manager.weights.sealed_images import read_sizes, read_table
from torch_shim.weights.model_weights import image_fields
from torch_shim.wire.image_digests import lay_out

TABLE = lay_out([3, 64, 65])


def test_manager_reads_the_table_from_packed_sizes() -> None:
    fields = image_fields(TABLE, "0" * 64, packed=True)
    assert read_sizes(fields["sizes"], fields["total"]) == TABLE
    assert fields.keys() == {"digest", "total", "sizes"}


def test_older_manager_reads_the_table_from_rows() -> None:
    fields = image_fields(TABLE, "0" * 64, packed=False)
    assert read_table(fields["table"], fields["total"]) == TABLE
    assert fields.keys() == {"digest", "total", "table"}

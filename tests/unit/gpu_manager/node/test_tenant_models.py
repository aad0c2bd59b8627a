"""What a node remembers of the functions of a model."""

from gpu_manager.credentials import FunctionIdentity
from gpu_manager.node.tenant_models import Catalogue
from torch_shim.wire.image_digests import ImageTable

DIGEST = "d" * 64
TABLE = ImageTable((), 0)


def test_model_is_found_by_its_functions_however_many_have_come_and_gone() -> None:
    catalogue = Catalogue()
    for number in range(1_000):
        catalogue.add(FunctionIdentity("team", f"f{number}"), DIGEST, TABLE)

    (model,) = catalogue
    assert catalogue.named("f999") == catalogue.named("team/f999") == [model.id]
    assert catalogue.named("other/f999") == []
    assert catalogue.named("f0") == []
    assert len(model.functions) == 100
    assert model.label.startswith("f900, f901")


def test_function_that_registers_again_keeps_its_place() -> None:
    catalogue = Catalogue()
    for name in ("first", "second", "first"):
        catalogue.add(FunctionIdentity("team", name), DIGEST, TABLE)

    (model,) = catalogue
    assert model.label == "first, second"

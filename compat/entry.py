"""One entry of the compatibility suite: a program, its arguments, and what is promised about it."""

from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
OUR_REFUSAL = "torch_shim.errors.UnsupportedCall"

# What programs of a group import. Each group has one process that imports this once; the group's
# programs run in forks of that process.
GROUPS = {
    "torch": ("torch._dynamo",),
    "vision": ("torch._dynamo", "torchvision", "timm"),
    "language": ("torch._dynamo", "torchvision", "accelerate", "transformers"),
    "images": ("torch._dynamo", "torchvision", "kornia", "segmentation_models_pytorch"),
    "diffusers": ("torch._dynamo", "transformers", "diffusers"),
    "adapters": ("torch._dynamo", "transformers", "peft"),
    "graphs": ("torch._dynamo", "torch_geometric.nn"),
    "research": ("torch._dynamo", "torchmetrics", "pyro", "pytorch_lightning", "einops"),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One program with its arguments, and what is promised about it."""

    program: str
    args: tuple[str, ...] = ()
    group: str = "torch"
    quick: bool = False  # runs in `make test`; the others in `make compat`
    has_model: bool = True
    trains: bool = False  # it asks for gradients, which the function's own process computes
    loosen: float = 1.0  # multiplies the tolerance of every dtype
    refusal: str | None = None  # it may refuse, with these words
    raises: str = OUR_REFUSAL  # the type of that refusal: ours, or the one that CUDA raises

    @property
    def name(self) -> str:
        """What the table and the tests call it."""
        return " ".join((self.program, *self.args))

    @property
    def path(self) -> Path:
        """The file of the program."""
        return PROGRAMS / f"{self.program}.py"

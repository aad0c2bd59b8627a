"""Whether two runs of a program saved the same results, within what their dtypes can hold."""

from collections.abc import Iterator, Mapping, Sequence

import torch

# dtype -> (relative, absolute); whatever is not listed must be equal.
TOLERANCES = {
    torch.float64: (1e-7, 1e-9),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.complex64: (1e-4, 1e-5),
    torch.complex128: (1e-7, 1e-9),
}


def differences(
    expected: object, actual: object, loosen: float = 1.0, where: str = "results"
) -> Iterator[str]:
    """One line for every place where the two differ by more than `loosen` times the tolerance."""
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        yield from _tensors(expected, actual, loosen, where)
    elif type(expected) is not type(actual):
        yield f"{where}: {type(actual).__name__} instead of {type(expected).__name__}"
    elif isinstance(expected, Mapping) and isinstance(actual, Mapping):
        yield from _mappings(expected, actual, loosen, where)
    elif isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        yield from _sequences(expected, actual, loosen, where)
    elif isinstance(expected, float) and isinstance(actual, float):
        one, other = torch.tensor(expected), torch.tensor(actual)
        yield from _tensors(one, other, loosen, where)
    elif expected != actual:
        yield f"{where}: {actual!r} instead of {expected!r}"


def identical(expected: object, actual: object) -> bool:
    """Whether the two are equal to the last bit."""
    return not any(differences(expected, actual, loosen=0.0))


def _mappings(
    expected: Mapping[object, object], actual: Mapping[object, object], loosen: float, where: str
) -> Iterator[str]:
    if expected.keys() != actual.keys():
        odd = sorted(map(str, expected.keys() ^ actual.keys()))
        yield f"{where}: on one side only: {', '.join(odd)}"
        return
    for key, value in expected.items():
        yield from differences(value, actual[key], loosen, f"{where}[{key!r}]")


def _sequences(
    expected: Sequence[object], actual: Sequence[object], loosen: float, where: str
) -> Iterator[str]:
    if len(expected) != len(actual):
        yield f"{where}: {len(actual)} entries instead of {len(expected)}"
        return
    for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
        yield from differences(one, other, loosen, f"{where}[{index}]")


def _tensors(
    expected: torch.Tensor, actual: torch.Tensor, loosen: float, where: str
) -> Iterator[str]:
    if (expected.dtype, expected.shape) != (actual.dtype, actual.shape):
        yield (
            f"{where}: {actual.dtype} {list(actual.shape)}"
            f" instead of {expected.dtype} {list(expected.shape)}"
        )
        return
    if expected.numel() == 0:
        return
    if expected.dtype not in TOLERANCES:
        if not torch.equal(expected, actual):
            count = int((expected != actual).sum())
            yield f"{where}: {count} of {expected.numel()} values differ"
        return
    relative, absolute = (loosen * part for part in TOLERANCES[expected.dtype])
    wide = torch.complex128 if expected.is_complex() else torch.float64
    one, other = expected.to(wide), actual.to(wide)
    # A sum that cancels is as exact as its terms, so small values are held to the usual size.
    finite = one[one.isfinite()]
    usual = finite.abs().square().mean().sqrt() if finite.numel() else torch.tensor(0.0)
    allowed = absolute + relative * one.abs().clamp(min=float(usual))
    wrong = ~(((one - other).abs() <= allowed) | (one == other) | (one.isnan() & other.isnan()))
    if wrong.any():
        worst = float((one - other).abs()[wrong].nan_to_num(nan=torch.inf).max())
        yield (
            f"{where}: {int(wrong.sum())} of {one.numel()} values differ,"
            f" by up to {worst:.3g} where {float(usual):.3g} is usual"
        )

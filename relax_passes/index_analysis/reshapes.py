"""Where an element of a row-major tensor is after a reshape, for symbolic shapes."""

from __future__ import annotations

from collections.abc import Sequence

from .index_domain import Domain, Index, integer


def regroup(
    indices: Sequence[Index], shape: Sequence[Index], dims: Sequence[Index], domain: Domain
) -> list[Index]:
    """The place in a row-major tensor of `dims` that is place `indices` of its reshape to `shape`.

    Dimensions are matched in the smallest groups of equal size, so that no product is divided
    that need not be.
    """
    result: list[Index] = []
    i = j = 0
    while i < len(shape) or j < len(dims):
        a, b = _group(shape[i:], dims[j:], domain)
        if a == b == 1:
            result.append(indices[i])
        else:
            flat = _ravel(indices[i : i + a], shape[i : i + a], domain)
            result += unravel(flat, dims[j : j + b], domain)
        i, j = i + a, j + b
    return result


def _group(shape: Sequence[Index], dims: Sequence[Index], domain: Domain) -> tuple[int, int]:
    """How many leading dimensions of each have the same product; all of them if none fewer."""
    for total in range(1, len(shape) + len(dims)):
        for a in range(max(1, total + 1 - len(dims)), min(total, len(shape)) + 1):
            b = total + 1 - a
            if domain.is_equal(_product(shape[:a]), _product(dims[:b])):
                return a, b
    return len(shape), len(dims)


def _product(dims: Sequence[Index]) -> Index:
    result: Index = integer(1)
    for dim in dims:
        result = result * dim
    return result


def _ravel(indices: Sequence[Index], shape: Sequence[Index], domain: Domain) -> Index:
    flat: Index = integer(0)
    for index, dim in zip(indices, shape, strict=True):
        flat = flat * dim + index
    return domain.simplify(flat)


def unravel(flat: Index, dims: Sequence[Index], domain: Domain) -> list[Index]:
    """The indices of element `flat` of a row-major tensor of `dims`."""
    result: list[Index] = []
    for dim in reversed(dims[1:]):
        flat, index = domain.divide(flat, dim)
        result.append(index)
    return [*([flat] if dims else []), *reversed(result)]

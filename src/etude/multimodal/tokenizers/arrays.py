"""Converting user input to tensors: values of any kind as float32, codes as int64."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.core.errors import DataError

MISSING = -1
"""The code of a missing value."""


def as_floats(values: Any, what: str = "values") -> Tensor:
    """Return numbers (a tensor, an array, lists of numbers) as a tensor of float32.

    Values beyond float32 become infinite, None in a list becomes NaN.

    >>> as_floats([[1, 2], [3, None]])
    tensor([[1., 2.],
            [3., nan]])
    """
    if isinstance(values, Tensor):
        if values.is_complex():
            raise DataError(f"{what} must be real numbers, found {values.dtype}")
        return values.detach().to(torch.float32)
    try:
        array = np.asarray(values)
        if array.dtype.kind == "c":
            raise TypeError(array.dtype)
        with np.errstate(over="ignore"):
            return torch.from_numpy(np.require(array, np.float32, ["C", "W"]))
    except (TypeError, ValueError) as error:
        raise DataError(f"{what} must be an array of real numbers: {error}") from error


def as_whole_numbers(values: Any, what: str = "codes") -> Tensor:
    """Return integers as a tensor of int64; raises DataError for others.

    >>> as_whole_numbers([3, 4])
    tensor([3, 4])
    """
    if not isinstance(values, Tensor):
        array = np.asarray(values)
        if array.size and array.dtype.kind not in "iu":
            raise DataError(f"{what} must be integers, found {array.dtype}")
        return torch.from_numpy(array.astype(np.int64))
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise DataError(f"{what} must be integers, found {values.dtype}")
    return values.to(torch.int64)


def as_codes(codes: Any, size: int, what: str = "codes") -> Tensor:
    """Return codes as a tensor of int64; raises DataError unless all are below `size`, or -1 for missing ones.

    >>> as_codes([0, 2, -1], 3)
    tensor([ 0,  2, -1])
    """
    tensor = as_whole_numbers(codes, what)
    if tensor.numel():
        low, high = (int(value) for value in tensor.aminmax())
        if low < MISSING or high >= size:
            bad = low if low < MISSING else high
            raise DataError(f"{what} must be 0 … {size - 1}, or {MISSING} for a missing value; found {bad}")
    return tensor

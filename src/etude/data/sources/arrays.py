"""Arrays of other libraries as tensors: NumPy arrays, pandas tables, and anything with the array protocol.

None of these libraries is imported: NumPy's protocol `__array__` is used.
"""

import warnings
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.core.errors import DataError


@runtime_checkable
class ArrayLike(Protocol):
    """Anything NumPy can convert: arrays, pandas frames and series, tensors, JAX arrays …"""

    def __array__(self) -> npt.NDArray[Any]: ...


def is_array(value: object) -> bool:
    """Whether a value is an array of numbers: one sample per row."""
    return isinstance(value, ArrayLike) and not isinstance(value, np.generic)


def is_column(value: object) -> bool:
    """Whether a value is an array, or a list of numbers or of such lists.

    >>> is_column(np.zeros(3)), is_column([[1.0, 2.0], [3.0, 4.0]]), is_column([torch.zeros(2)]), is_column([])
    (True, True, False, False)
    """
    if not isinstance(value, list):
        return is_array(value)
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, (int, float, np.generic))


def is_pair(value: object) -> bool:
    """Whether a value is a tuple of data and labels."""
    return isinstance(value, tuple) and len(value) == 2 and all(map(is_column, value))


def as_tensor(value: Any, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor, an array, a pandas table or a list of numbers as a tensor; memory is shared if possible.

    float64, the default of NumPy and pandas, becomes torch's default dtype, usually float32; with `dtype` all
    floating-point values get that dtype. A memory-mapped file keeps its dtype without `dtype`, and stays on disk.
    Tensors are not changed. Raises DataError for text, dates and other non-numbers.

    >>> as_tensor(np.array([0.5, 1.0]), "data"), as_tensor([1, 0], "labels")
    (tensor([0.5000, 1.0000]), tensor([1, 0]))
    """
    if isinstance(value, Tensor):
        tensor = value.detach()
    elif isinstance(value, (list, ArrayLike)):
        try:
            tensor = _from_numpy(_numbers(value, name))
        except TypeError as error:  # number types that torch lacks, such as float128
            raise _no_numbers(value, name) from error
        is_default = tensor.dtype is torch.float64 and not isinstance(value, np.memmap)
        if is_default or (dtype is not None and tensor.is_floating_point()):
            tensor = tensor.to(dtype or torch.get_default_dtype())
    else:
        raise DataError(f"{name} is a {type(value).__name__}; pass a tensor, a NumPy array or a pandas table")
    if tensor.dim() == 0:
        raise DataError(f"{name} is a single number; its first dimension must run over the samples")
    return tensor


def _numbers(value: Any, name: str) -> npt.NDArray[Any]:
    """Return the value as an array of numbers, in native byte order."""
    try:
        array = value if isinstance(value, np.ndarray) else np.ascontiguousarray(value)
        if array.dtype == object and not isinstance(value, (np.ndarray, list)):
            array = np.array(array.tolist())  # a table with several number types
    except (TypeError, ValueError) as error:
        raise _no_numbers(value, name) from error
    if array.dtype.kind not in "biufc":
        raise _no_numbers(value, name)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _from_numpy(array: npt.NDArray[Any]) -> Tensor:
    with warnings.catch_warnings():
        # A read-only array (a memory-mapped file) is fine: it is never written.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        try:
            return torch.from_numpy(array)
        except ValueError:  # strides that torch does not support, such as those of a reversed array
            return torch.from_numpy(array.copy())


def _no_numbers(value: Any, name: str) -> DataError:
    columns = getattr(value, "columns", ())  # the columns of a table
    text = [str(one) for one in columns if np.asarray(value[one]).dtype.kind not in "biuf"]
    what = f"columns that are not numeric: {', '.join(text)}" if text else f"a {type(value).__name__}"
    dtype = "" if text or not isinstance(value, ArrayLike) else f" of {np.asarray(value).dtype}"
    return DataError(
        f"{name}: {what}{dtype} cannot become a tensor; pass numbers (convert class names with numpy.unique(names, "
        "return_inverse=True)), in rows of equal length"
    )

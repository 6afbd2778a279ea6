"""Names of devices."""

import torch

from etude.core.errors import ConfigError
from etude.core.spelling import shorten


def as_device(device: torch.device | str | int) -> torch.device:
    """Return the device of that name; `auto` is CUDA where there is one. Raises ConfigError for an unknown name.

    >>> as_device("cpu")
    device(type='cpu')
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:  # an index that is no number of 8 bits is a ValueError
        raise ConfigError(
            f"device {shorten(str(device))!r} is not known to torch; use cpu, cuda or cuda:N"
        ) from error

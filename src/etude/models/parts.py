"""What models share: names of activations and number types, and arguments as one mapping."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, ParamSpec

from torch import nn

P = ParamSpec("P")

Activation = Literal["relu", "tanh", "sigmoid", "gelu", "silu"]
Dtype = Literal["float32", "float64", "bfloat16", "float16"]

ACTIVATIONS: Mapping[Activation, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}


def takes_config(init: Callable[P, None]) -> Callable[P, None]:
    """Let a model be made with a mapping of its arguments: `LeNet5(create_model_config(config))`."""

    @functools.wraps(init)
    def unpacked(*args: P.args, **kwargs: P.kwargs) -> None:
        if len(args) == 2 and isinstance(config := args[1], Mapping):
            options: Any = {**config, **kwargs}
            init(args[0], **options)  # type: ignore[arg-type]
        else:
            init(*args, **kwargs)

    return unpacked

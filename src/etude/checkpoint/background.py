"""Saving in the background: the state is copied to host memory, and a thread writes the copy while training goes on."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from etude.checkpoint.contents import Contents
from etude.core.errors import CheckpointError


class BackgroundWriter:
    """Writes one checkpoint at a time in a thread. The memory of the copy is reused by the next one."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the thread still writes."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, contents: Contents, write: Callable[[Contents], object]) -> None:
        """Copy the tensors and write the copy in a thread; `wait` tells how it ended."""
        self.wait()
        contents = contents.copied(self._copied)
        # A daemon: after a second Ctrl-C the process ends, and what it leaves is removed by the next one.
        self._thread = threading.Thread(target=self._run, args=(contents, write), name="etude-save", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Wait until nothing is being written; raise the error of the last write, if it failed."""
        self.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def _run(self, contents: Contents, write: Callable[[Contents], object]) -> None:
        try:
            write(contents)
        except BaseException as error:  # raised again by `wait`, in the thread that trains
            self._error = error

    @torch.no_grad()
    def _copied(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy to host memory: page-locked for a device, so that all copies run at once. Waits for the device once."""
        try:
            copies = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        except RuntimeError as error:  # not enough memory on the host
            self._copies = {}
            raise CheckpointError(
                f"cannot copy the state to save it in the background: {error!s:.200}; set training.async_save=false"
            ) from error
        devices = set()
        for name, tensor in tensors.items():
            copies[name].copy_(tensor, non_blocking=True)
            if tensor.is_cuda:
                devices.add(tensor.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        self._copies = copies
        return copies

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        """Return memory for a copy: that of the last checkpoint if it fits."""
        known = self._copies.get(name)
        if known is not None and (known.shape, known.dtype) == (tensor.shape, tensor.dtype):
            return known
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

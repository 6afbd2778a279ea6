"""Instructions executed by this thread, where Linux and the processor let us count them."""

import ctypes
import os
import platform
import struct
import sys

SYSCALLS = {"x86_64": 298, "aarch64": 241}
HARDWARE, SOFTWARE = 0, 1
INSTRUCTIONS, TASK_CLOCK = 1, 1
EXCLUDE_KERNEL, EXCLUDE_HYPERVISOR = 1 << 5, 1 << 6
ATTRIBUTE_SIZE, FLAGS_OFFSET = 128, 40


class InstructionCounter:
    """Counts what perf_event_open counts for the calling thread; `read` gives None where that is not possible.

    Virtual machines often hide the counter. `kind` and `event` are those of perf_event_open(2).
    """

    def __init__(self, kind: int = HARDWARE, event: int = INSTRUCTIONS) -> None:
        self._descriptor = -1
        number = SYSCALLS.get(platform.machine())
        if sys.platform != "linux" or number is None:
            return
        attribute = bytearray(ATTRIBUTE_SIZE)
        struct.pack_into("IIQ", attribute, 0, kind, ATTRIBUTE_SIZE, event)
        struct.pack_into("Q", attribute, FLAGS_OFFSET, EXCLUDE_KERNEL | EXCLUDE_HYPERVISOR)
        pointer = (ctypes.c_char * ATTRIBUTE_SIZE).from_buffer(attribute)
        this_thread, any_cpu, no_group = 0, -1, -1
        self._descriptor = ctypes.CDLL(None).syscall(number, pointer, this_thread, any_cpu, no_group, 0)

    def read(self) -> int | None:
        """Return the count up to now."""
        if self._descriptor < 0:
            return None
        return int.from_bytes(os.read(self._descriptor, 8), sys.byteorder)

    def close(self) -> None:
        """Stop counting; safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

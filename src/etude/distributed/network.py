"""Addresses of machines that run together: which one this is, and whether the others can be reached."""

import contextlib
import ipaddress
import os
import socket
import stat
import struct
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from etude.core.errors import ConfigError, ConnectionLost

JOIN_TIMEOUT_S = 600
"""How long a machine waits for the others."""
_RETRY_S = 0.5
PEER_TIMEOUT_S = 60
"""How long another machine may be unreachable before connections to it fail; Linux's own default is a quarter hour."""
_PROBE_S = 10


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port.

    >>> parse_endpoint("node1:29400"), parse_endpoint("[fe80::1]:29400")
    (('node1', 29400), ('fe80::1', 29400))
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"--rdzv-endpoint {endpoint}: give the host and a port, such as node1:29400")
    return host.strip("[]"), int(port)


def local_address(endpoint: str) -> tuple[str, bool]:
    """Return the address by which other machines reach this one, and whether the endpoint is on this machine.

    The address is that from which it reaches the endpoint: the host name may stand for another network, or nothing.
    """
    host, port = parse_endpoint(endpoint)
    try:
        kind, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as one:
            one.connect(found)  # sends nothing
            address = str(one.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"--rdzv-endpoint {endpoint}: {error.strerror or error}") from error
    return address, address == found[0]


def is_open(endpoint: str) -> bool:
    """Whether something answers at the endpoint."""
    try:
        with socket.create_connection(parse_endpoint(endpoint), timeout=5):
            return True
    except OSError:
        return False


def wait_for_endpoint(endpoint: str, timeout_s: float = JOIN_TIMEOUT_S) -> None:
    """Wait until the machine of the endpoint has begun; raise ConnectionLost if it does not.

    Torch would wait too, but without hearing Ctrl-C.
    """
    deadline = time.monotonic() + timeout_s
    while not is_open(endpoint):
        if time.monotonic() > deadline:
            raise ConnectionLost(
                f"nothing answers at {endpoint} after {timeout_s:.0f} s; start the same command on that machine too, "
                "and let the others reach its port"
            )
        time.sleep(_RETRY_S)


def interface_of(address: str) -> str:
    """Return the network interface with this IPv4 address; empty if it is unknown."""
    if sys.platform != "linux":
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                request = fcntl.ioctl(one, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                if socket.inet_ntoa(request[20:24]) == address:
                    return name
    return ""


def notice_lost_machines() -> None:
    """Let the connections of this process to other machines fail if those cannot be reached any more (on Linux).

    Torch and gloo open them and set no such limit: a read would wait until the kernel gives up, for signals too. The
    kernels of the machines answer the probes, so a process that is only slow, or even stopped, is not lost.
    """
    if sys.platform != "linux":
        return
    options = (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * PEER_TIMEOUT_S),
    )
    for path in Path("/proc/self/fd").iterdir():
        # no peer, or closed by now
        with contextlib.suppress(OSError, ValueError), ExitStack() as stack:
            if not stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                continue
            one = stack.enter_context(socket.socket(fileno=os.dup(int(path.name))))
            is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
            if is_tcp and not ipaddress.ip_address(one.getpeername()[0].partition("%")[0]).is_loopback:
                for option in options:
                    one.setsockopt(*option)

"""Two hosts on one machine: network namespaces, joined by a wire that can be cut or disturbed.

Each host has a veth pair to a third namespace, in which `relay.py` passes frames on: the kernel
need not have netem.
"""

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

RELAY = Path(__file__).with_name("relay.py")
_SIOCETHTOOL, _SET_TX_CHECKSUM = 0x8946, 0x17


@dataclass(frozen=True)
class Host:
    """A host.

    Attributes:
        name: Its network namespace.
        address: Its address.
        interface: Its interface to the other one.
    """

    name: str
    address: str
    interface: str

    @property
    def run(self) -> list[str]:
        """What to put before a command that is to run there."""
        gloo = f"GLOO_SOCKET_IFNAME={self.interface}"
        return ["ip", "netns", "exec", self.name, "env", gloo]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread is on the host, as are sockets and threads that it makes there."""
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        try:
            os.setns(there, os.CLONE_NEWNET)
            yield
        finally:
            os.setns(here, os.CLONE_NEWNET)
            os.close(there)
            os.close(here)


class Wire:
    """What is between the hosts.

    Args:
        name: Its network namespace.
        ends: Its interfaces.
        relay: The process that passes frames on.
    """

    def __init__(self, name: str, ends: list[str], relay: subprocess.Popen):
        self._name, self._ends, self._relay = name, ends, relay

    @contextmanager
    def cut(self) -> Iterator[None]:
        """The cable of the second host is out."""
        _ip("-n", self._name, "link", "set", self._ends[1], "down")
        try:
            yield
        finally:
            _ip("-n", self._name, "link", "set", self._ends[1], "up")

    @contextmanager
    def disturbed(self, delay: float, loss: float) -> Iterator[None]:
        """Each frame takes so many seconds, and this fraction of them never arrives."""
        self._set(delay, loss)
        try:
            yield
        finally:
            self._set(0, 0)

    def _set(self, delay: float, loss: float) -> None:
        assert self._relay.stdin is not None
        self._relay.stdin.write(f"{delay} {loss}\n".encode())
        self._relay.stdin.flush()


def missing() -> str | None:
    """Why there can be no hosts here; None if there can."""
    try:
        with two_hosts():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        text = error.stderr.decode() if isinstance(error, subprocess.CalledProcessError) else error
        return f"network namespaces cannot be made here ({text})"


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host, Wire]]:
    """Two hosts and the wire; all is taken down at the end."""
    _sweep()
    names = [f"test-{os.getpid()}-{part}" for part in ("a", "b", "wire")]
    hosts = [Host(names[n], f"10.77.0.{n + 1}", f"veth-{'ab'[n]}") for n in (0, 1)]
    ends = ["wire-a", "wire-b"]
    with ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        for host, end in zip(hosts, ends, strict=True):
            pair = ("netns", host.name, "type", "veth", "peer", "name", end, "netns", names[2])
            _ip("link", "add", host.interface, *pair)
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
            for name, interface in (
                (host.name, "lo"),
                (host.name, host.interface),
                (names[2], end),
            ):
                _ip("-n", name, "link", "set", interface, "up")
            with host.entered():
                _send_checksums(host.interface)
        relay = subprocess.Popen(
            ["ip", "netns", "exec", names[2], sys.executable, RELAY, *ends], stdin=subprocess.PIPE
        )
        stack.callback(relay.wait, timeout=10)
        assert relay.stdin is not None
        stack.callback(relay.stdin.close)  # which ends it
        yield hosts[0], hosts[1], Wire(names[2], ends, relay)


def _sweep() -> None:
    """Take down what tests that were killed have left behind."""
    for left in Path("/run/netns").glob("test-*-*"):
        if not Path("/proc", left.name.split("-")[1]).exists():
            _ip("netns", "delete", left.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


def _send_checksums(interface: str) -> None:
    """Between veth ends the kernel leaves checksums out, which a relay would pass on as wrong."""
    value = ctypes.create_string_buffer(struct.pack("II", _SET_TX_CHECKSUM, 0))
    request = struct.pack("16sP8x", interface.encode(), ctypes.addressof(value))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, request)

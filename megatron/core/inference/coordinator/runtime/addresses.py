"""Which address and interface of this machine the rest of the job can reach."""

import os
import socket
import tempfile
from pathlib import Path

_LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACES = "lo", "lo0"  # Linux, BSD and macOS
_INTERFACE_VARIABLES = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def job_address(named: str | None = None, alone: bool = True) -> str:
    """This machine's address within the job.

    A named one, if it is this machine's; on other machines the address that leads there. Without
    one, loopback while the job is alone on this machine, else the address that leads to
    MASTER_ADDR. On the master itself, whose own name may well resolve to loopback, it is the first
    address that is none.

    Args:
        named: What the user gave, once for all machines or to each its own.
        alone: Whether all ranks of the job are on this machine.
    """
    if named is not None and _is_here(named):
        return named
    if named is None and alone:
        return _LOOPBACK
    address = _address_towards(named or os.environ.get("MASTER_ADDR", ""))
    if address is None or address.startswith("127."):
        return next(iter(other_addresses()), socket.getfqdn())
    return address


def _is_here(host: str) -> bool:
    """Whether it names an address of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
        return True


def machine() -> str:
    """Names what this process shares with others: kernel, loopback network and temporary folder.

    Containers on one machine share the kernel alone.
    """
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network = os.stat("/proc/self/ns/net").st_ino
    folder = os.stat(tempfile.gettempdir())
    return f"{kernel} {network} {folder.st_dev} {folder.st_ino}"


def keep_collectives_on_loopback() -> None:
    """Keep gloo and NCCL off the network while all ranks are on this machine.

    They listen where this machine's name leads to, for whoever connects. Call it before process
    groups are made; what the environment says already stays.
    """
    loopback = [name for _, name in socket.if_nameindex() if name in _LOOPBACK_INTERFACES]
    if loopback and _on_one_machine():
        for variable in _INTERFACE_VARIABLES:
            os.environ.setdefault(variable, loopback[0])


def _on_one_machine() -> bool:
    """True if all ranks are on this machine, by the word of torchrun or tools/launch.py."""
    return os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")


def _address_towards(host: str) -> str | None:
    """The address that packets to a host would carry; none is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return address


def other_addresses() -> list[str]:
    """IPv4 addresses of this machine's interfaces that are up, loopback left out."""
    import psutil  # needed between machines alone

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return [
        entry.address
        for name, entries in sorted(psutil.net_if_addrs().items())
        for entry in entries
        if name in up and entry.family is socket.AF_INET and not entry.address.startswith("127.")
    ]

"""One port for several processes: each listens on a socket of its own, and nobody else may.

SO_REUSEPORT lets the system spread connections over the sockets that listen on a port, each with
its own accept queue. It would as readily let two servers of one user share a port unnoticed; so the
parent first takes the port alone, and opens it to sharing only then.
"""

import contextlib
import errno
import ipaddress
import os
import socket
import weakref

DEFAULT_HOST = "0.0.0.0"

_holders: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _let_go() -> None:
    for holder in list(_holders):
        holder.close()


# A fork would keep the port for as long as it lives.
os.register_at_fork(after_in_child=_let_go)


class PortInUseError(OSError):
    """Somebody else has the port."""


def hold_port(host: str, port: int) -> socket.socket:
    """Reserves a port for sockets of `listening_socket`, in this and other processes.

    Args:
        host: Address or name to bind; of a name's addresses an IPv4 one is preferred.
        port: The port; 0 lets the system choose one.

    Returns:
        A bound socket that does not listen; the port is free again once it is closed.

    Raises:
        PortInUseError: A socket of anybody, this user included, is bound to the port.
        OSError: The host is not an address of this machine, or the port is not allowed.
    """
    family, address = _resolve(host, port)
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        _bind_alone(holder, address)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        holder.close()
        raise _explained(error, host, port) from error
    _holders.add(holder)
    return holder


def take_over(sock: socket.socket) -> socket.socket:
    """Makes a bound socket, which is closed, the holder of its port.

    Closing it and binding another would fail where a fork has it too.

    Raises:
        ValueError: It is not bound to a port.
    """
    with sock:
        if not sock.getsockname()[1]:
            raise ValueError("sock must be bound to a port before it is passed")
        holder = sock.dup()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    _holders.add(holder)
    return holder


def listening_socket(family: int, address: tuple) -> socket.socket:
    """A socket bound to a held port, ready to listen.

    It names its protocol: asyncio sets TCP_NODELAY only on connections that do, and without that
    an answer's last piece waits 40 ms for the client's acknowledgement of the one before.

    Args:
        family: The holder's address family.
        address: What the holder's `getsockname` returns.
    """
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(address)
    sock.setblocking(False)
    return sock


def url_of(address: tuple) -> str:
    """The base URL at which this machine reaches a bound address.

    An address that stands for all interfaces becomes the loopback address of its family; from
    elsewhere, use the machine's name instead.

    Args:
        address: What a socket's `getsockname` returns.
    """
    host, port = address[:2]
    ip = ipaddress.ip_address(host.partition("%")[0])
    if ip.is_unspecified:
        host = "127.0.0.1" if ip.version == 4 else "::1"
    return f"http://[{host}]:{port}" if ip.version == 6 else f"http://{host}:{port}"


def _resolve(host: str, port: int) -> tuple[int, tuple]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise OSError(f"cannot serve on {host}: {error.strerror}") from error
    found.sort(key=lambda each: each[0] != socket.AF_INET)
    family, _, _, _, address = found[0]
    return family, address


def _bind_alone(sock: socket.socket, address: tuple) -> None:
    """Binds where no other socket is bound.

    Connections that a former server closed keep its port for a minute. Only SO_REUSEADDR passes
    over them; it would pass over a bound socket that has the option too and does not listen yet,
    so it comes second.
    """
    with contextlib.suppress(OSError):
        return sock.bind(address)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return sock.bind(address)


def _explained(error: OSError, host: str, port: int) -> OSError:
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(
            errno.EADDRINUSE,
            f"port {port} is in use on {host}: stop what listens there, or choose another port "
            "(0 lets the system choose)",
        )
    reason = os.strerror(error.errno) if error.errno else str(error)
    return OSError(error.errno, f"cannot serve on {host} port {port}: {reason}")

"""ZeroMQ sockets as every end of the protocol wants them."""

import zmq

HEARTBEAT_MS = 500
HEARTBEAT_TIMEOUT_MS = 2000


def dealer(context: zmq.Context, address: str, identity: bytes) -> zmq.Socket:
    """A DEALER connected to a coordinator.

    The identity is set, so that the coordinator knows the peer again after a broken connection
    has come back.

    Args:
        context: Where the socket lives.
        address: The coordinator's, e.g. tcp://127.0.0.1:5000.
        identity: 1 to 255 bytes, unique among all peers; must not begin with a zero byte.

    Raises:
        ValueError: The address is none.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    _common(socket)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ValueError(f"{address!r} is no coordinator address ({error.strerror})") from None
    return socket


def router(context: zmq.Context) -> zmq.Socket:
    """A ROUTER, not bound yet, that says when a peer cannot be reached."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    _common(socket)
    return socket


def _common(socket: zmq.Socket) -> None:
    # Without heartbeats a peer whose machine is gone looks like one that has nothing to say.
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    # No send may block the loop it is made from.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)

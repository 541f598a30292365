"""A wire between two hosts that can be slow and lose packets, where the kernel has no netem.

    relay.py INTERFACE INTERFACE

It passes Ethernet frames on between two interfaces. A line on standard input sets what becomes of
the frames from then on: `DELAY LOSS`, in seconds and as a fraction.
"""

import heapq
import random
import select
import socket
import sys
import time
from contextlib import suppress

_ALL_PROTOCOLS = 0x0003
_OUTGOING = 4  # frames that this process sent itself
_LARGEST = 65536


def open_end(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    end.bind((interface, 0))
    end.setblocking(False)
    return end


def main(first: str, second: str) -> None:
    ends = [open_end(first), open_end(second)]
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    delay = loss = 0.0
    under_way: list[tuple[float, int, socket.socket, bytes]] = []
    count, source = 0, random.Random(5)
    while True:
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, _, end, frame = heapq.heappop(under_way)
            with suppress(OSError):  # the interface is down, or full: the frame is lost
                end.send(frame)
        left = max(0.0, under_way[0][0] - now) if under_way else None
        for ready in select.select([sys.stdin, *ends], [], [], left)[0]:
            if ready is sys.stdin:
                line = sys.stdin.readline()
                if not line:
                    return
                delay, loss = map(float, line.split())
                continue
            try:
                frame, address = ready.recvfrom(_LARGEST)
            except OSError:
                continue  # the interface is down
            if address[2] != _OUTGOING and source.random() >= loss:
                count += 1
                heapq.heappush(under_way, (time.monotonic() + delay, count, other[ready], frame))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A coordinator's loop in a thread of the test's own process."""

import threading
from typing import Any

import zmq
from dummy_engine import BLOCK

from megatron.core.inference.coordinator.core import Coordinator
from megatron.core.inference.coordinator.runtime import sockets
from megatron.core.inference.coordinator.runtime.keys import Lock
from megatron.core.inference.coordinator.runtime.loop import CoordinatorLoop
from megatron.core.inference.coordinator.runtime.process import bind
from megatron.core.inference.coordinator.settings import CoordinatorSettings

SECONDS = 10
"""Until a test that waits for something gives up."""


class Running:
    """A coordinator's loop in a thread."""

    def __init__(self, port: int = 0, lock: Lock | None = None, **settings: Any):
        self.context = zmq.Context()
        router = sockets.router(self.context)
        rights = {}
        self._guard = None
        if lock is not None:
            self._guard = lock.guard(self.context)
            lock.apply(router)
            rights["rights_of"] = self._guard.rights
        self.address = bind(router, "127.0.0.1", port)
        core = Coordinator(CoordinatorSettings(**({"block_size_tokens": BLOCK} | settings)))
        self.loop = CoordinatorLoop(core, router, **rights)
        self._thread = threading.Thread(target=self._run, args=(router,))
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.address.rsplit(":", 1)[1])

    @property
    def counts(self) -> dict[str, int]:
        return self.loop.events.counts

    def _run(self, router: zmq.Socket) -> None:
        self.loop.run()
        router.close(linger=0)

    def close(self) -> None:
        self.loop.stop()
        self._thread.join(SECONDS)
        if self._guard is not None:
            self._guard.stop()
        self.context.destroy(linger=0)

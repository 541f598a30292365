"""The process under attack: tools/run_coordinator.py, as anybody would start it."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from coordinator_fuzz.peer import BLOCK
from megatron.core.inference.coordinator.runtime.keys import KeyRing

_TOOL = Path(__file__).parents[1] / "run_coordinator.py"
_START_SECONDS = 60.0
_FRAME_BYTES = 1 << 20
"""Of the largest frame that it takes: small, so that larger ones are no work to send."""

LARGER_FRAME = _FRAME_BYTES + 1


class TargetFailed(RuntimeError):
    """The coordinator did not come up, or ended by itself; the text has the end of its log."""


class Target:
    """A running coordinator.

    Args:
        process: It.
        folder: Where its address, its keys and its log are.

    Attributes:
        address: Where it listens.
        ring: The keys of its peers; None where it speaks in plain.
    """

    def __init__(self, process: subprocess.Popen, folder: Path):
        self._process, self._log = process, folder / "log"
        self.address = self._wait_for(folder / "address")
        keys = folder / "keys.json"
        self.ring = KeyRing.read(keys) if keys.exists() else None

    @property
    def port(self) -> int:
        """The port of its address."""
        return int(self.address.rsplit(":", 1)[1])

    @property
    def rss_mib(self) -> float:
        """Resident memory, MiB."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    @property
    def descriptors(self) -> int:
        """Open files and sockets."""
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    @property
    def log_bytes(self) -> int:
        """Size of its log."""
        return self._log.stat().st_size

    @property
    def log(self) -> str:
        """What it logged."""
        return self._log.read_text(errors="replace")

    def check(self, patience: float = 0.0) -> None:
        """Do nothing while it runs.

        Args:
            patience: Seconds to wait for its end, where it seems near.

        Raises:
            TargetFailed: It does not.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        code = self._process.poll()
        if code is not None:
            raise TargetFailed(f"the coordinator ended with {code}:\n{self.log[-3000:]}")

    def stop(self) -> dict[str, int]:
        """End it politely; how often each event happened, as it says at its end.

        Raises:
            TargetFailed: It does not end within 10 s, or not orderly.
        """
        self.check()
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            raise TargetFailed("the coordinator does not end on SIGTERM") from None
        stopped = re.search(r" stopped (.*)$", self.log, re.MULTILINE)
        if code or stopped is None:
            raise TargetFailed(f"the coordinator ended with {code}:\n{self.log[-3000:]}")
        return {name: int(n) for name, n in re.findall(r"(\w+)=(\d+)", stopped[1])}

    def _wait_for(self, path: Path) -> str:
        deadline = time.monotonic() + _START_SECONDS
        while not path.exists():
            self.check()
            if time.monotonic() > deadline:
                raise TargetFailed(f"no coordinator within {_START_SECONDS:.0f} s")
            time.sleep(0.02)
        return path.read_text().strip()


@contextmanager
def running(plain: bool, flags: Sequence[Any] = ()) -> Iterator[Target]:
    """A coordinator, ended in any case.

    Args:
        plain: It takes messages from everybody; if not, it has keys.
        flags: More for its command line.

    Raises:
        TargetFailed: It does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="coordinator-fuzz-") as name:
        folder = Path(name)
        access = ["plain"] if plain else [f"key-file={folder / 'keys.json'}"]
        more = [f"max-frame-bytes={_FRAME_BYTES}", "max-retries=999", *access, *flags]
        command = [sys.executable, str(_TOOL), "--port=0", f"--address-file={folder / 'address'}"]
        command += [f"--inference-dynamic-batching-block-size={BLOCK}"]
        command += [f"--inference-coordinator-{flag}" for flag in more]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield Target(process, folder)
        finally:
            process.kill()
            process.wait()

"""What our coordinator says of itself in its log."""

import ast
import re
from collections import Counter
from pathlib import Path

_EVENT = re.compile(r"coordinator (?:INFO|WARNING) (\w+)(.*)")
_FIELD = re.compile(r" (\w+)=('[^']*'|\"[^\"]*\"|[-\d.]+)")


class CoordinatorLog:
    """Reads a coordinator's log while it is written.

    Args:
        path: The file.

    Attributes:
        taken_back: Requests that lost replicas had.
        exceptions: Tracebacks.
    """

    def __init__(self, path: Path):
        self.path = path
        self.taken_back = self.exceptions = 0
        self._offset = 0
        self._live = 0
        self._away: set[int] = set()
        self._totals: Counter[str] = Counter()

    def live(self) -> int:
        """Replicas that are registered at present."""
        self._read()
        return self._live

    def totals(self) -> Counter[str]:
        """How often each event happened, once the coordinator has been stopped."""
        self._read()
        return self._totals

    def _read(self) -> None:
        with self.path.open() as file:
            file.seek(self._offset)
            # The last line may be half written.
            whole, newline, _ = file.read().rpartition("\n")
        self._offset += len((whole + newline).encode())
        for line in whole.splitlines():
            self.exceptions += line.lstrip().startswith("Traceback")
            found = _EVENT.search(line)
            if found is not None:
                fields = {k: ast.literal_eval(v) for k, v in _FIELD.findall(found[2])}
                self._note(found[1], fields)

    def _note(self, event: str, fields: dict) -> None:
        match event:
            case "ranks_registered":
                self._live = fields["registered"]
            case "rank_away":
                self._away.add(fields["rank"])
                self._live -= 1
            case "rank_back" if fields["rank"] in self._away:
                self._away.remove(fields["rank"])
                self._live += 1
            case "rank_lost" | "rank_left":
                self._live -= fields["rank"] not in self._away
                self._away.discard(fields["rank"])
                self.taken_back += fields["requests"]
            case "stopped":
                self._totals.update(fields)

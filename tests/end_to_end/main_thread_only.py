"""Runs a script in which a collective off the main thread fails, as it does on several GPUs.

    main_thread_only.py SCRIPT [arguments]

CUDA's current device belongs to a thread: anywhere else all ranks would meet on the first GPU.
"""

import functools
import runpy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "scatter_object_list"),
)


def guard() -> None:
    import torch.distributed

    for name in COLLECTIVES:
        setattr(torch.distributed, name, _guarded(getattr(torch.distributed, name)))


def _guarded(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def run(*args: Any, **kwargs: Any) -> Any:
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            raise RuntimeError(f"{collective.__name__} in {thread.name}, not in the main thread")
        return collective(*args, **kwargs)

    return run


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    guard()
    runpy.run_path(sys.argv[0], run_name="__main__")

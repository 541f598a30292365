"""Collecting something from every rank while engines run, without a collective.

A collective would hold up the engine's loop if it ran in the loop's thread. In any other thread it
would run on the wrong GPU: CUDA's current device belongs to a thread, and a new one has the first.
The store that the ranks met at needs neither.
"""

import json
import time
from itertools import count
from typing import Any

import torch
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 600.0
"""How long other ranks may take, e.g. to start their front ends."""

_calls = count()


def gathered(value: Any) -> list[Any]:
    """Every rank's value, in the order of ranks; in any thread.

    All ranks must call it equally often.

    Args:
        value: Anything that JSON can hold.

    Raises:
        TimeoutError: A rank did not call it in time.
    """
    world = torch.distributed.get_world_size()
    if world == 1:
        return [value]
    store = PrefixStore(f"prefix_routing/{next(_calls)}", _get_default_store())
    store.set(str(torch.distributed.get_rank()), json.dumps(value))
    values, deadline = [], time.monotonic() + _PATIENCE_SECONDS
    for rank in map(str, range(world)):
        while not store.check([rank]):  # to wait in `get` would keep all other threads from it
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} did not report within {_PATIENCE_SECONDS:g} s")
            time.sleep(_LOOK_SECONDS)
        values.append(json.loads(store.get(rank)))
    return values

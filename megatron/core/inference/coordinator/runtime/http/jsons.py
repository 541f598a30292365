"""JSON in and out: orjson where it is installed, as megatron-core's chat endpoint has it."""

import json
from typing import Any

try:
    import orjson  # type: ignore[import-not-found]
except ImportError:
    orjson = None


def loads(data: bytes | str) -> Any:
    """Decodes.

    Raises:
        ValueError: `data` is no JSON, or is nested too deeply.
    """
    try:
        return json.loads(data) if orjson is None else orjson.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dumps(value: Any) -> str:
    """Encodes, without spaces."""
    if orjson is not None:
        return orjson.dumps(value).decode()
    return json.dumps(value, separators=(",", ":"))

"""The HTTP front ends: several processes on one port that speak the OpenAI API."""

from megatron.core.inference.coordinator.runtime.http.server import (
    drain_text_gen_server,
    start_text_gen_server,
    stop_text_gen_server,
    supervision,
)

__all__ = [
    "drain_text_gen_server",
    "start_text_gen_server",
    "stop_text_gen_server",
    "supervision",
]

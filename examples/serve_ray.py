#!/usr/bin/env python3
r"""Serve with Ray: one actor a rank, on any nodes, and all replicas behind one coordinator.

    python examples/serve_ray.py --ranks 16 --load CHECKPOINT --use-checkpoint-args --bf16 \
        --tensor-model-parallel-size 2 … [flags of the tool or of Megatron]

The repository must be at the same place on every node. Replicas should lie within nodes: Ray fills
one node after the other as far as it can.
"""

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import ray

TOOL = Path(__file__).resolve().parents[1] / "tools" / "run_dynamic_text_generation_server.py"


class Rank:
    """One rank; its server is a process of its own, which needs a main thread."""

    def address(self) -> tuple[str, int]:
        """This node's address, and a port that is free at present."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def serve(self, rank: int, ranks: int, master: tuple[str, int], flags: Sequence[str]) -> int:
        """Serve until the process ends; returns its exit code."""
        return subprocess.call(
            [sys.executable, str(TOOL), *flags],
            env=os.environ | environment(rank, ranks, master) | {"OMP_NUM_THREADS": "1"},
        )


def environment(rank: int, ranks: int, master: tuple[str, int]) -> dict[str, str]:
    """What Megatron reads of a process's place in the job.

    Ray shows each actor its own GPU alone, so that is the first one everywhere.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # which tensor parallelism asks for
    }


def main(argv: Sequence[str]) -> None:
    """Serve until the first rank ends."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--gpus-per-rank", type=int, default=1, help="0 to compute on CPUs")
    options, flags = parser.parse_known_args(argv)
    ray.init()
    bundle = {"CPU": 1.0} | ({"GPU": options.gpus_per_rank} if options.gpus_per_rank else {})
    group = ray.util.placement_group([bundle] * options.ranks, strategy="PACK")
    ray.get(group.ready())
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
    actor = ray.remote(num_cpus=1, num_gpus=options.gpus_per_rank)(Rank)
    actors = [actor.options(scheduling_strategy=strategy).remote() for _ in range(options.ranks)]
    master = ray.get(actors[0].address.remote())
    served = [
        each.serve.remote(rank, options.ranks, master, flags) for rank, each in enumerate(actors)
    ]
    (ended, *_), _ = ray.wait(served)
    sys.exit(ray.get(ended))


if __name__ == "__main__":
    main(sys.argv[1:])

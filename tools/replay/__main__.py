r"""Replay traffic through the coordinator core, against modelled replicas, and compare policies.

    python tools/replay                                     generated rollouts, a few policies
    python tools/replay --policies all --html report.html   every policy; a page to look at
    python tools/replay --workload decisions --path run.jsonl --policies betas
    python tools/replay --claims claims.json                the reported claims, checked

workloads (--workload):
  rollouts            made up from the seed, in the shape of recorded agents
  chats               made up: 40 chats that share a system prompt, one request at a time
  sessions            a file of our own format (tools/replay/jsonl.py)
  decisions           what a server recorded with --inference-coordinator-record FILE
  swebench, claude_code, tau, mooncake, mooncake_synthetic, reference
                      recorded workloads, from a folder of their own

policies (--policies, separated by commas): NAME[:WEIGHT][@events|@history|@stock]
  relative:BETA, capacity:ALPHA, prefill_work and the core's other cost policies, with the signal
  longest_prefix, or first_prefix_block after "first+"; load_balanced
  round_robin, random, consistent_hash, pinned, released:PLACES, work_batch, block_cost:WEIGHT
  and the sets quick, reference, betas, alphas, all
  @events: replicas tell of their caches; @history: what they hold is guessed from what was routed
  to them, and from their size; @stock: without their size. Without @: events, and history.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from light_import import import_lightly  # noqa: E402

import_lightly()

from replay.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(__doc__))

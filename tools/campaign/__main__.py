r"""Load a fleet to 80 % of its capacity, let something break every few seconds, and count.

    python tools/campaign                        2 minutes, 3 real engines on the CPU
    python tools/campaign --minutes 30           the long one
    python tools/campaign --engines stub         engines that compute nothing: far more requests
    python tools/campaign --released             the control: megatron-core's own coordinator

The coordinator is the real one, tools/run_coordinator.py with keys; every replica is a process of
its own behind a link that can be cut; every answer is compared with an undisturbed engine's.

what breaks (--faults, separated by commas; each as often as the others, in an order of the seed):
  kill          a replica gets SIGKILL, and is started anew at once
  stop          a replica is stopped (SIGSTOP) for longer than the hung timeout, then goes on
  stop_briefly  a replica is stopped for 1 s, which nobody needs to notice
  stop_coordinator, stop_all
                the coordinator, or it and all replicas, are stopped for 0.5 to 9 s: nobody died
  hang          a replica's main thread stands still past the hung timeout; its connection stands
  cut           the link of a replica carries nothing for 1 s or for 5 s
  client        a client goes with requests in flight: killed, or with a good-bye
  pause         PAUSE, and UNPAUSE 2 s later
  suspend       PAUSE, SUSPEND, and 2 s later RESUME, UNPAUSE: new weights
  epoch         SET_GENERATION_EPOCH: new weights while requests run

The last line of the output is JSON:
  sent, answered, errored, lost, twice   requests of the clients that stay. Lost: neither an answer
                                         nor an error within --deadline; twice: more than one
  faults          how often each kind happened
  wrong           answers that are not the undisturbed engine's
  errors          the errors, by code
  abandoned       requests of the clients that were lost; they count nowhere else
  ranks_lost, taken_back, late_dropped   of the coordinator: replicas lost, the requests that these
                  had, replies that came for a request which somebody else had answered or has
  ended           replicas that ended although nobody killed them
  capacity, rate  requests a second: measured before the first fault, and sent on average
  latency_p50, latency_p99   seconds
  descriptors, rss_mib   of the coordinator, before the first fault and after the last
It ends with status 1 if requests were lost, answered twice or wrongly, a replica or the coordinator
ended by itself, the coordinator logged an exception, has more descriptors open than before, or its
memory grew by more than --growth-mib. With --released it is a report and the status is 0.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import campaign.light  # noqa: E402, F401  before anything of megatron-core
from campaign.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(__doc__))

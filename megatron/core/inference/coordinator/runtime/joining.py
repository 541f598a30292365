"""Flags of a job that joins a coordinator which runs alone."""

import argparse
import re

from megatron.core.inference.coordinator.settings import SettingsError

_ADDRESS = "--inference-coordinator-address"
_DRAIN_SECONDS = "--inference-coordinator-drain-seconds"
_OF_ITS_OWN_COORDINATOR = (
    "inference_coordinator_port",
    "inference_coordinator_record",
    "coordinator_schedule_output",
)


def add_joining_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("joining a coordinator that runs alone")
    group.add_argument(
        _ADDRESS,
        default=None,
        metavar="tcp://HOST:PORT",
        help="Join the coordinator at this address, of tools/run_coordinator.py, instead of "
        "starting one. How it routes, and what it does when replicas are lost, is set there.",
    )
    group.add_argument(
        _DRAIN_SECONDS,
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="On Ctrl-C or SIGTERM such a job gets no new requests and answers those that it has, "
        "up to so many seconds; then others get them. A second signal ends it at once. torchrun "
        "kills its processes after 30 s. Default: 20.",
    )


def check_joining(args: argparse.Namespace) -> None:
    """Check the flags' values, and that none contradicts them.

    Raises:
        SettingsError: Something is wrong; the text says what to do.
    """
    address = args.inference_coordinator_address
    seconds = args.inference_coordinator_drain_seconds
    if not 0 <= seconds < float("inf"):
        raise SettingsError(f"{_DRAIN_SECONDS} is {seconds:g}; give a number of 0 or more")
    front_ends = args.frontend_replicas
    if front_ends < -1 or (front_ends == 0 and address is None):
        raise SettingsError(
            f"--frontend-replicas is {front_ends}; give 1 or more, or -1 for the default"
        )
    if address is None:
        return
    if re.fullmatch(r"tcp://.+:\d{1,5}", address) is None:
        raise SettingsError(
            f"{_ADDRESS} is {address!r}; give tcp://HOST:PORT, as tools/run_coordinator.py "
            "prints it"
        )
    for name in _OF_ITS_OWN_COORDINATOR:
        if getattr(args, name) not in (None, ""):
            flag = "--" + name.replace("_", "-")
            raise SettingsError(
                f"{flag} is for a coordinator that this job starts, and it joins the one at "
                f"{address}; give it to tools/run_coordinator.py there, or leave one of them out"
            )

#!/usr/bin/env python3
r"""Run the coordinator alone; replicas join it, each a job of its own, and leave it again.

It needs no GPU, no model and no torchrun. Losing one replica does not take the others down, and
replicas may come and go while requests are served:

    tools/run_coordinator.py --host 10.0.0.1 --inference-coordinator-key-file keys.json

    # a replica, on any machine that reaches that address and has keys.json (mode 0600), with HTTP
    # front ends of its own; --frontend-replicas 0: without
    torchrun --nproc-per-node 8 tools/run_dynamic_text_generation_server.py --load … \
        --tensor-model-parallel-size 8 --inference-coordinator-address tcp://10.0.0.1:5100 \
        --inference-coordinator-key-file keys.json

SIGTERM lets a replica finish what it has before it goes. Replicas wait 5 minutes for a coordinator
that has ended: start it again at the same address, with the same key file, and they are back.
"""

import argparse
import errno
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from light_import import import_lightly

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before any import that asks a GPU, and takes its memory
import_lightly()

from megatron.core.inference.config import PrefixCachingEvictionPolicy  # noqa: E402

from megatron.core.inference.coordinator.arguments import (  # noqa: E402
    add_prefix_routing_args,
    routing_settings_from_args,
    say_errors_in_one_sentence,
)
from megatron.core.inference.coordinator.runtime import (  # noqa: E402
    addresses,
    keys,
    private_files,
    process,
)
from megatron.core.inference.coordinator.runtime.eventlog import log_to_stderr  # noqa: E402
from megatron.core.inference.coordinator.runtime.records import check_file  # noqa: E402
from megatron.core.inference.coordinator.settings import (  # noqa: E402
    AccessSettings,
    CoordinatorSettings,
    FleetSettings,
    RecordSettings,
    SettingsError,
)

_MEGATRON = "--inference-dynamic-batching-"
_ALL_INTERFACES = "0.0.0.0"


def make_parser() -> argparse.ArgumentParser:
    """The flags: its own, those that Megatron calls so as well, and those of routing and fleet."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_own_flags(parser.add_argument_group("coordinator"))
    _add_engine_flags(
        parser.add_argument_group("engines", "What the replicas' jobs are started with as well.")
    )
    say_errors_in_one_sentence(parser)
    return add_prefix_routing_args(parser)


def _add_own_flags(group: Any) -> None:
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="Address to listen at, which the replicas' machines can reach; 0.0.0.0 for all "
        "interfaces. Default: 127.0.0.1, this machine alone.",
    )
    group.add_argument(
        "--port",
        type=int,
        default=5100,
        help="Port to listen at; 0 lets the system choose. Default: 5100.",
    )
    group.add_argument(
        "--address-file",
        type=Path,
        default=None,
        metavar="FILE",
        help="File that gets the address, e.g. tcp://127.0.0.1:5100, once it listens.",
    )
    group.add_argument(
        "--expected-replicas",
        type=int,
        default=0,
        metavar="N",
        help="Requests wait until so many replicas have registered, at first; later ones may come "
        "and go. Default: 0, the first replica serves at once.",
    )
    group.add_argument(
        "--coordinator-schedule-output",
        default=None,
        metavar="FILE",
        help="JSON file that gets every routing decision when the coordinator ends.",
    )


def _add_engine_flags(group: Any) -> None:
    group.add_argument(
        f"{_MEGATRON}block-size",
        type=int,
        default=256,
        metavar="TOKENS",
        help="Tokens in a cache block; a replica with another size is refused. Default: 256, "
        "Megatron's; the built-in set-up on the CPU has 64.",
    )
    group.add_argument(
        f"{_MEGATRON}prefix-caching",
        dest="inference_dynamic_batching_enable_prefix_caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Whether the replicas cache prefixes; if not, requests are routed by load alone. "
        "Default: on.",
    )
    group.add_argument(
        f"{_MEGATRON}prefix-caching-eviction-policy",
        choices=[policy.value for policy in PrefixCachingEvictionPolicy],
        default="ref_zero",
        help="Of released engines, which do not tell it. Default: ref_zero, Megatron's.",
    )
    group.add_argument(
        f"{_MEGATRON}max-requests",
        type=int,
        default=1024,
        metavar="N",
        help="Requests that a released engine runs at once; others tell it. Default: 1024.",
    )
    group.add_argument(
        "--deterministic-mode",
        action="store_true",
        help="Break ties by load and number alone, so that a run can be repeated.",
    )


def settings_of(args: argparse.Namespace) -> process.ProcessSettings:
    """What the parsed flags ask for.

    Raises:
        SettingsError: A value is out of its range or contradicts another; says what to do.
    """
    if not 0 <= args.port <= 65535:
        raise SettingsError(f"--port is {args.port}; give a port from 0 to 65535")
    recording = RecordSettings.from_mapping(vars(args))
    for flag, path in (
        ("--address-file", args.address_file),
        ("--coordinator-schedule-output", args.coordinator_schedule_output),
        (RecordSettings.flag("record"), recording.record),
    ):
        check_file(flag, path)
    caching = args.inference_dynamic_batching_enable_prefix_caching
    core = CoordinatorSettings(
        routing=routing_settings_from_args(args),
        fleet=FleetSettings.from_mapping(vars(args)),
        expected_ranks=args.expected_replicas,
        prefix_caching=caching,
        block_size_tokens=args.inference_dynamic_batching_block_size if caching else None,
        max_requests=args.inference_dynamic_batching_max_requests,
        eviction=args.inference_dynamic_batching_prefix_caching_eviction_policy,
        deterministic=args.deterministic_mode,
    )
    access = AccessSettings.from_mapping(vars(args))
    if not access.plain and not (access.key_file or os.environ.get(keys.KEY_FILE_VARIABLE)):
        raise SettingsError(
            f"name a file for the keys with {AccessSettings.flag('key_file')}, which replicas and "
            f"clients get as well; or let everybody in with {AccessSettings.flag('plain')}"
        )
    return process.ProcessSettings(
        core,
        args.host,
        args.port,
        args.coordinator_schedule_output,
        recording,
        lock=keys.make_lock(access),
    )


def announce(args: argparse.Namespace, core: CoordinatorSettings, address: str) -> None:
    """Tell where it listens, and how to join it."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    if host == _ALL_INTERFACES:  # name one that others can reach
        address = f"tcp://{next(iter(addresses.other_addresses()), '127.0.0.1')}:{port}"
    weighed = f", weighed by {core.routing.cost_policy.value}" if core.hashed else ""
    _say(f"listening at {address}: {core.signal.value}{weighed}")
    _say("a replica joins with:")
    flags = [f"--inference-coordinator-address {address}"]
    if args.inference_coordinator_plain:
        flags.append(AccessSettings.flag("plain"))
    else:
        path = args.inference_coordinator_key_file or os.environ[keys.KEY_FILE_VARIABLE]
        flags.append(f"{AccessSettings.flag('key_file')} {Path(path).resolve()}")
    if core.prefix_caching:
        flags.append(f"{_MEGATRON}block-size {core.block_size_tokens}")
    else:
        flags.append(f"--no-{_MEGATRON[2:]}prefix-caching")
    tool = "torchrun --nproc-per-node 1 tools/run_dynamic_text_generation_server.py"
    print("  " + " \\\n      ".join([tool, *flags]), flush=True)
    if args.address_file is not None:
        private_files.write(args.address_file, address + "\n", private_files.PUBLIC)


def _say(text: str) -> None:
    print(f"[coordinator] {text}", flush=True)


def main(argv: list[str]) -> None:
    """Coordinate until told to stop."""
    args = make_parser().parse_args(argv)
    log_to_stderr(process.LOG_FORMAT, logging.INFO)
    try:
        settings = settings_of(args)
        if args.address_file is not None:
            args.address_file.unlink(missing_ok=True)  # or somebody reads that of an earlier run
        process.serve(
            settings,
            listening=lambda address: announce(args, settings.coordinator, address),
            signals=(signal.SIGINT, signal.SIGTERM),
        )
    except (SettingsError, keys.KeyFileError) as error:
        sys.exit(f"[coordinator] error: {error}")
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or error
        if error.errno == errno.EADDRINUSE:
            text = f"port {args.port} on {args.host} is in use; name another with --port"
        sys.exit(f"[coordinator] error: {text}")
    _say("stopped")


if __name__ == "__main__":
    main(sys.argv[1:])

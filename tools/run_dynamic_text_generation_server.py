#!/usr/bin/env python3
r"""Serve a model over HTTP: DP replicas of megatron-core's engine behind prefix-affinity routing.

Start it with torchrun, one process a GPU (or a replica, on the CPU). It takes Megatron's own
arguments; without --load and --num-layers it serves a small built-in GPT with random weights.

    torchrun --nproc-per-node 8 tools/run_dynamic_text_generation_server.py \
        --load CHECKPOINT --use-checkpoint-args --tokenizer-type … --port 5000
"""

import argparse
import asyncio
import contextlib
import io
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# A fork server's child runs this file again: nothing heavy may be imported up here.

_QUIET_LOGGERS = ("torch.utils.cpp_extension", "megatron")
_OUR_LOGGER = "megatron.core.inference.coordinator"
_LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"

_KEY_FLAG, _KEY_VARIABLE = "--api-key", "MEGATRON_API_KEY"  # as in runtime/http/access.py

_SAID_BY_THE_FIRST_S = 5.0
"""Its first rank says what all of a machine find wrong; meanwhile its launcher ends the others."""


def add_server_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the server's own flags and the routing flags to Megatron's parser."""
    from megatron.core.inference.coordinator.arguments import add_prefix_routing_args
    from megatron.core.inference.coordinator.runtime.http.access import add_http_args
    from megatron.core.inference.coordinator.runtime.joining import add_joining_args

    group = parser.add_argument_group("HTTP server")
    group.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="Where to compute; auto takes the GPU if there is one. Default: auto.",
    )
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="Address to serve on; 0.0.0.0 for all interfaces. Default: 127.0.0.1.",
    )
    group.add_argument(
        "--port",
        type=int,
        default=5000,
        help="Port to serve on; 0 lets the system choose. A port in use is an error. "
        "Default: 5000.",
    )
    group.add_argument(
        "--frontend-replicas",
        type=int,
        default=-1,
        help="HTTP front-end processes, each with its own accept queue on the port; -1 means "
        "max(DP size, 4), or 4 on each rank with --frontend-on-all-ranks; 0 means none, where the "
        "job joins a coordinator (--inference-coordinator-address). Default: -1.",
    )
    group.add_argument(
        "--frontend-on-all-ranks",
        action="store_true",
        help="Every rank hosts front ends, on a port of its own that the system chooses; the "
        "addresses are printed and written to --url-file. --port is not used then.",
    )
    group.add_argument(
        "--url-file",
        type=Path,
        default=None,
        help='File that gets {"urls": ["http://host:port", …]} once they accept connections.',
    )
    group.add_argument(
        "--parsers",
        nargs="*",
        default=[],
        metavar="PARSER",
        help="megatron-core's response parsers to apply, in order, e.g. qwen3-coder-tool.",
    )
    group.add_argument(
        "--model-name",
        default="megatron",
        help="What /v1/models and the answers call the model. Default: megatron.",
    )
    group.add_argument(
        "--inference-coordinator-host",
        "--coordinator-host",
        default=None,
        metavar="ADDRESS",
        help="Address of the coordinator's machine, rank 0's, that all ranks can reach; the same "
        "on every node. Default: 127.0.0.1 on one machine, else the address on the way to "
        "MASTER_ADDR.",
    )
    group.add_argument(
        "--coordinator-schedule-output",
        default=None,
        metavar="FILE",
        help="JSON file that gets every routing decision as it goes.",
    )
    _add_flags_of_other_tools(parser)
    add_joining_args(parser)
    return add_prefix_routing_args(add_http_args(parser))


def _add_flags_of_other_tools(parser: argparse.ArgumentParser) -> None:
    """Add what scripts around Megatron-LM's own inference tools pass."""
    group = parser.add_argument_group("as Megatron-LM's inference tools have them")
    group.add_argument(
        "--return-log-probs",
        action="store_true",
        help="Requests may ask for log probabilities of prompt tokens (echo with logprobs): the "
        "engine keeps the logits of whole prompts, which takes memory.",
    )
    group.add_argument(
        "--skip-prompt-log-probs",
        action="store_true",
        help="Undoes --return-log-probs; those of generated tokens need neither.",
    )
    group.add_argument(
        "--use-flashinfer-fused-rope",
        action="store_true",
        help="Apply rotary embeddings with flashinfer's kernel.",
    )
    group.add_argument(
        "--inference-ckpt-non-strict",
        action="store_true",
        help="Taken and ignored: extra states that a checkpoint lacks are never missed.",
    )
    group.add_argument(
        "--coordinator-port",
        type=int,
        default=argparse.SUPPRESS,
        dest="inference_coordinator_port",
        help="The same as --inference-coordinator-port.",
    )
    group.add_argument(
        "--verbose",
        action="store_true",
        default=argparse.SUPPRESS,
        dest="inference_text_gen_server_logging",
        help="The same as --inference-text-gen-server-logging.",
    )


def _hide_keys(argv: list[str]) -> None:
    """Start this process again without API keys on its command line, where everybody reads them.

    Processes that it starts get them through the environment, which is private, or a pipe.
    """
    rest, keys = _without_keys(argv)
    if keys:
        known = os.environ.get(_KEY_VARIABLE)
        os.environ[_KEY_VARIABLE] = ",".join([known, *keys] if known else keys)
        interpreter = sys.orig_argv[: len(sys.orig_argv) - len(argv)]
        os.execv(sys.executable, [*interpreter, *rest])


def _without_keys(argv: list[str]) -> tuple[list[str], list[str]]:
    """The other arguments, and the keys; what the parser would refuse is left to it."""
    rest: list[str] = []
    keys: list[str] = []
    values = iter(argv)
    for value in values:
        flag, equals, key = value.partition("=")
        if flag != _KEY_FLAG:
            rest.append(value)
            continue
        keys.append(key if equals else next(values, ""))
        if not keys[-1] or (not equals and keys[-1].startswith("-")):
            return argv, []
    return rest, keys


def _quiet() -> None:
    """Keep the log to what an operator needs: imports of megatron-core print dozens of lines."""
    warnings.simplefilter("ignore")
    # For the processes that this one starts.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ.setdefault("TORCH_LOGS", "-all")
    logging.basicConfig(level=logging.WARNING, format=_LOG_FORMAT)
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger(_OUR_LOGGER).setLevel(logging.WARNING)


def _choose_device(argv: list[str]) -> None:
    """Obey --device before torch looks for a GPU."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="auto")
    device = parser.parse_known_args(argv)[0].device
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif device == "cuda":
        import torch

        if not torch.cuda.is_available():
            sys.exit("--device cuda, but torch finds no GPU; use --device cpu")


def _build(argv: list[str], rank: int) -> Any:
    """Everything before the first message: arguments, process groups, model, engine."""
    from megatron.core.inference.coordinator import patch
    from megatron.core.inference.coordinator.arguments import routing_settings_from_args
    from megatron.core.inference.coordinator.runtime import fork_server
    from megatron.core.inference.coordinator.runtime import model as models
    from megatron.core.inference.coordinator.runtime.eventlog import log_to_stderr
    from megatron.core.inference.coordinator.runtime.serving import Setup

    log_to_stderr(_LOG_FORMAT, logging.WARNING)  # as `_quiet` did, which imports nothing
    built_in = not any(arg.split("=")[0] in ("--load", "--num-layers") for arg in argv)
    defaults = {
        "inference_dynamic_batching_enable_prefix_caching": True,
        "inference_dynamic_batching_prefix_caching_eviction_policy": "lru",
    }
    if models.device_type() == "cpu":
        defaults["inference_dynamic_batching_block_size"] = 64
    elif built_in:  # flash-attn computes in halves; the rest is Megatron's for large models
        defaults |= {"bf16": True, "inference_dynamic_batching_buffer_size_gb": 4.0}
        defaults["inference_dynamic_batching_max_requests"] = 256
    if built_in:
        argv = [*models.BUILT_IN_MODEL, *argv]
    _check_load(argv)
    with _kept_back_unless_it_fails():  # Megatron tells of batch sizes and pipeline stages
        args = models.parse(add_server_args, argv, defaults)
    _check(args, rank)
    settings = routing_settings_from_args(args)
    patch(settings)
    setup = Setup(args, settings, None, rank)
    if (rank == 0 and setup.joins is None) or setup.hosts_front_ends:
        fork_server.warm_up()  # its imports go on while the model is built
    models.initialize(args)
    setup.say("building the built-in GPT (random weights)" if built_in else "building the model")
    model = models.build_model(args)
    if args.load is not None and models.device_type() == "cuda" and not (args.bf16 or args.fp16):
        setup.say("note: it computes in fp32; --bf16 or --fp16 is not taken from a checkpoint")
    if args.load is not None:
        setup.say(f"loaded {models.load_checkpoint(model, args)}")
    config = models.build_inference_config(args, model)
    setup.engine = models.build_engine(model, models.build_tokenizer(args), config)
    return setup


@contextlib.contextmanager
def _kept_back_unless_it_fails() -> Iterator[None]:
    printed, wrong = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(wrong):
            yield
    except BaseException:
        if wrong.getvalue():  # a wrong flag, which every rank finds
            _let_the_first_rank_say_it()
        sys.stdout.write(printed.getvalue())  # --help is among it
        sys.stderr.write(wrong.getvalue())
        raise
    sys.stderr.write(wrong.getvalue())


def _check_load(argv: list[str]) -> None:
    """Look for the checkpoint first: Megatron would complain of arguments that it lacks then."""
    from megatron.core.inference.coordinator.runtime.model import find_checkpoint

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--ckpt-step", type=int)
    args, _ = parser.parse_known_args(argv)
    if args.load is not None:
        find_checkpoint(args.load, args.ckpt_step)


def _check(args: argparse.Namespace, rank: int) -> None:
    from megatron.core.inference.coordinator import SettingsError
    from megatron.core.inference.coordinator.runtime.http.access import keys_from_args
    from megatron.core.inference.coordinator.runtime.http.limits import HttpSettings
    from megatron.core.inference.coordinator.runtime.joining import check_joining
    from megatron.core.inference.coordinator.runtime.records import check_file

    HttpSettings.from_mapping(vars(args))
    if rank == 0 or args.frontend_on_all_ranks:  # no other rank needs them
        keys_from_args(args)
    _check_parsers(args.parsers)
    check_joining(args)
    url_file = args.url_file
    if url_file is not None and rank == 0:  # which writes it; its folder may be nowhere else
        check_file("--url-file", url_file)
        url_file.unlink(missing_ok=True)  # or somebody reads the addresses of an earlier run
    if rank == 0:
        check_file("--coordinator-schedule-output", args.coordinator_schedule_output)
        check_file("--inference-coordinator-record", args.inference_coordinator_record)
    if not args.model_name.strip():
        raise SettingsError("--model-name is empty; give the name that answers shall show")
    size = args.inference_dynamic_batching_block_size
    if size < 1:
        raise SettingsError(f"--inference-dynamic-batching-block-size is {size}; give 1 or more")
    for name in ("port", "inference_coordinator_port"):
        port = getattr(args, name)
        if port is not None and not 0 <= port <= 65535:
            flag = "--" + name.replace("_", "-")
            raise SettingsError(f"{flag} is {port}; give a port from 0 to 65535")


def _check_parsers(names: list[str]) -> None:
    """Look for them now: an endpoint would fail on every answer."""
    from megatron.core.tokenizers.text.parsers import PARSER_MAPPING

    from megatron.core.inference.coordinator import SettingsError

    for name in names:
        if name not in PARSER_MAPPING:
            known = ", ".join(sorted(PARSER_MAPPING))
            raise SettingsError(f"--parsers {name}: megatron-core has {known}")


def main(argv: list[str]) -> None:
    """Serve until told to stop."""
    _quiet()
    _choose_device(argv)
    from megatron.core.inference.coordinator.runtime import serving
    from megatron.core.inference.coordinator.runtime.stop_signal import StopSignal

    stop_signal = StopSignal()
    rank = int(os.environ.get("RANK", "0"))
    try:
        asyncio.run(serving.Server(_build(argv, rank)).serve(stop_signal.on_stop))
    except _expected_errors() as error:
        if isinstance(error, _same_everywhere()):
            _let_the_first_rank_say_it()
        sys.exit(f"[rank {rank}] error: {_text_of(error)}")
    stop_signal.exit_if_stopped()


def _let_the_first_rank_say_it() -> None:
    """Return in the first rank of this machine; another one is ended with it meanwhile."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_SAID_BY_THE_FIRST_S)


def _text_of(error: Exception) -> str:
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _same_everywhere() -> tuple[type[Exception], ...]:
    """What every rank of a machine finds out for itself."""
    from megatron.core.inference.coordinator import SettingsError

    return SettingsError, FileNotFoundError


def _expected_errors() -> tuple[type[Exception], ...]:
    """What a user can mend; its text says how, and a traceback would only hide that."""
    from megatron.core.inference.coordinator.runtime.http.server import FrontEndError
    from megatron.core.inference.coordinator.runtime.process import CoordinatorDied

    return OSError, ValueError, CoordinatorDied, FrontEndError


if __name__ == "__main__":
    _hide_keys(sys.argv[1:])
    main(sys.argv[1:])

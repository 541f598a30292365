"""From Megatron's arguments to an engine, on a GPU or a CPU: the one place that builds models.

In each rank's process, in this order: `parse`, `initialize`, `build_model`, `load_checkpoint`
where there is one, `build_tokenizer`, `build_inference_config`, `build_engine`.
"""

import contextlib
import io
import os
import re
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokenizers.utils import build_tokenizer as released
from megatron.core.transformer import attention
from megatron.core.transformer.enums import InferenceCudaGraphScope
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    inference_cfg_from_args,
)
from megatron.training.initialize import initialize_megatron

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.inference.coordinator.arguments import (
    say_errors_in_one_sentence,
    show_own_help,
)
from megatron.core.inference.coordinator.runtime import cpu_device
from megatron.core.inference.coordinator.runtime.addresses import keep_collectives_on_loopback
from megatron.core.inference.coordinator.runtime.byte_tokenizer import TOKENIZER_TYPE, ByteTokenizer
from megatron.training import arguments, global_vars

BUILT_IN_MODEL = tuple(
    (
        "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --position-embedding-type rope "
        "--max-position-embeddings 8192 --seq-length 8192 --inference-max-seq-length 8192 "
        # With the usual 0.02 an untrained model hardly looks back: its answers would not tell
        # whether it saw the right history.
        "--init-method-std 0.2 --untie-embeddings-and-output-weights "
        # Weights drawn on the CPU do not depend on the tensor parallel size; nor do they on a
        # vocabulary that is not padded to a multiple of it, as Megatron would by itself.
        "--seed 1234 --use-cpu-initialization "
        f"--tokenizer-type {TOKENIZER_TYPE} --padded-vocab-size {ByteTokenizer.vocab_size}"
    ).split()
)
"""Arguments of a small GPT whose random weights depend on the seed alone."""

SERVING_DEFAULTS = {
    "enable_one_logger": False,
    # The trackers for training keep states of a CUDA generator; serving never forks one.
    "inference_rng_tracker": True,
    # The kernel that accumulates gradients comes with APEX, and there are no gradients.
    "gradient_accumulation_fusion": False,
}
"""Defaults that suit a server; the next two dicts are more, and flags win over all of them."""

PLAIN_DEFAULTS = {
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
}
"""Without Transformer Engine, or a GPU for it: off is what would need it, or APEX."""

STORE_VARIABLE = "MEGATRON_STORE_FILE"
"""Names the file where the ranks meet, if they need no TCP port for it: set by tools/launch.py."""

_FLASH_ATTN = "2.7.3"
"""The oldest whose paged attention megatron-core takes."""

_HAVE_TE = find_spec("transformer_engine") is not None

CPU_DEFAULTS = {
    "use_cpu_initialization": True,
    "distributed_backend": "gloo",
    # These compile on first use, which takes a C++ compiler and seconds, and gains little.
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    # Megatron reserves 40 GB of GPU memory, and a request slot for each block in it.
    "inference_dynamic_batching_buffer_size_gb": 1.0,
    "inference_dynamic_batching_max_requests": 64,
}


def parse(
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
    argv: Sequence[str] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> Namespace:
    """Parses and validates Megatron's arguments; those that only training needs may be absent.

    Megatron keeps the result as its global arguments, so a process parses once.

    Args:
        extra_args_provider: Adds flags to Megatron's parser.
        argv: The arguments; those of the process if None.
        args_defaults: Defaults by argument name, e.g. {"num_layers": 4}; they override those of
            the provider, which override ours.

    Raises:
        SystemExit: A flag is unknown, or its value is none of those allowed.
        ValueError: Values are missing or contradict each other (Megatron's own checks).
    """

    def provide(parser: ArgumentParser) -> ArgumentParser:
        for action in parser._actions:
            # Some of Megatron's help texts hold a bare percent sign, where --help would break off.
            action.help = action.help and re.sub(r"%%|%(?!\()", "%%", action.help)
            if action.dest == "tokenizer_type":
                action.choices = [*(action.choices or ()), TOKENIZER_TYPE]
        parser.set_defaults(**_defaults())
        say_errors_in_one_sentence(parser)
        groups = len(parser._action_groups)
        parser = extra_args_provider(parser) if extra_args_provider else parser
        parser.set_defaults(**args_defaults or {})
        if extra_args_provider:
            show_own_help(parser, groups)
        return parser

    # Megatron asks for it where there is tensor parallelism; CUDA reads it when it starts up.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(arguments, "_print_args", lambda *_: None))  # 700 lines
        stack.enter_context(_replaced(global_vars, "build_tokenizer", build_tokenizer))
        if argv is not None:
            stack.enter_context(_replaced(sys, "argv", [sys.argv[0], *argv]))
        if device_type() == "cpu":
            # Tensor parallelism makes Megatron ask for the GPU's generation: on older ones it
            # wants CUDA_DEVICE_MAX_CONNECTIONS set. A CPU is as free of that as the newest.
            stack.enter_context(_replaced(arguments, "get_device_arch_version", lambda: 10))
        try:
            return arguments.parse_and_validate_args(provide, args_defaults={"micro_batch_size": 1})
        except AssertionError as error:
            # Most of Megatron's checks have no text; what they check says more than nothing.
            reason = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
            raise ValueError(f"Megatron refuses these arguments: {reason}") from error


def initialize(args: Namespace) -> None:
    """Sets this process up: device, process groups (unless they exist), seeds."""
    if device_type() == "cpu":
        cpu_device.install_cpu_overrides()
    else:
        torch.cuda.set_device(args.local_rank)
        _check_attention(args)
    # Going on to its groups, Megatron would compile a helper for data sets, whose sources a wheel
    # does not ship, and end the process.
    initialize_megatron(allow_no_cuda=True, skip_mpu_initialization=True)
    _join_processes(args)
    _seed(args)


def _check_attention(args: Namespace) -> None:
    """Find out now, and not at the first request, what attention there is on a GPU."""
    if attention.HAVE_FA3 or attention.HAVE_FA4:
        return
    if attention.flash_attn_varlen_func is not None:
        if not attention.is_fa_min_version(_FLASH_ATTN):
            raise ValueError(f"flash-attn is older than {_FLASH_ATTN}: install a newer one.")
        return
    if args.cuda_graph_impl != "none":
        raise ValueError(
            "CUDA graphs cannot hold the attention that takes flash-attn's place: install "
            "flash-attn, or leave --cuda-graph-impl out."
        )
    cpu_device.install_attention_overrides()


def build_model(args: Namespace) -> torch.nn.Module:
    """The model that the arguments describe, with its seed's weights, ready to infer.

    Only this function knows of model classes: a hybrid model where the arguments give a layer
    pattern, else a GPT.
    """
    if args.transformer_impl == "transformer_engine" and not _HAVE_TE:
        raise ValueError("Transformer Engine is not installed: use --transformer-impl local.")
    config = (hybrid_config_from_args if args.hybrid_layer_pattern else gpt_config_from_args)(args)
    builder = config.get_builder_cls()(config)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    _seed(args)  # so that a second model in this process gets the same weights
    with contextlib.redirect_stdout(io.StringIO()):  # the builder prints its number of weights
        (model,) = builder.build_distributed_models(groups, wrap_with_ddp=False)
    return model.to(torch.cuda.current_device()).eval()


def load_checkpoint(model: torch.nn.Module, args: Namespace) -> Path:
    """Loads the weights of the distributed checkpoint that `--load` names.

    It may have been written with other model parallel sizes. Returns the directory read.

    Raises:
        FileNotFoundError: `--load` names no checkpoint.
        ValueError: It names one of another format, or of another model.
    """
    folder = find_checkpoint(Path(args.load), args.ckpt_step)
    metadata = dist_checkpointing.load_content_metadata(str(folder)) or {}
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    model = unwrap_model(model)
    # Megatron saves under the key "model", which is no part of the names in the checkpoint: one
    # of the bare state dict loads as well.
    wanted = {"model": model.sharded_state_dict(metadata=metadata)}
    try:
        weights = dist_checkpointing.load(wanted, str(folder))["model"]
    except torch.distributed.checkpoint.CheckpointException as error:  # which is no Exception
        raise ValueError(f"{folder} is of another model; try --use-checkpoint-args.") from error
    # Not strictly: only a model of quantized layers has its extra states in a checkpoint.
    model.load_state_dict(weights, strict=False)
    return folder


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """The directory of one distributed checkpoint; raises as `load_checkpoint` does.

    Args:
        path: A checkpoint, or Megatron's directory of several and a file that names the latest.
        step: Which of several; the latest if None.
    """
    tracker = path / "latest_checkpointed_iteration.txt"
    if (path / "metadata.json").is_file():
        return path
    if not step and not tracker.is_file():
        raise FileNotFoundError(f"No checkpoint in {path}: no {tracker.name}, no metadata.json.")
    latest = str(step or tracker.read_text().strip())
    folder = path / (f"iter_{int(latest):07d}" if latest.isdecimal() else latest)
    if not folder.is_dir():
        raise FileNotFoundError(f"No checkpoint in {path}: {folder.name} is missing.")
    if not (folder / "metadata.json").is_file():
        raise ValueError(f"{folder} is not a distributed checkpoint (--ckpt-format torch_dist).")
    return folder


def build_tokenizer(args: Namespace) -> Any:
    """The tokenizer that `--tokenizer-type` names: one of Megatron's, or ours of bytes.

    Sets `args.padded_vocab_size`, of which the model is built, where it is None.
    """
    if args.tokenizer_type != TOKENIZER_TYPE:
        return released.build_tokenizer(args)
    if args.padded_vocab_size is None:
        args.padded_vocab_size = released.vocab_size_with_padding(ByteTokenizer.vocab_size, args)
    return ByteTokenizer()


def build_inference_config(
    args: Namespace, model: torch.nn.Module, **overrides: Any
) -> InferenceConfig:
    """megatron-core's configuration of the engine, with `overrides` of its fields."""
    config = inference_cfg_from_args(args).to_inference_config(
        model,
        kv_cache_management_mode=args.rl_kv_cache_management_mode,
        static_kv_memory_pointers=args.rl_persist_cuda_graphs,
        # Left on, the context would pad each batch to the size of a graph that nobody captures.
        enable_cuda_graphs=args.inference_cuda_graph_scope != InferenceCudaGraphScope.none,
    )
    return replace(config, verbose=False, **overrides)


def build_engine(
    model: torch.nn.Module, tokenizer: Any, inference_config: InferenceConfig
) -> DynamicInferenceEngine:
    """megatron-core's engine for a model, with its context and controller."""
    context = DynamicInferenceContext(get_model_config(model), inference_config)
    controller = TextGenerationController(GPTInferenceWrapper(model, context), tokenizer)
    return DynamicInferenceEngine(controller, context)


def device_type() -> str:
    """What serves on this machine: "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _defaults() -> dict[str, Any]:
    on_cpu = device_type() == "cpu"
    plain = PLAIN_DEFAULTS if on_cpu or not _HAVE_TE else {}
    return SERVING_DEFAULTS | plain | (CPU_DEFAULTS if on_cpu else {})


def _join_processes(args: Namespace) -> None:
    """Makes the process groups, then the model parallel groups; neither twice."""
    if not torch.distributed.is_initialized():
        keep_collectives_on_loopback()
        torch.distributed.init_process_group(
            args.distributed_backend,
            timeout=timedelta(minutes=args.distributed_timeout_minutes),
            rank=args.rank,
            world_size=args.world_size,
            store=_store(args.world_size),
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            distributed_timeout_minutes=args.distributed_timeout_minutes,
            order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        )


def _store(world_size: int) -> torch.distributed.Store | None:
    """Where the ranks meet; None leaves it to torch, which goes by the launcher's address."""
    if world_size == 1:
        return torch.distributed.HashStore()
    path = os.environ.get(STORE_VARIABLE)
    return torch.distributed.FileStore(path, world_size) if path else None


def _seed(args: Namespace) -> None:
    """Seeds what draws weights, alike on all ranks that share a layer."""
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed, args.te_rng_tracker, args.inference_rng_tracker, args.cuda_graph_impl != "none"
    )


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)

"""Models from arguments, checkpoints and the byte tokenizer.

As a script, this file is one rank of a model that is split over two processes.
"""

import argparse
import contextlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.inference.sampling_params import SamplingParams

from megatron.core import dist_checkpointing
from megatron.core.inference.coordinator.runtime import model
from megatron.core.inference.coordinator.runtime.byte_tokenizer import ByteTokenizer
from megatron.training import global_vars

PROMPTS = ["Two ranks, one answer.", "A prompt of more than one block of sixteen tokens."]


def answers_of(args):
    """The ids that the model of the arguments generates for PROMPTS, greedily."""
    served = model.build_model(args)
    if args.load:
        model.load_checkpoint(served, args)
    config = model.build_inference_config(
        args, served, block_size_tokens=16, enable_prefix_caching=True, buffer_size_gb=0.05
    )
    engine = model.build_engine(served, model.build_tokenizer(args), config)
    greedy = SamplingParams(num_tokens_to_generate=9, top_k=1, termination_id=-1)
    return [record.merge().generated_tokens for record in engine.generate(PROMPTS, greedy)]


@pytest.fixture(scope="module")
def checkpoints(built_in_args, tmp_path_factory):
    """A directory as Megatron writes it, with the built-in model of another seed."""
    path = tmp_path_factory.mktemp("checkpoints")
    folder = path / "iter_0000123"
    folder.mkdir()
    other = type(built_in_args)(**vars(built_in_args) | {"seed": 4321})
    weights = model.build_model(other).sharded_state_dict()
    state = {"model": weights, "args": other, "iteration": 123, "checkpoint_version": 3.0}
    dist_checkpointing.save(state, str(folder))
    (path / "latest_checkpointed_iteration.txt").write_text("123")
    return path


@pytest.fixture
def parse(built_in_args):
    """`model.parse` once more, after the shared arguments were parsed in this process."""
    global_vars.unset_global_variables()
    yield model.parse
    global_vars.unset_global_variables()


# --- Arguments ---


def test_only_the_model_must_be_described(parse):
    args = parse(argv=model.BUILT_IN_MODEL)
    assert (args.num_layers, args.hidden_size, args.padded_vocab_size) == (4, 256, 260)
    assert (args.transformer_impl, args.distributed_backend) == ("local", "gloo")
    assert (args.micro_batch_size, args.params_dtype) == (1, torch.float32)
    assert isinstance(global_vars.get_tokenizer(), ByteTokenizer)


def test_a_flag_wins_over_every_default(parse):
    def provide(parser):
        parser.add_argument("--colour", default="red")
        parser.set_defaults(inference_dynamic_batching_block_size=16, seed=1)
        return parser

    argv = [*model.BUILT_IN_MODEL, "--inference-dynamic-batching-max-requests", "8"]
    args = parse(provide, argv, {"colour": "blue"})
    assert (args.colour, args.inference_dynamic_batching_block_size) == ("blue", 16)
    assert (args.inference_dynamic_batching_max_requests, args.seed) == (8, 1234)


def test_the_command_line_of_the_process_is_read(parse, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["serve", *model.BUILT_IN_MODEL, "--num-layers", "2"])
    assert parse().num_layers == 2


def test_help_is_printed_and_an_unknown_flag_refused(parse, capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(argv=["--help"])
    assert "--inference-dynamic-batching-block-size" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        parse(argv=["--inference-dynamic-batching-block"])
    assert "there is no flag --inference-dynamic-batching-block;" in capsys.readouterr().err


def test_transformer_engine_is_missed_in_one_sentence(built_in_args):
    args = type(built_in_args)(**vars(built_in_args) | {"transformer_impl": "transformer_engine"})
    with pytest.raises(ValueError, match="use --transformer-impl local"):
        model.build_model(args)


# --- Models and checkpoints ---


def test_a_seed_gives_the_same_weights_again(built_in_args, built_in_model):
    torch.rand(5)
    again = model.build_model(built_in_args)
    assert not again.training
    pairs = zip(built_in_model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_a_checkpoint_answers_as_its_model(built_in_args, checkpoints):
    fields = vars(built_in_args)
    expected = answers_of(type(built_in_args)(**fields | {"seed": 4321}))
    assert expected != answers_of(built_in_args)
    for place in (checkpoints, checkpoints / "iter_0000123"):
        assert answers_of(type(built_in_args)(**fields | {"load": str(place)})) == expected


def test_a_bare_state_dict_loads_too(built_in_args, built_in_model, tmp_path):
    dist_checkpointing.save(built_in_model.sharded_state_dict(), str(tmp_path))
    fields = vars(built_in_args) | {"load": str(tmp_path), "seed": 4321}
    loaded = model.build_model(type(built_in_args)(**fields))
    model.load_checkpoint(loaded, type(built_in_args)(**fields))
    pairs = zip(built_in_model.parameters(), loaded.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_a_checkpoint_of_another_model_is_refused(built_in_args, checkpoints):
    fields = vars(built_in_args) | {"num_layers": 5, "load": str(checkpoints)}
    args = type(built_in_args)(**fields)
    with pytest.raises(ValueError, match="use-checkpoint-args"):
        model.load_checkpoint(model.build_model(args), args)


@pytest.mark.parametrize(
    ("latest", "step", "found"),
    [("123", None, "iter_0000123"), ("release", None, "release"), ("123", 7, "iter_0000007")],
)
def test_find_checkpoint(tmp_path, latest, step, found):
    for name in ("iter_0000007", "iter_0000123", "release"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.json").write_text("{}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(f"{latest}\n")
    assert model.find_checkpoint(tmp_path, step) == tmp_path / found
    assert model.find_checkpoint(tmp_path / found) == tmp_path / found


def test_find_checkpoint_says_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no latest_checkpointed_iteration\.txt, no meta"):
        model.find_checkpoint(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(FileNotFoundError, match="iter_0000005 is missing"):
        model.find_checkpoint(tmp_path)
    (tmp_path / "iter_0000005" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(ValueError, match="not a distributed checkpoint"):
        model.find_checkpoint(tmp_path)


def test_two_ranks_answer_as_one(built_in_args, checkpoints):
    launch = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *launch, __file__]
    flags = ["--tensor-model-parallel-size", "2", "--load-afterwards", str(checkpoints)]
    done = subprocess.run(
        [*command, *model.BUILT_IN_MODEL, *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("[[[")]
    loaded = type(built_in_args)(**vars(built_in_args) | {"load": str(checkpoints)})
    expected = [answers_of(built_in_args), answers_of(loaded)]
    assert [json.loads(line) for line in lines] == [expected, expected]


# --- The byte tokenizer ---


def test_text_comes_back():
    tokenizer = ByteTokenizer()
    text = "Zoë says <|end|>: 你好 🎉\n"
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert max(ids) < 256  # what a user writes is never a special token
    assert [text[i:] for i in tokenizer.offsets(ids, text)][:3] == [text, text[1:], text[2:]]


def test_any_ids_have_a_text():
    tokenizer = pickle.loads(pickle.dumps(ByteTokenizer()))
    every = list(range(300))
    assert tokenizer.detokenize(every).startswith("\x00\x01")
    assert "<|end|><|begin|>" in tokenizer.detokenize(every, skip_special_tokens=False)
    assert [tokenizer.detokenize([each]) for each in (0x41, 0xC3, tokenizer.eod)] == ["A", "�", ""]
    assert tokenizer.tokenize("\ud800")  # a lone surrogate can arrive in JSON


def test_a_later_turn_begins_with_the_earlier_prompt():
    tokenizer = ByteTokenizer()
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi {you}"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    options = {"tokenize": True, "add_generation_prompt": True, "tools": tools, "thinking": False}
    first = tokenizer.apply_chat_template(chat, **options)
    chat += [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": "42"},
    ]
    second = tokenizer.apply_chat_template(chat, **options)
    assert second[: len(first)] == first
    assert first.count(tokenizer.eos_id) == 3
    assert second.count(tokenizer.eos_id) == 5
    text = tokenizer.apply_chat_template(chat[:2], tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|role|>system\nBe brief.<|end|><|role|>user\nHi {you}<|end|><|role|>assistant\n"
    )


def main() -> None:
    """Prints what this rank generates, with the seed's weights and with a checkpoint's."""

    def provide(parser):
        parser.add_argument("--load-afterwards", type=Path)
        return parser

    torch.set_num_threads(1)
    assert torch.cuda.current_device.__module__ == "torch.cuda"  # imports replace nothing
    args = model.parse(provide)
    model.initialize(args)
    answers = [answers_of(args)]
    args.load = args.load_afterwards
    answers.append(answers_of(args))
    # In one write: the ranks share a pipe.
    sys.stdout.write(f"{json.dumps(answers)}\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()


# --- what a GPU needs ----------------------------------------------------------------------------


def test_tensor_parallelism_needs_no_variable_of_the_user_s(parse, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    parse(argv=model.BUILT_IN_MODEL)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


@pytest.mark.parametrize(
    ("flash_attn", "graphs", "refused"),
    [
        ("2.8.0", "local", None),
        ("2.5.0", "none", "flash-attn is older than 2.7.3"),
        (None, "none", None),
        (None, "local", "CUDA graphs cannot hold the attention"),
    ],
)
def test_attention_that_would_fail_later_is_refused(flash_attn, graphs, refused, monkeypatch):
    installed = []
    monkeypatch.setattr(model.attention, "HAVE_FA3", False)
    monkeypatch.setattr(model.attention, "HAVE_FA4", False)
    monkeypatch.setattr(model.attention, "flash_attn_varlen_func", flash_attn)
    monkeypatch.setattr(
        model.attention, "is_fa_min_version", lambda least: str(flash_attn) >= least
    )
    monkeypatch.setattr(
        model.cpu_device, "install_attention_overrides", lambda: installed.append(True)
    )
    with pytest.raises(ValueError, match=refused) if refused else contextlib.nullcontext():
        model._check_attention(argparse.Namespace(cuda_graph_impl=graphs))
    assert bool(installed) is (flash_attn is None and refused is None)

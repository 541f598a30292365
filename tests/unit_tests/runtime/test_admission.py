"""What reaches the engine: nothing that would end its loop."""

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling.torch_sampling import TorchSampling
from megatron.core.inference.sampling_params import SamplingParams

from megatron.core.inference.coordinator.runtime.admission import (
    RequestRefused,
    check_log_probs,
    checked_salt,
    checked_sampling,
    checked_tokens,
)

VOCAB = 100


def params(**values):
    return checked_sampling(values, VOCAB)


def refused(values):
    with pytest.raises(RequestRefused) as error:
        checked_sampling(values, VOCAB)
    return str(error.value)


# --- sampling parameters -------------------------------------------------------------------------


def test_the_defaults_are_taken_as_they_are():
    assert params() == SamplingParams()
    assert checked_sampling(SamplingParams().serialize(), VOCAB) == SamplingParams()


def test_good_values_are_taken_as_they_are():
    values = {
        "temperature": 0.7,
        "top_k": 5,
        "return_log_probs": True,
        "skip_prompt_log_probs": True,
        "num_tokens_to_generate": 12,
        "termination_id": -1,
        "top_n_logprobs": 3,
        "stop_words": ["a", "bc"],
        "add_BOS": True,
    }
    taken = checked_sampling(values, VOCAB)
    assert {name: getattr(taken, name) for name in values} == values


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-50, 1e-38, 9e-6])
def test_a_temperature_of_almost_0_is_greedy_whatever_else_is_asked(temperature):
    taken = params(temperature=temperature, top_k=7, top_p=0.5)
    assert (taken.temperature, taken.top_k, taken.top_p) == (1.0, 1, 0.0)


def test_the_coldest_temperature_that_is_taken_can_be_divided_by():
    taken = params(temperature=1e-5)
    assert taken.temperature == 1e-5
    sampled = TorchSampling.sample_from_logits(
        torch.tensor([[1.0, 80.0, -80.0]]), 1e-5, 0, 0.0, generator=torch.Generator()
    )
    assert sampled.tolist() == [1]


def test_a_top_p_of_1_filters_nothing_and_is_left_out():
    taken = params(top_p=1.0, top_k=5)
    assert (taken.top_p, taken.top_k) == (0.0, 5)
    assert params(top_p=1).top_p == 0.0


def test_whole_numbers_become_floats_where_the_engine_wants_floats():
    taken = params(temperature=2, top_p=0)
    assert (type(taken.temperature), type(taken.top_p)) == (float, float)


def test_what_megatron_does_not_know_is_left_alone():
    assert params(detokenize=True, my_tag="x").my_tag == "x"


def test_a_sampler_that_takes_both_filters_gets_them():
    taken = checked_sampling({"top_k": 2, "top_p": 0.5}, 100, "flashinfer")
    assert (taken.top_k, taken.top_p) == (2, 0.5)


@pytest.mark.parametrize("values", [None, 5, "text", [], [1], {1: 2}, {"top_k": 1, b"x": 2}])
def test_what_is_no_map_of_names_is_refused(values):
    assert refused(values) == "sampling parameters are no map of names to values"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"temperature": True}, "temperature must be a number, not True"),
        ({"temperature": None}, "temperature must be a number, not None"),
        ({"temperature": -1}, "temperature is -1; it must be between 0 and 1e+06"),
        ({"temperature": float("nan")}, "temperature is nan; it must be between 0 and 1e+06"),
        ({"temperature": float("inf")}, "temperature is inf; it must be between 0 and 1e+06"),
        ({"top_p": 1.1}, "top_p is 1.1; it must be between 0 and 1"),
        ({"top_p": [0.5]}, "top_p must be a number, not [0.5]"),
        ({"top_k": -1}, "top_k is -1; it must be a whole number from 0 to 99"),
        ({"top_k": 100}, "top_k is 100; it must be a whole number from 0 to 99"),
        ({"top_k": 1.0}, "top_k is 1.0; it must be a whole number from 0 to 99"),
        ({"top_k": True}, "top_k is True; it must be a whole number from 0 to 99"),
        ({"top_k": None}, "top_k is None; it must be a whole number from 0 to 99"),
        (
            {"top_n_logprobs": 101, "return_log_probs": True},
            "top_n_logprobs is 101; it must be a whole number from 0 to 100",
        ),
        (
            {"num_tokens_to_generate": -1},
            "num_tokens_to_generate is -1; it must be a whole number from 0 to 2147483647",
        ),
        (
            {"num_tokens_to_generate": "9"},
            "num_tokens_to_generate is '9'; it must be a whole number from 0 to 2147483647",
        ),
        (
            {"num_tokens_total": 2**31},
            "num_tokens_total is 2147483648; it must be a whole number from 0 to 2147483647",
        ),
        (
            {"termination_id": -2},
            "termination_id is -2; it must be a whole number from -1 to 2147483647",
        ),
        (
            {"top_k": 2, "top_p": 0.5},
            "this engine's sampler does not take top_k and top_p together; give one of them",
        ),
        (
            {"num_tokens_to_generate": 1, "num_tokens_total": 2},
            "give num_tokens_to_generate or num_tokens_total, not both",
        ),
        ({"top_n_logprobs": 2}, "top_n_logprobs needs return_log_probs"),
        ({"stop_words": "stop"}, "stop_words must be a list of non-empty strings"),
        ({"stop_words": [""]}, "stop_words must be a list of non-empty strings"),
        ({"stop_words": [1]}, "stop_words must be a list of non-empty strings"),
        ({"stop_words": {}}, "stop_words must be a list of non-empty strings"),
        ({"return_log_probs": "yes"}, "return_log_probs must be true or false, not 'yes'"),
        ({"return_log_probs": None}, "return_log_probs must be true or false, not None"),
        ({"skip_prompt_log_probs": []}, "skip_prompt_log_probs must be true or false, not []"),
        ({"add_BOS": 1}, "add_BOS must be true or false, not 1"),
        ({"detokenize_stop_sequence": 0}, "detokenize_stop_sequence must be true or false, not 0"),
        ({"serialize": 1}, "'serialize' is no sampling parameter"),
        ({"deserialize": None}, "'deserialize' is no sampling parameter"),
        ({"add_attributes": 1}, "'add_attributes' is no sampling parameter"),
        ({"__class__": 1}, "'__class__' is no sampling parameter"),
        ({"__dict__": {"serialize": 1}}, "'__dict__' is no sampling parameter"),
        (
            {"_sync_prompt_logprobs_fields": 1},
            "'_sync_prompt_logprobs_fields' is no sampling parameter",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(values, reason):
    assert refused(values) == reason


@pytest.mark.parametrize("value", ["x", None, []])
def test_a_count_of_log_probs_that_cannot_be_compared_is_refused(value):
    assert refused({"top_n_logprobs": value}).startswith("sampling parameters: ")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 200) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=3,
)
FIELDS = [*SamplingParams().serialize(), "serialize", "__doc__", "other"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
def test_what_is_taken_can_be_tensorized_sampled_with_and_sent_back(values):
    try:
        taken = checked_sampling(values, VOCAB)
    except RequestRefused:
        return
    taken.termination_id = -1 if taken.termination_id is None else taken.termination_id
    request = DynamicInferenceRequest(request_id=0, sampling_params=taken)
    tracked = zip(request.tracked_metadata, request.get_metadata_types(), strict=True)
    columns = {name: torch.as_tensor(value, dtype=kind) for value, (name, kind) in tracked}
    assert all(column.shape == () for column in columns.values())
    TorchSampling.sample_from_logits(
        torch.linspace(-30, 30, VOCAB)[None],
        columns["temperature"].item(),
        columns["top_k"].item(),
        columns["top_p"].item(),
        generator=torch.Generator(),
        vocab_size=VOCAB,
    )
    msgpack.packb(request.serialize())


# --- prompts -------------------------------------------------------------------------------------


def test_token_ids_in_the_vocabulary_are_taken():
    array = checked_tokens([0, 99, 5], VOCAB)
    assert (array.dtype, array.tolist()) == (np.int64, [0, 99, 5])
    assert checked_tokens(array, VOCAB) is array


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([], "the prompt is empty"),
        (None, "a prompt must be text or a list of token ids"),
        (7, "a prompt must be text or a list of token ids"),
        ({}, "a prompt must be text or a list of token ids"),
        ([1, "2"], "a prompt must be text or a list of token ids"),
        ([1, 2.0], "a prompt must be text or a list of token ids"),
        ([True], "a prompt must be text or a list of token ids"),
        ([[1]], "a prompt must be text or a list of token ids"),
        ([5, 100], "token id 100 is outside the vocabulary of 100"),
        ([5, -1, 100], "token id -1 is outside the vocabulary of 100"),
        ([2**63], f"token id {2**63} is outside the vocabulary of 100"),
    ],
)
def test_a_prompt_that_cannot_be_run_is_refused(tokens, reason):
    with pytest.raises(RequestRefused) as error:
        checked_tokens(tokens, VOCAB)
    assert str(error.value) == reason


# --- log probabilities of the prompt -------------------------------------------------------------


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("only_last", [False, True])
def test_prompt_log_probs_need_the_logits_of_the_prompt(wanted, skipped, only_last):
    asked = SamplingParams(return_log_probs=wanted, skip_prompt_log_probs=skipped)
    if wanted and not skipped and only_last:
        with pytest.raises(RequestRefused, match="skip_prompt_log_probs, or start it with"):
            check_log_probs(asked, only_last)
    else:
        check_log_probs(asked, only_last)


@pytest.mark.parametrize("salt", [-1, 2**63, "7", 1.0, True, None])
def test_a_salt_that_is_none_is_refused(salt):
    with pytest.raises(RequestRefused, match=r"^cache_salt must be a whole number from 0"):
        checked_salt(salt)
    assert checked_salt(0) == 0
    assert checked_salt(2**63 - 1) == 2**63 - 1

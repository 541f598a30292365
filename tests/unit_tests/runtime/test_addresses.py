"""The address that the rest of a job can reach this machine at."""

import os
import socket

import pytest

from megatron.core.inference.coordinator.runtime import addresses


@pytest.fixture(autouse=True)
def master(monkeypatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.1.1.1")


@pytest.fixture
def interfaces(monkeypatch):
    """`interfaces(size, local)`: what gloo and NCCL are told; None: the launcher does not say."""
    for variable in addresses._INTERFACE_VARIABLES:
        monkeypatch.setenv(variable, "")  # so that it is put back
        monkeypatch.delenv(variable)

    def tell(size: str | None, local: str | None) -> list[str | None]:
        for name, value in {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": local}.items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        addresses.keep_collectives_on_loopback()
        return [os.environ.get(variable) for variable in addresses._INTERFACE_VARIABLES]

    return tell


@pytest.mark.parametrize(("size", "local"), [(None, None), ("1", None), ("1", "1"), ("8", "8")])
def test_collectives_of_a_job_on_one_machine_stay_on_loopback(interfaces, size, local):
    assert interfaces(size, local) == ["lo", "lo"]


@pytest.mark.parametrize("local", ["8", None])  # Ray's workers are not told
def test_collectives_that_may_be_between_machines_go_where_they_did(interfaces, local):
    assert interfaces("16", local) == [None, None]


def test_an_interface_that_was_named_stays(interfaces, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    assert interfaces("8", "8") == ["lo", "eth0"]


@pytest.mark.parametrize("local", ["8", None])
def test_a_job_on_one_machine_stays_on_loopback(local, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert addresses.job_address() == "127.0.0.1"


def test_on_several_machines_it_is_the_address_that_leads_to_the_master(monkeypatch):
    monkeypatch.setattr(addresses, "_address_towards", {"10.1.1.1": "10.1.1.7"}.get)
    assert addresses.job_address(alone=False) == "10.1.1.7"


@pytest.mark.parametrize("towards", [None, "127.0.0.1", "127.0.1.1"])
def test_on_the_master_itself_it_is_the_first_that_is_not_loopback(monkeypatch, towards):
    monkeypatch.setattr(addresses, "_address_towards", lambda host: towards)
    monkeypatch.setattr(addresses, "other_addresses", lambda: ["10.1.1.1", "10.2.2.2"])
    assert addresses.job_address(alone=False) == "10.1.1.1"


def test_a_machine_with_nothing_but_loopback_gives_its_name(monkeypatch):
    monkeypatch.setattr(addresses, "_address_towards", lambda host: None)
    monkeypatch.setattr(addresses, "other_addresses", list)
    monkeypatch.setattr(socket, "getfqdn", lambda: "node0.cluster")
    assert addresses.job_address(alone=False) == "node0.cluster"


@pytest.mark.parametrize("alone", [True, False])
def test_a_named_address_is_taken_by_the_machine_that_has_it(alone):
    assert addresses.job_address("127.0.0.3", alone) == "127.0.0.3"
    assert addresses.job_address("localhost", alone) == "localhost"


def test_other_machines_take_their_address_on_the_way_to_the_named_one(monkeypatch):
    towards = {"192.0.2.1": "192.0.2.7", "10.1.1.1": "10.1.1.7"}
    monkeypatch.setattr(addresses, "_address_towards", towards.get)
    assert addresses.job_address("192.0.2.1", alone=False) == "192.0.2.7"


def test_a_host_that_has_no_address_leads_nowhere():
    assert addresses._address_towards("no host at all") is None
    assert addresses._address_towards("127.0.0.1") == "127.0.0.1"


def test_other_addresses_are_none_of_loopback():
    assert not [a for a in addresses.other_addresses() if a.startswith("127.")]

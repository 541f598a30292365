"""The address that the rest of a job can reach this machine at."""

import os
import socket

import pytest

from megatron.core.inference.coordinator.runtime import addresses


@pytest.fixture
def world(monkeypatch):
    """`world(size, local, master)`: what torchrun would tell."""

    def tell(size: str | None, local: str | None, master: str = "10.1.1.1") -> None:
        values = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": local, "MASTER_ADDR": master}
        for name, value in values.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return tell


@pytest.fixture
def interfaces(monkeypatch):
    """`interfaces()`: what gloo and NCCL are told."""
    for variable in addresses._INTERFACE_VARIABLES:
        monkeypatch.setenv(variable, "")  # so that it is put back
        monkeypatch.delenv(variable)

    def tell() -> list[str | None]:
        addresses.keep_collectives_on_loopback()
        return [os.environ.get(variable) for variable in addresses._INTERFACE_VARIABLES]

    return tell


@pytest.mark.parametrize(("size", "local"), [(None, None), ("1", "1"), ("8", "8"), ("2", None)])
def test_a_job_on_one_machine_stays_on_loopback(world, size, local):
    world(size, local)
    assert addresses.job_address() == "127.0.0.1"


@pytest.mark.parametrize(("size", "local"), [(None, None), ("1", "1"), ("8", "8")])
def test_collectives_of_a_job_on_one_machine_stay_on_loopback(world, interfaces, size, local):
    world(size, local)
    assert interfaces() == ["lo", "lo"]


def test_collectives_between_machines_go_where_they_did(world, interfaces):
    world("16", "8")
    assert interfaces() == [None, None]


def test_an_interface_that_was_named_stays(world, interfaces, monkeypatch):
    world("8", "8")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    assert interfaces() == ["lo", "eth0"]


def test_on_several_machines_it_is_the_address_that_leads_to_the_master(world, monkeypatch):
    world("16", "8", "10.1.1.1")
    monkeypatch.setattr(addresses, "_address_towards", {"10.1.1.1": "10.1.1.7"}.get)
    assert addresses.job_address() == "10.1.1.7"


@pytest.mark.parametrize("towards", [None, "127.0.0.1", "127.0.1.1"])
def test_on_the_master_itself_it_is_the_first_that_is_not_loopback(world, monkeypatch, towards):
    world("16", "8", "node0")
    monkeypatch.setattr(addresses, "_address_towards", lambda host: towards)
    monkeypatch.setattr(addresses, "other_addresses", lambda: ["10.1.1.1", "10.2.2.2"])
    assert addresses.job_address() == "10.1.1.1"


def test_a_machine_with_nothing_but_loopback_gives_its_name(world, monkeypatch):
    world("16", "8", "node0")
    monkeypatch.setattr(addresses, "_address_towards", lambda host: None)
    monkeypatch.setattr(addresses, "other_addresses", list)
    monkeypatch.setattr(socket, "getfqdn", lambda: "node0.cluster")
    assert addresses.job_address() == "node0.cluster"


def test_a_host_that_has_no_address_leads_nowhere():
    assert addresses._address_towards("no host at all") is None
    assert addresses._address_towards("127.0.0.1") == "127.0.0.1"


def testother_addresses_are_none_of_loopback():
    assert not [a for a in addresses.other_addresses() if a.startswith("127.")]

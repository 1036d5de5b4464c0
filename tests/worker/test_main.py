"""What a rank sets up before its loop."""

from __future__ import annotations

import os

import pytest

from raybench.worker.main import num_cores, threads_per_rank
from raybench.worker.network import VARIABLES, choose_interface, interface_of


@pytest.fixture(autouse=True)
def _no_interface_named(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "any")  # so that it is restored
        monkeypatch.delenv(variable)


def test_interface_of_an_address():
    assert interface_of("127.0.0.1") in ("lo", "lo0")
    assert interface_of("203.0.113.77") is None
    assert interface_of("::1") is None


def test_interface_is_chosen_for_both_libraries():
    name = choose_interface("127.0.0.1")
    assert [os.environ[variable] for variable in VARIABLES] == [name, name]


def test_interface_that_the_user_named_stays(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    choose_interface("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"
    assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")


def test_nothing_is_chosen_for_an_unknown_address():
    assert choose_interface("203.0.113.77") is None
    assert not set(VARIABLES) & set(os.environ)


@pytest.mark.parametrize(("ranks", "least"), [(1, num_cores()), (1000, 1)])
def test_threads_per_rank(ranks, least):
    assert threads_per_rank(ranks) == least

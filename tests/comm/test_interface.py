"""A node's interface: which it is, how fast it says it is, and what it sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from raybench.comm import interface
from raybench.comm.interface import Counters, link_bytes_per_s, used_interface


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where interfaces are told of; none yet, and no RDMA device."""
    monkeypatch.setattr(interface, "_CLASS", tmp_path / "net")
    monkeypatch.setattr(interface, "_RDMA", tmp_path / "infiniband")
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "net" / "eth9" / "statistics").mkdir(parents=True)
    return tmp_path / "net"


@pytest.mark.parametrize(("text", "speed"), [("25000\n", 3.125e9), ("-1\n", None), ("", None), ("10Gb/s", None)])
def test_the_speed_that_an_interface_says(net: Path, text: str, speed: float | None) -> None:
    assert link_bytes_per_s("gloo", "eth9") is None  # says none
    (net / "eth9" / "speed").write_text(text)
    assert link_bytes_per_s("gloo", "eth9") == speed
    assert link_bytes_per_s("gloo", None) is None


def test_where_nccl_may_use_rdma_the_interface_s_speed_says_nothing(net: Path, monkeypatch) -> None:
    (net / "eth9" / "speed").write_text("25000")
    (net.parent / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert link_bytes_per_s("nccl", "eth9") is None
    assert link_bytes_per_s("gloo", "eth9") == 3.125e9
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    assert link_bytes_per_s("nccl", "eth9") == 3.125e9


def test_the_interface_in_use(net: Path, monkeypatch) -> None:
    monkeypatch.setattr(interface, "interface_of", lambda address: f"carries {address}")
    assert used_interface("gloo", "10.0.0.1") == "carries 10.0.0.1"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth9")
    assert used_interface("nccl", "10.0.0.1") == "eth9"
    assert used_interface("gloo", "10.0.0.1") == "carries 10.0.0.1"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker0")
    assert used_interface("nccl", "10.0.0.1") == "carries 10.0.0.1"


def test_bytes_sent(net: Path) -> None:
    sent = net / "eth9" / "statistics" / "tx_bytes"
    sent.write_text("1000")
    counters = Counters("eth9")
    before = counters.read()
    assert before == (1000, None)  # no loopback here
    sent.write_text("5000")
    assert counters.sent_since(before) == {"network_bytes": 4000, "loopback_bytes": None}
    assert Counters("lo").read() == (None, None)

"""Between nodes: a real Listener and real sockets on the loopback; and who is paired with whom."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from raybench.doctor.live import reach as module
from raybench.doctor.live.allreduce import ranks_of
from raybench.doctor.live.gather import _lost, _skipped
from raybench.doctor.live.reach import NUM_SAMPLES, Listener, reach, stream, try_port
from raybench.doctor.live.rounds import neighbours, trials
from tests.doctor.live.made import gpu, node


@pytest.fixture
def listener() -> Iterator[Listener]:
    found = Listener("10.0.0.2")
    yield found
    found.close()


def test_ports_are_spread_over_the_range(listener: Listener):
    low, high = map(int, module._RANGE.read_text().split())
    inside = sorted(port for port in listener.ports if port not in module.FIXED_PORTS)
    assert NUM_SAMPLES - 1 <= len(inside) <= NUM_SAMPLES
    assert low <= inside[0]
    assert inside[-1] <= high
    width = (high - low + 1) // NUM_SAMPLES
    parts = {(port - low) // width for port in inside}
    assert len(parts) >= NUM_SAMPLES - 1, "so that a rule for part of the range is met"


def test_a_node_is_reached_and_its_clock_is_read(listener: Listener):
    with socket.create_server(("127.0.0.1", 0)) as other, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        fixed = [other.getsockname()[1], unused.getsockname()[1]]
        found = reach("10.0.0.1", "10.0.0.2", "127.0.0.1", fixed, listener.ports)
    assert found["ports"][fixed[0]] == "ok"
    assert found["ports"][fixed[1]] == "refused"
    assert all(found["ports"][port] == "ok" for port in listener.ports)
    assert found["answered_by"] == "10.0.0.2"
    assert found["round_trip_ns"] is not None
    assert found["offset_ns"] is not None
    assert abs(found["offset_ns"]) <= found["round_trip_ns"], "one clock"


def test_an_offset_is_found(listener: Listener, monkeypatch: pytest.MonkeyPatch):
    """The listener's threads live 5 s in the future."""
    real = time.time_ns
    caller = threading.current_thread()

    def ahead() -> int:
        return real() + (0 if threading.current_thread() is caller else 5_000_000_000)

    monkeypatch.setattr(time, "time_ns", ahead)
    found = reach("10.0.0.1", "10.0.0.2", "127.0.0.1", [], listener.ports[:1])
    assert found["offset_ns"] == pytest.approx(5e9, abs=found["round_trip_ns"])


def test_somebody_else_who_answers_is_not_taken_for_the_node():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def greet() -> None:
            for _ in range(2):
                connection, _ = other.accept()
                connection.sendall(b"SSH-2.0-x\n")
                connection.close()

        thread = threading.Thread(target=greet)
        thread.start()
        found = reach("10.0.0.1", "10.0.0.2", "127.0.0.1", [], [port])
        thread.join(10)
    assert found["answered_by"] != "10.0.0.2"
    assert found["offset_ns"] is None


def test_no_route_is_told_apart():
    assert try_port("255.255.255.255", 9) == "unreachable"


def test_a_stream_is_counted_by_its_receiver(listener: Listener, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "STREAM_S", 0.3)
    monkeypatch.setattr(module, "WARM_UP_S", 0.1)
    stream("10.0.0.1", "127.0.0.1", listener.ports[-1])
    size, duration = listener.received("10.0.0.1")
    assert size > 1 << 20
    assert 0.3e9 <= duration < 2e9
    assert listener.received("10.0.0.1") == (0, 0)


def test_neighbours_meet_and_nobody_twice_at_a_time():
    assert neighbours(1) == []
    assert neighbours(2) == [[(0, 1)]]
    rounds = neighbours(5)
    assert sorted(pair for group in rounds for pair in group) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    for group in rounds:
        assert max(Counter(at for pair in group for at in pair).values()) == 1


def test_two_ranks_before_all():
    four = trials([0, 0, 1, 1])
    assert [(trial.stage, trial.groups) for trial in four] == [
        ("within", ((0, 1), (2, 3))),
        ("between", ((0, 2),)),
        ("all", ((0, 1, 2, 3),)),
    ]
    assert [trial.stage for trial in trials([0, 0])] == ["within"]
    assert [trial.stage for trial in trials([0, 1])] == ["between"]
    assert [trial.groups for trial in trials([0, 1, 2])] == [((0, 1),), ((1, 2),), ((0, 1, 2),)]


def test_ranks_are_free_gpus_or_else_processes():
    assert ranks_of([node(), node(free_gpus=1)]) == ("nccl", [0, 0, 1])
    plain = [node(gpus=[], free_gpus=0), node(gpus=[], free_gpus=0, num_cpus=1)]
    assert ranks_of(plain) == ("gloo", [0, 0, 1])
    assert ranks_of(plain[1:]) == ("gloo", [0, 0])
    assert ranks_of([node(free_gpus=1)]) == ("gloo", [0, 0]), "a single GPU has nobody to talk to"


def test_only_nodes_that_went_away_by_themselves_are_lost():
    def listed(address: str, reason: int) -> dict[str, object]:
        return {"NodeManagerAddress": address, "Alive": False, "DeathReason": reason}

    dead = [
        listed("10.0.0.1", 2),
        listed("10.0.0.2", 1),
        listed("10.0.0.3", 4),
        listed("10.0.0.4", 3),
        listed("10.0.0.5", 2),
    ]
    back = {"NodeManagerAddress": "10.0.0.5", "Alive": True}
    assert _lost([*dead, back], ["10.0.0.5"]) == ["10.0.0.1", "10.0.0.4"]


def test_what_is_not_looked_at_is_said():
    plain = node("10.0.0.2", gpus=[], ray_gpus=0, free_gpus=0)
    assert _skipped([node()]) == ["ports, clocks and bandwidth between nodes: there is one node"]
    assert _skipped([node(), plain])[0].endswith(": no GPU on 10.0.0.2")
    assert _skipped([plain, plain])[0].endswith(": no node has a GPU")
    (acs, busy) = _skipped([node(acs_bridges=None, gpus=[gpu(), gpu(1)], free_gpus=1), node("10.0.0.2")])
    assert acs.startswith("ACS on 10.0.0.1: only root")
    assert busy == "1 of 2 GPUs of 10.0.0.1 in the all-reduces: Ray gave them away"

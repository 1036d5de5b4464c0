"""What a sweep is asked for, and among whom it runs: plain data, one message for what is wrong."""

from __future__ import annotations

import pytest

from raybench.comm.groups import groups_of, members, num_nodes, usual_groups
from raybench.comm.request import read_settings
from raybench.comm.sweep import KINDS, parse_layout, parse_names, parse_sizes
from raybench.errors import RequestError
from raybench.suite.track import Layout


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8:64", (8, 16, 32, 64)),
        ("8:1000:10", (8, 80, 800)),
        ("1K:1M:32", (1024, 32768, 1048576)),
        ("4MiB", (4 << 20,)),
        ("512M:1g", (1 << 29, 1 << 30)),
    ],
)
def test_sizes(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "x", "8:", "64:8", "0:8", "8:64:1", "8:64:x", "1:2:3:4", "-8:64", "8:2048G"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(RequestError, match=r"^--sizes: "):
        parse_sizes(text)


def test_names_and_layouts() -> None:
    assert parse_names("--operations", "all-reduce, send_receive,all-reduce", KINDS) == ("all_reduce", "send_receive")
    assert parse_layout("tensor=2, data=4") == Layout(data=4, tensor=2)
    for text in ("data", "dat=2", "data=0", "data=x", "data=2,data=2", "", "data=99999999"):
        with pytest.raises(RequestError, match=r"^--layout: "):
            parse_layout(text)


def test_groups() -> None:
    nodes = ["a", "a", "a", "b", "b", "b"]
    assert groups_of("node", nodes, None) == ((0, 1, 2), (3, 4, 5))
    assert groups_of("across", nodes, None) == ((0, 3),)
    assert groups_of("all", nodes, None) == ((0, 1, 2, 3, 4, 5),)
    assert members(groups_of("node", nodes, None)) == (0, 1, 2, 3, 4, 5)
    assert num_nodes((0, 3), nodes) == 2
    assert usual_groups(nodes, None) == ("node", "across", "all")
    layout = Layout(data=3, tensor=2)
    # Tensor groups inside the nodes as far as it goes; what is left over on both forms one that crosses.
    assert groups_of("tensor", nodes, layout) == ((0, 1), (2, 5), (3, 4))
    assert groups_of("data", nodes, layout) == ((0, 3, 2), (1, 4, 5))
    assert usual_groups(nodes, layout) == ("node", "across", "all", "data", "tensor")


def test_a_group_that_is_another_is_not_measured_twice() -> None:
    assert usual_groups(["a", "a"], None) == ("node",)
    assert usual_groups(["a", "b"], None) == ("across",)
    assert usual_groups(["a", "a"], Layout(data=2)) == ("node",)


def test_nodes_with_fewer_ranks_are_left_out() -> None:
    assert groups_of("node", ["a", "a", "b", "b", "c"], None) == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("name", "nodes", "layout", "message"),
    [
        ("across", ["a", "a"], None, "--groups: across needs 2 nodes, the cluster has 1"),
        ("node", ["a", "b"], None, "--groups: node needs 2 ranks on a node, every node has 1 (see --ranks-per-node)"),
        ("all", ["a"], None, "--groups: all needs 2 ranks, there is 1"),
        ("data", ["a", "a"], None, "--groups: data is an axis of a layout, and no --layout is given"),
        ("pipeline", ["a", "a"], Layout(data=2), "--groups: pipeline has size 1 in --layout"),
        ("data", ["a", "a"], Layout(data=4), "--layout: 4x1x1 needs 4 ranks, there are 2"),
    ],
)
def test_a_group_that_is_not_there(name: str, nodes: list[str], layout: Layout | None, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        groups_of(name, nodes, layout)
    assert str(caught.value).startswith(message)


def test_settings(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAYBENCH_NCCL_ENV", raising=False)
    (tmp_path / "mine.env").write_text("NCCL_PROTO=LL\n")
    assert read_settings(None) == {"default": {}}
    found = read_settings("none,universal,mine.env")
    assert list(found) == ["none", "universal", "mine"]
    assert (found["none"], found["mine"]) == ({}, {"NCCL_PROTO": "LL"})
    assert found["universal"]["NCCL_DEBUG"] == "WARN"
    with pytest.raises(RequestError, match=r"^--nccl-env: 'none' is named twice"):
        read_settings("none,none")
    with pytest.raises(RequestError, match=r"^--nccl-env: 'universl' is not known; did you mean 'universal'"):
        read_settings("none,universl")
    with pytest.raises(RequestError, match=r"^--nccl-env: there is no file"):
        read_settings("none,./gone.env")
    monkeypatch.setenv("RAYBENCH_NCCL_ENV", "universal")
    assert read_settings(None)["default"]["NCCL_DEBUG"] == "WARN"

"""Several files of one run read together, and the answer as text."""

import json

import pytest

from raybench.doctor.__main__ import main
from raybench.doctor.read import read_nccl, read_topo, read_watchdog, story
from raybench.doctor.render import render

NVLINK = "\tGPU0\tGPU1\nGPU0\tX\tNV4\nGPU1\tNV4\tX\n"
SWITCH = NVLINK.replace("NV4", "PXB")
NICS = "\tGPU0\tNIC0\nGPU0\t X \tPIX\nNIC0\tPIX\t X \nNIC Legend:\n NIC0: mlx5_7\n"
P2P = "n1:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC\nn1:1:1 [0] NCCL INFO Connected all rings\n"


def caught(rank, seq=1):
    return (
        f"[rank{rank}]:[E1119 03:27:40.2 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective "
        f"operation timeout: WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran "
        "for 600040 milliseconds before timing out.\n"
    )


def topo(text, path="topo.txt"):
    return ("topo", path, read_topo(text))


def log(text, path="nccl.log"):
    return ("nccl", path, read_nccl(text.splitlines()))


def dog(text, path="err.log"):
    return ("watchdog", path, read_watchdog(text))


def codes(answer):
    return [item["code"] for item in answer["findings"]]


def test_peer_to_peer_over_nvlink_is_no_risk():
    assert "p2p-hang-risk" in codes(story([log(P2P)]))
    assert codes(story([topo(NVLINK), log(P2P)])) == []
    assert story([topo(NVLINK), log(P2P)])["verdict"] == "Nothing wrong was found in these files."


def test_a_file_of_something_else_is_not_well():
    answer = story([topo(NVLINK), log("hello\n", "train.log")])
    assert answer["verdict"] == "Nothing can be said of train.log: not-recognised."


def test_evidence_does_not_steer_the_terminal():
    text = render(read_topo("a\x1b[2Jb\x07\x04c\n"))
    assert [line for line in text.splitlines() if "|" in line] == ["    | a?[2Jb??c"]


def test_hang_over_a_pcie_switch():
    answer = story([topo(SWITCH), log(P2P), dog(caught(0) + caught(1))])
    assert "ACS or an IOMMU" in answer["verdict"]
    risk = next(
        item for item in answer["findings"] if item["code"] == "p2p-hang-risk" and item["paths"] == ["topo.txt"]
    )
    assert risk["severity"] == "warning"


def test_a_silent_rank_comes_before_the_topology():
    answer = story([topo(SWITCH), log(P2P), dog(caught(0, 9) + caught(2, 9))])
    assert answer["silent_ranks"] == ["1"]
    assert answer["verdict"].startswith("Rank 1 does not report")


def test_one_file_a_rank_is_judged_over_all_of_them():
    alone = [dog(caught(rank, 9), f"rank{rank}.log") for rank in (0, 1, 2)]
    assert "silent-rank" in codes(alone[2][2])
    answer = story(alone)
    assert answer["silent_ranks"] == []
    assert codes(answer) == ["collective-timeout"]
    moved = [*alone[:2], dog(caught(2, 8), "rank2.log")]
    assert "ranks-desynchronised" in codes(story(moved))


def test_desync_reports_stay():
    report = " - the lagging/dead/mismatched ranks that caused the desync are:\n [0] finished collective #3"
    answer = story([dog(caught(1, 9) + report), dog(caught(2, 9))])
    assert "ranks-desynchronised" in codes(answer)
    assert answer["verdict"].startswith("ranks-desynchronised")


def test_an_error_of_the_log_explains_the_time_out():
    warn = "n1:1:1 [0] x.cc:1 NCCL WARN NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129\n"
    answer = story([log(P2P + warn, "a/n1.log"), dog(caught(0, 5) + caught(1, 5))])
    assert answer["verdict"].startswith("ib-retry-exceeded (n1.log)")
    assert "follows from it" in answer["verdict"]


def test_versions_that_differ_between_files():
    answer = story([log("NCCL version 2.19.3+cuda12.3\n", "a"), log("NCCL version 2.20.5+cuda12.4\n", "b")])
    assert codes(answer) == ["mixed-versions"]
    assert "2.19.3 and 2.20.5" in answer["findings"][0]["message"]
    assert codes(story([log("NCCL version 2.19.3\n", "a"), log("NCCL version 2.19.3+cuda12.4\n", "b")])) == []


def test_tcp_beside_unused_nics():
    socket = log("n1:1:1 [0] NCCL INFO Using network Socket\n")
    assert "mlx5_7" in story([topo(NICS), socket])["verdict"]
    assert "mlx5_7" not in story([socket])["verdict"]


def test_one_message_of_many_files_is_one_finding():
    answer = story([log(P2P, "a"), log(P2P, "b")])
    assert [item["paths"] for item in answer["findings"]] == [["a", "b"]]
    assert answer["files"] == [{"kind": "nccl", "path": "a"}, {"kind": "nccl", "path": "b"}]


def test_nothing_to_read():
    assert story([])["verdict"] == "Nothing wrong was found in these files."


def test_render_shows_facts_findings_and_advice():
    text = render(read_topo(SWITCH))
    assert "links: 1 × PXB" in text
    assert "WARNING p2p-hang-risk" in text
    assert "| GPU0\tX\tPXB" in text
    assert "- Test once with NCCL_P2P_DISABLE=1" in text
    assert max(len(line) for line in text.splitlines() if "|" not in line) <= 100
    assert "NIC0 = mlx5_7" in render(read_topo(NICS))
    assert "nothing found" in render(read_topo(NVLINK))
    assert "docs/troubleshooting.md" in text
    assert "docs/troubleshooting.md" not in render(read_topo(NVLINK))


def test_render_of_every_kind():
    hosts = render(read_topo(NVLINK + SWITCH))
    assert hosts.index("host 1") < hosts.index("host 2") < hosts.index("p2p-hang-risk")
    assert "network: not in this file" in render(read_nccl(P2P.splitlines()))
    assert "rank 1 seq 9 op ALLREDUCE" in render(read_watchdog(caught(1, 9)))
    assert "ACS" in render(story([topo(SWITCH), dog(caught(0) + caught(1))]))


def test_module_as_a_command(tmp_path, capsys):
    path = tmp_path / "topo.txt"
    path.write_text(NVLINK)
    assert main(["topo", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["links"] == {"GPU0-GPU1": "NV4"}
    assert main(["topo", str(path)]) == 0
    assert capsys.readouterr().out.startswith("Topology\n")
    assert main(["nccl", str(tmp_path / "none")]) == 2
    out = capsys.readouterr()
    assert (out.out, out.err.count("\n")) == ("", 1)
    with pytest.raises(SystemExit):
        main(["other", str(path)])

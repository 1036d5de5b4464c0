"""`nvidia-smi topo -m` in every layout that users paste."""

import os
from pathlib import Path

import pytest

from raybench.doctor.read import read_file, read_topo
from raybench.errors import RequestError

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""
TABS = (
    "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tNV6\tPXB\t0-27\t0\t\tN/A\n"
    "GPU1\tNV6\t X \tSYS\t28-55\t1\t\tN/A\n"
    "NIC0\tPXB\tSYS\t X \t\t\t\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_3\n"
)
PAIR = {"GPU0-GPU1": "NV6"}


def codes(answer):
    return [item["code"] for item in answer["findings"]]


def facts(answer):
    return (
        answer["complete"],
        answer["links"],
        answer["gpu_nic_links"],
        answer["cpu_affinity"],
        answer["numa_affinity"],
        answer["nics"],
    )


EXPECTED = (
    True,
    PAIR,
    {"GPU0-NIC0": "PXB", "GPU1-NIC0": "SYS"},
    {"GPU0": "0-27", "GPU1": "28-55"},
    {"GPU0": "0", "GPU1": "1"},
    [{"name": "NIC0", "device": "mlx5_3"}],
)


LAYOUTS = {
    "tabs": TABS,
    "tabs that a terminal has expanded": TABS.expandtabs(8),
    "doubled tabs": TABS.replace("\t", "\t\t"),
    "columns two blanks apart": TABS.replace("\t\t", "\t").replace("\t", "  "),
    "underlined header": TABS.replace("\tGPU0", "\t\x1b[4mGPU0", 1).replace("NUMA ID", "NUMA ID\x1b[0m", 1),
    "underlined header whose escape characters were lost": TABS.replace("\tGPU0", "\t[4mGPU0", 1).replace(
        "NUMA ID", "NUMA ID[0m", 1
    ),
    "header without leading blank": TABS[1:],
    "header glued together": TABS.split("\n", 1)[0].replace("\t", "") + "\n" + TABS.split("\n", 1)[1],
    "carriage returns": TABS.replace("\n", "\r\n"),
    "prompt and other tools around it": "ops@n1:~$ nvidia-smi -L\nGPU 0: NVIDIA A30 (UUID: GPU-1)\nGPU 1: NVIDIA A30\n"
    "\t Link 0: 25 GB/s\nops@n1:~$ nvidia-smi topo -m\n" + TABS + LEGEND + "ops@n1:~$ GPU0 is fine\n",
    "a launcher's prefix on every line": "".join(f"[1,0]<stdout>:{line}\n" for line in TABS.splitlines()),
    "a host's name on every line": "".join(f"node7: {line}\n" for line in TABS.splitlines()),
    **{
        f"lines behind {prefix!r}": "".join(f"{prefix}{line}\n" for line in TABS.splitlines())
        for prefix in (
            *("> ", "| ", "# ", "worker-1  | ", "[rank0]: ", "3: ", "n7.example.org: ", "(Worker pid=7, ip=10.0.0.4) "),
            *("2026-03-01T10:11:12.123456Z ", "2026-03-01T10:11:12.1Z stdout F ", "Mar 01 10:11:12 n1 job[12]: "),
        )
    },
    "an editor's line numbers": "".join(f"{n:6}\t{line}\n" for n, line in enumerate(TABS.splitlines(), 1)),
    "the same behind blanks": "".join(f"{n:6}  {line}\n" for n, line in enumerate(TABS.splitlines(), 1)),
    "line numbers of grep": "".join(f"{n}:{line}\n" for n, line in enumerate(TABS.splitlines(), 1)),
    "rows in another order": "\n".join(TABS.splitlines()[i] for i in (0, 3, 2, 1, 4, 5, 6, 7)),
    "no end of line at the end": TABS.rstrip("\n"),
}


def large(num_gpus, num_nics):
    """A board with an NVSwitch and a NIC for each pair of GPUs, as nvidia-smi prints it."""
    names = [*(f"GPU{n}" for n in range(num_gpus)), *(f"NIC{n}" for n in range(num_nics))]
    rows = ["\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"]
    for one in names:
        links = [" X " if one == other else "NV18" if one[0] == other[0] == "G" else "SYS" for other in names]
        rows.append("\t".join([one, *links, *(["0-47,96-143", "0", "", "N/A"] if one[0] == "G" else ["", "", ""])]))
    return "\n".join([*rows, LEGEND, "NIC Legend:", "", *(f"  NIC{n}: mlx5_{n}" for n in range(num_nics))]) + "\n"


@pytest.mark.parametrize("width", range(64, 200, 7))
@pytest.mark.parametrize("sizes", [(8, 4), (16, 9)])
def test_wrapped_by_a_narrow_terminal(sizes, width):
    whole = large(*sizes)
    lines = whole.expandtabs(8).splitlines()
    wrapped = [line[at : at + width] for line in lines for at in range(0, max(1, len(line)), width)]
    expected, answer = read_topo(whole), read_topo("\n".join(wrapped))
    assert expected["complete"]
    assert (answer["gpus"], answer["nics"]) == (expected["gpus"], expected["nics"])
    assert (answer["links"], answer["gpu_nic_links"]) == (expected["links"], expected["gpu_nic_links"])
    assert answer["complete"]


@pytest.mark.parametrize("text", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts_give_the_same_facts(text):
    answer = read_topo(text)
    assert facts(answer) == EXPECTED
    assert answer["gpus"] == ["GPU0", "GPU1"]
    assert answer["nvlink_full_mesh"] is True
    assert answer["worst_link"] == "NV6"
    assert codes(answer) == ["nic-far-from-gpu"]


def test_a_header_of_a_single_gpu_without_leading_blank_is_no_row():
    answer = read_topo("GPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-3\tN/A\n")
    assert answer["cpu_affinity"] == {"GPU0": "0-3"}
    assert answer["numa_affinity"] == {"GPU0": "N/A"}
    assert (answer["worst_link"], answer["nvlink_full_mesh"], codes(answer)) == (None, False, ["single-gpu"])


@pytest.mark.parametrize(
    ("row", "cpu", "numa"),
    [
        ("GPU0\t X \t0-9,20-29\t0-1\t\tN/A", "0-9,20-29", "0-1"),
        ("GPU0\t X \t0-9,20-29\t\t1\t\tN/A", "0-9,20-29", "1"),
        ("GPU0\t X \t0,2,4,6,8,10,12,1\t0\t\tN/A", "0,2,4,6,8,10,12,1", "0"),
        ("GPU0\t X \t0-9\t\t\tN/A", "0-9", None),
        ("GPU0\t X \t\t1\t\tN/A", None, "1"),
        ("GPU0\t X \t\t\t\tN/A", None, None),
        ("GPU0\t X \t\t\t\tN/A".expandtabs(8), None, None),
        ("GPU0\t X \t0-9\t\t\tN/A".expandtabs(8), "0-9", None),
        ("GPU0\t X ", None, None),
    ],
)
def test_affinity_columns(row, cpu, numa):
    answer = read_topo(f"\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n{row}\n")
    assert answer["cpu_affinity"].get("GPU0") == cpu
    assert answer["numa_affinity"].get("GPU0") == numa
    assert answer["complete"] is True


def test_numa_not_available_with_the_cpu_cell_empty():
    answer = read_topo("\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPHB\t\tN/A\nGPU1\tPHB\t X \t\tN/A\n")
    assert answer["cpu_affinity"] == {}
    assert answer["numa_affinity"] == {"GPU0": "N/A", "GPU1": "N/A"}


def test_device_named_columns_out_of_order_and_soc():
    text = (
        "\tGPU0\tGPU1\tmlx5_bond_1\tmlx4_0\tibp9s0\tCPU Affinity\n"
        "GPU0\t X \tSOC\tSOC\tPHB\tSOC\t0-3\n"
        "GPU1\tSOC\t X \tSOC\tSOC\tSOC\t4-7\n"
        "mlx4_0\tPHB\tSOC\tSOC\t X \tPIX\n"
        "mlx5_bond_1\tSOC\tSOC\t X \tSOC\tSOC\n"
        "ibp9s0\tSOC\tSOC\tSOC\tPIX\t X \n"
    )
    answer = read_topo(text)
    assert [nic["name"] for nic in answer["nics"]] == ["mlx5_bond_1", "mlx4_0", "ibp9s0"]
    assert all(nic["name"] == nic["device"] for nic in answer["nics"])
    assert answer["links"] == {"GPU0-GPU1": "SYS"}
    assert answer["gpu_nic_links"]["GPU0-mlx4_0"] == "PHB"
    assert answer["complete"] is True
    assert codes(answer) == ["p2p-through-host-bridge", "nic-far-from-gpu"]


def test_nic_columns_out_of_order_keep_the_header_order():
    rows = "\tGPU0\tNIC1\tNIC0\nGPU0\t X \tPIX\tSYS\nNIC1\tPIX\t X \tSYS\nNIC0\tSYS\tSYS\t X\n"
    text = rows + "NIC Legend:\nNIC0: a0\nNIC1: b-1.2\n"
    answer = read_topo(text)
    assert answer["nics"] == [{"name": "NIC1", "device": "b-1.2"}, {"name": "NIC0", "device": "a0"}]
    assert answer["gpu_nic_links"] == {"GPU0-NIC1": "PIX", "GPU0-NIC0": "SYS"}


@pytest.mark.parametrize(
    ("legend", "devices"),
    [
        ("NIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n", ["mlx5_0", "mlx5_1"]),
        ("NIC Legend:\n  NIC0: mlx5_0  NIC1: mlx5_1\n", ["mlx5_0", "mlx5_1"]),
        ("NIC Legend:\n\t\tNIC0:mlx5_0\n\t\tNIC1:mlx5_1", ["mlx5_0", "mlx5_1"]),
        ("NIC Legend:\n  NIC0:\n   mlx5_0\n  NIC1: mlx5_1\n", ["mlx5_0", "mlx5_1"]),
        ("NIC Legend:\n  NIC0: mlx5_0\n  NIC1: \ufffd\x01mlx5\n", ["mlx5_0", None]),
        ("NIC Legend:\n  NIC0: mlx5 0\n  NIC1:\n\n", [None, None]),
        ("", [None, None]),
    ],
)
def test_nic_legend(legend, devices):
    text = "\tGPU0\tNIC0\tNIC1\nGPU0\t X \tPIX\tNODE\nNIC0\tPIX\t X \tSYS\nNIC1\tNODE\tSYS\t X \n" + legend
    assert [nic["device"] for nic in read_topo(text)["nics"]] == devices


def test_wrapped_legend_of_link_types_is_no_row():
    text = TABS + LEGEND.replace("between NUMA nodes", "between\nNUMA nodes").replace("single PCIe", "single\n  PCIe")
    assert facts(read_topo(text)) == EXPECTED


ROWS = (
    "\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\n"
    "GPU0\t X \tPIX\tSYS\t0-3\t0\n"
    "GPU1\tPIX\t X \tSYS\t0-3\t0\n"
    "GPU2\tSYS\tSYS\t X \t4-7\t1\n"
)


ALL = {"GPU0-GPU1": "PIX", "GPU0-GPU2": "SYS", "GPU1-GPU2": "SYS"}


@pytest.mark.parametrize(
    ("cut", "links", "whole_rows"),
    [
        ("GPU2\tSYS\tSYS\t X \t4-7\t1\n", ALL, ["GPU0", "GPU1"]),
        ("\t X \tSYS\t0-3\t0\nGPU2\tSYS\tSYS\t X \t4-7\t1\n", {"GPU0-GPU1": "PIX", "GPU0-GPU2": "SYS"}, ["GPU0"]),
        ("SYS\t0-3\t0\nGPU1\tPIX\t X \tSYS\t0-3\t0\nGPU2\tSYS\tSYS\t X \t4-7\t1\n", {"GPU0-GPU1": "PIX"}, []),
        ("S\t X \t4-7\t1\n", ALL, ["GPU0", "GPU1"]),
    ],
)
def test_cut_rows_and_cells(cut, links, whole_rows):
    answer = read_topo(ROWS[: -len(cut)])
    assert answer["complete"] is False
    assert answer["gpus"] == ["GPU0", "GPU1", "GPU2"]
    assert answer["links"] == links
    assert list(answer["cpu_affinity"]) == whole_rows
    assert "truncated-input" in codes(answer)


def test_last_row_cut_between_its_affinities():
    answer = read_topo(ROWS[: -len("7\t1\n")])
    assert answer["complete"] is True
    assert list(answer["cpu_affinity"]) == ["GPU0", "GPU1"]


def test_a_pair_is_read_from_the_other_row():
    lines = ROWS.splitlines()
    lines[1] = "GPU0\t X "
    assert read_topo("\n".join(lines))["links"] == {"GPU0-GPU1": "PIX", "GPU0-GPU2": "SYS", "GPU1-GPU2": "SYS"}


def test_an_empty_cell_before_the_diagonal_does_not_shift_the_others():
    answer = read_topo(ROWS.replace("GPU1\tPIX\t X \tSYS", "GPU1\t\t X \tNV4").replace("GPU0\t X \tPIX\tSYS", "GPU0"))
    assert answer["links"]["GPU1-GPU2"] == "NV4"
    assert "GPU0-GPU1" not in answer["links"]


def test_rows_without_header():
    answer = read_topo("GPU0\t X \tNV2\tPIX\t0-3\nGPU1\tNV2\t X \tPIX\t0-3\nNIC0\tPIX\tPIX\t X\n")
    assert answer["complete"] is False
    assert answer["links"] == {"GPU0-GPU1": "NV2"}
    assert codes(answer) == ["truncated-input"]


def test_only_a_legend():
    answer = read_topo("NIC Legend:\n  NIC0: mlx5_0\n  NIC1: rocep3s0\n")
    assert answer["nics"] == [{"name": "NIC0", "device": "mlx5_0"}, {"name": "NIC1", "device": "rocep3s0"}]
    assert (answer["complete"], codes(answer)) == (False, ["truncated-input"])
    assert codes(read_topo(LEGEND)) == ["truncated-input"]


def test_two_hosts():
    other = TABS.replace("NV6", "SYS").replace("mlx5_3", "mlx5_9")
    peer = "\tGPU0\tGPU1\nGPU0\tX\tNS\nGPU1\tNS\tX\n"
    answer = read_topo("##### host a\n" + TABS + "##### host b\n" + other + peer)
    assert list(answer) == ["kind", "hosts"]
    one, two = answer["hosts"]
    assert (one["links"], one["nics"][0]["device"]) == (PAIR, "mlx5_3")
    assert (two["links"], two["nics"][0]["device"]) == ({"GPU0-GPU1": "SYS"}, "mlx5_9")
    assert "p2p-disabled" in codes(two)
    assert "p2p-disabled" not in codes(one)
    assert all("kind" not in host for host in answer["hosts"])


def test_two_hosts_in_one_stream_with_their_names_before_every_line():
    one = [f"a: {line}" for line in TABS.splitlines()]
    two = [f"b: {line}" for line in TABS.replace("NV6", "PIX").splitlines()]
    mixed = "\n".join(line for pair in zip(one, two, strict=True) for line in pair)
    assert [host["links"] for host in read_topo(mixed)["hosts"]] == [PAIR, {"GPU0-GPU1": "PIX"}]


PEER = " \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tCNS\tX\t\n\nLegend:\n  X    = Self\n  OK   = Status Ok\n"


def test_a_peer_to_peer_matrix_does_not_overwrite_the_topology():
    assert facts(read_topo(TABS + PEER)) == EXPECTED
    before = read_topo(PEER + TABS)
    assert facts(before) == EXPECTED
    assert "p2p-disabled" in codes(before)


def test_a_peer_to_peer_matrix_alone():
    answer = read_topo(PEER)
    assert answer["gpus"] == ["GPU0", "GPU1"]
    assert (answer["links"], answer["worst_link"], answer["nvlink_full_mesh"]) == ({}, None, False)
    assert codes(answer) == ["p2p-disabled"]
    assert answer["findings"][0]["evidence"] == "GPU1\tCNS\tX"


def test_peer_to_peer_all_ok_is_no_finding():
    assert codes(read_topo(PEER.replace("CNS", "OK"))) == []


@pytest.mark.parametrize(
    "text", ["", "\n\n", "GPU0 and GPU1 hang\n", "GPU 0: NVIDIA A100\n", "<html></html>", "NIC: a"]
)
def test_not_recognised(text):
    answer = read_topo(text)
    assert codes(answer) == ["not-recognised"]
    assert (answer["complete"], answer["gpus"], answer["worst_link"]) == (False, [], None)


def test_refused_minus_i_is_explained():
    answer = read_topo("The -i command line argument must be used in conjunction with -n or -p.\n")
    assert "takes no `-i`" in answer["findings"][0]["message"]


def matrix(*links):
    """A header and rows from the links above the diagonal, row by row."""
    size = next(n for n in range(2, 20) if n * (n - 1) // 2 == len(links))
    upper = iter(links)
    cells = [["X"] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1, size):
            cells[i][j] = cells[j][i] = next(upper)
    names = [f"GPU{i}" for i in range(size)]
    rows = ["\t".join([name, *row]) for name, row in zip(names, cells, strict=True)]
    return "\t" + "\t".join(names) + "\n" + "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    ("links", "worst", "mesh", "found"),
    [
        (["NV12"], "NV12", True, []),
        (["NV4", "NV2", "NV4"], "NV2", True, []),
        (["NV18", "PIX", "PXB"], "PXB", False, ["mixed-nvlink-pcie"]),
        (["NV1", "SYS", "NV1"], "SYS", False, []),  # a chain of NVLinks joins all three
        (["PIX"], "PIX", False, ["p2p-hang-risk"]),
        (["PXB"], "PXB", False, ["p2p-hang-risk"]),
        (["PHB"], "PHB", False, ["p2p-through-host-bridge"]),
        (["NODE", "PIX", "SYS"], "SYS", False, ["p2p-through-host-bridge", "p2p-hang-risk"]),
    ],
)
def test_what_links_mean(links, worst, mesh, found):
    answer = read_topo(matrix(*links))
    assert (answer["worst_link"], answer["nvlink_full_mesh"]) == (worst, mesh)
    assert codes(answer) == found


def test_evidence_is_the_row_of_a_pair_at_risk():
    answer = read_topo(matrix("SYS", "SYS", "PXB"))
    risk = next(item for item in answer["findings"] if item["code"] == "p2p-hang-risk")
    assert risk["evidence"] == "GPU1\tSYS\tX\tPXB"
    assert risk["severity"] == "warning"
    assert any("NCCL_P2P_DISABLE=1" in step for step in risk["advice"])


def test_unknown_pairs_do_not_make_islands():
    assert codes(read_topo(matrix("NV4", "SYS", "SYS", "SYS", "SYS", "NV4"))) == ["mixed-nvlink-pcie"]
    cut = "\tGPU0\tGPU1\tGPU2\tGPU3\nGPU0\tX\tNV4\tSYS\n"  # how GPU2 and GPU3 reach the rest is not known
    assert codes(read_topo(cut)) == ["truncated-input"]


def test_a_very_large_file_keeps_its_matrix(tmp_path):
    path = tmp_path / "all.txt"
    path.write_text("some other tool says nothing of interest\n" * 120_000 + TABS)
    answer = read_file("topo", path)
    assert answer["links"] == PAIR


def test_utf_16_as_windows_shells_write_it(tmp_path):
    path = tmp_path / "topo.txt"
    path.write_bytes(TABS.encode("utf-16"))
    assert facts(read_file("topo", path)) == EXPECTED


def test_a_byte_order_mark_and_a_pipe(tmp_path):
    path = tmp_path / "marked.txt"
    path.write_bytes(b"\xef\xbb\xbf" + TABS.encode())
    assert facts(read_file("topo", path)) == EXPECTED
    read_end, write_end = os.pipe()
    os.write(write_end, TABS.encode())
    os.close(write_end)
    assert facts(read_file("topo", Path(f"/dev/fd/{read_end}"))) == EXPECTED
    os.close(read_end)


def test_unreadable_path_is_one_sentence(tmp_path):
    with pytest.raises(RequestError, match=r"^cannot read '.*missing.txt': No such file or directory$"):
        read_file("topo", tmp_path / "missing.txt")
    with pytest.raises(RequestError, match="Is a directory"):
        read_file("nccl", tmp_path)
    with pytest.raises(RequestError, match="Is a directory"):
        read_file("watchdog", tmp_path)

"""NCCL_DEBUG=INFO logs: facts and errors, whatever launcher, version or terminal they have passed through."""

import json

import pytest

from raybench.doctor.read import read_file, read_nccl

LINE = "n1:10:20 [0] NCCL INFO "


def codes(answer):
    return [item["code"] for item in answer["findings"]]


def read(text):
    return read_nccl(text.splitlines(keepends=True))


def found(text, code):
    return next(item for item in read(text)["findings"] if item["code"] == code)


HEALTHY = [
    "Bootstrap : Using ens5:10.7.0.4<0>",
    "NCCL version 2.18.6+cuda12.1",
    "NET/IB : Using [0]mlx5_2:1/RoCE [1]mlx5_bond_0:1/RoCE [RO]; OOB ens5:10.7.0.4<0>",
    "Using network IB",
    "comm 0x55d0 rank 3 nranks 16 cudaDev 3 busId 5000 - Init START",
    "Channel 00/0 : 3[3] -> 4[4] via P2P/CUMEM/read",
    "Channel 00/0 : 3[3] -> 8[0] [send] via NET/IB/1/GDRDMA",
    "Channel 01/0 : 3[3] -> 8[0] [send] via NET/IB/1/GDRDMA",
    "Connected all rings",
]
FACTS = {
    "nccl_version": "2.18.6",
    "cuda_version": "12.1",
    "num_ranks": 16,
    "network": "IB",
    "interfaces": ["ens5"],
    "ib_devices": ["mlx5_2:1/RoCE", "mlx5_bond_0:1/RoCE"],
    "transports": {"P2P/CUMEM/read": 1, "NET/IB/1/GDRDMA": 2},
    "gdrdma": True,
    "rings_connected": True,
}

PREFIXES = {
    "whole": "n1:10:20 [3] NCCL INFO ",
    "device only": "[3] NCCL INFO ",
    "gone": "NCCL INFO ",
    "mpirun": "[1,3]<stdout>:n1:10:20 [3] NCCL INFO ",
    "srun": "3: n1:10:20 [3] NCCL INFO ",
    "torchrun": "[default3]:n1:10:20 [3] NCCL INFO ",
    "horovod": "[worker0|0]:n1:10:20 [3] NCCL INFO ",
    "ray": "\x1b[36m(RayTrainWorker pid=77, ip=10.7.0.4)\x1b[0m n1:10:20 [3] NCCL INFO ",
    "pid": "(pid=77) n1:10:20 [3] NCCL INFO ",
    "kubectl": "[pod/train-0/main] train-0:10:20 [3] NCCL INFO ",
    "number": "[88] n1:10:20 [3] NCCL INFO ",
    "colour reset": "\x1b[0mn1:10:20 [3] NCCL INFO ",
    "colour reset without its escape": "[0mn1:10:20 [3] NCCL INFO ",
    "time": "[2026-03-01 10:11:12] n1:10:20 [3] NCCL INFO ",
    "no library name": "n1:10:20 [3] INFO ",
    "no library name, device only": "[3] INFO ",
}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES.keys())
@pytest.mark.parametrize("end", ["\n", "\r\n", "\x1b[0m\n"], ids=["lf", "crlf", "colour"])
def test_prefixes(prefix, end):
    answer = read("".join(prefix + line + end for line in HEALTHY))
    assert {name: answer[name] for name in FACTS} == FACTS
    assert [item["severity"] for item in answer["findings"]] == ["warning"]
    assert codes(answer) == ["p2p-hang-risk"]


def test_lines_without_ends_are_lines_too():
    answer = read_nccl([LINE + line for line in HEALTHY])
    assert {name: answer[name] for name in FACTS} == FACTS


def test_wrapped_at_blanks():
    text = "".join(LINE + line + "\n" for line in HEALTHY)
    for wrap in (" via", "] ->", " [1]", "; OOB", "Using network"):
        text = text.replace(wrap + " ", wrap + "\n")
    answer = read(text)
    assert {name: answer[name] for name in FACTS} == FACTS


@pytest.mark.parametrize("width", range(34, 120, 3))
def test_wrapped_inside_words_at_any_width(width):
    lines = [LINE + line for line in HEALTHY if not line.startswith(("Using network", "NCCL version"))]
    wrapped = [line[at : at + width] for line in lines for at in range(0, len(line), width)]
    answer = read("\n".join(wrapped))
    for name in ("transports", "gdrdma", "interfaces", "num_ranks", "ib_devices"):
        assert answer[name] == FACTS[name], name


def test_foreign_lines_between_change_nothing():
    noise = [
        "epoch 3 loss 0.5",
        "100%|####| 7/7 [00:01<00:00]",
        "  File train.py, line 5",
        "5",
        "/GDRDMAx",
        "[INFO] via air",
    ]
    lines = [line for number, fact in enumerate(HEALTHY) for line in (LINE + fact, noise[number % len(noise)])]
    answer = read("\n".join(lines))
    assert {name: answer[name] for name in FACTS} == FACTS


def test_rays_mark_of_repeated_lines():
    mark = "\x1b[32m [repeated 15x across cluster] (Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0)\x1b[0m"
    answer = read("".join(f"(TrainWorker pid=7) {LINE}{line}{mark}\n" for line in HEALTHY))
    assert {name: answer[name] for name in FACTS} == FACTS


@pytest.mark.parametrize("blank", ["", " "])
@pytest.mark.parametrize(
    "around", [lambda line: {"log": line + "\n", "stream": "stdout"}, lambda line: {"time": "10:11", "message": line}]
)
def test_lines_that_a_collector_wrote_as_json(around, blank):
    marks = ("," + blank, ":" + blank)
    text = "".join(json.dumps(around(LINE + line), separators=marks) + "\n" for line in HEALTHY)
    answer = read(text + '{"log":"cut\n{"log":5}\n')
    assert {name: answer[name] for name in FACTS} == FACTS


def test_messages_without_anything_before_them():
    answer = read("\n".join(HEALTHY[:4] + HEALTHY[5:]))
    assert {name: answer[name] for name in FACTS} == FACTS | {"num_ranks": None}


def test_two_records_on_one_line_and_a_progress_bar_before_one():
    answer = read(
        "n1:1:2 [0] NCCL INFO Using network Socket n1:1:3 [1] NCCL INFO comm 0x1 rank 1 nranks 4\n"
        "10%|#   | 1/10\rn1:1:2 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct\n"
    )
    assert (answer["network"], answer["num_ranks"]) == ("Socket", 4)
    assert answer["transports"] == {"SHM/direct/direct": 1}


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("Ring 00 : 0 -> 1 via P2P/IPC", "P2P/IPC"),
        ("Ring 01 : 0[0] -> 1[1] via direct shared memory", "SHM"),
        ("Channel 02 : 0[1a000] -> 1[3b000] via P2P/direct pointer", "P2P/direct pointer"),
        ("Channel 02/1 : 0[1a000] -> 1[3b000] via P2P/IPC comm 0x55f00 nRanks 08", "P2P/IPC"),
        ("Channel 02 : 8[c1] -> 0[c1] [receive] via NET/UCX/0/GDRDMA comm 0x2aaf nRanks 08", "NET/UCX/0/GDRDMA"),
        (
            "Channel 02/0 : 0[0] -> 1[1] [send] via NET/AWS Libfabric/3/GDRDMA/Shared",
            "NET/AWS Libfabric/3/GDRDMA/Shared",
        ),
        ("Channel 02/0 : 0[0] -> 1[1] [send] via NET/IB/0(2)/GDRDMA(PCI)", "NET/IB/0(2)/GDRDMA(PCI)"),
        ("Channel 02/0 : 0[0] -> 1[1] via P2P/indirect/3[2]", "P2P/indirect/3[2]"),
        ("Channel 02/0 : 0[0] -> 1[1] via P2P/MNNVL/CE", "P2P/MNNVL/CE"),
        ("Channel 02/0 : 0[0] -> 1[1] via SOMETHING/new", "SOMETHING/new"),
    ],
)
def test_connection_lines(line, path):
    assert read(LINE + line + "\n")["transports"] == {path: 1}
    assert read("INFO " + line + "\nforeign\n")["transports"] == {path: 1}


@pytest.mark.parametrize(
    "line",
    [
        "Channel 00/02 :    0   1   2",
        "Trees [0] 1/-1/-1->0->-1",
        "Ring 00 : 7 -> 0 -> 1 comm 0x1 nRanks 08 busId 1a000",
        "Connected via something",
    ],
)
def test_other_lines_are_no_connections(line):
    assert read(LINE + line + "\n")["transports"] == {}


def test_gpudirect_after_connected_all_rings_is_not_the_nics():
    text = LINE + "Channel 00/0 : 0[0] -> 1[1] via P2P/IPC\n" + LINE + "Connected all rings, use ring PXN 0 GDR 1\n"
    assert (read(text)["gdrdma"], read(text)["rings_connected"]) == (None, True)


@pytest.mark.parametrize(
    ("lines", "gdrdma", "code"),
    [
        (["Channel 00 : 0[0] -> 1[1] [send] via NET/IB/0"], False, True),
        (["Channel 00 : 0[0] -> 1[1] [send] via NET/Libfabric/0"], False, True),
        (["Channel 00 : 0[0] -> 1[1] [send] via NET/Socket/0"], None, False),
        (["Channel 00 : 0[0] -> 1[1] [send] via NET/FastSocket/0"], None, False),
        (["NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"], False, True),
        (["NET/IB : GPU Direct RDMA Disabled for GPU 0[0] / HCA 0 (distance 7 > 4)"], False, True),
        (["NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'"], None, False),
        (
            ["Channel 00 : 0[0] -> 1[1] [send] via NET/IB/0", "Channel 00 : 2[2] -> 3[3] [send] via NET/IB/1/GDRDMA"],
            True,
            False,
        ),
        (["Channel 00 : 0[0] -> 1[1] via P2P/IPC"], None, False),
    ],
)
def test_gpudirect(lines, gdrdma, code):
    answer = read("".join(LINE + line + "\n" for line in lines))
    assert answer["gdrdma"] is gdrdma
    assert ("no-gpudirect-rdma" in codes(answer)) is code


@pytest.mark.parametrize(
    ("lines", "network"),
    [
        (["Using network AWS Libfabric"], "AWS Libfabric"),
        (["Using internal Network Socket"], "Socket"),
        (["Using network IBext_v8", "Using network IB"], "IBext_v8"),
        (["NET/Plugin: Using internal network plugin.", "Using non-device net plugin version 0"], None),
        (["Channel 00 : 0 -> 1 [send] via NET/Socket/1"], "Socket"),
        (["Channel 00 : 0 -> 1 [send] via NET/AWS Libfabric/0/GDRDMA", "Using network IB"], "IB"),
    ],
)
def test_network(lines, network):
    answer = read("".join(LINE + line + "\n" for line in lines))
    assert answer["network"] == network
    assert ("socket-fallback" in codes(answer)) is (network == "Socket")


@pytest.mark.parametrize(
    ("text", "version", "cuda"),
    [
        ("NCCL version 2.2.13+cuda9.0\n", "2.2.13", "9.0"),
        (LINE + "NCCL version 2.30.1+cuda13.2\n", "2.30.1", "13.2"),
        ("[0] NCCL INFO RCCL version : 2.27.7-HEAD:0d2c4fd\nHIP version  : 7.2.26015\n", "2.27.7", None),
        ("RCCL version 2.18.3+hip6.0 HEAD:abc\n", "2.18.3", None),
        ("NCCL version 2.14.3+cudaCUDA_MAJOR.CUDA_MINOR\n", "2.14.3", None),
        (
            "RuntimeError: NCCL error in: ../torch/x.cpp:1, unhandled system error, NCCL version 21.0.3\n",
            "21.0.3",
            None,
        ),
        ("NCCL version\n2.19.4+cuda12.2\n", "2.19.4", "12.2"),
        (LINE + "cudaDriverVersion 12080\n", None, None),
    ],
)
def test_versions(text, version, cuda):
    answer = read(text)
    assert (answer["nccl_version"], answer["cuda_version"]) == (version, cuda)
    assert "not-recognised" not in codes(answer)


@pytest.mark.parametrize(
    ("text", "num_ranks"),
    [
        ("comm 0x1 rank 0 nranks 8 cudaDev 0", 8),
        ("comm 0x1 rank 0 nRanks 32 nNodes 4 localRanks 8", 32),
        ("AllReduce: opCount 0 [nranks=6] stream 0x1", 6),
        ("Channel 00/02 :    0   1   2   3", 4),
        ("Ring 00 :    0   2   1", 3),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/IPC", None),
    ],
)
def test_num_ranks(text, num_ranks):
    assert read(LINE + text + "\n")["num_ranks"] == num_ranks


def test_a_wrapped_ring_is_counted_whole_and_a_number_after_it_is_not():
    ring = "Channel 00/02 :    0   1   2   3   4   5   6   7"
    assert read(LINE + ring[:38] + "\n" + ring[38:] + "\n")["num_ranks"] == 8
    assert read(LINE + ring + "\n42\n")["num_ranks"] == 8


def test_long_lists_wrapped_over_many_lines():
    devices = [f"mlx5_{number}:1/IB" for number in range(16)]
    shown = " ".join(f"[{number}]{name}" for number, name in enumerate(devices))
    line = f"{LINE}NET/IB : Using {shown} [RO]; OOB ib0:10.0.0.1<0>"
    for width in (60, 80, 101):
        answer = read("\n".join(line[at : at + width] for at in range(0, len(line), width)))
        assert answer["ib_devices"] == devices
        assert answer["interfaces"] == ["ib0"]
    ring = LINE + "Channel 00/02 :" + "".join(f"{rank:4d}" for rank in range(128))
    assert read("\n".join(ring[at : at + 79] for at in range(0, len(ring), 79)))["num_ranks"] == 128


def test_a_foreign_line_inside_a_wrapped_record():
    text = LINE + "Channel 00/0 : 0[0] -> 8[0] [send] via\n 50%|##  | 1/2\nNET/IB/0/GDRDMA\n"
    assert read(text)["transports"] == {"NET/IB/0/GDRDMA": 1}


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        (["NET : Using interface eno1:10.0.0.1<0>", "NET : Using interface ib0"], ["eno1", "ib0"]),
        (["NET/IB : Using interface ib0 for sideband communication"], ["ib0"]),
        (["Bootstrap : Using [0]bond0:10.0.0.1<0> [1]eth1.100:fd00::1%eth1<0>"], ["bond0", "eth1.100"]),
        (
            ["Bootstrap: Using eth0:10.0.0.1<0>", "NET/Socket : Using [0]eth0:10.0.0.1<0> [1]wg0:10.9.0.1<0>"],
            ["eth0", "wg0"],
        ),
        (["NET/IB : No device found.", "NET/IB : Using [RO]; OOB eth9:10.0.0.1<0>"], ["eth9"]),
        (["NCCL_SOCKET_IFNAME set by environment to eth7."], []),
    ],
)
def test_interfaces(lines, names):
    assert read("".join(LINE + line + "\n" for line in lines))["interfaces"] == names


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("NET/IB: [0] mlx5_1:1/IB ", ["mlx5_1:1/IB"]),
        (
            "NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]bnxt_re0:2/RoCE ; OOB e0:10.0.0.1<0>",
            ["mlx5_0:1/IB/SHARP", "bnxt_re0:2/RoCE"],
        ),
        (
            "NET/IB : Using [0]={[0] mlx5_0:1/IB, [1] mlx5_1:1/IB} [RO]; OOB e0:10.0.0.1<0>",
            ["mlx5_0:1/IB", "mlx5_1:1/IB"],
        ),
        ("NET/IB: [0] mlx5_0:uverbs0:1/IB provider=Mlx5 speed=200000", []),
        ("NET/IB : Using [RO]; OOB e0:10.0.0.1<0>", []),
    ],
)
def test_ib_devices(line, names):
    assert read(LINE + line + "\n")["ib_devices"] == names


def test_mixed_link_layers_are_judged_in_one_list_only():
    ib, roce = "NET/IB : Using [0]mlx5_0:1/IB ; OOB", "NET/IB : Using [0]mlx5_0:1/RoCE ; OOB"
    assert "mixed-link-layers" not in codes(read(f"{LINE}{ib}\n{LINE}{roce}\n"))
    both = found(LINE + "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_7:1/RoCE [2]mlx5_1:1/IB ; OOB\n", "mixed-link-layers")
    assert "NCCL_IB_HCA=^mlx5_7:1" in both["advice"][0]


WARN = "n1:10:20 [0] misc/file.cc:42 NCCL WARN "
ERRORS = [
    ("NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129", "ib-retry-exceeded"),
    (
        "NET/IB : Got completion from peer 10.0.0.5<3> with error 12, opcode 0, len 0, vendor err 129 (Recv)",
        "ib-retry-exceeded",
    ),
    (
        "NET/IB: Got completion from peer 10.0.0.5<3> with status=12 opcode=129 len=0 vendor err 129 (Send)",
        "ib-retry-exceeded",
    ),
    (
        "NET/IB: Got completion from peer a<3> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=X(129) vendor_err=129",
        "ib-retry-exceeded",
    ),
    (
        "NET/IB: Got completion from peer a<3> with status=4 opcode=12 len=0 vendor err 81 (Send) hca mlx5_0",
        "ib-local-protection",
    ),
    ("Call to ibv_modify_qp failed with error Connection timed out", "roce-gid-or-route"),
    (
        "Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1, curr state INIT",
        "roce-gid-or-route",
    ),
    ("Call to ibv_reg_mr failed with error Cannot allocate memory", "memlock-too-low"),
    ("Call to ibv_exp_reg_mr failed with error Cannot allocate memory", "memlock-too-low"),
    ("Call to ibv_reg_dmabuf_mr failed with error Cannot allocate memory", "memlock-too-low"),
    ("Call to posix_fallocate failed : No space left on device", "shm-too-small"),
    ("Error while creating shared memory segment nccl-shm-send-1 (size 9637888)", "shm-too-small"),
    ("Error: failed to extend /dev/shm/nccl-a1 to 9637892 bytes, error: No space left on device (28)", "shm-too-small"),
    ("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1a000", "duplicate-gpu"),
    ("Bootstrap : no socket interface found", "interface-not-found"),
    ("NET/IB : No IP interface found.", "interface-not-found"),
    (
        "ncclSocketInit: connecting to address  with family 1 is neither AF_INET(2) nor AF_INET6(10)",
        "interface-not-found",
    ),
    ("Call to socket failed : Address family not supported by protocol", "interface-not-found"),
    ("Connect to 10.0.0.5<4711> failed : Connection refused", "connection-refused"),
    (
        "socketPollConnect: connect to 10.0.0.5<1> returned Connection refused, exceeded error retry count",
        "connection-refused",
    ),
    (
        "socketPollConnect: Connect to 10.0.0.5<1> returned 110(Connection timed out) errno 115(in progress)",
        "connection-timeout",
    ),
    ("socketPollConnect: exceeded timeouts (20000)", "connection-timeout"),
    (
        "socketPollConnect: Connect to 10.0.0.5<1> returned 113(No route to host) errno 111(Connection refused)",
        "peer-unreachable",
    ),
    ("socketPollConnect: Connect to 10.0.0.5<1> returned 113 errno 110", "peer-unreachable"),
    ("socketStartConnect: Connect to 10.0.0.5<1> failed : Software caused connection abort", "peer-unreachable"),
    ("socketProgress: Connection closed by remote peer n2<5000>", "peer-closed"),
    ("NET/Socket : message truncated : receiving 1048576 bytes instead of 65536", "size-mismatch"),
    ("NET/IB : req 0/1 tag 7 peer 10.0.0.5<1> collective mismatch error, local size 8 remote size 16", "size-mismatch"),
    ("Mismatched NCCL version detected : rank 1 version 21903 rank 0 version 21805", "mixed-versions"),
    ("NET/OFI OFI fi_getinfo() call failed: No data available", "net-plugin-failed"),
    ("Failed to initialize any NET plugin", "net-plugin-failed"),
    ("Error: network AWS Libfabric not found.", "net-plugin-failed"),
    (
        "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 1 'invalid argument'.",
        "nvls-fabric-manager",
    ),
    ("failed to open CUDA IPC handle : 30 unknown error", "peer-access-unsupported"),
    ("Cuda failure 217 'peer access is not supported between these two devices'", "peer-access-unsupported"),
]


@pytest.mark.parametrize(("message", "code"), ERRORS, ids=range(len(ERRORS)))
def test_errors(message, code):
    answer = read(LINE + "Using network IB\n" + WARN + message + "\n")
    assert codes(answer) == [code]
    item = answer["findings"][0]
    assert (item["severity"], item["evidence"]) == ("error", WARN + message)
    assert item["advice"]
    assert (answer["num_warnings"], answer["first_warning"]) == (1, WARN + message)


@pytest.mark.parametrize(("message", "code"), ERRORS, ids=range(len(ERRORS)))
def test_errors_in_an_exception_of_pytorch(message, code):
    text = (
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error "
        "(run with NCCL_DEBUG=WARN for details), NCCL version 2.20.5\n[rank3]: Last error:\n[rank3]: " + message + "\n"
    )
    assert codes(read(text)) == [code]


@pytest.mark.parametrize(("message", "code"), ERRORS, ids=range(len(ERRORS)))
@pytest.mark.parametrize("prefix", ["", "[1,0]<stderr>:"])
def test_errors_wrapped_anywhere(message, code, prefix):
    record = WARN + message
    for at in range(len(WARN), len(record), 7):
        cut = record[:at] + "\n" + prefix + record[at:].lstrip() + "\n"
        assert code in codes(read(prefix + cut)), cut


@pytest.mark.parametrize(
    "line",
    [
        "NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file: No such file or directory",
        "PROFILER/Plugin: Could not find: libnccl-profiler.so.",
        "NET/Plugin: Failed to find ncclNetPlugin_v8 symbol.",
        "Failed to open libibverbs.so[.1]",
        "NET/IB : No device found.",
        "NET/IB : Using [RO]; OOB ens3:10.0.0.1<0>",
        "[Service thread] Connection closed by localRank 0",
        "NCCL_DEBUG set by environment to WARN.",
        "transport/net.cc:784 -> 2",
    ],
)
def test_benign_lines(line):
    assert codes(read(LINE + line + "\n")) == []


@pytest.mark.parametrize(
    "line",
    [
        "[W socket.cpp:426] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97 - Address family "
        "not supported by protocol).",
        "wandb: Connection refused, retrying",
        "requests.exceptions.ConnectionError: No route to host",
        "OSError: [Errno 28] No space left on device: '/data/checkpoint'",
    ],
)
def test_other_programs_errors_are_not_nccls(line):
    assert codes(read(LINE + "Using network IB\n" + line + "\n")) == []
    assert codes(read(WARN + "something unknown\n" + line + "\n")) == []


def test_retries_that_succeed_are_no_error():
    retry = LINE + "Call to connect returned Connection refused, retrying\n"
    assert codes(read(retry * 3)) == ["connection-refused"]
    assert codes(read(retry * 3 + LINE + "Connected all rings\n")) == []
    assert codes(read(LINE + "Connected all rings\n" + retry)) == ["connection-refused"]
    failed = WARN + "Connect to 10.0.0.5<1> failed : Connection refused\n"
    answer = read(retry * 3 + failed + LINE + "Connected all rings\n")
    assert codes(answer) == ["connection-refused"]
    assert answer["findings"][0]["evidence"] == failed.strip()


def test_of_several_warnings_the_first_is_the_cause():
    answer = read(
        WARN
        + "NET/IB : Got completion with error 12, opcode 1, len 0, vendor err 129\n"
        + WARN
        + "socketProgress: Connection closed by remote peer n2<5>\n"
    )
    assert codes(answer) == ["ib-retry-exceeded", "peer-closed"]
    cause, follower = answer["findings"]
    assert "follows line 1" in follower["message"]
    assert "line 1" not in cause["message"]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *((name, True) for name in ("veth1a2b3c", "docker0", "br-0a1b2c3d4e5f", "virbr0", "cni0", "lo", "ip6tnl0")),
        *((name, False) for name in ("br0", "bond0", "lo1", "eth0", "brp1", "wg0", "ens1f0")),
    ],
)
def test_wrong_interfaces(name, wrong):
    answer = read(LINE + f"NET/Socket : Using [0]{name}:10.1.2.3<0>\n")
    assert ("wrong-interface" in codes(answer)) is wrong
    assert answer["interfaces"] == [name]


def test_link_local_addresses():
    assert "wrong-interface" in codes(read(LINE + "Bootstrap : Using eth0:fe80::1:2%eth0<0>\n"))
    assert "wrong-interface" in codes(read(WARN + "Connect to fe80::1:2%eth0<4711> failed : Connection timed out\n"))
    assert "wrong-interface" not in codes(read(LINE + "Bootstrap : Using eth0:fd00::1:2<0>\n"))


def test_two_versions_in_a_file():
    text = "NCCL version 2.19.3+cuda12.3\nNCCL version 2.20.5+cuda12.4\n"
    assert codes(read(text)) == ["mixed-versions"]
    assert codes(read("NCCL version 2.19.3+cuda12.3\nRuntimeError: NCCL error, NCCL version 2.19.3\n")) == []
    assert codes(read("NCCL version 2.10.3+cuda11.3\nRuntimeError: NCCL error, NCCL version 21.0.3\n")) == []


def test_hang_risk_needs_silence():
    p2p, rings = LINE + "Channel 00/0 : 0[0] -> 1[1] via P2P/IPC\n", LINE + "Connected all rings\n"
    assert codes(read(p2p + rings)) == ["p2p-hang-risk"]
    assert codes(read(p2p)) == []
    assert codes(read(p2p + rings + WARN + "anything\n")) == []
    benign = "n1:10:20 [1] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]\n"
    assert codes(read(benign + p2p + rings)) == ["p2p-hang-risk"]
    assert read(benign)["first_warning"] is None
    assert codes(read(rings + LINE + "Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct\n")) == []


def test_advice_fits_the_version():
    gid = WARN + "Call to ibv_modify_qp failed with error Invalid argument\n"
    old, new = "NCCL version 2.18.1+cuda12.1\n", "NCCL version 2.25.1+cuda12.8\n"
    assert found(old + gid, "roce-gid-or-route")["advice"][0].startswith("Set NCCL_IB_GID_INDEX")
    assert found(new + gid, "roce-gid-or-route")["advice"][0].startswith("Unset NCCL_IB_GID_INDEX")
    closed = WARN + "socketProgress: Connection closed by remote peer a<1>\n"
    assert "this one does not" in found(new + closed, "peer-closed")["advice"][1]
    assert "this one does not" not in found("NCCL version 2.28.3+cuda13.0\n" + closed, "peer-closed")["advice"][1]
    retry = WARN + "NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129\n"
    assert "(18 here)" in found(old + retry, "ib-retry-exceeded")["advice"][1]


def test_settings_of_the_run_are_in_the_advice():
    text = LINE + "NCCL_IB_DISABLE set by environment to 1.\n" + LINE + "Using network Socket\n"
    assert read(text)["environment"] == {"NCCL_IB_DISABLE": "1"}
    assert found(text, "socket-fallback")["advice"][0].startswith("NCCL_IB_DISABLE=1 is set")
    assert found(text, "socket-fallback")["severity"] == "info"


def test_rccl_kernel_command_line():
    text = (
        'h:1:2 [0] /build/rccl/src/init.cpp:122 NCCL WARN Missing "iommu=pt" from kernel command line which can hang!\n'
    )
    assert codes(read(text)) == ["iommu-not-passthrough"]
    assert codes(read(text.replace("iommu=pt", "HSA_FORCE_FINE_GRAIN_PCIE=1"))) == []


def test_nvls_only_in_its_own_file():
    assert codes(read("h:1:2 [0] transport/nvls.cc:158 NCCL WARN Cuda failure 1 'invalid argument'\n")) == [
        "nvls-fabric-manager"
    ]
    assert codes(read("h:1:2 [0] transport/p2p.cc:158 NCCL WARN Cuda failure 1 'invalid argument'\n")) == []


def test_the_watchdog_in_the_same_file_is_read_too():
    text = LINE + "Using network IB\n[rank1]:[E1119 03:27:40.2 ProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught "
    text += "collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, "
    assert "collective-timeout" in codes(read(text + "Timeout(ms)=600000) ran for 600043 milliseconds before\n"))


def test_not_recognised():
    assert codes(read("hello\nConnection refused\n")) == ["not-recognised"]
    assert codes(read("")) == ["not-recognised"]


def test_files_are_read_like_lines(tmp_path):
    path = tmp_path / "nccl.log"
    path.write_text("".join(LINE + line + "\n" for line in HEALTHY) * 2500)
    answer = read_file("nccl", path)
    assert answer["transports"] == {"P2P/CUMEM/read": 2500, "NET/IB/1/GDRDMA": 5000}
    assert {name: answer[name] for name in FACTS if name != "transports"} == {
        name: FACTS[name] for name in FACTS if name != "transports"
    }

"""Reading what a host tells: nvidia-smi's XML, PCI configuration, control groups, interfaces, and this machine."""

from __future__ import annotations

import json
import struct
import subprocess
from pathlib import Path

import pytest

from raybench.doctor.live import gpu as module
from raybench.doctor.live.facts import Interface
from raybench.doctor.live.gpu import read_smi, run_smi
from raybench.doctor.live.host import has_open_driver, limits, loaded_modules, rdma_ports
from raybench.doctor.live.interfaces import choices, gloo_choice, nccl_choice
from raybench.doctor.live.node import examine
from raybench.doctor.live.pci import acs_bridges, acs_control, iommu_type, num_nvidia_gpus
from tests.doctor.live.made import interface

A10 = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
	<driver_version>570.124.06</driver_version>
	<cuda_version>12.8</cuda_version>
	<attached_gpus>2</attached_gpus>
	<gpu id="00000000:00:04.0">
		<product_name>NVIDIA A10</product_name>
		<pci><pci_gpu_link_info>
			<pcie_gen><max_link_gen>4</max_link_gen><current_link_gen>1</current_link_gen></pcie_gen>
			<link_widths><max_link_width>16x</max_link_width><current_link_width>8x</current_link_width></link_widths>
		</pci_gpu_link_info></pci>
		<clocks_event_reasons>
			<clocks_event_reason_gpu_idle>Not Active</clocks_event_reason_gpu_idle>
			<clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
			<clocks_event_reason_hw_slowdown>Active</clocks_event_reason_hw_slowdown>
			<clocks_event_reason_hw_thermal_slowdown>Active</clocks_event_reason_hw_thermal_slowdown>
		</clocks_event_reasons>
		<fb_memory_usage>
			<total>23028 MiB</total><reserved>512 MiB</reserved><used>9012 MiB</used><free>13504 MiB</free>
		</fb_memory_usage>
		<ecc_errors>
			<volatile>
				<sram_correctable>0</sram_correctable><sram_uncorrectable_parity>1</sram_uncorrectable_parity>
				<sram_uncorrectable_secded>0</sram_uncorrectable_secded>
				<dram_correctable>7</dram_correctable><dram_uncorrectable>2</dram_uncorrectable>
			</volatile>
			<aggregate><dram_uncorrectable>9</dram_uncorrectable></aggregate>
		</ecc_errors>
		<remapped_rows><remapped_row_pending>Yes</remapped_row_pending></remapped_rows>
		<temperature><gpu_temp>91 C</gpu_temp></temperature>
		<processes><process_info>
			<pid>4711</pid><type>C</type><process_name>python</process_name><used_memory>9000 MiB</used_memory>
		</process_info></processes>
	</gpu>
	<gpu id="00000000:00:05.0">
		<product_name>NVIDIA A10</product_name>
		<clocks_throttle_reasons>
			<clocks_throttle_reason_hw_power_brake_slowdown>Active</clocks_throttle_reason_hw_power_brake_slowdown>
		</clocks_throttle_reasons>
		<fb_memory_usage><total>23028 MiB</total><used>[N/A]</used></fb_memory_usage>
		<ecc_errors><volatile><double_bit><total>4</total></double_bit></volatile></ecc_errors>
		<processes/>
	</gpu>
</nvidia_smi_log>
"""


def test_what_nvidia_smi_tells():
    (first, second), versions = read_smi(A10)
    assert versions == {"driver": "570.124.06", "driver_cuda": "12.8"}
    assert (first["name"], first["bus_id"], first["memory_bytes"]) == ("NVIDIA A10", "00000000:00:04.0", 23028 << 20)
    assert (first["used_bytes"], first["processes"]) == (9012 << 20, ["pid 4711 python 9000 MiB"])
    assert (first["uncorrected_errors"], first["pending_repair"]) == (3, True)
    assert first["slowdowns"] == ["hw_slowdown", "hw_thermal_slowdown"], "a power cap under load is no fault"
    assert (first["link_width"], first["max_link_width"], first["temperature_c"]) == (8, 16, 91)
    assert (second["index"], second["used_bytes"], second["uncorrected_errors"]) == (1, None, 4)
    assert second["slowdowns"] == ["hw_power_brake_slowdown"]
    assert (second["link_width"], second["pending_repair"], second["processes"]) == (None, False, [])


@pytest.mark.parametrize("text", [None, "", "No devices were found", A10[: len(A10) // 2]])
def test_a_driver_that_does_not_answer_has_no_gpus(text: str | None):
    assert read_smi(text) == ([], {"driver": None, "driver_cuda": None})


def test_a_hanging_nvidia_smi_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nexec sleep 30\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(module, "TIMEOUT_S", 0.2)
    assert run_smi("-q", "-x") is None
    fake.write_text("#!/bin/sh\necho $*\n")
    monkeypatch.setattr(module, "TIMEOUT_S", 20.0)
    assert run_smi("topo", "-m") == "topo -m\n"
    fake.write_text("#!/bin/sh\nexit 9\n")
    assert run_smi("-q", "-x") is None


def config(*capabilities: tuple[int, int]) -> bytes:
    """PCI configuration space whose extended capabilities are (id, control), from 0x100 on, 32 bytes apart."""
    space = bytearray(4096)
    for number, (kind, control) in enumerate(capabilities):
        at = 0x100 + 32 * number
        following = at + 32 if number + 1 < len(capabilities) else 0
        struct.pack_into("<I", space, at, kind | 1 << 16 | following << 20)
        struct.pack_into("<H", space, at + 6, control)
    return bytes(space)


def device(root: Path, name: str, kind: str, vendor: str = "0x8086", space: bytes = b"") -> Path:
    folder = root / name
    folder.mkdir()
    (folder / "class").write_text(f"{kind}\n")
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "config").write_bytes(space)
    return folder


def test_acs_is_read_from_configuration_space(tmp_path: Path):
    assert acs_control(config((1, 0xFFFF), (0x0D, 0x1D))) == 0x1D
    assert acs_control(config((1, 0xFFFF))) is None
    assert acs_control(config()) is None
    circle = bytearray(config((1, 0)))
    struct.pack_into("<I", circle, 0x100, 1 | 0x100 << 20)
    assert acs_control(bytes(circle)) is None, "a broken chain ends"
    device(tmp_path, "0000:00:01.0", "0x060400", space=config((1, 0), (0x0D, 0x1D)))
    device(tmp_path, "0000:00:02.0", "0x060400", space=config((0x0D, 0x01)))
    device(tmp_path, "0000:01:00.0", "0x030200", "0x10de", config((0x0D, 0xFF)))
    assert acs_bridges(tmp_path) == ["0000:00:01.0"], "source validation alone sends nothing through the CPU"
    device(tmp_path, "0000:00:03.0", "0x060400", space=bytes(64))
    assert acs_bridges(tmp_path) is None, "without root there are 64 bytes"


def test_gpus_on_the_bus_and_their_iommu(tmp_path: Path):
    (device(tmp_path, "0000:00:04.0", "0x030200", "0x10de") / "iommu_group").mkdir()
    (tmp_path / "0000:00:04.0" / "iommu_group" / "type").write_text("DMA-FQ\n")
    device(tmp_path, "0000:00:05.0", "0x030000", "0x10de")
    device(tmp_path, "0000:00:06.0", "0x040300", "0x10de")
    device(tmp_path, "0000:00:07.0", "0x030000", "0x1002")
    assert num_nvidia_gpus(tmp_path) == 2
    assert num_nvidia_gpus(tmp_path / "nowhere") == 0
    assert iommu_type("00000000:00:04.0", tmp_path) == "DMA-FQ"
    assert iommu_type("00000000:00:05.0", tmp_path) is None


def tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


def test_limits_of_control_groups_of_both_versions(tmp_path: Path):
    tree(
        tmp_path,
        {
            "pod/memory.max": "8589934592",
            "pod/memory.current": "4000",
            "pod/job/memory.max": "max",
            "pod/cpu.max": "400000 100000",
            "pod/job/cpu.max": "max 100000",
            "pod/job/pids.max": "1000",
            "pod/job/pids.current": "17",
        },
    )
    found = limits(tmp_path, "0::/pod/job\n")
    assert (found["memory_bytes"], found["memory_used_bytes"], found["cpus"]) == (8589934592, 4000, 4.0)
    assert (found["pids"], found["pids_used"]) == (1000, 17)
    old = tmp_path / "old"
    tree(
        old,
        {
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/docker/x/memory.limit_in_bytes": "1073741824",
            "memory/docker/x/memory.usage_in_bytes": "5",
            "cpu/docker/x/cpu.cfs_quota_us": "150000",
            "cpu/docker/x/cpu.cfs_period_us": "100000",
            "pids/pids.max": "max",
        },
    )
    found = limits(old, "4:memory:/docker/x\n2:cpu,cpuacct:/docker/x\n1:pids:/\n0::/\n")
    assert (found["memory_bytes"], found["memory_used_bytes"], found["cpus"]) == (1073741824, 5, 1.5)
    assert found["pids"] is None
    inside = limits(old / "memory" / "docker" / "x", "0::/not/here\n")
    assert inside["memory_bytes"] == 1073741824, "a container sees its own group as the root"


def test_modules_rdma_and_driver(tmp_path: Path):
    tree(
        tmp_path,
        {
            "modules": "nvidia_peermem 16384 0 - Live 0x0\ngdrdrv 24576 0 - Live 0x0\nnvidia_peermem_x 1 0 - Live 0x0",
            "version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build",
            "ib/mlx5_0/ports/1/state": "4: ACTIVE",
            "ib/mlx5_0/ports/1/link_layer": "Ethernet",
            "ib/mlx5_0/ports/1/rate": "100 Gb/sec (2X NDR)",
            "ib/mlx5_1/ports/1/state": "1: DOWN",
        },
    )
    assert loaded_modules(tmp_path / "modules") == ["nvidia_peermem", "gdrdrv"]
    assert has_open_driver(tmp_path / "version")
    assert not has_open_driver(tmp_path / "nowhere")
    first, second = rdma_ports(tmp_path / "ib")
    assert first == {
        "name": "mlx5_0:1",
        "is_active": True,
        "link_layer": "Ethernet",
        "rate": "100 Gb/sec (2X NDR)",
    }
    assert (second["name"], second["is_active"]) == ("mlx5_1:1", False)


KNOWN = [
    interface("lo", "127.0.0.1"),
    interface("eth0", "10.0.0.1"),
    interface("eth1", "10.1.0.1"),
    interface("eth10", "10.2.0.1"),
    interface("eth2", None),
    interface("eth3", "10.3.0.1", is_up=False),
]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("eth", ["eth0", "eth1", "eth10"]),
        ("eth1", ["eth1", "eth10"]),
        ("=eth1", ["eth1"]),
        ("=eth1,eth0", ["eth0", "eth1"]),
        ("^lo,eth1", ["eth0"]),
        ("^=eth1", ["lo", "eth0", "eth10"]),
        ("ens", []),
        ("=eth", []),
        ("eth2,eth3", []),
    ],
)
def test_the_interfaces_that_nccl_takes(wanted: str, names: list[str]):
    assert [each["name"] for each in nccl_choice(wanted, KNOWN)] == names


def test_the_interfaces_that_gloo_takes():
    def names(found: tuple[list[Interface], list[str]]) -> tuple[list[str], list[str]]:
        return [each["name"] for each in found[0]], found[1]

    assert names(gloo_choice("eth1", KNOWN)) == (["eth1"], [])
    assert names(gloo_choice("eth1,eth9", KNOWN)) == (["eth1"], ["eth9"])
    chosen = choices({"GLOO_SOCKET_IFNAME": "eth1,eth9", "NCCL_SOCKET_IFNAME": "=eth0", "NCCL_DEBUG": "WARN"}, KNOWN)
    assert {variable: [each["name"] for each in found] for variable, found in chosen.items()} == {
        "GLOO_SOCKET_IFNAME": [],
        "NCCL_SOCKET_IFNAME": ["eth0"],
    }
    assert choices({}, KNOWN) == {}


def test_this_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("PASSWORD", "secret")
    found = examine("127.0.0.1")
    assert json.loads(json.dumps(found)) == found
    assert "secret" not in json.dumps(found)
    assert found["environment"]["NCCL_DEBUG"] == "WARN"
    assert found["ray_interface"] == "lo"
    assert found["shm_bytes"]
    shown = subprocess.run(
        ["df", "-B1", "--output=size", "/dev/shm"], capture_output=True, text=True, check=True
    ).stdout
    assert found["shm_bytes"] == int(shown.split()[-1])
    assert found["is_clock_synchronised"] in (True, False, None)
    assert (found["topology"] is None) == (not found["gpus"])

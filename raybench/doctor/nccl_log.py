"""What a log of NCCL's shows, as plain data: filled by `nccl`, judged by `nccl_findings`."""

from __future__ import annotations

from dataclasses import dataclass, field

from raybench.doctor.nccl_signs import Signs


@dataclass
class Log:
    """Everything a log tells, gathered line by line."""

    versions: dict[str, str] = field(default_factory=dict)  # version -> line
    cuda: str | None = None
    num_ranks: int = 0
    ring: int = 0
    whole_ring: int = 0
    network: str | None = None
    network_line: str | None = None
    net_name: str | None = None
    interfaces: dict[str, str] = field(default_factory=dict)  # name -> line
    link_local: str | None = None  # a line where an fe80:: address is in use
    ib_devices: dict[str, str] = field(default_factory=dict)
    mixed_layers: str | None = None
    transports: dict[str, int] = field(default_factory=dict)
    first_p2p: str | None = None
    rdma_line: str | None = None
    gdr_line: str | None = None
    gdr_off_line: str | None = None
    rings_connected: bool = False
    connected_at: int = 0
    num_records: int = 0
    num_warnings: int = 0
    first_warning: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    signs: Signs = field(default_factory=Signs)
    watchdog: list[str] = field(default_factory=list)
    num_mended: int = 0

    @property
    def gdrdma(self) -> bool | None:
        """GPUDirect RDMA in use; None where the log does not say."""
        if self.gdr_line:
            return True
        return False if self.rdma_line or self.gdr_off_line else None

    @property
    def empty(self) -> bool:
        """Nothing of NCCL's in it."""
        return not (self.num_records or self.versions or self.signs.found or self.transports or self.ring)

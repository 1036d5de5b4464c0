"""ZeRO stage 3 within a node, replicas across nodes: MiCS (Zhang et al., 2022), FSDP's hybrid sharding.

Parameters are gathered and gradients reduce-scattered over the fast links inside a node; across nodes goes one
all-reduce of each rank's part, once a step. The states are divided by the ranks of a node only.
"""

from __future__ import annotations

from raybench.parallel.sharded.zero3 import Zero3


class HybridSharded(Zero3):
    """The mesh says which ranks hold the parts of one copy (`shards`) and which the same part (`replicas`)."""

    def update(self) -> None:
        for bucket in self.buckets:
            bucket.wait()
            bucket.pending = self.context.mesh.replicas.all_reduce(bucket.shard_gradient, label=bucket.label)
        super().update()

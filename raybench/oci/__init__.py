"""`ray up` on Oracle Cloud: an external node provider for Ray's cluster launcher and autoscaler, on OCI's own SDK.

    provider:
      type: external
      module: raybench.oci.OCINodeProvider

It runs in two places: where `ray up` is typed (credentials from `~/.oci/config`) and in the head node's autoscaler
(credentials of the instance itself). Keys of `node_config` are those of the SDK's `LaunchInstanceDetails`.
"""

from raybench.oci.provider import OCINodeProvider

__all__ = ["OCINodeProvider"]

"""The same fixture as for clusters."""

from tests.clusters.conftest import bed

__all__ = ["bed"]

"""Checkpoints that any data-parallel layout can write and any other can read."""

from raybench.checkpoint.files import load, save

__all__ = ["load", "save"]

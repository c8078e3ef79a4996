"""Runs what a pass changed, before and after, on the same inputs."""

from .check import check_rewrite
from .checked import checked

__all__ = ["check_rewrite", "checked"]

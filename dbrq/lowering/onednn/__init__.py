"""The onednn backend: partitions of the graph executed by oneDNN itself, through its C API (docs/onednn.md)."""

from ...errors import OneDNNError
from .model import OneDNNModel

__all__ = ["OneDNNError", "OneDNNModel"]

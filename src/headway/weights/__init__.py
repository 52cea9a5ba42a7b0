"""Weight channels: versioned, atomic, checksummed safetensors files from learner to engines."""

from headway.weights.disk import DiskChannel
from headway.weights.layout import read_weights
from headway.weights.memory import MemoryChannel

__all__ = ["DiskChannel", "MemoryChannel", "read_weights"]

"""Weight channels: versioned, atomic, checksummed parameters from learner to engines."""

from headway.weights.collective import CollectiveChannel
from headway.weights.delta import DeltaChannel
from headway.weights.disk import DiskChannel
from headway.weights.layout import read_weights
from headway.weights.memory import MemoryChannel
from headway.weights.reader import WeightReader

__all__ = ["CollectiveChannel", "DeltaChannel", "DiskChannel", "MemoryChannel", "WeightReader", "read_weights"]

"""The engine's end of every channel."""

from collections.abc import Mapping

from torch import Tensor

from headway.types import NO_VERSION, WeightRef
from headway.weights.delta import SUFFIX, apply_delta
from headway.weights.layout import read_weights


class WeightReader:
    """Reads published versions for one engine and holds the last one, which a difference may start from."""

    def __init__(self) -> None:
        self._version, self._held = NO_VERSION, dict[str, Tensor]()

    def read(self, ref: WeightRef) -> Mapping[str, Tensor]:
        """The tensors of a version, whole and checked; write to none of them. Raises WeightsRefused, DeliveryFailed."""
        is_delta = ref.path.endswith(SUFFIX)
        tensors = apply_delta(ref, self._version, self._held) if is_delta else read_weights(ref)
        self._version, self._held = ref.version, tensors
        return tensors

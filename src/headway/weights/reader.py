"""The engine's end of every channel."""

from collections.abc import Mapping

from torch import Tensor

from headway.types import NO_VERSION, WeightRef
from headway.weights.delta import SUFFIX, apply_delta
from headway.weights.group import Receiver, is_meeting
from headway.weights.layout import read_weights


class WeightReader:
    """Reads published versions for one engine and holds the last one, which a difference may start from.

    `device`: where the engine computes; versions that come from GPU to GPU arrive there.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._version, self._held = NO_VERSION, dict[str, Tensor]()
        self._receiver = Receiver(device)

    def read(self, ref: WeightRef) -> Mapping[str, Tensor]:
        """The tensors of a version, whole and checked; write to none of them. Raises WeightsRefused, DeliveryFailed."""
        self._held = self._read(ref)
        self._version = ref.version
        return self._held

    def _read(self, ref: WeightRef) -> dict[str, Tensor]:
        if is_meeting(ref):
            return self._receiver.receive(ref)
        if ref.path.endswith(SUFFIX):
            return apply_delta(ref, self._version, self._held)
        return read_weights(ref)

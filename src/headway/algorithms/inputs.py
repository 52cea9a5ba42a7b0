"""Checks and cleaning at the door of every loss: shapes, presence, finiteness, and no gradient but the policy's."""

from collections.abc import Mapping

import torch
from torch import Tensor

MENDS = {
    "behavior_logprobs": "let the engine return the log-probs it sampled with, or choose asympo, spo or naive",
    "behavior_entropy": 'let the engine return entropies, or set behavior_entropy = "topk_lower_bound" or "learner"',
    "group": "pass which responses share a prompt, [B]",
    "proximal_logprobs": "choose a proximal source",
    "rollout_logprobs": "let the engine return the log-probs of the cached ids, or choose mc_no_ratio",
}


class NonFiniteInput(ValueError):
    """NaN or infinity at an active position of `key`: `index` is (row, position, …), `count` how many there are."""

    def __init__(self, method: str, key: str, index: tuple[int, ...], value: float, count: int) -> None:
        self.method, self.key, self.index, self.value, self.count = method, key, index, value, count
        super().__init__(
            f"{method}: {key} of sample {index[0]} is {value} at position {', '.join(map(str, index[1:]))} "
            f"({count} such values): drop the sample, or mask the position"
        )

    def at_row(self, row: int) -> "NonFiniteInput":
        """The same of another row: that of the batch a micro-batch was cut from."""
        return NonFiniteInput(self.method, self.key, (row, *self.index[1:]), self.value, self.count)


def require(name: str, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The tensors, none of them None. Raises ValueError naming the tensor, the method and the mend."""
    for key, tensor in tensors.items():
        if tensor is None:
            raise ValueError(f"{name} needs {key}, which is missing: {MENDS[key]}")
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}


def require_live(name: str, key: str, tensor: Tensor, shape: str) -> None:
    """Raises TypeError on no tensor, ValueError on other axes than those of `shape`, such as "[B, T]", or no floats."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: {key} is a {type(tensor).__name__}, expected a tensor {shape}")
    if tensor.ndim != len(shape.split(",")):
        raise ValueError(f"{name}: {key} has shape {tuple(tensor.shape)}, expected {shape}")
    if not tensor.is_floating_point():
        raise ValueError(f"{name}: {key} has dtype {tensor.dtype}, through which no gradient flows; pass floats")


def require_shapes(name: str, tensors: Mapping[str, Tensor], shape: torch.Size) -> None:
    """Raises ValueError naming the first tensor whose shape is another, TypeError naming what is no tensor."""
    for key, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: {key} is a {type(tensor).__name__}, expected a tensor of {tuple(shape)}")
        if tensor.shape != shape:
            raise ValueError(f"{name}: {key} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")


def as_bool(name: str, mask: Tensor) -> Tensor:
    """The mask as bool. Raises ValueError on one that holds anything but 0 and 1: a weight, perhaps."""
    if mask.dtype == torch.bool:
        return mask
    active = mask != 0
    if not bool((active == mask).all()):
        raise ValueError(f"{name}: mask holds {mask[active != mask][0].item()}, but a token trains (1) or does not (0)")
    return active


def clean(name: str, tensors: Mapping[str, Tensor], mask: Tensor, live: str) -> dict[str, Tensor]:
    """Each tensor with 0 at masked positions; all but `live` detached, so a masked NaN reaches no gradient.

    In at least float32: a half holds neither a token count nor the ratio of a broken sample.

    Args:
        mask: bool, `[B, T]` or broadcastable to the tensors.
        live: the one that keeps its gradient.

    Raises:
        NonFiniteInput: NaN or infinity at an active position, naming the tensor, the sample and the position.
    """
    cleaned = {
        key: torch.where(mask, tensor if key == live else tensor.detach(), 0.0).to(
            torch.promote_types(tensor.dtype, torch.float32)
        )
        for key, tensor in tensors.items()
    }
    # One look at the sum costs one synchronization; which tensor is at fault matters only once something is.
    total = sum((tensor.detach().sum() for tensor in cleaned.values()), start=torch.zeros((), device=mask.device))
    if not bool(torch.isfinite(total)):
        for key, tensor in cleaned.items():
            _refuse_non_finite(name, key, tensor.detach())
    return cleaned


def require_response_advantages(name: str, advantages: Tensor, mask: Tensor) -> None:
    """Raises ValueError naming the first response whose tokens carry different advantages."""
    if not mask.numel():
        return
    high = torch.where(mask, advantages, -torch.inf).amax(1)
    low = torch.where(mask, advantages, torch.inf).amin(1)
    mixed = mask.any(1) & (high != low)
    if bool(mixed.any()):
        row = int(mixed.nonzero()[0, 0])
        raise ValueError(
            f"{name} needs one advantage per response, but those of sample {row} differ between tokens: "
            "give every token of a response the same value, or choose a per-token method"
        )


def _refuse_non_finite(name: str, key: str, tensor: Tensor) -> None:
    bad = (~torch.isfinite(tensor)).nonzero()
    if len(bad):
        index = tuple(bad[0].tolist())
        raise NonFiniteInput(name, key, index, tensor[index].item(), len(bad))

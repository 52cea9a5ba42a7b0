"""Bounds on the behavior entropy from what an engine reported of its most likely tokens."""

from collections.abc import Sequence

import numpy as np
import torch

from headway.algorithms import topk_entropy_lower_bound
from headway.types import Floats, Response


def entropy_bounds(responses: Sequence[Response]) -> list[Floats | None]:
    """`topk_entropy_lower_bound` of every token, `[T]` a response; None where the engine reported too little.

    Tool tokens get a number that means nothing; their mask is False.
    """
    told = [_tells(response) for response in responses]
    if not any(told):
        return [None] * len(responses)
    some = [response for response, tells in zip(responses, told, strict=True) if tells]

    def joined(arrays: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays))

    # All responses at once: a call for each would cost more than the bounds do.
    bounds = topk_entropy_lower_bound(
        joined([np.asarray(r.side.top_logprobs) for r in some]),
        joined([np.asarray(r.behavior_logprobs) for r in some]),
        joined([(np.asarray(r.side.top_ids) == r.token_ids[:, None]).any(1) for r in some]),
    )
    parts = iter(bounds.float().split([len(r.token_ids) for r in some]))
    return [next(parts).numpy() if tells else None for tells in told]


def _tells(response: Response) -> bool:
    side = response.side
    return all(part is not None for part in (side.top_ids, side.top_logprobs, response.behavior_logprobs))

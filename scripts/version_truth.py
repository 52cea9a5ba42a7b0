"""What plain `transformers` says of a batch's tokens under the very parameters that sampled them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from headway.engine.rounding import Rounding, round_weights
from headway.types import Batch

Columns = dict[str, np.ndarray]
"""By name, one number for every token that trains."""


def gather(name: str, batch: Batch) -> np.ndarray:
    """Of all tokens that train."""
    return np.concatenate([getattr(r, name)[r.mask] for r in batch.responses])


class Truth:
    """Parameters of the versions in use, and what plain `transformers` says of tokens under them."""

    def __init__(self, model: Any, temperature: float, rounding: Rounding) -> None:
        self._model, self._temperature = model.eval(), temperature
        self._rounding: Rounding = rounding
        self._kept: dict[int, dict[str, torch.Tensor]] = {}

    def learn(self, version: int, parameters: Mapping[str, torch.Tensor], *, oldest: int) -> None:
        self._kept = {v: kept for v, kept in self._kept.items() if v >= oldest}
        self._kept[version] = {name: tensor.detach().clone() for name, tensor in parameters.items()}

    def columns(self, batch: Batch) -> Columns:
        """log πθ, and log π(θ_v) and log π(rounded θ_v) with v the version that sampled each token."""
        versions = gather("versions", batch)
        exact, rounded = np.zeros(len(versions), np.float32), np.zeros(len(versions), np.float32)
        for version in np.unique(versions):
            kept = self._kept[int(version)]
            exact = np.where(versions == version, self._logprobs(kept, batch), exact)
            served = round_weights(kept, self._rounding)
            rounded = np.where(versions == version, self._logprobs(served, batch), rounded)
        current = self._logprobs(self._kept[batch.policy_version], batch)
        return {"true_current": current, "true_exact": exact, "true_rounded": rounded}

    @torch.no_grad()
    def _logprobs(self, parameters: Mapping[str, torch.Tensor], batch: Batch) -> np.ndarray:
        """One padded forward pass; what stands behind a token cannot reach it."""
        self._model.load_state_dict(parameters, strict=False)
        self._model.tie_weights()
        prompts = [group.prompt.token_ids for group in batch.groups for _ in group.responses]
        rows = [np.concatenate([p, r.token_ids]) for p, r in zip(prompts, batch.responses, strict=True)]
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for at, row in enumerate(rows):
            ids[at, : len(row)] = torch.from_numpy(row)
        every = torch.log_softmax(self._model(ids).logits[:, :-1] / self._temperature, -1)
        chosen = every.gather(2, ids[:, 1:, None])[..., 0].numpy()
        parts = zip(chosen, prompts, batch.responses, strict=True)
        return np.concatenate([row[len(p) - 1 :][: len(r.mask)][r.mask] for row, p, r in parts])

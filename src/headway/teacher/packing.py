"""Several responses to one prompt in one row: the prompt is computed once, and no response sees another."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.types import Ints


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of a prompt and the responses to it, padded on the right to the widest (S).

    Example: prompt `[5, 6]` with responses `[7, 8]` and `[9]` is `input_ids=[[5, 6, 7, 8, 9]]` at positions
    `[[0, 1, 2, 3, 2]]`; the 9 attends to 5, 6 and itself.
    """

    input_ids: Tensor
    """`[B, S]` int64."""
    position_ids: Tensor
    """`[B, S]`, as if each response stood alone behind its prompt."""
    attention: Tensor
    """`[B, 1, S, S]` bool, whether a token sees another."""
    predicting: Tensor
    """`[N, 2]`, (row, column) of the state that predicts each response token, request after request."""


def pack(rows: Sequence[tuple[Ints, Sequence[Ints]]]) -> Packed:
    """Lay out (prompt, responses) rows; `predicting` goes row by row, response by response, token by token."""
    widths = [len(prompt) + sum(map(len, responses)) for prompt, responses in rows]
    width = max(widths)
    input_ids = np.zeros((len(rows), width), np.int64)
    positions = np.zeros((len(rows), width), np.int64)
    part = np.full((len(rows), width), -1, np.int64)  # which response a column belongs to; 0 is the prompt
    predicting: list[tuple[int, int]] = []
    for row, (prompt, responses) in enumerate(rows):
        start = len(prompt)
        input_ids[row, :start], positions[row, :start], part[row, :start] = prompt, np.arange(start), 0
        for number, response in enumerate(responses, 1):
            columns = slice(start, start + len(response))
            input_ids[row, columns] = response
            positions[row, columns] = len(prompt) + np.arange(len(response))
            part[row, columns] = number
            before = [len(prompt) - 1, *range(start, start + len(response) - 1)]
            predicting += [(row, column) for column in before]
            start += len(response)
    parts = torch.from_numpy(part)
    seen = (parts[:, None, :] == 0) | (parts[:, None, :] == parts[:, :, None])
    # Padding sees itself: a row of the mask without any True would be a softmax over nothing.
    attention = seen.tril() | torch.eye(width, dtype=torch.bool)
    return Packed(
        torch.from_numpy(input_ids), torch.from_numpy(positions), attention.unsqueeze(1), torch.tensor(predicting)
    )

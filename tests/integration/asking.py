"""Requests put to an engine, and what their answers are compared by."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from headway.engine.hosting import Client
from headway.types import Completion, Sampling

PROMPTS = [np.array(p, np.int32) for p in ([1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [3], [1, 2, 3], [11, 12])]
PLAIN = Sampling(max_tokens=12, seed=7, temperature=0.8)
LONG = replace(PLAIN, max_tokens=400)


async def ask_all(client: Client, prompts: Any, sampling: Sampling) -> list[Completion]:
    """One completion for each prompt; the seed of the i-th is `sampling.seed + i`."""
    asked = (client.generate(p, replace(sampling, seed=sampling.seed + i)) for i, p in enumerate(prompts))
    return await asyncio.gather(*asked)


async def under_way(client: Client) -> "asyncio.Task[Completion]":
    """A long request that has some of its tokens, but not all; where a short one takes long, it needs another try."""
    for _ in range(20):
        pending = asyncio.ensure_future(client.generate(PROMPTS[1], LONG))
        await client.generate(PROMPTS[2], Sampling(max_tokens=2, priority=-1))
        if not pending.done():
            return pending
    raise AssertionError("every long request ended before a short one")


async def interrupted(client: Client) -> Completion:
    """A long request interrupted under way."""
    for _ in range(20):
        pending = await under_way(client)
        await client.interrupt()
        if 0 < len((partial := await pending).token_ids) < LONG.max_tokens:
            return partial
    raise AssertionError("no interruption came while a request was under way")


def close_to(found: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=5e-5, rtol=0)


def chosen(full: torch.Tensor, ids: np.ndarray) -> torch.Tensor:
    return full.gather(-1, torch.from_numpy(ids)[:, None].long())[:, 0]


def same_tokens(found: Completion, expected: Completion) -> None:
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=5e-5)  # pyright: ignore[reportArgumentType, reportCallIssue]

"""Sums whose judge does what the answer says."""

import asyncio
import os
import time

from headway.envs import Turn
from headway.envs.addition import Addition
from headway.types import Prompt


class Obeying:
    """Blocks, dies, raises, goes on or waits, as it is told; anything else ends the episode with reward 1."""

    async def step(self, text: str) -> Turn:
        match text:
            case "block":
                time.sleep(3600)
            case "die":
                time.sleep(0.3)  # one that dies at once may take along the word that it had begun
                os._exit(7)
            case "raise":
                raise ValueError("not like this")
            case "go on":
                return Turn(0.25, observation="and?")
            case "wait":
                await asyncio.sleep(0.5)
            case "wait long":
                await asyncio.sleep(1.5)
        return Turn(1.0)


class Judged(Addition):
    def start(self, prompt: Prompt) -> Obeying:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Obeying()

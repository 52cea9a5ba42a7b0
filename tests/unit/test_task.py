"""What is looked at of a task's prompts before a run starts."""

from typing import Any

import numpy as np
import pytest

from headway.config import ConfigError
from headway.runtime.task import longest_prompt
from headway.types import Prompt, Split


class Prompts:
    """Lengths 0, 1, 2, …; those in `broken` cannot be made."""

    def __init__(self, size: int, broken: range) -> None:
        self._size, self._broken = size, broken

    def size(self, split: Split) -> int:
        return self._size

    def prompt(self, split: Split, index: int) -> Prompt:
        if index in self._broken:
            raise OSError("the file of questions is gone")
        return Prompt(index, split, np.zeros(index, np.int32))


def longest(size: int, broken: range = range(0)) -> int:
    environment: Any = Prompts(size, broken)
    return longest_prompt(environment, "train")


def test_prompts_are_sampled_over_the_whole_split():
    assert longest(10) == 9 and longest(6400) == 6300


def test_a_prompt_that_cannot_be_made_is_left_to_the_run():
    assert longest(10, broken=range(0, 10, 3)) == 8


def test_a_split_of_which_no_prompt_can_be_made_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match="no train prompt could be made: OSError: the file of questions is gone"):
        longest(10, broken=range(10))

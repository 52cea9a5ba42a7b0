"""A learner on several ranks is the learner on one: loss, gradient, parameters, metrics, for every method."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_program import CASES, train
from safetensors.torch import load_file

from headway.training.batching import micro_batches, shares

PROGRAM = Path(__file__).with_name("rank_program.py")


def train_on_ranks(num_ranks: int, num_steps: int, folder: Path, names: list[str]) -> None:
    """Start all ranks at once and wait for their end."""
    commands = [
        [sys.executable, PROGRAM, str(rank), str(num_ranks), str(num_steps), str(folder), *names]
        for rank in range(num_ranks)
    ]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    said = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * num_ranks, "\n".join(said)


def compare(num_ranks: int, num_steps: int, folder: Path, names: list[str]) -> None:
    train_on_ranks(num_ranks, num_steps, folder, names)
    torch.set_num_threads(1)
    for name in names:
        one, several = train(name, num_steps), load_file(folder / f"{name}-{num_ranks}.safetensors")
        assert one.keys() == several.keys()
        rtol, atol = 1e-6, 1e-9
        if name == "float32":  # rounding grows from step to step, so only the first is compared
            rtol, atol = 1e-4, 1e-6
            one = {key: value for key, value in one.items() if key.startswith("gradient")}
        for key, expected in one.items():
            torch.testing.assert_close(several[key], expected, rtol=rtol, atol=atol, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.timeout(600)
def test_two_ranks_equal_one_for_every_method(tmp_path: Path):
    compare(2, 2, tmp_path, list(CASES))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_any_number_of_ranks_equals_one_over_twenty_steps_for_every_method(num_ranks: int, tmp_path: Path):
    compare(num_ranks, 20, tmp_path, list(CASES))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    max_tokens=st.integers(1, 100),
    num_ranks=st.integers(1, 5),
    keep_split=st.booleans(),
)
def test_shares_hold_every_row_once_and_are_equally_many(
    lengths: list[int], max_tokens: int, num_ranks: int, keep_split: bool
):
    sizes = torch.tensor(lengths)
    dealt = shares(sizes, max_tokens=max_tokens, num_ranks=num_ranks, keep_split=keep_split)
    assert len({len(parts) for parts in dealt}) == 1
    assert sorted(row for parts in dealt for part in parts for row in part.tolist()) == list(range(len(lengths)))
    for part in (part for parts in dealt for part in parts if len(part) > 1):
        assert len(part) * max(lengths[row] for row in part.tolist()) <= max_tokens
    if keep_split or num_ranks == 1:
        whole = {tuple(part.tolist()) for part in micro_batches(sizes, max_tokens=max_tokens)}
        assert {tuple(part.tolist()) for parts in dealt for part in parts if len(part)} == whole

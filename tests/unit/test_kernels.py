"""The decoder's compiled attention: against plain numpy in float64, at every length, and what it must never hide."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engine import kernels


def case(seed: int, *, num: int, kv: int, group: int, dim: int, columns: int, spread: float = 1.0) -> dict[str, Any]:
    """Random arguments of `attend`: rows of unlike lengths in a cache with one row more; what lies beyond is NaN.

    Scores have the standard deviation `spread`.
    """
    rng = np.random.default_rng(seed)
    arrays = {
        "qk": rng.normal(size=(num, kv, group + 1, dim)) * ([[spread * dim**-0.5]] * group + [[1]]),
        "v": rng.normal(size=(num, kv, dim)),
        "keys": rng.normal(size=(num + 1, kv, dim, columns)),
        "values": rng.normal(size=(num + 1, kv, columns, dim)),
        "out": np.full((num, kv, group, dim), np.nan),
    }
    found: dict[str, Any] = {name: array.astype(np.float32) for name, array in arrays.items()}
    found["positions"] = rng.integers(0, columns, num)
    for row, at in enumerate(found["positions"]):
        found["keys"][row, :, :, at:] = np.nan
        found["values"][row, :, at:] = np.nan
    return found


def expected(c: dict[str, Any]) -> np.ndarray:
    out = np.empty(c["out"].shape)
    for row, head, query in np.ndindex(out.shape[:3]):
        at = c["positions"][row]
        keys = np.column_stack([c["keys"][row, head, :, :at], c["qk"][row, head, -1]]).astype(np.float64)
        values = np.vstack([c["values"][row, head, :at], c["v"][row, head]]).astype(np.float64)
        scores = c["qk"][row, head, query].astype(np.float64) @ keys
        weights = np.exp(scores - scores.max())
        out[row, head, query] = weights @ values / weights.sum()
    return out


def attend(c: dict[str, Any]) -> np.ndarray:
    kernels.attend(c["qk"], c["v"], c["positions"], c["keys"], c["values"], c["out"])
    return c["out"]


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num=st.integers(1, 5),
    kv=st.integers(1, 3),
    group=st.integers(1, 5),
    dim=st.sampled_from([4, 8, 24, 64]),
    columns=st.integers(1, 70),
)
def test_every_row_attends_to_its_own_columns_and_to_none_beyond(
    seed: int, num: int, kv: int, group: int, dim: int, columns: int
) -> None:
    c = case(seed, num=num, kv=kv, group=group, dim=dim, columns=columns)
    truth = expected(c)
    assert np.abs(attend(c) - truth).max() < 3e-6


def test_the_new_key_and_value_stay_in_the_cache_and_nothing_else_changes() -> None:
    c = case(0, num=3, kv=2, group=2, dim=8, columns=9)
    keys, values = c["keys"].copy(), c["values"].copy()
    for row, at in enumerate(c["positions"]):
        keys[row, :, :, at], values[row, :, at] = c["qk"][row, :, -1], c["v"][row]
    attend(c)
    np.testing.assert_array_equal(c["keys"], keys)
    np.testing.assert_array_equal(c["values"], values)


def test_scores_far_apart_neither_overflow_nor_lose_the_winner() -> None:
    c = case(1, num=4, kv=2, group=3, dim=16, columns=40, spread=1e4)
    truth = expected(c)
    assert np.abs(attend(c) - truth).max() < 1e-5


@pytest.mark.parametrize("column", [0, 1, 9, 18, 19])
@pytest.mark.parametrize(("name", "value"), [("keys", np.nan), ("values", np.nan), ("values", np.inf)])
def test_one_cached_value_that_is_not_finite_shows_in_every_query_of_its_row(
    name: str, column: int, value: float
) -> None:
    c = full(num=3, kv=1, group=3, dim=8, columns=21)
    where = (1, 0, 5, column) if name == "keys" else (1, 0, column, 5)
    c[name][where] = value
    out = attend(c)
    assert not np.isfinite(out[1, 0]).all(axis=1).any()
    assert np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize("name", ["qk", "v"])
def test_a_new_key_or_value_that_is_not_finite_shows_in_every_query_of_its_row(name: str) -> None:
    c = full(num=3, kv=1, group=3, dim=8, columns=21)
    c[name][(1, 0, 3, 5) if name == "qk" else (1, 0, 5)] = np.nan
    out = attend(c)
    assert not np.isfinite(out[1, 0]).all(axis=1).any()
    assert np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize("query", [0, 1, 2])
def test_a_query_that_is_not_finite_leaves_its_neighbors_alone(query: int) -> None:
    c = full(num=2, kv=1, group=3, dim=8, columns=21)
    c["qk"][1, 0, query, 3] = np.nan
    out = attend(c)
    assert np.isnan(out[1, 0, query]).all()
    assert np.isfinite(np.delete(out[1, 0], query, axis=0)).all() and np.isfinite(out[0]).all()


def full(**sizes: int) -> dict[str, Any]:
    """A case whose rows are as long as the cache, all of it finite."""
    c = case(2, **sizes)
    c["positions"][:] = sizes["columns"] - 1
    return {name: np.nan_to_num(array, nan=0.5) for name, array in c.items()}


def test_a_row_does_not_depend_on_its_neighbors_bit_for_bit() -> None:
    many = case(3, num=5, kv=2, group=2, dim=24, columns=50)
    one = {name: array[3:4].copy() for name, array in many.items()}
    np.testing.assert_array_equal(attend(many)[3:4], attend(one))


def test_far_below_the_largest_score_a_weight_is_nothing_at_all() -> None:
    c = full(num=1, kv=1, group=1, dim=4, columns=5)
    c["qk"][:] = 1
    c["keys"][:] = [[[[0, 100, 0, 11, 0]]]]  # the last is written over, by 1
    c["values"][0, 0, :, 0] = [3e38, 2, 3e38, 3e38, 3e38]
    assert attend(c)[0, 0, 0, 0] == 2


def test_machine_code_is_kept_and_harm_to_it_only_costs_time(tmp_path: Path) -> None:
    def num_kept(cache: Path) -> str:
        script = "from headway.engine import kernels; print(sum(kernels.attend.stats.cache_hits.values()))"
        command, environment = [sys.executable, "-c", script], os.environ | {"HEADWAY_CACHE": str(cache)}
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()

    assert [num_kept(tmp_path) for _ in range(2)] == ["0", "1"]
    for kind in ("*.nbc", "*.nbi"):
        (kept,) = tmp_path.rglob(kind)
        kept.write_bytes(kept.read_bytes()[:10])
        assert num_kept(tmp_path) == "0"
    (tmp_path / "a file").touch()
    assert num_kept(tmp_path / "a file") == "0"

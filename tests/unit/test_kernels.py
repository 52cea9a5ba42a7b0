"""The decoder's compiled attention: against plain numpy in float64, at every length, and what it must never hide."""

from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engine import kernels


def case(seed: int, *, num: int, kv: int, group: int, dim: int, columns: int, spread: float = 1.0) -> dict[str, Any]:
    """Random arguments of `attend`: rows of unlike lengths in a cache with one row more; what lies beyond is NaN."""
    rng = np.random.default_rng(seed)
    arrays = {
        "qk": rng.normal(0, spread, (num, kv, group + 1, dim)),
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
    assert np.abs(attend(c) - truth).max() < 5e-6


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


@pytest.mark.parametrize("name", ["qk", "v", "keys", "values"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_comes_out_not_finite_in_its_row_and_in_no_other(name: str, value: float) -> None:
    c = case(2, num=3, kv=1, group=2, dim=8, columns=21)
    c["positions"][:] = 20
    c = {k: np.nan_to_num(v, nan=0.5) if k in ("keys", "values") else v for k, v in c.items()}
    c[name][1] = value
    out = attend(c)
    assert not np.isfinite(out[1]).any()
    assert np.isfinite(out[[0, 2]]).all()


def test_a_row_does_not_depend_on_its_neighbors_bit_for_bit() -> None:
    many = case(3, num=5, kv=2, group=2, dim=24, columns=50)
    one = {name: array[3:4].copy() for name, array in many.items()}
    np.testing.assert_array_equal(attend(many)[3:4], attend(one))


def test_where_no_machine_code_can_be_kept_the_kernels_are_compiled_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(numba, "njit", refuse)
    assert kernels._compiled(expected) is expected

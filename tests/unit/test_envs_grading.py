import threading
import time

import pytest

from headway.envs.grading import final_answer, is_correct

RIGHT = [
    "The answer is \\boxed{1234}.",
    "First 7, then \\boxed{7}, no: \\boxed{1,234}",
    "\\boxed{\\$1,234.00}",
    "\\boxed{1234 \\text{ apples}}",
    "\\boxed{1234 dollars}",
    "\\boxed{x = 1234}",
    "\\boxed{\\frac{2468}{2}}",
    "\\boxed{2468/2}",
    "\\boxed{617 \\times 2}",
    "7 + 1227 = $1,234.",
    "so it is **1234**",
    "#### 1234",
]
WRONG = [
    "",
    "1234 or 5",
    "\\boxed{12345}",
    "\\boxed{-1234}",
    "1234, so \\boxed{}",
    "\\boxed{1234",  # never closed, and the policy knows that a box is what counts
    "\\boxed{one thousand}",
    "\\boxed{1234!}",
    "\\boxed{1234^1}",
]


@pytest.mark.parametrize("text", RIGHT)
def test_right_answers_are_recognized_however_they_are_dressed(text: str):
    assert is_correct(text, "1234")


@pytest.mark.parametrize("text", [t for t in WRONG if t != "\\boxed{1234"])
def test_wrong_answers_are_not(text: str):
    assert not is_correct(text, "1234")


def test_without_a_closed_box_the_last_number_counts_only_where_allowed():
    assert is_correct("\\boxed{1234", "1234")
    assert not is_correct("\\boxed{1234", "1234", "boxed")
    assert not is_correct("it is 1234", "1234", "boxed")


def test_negative_numbers_decimals_and_percents_compare_by_value():
    assert is_correct("\\boxed{-3}", "-3") and is_correct("it fell to -3", "-3")
    assert is_correct("\\boxed{0.5}", "1/2") and is_correct("\\boxed{\\frac{1}{2}}", "0.5")
    assert is_correct("\\boxed{40\\%}", "40") and is_correct("that is 40%", "40")


BOMBS = [
    "\\boxed{9^{9^{9^9}}}",
    "\\boxed{9**9**9**9}",
    "\\boxed{" + "9!" * 40 + "}",
    "\\boxed{100000000!}",
    "\\boxed{\\binom{100000000}{50000000}}",
    "\\boxed{\\sum_{i=1}^{10^{9}} i}",
    "\\boxed{" + "1+" * 50_000 + "1}",
    "\\boxed{" + "(" * 90 + "}",
    "\\boxed{" * 5000,
    "{" * 100_000,
    "9" * 100_000,
    "1/" * 50_000,
    "\\boxed{" + "\\frac" * 20 + "}",
    "\\boxed{" + "99*" * 30 + "9}",
    "\\boxed{1/0}",
    "\\boxed{" + "\\text{" * 15 + "}",
    "\\boxed{\\text{a" + " " * 90 + "}",
]


@pytest.mark.parametrize("text", BOMBS, ids=range(len(BOMBS)))
def test_nothing_a_policy_writes_can_hang_or_break_the_grader(text: str):
    started = time.perf_counter()
    assert not is_correct(text, "1234")
    assert time.perf_counter() - started < 2


def test_it_works_outside_the_main_thread():
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(is_correct("\\boxed{77/7}", "11")))
    thread.start()
    thread.join(timeout=30)
    assert results == [True]


def test_candidates_that_are_no_plain_number_are_not_parsed():
    assert final_answer("\\boxed{9^9}") is None
    assert final_answer("\\boxed{" + "1" * 101 + "}") is None
    assert final_answer("\\boxed{ $42$ }") == "42"

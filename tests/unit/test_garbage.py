"""Collections inside a long run leave out what lived before it, and nothing else."""

import gc
import weakref

import pytest

from headway.processes.garbage import startup_frozen


class Node:
    """Something that only a collection can free, once it holds itself."""

    def __init__(self) -> None:
        self.itself = self


def test_what_lived_before_is_not_searched_within_and_is_afterwards() -> None:
    node = Node()
    before = weakref.ref(node)
    with startup_frozen():
        del node
        gc.collect()
        assert before() is not None
    gc.collect()
    assert before() is None and gc.get_freeze_count() == 0


def test_what_was_garbage_before_is_freed_first() -> None:
    garbage = weakref.ref(Node())
    with startup_frozen():
        assert garbage() is None


def test_what_is_made_within_is_collected_within() -> None:
    with startup_frozen():
        within = weakref.ref(Node())
        gc.collect()
        assert within() is None


def test_an_error_within_ends_it_too() -> None:
    with pytest.raises(RuntimeError), startup_frozen():
        raise RuntimeError
    assert gc.get_freeze_count() == 0

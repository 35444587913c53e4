"""The order of eviction: told order, whatever is locked, queued again or swept in between."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halocline.memory.evictable import EvictionQueue
from testing.memory import profile


def indices(*of):
    return np.array(of, np.int64)


def test_the_first_in_is_the_first_out():
    queue = EvictionQueue(10)
    queue.push(indices(3, 1))
    queue.push(indices(7))
    assert queue.pop(2).tolist() == [3, 1]
    assert queue.waiting().tolist() == [7]


def test_what_is_removed_is_skipped():
    queue = EvictionQueue(10)
    queue.push(indices(3, 1, 7))
    queue.remove(indices(1))
    assert queue.pop(2).tolist() == [3, 7]


def test_what_is_queued_again_goes_last_and_counts_once():
    queue = EvictionQueue(10)
    queue.push(indices(3, 1))
    queue.push(indices(3))
    assert queue.length == 2
    assert queue.pop(2).tolist() == [1, 3]


def test_more_than_waits_cannot_be_popped():
    queue = EvictionQueue(10)
    queue.push(indices(3))
    with pytest.raises(AssertionError, match="2 pages to evict, 1 evictable"):
        queue.pop(2)


def test_what_does_not_wait_cannot_be_removed():
    with pytest.raises(AssertionError, match="do not all wait"):
        EvictionQueue(10).remove(indices(0))


def test_some_can_be_put_into_the_order_in_which_they_would_go():
    queue = EvictionQueue(10)
    queue.push(indices(8, 2, 5))
    assert queue.in_order(indices(2, 5, 8)).tolist() == [8, 2, 5]


ACTS = st.lists(st.tuples(st.sampled_from(("push", "push", "remove", "pop")), st.sets(st.integers(0, 19))), max_size=60)


@profile(examples=200)
@given(ACTS)
def test_any_history_leaves_the_order_of_a_plain_list(history):
    """Long enough that the queue is swept several times."""
    queue, model = EvictionQueue(20), []
    for act, chosen in history:
        if act == "push":
            queue.push(indices(*sorted(chosen)))
            model = [index for index in model if index not in chosen] + sorted(chosen)
        elif act == "remove":
            queue.remove(indices(*[index for index in model if index in chosen]))
            model = [index for index in model if index not in chosen]
        else:
            count = min(len(chosen), len(model))
            assert queue.pop(count).tolist() == model[:count]
            model = model[count:]
        assert queue.waiting().tolist() == model
        assert queue.length == len(model)

"""Borders of the tree at which a small fault would go unseen elsewhere: each test is the one that catches it."""

from __future__ import annotations

from halocline.cache.keys import token_key
from halocline.memory.retention import Full, Sliding, State
from testing.cache import CacheWorld, arena_of, lose


def boundary(w: CacheWorld, tokens) -> int:
    return w.tree.match(token_key(tokens)).boundary_tokens


def test_a_state_stays_at_the_end_of_a_node_that_is_split():
    """The state after 64 tokens is no state after 32, wherever the next prompt branches off."""
    w = CacheWorld(arena_of((Full(), 16, 5), (State(), 1, 1), slabs=200))
    w.serve(range(64))
    branch = [*range(32), *range(500, 530)]
    w.serve(branch, cuts=False)
    assert boundary(w, range(65)) == 64
    assert boundary(w, branch) == 0, "nobody has saved a state at the branch"
    w.check()


def test_the_second_checkpoint_of_a_boundary_is_freed():
    """Two who compute the same prompt in one step save a state each: the tree has one, and nothing leaks."""
    w = CacheWorld(arena_of((Full(), 16, 5), (State(), 1, 1), slabs=200))
    both = [w.enter(range(64)), w.enter(range(64))]
    assert w.compute([(runner, 64) for runner in both])
    w.check()
    for runner in both:
        w.leave(runner)
    assert w.arena.budget.cached[1] == 1
    w.check()


def test_of_two_who_bring_the_same_in_one_step_the_one_who_is_further_on_caches_what_the_other_still_reads():
    """Both end in one new node, and the window of the second has passed pages that the first keeps: one copy stays."""
    w = CacheWorld(arena_of((Full(), 16, 5), (Sliding(40), 4, 1), slabs=200))
    first, second = w.enter(range(100)), w.enter(range(100))
    assert w.compute([(first, 64), (second, 76)])
    assert first.lock.node is second.lock.node
    w.check()
    assert w.arena.budget.cached[1] == 6  # pages 0 to 5; the first locks 6 to 15, the second 9 to 15
    w.leave(first)
    w.check()
    assert w.arena.budget.cached[1] == 9


def test_a_node_at_which_two_paths_end_grows_for_neither():
    w = CacheWorld(arena_of((Full(), 16, 5), (Sliding(40), 16, 1), slabs=200))
    first, second = w.enter([*range(32), *range(500, 540)]), w.enter([*range(32), *range(700, 740)])
    assert w.compute([(first, 32), (second, 32)])
    assert first.lock.node is second.lock.node
    assert w.compute([(first, 16)])
    assert (first.lock.node.end, second.lock.node.end) == (3, 2)
    assert w.compute([(second, 16)])
    w.check()


def test_a_node_that_owns_nothing_stays_while_a_path_ends_there():
    """Without a full pool a window may pass all pages of the node where its request goes on."""
    w = CacheWorld(arena_of((Sliding(2), 4, 1), slabs=20))
    runner = w.enter(range(7), output=20)
    assert w.compute([(runner, 7)])
    lose(w, 0, [0])
    w.check()
    runner.tokens.append(1000)
    assert w.compute([(runner, 1)])
    w.check()
    assert boundary(w, [*range(7), 1000, 1001]) == 8

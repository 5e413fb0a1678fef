"""The order in which diverged lanes are run."""

from common.emulator.ptx.flow import convergence_order


def order(*successors: list[int]) -> list[int]:
    return convergence_order(successors, 0)


def test_a_diamond_puts_the_join_last() -> None:
    assert order([1, 2], [3], [3], [])[-1] == 3


def test_a_loop_comes_before_what_follows_it_whatever_the_text_order() -> None:
    # 0 -> header 1; 1 -> exit 2 or body 3; 3 -> 1
    assert order([1], [2, 3], [], [1]) == [0, 1, 3, 2]


def test_nested_loops() -> None:
    # outer header 1, inner header 2 with body 3, outer latch 4, exit 5
    places = {node: place for place, node in enumerate(order([1], [5, 2], [4, 3], [2], [1], []))}
    assert places[3] < places[4] < places[5] and places[1] < places[2] < places[3]


def test_a_loop_with_two_entries_is_still_ordered() -> None:
    assert sorted(order([1, 2], [2], [1, 3], [])) == [0, 1, 2, 3]
    assert order([1, 2], [2], [1, 3], [])[-1] == 3


def test_unreachable_nodes_are_left_out() -> None:
    assert order([1], [], [0]) == [0, 1]


def test_a_long_chain_needs_no_recursion() -> None:
    count = 20_000
    assert len(order(*[[n + 1] for n in range(count)], [])) == count + 1

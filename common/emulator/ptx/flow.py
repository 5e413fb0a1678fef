"""Control flow: in which order the segments of a function should run so that diverged lanes meet again."""

from __future__ import annotations

from collections.abc import Sequence


def convergence_order(successors: Sequence[Sequence[int]], entry: int) -> list[int]:
    """Nodes reachable from `entry` in an order where a loop's body comes before everything after the loop.

    Lanes that stand at different places are run lowest place first, so those that left a loop or a branch early wait
    where the others will arrive: they reconverge at the immediate post-dominator or before it ("thread frontiers",
    Diamos et al., MICRO 2011). The order is a topological one of the strongly connected components; inside a component
    the edges back to its entry are cut and the rest is ordered the same way.
    """
    return _ordered(set(_reachable(successors, entry)), successors, entry)


def _reachable(successors: Sequence[Sequence[int]], entry: int) -> list[int]:
    seen, stack = {entry}, [entry]
    while stack:
        for node in successors[stack.pop()]:
            if node not in seen:
                seen.add(node)
                stack.append(node)
    return sorted(seen)


def _ordered(nodes: set[int], successors: Sequence[Sequence[int]], entry: int) -> list[int]:
    order: list[int] = []
    work: list[tuple[set[int], int | None]] = [(nodes, entry)]
    while work:
        region, head = work.pop()
        if len(region) == 1:
            order.extend(region)
            continue
        components = _components(region, successors, head)
        expanded: list[tuple[set[int], int | None]] = []
        for component, component_head in components:
            if len(component) == 1:
                expanded.append((component, None))
            else:
                expanded.append(({component_head}, None))
                expanded.append((component - {component_head}, None))
        work.extend(reversed(expanded))
    return order


def _components(region: set[int], successors: Sequence[Sequence[int]], head: int | None) -> list[tuple[set[int], int]]:
    """Strongly connected components of `region` in topological order, each with the node it is entered by (Tarjan)."""
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    on_stack: set[int] = set()
    stack: list[int] = []
    found: list[tuple[set[int], int]] = []
    roots = ([head] if head is not None else []) + sorted(region)
    for root in roots:
        if root in number:
            continue
        calls = [(root, iter(successors[root]))]
        number[root] = low[root] = len(number)
        stack.append(root)
        on_stack.add(root)
        while calls:
            node, rest = calls[-1]
            for following in rest:
                if following not in region:
                    continue
                if following not in number:
                    number[following] = low[following] = len(number)
                    stack.append(following)
                    on_stack.add(following)
                    calls.append((following, iter(successors[following])))
                    break
                if following in on_stack:
                    low[node] = min(low[node], number[following])
            else:
                calls.pop()
                if calls:
                    low[calls[-1][0]] = min(low[calls[-1][0]], low[node])
                if low[node] == number[node]:
                    component = set()
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.add(member)
                        if member == node:
                            break
                    found.append((component, node))
    return found[::-1]

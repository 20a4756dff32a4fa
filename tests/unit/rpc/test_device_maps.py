"""Every rule for device maps, without a device: the workers' device counts are made up."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import pytest
import torch

from rankcall.errors import DeviceMapError
from rankcall.rpc.device_maps import (
    WorkerDevices,
    as_device_map,
    device_list,
    reverse_maps,
    validate,
)


def devices(*names: Any) -> list[torch.device]:
    """Return devices by name, or by CUDA index."""
    return [torch.device(f"cuda:{name}" if isinstance(name, int) else name) for name in names]


def node(
    name: str, count: int, maps: dict[str, dict[Any, Any]] | None = None, *own: Any
) -> WorkerDevices:
    """Return a node whose maps are given by CUDA index or name."""
    made = {
        to: dict(zip(devices(*device_map), devices(*device_map.values()), strict=True))
        for to, device_map in (maps or {}).items()
    }
    return WorkerDevices(name, count, made, devices(*own))


# The broken rule, the nodes, the message, and whether a dynamic group checks the rule, too.
BROKEN = [
    ("1 duplicates", [node("a", 4, {}, 1, 1)], "Node a has duplicated devices", True),
    ("2 too high", [node("a", 2, {}, 0, 2)], "Node a has devices with invalid indices", True),
    ("2 no index", [node("a", 2, {}, "cuda")], "Node a has devices with invalid indices", True),
    ("2 other kind", [node("a", 2, {}, "meta")], "Node a has devices with invalid indices", True),
    (
        "3 unknown worker",
        [node("a", 1, {"c": {0: 0}}), node("b", 1)],
        "Node a has invalid target node names in its device maps",
        False,
    ),
    (
        "4 two sources, one target",
        [node("a", 2, {"b": {0: 0, 1: 0}}), node("b", 1)],
        "Node a has duplicated target devices in its device map for b",
        True,
    ),
    (
        "5 source not in the list",
        [node("a", 2, {"b": {1: 0}}, 0), node("b", 1)],
        "Node a has unexpected source devices in its device map for b",
        True,
    ),
    (
        "5 source not there",
        [node("a", 1, {"b": {1: 0}}), node("b", 1)],
        "Node a has source devices with invalid indices in its device map for b",
        True,
    ),
    (
        "6 target not in the list",
        [node("a", 1, {"b": {0: 1}}), node("b", 2, {}, 0)],
        "Node a has unexpected target devices in its device map for b",
        True,
    ),
    (
        "6 target not there",
        [node("a", 1, {"b": {0: 1}}), node("b", 1)],
        "Node a has target devices with invalid indices in its device map for b",
        True,
    ),
    (
        "6 to itself",
        [node("a", 1, {"a": {0: 1}})],
        "Node a has target devices with invalid indices in its device map for a",
        True,
    ),
]


@pytest.mark.parametrize(("nodes", "says", "dynamic"), [b[1:] for b in BROKEN], ids=lambda v: "")
def test_a_broken_rule_is_named(nodes: list[WorkerDevices], says: str, dynamic: bool) -> None:
    """With the node, its devices, its device count and the map; in any order of the nodes."""
    for order in permutations(nodes):
        with pytest.raises(DeviceMapError) as caught:
            validate(order, static=True)
        assert isinstance(caught.value, ValueError)
        message = str(caught.value)
        assert message.startswith(says)
        assert f"devices = {list(nodes[0].devices)}" in message
        assert f"device count = {nodes[0].device_count}" in message
        assert "device map" in message
        if dynamic:
            with pytest.raises(DeviceMapError):
                validate(order, static=False)
        else:
            validate(order, static=False)


GOOD = [
    [node("a", 0), node("b", 0)],
    [node("a", 2, {"b": {0: 1, 1: 0}}), node("b", 2, {"a": {0: 1}})],
    [node("a", 2, {"b": {"cpu": 0}}), node("b", 1)],
    [node("a", 2, {"b": {0: "cpu"}}, 0, 1), node("b", 0)],
    [node("a", 4, {"b": {3: 2}}, 3, 1), node("b", 4, {}, 2)],
    [node("a", 1, {"a": {0: 0}})],
]


@pytest.mark.parametrize("nodes", GOOD, ids=range(len(GOOD)))
def test_good_maps_pass(nodes: list[WorkerDevices]) -> None:
    """In both kinds of group, and after the trip through JSON that they take."""
    for static in (True, False):
        validate(nodes, static)
        validate([WorkerDevices.from_json(worker.to_json()) for worker in nodes], static)


def test_absent_targets_are_left_for_later() -> None:
    """A dynamic group checks the target's side of a map when the target has joined."""
    early = node("a", 1, {"late": {0: 5}})
    validate([early], static=False)
    with pytest.raises(DeviceMapError, match="target devices with invalid indices"):
        validate([early, node("late", 1)], static=False)


def test_reverse_maps_bring_answers_back() -> None:
    """With any maps, a tensor comes back to the device that it was sent from."""
    choices: list[dict[Any, Any]] = [{}, {0: 0}, {0: 1, 1: 0}, {1: 0}]
    for to_b, to_c, back in product(choices, repeat=3):
        nodes = [node("a", 2, {"b": to_b, "c": to_c}), node("b", 2, {"a": back}), node("c", 2)]
        for me in "abc":
            reverse = reverse_maps(me, nodes)
            assert set(reverse) == {sender.name for sender in nodes if me in sender.maps}
            for sender in nodes:
                for here, there in sender.maps.get(me, {}).items():
                    assert reverse[sender.name][there] == here


def test_devices_an_agent_handles() -> None:
    """Its own list sorted; else what its maps and the reverse ones mention, without CPU."""
    mapped = node("a", 4, {"b": {2: 0, "cpu": 1}})
    assert device_list(mapped, {"c": {torch.device("cuda:1"): torch.device("cuda:0")}}) == devices(
        1, 2
    )
    assert device_list(node("a", 4, {"b": {0: 0}}, 3, 1), {}) == devices(1, 3)
    assert device_list(node("a", 4), {}) == []


def test_maps_may_be_written_in_short() -> None:
    """Indices, names and devices mean the same; two sources for one target are refused at once."""
    wanted = {torch.device("cuda:0"): torch.device("cuda:1")}
    assert as_device_map({0: 1}) == as_device_map({"cuda:0": torch.device("cuda", 1)}) == wanted
    with pytest.raises(DeviceMapError, match="two devices are mapped to cuda:1"):
        as_device_map({0: 1, 2: "cuda:1"})

"""Device maps: which device a tensor lands on at another worker, and the rules for that.

Pure functions over the workers' descriptions of themselves. A worker's *map* to a target says,
for devices here, the device there that an argument lands on; answers go back by the inverse.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rankcall.errors import DeviceMapError

DeviceMap = dict[torch.device, torch.device]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class WorkerDevices:
    """The devices of one worker, as it describes them; ``devices`` is empty without a list."""

    name: str
    device_count: int = 0
    maps: Mapping[str, DeviceMap] = field(default_factory=dict)
    devices: Sequence[torch.device] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it in a form that JSON can carry."""
        maps = {
            to: {str(k): str(v) for k, v in device_map.items()}
            for to, device_map in self.maps.items()
        }
        return {
            "name": self.name,
            "device_count": self.device_count,
            "maps": maps,
            "devices": [str(device) for device in self.devices],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> WorkerDevices:
        """Return the node of a ``to_json``."""
        maps = {
            to: {torch.device(k): torch.device(v) for k, v in device_map.items()}
            for to, device_map in record["maps"].items()
        }
        devices = [torch.device(device) for device in record["devices"]]
        return cls(record["name"], record["device_count"], maps, devices)


def validate(nodes: Iterable[WorkerDevices], static: bool) -> None:
    """Check every node's devices and maps. Raises ``DeviceMapError`` (a ``ValueError``).

    In a dynamic group a map may name a worker that has not joined yet; what depends on that
    worker's own devices is checked when it joins.
    """
    by_name = {node.name: node for node in nodes}
    for node in by_name.values():
        _validate_devices(node)
    for node in by_name.values():
        unknown = sorted(set(node.maps) - set(by_name))
        if static and unknown:
            _fail(
                node,
                "has invalid target node names in its device maps",
                unknown=", ".join(unknown),
                device_maps=dict(node.maps),
                workers=", ".join(sorted(by_name)),
            )
        for target, device_map in node.maps.items():
            _validate_map(node, target, by_name.get(target), device_map)


def _validate_devices(node: WorkerDevices) -> None:
    if len(set(node.devices)) != len(node.devices):
        _fail(node, "has duplicated devices", device_maps=dict(node.maps))
    if not _exist(node.devices, node.device_count):
        _fail(node, "has devices with invalid indices", device_maps=dict(node.maps))


def _validate_map(
    node: WorkerDevices, to: str, target: WorkerDevices | None, device_map: DeviceMap
) -> None:
    where = f"in its device map for {to}"
    if len(set(device_map.values())) != len(device_map):
        _fail(node, f"has duplicated target devices {where}", device_map=device_map)
    if node.devices and not set(device_map) <= set(node.devices):
        _fail(node, f"has unexpected source devices {where}", device_map=device_map)
    if not node.devices and not _exist(device_map, node.device_count):
        _fail(node, f"has source devices with invalid indices {where}", device_map=device_map)
    if target is None:
        return
    theirs = {"target_devices": list(target.devices), "target_device_count": target.device_count}
    if target.devices and not set(device_map.values()) <= set(target.devices):
        _fail(node, f"has unexpected target devices {where}", device_map=device_map, **theirs)
    if not target.devices and not _exist(device_map.values(), target.device_count):
        problem = f"has target devices with invalid indices {where}"
        _fail(node, problem, device_map=device_map, **theirs)


def _exist(devices: Iterable[torch.device], count: int) -> bool:
    return all(
        device.type == "cpu" or (device.type == "cuda" and 0 <= _index(device) < count)
        for device in devices
    )


def _index(device: torch.device) -> int:
    return -1 if device.index is None else device.index


def _fail(node: WorkerDevices, problem: str, **shown: Any) -> None:
    """Raise the error, in the words of torch's TensorPipe back end, with all facts below them."""
    shown = {"devices": list(node.devices), "device_count": node.device_count, **shown}
    facts = "\n".join(f"{name.replace('_', ' ')} = {value}" for name, value in shown.items())
    raise DeviceMapError(f"Node {node.name} {problem}\n{facts}")


def reverse_maps(me: str, nodes: Iterable[WorkerDevices]) -> dict[str, DeviceMap]:
    """Return the inverse of each node's map to ``me``, by node: answers go back by it."""
    return {
        node.name: {there: here for here, there in node.maps[me].items()}
        for node in nodes
        if me in node.maps
    }


def device_list(node: WorkerDevices, reverse: Mapping[str, DeviceMap]) -> list[torch.device]:
    """Return the devices a worker's agent handles, sorted by index.

    Its own list if it gave one; otherwise all that its maps and the reverse maps mention, but CPU.
    """
    mentioned = {
        device for device_map in (*node.maps.values(), *reverse.values()) for device in device_map
    }
    return sorted(node.devices or mentioned - {CPU}, key=_index)


def as_device(given: Any) -> torch.device:
    """Return a device by its CUDA index or its name; it need not exist here."""
    return torch.device("cuda", given) if isinstance(given, int) else torch.device(given)


def as_device_map(given: Mapping[Any, Any]) -> DeviceMap:
    """Return a map of indices, names or devices as one of devices. Raises ``DeviceMapError``."""
    made: DeviceMap = {}
    for here, there in given.items():
        source, target = as_device(here), as_device(there)
        if target in made.values():
            raise DeviceMapError(f"two devices are mapped to {target} in {dict(given)}")
        made[source] = target
    return made

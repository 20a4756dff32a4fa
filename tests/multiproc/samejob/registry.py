"""The table of programs, and what several of them use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from samejob.job import Job

# Under the names that the installed torch does not warn of.
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather_into_tensor = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True)
class Program:
    """A program and how it is run.

    ``bare`` programs make their groups and start the recording by themselves. ``quiet`` ones do not
    report how much was recorded. ``slow`` ones are not in the short tests. ``deadline`` is in
    seconds.
    """

    function: Callable[[Job], None]
    world_size: int = 2
    bare: bool = False
    quiet: bool = False
    slow: bool = False
    deadline: float = 90.0


PROGRAMS: dict[str, Program] = {}


def program(**options: Any) -> Callable[[Callable[[Job], None]], Callable[[Job], None]]:
    """List a program under its function's name."""

    def list_it(function: Callable[[Job], None]) -> Callable[[Job], None]:
        PROGRAMS[function.__name__] = Program(function, **options)
        return function

    return list_it


def random_tensor(rank: int, *size: int, seed: int = 0) -> torch.Tensor:
    """Return a tensor that differs between ranks and is the same in every run."""
    generator = torch.Generator("cpu").manual_seed(1000 * seed + rank)
    numbers = torch.randn(*size, generator=generator, device="cpu")
    return numbers.to(torch.get_default_device())


def small_model(layers: int = 3) -> nn.Sequential:
    """Return a model that is the same on every rank."""
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))

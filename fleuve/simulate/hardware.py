"""What a device can do, from the catalogue's data sheets."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fleuve.config.nearest import did_you_mean, nearest
from fleuve.errors import UserError

CATALOGUE = Path(__file__).parent / "catalogue"


@dataclass(frozen=True)
class Hardware:
    """One device and its wires. Sizes are bytes, rates are bytes and operations a second, one direction.

    `peak` is of dense matrix products by type (`bfloat16`, `float32`); `link` joins the devices of a node, of which
    there are `node`; `network` is each device's own way to other nodes.
    """

    name: str
    memory: float
    memory_bandwidth: float
    peak: dict[str, float] = field(hash=False)
    link: float
    network: float
    node: int

    def fabric(self, devices: int) -> float:
        """Bytes a second that a collective operation over `devices` moves at each of them, at best: the links' within a
        node; across nodes, all adapters of a node work for all its devices, and the links still bound it."""
        return self.link if devices <= self.node else min(self.link, self.node * self.network)


def hardware_names() -> list[str]:
    """What the catalogue has."""
    return sorted(_tables("hardware"))


def load_hardware(name: str, key: str = "simulate.hardware") -> Hardware:
    """From the catalogue; `key` is what errors call the setting.

    Raises:
        UserError: there is no such device; names the nearest.
    """
    table = _tables("hardware").get(name.lower())
    if table is None:
        known = ", ".join(hardware_names())
        hint = did_you_mean(nearest(name, hardware_names()))
        raise UserError(f"{key} = {name}: no such hardware in the catalogue ({known}){hint}")
    return Hardware(
        name=name.lower(),
        memory=table["memory_gb"] * 1e9,
        memory_bandwidth=table["memory_gb_s"] * 1e9,
        peak={dtype: flops * 1e12 for dtype, flops in table["tflops"].items()},
        link=table["link_gb_s"] * 1e9,
        network=table["network_gb_s"] * 1e9,
        node=table["node"],
    )


@cache
def _tables(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads((CATALOGUE / f"{name}.toml").read_text(encoding="utf-8"))


def catalogue_models() -> dict[str, dict[str, Any]]:
    """The catalogue's tables of models."""
    return _tables("models")


def catalogue_times() -> dict[str, dict[str, Any]]:
    """The catalogue's measured times: hardware → model → `[simulate.measured]`."""
    return _tables("measured")

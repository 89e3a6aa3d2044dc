"""`[launch]`: on which machines the processes of a run are, and who starts them."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from fleuve.config.library import require
from fleuve.config.section import NonNegative, Seconds, Section

Port = Annotated[int, Field(ge=1024, le=65535)]
HIGHEST = 65535


def check_ray_address(address: str) -> None:
    """
    Raises:
        ValueError: it is neither "auto", nor "local", nor the HOST:PORT of a head.
    """
    if address in ("auto", "local"):
        return
    if address.startswith("ray://"):
        raise ValueError(
            f"{address}: the run's own process is a part of the cluster: start it on a node, or by `ray job submit`"
        )
    try:
        port = split_ray_address(address)[1]
    except ValueError:
        raise ValueError(f'{address!r} is neither "auto", nor "local", nor HOST:PORT, as in 10.0.0.1:6379') from None
    if not 1 <= port <= HIGHEST:
        raise ValueError(f"{address}: ports are from 1 to {HIGHEST}; the head of a cluster listens on 6379 as a rule")


def split_ray_address(address: str) -> tuple[str, int]:
    """`HOST:PORT` or `[HOST]:PORT` as its two parts.

    Raises:
        ValueError: it is neither.
    """
    found = re.fullmatch(r"(?:([^\s:/\[\]]+)|\[([0-9A-Fa-f:.%\w]+)\]):([0-9]+)", address)
    if found is None:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return found[1] or found[2], int(found[3])


class RaySettings(Section):
    """The cluster of `launch.backend = "ray"`. `address`: "auto" is the cluster that this machine is a node of (or that
    RAY_ADDRESS names), and where there is none, one of this machine alone that ends with the run; "local" is always
    such a one; or HOST:PORT. GPUs not given: one to each process that computes on GPUs, where the cluster has any."""

    address: str = "auto"
    strategy: Literal["pack", "spread"] = "pack"
    worker_gpus: NonNegative | None = None
    rank_gpus: NonNegative | None = None
    env: tuple[str, ...] = ()
    ports: tuple[Port, Port] | None = None
    place_timeout: Seconds = 120.0

    @field_validator("address")
    @classmethod
    def _somewhere(cls, address: str) -> str:
        check_ray_address(address)
        return address

    @field_validator("env")
    @classmethod
    def _variables(cls, env: tuple[str, ...]) -> tuple[str, ...]:
        for line in env:
            name, equals, _ = line.partition("=")
            if not equals or not name.isidentifier():
                raise ValueError(f'{line!r}: an environment variable is given as "NAME=value"')
        return env

    @field_validator("ports")
    @classmethod
    def _range(cls, ports: tuple[int, int] | None) -> tuple[int, int] | None:
        if ports is not None and ports[0] > ports[1]:
            raise ValueError(f"from {ports[0]} to {ports[1]} there is no port; give the lower one first")
        return ports


class LaunchSettings(Section):
    """Who gets which cores. `disaggregated`: rollout and training each have their own, at the same time.
    `colocated`: both use all of them, in turn."""

    backend: Literal["local", "ray"] = "local"
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    ray: RaySettings = RaySettings()

    @model_validator(mode="after")
    def _ray_gives_each_its_own(self) -> LaunchSettings:
        if self.backend == "ray" and self.placement == "colocated":
            raise ValueError(
                'launch.placement = "colocated" needs launch.backend = "local": Ray gives each process devices of its '
                "own"
            )
        return self


def require_ray() -> None:
    """
    Raises:
        UserError: Ray is not installed here.
    """
    require("ray", 'launch.backend = "ray" needs Ray, which is not installed: pip install "ray[default]>=2.40"')

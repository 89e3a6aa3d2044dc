"""`[launch]`: what cannot be meant is one line."""

from __future__ import annotations

import importlib.util

import pytest

from fleuve.config.launching import LaunchSettings, require_ray
from fleuve.errors import UserError


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"backend": "ray", "placement": "colocated"}, "needs launch.backend"),
        ({"ray": {"env": ["NCCL_DEBUG"]}}, "NAME=value"),
        ({"ray": {"env": ["A B=1"]}}, "NAME=value"),
        ({"ray": {"ports": [20100, 20000]}}, "lower one first"),
        ({"ray": {"ports": [80, 90]}}, "1024"),
        ({"ray": {"address": "ray://head:10001"}}, "ray job submit"),
        ({"ray": {"address": "foo"}}, "neither .* nor HOST:PORT, as in 10.0.0.1:6379"),
        ({"ray": {"address": ""}}, "nor HOST:PORT"),
        ({"ray": {"address": "head:"}}, "nor HOST:PORT"),
        ({"ray": {"address": ":6379"}}, "nor HOST:PORT"),
        ({"ray": {"address": "http://head:6379"}}, "nor HOST:PORT"),
        ({"ray": {"address": "::1:6379"}}, "nor HOST:PORT"),
        ({"ray": {"address": "head:65536"}}, "from 1 to 65535"),
        ({"ray": {"address": "head:0"}}, "from 1 to 65535"),
    ],
)
def test_what_cannot_be_meant_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        LaunchSettings.model_validate(given)


@pytest.mark.parametrize("address", ["auto", "local", "head:6379", "10.0.0.1:6379", "[fd00::1]:65535"])
def test_a_cluster_is_found_by_itself_or_at_host_and_port_or_made_here(address):
    assert LaunchSettings.model_validate({"ray": {"address": address}}).ray.address == address


def test_without_ray_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install \"ray\[default\]"):
        require_ray()

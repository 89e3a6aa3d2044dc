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
    ],
)
def test_what_cannot_be_meant_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        LaunchSettings.model_validate(given)


def test_without_ray_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install \"ray\[default\]"):
        require_ray()

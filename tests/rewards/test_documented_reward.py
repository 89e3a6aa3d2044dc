"""The reward function in docs/data.md works as it stands there."""

import re
from pathlib import Path

import pytest

from fleuve.config.settings import RewardSettings
from fleuve.rewards.pool import RewardPool
from fleuve.types import Prompt

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


async def test_the_documented_reward_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (name,) = re.findall(r'data\.verifier = "(rewards:\w+)"', PAGE.read_text())
    (tmp_path / "rewards.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    prompt = Prompt(id="e0/0", input_ids=[1], text="?", answer="33", verifier=name)
    async with RewardPool(RewardSettings(), verifiers=[name]) as rewards:
        assert (await rewards.score(prompt, "it is 33")).score == pytest.approx(1.498)
        assert (await rewards.score(prompt, "it is 34")).score == 0.0

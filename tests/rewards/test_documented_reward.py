"""The reward function in docs/data.md works as it stands there."""

import re
from pathlib import Path

import pytest

from fleuve.config.loader import dump_settings, load_settings
from fleuve.config.settings import RewardSettings
from fleuve.rewards.find import check_verifier
from fleuve.rewards.pool import RewardPool
from fleuve.types import Prompt

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def documented() -> tuple[str, str]:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (name,) = re.findall(r'data\.verifier = "(rewards:\w+)"', PAGE.read_text())
    return code, name


async def test_the_documented_reward_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, name = documented()
    (tmp_path / "rewards.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    prompt = Prompt(id="e0/0", input_ids=[1], text="?", answer="33", verifier=name)
    async with RewardPool(RewardSettings(), verifiers=[name]) as rewards:
        assert (await rewards.score(prompt, "it is 33")).score == pytest.approx(1.498)
        assert (await rewards.score(prompt, "it is 34")).score == 0.0


@pytest.mark.parametrize("relative", [True, False])
async def test_it_works_beside_the_settings_from_wherever_the_run_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: bool
) -> None:
    code, name = documented()
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "mine"
    elsewhere.mkdir()
    folder.mkdir()
    (folder / "rewards.py").write_text(code)
    config = folder / "run.toml"
    config.write_text(f'run_dir = "r"\n[model]\npath = "m"\n[data]\ntrain = "d.jsonl"\nverifier = "{name}"\n')
    monkeypatch.chdir(elsewhere)
    settings = load_settings("../mine/run.toml" if relative else config)
    copy = elsewhere / "config.toml"
    copy.write_text(dump_settings(settings))
    for again in (settings, load_settings(copy)):
        check_verifier(name, again.reward.path)
        prompt = Prompt(id="e0/0", input_ids=[1], text="?", answer="33", verifier=name)
        async with RewardPool(again.reward, verifiers=[name]) as rewards:
            assert (await rewards.score(prompt, "it is 33")).score == pytest.approx(1.498)


async def test_the_ten_lines_of_the_page_on_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (PAGE.parent / "rewards.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (verifier,) = re.findall(r"^verifier = '(.*)'$", page, re.MULTILINE)
    assert len(code.splitlines()) <= 10
    (tmp_path / "rewards.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    check_verifier(verifier)
    prompt = Prompt(id="e0/0", input_ids=[1], text="?", answer="33", verifier=verifier, row={"steps": 2})
    async with RewardPool(RewardSettings(), verifiers=[verifier]) as rewards:
        both = await rewards.score(prompt, "<think>7*3=21\n12+21=33</think>\n33")
        assert both.score == pytest.approx(1.0 + 0.2 + 0.1), both.reason
        assert (await rewards.score(prompt, "7*3=21\n34")).score == pytest.approx(0.1)


def test_every_number_of_the_service_is_documented() -> None:
    page = (PAGE.parent / "rewards.md").read_text()
    documented = set(re.findall(r"`(reward_service/[\w/]+)`", page))
    assert documented == set(RewardPool(RewardSettings()).metrics())

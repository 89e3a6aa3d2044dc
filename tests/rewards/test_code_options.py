"""A verifier process's options for code are the settings of `[reward.code]`."""

from fleuve.config.settings import RewardSettings
from fleuve.rewards.code.options import CodeOptions


def test_they_have_the_same_names_and_defaults() -> None:
    settings = RewardSettings()
    assert CodeOptions() == CodeOptions(**settings.code.model_dump(), deadline=settings.deadline)

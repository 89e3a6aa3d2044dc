"""The parts of a trainer that the settings may ask for: a loss, a reference policy, a critic."""

from __future__ import annotations

from fleuve.algorithms.losses import PolicyLoss
from fleuve.config.settings import Settings
from fleuve.modeling.loading import DTYPES, load_model
from fleuve.train.critic import Critic
from fleuve.train.policy import Policy


def policy_loss_of(settings: Settings) -> PolicyLoss:
    """The loss that `[algorithm]` describes."""
    a = settings.algorithm
    return PolicyLoss(
        objective=a.objective,
        clip_low=a.clip_low,
        clip_high=a.clip_high,
        dual_clip=a.dual_clip,
        tau_positive=a.tau_positive,
        tau_negative=a.tau_negative,
        aggregation=a.aggregation,
        horizon=float(a.horizon or settings.rollout.max_new_tokens),
        cap=a.cap,
        cap_level=a.cap_level,
        cap_value=a.cap_value,
        cap_low=a.cap_low,
        kl_coefficient=a.kl_coefficient if a.kl_in == "loss" else 0.0,
        kl_estimator=a.kl_estimator,
        entropy_coefficient=a.entropy_coefficient,
    )


def open_reference(settings: Settings, device: str) -> Policy | None:
    """The frozen policy that KL is measured to: the initial model unless `algorithm.reference` names another. None
    without KL.

    Raises:
        UserError: it cannot be opened.
    """
    if settings.algorithm.kl_coefficient == 0:
        return None
    path = settings.algorithm.reference or settings.model.path
    model = load_model(path, DTYPES[settings.trainer.dtype], device).requires_grad_(False)
    return Policy(model, settings.rollout.temperature, settings.trainer.logprob_chunk)


def open_critic(settings: Settings, policy: Policy) -> Critic | None:
    """The value model, where it is the baseline.

    Raises:
        UserError: it cannot be opened.
    """
    if settings.algorithm.baseline != "critic":
        return None
    critic, trainer = settings.critic, settings.trainer
    return Critic(
        policy,
        critic.path or settings.model.path,
        backbone=critic.backbone,
        learning_rate=critic.learning_rate,
        clip=critic.clip or None,
        coefficient=critic.coefficient,
        warmup_steps=critic.warmup_steps,
        dtype=DTYPES[trainer.dtype],
        betas=(trainer.beta1, trainer.beta2),
        eps=trainer.eps,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        activation_checkpointing=trainer.activation_checkpointing,
    )

"""The parts of a trainer as the settings ask for them: a policy, a loss, a reference policy, a critic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fleuve.algorithms.losses import PolicyLoss
from fleuve.config.settings import Settings
from fleuve.modeling.loading import DTYPES, load_model
from fleuve.train.context import Context
from fleuve.train.critic import Critic
from fleuve.train.lora import AdapterOptimizer, add_adapters, without_adapters
from fleuve.train.optimizer import MasterOptimizer
from fleuve.train.packing import Bins, pack
from fleuve.train.policy import Policy
from fleuve.train.ranks import RankGroup, Ranks
from fleuve.train.sharded_optimizer import ShardedOptimizer
from fleuve.train.sharding import ShardedModel
from fleuve.train.sharing import SequenceCost, share_out

Pack = Callable[[Sequence[int], int], Bins]
"""Lengths of sequences and a token budget, to the micro-batches that this rank computes."""


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


def open_policy(settings: Settings, device: str, ranks: Ranks) -> tuple[Policy, MasterOptimizer, Pack]:
    """The policy, what moves its weights, and how its micro-batches are made. In a group of ranks all three are for
    this rank's share.

    Raises:
        UserError: the model cannot be opened.
    """
    trainer = settings.trainer
    adamw = {"betas": (trainer.beta1, trainer.beta2), "eps": trainer.eps, "weight_decay": trainer.weight_decay}
    dtype, temperature, chunk = DTYPES[trainer.dtype], settings.rollout.temperature, trainer.logprob_chunk
    if settings.lora.rank:
        model = load_model(settings.model.path, dtype, device).requires_grad_(False)
        adapters = AdapterOptimizer(model, dtype, add_adapters(model, settings.lora, settings.seed), **adamw)
        return Policy(model, temperature, chunk, trainer.activation_checkpointing), adapters, pack
    if not isinstance(ranks, RankGroup):
        model = load_model(settings.model.path, torch.float32, device)
        optimizer = MasterOptimizer(model, dtype, **adamw)  # type: ignore[arg-type]
        return Policy(model, temperature, chunk, trainer.activation_checkpointing), optimizer, pack
    offload = trainer.offload and device == "cuda"
    sharded = ShardedModel(settings.model.path, dtype, ranks, device, offload=offload)
    context = _context(ranks, sharded.model)
    policy = Policy(
        sharded.model,
        temperature,
        chunk,
        trainer.activation_checkpointing,
        sharded,
        context,
        sharded.token_logprobs,
    )
    cost = SequenceCost.of(*sharded.width_and_size)

    def own_share(lengths: Sequence[int], budget: int) -> Bins:
        return share_out(lengths, ranks.seats, budget, cost)[ranks.seat]

    return policy, ShardedOptimizer(sharded, **adamw), own_share  # type: ignore[arg-type]


def _context(ranks: RankGroup, model: torch.nn.Module) -> Context | None:
    if ranks.neighbours is None:
        return None
    context = Context(ranks.neighbours, ranks.rank // ranks.tensor % ranks.context, ranks.context)
    context.check(model)
    return context


def open_reference(settings: Settings, device: str, ranks: Ranks, policy: Policy) -> Policy | None:
    """The frozen policy that KL is measured to: the initial model unless `algorithm.reference` names another. None
    without KL. Where adapters learn, the initial model is `policy`'s without them.

    Raises:
        UserError: it cannot be opened.
    """
    if settings.algorithm.kl_coefficient == 0:
        return None
    path = settings.algorithm.reference or settings.model.path
    dtype, temperature, chunk = (
        DTYPES[settings.trainer.dtype],
        settings.rollout.temperature,
        settings.trainer.logprob_chunk,
    )
    if settings.lora.rank and path == settings.model.path:
        return Policy(policy.model, temperature, chunk, around=without_adapters(policy.model))
    if isinstance(ranks, RankGroup):
        offload = settings.trainer.offload and device == "cuda"
        sharded = ShardedModel(path, dtype, ranks, device, offload=offload, trained=False)
        context = _context(ranks, sharded.model)
        return Policy(sharded.model, temperature, chunk, False, sharded, context, sharded.token_logprobs)
    return Policy(load_model(path, dtype, device).requires_grad_(False), temperature, chunk)


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

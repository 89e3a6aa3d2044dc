"""The policy's loss, put together from one objective, one correction, one aggregation, and regularisers.

With the log-probabilities of the current (θ), proximal and behaviour policy, r = π_θ / π_prox and w = π_prox / π_behav:

    loss = − Σ_t  n_t · cap(w_t) · objective(r_t, A_t)  +  β Σ_t n_t · KL(π_θ ‖ π_ref)_t  −  c Σ_t n_t · H_t

With PPO's objective, min(r A, clip(r, 1 − ε_low, 1 + ε_high) A), and n_t = 1/N this is decoupled PPO. The clip keeps θ
near the *proximal* policy, the weights at the start of the step, however old the sampler was; w, which carries no
gradient, corrects for who really sampled. w is always applied. When the proximal policy is taken to be the behaviour
policy itself, w = 1 and what remains is PPO as first published ("naive": its clip is centred on old weights).

Sources: Hilton et al. 2022 (Batch size-invariance for policy optimization, the decoupled objective); Fu et al. 2025
(AReaL, section 5.2); and each part's own, in the module that it is from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, assert_never

import torch
from torch import Tensor

from fleuve.algorithms import aggregation, corrections, objectives
from fleuve.algorithms.aggregation import Totals
from fleuve.algorithms.answers import Answers
from fleuve.algorithms.corrections import Correction, Level, importance_weight
from fleuve.algorithms.diagnostics import LossSums, TokenFacts, loss_sums
from fleuve.algorithms.kl import Estimator, kl_penalty
from fleuve.algorithms.objectives import Surrogate
from fleuve.algorithms.ratios import bounded, upcast

Objective = Literal["ppo", "gspo", "cispo", "sapo", "policy_gradient"]
Aggregation = Literal["token_mean", "answer_mean", "constant"]
Cap = Literal["mask", "clamp", "second_moment", "none"]


class LossInputs(NamedTuple):
    """What a loss is computed from. All tensors are `[tokens]`: the learnt tokens of whole answers in one micro-batch.

    `logprobs` (of the current policy) and `entropies` (nats; None unless there is an entropy bonus) carry the gradient.
    `proximal` is the policy that the clip is centred on; pass the behaviour's for naive PPO. `behaviour` is of whoever
    sampled each token, recorded at sampling. `reference` is the frozen policy's (None unless KL is in the loss).
    """

    logprobs: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    staleness: Tensor
    answers: Answers
    reference: Tensor | None = None
    entropies: Tensor | None = None

    def select(self, mask: Tensor) -> LossInputs:
        """Only the tokens where `mask` `[tokens]` holds. The others may hold anything, even NaN: nothing of it
        reaches value or gradient."""
        tensors = {name: value[mask] for name, value in self._asdict().items() if isinstance(value, Tensor)}
        return self._replace(answers=replace(self.answers, index=self.answers.index[mask]), **tensors)


@dataclass(frozen=True)
class PolicyLoss:
    """A choice of parts, by the names and with the defaults of the `[algorithm]` settings.

    `horizon` (tokens) is the constant of the aggregation `constant`. `kl_coefficient` is that of KL in the loss.
    """

    objective: Objective = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    aggregation: Aggregation = "token_mean"
    horizon: float = 1.0
    cap: Cap = "mask"
    cap_level: Level = "token"
    cap_value: float = 5.0
    cap_low: float = 0.0
    kl_coefficient: float = 0.0
    kl_estimator: Estimator = "k3"
    entropy_coefficient: float = 0.0

    def __call__(
        self, inputs: LossInputs, totals: Totals, weight_limit: float | None = None
    ) -> tuple[Tensor, LossSums]:
        """The loss of one micro-batch (a scalar with gradient), and sums to judge it by.

        Args:
            inputs: its tokens.
            totals: over the *whole* minibatch and all ranks, so that how it was split does not show.
            weight_limit: of the cap `second_moment`: the largest |log w| of the whole minibatch that is kept.

        Example: one token on policy (r = w = 1) has the gradient −A / N.
        """
        answers = inputs.answers
        logprobs = upcast(inputs.logprobs)
        log_ratio = bounded(logprobs - inputs.proximal.detach())
        log_weight = bounded(inputs.proximal.detach() - inputs.behaviour)
        surrogate = self._surrogate(logprobs, log_ratio, inputs.advantages, answers)
        correction = self._correction(log_weight, answers, weight_limit)
        share = self._shares(answers, totals, logprobs.dtype)
        # Both, so that a dropped token's weight and value may be anything: 0 · inf is NaN, forwards and backwards.
        weight, value = (torch.where(correction.kept, x, 0.0) for x in (correction.weight, surrogate.value))
        loss = -(share * weight * value).sum()
        kl: Tensor | None = None
        if self.kl_coefficient:
            if inputs.reference is None:
                raise ValueError("KL is in the loss, and there are no log-probabilities of the reference")
            kl = kl_penalty(logprobs, inputs.reference, self._importance(logprobs, inputs), self.kl_estimator)
            loss = loss + self.kl_coefficient * (share * kl).sum()
        if self.entropy_coefficient:
            if inputs.entropies is None:
                raise ValueError("there is an entropy bonus, and there are no entropies")
            loss = loss - self.entropy_coefficient * (share * inputs.entropies).sum()
        level: Level = "token" if self.cap == "second_moment" else self.cap_level
        uncapped = importance_weight(log_weight, answers, level)
        facts = TokenFacts(
            staleness=inputs.staleness,
            clipped_high=surrogate.clipped_high,
            clipped_low=surrogate.clipped_low,
            capped=~correction.kept | (correction.weight != uncapped),
            log_ratio=log_ratio.detach(),
            log_weight=log_weight.detach(),
            kl_reference=None if kl is None else kl.detach(),
        )
        return loss, loss_sums(facts)

    def _importance(self, logprobs: Tensor, inputs: LossInputs) -> Tensor:
        """π_θ / π_behav, which makes the KL of tokens that older policies sampled that of π_θ, `[tokens]`. Every token
        keeps its pull to the reference, those that the cap drops too; with a cap, no weight is above its bound."""
        weight = bounded(logprobs.detach() - inputs.behaviour).exp()
        return weight if self.cap == "none" else weight.clamp(max=self.cap_value)

    def _surrogate(self, logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, answers: Answers) -> Surrogate:
        low, high = self.clip_low, self.clip_high
        match self.objective:
            case "ppo":
                return objectives.ppo(
                    logprobs, log_ratio, advantages, answers, clip_low=low, clip_high=high, dual_clip=self.dual_clip
                )
            case "gspo":
                return objectives.gspo(
                    logprobs, log_ratio, advantages, answers, clip_low=low, clip_high=high, dual_clip=self.dual_clip
                )
            case "cispo":
                return objectives.cispo(logprobs, log_ratio, advantages, answers, clip_low=low, clip_high=high)
            case "sapo":
                return objectives.sapo(
                    logprobs, log_ratio, advantages, answers, tau_pos=self.tau_positive, tau_neg=self.tau_negative
                )
            case "policy_gradient":
                return objectives.policy_gradient(logprobs, log_ratio, advantages, answers)
            case _:
                assert_never(self.objective)

    def _correction(self, log_weight: Tensor, answers: Answers, limit: float | None) -> Correction:
        low, high, level = self.cap_low, self.cap_value, self.cap_level
        match self.cap:
            case "none":
                return corrections.none(log_weight, answers, level=level)
            case "clamp":
                return corrections.clamp(log_weight, answers, lower=low, upper=high, level=level)
            case "mask":
                return corrections.mask(log_weight, answers, lower=low, upper=high, level=level)
            case "second_moment":
                if limit is None:
                    raise ValueError("second-moment masking needs the minibatch's limit")
                return corrections.second_moment(log_weight, limit)
            case _:
                assert_never(self.cap)

    def _shares(self, answers: Answers, totals: Totals, dtype: torch.dtype) -> Tensor:
        match self.aggregation:
            case "token_mean":
                return aggregation.token_mean(answers, totals, dtype=dtype)
            case "answer_mean":
                return aggregation.answer_mean(answers, totals, dtype=dtype)
            case "constant":
                return aggregation.constant(answers, totals, horizon=self.horizon, dtype=dtype)
            case _:
                assert_never(self.aggregation)

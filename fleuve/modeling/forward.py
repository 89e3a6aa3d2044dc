"""The two halves of a decoder's forward pass: tokens to hidden states, hidden states to logits.

Trainer and engine want logits of some rows only (a chunk, the rows that are sampled), so the output head is applied
apart from the layers. What a family does to its logits after the head is in `logits`; `agrees_with_own_forward` tests
that nothing was forgotten.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fleuve.modeling.attention import Attention


def base_model(model: torch.nn.Module) -> Any:
    """The decoder without its output head."""
    return getattr(model, str(model.base_model_prefix))


def hidden_states(model: torch.nn.Module, input_ids: Tensor, position_ids: Tensor, attention: Attention) -> Tensor:
    """One pass through the layers over packed tokens.

    Args: `input_ids`, `position_ids` [tokens]; `attention` decides which of them see each other.
    Returns [tokens, hidden], after the final norm.
    """
    out = base_model(model)(
        input_ids=input_ids.unsqueeze(0),
        position_ids=position_ids.unsqueeze(0),
        use_cache=False,
        fleuve_attention=attention,
    )
    return out.last_hidden_state[0]  # type: ignore[no-any-return]


def logits(model: torch.nn.Module, hidden: Tensor) -> Tensor:
    """`hidden` [tokens, hidden] through the output head to [tokens, vocabulary], with the scaling and soft-capping
    that some families (Gemma 2 and 3, Cohere, Granite) apply to their logits."""
    out: Tensor = model.get_output_embeddings()(hidden)  # type: ignore[operator]
    config: Any = model.config
    if (scale := getattr(config, "logit_scale", None)) is not None:
        out = out * scale
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        out = out / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        out = torch.tanh(out / cap) * cap
    return out


@torch.inference_mode()
def agrees_with_own_forward(model: torch.nn.Module, attention: Attention) -> bool:
    """Whether `logits(hidden_states(...))` is what the model itself answers, on one token."""
    device = model.get_input_embeddings().weight.device  # type: ignore[operator]
    token, position = torch.ones(1, dtype=torch.long, device=device), torch.zeros(1, dtype=torch.long, device=device)
    ours = logits(model, hidden_states(model, token, position, attention))
    own = model(
        input_ids=token.unsqueeze(0), position_ids=position.unsqueeze(0), use_cache=False, fleuve_attention=attention
    ).logits[0]
    return torch.allclose(ours.float(), own.float(), atol=1e-2, rtol=1e-2)

"""What an engine's answers are held against: the trainer's own log-probabilities, under the weights of any version."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from fleuve.modeling.loading import DTYPES, load_model
from fleuve.train.microbatch import make_micro_batches, sample_of
from fleuve.train.policy import Policy
from fleuve.types import Completion, Float32Array, Trajectory

NOISE = 0.3
"""Of a matrix's own spread: far enough that an answer scored under another version's weights stands out."""

CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""What transformers calls the cache that a forward pass goes on from."""
REMEMBERED = 4
"""Versions whose weights are not made anew each time."""


class Scorer:
    """The model in fp32. Version 0 are its own weights; every other version is those with noise of its own on them, in
    `dtype`, as a trainer would publish them."""

    def __init__(self, path: str, dtype: str = "float32") -> None:
        self.model = load_model(path, torch.float32)
        self.dtype = DTYPES[dtype]
        self._first = {name: p.detach().to(self.dtype, copy=True) for name, p in self.model.named_parameters()}
        self._loaded = 0
        self._made: dict[int, list[tuple[str, Tensor]]] = {}  # the last ones asked for

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]

    @property
    def context(self) -> int:
        """The most positions of a sequence."""
        return int(self.model.config.max_position_embeddings)

    def weights(self, version: int) -> list[tuple[str, Tensor]]:
        """Of one version, each tied tensor once."""
        if version not in self._made:
            self._made[version] = list(self._make(version))
            for old in list(self._made)[:-REMEMBERED]:
                del self._made[old]
        return self._made[version]

    def _make(self, version: int) -> Iterator[tuple[str, Tensor]]:
        noise = torch.Generator().manual_seed(version)
        for name, tensor in self._first.items():
            if version and tensor.ndim > 1:
                drawn = torch.randn(tensor.shape, generator=noise) * (NOISE * tensor.float().std())
                yield name, (tensor.float() + drawn).to(self.dtype)
            else:
                yield name, tensor

    @torch.no_grad()
    def logprobs(self, prompt: list[int], output: list[int], version: int, temperature: float = 1.0) -> Float32Array:
        """Of the tokens of `output`, `[tokens]`, by the code that training scores with."""
        count = len(output)
        trajectory = Trajectory(
            prompt_ids=np.asarray(prompt, np.int32),
            output_ids=np.asarray(output, np.int32),
            logprobs=np.zeros(count, np.float32),
            versions=np.full(count, version, np.int32),
            loss_mask=np.ones(count, np.bool_),
            finish_reason="length",
        )
        micro_batches = make_micro_batches([sample_of(trajectory, trajectory.loss_mask)], 10**6)
        policy = Policy(self._at(version), temperature, chunk=1024)
        scored: Float32Array = policy.logprobs(micro_batches[0])[0].numpy()
        return scored

    @torch.no_grad()
    def scores(self, prompt: list[int], version: int) -> Tensor:
        """The logits of the token after `prompt`, `[vocabulary]`, by transformers' own attention."""
        return self._plain(version, torch.tensor([prompt]))[0, -1].double()

    @torch.no_grad()
    def kept(self, prompt: list[int], answer: Completion) -> Float32Array:
        """Log-probabilities `[tokens]` where new weights go on under the cache of the old ones: each token is fed once,
        by the weights that sampled the one after it."""
        past, found = DynamicCache(config=self.model.config), []
        tokens, fed = [*prompt, *answer.output_ids], 0
        for start, end in _segments(answer.versions):
            last = len(prompt) + end - 1  # of the segment's tokens the last is fed by whoever samples the next
            model = self._at(answer.versions[start])
            with _own_attention(model):
                out = model(input_ids=torch.tensor([tokens[fed:last]]), use_cache=True, **{CACHE: past})
            fed = last
            rows = out.logits[0, -(end - start) :].log_softmax(-1)
            found.append(rows.gather(1, torch.tensor(answer.output_ids[start:end])[:, None])[:, 0].numpy())
        return np.concatenate(found)

    def _plain(self, version: int, ids: Tensor) -> Tensor:
        model = self._at(version)
        with _own_attention(model):
            return model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]

    def _at(self, version: int) -> torch.nn.Module:
        """The model with the weights of `version`."""
        if self._loaded != version:
            parameters = dict(self.model.named_parameters())
            with torch.no_grad():
                for name, tensor in self.weights(version):
                    parameters[name].copy_(tensor)
            self._loaded = version
        return self.model


class _own_attention:  # noqa: N801 (reads as a function)
    """`with`: the model attends as transformers itself does, without our attention function."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.before = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")

    def __exit__(self, *_: object) -> None:
        self.model.set_attn_implementation(self.before)


def _segments(versions: list[int]) -> Iterator[tuple[int, int]]:
    """`(first, behind the last)` of each run of tokens of one version."""
    start = 0
    for at in range(1, len(versions) + 1):
        if at == len(versions) or versions[at] != versions[start]:
            yield start, at
            start = at


def filtered(scores: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """The distribution that is to be sampled from, enumerated: temperature, then the `top_k` likeliest, of those the
    fewest that reach `top_p`, each time renormalised. `[vocabulary]`."""
    p = (scores / temperature).softmax(-1)
    order = p.argsort(descending=True).tolist()
    kept = order[: top_k or len(order)]
    mass = sum(p[i].item() for i in kept)
    nucleus, reached = [], 0.0
    for i in kept:
        if reached >= top_p:
            break
        nucleus.append(i)
        reached += p[i].item() / mass
    out = torch.zeros_like(p)
    out[nucleus] = p[nucleus] / p[nucleus].sum()
    return out

"""The numbers of a decoder's shape that costs depend on, from the catalogue or from any Hugging Face config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleuve.config.models import ModelFacts, inspect_model, resolve_model
from fleuve.config.nearest import did_you_mean, nearest
from fleuve.errors import UserError
from fleuve.simulate.hardware import catalogue_models

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder with grouped-query attention and a gated feed-forward layer of three matrices (Llama, Qwen)."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    attention_bias: bool = False

    @property
    def layer_parameters(self) -> int:
        """Matrices, biases and norms of one layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        bias = self.head_dim * (self.heads + 2 * self.kv_heads) * self.attention_bias
        return attention + bias + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """All of them; a tied output head is counted once."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + self.hidden + embeddings

    def adapter_parameters(self, rank: int) -> int:
        """Those of adapters of this rank beside all matrices of the layers: of each, rank times rows and columns."""
        edges = 7 * self.hidden + 2 * (self.heads + self.kv_heads) * self.head_dim + 3 * self.intermediate
        return self.layers * rank * edges

    @property
    def active_parameters(self) -> int:
        """Those that every token is multiplied with: all but the input embedding, of which it takes one row."""
        return self.layers * self.layer_parameters + self.hidden + self.vocab * self.hidden

    @property
    def attention_width(self) -> int:
        """Of all query heads together."""
        return self.heads * self.head_dim

    def kv_bytes(self, dtype: str) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES[dtype]

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the whole model."""
        return self.parameters * BYTES[dtype]

    def check_split(self, devices: int, key: str) -> None:
        """Tensor parallelism gives each device whole attention heads.

        Raises:
            UserError: `devices` do not divide them; `key` is what the error calls the setting.
        """
        if self.heads % devices:
            nearest = max(d for d in range(1, devices) if self.heads % d == 0)
            raise UserError(
                f"{key} = {devices} does not divide the {self.heads} attention heads of {self.name}; {nearest} does"
            )

    def forward_flops(self, tokens: float, pairs: float) -> float:
        """Operations of a forward pass: two for every parameter and token, and four (a product and a sum for the score,
        the same for the value) for every pair of a query and a key, for each unit of attention's width and layer.

        Args:
            pairs: queries and the keys they see: L²/2 for a causal sequence of L tokens.
        """
        return 2 * self.active_parameters * tokens + 4 * self.layers * self.attention_width * pairs


def model_names() -> list[str]:
    """What the catalogue has."""
    return sorted(catalogue_models())


def load_model_shape(path: str, key: str = "simulate.model") -> ModelShape:
    """From a name in the catalogue, a config.json, a model directory, a `builtin:NAME`, or a hub name whose files are
    on this machine; `key` is what errors call the setting.

    Raises:
        UserError: there is no such model (names the nearest), or its config.json lacks what is needed.
    """
    table = catalogue_models().get(path.lower())
    if table is not None:
        return ModelShape(name=path.lower(), **{key: value for key, value in table.items() if key != "hub"})
    config = _config_path(path, key)
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{key} = {path}: {config} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{key} = {path}: {config} holds no JSON object")
    return _from_config(path, content, config, key)


def _config_path(path: str, key: str) -> Path:
    place = Path(resolve_model(path)).expanduser()
    if place.is_file():
        return place
    if (place / "config.json").is_file():
        return place / "config.json"
    if place.exists() or path.startswith("builtin:"):
        inspect_model(path, key)
        raise UserError(f"{key} = {path}: no config.json in it")
    if (similar := nearest(path.rpartition("/")[2], model_names(), cutoff=0.7)) is not None:
        known = ", ".join(model_names())
        raise UserError(f"{key} = {path}: no such model in the catalogue ({known}){did_you_mean(similar)}")
    facts: ModelFacts = inspect_model(path, key)
    if facts.directory is None:
        known = ", ".join(model_names())
        raise UserError(
            f"{key} = {path}: its files are not on this machine; give its config.json, or a name of the catalogue "
            f"({known})"
        )
    return facts.directory / "config.json"


def _from_config(name: str, content: dict[str, Any], file: Path, key: str) -> ModelShape:
    nested = content.get("text_config")
    config: dict[str, Any] = {**content, **nested} if isinstance(nested, dict) else content

    def number(field: str, default: int | None = None) -> int:
        value = config.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise UserError(f"{key} = {name}: {file} has no {field}, so it is not a decoder whose costs are known")
        return value

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    if any(isinstance(config.get(f), int) and config[f] > 1 for f in ("num_experts", "num_local_experts")):
        raise UserError(f"{key} = {name}: {file} is of a mixture of experts; the cost models are those of dense models")
    return ModelShape(
        name=name,
        layers=number("num_hidden_layers"),
        hidden=hidden,
        intermediate=number("intermediate_size"),
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", hidden // heads),
        vocab=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", config.get("model_type") == "qwen2")),
    )

"""Tiny random models, a character-level tokenizer, and engines over them."""

from __future__ import annotations

import string
from collections.abc import Iterable

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fleuve.engine.engine import Engine, Outcome
from fleuve.engine.scheduler import Limits
from fleuve.modeling.loading import build_model
from fleuve.types import Completion, GenerationRequest, SamplingParams

TINY = {
    "model_type": "llama",
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ ';' }}{% endfor %}assistant: "


def tiny_model(seed: int = 0, **changes: object) -> torch.nn.Module:
    """A random model of 0.1 M parameters; the same seed gives the same one."""
    torch.manual_seed(seed)
    return build_model({**TINY, **changes}).eval()


def character_tokenizer() -> PreTrainedTokenizerFast:
    characters = ["<pad>", "<bos>", "<eos>", *sorted(set(string.printable) - set("\t\r\x0b\x0c"))]
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", chat_template=TEMPLATE
    )


def engine_of(model: torch.nn.Module, **options: object) -> Engine:
    """An engine over `model`; limits and engine options by name."""
    limits = {"max_running": 16, "kv_cache_tokens": 16384, "prefill_tokens": 64, "context": 512}
    limits |= {k: options.pop(k) for k in tuple(options) if k in limits}
    return Engine(model, Limits(**limits), **options)


def ask(request_id: object, prompt: list[int], new: int = 20, **sampling: object) -> GenerationRequest:
    """A request; answers run to their full length unless told otherwise."""
    params = SamplingParams(max_new_tokens=new, **({"ignore_eos": True} | sampling))
    return GenerationRequest(request_id=str(request_id), input_ids=prompt, sampling=params)


def prompt_of(number: int, length: int) -> list[int]:
    """Some prompt of this length; another number gives another one."""
    return [3 + (number * 31 + i * i * 7 + i) % 90 for i in range(length)]


def run_all(engine: Engine, requests: Iterable[GenerationRequest]) -> dict[str, Completion]:
    """Every answer by its request's id."""
    for request in requests:
        engine.add(request)
    return drain(engine)


def drain(engine: Engine) -> dict[str, Completion]:
    """Steps until nothing is left."""
    ended: dict[str, Completion] = {}
    while not engine.idle:
        ended |= by_id(engine.step())
    return ended


def by_id(outcome: Outcome) -> dict[str, Completion]:
    """The completions of one step; an error in it is raised."""
    for end in outcome.ended:
        if isinstance(end, tuple):
            raise end[1]
    return {end.request_id: end for end in outcome.ended if isinstance(end, Completion)}


@torch.inference_mode()
def score(model: torch.nn.Module, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probabilities of `output` after `prompt` by one plain forward pass of transformers' own attention."""
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    finally:
        model.set_attn_implementation(own)
    return (logits.double() / temperature).log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0].tolist()

"""A prompt that cannot fit is refused soon, and one that fits is tokenised as it always is."""

from __future__ import annotations

import time

import pytest
from served import Client
from tiny_engine import character_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fleuve.engine.engine import RequestError
from fleuve.engine.prompts import PIECE, tokens_of
from fleuve.engine.server import MAX_BODY


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerFast:
    """With long tokens: of runs of a letter, and of blanks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["a" * 64 + " " * 64 + "the quick brown fox " * 20] * 8, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("text", ["the quick brown fox ", "a", " ", "a ", "é", "the quick\n\n\n", "xyz"])
def test_whatever_fits_is_tokenised_as_a_whole(bpe: PreTrainedTokenizerFast, text: str) -> None:
    whole = text * (3 * PIECE // len(text))
    expected = bpe.encode(whole)
    assert tokens_of(bpe, whole, context=len(expected)) == expected
    with pytest.raises(RequestError, match="characters are"):
        tokens_of(bpe, whole, context=len(expected) // 3)


def test_one_that_fills_the_largest_body_is_refused_at_once() -> None:
    tokenizer = character_tokenizer()
    started = time.perf_counter()
    with pytest.raises(RequestError, match=r"the first 16384 of the prompt's 8000000 characters are"):
        tokens_of(tokenizer, "1" * 8_000_000, context=512)
    assert time.perf_counter() - started < 5.0  # 20 ms on a quiet machine


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_over_http_too(client: Client, path: str) -> None:
    text = "1+" * (MAX_BODY // 2 - 1000)
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    started = time.perf_counter()
    reply = await client.json(path, body | {"max_tokens": 4}, status=400)
    assert "the model's context is 512" in reply["error"]["message"]
    assert time.perf_counter() - started < 20.0

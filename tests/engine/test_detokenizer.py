"""Text from tokens one by one, with a byte-level tokenizer whose characters may take several tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fleuve.engine.detokenizer import Detokenizer


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
    core.train_from_iterator(["the answer is 42, then the next step is to add the numbers"] * 10, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


TOKENIZER = byte_level_tokenizer()


def push_all(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    """What `take` and at last `finish` give, token by token, until a stop string."""
    pieces = []
    for token in ids:
        detokenizer.push(token)
        pieces.append(detokenizer.take())
        if detokenizer.stopped:
            break
    return [*pieces, detokenizer.finish()]


@settings(max_examples=200)
@given(st.text(max_size=20), st.text(max_size=30))
def test_the_pieces_together_are_the_text(prompt: str, answer: str) -> None:
    ids = TOKENIZER.encode(answer)
    detokenizer = Detokenizer(TOKENIZER, TOKENIZER.encode(prompt))
    assert "".join(push_all(detokenizer, ids)) == TOKENIZER.decode(ids) == detokenizer.text


def test_a_character_of_several_tokens_comes_when_it_is_whole() -> None:
    ids = TOKENIZER.encode("a🙂b")
    assert len(ids) == 6
    assert push_all(Detokenizer(TOKENIZER, []), ids) == ["a", "", "", "", "🙂", "b", ""]


def test_a_character_cut_off_at_the_end_is_marked_as_such() -> None:
    ids = TOKENIZER.encode("a🙂")[:3]
    assert push_all(Detokenizer(TOKENIZER, []), ids) == ["a", "", "", "�"]


@settings(max_examples=200)
@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_is_cut_before_the_stop_string_that_is_complete_first(answer: str, stop: list[str]) -> None:
    pieces = push_all(Detokenizer(TOKENIZER, [], stop), TOKENIZER.encode(answer))
    completed = [(at + len(s), at) for s in stop if (at := answer.find(s)) >= 0]
    assert "".join(pieces) == answer[: min(completed)[1] if completed else len(answer)]


def test_what_may_begin_a_stop_string_is_held_back_until_it_is_clear() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], ["bcd"])
    assert push_all(detokenizer, TOKENIZER.encode("abcabc")) == ["a", "", "", "bca", "", "", "bc"]


def test_special_tokens_have_no_text() -> None:
    ids = [*TOKENIZER.encode("ab"), TOKENIZER.eos_token_id]
    assert "".join(push_all(Detokenizer(TOKENIZER, []), ids)) == "ab"

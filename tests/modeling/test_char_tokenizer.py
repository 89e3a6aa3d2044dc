"""The character tokenizer: one token a character, nothing added, nothing lost."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from fleuve.errors import UserError
from fleuve.modeling.char_tokenizer import EOS, PAD, UNKNOWN, build_char_tokenizer

ALPHABET = "abcxyz0123456789+-*=;?# \n.é"
TOKENIZER = build_char_tokenizer(ALPHABET)


@given(st.text(alphabet=ALPHABET))
def test_every_character_is_one_token_and_decoding_gives_the_text_back(text: str) -> None:
    ids = TOKENIZER(text).input_ids
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_the_end_token_is_not_part_of_the_decoded_text_when_special_tokens_are_skipped() -> None:
    ids = [*TOKENIZER("a+b").input_ids, TOKENIZER.eos_token_id]
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "a+b"
    assert TOKENIZER.decode(ids) == f"a+b{EOS}"


def test_special_tokens_come_first_and_the_alphabet_in_order() -> None:
    assert TOKENIZER.convert_tokens_to_ids([PAD, EOS, UNKNOWN, *ALPHABET]) == list(range(len(ALPHABET) + 3))
    assert len(TOKENIZER) == len(ALPHABET) + 3
    assert TOKENIZER.bos_token_id is None


def test_a_character_outside_the_alphabet_is_unknown_and_its_neighbours_are_not() -> None:
    assert TOKENIZER.convert_ids_to_tokens(TOKENIZER("aQb").input_ids) == ["a", UNKNOWN, "b"]


def test_it_is_the_same_after_saving_and_loading(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "a=1+2 ;\n#3é"
    assert loaded(text).input_ids == TOKENIZER(text).input_ids
    assert loaded.decode(loaded(text).input_ids) == text
    assert (loaded.eos_token_id, loaded.pad_token_id) == (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id)


@pytest.mark.parametrize(("alphabet", "says"), [("abca", "repeated: 'a'"), ("", "at least one character")])
def test_an_alphabet_names_each_character_once(alphabet: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        build_char_tokenizer(alphabet)

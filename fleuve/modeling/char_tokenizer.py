"""A tokenizer for small models of one's own: every character of an alphabet is one token."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from fleuve.errors import UserError

PAD, EOS, UNKNOWN = SPECIAL = ("<pad>", "<eos>", "<unk>")


def build_char_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """`<pad>` is 0, `<eos>` 1, `<unk>` 2 and the characters of `alphabet` follow in order.

    Adds no token by itself at either end. A character outside the alphabet becomes `<unk>`. Saves and loads as any
    Hugging Face tokenizer.

    Raises:
        UserError: the alphabet is empty or repeats a character.
    """
    repeated = sorted({c for c in alphabet if alphabet.count(c) > 1})
    if not alphabet or repeated:
        raise UserError(
            f"an alphabet names each character once; repeated: {''.join(repeated)!r}"
            if repeated
            else "an alphabet needs at least one character"
        )
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )

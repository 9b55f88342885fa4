"""Write the embedded model's byte-level tokenizer: ``python scripts/make_tinycode_tokenizer.py``.

Token b is byte b for 0 to 255; then come the special tokens, and reserved ones up to the model's
vocabulary of 272, so that tokenizer and output matrix have the same length. There are no merges and
nothing is trained. A folder as argument is written instead of ``data/tinycode``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>")
VOCABULARY = 272
CONTEXT = 2048
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% elif message['role'] in ('user', 'system') %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% else %}{{ raise_exception('unknown role ' + message['role']) }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_characters() -> list[str]:
    """The character that the byte-level pre-tokenizer writes for each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def build() -> PreTrainedTokenizerFast:
    """The tokenizer, with a chat template that marks answer and eos as generated."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    reserved = [f"<|reserved_{number}|>" for number in range(VOCABULARY - 256 - len(SPECIAL))]
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in [*SPECIAL, *reserved]]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    """Write the tokenizer's files and say so."""
    folder = Path(
        sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent / "data" / "tinycode"
    )
    tokenizer = build()
    assert len(tokenizer) == VOCABULARY
    tokenizer.save_pretrained(folder)
    print(f"wrote {folder}: {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()

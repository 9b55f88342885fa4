"""Write the embedded model's byte-level tokenizer: ``python scripts/make_tinycode_tokenizer.py``.

It is that of ``tokenizer=byte``, with the model's context. Nothing is trained. A folder as argument
is written instead of ``data/tinycode``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from specheads.data.tokenizers import byte_tokenizer

VOCABULARY = 272  # rows of the model's output matrix, as many as there are tokens
CONTEXT = 2048


def main() -> None:
    """Write the tokenizer's files and say so."""
    folder = Path(
        sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent / "data" / "tinycode"
    )
    tokenizer = byte_tokenizer(CONTEXT)
    assert len(tokenizer) == VOCABULARY
    tokenizer.save_pretrained(folder)
    print(f"wrote {folder}: {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()

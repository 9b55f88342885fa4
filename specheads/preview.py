"""Show what a model would learn from records: ``python -m specheads.preview data=<source> model=``.

Learned tokens are in colour (in brackets where there is none), special tokens are shown by name.
Then come counts of the whole training part: tokens, learned ones, records left out by reason, and
how full packed rows are. Exit code 1: nothing in it can be learned.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from specheads.config import ConfigError, PreviewConfig, RunError
from specheads.config.main import answer, entry_point
from specheads.system.terminal import harmless, wants_color, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from specheads.data.schema import Record


def run(config: PreviewConfig) -> None:
    """Read, encode, print."""
    from specheads.data.chat import Documents, encode_records, pick, share
    from specheads.data.load import load_records
    from specheads.data.pack import PackedBatches
    from specheads.data.schema import Dropped, Tally
    from specheads.models.base import load_tokenizer

    data = config.data
    tokenizer = load_tokenizer(
        config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    dropped = Dropped()
    records = load_records(data, "train", dropped=dropped)
    _show(config, pick(records, config.num_records, config.seed), tokenizer)
    try:
        documents = Documents(tokenizer, seq_len=data.seq_len)
        encoded = encode_records(records, documents, Tally(data.max_bad_fraction, dropped))
    except ConfigError as error:
        raise RunError(str(error)) from None
    counts = encoded.counts
    _write(f"train: {encoded.summary()}")
    if data.max_records and len(records) == data.max_records:
        _write(f"       a sample; data.max_records={data.max_records:,}, 0 takes every record")
    _write(f"mask: {share(counts['learned'], counts['tokens'])}")
    if dropped:
        _write(f"read: {dropped.summary()}")
    shape = {"seq_len": data.seq_len, "rows": 1}  # counted, and never laid out
    packed = PackedBatches(encoded.documents, **shape, seed=config.seed, pad_token_id=0)
    _write(
        f"packed: {packed.rows_per_epoch:,} rows of {data.seq_len} tokens,"
        f" {100 * packed.efficiency:.1f}% full"
    )
    left_out = {row["where"]: row["error"] for row in dropped.rows.values()}
    full = {"rows": packed.rows_per_epoch, "seq_len": data.seq_len, "full": packed.efficiency}
    answer({"counts": counts, "left_out": left_out, **full})


def _show(
    config: PreviewConfig, chosen: Sequence[Record], tokenizer: PreTrainedTokenizerBase
) -> None:
    from specheads.data.chat import PLAIN, Encoder, render_mask, share
    from specheads.data.schema import RecordError
    from specheads.losses.cross_entropy import IGNORE

    encoding = sys.stdout.encoding or "utf-8"
    shown = all(each.encode(encoding, "ignore").decode(encoding) == each for each in PLAIN)
    brackets = PLAIN if shown else (">>>", "<<<")
    marks = None if wants_color(config.color, sys.stdout) else brackets
    encoder = Encoder(tokenizer)
    for number, record in enumerate(chosen, 1):
        title = f"[{number} of {len(chosen)}] {record['id']} ({record['kind']})"
        try:
            encoded = encoder(record)
        except RecordError as error:
            _write(f"{title}: cannot be encoded: {error}\n")
            continue
        learned = int((encoded.labels != IGNORE).sum())
        long = len(encoded.input_ids) > config.data.seq_len
        note = f", longer than data.seq_len={config.data.seq_len}" if long else ""
        _write(f"{title}: {share(learned, len(encoded.input_ids))}{note}")
        write(render_mask(encoded, tokenizer, marks) + "\n\n")


def _write(line: str) -> None:
    write(harmless(line) + "\n")


main = entry_point("preview", PreviewConfig, run, literal=("model",))


if __name__ == "__main__":
    main()

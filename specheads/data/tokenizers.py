"""Tokenizers of models that are trained from scratch: bytes, byte-level BPE, or another model's.

Both kinds made here know every text: ids 0 to 255 are the bytes, id b is byte b, then come the
merged pairs (BPE, in the order learned; bytes alone have none), then :data:`SPECIAL` and reserved
tokens, :data:`NUM_SPECIAL` in all. No text is added around what is encoded, so that
``decode(encode(text)) == text``, special tokens spelled out in it included.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specheads.config import ConfigError, TrainConfig
from specheads.data.load import load_records
from specheads.data.rendering import OUR_TEMPLATE
from specheads.data.schema import Dropped, Record, tokenizer_digest
from specheads.models.base import load_tokenizer, num_ids
from specheads.runs.directory import is_used
from specheads.system import dist
from specheads.system.errors import did_you_mean
from specheads.system.files import whole_folder

SPECIAL = ("<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>")
NUM_SPECIAL = 16  # with <|reserved_0|> and so on, for those who tune the model to more roles
_FOLDER, _MADE_FROM = "tokenizer", "made_from.json"
_ROUND = 64  # rows of a new model's embedding come in multiples of it: matrix products like that


def choose_tokenizer(cfg: TrainConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer that ``cfg.tokenizer`` asks for, on every rank the same.

    ``byte``: :func:`byte_tokenizer`. ``bpe``: :func:`bpe_tokenizer` of the run's training records,
    which every rank learns, and rank 0 keeps in ``tokenizer/`` of the run directory for a resumed
    run.
    A folder or a name on the hub: that model's. Empty: that of ``model.name``.

    Raises:
        ConfigError: if there is none of that name, or the one of the run to resume is missing or
            was changed.
        RunError: if the disk is full.
    """
    trust = cfg.model.trust_remote_code
    if cfg.tokenizer == "byte":
        return byte_tokenizer(_context(cfg))
    if cfg.tokenizer == "bpe":
        return _bpe_of_run(cfg)
    if not cfg.tokenizer:
        return load_tokenizer(cfg.model.name, revision=cfg.model.revision, trust_remote_code=trust)
    try:
        return load_tokenizer(cfg.tokenizer, trust_remote_code=trust)
    except ConfigError as error:
        detail = str(error).removeprefix(f"model.name={cfg.tokenizer}: ")
        raise ConfigError(
            f"tokenizer={cfg.tokenizer} is neither byte nor bpe nor a model that has one"
            + did_you_mean(cfg.tokenizer, ("byte", "bpe"), detail)
        ) from None


def byte_tokenizer(context: int | None = None) -> PreTrainedTokenizerFast:
    """Return the tokenizer whose id b is byte b, followed by the special tokens; 272 in all.

    Args:
        context: the longest text that its model takes, in tokens, where that is known.
    """
    return _assemble([], "byte", context)


def bpe_tokenizer(
    texts: Iterable[str], size: int, context: int | None = None
) -> PreTrainedTokenizerFast:
    """Learn byte-level BPE (Sennrich et al., arXiv:1508.07909; on bytes: GPT-2); deterministic.

    Texts are first cut into words as GPT-2 does; no merge crosses a cut.

    Args:
        texts: what the merges are learned from.
        size: tokens in all, more than the bytes and the special tokens. There are fewer where no
            pair occurs twice any more.
        context: the longest text that its model takes, in tokens, where that is known.
    """
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size - NUM_SPECIAL,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    learner.train_from_iterator(texts, trainer)
    merges = json.loads(learner.to_str())["model"]["merges"]
    return _assemble([(left, right) for left, right in merges], "bpe", context)


def _assemble(
    merges: list[tuple[str, str]], name: str, context: int | None
) -> PreTrainedTokenizerFast:
    # the learner orders bytes by the characters that stand for them; here id b is byte b
    characters = bytes_to_unicode()
    vocabulary = {characters[byte]: byte for byte in range(256)}
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))  # two merges may spell one token
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(merges))
    inner.decoder = decoders.ByteLevel()
    reserved = [f"<|reserved_{number}|>" for number in range(NUM_SPECIAL - len(SPECIAL))]
    special = [AddedToken(text, special=True, normalized=False) for text in [*SPECIAL, *reserved]]
    inner.add_special_tokens(special)
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        chat_template=OUR_TEMPLATE,
        clean_up_tokenization_spaces=False,
        **({"model_max_length": context} if context else {}),
    )
    made.name_or_path = name
    return made


def complete_init(init: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return ``model.init`` with what follows from the tokenizer, to build a model from.

    ``vocab_size``, where it is absent or 0, becomes the number of token ids rounded up to a
    multiple of 64. ``pad_token_id``, ``bos_token_id`` and ``eos_token_id``, where absent, become
    the tokenizer's: transformers' defaults are ids of Llama's vocabulary, at which generation
    would stop, and whose embedding, for the padding, never learns.

    Raises:
        ConfigError: if a given ``vocab_size`` is too small, or a given id is another token's.
    """
    values = dict(init)
    if values.get("model_type") not in CONFIG_MAPPING:
        return values  # build_from_init says so
    known, name = CONFIG_MAPPING[values["model_type"]](), tokenizer.name_or_path
    ids, given = num_ids(tokenizer), values.get("vocab_size")
    if hasattr(known, "vocab_size") and not given:
        values["vocab_size"] = -(-ids // _ROUND) * _ROUND
    elif isinstance(given, int) and given < ids:
        raise ConfigError(
            f"model.init.vocab_size is {given}, the tokenizer {name} has {ids} token ids;"
            " 0 takes it from the tokenizer"
        )
    for role in ("pad", "bos", "eos"):
        key = f"{role}_token_id"
        own = getattr(tokenizer, key)
        if own is None or not hasattr(known, key):
            continue
        if values.get(key) is not None:
            if own not in (values[key] if isinstance(values[key], list) else [values[key]]):
                raise ConfigError(
                    f"model.init.{key} is {values[key]}, {role} of the tokenizer {name} is {own};"
                    " left out, it is the tokenizer's"
                )
        elif role != "pad" or own != tokenizer.eos_token_id:  # else eos would never be learned
            values[key] = own
    return values


def _bpe_of_run(cfg: TrainConfig) -> PreTrainedTokenizerBase:
    own = Path(cfg.run_dir) / _FOLDER
    wanted: dict[str, Any] = {"tokenizer": cfg.tokenizer, "tokenizer_size": cfg.tokenizer_size}
    if cfg.resume and (cfg.resume != "auto" or is_used(own.parent)):
        # the weights know this one, whatever the data and the library have become since
        kept = own if cfg.resume == "auto" else Path(cfg.resume).resolve().parent.parent / _FOLDER
        path = kept / _MADE_FROM
        made_from = json.loads(path.read_text()) if path.is_file() else {}
        if not wanted.items() <= made_from.items():
            raise ConfigError(
                f"resume={cfg.resume}: the run has no tokenizer in {kept} that was made with"
                f" tokenizer={cfg.tokenizer} tokenizer_size={cfg.tokenizer_size}"
            )
        tokenizer = load_tokenizer(str(kept))
        if tokenizer_digest(tokenizer) != made_from["digest"]:
            raise ConfigError(f"{kept} was changed after the run began to train with it")
        if dist.is_main() and kept != own and not cfg.dry_run:
            with whole_folder(own) as fresh:
                shutil.copytree(kept, fresh, dirs_exist_ok=True)
        return tokenizer
    records = load_records(cfg.data, "train", dropped=Dropped())
    learned = bpe_tokenizer(_texts(records), cfg.tokenizer_size, _context(cfg))
    if dist.is_main() and not cfg.dry_run:
        made_from = {**wanted, "digest": tokenizer_digest(learned)}
        with whole_folder(own) as fresh:
            learned.save_pretrained(fresh)
            (fresh / _MADE_FROM).write_text(json.dumps(made_from, indent=2) + "\n")
        print(
            f"tokenizer: {len(learned):,} tokens (tokenizer_size={cfg.tokenizer_size})"
            f" learned from {len(records):,} records, kept in {own}",
            flush=True,
        )
    return learned


def _texts(records: Iterable[Record]) -> Iterator[str]:
    for record in records:
        yield from (message["content"] for message in record.get("messages", ()))
        yield from (record[key] for key in ("prompt", "completion", "text") if key in record)


def _context(cfg: TrainConfig) -> int | None:
    length = cfg.model.init.get("max_position_embeddings")
    return length if isinstance(length, int) else None

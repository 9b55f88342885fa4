"""What every recipe starts from: records as packed rows, a base model, heads, prompts to decode.

Records are read, or looked at where they are streamed, before a model is loaded. A base model that
does not exist yet is built from ``model.init``, with a tokenizer of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.config import ConfigError, HeadsConfig, TrainConfig
from specheads.config.training import DraftConfig
from specheads.data.chat import Documents, Encoder, encode_records, learned_counts, most_frequent
from specheads.data.load import load_records, read_jsonl
from specheads.data.pack import GrowingBatches, PackedBatches, check_isolation, one_pass
from specheads.data.schema import Dropped, Record, Tally
from specheads.data.stream import RecordStream, StreamedBatches
from specheads.data.tokenizers import choose_tokenizer, complete_init
from specheads.models import base as bases
from specheads.models import draft as drafts
from specheads.models import sharded
from specheads.models.adapters import add_adapter, check_tunable, require_grad
from specheads.models.checkpoint import KINDS, check_digest, load_heads, read_config
from specheads.models.kinds import Heads
from specheads.models.manifest import one_line
from specheads.models.mtp import MtpHeads
from specheads.models.output import OutputLayer, output_layer
from specheads.models.quantize import METHODS, quantization_of
from specheads.models.support import tree_support
from specheads.system import dist, hardware
from specheads.system.errors import one_of, refuse
from specheads.system.files import shipped_export, tinycode_dir
from specheads.training import ranks
from specheads.training.engine import Spread


@dataclass(frozen=True)
class Read:
    """A run's records, before they are encoded.

    Attributes:
        train: the training records, or the stream of them.
        heldout: the held-out records.
        dropped: records that could not be used.
    """

    train: list[Record] | RecordStream
    heldout: list[Record]
    dropped: Dropped


def read_data(cfg: TrainConfig) -> Read:
    """Read all records; of streamed ones the beginning, and those that are held out.

    A recipe calls this first: what is wrong with the data is then known before a model is loaded.

    Raises:
        ConfigError: if there is no such data, too many records cannot be used, nothing is left, or
            the run needs all of them at one time and they are streamed.
    """
    dropped = Dropped()
    if not cfg.data.streaming:
        train = load_records(cfg.data, "train", dropped=dropped)
        return Read(train, load_records(cfg.data, "heldout", dropped=dropped), dropped)
    needs_all = {
        "data.growth": cfg.data.growth,
        "features.dir": "" if cfg.features.dir == "auto" else cfg.features.dir,
        "draft.stored": cfg.draft.stored,
        "heads.lm_head": cfg.heads.lm_head if "pruned" in cfg.heads.lm_head else "",
        "tokenizer": "bpe" if cfg.tokenizer == "bpe" else "",
    }
    refuse(
        {
            f"{key}={value} needs all training records at one time, which data.streaming=true does"
            " not hold; expected data.streaming=false": value
            for key, value in needs_all.items()
        }
    )
    stream = RecordStream(cfg.data, dropped)
    return Read(stream, stream.heldout, dropped)


@dataclass(frozen=True)
class Data:
    """A run's data.

    Attributes:
        train: endless micro-batches of this rank.
        heldout: packed held-out rows, always the same.
        heldout_records: the records that ``heldout`` is made of.
        summary: counts, for the export.
        dropped: records that could not be used.
    """

    train: PackedBatches | GrowingBatches | StreamedBatches
    heldout: list[dict[str, Any]]
    heldout_records: list[Record]
    summary: dict[str, Any]
    dropped: Dropped

    def quarantine(self, run_dir: Path) -> None:
        """Write the records that could not be used to ``quarantine.jsonl``, if there are any.

        A stream goes on with it while it is read, on each rank in a file of its own.
        """
        path = run_dir / "quarantine.jsonl"
        if isinstance(self.train, StreamedBatches):
            self.train.write_quarantine(path)
        elif self.dropped.rows and dist.is_main():
            self.dropped.write(path)
            print(f"quarantine: {len(self.dropped.rows):,} records in {path}", flush=True)


def load_base(
    cfg: TrainConfig, *, train_base: bool = False, weights: bool = True
) -> tuple[PreTrainedModel, OutputLayer, PreTrainedTokenizerBase]:
    """Return the base model on this rank's device, its output layer, and its tokenizer.

    Args:
        cfg: the run's settings.
        train_base: whether it is going to be tuned: by its adapter, if the settings have one,
            which is added here.
        weights: False only describes it, on the meta device: nobody here holds it.

    Raises:
        ConfigError: if one of them is missing, or they or the loss do not fit together.
    """
    model = cfg.model
    own = f"tokenizer={cfg.tokenizer} is for models trained from scratch; model.name={model.name}"
    refuse({f"{own} has its own": cfg.tokenizer})
    if train_base:
        check_tunable(model.quantization, cfg.adapter)
        check_no_cache(cfg)
        told = f"model.device_map={model.device_map} spreads a frozen base; {cfg.recipe} trains it"
        refuse({told: model.device_map})
    trusted, which = model.trust_remote_code, model.revision
    tokenizer = bases.load_tokenizer(model.name, revision=which, trust_remote_code=trusted)
    how: bases.Loading = {"dtype": model.dtype, "device": cfg.device, "attn": model.attn}
    how |= {"trust_remote_code": trusted, "device_map": model.device_map or None}
    if weights:
        method = model.quantization
        base = _in_parts(cfg) or bases.load_base_model(
            model.name, revision=which, quantization=method, **how
        )
        with sharded.runnable(base):
            output = output_layer(base)
        disk = (
            f"model.device_map={model.device_map} puts the output matrix on disk, which heads and"
        )
        refuse({f"{disk} losses read; give lm_head a device": output.weight.is_meta})
    else:
        base = bases.described(model.name, revision=which, trust_remote_code=trusted)
        output = OutputLayer(base.get_output_embeddings())
    bases.check_tokenizer(tokenizer, base)
    if train_base and cfg.adapter.kind == "lora":
        add_adapter(base, cfg.adapter, seed=cfg.seed)
    if train_base and model.gradient_checkpointing:
        bases.checkpoint_layers(base)
    if not train_base:  # also where a cache of features stands in for it, and nobody else asks
        require_grad(base, False)
    return base, output, tokenizer


def _in_parts(cfg: TrainConfig) -> PreTrainedModel | None:
    """Return the base in parts over the ranks of ZeRO-3, or None where every rank has to hold it.

    That is where the base itself is not run in training's steps, or layers of it are copied, in a
    dry run, whose passes run without DeepSpeed, and where a line says why.
    """
    model, copied = cfg.model, cfg.recipe == "distill" and cfg.draft.start == "base"
    elsewhere = cfg.features.dir not in ("", "auto") or cfg.draft.stored or cfg.dry_run or copied
    if elsewhere or model.quantization != "none" or Spread.from_config(cfg.deepspeed).stage < 3:
        return None
    why = "autocast=float16 rounds its float32 weights while it trains"
    if cfg.autocast != "float16" or model.dtype == "float16":
        base, why = sharded.load_sharded(
            model.name, ranks.join(cfg), dtype=bases.torch_dtype(model.dtype), attn=model.attn,
            revision=model.revision, trust_remote_code=model.trust_remote_code,
        )  # fmt: skip
        if base is not None:
            return base
    if dist.is_main():
        print(f"every rank reads the base whole, and divides it then: {why}", flush=True)
    return None


def check_no_cache(cfg: TrainConfig) -> None:
    """Refuse hidden states from elsewhere where the base is trained, and they change with it."""
    source = cfg.features.source
    kept = f"{source} keeps hidden states of a frozen base, as"
    refuse({f"{kept} +recipe=medusa1 has; {cfg.recipe} trains it": source})


@contextlib.contextmanager
def in_section(name: str) -> Iterator[None]:
    """Say of a value that is refused which section of the settings it stands in."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{name}.{error}") from None


def load_data(
    cfg: TrainConfig,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_base: bool,
    learn_all: bool = False,
    read: Read | None = None,
) -> Data:
    """Encode and pack the training and the held-out records.

    Args:
        cfg: the run's settings.
        base: decides the longest row, and must keep packed documents apart.
        tokenizer: of ``base``.
        train_base: whether gradients go through ``base``.
        learn_all: learn prompts too, as pre-training does.
        read: the records; None reads them now.

    Raises:
        ConfigError: if there is nothing to learn from, or ``base`` cannot keep documents apart.
    """
    if base.device.type != "meta":
        with sharded.runnable(base):
            check_isolation(base, backward=train_base)
    read = read or read_data(cfg)
    wanted, dropped, pad = cfg.data, read.dropped, int(tokenizer.pad_token_id or 0)
    quiet = not (sys.stderr.isatty() and dist.is_main())

    def documents_of(seq_len: int) -> Documents:
        context = bases.context_length(base)
        return Documents(tokenizer, seq_len=seq_len, context=context, learn_all=learn_all)

    def encode(records: Sequence[Record], seq_len: int) -> Documents:
        bar = tqdm(records, desc="tokenize", disable=quiet, leave=False)
        return encode_records(bar, documents_of(seq_len), Tally(wanted.max_bad_fraction, dropped))

    heldout = encode(read.heldout, wanted.seq_len)
    order: dict[str, Any] = {"seed": cfg.seed, "pad_token_id": pad}
    order |= {"rank": dist.rank(), "world": dist.world_size()}
    train: PackedBatches | GrowingBatches | StreamedBatches
    if isinstance(read.train, RecordStream):
        train = StreamedBatches(read.train, documents_of(wanted.seq_len), rows=wanted.rows, **order)
        counts, used = train.counts, f"{100 * train.efficiency:.0f}% of the first rows used"
        said = f"streamed from {read.train.reader.name}, {used}"
    else:
        stages: list[tuple[int, PackedBatches]] = []
        for length, share in [*wanted.growth, [wanted.seq_len, 1.0]]:
            seq_len = int(length)
            encoded = encode(read.train, seq_len)
            # shorter rows, and more of them: every stage learns from as many tokens per step
            rows = wanted.rows * wanted.seq_len // seq_len
            packed = PackedBatches(encoded.documents, seq_len=seq_len, rows=rows, **order)
            stages.append((round(share * cfg.steps) * cfg.optim.accumulation, packed))
        train = packed if len(stages) == 1 else GrowingBatches(stages)
        counts, said = encoded.counts, encoded.summary()
    if dist.is_main():
        print(f"train: {said}\nheldout: {heldout.summary()}", flush=True)
        if dropped:
            print(f"read: {dropped.summary()}", flush=True)
    summary = {key: getattr(wanted, key) for key in ("source", "path", "kinds", "seq_len")}
    # the counts of a stream are of what has been read when this is written
    summary |= {"train": counts, "heldout": heldout.counts, "dropped": dropped.counts}
    shape = {"seq_len": wanted.seq_len, "rows": min(wanted.rows, 8), "pad_token_id": pad}
    heldout_rows = one_pass(heldout.documents, **shape, max_rows=cfg.evaluate.loss_rows)
    return Data(train, heldout_rows, read.heldout, summary, dropped)


def prompt_records(
    cfg: TrainConfig, data: Data, tokenizer: PreTrainedTokenizerBase, context: int | None = None
) -> list[Record]:
    """Return ``evaluate.num_prompts`` records to decode and to calibrate on, the kinds in turn.

    They are never those of the measured set: the embedded model has a file of its own, otherwise
    they come from the held-out records.

    Args:
        cfg: the run's settings.
        data: the run's data.
        tokenizer: of the base model.
        context: the base model's, of which ``evaluate.max_new_tokens`` are left free.
    """
    records = data.heldout_records
    own = tinycode_dir() / "calibration.jsonl"
    if cfg.model.name == "tinycode" and cfg.data.source == "pycode" and own.is_file():
        records = read_jsonl(own)
    encoder, wanted, longest = Encoder(tokenizer), cfg.evaluate.num_prompts, cfg.data.seq_len
    if context is not None:
        longest = min(longest, context - cfg.evaluate.max_new_tokens)
    by_kind: dict[str, list[Record]] = {}
    for record in records:
        kind = by_kind.setdefault(record["kind"], [])
        if len(kind) < wanted and 0 < len(encoder.prompt(record)) <= longest:
            kind.append(record)
    turns = itertools.zip_longest(*by_kind.values())
    return [record for turn in turns for record in turn if record is not None][:wanted]


def heads_of(wanted: HeadsConfig, base: PreTrainedModel, output: OutputLayer) -> Any:
    """Return the heads that the section describes, as they are built, an ``nn.Module``.

    Raises:
        ConfigError: if they cannot be built for this base.
    """
    # heads.condition makes Hydra heads; those of MTP have a section and recipes of their own
    one_of("heads.kind", wanted.kind, *(name for name in KINDS if name not in ("hydra", "mtp")))
    try:
        with in_section("heads"):
            return KINDS[wanted.kind].from_settings(wanted, base, output)
    except TypeError as error:  # a word that the kind does not take
        raise ConfigError(f"heads.options={wanted.options}: {error}") from None


def build_heads(cfg: TrainConfig, base: PreTrainedModel, output: OutputLayer, data: Data) -> Any:
    """Return the heads of ``cfg.heads``, an ``nn.Module``, where the base's output layer is.

    They start as those of the export ``heads.start``; without one as their kind does.

    Raises:
        ConfigError: if they cannot be built for this base, or those of the export are others.
    """
    wanted, heads = cfg.heads, heads_of(cfg.heads, base, output)
    if wanted.start:
        _start_from(cfg, heads)
    else:
        kept = None
        if heads.token_map is not None:
            assert not isinstance(data.train, StreamedBatches)  # read_data has seen to it
            counts = learned_counts(data.train.documents, heads.vocab_size)
            kept = torch.from_numpy(most_frequent(counts, heads.num_outputs))
        heads.init_from_output(output.weight, kept)
    return heads.to(_place(output, cfg.device))


def build_mtp_heads(
    cfg: TrainConfig, base: PreTrainedModel, output: OutputLayer, *, start: str
) -> MtpHeads:
    """Return the heads of ``cfg.mtp``, ``mtp.num_heads`` - 1 layers, where the base's output is.

    Args:
        cfg: the run's settings; the heads of the export ``heads.start``, if any, come first.
        base: the base model, with or without an adapter.
        output: its output layer.
        start: ``base``, copies of its last layer, or ``random``.

    Raises:
        ConfigError: if they cannot be built for this base, or its last layer cannot be copied, or
            those of ``heads.start`` are others.
    """
    with in_section("mtp"):
        heads = MtpHeads.from_settings(cfg.mtp, base, output)
        if cfg.heads.start:
            _start_from(cfg, heads)
        elif start == "base":
            method = (quantization_of(base) or {"method": "nf4"})["method"]
            if method not in METHODS:
                raise ValueError(
                    f"start=base copies the base's last layer, which {method} has quantised for"
                    " good: choose mtp.start=random"
                )
            heads.init_from_base(base)
    return heads.to(_place(output, cfg.device))


def check_mtp(cfg: TrainConfig) -> None:
    """Refuse, before anything is loaded, settings of MTP heads that contradict each other.

    Raises:
        ConfigError: if an adapter has nothing to do.
    """
    told = f"adapter.kind={cfg.adapter.kind} tunes the base, which mtp.train_base=false freezes"
    idle = cfg.adapter.kind != "none" and not cfg.mtp.train_base
    refuse({f"{told}: set mtp.train_base=true": idle})


def _place(output: OutputLayer, device: str) -> torch.device:
    found = output.weight.device
    return found if found.type != "meta" else hardware.pick_device(device)


def _start_from(cfg: TrainConfig, heads: Heads) -> None:
    start, model = shipped_export(cfg.heads.start), cfg.model
    found = load_heads(start)
    if not model.init:
        given = Path(start), read_config(start), model.name
        check_digest(*given, revision=model.revision, other_base=model.other_base)
    with one_line(f"heads.start={start} holds other heads than heads.* describes"):
        heads.load_state_dict(found.state_dict())
    for key in heads.unseen_settings:  # tensors do not say everything
        there, here = getattr(found, key), getattr(heads, key)
        other = f"heads.start={start} holds heads of {heads.kind}.{key}={there}, not {here}"
        refuse({other: there != here})


def new_base(
    cfg: TrainConfig, *, fewer_layers: int = 0
) -> tuple[PreTrainedModel, OutputLayer, PreTrainedTokenizerBase]:
    """Return a randomly initialised base on this rank's device, its output layer, its tokenizer.

    Args:
        cfg: the run's settings.
        fewer_layers: layers to leave out of ``model.init``'s, because heads take their place
            (arXiv:2404.19737, section 3: as many parameters with more heads as with one).

    Raises:
        ConfigError: if a setting asks for what a new model cannot have, or too few layers are left.
    """
    model, init = cfg.model, cfg.model.init
    new = f"starts from a model that exists; {cfg.recipe} trains a new one"
    refuse(
        {
            f"{cfg.recipe} builds its model from model.init, which is empty": not init,
            f"{cfg.recipe} keeps float32 weights, got model.dtype={model.dtype}; for bfloat16"
            " matrix products set autocast=bfloat16": model.dtype != "float32",
            f"model.quantization={model.quantization} {new}": model.quantization != "none",
            f"adapter.kind={cfg.adapter.kind} {new}": cfg.adapter.kind != "none",
            f"heads.start={cfg.heads.start} {new}": cfg.heads.start,
        }
    )
    check_no_cache(cfg)
    tokenizer = choose_tokenizer(cfg)
    init = complete_init(init, tokenizer)
    if fewer_layers:
        init = shortened(init, fewer_layers)
    base = bases.build_from_init(init, attn=cfg.model.attn)
    base.to(hardware.pick_device(cfg.device))  # type: ignore[arg-type]
    bases.check_tokenizer(tokenizer, base)
    output = output_layer(base)
    if cfg.model.gradient_checkpointing:
        bases.checkpoint_layers(base)
    return base, output, tokenizer


def shortened(init: dict[str, Any], fewer: int) -> dict[str, Any]:
    """Return ``model.init`` with ``fewer`` layers less, as heads take their place.

    Raises:
        ConfigError: if their number is not there, or less than two are left.
    """
    layers = init.get("num_hidden_layers")
    if not isinstance(layers, int):
        raise ConfigError("model.init.num_hidden_layers is missing, which mtp.parity counts from")
    if layers - fewer < 2:
        raise ConfigError(
            f"model.init.num_hidden_layers is {layers}, of which {fewer} become heads"
            f" (mtp.num_heads - 1): {layers - fewer} left, at least 2 are needed;"
            " mtp.parity=false adds heads on top"
        )
    kept: dict[str, Any] = {"num_hidden_layers": layers - fewer}
    for key in ("layer_types", "mlp_layer_types"):
        if types := init.get(key):
            kept[key] = types[: layers - fewer]
    return {**init, **kept}


def check_draft(cfg: TrainConfig) -> None:
    """Refuse, before anything is loaded, settings of a draft model that contradict each other.

    Raises:
        ConfigError: naming one of the keys, what was found and what was expected.
    """
    draft, start = cfg.draft, cfg.draft.start
    key = "on_policy" if draft.on_policy else "stored"
    refuse(
        {
            f"draft.hidden={draft.hidden} makes a new model narrower, expected draft.start=random,"
            f" got {start}": bool(draft.hidden and start != "random"),
            f"draft.keep={draft.keep} names layers of the base, expected draft.start=base,"
            f" got {start}": bool(draft.keep and start != "base"),
            "draft.start=base copies layers of the base, which model.quantization="
            f"{cfg.model.quantization} packs; expected none, or draft.start=random": (
                start == "base" and cfg.model.quantization != "none"
            ),
            f"draft.{key}={getattr(draft, key)} needs the base's distribution as its teacher;"
            " draft.loss=labels learns the data's tokens": (
                draft.loss == "labels" and bool(draft.on_policy or draft.stored)
            ),
            f"{cfg.features.source} keeps hidden states for heads; what a draft model"
            " learns from is kept by draft.stored": bool(cfg.features.source),
            f"adapter.kind={cfg.adapter.kind} tunes the base; {cfg.recipe} trains a draft model": (
                cfg.adapter.kind != "none"
            ),
            f"draft.on_policy={draft.on_policy} lets the draft model write, and with"
            " deepspeed=zero3 no rank has whole weights to write with (zero2 has)": (
                draft.on_policy > 0 and Spread.from_config(cfg.deepspeed).stage == 3
            ),
            "draft.stored needs rows of one length; leave data.growth out": bool(
                draft.stored and cfg.data.growth
            ),
        }
    )
    if bases.without_weights(cfg.model.name):
        here = f"model.name={cfg.model.name} holds no weights, and"
        taught = draft.stored and not draft.on_policy and not draft.learn_prompts
        refuse(
            {
                f"{here} draft.start=base copies some; expected random, or a draft model": (
                    start == "base"
                ),
                f"{here} evaluate.every={cfg.evaluate.every} decodes with them; expected 0": (
                    cfg.evaluate.every
                ),
                f"{here} the draft model has no teacher; expected draft.stored= with records of"
                " regenerate logprobs= and draft.learn_prompts=false, or draft.loss=labels": (
                    draft.loss != "labels" and not taught
                ),
            }
        )


def fresh_draft(wanted: DraftConfig, base: PreTrainedModel, attn: str) -> PreTrainedModel | None:
    """Return a draft model drawn at random or cut out of the base; None if it is to be loaded.

    Raises:
        ConfigError: if it cannot be made.
    """
    if wanted.start == "random":
        return drafts.new_draft(
            drafts.draft_config(base.config, wanted.layers, wanted.hidden), attn=attn
        )
    if wanted.start != "base":
        return None
    total = int(base.config.get_text_config().num_hidden_layers)
    if wanted.layers > total:
        raise ConfigError(f"draft.layers is {wanted.layers}, the base model has {total} layers")
    return drafts.pruned(base, wanted.keep or drafts.spread(total, wanted.layers))


def build_draft(
    cfg: TrainConfig, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Return the draft model of ``cfg.draft`` in float32, on this rank's device.

    Its texts end as the base's do.

    Raises:
        ConfigError: if it cannot be made or loaded, is too short for the rows, cannot keep packed
            documents apart, or cannot be decoded with.
    """
    attn = cfg.model.attn
    draft = fresh_draft(cfg.draft, base, attn)
    if draft is None:
        how: bases.Loading = {"device": "cpu", "attn": attn}
        how["trust_remote_code"] = cfg.model.trust_remote_code
        draft = drafts.load_draft(cfg.draft.start, tokenizer=tokenizer, where="draft.start", **how)
    draft.to(hardware.pick_device(cfg.device))  # type: ignore[arg-type]
    output_layer(draft)
    context = bases.context_length(draft)
    if context is not None and cfg.data.seq_len > context:
        raise ConfigError(
            f"data.seq_len is {cfg.data.seq_len}, longer than the draft model's context of"
            f" {context}"
        )
    check_isolation(draft, backward=True)
    if not attn.startswith("flash"):  # with which nothing is decoded
        tree_support(draft)
    drafts.take_end_tokens(draft, base)
    if cfg.model.gradient_checkpointing:
        bases.checkpoint_layers(draft)
    return draft

"""The formats that an export can be written in, each one entry of ``FORMATS``.

A format is a module of functions that check, write and serve it, and its entry here. The settings
of ``export``, its errors, the commands that serve a folder, the model cards and docs/formats.md
read the entry.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import huggingface_hub
import torch
from huggingface_hub.errors import LocalTokenNotFoundError
from torch import Tensor
from tqdm import tqdm

from specheads.attention.tree import Tree
from specheads.config import ConfigError, ExportConfig, RunError
from specheads.data.chat import Encoder, learned_counts, most_frequent
from specheads.data.schema import Record
from specheads.formats import drafters, medusa, mtp_standard, serving
from specheads.formats.serving import Job, Serving
from specheads.models import checkpoint as exports
from specheads.models import mtp_hf
from specheads.models.adapters import merge_adapter
from specheads.models.base import load_base_model, load_config, load_tokenizer, torch_dtype
from specheads.models.draft import save_draft
from specheads.models.heads import MedusaHeads, low_rank_heads, pruned_heads
from specheads.models.kinds import Heads
from specheads.models.manifest import expect, first_line, said_of
from specheads.models.mtp import MtpHeads
from specheads.system.errors import refuse
from specheads.system.hardware import pick_device
from specheads.system.hub import is_hub_error

HEADS = tuple(exports.KINDS)


@dataclass(frozen=True)
class Format:
    """One format: what it holds, how it is written and served, and what is said of it.

    Attributes:
        kinds: of exports that have a place in it: kinds of heads, or ``draft``.
        holds: for docs/formats.md, and for errors.
        write: writes the folder, whole or not at all, and returns lines that the user has to know
            besides, if any.
            Raises ConfigError before anything is loaded for heads of one of ``kinds`` that the
            format cannot hold, as far as config.json says that.
        serve: ``(place, base, info) -> commands``, see :func:`commands`.
        chain: whether engines draft with it a chain of best guesses, and no tree.
        loads: whether ``from_pretrained`` of transformers loads the folder.
        inside: where in the folder a tuned base lies.
    """

    kinds: tuple[str, ...]
    holds: str
    write: Callable[[Job], list[str] | None]
    serve: Callable[[str, str, dict[str, Any]], list[Serving]]
    chain: bool = False
    loads: bool = False
    inside: str = "base"


def write(job: Job) -> list[str]:
    """Write an export in a format, whole or not at all.

    Returns:
        What the user has to know, in lines.

    Raises:
        ConfigError: before anything is loaded, if the format cannot hold such heads; if the base
            cannot be loaded.
        RunError: if the disk is full.
    """
    known, kind = FORMATS[job.form], job.info["kind"]
    if kind not in known.kinds:
        found = _INSTEAD.get(kind, f"{kind}; plain writes its base model")
        raise ConfigError(f"format={job.form} holds {known.holds}; {job.checkpoint} is {found}")
    notes = known.write(job) or []
    return notes if job.form == "native" else [known.holds, *notes]


def commands(form: str, folder: str | Path, info: dict[str, Any], base: str = "") -> list[Serving]:
    """Return how each engine serves a folder, or why it does not.

    Args:
        form: the folder's format.
        folder: as it is to be named in the commands.
        info: the config.json of the native export that it was made of, or the specheads.json of a
            draft model; empty for a plain model trained from scratch.
        base: how the base model is to be named; empty: as ``info`` names it.
    """
    place, known = str(folder), FORMATS[form]
    own = f"{place}/{known.inside}".rstrip("/")
    tuned = info.get("base", {}).get("tuned")
    return known.serve(place, base or (own if tuned else serving.base_name(info, place)), info)


def recorded_dtype(name: str) -> str:
    """Return the dtype that a model's config names, float32 where it names none.

    Raises:
        ConfigError: if its config cannot be read.
    """
    config = load_config(name)
    dtype = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    return str(dtype or "float32").removeprefix("torch.")


def write_draft(job: Job) -> list[str] | None:
    """Write a draft model again: ``native`` with what specheads knows of its origin, or without."""
    tokenizer, dtype = load_tokenizer(job.checkpoint), job.dtype or recorded_dtype(job.checkpoint)
    model = load_base_model(job.checkpoint, dtype=dtype, device="cpu")
    if job.form != "native":
        exports.save_plain_model(job.output, model, tokenizer, dtype=job.dtype)
        return None
    save_draft(job.output, model, tokenizer, job.info, dtype=job.dtype)
    return ["a draft model, its origin beside it"]


def _write_plain(job: Job) -> None:
    export = exports.load_export(job.checkpoint, dtype=job.dtype, device="cpu")
    exports.save_plain_model(job.output, export.base, export.tokenizer, dtype=job.dtype)


def _write_hf(job: Job) -> None:
    export = exports.load_export(job.checkpoint, dtype=job.dtype, device="cpu")
    mtp_hf.write(job.output, export.base, cast(MtpHeads, export.heads), export.tokenizer)


def _serve_hf(place: str, base: str, info: dict[str, Any]) -> list[Serving]:
    command = f"import specheads; {serving.load(place)}"
    own = Serving("transformers", command, "its heads are model.mtp; without: mtp_heads=None")
    return [own, *serving.without_heads(info)]


def _write_vllm_heads(job: Job) -> None:
    """Write the heads as they are, and a tuned base with its adapter merged."""
    _write_again(job, exports.load_heads(job.checkpoint), merge=True)


def _write_again(job: Job, heads: Heads, *, merge: bool) -> None:
    """Write a native export with these heads; with ``merge`` a separate adapter is in its base."""
    about, tuned = job.info["base"], None
    if about["tuned"]:
        tuned = exports.load_export(job.checkpoint, device="cpu").base
        if merge and about.get("adapter"):
            merge_adapter(tuned)
    tokenizer, tree = load_tokenizer(job.checkpoint), Tree.from_choices(job.info["tree"]["choices"])
    exports.save_export(
        job.output, heads, tokenizer, tree, job.info, tuned_base=tuned, dtype=job.dtype
    )


# what to do with an export of a kind that a format has no place for
_INSTEAD = {
    "hydra": "hydra, heads which read the tokens drafted before their own",
    "mtp": "mtp, which format=mtp_standard holds",
    "block": "block heads, which format=dflash or dspark holds",
    "eagle3": "an EAGLE-3 head, which format=eagle3 holds",
    "draft": "a draft model, which format=draft writes for every engine",
}
_MEDUSA = partial(Format, kinds=("medusa",), write=medusa.write, chain=True)
_DRAFTER = partial(Format, write=drafters.write, chain=True)

FORMATS = {
    "native": Format(
        kinds=(*HEADS, "draft"),
        holds="any heads, tree, tokenizer; the tuned base or its adapter",
        write=write_draft,  # heads are written by export, which can change them
        serve=serving.native,
    ),
    "plain": Format(
        kinds=HEADS,
        holds="the base alone, adapter merged",
        write=_write_plain,
        serve=lambda place, base, info: serving.text_copies(place),
        loads=True,
        inside="",
    ),
    "draft": Format(
        kinds=("draft",),
        holds="a draft model, without what only specheads reads",
        write=write_draft,
        serve=serving.draft_model,
        loads=True,
    ),
    "hf": Format(
        kinds=("mtp",),
        holds="base and MTP heads, one model",
        write=_write_hf,
        serve=_serve_hf,
        loads=True,
    ),
    "mtp_standard": Format(
        kinds=("mtp",),
        holds="base and sequential MTP heads that share its output matrix",
        write=mtp_standard.write_export,
        serve=mtp_standard.serve,
        chain=True,
        loads=True,
    ),
    "fasterdecoding_v1": _MEDUSA(
        holds="Medusa heads, an output matrix each", serve=medusa.serve_tgi
    ),
    "fasterdecoding_v2": _MEDUSA(
        holds="Medusa heads that share the base's output matrix", serve=medusa.serve_tgi
    ),
    "merged": _MEDUSA(
        holds="base and Medusa heads, one folder",
        serve=medusa.serve_merged,
        chain=False,
        loads=True,
        inside="",
    ),
    "dflash": _DRAFTER(
        kinds=("block",),
        holds="block heads of the published form",
        serve=partial(drafters.serve, "dflash"),
    ),
    "dspark": _DRAFTER(
        kinds=("block",),
        holds="the same with a Markov correction",
        serve=partial(drafters.serve, "dspark"),
    ),
    "eagle3": _DRAFTER(
        kinds=("eagle3",), holds="an EAGLE-3 head", serve=partial(drafters.serve, "eagle3")
    ),
    "vllm_heads": Format(
        kinds=HEADS,
        holds="any heads, as specheads reads them inside vLLM; a tuned base, its adapter merged",
        write=_write_vllm_heads,
        serve=serving.vllm_heads,
        chain=True,
    ),
}

_PROMPTS = ("prompts.jsonl", "calibration.jsonl")  # what bench and tree_search read of an export


def write_native(config: ExportConfig, records: list[Record]) -> None:
    """Write an export of ours again, with smaller heads where they are asked for.

    Args:
        config: what to write, and how.
        records: those in whose answers tokens are counted, of pruned heads.

    Raises:
        ConfigError: if the heads or the adapter are not there, or do not become smaller.
        RunError: if the disk is full.
    """
    checkpoint, output = config.checkpoint, Path(config.output)
    info = exports.read_config(checkpoint)
    number = "rank" if config.lm_head == "low_rank" else "num_kept"
    asked = f"lm_head={config.lm_head} {number}={getattr(config, number)}"
    _check_heads(config, info, asked)
    heads = exports.load_heads(checkpoint)
    smaller, note = _smaller(config, heads, records)
    if config.lm_head != "keep" and num_bytes(smaller) >= num_bytes(heads):
        raise ConfigError(
            f"{asked} makes no smaller heads of {checkpoint}: {size(heads)} before,"
            f" {size(smaller)} after"
        )
    training = info.get("training", {}) | ({"compressed": note} if note else {})
    dtype = torch_dtype(config.dtype) if config.dtype else None
    job = Job("native", checkpoint, {**info, "training": training}, output, dtype)
    _write_again(job, smaller, merge=config.merge)
    for name in _PROMPTS:
        if (Path(checkpoint) / name).is_file():
            shutil.copyfile(Path(checkpoint) / name, output / name)
    print(f"heads: {size(heads)} before, {size(smaller, dtype)} now")
    print(
        f"wrote {output}, with the tree of {checkpoint} and none of its measurements; find"
        f" its own: python -m specheads.tree_search checkpoint={output}"
    )


def _check_heads(config: ExportConfig, info: dict[str, Any], asked: str) -> None:
    """Refuse what cannot be done to the heads, from config.json alone."""
    checkpoint, kept, kind = config.checkpoint, config.num_kept, info["kind"]
    changed, pruned = config.lm_head != "keep", config.lm_head == "pruned"
    best = 1 + max((rank for path in info["tree"]["choices"] for rank in path), default=-1)
    refuse({
        f"merge=true, but {checkpoint} has no separate adapter": (
            config.merge and not info["base"].get("adapter")
        ),
        f"{asked} is not for {kind.upper()} heads, which {checkpoint} has": (
            changed and not exports.KINDS[kind].compressible
        ),
        f"num_kept is {kept}, the vocabulary of {checkpoint} has {info['vocab_size']} tokens": (
            pruned and kept > info["vocab_size"]
        ),
        f"num_kept is {kept}, but the tree of {checkpoint} takes the {best} best guesses of a"
        " head": pruned and kept < best,
    })  # fmt: skip


def _smaller(
    config: ExportConfig, heads: Heads, records: list[Record]
) -> tuple[Heads, dict[str, Any]]:
    """Return the heads that are asked for, and what the new export says about how they came."""
    if config.lm_head == "keep":
        return heads, {}
    own = cast(MedusaHeads, heads)  # the compressible ones
    with said_of(config.checkpoint):
        if config.lm_head == "pruned":
            kept, coverage = _most_frequent(config, own.vocab_size, records)
            return pruned_heads(own, kept), {"num_kept": config.num_kept, **coverage}
        own.to(pick_device(config.device))
        return low_rank_heads(own, config.rank), {"rank": config.rank}


def _most_frequent(
    config: ExportConfig, vocab_size: int, records: list[Record]
) -> tuple[Tensor, dict[str, Any]]:
    """Return the tokens to keep, and how much of the counted answers they are; prints that."""
    encode = Encoder(load_tokenizer(config.checkpoint))
    documents = [encode(record) for record in tqdm(records, unit="record", disable=None)]
    counts = learned_counts(documents, vocab_size)
    if not (total := int(counts.sum())):
        raise ConfigError(f"counted={config.counted}: its records hold no answers")
    kept = most_frequent(counts, config.num_kept)
    share, seen = float(counts[kept].sum() / total), int((counts > 0).sum())
    print(
        f"the {len(kept):,} kept tokens are {share:.2%} of the {total:,} answer tokens of"
        f" {config.counted}"
    )
    if seen < len(kept):
        print(f"only {seen:,} different tokens occur there; the others are kept by their number")
    return torch.from_numpy(kept), {"counted_tokens": total, "counted_share": share}


def num_bytes(heads: Heads, dtype: torch.dtype | None = None) -> int:
    """Return the size of all tensors of ``heads``, as they are or in ``dtype``."""
    tensors = heads.state_dict().values()
    dtypes = (dtype if dtype and each.is_floating_point() else each.dtype for each in tensors)
    return sum(t.numel() * each.itemsize for t, each in zip(tensors, dtypes, strict=True))


def size(heads: Heads, dtype: torch.dtype | None = None) -> str:
    """Return how many parameters ``heads`` have and what they take, in words."""
    parameters = sum(parameter.numel() for parameter in heads.parameters())
    return f"{parameters:,} parameters in {num_bytes(heads, dtype) / 1e6:,.2f} MB"


_REFUSED = {
    401: "the hub does not accept the token: set HF_TOKEN, or run `hf auth login`",
    403: "the token may not write there: it needs the write permission for that organisation",
}


def check_push(push: str) -> None:
    """Check the name, and that the hub knows who is asking, before anything is written.

    Args:
        push: ``organisation/name``.

    Raises:
        ConfigError: one line, if the name is none, nobody is logged in, the login is refused, or
            the hub cannot be reached.
    """
    expect("/" in push, "push", push, "organisation/name, as the hub has it")
    with said_of(f"push is {push!r:.120}"):
        huggingface_hub.utils.validate_repo_id(push)
    try:
        huggingface_hub.HfApi().whoami()
    except Exception as error:
        raise ConfigError(f"push={push}: {_reason(error)}") from None


def upload(folder: str | Path, push: str, *, private: bool = False) -> str:
    """Make the repository if there is none, and upload a folder in one commit.

    Args:
        folder: whole; it stays as it is.
        push: ``organisation/name``.
        private: of a repository that is made; one that is there stays as it is.

    Returns:
        Where it can be seen.

    Raises:
        RunError: one line, if the hub refuses or cannot be reached.
    """
    hub = huggingface_hub.HfApi()
    try:
        hub.create_repo(push, private=private, repo_type="model", exist_ok=True)
        hidden = [".*", "**/.*"]  # what editors and systems leave behind
        hub.upload_folder(
            repo_id=push,
            repo_type="model",
            folder_path=str(folder),
            ignore_patterns=hidden,
            commit_message="Export of specheads",
        )
    except Exception as error:
        reason = _reason(error)
        raise RunError(f"{folder} is written, but was not uploaded to {push}: {reason}") from None
    return f"https://huggingface.co/{push}"


def _reason(error: Exception) -> str:
    """Return what went wrong in one line, without what a server says at length.

    An error that the hub's client does not raise is a mistake of ours, and raised again.
    """
    if not is_hub_error(error):
        raise error
    if isinstance(error, LocalTokenNotFoundError):
        return "nobody is logged in: set HF_TOKEN, or run `hf auth login`"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return _REFUSED.get(status, f"the hub answered {status}")
    # by name: which network library lies below the hub's client changes with its version
    if {"TransportError", "ConnectionError"} & {kind.__name__ for kind in type(error).__mro__}:
        return "the hub cannot be reached"
    return first_line(error)

"""Load what a command decodes with, and make the drafter that its settings name.

A checkpoint is an export, or a base model without heads; ``decode.drafter`` names one drafter or
several that are merged. A new name is a line in ``specheads.config.commands.DRAFTERS``, which says
what it needs, and one in :func:`_member`, which makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.attention.tree import Tree
from specheads.config import BenchConfig, ConfigError, DecodeConfig, QualityConfig, ServeConfig
from specheads.config.commands import DRAFTERS, SpreadSettings, TextSettings
from specheads.decoding.accept import Acceptance
from specheads.decoding.costs import member_costs, step_costs
from specheads.drafters.contract import Drafter
from specheads.drafters.draft_heads import NUM_PASSES, DraftHeadsDrafter
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.draft_tree import DraftTreeDrafter, SampledTreeDrafter, sequoia_tree
from specheads.drafters.growing import Grown
from specheads.drafters.heads import HeadsDrafter, heads_drafter
from specheads.drafters.length import AdaptiveLength, FixedLength, Length, StepCosts
from specheads.drafters.lookahead import LookaheadDrafter
from specheads.drafters.lookup import LOOKUP_NGRAM, LOOKUP_TOKENS, NgramDrafter, SuffixDrafter
from specheads.drafters.merge import HybridDrafter
from specheads.models.base import (
    Loading,
    check_tokenizer,
    input_device,
    load_base_model,
    load_tokenizer,
)
from specheads.models.checkpoint import Export, load_export
from specheads.models.digest import file_sha256
from specheads.models.draft import check_same_tokenizer, load_draft
from specheads.models.kinds import Heads
from specheads.models.manifest import MANIFEST, PROVENANCE, read_json
from specheads.models.names import base_digest
from specheads.models.output import output_layer
from specheads.system import hardware
from specheads.system.hub import fetched_export


def exported_drafter(export: Export, decode: DecodeConfig | None = None) -> HeadsDrafter:
    """Return the drafter of an export's heads that ``decode`` asks for; by default the fastest.

    Raises:
        ConfigError: if a dynamic tree is asked for, and neither the settings nor the export say how
            large it is to be.
    """
    decode = decode or DecodeConfig()
    shape: Tree | Grown = export.tree
    if tree_kind(export, decode) == "dynamic":
        measured = dynamic_settings(export)
        num_nodes = decode.num_nodes or measured.get("num_nodes", 0)
        if not num_nodes:
            raise ConfigError(
                "decode.tree=dynamic needs decode.num_nodes: the export was not searched for it"
                " (python -m specheads.tree_search)"
            )
        shape = Grown(num_nodes, temperatures=measured.get("temperatures"))
    return heads_drafter(export.base, export.heads, output_layer(export.base), shape)


def tree_kind(export: Export, decode: DecodeConfig) -> str:
    """Return ``static`` or ``dynamic``; ``auto`` is what was faster when tree_search was run."""
    if decode.tree != "auto":
        return decode.tree
    if decode.num_nodes:
        return "dynamic"
    dynamic = dynamic_settings(export).get("speedup", 0)
    static = _measured_on(export).get("speedup", 0)
    return "dynamic" if dynamic > static else "static"


def _measured_on(export: Export) -> dict[str, Any]:
    return export.config.get("tree", {}).get("measured_on") or {}


def dynamic_settings(export: Export) -> dict[str, Any]:
    """Return what tree_search found about dynamic trees; empty where it was not run."""
    return _measured_on(export).get("dynamic") or {}


def acceptance_rule(decode: DecodeConfig) -> Acceptance:
    """Return the rule that ``decode`` asks for."""
    return Acceptance(
        decode.acceptance, decode.epsilon, decode.delta, decode.lenience, decode.bound
    )


@dataclass(frozen=True)
class Subject:
    """A base model with its tokenizer, in eval mode, and the export it came with, if any."""

    base: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    export: Export | None = None


def is_plain_model(checkpoint: str) -> bool:
    """Return whether ``checkpoint`` names a base model rather than an export of specheads.

    ``tinycode``, a GGUF file, a folder whose config.json is transformers', or, where there is no
    such folder, a name of the form owner/model.

    Raises:
        ConfigError: if the folder's config.json cannot be read.
    """
    if checkpoint == "tinycode" or checkpoint.endswith(".gguf"):
        return True
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        export = (path / MANIFEST).is_file() and not (path / PROVENANCE).is_file()
        if export or not (path / "config.json").is_file():
            return False
        config = read_json(path / "config.json", f"{path} is no model", strict=False)
        return "model_type" in config and "format_version" not in config
    return not path.exists() and checkpoint.count("/") == 1 and checkpoint[0] not in "./~"


def weights_digest(checkpoint: str) -> str:
    """Return a digest of an export's or a folder's weights, or the name of a model on the hub."""
    if not is_plain_model(checkpoint):
        return file_sha256(Path(checkpoint) / MANIFEST)
    if checkpoint == "tinycode" or Path(checkpoint).expanduser().exists():
        return base_digest(checkpoint)
    return checkpoint


def load_subject(
    checkpoint: str,
    *,
    base: str | None = None,
    other_base: bool = False,
    **loading: Unpack[Loading],
) -> Subject:
    """Load an export, or a base model alone.

    Args:
        checkpoint: an export's folder or name on the hub, or what :func:`is_plain_model` knows.
        base: where an export's base model is now, if it was moved.
        other_base: a base of other weights than an export's is taken, with a line that says so.
        **loading: see :class:`specheads.models.base.Loading`; float32 unless given. ``attn`` is of
            a base model alone, an export's is its own.

    Raises:
        ConfigError: if it cannot be found or loaded, or ``base`` is given for a base model.
    """
    options: Loading = {"dtype": "float32", "attn": "auto", **loading}
    checkpoint = fetched_export(checkpoint)
    if not is_plain_model(checkpoint):
        options.pop("attn")
        export = load_export(checkpoint, base=base or None, other_base=other_base, **options)
        return Subject(export.base, export.tokenizer, export)
    if base:
        raise ConfigError(f"base is {base}, but checkpoint={checkpoint} is a base model itself")
    try:
        trusted = options.get("trust_remote_code", False)
        tokenizer = load_tokenizer(checkpoint, trust_remote_code=trusted)
        model = load_base_model(checkpoint, **options)
    except ConfigError as error:
        raise ConfigError(
            f"checkpoint={checkpoint} is no export, and as a base model: {error}"
        ) from None
    check_tokenizer(tokenizer, model)
    return Subject(model, tokenizer)


def subject_of(
    config: TextSettings | ServeConfig | BenchConfig | QualityConfig, decode: DecodeConfig | None
) -> Subject:
    """Get the machine ready, and load what a command's settings name.

    Args:
        config: the settings.
        decode: what is to draft, checked before anything is loaded; None: nothing is.

    Raises:
        ConfigError: if it cannot be loaded, or the checkpoint has not what drafts.
    """
    if decode is not None:
        check_drafter(decode, has_heads=not is_plain_model(config.checkpoint))
    threads = None if isinstance(config, SpreadSettings) else config.threads
    spread = config.device_map if isinstance(config, SpreadSettings) else None
    device, dtype, _ = hardware.prepare(config.device, config.dtype, threads)
    where: Loading = {"dtype": dtype, "device": device, "device_map": spread or None}
    return load_subject(config.checkpoint, base=config.base, other_base=config.other_base, **where)


ADAPTIVE_TOKENS = 8  # longest draft where the length adapts itself
TREE_NODES, TREE_DEPTH = 12, 4  # of a draft model's tree where the settings say nothing
# per child of a node, how often it is accepted; shapes sampled trees, whose own rates are unknown
ASSUMED_RATES = (0.7, 0.12, 0.05, 0.03)

Draft = PreTrainedModel | Export  # alone, or with heads of its own


@dataclass(frozen=True)
class Chosen:
    """A drafter as asked for.

    Attributes:
        name: as in ``decode.drafter``; of ``auto``, what that was.
        drafter: proposes.
        num_nodes: of its largest tree, root included.
        models: all that it runs beside the base.
    """

    name: str
    drafter: Drafter
    num_nodes: int
    models: Sequence[nn.Module | Heads] = ()

    @property
    def extra_parameters(self) -> int:
        """Of all models beside the base."""
        return sum(map(num_parameters, {id(model): model for model in self.models}.values()))


def check_drafter(decode: DecodeConfig, *, has_heads: bool) -> list[str]:
    """Return what ``decode.drafter`` names, if it can be made together; nothing need be loaded.

    ``auto`` is a draft model if one is given, else heads; where there is neither, what needs no
    training: the text's own suffixes.

    Raises:
        ConfigError: for heads where there are none, and naming what does not go together.
    """
    if decode.drafter == "auto":
        return ["draft" if decode.draft else "heads" if has_heads else "suffix"]
    names = decode.drafter.split("+")
    if "heads" in names and not has_heads:
        raise ConfigError(
            f"decode.drafter={decode.drafter} needs the heads of an export, but the checkpoint is a"
            " base model alone"
        )
    drafted = any(DRAFTERS[name] == "draft" for name in names)
    if decode.draft_sampling == "sampled" and len(names) > 1 and drafted:
        raise ConfigError(
            f"decode.drafter={decode.drafter} merges guesses, which sampled ones cannot be:"
            " decode.draft_sampling must be greedy or coupled, got 'sampled'"
        )
    return names


def choose_drafter(subject: Subject, decode: DecodeConfig, *, draft: Draft | None = None) -> Chosen:
    """Make the drafter that ``decode`` asks for; several are merged into one tree.

    With ``decode.draft_tokens=0`` the costs of the draft model are clocked first, for a second or
    some, on which the length of drafts then depends; so are, where several are merged and
    ``decode.num_nodes=0``, verify steps of several sizes, on which depends how much is verified.

    Args:
        subject: the base model, its tokenizer, and its heads, if any.
        decode: the settings.
        draft: the model of ``decode.draft``, if it is loaded already.

    Raises:
        ConfigError: if something asked for is not there, does not fit the base model, or cannot be
            merged.
    """
    names = check_drafter(decode, has_heads=subject.export is not None)
    if draft is None and any(DRAFTERS[name] == "draft" for name in names):
        draft = draft_model(subject, decode)
    members = [_member(name, subject, decode, draft) for name in names]
    if len(members) == 1:
        return members[0]
    drafters, sizes = [each.drafter for each in members], [each.num_nodes for each in members]
    num_nodes = decode.num_nodes or sum(size - 1 for size in sizes) + 1
    costs: list[StepCosts] = []
    if not decode.num_nodes:
        alone = None if draft is None else model_of(draft)
        costs = member_costs(subject.base, names, drafters, sizes, alone, max_nodes=num_nodes)
    merged = HybridDrafter(drafters, decode.num_nodes, costs=costs)
    models = [model for each in members for model in each.models]
    return Chosen("+".join(names), merged, num_nodes, models)


def draft_model(subject: Subject, decode: DecodeConfig) -> Draft:
    """Load ``decode.draft`` with the base's dtype, where the base reads its tokens.

    Returns:
        The draft model; with its heads, where the folder is an export of heads on it.

    Raises:
        ConfigError: if it cannot be loaded, or has another tokenizer.
    """
    path = decode.draft
    options: dict[str, Any] = {"dtype": subject.base.dtype, "device": input_device(subject.base)}
    if not Path(path).is_dir() or is_plain_model(path):
        return load_draft(path, tokenizer=subject.tokenizer, where="decode.draft", **options)
    export = load_export(path, **options)
    check_same_tokenizer(subject.tokenizer, export.tokenizer, f"decode.draft={path}")
    return export


def model_of(draft: Draft) -> PreTrainedModel:
    """Return the draft model itself."""
    return draft.base if isinstance(draft, Export) else draft


def _member(name: str, subject: Subject, decode: DecodeConfig, draft: Draft | None) -> Chosen:
    """Make the one drafter ``name``."""
    base, num_tokens, num_nodes = subject.base, decode.draft_tokens, decode.num_nodes
    if name == "heads":
        assert subject.export is not None
        heads = exported_drafter(subject.export, decode)
        return Chosen(name, heads, heads.num_nodes, [subject.export.heads])
    if name == "lookup":
        return Chosen(name, NgramDrafter(LOOKUP_NGRAM, LOOKUP_TOKENS), LOOKUP_TOKENS + 1)
    if name == "suffix":
        suffix = SuffixDrafter()
        return Chosen(name, suffix, suffix.num_nodes)
    if name == "lookahead":
        window, ngram, guesses = decode.window, decode.ngram, decode.guesses
        lookahead = LookaheadDrafter(window, ngram, guesses, fixed_size=decode.compile)
        return Chosen(name, lookahead, (ngram - 1) * (window + guesses))
    assert draft is not None
    model, sampling = model_of(draft), decode.draft_sampling
    if name == "draft":
        length: Length = FixedLength(num_tokens or ADAPTIVE_TOKENS)
        if not num_tokens:
            length = AdaptiveLength(step_costs(base, model, ADAPTIVE_TOKENS), ADAPTIVE_TOKENS)
        chain = DraftModelDrafter(model, length, sampling=sampling)
        return Chosen(name, chain, length.max_tokens + 1, [model])
    if name == "draft_heads":
        if not isinstance(draft, Export) or not draft.heads.for_draft_model:
            raise ConfigError(
                f"decode.drafter=draft_heads needs Medusa or Hydra heads of a draft model:"
                f" decode.draft={decode.draft} is no export of such heads"
            )
        tree, output = draft.tree, output_layer(model)
        own = DraftHeadsDrafter(model, draft.heads, output, tree, max_tokens=num_tokens)
        size = (NUM_PASSES - 1) * (tree.max_depth + 1) + tree.num_nodes + 1
        return Chosen(name, own, size, [model, draft.heads])
    num_nodes, depth = num_nodes or TREE_NODES, num_tokens or TREE_DEPTH
    if sampling == "greedy":
        gain = 0.0 if num_tokens else step_costs(base, model, 2).draft
        grown = DraftTreeDrafter(model, num_nodes, max_depth=depth, min_gain=gain)
        return Chosen(name, grown, num_nodes, [model])
    shape, _ = sequoia_tree(ASSUMED_RATES, num_nodes, depth)
    fixed = SampledTreeDrafter(model, shape, coupled=sampling == "coupled")
    return Chosen(name, fixed, num_nodes, [model])


def num_parameters(model: nn.Module | Heads) -> int:
    """Return the number of a model's parameters, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())

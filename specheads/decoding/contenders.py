"""What a bench measures beside trees of heads: other heads, drafters, and transformers' own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from specheads.config import ConfigError, DecodeConfig
from specheads.decoding.assisted import hf_assisted_method, hf_lookup_method
from specheads.decoding.deciding import Acceptance
from specheads.decoding.drafting import (
    check_drafter,
    choose_drafter,
    draft_model,
    drafter_names,
    model_of,
    num_parameters,
)
from specheads.decoding.exported import dynamic_settings, exported_drafter
from specheads.decoding.measure import Method, drafted_method
from specheads.decoding.subject import Subject
from specheads.drafters.ngram import LOOKUP_NGRAM, LOOKUP_TOKENS
from specheads.models.checkpoint import Export, load_export
from specheads.models.draft import vocab_size

HF_TOKENS = 4  # of transformers' assistant where our own draft's length adapts itself


def asked_for(
    decode: DecodeConfig, drafters: Sequence[str], *, has_heads: bool
) -> list[DecodeConfig]:
    """Return the settings of each drafter asked for, without the heads alone.

    Args:
        decode: the settings, its own drafter first.
        drafters: more, as in ``decode.drafter``.
        has_heads: the checkpoint is an export.

    Raises:
        ConfigError: for a drafter that is unknown, lacks its model, or cannot be made.
    """
    names = ["+".join(drafter_names(decode, has_heads=has_heads)), *drafters]
    found = [replace(decode, drafter=name) for name in dict.fromkeys(names) if name != "heads"]
    for each in found:
        check_drafter(each, has_heads=has_heads)
    return found


def other_methods(
    subject: Subject,
    asked: Sequence[DecodeConfig],
    *,
    eos: tuple[int, ...],
    max_new_tokens: int,
    lossy: Acceptance | None = None,
) -> list[Method]:
    """Return a method for each of ``asked``, and what transformers has of the kind.

    Args:
        subject: base model, tokenizer, and heads, if any.
        asked: from :func:`asked_for`.
        eos: tokens that end a text.
        max_new_tokens: limit per prompt.
        lossy: a rule that the first one is decoded by once more, where there are no heads.

    Raises:
        ConfigError: if a drafter cannot be made for this base model.
    """
    if not asked:
        return []
    base = subject.base
    decode, draft = asked[0], None
    names = {name for each in asked for name in each.drafter.split("+")}
    methods = []
    if decode.draft:
        draft = draft_model(subject, decode)
        num_tokens, alone = decode.draft_tokens or HF_TOKENS, model_of(draft)
        if vocab_size(alone) == vocab_size(base):  # transformers takes no others
            methods.append(hf_assisted_method(base, alone, num_tokens, eos, max_new_tokens))
    if names & {"lookup", "suffix"}:
        methods.append(hf_lookup_method(base, LOOKUP_TOKENS, LOOKUP_NGRAM, eos, max_new_tokens))
    chosen = [choose_drafter(subject, each, draft=draft) for each in asked]
    rules: list[tuple[str, Acceptance | None]] = [(each.name, None) for each in chosen]
    if lossy is not None and subject.export is None:
        chosen.append(chosen[0])
        rules.append((f"{chosen[0].name}_{lossy.rule}", lossy))
    for each, (name, rule) in zip(chosen, rules, strict=True):
        methods.append(
            drafted_method(
                name,
                base,
                each.drafter,
                eos,
                max_new_tokens,
                tree_nodes=each.num_nodes,
                extra_parameters=each.extra_parameters,
                acceptance=rule,
                compile=decode.compile,
                drafter_name=each.name,
            )
        )
    return methods


def load_others(subject: Subject, paths: Sequence[str]) -> dict[str, Export]:
    """Load exports of other heads on the subject's own base model, by short names.

    Args:
        subject: has heads of its own.
        paths: folders; ``runs/medusa1/export`` is called ``medusa1``.

    Raises:
        ConfigError: if one has another base model, or two would have one name.
    """
    found: dict[str, Export] = {}
    for path in paths:
        folder = Path(path)
        name = folder.resolve().parent.name if folder.name == "export" else folder.name
        if name in found:
            raise ConfigError(f"exports: {path} would be called {name}, as another one is")
        if subject.export is None:
            raise ConfigError(
                f"exports={path} are other heads beside those of checkpoint, which has none"
            )
        found[name] = load_export(folder, beside=subject.export)
    return found


def methods_of_others(
    others: Mapping[str, Export],
    *,
    eos: tuple[int, ...],
    max_new_tokens: int,
    compile: bool = False,
) -> list[Method]:
    """Return for each export its tree, called ``<name>/tree``, and that of each step, if measured.

    Args:
        others: from :func:`load_others`.
        eos: tokens that end a text.
        max_new_tokens: limit per prompt.
        compile: compile the base's passes.
    """
    methods = []
    for name, export in others.items():
        kinds = {"tree": "static"} | (
            {"tree_dynamic": "dynamic"} if dynamic_settings(export) else {}
        )
        for method, kind in kinds.items():
            drafter = exported_drafter(export, DecodeConfig(tree=kind))
            num_nodes = getattr(drafter, "num_nodes", export.tree.num_nodes)
            methods.append(
                drafted_method(
                    f"{name}/{method}",
                    export.base,
                    drafter,
                    eos,
                    max_new_tokens,
                    tree_nodes=num_nodes,
                    extra_parameters=num_parameters(export.heads),
                    compile=compile,
                )
            )
    return methods

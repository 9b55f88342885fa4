"""Measure an export, or drafters, beside plain decoding and transformers' own loops: one process.

All methods of one comparison share process, weights, dtype, prompts, limit and rule of counting: a
new token is one that stands after the prompt in the result, an end of text included. The baselines
are plain decoding and transformers' own loops: generate, compiled generate, an assistant model,
prompt lookup.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import CompileConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from specheads.attention.tree import Tree
from specheads.config import ConfigError, DecodeConfig
from specheads.decoding import exported
from specheads.decoding.accept import Acceptance
from specheads.decoding.loop import decode
from specheads.decoding.result import DecodedRow
from specheads.drafters.contract import Drafter
from specheads.drafters.heads import heads_drafter
from specheads.drafters.lookup import LOOKUP_NGRAM, LOOKUP_TOKENS, NgramDrafter
from specheads.measure import rows as report
from specheads.measure.clock import Batch, Decoded, Method, Prompt, clock
from specheads.measure.identity import Noise, Rounding, compare
from specheads.measure.render import disturbance_lines
from specheads.models.base import end_tokens
from specheads.models.checkpoint import Export, load_export
from specheads.models.draft import vocab_size
from specheads.models.kinds import Heads
from specheads.models.output import output_layer
from specheads.system import hardware
from specheads.system.terminal import progress_bar
from specheads.verification.sampling import Sampler

HF_TOKENS = 4  # of transformers' assistant where our own draft's length adapts itself


@dataclass(frozen=True)
class Contest:
    """What all methods of one comparison share, and the methods.

    Attributes:
        base: base model.
        eos: tokens that end a text.
        pad: padding of transformers' generate.
        max_new_tokens: limit per prompt.
        compile: compile the base's passes in our own loops, the plain one included, which is then
            measured as it was before too, and generate with compiled passes.
        invariant: see :class:`specheads.decoding.loop.Settings`; of our own loops.
    """

    base: PreTrainedModel
    eos: tuple[int, ...]
    pad: int | None
    max_new_tokens: int
    compile: bool = False
    invariant: bool = False

    @staticmethod
    def of(subject: exported.Subject | Export, max_new_tokens: int, **settings: bool) -> Contest:
        """Return the contest on a model that was loaded.

        Args:
            subject: has the base model and its tokenizer.
            max_new_tokens: limit per prompt.
            **settings: ``compile`` and ``invariant``.
        """
        base, tokenizer = subject.base, subject.tokenizer
        eos, pad = end_tokens(base, tokenizer), tokenizer.pad_token_id
        return Contest(base, eos, pad, max_new_tokens, **settings)

    def ours(
        self,
        name: str = "plain",
        drafter: Drafter | None = None,
        tree_nodes: int = 1,
        *,
        rule: Acceptance | None = None,
        extra: int = 0,
        kind: str = "",
    ) -> Method:
        """Return the decoding loop with a drafter; without one plain decoding.

        Tokens are compared with plain decoding's where the rule is lossless and, when sampling, the
        candidates are not themselves sampled.

        Args:
            name: of the method.
            drafter: proposes.
            tree_nodes: most tokens that a step verifies, the root included.
            rule: of acceptance; exact if None.
            extra: parameters of all models beside the base.
            kind: what the drafter is called; by default after its class.
        """
        lossless = seeded = rule is None or rule.lossless
        if drafter is not None:
            # sampled candidates are verified by rejection: other texts of the same distribution
            seeded = lossless and drafter.deterministic
            kind = kind or type(drafter).__name__.removesuffix("Drafter").lower()

        loop: dict[str, Any] = {"eos_token_ids": self.eos, "acceptance": rule}
        loop |= {"compile": self.compile, "invariant": self.invariant}

        def run(batch: Batch, heat: float, seed: int, limit: int = self.max_new_tokens) -> Decoded:
            own = {"attention_mask": batch.attention_mask, "max_new_tokens": limit}
            sampler = Sampler(temperature=heat, seed=seed)
            result = decode(self.base, drafter, batch.input_ids, sampler=sampler, **own, **loop)
            return list(result.rows)

        return Method(
            name, run, kind or None, tree_nodes, extra,
            seeded=seeded, lossless=lossless, compiled=self.compile,
        )  # fmt: skip

    def one_by_one(self) -> Method:
        """Return plain decoding of the prompts of a batch one after the other.

        What a batch gains by itself, before anything is drafted: a decoder that is slower than this
        has no use for its batch. Of one prompt it would be ``plain`` again: it is left out there.
        """
        plain = self.ours()

        def run(batch: Batch, heat: float, seed: int, *limit: int) -> Decoded:
            alone = enumerate(_rows(batch))
            return [plain.decode(row, heat, seed + i, *limit)[0] for i, row in alone]

        return replace(plain, name="one_by_one", in_batches=True, decode=run)

    def generate(self, name: str = "hf_generate", **options: Any) -> Method:
        """Return transformers' own ``generate``; it draws differently, so only T=0 compares tokens.

        Prompts of a batch are padded to the longest, and rows that ended wait for the others.

        Args:
            name: of the method.
            **options: more arguments of ``generate``.
        """
        if self.base.device.type == "cpu":  # generate() loads deepspeed, which announces its guess
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        padding = self.pad if self.pad is not None else next(iter(self.eos), 0)

        def run(batch: Batch, heat: float, seed: int, limit: int = self.max_new_tokens) -> Decoded:
            torch.manual_seed(seed)
            rows = self._generated(batch, heat, limit, pad_token_id=padding, **options)
            found = []
            for tokens in rows:  # a row that ended was padded to the length of the longest
                end = next((i + 1 for i, token in enumerate(tokens) if token in self.eos), None)
                text = tokens[:end]
                found.append(DecodedRow(text, [1] * (len(text) - 1), finished=end is not None))
            return found

        return Method(name, run, seeded=False, compiled="compile_config" in options)

    def compiled_generate(self) -> Method:
        """Return ``generate`` with transformers' static cache, for which it compiles its passes.

        It does so by itself on a GPU; on other devices it has to be told.
        """
        on_gpu = self.base.device.type == "cuda"
        how: Any = CompileConfig(mode="reduce-overhead" if on_gpu else "default")
        how._compile_all_devices = True
        return self.generate("hf_compiled", cache_implementation="static", compile_config=how)

    def assisted(self, draft: PreTrainedModel, num_tokens: int) -> Method:
        """Return ``generate(assistant_model=draft)`` with as many guesses at every step.

        Its confidence threshold is 0 and its schedule constant, so that it drafts what a chain of
        fixed length drafts here. It takes one prompt at a time: rows of a batch follow each other.

        Args:
            draft: the assistant; its generation settings are changed while it runs.
            num_tokens: guesses per step.
        """
        found = self._speculating("hf_assisted", "hf assistant", num_tokens, assistant_model=draft)
        return replace(found, extra_parameters=exported.num_parameters(draft))

    def lookup(self, num_tokens: int, ngram: int) -> Method:
        """Return ``generate(prompt_lookup_num_tokens=...)``, one prompt at a time.

        Args:
            num_tokens: tokens copied per step.
            ngram: longest match.
        """
        copied = {"prompt_lookup_num_tokens": num_tokens, "max_matching_ngram_size": ngram}
        return self._speculating("hf_lookup", "hf prompt lookup", num_tokens, **copied)

    def _speculating(self, name: str, kind: str, num_tokens: int, **options: Any) -> Method:
        """Return transformers' own speculation, which takes one row at a time."""
        # there is no padding; any other token than the end would be hidden from the assistant
        options["pad_token_id"] = next(iter(self.eos), None)

        def run(batch: Batch, heat: float, seed: int, limit: int = self.max_new_tokens) -> Decoded:
            texts = []
            for i, row in enumerate(_rows(batch)):
                torch.manual_seed(seed + i)
                gains = _Gains()
                with fixed_assistant(options.get("assistant_model"), num_tokens):
                    (tokens,) = self._generated(row, heat, limit, streamer=gains, **options)
                texts.append(DecodedRow(tokens, gains.lengths[1:], tokens[-1] in self.eos))
            return texts

        return Method(name, run, kind, num_tokens + 1, seeded=False)

    def _generated(
        self, batch: Batch, temperature: float, limit: int, **options: Any
    ) -> list[list[int]]:
        """Return what transformers' ``generate`` puts behind each row, drawn from all tokens."""
        if temperature:
            options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        sequences = self.base.generate(  # type: ignore[operator]
            batch.input_ids,
            attention_mask=batch.attention_mask,
            do_sample=temperature > 0,
            eos_token_id=list(self.eos) or None,
            max_new_tokens=limit,
            **options,
        )
        tokens: list[list[int]] = sequences[:, batch.input_ids.shape[1] :].tolist()
        return tokens

    def baselines(self, *, batched: bool = False) -> list[Method]:
        """Return plain decoding, generate and prompt lookup.

        Args:
            batched: there will be batches, to be measured beside decoding without them.
        """
        generate = [self.generate()]
        if self.compile:
            eager = replace(self, compile=False).ours("plain_eager")
            generate = [eager, *generate, self.compiled_generate()]
        alone = [self.one_by_one()] if batched else []
        copying = NgramDrafter(max_ngram=LOOKUP_NGRAM, num_tokens=LOOKUP_TOKENS)
        looking = self.ours("prompt_lookup", copying, LOOKUP_TOKENS + 1)
        return [self.ours(), *generate, *alone, looking]

    def of_trees(self, heads: Heads, trees: Sequence[Tree]) -> list[Method]:
        """Return heads with static trees, the first of which is called ``tree``."""
        output, extra = output_layer(self.base), exported.num_parameters(heads)
        found: list[Method] = []
        for tree in trees:
            drafter = heads_drafter(self.base, heads, output, tree)
            name = f"tree_{tree.num_nodes}" if found else "tree"
            found.append(self.ours(name, drafter, tree.num_nodes, extra=extra))
        return found

    def of_export(
        self, export: Export, decode: DecodeConfig, lossy: Acceptance | None = None
    ) -> list[Method]:
        """Return an export's heads with dynamic trees, and with a lossy rule.

        Args:
            export: the heads.
            decode: may ask for dynamic trees, else they are measured if tree_search has chosen one.
            lossy: a rule that the static tree is decoded by once more, named in the row.
        """
        extra, found = exported.num_parameters(export.heads), []
        if decode.tree == "dynamic" or decode.num_nodes or exported.dynamic_settings(export):
            drafter = exported.exported_drafter(export, replace(decode, tree="dynamic"))
            found.append(self.ours("tree_dynamic", drafter, drafter.num_nodes, extra=extra))
        if lossy is not None:
            drafter = exported.exported_drafter(export, DecodeConfig(tree="static"))
            name, num_nodes = f"tree_{lossy.rule}", export.tree.num_nodes
            found.append(self.ours(name, drafter, num_nodes, extra=extra, rule=lossy))
        return found

    def of_drafters(
        self, subject: exported.Subject, asked: Sequence[DecodeConfig], lossy: Acceptance | None
    ) -> list[Method]:
        """Return a method for each of ``asked``, and what transformers has of the kind.

        Args:
            subject: base model, tokenizer, and heads, if any.
            asked: from :func:`asked_for`.
            lossy: a rule that the first one is decoded by once more, where there are no heads.

        Raises:
            ConfigError: if a drafter cannot be made for this base model.
        """
        if not asked:
            return []
        decode, draft = asked[0], None
        methods = []
        if decode.draft:
            draft = exported.draft_model(subject, decode)
            if vocab_size(exported.model_of(draft)) == vocab_size(self.base):  # they take no others
                num_tokens = decode.draft_tokens or HF_TOKENS
                methods.append(self.assisted(exported.model_of(draft), num_tokens))
        if {name for each in asked for name in each.drafter.split("+")} & {"lookup", "suffix"}:
            methods.append(self.lookup(LOOKUP_TOKENS, LOOKUP_NGRAM))
        chosen = [exported.choose_drafter(subject, each, draft=draft) for each in asked]
        rules: list[tuple[exported.Chosen, Acceptance | None]] = [(each, None) for each in chosen]
        if lossy is not None and subject.export is None:
            rules.append((chosen[0], lossy))
        for each, rule in rules:
            name = f"{each.name}_{rule.rule}" if rule else each.name
            extra, kind = each.extra_parameters, each.name
            own = self.ours(name, each.drafter, each.num_nodes, rule=rule, extra=extra, kind=kind)
            methods.append(own)
        return methods

    def of_others(self, others: Mapping[str, Export]) -> list[Method]:
        """Return for each export its tree, called ``<name>/tree``, and that of each step.

        The latter is measured where tree_search has chosen one.
        """
        found = []
        for name, export in others.items():
            own = self.of_trees(export.heads, [export.tree])
            own += self.of_export(export, DecodeConfig())
            found += [replace(method, name=f"{name}/{method.name}") for method in own]
        return found


def _rows(batch: Batch) -> Iterator[Batch]:
    """Yield each row as a batch of its own, without padding."""
    for ids, mask in zip(batch.input_ids, batch.attention_mask.bool(), strict=True):
        yield Batch(ids[mask][None], torch.ones_like(ids[mask])[None])


def fixed_assistant(draft: PreTrainedModel | None, num_tokens: int) -> AbstractContextManager[Any]:
    """While open, transformers drafts ``num_tokens`` with ``draft``, never fewer for lack of trust.

    It reads that from the assistant's own generation settings; without one nothing changes.
    """
    return patch.dict(
        vars(draft.generation_config) if draft else {},
        num_assistant_tokens=num_tokens,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )


class _Gains(BaseStreamer):
    """Notes how many tokens transformers' assisted generation gains with each pass.

    The prompt comes first. The first pass verifies guesses with it, so that it counts as a step,
    which it does not here.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Be given what a pass gave."""
        self.lengths.append(value.numel())

    def end(self) -> None:
        """Be told that there is no more."""


@dataclass(frozen=True)
class Plan:
    """What is clocked.

    Attributes:
        temperatures: 0 and 0.7 must be among them, see :func:`specheads.measure.rows.headline`.
        repeats: clocked rounds.
        batch_sizes: prompts decoded together; 1 must be among them.
        seed: of the sampling.
    """

    temperatures: Sequence[float]
    repeats: int
    batch_sizes: Sequence[int] = (1,)
    seed: int = 0


def benchmark(
    base: PreTrainedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    plan: Plan,
    *,
    settings: Mapping[str, Any] | None = None,
    headline: str = "tree",
) -> tuple[dict[str, Any], report.Clocked]:
    """Clock ``methods`` at every temperature and batch size, and show a bar meanwhile.

    Args:
        base: base model.
        methods: compared.
        prompts: decoded.
        plan: temperatures, batch sizes and repeats.
        settings: more to record beside the figures.
        headline: the method whose figures are to be quoted.

    Returns:
        The content of bench.json; and the runs themselves.
    """
    before = hardware.environment(base.device)
    clocked = {}
    watched: list[dict[str, Any]] = []
    turns = [(temperature, size) for temperature in plan.temperatures for size in plan.batch_sizes]
    texts = sum(size > 1 or not method.in_batches for _, size in turns for method in methods)
    with progress_bar("text", total=texts * len(prompts) * plan.repeats) as bar:
        how: dict[str, Any] = {"repeats": plan.repeats, "seed": plan.seed, "tick": bar.update}
        for temperature, size in turns:
            bar.set_description(f"T={temperature:g}, batch {size}")
            runs = clock(methods, prompts, temperature, batch_size=size, prefill=True, **how)
            clocked[temperature, size] = runs
            watched.append(report.seen_beside(runs, temperature))
    # only now: the float32 copy that a divergence asks for would count as memory of the methods
    rows, noise = make_rows(base, methods, prompts, clocked, seed=plan.seed)
    result: dict[str, Any] = {
        "environment": {**before, **report.disturbance(watched)},
        "settings": {
            **(settings or {}),
            "temperatures": list(plan.temperatures),
            "batch_sizes": list(plan.batch_sizes),
            "repeats": plan.repeats,
            "seed": plan.seed,
            "threads": torch.get_num_threads(),
            "noise": asdict(noise) if noise else None,
        },
        "headline": report.headline(rows, headline),
        "crossover": report.crossovers(rows),
        "pairs": report.pairs(clocked),
        "rows": rows,
    }
    return result | {"warnings": disturbance_lines(result)}, clocked


def make_rows(
    base: PreTrainedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    clocked: report.Clocked,
    *,
    seed: int = 0,
    most_texts: int = 0,
) -> tuple[list[dict[str, Any]], Noise | None]:
    """Compare all tokens with those of plain decoding alone, and return the rows of bench.json.

    A batch, too, is held to plain decoding of each prompt by itself; its speed to plain decoding in
    batches of the same size. With the rows comes what rounding does to logits along the plain
    texts, measured where anything differs: along the first ``most_texts`` of each temperature, or
    all of them, which takes as long as decoding them again.
    """
    plain = {
        temperature: [decoded.new_tokens for decoded in runs["plain"].decoded]
        for (temperature, size), runs in clocked.items()
        if size == 1
    }
    ids = [prompt.input_ids for prompt in prompts]
    number = most_texts or len(ids)
    texts = [each for of in plain.values() for each in zip(ids[:number], of, strict=False)]
    # all nodes of a batch go through one matrix product, whose shape decides how it rounds
    widths = {method.tree_nodes * size for method in methods for _, size in clocked}
    compiled = any(method.compiled for method in methods)
    rounding = Rounding(base, texts, sorted(widths), compiled=compiled)
    on = {"dtype": str(base.dtype).removeprefix("torch."), "device": base.device.type}
    rows = []
    for (temperature, _), runs in clocked.items():
        samplers = [Sampler(temperature=temperature, seed=seed + n) for n in range(len(prompts))]
        for method in (each for each in methods if each.name in runs):
            found = None
            if method.seeded or (temperature == 0 and method.lossless):
                other = [decoded.new_tokens for decoded in runs[method.name].decoded]
                found = compare(prompts, plain[temperature], other, samplers, rounding=rounding)
            rows.append(report.make_row(method, runs, prompts, temperature, found, **on))
    return rows, rounding.noise if any(row["divergences"] for row in rows) else None


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
    names = ["+".join(exported.check_drafter(decode, has_heads=has_heads)), *drafters]
    found = [replace(decode, drafter=name) for name in dict.fromkeys(names) if name != "heads"]
    for each in found:
        exported.check_drafter(each, has_heads=has_heads)
    return found


def quoted_method(
    export: Export | None, decode: DecodeConfig, asked: Sequence[DecodeConfig]
) -> str:
    """Return the method to quote: what generate would decode with, given the same settings."""
    if export is None or decode.draft or decode.drafter not in ("auto", "heads"):
        return asked[0].drafter
    return "tree_dynamic" if exported.tree_kind(export, decode) == "dynamic" else "tree"


def load_others(subject: exported.Subject, paths: Sequence[str]) -> dict[str, Export]:
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

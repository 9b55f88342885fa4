"""Measure an export: plain, transformers' generate, prompt lookup and trees, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specheads.attention.tree import Tree
from specheads.config import ConfigError, DecodeConfig, SpecBenchConfig
from specheads.data.suites import Question, QuestionPrompts
from specheads.decoding import exported
from specheads.decoding.accept import Acceptance
from specheads.decoding.exported import (
    Chosen,
    Subject,
    check_drafter,
    choose_drafter,
    draft_model,
    drafter_names,
    dynamic_settings,
    exported_drafter,
    model_of,
    num_parameters,
    tree_kind,
)
from specheads.decoding.generate import SpecDecoder
from specheads.drafters.contract import Drafter
from specheads.drafters.heads import static_drafter
from specheads.drafters.lookup import LOOKUP_NGRAM, LOOKUP_TOKENS, NgramDrafter
from specheads.measure import rows as report
from specheads.measure.clock import (
    Method,
    Prompt,
    clock,
    drafted_method,
    hf_assisted_method,
    hf_compiled_method,
    hf_generate_method,
    hf_lookup_method,
    one_by_one_method,
    plain_method,
)
from specheads.measure.hits import Texts, collect_hits, grow_static
from specheads.measure.identity import Rounding, compare
from specheads.measure.render import disturbance_lines
from specheads.measure.rows import Clocked
from specheads.measure.suites import AnswerFile, Asked, answer_all
from specheads.models.base import end_tokens
from specheads.models.checkpoint import Export, load_export
from specheads.models.draft import vocab_size
from specheads.models.kinds import Heads
from specheads.models.output import OutputLayer, output_layer
from specheads.system import hardware
from specheads.system.terminal import progress_bar
from specheads.verification.sampling import Sampler

HF_TOKENS = 4  # of transformers' assistant where our own draft's length adapts itself


@dataclass(frozen=True)
class Contest:
    """What all methods of one comparison share.

    Attributes:
        base: base model.
        eos: tokens that end a text.
        pad: padding of transformers' generate.
        max_new_tokens: limit per prompt.
        compile: compile the base's passes in our own loops, the plain one included, which is then
            measured as it was before too, and generate with compiled passes.
    """

    base: PreTrainedModel
    eos: tuple[int, ...]
    pad: int | None
    max_new_tokens: int
    compile: bool = False

    @staticmethod
    def of(subject: Subject | Export, max_new_tokens: int, *, compile: bool = False) -> Contest:
        """Return the contest on a model that was loaded."""
        base, tokenizer = subject.base, subject.tokenizer
        eos, pad = end_tokens(base, tokenizer), tokenizer.pad_token_id
        return Contest(base, eos, pad, max_new_tokens, compile)

    def drafted(
        self,
        name: str,
        drafter: Drafter,
        num_nodes: int,
        *,
        extra: int = 0,
        rule: Acceptance | None = None,
        kind: str = "",
    ) -> Method:
        """Return the loop with a drafter of ``extra`` parameters; ``kind`` is its name."""
        method = drafted_method(
            name,
            self.base,
            drafter,
            self.eos,
            self.max_new_tokens,
            tree_nodes=num_nodes,
            acceptance=rule,
            compile=self.compile,
        )
        return replace(method, extra_parameters=extra, drafter=kind or method.drafter)

    def baselines(self, *, batched: bool = False) -> list[Method]:
        """Return plain decoding, generate and prompt lookup.

        Args:
            batched: there will be batches, to be measured beside decoding without them.
        """
        base, eos, pad, limit = self.base, self.eos, self.pad, self.max_new_tokens
        plain = plain_method(base, eos, limit, compile=self.compile)
        generate = [hf_generate_method(base, eos, pad, limit)]
        if self.compile:
            generate.insert(0, replace(plain_method(base, eos, limit), name="plain_eager"))
            generate.append(hf_compiled_method(base, eos, pad, limit))
        copying = NgramDrafter(max_ngram=LOOKUP_NGRAM, num_tokens=LOOKUP_TOKENS)
        alone = [one_by_one_method(plain)] if batched else []
        return [
            plain,
            *generate,
            *alone,
            self.drafted("prompt_lookup", copying, LOOKUP_TOKENS + 1),
        ]

    def of_trees(self, heads: Heads, output: OutputLayer, trees: Sequence[Tree]) -> list[Method]:
        """Return heads with static trees, the first of which is called ``tree``."""
        return [
            self.drafted(
                f"tree_{tree.num_nodes}" if index else "tree",
                static_drafter(self.base, heads, output, tree),
                tree.num_nodes,
                extra=num_parameters(heads),
            )
            for index, tree in enumerate(trees)
        ]

    def of_export(
        self, export: Export, decode: DecodeConfig, lossy: Acceptance | None
    ) -> list[Method]:
        """Return an export's heads with dynamic trees, and with a lossy rule.

        Args:
            export: the heads.
            decode: may ask for dynamic trees, else they are measured if tree_search has chosen one.
            lossy: a rule that the static tree is decoded by once more, named in the row.
        """
        extra, found = num_parameters(export.heads), []
        if decode.tree == "dynamic" or decode.num_nodes or dynamic_settings(export):
            drafter: Any = exported_drafter(export, replace(decode, tree="dynamic"))
            found.append(self.drafted("tree_dynamic", drafter, drafter.num_nodes, extra=extra))
        if lossy is not None:
            drafter = exported_drafter(export, DecodeConfig(tree="static"))
            name, num_nodes = f"tree_{lossy.rule}", export.tree.num_nodes
            found.append(self.drafted(name, drafter, num_nodes, extra=extra, rule=lossy))
        return found

    def of_drafters(
        self, subject: Subject, asked: Sequence[DecodeConfig], lossy: Acceptance | None
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
        base, eos, limit = self.base, self.eos, self.max_new_tokens
        decode, draft = asked[0], None
        methods = []
        if decode.draft:
            draft = draft_model(subject, decode)
            num_tokens, alone = decode.draft_tokens or HF_TOKENS, model_of(draft)
            if vocab_size(alone) == vocab_size(base):  # transformers takes no others
                methods.append(hf_assisted_method(base, alone, num_tokens, eos, limit))
        if {name for each in asked for name in each.drafter.split("+")} & {"lookup", "suffix"}:
            methods.append(hf_lookup_method(base, LOOKUP_TOKENS, LOOKUP_NGRAM, eos, limit))
        chosen = [choose_drafter(subject, each, draft=draft) for each in asked]
        rules: list[tuple[Chosen, str, Acceptance | None]]
        rules = [(each, each.name, None) for each in chosen]
        if lossy is not None and subject.export is None:
            rules.append((chosen[0], f"{chosen[0].name}_{lossy.rule}", lossy))
        return methods + [
            self.drafted(
                name,
                each.drafter,
                each.num_nodes,
                extra=each.extra_parameters,
                rule=rule,
                kind=each.name,
            )
            for each, name, rule in rules
        ]

    def of_others(self, others: Mapping[str, Export]) -> list[Method]:
        """Return for each export its tree, called ``<name>/tree``, and that of each step.

        The latter is measured where tree_search has chosen one.
        """
        methods = []
        for name, export in others.items():
            kinds = {"tree": "static"}
            kinds |= {"tree_dynamic": "dynamic"} if dynamic_settings(export) else {}
            for method, kind in kinds.items():
                drafter = exported_drafter(export, DecodeConfig(tree=kind))
                num_nodes = getattr(drafter, "num_nodes", export.tree.num_nodes)
                extra = num_parameters(export.heads)
                methods.append(self.drafted(f"{name}/{method}", drafter, num_nodes, extra=extra))
        return methods


def measure_rows(
    base: PreTrainedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    temperature: float,
    *,
    repeats: int,
    seed: int = 0,
    tick: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Clock ``methods`` at one temperature, batch 1; return a row of bench.json for each of them.

    Args:
        base: base model.
        methods: plain decoding among them.
        prompts: disjoint from those the tree was chosen on.
        temperature: of the sampling.
        repeats: clocked rounds over all prompts.
        seed: prompt n is sampled with ``seed + n``.
        tick: called after every decoded prompt.
    """
    runs = clock(methods, prompts, temperature, repeats=repeats, seed=seed, tick=tick)
    clocked = {(temperature, 1): runs}
    rounding = rounding_of(base, methods, prompts, clocked)
    return make_rows(base, methods, prompts, clocked, rounding, seed=seed)


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
    bar: Any = None,
) -> tuple[dict[str, Any], Clocked]:
    """Clock ``methods`` at every temperature and batch size.

    Args:
        base: base model.
        methods: compared.
        prompts: decoded.
        plan: temperatures, batch sizes and repeats.
        settings: more to record beside the figures.
        headline: the method whose figures are to be quoted.
        bar: told which temperature and batch size comes next (``set_description``), and of every
            decoded prompt (``update``).

    Returns:
        The content of bench.json; and the runs themselves.
    """
    before = hardware.environment(base.device)
    clocked = {}
    watched: list[dict[str, Any]] = []
    for temperature in plan.temperatures:
        for size in plan.batch_sizes:
            if bar is not None:
                bar.set_description(f"T={temperature:g}, batch {size}")
            runs = clock(
                methods,
                prompts,
                temperature,
                repeats=plan.repeats,
                batch_size=size,
                seed=plan.seed,
                tick=bar.update if bar is not None else lambda: None,
                prefill=True,
            )
            clocked[temperature, size] = runs
            started = runs["plain"].started
            assert started is not None
            watched.append(
                {
                    "temperature": temperature,
                    "batch": size,
                    "drift": round(report.baseline_drift([runs]), 4),
                    **hardware.between(started, hardware.sample()),
                }
            )
    # only now: the float32 copy that a divergence asks for would count as memory of the methods
    rounding = rounding_of(base, methods, prompts, clocked)
    rows = make_rows(base, methods, prompts, clocked, rounding, seed=plan.seed)
    result: dict[str, Any] = {
        "environment": {**before, **report.disturbance(watched)},
        "settings": {
            **(settings or {}),
            "temperatures": list(plan.temperatures),
            "batch_sizes": list(plan.batch_sizes),
            "repeats": plan.repeats,
            "seed": plan.seed,
            "threads": torch.get_num_threads(),
            "noise": asdict(rounding.noise) if any(row["divergences"] for row in rows) else None,
        },
        "headline": report.headline(rows, headline),
        "crossover": report.crossovers(rows),
        "pairs": report.pairs(clocked),
        "rows": rows,
    }
    return result | {"warnings": disturbance_lines(result)}, clocked


def rounding_of(
    base: PreTrainedModel, methods: Sequence[Method], prompts: Sequence[Prompt], clocked: Clocked
) -> Rounding:
    """Return what will measure, if asked, how rounding moves logits along the plain texts."""
    texts = [
        (prompt.input_ids, decoded.tokens)
        for (_, size), runs in clocked.items()
        if size == 1
        for prompt, decoded in zip(prompts, runs["plain"].decoded, strict=True)
    ]
    widths = {method.tree_nodes * size for method in methods for _, size in clocked}
    compiled = any(method.compiled for method in methods)
    return Rounding(base, texts, sorted(widths), compiled=compiled)


def make_rows(
    base: PreTrainedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    clocked: Clocked,
    rounding: Rounding,
    *,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Compare all tokens with those of plain decoding alone, and return the rows of bench.json.

    A batch, too, is held to plain decoding of each prompt by itself; its speed to plain decoding in
    batches of the same size.
    """
    names, ids = ([getattr(prompt, key) for prompt in prompts] for key in ("id", "input_ids"))
    dtype, device = str(base.dtype).removeprefix("torch."), base.device.type
    rows = []
    for (temperature, _), runs in clocked.items():
        plain = [decoded.tokens for decoded in clocked[temperature, 1]["plain"].decoded]
        samplers = [Sampler(temperature=temperature, seed=seed + n) for n in range(len(prompts))]
        for method in (each for each in methods if each.name in runs):
            same = None
            if method.seeded or (temperature == 0 and method.lossless):
                texts = [decoded.tokens for decoded in runs[method.name].decoded]
                same = compare(names, ids, plain, texts, samplers, rounding=rounding)
            rows.append(
                report.make_row(
                    method, runs, prompts, temperature, same, dtype=dtype, device=device
                )
            )
    return rows


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


def quoted_method(
    export: Export | None, decode: DecodeConfig, asked: Sequence[DecodeConfig]
) -> str:
    """Return the method to quote: what generate would decode with, given the same settings."""
    if export is None or decode.draft or decode.drafter not in ("auto", "heads"):
        return asked[0].drafter
    return "tree_dynamic" if tree_kind(export, decode) == "dynamic" else "tree"


def grown_trees(
    export: Export, prompts: Sequence[Prompt], eos: tuple[int, ...], sizes: Sequence[int]
) -> list[Tree]:
    """Grow static trees of some sizes for an export's heads, on calibration prompts."""
    texts = Texts([prompt.input_ids for prompt in prompts], eos)
    hits = collect_hits(export.base, export.heads, output_layer(export.base), texts)
    return [grow_static(hits, size) for size in sizes]


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


def answer_missing(
    config: SpecBenchConfig,
    questions: Sequence[Question],
    files: Mapping[str, AnswerFile],
    prompts: QuestionPrompts,
    dtype: str,
) -> list[int | str] | None:
    """Load, and answer what is missing; return the ids of questions that are too long.

    None where nothing is missing: then nothing is loaded.
    """
    todo = {
        number: missing
        for number, question in enumerate(questions)
        if (missing := [name for name, file in files.items() if not file.has(question)])
    }
    if not todo:
        return None
    decode = config.decode
    drafted = exported.load_decoder(
        config.checkpoint, decode, base=config.base, dtype=dtype, device=config.device
    )
    plain = SpecDecoder(drafted.base, None, tokenizer=drafted.tokenizer, compile=decode.compile)
    asked = Asked(prompts, config.max_new_tokens, config.temperature, config.seed)
    with progress_bar("question", total=len(todo)) as bar:
        return answer_all(
            {"drafted": drafted, "plain": plain},
            questions,
            todo,
            files,
            asked,
            warmup=config.warmup,
            skip_long=config.skip_long,
            tick=bar.update,
        )

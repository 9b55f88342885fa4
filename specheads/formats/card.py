"""Model cards: ``README.md`` with the hub's YAML, beside everything that is exported.

What was measured stands between two marks. Only that part is replaced when it is measured again:
whatever is written around it by hand stays. The licence is that of the base model, as its own card
or config states it, and never guessed.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specheads.config import ConfigError, RunError
from specheads.formats import serving
from specheads.formats.serving import Serving
from specheads.formats.write import FORMATS, commands, upload
from specheads.models.checkpoint import read_config
from specheads.models.manifest import read_json, read_provenance
from specheads.models.names import OURS
from specheads.system.files import write_whole
from specheads.system.hub import fetched, keep_to_the_cache_if_unreachable

CARD = "README.md"
BEGIN = "<!-- specheads: measured. This part is rewritten; write elsewhere. -->"
END = "<!-- specheads: end of measured -->"
_BENCH = "bench.json"
# per kind of export: what it is, and its tag on the hub
_KINDS = {
    "medusa": ("Medusa heads", "medusa"),
    "hydra": ("Hydra heads", "hydra"),
    "block": ("Block heads", "dflash"),
    "eagle3": ("An EAGLE-3 head", "eagle3"),
    "mtp": ("Multi-token-prediction heads", "multi-token-prediction"),
    "draft": ("A draft model", "draft-model"),
}
# methods of a bench that say something about the folder
_METHODS = ("plain", "hf_generate", "prompt_lookup", "tree", "tree_dynamic")
# what an evaluation says of a temperature, with the ends of the accept length's interval
_FINAL = (
    "accept_length", "accept_length_low", "accept_length_high", "speedup", "identical", "compared",
)  # fmt: skip
_ROUNDING = (
    "Where two tokens are nearly equally likely, passes of different sizes may round differently;"
    " `specheads bench` counts such places."
)


def write(
    folder: str | Path,
    form: str,
    info: Mapping[str, Any],
    *,
    final: Mapping[str, float] | None = None,
    name: str = "",
) -> None:
    """Write the card of a folder that was just written; one that lies there is replaced.

    Args:
        folder: where it goes. A ``bench.json`` in it is taken for what was measured.
        form: its format, a key of ``FORMATS``.
        info: the config.json of the native export it was made of, the specheads.json of a draft
            model, or nothing of a kind for a plain model trained from scratch.
        final: ``final/...`` of a recipe's last evaluation, made on this machine now.
        name: ``organisation/name`` where it is uploaded to; empty: commands name the folder.

    Raises:
        ConfigError: if a ``bench.json`` in the folder cannot be read.
        RunError: if the disk is full.
    """
    from specheads.system import hardware

    folder, info = Path(folder), dict(info)
    about, is_draft = info.get("base", {}), info.get("kind") == "draft"
    licence = licence_of(str(about.get("name") or ""), about.get("revision"))
    if (folder / _BENCH).is_file():
        figures = _by_bench(read_json(folder / _BENCH, "no bench"), folder / _BENCH)
    else:
        found = final or (info.get("measured") if is_draft else None) or {}
        figures = _by_training(form, info, found, hardware.environment() if final else {})
    place = name or folder.resolve().name
    if form == "native" and not is_draft:  # heads are loaded from a folder, not from the hub
        place = place.rpartition("/")[2]
    use = _use(commands(form, place, info, base=_moved(about)))
    if name and place != name:
        use = f"```sh\nhf download {name} --local-dir {place}\n```\n\n{use}"
    title, text = _opening(form, info)
    parts = [
        _front_matter(form, info, licence),
        f"# {title}",
        text,
        f"## What the output is\n\n{_output(info)}",
        f"## Training\n\n{_training(info.get('training') or {})}",
        f"## Measured\n\n{BEGIN}\n{figures}\n{END}",
        f"## Use\n\n{use}",
        f"## Licence\n\n{_licence_text(_shown_base(info), licence)}",
    ]
    _save(folder / CARD, "\n\n".join(parts) + "\n")


def finish(
    folder: Path, form: str, info: dict[str, Any], *, push: str = "", private: bool = False
) -> None:
    """Write the card of a folder, print how it is served, and upload it if asked.

    Args:
        folder: that was just written, whole.
        form: its format, a key of ``FORMATS``.
        info: the config.json of the native export that it was made of, or the specheads.json of a
            draft model.
        push: ``organisation/name`` on the hub, see :func:`check_push`; empty: nowhere.
        private: of a repository that is made for it.

    Raises:
        RunError: if the upload fails, or the disk is full; the folder stays.
    """
    write(folder, form, info, name=push)
    print("\n".join(serving.lines(commands(form, folder, info))))
    if push:
        print(f"uploaded to {upload(folder, push, private=private)}")


def check(folder: str | Path) -> None:
    """Check that :func:`measured` will find a card whose part it can replace, or can write one.

    Raises:
        ConfigError: if it cannot.
    """
    folder = Path(folder)
    if (folder / CARD).exists():
        _split(folder)
    else:
        _about(folder)


def measured(folder: str | Path, result: Mapping[str, Any] | None = None) -> None:
    """Replace the measured part of a folder's card; an export without one is given one.

    Args:
        folder: with a card, or a native export.
        result: what ``specheads.bench`` writes. None: what the folder's config.json says of its
            tree, which a tree search has just replaced.

    Raises:
        ConfigError: if there is neither, the card has lost its marks, or ``result`` is none.
        RunError: if the disk is full.
    """
    folder = Path(folder)
    if not (folder / CARD).exists():
        write(folder, "native", _about(folder))
    before, after = _split(folder)
    if result is None:
        info = read_json(folder / "config.json", f"{folder} is no export")
        text = _by_training("native", info, {}, {})
    else:
        text = _by_bench(result, folder / _BENCH)
    _save(folder / CARD, f"{before}{BEGIN}\n{text}\n{END}{after}")


def refresh(folder: str | Path) -> bool:
    """Let the card of an export say what its new tree is expected to do, in place of old figures.

    Returns:
        whether it has a card with a part for that; one without is left alone.

    Raises:
        RunError: if the disk is full.
    """
    with contextlib.suppress(ConfigError):
        if (Path(folder) / CARD).exists():
            measured(folder)
            return True
    return False


def _about(folder: Path) -> dict[str, Any]:
    """Return what an export without a card says of itself."""
    try:
        return read_provenance(folder) or read_config(folder)
    except ConfigError as error:
        raise ConfigError(f"{folder} has no {CARD}, and none can be written: {error}") from None


def _split(folder: Path) -> tuple[str, str]:
    """Return what stands before and after the measured part."""
    file = folder / CARD
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        missing = END if begin else BEGIN
        raise ConfigError(f"{file} lacks the line {missing!r}: measured figures go between the two")
    return before, after


def _save(file: Path, text: str) -> None:
    try:
        write_whole(file, text)
    except PermissionError as error:
        raise RunError(f"cannot write {file}: {error}") from None


def _on_the_hub(base: str) -> bool:
    """Return whether a recorded base is a name on the hub: folders are recorded by full paths."""
    return bool(base) and base not in OURS and not Path(base).is_absolute()


def _shown_base(info: Mapping[str, Any]) -> str:
    """Return the base's name for readers elsewhere: of a folder only its own name."""
    name = str(info.get("base", {}).get("name") or "")
    return Path(name).name if Path(name).is_absolute() else name


def _moved(about: Mapping[str, Any]) -> str:
    """Return how commands call a base that no path of this machine may name; else nothing."""
    base = str(about.get("name") or "")
    if about.get("tuned") or not base or _on_the_hub(base):
        return ""
    return {"tinycode": "data/tinycode", "smollm2": "smollm2"}.get(base, "BASE")


def _without_heads(form: str, info: Mapping[str, Any]) -> bool:
    """Return whether a format leaves out the heads of the export it is made of."""
    return bool(FORMATS[form].title) and info.get("kind", "draft") != "draft"


def _front_matter(form: str, info: Mapping[str, Any], licence: Licence) -> str:
    """Return the YAML that the hub reads; every string is quoted as JSON, which YAML includes."""
    kind, base = info.get("kind"), str(info.get("base", {}).get("name") or "")
    without = _without_heads(form, info)
    relation = "" if without or kind == "draft" else "adapter"
    start = ((info.get("training") or {}).get("draft") or {}).get("start")
    if info.get("base", {}).get("tuned") or (kind == "draft" and start == "base"):
        relation = "finetune"
    tags = [] if without or kind is None else [_KINDS.get(kind, ("", kind))[1]]
    hub = _on_the_hub(base)
    values = {
        "license": licence.identifier,
        "license_name": licence.name,
        "license_link": licence.link,
        "base_model": base if hub else "",
        "base_model_relation": relation if hub else "",
        "library_name": "transformers" if FORMATS[form].loads else "specheads",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", *tags],
    }
    lines = [f"{k}: {json.dumps(v, ensure_ascii=False)}" for k, v in values.items() if v]
    return "\n".join(["---", *lines, "---"])


def _opening(form: str, info: Mapping[str, Any]) -> tuple[str, str]:
    """Return the card's title, and what the folder is."""
    kind, base, known = info.get("kind"), _shown_base(info), FORMATS[form]
    of = f" of {base}" if base else ""
    if _without_heads(form, info):
        tuned = "tuned base" if info["base"].get("tuned") else "base"
        title = f"{known.title} {base}".strip().replace("base", tuned, 1)
        return title, known.card.format(base=of, kind=kind)
    what = "A base model" if kind is None else _KINDS.get(kind, (f"{kind} heads", ""))[0]
    title = f"{what} for {base}" if base else f"{what}, trained from scratch"
    if kind is None:
        return title, "A plain language model, for heads or a draft model to be trained on."
    if kind == "draft":
        return title, f"A small model that guesses the next tokens{of}, for speculative decoding."
    text = (
        f"{info['num_heads']} heads that guess the next {info['num_heads']} tokens behind the one"
        f" that the base model{of} gives, for speculative decoding. {known.card}"
    )
    return title, text.rstrip()


def _output(info: Mapping[str, Any]) -> str:
    """Return what the decoded text is identical to."""
    kind, base = info.get("kind"), _shown_base(info)
    if kind is None:
        return "Its own: nothing is guessed."
    if not info["base"].get("tuned"):
        guesses = "The draft model" if kind == "draft" else "Guessing"
        return (
            f"{guesses} changes how fast text appears, not the text: greedy decoding with specheads"
            f" gives the tokens of {base or 'the base model'} itself, and sampling those of its"
            f" plain decoding with the same seed. {_ROUNDING} `decode.acceptance=lossy_...` gives"
            " this up, and says so."
        )
    if not base:
        return (
            "The text of the base model in this folder, which was trained from scratch together"
            f" with the heads: there is no original to compare it with. {_ROUNDING}"
        )
    text = (
        f"The text of the **tuned** base model, which was trained together with the heads and is"
        f" **not** {base} any more. Guessing adds no further change. {_ROUNDING}"
    )
    found = info.get("training", {}).get("heldout") or {}
    if {"loss", "original_loss"} <= found.keys():
        kl = f"; KL(original || tuned) {found['kl']:.4f}" if "kl" in found else ""
        text += (
            f"\n\nHeld-out loss in nats per token: {found['loss']:.4f} tuned,"
            f" {found['original_loss']:.4f} original{kl}."
        )
    return text


def _table(header: str, rows: Iterable[str], rule: str = "") -> str:
    """Return a Markdown table; its cells are put to the right unless ``rule`` says otherwise."""
    return "\n".join([header, rule or re.sub(r"[^|]+", " ---: ", header), *rows])


def _training(about: Mapping[str, Any]) -> str:
    """Return recipe, data and held-out accuracy, as far as the export knows them."""
    rows = [("recipe", about.get("recipe")), ("steps", about.get("steps"))]
    data = about.get("data") or {}
    if isinstance(data, Mapping):
        path = data.get("path") or ""
        if source := data.get("source"):
            shown = path if source == "hub" else Path(str(path)).name
            rows.append(("data", f"{source} {shown}".strip()))
        for part, name, more in (("train", "trained on", " learned"), ("heldout", "held out", "")):
            counts = data.get(part) or {}
            if counts.get("learned"):
                documents = f"{counts.get('documents', 0):,} documents"
                rows.append((name, f"{documents}, {counts['learned']:,} tokens{more}"))
    draft = about.get("draft") or {}
    compressed = "made smaller after training" if about.get("compressed") else None
    rows += [
        ("loss", draft.get("loss")),
        ("start", draft.get("start")),
        ("output matrices", compressed),
        ("made of", about.get("from")),
    ]
    known = [f"| {name} | {value} |" for name, value in rows if value not in (None, "")]
    if not known:
        return "Nothing is recorded about its training."
    table = _table("| | |", known, "| --- | --- |")
    accuracy = _accuracy(about.get("heldout") or {})
    return f"{table}\n\n{accuracy}" if accuracy else table


def _accuracy(found: Mapping[str, float]) -> str:
    """Return the table of held-out accuracy per head; head i guesses i + 2 tokens ahead."""

    def shown(key: str, form: str) -> str:
        return format(found[key], form) if found.get(key) is not None else "-"

    rows = [
        f"| {i} | {i + 2} | {shown(f'head_{i}/top1', '.1%')} | {shown(f'head_{i}/top5', '.1%')} |"
        f" {shown(f'head_{i}/loss', '.3f')} |"
        for i in range(len(found))
        if f"head_{i}/top1" in found
    ]
    if rows:
        table = _table("| head | tokens ahead | top 1 | top 5 | loss |", rows)
        return f"Held-out accuracy:\n\n{table}"
    if "alpha" in found:
        top1 = f"; top 1 {found['top1']:.1%}" if "top1" in found else ""
        return f"Held-out acceptance of drawn guesses (alpha): {found['alpha']:.4f}{top1}."
    return ""


def _by_training(
    form: str, info: Mapping[str, Any], final: Mapping[str, float], machine: Mapping[str, Any]
) -> str:
    """Return what the recipe measured itself: the chosen tree, and its last evaluation."""
    if _without_heads(form, info):
        return "Nothing was measured without the heads."
    parts = []
    tree = info.get("tree") or {}
    on = tree.get("measured_on") or {}
    if tree.get("expected_accept_length") and on:
        faster = on.get("speedup")
        speed = f" and {faster:.2f}x the speed of plain decoding" if faster else ""
        parts.append(
            f"Expected of its tree of {len(tree['choices']) + 1} nodes:"
            f" {tree['expected_accept_length']:.2f} tokens per verify step{speed}, from"
            f" {on.get('num_prompts')} prompts ({on.get('dtype')}, {on.get('device')},"
            f" {on.get('threads')} threads)."
        )
        grown = on.get("dynamic") or {}
        if grown.get("speedup", 0) > (faster or 0):
            parts.append(
                f"Trees of {grown['num_nodes']} nodes grown at each step, which decoding takes"
                f" unless told otherwise: {grown['accept_length']:.2f} tokens and"
                f" {grown['speedup']:.2f}x."
            )
        if FORMATS[form].chain and (chain := _chain(tree)):
            parts.append(
                f"That is in specheads. A chain of the heads' best guesses, as this format is"
                f" served, is expected to give {chain:.2f} tokens per step."
            )
    rows = []
    for at in sorted({key.rpartition("/")[2] for key in final if key.startswith("final/")}):
        length, low, high, speedup, same, of = (final.get(f"final/{key}/{at}") for key in _FINAL)
        if length is None:
            continue
        between = "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
        fast = "-" if speedup is None else f"{speedup:.2f}x"
        equal = "-" if same is None or of is None else f"{same:.0f} of {of:.0f}"
        rows.append(f"| {at.removeprefix('t')} | {length:.2f}{between} | {fast} | {equal} |")
    if rows:
        dtype = info.get("base", {}).get("dtype")
        where = ", ".join(str(each) for each in (dtype, _machine(machine)) if each)
        header = "| temperature | accept length (95%) | speed | same text as plain |"
        table = _table(header, rows)
        parts.append(f"At the end of training, on held-out prompts ({where}):\n\n{table}")
    return "\n\n".join(parts) or "Nothing was measured yet: `specheads bench card=true` does it."


def _chain(tree: Mapping[str, Any]) -> float:
    """Return the expected accept length of the tree's first choices alone; 0 if it is unknown."""
    chances, choices = tree["measured_on"].get("acceptance") or [], tree["choices"]
    if len(chances) != len(choices):
        return 0.0
    # a path of ranks that are all 0 takes every head's best guess
    first = [chance for path, chance in zip(choices, chances, strict=True) if not any(path)]
    return 1 + sum(first) if first else 0.0


def _by_bench(result: Mapping[str, Any], file: Path) -> str:
    """Return the table of a bench's rows at batch 1.

    Raises:
        ConfigError: if ``result``, which may be read from ``file``, is none.
    """
    try:
        shown = {*_METHODS, (result.get("headline") or {}).get("method")}
        rows = [row for row in result["rows"] if row["batch"] == 1 and row["method"] in shown]
        rows.sort(key=lambda row: row["temperature"])
        about, settings = result["environment"], result["settings"]
        dtypes = ", ".join(sorted({str(row["dtype"]) for row in rows}))
        header = (
            "| temperature | method | tokens/s | speed (95%) | x generate | accept length |"
            " same text as plain |"
        )
        rule = "| ---: | --- | ---: | ---: | ---: | ---: | ---: |"
        table = _table(header, map(_bench_row, rows), rule)
        text = (
            f"`specheads bench`, {settings['num_prompts']} prompts of up to"
            f" {settings['max_new_tokens']} new tokens, batch 1, {dtypes}, {_machine(about)}."
            f"\n\n{table}"
        )
        if about.get("contended"):
            drift, share = about.get("baseline_drift"), about.get("largest_other_share")
            others = f", others took up to {share:.0%} of the processors" if share else ""
            text += f"\n\nThe machine was busy (plain decoding itself varied {drift:.2f}x{others})."
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} is no result of specheads.bench: {error!r:.100}") from None
    return text


def _bench_row(row: Mapping[str, Any]) -> str:
    low, high = row["speedup_vs_plain_ci95"]
    same = "-" if row["identical"] is None else f"{row['identical']} of {row['compared']}"
    return (
        f"| {row['temperature']:g} | {row['method']} | {row['tokens_per_second']:.1f} |"
        f" {row['speedup_vs_plain']:.2f}x ({low:.2f} to {high:.2f}) |"
        f" {row['speedup_vs_hf_generate']:.2f} | {row['accept_length']:.2f} | {same} |"
    )


def _machine(about: Mapping[str, Any]) -> str:
    """Return hardware and date in a few words."""
    device = about.get("device", "cpu")
    found = [device, about.get("date")]
    if device == "cpu":
        threads = f"{about['threads']} threads" if about.get("threads") else None
        found = [about.get("processor") or "cpu", threads, about.get("date")]
    return ", ".join(str(each) for each in found if each) or "machine unknown"


def _use(found: Sequence[Serving]) -> str:
    """Return the commands of the engines, and why others have none."""
    parts = [
        "Composed from the engines' files and documents in the versions named, and run where it"
        " says tried."
    ]
    without = []
    for each in found:
        if each.command:
            note = f"\n\n{each.note[0].upper()}{each.note[1:]}." if each.note else ""
            block = f"```{each.language}\n{each.command}\n```"
            parts.append(f"**{each.engine}** ({each.checked})\n\n{block}{note}")
        else:
            without.append(f"- {each.engine} ({each.checked}): {each.note}.")
    if without:
        parts.append("\n".join(["Not served by:", "", *without]))
    return "\n\n".join(parts)


UNKNOWN = "unknown"  # which the hub knows as a licence of its own
_IDENTIFIER = re.compile(r"[A-Za-z0-9][\w.+-]{0,60}")
_LINK = re.compile(r"https://[\w./%+-]{1,200}")
_MOST = 1 << 20  # characters of a card that are read


class Licence(NamedTuple):
    """What is known of a licence.

    Attributes:
        identifier: for the card's ``license``, ``unknown`` where nothing says it.
        name: of an ``other`` one.
        link: to its text.
        source: where it was read.
    """

    identifier: str
    name: str = ""
    link: str = ""
    source: str = ""


def licence_of(name: str, revision: str | None = None) -> Licence:
    """Return the licence of a base model.

    Args:
        name: a folder, a GGUF file, a name on the hub, ``tinycode``, ``smollm2``; empty where there
            is no original.
        revision: of the hub's.
    """
    if not name:
        return Licence(UNKNOWN)
    folder = Path(serving.resolved(name)).expanduser()
    found = None
    if folder.is_dir():
        found = _of_file(folder / CARD) or _of_file(folder / "config.json")
    elif not folder.is_absolute():
        keep_to_the_cache_if_unreachable()
        card = fetched(name, CARD, revision)
        found = _of_file(card) if card else None
    return found or Licence(UNKNOWN)


def _of_file(file: Path) -> Licence | None:
    """Return what the YAML at the head of a card says, or a config; None if it does not say it.

    A stranger's words are not copied as they are.
    """
    import yaml

    try:
        if file.name == CARD:
            with file.open(encoding="utf-8") as card:
                found = re.match(r"---\s*\n(.*?\n)---\s*(\n|$)", card.read(_MOST), re.DOTALL)
            about = yaml.safe_load(found[1]) if found else None
        else:
            about = read_json(file, "no config", strict=False)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, ConfigError):
        return None
    if not isinstance(about, dict):
        return None

    def stated(key: str, pattern: re.Pattern[str]) -> str:
        value = about.get(key)
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        return value if isinstance(value, str) and pattern.fullmatch(value) else ""

    if not (identifier := stated("license", _IDENTIFIER)):
        return None
    name, link = stated("license_name", _IDENTIFIER), stated("license_link", _LINK)
    return Licence(identifier.lower(), name, link, f"its {file.name}")


def _licence_text(base: str, licence: Licence) -> str:
    if not base:
        return (
            "Not set: the model was trained from scratch. Whoever publishes it says under which"
            " licence, here and in `license` above."
        )
    if licence.identifier == UNKNOWN:
        return (
            f"Unknown: neither a card nor the config of {base} names a licence. What is derived"
            " from a model is bound by its licence: look it up before passing this on."
        )
    named = licence.name or licence.identifier
    link = f" ({licence.link})" if licence.link else ""
    return f"{named}{link}: that of the base model {base}, read in {licence.source}."

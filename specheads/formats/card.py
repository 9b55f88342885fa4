"""Model cards: ``README.md`` with the hub's YAML, beside everything that is exported.

What was measured stands between two marks. Only that part is replaced when it is measured again:
whatever is written around it by hand stays.

The parts of a model card: what the output is, how it was trained, what was measured.

The licence of a base model, as its own card or config states it; never guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specheads.config import ConfigError, RunError
from specheads.formats.serving import Serving, commands
from specheads.models.checkpoint import read_config
from specheads.models.draft import read_provenance
from specheads.models.kinds import KINDS
from specheads.models.manifest import read_json
from specheads.models.names import is_hub_error, keep_to_the_cache_if_unreachable
from specheads.system.files import tinycode_dir, whole_file

_WORDS = {
    "medusa": "Medusa heads",
    "hydra": "Hydra heads",
    "mtp": "Multi-token-prediction heads",
    "draft": "A draft model",
    "base": "A base model",
}
_LAYOUTS = {
    "hf": "Base model and heads are one model, whose class transformers knows through specheads.",
    "mtp_standard": "Base model and heads are laid out in the MTP standard of transformers.",
    "vllm_medusa": "Laid out for vLLM 0.28 to 0.32.",
    "fasterdecoding_v1": "Laid out as the original Medusa code and TGI read them.",
    "fasterdecoding_v2": "Laid out as the original Medusa code and TGI read them, version 2.",
    "merged": "Base model and heads in one folder, laid out as the original code's checkpoints.",
}
_CHAINS = ("mtp_standard", "vllm_medusa", "fasterdecoding_v1", "fasterdecoding_v2")
# what a bench measures that says something about the folder
_METHODS = ("plain", "hf_generate", "prompt_lookup", "tree", "tree_dynamic")


def shown_base(info: Mapping[str, Any]) -> str:
    """Return the base's name for readers elsewhere: of a folder only its own name."""
    name = str(info.get("base", {}).get("name") or "")
    return Path(name).name if Path(name).is_absolute() else name


def title(form: str, info: Mapping[str, Any]) -> str:
    """Return the card's heading."""
    base = shown_base(info)
    if without_heads(form, info):
        tuned = "tuned " if info["base"].get("tuned") else ""
        what = "The base model" if form == "plain" else "Settings of text copies for the base model"
        return f"{what.replace('base', f'{tuned}base')}{f' {base}' if base else ''}"
    kind = info.get("kind", "base")
    what = _WORDS.get(kind, f"{kind} heads")
    return f"{what} for {base}" if base else f"{what}, trained from scratch"


def without_heads(form: str, info: Mapping[str, Any]) -> bool:
    """Return whether a format leaves out the heads of the export it is made of."""
    return form in ("plain", "vllm_custom_class") and info.get("kind") in KINDS


def introduction(form: str, info: Mapping[str, Any]) -> str:
    """Return what the folder is."""
    kind = info.get("kind", "base")
    base = shown_base(info)
    of = f" of {base}" if base else ""
    if kind == "base":
        return "A plain language model, for heads or a draft model to be trained on."
    if form == "plain":
        return (
            f"The base model{of} as {kind} heads were trained with it, without them: an ordinary"
            " model folder."
        )
    if form == "vllm_custom_class":
        return (
            f"Settings with which vLLM guesses from the text, for the base model{of}. The {kind}"
            " heads that it was exported with are not used."
        )
    if kind == "draft":
        return f"A small model that guesses the next tokens{of}, for speculative decoding."
    number = info["num_heads"]
    text = (
        f"{number} heads that guess the next {number} tokens behind the one that the base"
        f" model{of} gives, for speculative decoding."
    )
    return f"{text} {_LAYOUTS[form]}" if form in _LAYOUTS else text


def output(form: str, info: Mapping[str, Any]) -> str:
    """Return what the decoded text is identical to."""
    kind, base = info.get("kind", "base"), shown_base(info)
    about = info.get("base", {})
    original = base or "the base model"
    rounding = (
        "Where two tokens are nearly equally likely, passes of different sizes may round"
        " differently; `specheads bench` counts such places."
    )
    if kind == "base":
        return "Its own: nothing is guessed."
    if not about.get("tuned"):
        guesses = "The draft model" if kind == "draft" else "Guessing"
        return (
            f"{guesses} changes how fast text appears, not the text: greedy decoding with specheads"
            f" gives the tokens of {original} itself, and sampling those of its plain decoding with"
            f" the same seed. {rounding} `decode.acceptance=lossy_...` gives this up, and says so."
        )
    if not base:
        return (
            "The text of the base model in this folder, which was trained from scratch together"
            f" with the heads: there is no original to compare it with. {rounding}"
        )
    text = (
        f"The text of the **tuned** base model, which was trained together with the heads and is"
        f" **not** {base} any more. Guessing adds no further change. {rounding}"
    )
    found = info.get("training", {}).get("heldout") or {}
    if {"loss", "original_loss"} <= found.keys():
        text += (
            f"\n\nHeld-out loss in nats per token: {found['loss']:.4f} tuned,"
            f" {found['original_loss']:.4f} original"
        )
        text += f"; KL(original || tuned) {found['kl']:.4f}." if "kl" in found else "."
    return text


def training(info: Mapping[str, Any]) -> str:
    """Return recipe, data and held-out accuracy, as far as the export knows them."""
    about = info.get("training") or {}
    rows = [("recipe", about.get("recipe")), ("steps", about.get("steps"))]
    data = about.get("data") or {}
    if isinstance(data, Mapping):
        path = (
            Path(str(data.get("path") or "")).name if data.get("source") != "hub" else data["path"]
        )
        rows.append(
            ("data", f"{data.get('source')} {path}".strip() if data.get("source") else None)
        )
        for part, name in (("train", "trained on"), ("heldout", "held out")):
            counts = data.get(part) or {}
            if counts.get("learned"):
                text = f"{counts.get('documents', 0):,} documents, {counts['learned']:,} tokens"
                rows.append((name, f"{text} learned" if part == "train" else text))
    draft = about.get("draft") or {}
    rows += [("loss", draft.get("loss")), ("start", draft.get("start"))]
    if about.get("compressed"):
        rows.append(("output matrices", "made smaller after training"))
    if about.get("from"):
        rows.append(("made of", about["from"]))
    lines = [f"| {name} | {value} |" for name, value in rows if value not in (None, "")]
    if not lines:
        return "Nothing is recorded about its training."
    table = "\n".join(["| | |", "| --- | --- |", *lines])
    accuracy = _accuracy(about.get("heldout") or {})
    return f"{table}\n\n{accuracy}" if accuracy else table


def _accuracy(found: Mapping[str, float]) -> str:
    """Return the table of held-out accuracy per head; head i guesses i + 2 tokens ahead."""
    heads = [i for i in range(len(found)) if f"head_{i}/top1" in found]
    if heads:
        lines = ["Held-out accuracy:", "", "| head | tokens ahead | top 1 | top 5 | loss |"]
        lines.append("| ---: | ---: | ---: | ---: | ---: |")
        for i in heads:
            top1 = format(found[f"head_{i}/top1"], ".1%")
            top5 = _or_dash(found.get(f"head_{i}/top5"), ".1%")
            loss = _or_dash(found.get(f"head_{i}/loss"), ".3f")
            lines.append(f"| {i} | {i + 2} | {top1} | {top5} | {loss} |")
        return "\n".join(lines)
    if "alpha" in found:
        top1 = f"; top 1 {found['top1']:.1%}" if "top1" in found else ""
        return f"Held-out acceptance of drawn guesses (alpha): {found['alpha']:.4f}{top1}."
    return ""


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def measured_by_training(
    form: str, info: Mapping[str, Any], final: Mapping[str, float], machine: Mapping[str, Any]
) -> str:
    """Return what the recipe measured itself: the chosen tree, and its last evaluation."""
    if without_heads(form, info):
        return "Nothing was measured without the heads."
    parts = []
    tree = info.get("tree") or {}
    on = tree.get("measured_on") or {}
    if tree.get("expected_accept_length") and on:
        batch = f"{on.get('dtype')}, {on.get('device')}, {on.get('threads')} threads"
        expected = f"{tree['expected_accept_length']:.2f} tokens per verify step"
        faster = (
            f" and {on['speedup']:.2f}x the speed of plain decoding" if on.get("speedup") else ""
        )
        parts.append(
            f"Expected of its tree of {len(tree['choices']) + 1} nodes: {expected}{faster}, from"
            f" {on.get('num_prompts')} prompts ({batch})."
        )
        if form in _CHAINS and (chain := _chain(tree)):
            parts.append(
                f"That is in specheads. A chain of the heads' best guesses, as this format is"
                f" served, is expected to give {chain:.2f} tokens per step."
            )
    rows = []
    for at in sorted({key.rpartition("/")[2] for key in final if key.startswith("final/")}):
        length = final.get(f"final/accept_length/{at}")
        if length is None:
            continue
        low, high = (final.get(f"final/accept_length_{end}/{at}") for end in ("low", "high"))
        between = "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
        speed = final.get(f"final/speedup/{at}")
        same, of = final.get(f"final/identical/{at}"), final.get(f"final/compared/{at}")
        equal = "-" if same is None or of is None else f"{same:.0f} of {of:.0f}"
        rows.append(
            f"| {at.removeprefix('t')} | {length:.2f}{between} |"
            f" {'-' if speed is None else f'{speed:.2f}x'} | {equal} |"
        )
    if rows:
        dtype = info.get("base", {}).get("dtype")
        where = ", ".join(str(each) for each in (dtype, _machine(machine)) if each)
        parts.append(
            "\n".join(
                [
                    f"At the end of training, on held-out prompts ({where}):",
                    "",
                    "| temperature | accept length (95%) | speed | same text as plain |",
                    "| ---: | ---: | ---: | ---: |",
                    *rows,
                ]
            )
        )
    return "\n\n".join(parts) or "Nothing was measured yet: `specheads bench card=true` does it."


def _chain(tree: Mapping[str, Any]) -> float:
    """Return the expected accept length of the tree's first choices alone; 0 if it is unknown."""
    chances = tree["measured_on"].get("acceptance") or []
    if len(chances) != len(tree["choices"]):
        return 0.0
    first = [
        chance
        for path, chance in zip(tree["choices"], chances, strict=True)
        if not any(path)  # ranks, the best one being 0
    ]
    return 1 + sum(first) if first else 0.0


def measured_by_bench(result: Mapping[str, Any]) -> str:
    """Return the table of a bench's rows at batch 1."""
    rows = _rows(result)
    about, settings = result["environment"], result["settings"]
    dtypes = ", ".join(sorted({str(row["dtype"]) for row in rows}))
    lines = [
        f"`specheads bench`, {settings['num_prompts']} prompts of up to"
        f" {settings['max_new_tokens']} new tokens, batch 1, {dtypes}, {_machine(about)}.",
        "",
        "| temperature | method | tokens/s | speed (95%) | x generate | accept length |"
        " same text as plain |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        low, high = row["speedup_vs_plain_ci95"]
        same = "-" if row["identical"] is None else f"{row['identical']} of {row['compared']}"
        lines.append(
            f"| {row['temperature']:g} | {row['method']} | {row['tokens_per_second']:.1f} |"
            f" {row['speedup_vs_plain']:.2f}x ({low:.2f} to {high:.2f}) |"
            f" {row['speedup_vs_hf_generate']:.2f} | {row['accept_length']:.2f} | {same} |"
        )
    if about.get("contended"):
        drift, share = about.get("baseline_drift"), about.get("largest_other_share")
        others = f", others took up to {share:.0%} of the processors" if share else ""
        lines += ["", f"The machine was busy (plain decoding itself varied {drift:.2f}x{others})."]
    return "\n".join(lines)


def _rows(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    shown = {*_METHODS, (result.get("headline") or {}).get("method")}
    rows = [row for row in result["rows"] if row["batch"] == 1 and row["method"] in shown]
    return sorted(rows, key=lambda row: row["temperature"])


def _machine(about: Mapping[str, Any]) -> str:
    """Return hardware and date in a few words."""
    device = about.get("device", "cpu")
    found = [about.get("processor") or "cpu"] if device == "cpu" else [device]
    if about.get("threads") and device == "cpu":
        found.append(f"{about['threads']} threads")
    found.append(about.get("date"))
    return ", ".join(str(each) for each in found if each) or "machine unknown"


def serving(found: Sequence[Serving]) -> str:
    """Return the commands of the engines, and why others have none."""
    parts = [
        "Composed from the engines' files and documents in the versions named, and run where it"
        " says tried."
    ]
    for each in (each for each in found if each.command):
        note = f"\n\n{each.note[0].upper()}{each.note[1:]}." if each.note else ""
        parts.append(
            f"**{each.engine}** ({each.checked})\n\n```{each.language}\n{each.command}\n```{note}"
        )
    without = [each for each in found if not each.command]
    if without:
        parts.append(
            "\n".join(
                ["Not served by:", "", *(f"- {e.engine} ({e.checked}): {e.note}." for e in without)]
            )
        )
    return "\n\n".join(parts)


UNKNOWN = "unknown"  # which the hub knows as a licence of its own
_IDENTIFIER = re.compile(r"[A-Za-z0-9][\w.+-]{0,60}")
_MOST = 1 << 20  # characters of a card that are read


class Licence(NamedTuple):
    """What is known.

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
        name: a folder, a name on the hub, ``tinycode``; empty where there is no original.
        revision: of the hub's.
    """
    if not name:
        return Licence(UNKNOWN)
    folder = tinycode_dir() if name == "tinycode" else Path(name).expanduser()
    if folder.is_dir():
        return _of_card(folder / "README.md") or _of_config(folder / "config.json")
    if folder.is_absolute():
        return Licence(UNKNOWN)
    card = _card_on_the_hub(name, revision)
    return (_of_card(card) if card else None) or Licence(UNKNOWN)


def _card_on_the_hub(name: str, revision: str | None) -> Path | None:
    """Return the card of a model on the hub: from the cache, or fetched if the hub answers."""
    from huggingface_hub import hf_hub_download

    keep_to_the_cache_if_unreachable()
    try:
        return Path(hf_hub_download(name, "README.md", revision=revision))
    except Exception as error:
        if not is_hub_error(error):
            raise
        return None  # no card, no access, no network: the licence stays unknown


def _of_card(file: Path) -> Licence | None:
    """Return what the YAML at the head of a card says; None if it does not say it."""
    import yaml

    try:
        with file.open(encoding="utf-8") as card:
            text = card.read(_MOST)
    except (OSError, UnicodeDecodeError):
        return None
    found = re.match(r"---\s*\n(.*?\n)---\s*(\n|$)", text, re.DOTALL)
    if not found:
        return None
    try:
        about = yaml.safe_load(found[1])
    except (yaml.YAMLError, RecursionError):
        return None
    return _checked(about, file)


def _of_config(file: Path) -> Licence:
    try:
        about = read_json(file, "no config", strict=False)
    except ConfigError:
        return Licence(UNKNOWN)
    return _checked(about, file) or Licence(UNKNOWN)


def _checked(about: Any, file: Path) -> Licence | None:
    """Return the licence in a mapping of keys; a stranger's words are not copied as they are."""
    if not isinstance(about, dict):
        return None
    identifier = about.get("license")
    if isinstance(identifier, list) and len(identifier) == 1:
        identifier = identifier[0]
    if not isinstance(identifier, str) or not _IDENTIFIER.fullmatch(identifier):
        return None
    name, link = about.get("license_name"), about.get("license_link")
    name = name if isinstance(name, str) and _IDENTIFIER.fullmatch(name) else ""
    plain = isinstance(link, str) and re.fullmatch(r"https://[\w./%+-]{1,200}", link)
    return Licence(identifier.lower(), name, str(link) if plain else "", f"its {file.name}")


CARD = "README.md"
BEGIN = "<!-- specheads: measured. This part is rewritten; write elsewhere. -->"
END = "<!-- specheads: end of measured -->"
_PLAIN = ("plain", "hf", "mtp_standard", "merged", "draft")  # which from_pretrained loads
_BENCH = "bench.json"


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
        form: its format.
        info: the config.json of the native export it was made of, the specheads.json of a draft
            model, or nothing for a plain model trained from scratch.
        final: ``final/...`` of a recipe's last evaluation, made on this machine now.
        name: ``organisation/name`` where it is uploaded to; empty: commands name the folder.

    Raises:
        ConfigError: if a ``bench.json`` in the folder cannot be read.
        RunError: if the disk is full.
    """
    from specheads.system import hardware

    folder = Path(folder)
    info = dict(info)
    licence = _licence(info)
    if (folder / _BENCH).is_file():
        measured = _by_bench(read_json(folder / _BENCH, "no bench"), folder / _BENCH)
    else:
        of_draft = info.get("measured") if info.get("kind") == "draft" else None
        found, machine = final or {}, hardware.environment() if final else {}
        measured = measured_by_training(form, info, found or of_draft or {}, machine)
    use = serving(_served(form, name or folder.resolve().name, info))
    if name and form == "native" and info.get("kind") != "draft":  # which is loaded from a folder
        use = f"```sh\nhf download {name} --local-dir {_short(name)}\n```\n\n{use}"
    parts = [
        _front_matter(form, info, licence),
        f"# {title(form, info)}",
        introduction(form, info),
        f"## What the output is\n\n{output(form, info)}",
        f"## Training\n\n{training(info)}",
        f"## Measured\n\n{BEGIN}\n{measured}\n{END}",
        f"## Use\n\n{use}",
        f"## Licence\n\n{_licence_text(info, licence)}",
    ]
    _save(folder / CARD, "\n\n".join(parts) + "\n")


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
        text = measured_by_training("native", info, {}, {})
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
    if not (Path(folder) / CARD).exists():
        return False
    try:
        measured(folder)
    except ConfigError:
        return False
    return True


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


def _by_bench(result: Mapping[str, Any], file: Path) -> str:
    try:
        return measured_by_bench(result)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} is no result of specheads.bench: {error!r:.100}") from None


def _save(file: Path, text: str) -> None:
    with whole_file(file) as fresh:
        try:
            fresh.write_text(text, encoding="utf-8")
        except PermissionError as error:
            raise RunError(f"cannot write {file}: {error}") from None


def _front_matter(form: str, info: Mapping[str, Any], licence: Licence) -> str:
    """Return the YAML that the hub reads; every string is quoted as JSON, which YAML includes."""
    kind, about = info.get("kind", "base"), info.get("base", {})
    base = str(about.get("name") or "")
    values: dict[str, Any] = {"license": licence.identifier}
    if licence.name:
        values["license_name"] = licence.name
    if licence.link:
        values["license_link"] = licence.link
    if _on_the_hub(base):
        values["base_model"] = base
        if relation := _relation(form, info):
            values["base_model_relation"] = relation
    values["library_name"] = "transformers" if form in _PLAIN else "specheads"
    values["pipeline_tag"] = "text-generation"
    words = {"mtp": ["multi-token-prediction"], "draft": ["draft-model"], "base": []}
    heads = [] if without_heads(form, info) else words.get(kind, [kind])
    values["tags"] = ["speculative-decoding", *heads]
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    return "\n".join(["---", *lines, "---"])


def _relation(form: str, info: Mapping[str, Any]) -> str:
    """Return the hub's word for how this came of its base; empty where it has none."""
    if info.get("base", {}).get("tuned"):
        return "finetune"
    if info.get("kind") == "draft":
        start = ((info.get("training") or {}).get("draft") or {}).get("start")
        return "finetune" if start == "base" else ""
    return "" if form in ("plain", "vllm_custom_class") else "adapter"


def _licence(info: Mapping[str, Any]) -> Licence:
    about = info.get("base", {})
    return licence_of(str(about.get("name") or ""), about.get("revision"))


def _licence_text(info: Mapping[str, Any], licence: Licence) -> str:
    base = shown_base(info)
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


def _served(form: str, name: str, info: dict[str, Any]) -> list[Serving]:
    """Return the serving commands for a card, where no path of this machine belongs."""
    about = info.get("base", {})
    base = str(about.get("name") or "")
    if form == "native" and info.get("kind") != "draft":
        name = _short(name)
    if about.get("tuned") or not base or _on_the_hub(base):
        return commands(form, name, info)
    return commands(form, name, info, base="data/tinycode" if base == "tinycode" else "BASE")


def _on_the_hub(base: str) -> bool:
    """Return whether a recorded base is a name on the hub: folders are recorded by full paths."""
    return bool(base) and base != "tinycode" and not Path(base).is_absolute()


def _short(name: str) -> str:
    return name.rpartition("/")[2]

"""The parts of a model card: what the output is, how it was trained, what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specheads.formats.serving import Serving

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
    what = _WORDS[info.get("kind", "base")]
    return f"{what} for {base}" if base else f"{what}, trained from scratch"


def without_heads(form: str, info: Mapping[str, Any]) -> bool:
    """Return whether a format leaves out the heads of the export it is made of."""
    return form in ("plain", "vllm_custom_class") and info.get("kind") in ("medusa", "hydra", "mtp")


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

"""How engines serve a written folder: one command per engine, or why there is none.

The commands are composed from the engines' own files and documents, in the versions of ``CHECKED``.
Where these say "tried", docs/serving.md has what was run, and how.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specheads.models.names import OURS, resolve_name
from specheads.system import __version__

# what was read and run of each engine, in November 2026
CHECKED = {
    "specheads": __version__,
    "transformers": "5.23, tried",
    "vLLM": "0.32 and 0.33, tried on a CPU",
    "SGLang": "its documents of 2026",
    "TensorRT-LLM": "its documents of 2026",
    "llama.cpp": "build 11434, tried on a CPU",
    "TGI": "3.3.7, its files; archived in March 2026",
    "FasterDecoding/Medusa": "main, its files",
}
_ENGINES = ("vLLM", "SGLang", "TensorRT-LLM", "llama.cpp")
ALONE = "one prompt at a time, a chain of guesses"
_DRAFTED = 4  # tokens per step that a draft model is asked for
_DRAFT = "a draft model (+recipe=distill) can be served there"
# by which vLLM 0.32 and 0.33 know other drafters, whatever "method" says: config/speculative.py
_OF_OTHERS = ("eagle-", "eagle3", "dflash", "dspark")
DEEPSEEK = "deepseek_v3"
NATIVE_MTP = (DEEPSEEK, "glm4_moe")  # bases whose MTP layers engines know by themselves
_HEADS = "specheads.vllm_heads.HeadsProposer"
_PROPOSER = "specheads.vllm_proposer.SuffixProposer"
_BESIDE = "needs specheads in vLLM's environment, and its first model runner: docs/serving_vllm.md"
COPIED = 8  # tokens guessed per step at most; where nothing was written before, nothing is guessed


class Job(NamedTuple):
    """An export that is to be written in a format.

    Attributes:
        form: the format, a key of ``FORMATS``.
        checkpoint: the export.
        info: what its config.json holds, or the specheads.json of a draft model.
        output: a new folder.
        dtype: of the written tensors; None keeps theirs.
        layout: of formats that have two.
    """

    form: str
    checkpoint: str
    info: dict[str, Any]
    output: Path
    dtype: torch.dtype | None
    layout: str = "speculators"


class Serving(NamedTuple):
    """How one engine serves a folder.

    Attributes:
        engine: a key of ``CHECKED``.
        command: to type, or to paste into Python; empty where the engine cannot serve the folder.
        note: why it cannot, or what to know.
        version: what was checked, where it is not that of ``CHECKED``.
    """

    engine: str
    command: str
    note: str = ""
    version: str = ""

    @property
    def checked(self) -> str:
        """The version whose files or documents were read."""
        return self.version or CHECKED[self.engine]

    @property
    def language(self) -> str:
        """``sh``, or ``python``."""
        return "python" if self.command.startswith(("AutoModel", "export =", "import ")) else "sh"


def taken_for(path: str | Path, form: str = "") -> str:
    """Return the word in a folder's path, or in its name on the hub, that misleads vLLM.

    A draft in a folder with such a word is loaded as a head of that kind, whatever ``method`` says.
    Empty where there is none, or it is that of the format ``form``.
    """
    found = (word for word in _OF_OTHERS if word in str(path).lower())
    return next((word for word in found if word != form), "")


def resolved(name: str) -> str:
    """Return the folder of a model of ours, or of a GGUF file; any other name as it is."""
    return resolve_name(name) if name in OURS or name.endswith(".gguf") else name


def base_name(info: dict[str, Any], folder: str) -> str:
    """Return how engines find the original base model; it is the folder itself where none was."""
    return resolved(str(info.get("base", {}).get("name") or folder))


def lines(found: list[Serving]) -> list[str]:
    """Return the commands as lines for a terminal."""
    shown = ["how it is served (read in the engines' files and documents; run where it says"
             " tried):"]  # fmt: skip
    for each in found:
        shown.append(f"  {each.engine} ({each.checked}): {each.command or 'no'}")
        if each.note:
            shown.append(f"    {each.note}")
    return shown


def load(folder: str) -> str:
    """Return the Python with which transformers loads a folder."""
    return f'AutoModelForCausalLM.from_pretrained("{folder}")'


def speculative(method: str, num_tokens: int, drafter: str = "") -> dict[str, Any]:
    """Return a value of vLLM's ``--speculative-config``; some methods need no ``drafter``."""
    given = {"method": method, "model": drafter, "num_speculative_tokens": num_tokens}
    return {key: value for key, value in given.items() if value}


def vllm(model: str, config: dict[str, Any], note: str = "", version: str = "") -> Serving:
    """Return vLLM's command for a model and a ``--speculative-config``."""
    command = f"vllm serve {model} --speculative-config '{json.dumps(config)}'"
    return Serving("vLLM", command, note, version)


def transformers(model: str, option: str, note: str = "", before: str = "") -> Serving:
    """Return the Python with which transformers decodes, with an ``option`` of its ``generate``."""
    return Serving("transformers", f"{before}{load(model)}.generate(**inputs, {option})", note)


def sglang(model: str, algorithm: str, num_steps: int = 0, **options: Any) -> Serving:
    """Return SGLang's command; ``options`` are named as there, behind ``--speculative-``.

    With ``num_steps`` a chain of so many tokens is drafted.
    """
    named = {"algorithm": algorithm, **options}
    if num_steps:
        named |= {"num_steps": num_steps, "eagle_topk": 1, "num_draft_tokens": num_steps + 1}
    words = [f" --speculative-{key.replace('_', '-')} {value}" for key, value in named.items()]
    command = f"python -m sglang.launch_server --model-path {model}" + "".join(words)
    return Serving("SGLang", command)


def tensorrt(model: str, **config: Any) -> Serving:
    """Return TensorRT-LLM's command, and in its note the file that it needs."""
    keys = ", ".join(f"{key}: {value}" for key, value in config.items())
    note = f"spec.yaml: {{speculative_config: {{{keys}}}}}"
    return Serving("TensorRT-LLM", f"trtllm-serve {model} --config spec.yaml", note)


def llama_cpp(options: str, converted: str) -> Serving:
    """Return llama.cpp's command; ``converted`` is what has to be made GGUF before."""
    note = f"after convert_hf_to_gguf.py for {converted}"
    return Serving("llama.cpp", f"llama-server -m {options}", note)


def native(place: str, base: str, info: dict[str, Any]) -> list[Serving]:
    """Return how specheads itself decodes with a native export, and what other engines need.

    Args:
        place: the folder.
        base: where the base model is now.
        info: the config.json of heads, or the specheads.json of a draft model.
    """
    if info["kind"] == "draft":
        command = f"specheads generate checkpoint={base} decode.draft={place} prompt=..."
        return [Serving("specheads", command), *draft_model(place, base, info)]
    moved = not info["base"]["tuned"] and base != base_name(info, place)
    given = f" base={base}" if moved else ""
    own = f"specheads generate checkpoint={place}{given} prompt=..."
    more = "trees, batches; specheads bench measures it, specheads chat talks to it"
    code = (
        f'export = load_export("{place}"); export.base.generate(**inputs, custom_generate='
        "SpecDecoder(export.base, exported_drafter(export)))"
    )
    found = [Serving("specheads", own, more)]
    found.append(Serving("transformers", code, "with specheads imported: docs/decoding.md"))
    (known, *others), here = without_heads(info), heads_in_vllm(place, base, info)
    if known.note.startswith("format="):  # what it reads by itself
        here = here._replace(note=f"{here.note}; without specheads {known.note}")
    found += [here, *others]
    if info["kind"] == "medusa":
        found.append(Serving("TGI", "", "format=fasterdecoding_v1 or _v2 is what it reads"))
    return found


def heads_in_vllm(place: str, base: str, info: dict[str, Any]) -> Serving:
    """Return vLLM's command for the heads of a native export, see :mod:`specheads.vllm_heads`."""
    if info["base"].get("adapter"):
        return Serving("vLLM", "", "it runs no adapter: format=vllm_heads merges it into the base")
    config = speculative("custom_class", info["num_heads"], _HEADS)
    options = [f" --additional-config '{json.dumps({'specheads': {'heads': place}})}'"]
    # of a prefix that is in vLLM's cache, heads that attend would not see the hidden states
    if info["kind"] != "medusa" or info.get("prefix_layer"):
        options.append(" --no-enable-prefix-caching")
    # in a graph of the whole pass nobody sees its hidden states; a CPU has no graphs
    options.append(""" --compilation-config '{"cudagraph_mode": "PIECEWISE"}'""")
    note = f"a chain of the heads' best guesses; {_BESIDE}"
    found = vllm(base, config, note, "0.32, tried on a CPU; 0.33, its files")
    return found._replace(command=found.command + "".join(options))


def vllm_heads(place: str, base: str, info: dict[str, Any]) -> list[Serving]:
    """Return how vLLM serves a folder of ``format=vllm_heads``, whose adapter is merged."""
    return [heads_in_vllm(place, base, {**info, "base": {**info["base"], "adapter": False}})]


def draft_model(place: str, base: str, info: dict[str, Any]) -> list[Serving]:
    """Return how engines guess with a draft model: all have a place for one."""
    refused = ", ".join(_OF_OTHERS)
    note = f"vocab_size must be the same in both configs; the draft's path must not hold {refused}"
    options = f"base.gguf -md draft.gguf --spec-type draft-simple --spec-draft-n-max {_DRAFTED}"
    kind = {"decoding_type": "DraftTarget", "max_draft_len": _DRAFTED, "speculative_model": place}
    return [
        transformers(base, f"assistant_model={load(place)}", ALONE),
        vllm(base, speculative("draft_model", _DRAFTED, place), note),
        sglang(base, "STANDALONE", _DRAFTED, draft_model_path=place),
        tensorrt(base, **kind),
        llama_cpp(options, f"{base} and for {place}"),
    ]


def text_copies(place: str, note: str = "") -> list[Serving]:
    """Return how engines serve a plain model, guessing from the text where they can.

    Args:
        place: the model's folder or name.
        note: for transformers.
    """
    # it looks for the last 12 tokens by default, which hardly ever come again in a short text
    copied = f"--spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m {COPIED}"
    return [
        transformers(place, f"prompt_lookup_num_tokens={COPIED}", note),
        vllm(place, speculative("custom_class", COPIED, _PROPOSER), _BESIDE),
        sglang(place, "NGRAM", num_draft_tokens=COPIED),
        tensorrt(place, decoding_type="NGram", max_draft_len=COPIED, max_matching_ngram_size=4),
        llama_cpp(f"base.gguf --spec-type ngram-simple {copied}", place),
    ]


def without_heads(info: dict[str, Any]) -> list[Serving]:
    """Return why engines cannot use the heads of a format that is none of theirs.

    Args:
        info: the config.json of the native export.
    """
    kind = info["kind"]
    if kind == "mtp":
        fits = info.get("variant") == "sequential" and info.get("lm_head") == "shared"
        other = "it has no place for MTP heads that are parallel or have their own matrix"
        unknown = unknown_mtp(info) if fits else dict.fromkeys(_ENGINES, other)
        reads = "format=mtp_standard is what it reads"
        return [Serving(engine, "", unknown.get(engine, reads)) for engine in _ENGINES]
    if kind in ("block", "eagle3"):
        reads = "format=eagle3" if kind == "eagle3" else "format=dflash or format=dspark"
        note = f"{reads} is what it reads"
        if info.get("form", {}).get("form") == "joined":
            note = f"it knows block heads of the published form alone (+recipe=dspark); {_DRAFT}"
        return [Serving(engine, "", note) for engine in _ENGINES]
    no_method = "it has no Medusa or Hydra method"
    left = f"Medusa left with its TensorRT backend in 2026; {_DRAFT}"
    gone = f"{no_method} (0.33 removed Medusa's); format=vllm_heads brings them to it"
    other = f"{no_method}; {_DRAFT}"
    notes = (gone, other, left, other)
    return [Serving(engine, "", note) for engine, note in zip(_ENGINES, notes, strict=True)]


def unknown_mtp(info: dict[str, Any]) -> dict[str, str]:
    """Return the engines that do not know MTP layers of such a base model, and why."""
    kind, found = info.get("block", {}).get("model_type", ""), {}
    if kind not in NATIVE_MTP:
        unknown = f"it knows MTP layers of certain models, of {kind} it does not"
        found = {"SGLang": unknown, "llama.cpp": unknown}
    if kind != DEEPSEEK:
        found["TensorRT-LLM"] = "it knows MTP layers of DeepSeek-V3 alone"
    return found

"""How a written folder is served: one command per engine, or why there is none.

Composed from what the engines' own files and documents say, in the versions named here. Where these
say "tried", docs/serving.md has what was run, and how. What engines can hold changes quickly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from specheads.formats import vllm
from specheads.system import __version__
from specheads.system.files import tinycode_dir

# what was read and run of each, in November 2026
VLLM = "0.32 and 0.33, tried on a CPU"
VLLM_MTP = "0.33, tried on a CPU"
VLLM_NATIVE_MTP = "0.33, its files"
VLLM_MEDUSA = "0.28 to 0.32, their files; the last tried on a CPU"
SGLANG = "its documents of 2026"
TENSORRT = "its documents of 2026"
LLAMA_CPP = "of 2026, tried in part"
TGI = "3.3.7, its files; archived in March 2026"
TRANSFORMERS = "5.23, tried"
DRAFTED = 4  # tokens per step that a draft model is asked for
COPIED = 8  # tokens per step that are copied from the text
_DEEPSEEK = "deepseek_v3"
_ONLY_DEEPSEEK = "it knows MTP layers of DeepSeek-V3 alone"
_NATIVE_MTP = (_DEEPSEEK, "glm4_moe")  # bases whose MTP layers engines know by themselves
# by which vLLM 0.32 and 0.33 know other drafters, whatever "method" says: config/speculative.py
_OF_OTHERS = ("eagle-", "eagle3", "dflash", "dspark")


class Serving(NamedTuple):
    """One engine.

    Attributes:
        engine: its name.
        checked: the version whose files or documents were read.
        command: to type, or to paste into Python; empty where the engine cannot serve the folder.
        note: why it cannot, or what to know.
    """

    engine: str
    checked: str
    command: str
    note: str = ""

    @property
    def language(self) -> str:
        """``sh``, or ``python``."""
        return "python" if self.command.startswith(("AutoModel", "export =", "import ")) else "sh"


def commands(
    form: str, folder: str | Path, info: dict[str, Any], *, base: str = ""
) -> list[Serving]:
    """Return how each engine serves a folder, or why it does not.

    Args:
        form: the folder's format.
        folder: as it is to be named in the commands.
        info: the config.json of the native export that it was made of, or the specheads.json of a
            draft model; empty for a plain model trained from scratch.
        base: how the base model is to be named; empty: as ``info`` names it.
    """
    place, kind, moved = str(folder), info.get("kind", "base"), base
    base = base or base_place(form, place, info)
    if kind == "draft":
        return _draft_model(form, place, base)
    if form == "plain":
        return _alone(place, "")
    if form == "vllm_custom_class":
        return _alone(base, "", "the settings in speculative_config.json; ")
    if form == "vllm_medusa":
        return [_vllm_medusa(place, base, info["num_heads"]), *_elsewhere(form, info)]
    if form in ("fasterdecoding_v1", "fasterdecoding_v2"):
        return [_tgi(place, info), *_elsewhere(form, info)]
    if form == "merged":
        return [*_alone(place, "the base alone: the heads are passed over"), *_original_code(place)]
    if form == "mtp_standard":
        return _mtp(place, info)
    if form == "hf":
        load = f'import specheads; AutoModelForCausalLM.from_pretrained("{place}")'
        return [
            Serving("transformers", TRANSFORMERS, load, "its heads are model.mtp"),
            *_elsewhere(form, info),
        ]
    return [*_ours(place, moved, info), *_elsewhere(form, info)]


def taken_for(path: str | Path) -> str:
    """Return the word in a folder's path, or in its name on the hub, that misleads vLLM.

    A draft in a folder with such a word is loaded as a head of that kind, whatever ``method`` says.
    Empty where there is none.
    """
    return next((word for word in _OF_OTHERS if word in str(path).lower()), "")


def base_place(form: str, folder: str, info: dict[str, Any]) -> str:
    """Return where the base model of a folder is: its own, or the original under its name."""
    about = info.get("base", {})
    if not about.get("tuned"):
        name = str(about.get("name") or folder)
        return str(tinycode_dir()) if name == "tinycode" else name
    return folder if form in ("plain", "vllm_custom_class", "merged") else f"{folder}/base"


def lines(found: list[Serving]) -> list[str]:
    """Return the commands as lines for a terminal."""
    shown = ["how it is served (read in the engines' files and documents; run where it says"
             " tried):"]  # fmt: skip
    for each in found:
        shown.append(f"  {each.engine} ({each.checked}): {each.command or 'no'}")
        if each.note:
            shown.append(f"    {each.note}")
    return shown


def _draft_model(form: str, place: str, base: str) -> list[Serving]:
    """Return how engines guess with a draft model: all have a place for one."""
    config = {"method": "draft_model", "model": place, "num_speculative_tokens": DRAFTED}
    python = (
        f'AutoModelForCausalLM.from_pretrained("{base}").generate(**inputs, assistant_model='
        f'AutoModelForCausalLM.from_pretrained("{place}"))'
    )
    own = []
    if form == "native":
        command = f"specheads generate checkpoint={base} decode.draft={place} prompt=..."
        own = [Serving("specheads", __version__, command)]
    return [
        *own,
        Serving("transformers", TRANSFORMERS, python, "one prompt at a time, a chain of guesses"),
        Serving(
            "vLLM",
            VLLM,
            _vllm_command(base, config),
            "vocab_size must be the same in both configs; the draft's path must not hold "
            + ", ".join(_OF_OTHERS),
        ),
        Serving(
            "SGLang",
            SGLANG,
            f"python -m sglang.launch_server --model-path {base} --speculative-algorithm STANDALONE"
            f" --speculative-draft-model-path {place} --speculative-num-steps {DRAFTED}"
            f" --speculative-eagle-topk 1 --speculative-num-draft-tokens {DRAFTED + 1}",
        ),
        Serving(
            "TensorRT-LLM",
            TENSORRT,
            f"trtllm-serve {base} --config spec.yaml",
            f"spec.yaml: {{speculative_config: {{decoding_type: DraftTarget, max_draft_len:"
            f" {DRAFTED}, speculative_model: {place}}}}}",
        ),
        Serving(
            "llama.cpp",
            LLAMA_CPP,
            f"llama-server -m base.gguf -md draft.gguf --spec-type draft-simple"
            f" --spec-draft-n-max {DRAFTED}",
            f"after convert_hf_to_gguf.py for {base} and for {place}",
        ),
    ]


def _alone(place: str, note: str, settings: str = "") -> list[Serving]:
    """Return how engines serve a plain model, guessing from the text where they can."""
    config = vllm.settings(num_tokens=COPIED)
    needs = "needs specheads in vLLM's environment, and its first model runner: docs/serving.md"
    return [
        Serving(
            "transformers",
            TRANSFORMERS,
            f'AutoModelForCausalLM.from_pretrained("{place}").generate(**inputs,'
            f" prompt_lookup_num_tokens={COPIED})",
            note,
        ),
        Serving("vLLM", VLLM, _vllm_command(place, config), settings + needs),
        Serving(
            "SGLang",
            SGLANG,
            f"python -m sglang.launch_server --model-path {place} --speculative-algorithm NGRAM"
            f" --speculative-num-draft-tokens {COPIED}",
        ),
        Serving(
            "TensorRT-LLM",
            TENSORRT,
            f"trtllm-serve {place} --config spec.yaml",
            "spec.yaml: {speculative_config: {decoding_type: NGram, max_draft_len:"
            f" {COPIED}, max_matching_ngram_size: 4}}}}",
        ),
        Serving(
            "llama.cpp",
            LLAMA_CPP,
            "llama-server -m base.gguf --spec-type ngram-simple --spec-ngram-simple-size-m"
            f" {COPIED}",
            f"after convert_hf_to_gguf.py for {place}",
        ),
    ]


def _vllm_medusa(place: str, base: str, num_heads: int) -> Serving:
    config = {"method": "medusa", "model": place, "num_speculative_tokens": num_heads}
    note = (
        "a chain of the heads' best guesses, no tree; num_speculative_tokens may be smaller; 0.33"
        " removed the method"
    )
    return Serving("vLLM", VLLM_MEDUSA, _vllm_command(base, config), note)


def _tgi(place: str, info: dict[str, Any]) -> Serving:
    command = f"text-generation-launcher --model-id {place} --speculate {info['num_heads']}"
    note = "a chain of the heads' best guesses, no tree; TGI is no longer maintained"
    return Serving("TGI", TGI, command, note)


def _original_code(place: str) -> list[Serving]:
    command = f"python -m medusa.inference.cli --model {place}"
    note = "the code of the paper: transformers of 2023, its own trees"
    return [Serving("FasterDecoding/Medusa", "main, its files", command, note)]


def _mtp(place: str, info: dict[str, Any]) -> list[Serving]:
    """Return how engines serve a folder in the MTP standard of transformers."""
    kind, number = info.get("block", {}).get("model_type", ""), info["num_heads"]
    native = kind in _NATIVE_MTP
    load = "" if native else "import specheads; "
    python = (
        f'{load}AutoModelForCausalLM.from_pretrained("{place}").generate(**inputs, use_mtp=True)'
    )
    config = {"method": "mtp", "num_speculative_tokens": number}
    needs = (
        f"needs vLLM 0.33 and transformers 5.20 or newer, and specheads beside them, of which a"
        f" {kind} with MTP layers is a class. 0.33 exists for GPUs only: on a CPU its Python files"
        " were tried, over the kernels of 0.32"
    )
    sglang = (
        f"python -m sglang.launch_server --model-path {place} --speculative-algorithm EAGLE"
        f" --speculative-num-steps {number} --speculative-eagle-topk 1"
        f" --speculative-num-draft-tokens {number + 1}"
    )
    llama = f"llama-server -m model.gguf --spec-type draft-mtp --spec-draft-n-max {number}"
    spec = f"spec.yaml: {{speculative_config: {{decoding_type: MTP, max_draft_len: {number}}}}}"
    tensorrt = (f"trtllm-serve {place} --config spec.yaml", spec)
    no = ("", _unknown_mtp(kind))
    converted = (llama, f"after convert_hf_to_gguf.py for {place}")
    alone = "one prompt at a time, a chain of guesses"
    if number > 1:
        alone += f"; prompts of at least {number} tokens: it fails with fewer than there are heads"
    return [
        Serving("transformers", TRANSFORMERS, python, alone),
        Serving(
            "vLLM",
            VLLM_NATIVE_MTP if native else VLLM_MTP,
            _vllm_command(place, config),
            "" if native else needs,
        ),
        Serving("SGLang", SGLANG, *((sglang,) if native else no)),
        Serving(
            "TensorRT-LLM", TENSORRT, *(tensorrt if kind == _DEEPSEEK else ("", _ONLY_DEEPSEEK))
        ),
        Serving("llama.cpp", LLAMA_CPP, *(converted if native else no)),
    ]


def _ours(place: str, moved: str, info: dict[str, Any]) -> list[Serving]:
    """Return how specheads itself decodes with a native export."""
    given = f" base={moved}" if moved and not info["base"]["tuned"] else ""
    return [
        Serving(
            "specheads",
            __version__,
            f"specheads generate checkpoint={place}{given} prompt=...",
            "trees, batches; specheads bench measures it, specheads chat talks to it",
        ),
        Serving(
            "transformers",
            TRANSFORMERS,
            f'export = load_export("{place}"); export.base.generate(**inputs, custom_generate='
            "SpecDecoder(export.base, exported_drafter(export)))",
            "with specheads imported: docs/decoding.md",
        ),
    ]


def _elsewhere(form: str, info: dict[str, Any]) -> list[Serving]:
    """Return why the engines that are left cannot use these heads, and what they can use."""
    notes = {"medusa": _of_medusa, "hydra": _of_hydra, "mtp": _of_mtp}[info["kind"]](form, info)
    checked = [VLLM, SGLANG, TENSORRT, LLAMA_CPP, TGI]
    engines = ["vLLM", "SGLang", "TensorRT-LLM", "llama.cpp", "TGI"]
    return [Serving(*each) for each in zip(engines, checked, [""] * 5, notes, strict=False)]


_DRAFTS = "a draft model (+recipe=distill) can be served there"


def _of_medusa(form: str, info: dict[str, Any]) -> list[str]:
    older = "" if form == "vllm_medusa" else "; format=vllm_medusa is for 0.28 to 0.32"
    return [
        f"0.33 removed Medusa heads{older}; format=vllm_custom_class guesses without heads",
        *_of_hydra(form, info)[1:],
        *(["format=fasterdecoding_v1 or _v2 is what it reads"] if form == "native" else []),
    ]


def _of_hydra(form: str, info: dict[str, Any]) -> list[str]:
    return [
        "it has no Hydra method; format=vllm_custom_class guesses without heads",
        f"it has no Medusa or Hydra method; {_DRAFTS}",
        f"Medusa left with its TensorRT backend in 2026; {_DRAFTS}",
        f"it has no Medusa or Hydra method; {_DRAFTS}",
    ]


def _of_mtp(form: str, info: dict[str, Any]) -> list[str]:
    if info.get("variant") != "sequential" or info.get("lm_head") != "shared":
        return ["it has no place for MTP heads that are parallel or have their own matrix"] * 4
    base = info.get("block", {}).get("model_type", "")
    reads = "format=mtp_standard is what it reads"
    native = reads if base in _NATIVE_MTP else _unknown_mtp(base)
    return [reads, native, reads if base == _DEEPSEEK else _ONLY_DEEPSEEK, native]


def _unknown_mtp(model_type: str) -> str:
    return f"it knows MTP layers of certain models, of {model_type} it does not"


def _vllm_command(model: str, config: dict[str, Any]) -> str:
    return f"vllm serve {model} --speculative-config '{json.dumps(config)}'"

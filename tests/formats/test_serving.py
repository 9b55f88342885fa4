"""Serving commands: every engine has an answer, and every command can be taken apart again."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from specheads.formats.serving import Serving, lines, taken_for
from specheads.formats.write import FORMATS, commands
from specheads.vllm_heads import HeadsProposer

BASE = {"name": "org/base", "tuned": False}
TUNED = {"name": "org/base", "tuned": True}


def heads(kind: str, **more: Any) -> dict[str, Any]:
    """Return what an export's config.json says, as far as it matters here."""
    return {"kind": kind, "num_heads": 3, "base": BASE, **more}


def mtp(model_type: str, **more: Any) -> dict[str, Any]:
    """Return the config.json of sequential MTP heads on a base of a certain type."""
    shared = {"variant": "sequential", "lm_head": "shared", "block": {"model_type": model_type}}
    return heads("mtp", **{**shared, **more})


# form, what the native export says, engines with a command, engines with none
CASES: list[tuple[str, dict[str, Any], set[str], set[str]]] = [
    (
        "native", heads("medusa"), {"specheads", "transformers", "vLLM"},
        {"SGLang", "TensorRT-LLM", "llama.cpp", "TGI"},
    ),
    (
        "native", heads("hydra"), {"specheads", "transformers", "vLLM"},
        {"SGLang", "TensorRT-LLM", "llama.cpp"},
    ),
    (
        "native", mtp("llama", variant="parallel", base=TUNED),
        {"specheads", "transformers", "vLLM"}, {"SGLang", "TensorRT-LLM", "llama.cpp"},
    ),
    (
        "native", heads("medusa", base={**TUNED, "adapter": True}), {"specheads", "transformers"},
        {"vLLM", "SGLang", "TensorRT-LLM", "llama.cpp", "TGI"},
    ),
    ("vllm_heads", heads("medusa", base={**TUNED, "adapter": True}), {"vLLM"}, set()),
    (
        "native", {"kind": "draft", "base": {"name": "org/base"}},
        {"specheads", "transformers", "vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"}, set(),
    ),
    (
        "draft", {"kind": "draft", "base": {"name": "org/base"}},
        {"transformers", "vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"}, set(),
    ),
    (
        "plain", heads("medusa", base=TUNED),
        {"transformers", "vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"}, set(),
    ),
    ("plain", {}, {"transformers", "vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"}, set()),
    (
        "merged", heads("medusa", base=TUNED),
        {
            "transformers", "vLLM", "SGLang", "TensorRT-LLM", "llama.cpp", "FasterDecoding/Medusa",
        }, set(),
    ),
    (
        "fasterdecoding_v1", heads("medusa"), {"TGI"},
        {"vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"},
    ),
    (
        "fasterdecoding_v2", heads("medusa", base=TUNED), {"TGI"},
        {"vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"},
    ),
    (
        "native", heads("eagle3"), {"specheads", "transformers", "vLLM"},
        {"SGLang", "TensorRT-LLM", "llama.cpp"},
    ),
    ("dflash", heads("block"), {"vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"}, set()),
    ("dspark", heads("block"), {"vLLM", "SGLang", "llama.cpp"}, {"TensorRT-LLM"}),
    ("eagle3", heads("eagle3"), {"vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"}, set()),
    ("hf", mtp("llama"), {"transformers"}, {"vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"}),
    (
        "mtp_standard", mtp("llama", base=TUNED), {"transformers", "vLLM"},
        {"SGLang", "TensorRT-LLM", "llama.cpp"},
    ),
    (
        "mtp_standard", mtp("deepseek_v3"),
        {"transformers", "vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"}, set(),
    ),
    (
        "mtp_standard", mtp("glm4_moe"), {"transformers", "vLLM", "SGLang", "llama.cpp"},
        {"TensorRT-LLM"},
    ),
]  # fmt: skip


def test_every_format_is_in_the_cases() -> None:
    """A format that is added without its commands would print none, or stop after writing."""
    assert {form for form, *_ in CASES} == set(FORMATS)


def test_the_page_of_formats_says_what_the_table_says() -> None:
    """A format that the page lacks is found by nobody; one that is described otherwise misleads."""
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    table = page.partition("## Which format for what")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")][1:]
    assert [[f" `{form}` ", f" {each.holds} "] for form, each in FORMATS.items()] == rows


@pytest.mark.parametrize("form,info,able,unable", CASES)
def test_each_engine_has_a_command_or_a_reason(
    form: str, info: dict[str, Any], able: set[str], unable: set[str]
) -> None:
    """An engine without an answer sends its users to try, and to find 0% acceptance."""
    found = commands(form, "FOLDER", info)
    assert {each.engine for each in found if each.command} == able
    assert {each.engine for each in found if not each.command} == unable
    assert all(each.checked for each in found)
    assert all(each.note for each in found if not each.command)
    for each in found:
        check_command(each)
    shown = "\n".join(lines(found))
    assert all(each.command in shown and each.note in shown for each in found)


def check_command(each: Serving) -> None:
    """Take a command apart as a shell or Python would."""
    if not each.command:
        return
    if each.language == "python":
        ast.parse(each.command)
    else:
        words = shlex.split(each.command)
        if "--speculative-config" in words:
            given = json.loads(words[words.index("--speculative-config") + 1])
            assert {"method", "num_speculative_tokens"} <= given.keys()
    if each.note.startswith("spec.yaml: "):
        spec = yaml.safe_load(each.note.removeprefix("spec.yaml: "))
        assert {"decoding_type", "max_draft_len"} <= spec["speculative_config"].keys()


def command(engine: str, form: str, info: dict[str, Any], **more: Any) -> str:
    """Return one engine's command."""
    return next(
        each.command
        for each in commands(form, "FOLDER", info, **more)
        if each.engine == engine and each.command
    )


def test_the_base_model_is_where_the_format_has_it() -> None:
    """A tuned base's heads on the original model guess worse, and nobody is told."""
    assert command("vLLM", "vllm_heads", heads("medusa")).startswith("vllm serve org/base ")
    assert command("vLLM", "vllm_heads", heads("medusa", base=TUNED)).startswith(
        "vllm serve FOLDER/base "
    )
    for form in ("plain", "merged"):
        assert command("vLLM", form, heads("medusa", base=TUNED)).startswith("vllm serve FOLDER ")
    draft = {"kind": "draft", "base": {"name": "org/base"}}
    assert command("vLLM", "draft", draft, base="BASE").startswith("vllm serve BASE ")
    assert '"model": "FOLDER"' in command("vLLM", "draft", draft)
    assert "--model-path org/base " in command("SGLang", "draft", draft)
    assert "--speculative-draft-model-path FOLDER " in command("SGLang", "draft", draft)


def test_a_format_is_promised_where_it_is_read_alone() -> None:
    """Somebody would convert a llama's MTP heads for an engine that has no class for them."""
    for model_type, readers in [
        ("llama", {"vLLM"}),
        ("glm4_moe", {"vLLM", "SGLang", "llama.cpp"}),
        ("deepseek_v3", {"vLLM", "SGLang", "llama.cpp", "TensorRT-LLM"}),
    ]:
        found = commands("native", "FOLDER", mtp(model_type))
        assert readers == {each.engine for each in found if "format=mtp_standard" in each.note}
        served = commands("mtp_standard", "FOLDER", mtp(model_type))
        assert {each.engine for each in served if each.command} == {"transformers", *readers}


def test_our_own_command_names_a_base_that_was_moved() -> None:
    """On a card that is read elsewhere, the path of this machine is no use, and no one's affair."""
    ours = heads("medusa", base={"name": "/home/me/base", "tuned": False})
    assert command("specheads", "native", ours) == "specheads generate checkpoint=FOLDER prompt=..."
    moved = command("specheads", "native", ours, base="BASE")
    assert moved == "specheads generate checkpoint=FOLDER base=BASE prompt=..."
    tuned = heads("medusa", base=TUNED)
    assert "base=" not in command("specheads", "native", tuned, base="BASE")


RUN = ("specheads", "transformers", "vLLM", "llama.cpp")  # at least in part


def test_nothing_is_said_to_have_been_run_that_was_not() -> None:
    """A version beside a command reads like a test, so each says whether anything was run."""
    for form, info, *_ in CASES:
        for each in commands(form, "FOLDER", info):
            tried = "tried" in each.checked or each.engine == "specheads"
            native = form == "mtp_standard" and info["block"]["model_type"] != "llama"
            assert tried == (each.engine in RUN and not (each.engine == "vLLM" and native)), each
            assert tried or "files" in each.checked or "documents" in each.checked
    assert "tried" in " ".join(lines([])) and "read" in " ".join(lines([]))


def test_llama_cpp_is_given_options_that_it_has() -> None:
    """llama.cpp ends at ``--draft-max``, which it removed, and drafts nothing without a type."""
    draft = command("llama.cpp", "draft", {"kind": "draft", "base": {"name": "org/base"}})
    assert "-md draft.gguf --spec-type draft-simple --spec-draft-n-max 4" in draft
    copies = command("llama.cpp", "plain", {})
    settings = "--spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 8"
    assert copies.endswith(f"--spec-type ngram-simple {settings}")
    mtp_heads = command("llama.cpp", "mtp_standard", mtp("glm4_moe"))
    assert mtp_heads.endswith("--spec-type draft-mtp --spec-draft-n-max 3")


def test_mtp_in_vllm_names_what_it_needs() -> None:
    """The folder loads in vLLM 0.32, which refuses its MTP layers; transformers 5.19 has none."""
    for kind in ("llama", "mistral", "qwen3"):
        served = commands("mtp_standard", "FOLDER", mtp(kind))
        note = next(each.note for each in served if each.engine == "vLLM")
        assert "vLLM 0.33 and transformers 5.20 or newer, and specheads beside them" in note


def test_vllm_is_told_where_heads_are_and_what_they_read() -> None:
    """Heads that attend guess from what they saw, and prefixes that vLLM has in its cache hide it.

    A graph of the whole pass hides everything.
    """
    for kind, more, hidden in [
        ("medusa", {}, False), ("medusa", {"prefix_layer": True}, True), ("hydra", {}, True),
    ]:  # fmt: skip
        words = shlex.split(command("vLLM", "vllm_heads", heads(kind, **more, base=TUNED)))
        assert words[:3] == ["vllm", "serve", "FOLDER/base"]
        given = dict(zip(words, words[1:], strict=False))
        assert json.loads(given["--additional-config"]) == {"specheads": {"heads": "FOLDER"}}
        settings = json.loads(given["--speculative-config"])
        assert settings["model"] == f"{HeadsProposer.__module__}.{HeadsProposer.__name__}"
        assert settings["num_speculative_tokens"] == 3
        assert ("--no-enable-prefix-caching" in words) == hidden
        assert json.loads(given["--compilation-config"]) == {"cudagraph_mode": "PIECEWISE"}


@pytest.mark.parametrize(
    "path,word",
    [
        ("runs/my-eagle-draft", "eagle-"),
        ("Qwen3-8B_EAGLE3/out", "eagle3"),
        ("org/DFlash-heads", "dflash"),
        ("/data/dspark/drafts/one", "dspark"),
        ("runs/eagle", ""),
        ("runs/eagle_draft", ""),
        ("beagle/d-flash", ""),
    ],
)
def test_paths_that_vllm_takes_for_another_drafter(path: str, word: str) -> None:
    """The whole path that vLLM is given counts, in lower case, whatever ``method`` says."""
    assert taken_for(path) == word


def test_the_page_names_the_versions_that_were_checked() -> None:
    """A page that is older than the commands sends readers to versions that nobody looked at."""
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "serving.md").read_text()
    table = [line for line in page.splitlines() if line.startswith("| ")]
    for form, info, *_ in CASES:
        for each in commands(form, "FOLDER", info):
            if each.engine not in ("specheads", "FasterDecoding/Medusa"):
                assert any(line.startswith(f"| {each.engine} | {each.checked} |") for line in table)
    name = "specheads.vllm_proposer.SuffixProposer"
    assert name in command("vLLM", "plain", {})
    assert f'"model": "{name}"' in (docs / "serving_vllm.md").read_text()


def test_prompts_too_short_for_transformers_are_named() -> None:
    """It ends in an error about sizes of tensors, which tells nobody that the prompt is short."""
    info = {**mtp("llama"), "num_heads": 3}
    (noted, *_) = commands("mtp_standard", "FOLDER", info)
    assert noted.engine == "transformers" and "prompts of at least 3 tokens" in noted.note

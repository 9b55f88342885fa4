"""``python -m specheads.export``: smaller heads, a merged adapter, another dtype, whole folders."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from specheads import export, generate
from specheads.attention.tree import default_tree
from specheads.config import AdapterConfig, ConfigError, ExportConfig, GenerateConfig
from specheads.data.chat import Encoder
from specheads.formats.write import FORMATS
from specheads.losses.cross_entropy import IGNORE
from specheads.models.adapters import add_adapter, has_adapter
from specheads.models.base import load_base_model, load_tokenizer
from specheads.models.checkpoint import load_export, load_heads, origin, save_export, set_tree
from specheads.models.heads import MedusaHeads, low_rank_heads, output_matrix

Program = Callable[..., subprocess.CompletedProcess[str]]
VOCAB, SIZE = 272, 32
MEASURED = {"speedup": 2.0, "dynamic": {"num_nodes": 4, "speedup": 3.0, "temperatures": [1, 1, 1]}}


def write(path: Path, model: Path, lm_head: str = "own", **options: Any) -> Path:
    """Write an export with random heads and a measured tree; return its folder."""
    form = {key: options.pop(key) for key in ("condition", "markov_rank") if key in options}
    heads = MedusaHeads(3, 1, SIZE, VOCAB, lm_head, **form)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.1)
    info, tree = origin(str(model), {"recipe": "none", "steps": 7}), default_tree(3, 6)
    save_export(path, heads, load_tokenizer(str(model)), tree, info, **options)
    set_tree(path, tree, 2.5, MEASURED)
    return path


@pytest.fixture
def trained(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """Return the folder of an export whose heads and tree could have been trained."""
    return write(tmp_path / "trained", tiny_model_dir)


def made(
    trained: Path, capsys: pytest.CaptureFixture[str] | None = None, **settings: Any
) -> tuple[Path, str]:
    """Run the command in this process; return the new folder and what was printed."""
    output = trained.with_name("made")
    export.run(ExportConfig(checkpoint=str(trained), output=str(output), **settings))
    return output, capsys.readouterr().out if capsys else ""


def text_of(capsys: pytest.CaptureFixture[str], checkpoint: Path, **settings: Any) -> str:
    """Return what generate prints for this export."""
    capsys.readouterr()
    prompt = {"checkpoint": str(checkpoint), "prompt": "def f(x):", "max_new_tokens": 24}
    generate.run(GenerateConfig(**prompt, **settings))  # type: ignore[arg-type]
    return capsys.readouterr().out


@pytest.mark.parametrize("form", [{}, {"condition": True}, {"markov_rank": 4}])
@pytest.mark.parametrize("lm_head", ["low_rank", "pruned"])
def test_decoding_stays_that_of_the_base(
    tiny_model_dir: Path,
    tmp_path: Path,
    tiny_jsonl: Path,
    capsys: pytest.CaptureFixture[str],
    lm_head: str,
    form: dict[str, Any],
) -> None:
    """Smaller heads guess worse; a guess under a wrong id, taken for right, would change text."""
    trained = write(tmp_path / "trained", tiny_model_dir, **form)
    output, _ = made(trained, lm_head=lm_head, rank=4, num_kept=40, counted=str(tiny_jsonl))
    found = load_export(output)
    assert found.heads.lm_head == lm_head and found.heads.sequential == bool(form)
    plain = text_of(capsys, trained, plain=True)
    assert text_of(capsys, output) == plain
    assert text_of(capsys, output, temperature=0.8) == text_of(
        capsys, trained, plain=True, temperature=0.8
    )


def test_low_rank_through_the_command_line(trained: Path, program: Program) -> None:
    """What was printed, what lies in the folder, and what the library makes must be one thing."""
    output = trained.with_name("low")
    done = program(
        "export", f"checkpoint={trained}", f"output={output}", "lm_head=low_rank", "rank=8"
    )
    assert done.returncode == 0, done.stderr
    before, found = load_heads(trained), load_heads(output)
    expected = low_rank_heads(before, 8).state_dict()
    assert all(torch.allclose(t, expected[n], atol=1e-6) for n, t in found.state_dict().items())
    config = json.loads((output / "config.json").read_text())
    assert config["lm_head"] == "low_rank" and config["rank"] == 8
    assert config["training"]["compressed"] == {"rank": 8}
    sizes = [sum(p.numel() for p in heads.parameters()) for heads in (before, found)]
    assert sizes == [3 * (SIZE * SIZE + SIZE + VOCAB * SIZE), 3 * (SIZE * SIZE + SIZE + 304 * 8)]
    for parameters in sizes:
        assert f"{parameters:,} parameters in {parameters * 4 / 1e6:.2f} MB" in done.stdout
    assert f"tree_search checkpoint={output}" in done.stdout


def test_the_measured_tree_is_not_that_of_the_new_heads(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Expected lengths and temperatures of other heads would pick a tree, and be believed."""
    old = load_export(trained).config
    new = load_export(made(trained, lm_head="low_rank", rank=4)[0]).config
    assert old["tree"]["measured_on"] == MEASURED and old["tree"]["expected_accept_length"] == 2.5
    assert new["tree"] == {
        "choices": old["tree"]["choices"], "expected_accept_length": None, "measured_on": None
    }  # fmt: skip
    kept = {key: value for key, value in new["training"].items() if key != "compressed"}
    assert kept == old["training"]
    assert {k: new["base"][k] for k in ("name", "digest", "dtype")} == {
        k: old["base"][k] for k in ("name", "digest", "dtype")
    }


def test_pruned_keeps_the_tokens_of_the_answers(
    trained: Path, tiny_jsonl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counted over prompts too, the kept tokens would be those that nobody has to guess."""
    output, printed = made(trained, capsys, lm_head="pruned", num_kept=12, counted=str(tiny_jsonl))
    counts: dict[int, int] = {}
    encode = Encoder(load_tokenizer(str(trained)))
    for line in tiny_jsonl.read_text().splitlines():
        record = {"kind": "", **json.loads(line)}
        for token in encode(record).labels.tolist():
            if token != IGNORE:
                counts[token] = counts.get(token, 0) + 1
    best = sorted(counts, key=lambda token: (-counts[token], token))[:12]
    before, found = load_heads(trained), load_heads(output)
    assert found.token_map is not None and found.token_map.tolist() == sorted(best)
    for i in range(3):
        assert torch.equal(output_matrix(found, i), output_matrix(before, i)[sorted(best)])
    total, covered = sum(counts.values()), sum(counts[token] for token in best)
    assert f"the 12 kept tokens are {covered / total:.2%} of the {total:,} answer tokens" in printed
    note = load_export(output).config["training"]["compressed"]
    assert note == {
        "num_kept": 12, "counted_tokens": total, "counted_share": covered / total
    }  # fmt: skip


def test_tokens_that_never_occur_are_named(
    trained: Path, tiny_jsonl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """100% covered is no news if the file holds fewer tokens than are kept."""
    _, printed = made(trained, capsys, lm_head="pruned", num_kept=200, counted=str(tiny_jsonl))
    assert "are 100.00% of" in printed and "different tokens occur there" in printed


def test_prompts_and_dtype_come_along(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Searched on other prompts than the export's own, the new tree is measured on what it saw."""
    (trained / "calibration.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    output, printed = made(trained, capsys, dtype="bfloat16")
    assert (output / "calibration.jsonl").read_text().startswith('{"prompt"')
    heads = load_heads(output)
    assert {parameter.dtype for parameter in heads.parameters()} == {torch.bfloat16}
    parameters = sum(parameter.numel() for parameter in heads.parameters())
    assert f"{parameters:,} parameters in {parameters * 2 / 1e6:.2f} MB now" in printed
    assert text_of(capsys, output) == text_of(capsys, trained, plain=True)


def test_a_tuned_base_comes_along(
    tiny_model_dir: Path,
    tmp_path: Path,
    make_tiny_llama: Callable[..., LlamaForCausalLM],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Left behind, the tuned base would be replaced by the original, whose heads these are not."""
    trained = write(tmp_path / "trained", tiny_model_dir, tuned_base=make_tiny_llama(seed=5))
    output, _ = made(trained, lm_head="low_rank", rank=4)
    for name, tensor in load_export(output).base.state_dict().items():
        assert torch.equal(tensor, load_export(trained).base.state_dict()[name])
    assert text_of(capsys, output) == text_of(capsys, trained, plain=True)


def test_an_adapter_is_merged_or_stays_one(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An adapter dropped on the way leaves the original base under heads of another."""
    base = load_base_model(str(tiny_model_dir), dtype="float32")
    add_adapter(base, AdapterConfig(kind="lora", rank=4))
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.3)
    trained = write(tmp_path / "trained", tiny_model_dir, tuned_base=base)
    plain = text_of(capsys, trained, plain=True)
    original = write(tmp_path / "original", tiny_model_dir)
    assert plain != text_of(capsys, original, plain=True)

    kept, _ = made(trained, lm_head="low_rank", rank=4)
    assert has_adapter(load_export(kept).base) and not (kept / "base").exists()
    merged = kept.with_name("merged")
    export.run(ExportConfig(checkpoint=str(kept), output=str(merged), merge=True))
    found = load_export(merged)
    assert not has_adapter(found.base) and not (merged / "adapter").exists()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = base.eval()(input_ids=ids).logits
        torch.testing.assert_close(found.base(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    for folder in (kept, merged):
        assert text_of(capsys, folder) == plain


def test_mistakes_are_one_line_and_leave_nothing(
    trained: Path, tiny_model_dir: Path, tiny_jsonl: Path, tmp_path: Path
) -> None:
    """Minutes of loading before a mistyped setting is named, or half a folder after it."""
    shared = write(tmp_path / "shared", tiny_model_dir, "shared")
    prompts = tmp_path / "no_answers.jsonl"
    turn = {"role": "user", "content": "hello"}
    prompts.write_text(json.dumps({"id": "a", "messages": [turn]}) + "\n")
    counted = {"lm_head": "pruned", "counted": str(tiny_jsonl)}
    for settings, message in (
        ({}, "nothing to change: give lm_head=, merge=true or dtype="),
        ({"merge": True}, "trained has no separate adapter"),
        ({"lm_head": "low_rank", "rank": 33}, r"trained: rank must be in 1\.\.32, .* got 33"),
        (
            {"lm_head": "low_rank", "rank": 30},
            "rank=30 makes no smaller heads of .*: 29,[0-9]+ par",
        ),
        ({"lm_head": "pruned"}, "lm_head=pruned needs counted="),
        ({**counted, "num_kept": 300}, "num_kept is 300, the vocabulary of .* has 272 tokens"),
        ({**counted, "num_kept": 272}, "num_kept=272 makes no smaller heads"),
        ({**counted, "num_kept": 1}, "num_kept is 1, but the tree of .* takes the 2 best guesses"),
        ({**counted, "counted": str(prompts), "num_kept": 9}, "its records hold no answers"),
        ({**counted, "counted": "gone.jsonl"}, r"cannot read gone\.jsonl"),
        ({"lm_head": "low_rank", "output": str(trained)}, "trained, which exists: give a new"),
        ({"lm_head": "low_rank", "output": "/proc/no/made"}, r"/proc/no/made cannot be made: No"),
        (
            {"lm_head": "low_rank", "output": str(prompts / "made")},
            "no_answers.jsonl/made cannot be made: Not a directory; give a folder that can be",
        ),
        ({"lm_head": "low_rank", "checkpoint": str(tiny_model_dir)}, "not an export of specheads"),
        (
            {"lm_head": "low_rank", "checkpoint": str(shared)},
            "shared: lm_head of the heads .* got 'shared'",
        ),
    ):
        values = {"checkpoint": str(trained), "output": str(tmp_path / "made"), **settings}
        with pytest.raises(ConfigError, match=message) as refused:
            export.run(ExportConfig(**values))  # type: ignore[arg-type]
        assert "\n" not in str(refused.value)
        assert not (tmp_path / "made").exists()


def test_the_folders_above_the_output_are_made(trained: Path) -> None:
    """Every other command that writes a folder makes those above it."""
    output = trained.with_name("not") / "there" / "yet"
    export.run(
        ExportConfig(checkpoint=str(trained), output=str(output), lm_head="low_rank", rank=4)
    )
    assert load_export(output).heads.lm_head == "low_rank"


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "native"])
def test_a_path_that_vllm_takes_for_another_drafter_is_refused(
    form: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a folder is loaded as an EAGLE head, whatever ``method`` says, and fails in its tensors.

    What is found is said before anything is read: there is no checkpoint here. Native heads, which
    vLLM cannot load at all, may lie anywhere.
    """
    (tmp_path / "dflash").mkdir()
    monkeypatch.chdir(tmp_path / "dflash")
    for settings, message in (
        ({"output": str(tmp_path / "My-Eagle-draft")}, "output is .*My-Eagle-draft: .* 'eagle-'"),
        ({"output": "out"}, "output is .*/dflash/out: .* 'dflash'"),
        (
            {"output": str(tmp_path / "out"), "push": "o/d-eagle3"},
            "push is o/d-eagle3: .* 'eagle3'",
        ),
    ):
        if f"'{form}'" in message:  # which it is
            continue
        with pytest.raises(ConfigError, match=f"{message}.*without it") as refused:
            export.run(ExportConfig(checkpoint="gone", format=form, **settings))  # type: ignore[arg-type]
        assert "\n" not in str(refused.value)
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "specheads.json").write_text("{}")
    with pytest.raises(ConfigError, match="'dflash'"):
        export.run(ExportConfig(checkpoint=str(draft), output="out", dtype="bfloat16"))
    export.run(ExportConfig(checkpoint=str(trained), output="out", dtype="bfloat16"))
    assert load_heads("out").num_heads == 3

"""Model cards: what they say, and what they leave alone."""

from __future__ import annotations

import json
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

from specheads.attention.tree import Tree
from specheads.config import ConfigError
from specheads.formats import card
from specheads.formats.card import UNKNOWN, Licence, licence_of
from specheads.models.checkpoint import load_export, read_config, set_tree

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "export"
HELDOUT = {
    "head_0/loss": 0.7381, "head_0/top1": 0.7987, "head_0/top5": 0.9448,
    "head_1/loss": 0.88355, "head_1/top1": 0.7569, "head_1/top5": 0.9277,
}  # fmt: skip
FINAL = {
    "final/accept_length/t0": 3.8968, "final/accept_length_low/t0": 3.6512,
    "final/accept_length_high/t0": 4.1847, "final/speedup/t0": 1.648,
    "final/identical/t0": 12.0, "final/compared/t0": 12.0, "final/rep8/t0": 0.04,
    "final/accept_length/t1": 3.1602, "final/speedup/t1": 1.4019,
}  # fmt: skip


def row(method: str, temperature: float, **more: Any) -> dict[str, Any]:
    """Return a row of a bench."""
    return {
        "method": method, "temperature": temperature, "batch": 1, "dtype": "bfloat16",
        "tokens_per_second": 357.612, "speedup_vs_plain": 1.6392,
        "speedup_vs_plain_ci95": [1.4978, 1.7866], "speedup_vs_hf_generate": 1.7556,
        "accept_length": 2.1027, "identical": 47, "compared": 48, **more,
    }  # fmt: skip


BENCH: dict[str, Any] = {
    "environment": {
        "date": "2026-11-21", "processor": "A Processor", "device": "cpu", "threads": 2,
        "baseline_drift": 1.12, "contended": False,
    },
    "settings": {"num_prompts": 48, "max_new_tokens": 128},
    "headline": {"method": "heads+suffix"},
    "rows": [
        row("heads+suffix", 1.0, tokens_per_second=99.9), row("tree", 0.0),
        row("plain", 0.0, identical=None), row("sampled_tree", 0.0), row("tree", 0.0, batch=8),
    ],
}  # fmt: skip


def info(kind: str = "medusa", **more: Any) -> dict[str, Any]:
    """Return what an export's config.json says."""
    base = {"name": "org/base", "tuned": False, "revision": None, "dtype": "float32"}
    training = {
        "recipe": "medusa1",
        "steps": 700,
        "data": {
            "source": "jsonl",
            "path": "/home/me/secret/answers.jsonl",
            "train": {"documents": 5976, "learned": 481312},
            "heldout": {"documents": 841, "learned": 68327},
        },
        "heldout": HELDOUT,
    }
    tree = {"choices": [[0], [1], [0, 0]], "expected_accept_length": None, "measured_on": None}
    found = {"kind": kind, "num_heads": 2, "base": base, "training": training, "tree": tree}
    return {**found, **more}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub have no cards; nothing here asks a network."""

    def missing(*args: Any, **kwargs: Any) -> str:
        raise OSError("no such card")

    monkeypatch.setattr("specheads.formats.card.keep_to_the_cache_if_unreachable", lambda: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", missing)


def written(folder: Path, form: str, about: dict[str, Any], **more: Any) -> tuple[Any, str]:
    """Write a card; return its YAML and what follows."""
    folder.mkdir(exist_ok=True)
    card.write(folder, form, about, **more)
    _, front, body = (folder / card.CARD).read_text().split("---\n", 2)
    return yaml.safe_load(front), body


def test_what_the_hub_reads(tmp_path: Path) -> None:
    """A repository without these is found by nobody who looks for the base model."""
    front, body = written(tmp_path / "heads", "native", info(), name="me/heads")
    assert front == {
        "license": "unknown",
        "base_model": "org/base",
        "base_model_relation": "adapter",
        "library_name": "specheads",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "medusa"],
    }
    assert "# Medusa heads for org/base" in body
    assert "Unknown: neither a card nor the config of org/base names a licence" in body
    assert "hf download me/heads --local-dir heads" in body
    assert "specheads generate checkpoint=heads prompt=..." in body
    _, body = written(tmp_path / "tgi", "fasterdecoding_v1", info(), name="me/heads")
    assert "hf download" not in body and "--model-id me/heads" in body
    tuned = info("hydra", base={"name": "org/base", "tuned": True, "revision": None})
    front, _ = written(tmp_path / "tuned", "native", tuned)
    assert front["base_model_relation"] == "finetune" and "hydra" in front["tags"]
    front, _ = written(tmp_path / "merged", "merged", tuned)
    assert front["library_name"] == "transformers"
    short = info(base={"name": "gpt2", "tuned": False, "revision": None})
    front, body = written(tmp_path / "short", "vllm_heads", short)
    assert front["base_model"] == "gpt2" and "vllm serve gpt2 " in body
    front, body = written(tmp_path / "scratch", "plain", {"training": {"recipe": "pretrain"}})
    assert "base_model" not in front and front["tags"] == ["speculative-decoding"]
    assert "A base model, trained from scratch" in body


def test_accuracy_per_head_and_data(tmp_path: Path) -> None:
    """Figures that only the run's folder knows are lost with it."""
    before = datetime.now(UTC).date()
    _, body = written(tmp_path / "heads", "native", info(), final=FINAL)
    assert "| 0 | 2 | 79.9% | 94.5% | 0.738 |" in body
    assert "| 1 | 3 | 75.7% | 92.8% | 0.884 |" in body
    assert "| trained on | 5,976 documents, 481,312 tokens learned |" in body
    assert "| data | jsonl answers.jsonl |" in body and "secret" not in body
    assert "| 0 | 3.90 (3.65 to 4.18) | 1.65x | 12 of 12 |" in body
    assert "| 1 | 3.16 | 1.40x | - |" in body
    today = f"({before}|{datetime.now(UTC).date()})"  # it may be midnight
    assert re.search(rf"on held-out prompts \(float32, .*\d threads, {today}\):", body)
    draft: dict[str, Any] = {
        "kind": "draft",
        "base": {"name": "org/base", "revision": None},
        "training": {"recipe": "distill", "heldout": {"alpha": 0.68288, "top1": 0.6498}},
        "measured": FINAL,
    }
    front, body = written(tmp_path / "draft", "native", draft)
    assert "base_model_relation" not in front and "draft-model" in front["tags"]
    assert "(alpha): 0.6829; top 1 65.0%" in body
    assert "| 0 | 3.90 (3.65 to 4.18) | 1.65x | 12 of 12 |" in body
    start = {**draft["training"], "draft": {"start": "base"}}
    front, _ = written(tmp_path / "draft", "draft", {**draft, "training": start})
    assert front["base_model_relation"] == "finetune"
    assert front["library_name"] == "transformers"


def test_what_the_output_is_identical_to(tmp_path: Path) -> None:
    """That a tuned base is not the original must stand on the card, with its distance."""
    _, body = written(tmp_path / "heads", "native", info())
    assert "gives the tokens of org/base itself" in body and "tuned" not in body
    moved = {"loss": 0.49226, "original_loss": 0.4948, "kl": 0.05251}
    base = {"name": "org/base", "tuned": True, "revision": None}
    tuned = info(base=base, training={"recipe": "medusa2", "heldout": moved})
    for form in ("native", "plain", "merged"):
        _, body = written(tmp_path / form, form, tuned)
        assert "**not** org/base any more" in body
        assert "0.4923 tuned, 0.4948 original; KL(original || tuned) 0.0525" in body
    scratch = info("mtp", base={"name": "", "tuned": True, "revision": None})
    _, body = written(tmp_path / "scratch", "native", scratch)
    assert "there is no original to compare it with" in body
    assert "trained from scratch" in body


def test_no_path_of_this_machine_is_on_a_card(tmp_path: Path) -> None:
    """An uploaded card would tell strangers how the folders here are called, and help nobody."""
    base = {"name": "/home/me/models/base-7b", "tuned": False, "revision": None}
    for form in ("native", "fasterdecoding_v1", "plain"):
        front, body = written(tmp_path / form, form, info(base=base))
        assert "/home/me" not in body and str(tmp_path) not in body
        assert "base_model" not in front
        assert "base-7b" in body


def test_measuring_again_leaves_the_rest_alone(tmp_path: Path) -> None:
    """What somebody wrote by hand, lost at the next measurement, is not written twice."""
    folder = tmp_path / "heads"
    written(folder, "native", info(), final=FINAL)
    file = folder / card.CARD
    own = file.read_text().replace("## Training", "Made with care.\n\n## Training") + "\nMine.\n"
    own = own.replace('license: "unknown"', "license: mit")
    file.write_text(own)
    card.check(folder)
    card.measured(folder, BENCH)
    text = file.read_text()
    before, begin, rest = text.partition(card.BEGIN)
    table, end, after = rest.partition(card.END)
    assert own.startswith(before + begin) and own.endswith(end + after)
    assert "Made with care." in before and "Mine." in after and "license: mit" in before
    assert "| 0 | tree | 357.6 | 1.64x (1.50 to 1.79) | 1.76 | 2.10 | 47 of 48 |" in table
    assert "| 0 | plain |" in table and "| - |" in table
    assert "| 1 | heads+suffix | 99.9 |" in table
    assert "sampled_tree" not in table and table.count("| tree |") == 1
    assert "48 prompts of up to 128 new tokens" in table
    assert "bfloat16, A Processor, 2 threads, 2026-11-21" in table
    assert "busy" not in table and "3.90" not in table
    card.measured(folder, BENCH)
    assert file.read_text() == text
    environment = {**BENCH["environment"], "contended": True, "device": "NVIDIA H200"}
    card.measured(folder, {**BENCH, "environment": environment})
    text = file.read_text()
    assert "itself varied 1.12x" in text and "NVIDIA H200, 2026-11-21" in text


def test_a_bench_beside_the_export_is_taken(tmp_path: Path) -> None:
    """Figures measured before the card was there would have to be measured again."""
    folder = tmp_path / "heads"
    folder.mkdir()
    (folder / "bench.json").write_text(json.dumps(BENCH))
    _, body = written(folder, "native", info())
    assert "| 0 | tree | 357.6 |" in body
    (folder / "bench.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no result of specheads.bench"):
        card.write(folder, "native", info())


def test_a_card_that_cannot_be_updated_is_found_before_measuring(tmp_path: Path) -> None:
    """Half an hour of measuring must not end with a missing line in a file."""
    with pytest.raises(ConfigError, match=r"has no README.md, and none can be written: .* is not"):
        card.check(tmp_path)
    assert not card.refresh(tmp_path)
    file = tmp_path / card.CARD
    file.write_text("all mine\n")
    with pytest.raises(ConfigError, match="lacks the line '<!-- specheads: measured"):
        card.check(tmp_path)
    assert not card.refresh(tmp_path)
    file.write_text(f"all mine\n{card.BEGIN}\n")
    with pytest.raises(ConfigError, match="lacks the line '<!-- specheads: end of measured"):
        card.measured(tmp_path, BENCH)
    assert file.read_text() == f"all mine\n{card.BEGIN}\n"
    file.write_text(f"{card.BEGIN}\n{card.END}")
    with pytest.raises(ConfigError, match="is no result of specheads.bench"):
        card.measured(tmp_path, {"rows": []})


def test_an_export_without_a_card_is_given_one(tmp_path: Path) -> None:
    """Exports of earlier versions have none, and measuring them again would end in an error."""
    folder = tmp_path / "golden"
    shutil.copytree(GOLDEN, folder)
    card.check(folder)
    assert not card.refresh(folder) and not (folder / card.CARD).exists()
    card.measured(folder, BENCH)
    text = (folder / card.CARD).read_text()
    assert text.startswith("---\n") and "| 0 | tree | 357.6 |" in text


def test_a_new_tree_makes_old_figures_void(tmp_path: Path) -> None:
    """Figures of another tree are those of another method; the export itself must still load."""
    folder = tmp_path / "golden"
    shutil.copytree(GOLDEN, folder)
    card.write(folder, "native", read_config(folder))
    card.measured(folder, BENCH)
    on = {
        "num_prompts": 9, "speedup": 1.5, "dtype": "float32", "device": "cpu", "threads": 1,
    }  # fmt: skip
    set_tree(folder, Tree.from_choices([[0], [1]]), 1.75, on)
    assert card.refresh(folder)
    text = (folder / card.CARD).read_text()
    assert "357.6" not in text
    assert (
        "Expected of its tree of 3 nodes: 1.75 tokens per verify step and 1.50x the speed of"
        " plain decoding, from 9 prompts (float32, cpu, 1 threads)." in text
    )
    load_export(folder)  # the manifest lets the card be edited
    assert "grown at each step" not in text
    for speed, told in ((1.6, True), (1.4, False)):  # what decoding takes is what is faster
        grown = {"num_nodes": 6, "accept_length": 1.9, "speedup": speed}
        set_tree(folder, Tree.from_choices([[0], [1]]), 1.75, {**on, "dynamic": grown})
        assert card.refresh(folder)
        text = (folder / card.CARD).read_text()
        assert ("Trees of 6 nodes grown at each step" in text) == told


def test_a_format_that_is_served_as_a_chain_promises_no_tree(tmp_path: Path) -> None:
    """The accept length of a tree beside an engine that takes chains is one nobody will see."""
    on = {"num_prompts": 9, "dtype": "float32", "device": "cpu", "threads": 1}
    tree = {
        "choices": [[0], [1], [0, 0], [0, 1]],
        "expected_accept_length": 2.2,
        "measured_on": {**on, "acceptance": [0.6, 0.2, 0.3, 0.1]},
    }
    measured = "Expected of its tree of 5 nodes: 2.20 tokens per verify step, from 9 prompts"
    chain = "is expected to give 1.90 tokens per step"
    for form in ("native", "merged"):
        _, body = written(tmp_path / form, form, info(tree=tree))
        assert measured in body and "chain of the heads' best guesses, as this" not in body
    for form in ("vllm_heads", "fasterdecoding_v1", "fasterdecoding_v2"):
        _, body = written(tmp_path / form, form, info(tree=tree))
        assert measured in body and chain in body
    front, body = written(tmp_path / "plain", "plain", info(tree=tree))
    assert "# Medusa" not in body and "medusa" not in front["tags"]
    assert measured not in body and "Nothing was measured without the heads." in body
    tree["measured_on"] = on  # by a version that did not keep the chances
    _, body = written(tmp_path / "old", "fasterdecoding_v1", info(tree=tree))
    assert measured in body and "is expected to give" not in body


CARDS = [
    ("---\nlicense: apache-2.0\n---\n# x", Licence("apache-2.0", source="its README.md")),
    ("---\nlicense: [MIT]\n---\n", Licence("mit", source="its README.md")),
    (
        "---\nlicense: other\nlicense_name: llama3.1\nlicense_link: https://a.org/L-1\n---\n",
        Licence("other", "llama3.1", "https://a.org/L-1", "its README.md"),
    ),
    (
        "---\nlicense: other\nlicense_name: 'x\\ny'\nlicense_link: javascript:alert(1)\n---\n",
        Licence("other", source="its README.md"),
    ),
    ('---\nlicense: "a\'; b: [\\n"\n---\n', Licence(UNKNOWN)),
    ("---\nlicense: !!python/object/apply:os.system [echo]\n---\n", Licence(UNKNOWN)),
    ("---\nlicense: [\n---\n", Licence(UNKNOWN)),
    ("---\n- license\n---\n", Licence(UNKNOWN)),
    ("license: mit\n", Licence(UNKNOWN)),
    ("", Licence(UNKNOWN)),
]


@pytest.mark.parametrize("text,expected", CARDS)
def test_the_licence_of_a_base(text: str, expected: Licence, tmp_path: Path) -> None:
    """A licence that is guessed, or copied from a stranger's words, is worse than none."""
    (tmp_path / "README.md").write_text(text)
    assert licence_of(str(tmp_path)) == expected
    assert licence_of(str(tmp_path / "away")) == Licence(UNKNOWN)


def test_where_licences_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card goes before the config, and what does not answer is unknown, not an error."""
    assert licence_of("") == Licence(UNKNOWN)
    assert licence_of("tinycode").identifier == "other"
    assert licence_of("org/base") == Licence(UNKNOWN)
    (tmp_path / "config.json").write_text('{"license": "mit"}')
    assert licence_of(str(tmp_path)) == Licence("mit", source="its config.json")
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    assert licence_of(str(tmp_path)).identifier == "apache-2.0"
    asked = []

    def fetched(name: str, file: str, revision: str | None) -> str:
        asked.append((name, file, revision))
        return str(tmp_path / "README.md")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetched)
    assert licence_of("org/base", "v2").identifier == "apache-2.0"
    assert asked == [("org/base", "README.md", "v2")]


def test_finishing_writes_says_and_uploads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An upload without the card that was just written would be an earlier one, or bare."""
    folder = tmp_path / "heads"
    folder.mkdir()
    card.finish(folder, "native", info())
    assert "uploaded" not in capsys.readouterr().out
    (folder / card.CARD).unlink()
    sent = []

    def upload(path: Path, name: str, *, private: bool) -> str:
        sent.append((name, private, (path / card.CARD).read_text()))
        return "https://hub/me/heads"

    monkeypatch.setattr(card, "upload", upload)
    card.finish(folder, "native", info(), push="me/heads", private=True)
    out = capsys.readouterr().out
    assert f"specheads generate checkpoint={folder} prompt=" in out
    assert (
        "vLLM (0.32, tried on a CPU; 0.33, its files): vllm serve " in out
        and "uploaded to https://hub/me/heads" in out
    )
    assert [(name, private) for name, private, _ in sent] == [("me/heads", True)]
    assert "hf download me/heads" in sent[0][2]

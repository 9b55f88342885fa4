"""The checkpoints in data/checkpoints/: whole, as small as their table says, and lossless."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from specheads.config import ConfigError, DecodeConfig
from specheads.decoding.exported import Subject, choose_drafter, load_subject
from specheads.decoding.loop import decode, plain_decode
from specheads.models.checkpoint import load_export
from specheads.models.manifest import check_manifest
from specheads.verification.sampling import Sampler

SHIPPED = Path(__file__).parents[2] / "data" / "checkpoints"
NAMES = ("smollm2", "block", "hydra", "medusa1", "draft", "mtp_byte")
PROMPT = "Write the next statement.\ndef add(a, b):\n    total = a + b\n"


@pytest.fixture(scope="module")
def tinycode_heads() -> Subject:
    """Load the Medusa heads, and the embedded base with them."""
    return load_subject(str(SHIPPED / "medusa1"))


def prompt_of(subject: Subject) -> torch.Tensor:
    """Return [1, P] token ids."""
    ids = subject.tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_dict=False
    )
    return torch.tensor([ids])


def check_lossless(subject: Subject, settings: DecodeConfig) -> None:
    """Decode a few tokens and compare them with the plain loop's; some must have been guessed."""
    drafter = choose_drafter(subject, settings).drafter
    ids = prompt_of(subject)
    result = decode(subject.base, drafter, ids, max_new_tokens=24, sampler=Sampler())
    plain = plain_decode(subject.base, ids, max_new_tokens=24, sampler=Sampler())
    assert result.rows[0].new_tokens == plain.rows[0].new_tokens
    assert sum(result.rows[0].accept_lengths) > len(result.rows[0].accept_lengths)


@pytest.mark.parametrize("name", NAMES)
def test_folder_is_whole(name: str, tmp_path: Path) -> None:
    """A file that git changed (line ends, LFS pointers) fails at load on other machines only."""
    assert check_manifest(SHIPPED / name)["files"]
    copy = tmp_path / name
    copy.mkdir()
    for path in (SHIPPED / name).iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(
                path.read_bytes()[: -1 if path.suffix == ".json" else None]
            )
    with pytest.raises(ConfigError):
        check_manifest(copy)


@pytest.mark.parametrize("name", NAMES)
def test_cards_name_the_licence(name: str) -> None:
    """Weights that go round without a licence are nobody's to use."""
    text = (SHIPPED / name / "README.md").read_text()
    front, licence = text.split("---")[1], "apache-2.0" if name == "smollm2" else "other"
    assert re.findall("^license: (.*)$", front, re.MULTILINE) == [f'"{licence}"']
    assert f"\n## Licence\n\n{licence}: " in text
    assert not re.search(rf"Not set|/tmp/|/home/|{re.escape(str(SHIPPED.parents[1]))}", text)


def test_sizes_are_those_of_the_table() -> None:
    """Weights left in float32 would double every clone, for good."""
    table = (SHIPPED / "README.md").read_text()
    found = {
        name: sum(p.stat().st_size for p in (SHIPPED / name).rglob("*") if p.is_file())
        for name in NAMES
    }
    assert {path.name for path in SHIPPED.iterdir() if path.is_dir()} == set(NAMES)
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| ([\d.]+) \|", table, re.MULTILINE)
    assert rows == [(name, f"{found[name] / 1e6:.1f}") for name in NAMES]
    assert found["smollm2"] <= 20e6 and sum(found.values()) < 51e6


def test_heads_on_the_embedded_base(tinycode_heads: Subject) -> None:
    """Heads that were shipped for another base, or truncated, guess nothing or decode otherwise."""
    check_lossless(tinycode_heads, DecodeConfig())
    assert tinycode_heads.export is not None
    hydra = load_export(SHIPPED / "hydra", beside=tinycode_heads.export)
    check_lossless(Subject(hydra.base, hydra.tokenizer, hydra), DecodeConfig(tree="static"))
    # bench takes trees grown at each step only where their size was measured
    for export in (tinycode_heads.export, hydra):
        assert export.config["tree"]["measured_on"]["dynamic"]["num_nodes"] > 1


def test_draft_model(tinycode_heads: Subject) -> None:
    """A draft model with other tokens than the base's is refused, or never right."""
    settings = DecodeConfig(drafter="draft", draft=str(SHIPPED / "draft"), draft_tokens=4)
    check_lossless(tinycode_heads, settings)


def test_multi_token_prediction() -> None:
    """An export with a base of its own: heads and base must be of one run."""
    check_lossless(load_subject(str(SHIPPED / "mtp_byte")), DecodeConfig())

"""Make the checkpoints that ship with the repository from runs: ``data/checkpoints/``.

    python scripts/ship_checkpoints.py [--runs runs] [--out data/checkpoints] [--only hydra ...]
    python scripts/ship_checkpoints.py --cards      # write the model cards anew, and nothing else

Each is the export of a run, its tensors rounded to bfloat16, which halves them; trees, what they
were measured at and the record of the training are kept. A folder that is there is replaced. How to
train them again stands in data/checkpoints/README.md, and in scripts/bench_full.py as commands.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import harness

from specheads.attention.tree import Tree
from specheads.formats import card
from specheads.models.base import load_base_model, load_tokenizer
from specheads.models.checkpoint import load_export, load_heads, read_config, save_export, set_tree
from specheads.models.draft import save_draft
from specheads.models.manifest import read_provenance

RUNS = {
    "smollm2": "smollm2",
    "block": "tinyblock",
    "hydra": "hydra",
    "medusa1": "medusa1",
    "draft": "distill",
    "mtp_byte": "mtp",
}
DTYPE = "bfloat16"
UNSET = "Not set: the model was trained from scratch."  # of a card without a base model
LICENCE = (
    "other: the model learned from the Python sources that the card of tinycode lists with their"
    " licences (data/tinycode/README.md in the repository of specheads), and may reproduce short"
    " pieces of them."
)


@dataclass
class Settings:
    """What is shipped.

    Attributes:
        cards: write the model cards alone
    """

    runs: Path = Path("runs")
    out: Path = Path("data/checkpoints")
    only: tuple[Literal["smollm2", "block", "hydra", "medusa1", "draft", "mtp_byte"], ...] = tuple(
        RUNS
    )
    cards: bool = False


def ship_export(source: Path, target: Path) -> None:
    """Write heads, and the base they were trained with where there is no other, in ``DTYPE``."""
    info = read_config(source)
    tuned = load_export(source, device="cpu").base if info["base"]["tuned"] else None
    tokenizer, measured = load_tokenizer(str(source)), info["tree"]
    tree = Tree.from_choices(measured["choices"])
    save_export(target, load_heads(source), tokenizer, tree, info, tuned_base=tuned, dtype=DTYPE)
    set_tree(target, tree, measured["expected_accept_length"], measured["measured_on"])
    if info["base"]["name"] == "smollm2":  # held-out questions that the base wrote itself
        shutil.copy(source.parent / "prompts.jsonl", target)


def ship_draft(source: Path, target: Path) -> None:
    """Write a draft model in ``DTYPE``, its origin beside it.

    Raises:
        SystemExit: if ``source`` is no draft model of specheads.
    """
    about = read_provenance(source)
    if about is None:
        raise SystemExit(f"{source} is no draft model made by specheads")
    draft = load_base_model(str(source), dtype="float32", device="cpu")
    save_draft(target, draft, load_tokenizer(str(source)), about, dtype=DTYPE)


def write_card(folder: Path) -> None:
    """Write a folder's model card; a model from scratch has a licence to be named here."""
    card.write(folder, "native", read_provenance(folder) or read_config(folder))
    path = folder / card.CARD
    text = path.read_text()
    if UNSET in text:
        text = text.partition(UNSET)[0] + LICENCE + "\n"
        path.write_text(text.replace('license: "unknown"', 'license: "other"', 1))


def num_bytes(folder: Path) -> int:
    """Return the size of all files of ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    """Write them and print their sizes."""
    given = harness.parse(Settings)
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.only:
        source, target = given.runs / RUNS[name] / "export", given.out / name
        if not given.cards:
            (ship_draft if name == "draft" else ship_export)(source, target)
        write_card(target)
        print(f"{target}: {num_bytes(target) / 1e6:.1f} MB")
    print(f"{given.out}: {num_bytes(given.out) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

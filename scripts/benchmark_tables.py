"""The tables of BENCHMARKS.md, each line made again from the files that its section names.

``TABLES`` has, for every section with tables, what makes each of them, in the order of the page.
A maker returns the lines below the table's head, as they should stand there.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # a test imports this from elsewhere

from decoding_tables import (
    TREES,
    Maker,
    adaptive,
    batches,
    compare,
    compiled,
    drafters,
    mtp_benches,
    paired,
    per_kind,
    step,
    typical,
    unseen,
)
from training_tables import (
    claim,
    distill,
    features,
    heads,
    memory,
    mtp_memory,
    mtp_table,
    train,
    zero,
)

PAIRS = (
    "draft / hf_assisted",
    "draft_tree / hf_assisted",
    "prompt_lookup / hf_lookup",
    "suffix / hf_lookup",
    "heads+suffix / tree",
    "heads+suffix / tree_dynamic",
    "heads+suffix / suffix",
    "draft+suffix / draft",
    "draft+suffix / suffix",
)
TABLES: dict[str, list[Maker]] = {
    "tinycode, Hydra heads, CPU: the quickstart": [per_kind("tinycode_hydra", TREES), typical],
    "Ways to train heads, on equal terms": [heads],
    "tinycode, medusa2, CPU": [
        per_kind("tinycode_medusa2", TREES),
        unseen,
        batches,
        step,
        compiled,
    ],
    "Draft models: losses, data, and what they predict": [distill, claim, compare, adaptive],
    "All drafters in one process": [
        drafters,
        paired("tinycode_drafters", PAIRS),
        per_kind(
            "tinycode_drafters",
            {"Medusa-1 heads": "tree", "suffix copies": "suffix", "both": "heads+suffix"},
            (0, 1),
        ),
        paired("mtp_byte/bench_hybrid", PAIRS[2:7]),
    ],
    "Memory and time of a training step": [memory],
    "Multi-token prediction from scratch: bytes and BPE": [
        mtp_benches,
        per_kind("mtp_byte/bench", TREES),
    ],
    "Predicting one token or several, on equal terms": [mtp_table],
    "Memory of multi-token prediction": [mtp_memory],
    "Training beside the reference loss": [train],
    "Training from stored hidden states": [features],
    "Memory and time of ZeRO": [zero],
}

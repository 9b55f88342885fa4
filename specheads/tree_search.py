"""Find the fastest tree on this machine: ``python -m specheads.tree_search checkpoint=<export>``.

Measures the heads on calibration prompts, clocks trees of several sizes, static ones and ones grown
at every step, and writes the static tree with the most tokens per second into the export. Then it
decodes other prompts with the chosen tree and prints the accept length that was expected beside the
one that came. Hits are counted at the given temperature and at T=1 together: greedy text of a small
model loops, and a tree made for loops is made for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specheads.config import TreeSearchConfig
from specheads.config.main import answer, entry_point
from specheads.system.files import check_folder
from specheads.system.terminal import progress_bar


def run(config: TreeSearchConfig) -> None:
    """Load, measure, print, write."""
    from specheads.formats import card
    from specheads.measure import calibrate
    from specheads.measure.clock import digest_of, two_sets
    from specheads.measure.hits import Texts
    from specheads.measure.plots import tree_svg, tree_text
    from specheads.models.base import end_tokens
    from specheads.models.checkpoint import load_export, set_tree
    from specheads.models.output import output_layer
    from specheads.system import hardware

    own = Path(config.checkpoint) / "tree.svg"
    picture = check_folder("out", config.out) if config.out else own
    device, dtype, _ = hardware.prepare(config.device, config.dtype, config.threads)
    on: dict[str, Any] = {"dtype": dtype, "device": device, "other_base": config.other_base}
    export = load_export(config.checkpoint, base=config.base or None, **on)
    calibration, measured = two_sets(config, config.checkpoint, export.base, export.tokenizer)
    base, temperatures = export.base, sorted({config.temperature, 1.0})
    ids, ends = [each.input_ids for each in calibration], end_tokens(base, export.tokenizer)
    limit, seed, bar = config.max_new_tokens, config.seed, _bar("calibrate")
    texts = Texts(ids, ends, limit, temperatures, seed, bar)
    sizes = calibrate.Search(config.num_nodes, config.max_nodes, config.batch_size, config.repeats)
    found = calibrate.calibrate(base, export.heads, output_layer(base), texts, sizes)
    tree, length = found.tree, found.expected_accept_length
    measured_on = {**found.measured_on, "prompts_sha256": digest_of(calibration)}
    if measured:
        ids = [each.input_ids for each in measured]
        unseen = replace(texts, prompts=ids, progress=_bar("measure"))
        about = {"num_prompts": len(measured), "prompts_sha256": digest_of(measured)}
        checked = calibrate.check_expected(export, found, unseen)
        measured_on["measured"] = about | checked
    set_tree(config.checkpoint, tree, length, measured_on)
    acceptance = measured_on.get("acceptance", [])
    title = f"{tree.num_nodes} nodes: {length:.2f} tokens per verify step expected"
    picture.write_text(tree_svg(tree, acceptance, title=title), encoding="utf-8")
    if "sizes" in measured_on:
        print(calibrate.format_sizes(measured_on))
    print("\n" + tree_text(tree, acceptance))
    print("\n" + calibrate.format_calibration(measured_on, tree.max_depth))
    print(f"wrote the static tree into {config.checkpoint}, its picture to {picture}")
    told = {"choices": tree.to_json(), "expected_accept_length": length, "measured_on": measured_on}
    answer({"checkpoint": config.checkpoint, **told, "picture": str(picture)})
    if card.refresh(config.checkpoint):
        print("its card now says what this search expects; specheads bench card=true measures it")


def _bar(name: str) -> Callable[[Sequence[int]], Any]:
    return lambda items: progress_bar("batch", iterable=items, desc=f"{name}: ")


main = entry_point("tree_search", TreeSearchConfig, run)


if __name__ == "__main__":
    main()

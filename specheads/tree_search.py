"""Find the fastest tree on this machine: ``python -m specheads.tree_search checkpoint=<export>``.

Measures the heads on calibration prompts, clocks trees of several sizes, static ones and ones grown
at every step, and writes the static tree with the most tokens per second into the export. Then it
decodes other prompts with the chosen tree and prints the accept length that was expected beside the
one that came. Hits are counted at the given temperature and at T=1 together: greedy text of a small
model loops, and a tree made for loops is made for nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specheads.config import ConfigError, TreeSearchConfig
from specheads.config.main import answer, answers_json, hydra_main
from specheads.system.files import check_folder
from specheads.system.terminal import progress_bar

if TYPE_CHECKING:
    from specheads.measure.clock import Prompt
    from specheads.models.checkpoint import Export


@answers_json
def run(config: TreeSearchConfig) -> None:
    """Load, measure, print, write."""
    from specheads.formats import card
    from specheads.measure import calibrate
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
    calibration, measured, digest = choose_prompts(config, export)
    base, temperatures = export.base, sorted({config.temperature, 1.0})
    ids, ends = [each.input_ids for each in calibration], end_tokens(base, export.tokenizer)
    texts = Texts(ids, ends, config.max_new_tokens, temperatures, config.seed)
    sizes = calibrate.Search(config.num_nodes, config.max_nodes, config.batch_size, config.repeats)
    bar = _bar("calibrate")
    found = calibrate.calibrate(base, export.heads, output_layer(base), texts, sizes, progress=bar)
    tree, length = found.tree, found.expected_accept_length
    measured_on = {**found.measured_on, "prompts_sha256": digest}
    if measured:
        unseen = replace(texts, prompts=[each.input_ids for each in measured])
        names = "".join(sorted(map(sha256_of, measured)))
        about = {"num_prompts": len(measured), "prompts_sha256": _sha256(names)}
        checked = calibrate.check_expected(export, found, unseen, _bar)
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


def choose_prompts(
    config: TreeSearchConfig, export: Export
) -> tuple[list[Prompt], list[Prompt], str]:
    """Return the prompts to calibrate on, others to measure on, and the sha256 of the former.

    Both come from the user's one file where only ``prompts`` is given. A prompt whose tokens are
    those of a calibration prompt is never measured, whatever it is called.

    Raises:
        ConfigError: if a file of prompts to measure holds none that is not calibrated on.
    """
    from specheads.measure.clock import prompt_file, prompts_of

    def read(path: Path, number: int) -> tuple[list[Prompt], str]:
        return prompts_of(export.base, export.tokenizer, path, number, config.max_new_tokens)

    path = prompt_file(config.prompts, config.checkpoint, "calibration.jsonl")
    calibration, digest = read(path, config.num_prompts)
    if not config.num_measured:
        return calibration, [], digest
    if config.prompts:
        others = read(path, config.num_prompts + config.num_measured)[0][config.num_prompts :]
    else:
        path = prompt_file("", config.checkpoint, "prompts.jsonl")
        others, _ = read(path, config.num_measured)
    known = {sha256_of(prompt) for prompt in calibration}
    measured = [prompt for prompt in others if sha256_of(prompt) not in known]
    if len(measured) < len(others):
        print(f"{len(others) - len(measured)} prompts of {path} are calibrated on: not measured")
    if not (measured or config.prompts):
        raise ConfigError(f"{path} holds no prompt but those that are calibrated on")
    return calibration, measured, digest


def _bar(name: str) -> Callable[[Sequence[int]], Any]:
    return lambda items: progress_bar("batch", iterable=items, desc=f"{name}: ")


def sha256_of(prompt: Prompt) -> str:
    """Return the hash of a prompt's tokens."""
    return _sha256(json.dumps(prompt.input_ids[0].tolist()))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    """Entry point."""
    hydra_main("tree_search", TreeSearchConfig, run)


if __name__ == "__main__":
    main()

"""Find the fastest tree on this machine: ``python -m specheads.tree_search checkpoint=<export>``.

Measures the heads on calibration prompts, clocks trees of several sizes, static ones and ones grown
at every step, and writes the static tree with the most tokens per second into the export. Then it
decodes other prompts with the chosen tree and prints the accept length that was expected beside the
one that came. Hits are counted at the given temperature and at T=1 together: greedy text of a small
model loops, and a tree made for loops is made for nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specheads.config import ConfigError, TreeSearchConfig
from specheads.config.main import answer, answers_json, hydra_main
from specheads.measure.clock import max_prompt_length, prompt_file
from specheads.system.terminal import progress_bar

if TYPE_CHECKING:
    import torch

    from specheads.attention.tree import Tree
    from specheads.drafters.contract import Drafter
    from specheads.measure.clock import Prompt
    from specheads.models.checkpoint import Export


@answers_json
def run(config: TreeSearchConfig) -> None:
    """Load, measure, print, write."""
    from specheads.formats import card
    from specheads.measure.calibrate import calibrate
    from specheads.measure.plots import tree_svg, tree_text
    from specheads.models.base import end_tokens
    from specheads.models.checkpoint import load_export, set_tree
    from specheads.models.output import output_layer
    from specheads.system import hardware

    picture = Path(config.out or Path(config.checkpoint) / "tree.svg")
    if config.out and not picture.parent.is_dir():
        raise ConfigError(f"out is {picture}, but there is no folder {picture.parent}")
    device = hardware.pick_device(config.device)
    hardware.pin_threads(config.threads)
    dtype = hardware.pick_dtype(config.dtype, device)
    hardware.quiet_loading()
    export = load_export(config.checkpoint, dtype=dtype, device=device)
    calibration, measured, digests = choose_prompts(config, export, device)
    eos = end_tokens(export.base, export.tokenizer)
    temperatures = sorted({config.temperature, 1.0})
    found = calibrate(
        export.base,
        export.heads,
        output_layer(export.base),
        [prompt.input_ids for prompt in calibration],
        eos_token_ids=eos,
        max_new_tokens=config.max_new_tokens,
        temperatures=temperatures,
        seed=config.seed,
        num_nodes=config.num_nodes,
        max_nodes=config.max_nodes,
        batch_size=config.batch_size,
        repeats=config.repeats,
        dynamic=True,
        progress=lambda items: progress_bar("batch", iterable=items, desc="calibrate"),
    )
    measured_on = {**found.measured_on, **digests}
    if measured:
        measured_on["measured"] = check(config, export, found.tree, measured_on, measured, eos)
    set_tree(config.checkpoint, found.tree, found.expected_accept_length, measured_on)
    acceptance = measured_on.get("acceptance", [])
    picture.write_text(
        tree_svg(
            found.tree,
            acceptance,
            title=f"{found.tree.num_nodes} nodes: "
            f"{found.expected_accept_length:.2f} tokens per verify step expected",
        ),
        encoding="utf-8",
    )
    if "sizes" in measured_on:
        print(format_sizes(measured_on))
    print("\n" + tree_text(found.tree, acceptance))
    print("\n" + format_result(measured_on, found.tree.max_depth))
    print(f"wrote the static tree into {config.checkpoint}, its picture to {picture}")
    answer(
        {
            "checkpoint": config.checkpoint,
            "choices": found.tree.to_json(),
            "expected_accept_length": found.expected_accept_length,
            "measured_on": measured_on,
            "picture": str(picture),
        }
    )
    if card.refresh(config.checkpoint):
        print("its card now says what this search expects; specheads bench card=true measures it")


def choose_prompts(
    config: TreeSearchConfig, export: Export, device: torch.device
) -> tuple[list[Prompt], list[Prompt], dict[str, Any]]:
    """Return the prompts to calibrate on, others to measure on, and the sha256 of the former.

    Both come from the user's one file where only ``prompts`` is given. A prompt whose tokens are
    those of a calibration prompt is never measured, whatever it is called.

    Raises:
        ConfigError: if a file of prompts to measure holds none that is not calibrated on.
    """
    from specheads.measure.clock import read_prompts

    longest = max_prompt_length(export.base, config.max_new_tokens)

    def read(path: Path, number: int) -> tuple[list[Prompt], str]:
        return read_prompts(path, export.tokenizer, number, max_length=longest, device=device)

    path = prompt_file(config.prompts, config.checkpoint, "calibration.jsonl")
    calibration, digest = read(path, config.num_prompts)
    if not config.num_measured:
        return calibration, [], {"prompts_sha256": digest}
    own = config.measured_prompts or not config.prompts
    if own:
        path = prompt_file(config.measured_prompts, config.checkpoint, "prompts.jsonl")
        others, _ = read(path, config.num_measured)
    else:
        both, _ = read(path, config.num_prompts + config.num_measured)
        others = both[config.num_prompts :]
    known = {sha256_of(prompt) for prompt in calibration}
    measured = [prompt for prompt in others if sha256_of(prompt) not in known]
    if len(measured) < len(others):
        print(f"{len(others) - len(measured)} prompts of {path} are calibrated on: not measured")
    if own and not measured:
        raise ConfigError(f"{path} holds no prompt but those that are calibrated on")
    return calibration, measured, {"prompts_sha256": digest}


def sha256_of(prompt: Prompt) -> str:
    """Return the hash of a prompt's tokens."""
    import hashlib
    import json

    return hashlib.sha256(json.dumps(prompt.input_ids[0].tolist()).encode()).hexdigest()


def check(
    config: TreeSearchConfig,
    export: Export,
    tree: Tree,
    measured_on: dict[str, Any],
    prompts: list[Prompt],
    eos: tuple[int, ...],
) -> dict[str, Any]:
    """Decode prompts that were not calibrated on, and compare accept lengths with the expected."""
    import hashlib

    from specheads.drafters.heads import dynamic_drafter, static_drafter
    from specheads.measure.hits import decoded_gains
    from specheads.models.output import output_layer

    def gain(name: str, drafter: Drafter, expected: float) -> dict[str, Any]:
        gains = decoded_gains(
            export.base,
            drafter,
            [prompt.input_ids for prompt in prompts],
            num_heads=export.heads.num_heads,
            eos_token_ids=eos,
            max_new_tokens=config.max_new_tokens,
            temperatures=measured_on["temperatures"],
            seed=config.seed,
            progress=lambda items: progress_bar("batch", iterable=items, desc=name),
        )
        (length,) = gains.lengths()
        return {
            "accept_length": round(length, 4),
            "accept_length_ci95": [round(bound, 4) for bound in gains.ci95(0)],
            "relative_to_expected": round(length / expected - 1, 4),
        }

    output = output_layer(export.base)
    names = "".join(sorted(map(sha256_of, prompts)))
    result: dict[str, Any] = {
        "num_prompts": len(prompts),
        "prompts_sha256": hashlib.sha256(names.encode()).hexdigest(),
        "static": gain(
            "static",
            static_drafter(export.base, export.heads, output, tree),
            measured_on["accept_length"],
        ),
    }
    if dynamic := measured_on.get("dynamic"):
        drafter = dynamic_drafter(
            export.base,
            export.heads,
            output,
            dynamic["num_nodes"],
            temperatures=dynamic["temperatures"],
        )
        result["dynamic"] = gain("dynamic", drafter, dynamic["accept_length"])
    return result


def format_sizes(measured_on: dict[str, Any]) -> str:
    """Return the measured sizes as a table of plain text."""
    kinds: dict[str, dict[str, Any]] = {"static tree": measured_on}
    if "dynamic" in measured_on:
        kinds["tree grown at each step"] = measured_on["dynamic"]
    rows = {
        name: {size["num_nodes"]: size for size in kind["sizes"]} for name, kind in kinds.items()
    }
    lines = [
        f"plain step {measured_on['plain_step_ms']:.2f} ms ({measured_on['dtype']}, "
        f"{measured_on['threads']} threads, batch {measured_on['batch_size']})",
        "     " + "".join(f"   {name:^25}" for name in kinds).rstrip(),
        "nodes" + "   accept  ms/step  speed-up" * len(kinds),
    ]
    for nodes in sorted({nodes for row in rows.values() for nodes in row}):
        line = f"{nodes:5d}"
        for name, kind in kinds.items():
            if size := rows[name].get(nodes):
                mark = "*" if nodes == kind["num_nodes"] else " "
                line += (
                    f"   {size['accept_length']:6.2f}  {size['step_ms']:7.2f}"
                    f"  {size['speedup']:6.2f}x{mark}"
                )
            else:
                line += " " * 28
        lines.append(line.rstrip())
    return "\n".join(lines)


def format_result(measured_on: dict[str, Any], depth: int) -> str:
    """Return what was chosen, what is expected of it and what came of it."""
    from specheads.measure.rows import DRIFT_LIMIT

    if "sizes" not in measured_on:
        return "do not speculate here: no guess of any head was right"
    lines = []
    checked = measured_on.get("measured", {})
    for name, kind in (("static", measured_on), ("dynamic", measured_on.get("dynamic"))):
        if not kind:
            continue
        low, high = kind["accept_length_ci95"]
        deep = f", depth {depth}" if name == "static" else ""
        lines.append(
            f"{name}: {kind['num_nodes']} nodes{deep}, expected accept length "
            f"{kind['accept_length']:.2f} (95%: {low:.2f} to {high:.2f}), "
            f"{kind['speedup']:.2f}x plain decoding"
        )
        if came := checked.get(name):
            low, high = came["accept_length_ci95"]
            lines.append(
                f"  measured on {checked['num_prompts']} other prompts: "
                f"{came['accept_length']:.2f} (95%: {low:.2f} to {high:.2f}), "
                f"{came['relative_to_expected']:+.1%} from the expected"
            )
    if not checked:
        lines.append("not measured on other prompts: none were given")
    static, dynamic = measured_on["speedup"], measured_on.get("dynamic", {}).get("speedup", 0.0)
    if max(static, dynamic) <= 1:
        lines.append(
            f"do not speculate here: the fastest tree is expected at {max(static, dynamic):.2f}x "
            "plain decoding"
        )
    elif static <= 1:
        lines.append("do not speculate here with the static tree, but with trees of each step")
    elif dynamic > static:
        lines.append(
            f"trees grown at each step are expected to be {dynamic / static:.2f}x as fast here: "
            "decode.tree=auto, the default, takes them"
        )
    if (drift := measured_on.get("plain_step_drift", 1.0)) > DRIFT_LIMIT:
        lines.append(
            f"The machine was busy: plain steps varied {drift:.2f}x between rounds; search again."
        )
    return "\n".join(lines)


def main() -> None:
    """Entry point."""
    hydra_main("tree_search", TreeSearchConfig, run)


if __name__ == "__main__":
    main()

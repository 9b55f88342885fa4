"""Find the fastest tree on this machine: ``python -m specheads.tree_search checkpoint=<export>``.

Measures the heads on the calibration prompts (never on those that are reported on), clocks trees of
several sizes, and writes the one with the most tokens per second into the export. Hits are counted
at the given temperature and at T=1 together: greedy text of a small model loops, and a tree made
for loops is made for nothing else.
"""

from __future__ import annotations

from typing import Any

from specheads.bench import max_prompt_length, prompt_file
from specheads.config import TreeSearchConfig
from specheads.entry import hydra_main


def run(config: TreeSearchConfig) -> None:
    """Load, measure, print, write."""
    from tqdm import tqdm

    from specheads import dist, hardware
    from specheads.decoding.calibrate import calibrate
    from specheads.decoding.measure import end_tokens, read_prompts
    from specheads.models.base import output_layer
    from specheads.models.checkpoint import load_export, set_tree

    device = dist.device()
    hardware.pin_threads(config.threads)
    dtype = hardware.pick_dtype(config.dtype, device)
    hardware.quiet_loading()
    export = load_export(config.checkpoint, dtype=dtype, device=device)
    prompts, digest = read_prompts(
        prompt_file(config.prompts, config.checkpoint, "calibration.jsonl"),
        export.tokenizer,
        config.num_prompts,
        max_length=max_prompt_length(export, config.max_new_tokens),
        device=device,
    )
    found = calibrate(
        export.base,
        export.heads,
        output_layer(export.base),
        [prompt.input_ids for prompt in prompts],
        eos_token_ids=end_tokens(export.base, export.tokenizer),
        max_new_tokens=config.max_new_tokens,
        temperatures=sorted({config.temperature, 1.0}),
        seed=config.seed,
        max_nodes=config.max_nodes,
        progress=lambda items: tqdm(items, unit="prompt", disable=None),
    )
    measured_on = {**found.measured_on, "prompts_sha256": digest}
    set_tree(config.checkpoint, found.tree, found.expected_accept_length, measured_on)
    print(format_sizes(measured_on))
    print(
        f"wrote a tree of {found.tree.num_nodes} nodes, depth {found.tree.max_depth}, expected "
        f"accept length {found.expected_accept_length:.2f}, into {config.checkpoint}"
    )


def format_sizes(measured_on: dict[str, Any]) -> str:
    """Return the measured sizes as a table of plain text."""
    lines = [
        f"plain step {measured_on['plain_step_ms']:.2f} ms ({measured_on['dtype']}, "
        f"{measured_on['threads']} threads)",
        "nodes  accept  ms/step  speed-up",
    ]
    lines += [
        f"{size['num_nodes']:5d}  {size['accept_length']:6.2f}  {size['step_ms']:7.2f}  "
        f"{size['speedup']:7.2f}x"
        for size in measured_on["sizes"]
    ]
    return "\n".join(lines)


def main() -> None:
    """Entry point."""
    hydra_main("tree_search", TreeSearchConfig, run)


if __name__ == "__main__":
    main()

r"""Continue a prompt: ``python -m specheads.generate checkpoint=<export> prompt="def add(a, b):"``.

The prompt is taken as it stands, whatever characters it holds; without one, standard input is read.
The text goes to standard output, tokens and time to standard error.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from specheads.config import ConfigError, GenerateConfig
from specheads.entry import hydra_main


def take_literal(argv: list[str], key: str) -> tuple[list[str], str | None]:
    """Take ``key=value`` out of a command line before Hydra sees it.

    Hydra gives meaning to quotes, commas, brackets, ``$`` and line breaks in values; prompts are
    full of them.

    Returns:
        The other arguments, and the last value given for ``key``, or None.
    """
    values = [arg.partition("=")[2] for arg in argv if arg.startswith(f"{key}=")]
    others = [arg for arg in argv if not arg.startswith(f"{key}=")]
    if not values:
        return others, None
    # An argument that is not UTF-8 arrives with surrogates, which no tokenizer takes.
    return others, values[-1].encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def run(config: GenerateConfig) -> None:
    """Load, decode, print."""
    import torch

    from specheads import dist, hardware
    from specheads.data.chat import Encoder
    from specheads.data.records import Record
    from specheads.decoding.loop import decode
    from specheads.decoding.measure import end_tokens
    from specheads.decoding.plain import plain_decode
    from specheads.decoding.sampling import Sampler
    from specheads.decoding.show import StepPrinter
    from specheads.drafters.heads import HeadsDrafter
    from specheads.models.base import context_length, output_layer
    from specheads.models.checkpoint import load_export

    device = dist.device()
    dtype = hardware.pick_dtype(config.dtype, device)
    hardware.quiet_loading()
    export = load_export(config.checkpoint, dtype=dtype, device=device)
    base, tokenizer = export.base, export.tokenizer
    prompt = config.prompt or _read_prompt()
    record: Record = {"id": "prompt", "kind": "prompt"}
    if config.raw or tokenizer.chat_template is None:
        record["text"] = prompt
    else:
        record["messages"] = [{"role": "user", "content": prompt}]
    ids = Encoder(tokenizer).prompt(record)
    room = (context_length(base) or 1 << 30) - len(ids)
    if room < 1:
        raise ConfigError(
            f"the prompt is {len(ids)} tokens, but the base model's context is {room + len(ids)}"
        )
    color = config.color == "always" or (config.color == "auto" and sys.stdout.isatty())
    printer = StepPrinter(tokenizer, _write, color=color)
    sampler = Sampler(
        temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, seed=config.seed
    )
    input_ids = torch.tensor([ids], device=device)
    limit, eos = min(config.max_new_tokens, room), end_tokens(base, tokenizer)
    start = time.perf_counter()
    if config.plain:
        result = plain_decode(
            base,
            input_ids,
            max_new_tokens=limit,
            sampler=sampler,
            eos_token_ids=eos,
            on_tokens=printer,
        )
    else:
        result = decode(
            base,
            HeadsDrafter(export.heads, output_layer(base), export.tree),
            input_ids,
            max_new_tokens=limit,
            sampler=sampler,
            eos_token_ids=eos,
            on_tokens=printer,
        )
    printer.finish()
    seconds = time.perf_counter() - start
    _write("\n")
    num_new = len(result.new_tokens)
    print(
        f"{num_new} tokens in {result.num_steps} steps after the prompt: "
        f"{result.accept_length:.2f} tokens per step, {num_new / seconds:.0f} tokens/s"
        + ("" if result.finished or limit == config.max_new_tokens else "; the context is full"),
        file=sys.stderr,
    )


def _read_prompt() -> str:
    if sys.stdin.isatty():
        print("prompt, then Ctrl-D:", file=sys.stderr)
    prompt = sys.stdin.read()
    if not prompt.strip():
        raise ConfigError('no prompt given: prompt="..." or text on standard input')
    return prompt


def _write(piece: str) -> None:
    # A terminal without UTF-8 shows a question mark rather than ending the program.
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(piece.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def main() -> None:
    """Entry point."""
    sys.argv[1:], prompt = take_literal(sys.argv[1:], "prompt")

    def task(config: GenerateConfig) -> None:
        run(config if prompt is None else replace(config, prompt=prompt))

    hydra_main("generate", GenerateConfig, task)


if __name__ == "__main__":
    main()

"""From a model's name to heads for it: ``python -m specheads.auto model=<any chat model>``.

The base model writes questions and answers them, heads are trained on that, and their tree and
speed are measured on this machine, all within ``minutes``. The same command goes on where it was
stopped; what it writes lies in ``runs/<name>``.
"""

from __future__ import annotations

from specheads.config import AutoConfig, ConfigError
from specheads.config.main import answer, hydra_main
from specheads.system.signals import StopSignal
from specheads.system.terminal import note


def run(config: AutoConfig) -> None:
    """Go through the stages, and say what came of them."""
    if not config.model:
        raise ConfigError("model is missing; expected a folder, a .gguf file or a name on the hub")
    _say(f"{config.model}, {config.minutes:g} minutes")
    from specheads.stages import auto

    answer(auto(config, _say))


def _say(text: str) -> None:
    note(f"specheads: {text}")


def main() -> None:
    """Entry point."""
    with StopSignal(at_once=True, advice="the same command goes on"):
        hydra_main("auto", AutoConfig, run, literal=("model",))


if __name__ == "__main__":
    main()

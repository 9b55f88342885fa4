r"""Let the base model answer the prompts itself: ``python -m specheads.regenerate output=<file>``.

Heads learn to guess what their base model would say, so they learn best from its own words. Answers
in the input are dropped and given anew, turn by turn; with ``prompts=self`` the base asks the
questions, too. The output is appended to as answers come; the same command continues it, and
``train data=<output>`` reads it.
"""

from __future__ import annotations

from specheads.config import RegenerateConfig
from specheads.config.main import answer, hydra_main
from specheads.system.signals import StopSignal
from specheads.system.terminal import note


def run(config: RegenerateConfig) -> None:
    """Answer, and say what came of it."""
    from specheads.regeneration.answering import regenerate
    from specheads.system import hardware

    hardware.quiet_loading()
    answer(regenerate(config, note))


def main() -> None:
    """Entry point."""
    with StopSignal(at_once=True, advice="the same command goes on"):
        hydra_main("regenerate", RegenerateConfig, run, literal=("model",))


if __name__ == "__main__":
    main()

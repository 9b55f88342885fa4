"""Say what a run needs, before its base is downloaded: ``python -m specheads.plan``.

Parameters, memory of a rank under every value of ``deepspeed``, the cheapest that fits, hidden
states, and what regenerating the data costs, from the settings of ``train`` and config.json alone.

    specheads plan model=meta-llama/Llama-3.1-8B recipe=medusa1 gpus=8 memory=80
"""

from __future__ import annotations

from specheads.config import PlanConfig
from specheads.config.compose import check_recipe
from specheads.config.main import answer, entry_point


def run(config: PlanConfig) -> None:
    """Count, print.

    Raises:
        ConfigError: if there is no such model, the recipe cannot be planned, or its settings
            contradict each other.
    """
    check_recipe(config.recipe)
    from specheads.training.forecast import forecast

    memory = config.memory * 1e9
    found = forecast(config, gpus=config.gpus, memory=memory, flops=config.flops)
    print(found)
    answer(found.figures)


main = entry_point("plan", PlanConfig, run)


if __name__ == "__main__":
    main()

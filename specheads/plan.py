"""Say what a run needs, before its base is downloaded: ``python -m specheads.plan``.

Parameters, memory of a rank under every value of ``deepspeed``, the cheapest that fits, hidden
states, and what regenerating the data costs, from the settings of ``train`` and config.json alone.

    specheads plan model=meta-llama/Llama-3.1-8B recipe=medusa1 gpus=8 memory=80
"""

from __future__ import annotations

from specheads.config import ConfigError, PlanConfig
from specheads.config.main import answer, answers_json, entry_point
from specheads.system.files import conf_dir


@answers_json
def run(config: PlanConfig) -> None:
    """Count, print.

    Raises:
        ConfigError: if there is no such model, the recipe cannot be planned, or its settings
            contradict each other.
    """
    if not config.recipe:
        names = sorted(path.stem for path in (conf_dir() / "recipe").glob("*.yaml"))
        raise ConfigError(f"choose a recipe: recipe={'|'.join(names)}")
    from specheads.training.forecast import forecast

    memory = config.memory * 1e9
    found = forecast(config, gpus=config.gpus, memory=memory, flops=config.flops)
    print(found)
    answer(found.figures)


main = entry_point("plan", PlanConfig, run)


if __name__ == "__main__":
    main()

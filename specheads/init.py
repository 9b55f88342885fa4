"""Begin a YAML file of a run: ``python -m specheads.init model=<base> data=<file> output=my.yaml``.

It holds recipe, model and data, and the ten settings that matter most, each with its reason;
``specheads train config=my.yaml`` takes it.
"""

from __future__ import annotations

from pathlib import Path

from specheads.config import ConfigError, InitConfig, TrainConfig
from specheads.config.compose import composed
from specheads.config.main import entry_point, tidy_arguments
from specheads.system.files import filled, write_whole


def run(config: InitConfig) -> None:
    """Check the settings as training would, and write them.

    Raises:
        ConfigError: if one is wrong, or the file is there already.
    """
    output = Path(config.output).expanduser()
    if output.exists():
        raise ConfigError(f"output={output} is there already; name another, or remove it")
    name = config.name or output.stem
    words = [f"recipe={config.recipe}", f"model={config.model}", f"data={config.data}"]
    words = [*(word for word in words if not word.endswith("=")), f"name={name}"]
    settings = composed("train", TrainConfig, [*tidy_arguments(words), f"run_dir=runs/{name}"])
    given = [word.replace("=", ": ", 1) for word in words]
    template = Path(__file__).with_name("config") / "first.yaml.j2"
    write_whole(output, filled(template, given=given, settings=settings))
    print(f"wrote {output}; next: specheads train config={output} dry_run=true")


main = entry_point("init", InitConfig, run, literal=("model", "data", "recipe", "output"))


if __name__ == "__main__":
    main()

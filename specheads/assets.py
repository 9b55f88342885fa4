"""Find the folders that ship with specheads: in a wheel inside the package, in a clone beside."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _shipped(name: str) -> Path:
    inside, beside = _PACKAGE / name, _PACKAGE.parent / name
    if inside.is_dir():
        return inside
    if beside.is_dir() and (_PACKAGE.parent / "pyproject.toml").is_file():
        return beside
    raise FileNotFoundError(f"specheads has lost its {name} folder; reinstall it")


def conf_dir() -> Path:
    """Return the folder of Hydra configs."""
    return _shipped("conf")


def recipes_dir() -> Path:
    """Return the folder of recipe programs."""
    return _shipped("recipes")


def tinycode_dir() -> Path:
    """Return the folder of the embedded base model."""
    # a clone keeps it under data/, which inside the package is the name of a module
    inside, beside = _PACKAGE / "tinycode", _PACKAGE.parent / "data" / "tinycode"
    if inside.is_dir() or not beside.is_dir():
        return inside
    return beside

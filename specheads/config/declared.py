"""Settings that say in their declaration what they may be: the range stands beside the default.

``rank: int = at_least(1, 64)`` is 64 unless told otherwise, and never below 1. What depends on
several settings is checked by ``_check_together`` of their class, behind what is declared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, ClassVar

from specheads.system import errors

Check = Callable[[object, str, str], None]  # of settings, their section, and the name of a field


@dataclass
class Settings:
    """What checks itself as soon as it is there.

    Attributes:
        section: what stands before its fields in a key, ``optim.`` say.
    """

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for each in fields(self):
            if check := each.metadata.get("check"):
                check(self, self.section, each.name)
        for kind in reversed(type(self).__mro__):  # what stands below relies on what stands above
            if check_together := vars(kind).get("_check_together"):
                check_together(self)

    def check(self, fits: object, name: str, expected: str) -> None:
        """Raise ConfigError unless ``fits``, about a setting or one of a section, ``optim.lr``."""
        errors.check(bool(fits), self.section + name, attrgetter(name)(self), expected)


@dataclass
class Section(Settings):
    """Settings below a key of their own, which their class is named after."""

    def __init_subclass__(cls) -> None:
        cls.section = f"{cls.__name__.removesuffix('Config').lower()}."


def _declared(default: Any, check: Check) -> Any:
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"check": check})
    return field(default=default, metadata={"check": check})


def _bounded(check: Callable[..., None], bound: object, default: Any) -> Any:
    return _declared(default, lambda of, section, name: check(of, section, **{name: bound}))


def at_least(bound: float, default: Any) -> Any:
    """Declare a number, or a list of them, none below ``bound``."""
    return _bounded(errors.at_least, bound, default)


def positive(default: float) -> Any:
    """Declare a number above 0."""
    return within("(0, inf)", default)


def within(interval: str, default: float) -> Any:
    """Declare a number in an interval as mathematics writes it: ``(0, 1]`` leaves out 0."""
    return _bounded(errors.within, interval, default)


def one_of(*options: str, default: str = "") -> Any:
    """Declare one of these words, the first unless ``default`` says another."""

    def check(settings: object, section: str, name: str) -> None:
        errors.one_of(section + name, getattr(settings, name), *options)

    return _declared(default or options[0], check)

"""Settings as text: `"tree:arity=4"` is `Tree(arity=4)`.

The grammar, shared by everything that has a name and settings:

    name                         ring
    name:value                   tree:4            the first field, by position
    name:key=value,key=value     hierarchical:inner=direct,outer=ring

A value is read as the type of the field it belongs to. Unknown names and keys answer with the nearest ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

from syncline.errors import ConfigError, UnknownName

T = TypeVar("T")


def parse(kind: str, text: str, table: Mapping[str, type[T]]) -> T:
    """Build the object that `text` describes from the classes in `table`."""
    name, _, rest = text.strip().partition(":")
    if name not in table:
        raise UnknownName(kind, name, table)
    return build(kind, name, table[name], rest)


def build(kind: str, name: str, cls: type[T], text: str) -> T:
    """Read `key=value,...` into the settings of one dataclass."""
    types = get_type_hints(cls)
    names = [field.name for field in fields(cls) if field.init]  # type: ignore[arg-type]
    settings: dict[str, Any] = {}
    for position, part in enumerate(filter(None, text.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            if position or not names:
                raise ConfigError(f"{part!r} in {name}:{text} has no key; write key=value, keys: {names}")
            key, value = names[0], part
        key = key.strip().replace("-", "_")
        if key not in names:
            raise UnknownName(f"setting of {kind} {name}", key, names)
        settings[key] = read(f"{name}:{key}", value.strip(), types[key])
    return cls(**settings)


def read(where: str, value: str, target: Any) -> Any:
    """One value as the type its field is annotated with."""
    try:
        if target is bool:
            return {"true": True, "false": False, "yes": True, "no": False}[value.lower()]
        if target is int or target is float:
            return target(value)
    except (KeyError, ValueError):
        raise ConfigError(f"{where}={value!r} is not a {target.__name__}") from None
    return value


def text_of(name: str, settings: Any) -> str:
    """The shortest text that `parse` reads back as `settings`."""
    changed = [
        f"{field.name}={getattr(settings, field.name)}"
        for field in fields(settings)
        if field.init and (field.default is MISSING or getattr(settings, field.name) != field.default)
    ]
    return f"{name}:{','.join(changed)}" if changed else name

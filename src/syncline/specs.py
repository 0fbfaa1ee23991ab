"""Settings as text: `"tree:arity=4"` is `Tree(arity=4)`.

The grammar, shared by everything that has a name and settings:

    name                         ring
    name:value                   tree:4            the first field, by position
    name:key=value,key=value     hierarchical:inner=direct,outer=ring
    name:key=(name:...)          hierarchical:inner=(tree:arity=3,pieces=2)     brackets keep commas together

A value is read as the type of the field it belongs to. Unknown names and keys answer with the nearest ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
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
    known = settings_of(cls)
    names = [field.name for field in known]
    settings: dict[str, Any] = {}
    for position, part in enumerate(filter(None, split_outside_brackets(text))):
        key, value = key_and_value(part, position, f"{name}:{text}", names)
        if key not in names:
            raise UnknownName(f"setting of {kind} {name}", key, names)
        if key in settings:
            raise ConfigError(f"{name}:{text} gives {key} twice; give it once")
        settings[key] = read(f"{name}:{key}", value, types[key])
    missing = [field.name for field in known if required(field) and field.name not in settings]
    if missing:
        raise ConfigError(f"{kind} {name} needs {', '.join(missing)}; write {name}:{missing[0]}=...")
    return cls(**settings)


def split_outside_brackets(text: str) -> list[str]:
    """What commas separate that are in no brackets."""
    pieces, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            break
        if letter == "," and not depth:
            pieces.append("")
        else:
            pieces[-1] += letter
    if depth:
        raise ConfigError(f"the brackets of {text!r} do not match; write key=(name:...) for a value with commas")
    return pieces


def key_and_value(part: str, position: int, where: str, names: list[str]) -> tuple[str, str]:
    """`key=value`, or a value alone for the first setting."""
    key, equals, value = part.partition("=")
    if equals and "(" not in key and ":" not in key:
        return key.strip().replace("-", "_"), value.strip()
    if position or not names:
        raise ConfigError(f"{part!r} in {where} has no key; write key=value, keys: {names}")
    return names[0], part.strip()


def settings_of(cls: Any) -> list[Field[Any]]:
    """The fields that can be given."""
    return [field for field in fields(cls) if field.init]


def required(field: Field[Any]) -> bool:
    """Whether a setting has no default."""
    return field.default is MISSING and field.default_factory is MISSING


def read(where: str, value: str, target: Any) -> Any:
    """One value as the type its field is annotated with."""
    try:
        if target is bool:
            return {"true": True, "false": False, "yes": True, "no": False}[value.lower()]
        if target is int or target is float:
            return target(value)
    except (KeyError, ValueError):
        raise ConfigError(f"{where}={value!r} is not a {target.__name__}") from None
    return value[1:-1] if value.startswith("(") and value.endswith(")") else value


def text_of(name: str, settings: Any) -> str:
    """The shortest text that `parse` reads back as `settings`; the name alone where they are no dataclass."""
    changed = []
    for field in settings_of(settings) if is_dataclass(settings) else ():
        value = getattr(settings, field.name)
        if field.default is MISSING or value != field.default:
            changed.append(f"{field.name}=({value})" if "," in str(value) else f"{field.name}={value}")
    return f"{name}:{','.join(changed)}" if changed else name

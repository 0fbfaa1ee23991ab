"""Parts of a model that are exchanged in turn.

A block is what has a number in its name, such as `blocks.3`, or a module that has none. Blocks are dealt out to
fragments in turn, so that each fragment has blocks of all depths, which converges better than a run of neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.errors import ConfigError
from syncline.reducer.parameters import Named


def split(named: Named, fragments: int) -> list[Named]:
    """Every parameter is in exactly one fragment, and no fragment is empty."""
    blocks: dict[str, Named] = {}
    for name, parameter in named:
        blocks.setdefault(block_of(name), []).append((name, parameter))
    if len(blocks) < fragments:  # few large modules: deal out parameters
        blocks = {name: [(name, parameter)] for name, parameter in named}
    if len(blocks) < fragments:
        raise ConfigError(f"fragments={fragments} are more than the {len(named)} parameters; try {len(named)}")
    return [dealt(list(blocks.values()), fragments, number) for number in range(fragments)]


def dealt(blocks: Sequence[Named], fragments: int, number: int) -> Named:
    """Every so many blocks, beginning with this one."""
    return [one for block in blocks[number::fragments] for one in block]


def block_of(name: str) -> str:
    """`blocks.3.attention.weight` belongs to `blocks.3`, `head.weight` to `head`."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return parts[0]

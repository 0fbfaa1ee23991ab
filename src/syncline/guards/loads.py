"""Weights that were loaded into a model by `load_state_dict`, in modes in which ranks train alone for a while.

Such weights are no training progress: ranks go on from them. All ranks must have loaded the same ones, which they tell
each other by a digest when they next synchronize.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

from torch import Tensor, nn

from syncline.errors import ReplicasDiverged
from syncline.fabric.agreement import some_ranks
from syncline.fabric.base import Fabric
from syncline.guards.divergence import digest_of
from syncline.replicas import all_have, gather_texts


class Loads:
    """The parameters of one replica that were loaded, with digests of their weights."""

    def __init__(self, model: nn.Module, named: Sequence[tuple[str, Tensor]], use: Callable[[set[str]], None]) -> None:
        """`use` is called with the names of parameters that have just been loaded."""
        self.use = use
        self.untold: dict[str, int] = {}  # digests by name
        self.told: dict[str, int] = {}  # with what left last
        self.since: set[str] = set()  # names, since then
        self.restores = False  # Sync itself has just restored weights, so that loading them again is no news
        self.names = [name for name, _ in named]
        names = {id(parameter): name for name, parameter in named}
        self.hooks = []
        for module in model.modules():
            mine: list[Tensor] = [p for p in module.parameters(recurse=False) if id(p) in names]
            if mine:
                watched = ModuleLoads({names[id(p)]: p for p in mine if not p.is_inference()}, self)
                self.hooks.append(module.register_load_state_dict_pre_hook(watched.before))  # type: ignore[no-untyped-call]
                self.hooks.append(module.register_load_state_dict_post_hook(watched.after))  # type: ignore[no-untyped-call]

    def add(self, loaded: dict[str, int]) -> None:
        """Take note of the digests of what a module has loaded."""
        self.untold |= loaded
        self.since |= loaded.keys()
        self.use(set(loaded))

    def leave(self) -> dict[str, int]:
        """What ranks are told now."""
        self.told, self.untold = self.untold, {}
        self.since = set()
        return self.told

    def tell_again(self) -> None:
        """Ranks could not compare what was told last."""
        self.untold = self.told | self.untold

    def clear(self) -> None:
        """All ranks have been made equal."""
        self.untold, self.told, self.since = {}, {}, set()

    def compare(self, fabric: Fabric, when: str) -> None:
        """Raise `ReplicasDiverged` on every rank unless all have loaded the same weights."""
        text = "\n".join(f"{name}\t{self.told[name]}" for name in self.names if name in self.told)
        if not all_have(fabric, text):
            told = [dict(line.split("\t") for line in theirs.splitlines()) for theirs in gather_texts(fabric, text)]
            raise ReplicasDiverged(difference(told, when))

    def close(self) -> None:
        """Stop watching."""
        for hook in self.hooks:
            hook.remove()


class ModuleLoads:
    """Sees what one module loads. In a copy of the model it sees nothing."""

    def __init__(self, own: dict[str, Tensor] | None = None, loads: Loads | None = None) -> None:
        self.own = own or {}
        self.loads = loads
        self.versions: dict[str, int] = {}
        self.restored: dict[str, int] = {}

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def before(self, *_: object) -> None:
        """The module is about to load."""
        self.versions = {name: parameter._version for name, parameter in self.own.items()}
        restores = self.loads is not None and self.loads.restores
        self.restored = {name: digest_of(parameter) for name, parameter in self.own.items()} if restores else {}

    def after(self, *_: object) -> None:
        """The module has loaded those parameters that have another version now."""
        changed = [name for name, parameter in self.own.items() if parameter._version != self.versions.get(name)]
        loaded = {name: digest_of(self.own[name]) for name in changed}
        news = {name: digest for name, digest in loaded.items() if self.restored.get(name) != digest}
        if self.loads is not None and news:
            self.loads.add(news)


def difference(told: Sequence[dict[str, str]], when: str) -> str:
    """The first parameter that ranks loaded differently, and who did."""
    names = dict.fromkeys(name for theirs in told for name in theirs)
    apart = [name for name in names if len({theirs.get(name) for theirs in told}) > 1]
    ranks: dict[str | None, list[int]] = {}
    for rank, theirs in enumerate(told):
        ranks.setdefault(theirs.get(apart[0]), []).append(rank)
    absent = ranks.pop(None, [])
    sides = [f"by {some_ranks(who)}" for who in ranks.values()]
    how = ", with other values ".join(sides) + (f", and not by {some_ranks(absent)}" if absent else "")
    return (
        f"ranks loaded different weights before {when}: {apart[0]} was loaded {how}; it is the first of {len(apart)}. "
        f"What ranks have learned since does not belong to the same weights, so nothing was averaged. Load the same "
        f"weights on all ranks between the same two steps, or before Sync; sync.load_state_dict resumes a run"
    )

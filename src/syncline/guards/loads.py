"""Weights that were loaded into a model by `load_state_dict`.

Where ranks train alone for a while, such weights are no training progress: ranks go on from them. All ranks must have
loaded the same ones, which they tell each other by a digest when they next synchronize.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from syncline.core.ranks import some_ranks
from syncline.core.torch_internals import version_of
from syncline.errors import ReplicasDiverged
from syncline.fabric.base import Fabric
from syncline.guards.divergence import digest_of
from syncline.replicas import all_have, gather_texts

Named = Sequence[tuple[str, Tensor]]
Loaded = dict[str, Tensor]  # parameters by name


class LoadHook:
    """A hook of a module that copies and files of the model do not have: they call something that does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *given: object) -> None:
        self.call(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class ModuleLoads:
    """Tells which parameters one module has loaded."""

    def __init__(self, own: Loaded, tell: Callable[[Loaded], None]) -> None:
        self.own = own
        self.tell = tell
        self.versions: dict[str, int] = {}

    def before(self, *_: object) -> None:
        """The module is about to load."""
        self.versions = {name: version_of(parameter) for name, parameter in self.own.items()}

    def after(self, *_: object) -> None:
        """The module has loaded those parameters that have another version now."""
        changed = {name: p for name, p in self.own.items() if version_of(p) != self.versions.get(name)}
        if changed:
            self.tell(changed)


def watch_loads(model: nn.Module, named: Named, tell: Callable[[Loaded], None]) -> list[RemovableHandle]:
    """Be told of the parameters that any module of a model loads, by name."""
    names = {id(parameter): name for name, parameter in named if not parameter.is_inference()}
    hooks = []
    for module in model.modules():
        own: Loaded = {names[id(p)]: p for p in module.parameters(recurse=False) if id(p) in names}
        if own:
            watched = ModuleLoads(own, tell)
            hooks.append(module.register_load_state_dict_pre_hook(LoadHook(watched.before)))  # type: ignore[no-untyped-call]
            hooks.append(module.register_load_state_dict_post_hook(LoadHook(watched.after)))  # type: ignore[no-untyped-call]
    return hooks


class Loads:
    """Weights that one replica has loaded, as digests, until ranks have told each other."""

    def __init__(self, model: nn.Module, named: Named, use: Callable[[Collection[str]], None]) -> None:
        """`use` is called with the names of parameters that have just been loaded."""
        self.use = use
        self.named = named
        self.untold: dict[str, int] = {}  # digests by name
        self.told: dict[str, int] = {}  # with what left last
        self.since: set[str] = set()  # names, since then
        self.restored: dict[str, int] = {}  # by Sync itself, so that to load them again is no news
        self.hooks = watch_loads(model, named, self.add)

    def add(self, loaded: Loaded) -> None:
        """Take note of what a module has loaded."""
        digests = {name: digest_of(parameter) for name, parameter in loaded.items()}
        news = {name: digest for name, digest in digests.items() if self.restored.get(name) != digest}
        self.untold |= news
        self.since |= news.keys()
        self.use(news)

    def restore(self) -> None:
        """Parameters are what was saved, on all ranks."""
        self.clear()
        self.restored = {name: digest_of(parameter) for name, parameter in self.named}

    def train(self) -> None:
        """Parameters have changed since they were restored."""
        self.restored = {}

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
        text = "\n".join(f"{name}\t{self.told[name]}" for name, _ in self.named if name in self.told)
        if not all_have(fabric, text):
            told = [dict(line.split("\t") for line in theirs.splitlines()) for theirs in gather_texts(fabric, text)]
            raise ReplicasDiverged(difference(told, when))

    def close(self) -> None:
        """Stop watching."""
        for hook in self.hooks:
            hook.remove()


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

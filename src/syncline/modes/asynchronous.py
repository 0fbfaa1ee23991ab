"""Asynchronous SGD: parameters live at servers; a worker pushes its gradients, takes parameters, and waits for nobody.

    worker 0   compute ─push/pull─ compute ─push/pull─ compute ─push/pull─
    worker 1   compute ──────── push/pull ── compute ──────── push/pull ──

Nobody waits for a slow worker. The price is that gradients are stale: others have moved the parameters since they were
read. That lowers the largest stable learning rate, more with more workers; lower momentum, or say `damping=true`, which
divides the learning rate of a push by 1 + its staleness, or `compensation`, which corrects gradients to first order.

The optimizer runs at the servers with the settings of the worker that pushes. `share=true` divides learning rates by
the number of workers, so that a round of pushes goes as far as one synchronous step.

Wire: gradients one way and parameters the other, each through a codec; on one machine parameters are read where the
server has them. A codec that speaks of some entries only, such as `topk`, is for gradients: optimizers move all
parameters, so those go in `int8` then, unless `pull` says otherwise. Clipping and unscaling between backward and step
are respected, at the price of overlap.

Paper: Dean et al., Large scale distributed deep networks (2012); Zheng et al., DC-ASGD (2017).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, ClassVar

from syncline.codecs.codec import Codec
from syncline.codecs.composed import innermost
from syncline.codecs.registry import codec_of
from syncline.errors import ConfigError, PairingError
from syncline.guards.trainable import refuse_closures
from syncline.modes.mode import Mode
from syncline.modes.replica import Replica

if TYPE_CHECKING:
    from syncline.modes.serving.driver import ServedDriver

DENSE_PULL = "int8"  # a quarter of the bytes, of every parameter


@dataclass(frozen=True)
class AsyncSGD(Mode):
    """Against parameter servers, with no bound."""

    name: ClassVar[str] = "async"
    has_servers: ClassVar[bool] = True
    servers: int = 1  # that share the parameters
    apart: bool = False  # servers are the last ranks, which do not train; else threads of the first ranks
    pull: str = "auto"  # codec of parameters on their way to workers; "auto" is that of gradients where it can be
    share: bool = True  # divide learning rates by the number of workers
    damping: bool = False  # divide learning rates by 1 + staleness
    compensation: float = 0.0  # of delay, DC-ASGD's lambda; 0.04 is a start

    def __post_init__(self) -> None:
        if self.servers < 1:
            raise ConfigError(f"servers={self.servers} is less than 1")
        if self.compensation < 0:
            raise ConfigError(f"compensation={self.compensation} is less than 0; try 0.04")
        if self.pull != "auto":
            self.check_pull(codec_of(self.pull))

    @property
    def bound(self) -> float:
        """Steps that a worker may be ahead of the slowest."""
        return inf

    def start(self, replica: Replica) -> ServedDriver:
        from syncline.modes.serving.driver import Plan, ServedDriver
        from syncline.modes.serving.server import Rules
        from syncline.modes.serving.shards import Roles

        refuse_closures(replica.optimizers, self.name)
        roles = Roles.of(replica.fabric.world, self.servers, self.apart)
        rules = Rules(self.bound, self.share, self.damping, self.compensation)
        return ServedDriver(replica, Plan(roles, rules, self.pull_codec(replica.settings.codec)))

    def pull_codec(self, push: Codec) -> Codec:
        """For parameters."""
        if self.pull != "auto":
            return codec_of(self.pull)
        says_all = innermost(push).says_all and tells_changes(push)
        return push if says_all else codec_of(DENSE_PULL)

    def check_pull(self, codec: Codec) -> None:
        """Not every codec of gradients can tell how parameters have changed."""
        if not tells_changes(codec):
            raise PairingError(
                f"{innermost(codec).name} says nothing of sizes, scales them or adds momentum, so parameters need "
                f"another codec; try pull={DENSE_PULL}"
            )

    def lasting(self) -> Mode:
        return replace(self, servers=1, apart=False)


def tells_changes(codec: Codec) -> bool:
    """Whether what is told, again and again, comes to what is meant."""
    inner = innermost(codec)
    return not (inner.correction is not None or getattr(inner, "vote", False) or getattr(inner, "scaled", False))

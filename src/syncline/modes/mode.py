"""What every mode is: frozen settings, and a driver that is told what happens in the user's loop.

backward          gradients come; a mode that sends them watches through a reducer
optimizer.step    `before_round`, the optimizer's own work, `after_round`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, ClassVar

from torch.optim import Optimizer

from syncline.errors import ConfigError
from syncline.guards.finite import harm_done
from syncline.modes.replica import Replica
from syncline.modes.settings import Settings
from syncline.modes.staleness import Staleness
from syncline.path.bucket import Slot
from syncline.path.codec_state import Saved
from syncline.path.coded import CodedPath
from syncline.path.path import DivideBy, Path
from syncline.reducer.reducer import Reducer
from syncline.replica.optimizer_steps import Step
from syncline.tracing.quality import Quality


class Mode(ABC):
    """When replicas talk."""

    name: ClassVar[str]
    least_world: ClassVar[int] = 1  # ranks from which on there is anything to do
    has_servers: ClassVar[bool] = False  # that keep parameters, so that a new process may take the place of a worker

    @abstractmethod
    def start(self, replica: Replica) -> Driver:
        """Begin, on every rank."""

    def lasting(self) -> Mode:
        """What must be the same when a run goes on from a checkpoint."""
        return self


class Driver(ABC):
    """A mode at work on one rank."""

    reducer: Reducer | None = None  # of modes that send gradients
    problem = ""  # with the gradients that the next step is for
    withholds = False  # there are no gradients to make a step with
    mends_parameters = False  # that are not finite on a rank: it takes those of others
    spoils_all = True  # what is wrong with some gradients is so with all that came with them

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.new_gradients: Callable[[], None] = lambda: None  # told when gradients come that no step has used

    @abstractmethod
    def before_round(self) -> None:
        """Make gradients what the optimizers should see."""

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step; from here on `problem` is that of its own gradients."""

    def harm_done(self) -> str:
        """What earlier steps have done to parameters, if anything; asked when something is wrong with gradients."""
        trained = ((name, p) for name, p in self.replica.named() if p.requires_grad)
        return harm_done(trained, self.mends_parameters)

    def makes_step(self) -> Step:
        """Who makes the step with gradients that are good."""
        return Step.NOBODY if self.withholds else Step.HERE

    def after_step(self, optimizer: Optimizer) -> None:
        """One optimizer has made its step."""
        if self.reducer is not None:
            self.reducer.after_step(optimizer)

    def after_scaler(self, optimizer: Optimizer) -> None:
        """A GradScaler has let one optimizer make its step, or has left it out."""

    def after_round(self, skipped: bool) -> None:
        """All optimizers have made their steps."""

    def without_gradient(self) -> Iterable[Slot]:
        """Parameters that had no gradient in the last backward pass, maybe because others have taken their places."""
        if self.reducer is None:
            return []
        layout = self.reducer.layout
        return [slot for slot in chain(layout.slots, layout.sparse) if not slot.fired]

    def after_update(self) -> None:
        """A GradScaler has updated its scale, after a step that was made or left out."""

    def unscaled(self) -> None:
        """A GradScaler has divided the gradients of an optimizer by its scale."""

    def needs_scaler(self) -> str:
        """Why this driver must know the GradScaler of the loop, if there is one; empty if it need not."""
        return ""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes that begin inside concern this rank alone."""
        with self.reducer.paused() if self.reducer is not None else nullcontext():
            yield

    def wait(self) -> None:
        """Make gradients what the optimizers should see, now."""

    def drain(self) -> None:
        """Let what is under way arrive, and use it."""

    @contextmanager
    def away(self) -> Iterator[None]:
        """This worker takes no part for a while."""
        raise ConfigError(
            f"ranks of mode {self.replica.settings.mode.name} need each other; away() is for async and bounded"
        )
        yield

    def serve(self) -> bool:
        """Serve, if that is all that this rank does; whether it was."""
        return False

    def staleness(self) -> Staleness:
        """Of the updates of this rank."""
        return Staleness({})

    def finish(self) -> None:
        """Before closing: use what has been said to this rank already."""

    def keep_company(self) -> None:
        """This rank has no more data: take part without any until nobody has."""
        raise ConfigError(f"mode {self.replica.settings.mode.name} has no join(); its ranks need not have equal data")

    def join(self, divide_by: DivideBy | None) -> None:
        """Ranks may have different numbers of batches from now on: by how many sums are divided. None: no longer."""

    def announce(self, wanted: Settings) -> None:
        """Tell the other ranks that this one reconfigures.

        Raise if ranks do or want different things, or if there are gradients that no step has used.
        """

    def quiesce(self, wanted: Settings) -> None:
        """Let all that is under way arrive and be used, so that all replicas are equal."""

    def residuals(self) -> Saved:
        """Residuals and codec state of this rank by parameter, with the step that a unit of a residual stands for."""
        return {}

    def take_over(self, residuals: Saved, previous: Driver) -> None:
        """Go on where another driver, which has quiesced, has ended."""

    def paths(self) -> list[Path]:
        """The paths that buckets take."""
        return [] if self.reducer is None else [self.reducer.path]

    def quality(self) -> list[Quality]:
        """Samples of what codecs left out."""
        return [sample for path in self.paths() if isinstance(path, CodedPath) for sample in path.watch.samples]

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on."""

    @abstractmethod
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from there."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the model."""

"""What a codec keeps from pass to pass, by bucket: its state and its residual. It is saved by parameter.

Encoding a bucket, its residual and its commit are here once: for `Sync`, for the push to a server, and for the hook of
plain DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncline.codecs import kernels
from syncline.codecs.codec import Codec, ReduceContext, State
from syncline.codecs.correction import Correction
from syncline.core.parts import Part
from syncline.guards.finite import SPARE, magnitude_fits, sum_fits
from syncline.path.residuals import GradientScale, Residual
from syncline.path.stages import Stage

Saved = dict[str, dict[str, Any]]


@dataclass
class PendingEncoding:
    """What a codec makes of a bucket in one pass; it counts when all ranks are known to have gone through with it."""

    values: Tensor  # gradient and residual in float32; what the codec has not sent, when it has ended
    state: State
    scale: GradientScale
    largest: float = 0.0  # magnitude of the values, before the codec has them
    overflow: Tensor | None = None  # beyond what gradients of 16 bits can hold

    def left(self) -> Tensor:
        """What is not sent: what the codec has left, and what it could not be given."""
        return self.values if self.overflow is None else self.values + self.overflow

    def end(self) -> None:
        """Take note that the codec has ended."""
        if self.overflow is not None:
            self.values += self.overflow
            self.overflow = None


@dataclass
class BucketCodecState:
    """Codec state and residual of one bucket."""

    parts: tuple[Part, ...]
    state: State
    residual: Residual | None = None
    correction: Correction | None = None
    stages: tuple[Stage, ...] | None = None  # of the bucket, in one phase of its codec
    phase: int = 0

    @classmethod
    def begin(cls, codec: Codec, parts: tuple[Part, ...], device: torch.device, feedback: bool) -> BucketCodecState:
        """The state before the first step."""
        state, correction = codec.start(parts, device), codec.correction
        if correction is not None:
            state |= correction.start(parts, device)
        return cls(parts, state, Residual(parts, device) if feedback else None, correction)

    def prepare(
        self,
        gradient: Tensor,
        scale: GradientScale,
        context: ReduceContext,
        lean: bool = False,
        look: Callable[[Tensor], None] | None = None,
        is_measured: bool = True,
    ) -> PendingEncoding:
        """Gradient and residual for a codec to work on: beside both, or where `lean`, in the memory of the gradient.

        Without a residual the gradient itself is worked on, because the mean is written over it. `look` is shown the
        gradient before the residual is added. Where there is none, what is not `is_measured` has no largest magnitude.
        """
        in_place = gradient.dtype == torch.float32 and (lean or self.residual is None)
        values = gradient if in_place else self._room(gradient, lean)
        staged = dict(self.state)
        source = gradient
        if self.correction is not None or gradient.dtype != torch.float32:
            source = values if in_place else values.copy_(gradient)
        staged |= self.correct(source, context)
        if look is not None:
            look(source)
        pending = PendingEncoding(values, staged, scale)
        if self.residual is None:
            if is_measured or values is not source:
                pending.largest = kernels.add_residual(values, source, None)
            return pending
        pending.largest = self.residual.add_to(source, scale, values)
        if gradient.dtype != torch.float32:
            pending.overflow = split_overflow(values, gradient.dtype)
        return pending

    def correct(self, gradient: Tensor, context: ReduceContext) -> State:
        """Change a gradient before the residual is added, as the codec asks for; the state that this changes."""
        return {} if self.correction is None else self.correction.apply(gradient, self.state, context)

    def _room(self, gradient: Tensor, lean: bool) -> Tensor:
        if lean or self.residual is None:
            return torch.empty_like(gradient, dtype=torch.float32)
        return self.residual.next_values()

    def fits(self, pending: PendingEncoding, times: int) -> bool:
        """Whether what a pass would leave can be added up again.

        No codec leaves more than the sum of all magnitudes of all ranks: where even that fits, nothing is looked at.
        """
        if magnitude_fits(pending.largest, (pending.values.numel() * times * SPARE) ** 2):
            return True
        new = [tensor for key, tensor in pending.state.items() if tensor is not self.state.get(key)]
        left = [] if self.residual is None else [pending.left()]
        return all(sum_fits(tensor, times) for tensor in [*left, *new])

    def commit(self, pending: PendingEncoding, unused: Container[str]) -> None:
        """Go on with what a good pass has left."""
        self.adopt(pending.state, unused)
        if self.residual is not None:
            self.residual.commit(pending.values, pending.scale, unused)

    def adopt(self, state: State, unused: Container[str]) -> None:
        """Go on with this state; parameters that nobody used keep theirs, because what was said of them is not used."""
        self.state = state | state_of(self.state, unused)


class CodecStateStore:
    """Codec states of all buckets. What was saved is put back at once, or when a bucket is met for the first time."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.states: dict[int, BucketCodecState] = {}
        self.saved: Saved = {}  # and not yet put back

    def of(self, number: int, parts: Callable[[], tuple[Part, ...]], device: torch.device) -> BucketCodecState:
        """The state of a bucket, whose parts are asked for once."""
        if number not in self.states:
            made = BucketCodecState.begin(self.codec, parts(), device, self.codec.feedback)
            self._take_out({part.name for part in made.parts})
            restore(made, self.saved)
            self.states[number] = made
        return self.states[number]

    def _take_out(self, names: Container[str]) -> None:
        """Put what other buckets have of these parameters, which were in those before, to what is to be put back."""
        for number, coded in list(self.states.items()):
            if any(part.name in names for part in coded.parts):
                for kind, values in saved_of(coded).items():
                    self.saved.setdefault(kind, {}).update(values)
                del self.states[number]

    def state_dict(self) -> Saved:
        """Residuals, their scales and codec state, by parameter."""
        made = {kind: dict(self.saved.get(kind, {})) for kind in KINDS}
        for coded in self.states.values():
            for kind, values in saved_of(coded).items():
                made[kind] |= values
        return made

    def load_state_dict(self, saved: Saved) -> None:
        """Go on from what was saved."""
        self.saved = {kind: dict(values) for kind, values in saved.items()}
        for coded in self.states.values():
            restore(coded, self.saved)


KINDS = ("residual", "step_scale", "state")


def state_of(state: State, names: Container[str]) -> State:
    """The part of a state that belongs to these parameters."""
    return {key: value for key, value in state.items() if key.rpartition("/")[0] in names}


def saved_of(coded: BucketCodecState) -> Saved:
    """Residual, its scales and codec state of a bucket, by parameter."""
    saved: Saved = {kind: {} for kind in KINDS}
    saved["state"] = {key: value.clone() for key, value in coded.state.items()}
    if coded.residual is not None:
        saved["step_scale"] = dict(coded.residual.step_scale)
        saved["residual"] = {part.name: coded.residual.values[part.lo : part.hi].clone() for part in coded.parts}
    return saved


def restore(coded: BucketCodecState, saved: Saved) -> None:
    """Put back what was saved of the parameters of a bucket, which is then held only here."""
    residual, step_scale, state = (saved.get(kind, {}) for kind in KINDS)
    for key in coded.state.keys() & state.keys():
        coded.state[key] = state.pop(key).clone()
    if coded.residual is None:
        return
    for part in coded.parts:
        if part.name in residual:
            coded.residual.values[part.lo : part.hi] = residual.pop(part.name).flatten()
        if part.name in step_scale:  # there is no residual before the first step that counted
            coded.residual.restore(part.name, step_scale.pop(part.name))


def split_overflow(values: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Leave what gradients of this type can hold; what is beyond that, to be kept, or None.

    Otherwise a mean with the residual might never fit, and with it none of the steps to come.
    """
    if values.dtype == dtype:
        return None
    most = torch.finfo(dtype).max
    if not most < float(values.abs().max()) < torch.inf:
        return None
    within = values.clamp(-most, most)
    beyond = values - within
    values.copy_(within)
    return beyond

"""What a codec keeps from step to step, by bucket: its state, and what was not sent. It is saved by parameter."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncline.codecs.codec import Codec, Part, Place, State
from syncline.codecs.correction import Correction
from syncline.codecs.feedback import Feedback, Units

Saved = dict[str, dict[str, Any]]


@dataclass
class Coded:
    """Of one bucket."""

    parts: tuple[Part, ...]
    state: State
    feedback: Feedback | None = None
    correction: Correction | None = None

    @classmethod
    def begin(cls, codec: Codec, parts: tuple[Part, ...], device: torch.device, feeds_back: bool) -> Coded:
        """Before the first step."""
        state, correction = codec.start(parts, device), codec.correction
        if correction is not None:
            state |= correction.start(parts, device)
        return cls(parts, state, Feedback(parts, device) if feeds_back else None, correction)

    def correct(self, values: Tensor, place: Place) -> State:
        """What becomes of a gradient before what was kept is added; returns the state that this changes."""
        return {} if self.correction is None else self.correction.apply(values, self.state, place)

    def commit(self, left: Tensor, state: State, units: Units, unused: Container[str]) -> None:
        """Keep what a good pass has left, of gradients that were worth this much."""
        self.adopt(state, unused)
        if self.feedback is not None:
            self.feedback.commit(left, units, unused)

    def adopt(self, state: State, unused: Container[str]) -> None:
        """Go on with this state; parameters that nobody used keep theirs, because what was said of them is not used."""
        self.state = state | state_of(self.state, unused)


class Memory:
    """Of all buckets. What was saved is put back at once, or when a bucket is met for the first time."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.coded: dict[int, Coded] = {}
        self.saved: Saved = {}  # and not yet put back

    def of(self, number: int, parts: Callable[[], tuple[Part, ...]], device: torch.device) -> Coded:
        """What is kept of a bucket, whose parts are asked for once."""
        if number not in self.coded:
            self.coded[number] = Coded.begin(self.codec, parts(), device, self.codec.feedback)
            restore(self.coded[number], self.saved)
        return self.coded[number]

    def state_dict(self) -> Saved:
        """By parameter."""
        kept, worth, state = (dict(self.saved.get(kind, {})) for kind in ("kept", "worth", "state"))
        for coded in self.coded.values():
            state |= {key: value.clone() for key, value in coded.state.items()}
            if coded.feedback is not None:
                worth |= coded.feedback.worth
                kept |= {part.name: coded.feedback.kept[part.lo : part.hi].clone() for part in coded.parts}
        return {"kept": kept, "worth": worth, "state": state}

    def load_state_dict(self, saved: Saved) -> None:
        """Go on from there."""
        self.saved = {kind: dict(values) for kind, values in saved.items()}
        for coded in self.coded.values():
            restore(coded, self.saved)


def state_of(state: State, names: Container[str]) -> State:
    """What of a state belongs to these parameters."""
    return {key: value for key, value in state.items() if key.rpartition("/")[0] in names}


def restore(coded: Coded, saved: Saved) -> None:
    """Put back what was saved of the parameters of a bucket, which is then held only here."""
    kept, worth, state = (saved.get(kind, {}) for kind in ("kept", "worth", "state"))
    for key in coded.state.keys() & state.keys():
        coded.state[key] = state.pop(key).clone()
    if coded.feedback is None:
        return
    for part in coded.parts:
        if part.name in kept:
            coded.feedback.kept[part.lo : part.hi] = kept.pop(part.name).flatten()
        if part.name in worth:  # nothing was kept before the first step that counted
            coded.feedback.worth[part.name] = worth.pop(part.name)

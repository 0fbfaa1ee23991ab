"""How buckets get smaller on their way between a worker and a server, in both directions.

Gradients go with error feedback, which the worker keeps. Parameters go as what has changed since the worker was told
last: the server has a mirror of what the worker has, so whatever was left out is still in the difference next time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container

import torch
from torch import Tensor

from syncline.codecs.codec import Codec, ReduceContext, State
from syncline.core.parts import Part
from syncline.modes.serving.speech import listen, pack, speak, unpack
from syncline.path.codec_state import BucketCodecState


def seed_of(seed: int, worker: int, what: str) -> int:
    """Every worker draws differently, in each direction."""
    return int.from_bytes(hashlib.blake2b(repr((seed, worker, what)).encode(), digest_size=7).digest(), "big")


class Coder:
    """One direction of one bucket of one worker; both ends have one, and their states are the same."""

    def __init__(self, codec: Codec, coded: BucketCodecState, seed: int) -> None:
        self.codec = codec
        self.coded = coded
        self.seed = seed

    @classmethod
    def begin(cls, codec: Codec, parts: tuple[Part, ...], seed: int) -> Coder:
        """For who keeps nothing but the state of the codec."""
        return cls(codec, BucketCodecState.begin(codec, parts, torch.device("cpu"), feedback=False), seed)

    @property
    def state(self) -> State:
        """Of the codec."""
        return self.coded.state

    @state.setter
    def state(self, state: State) -> None:
        self.coded.state = state

    def say(self, values: Tensor, step: int, staged: State | None = None) -> tuple[Tensor, Tensor, State]:
        """Words for the other end, what they mean, and the state after that; `values` hold what was left out.

        `staged` is the state with what the values have changed of it already.
        """
        state = dict(self.state) if staged is None else staged
        said, decoder = speak(self.codec.reduce(values, state, self.context(step)))
        meant = torch.empty_like(values)
        decoder(meant)
        return pack(said), meant, state

    def hear(self, words: Tensor, step: int, device: torch.device, unused: Container[str] = ()) -> Tensor:
        """What was meant; the state goes on, but not that of parameters that the other end did not use."""
        state = dict(self.state)
        parts = self.coded.parts
        zeros = torch.zeros(parts[-1].hi if parts else 0, dtype=torch.float32, device=device)
        decoder = listen(self.codec.reduce(zeros, state, self.context(step)), unpack(words))
        meant = torch.empty_like(zeros)
        decoder(meant)
        self.coded.adopt(state, unused)
        return meant

    def context(self, step: int) -> ReduceContext:
        """A world of one."""
        return ReduceContext(0, 1, step, self.seed, self.coded.parts)


class Mirror:
    """What a worker has of a bucket, as its server knows."""

    def __init__(self, coder: Coder, flat: Tensor) -> None:
        self.coder = coder
        self.flat = flat.detach().float()

    def changes(self, flat: Tensor, step: int) -> Tensor:
        """Words that tell the worker what has changed, as far as the codec says."""
        words, meant, self.coder.state = self.coder.say(flat.detach().float() - self.flat, step)
        self.flat += meant
        return words

"""Which saved state a rank goes on from: its own, or the mean of all where the number of ranks has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.errors import ConfigError

STATE_VERSION = 6


def choose_state(
    states: Sequence[dict[str, Any]], rank: int, world: int, settings: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The state for a rank. Refuses what would be silently wrong: another version, other settings, too few ranks."""
    for state in states:
        if state.get("version") != STATE_VERSION:
            raise ConfigError(
                f"a state of version {state.get('version')} cannot be read, only one of {STATE_VERSION}. Load the "
                f"model and the optimizer as ever, and go on without the state of Sync: residuals begin at zero"
            )
        for name, value in (settings or {}).items():
            if state[name] != value:
                raise ConfigError(f"the state was saved with {name}={state[name]}, not {value}; use the same")
    saved_world = states[0]["world"]
    for state in states:
        if state["rank"] == rank and state["world"] == world:
            return state
    if {state["rank"] for state in states} != set(range(saved_world)):
        have = sorted(state["rank"] for state in states)
        raise ConfigError(
            f"rank {rank} of {world} needs its own state, or those of all {saved_world} ranks that were saved; "
            f"these are of ranks {have}"
        )
    return merged(sorted(states, key=lambda state: int(state["rank"]))) if saved_world > 1 else states[0]


def holds_work(state: dict[str, Any]) -> bool:
    """Whether something of a run is in it that no model and no optimizer has: what codecs kept, or a way of its own."""
    residuals = state.get("codec_state", {}).get("residual", {})
    return "parameters" in state or any(bool(tensor.any()) for tensor in residuals.values())


def merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What ranks had in common, which the first has, and means of what each had: what codecs kept, and parameters."""
    kept = [state["codec_state"] for state in states if state["codec_state"]]  # of servers there is none
    made = states[0] | {"codec_state": mean_state(kept or [{}])}
    if "parameters" in made:
        made["parameters"] = mean_state([{"": state["parameters"]} for state in states])[""]
    if "gradients" in made:
        made["gradients"] = merged([state["gradients"] for state in states])
    return made


def mean_state(states: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Means of what ranks had each, which are what they had in common where that was the same.

    Of codecs that talk between hosts only some ranks have state: the mean is theirs.
    """
    keys = {kind: {key: None for state in states for key in state[kind]} for kind in states[0]}
    return {
        kind: {key: mean_of([state[kind][key] for state in states if key in state[kind]]) for key in keys[kind]}
        for kind in states[0]
    }


def mean_of(values: Sequence[Any]) -> Any:
    """Of tensors or numbers."""
    if not isinstance(values[0], Tensor):
        return sum(values) / len(values)
    if all(torch.equal(value, values[0]) for value in values[1:]):
        return values[0]
    return torch.stack(list(values)).double().mean(0).to(values[0].dtype)

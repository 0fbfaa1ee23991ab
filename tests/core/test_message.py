"""Values as bytes: what is written is read again, and nothing else is believed."""

from __future__ import annotations

import json
import math
import random
from collections import OrderedDict, deque
from enum import IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

from support.references import same_bits
from syncline.core.message import DTYPES, read_message, write_message
from syncline.errors import ConfigError, CorruptMessage

NUMBERS = some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text(max_size=20)
KEYS = some.integers() | some.text(max_size=5) | some.tuples(some.integers(), some.text(max_size=3))
VALUES = some.recursive(
    NUMBERS,
    lambda inner: (
        some.lists(inner, max_size=4) | some.tuples(inner, inner) | some.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


class Colour(IntEnum):
    RED = 3


@given(VALUES)
def test_what_is_written_is_read(value: object) -> None:
    told = read_message(write_message(value))
    assert told == value
    assert repr(told) == repr(value)  # tuples stay tuples, and 1 is not True


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 3)], ids=str)
def test_tensors_keep_type_shape_and_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (10 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype)
    ((told, again), other) = read_message(write_message([(tensor, tensor.mT if tensor.dim() > 1 else tensor), 7]))
    assert (told.dtype, told.shape, other) == (tensor.dtype, tensor.shape, 7)
    assert same_bits(told, tensor)
    assert same_bits(again, tensor.mT if tensor.dim() > 1 else tensor)


def test_special_numbers_and_kinds_of_dicts() -> None:
    told = read_message(write_message(OrderedDict(a=float("nan"), b=[math.inf, -math.inf], c=Colour.RED)))
    assert math.isnan(told.pop("a"))
    assert told == {"b": [math.inf, -math.inf], "c": 3}


def test_an_optimizer_state_goes_there_and_back() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.1), betas=(0.8, 0.9))
    parameter.grad = torch.ones(3)
    optimizer.step()
    other = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=0.5)
    other.load_state_dict(read_message(write_message(optimizer.state_dict())))
    assert other.param_groups[0]["betas"] == (0.8, 0.9)
    assert str(other.state_dict()) == str(optimizer.state_dict())


def test_numbers_of_numpy_types_of_tensors_and_other_lists_go_there_and_back() -> None:
    value = [np.float32(0.1), np.int64(3), np.bool_(True), torch.bfloat16, {1, 2}, frozenset("a"), deque([1, (2,)])]
    told = read_message(write_message(value))
    assert told == [float(np.float32(0.1)), 3, True, *value[3:]]
    assert [type(one) for one in told] == [float, int, bool, torch.dtype, set, frozenset, deque]


def test_tensors_that_share_the_memory_of_their_conjugate_or_opposite_are_read_as_they_are() -> None:
    complex_ = torch.tensor([1 + 2j, 3 - 1j])
    conjugate, opposite = read_message(write_message([complex_.conj(), complex_.conj().imag]))
    assert torch.equal(conjugate, complex_.conj())
    assert torch.equal(opposite, -complex_.imag)


def test_a_number_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="a number cannot be sent to a rank"):
        write_message(10**5000)


@pytest.mark.parametrize("value", [object(), {1, object()}, b"bytes", [1, {"a": lambda: 0}], torch.eye(2).to_sparse()])
def test_what_could_run_or_has_no_word_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match="cannot be sent to a rank"):
        write_message(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(ConfigError, match="contains itself"):
        write_message(value)


def message(text: bytes, length: int | None = None, rest: int = 0) -> Tensor:
    """A message of any text."""
    text += b" " * (-len(text) % 8)
    words = torch.frombuffer(bytearray(text), dtype=torch.int64)
    return torch.cat([torch.tensor([len(text) if length is None else length]), words, torch.zeros(rest).long()])


@pytest.mark.parametrize(
    "words",
    [
        torch.zeros(0, dtype=torch.int64),
        message(b"[1,[]]", length=800),
        message(b"[1,[]]", length=-8),
        message(b"[1]"),
        message(b"{}"),
        message(b"[" * 100_000),
        message(b"[1,[]]", rest=1),
        message(b'[{"tensor":0},[]]'),
        message(b'[{"tensor":-1},[[0,[8]]]]', rest=1),
        message(b'[{"tensor":0},[[99,[1]]]]', rest=1),
        message(b'[{"tensor":0},[[0,[-1]]]]', rest=1),
        message(b'[{"tensor":0},[[0,[1.5]]]]', rest=1),
        message(b'[{"tensor":0},[[6,[9999999999999]]]]', rest=1),
        message(b'[{"tensor":0},[[6,[4611686018427387904,4]]]]', rest=1),
        message(b'[{"tensor":0},[[6,[' + b",".join([b"9" * 4000] * 400) + b"]]]]"),
        message(b'[{"tensor":0},[[6,[' + b",".join([b"1"] * 65) + b"]]]]", rest=1),
        message(b'[{"dtype":1000},[]]'),
        message(b'[{"set":[[1]]},[]]'),
        message(b'[{"object":[1]},[]]'),
        message(b'[{"dict":[[1]]},[]]'),
        message(b'[{"dict":[[[1],2]]},[]]'),
        message(b'[{"tuple":1,"dict":2},[]]'),
        message(b"\xff\xfe"),
    ],
)
def test_what_is_no_message_is_refused(words: Tensor) -> None:
    with pytest.raises(CorruptMessage, match="are no message"):
        read_message(words)


def test_a_message_with_wrong_bytes_is_read_or_refused_and_nothing_else() -> None:
    whole = write_message({"a": [1, 2.5, (None, "text")], 3: torch.arange(5), "b": torch.ones(2, 3)})
    draw = random.Random(7)
    for _ in range(3000):
        row = whole.clone().view(torch.uint8)
        for _ in range(draw.randint(1, 3)):
            row[draw.randrange(len(row))] = draw.randrange(256)
        words = row.view(torch.int64)[: draw.choice([len(whole), draw.randrange(len(whole))])]
        try:
            json.dumps(repr(read_message(words)))
        except CorruptMessage:
            continue

"""The stub of the native module says what the module offers: names, parameters in their order, and defaults."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import syncline
from syncline.core.native import native

STUB = ast.parse((Path(syncline.__file__).parent / "_native.pyi").read_text())
Signature = tuple[list[str], int]  # names of parameters, and how many have a default

pytestmark = pytest.mark.skipif(native is None, reason="the native module was not built")


def signature_of(function: ast.FunctionDef) -> Signature:
    return [argument.arg for argument in function.args.args], len(function.args.defaults)


def functions_of(body: list[ast.stmt]) -> dict[str, Signature]:
    return {node.name: signature_of(node) for node in body if isinstance(node, ast.FunctionDef)}


def offered(function: Any) -> Signature:
    ((text, *_),) = function.__nb_signature__
    text = re.sub(r"ndarray\[.*?\]", "ndarray", text)
    (parsed,) = ast.parse(re.sub(r"\\\d+", "0", text) + ": ...").body  # nanobind numbers the values of defaults
    assert isinstance(parsed, ast.FunctionDef)
    return signature_of(parsed)


def offered_by(owner: Any) -> dict[str, Signature]:
    names = [name for name in vars(owner) if hasattr(getattr(owner, name), "__nb_signature__")]
    return {name: offered(getattr(owner, name)) for name in names if not name.startswith("__") or name == "__init__"}


def test_functions_are_those_of_the_module() -> None:
    assert functions_of(STUB.body) == offered_by(native)


@pytest.mark.parametrize("kind", [node.name for node in STUB.body if isinstance(node, ast.ClassDef)])
def test_methods_are_those_of_the_module(kind: str) -> None:
    (described,) = [node for node in STUB.body if isinstance(node, ast.ClassDef) and node.name == kind]
    assert functions_of(described.body) == offered_by(getattr(native, kind))


def test_classes_are_those_of_the_module() -> None:
    described = {node.name for node in STUB.body if isinstance(node, ast.ClassDef)}
    assert described == {name for name, value in vars(native).items() if isinstance(value, type)}

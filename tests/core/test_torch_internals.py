"""What torch does not promise is used in one module, which says what to do where a torch has it no longer."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.optim import SGD

import syncline
from syncline.core import torch_internals
from syncline.core.torch_internals import in_turn

SOURCE = Path(syncline.__file__).parent
OF_PYTHON = {"_replace", "_asdict", "_exit", "_getframe"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_names(tree: ast.AST) -> Iterator[str]:
    """Names of ours: of functions, classes and attributes that objects give themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def foreign(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Private names that are used and are nobody's of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | OF_PYTHON:
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch"):
            yield from (part for part in node.module.split(".") if is_private(part))
            yield from (alias.name for alias in node.names if is_private(alias.name))


def test_nothing_private_of_torch_is_used_elsewhere() -> None:
    trees = {path: ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
    own = {name for tree in trees.values() for name in private_names(tree) if is_private(name)}
    found = {path.relative_to(SOURCE).as_posix(): sorted(set(foreign(tree, own))) for path, tree in trees.items()}
    assert found.pop("core/torch_internals.py")  # the search finds what there is
    assert {path: names for path, names in found.items() if names} == {}


def loaded_again() -> ModuleType:
    """The module as it is with the torch of this moment, beside the one in use."""
    spec = importlib.util.spec_from_file_location("torch_internals_again", torch_internals.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NEEDED = [
    (torch._C, "_current_graph_task_id"),
    (torch._C, "_current_autograd_node"),
    (torch.autograd.Variable, "_execution_engine"),
    (torch.distributed.distributed_c10d, "_new_process_group_helper"),
    (torch.distributed.distributed_c10d, "_world"),
    (torch._C._distributed_c10d, "AllgatherOptions"),
]


@pytest.mark.parametrize(("owner", "name"), NEEDED, ids=[name for _, name in NEEDED])
def test_a_torch_without_what_is_needed_is_refused(owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(ImportError, match=rf"torch .* has no .*{name}.*pip install 'torch=="):
        loaded_again()


def test_without_a_count_of_tensors_nobody_is_seen_to_hold_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    without = loaded_again()
    values = torch.zeros(3)
    view = values[1:]
    assert not without.counts_tensors
    assert without.count_tensors(values) == 0
    assert torch_internals.counts_tensors
    assert torch_internals.count_tensors(values) == torch_internals.count_tensors(view) > 1


def test_zeros_that_have_no_memory_are_told_from_others() -> None:
    assert torch_internals.has_no_memory(torch._efficientzerotensor(2))
    assert not torch_internals.has_no_memory(torch.zeros(2))


def drawn(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in (1, 7, 64)]


def test_one_call_each_comes_to_the_same_as_one_call_on_all() -> None:
    for name, one, argument in [
        ("copy_each", torch.Tensor.copy_, drawn(1)),
        ("divide_each", torch.Tensor.div_, 3),
        ("multiply_each", torch.Tensor.mul_, 0.5),
        ("multiply_each", torch.Tensor.mul_, drawn(2)),
    ]:
        together, by_turns = drawn(0), drawn(0)
        getattr(torch_internals, name)(together, argument)
        in_turn(one)(by_turns, argument)
        assert all(map(torch.equal, together, by_turns)), name
    norms = torch_internals.norm_of_each(drawn(0))
    torch.testing.assert_close(list(norms), in_turn(torch.linalg.vector_norm)(drawn(0)))


def test_a_model_has_buffers_when_any_part_of_it_has() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert not torch_internals.has_buffers(model)
    model[1].append(nn.BatchNorm1d(2))
    assert torch_internals.has_buffers(model)


def test_hooks_behind_a_step_are_those_of_the_optimizer() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))])
    hook = lambda *_: None  # noqa: E731
    optimizer.register_step_post_hook(hook)
    assert torch_internals.hooks_after_step(optimizer) == [hook]

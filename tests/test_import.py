"""Importing is light, the public surface is exact, and the parts import only the parts they may."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import syncline

SOURCE = Path(syncline.__file__).parent


def in_fresh_interpreter(code: str) -> object:
    """What `code` prints as JSON, with warnings as errors."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


# Import

LOOK = """
import json, os, sys, threading
import numpy, torch
before = len(os.listdir("/proc/self/task"))
import syncline
print(json.dumps({
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    "new threads": len(os.listdir("/proc/self/task")) - before,
    "python threads": threading.active_count(),
    "initialized": torch.distributed.is_initialized(),
    "current": syncline.current() is not None,
    "children": open(f"/proc/self/task/{os.getpid()}/children").read().split(),
    "cli": sorted(name for name in sys.modules if name.startswith(("syncline.cli", "syncline.bench"))),
}))
"""


@pytest.fixture(scope="module")
def look() -> dict:
    return in_fresh_interpreter(LOOK)


def test_import_starts_nothing(look: dict) -> None:
    assert look["new threads"] == 0
    assert look["python threads"] == 1
    assert look["children"] == []
    assert look["initialized"] is False
    assert look["current"] is False


def test_import_pulls_in_nothing_heavy(look: dict) -> None:
    assert "torch" in look["modules"]
    assert not {"plotly", "typer", "rich", "click", "mpi4py", "pytest"} & set(look["modules"])
    assert look["cli"] == []


ADDED = """
import json, time
import torch
before = time.process_time()
import syncline
print(json.dumps(time.process_time() - before))
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_import_takes_little_longer_than_that_of_torch() -> None:
    # Processor time of this import alone, in one interpreter; the least of five, as noise only adds.
    assert min(in_fresh_interpreter(ADDED) for _ in range(5)) <= 0.3


PACKAGES = """
import json, sys
import numpy, torch, torch.distributed
before = {name.partition(".")[0] for name in sys.modules}
import syncline
after = {name.partition(".")[0] for name in sys.modules}
print(json.dumps(sorted(after - before - sys.stdlib_module_names)))
"""


def test_import_needs_no_package_that_torch_does_not() -> None:
    found = in_fresh_interpreter(PACKAGES)
    assert [name for name in found if not name.startswith(("syncline", "_syncline"))] == []


# The public surface


def test_all_is_exact() -> None:
    public = {
        name
        for name, value in vars(syncline).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    }
    assert set(syncline.__all__) == public | {"__version__"}
    assert syncline.__all__ == sorted(syncline.__all__)


def test_modes_and_codecs_are_at_hand_after_the_import() -> None:
    made = "[str(syncline.codecs.TopK(0.01)), str(syncline.modes.LocalSGD(every=8))]"
    codec, mode = in_fresh_interpreter(f"import json, syncline; print(json.dumps({made}))")
    assert codec.startswith("TopK(keep=0.01")
    assert mode.startswith("LocalSGD(every=8")


@pytest.mark.parametrize(("package", "registry"), [("modes", "MODES"), ("codecs", "CODECS")])
def test_every_mode_and_codec_can_be_imported_from_its_package(package: str, registry: str) -> None:
    named = getattr(importlib.import_module(f"syncline.{package}.registry"), registry).values()
    assert {kind.__name__ for kind in named} <= set(getattr(syncline, package).__all__)


def test_the_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert syncline.__version__ == version("syncline")


def test_the_package_is_typed() -> None:
    assert (SOURCE / "py.typed").exists()


# Layers: part -> the parts it may not import

ABOVE_PATH = {"reducer", "modes", "sync", "launch", "current", "integrations", "bench", "cli"}
FORBIDDEN = {
    "errors.py": {"specs", "core", "collectives", "fabric", "launch", "current", "bench", "cli"},
    "specs.py": {"core", "collectives", "fabric", "launch", "current", "bench", "cli"},
    "core": {"collectives", "codecs", "fabric", "tracing", "guards", "path", "replica", "replicas", *ABOVE_PATH},
    "collectives": {"codecs", "fabric", "tracing", "guards", "path", "replica", "replicas", *ABOVE_PATH},
    "codecs": {"fabric", "tracing", "guards", "path", "replica", "replicas", *ABOVE_PATH},
    "fabric": {"codecs", "tracing", "guards", "path", "replica", "replicas", *ABOVE_PATH},
    "current.py": {"launch", "bench", "cli"},
    "launch": {"bench", "cli"},
    "tracing": {"fabric", "guards", "path", "replica", "replicas", *ABOVE_PATH},
    "guards": {"path", "replica", *ABOVE_PATH},
    "path": {"replica", "replicas", *ABOVE_PATH},
    "reducer": {"modes", "sync", "launch", "current", "integrations", "bench", "cli"},
    "replicas.py": {"guards", "path", *ABOVE_PATH},
    "replica": {"path", *ABOVE_PATH - {"reducer"}},
    "modes": {"sync", "launch", "current", "integrations", "bench", "cli"},
    "sync.py": {"integrations", "bench", "cli"},
    "integrations": {"reducer", "modes", "sync", "launch", "bench", "cli"},
    "batch_norm.py": {"path", "reducer", "sync", "launch", "bench", "cli"},
    "lab": {"path", "reducer", "modes", "sync", "integrations", "workloads", "bench", "cli"},
    "workloads": {"fabric", "path", *ABOVE_PATH},
    "__init__.py": {"bench", "cli", "workloads"},
    "bench": {"cli"},
}


@cache
def imports_of(file: Path) -> frozenset[str]:
    """Every part of this package that a file imports, also within functions, but not for types alone."""
    tree = ast.parse(file.read_text())
    return frozenset(part for node in really_run(tree) for part in parts_imported(node, file))


def really_run(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    if isinstance(tree, ast.If) and isinstance(tree.test, ast.Name) and tree.test.id == "TYPE_CHECKING":
        return
    yield tree
    for child in ast.iter_child_nodes(tree):
        yield from really_run(child)


def parts_imported(node: ast.AST, file: Path) -> Iterator[str]:
    """`from syncline.fabric.base import Fabric` is `fabric`."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, f"{file} has a relative import"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return
    for name in names:
        package, _, rest = name.partition(".")
        if package == "syncline" and rest:
            yield rest.partition(".")[0]


@pytest.mark.parametrize("part", FORBIDDEN)
def test_a_part_imports_only_the_parts_below_it(part: str) -> None:
    place = SOURCE / part
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    assert files
    for file in files:
        assert not imports_of(file) & FORBIDDEN[part], file


def test_nothing_but_the_command_imports_the_command() -> None:
    outside = [file for file in SOURCE.rglob("*.py") if "cli" not in file.parts and file.name != "__main__.py"]
    assert len(outside) > 20
    assert not [file for file in outside if "cli" in imports_of(file)]


def test_imports_are_really_read() -> None:
    assert {"collectives", "errors"} <= imports_of(SOURCE / "fabric" / "base.py")
    assert "fabric" in imports_of(SOURCE / "launch" / "run.py")
    assert "fabric" not in imports_of(SOURCE / "current.py")  # for types alone


def test_every_part_has_its_rule() -> None:
    parts = {path.name for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - {"cli", "__main__.py", "units.py"} == set(FORBIDDEN), (
        "say in FORBIDDEN what the new part may not use"
    )


# Codecs


def test_codecs_are_there_after_importing_the_package_and_in_their_table() -> None:
    named = in_fresh_interpreter("import json, syncline; print(json.dumps(syncline.codecs.TopK(0.01).keep))")
    assert named == 0.01
    from syncline import codecs
    from syncline.codecs.registry import CODECS

    public = {value for name in codecs.__all__ if (value := getattr(codecs, name)) is not codecs.Codec}
    assert public == set(CODECS.values())

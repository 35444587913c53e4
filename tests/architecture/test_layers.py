"""The shape of the code: imports point up design section 10's list only, and the pure core stays pure."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from testing.source import SOURCES, imported_names, module_name, module_of, modules

# From the top of the list to the bottom. A layer may import itself and what stands above it.
PURE_CORE = ("memory", "cache", "step", "schedule")
LIST = ("units", "errors", "params", "config", *PURE_CORE)
SYSTEM = ("huge_pages", "paths")  # what adapters ask of the operating system alike
ADAPTERS = ("engine", "disagg", "model", "sim", "api", "web")
ROOTS = ("compose", "outputs", "llm", "serve", "route", "group", "replay", "plan", "faults")
OUTERMOST = ("cli", "__main__")
LAYERS = (*LIST, *SYSTEM, *ADAPTERS, *ROOTS, *OUTERMOST, "__init__")

# Exceptions, both plain data: the moves that the arena plans belong to the waist, and the API, which speaks to an
# engine in another process, knows the form of the engine's messages.
SHARED_DATA = frozenset({("memory", "halocline.step.Move"), ("api", "halocline.engine.messages")})

IMPURE_NAMES = """
torch transformers time datetime random secrets os sys io pathlib tempfile shutil logging socket http urllib zmq
threading asyncio subprocess multiprocessing signal psutil uuid
"""
IMPURE = frozenset(IMPURE_NAMES.split())
ALLOWED_ABOVE = {"units": (), "errors": (), "params": ("errors",), "config": ("units", "errors", "params")}


def allowed_layers(layer: str) -> frozenset[str]:
    """Return the layers that `layer` may import."""
    if layer in ALLOWED_ABOVE:
        return frozenset({layer, *ALLOWED_ABOVE[layer]})
    if layer in LIST:
        return frozenset(LIST[: LIST.index(layer) + 1])
    if layer in SYSTEM:
        return frozenset({"units", "errors", layer})
    if layer in ADAPTERS:
        return frozenset({*LIST, *SYSTEM, layer})
    if layer in OUTERMOST:
        # The command line starts the composition roots; it builds no part itself.
        return frozenset({"units", "errors", "params", "config", *ROOTS, *OUTERMOST})
    return frozenset(LAYERS) - frozenset(OUTERMOST)


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_point_up_only(path: Path) -> None:
    layer = module_of(path)
    assert layer in LAYERS, f"{path} belongs to no layer of design section 10"
    wrong = [
        name
        for name in imported_names(path)
        if name.startswith("halocline.")
        and name.split(".")[1] in LAYERS
        and name.split(".")[1] not in allowed_layers(layer)
        and not any(layer == who and name.startswith(what) for who, what in SHARED_DATA)
    ]
    assert not wrong, f"{module_name(path)} may not import {wrong}"


@pytest.mark.parametrize("path", modules(*PURE_CORE), ids=module_name)
def test_the_core_imports_nothing_impure(path: Path) -> None:
    impure = sorted({name for name in imported_names(path) if name.split(".")[0] in IMPURE})
    assert not impure, f"{module_name(path)} is part of the pure core and imports {impure}"
    assert "np.random" not in path.read_text(encoding="utf-8"), f"{module_name(path)} draws random numbers"


@pytest.mark.parametrize("path", modules(*PURE_CORE), ids=module_name)
def test_the_core_reads_no_files_and_prints_nothing(path: Path) -> None:
    calls = {node.func.id for node in ast.walk(ast.parse(path.read_text())) if is_plain_call(node)}
    assert not calls & {"open", "print", "input", "exec", "eval"}, f"{module_name(path)} does I/O"


@pytest.mark.parametrize("path", modules(*PURE_CORE), ids=module_name)
def test_the_core_asks_no_object_what_it_has(path: Path) -> None:
    """`getattr` and `hasattr` with a constant name hide an interface that should be written down."""
    found = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if is_plain_call(node)
        and node.func.id in {"getattr", "hasattr", "setattr"}
        and isinstance(node.args[1], ast.Constant)
    ]
    assert not found, f"{module_name(path)}, lines {found}"


@pytest.mark.parametrize("path", [path for path in SOURCES if module_of(path) != "model"], ids=module_name)
def test_torch_lives_in_model_only(path: Path) -> None:
    if module_of(path) in ROOTS:
        pytest.skip("composition roots may import all")
    assert not [name for name in imported_names(path) if name.split(".")[0] == "torch"]


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_are_absolute(path: Path) -> None:
    relative = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative, f"{module_name(path)} has relative imports"


@pytest.mark.parametrize("path", [path for path in SOURCES if module_of(path) != "sim"], ids=module_name)
def test_only_replays_choose_what_of_a_plan_is_written_down(path: Path) -> None:
    """A plan without tokens and tables means nothing to a model's runner: no server can come to make one."""
    if module_name(path) == "halocline.schedule.scheduler":
        return  # it takes the choice
    assert not [name for name in imported_names(path) if name.startswith("halocline.sim.outline")]
    choices = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if is_plain_call(node)
        and node.func.id == "Scheduler"
        and (len(node.args) > 3 or any(keyword.arg in (None, "packer") for keyword in node.keywords))
    ]
    assert not choices, f"{module_name(path)}, lines {choices}"


def test_replays_do_choose_it() -> None:
    assert any("Sketcher()" in path.read_text() for path in modules("sim"))


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = {module_name(path): path for path in SOURCES}
    edges = {name: closest(imported_names(path), known) for name, path in known.items()}
    while leaves := [name for name, targets in edges.items() if not targets - {name}]:
        for leaf in leaves:
            del edges[leaf]
        edges = {name: targets - set(leaves) for name, targets in edges.items()}
    assert not edges, f"these modules are on an import circle or lead to one: {sorted(edges)}"


def closest(names: list[str], known: dict[str, Path]) -> set[str]:
    """Return the known modules that `names` mean: `halocline.units.MIB` is `halocline.units`."""
    found = set()
    for name in names:
        module = name
        while module and module not in known:
            module = module.rpartition(".")[0]
        # The package's own __init__ is lazy, so importing a submodule does not import what it exports.
        if module and module != "halocline":
            found.add(module)
    return found


def is_plain_call(node: ast.AST) -> bool:
    """Whether `node` calls something by a bare name."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)

"""Rules of the design that no linter knows. `make layers` holds the imports, `make lint` the rest."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dtrain
from dtrain import errors
from dtrain.reasons import REASONS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dtrain"


def test_import_dtrain_loads_the_standard_library_alone() -> None:
    assert _packages_loaded_by("import dtrain") == {"dtrain"}


def test_help_loads_click_alone() -> None:
    code = """
from dtrain.cli.main import run
assert run(["--help"]) == 0
"""
    assert _packages_loaded_by(code) == {"dtrain", "click"}


def test_a_list_of_jobs_loads_no_more_than_it_shows(tmp_path: Path) -> None:
    """Neither plans nor connections: pydantic and paramiko take longer to load than 1,000 jobs to list."""
    code = f"""
import os
os.environ["XDG_STATE_HOME"] = {str(tmp_path)!r}
from dtrain.cli.main import run
assert run(["status"]) == 0
"""
    assert _packages_loaded_by(code) == {"dtrain", "click", "rich", "typing_extensions"}


def test_the_launching_side_works_without_torch() -> None:
    """People launch from laptops where torch cannot be imported."""
    code = """
import importlib, pkgutil, dtrain
sys.modules["torch"] = None
for module in pkgutil.walk_packages(dtrain.__path__, "dtrain."):
    if module.name.split(".")[1] not in ("__main__", "node", "trainers", "bench"):
        importlib.import_module(module.name)
"""
    assert "click" in _packages_loaded_by(code)


def test_no_public_name_hides_a_module() -> None:
    modules = {module.name for module in pkgutil.iter_modules([str(PACKAGE)])}
    assert set(dtrain.__all__) & modules == set()


def test_node_imports_the_standard_library_alone() -> None:
    allowed = sys.stdlib_module_names | {"dtrain"}
    found = [
        f"{_where(path, node)}: {name}"
        for path in _sources(PACKAGE / "node")
        for node in ast.walk(_tree(path))
        for name in _imported(node)
        if name.split(".")[0] not in allowed
    ]
    assert found == []


def test_node_is_written_in_python_3_9() -> None:
    """The grammar, and what it cannot see: dataclass options, and `X | Y` of types (wire.py evaluates annotations)."""
    found = []
    for path in _sources(PACKAGE / "node"):
        tree = ast.parse(path.read_text(), filename=str(path), feature_version=(3, 9))
        found += [_where(path, node) for node in ast.walk(tree) if _needs_python_3_10(node)]
        found += [_where(path, node) for node in ast.walk(tree) if any(_is_union(part) for part in _annotations(node))]
    assert found == []


def test_the_table_of_exit_codes_is_complete() -> None:
    """The tree that errors.py begins with names every error class there is, with its exit code."""
    table = {name: int(code) for name, code in re.findall(r"^[ ├└│─]*(\w+) +(\d+) ", errors.__doc__ or "", re.MULTILINE)}
    classes = {cls.__name__: cls.exit_code for cls in _with_subclasses(errors.DtrainError)}
    assert table == classes


def test_every_reason_of_a_failure_is_documented() -> None:
    text = (ROOT / "docs/failures.md").read_text()
    workers, nodes = (re.findall(r"^\| `([a-z-]+)` \| \S", part, re.MULTILINE) for part in text.split("## Reasons of a node"))
    assert workers == [name for name, reason in REASONS.items() if not reason.of_node]
    assert nodes == [name for name, reason in REASONS.items() if reason.of_node]
    assert "(docs/failures.md)" in (ROOT / "README.md").read_text()


def test_every_error_class_stands_in_errors_py() -> None:
    known = {cls.__name__ for cls in _with_subclasses(errors.DtrainError)}
    found = [
        f"{_where(path, node)}: {node.name}"
        for path in _sources(PACKAGE)
        if path.name != "errors.py"
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ClassDef) and any(_last_name(base) in known for base in node.bases)
    ]
    assert found == []


def test_only_the_two_outer_edges_catch_everything() -> None:
    edges = {PACKAGE / "cli/main.py", PACKAGE / "node/agent.py"}
    found = [
        _where(path, node)
        for path in _sources(PACKAGE)
        if path not in edges
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ExceptHandler) and _catches_exception(node)
    ]
    assert found == []


def test_no_file_names_a_folder_of_one_machine() -> None:
    pattern = re.compile(r"(?<![\w.~*}>-])/(?:work|Users|tmp/lab)\b(?!-)")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    found = []
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path == Path(__file__) or not path.is_file() or b"\0" in path.read_bytes():
            continue
        lines = path.read_text().splitlines()
        found += [f"{name}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if pattern.search(line)]
    assert found == []


def _packages_loaded_by(code: str) -> set[str]:
    """Top-level packages outside the standard library that a fresh Python loads for `code`."""
    report = """
import atexit, sys
before = set(sys.modules)
atexit.register(lambda: print(*sorted(set(sys.modules) - before), file=sys.stderr))
"""
    done = subprocess.run([sys.executable, "-c", report + code], cwd=ROOT, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in done.stderr.splitlines()[-1].split()} - sys.stdlib_module_names - {"__main__"}


def _sources(folder: Path) -> Iterator[Path]:
    paths = sorted(folder.rglob("*.py"))
    assert paths, f"no Python files under {folder}"
    yield from paths


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def _where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def _imported(node: ast.AST) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(module=str(module), level=0):
            return [module]
        case _:
            return []


def _needs_python_3_10(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=func):
            options = {keyword.arg for keyword in node.keywords}
            is_dataclass = _last_name(func) == "dataclass" and options & {"slots", "kw_only", "match_args"}
            is_check = _last_name(func) in {"isinstance", "issubclass"} and isinstance(node.args[-1], ast.BinOp)
            return bool(is_dataclass or is_check)
        case ast.Assign(value=ast.BinOp(op=ast.BitOr(), left=left, right=right)):
            return any(isinstance(side, ast.Constant) and side.value is None for side in (left, right))
        case _:
            return False


def _annotations(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.arg(annotation=ast.expr() as annotation) | ast.AnnAssign(annotation=annotation):
            return [annotation]
        case ast.FunctionDef(returns=ast.expr() as annotation):
            return [annotation]
        case _:
            return []


def _is_union(annotation: ast.expr) -> bool:
    return any(isinstance(part, ast.BinOp) for part in ast.walk(annotation))


def _with_subclasses(cls: type[errors.DtrainError]) -> Iterator[type[errors.DtrainError]]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)


def _last_name(node: ast.expr) -> str | None:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return None


def _catches_exception(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or _last_name(kind) == "Exception" for kind in caught)

# SPDX-License-Identifier: Apache-2.0
"""The layer check: fails when a lower layer reaches for a higher one.

    python tests/check_layers.py [ROOT]

The order is core <- {cells, kernels, channel, cuda, workers} <- xla <- bindings <- python
(docs/design.md, Layers).
Checked, in every C++ file below ROOT/src, ROOT/include and ROOT/tests/cpp, on its #include lines:

- a layer includes itself and the layers below it, by their path from src/ ("core/array_view.h");
- include/ holds public headers, which include neither a layer nor XLA nor Python;
- Python.h, nanobind and NumPy appear in src/bindings alone;
- XLA's headers appear in src/xla, src/bindings and the C++ tests alone;
- the GIL is given up and taken by src/bindings/python/gil.h alone: not by nanobind's guards, whose
  destructors end the process where a daemon thread's end unwinds them;
- a C++ test uses what it has a using-declaration for: clang-tidy, which looks at several tests as
  one file, does not see it;

in virtual_gpu, which others can lift out:

- a quoted #include names a file of the folder; an import is of Python's own modules, the folder's
  or those in ALONE; nothing names callgate, as its headers, modules and variables do;

and in every Python file below ROOT/python, on its syntax tree, imports in functions included:

- JAX's private modules (`jax._src`, `jaxlib._jax`) appear in python/callgate/_jax alone;
- a folder imports itself, `_part` and those that PYTHON_LAYERS gives it; the files of TOP import
  anything;
- no file imports one that imports it, by whatever way;
- a folder's `__init__` is one sentence, without code, but in `callgate`, `sinks`, `executors` and
  `compat`;
- a file has at most 400 lines;
- nothing runs on import but definitions, and the registration of a file's own primitives, its part
  and its listeners.

Prints one line a violation; the exit status is 1 when there is any.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TypeGuard

# Each layer of src/ and the layers that it may include.
LAYERS: dict[str, frozenset[str]] = {
  "core": frozenset(),
  "cells": frozenset({"core"}),
  "kernels": frozenset({"core"}),
  "channel": frozenset({"core"}),
  "cuda": frozenset({"core"}),
  "workers": frozenset({"core"}),
  "xla": frozenset({"core", "cells", "kernels", "channel", "cuda"}),
  "bindings": frozenset({"core", "cells", "kernels", "channel", "cuda", "workers", "xla"}),
}

CPP_SUFFIXES = {".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".inc"}
INCLUDE = re.compile(r"^[ \t]*#[ \t]*include(?:_next)?[ \t]*[<\"]([^>\"\n]+)[>\"]", re.MULTILINE)
PYTHON_HEADER = re.compile(r"^(Python\.h|structmember\.h|cpython/|nanobind/|numpy/|pybind11/)")
GIL = PurePosixPath("src/bindings/python/gil.h")
GIL_GUARD = re.compile(
  r"\bgil_scoped_(?:release|acquire)\b|\bPyEval_(?:Save|Restore)Thread\b|\bPyGILState_Ensure\b"
  r"|\bPy_BEGIN_ALLOW_THREADS\b"
)
USING = re.compile(r"^[ \t]*using (?:::)?(?:\w+::)+(\w+);", re.MULTILINE)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)

PACKAGE = PurePosixPath("python/callgate")
PRIVATE_FOLDER = PACKAGE / "_jax"
# Each folder of the package and those that it may import, from below; the extension module is for
# all. docs/design.md has the order as a picture.
PYTHON_LAYERS: dict[str, frozenset[str]] = {
  folder: frozenset(allowed.split())
  for folder, allowed in {
    "_jax": "",
    "_core": "_jax",
    "_process": "_jax _core",
    "_arrays": "_core",
    "_build": "_core",
    "_sharding": "_jax _core",
    "_runtime": "_jax _core _process _arrays _sharding",
    "_call": "_jax _core _arrays _sharding _runtime",
    "_places": "_jax _core _arrays",
    "_gate": "_jax _core _arrays _runtime _call _places",
    "_kernel": "_jax _core _build _runtime _call",
    "_kernel/c": "_jax _core _build _call _kernel",
    "_kernel/numba": "_core _build _call _kernel",
    "_kernel/elementwise": "_core _build _sharding _call _kernel",
    "_kernel/cuda": "_core _build _call _kernel _kernel/elementwise",
    "_kernel/peers": "_core _build _call _runtime _kernel _kernel/cuda",
    "_kernel/cpp": "_core _build _call _kernel _kernel/cuda",
    "_tap": "_jax _core _sharding _runtime _call",
    "_breakpoint": "_jax _core _sharding _runtime _call _gate _tap",
    "_feed": "_jax _core _arrays _runtime _call _gate",
    "_torch": "_jax _core _arrays _call _gate",
    "_nan": "_jax _core",
    "_steer": "_jax _core _runtime _call _gate _tap",
    "_objects": "_jax _core _arrays _runtime _call _places _gate",
    "_checkpoints": "_jax _core _runtime _process _sharding _gate _tap _feed _objects",
    "_loops": "_jax _core _runtime _call _tap _steer _feed _objects _checkpoints",
    "_envs": "_jax _core _runtime _call _places _gate _tap",
    "_explain": "_jax _core _runtime _call",
    "_futures": "_jax _core _runtime _call _places _gate _objects",
    "_stream": "_core _process _sharding _tap",
    "_verify": "_jax _core _runtime _call _places _gate",
    "_replay": "_core _process _runtime _objects _stream",
    "sinks": "_core _process _tap",
    "_runs": "_core _runtime _process _tap _steer _stream sinks",
    "executors": "_core",
    "_watch": "_core _stream _tap _runs",
    "_serve": "_core _runtime _gate _tap _steer _stream _watch",
    "compat": "_jax _core _sharding _runtime _call _gate _tap",
  }.items()
}
# The tool that stands alone, and the packages that it may import.
TOOL = PurePosixPath("virtual_gpu")
ALONE = frozenset({"jax", "numpy", "pytest"})
BASE = ("_part",)  # imports nothing of the package, and any file may import it
TOP = ("__init__", "__main__", "_attach", "_names", "_start")  # these import anything
WITH_CODE = ("callgate", "sinks", "executors", "compat")  # folders whose __init__ has some
# By these a module may register on import what it defines.
REGISTRATIONS = (
  "join", "_part.on", "tracing.clear_with_caches",
  "jax.tree_util.register_pytree_node",
)  # fmt: skip
MOST_LINES = 400
# Functions that take a module's name as text. A logger's name, say, is none.
IMPORTERS = ("import_module", "__import__", "sys.modules.get")
PRIVATE = re.compile(r"^(jax\._src|jaxlib\._jax)(\.|$)")


def violations(root: Path) -> list[str]:
  """One line for each place below `root` that breaks the order, as `path:line: what`."""
  found: list[str] = []
  for folder in ("src", "include", "tests/cpp"):
    for path in _files(root / folder, CPP_SUFFIXES):
      found += _check_cpp(path, PurePosixPath(path.relative_to(root).as_posix()))
  package: Package = {}
  for path in _files(root / "python", {".py", ".pyi"}):
    name = PurePosixPath(path.relative_to(root).as_posix())
    text = path.read_text(encoding="utf-8")
    package[name] = tree = ast.parse(text, filename=str(path))
    found += _check_privacy(name, tree)
    if path.suffix == ".py" and name.is_relative_to(PACKAGE):
      found += _check_form(name, tree, len(text.splitlines()))
  return found + list(_check_imports(package)) + list(_check_tool(root))


def _files(folder: Path, suffixes: set[str]) -> list[Path]:
  return sorted(p for p in folder.rglob("*") if p.suffix in suffixes and p.is_file())


def _check_cpp(path: Path, name: PurePosixPath) -> Iterator[str]:
  layer = name.parts[1] if name.parts[0] == "src" else None
  if layer is not None and layer not in LAYERS:
    yield f"{name}:1: src/{layer} is no layer; add it to LAYERS in tests/check_layers.py"
    return
  text = path.read_text(encoding="utf-8")
  for match in INCLUDE.finditer(text):
    fault = _include_fault(name, layer, match[1])
    if fault is not None:
      yield f"{name}:{_line_of(text, match.start(1))}: {fault}"
  code = COMMENT.sub(_blanked, text)
  for match in GIL_GUARD.finditer(code) if name != GIL else ():
    line = _line_of(text, match.start())
    yield f"{name}:{line}: {match[0]}: use without_gil() or GilScope of {GIL}"
  for match in USING.finditer(code) if name.parts[0] == "tests" else ():
    if len(re.findall(rf"\b{match[1]}\b", code)) == 1:
      yield f"{name}:{_line_of(text, match.start(1))}: nothing uses {match[1]}"


def _line_of(text: str, position: int) -> int:
  return text.count("\n", 0, position) + 1


def _blanked(comment: re.Match[str]) -> str:
  """As long as the comment, with its lines."""
  return re.sub(r"[^\n]", " ", comment[0])


def _include_fault(name: PurePosixPath, layer: str | None, header: str) -> str | None:
  """The fault of including `header` in the file `name` of `layer`, or None."""
  if ".." in header.split("/"):
    return f'"{header}": include by the path from src/, not through ".."'
  if PYTHON_HEADER.match(header):
    return None if layer == "bindings" else f"<{header}>: only src/bindings may include it"
  target = header.split("/")[0]
  if target not in LAYERS:
    return None
  if name.parts[0] == "tests":
    return f'"{header}": C++ tests run without Python' if target == "bindings" else None
  if layer is None:
    return f'"{header}": public headers stand alone, they include no layer and no XLA'
  # "xla/" begins the paths of our own layer and of XLA's headers; the same rule serves both.
  if target != layer and target not in LAYERS[layer]:
    return f'"{header}": src/{layer} is not above {target}'
  return None


def _check_privacy(name: PurePosixPath, tree: ast.Module) -> Iterator[str]:
  if name.is_relative_to(PRIVATE_FOLDER):
    return
  lines = {line for line, module in _modules(tree) if PRIVATE.match(module)}
  for line in sorted(lines):
    yield f"{name}:{line}: a private module of JAX; only {PRIVATE_FOLDER} may use one"


# -- the package -----------------------------------------------------------------------------------
def _check_form(name: PurePosixPath, tree: ast.Module, lines: int) -> Iterator[str]:
  if lines > MOST_LINES:
    yield f"{name}:{lines}: {lines} lines; at most {MOST_LINES}, then it holds two ideas"
  if name.name == "__init__.py":
    if name.parent.name not in WITH_CODE and not _is_one_sentence(tree):
      yield f"{name}:1: expected one sentence as its docstring, and no code"
    return
  registers = "compat" in name.parts or any(
    isinstance(node, ast.Assign)
    and isinstance(node.value, ast.Call)
    and _dotted(node.value.func).endswith("Primitive")
    for node in tree.body
  )
  for node in tree.body:
    if not registers and name.stem not in TOP and _runs(node):
      yield f"{name}:{node.lineno}: runs on import; callgate/_start.py calls what has to run"


def _is_one_sentence(tree: ast.Module) -> bool:
  text = ast.get_docstring(tree) or ""
  return len(tree.body) == 1 and text.endswith(".") and "\n" not in text


def _runs(node: ast.stmt) -> bool:
  """True if a statement of a module does more than define."""
  if isinstance(node, ast.If):
    return _dotted(node.test) != "TYPE_CHECKING"
  if isinstance(node, ast.Assign):  # to what is another module's or object's
    parts = [x for target in node.targets for x in getattr(target, "elts", [target])]
    return any(isinstance(x, ast.Attribute | ast.Subscript) for x in parts)
  return isinstance(node, ast.For | ast.While | ast.With | ast.Try) or (
    isinstance(node, ast.Expr)
    and isinstance(node.value, ast.Call)
    and _dotted(node.value.func) not in REGISTRATIONS
  )


# -- the virtual GPU -------------------------------------------------------------------------------
def _check_tool(root: Path) -> Iterator[str]:
  files = _files(root / TOOL, {*CPP_SUFFIXES, ".py", ".txt"})
  files = [file for file in files if file.relative_to(root / TOOL).parts[0] != "build"]
  own = {file.stem for file in files if file.suffix == ".py"} | {TOOL.name}
  for path in files:
    name = PurePosixPath(path.relative_to(root).as_posix())
    text = path.read_text(encoding="utf-8")
    named = {_line_of(text, match.start()) for match in re.finditer(r"(?i)callgate", text)}
    yield from (f"{name}:{line}: names callgate; {TOOL} stands alone" for line in sorted(named))
    for line, what in _outside(path, text, root / TOOL, own):
      if line not in named:
        yield f"{name}:{line}: {what}"


def _outside(path: Path, text: str, tool: Path, own: set[str]) -> Iterator[tuple[int, str]]:
  """The includes and imports of what lies neither in the folder nor in ALONE."""
  for match in INCLUDE.finditer(text) if path.suffix in CPP_SUFFIXES else ():
    near = [(folder / match[1]).resolve() for folder in (path.parent, tool)]
    inside = any(x.is_file() and x.is_relative_to(tool.resolve()) for x in near)
    if text[match.start(1) - 1] == '"' and not inside:
      yield _line_of(text, match.start(1)), f'"{match[1]}": expected a file of {TOOL}'
  for node in ast.walk(ast.parse(text)) if path.suffix == ".py" else ():
    if isinstance(node, ast.Import):
      modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
      modules = [node.module]
    else:
      continue
    for module in modules:
      if module.split(".")[0] not in ALONE | own | sys.stdlib_module_names:
        yield node.lineno, f"{module}: {TOOL} imports {', '.join(sorted(ALONE))} alone"


Package = dict[PurePosixPath, ast.Module]


def imports_of(package: Package) -> Iterator[tuple[PurePosixPath, PurePosixPath, int]]:
  """Which file imports which, and on which line."""
  for name, tree in package.items():
    for line, module in _modules(tree):
      target = _file_of(module, package)
      if target is not None and target != name:
        yield name, target, line


def _check_imports(package: Package) -> Iterator[str]:
  imports: dict[PurePosixPath, dict[PurePosixPath, int]] = {name: {} for name in package}
  for name, target, line in imports_of(package):
    imports[name][target] = line
  for name, targets in imports.items():
    for target, line in targets.items():
      fault = _import_fault(name, target)
      if fault is not None:
        yield f"{name}:{line}: {fault}"
      elif (
        name < target and target != PACKAGE / "__init__.py" and name in _reached(target, imports)
      ):
        yield f"{name}:{line}: a circle: {target} imports this file, by whatever way"


def _file_of(module: str, package: Package) -> PurePosixPath | None:
  """The file of a module, or of the one that a name is imported from."""
  if module.split(".")[0] != "callgate" or module.startswith("callgate._callgate"):
    return None
  path = PurePosixPath("python", *module.split("."))
  for found in (path.with_suffix(".py"), path / "__init__.py"):
    if found in package:
      return found
  return _file_of(module.rpartition(".")[0], package) if "." in module else None


def layer_of(name: PurePosixPath) -> str:
  """The row of PYTHON_LAYERS that a file of the package belongs to; "" for the topmost files."""
  parts = name.relative_to(PACKAGE).parts[:-1]
  return next((f for f in ("/".join(parts[:2]), "/".join(parts[:1])) if f in PYTHON_LAYERS), "")


def _import_fault(name: PurePosixPath, target: PurePosixPath) -> str | None:
  if not (name.is_relative_to(PACKAGE) and target.is_relative_to(PACKAGE)):
    return None
  layer, other = layer_of(name), layer_of(target)
  if not layer:
    missing = "is in no folder of PYTHON_LAYERS: add it to that table in tests/check_layers.py"
    return None if name.stem in TOP else missing
  if layer == other or other in PYTHON_LAYERS[layer] or target.stem in BASE:
    return None
  return f"{layer} is not above {other or target.stem}"


def _reached(
  start: PurePosixPath, imports: dict[PurePosixPath, dict[PurePosixPath, int]]
) -> set[PurePosixPath]:
  found, left = {start}, [start]
  while left:
    new = imports.get(left.pop(), {}).keys() - found
    found |= new
    left += new
  return found


def _modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
  """Every dotted name that may be a module: imports, attribute chains, names given as text."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from ((node.lineno, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
      yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
    elif isinstance(node, ast.Attribute):
      yield node.lineno, _dotted(node)
    elif isinstance(node, ast.Call) and _dotted(node.func).endswith(IMPORTERS):
      yield from ((node.lineno, arg.value) for arg in node.args if _is_text(arg))
    elif isinstance(node, ast.Subscript) and _dotted(node.value) == "sys.modules":
      yield from ((node.lineno, key.value) for key in [node.slice] if _is_text(key))


def _is_text(node: ast.expr) -> TypeGuard[ast.Constant]:
  return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _dotted(node: ast.expr) -> str:
  """`a.b.c` of an attribute chain that starts at a name, else ""."""
  if isinstance(node, ast.Name):
    return node.id
  if isinstance(node, ast.Attribute):
    base = _dotted(node.value)
    return f"{base}.{node.attr}" if base else ""
  return ""


def main(argv: list[str]) -> int:
  root = Path(argv[0]) if argv else Path(__file__).resolve().parent.parent
  found = violations(root)
  print("\n".join(found) if found else "layers: every include and every import points down")
  return 1 if found else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))

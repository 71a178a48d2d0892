"""The layer check: fails when a lower layer reaches for a higher one.

    python tests/check_layers.py [ROOT]

The order is core <- {channel, cuda} <- xla <- bindings <- python (docs/design.md, section 4).
Checked, in every C++ file below ROOT/src, ROOT/include and ROOT/tests/cpp, on its #include lines:

- a layer includes itself and the layers below it, by their path from src/ ("core/dtype.h");
- include/ holds public headers, which include neither a layer nor XLA nor Python;
- Python.h, nanobind and NumPy appear in src/bindings alone;
- XLA's headers appear in src/xla, src/bindings and the C++ tests alone;
- the GIL is given up and taken by src/bindings/gil.h alone: not by nanobind's guards, whose
  destructors end the process where a daemon thread's end unwinds them;
- a C++ test uses what it has a using-declaration for: clang-tidy, which looks at several tests as
  one file, does not see it;

and in every Python file below ROOT/python, on its syntax tree: JAX's private modules (`jax._src`,
`jaxlib._jax`) appear in python/callgate/_compat.py alone. Prints one line a violation; the exit
status is 1 when there is any.
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
  "channel": frozenset({"core"}),
  "cuda": frozenset({"core"}),
  "xla": frozenset({"core", "channel", "cuda"}),
  "bindings": frozenset({"core", "channel", "cuda", "xla"}),
}

CPP_SUFFIXES = {".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".inc"}
INCLUDE = re.compile(r"^[ \t]*#[ \t]*include(?:_next)?[ \t]*[<\"]([^>\"\n]+)[>\"]", re.MULTILINE)
PYTHON_HEADER = re.compile(r"^(Python\.h|structmember\.h|cpython/|nanobind/|numpy/|pybind11/)")
GIL = PurePosixPath("src/bindings/gil.h")
GIL_GUARD = re.compile(
  r"\bgil_scoped_(?:release|acquire)\b|\bPyEval_(?:Save|Restore)Thread\b|\bPyGILState_Ensure\b"
  r"|\bPy_BEGIN_ALLOW_THREADS\b"
)
USING = re.compile(r"^[ \t]*using (?:::)?(?:\w+::)+(\w+);", re.MULTILINE)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)

COMPAT = PurePosixPath("python/callgate/_compat.py")
# What takes a module's name as text. A logger's name, say, is none.
IMPORTERS = ("import_module", "__import__", "sys.modules.get")
PRIVATE = re.compile(r"^(jax\._src|jaxlib\._jax)(\.|$)")


def violations(root: Path) -> list[str]:
  """One line for each place below `root` that breaks the order, as `path:line: what`."""
  found: list[str] = []
  for folder in ("src", "include", "tests/cpp"):
    for path in _files(root / folder, CPP_SUFFIXES):
      found += _check_cpp(path, PurePosixPath(path.relative_to(root).as_posix()))
  for path in _files(root / "python", {".py", ".pyi"}):
    found += _check_python(path, PurePosixPath(path.relative_to(root).as_posix()))
  return found


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
  """What is wrong with including `header` in the file `name` of `layer`, or None."""
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


def _check_python(path: Path, name: PurePosixPath) -> Iterator[str]:
  if name == COMPAT:
    return
  tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
  lines = {line for line, module in _modules(tree) if PRIVATE.match(module)}
  for line in sorted(lines):
    yield f"{name}:{line}: a private module of JAX; only {COMPAT} may use one"


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
  print("\n".join(found) if found else "layers: every include points down")
  return 1 if found else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))

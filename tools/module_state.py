# SPDX-License-Identifier: Apache-2.0
"""Lists the state that the package's modules hold: docs/state.md.

    python tools/module_state.py [--check] [ROOT]

A module's state is a name at its top whose value the code changes: a container that is made empty
or that a statement changes, in its module or through it in another; a cache; `threading.local()`,
an event, a counter; an instance; a name that a `global` statement assigns anew. A lock guards state
and is none. Other values never change; `CONSTANTS` has the calls that make such, and a name in
capitals stands for one.

A comment at the state says what guards it, and of what grows, what empties it. It ends with one of

    guarded by LOCK            a lock of this module, or `other._lock` of another;
                               exceptions follow after a comma
    atomic: REASON             single steps of Python, which no other thread comes between, with
                               the GIL or without; exceptions follow after "but for"
    set once: REASON           nobody changes it later
    one thread: REASON         no other one reads or changes it
    locks itself: REASON       an instance with a lock of its own
    constant: REASON           it is no state, which the code can't say by itself

and then `; emptied by EVENT`, `; at most SIZE` or `; never emptied: REASON`. The comment stands
behind the state, or above it and the lines that follow without a gap. A thread's own values,
events, counters and caches with a bound need none; other caches need the second half alone.

With `--check` nothing is written; the exit status is 1 where a state lacks its comment, or the page
is not what the code says.
"""

from __future__ import annotations

import ast
import collections
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("python/callgate")
PAGE = Path("docs/state.md")

CONSTANTS = {
  "CDLL", "ParamSpec", "Primitive", "PYFUNCTYPE", "ShapeDtypeStruct", "ShapedArray", "TypeVar",
  "as_pointer", "attrgetter", "cast", "compile", "dtype", "frozenset", "getLogger", "getpid",
  "int32", "make_user_context", "nullcontext", "object", "partial", "tuple", "type",
}  # fmt: skip
CONTAINERS = {
  "Counter", "OrderedDict", "bytearray", "defaultdict", "deque", "dict", "fromkeys", "list", "set",
}  # fmt: skip
WEAK = {"WeakKeyDictionary", "WeakSet", "WeakValueDictionary"}
DISPLAYS = (ast.Dict, ast.DictComp, ast.List, ast.ListComp, ast.Set, ast.SetComp)
USES = (ast.AugAssign, ast.Call, ast.For, ast.Subscript, ast.comprehension)
LISTS = {"dict", "list", "set", "sorted", "tuple"}
LOCKS = {"Condition", "Lock", "RLock", "Semaphore"}
CACHES = {"cache", "clearable_cache", "lru_cache", "once"}
CHANGES = {
  "add", "append", "appendleft", "clear", "discard", "extend", "insert", "move_to_end", "pop",
  "popitem", "popleft", "remove", "setdefault", "subtract", "update",
}  # fmt: skip
# The guard of each kind that needs no comment, and what empties a kind.
GUARDED = {
  "cache": "its own lock",
  "count": "atomic: `next()` is one step",
  "event": "its own lock",
  "thread's own": "each thread has its own",
}
# The page's words for those of comments.
KINDS = {
  "atomic": "atomic",
  "set once": "set once",
  "one thread": "one thread",
  "locks itself": "its own lock",
}
EMPTIED = {
  "cell": "",
  "count": "",
  "event": "",
  "instance": "",
  "thread's own": "the thread's end",
  "weak table": "the end of its objects",
}
_ENDS = "emptied by .+|at most .+|never emptied: .+"
SAID = re.compile(
  r"(?:^|[.:;,] )(?:(?:guarded by (?P<by>[\w.]+\w)(?:, (?P<but>[^;]+))?|"
  r"(?P<kind>atomic|set once|one thread|locks itself|constant): (?P<why>[^;]+))"
  rf"(?:; (?P<ends>{_ENDS}))?|(?P<lone>{_ENDS}))$",
  re.IGNORECASE,
)


class Name(NamedTuple):
  """A name at the top of a module, with the lines of its statement and what the code makes."""

  name: str
  first: int
  last: int
  kind: str
  bound: str = ""


class State(NamedTuple):
  """A row of the page."""

  module: str
  name: str
  kind: str
  guard: str
  emptied: str


class Module:
  """A file of the package: what it imports, its locks, and the names whose values it uses."""

  def __init__(self, path: str, text: str) -> None:
    self.path, self.text, self.tree = path, text, ast.parse(text)
    parts = Path(path).with_suffix("").parts
    self.dotted = ".".join(("callgate", *(part for part in parts if part != "__init__")))
    self.locks = {name for name, value, _ in _assignments(self.tree) if _called(value) in LOCKS}
    self.imported: dict[str, str] = {}
    self.rebound: set[str] = set()  # by `global` statements
    self._used: dict[str, list[ast.expr]] = {"changed": [], "walked": [], "listed": []}
    for node in ast.walk(self.tree):
      if isinstance(node, ast.Global):
        self.rebound.update(node.names)
      elif isinstance(node, ast.ImportFrom):
        self.imported |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
      elif isinstance(node, USES):
        for how, value in _uses(node):
          self._used[how].append(value)

  def used(self, how: str) -> Iterator[tuple[str, str]]:
    """The names, with their modules, whose values are "changed", "walked" or "listed" here."""
    for value in self._used[how]:
      while isinstance(value, ast.Subscript):  # of `table[key].append(...)` the table
        value = value.value
      if isinstance(value, ast.Name):
        module, _, name = self.imported.get(value.id, f"{self.dotted}.{value.id}").rpartition(".")
        yield module, name
      elif isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
        yield self.imported.get(value.value.id, ""), value.attr

  def names(self, changed: set[tuple[str, str]]) -> Iterator[Name]:
    """Its state; `changed` has the names whose values some module changes."""
    for name, value, node in _assignments(self.tree):
      kind, bound = _kind(value, (self.dotted, name) in changed, name.isupper())
      if not kind and name in self.rebound:
        kind = "cell"
      if kind:
        yield Name(name, node.lineno, node.end_lineno or node.lineno, kind, bound)
    for node in _definitions(self.tree):
      for decorator in node.decorator_list:
        if _last(decorator.func if isinstance(decorator, ast.Call) else decorator) in CACHES:
          bound = _bound(decorator, node.args)
          yield Name(node.name, decorator.lineno, node.lineno, "cache", bound)


def _uses(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
  """The values that a node changes, goes through in steps of its own, or makes a list of."""
  if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
    yield "changed", node.value
  elif isinstance(node, ast.AugAssign):
    yield "changed", node.target
  elif isinstance(node, (ast.For, ast.comprehension)):
    yield "walked", _table(node.iter)
  elif isinstance(node, ast.Call):
    if isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
      yield "changed", node.func.value
    elif _last(node.func) in LISTS and node.args:
      yield "listed", _table(node.args[0])


def _table(value: ast.expr) -> ast.expr:
  """Returns the table of `table.items()`."""
  if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
    return value.func.value if value.func.attr in {"items", "keys", "values"} else value
  return value


def _last(node: ast.expr | None) -> str:
  """The last part of a dotted name."""
  return getattr(node, "attr", getattr(node, "id", ""))


def _called(value: ast.expr | None) -> str:
  """The name of the function of a call; of `lru_cache(...)(f)` it is that of the cache."""
  if not isinstance(value, ast.Call):
    return ""
  return _called(value.func) if isinstance(value.func, ast.Call) else _last(value.func)


def _kind(value: ast.expr | None, changed: bool, capital: bool) -> tuple[str, str]:
  """The kind of state that a value is, "" for none; and the bound of one that grows."""
  call = _called(value)
  if isinstance(value, DISPLAYS) or call in CONTAINERS:
    parts = ("keys", "elts", "generators", "args")
    if not changed and any(getattr(value, part, None) for part in parts):
      return "", ""
    kind = call or type(value).__name__.removesuffix("Comp").lower()
    limits = {
      one.arg: f"{ast.unparse(one.value)} entries" for one in getattr(value, "keywords", ())
    }
    return kind, limits.get("maxlen", "")
  if call in WEAK:
    return "weak table", ""
  if isinstance(value, ast.Call) and call in CACHES:
    return "cache", _bound(value.func if isinstance(value.func, ast.Call) else value, None)
  if not call or call in LOCKS | CONSTANTS or (capital and not changed):
    return "", ""
  return {"local": "thread's own", "count": "count", "Event": "event"}.get(call, "instance"), ""


def _bound(cache: ast.expr, of: ast.arguments | None) -> str:
  """How much a cache holds; "" for what has no bound."""
  cleared = " or `jax.clear_caches()`" if "clearable" in ast.unparse(cache) else ""
  if isinstance(cache, ast.Call) and _called(cache) != "cache":
    sizes = [*cache.args, *(each.value for each in cache.keywords)]
    return f"{ast.unparse(sizes[0])} entries{cleared}"
  lone = cache.args[0] if isinstance(cache, ast.Call) and cache.args else None
  of = lone.args if isinstance(lone, ast.Lambda) else of
  return "one entry" if of is not None and not ast.unparse(of) else ""


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
  for node in body:
    yield node
    if isinstance(node, (ast.If, ast.Try, ast.With, ast.For)):
      yield from _statements([*node.body, *getattr(node, "orelse", ())])


def _assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None, ast.stmt]]:
  for node in _statements(tree.body):
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
      for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Name) and not target.id.startswith("__"):
          yield target.id, node.value, node
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
          for one, value in zip(target.elts, node.value.elts, strict=True):
            yield _last(one), value, node


def _definitions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
  """The functions of a module, and the methods of its classes."""
  for node in _statements(tree.body):
    inner = node.body if isinstance(node, ast.ClassDef) else [node]
    yield from (one for one in inner if isinstance(one, ast.FunctionDef))


def comment(line: str) -> str:
  """The text of a line's comment. A "#" in a string counts, too, if two spaces are before it."""
  return f"  {line}".partition("  #")[2].strip()


def is_comment(line: str) -> bool:
  """True for a line at the top of a module that is a comment alone, and no heading."""
  return line.startswith("#") and not line.startswith("# --")


def said(name: Name, lines: list[str]) -> re.Match[str] | None:
  """Finds the comment on a state: behind it, or above it and the lines that follow it."""
  for line in lines[name.first - 1 : name.last]:
    if match := SAID.search(comment(line).rstrip(".")):
      return match
  above = name.first - 1  # counts the lines above
  while name.kind not in GUARDED and above and lines[above - 1].strip():
    if lines[above - 1].startswith("#"):
      break
    above -= 1
  block: list[str] = []
  while above and is_comment(lines[above - 1]):
    block.insert(0, comment(lines[above - 1]))
    above -= 1
  return SAID.search(" ".join(block).rstrip("."))


def _row(module: Module, name: Name, match: re.Match[str] | None) -> State:
  guard, ends = GUARDED.get(name.kind, ""), ""
  if match:
    ends = match["ends"] or match["lone"] or ""
    if match["by"]:
      guard = f"`{match['by']}`" + (f", {match['but']}" if match["but"] else "")
    elif match["kind"]:
      guard = f"{KINDS[match['kind'].lower()]}: {match['why'].strip()}"
  emptied = ends.removeprefix("emptied by ") or EMPTIED.get(name.kind, "")
  if name.bound:
    emptied = f"at most {name.bound}"
  return State(module.path, name.name, name.kind, guard, emptied)


def read(root: Path) -> tuple[list[State], list[str]]:
  """The state of a tree's package, and its faults."""
  top = root / PACKAGE
  modules = [
    Module(path.relative_to(top).as_posix(), path.read_text("utf-8"))
    for path in sorted(top.rglob("*.py"))
  ]
  uses = {
    how: {use for module in modules for use in module.used(how)}
    for how in ("changed", "walked", "listed")
  }
  locks = {one.dotted: one.locks for one in modules}
  rows: list[State] = []
  faults: list[str] = []
  for module in modules:
    names = sorted(module.names(uses["changed"]), key=lambda one: one.first)
    lines = module.text.splitlines()
    for name in names:
      match = said(name, lines)
      if match and (match["kind"] or "").lower() == "constant":
        continue
      rows.append(row := _row(module, name, match))
      in_steps = uses["walked"] | (uses["listed"] if name.kind == "weak table" else set())
      for fault in _faults(row, name, match, module, locks, (module.dotted, name.name) in in_steps):
        faults.append(f"{PACKAGE}/{module.path}:{name.first}: {name.name} ({name.kind}): {fault}")
  return rows, faults


def _faults(
  row: State, name: Name, match: re.Match[str] | None, module: Module,
  locks: dict[str, set[str]], in_steps: bool,
) -> Iterator[str]:  # fmt: skip
  if not row.guard:
    yield "expected a comment that says what guards it, got none"
  elif match and match["by"] and not _is_lock(match["by"], module, locks):
    yield f"expected the name of a module's lock, got {match['by']}"
  elif not row.emptied and name.kind not in EMPTIED:
    yield "expected a comment that says what empties it, got none"
  elif row.guard.startswith("atomic") and in_steps and "but for" not in row.guard:
    how = "valuerefs(), keyrefs() or `weak.members`" if name.kind == "weak table" else "list(...)"
    yield f"expected one step to go through it, by {how}, got a loop that others come between"


def _is_lock(name: str, module: Module, locks: dict[str, set[str]]) -> bool:
  """True for a lock of this module, or `other.lock` for one of another."""
  base, dot, lock = name.rpartition(".")
  if not dot:
    return lock in module.locks
  return any(lock in held for one, held in locks.items() if one.endswith(f".{base}"))


def page(rows: list[State]) -> str:
  """The page, with the counts at its top."""
  counts = collections.Counter(_guard_kind(row) for row in rows)
  lines = [HEAD, "| guard | pieces |", "|---|---|"]
  lines += [f"| {kind} | {counts[kind]} |" for kind in sorted(counts, key=lambda k: -counts[k])]
  lines += ["", "| module | name | kind | guard | emptied by |", "|---|---|---|---|---|"]
  for row in rows:
    cells = (f"`{row.module}`", f"`{row.name}`", row.kind, row.guard, row.emptied)
    lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
  return "\n".join(lines) + "\n"


def _guard_kind(row: State) -> str:
  return "a module's lock" if row.guard.startswith("`") else row.guard.partition(":")[0]


HEAD = """\
# State of the modules

This page lists the module-level names of the package whose values change while a process runs. Read
it before you add state, or debug a race. A name belongs to its module. `python
tools/module_state.py` generates the page from the code and from the comment at each name; the
tool's docstring describes these comments. A test fails if a name has no comment, if the page is
outdated, or if code iterates in steps over a table whose single steps are atomic.

- A *cell* is a name that a `global` statement reassigns.
- *A module's lock* is held for each change, and for each access of more than one step.
- An *atomic* name needs no lock, because each change and each access is a single step of Python's
  containers. Python's containers keep their steps atomic without the GIL, too.
- *Set once* names don't change later. A *one thread* name is only read and changed by that thread.
- Caches, events and a few objects have a lock of their own.
"""


def main(options: list[str]) -> int:
  folders = [Path(option) for option in options if not option.startswith("--")]
  root = folders[0] if folders else ROOT
  rows, faults = read(root)
  for fault in faults:
    print(fault)
  if "--check" not in options:
    (root / PAGE).write_text(page(rows), "utf-8")
  elif not (root / PAGE).exists() or (root / PAGE).read_text("utf-8") != page(rows):
    print(f"{PAGE} is outdated; run python tools/module_state.py")
    return 1
  return bool(faults)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))

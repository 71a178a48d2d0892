# SPDX-License-Identifier: Apache-2.0
"""docs/state.md lists all state of the package's modules, with its guard and what empties it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from project_tools import load

ROOT = Path(__file__).resolve().parents[3]
module_state = load("module_state")


def faults_of(root: Path, text: str, name: str = "planted.py") -> list[str]:
  path = root / "python" / "callgate" / name
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(textwrap.dedent(text))
  return module_state.read(root)[1]


def test_the_page_is_what_the_code_says() -> None:
  rows, faults = module_state.read(ROOT)
  assert not faults
  page = (ROOT / "docs" / "state.md").read_text("utf-8")
  assert page == module_state.page(rows), "python tools/module_state.py writes it anew"


ALLOWED = """
  import collections, functools, threading, weakref
  _lock, _SIZES = threading.Lock(), {"a": 1}
  _names = ["never", "changed"]
  # Taps by name. Guarded by _lock; emptied by `close`.
  _taps: dict[str, int] = {}
  _more = set()
  _count = 0  # atomic: one assignment
  _weak = weakref.WeakSet()  # atomic: single steps
  _newest = collections.deque(maxlen=8)  # guarded by _lock, but for a fork's child
  _local = threading.local()
  _table = {1: "a"}  # constant: only the tests change it

  @functools.lru_cache(maxsize=4)
  def cached(x): ...

  @functools.cache
  def once(): ...

  def change():
    global _count
    _count = len(_names)
    _table[2] = "b"
"""


def test_state_with_its_comments_is_listed_and_the_rest_is_not(tmp_path: Path) -> None:
  assert faults_of(tmp_path, ALLOWED) == []
  rows = module_state.read(tmp_path)[0]
  assert [(row.name, row.kind, row.guard, row.emptied) for row in rows] == [
    ("_taps", "dict", "`_lock`", "`close`"),
    ("_more", "set", "`_lock`", "`close`"),
    ("_count", "cell", "atomic: one assignment", ""),
    ("_weak", "weak table", "atomic: single steps", "the end of its objects"),
    ("_newest", "deque", "`_lock`, but for a fork's child", "at most 8 entries"),
    ("_local", "thread's own", "each thread has its own", "the thread's end"),
    ("cached", "cache", "its own lock", "at most 4 entries"),
    ("once", "cache", "its own lock", "at most one entry"),
  ]


FAULTS = {
  "_seen = {}": "what guards it",
  "_seen: list[int] = []  # by name": "what guards it",
  "_made = ['a']\ndef add(x): _made.append(x)": "what guards it",
  "_last = None\ndef keep(x):\n  global _last\n  _last = x": "what guards it",
  "_server = Server()": "what guards it",
  "_seen = {}  # atomic: single steps": "what empties it",
  "import functools\n@functools.cache\ndef size(x): ...": "what empties it",
  "_seen = {}  # guarded by _lock; emptied by `close`": "the name of a module's lock, got _lock",
  "_seen = {}  # atomic: single steps; at most 8 entries\n"
  "def total(): return sum(x for x in _seen.values())": "one step to go through it, by list(...)",
  "import weakref\n_seen = weakref.WeakSet()  # atomic: single steps\n"
  "def total(): return list(_seen)": "one step to go through it, by valuerefs()",
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_planted_fault_is_found(tmp_path: Path, text: str) -> None:
  (fault,) = faults_of(tmp_path, text)
  assert fault.startswith("python/callgate/planted.py:")
  assert FAULTS[text] in fault


def test_state_that_another_module_changes_is_found(tmp_path: Path) -> None:
  assert faults_of(tmp_path, "sizes = {'a': 1}\n", "_core/sizes.py") == []
  text = "from callgate._core import sizes\ndef grow(x): sizes.sizes[x] = 2\n"
  assert "_core/sizes.py:1: sizes (dict)" in faults_of(tmp_path, text)[0]

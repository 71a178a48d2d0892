# SPDX-License-Identifier: Apache-2.0
"""The page "What works with what": the contract's table and the counts of random programs.

`CONTRACT_WRITE=1` writes it.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys

import contract
from contract import ROWS, Row

import callgate as cg

sys.path.append(str(pathlib.Path(__file__).parents[2] / "programs"))

import counts
import page

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "what_works.md"
# A column, and the questions whose refusals it tells.
COLUMNS = {
  "under `vmap`, in loops and over devices": [
    f"values {way}" for way in ("vmap", "split lanes", "scan", "shard_map")
  ],
  "derivatives": ["grad", "grad calls"],
  "by JAX's own callbacks": ["engine", "engine scan", "engine vmap"],
  "an error is the user's, and names the line": ["error", "line", "error vmap of cond", "told"],
  "and the lane": ["error", "line", "lane", "error vmap", "error vmap of scan"],
  "is freed with its programs": ["kept", "cycle", "dropped"],
  "`jax.export`": ["export"],
  "an export in another process, once its gates are defined there": ["export", "export elsewhere"],
  "copies and pickles": ["pickle", "pickle elsewhere"],
  "a fork's child": ["fork"],
  "Ctrl-C ends a program, and the next is right": ["interrupt", "silence"],
  "equal functions are two": ["equal"],
}
# Folders whose functions no program calls, or whose rows call them by other names: `gate.start`.
NOT_NAMED = {
  "_callgate",
  "_core",
  "_explain",
  "_futures",
  "_nan",
  "_serve",
  "_stream",
  "_verify",
  "compat",
}
HEAD = """\
# What works with what

The tests ask each part below the same questions (`tests/python/contract`). All of them give the
right value and make the right number of calls outside of `jit`, in `cond`, `jit` in `jit`, ahead of
time, in threads and with 40 executions under way; so do functions that were jitted before the
import, functions that are defined again, and programs under way at the end of the process, which
ends in silence or by the error that nobody caught; and the next process finds the program in JAX's
persistent cache. Where the answer to another question is no, the
table says why.

"""


def _cell(row: Row, questions: list[str]) -> str:
  if not row.tells and "error" in questions:
    return row.refuses.get("told", "the program goes on; `cg.errors()` raises")
  said = dict.fromkeys(row.refuses[q] for q in questions if q in row.refuses)
  return "; ".join(said) or "yes"


def _page() -> str:
  lines = [f"| part | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
  for name, row in ROWS.items():
    cells = (_cell(row, questions) for questions in COLUMNS.values())
    lines.append(f"| {name} | {' | '.join(cells)} |")
  return HEAD + "\n".join(lines) + "\n" + page.section(counts.read(counts.FILE))


def test_the_page_is_the_tables() -> None:
  if os.environ.get("CONTRACT_WRITE"):
    PAGE.write_text(_page(), "utf-8")
  assert PAGE.read_text("utf-8") == _page()


def test_each_refusal_is_in_the_table() -> None:
  asked = {question for questions in COLUMNS.values() for question in questions}
  assert {question for row in ROWS.values() for question in row.refuses} <= asked


def test_each_folder_with_public_names_has_a_row() -> None:
  text = pathlib.Path(contract.__file__).read_text("utf-8")
  folders = {name: module.split(".")[1] for name, module in cg._names.MODULES.items()}
  asked = {folder for name, folder in folders.items() if re.search(rf"\bcg\.{name}\(", text)}
  missing = set(folders.values()) - asked - NOT_NAMED
  assert not missing, f"no row of tests/python/support/contract.py makes anything of {missing}"
  assert set(folders.values()) - asked >= NOT_NAMED

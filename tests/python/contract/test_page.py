# SPDX-License-Identifier: Apache-2.0
"""The page "What works with what": the contract's table and the counts of random programs.

The environment variable `CONTRACT_WRITE=1` writes the page.
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
# Each column of the page with the questions whose refusals it shows.
COLUMNS = {
  "under `vmap`, in loops and over devices": [
    f"values {way}" for way in ("vmap", "split lanes", "scan", "shard_map")
  ],
  "derivatives": ["grad", "grad calls"],
  "`config(engine='jax')`": ["engine", "engine scan", "engine vmap"],
  "the user's exception, with the line": ["error", "line", "error vmap of cond", "told"],
  "with the lane": ["error", "line", "lane", "error vmap", "error vmap of scan"],
  "freed with its programs": ["kept", "cycle", "dropped"],
  "`jax.export`": ["export"],
  "an export in another process that defines its gates": ["export", "export elsewhere"],
  "copy, pickle": ["pickle", "pickle elsewhere"],
  "a fork's child": ["fork"],
  "Ctrl-C, then the next program": ["interrupt", "silence"],
  "equal functions stay apart": ["equal"],
}
# Folders without functions that programs call, or whose rows use other names, as `gate.start`.
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
# The questions whose refusals are messages, with which the tests compare.
QUOTED = {"grad", "export", "export elsewhere", "pickle", "pickle elsewhere", "fork"}
HEAD = """\
# What works with what

This page lists which combinations of callgate's parts, JAX's transformations and process boundaries
work. The tests (`tests/python/contract`) ask the same questions about every part and generate this
table. A cell is "yes", or the reason for a "no". A reason after "raises" quotes the error message.

Every part gives correct values and the correct number of calls in these cases, which the table
leaves out:

- outside `jit`, in `cond`, with `jit` in `jit`, and compiled ahead of time;
- in several threads, and with 40 executions in flight;
- in functions that were jitted before callgate was imported, and in functions that are redefined;
- at the end of the process: programs in flight finish without an error, or end with their uncaught
  exception;
- in the next process, which finds the program in JAX's persistent cache.

"""


def _cell(row: Row, questions: list[str]) -> str:
  if not row.tells and "error" in questions:
    return row.refuses.get("told", "the program continues; `cg.errors()` raises")
  said = dict.fromkeys(
    f"raises `{row.refuses[q]}`" if q in QUOTED else row.refuses[q]
    for q in questions
    if q in row.refuses
  )
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

# SPDX-License-Identifier: Apache-2.0
"""The tables of random programs in the documentation, made from `counts.json`."""

from __future__ import annotations

import itertools
import re

from counts import Counts, Refusal
from refusals import REFUSALS

# Each row with a pattern of the part names that it counts, without their effect.
ROWS = {
  "`gate`": "gate( from several places)?",
  "`gate`, `style='inplace'`": "gate inplace.*",
  "`gate`, `vmap='whole'`": "gate whole.*|gate inplace whole.*|broadcast",
  "`gate`, `run_on=` threads, executors": ".* on (its own|a named) thread|.* on an executor",
  "`gate` with a derivative of its own": "trees (jvp|vjp)|differences|.*rule.*",
  "`gate`, `run_on=` workers": "in workers",
  "`gate`, other options": "",  # the rows of FORMS that no other row counts
  "`gate.start`, `gate.result`": "start|result|tickets",
  "`call`": "call",
  "`tap`": "tap",
  "`tap`, `ordered=True`": "tap ordered.*",
  "`tap` to a channel": "tap( where)? to a channel.*",
  "`tap`, `where=`": "tap where.*",
  "`tap`, `every=`, of lanes": "tap every|tap of lanes.*",
  "`tap` in the flow of data": "tap dataflow.*",
  "`print`": "print",
  "`check`": "check.*",
  "`breakpoint`": "breakpoint",
  "`hold`, `use`": "hold|use|handles|.*object.*",
  "`find_nan`": "find_nan",
  "`knob`": "knob",
  "`feed`": "feed.*",
  "kernels": "kernel.*|elementwise.*|numba.*|C kernel.*",
  "`torch`": "torch",
  "environments": "envs",
  "`root`, `linear_solver`": "root.*|linear_solver.*",
  "`scan`, `fori_loop`, `while_loop`": r"cg\..*",
  "`stop`": "stop",
  "JAX's callbacks under `install`": "install.*",
  "`buffer_callback`, `host_callback`": "buffer_callback|id_tap.*|call of 2023",
}
# Each column with a pattern of the transformations around a part, or ways to run it.
COLUMNS = {
  "`jit`": "jit.*|way: (jit|ahead of time|donated|caches cleared|tracer leaks|check_writes)",
  "no `jit`": "way: (without jit|disable_jit)",
  "`scan`, `fori_loop`, `map`": "scan.*|fori_loop|map|associative_scan.*|way: scan around",
  "`while_loop`": "while",
  "`cond`, `switch`": "cond|switch",
  "`vmap`": "vmap|way: vmap around",
  "collectives": "psum|pmean|pmax|pmin|all_gather|ppermute|all_to_all|.*collective.*",
  "`grad`, `vjp`": "grad|value_and_grad|vjp.*|way: grad around",
  "`jvp`, `linearize`": "jvp|linearize",
  "`hessian`": "hessian",
  "`checkpoint`": "remat.*|way: remat3",
  "custom rules": "custom.*",
  "refs": "ref",
  "`shard_map`": "shard_map|way: (partial )?shard_map around",
  "sharded arrays": "way: (replicated|sharded|uneven|explicit.*)",
  "`export`": "way: exported.*",
  "next process": "way: (persistent cache|jitted before the import)",
  "threads": "way: (two threads|two programs.*|threads in a hurry|forty under way)",
  "a call raises": "way: an error.*",
  "Ctrl-C": "way: interrupted",
  "recorded, resumed": "way: (recorded|resumed)",
  "JAX's engine": "way: (engine jax|cg.install|debug_nans)",
  "`verify`, `find_nan`": "way: (verified|find_nan)",
}
HEAD = """
## Random programs

`make programs` generates random programs from these parts and JAX's transformations. It compares
values, derivatives, the number and order of calls, and leftover objects with an interpreter in
NumPy. A cell counts the correct programs with the part inside the transformation, or run in that
way: on one device, and after `+` on several devices. {programs} programs were correct: {versions}.
Refused programs don't count; the next table lists the refusals.

"""
REFUSED = """
callgate or JAX refused some programs, with these messages:

| message | reason | programs | common to all of them |
|---|---|---|---|
"""


def section(counts: Counts) -> str:
  """The section as Markdown."""
  versions = ", ".join(f"{n:,} on JAX {jax}" for jax, n in sorted(counts.programs.items()))
  lines = [f"| part | {' | '.join(COLUMNS)} |", "|---" + "|---:" * len(COLUMNS) + "|"]
  for row, column_counts in table(counts).items():
    lines.append(f"| {row} | {' | '.join(map(_cell, column_counts))} |")
  refused = [
    f"| {_words(words)} | {REFUSALS[words]} | {refusal.programs} | {_have(refusal)} |"
    for words, refusal in sorted(counts.refusals.items())
  ]
  head = HEAD.format(programs=f"{sum(counts.programs.values()):,}", versions=versions)
  return head + "\n".join(lines) + "\n" + REFUSED + "\n".join(refused) + "\n"


def table(counts: Counts) -> dict[str, list[tuple[int, int]]]:
  """For each row its columns' programs, on one device and over several."""
  made = {row: [(0, 0)] * len(COLUMNS) for row in ROWS}
  for part, by_transformation in counts.cells.items():
    row = made[row_of(part)]
    for (transformation, (one, more)), (i, pattern) in itertools.product(
      by_transformation.items(), enumerate(COLUMNS.values())
    ):
      if re.fullmatch(pattern, transformation):
        row[i] = row[i][0] + one, row[i][1] + more
  return made


def row_of(part: str) -> str:
  """The row that counts a part; each has one."""
  part = part.removesuffix(" of two")
  plain = part if part.startswith("tap") else re.sub(r" (io|ordered)\b", "", part)
  rows = [row for row, pattern in ROWS.items() if re.fullmatch(pattern, plain)]
  return rows[-1] if rows else "`gate`, other options"


def _cell(counts: tuple[int, int]) -> str:
  one, more = counts
  return f"{one:,} + {more:,}" if more else f"{one:,}" if one else ""


def _words(words: str) -> str:
  plain = words.removeprefix("(?s)").replace(".*", " ... ")
  return "`" + re.sub(r"\\d\+", "N", plain).replace("\\", "") + "`"


def _have(refusal: Refusal) -> str:
  if refusal.programs < 5:  # chance says more than the cause
    return ""
  return ", ".join(name.removeprefix("way: ") for name in sorted(refusal.have))

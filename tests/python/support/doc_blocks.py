# SPDX-License-Identifier: Apache-2.0
"""Runs the Python blocks of a documentation page, in order, in one namespace.

    python doc_blocks.py PAGE FOLDER [--gpu | --lower | --write]

A block that `<!-- output -->` and a block of text follow prints that text; --write puts there what
it prints now.
A block that needs a CUDA device has `<!-- gpu -->` on the line before it, or
`<!-- gpu: NAME, ... -->` where it needs modules too. Without --gpu such blocks are compiled only;
with it they alone run, with `cg`, `jax`, `jnp` and `np` there, and those whose modules are missing
are named; other blocks say `<!-- needs: NAME, ... -->`. --lower runs them where there is no device:
jitted functions are lowered for CUDA, which compiles their kernels, and give zeros; what is
asserted is computed and not looked at. The page's code is written to FOLDER as one file with the
page's line numbers, since compilers such as Triton's read a function's source.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib.util
import io
import os
import pathlib
import re
import textwrap
from typing import Any

_BLOCK = re.compile(
  r"^(?P<indent>[ ]*)(?P<file><!-- file: [^\n]+ -->\n)?"
  r"(?:<!-- (?:gpu|needs)(?P<modules>:[^\n]*)? -->\n\s*)?"
  r"```python\n(?P<code>.*?)^[ ]*```"
  r"(?:\n\n<!-- output -->\n```text\n(?P<output>.*?)^```)?",
  re.MULTILINE | re.DOTALL,
)
_IMPORTS = "import callgate as cg, jax, jax.numpy as jnp, numpy as np"
_GPU = re.compile(r"^[ ]*<!-- gpu")


@dataclasses.dataclass(frozen=True)
class Block:
  """A Python block of a page.

  Attributes:
    line: of its first statement, from 1.
    code: without the block's indentation.
    gpu: whether it needs a CUDA device.
    modules: what it imports that may be missing.
    output: what it prints, where the page shows that.
    shown: from where to where in the page.
  """

  line: int
  code: str
  gpu: bool
  modules: tuple[str, ...]
  output: str | None
  shown: tuple[int, int]


def blocks(text: str) -> list[Block]:
  """The Python blocks of a page, in order, without files (`--8<--`, and after `<!-- file: -->`)."""
  found: list[Block] = []
  for match in _BLOCK.finditer(text):
    if match["file"] or match["code"].lstrip().startswith("--8<--"):
      continue
    named = (match["modules"] or "").removeprefix(":").split(",")
    found.append(
      Block(
        line=text.count("\n", 0, match.start("code")) + 1,
        code=textwrap.dedent(match["code"]),
        gpu=_GPU.match(match[0]) is not None,
        modules=tuple(name.strip() for name in named if name.strip()),
        output=match["output"],
        shown=match.span("output"),
      )
    )
  return found


def run(
  page: pathlib.Path, folder: pathlib.Path, *, gpu: bool, lower: bool = False, write: bool = False
) -> None:
  """Runs a page's blocks.

  Args:
    page: the Markdown file.
    folder: where its code is written as a file.
    gpu: whether those for CUDA devices run, in place of the others.
    lower: whether these are lowered only.
    write: whether the page gets what its blocks print.
  """
  text = page.read_text(encoding="utf-8")
  found, printed = blocks(text), dict[Block, str]()
  path = folder / f"{page.stem}_blocks.py"
  path.write_text(_as_file(found), encoding="utf-8")
  namespace: dict[str, Any] = {"__name__": "__main__"}
  if gpu:
    exec(_IMPORTS, namespace)
  if lower:
    namespace["cg"].gate(lambda x: x, out=lambda x: x)  # the first one looks at JAX's own `jit`
    _lower_jitted(namespace["jax"])
  for block in found:
    tree = ast.parse("\n" * (block.line - 1) + block.code, str(path))
    if lower:
      tree = ast.fix_missing_locations(_WithoutAsserts().visit(tree))
    code = compile(tree, str(path), "exec")
    if block.gpu != gpu:
      continue
    if missing := [name for name in block.modules if not _has(name, runs=gpu and not lower)]:
      print(f"{page.name}:{block.line}: skipped, since there is no {', '.join(missing)}")
      continue
    if block.output is None:
      exec(code, namespace)
      continue
    with contextlib.redirect_stdout(io.StringIO()) as out:
      exec(code, namespace)
    printed[block] = out.getvalue()
    said = f"{page.name}:{block.line}: the page shows\n{block.output}the block prints\n"
    assert write or printed[block] == block.output, said + printed[block]
  if write:
    for block, own in reversed(printed.items()):
      text = text[: block.shown[0]] + own + text[block.shown[1] :]
    page.write_text(text, encoding="utf-8")


class _WithoutAsserts(ast.NodeTransformer):
  """Leaves what is asserted, as a statement."""

  def visit_Assert(self, node: ast.Assert) -> ast.Expr:
    return ast.copy_location(ast.Expr(node.test), node)


class _Lowered:
  """In place of a jitted function: a call lowers it for CUDA."""

  def __init__(self, jitted: Any) -> None:
    self._jitted = jitted

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    import jax
    import numpy as np

    lowered = self._jitted.trace(*args, **kwargs).lower(lowering_platforms=("cuda",))
    called = sorted(set(re.findall(r"@(callgate\.[\w.]+)", lowered.as_text())))
    print(f"lowered, calls {', '.join(called)}")
    return jax.tree.map(lambda info: np.zeros(info.shape, info.dtype), lowered.out_info)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._jitted, name)


def _lower_jitted(jax: Any) -> None:
  jit = jax.jit

  def lowering(fun: Any = None, /, **options: Any) -> Any:
    return (
      (lambda fun: _Lowered(jit(fun, **options))) if fun is None else _Lowered(jit(fun, **options))
    )

  jax.jit = lowering


def _as_file(found: list[Block]) -> str:
  lines: list[str] = []
  for block in found:
    lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
  return "\n".join(lines) + "\n"


def _has(module: str, *, runs: bool) -> bool:
  try:
    there = importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:  # a parent of it
    return False
  if not there or not runs:
    return there
  if module == "cuda.core":  # its block launches machine code, which the virtual GPU does not run
    return "VIRTUAL_GPU" not in os.environ
  if module == "torch":
    import torch

    return torch.cuda.is_available()  # PyTorch's build for the CPU has none
  return True


if __name__ == "__main__":
  parser = argparse.ArgumentParser()
  parser.add_argument("page", type=pathlib.Path)
  parser.add_argument("folder", type=pathlib.Path)
  which = parser.add_mutually_exclusive_group()
  which.add_argument("--gpu", action="store_true")
  which.add_argument("--lower", action="store_true")
  which.add_argument("--write", action="store_true")
  given = parser.parse_args()
  run(given.page, given.folder, gpu=given.gpu or given.lower, lower=given.lower, write=given.write)

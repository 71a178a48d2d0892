# SPDX-License-Identifier: Apache-2.0
"""A C++ compiler that has read the headers of kernels: two thirds of a small kernel's compilation.

`use()` names it in CXX, for this process and those that it starts. Another compiler than GCC is
left as it is, and so are compilations with other options than those of most kernels here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from callgate._build import toolchain
from callgate._core.errors import CompileError
from callgate._kernel.elementwise import elementwise

_BUILD = Path(__file__).parents[3] / "build"
_GIVEN = "CALLGATE_TEST_CXX"  # CXX as it was before `use()`
_FLAGS = (*toolchain._ALWAYS, *toolchain.DEFAULT_FLAGS)
# Flags that a kernel may add: GCC takes compiled headers with no other flags than theirs.
_ADDED = tuple((*family, *level) for family in ((), elementwise._FLAGS) for level in ((), ("-O0",)))


def use() -> None:
  if _GIVEN in os.environ:  # a parent process has
    return
  try:
    command = toolchain.compiler()
  except CompileError:
    return
  said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
  if "Free Software Foundation" not in said:
    return
  own = (str(toolchain.include_dir()), toolchain.headers_digest("*.h"))
  made_of = (command, said, toolchain.cpu(), _FLAGS, _ADDED, own)
  key = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
  folder = _BUILD / "quick-cpp" / key
  if not folder.exists():
    try:
      _make(command, folder)
    except (OSError, subprocess.CalledProcessError):
      return
  os.environ[_GIVEN] = os.environ.get("CXX", "")
  os.environ["CXX"] = shlex.join([*command, "-include", str(folder / "headers.h")])


def plain() -> str:
  """CXX for what is about headers as users have them."""
  if _GIVEN not in os.environ:
    return shlex.join(toolchain.compiler())
  return os.environ[_GIVEN] or toolchain.compiler()[0]


def _make(command: list[str], folder: Path) -> None:
  from callgate._kernel.cpp import cpp

  folder.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=folder.parent) as made:
    header = Path(made) / "made" / "headers.h"
    compiled = header.with_suffix(".h.gch")
    compiled.mkdir(parents=True)
    standard = "".join(f"#include <{name}>\n" for name in cpp._HEADERS)
    header.write_text(standard)  # which GCC reads where it takes no compiled headers
    source = Path(made) / "compiled.h"
    source.write_text(f'{standard}#include "callgate/kernel.h"\n')
    include = f"-I{toolchain.include_dir()}"
    for number, added in enumerate(_ADDED):
      to = ("-x", "c++-header", str(source), "-o", str(compiled / str(number)))
      subprocess.run([*command, *_FLAGS, include, *added, *to], check=True)
    with contextlib.suppress(OSError):  # another process was quicker
      header.parent.rename(folder)

# SPDX-License-Identifier: Apache-2.0
"""The compilers of tests: C++'s has read the headers of kernels, Numba's optimises little."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quick_cpp

import callgate as cg
from callgate._build import toolchain

CPP = "void same(cg::In<float, 1> x, cg::Out<float, 1> y) { y[0] = x[0]; }"
KERNELS: dict[str, Callable[..., Any]] = {
  "elementwise": lambda **options: cg.elementwise("T x", "T z", "z = x", **options),
  "cpp": lambda **options: cg.cpp(CPP, out=lambda x: x, **options),
}


@pytest.mark.parametrize("flags", [(), ("-O0",)])
@pytest.mark.parametrize("kind", KERNELS)
def test_kernels_take_the_compiled_headers(
  kind: str, flags: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  if quick_cpp._GIVEN not in os.environ:
    pytest.skip("another compiler than GCC")
  said = tmp_path / "said"
  compiler = tmp_path / "compiler"  # says which headers it reads
  command = shlex.join([*toolchain.compiler(), "-H"])
  compiler.write_text(f'#!/bin/sh\nexec {command} "$@" 2>> {said}\n')
  compiler.chmod(0o700)
  monkeypatch.setenv("CXX", str(compiler))
  monkeypatch.setenv("CALLGATE_CACHE_DIR", str(tmp_path / "cache"))
  x = np.ones(1, np.float32)
  np.testing.assert_array_equal(KERNELS[kind](flags=flags)(x), x)
  read = said.read_text().splitlines()
  assert [line for line in read if line.startswith("! ") and "headers.h.gch" in line], read
  # callgate's own headers are in the compiled ones.
  assert not [line for line in read if "kernel" in Path(line).name], read


@pytest.mark.skipif(os.environ.get("CALLGATE_TEST_XLA") != "quick", reason="XLA optimises, too")
def test_numba_optimises_as_little_as_xla() -> None:
  numba = pytest.importorskip("numba")
  assert int(numba.config.OPT) == int(os.environ["NUMBA_OPT"])

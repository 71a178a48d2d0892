# SPDX-License-Identifier: Apache-2.0
"""Shared libraries of kernels for the tests, built as a user would: the compiler and a header."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
import quick_cpp

import callgate as cg
from callgate._build import toolchain

WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror")

KERNELS = """
#include <complex>
#include <stdexcept>
#include <string>
#include "callgate/kernel.h"

void saxpy(float a, cg::In<float, 1> x, cg::In<float, 1> y, cg::Out<float, 1> z) {
  for (int64_t i = 0; i < x.size(); ++i) z[i] = a * x[i] + y[i];
}
CALLGATE_KERNEL(saxpy, a, x, y, z);

void matmul(cg::In<float, 2> a, cg::In<float, 2> b, cg::Out<float, 2> c) {
  for (int64_t i = 0; i < c.extent(0); ++i)
    for (int64_t j = 0; j < c.extent(1); ++j) {
      c(i, j) = 0;
      for (int64_t k = 0; k < b.extent(0); ++k) c(i, j) += a(i, k) * b(k, j);
    }
}
CALLGATE_KERNEL(matmul)

void histogram(cg::In<float> x, cg::Out<int32_t, 1> counts) {
  for (int32_t& count : counts) count = 0;
  for (float value : x) ++counts[int64_t(value)];
}
CALLGATE_KERNEL(histogram, x, counts);

void total(cg::In<float> x, cg::Out<float, 0> sum, cg::Out<float, 0> greatest) {
  sum() = greatest() = 0;
  for (float value : x) sum() += value, greatest() = value > greatest() ? value : greatest();
}
CALLGATE_KERNEL(total, x, sum, greatest);

void add(cg::Ins<float> xs, cg::Out<float> y) {
  for (int64_t i = 0; i < y.size(); ++i) y[i] = 0;
  for (int k = 0; k < xs.size(); ++k)
    for (int64_t i = 0; i < y.size(); ++i) y[i] += xs[k][i];
}
CALLGATE_KERNEL(add, xs, y);

void split(cg::In<float, 1> x, cg::Outs<float, 1> parts) {
  for (int64_t k = 0, i = 0; k < parts.size(); ++k)
    for (float& value : parts[int(k)]) value = x[i++];
}
CALLGATE_KERNEL(split, x, parts);

void shift(cg::Attr<int32_t> by, cg::InOut<int32_t, 1> x) {
  for (int32_t& value : x) value += by;
}
CALLGATE_KERNEL(shift, by, x);

void refuse(cg::In<float> x, cg::Out<float> y) {
  for (int64_t i = 0; i < x.size(); ++i) {
    if (x[i] < 0) throw std::domain_error("x[" + std::to_string(i) + "] is negative");
    y[i] = x[i];
  }
}
CALLGATE_KERNEL(refuse, x, y);

// Names that attributes of cg.Library have, too.
void path(cg::In<std::complex<float>> x, cg::Out<std::complex<float>> y) {
  for (int64_t i = 0; i < x.size(); ++i) y[i] = x[i] * x[i];
}
CALLGATE_KERNEL(path, x, y);
"""


def build(folder: Path, name: str, source: str, *flags: str) -> Path:
  """Builds `folder/lib<name>.so`; flags are the user's own."""
  try:
    compiler = shlex.split(quick_cpp.plain())
  except cg.CompileError as error:
    pytest.skip(str(error))
  unit, made = folder / f"{name}.cc", folder / f"lib{name}.so"
  unit.write_text(source)
  command = [*compiler, "-shared", "-fPIC", f"-I{toolchain.include_dir()}", *flags]
  done = subprocess.run(
    [*command, str(unit), "-o", str(made)], capture_output=True, text=True, timeout=120
  )
  assert done.returncode == 0, done.stderr
  return made

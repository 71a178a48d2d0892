# SPDX-License-Identifier: Apache-2.0
"""Stubs of what XLA's plugin may look up in NVIDIA's libraries: python stubs.py PLUGIN.so OUT

For each library a file of weak functions that say their name once and answer "not supported". What
the library's own sources define goes before them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# The library's file, the names that are its, and its number for "not supported".
LIBRARIES = {
  "cuda": (r"cu[A-Z][A-Za-z0-9]{3,}(_v\d|_ptsz|_ptds)*", 801),
  "cudart": (r"(__)?cuda[A-Z]\w+", 801),
  "cudnn": (r"cudnn[A-Z]\w+", 3000),
  "nvml": (r"nvml[A-Z]\w+", 3),
  "nccl": (r"p?nccl[A-Z]\w+", 5),
}
# Of the form of the driver's names, and none of them.
NOT_THE_DRIVERS = ("cuBlas", "cuDNN", "cuFFT", "cuSolver", "cuSparse", "cuRAND", "cuTensor")


def main(plugin: Path, out: Path) -> None:
  words = {word.decode() for word in re.findall(rb"[\x20-\x7e]{4,}", plugin.read_bytes())}
  out.mkdir(parents=True, exist_ok=True)
  for library, (pattern, status) in LIBRARIES.items():
    names = sorted(word for word in words if re.fullmatch(pattern, word))
    names = [name for name in names if not name.startswith(NOT_THE_DRIVERS)]
    lines = [
      "#include <cstdio>",
      "namespace {",
      "int unsupported(const char* name, bool& said) {",
      '  if (!said) std::fprintf(stderr, "virtual GPU: %s is not supported\\n", name);',
      "  said = true;",
      f"  return {status};",
      "}",
      "}  // namespace",
    ]
    lines += [
      f'extern "C" __attribute__((weak, visibility("default"))) int {name}() '
      f'{{ static bool said; return unsupported("{name}", said); }}'
      for name in names
    ]
    text = "\n".join(lines) + "\n"
    file = out / f"{library}_stubs.cc"
    if not file.exists() or file.read_text() != text:
      file.write_text(text)


if __name__ == "__main__":
  main(Path(sys.argv[1]), Path(sys.argv[2]))

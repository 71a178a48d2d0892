"""Writes the licences of what is compiled into the module, for the wheel.

    python tools/third_party_licenses.py XLA_INCLUDE OUTPUT

The texts are those of the packages that this build uses: nanobind, which is linked in, with its
hash table, and NumPy's and XLA's headers. Nothing of them lies in this repository.
"""

import importlib.metadata
import re
import sys
from pathlib import Path


def of_package(name: str) -> str:
  """The licence that an installed package brings; of several texts in one file the first."""
  files = importlib.metadata.files(name) or []
  (file,) = [f for f in files if f.parent.name == "licenses" and f.stem == "LICENSE"]
  return re.split(r"^-{4,}$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[0].strip()


def of_header(path: Path) -> str:
  """The comment that a header begins with."""
  comment = re.match(r"\s*/\*(.*?)\*/", path.read_text(encoding="utf-8"), re.DOTALL)
  if comment is None:
    raise ValueError(f"{path}: expected a licence in a comment at its beginning")
  lines = [re.sub(r"^ ?\*+ ?", "", line).rstrip() for line in comment[1].splitlines()]
  return "\n".join(line for line in lines if not line.startswith("=====")).strip()


def main(xla: str, output: str) -> None:
  nanobind = importlib.metadata.distribution("nanobind")
  (table,) = [f for f in nanobind.files or [] if f.name == "robin_map.h"]
  parts = {
    f"nanobind {nanobind.version}": of_package("nanobind"),
    "robin-map, part of nanobind": of_header(Path(nanobind.locate_file(table))),
    "NumPy's C headers": of_package("numpy"),
    "XLA's FFI headers": of_header(Path(xla) / "xla" / "ffi" / "api" / "ffi.h"),
  }
  rule = "=" * 80
  intro = (
    "The module callgate._callgate holds compiled parts of these projects, under these licences."
  )
  text = "\n\n".join([intro, *(f"{rule}\n{name}\n{rule}\n\n{own}" for name, own in parts.items())])
  Path(output).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
  main(*sys.argv[1:])

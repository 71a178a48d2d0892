# SPDX-License-Identifier: Apache-2.0
"""Writes what is compiled into the module, for the wheel's metadata: licences, and an SBOM.

    python tools/third_party.py VERSION XLA_INCLUDE OUTPUT

VERSION is callgate's. Into the folder OUTPUT go licenses/THIRD_PARTY_LICENSES.txt, and
sboms/callgate.cdx.json, in CycloneDX's format, where PEP 770 has it. The texts are those of the
packages that this build uses: nanobind, which is linked in, with its hash table, and NumPy's and
XLA's headers. Nothing of them lies in this repository.
"""

import dataclasses
import importlib.metadata
import json
import re
import sys
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Part:
  """A project whose code is compiled in, with its licence: SPDX's name, and the text."""

  name: str
  version: str  # "" where it tells none
  url: str  # a package's, as SBOMs write them
  spdx: str
  text: str
  note: str = ""


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


def parts(xla: Path) -> list[Part]:
  nanobind, numpy = map(importlib.metadata.distribution, ("nanobind", "numpy"))
  (table,) = [f for f in nanobind.files or [] if f.name == "robin_map.h"]
  jaxlib = xla.parent / "jaxlib-version"
  headers = jaxlib.read_text("utf-8").strip() if jaxlib.is_file() else ""
  return [
    Part(
      *("nanobind", nanobind.version, "pkg:pypi/nanobind", "BSD-3-Clause"),
      of_package("nanobind"),
    ),
    Part(
      *("robin-map", "", "pkg:github/Tessil/robin-map", "MIT"),
      of_header(Path(str(nanobind.locate_file(table)))),
      "part of nanobind",
    ),
    Part(
      *("numpy", numpy.version, "pkg:pypi/numpy", "BSD-3-Clause"),
      of_package("numpy"),
      "C headers",
    ),
    Part(
      *("xla", headers, "pkg:pypi/jaxlib", "Apache-2.0"),
      of_header(xla / "xla" / "ffi" / "api" / "ffi.h"),
      "FFI headers, as jaxlib has them",
    ),
  ]


def licenses(found: list[Part]) -> str:
  rule = "=" * 80
  intro = (
    "The module callgate._callgate holds compiled parts of these projects, under these licences."
  )
  titles = [" ".join(filter(None, (part.name, part.version))) for part in found]
  notes = [f" ({part.note})" if part.note else "" for part in found]
  texts = (
    f"{rule}\n{title}{note}\n{rule}\n\n{part.text}"
    for title, note, part in zip(titles, notes, found, strict=True)
  )
  return "\n\n".join([intro, *texts]) + "\n"


def sbom(version: str, found: list[Part]) -> str:
  def component(part: Part) -> dict[str, object]:
    at = f"@{part.version}" if part.version else ""
    about: dict[str, object] = {"type": "library", "name": part.name, "purl": part.url + at}
    about |= {"version": part.version} if part.version else {}
    about |= {"description": part.note} if part.note else {}
    return about | {"licenses": [{"license": {"id": part.spdx}}]}

  own = Part("callgate", version, "pkg:pypi/callgate", "Apache-2.0", "")
  whole = {
    "bomFormat": "CycloneDX",
    "specVersion": "1.6",
    "version": 1,
    "metadata": {"component": component(own)},
    "components": [component(part) for part in found],
  }
  return json.dumps(whole, indent=2) + "\n"


def main(version: str, xla: str, output: str) -> None:
  found = parts(Path(xla))
  for file, text in (
    ("licenses/THIRD_PARTY_LICENSES.txt", licenses(found)),
    ("sboms/callgate.cdx.json", sbom(version, found)),
  ):
    path = Path(output) / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
  main(*sys.argv[1:])

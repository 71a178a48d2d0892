# SPDX-License-Identifier: Apache-2.0
"""The projects whose code is compiled into the module: their licenses, and an SBOM of them.

    python tools/third_party.py sbom VERSION XLA_INCLUDE OUTPUT   # OUTPUT/sboms/callgate.cdx.json
    python tools/third_party.py licenses XLA_INCLUDE              # rewrites packaging/licenses

VERSION is callgate's. The SBOM is in CycloneDX's format, where PEP 770 has it; CMake writes it when
it builds a wheel. The texts in packaging/licenses are those of the packages of the build: nanobind,
which is linked in, with its hash table, and NumPy's and XLA's headers. `license-files` in
pyproject.toml lists them, so that they are in wheels and source archives. A test compares them with
the installed packages; after a change `licenses` writes them anew.
"""

import dataclasses
import importlib.metadata
import json
import re
import sys
from pathlib import Path

LICENSES = Path(__file__).resolve().parent.parent / "packaging" / "licenses"


@dataclasses.dataclass(frozen=True)
class Part:
  """A project whose code is compiled in, with its license: SPDX's name, and the text."""

  name: str
  version: str  # "" where it tells none
  url: str  # a package's, as SBOMs write them
  spdx: str
  text: str
  note: str = ""


def of_package(name: str) -> str:
  """The license that an installed package brings; of several texts in one file the first."""
  files = importlib.metadata.files(name) or []
  (file,) = [f for f in files if f.parent.name == "licenses" and f.stem == "LICENSE"]
  return re.split(r"^-{4,}$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[0].strip()


def of_header(path: Path) -> str:
  """The comment that a header begins with."""
  comment = re.match(r"\s*/\*(.*?)\*/", path.read_text(encoding="utf-8"), re.DOTALL)
  if comment is None:
    raise ValueError(f"{path}: expected a license in a comment at its beginning")
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


def zig_parts(zig: Path) -> list[Part]:
  """The parts that zig's compiler, in the folder `zig`, links into wheels of tools/portable.py."""
  library = zig / "lib" / "libcxx"
  config = (library / "include" / "__config").read_text("utf-8")
  major, minor, patch = re.search(r"_LIBCPP_VERSION (\d\d)(\d\d)(\d\d)\b", config).groups()
  release = importlib.metadata.version("ziglang")
  return [
    Part(
      *("libcxx", f"{int(major)}.{int(minor)}.{int(patch)}", "pkg:github/llvm/llvm-project"),
      "Apache-2.0 WITH LLVM-exception",
      (library / "LICENSE.TXT").read_text("utf-8").strip(),
      "libc++ and libc++abi, linked in",
    ),
    Part(
      *("zig", release, "pkg:pypi/ziglang", "MIT"),
      (zig / "LICENSE").read_text("utf-8").strip(),
      "compiler-rt, linked in",
    ),
  ]


def component(part: Part) -> dict[str, object]:
  """A part as an SBOM lists it."""
  at = f"@{part.version}" if part.version else ""
  about: dict[str, object] = {"type": "library", "name": part.name, "purl": part.url + at}
  about |= {"version": part.version} if part.version else {}
  about |= {"description": part.note} if part.note else {}
  compound = " " in part.spdx
  license = {"expression": part.spdx} if compound else {"license": {"id": part.spdx}}
  return about | {"licenses": [license]}


def sbom(version: str, found: list[Part]) -> str:
  own = Part("callgate", version, "pkg:pypi/callgate", "Apache-2.0", "")
  whole = {
    "bomFormat": "CycloneDX",
    "specVersion": "1.6",
    "version": 1,
    "metadata": {"component": component(own)},
    "components": [component(part) for part in found],
  }
  return json.dumps(whole, indent=2) + "\n"


def add_to_wheel(unpacked: Path, found: list[Part]) -> None:
  """Adds parts to the metadata of a wheel that lies unpacked in a folder."""
  (info,) = unpacked.glob("*.dist-info")
  metadata = (info / "METADATA").read_text("utf-8")
  for part in found:
    name = f"packaging/licenses/{part.name}.txt"
    (info / "licenses" / name).write_text(part.text + "\n", encoding="utf-8")
    metadata = re.sub(
      r"^(License-File: LICENSE)$", rf"\1\nLicense-File: {name}", metadata, flags=re.M
    )
    (expression,) = re.findall(r"^License-Expression: (.*)$", metadata, re.M)
    if part.spdx not in expression.split(" AND "):
      metadata = metadata.replace(expression, f"{expression} AND {part.spdx}", 1)
  (info / "METADATA").write_text(metadata, encoding="utf-8")
  (listed,) = (info / "sboms").glob("*.cdx.json")
  whole = json.loads(listed.read_text("utf-8"))
  whole["components"] += map(component, found)
  listed.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def main(what: str, *arguments: str) -> None:
  if what == "sbom":
    version, xla, output = arguments
    path = Path(output) / "sboms" / "callgate.cdx.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(sbom(version, parts(Path(xla))), encoding="utf-8")
  else:
    (xla,) = arguments
    for part in parts(Path(xla)):
      (LICENSES / f"{part.name}.txt").write_text(part.text + "\n", encoding="utf-8")


if __name__ == "__main__":
  main(*sys.argv[1:])

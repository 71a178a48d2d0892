# SPDX-License-Identifier: Apache-2.0
"""Checks the metadata of wheels and source archives; prints what is wrong, and exits with 1.

    python tools/check_package.py dist/*

- The license expression has all of pyproject.toml's terms, and those of each part in the SBOM.
- Every License-File is in the archive; pyproject.toml's are among them.
- The classifiers are pyproject.toml's.
- A wheel has a CycloneDX SBOM of this version, and a License-File for each part that it lists.
- A module for macOS calls functions of the system and of Python alone (tools/mach_o.py).
"""

import email.message
import email.parser
import json
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import mach_o

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
MODULE = "callgate/_callgate"


def contents(package: Path) -> dict[str, bytes]:
  """The files of a wheel, or of a source archive without its outermost folder."""
  if package.suffix == ".whl":
    with zipfile.ZipFile(package) as archive:
      return {name: archive.read(name) for name in archive.namelist()}
  with tarfile.open(package) as archive:
    files = [member for member in archive if member.isfile()]
    return {file.name.partition("/")[2]: archive.extractfile(file).read() for file in files}


def problems(package: Path) -> list[str]:
  files = contents(package)
  wheel = package.suffix == ".whl"
  place = f"callgate-{PROJECT['version']}.dist-info/" if wheel else ""
  raw = files.get(f"{place}METADATA" if wheel else "PKG-INFO")
  if raw is None:
    return ["no metadata"]
  metadata = email.parser.BytesParser().parsebytes(raw)
  found = missing_licenses(metadata, files, f"{place}licenses/" if wheel else "")
  if sorted(metadata.get_all("Classifier", [])) != sorted(PROJECT["classifiers"]):
    found.append("the classifiers are not pyproject.toml's")
  if wheel:
    found += wrong_parts(metadata, files.get(f"{place}sboms/callgate.cdx.json"))
    if "macosx" in package.name:
      found += wrong_module(files)
  return found


def terms(metadata: email.message.Message) -> set[str]:
  return set(str(metadata["License-Expression"]).split(" AND "))


def missing_licenses(
  metadata: email.message.Message, files: dict[str, bytes], place: str
) -> list[str]:
  listed = metadata.get_all("License-File", [])
  promised = {
    path.relative_to(ROOT).as_posix()
    for pattern in PROJECT["license-files"]
    for path in ROOT.glob(pattern)
  }
  found = [f"no License-File {name}" for name in sorted(promised - set(listed))]
  found += [f"the License-File {name} is not there" for name in listed if place + name not in files]
  absent = set(PROJECT["license"].split(" AND ")) - terms(metadata)
  return found + [f"the license expression lacks {term}" for term in sorted(absent)]


def wrong_parts(metadata: email.message.Message, raw: bytes | None) -> list[str]:
  """The differences between an SBOM and the rest of a wheel's metadata."""
  if raw is None:
    return ["no SBOM"]
  sbom = json.loads(raw)
  about = (sbom["bomFormat"], sbom["metadata"]["component"]["version"])
  found = [] if about == ("CycloneDX", PROJECT["version"]) else [f"the SBOM is of {about}"]
  for part in sbom["components"]:
    (license,) = part["licenses"]
    spdx = license.get("expression") or license["license"]["id"]
    if spdx not in terms(metadata):
      found.append(f"the license expression lacks {part['name']}'s {spdx}")
    if f"packaging/licenses/{part['name']}.txt" not in metadata.get_all("License-File", []):
      found.append(f"no License-File for {part['name']}")
  return found


def wrong_module(files: dict[str, bytes]) -> list[str]:
  (module,) = [data for name, data in files.items() if name.startswith(MODULE) and ".so" in name]
  return mach_o.problems(mach_o.read(module))


def main(packages: list[str]) -> int:
  failed = 0
  for package in packages:
    found = problems(Path(package))
    failed += bool(found)
    print(f"{Path(package).name}: {'; '.join(found) or 'as expected'}")
  return min(failed, 1)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))

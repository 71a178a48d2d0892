# SPDX-License-Identifier: Apache-2.0
"""Puts XLA's FFI headers of the oldest supported jaxlib into build/xla-headers/include.

pyproject.toml names that jaxlib. Its headers are copied from this Python's own installation when
the version is the same, else from its wheel, which pip fetches (or takes from its cache). Any
platform's wheel will do, since they all hold the same headers. Prints the folder; does nothing
when the headers of that version are there already.
"""

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "build" / "xla-headers"


def wanted_version() -> str:
  requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
  (pin,) = [r for r in requires if r.startswith("jaxlib==")]
  return pin.removeprefix("jaxlib==")


def installed_headers(version: str) -> Path | None:
  """The include folder of this Python's jaxlib, when that is `version`; jaxlib isn't imported."""
  try:
    if importlib.metadata.version("jaxlib") != version:
      return None
  except importlib.metadata.PackageNotFoundError:
    return None
  spec = importlib.util.find_spec("jaxlib")
  if spec is None or not spec.submodule_search_locations:
    return None
  include = Path(spec.submodule_search_locations[0]) / "include"
  return include if include.is_dir() else None


def extract_from_wheel(version: str, include: Path) -> None:
  with tempfile.TemporaryDirectory() as folder:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-qq"]
    # Wheels of this version exist for Python 3.12 whatever Python runs this.
    pip += ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "-d", folder]
    subprocess.run([*pip, f"jaxlib=={version}"], check=True)
    (wheel,) = Path(folder).glob("jaxlib-*.whl")
    prefix = "jaxlib/include/"
    with zipfile.ZipFile(wheel) as archive:
      for name in archive.namelist():
        if name.startswith(prefix) and not name.endswith("/"):
          target = include / name.removeprefix(prefix)
          target.parent.mkdir(parents=True, exist_ok=True)
          target.write_bytes(archive.read(name))


def main() -> None:
  version = wanted_version()
  stamp = TARGET / "jaxlib-version"
  if not stamp.exists() or stamp.read_text() != version:
    shutil.rmtree(TARGET, ignore_errors=True)
    include = TARGET / "include"
    source = installed_headers(version)
    if source is not None:
      shutil.copytree(source, include)
    else:
      extract_from_wheel(version, include)
    stamp.write_text(version)
  print(TARGET / "include")


if __name__ == "__main__":
  main()

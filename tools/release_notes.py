# SPDX-License-Identifier: Apache-2.0
"""Prints the section of CHANGELOG.md for a version, as a release's notes.

    python tools/release_notes.py [v0.1.0]

Fails unless the tag is the version of pyproject.toml, and the changelog has a dated section for it.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def section(changelog: str, version: str) -> str | None:
  """The text below `## [version] - date`, up to the next version or the links at the end."""
  start = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n"
  found = re.search(rf"{start}(.*?)(?=^## \[|^\[|\Z)", changelog, re.MULTILINE | re.DOTALL)
  return found[1].strip() if found else None


def main(tag: str | None = None) -> int:
  project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
  version = project["version"]
  if tag is not None and tag != f"v{version}":
    print(f"expected the tag v{version}, pyproject.toml's version, got {tag}", file=sys.stderr)
    return 1
  notes = section((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
  if notes is None:
    print(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'", file=sys.stderr)
    return 1
  print(notes)
  return 0


if __name__ == "__main__":
  sys.exit(main(*sys.argv[1:]))

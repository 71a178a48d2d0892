# SPDX-License-Identifier: Apache-2.0
"""Prints requirements of callgate as pip takes them, read from pyproject.toml.

    python tools/requirements.py run          # what callgate needs at run time
    python tools/requirements.py build        # what building in place needs, jaxlib left out
    python tools/requirements.py test demo    # extras, or groups of dependencies, of these names
    python tools/requirements.py --with-wheels test demo  # only those with wheels for this Python

With `--with-wheels` it asks pip for each, and names those it leaves out on stderr: for a Python for
which few libraries have wheels. `build` is for `pip install --no-build-isolation`, where the
headers come from tools/fetch_xla_headers.py and the environment's own jaxlib may be a newer one.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(group: str) -> list[str]:
  """The requirements of `group`: "run", "build", an extra or a group of pyproject.toml's.

  Raises KeyError for no such name."""
  config = tomllib.loads(PYPROJECT.read_text())
  if group == "run":
    return config["project"]["dependencies"]
  if group == "build":
    listed = config["build-system"]["requires"]
    return [r for r in listed if not r.startswith("jaxlib")] + ["cmake>=3.26", "ninja>=1.11"]
  named = config["project"]["optional-dependencies"] | config["dependency-groups"]
  return [one for requirement in named[group] for one in _expanded(requirement)]


def _expanded(requirement: str) -> list[str]:
  """An extra that names other extras of callgate, as "callgate[sinks]", stands for theirs."""
  match = re.fullmatch(r"callgate\[([\w,-]+)\]", requirement)
  if match is None:
    return [requirement]
  return [one for group in match[1].split(",") for one in requirements(group)]


def _has_wheels(requirement: str) -> bool:
  """True if this and all that it needs can be installed from wheels."""
  command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
  options = ["--dry-run", "--only-binary=:all:", requirement]
  return subprocess.run([*command, *options], capture_output=True, check=False).returncode == 0


def main(arguments: list[str]) -> int:
  for group in arguments:
    if group == "--with-wheels":
      continue
    try:
      listed = requirements(group)
    except KeyError:
      print(f"pyproject.toml has no extra and no group {group!r}", file=sys.stderr)
      return 1
    for requirement in listed:
      if "--with-wheels" not in arguments or _has_wheels(requirement):
        print(requirement)
      else:
        print(f"no wheels for this Python: {requirement}", file=sys.stderr)
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))

# SPDX-License-Identifier: Apache-2.0
"""Gives the site the version of the package: a hook of MkDocs (mkdocs.yml)."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def on_config(config: Any) -> Any:
  project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
  config.extra["release"] = project["version"]
  return config

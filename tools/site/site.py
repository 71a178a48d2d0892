# SPDX-License-Identifier: Apache-2.0
"""Completes the site: a hook of MkDocs (mkdocs.yml).

Each page gets the package's version. The search puts pages about the project below the guides.
Code without spaces gets a class, `word`: assets/site.css keeps it on one line in tables.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_WORD = re.compile(r"<code>((?:[^\s<]|<(?!/code>)[^>]*>)+)</code>")
# Pages of the navigation's parts that answer questions about the project: state.md, roadmap.md ...
_BEHIND = ("Explanation", "Project")
_KEPT = (
  "benchmarks.md",
  "comparison.md",
  "faq.md",
  "glossary.md",
  "limitations.md",
  "performance.md",
)


def on_config(config: Any) -> Any:
  project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
  config.extra["release"] = project["version"]
  return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
  del config, files
  parts = [parent.title for parent in page.ancestors]
  if any(part in _BEHIND for part in parts) and page.file.src_uri not in _KEPT:
    page.meta.setdefault("search", {"boost": 0.1})
  elif page.file.src_uri.startswith("gallery/"):  # code has every word
    page.meta.setdefault("search", {"boost": 0.5})
  return markdown


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
  del page, config, files
  return _WORD.sub(r'<code class="word">\1</code>', html)

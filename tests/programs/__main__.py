# SPDX-License-Identifier: Apache-2.0
"""Searches for programs that callgate runs wrongly.

python tests/programs --seconds 600 --seed 1
"""

from __future__ import annotations

import argparse
import sys
import time

import search


def main() -> int:
  parser = argparse.ArgumentParser(prog="python tests/programs", description=__doc__)
  parser.add_argument("--seconds", type=float, default=60)
  parser.add_argument("--most", type=int, default=sys.maxsize, help="programs in each process")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--jobs", type=int, default=2, help="processes that run programs")
  parser.add_argument("--save", default="", help="a folder for what is found, as files that run")
  parser.add_argument("--counts", default="", help="a file to which it adds its counts")
  parser.add_argument(
    "--only", default="", help="of parts and transformations those that it matches: 'forms'"
  )
  options = parser.parse_args()
  begin = time.monotonic()
  found = search.search(
    options.seconds, options.seed, options.jobs, options.save, options.counts, options.only,
    options.most,
  )  # fmt: skip
  print(f"{found.programs} programs in {time.monotonic() - begin:.0f} s, seed {options.seed}:")
  print(
    f"  {found.refused} refused, {found.ambiguous} left to rounding, {len(found.findings)} wrong"
  )
  return 1 if found.findings else 0


if __name__ == "__main__":
  sys.exit(main())

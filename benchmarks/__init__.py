# SPDX-License-Identifier: Apache-2.0
"""Side-by-side measurements of callgate and its peers; see `benchmarks/README.md`."""

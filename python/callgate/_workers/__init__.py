# SPDX-License-Identifier: Apache-2.0
"""Places where gates run: workers, executors, threads, and objects that live there."""

# SPDX-License-Identifier: Apache-2.0
"""Places where gates run, one interface for all: threads, workers, executors, objects there."""

# SPDX-License-Identifier: Apache-2.0
"""Places where gates run: threads, workers, executors and their objects, behind one interface."""

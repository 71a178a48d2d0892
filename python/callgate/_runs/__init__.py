# SPDX-License-Identifier: Apache-2.0
"""Runs: folders for a training's config, streams, alerts and files."""

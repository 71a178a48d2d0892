# SPDX-License-Identifier: Apache-2.0
"""XLA's CUDA plugin on a GPU made of software; `python -m virtual_gpu` is its command."""

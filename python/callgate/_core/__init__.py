# SPDX-License-Identifier: Apache-2.0
"""Values that every part shares: errors, dtypes, names, encodings; no tracing, no lowering."""

"""Values that every part shares: errors, dtypes, names, encodings; no tracing, no lowering."""

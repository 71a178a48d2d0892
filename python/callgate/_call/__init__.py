"""The primitive that gates and kernels share: tracing, its rules, its lowering."""

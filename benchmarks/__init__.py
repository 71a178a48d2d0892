"""Side-by-side measurements of callgate and its peers; see `benchmarks/README.md`."""

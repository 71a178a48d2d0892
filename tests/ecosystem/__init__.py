"""Programs of other libraries, which `tools/ecosystem.py` runs without and with `install()`."""

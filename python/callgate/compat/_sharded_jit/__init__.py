"""Parts by counts, and each process's part of them."""

"""Where tests/programs/secretive.py keeps a secret, and in which form."""

PLACES = {"argv": "A-{}", "environment": "E-{}", "memory": "M-{}", "file name": "N-{}", "file content": "C-{}"}

"""The kernel: operations, flows, and the drivers that run them in transactions."""

"""The store: what gates share, in Valkey or Redis."""

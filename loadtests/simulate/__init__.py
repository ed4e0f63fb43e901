"""The pure ledger in simulated time: policies side by side on workloads that no test machine could run."""

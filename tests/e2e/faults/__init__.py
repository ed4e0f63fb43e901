"""What happens to a client and to the ledger when something goes wrong: one row a fault, one cell a dialect."""

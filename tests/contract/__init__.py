"""What holds of every store, on real servers."""

"""What is measured rather than tested: run by hand, on a quiet machine."""

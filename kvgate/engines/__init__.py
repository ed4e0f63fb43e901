"""The kinds of engine that kvgate fronts, one file each; none knows of another."""

"""The API shapes that kvgate serves, one file each; none knows of another."""

"""What an operator runs beside kvgate; rules and dashboards are written by `python -m deploy.generate`."""

"""The operator's bench, and the development engine that tests, demo and `make run` put behind the gate."""

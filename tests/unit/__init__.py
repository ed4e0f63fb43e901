"""The core's promises, each as a test. None of them looks at a clock: a slow machine is not a broken one."""

from hypothesis import HealthCheck, settings

settings.register_profile("kvgate", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvgate")

"""Settings of all tests."""

from hypothesis import settings


# how long an example takes says more about what else runs on the machine than about the code
settings.register_profile("kerneldyno", deadline=None)
settings.load_profile("kerneldyno")

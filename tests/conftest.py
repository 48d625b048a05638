"""For all tests: no TFF worker is left behind by a test process."""

from tff_dpftrl.execution import worker_watchdog


def pytest_sessionstart(session):
    """TFF ends its worker in a destructor, which fails when the interpreter exits first."""
    del session
    worker_watchdog.start()

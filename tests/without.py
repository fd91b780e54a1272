"""`pytest -p without`: of a package from which a feature was taken, skip tests that ask for it; no other may fail."""

import pytest

MISSING = "this build of zeroshard is without a feature that the settings ask for"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.failed and call.excinfo is not None and MISSING in str(report.longrepr):
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1], MISSING)

"""What all tests share: trial counts, the two models, and no skips where everything is required."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("rekindle", max_examples=int(os.environ.get("REKINDLE_TRIALS", "100")), deadline=None)
settings.load_profile("rekindle")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The bundled model's folder, for tests where an answer must mean something. `make` has built it already."""
    from server.demo.build import ensure

    out = Path(os.environ.get("REKINDLE_DATA", "data")).absolute() / "models" / "demo"
    ensure(out)
    return out


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 model's folder, for tests that count."""
    from tests.support.tiny_vlm import build_tiny_vlm

    return build_tiny_vlm(tmp_path_factory.mktemp("models") / "tiny")


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("REKINDLE_REQUIRE_ALL"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"{reason} (and REKINDLE_REQUIRE_ALL is set: nothing may be left out)"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    report = yield
    _refuse_skip(report)
    return report

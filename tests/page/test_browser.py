"""The page in a browser without a screen, where there is one: no request to a network, sorting and filters work."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chai_eval.report.command import report
from chai_eval.report_settings import ReportSettings
from tests.page.test_report import results

__all__ = ["results"]

playwright = pytest.importorskip("playwright.sync_api")
FOUND = (os.environ.get("CHROMIUM"), *map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
BROWSER = next((each for each in FOUND if each), None)


@pytest.fixture(params=[1280, 390])
def page(request: pytest.FixtureRequest, results: Path) -> Iterator[Any]:
    out, *_ = report(ReportSettings((results,), results.parent / "out"), "python -m chai_eval report")
    with playwright.sync_playwright() as driver:
        try:
            browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        page = browser.new_page(viewport={"width": request.param, "height": 800})
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda asked: page.asked.append(asked.url))
        page.goto((out / "index.html").as_uri())
        yield page
        browser.close()


def column(page: Any, number: int) -> list[str]:
    rows = page.locator("#t-scores tbody tr:visible")
    return [rows.nth(at).locator("th, td").nth(number).inner_text() for at in range(rows.count())]


def test_it_opens_without_a_network_sorts_and_filters(page: Any) -> None:
    assert page.said == []
    assert [each for each in page.asked if not each.startswith(("file:", "data:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    button = page.locator("#t-scores thead button", has_text="difference")
    for direction in ("ascending", "descending"):
        button.focus()
        page.keyboard.press("Enter")
        header = page.locator("#t-scores thead th", has_text="difference")
        assert header.get_attribute("aria-sort") == direction
        values = [float(each) for each in column(page, 7)]
        assert values == sorted(values, reverse=direction == "descending")
        assert len(set(values)) > 1
    page.select_option("select[name=method]", "chai")
    assert set(column(page, 1)) == {"chai"}
    page.fill("input[name=find]", "boolq")
    assert set(column(page, 2)) == {"boolq"}
    assert "lines shown" in page.locator("output").inner_text()
    page.locator("button[type=reset]").click()
    page.wait_for_function("document.querySelector('output').value === ''")
    assert set(column(page, 1)) == {"chai", "chai_static"}
    assert page.said == []

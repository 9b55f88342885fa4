"""The race in a browser: it starts, both sides end equal, colours and steps are the API's.

``make test-browser`` runs it; it needs Chromium from the system's packages, and playwright.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.serving import served

pytestmark = pytest.mark.browser
SHOTS = Path(os.environ.get("SPECHEADS_SCREENSHOTS", "build/race"))
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return Chromium, without a screen."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium, "apt install chromium"
    with sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=chromium, args=OPTIONS)
        yield made
        made.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Return the address of a server."""
    with served() as address:
        yield address


LOOKS = {
    "wide": {"viewport": {"width": 1200, "height": 900}},
    "phone": {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2},
    "dark": {"viewport": {"width": 1200, "height": 900}, "color_scheme": "dark"},
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("mode", ["together", "apart"])
def test_the_race(browser: Any, url: str, look: str, mode: str) -> None:
    """Prevents a page that shows other tokens or steps than the server gave, or hides an error."""
    context = browser.new_context(**LOOKS[look])
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    bodies: list[str] = []

    def kept(response: Any) -> None:
        if response.url.endswith("completions"):
            bodies.append(response.text())

    page.on("requestfinished", lambda request: kept(request.response()))
    page.goto(url)
    page.wait_for_selector("#drafter option", state="attached")
    page.fill("#prompt", "Add type hints:\ndef area(width, height):\n    return width * height")
    page.select_option("#mode", mode)
    page.fill("#tokens", "40")
    page.keyboard.press("Tab")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")  # by keyboard alone
    page.wait_for_selector("#verdict.good, #verdict.bad", timeout=60_000)
    assert "All tokens equal" in page.inner_text("#verdict")
    assert page.inner_text("#text0") == page.inner_text("#text1")
    page.wait_for_timeout(200)
    assert len(bodies) == 2
    for number in (0, 1):
        drafted = number == 1
        steps = [
            json.loads(event[6:])["choices"][0]["step"]
            for body in bodies
            for event in body.split("\n\n")
            if event.startswith("data: {")
            and bool(json.loads(event[6:])["choices"]) and _is_drafted(body) == drafted
        ]  # fmt: skip
        num_tokens, num_steps = sum(len(s["tokens"]) for s in steps), sum(
            bool(s["tokens"]) for s in steps
        ) - 1  # fmt: skip
        figures = page.inner_text(f"#figures{number}")
        assert f"{num_tokens} tokens, {num_steps} steps" in figures
        shown = page.eval_on_selector_all(
            f"#text{number} span", "found => found.map(each => each.dataset.step)"
        )
        assert set(shown) <= {str(step) for step in range(num_steps + 1)}
        assert len(set(shown)) > 1
    assert page.locator("#tree svg circle").count() > 1
    assert page.locator("#tree svg circle.taken").count() >= 1
    wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    assert wide <= 0, "the page scrolls sideways"
    assert problems == []
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{look}-{mode}.png", full_page=True)
    context.close()


def _is_drafted(body: str) -> bool:
    """Tell which of the two answers this is: steps of the drafted one have trees."""
    return any(
        len(json.loads(event[6:])["choices"][0]["step"]["tree"]) > 1
        for event in body.split("\n\n")
        if event.startswith("data: {")
    )

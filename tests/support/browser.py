"""Debian's Chromium without a window, at any width, in light, dark and print."""

import base64
import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

_PROGRAMS = {"chromium": shutil.which("chromium"), "chromedriver": shutil.which("chromedriver")}


def why_not() -> str:
    """Why pages can't be opened here; empty if they can."""
    missing = [name for name, path in _PROGRAMS.items() if not path]
    if not importlib.util.find_spec("selenium"):
        missing.append("selenium (pip install -e '.[test]')")
    return f"needs {', '.join(missing)}: launch/ci_packages.sh" if missing else ""


class Browser:
    """A page in Chromium."""

    def __init__(self, driver):
        self.driver = driver

    def set_width(self, width: int) -> None:
        """Makes the window so wide, in CSS pixels."""
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def show(self, page, width: int, scheme: str, media: str = "screen") -> None:
        """Opens a file at a width in CSS pixels, in colours "light" or "dark"."""
        self.set_width(width)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        emulated = {"media": media, "features": [feature]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", emulated)
        self.driver.get(page.as_uri())

    def run(self, script: str):
        """What a script returns."""
        return self.driver.execute_script(script)

    def save_picture(self, path) -> None:
        """A PNG of the whole page."""
        how = {"captureBeyondViewport": True}
        taken = self.driver.execute_cdp_cmd("Page.captureScreenshot", how)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Chromium, closed at the end."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = _PROGRAMS["chromium"]
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(_PROGRAMS["chromedriver"])
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield Browser(driver)
    finally:
        driver.quit()

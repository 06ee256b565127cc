"""Pictures of a page of `heddle report`, for the docs: `python docs/images/report.py PAGE`.

Needs chromium and chromedriver. PAGE is of two rollouts or more, for docs/report.md (`make demo`
makes demo/report.html), or of loops, for docs/loop.md, which has their command.
"""

import base64
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

HERE = Path(__file__).resolve().parent
WIDTH = 1280
PICTURES = (
    ("report-why.png", "light", "summary", "why"),
    ("report-rollout.png", "light", "rollout", "rollout"),
    ("report-timeline.png", "light", "timeline", "plan"),
    ("report-differences.png", "dark", "differences", "trajectories"),
)
LOOP_PICTURES = (("report-training.png", "light", "training", "training"),)


def start(profile: str) -> Chrome:
    """Start the browser of this machine; Selenium would else look for one elsewhere."""
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(argument)
    return Chrome(options=options, service=Service(shutil.which("chromedriver")))


def take(browser: Chrome, name: str, scheme: str, first: str, last: str) -> None:
    """Save what lies between the top of one section and the end of another."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    top, bottom = browser.execute_script(
        "const at = (id) => document.getElementById(id).getBoundingClientRect();"
        "return [at(arguments[0]).top + scrollY - 10, at(arguments[1]).bottom + scrollY + 10]",
        first,
        last,
    )
    clip = {"x": 0, "y": top, "width": WIDTH, "height": bottom - top, "scale": 1}
    taken = browser.execute_cdp_cmd(
        "Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip}
    )
    (HERE / name).write_bytes(base64.b64decode(taken["data"]))


def main(page: str) -> None:
    """Take all pictures of one page."""
    with TemporaryDirectory() as profile:
        browser = start(profile)
        try:
            size = {"width": WIDTH, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.get(Path(page).resolve().as_uri())
            WebDriverWait(browser, 60).until(
                lambda b: b.execute_script("return document.body.dataset.ready") == "true"
            )
            # The bar that stays in sight would lie across a picture that is higher than the window.
            browser.execute_script("document.querySelector('nav').style.position = 'static'")
            of_loops = "return !document.getElementById('training').hidden"
            for picture in LOOP_PICTURES if browser.execute_script(of_loops) else PICTURES:
                take(browser, *picture)
        finally:
            browser.quit()


if __name__ == "__main__":
    main(sys.argv[1])

"""Chromium without a window, through chromedriver's HTTP interface: as much of it as the page's tests need."""

import base64
import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the WebDriver standard's name
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Escape": "\ue00c", "ArrowLeft": "\ue012", "ArrowRight": "\ue014"}
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy for this machine's own ports
# Chromium asks its maker for updates and the like unless told not to.
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--disable-background-networking"),
    *(
        "--disable-component-update",
        "--disable-sync",
        "--no-proxy-server",
        "--no-first-run",
        "--hide-scrollbars",
        "--force-color-profile=srgb",
    ),
)


def missing():
    """The first program that is not installed, or None."""
    return next((name for name in ("chromium", "chromedriver") if shutil.which(name) is None), None)


class Browser:
    def __init__(self, folder, width=1280, height=900):
        self.process = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.session = None
        try:
            found = next(
                (m for line in self.process.stdout if (m := re.search(r"successfully on port (\d+)", line))), None
            )
            assert found, "chromedriver did not start"
            self.base = f"http://127.0.0.1:{found[1]}/session"
            options = {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={folder}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"}}
            self.session = self._post("", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
            self.resize(width, height)
        except BaseException:
            self.close()
            raise

    def close(self):
        if self.session:
            with contextlib.suppress(OSError):
                self._ask("DELETE", f"/{self.session}")
        self.process.terminate()
        self.process.wait(20)
        self.process.stdout.close()

    def _ask(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with DIRECT.open(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def _post(self, path, body):
        return self._ask("POST", f"/{self.session}{path}" if self.session else path, body)

    def devtools(self, command, **params):
        return self._post("/goog/cdp/execute", {"cmd": command, "params": params})

    def resize(self, width, height, mobile=False):
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )

    def go(self, url):
        self._post("/url", {"url": url})

    def run(self, script, *args):
        """The value of a JavaScript expression; `arguments` has the args."""
        return self._post("/execute/sync", {"script": f"return {script}", "args": list(args)})

    def wait(self, script, seconds=30, args=()):
        """Until the expression is true; its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(script, *args)):
            assert time.monotonic() < end, f"after {seconds} s still not: {script}"
            time.sleep(0.02)
        return value

    def find(self, css):
        return self._post("/element", {"using": "css selector", "value": css})[ELEMENT]

    def click(self, css):
        self._post(f"/element/{self.find(css)}/click", {})

    def type(self, css, text):
        """Into a field: what it held is gone."""
        element = self.find(css)
        self._post(f"/element/{element}/clear", {})
        self._post(f"/element/{element}/value", {"text": text})

    def upload(self, css, path):
        self._post(f"/element/{self.find(css)}/value", {"text": str(path)})

    def choose(self, css, value):
        """An option of a list, as a user does."""
        self.click(f'{css} option[value="{value}"]')

    def press(self, *names):
        actions = [{"type": kind, "value": KEYS[name]} for name in names for kind in ("keyDown", "keyUp")]
        self._post("/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def hover(self, css):
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": {ELEMENT: self.find(css)}}
        self._post("/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def text(self, css):
        return self._ask("GET", f"/{self.session}/element/{self.find(css)}/text")

    def texts(self, css):
        return self.run("[...document.querySelectorAll(arguments[0])].map(e => e.innerText)", css)

    def log(self, kind):
        """What is new: `browser` (the console) or `performance` (the network)."""
        return self._post("/se/log", {"type": kind})

    def requests(self):
        """The addresses that were asked for since the last call."""
        events = (json.loads(entry["message"])["message"] for entry in self.log("performance"))
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def screenshot(self):
        return base64.b64decode(self._ask("GET", f"/{self.session}/screenshot"))

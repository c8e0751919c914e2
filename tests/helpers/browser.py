"""A headless Chromium (Debian's), driven through its DevTools protocol: no driver, no extra."""

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from websockets.sync.client import connect

from tests.helpers.eventually import eventually

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip
ANSWER_S = 30


class Browser:
    """One browser with one page; a context manager that leaves nothing behind.

    `errors`: what scripts threw and what the page logged as an error. `asked`: the addresses that
    the page asked for.
    """

    def __enter__(self):
        self.errors, self.asked = [], []
        self._numbers = itertools.count(1)
        self._folder = Path(tempfile.mkdtemp(prefix="chromium-"))
        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={self._folder}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            port = self._folder / "DevToolsActivePort"
            eventually(lambda: port.exists() and "\n" in port.read_text(), "chromium listens")
            number, path = port.read_text().split("\n")[:2]
            self._socket = connect(
                f"ws://127.0.0.1:{number}{path}", max_size=None, open_timeout=ANSWER_S
            )
            page = next(
                t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"
            )
            self._session = self.call(
                "Target.attachToTarget", targetId=page["targetId"], flatten=True
            )["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    _session = None
    _socket = None

    def __exit__(self, *_):
        if self._socket is not None:
            with contextlib.suppress(Exception):
                self.call("Browser.close")
            self._socket.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method, **params):
        """One command of the protocol, and its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(ANSWER_S))
            self._note(answer)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _note(self, message):
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(params["exceptionDetails"])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"])
            case "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])

    def open(self, url):
        self.call("Page.navigate", url=url)

    def js(self, expression):
        """The value of an expression in the page, a promise's when it is kept."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition, timeout_s=60.0):
        """Until an expression is true in the page."""
        eventually(
            lambda: self.js(f"Boolean({condition})"),
            lambda: f"never {condition}; errors: {self.errors}", timeout_s,
        )  # fmt: skip

    def shape(self, width, height, *, phone=False, dark=False):
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height,
            deviceScaleFactor=1, mobile=phone,
        )  # fmt: skip
        scheme = "dark" if dark else "light"
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def screenshot(self, path):
        data = self.call("Page.captureScreenshot", format="png")["data"]
        Path(path).write_bytes(base64.b64decode(data))

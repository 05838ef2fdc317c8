"""Control headless Chromium through the DevTools protocol.

Messages travel over a pair of pipes (``--remote-debugging-pipe``: JSON, each terminated by a zero
byte), without a port or a package.
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import signal
import time
from collections.abc import Iterator

FIRST_FREE = 10  # above descriptors 3 and 4, which Chromium uses
OPTIONS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",  # small in containers
    "--disable-background-networking",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
)


class Page:
    """Page of a separate browser."""

    def __init__(self, reading: int, writing: int):
        self._reading, self._writing = reading, writing
        self._rest, self._calls, self._session = b"", 0, {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def call(self, method: str, timeout: float = 180.0, **parameters) -> dict:
        """Call a protocol method and return its result. Raises RuntimeError or TimeoutError."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": parameters} | self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout
        while True:
            answer = self._message(method, deadline)
            if answer.get("id") == self._calls:
                break
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def go(self, url: str) -> None:
        failed = self.call("Page.navigate", url=url).get("errorText")
        if failed:
            raise RuntimeError(f"{url}: {failed}")

    def evaluate(self, script: str):
        """Return the value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"]["description"])
        return found["result"].get("value")

    def until(self, script: str, timeout: float = 180.0):
        """Evaluate ``script`` until its value is true and return it."""
        deadline = time.monotonic() + timeout
        while not (value := self.evaluate(script)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the page did not reach: {script}")
            time.sleep(0.2)
        return value

    def screenshot(self) -> bytes:
        """Return a screenshot as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        """Close the browser and its child processes."""
        self._session = {}
        self.call("Browser.close")

    def _message(self, method: str, deadline: float) -> dict:
        while b"\0" not in self._rest:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._reading], [], [], left)[0]:
                raise TimeoutError(f"{method}: the browser does not respond")
            block = os.read(self._reading, 1 << 20)
            if not block:
                raise RuntimeError(f"{method}: the browser has ended")
            self._rest += block
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def open_page(chromium: str, profile, size: tuple[int, int]) -> Iterator[Page]:
    """Open a page of ``size`` pixels in a browser with the profile folder ``profile``."""
    theirs_in, ours_out = map(_above, os.pipe())
    ours_in, theirs_out = map(_above, os.pipe())
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # required as root
    options = [f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}", *sandbox]
    noise = os.open(os.devnull, os.O_RDWR)
    places = {0: noise, 1: noise, 2: noise, 3: theirs_in, 4: theirs_out}
    child = os.posix_spawn(
        chromium,
        [chromium, *OPTIONS, *options],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, ours, place) for place, ours in places.items()],
        setpgroup=0,
    )
    for descriptor in (theirs_in, theirs_out, noise):
        os.close(descriptor)
    try:
        page = Page(ours_in, ours_out)
        yield page
        page.close()
        os.waitpid(child, 0)
        child = 0
    finally:
        if child:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(ours_in)
        os.close(ours_out)


def _above(descriptor: int) -> int:
    """Duplicate a descriptor to a number above those used by Chromium, and close the original."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE)
    os.close(descriptor)
    return moved

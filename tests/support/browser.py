"""Headless Chromium over its DevTools protocol (https://chromedevtools.github.io/devtools-protocol/)."""

import asyncio
import base64
import hashlib
import io
import itertools
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from PIL import Image
from PIL.PngImagePlugin import PngInfo

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            answer = await self._socket.receive_json()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    async def evaluate(self, script: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(60):
            while not await self.evaluate(script):
                await asyncio.sleep(0.1)

    async def screenshot(self, path: Path, source: Path) -> None:
        """Save a picture that names the content of `source`, the file that it shows, as `shown_source` reads it."""
        shot = await self.call("Page.captureScreenshot", format="png")
        about = PngInfo()
        about.add_text("Source", digest(source))
        Image.open(io.BytesIO(base64.b64decode(shot["data"]))).save(path, pnginfo=about, optimize=True)


def digest(source: Path) -> str:
    return hashlib.sha256(source.read_bytes()).hexdigest()


def shown_source(picture: Path) -> str:
    """The digest of the file that a picture of `Page.screenshot` shows."""
    with Image.open(picture) as image:
        return str(image.info.get("Source"))


@asynccontextmanager
async def opened(url: str, folder: Path) -> AsyncIterator[Page]:
    """A page of a new browser that has its files in `folder`."""
    assert CHROMIUM is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    command = [
        CHROMIUM,
        *flags,
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "--window-size=1100,1300",
        url,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        port_file = folder / "DevToolsActivePort"
        async with asyncio.timeout(60):
            while not port_file.exists() or not port_file.read_text():
                await asyncio.sleep(0.1)
        base = f"http://127.0.0.1:{port_file.read_text().splitlines()[0]}"
        async with aiohttp.ClientSession() as session, asyncio.timeout(120):
            async with session.get(f"{base}/json/list") as answer:
                target = next(t for t in await answer.json() if t["type"] == "page")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        os.killpg(process.pid, 9)
        process.wait()

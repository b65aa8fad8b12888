"""The page in a real browser. Needs the extra `ui`, playwright, and Debian's chromium (or CHROMIUM=/path)."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import RunningServer, running_server

from mars_lm.serving.requests import Limits
from tiny import tiny_checkpoint

pytest.importorskip("gradio", reason="the extra 'ui' is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("chromium is not installed", allow_module_level=True)

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
MINUTE = 60_000


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    checkpoint = tiny_checkpoint(max_position_embeddings=2048)
    with running_server(
        page=True, pause=0.03, checkpoint=checkpoint, limits=Limits(new_tokens=160)
    ) as running:
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        context = started.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"), executable_path=CHROMIUM, headless=True, args=FLAGS
        )
        yield context
        context.close()


@pytest.fixture
def page(browser: Any, server: RunningServer, tmp_path: Path) -> Iterator[Any]:
    """A page that has loaded; at its end no error was logged, and no other host was asked for anything."""
    page = browser.new_page()
    complaints: list[str] = []
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request",
        lambda r: None if r.url.startswith((server.url, "data:", "blob:")) else complaints.append(r.url),
    )
    page.goto(server.url + "/")
    page.wait_for_selector("#message textarea", timeout=MINUTE)
    yield page
    page.screenshot(
        path=os.environ.get("SCREENSHOTS", str(tmp_path)) + f"/{time.time_ns()}.png", full_page=True
    )
    page.close()
    assert not complaints
    server.wait_until_idle(30)


def numbers(page: Any, where: str = "#numbers") -> dict[str, float]:
    text = page.inner_text(where)
    return {
        name: float(re.search(rf"{name}\s+([\d.]+)", text)[1])  # type: ignore[index]
        for name in ("tokens per forward", "tokens per second", "tokens", "forwards")
    }


def send(page: Any, text: str) -> None:
    page.fill("#message textarea", text)
    page.press("#message textarea", "Enter")


def wait_for_forwards(page: Any, count: int) -> None:
    page.wait_for_function(
        "n => Number(document.querySelector('#numbers').innerText.match(/forwards\\s+(\\d+)/)[1]) >= n",
        arg=count,
        timeout=MINUTE,
    )


def set_slider(page: Any, where: str, value: str) -> None:
    box = page.locator(f"{where} input[type=number]")
    box.fill(value)
    box.press("Tab")


def test_a_chat_whose_colours_are_forwards(page, server):
    send(page, "What is <b>bold</b> & <|im_end|>?")
    for colour in range(4):
        page.wait_for_selector(f"#transcript .f{colour}", timeout=MINUTE)
    colours = {
        page.eval_on_selector(f"#transcript .f{n}", "e => getComputedStyle(e).backgroundColor")
        for n in range(4)
    }
    assert len(colours) == 4
    assert "What is <b>bold</b> & <|im_end|>?" in page.inner_text("#transcript")  # text, not markup
    page.click("#stop")
    server.wait_until_idle(10)
    said = numbers(page)
    assert said["tokens"] >= said["forwards"] > 0
    assert said["tokens per second"] > 0


def test_the_knob_moves_a_running_answer(page, server):
    page.uncheck("#exact input")
    set_slider(page, "#tau", "1")
    send(page, "hello")
    wait_for_forwards(page, 6)
    assert numbers(page)["tokens per forward"] == 1.0
    set_slider(page, "#tau", "0")
    page.wait_for_function(
        "() => Number(document.querySelector('#numbers').innerText.match(/forward\\s+([\\d.]+)/)[1]) > 2",
        timeout=MINUTE,
    )
    set_slider(page, "#block-size", "2")
    page.click("#stop")
    server.wait_until_idle(10)


def test_side_by_side(page, server):
    page.uncheck("#exact input")
    set_slider(page, "#tau", "0")
    page.get_by_role("tab", name="Side by side").click()
    page.fill("#prompt textarea", "hello world")
    page.click("#compare")
    page.wait_for_function(
        "() => [...document.querySelectorAll('#left dd, #right dd')].filter(e => +e.innerText).length == 8",
        timeout=MINUTE * 2,
    )
    server.wait_until_idle(60)
    page.wait_for_timeout(300)
    left, right = numbers(page, "#left"), numbers(page, "#right")
    assert left["tokens per forward"] == 1.0
    assert right["tokens per forward"] > 3.5


def test_by_keyboard_alone(page, server):
    """Tab reaches every control in an order that makes sense, and each works from there."""
    page.focus("#tau input[type=number]")
    reached = []
    for _ in range(30):
        reached.append(
            page.evaluate(
                "s => document.activeElement.closest(s)?.id",
                "#tau, #block-size, #exact, #message, #send, #stop, #clear",
            )
        )
        page.keyboard.press("Tab")
    order = [name for name in dict.fromkeys(reached) if name]
    assert order == ["tau", "block-size", "exact", "message", "send", "stop", "clear"]
    page.focus("#tau input[type=range]")
    page.keyboard.press("End")
    assert page.input_value("#tau input[type=number]") == "1"
    page.focus("#exact input")
    page.keyboard.press("Space")
    assert not page.is_checked("#exact input")
    page.focus("#message textarea")
    page.keyboard.type("hello")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    wait_for_forwards(page, 3)
    page.focus("#stop")
    page.keyboard.press("Enter")
    server.wait_until_idle(10)


def test_on_a_phone(page, server):
    page.set_viewport_size({"width": 400, "height": 800})
    send(page, "hello " * 30)
    page.wait_for_selector("#transcript .f1", timeout=MINUTE)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for control in ("#message textarea", "#send", "#tau input[type=range]", "#exact input"):
        box = page.locator(control).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 400
    page.click("#clear")
    server.wait_until_idle(10)


def test_a_reader_that_closes_the_page_frees_its_row(browser, server):
    page = browser.new_page()
    page.goto(server.url + "/")
    page.wait_for_selector("#message textarea", timeout=MINUTE)
    send(page, "hello")
    page.wait_for_selector("#transcript .f1", timeout=MINUTE)
    page.close()
    server.wait_until_idle(10)


def test_a_prompt_that_is_too_long_is_told_on_the_page(page):
    send(page, "hello world " * 1500)
    page.wait_for_selector("#numbers .problem", timeout=MINUTE)
    assert "shorten it" in page.inner_text("#numbers .problem")


def test_the_page_asks_for_a_key_where_the_server_has_keys(browser, tmp_path):
    file = tmp_path / "keys"
    file.write_text("page-key\n")
    with running_server(page=True, api_keys=file) as server:
        page = browser.new_page()
        page.goto(server.url + "/")
        fields = page.locator("input")
        fields.nth(1).wait_for(timeout=MINUTE)
        assert page.locator("#message textarea").count() == 0
        fields.nth(0).fill("me")
        fields.nth(1).fill("page-key")
        page.get_by_role("button", name="Login").click()
        page.wait_for_selector("#message textarea", timeout=MINUTE)
        page.close()

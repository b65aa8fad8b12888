"""The page at `/` (extra `ui`): a chat whose colours are forwards, the knob, and two modes side by side."""

from __future__ import annotations

import html
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import gradio as gr
from fastapi import FastAPI, Request, Response

from mars_lm.errors import MarsError
from mars_lm.serving.errors import ApiError, ClientLeftError
from mars_lm.serving.requests import MAX_PAGE_TOKENS
from mars_lm.serving.runner import Generation
from mars_lm.serving.schemas import ChatRequest

if TYPE_CHECKING:
    from mars_lm.serving.app import Server

COLOURS = 4
SIDES = ("One token per forward (AR)", "With these settings (MARS)")
# Tints that read under dark and under light text; neighbours differ in hue and in brightness.
_CSS = """
.mars { font-size: 1rem; line-height: 1.7; }
.mars .turn { margin: 0 0 .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.mars .who { font-weight: 600; display: block; }
.mars .f { border-radius: 3px; padding: .1em 0; box-decoration-break: clone; }
.mars .f0 { background: #ffe0a3; } .mars .f1 { background: #b9e3ff; }
.mars .f2 { background: #d3f2b5; } .mars .f3 { background: #f3cdee; }
.dark .mars .f0 { background: #6b4700; } .dark .mars .f1 { background: #0b4a6f; }
.dark .mars .f2 { background: #2f5a10; } .dark .mars .f3 { background: #682a5f; }
.mars .problem { color: #b00020; font-weight: 600; } .dark .mars .problem { color: #ff9aa8; }
.mars dl { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; margin: 0; }
.mars dl div { display: flex; gap: .4rem; } .mars dt { opacity: .8; }
.mars dd { margin: 0; font-weight: 600; }
#transcript { min-height: 8rem; }
@media (max-width: 480px) { .gradio-container { padding: .4rem !important; } }
"""


class Text:
    """One answer as it grows: its forwards in turning colours, and its numbers."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.tokens = self.forwards = 0
        self.seconds = 0.0
        self._started = time.perf_counter()

    def take(self, piece: Any) -> None:
        self.pieces.append(piece.output.text)
        self.tokens += len(piece.output.new_token_ids)
        self.forwards += 1
        self.seconds = time.perf_counter() - self._started

    @property
    def plain(self) -> str:
        return "".join(self.pieces)

    def html(self) -> str:
        return "".join(
            f'<span class="f f{number % COLOURS}">{html.escape(piece)}</span>'
            for number, piece in enumerate(self.pieces)
            if piece
        )

    def numbers(self) -> str:
        per_forward = self.tokens / self.forwards if self.forwards else 0.0
        per_second = self.tokens / self.seconds if self.seconds else 0.0
        rows = (
            ("tokens per forward", f"{per_forward:.2f}"),
            ("tokens per second", f"{per_second:.1f}"),
            ("tokens", str(self.tokens)),
            ("forwards", str(self.forwards)),
        )
        items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in rows)
        return f'<div class="mars"><dl>{items}</dl></div>'


def add_page(app: FastAPI, server: Server) -> None:
    """Mount the page at `/`; where the server has API keys, the page asks for one."""

    # The page takes every path that nothing else has; what is under /v1 and /mars stays the API's to refuse.
    async def no_such_path(request: Request) -> Response:
        raise ApiError(404, "There is no such path here.")

    for prefix in ("/v1", "/mars"):
        app.add_api_route(
            prefix + "/{path:path}",
            no_such_path,
            methods=["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"],
            include_in_schema=False,
        )
    keys = server.keys
    gr.mount_gradio_app(
        app,
        _Page(server).blocks(),
        path="/",
        auth=None if keys is None else lambda user, key: keys.accept(key),
        auth_message="Any name, and one of this server's API keys as the password.",
        footer_links=[],
        show_error=False,
        max_file_size=1,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=_theme(),
        css=_CSS,
        head='<meta name="viewport" content="width=device-width, initial-scale=1">',
    )


def _theme() -> gr.Theme:
    # Fonts of the system: the page asks no other host for anything. Explanations dark enough to be read.
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    return theme.set(block_info_text_color="*neutral_600", block_info_text_color_dark="*neutral_300")


class _Page:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.running: dict[str, Generation] = {}  # by browser session, for the knob

    def blocks(self) -> gr.Blocks:
        server, knob = self.server, self.server.knob
        trained = knob.trained_block_size
        name = server.options.model_name
        with gr.Blocks(title=f"{name} · mars", analytics_enabled=False, fill_width=True) as page:
            gr.HTML(f'<h1 style="margin:0">{html.escape(name)}</h1>')
            with gr.Row():
                tau = gr.Slider(
                    0,
                    1,
                    knob.defaults.tau if knob.defaults.rule == "probability" else 0.95,
                    step=0.01,
                    label="τ",
                    info="Confidence that a guessed token needs; 1 is one token per forward.",
                    interactive=trained is not None,
                    elem_id="tau",
                )
                block_size = gr.Slider(
                    1,
                    max(trained or 1, 2),
                    knob.defaults.block_size or trained or 1,
                    step=1,
                    label="B",
                    info="The most tokens of one forward.",
                    interactive=trained is not None,
                    elem_id="block-size",
                )
                exact = gr.Checkbox(
                    knob.defaults.exact,
                    label="Exact",
                    info="The words of one-token decoding; τ then moves only the speed.",
                    interactive=trained is not None,
                    elem_id="exact",
                )
            settings: list[Any] = [tau, block_size, exact]
            for setting in settings:
                setting.change(
                    self.turn, settings, None, api_visibility="private", queue=False, show_progress="hidden"
                )
            with gr.Tab("Chat"):
                turns = gr.State([])
                transcript = gr.HTML(
                    _log(""), elem_id="transcript", autoscroll=True, max_height=520, label="Conversation"
                )
                numbers = gr.HTML(Text().numbers(), elem_id="numbers")
                message = gr.Textbox(
                    label="Message",
                    placeholder="Enter sends it",
                    lines=1,
                    max_lines=8,
                    max_length=20_000,
                    autofocus=True,
                    elem_id="message",
                )
                with gr.Row():
                    send = gr.Button("Send", variant="primary", elem_id="send")
                    stop = gr.Button("Stop", elem_id="stop")
                    clear = gr.Button("New conversation", elem_id="clear")
                chat = gr.on(
                    [message.submit, send.click],
                    self.chat,
                    [message, turns, *settings],
                    [transcript, numbers, turns, message],
                    api_visibility="private",
                    show_progress="hidden",
                    concurrency_limit=None,
                    trigger_mode="once",
                )
                stop.click(self.stop, None, None, api_visibility="private", queue=False)
                clear.click(
                    lambda: (_log(""), Text().numbers(), [], ""),
                    None,
                    [transcript, numbers, turns, message],
                    cancels=[chat],
                    api_visibility="private",
                    queue=False,
                )
            with gr.Tab("Side by side"):
                prompt = gr.Textbox(
                    "Explain in three sentences why the sky is blue.",
                    label="Prompt",
                    max_length=20_000,
                    elem_id="prompt",
                )
                compare = gr.Button("Answer both ways", variant="primary", elem_id="compare")
                with gr.Row():
                    sides = [
                        gr.HTML(_side(title, None), elem_id=where)
                        for where, title in zip(("left", "right"), SIDES, strict=True)
                    ]
                gr.on(
                    [prompt.submit, compare.click],
                    self.compare,
                    [prompt, *settings],
                    sides,
                    api_visibility="private",
                    show_progress="hidden",
                    concurrency_limit=None,
                    trigger_mode="once",
                )
        page.queue(max_size=server.options.limits.queue or 1, default_concurrency_limit=None)
        return page

    async def chat(
        self,
        message: str,
        turns: list[dict[str, str]],
        tau: float,
        block_size: float,
        exact: bool,
        request: gr.Request,
    ) -> AsyncIterator[Any]:
        """Stream an answer: transcript, numbers, turns, and the emptied message box."""
        if not message.strip():
            yield _log(_said(turns)), Text().numbers(), turns, ""
            return
        asked = [*turns, {"role": "user", "content": message}]
        before, text = _said(asked), Text()
        try:
            async for text in self._stream(asked, self._chosen(tau, block_size, exact), request.session_hash):
                yield _log(before + _turn("assistant", text.html())), text.numbers(), turns, ""
        except ClientLeftError:
            pass  # stopped: what is there stays
        except (ApiError, MarsError) as error:
            problem = _problem(str(error))
            yield _log(before + _turn("assistant", text.html())), problem + text.numbers(), turns, message
            return
        answered = [*asked, {"role": "assistant", "content": text.plain}] if text.plain.strip() else turns
        yield _log(before + _turn("assistant", text.html())), text.numbers(), answered, ""

    async def compare(
        self, prompt: str, tau: float, block_size: float, exact: bool, request: gr.Request
    ) -> AsyncIterator[Any]:
        """Answer one prompt in one-token mode and then with the settings: each has the machine to itself."""
        shown: list[Any] = [Text(), None]
        chosen = ({"rule": "probability", "tau": 1.0, "exact": exact}, self._chosen(tau, block_size, exact))
        for number, choice in enumerate(chosen):
            try:
                messages = [{"role": "user", "content": prompt}]
                # Only the second side follows the knob: the first is what it is compared with.
                session = request.session_hash if number else None
                async for text in self._stream(messages, choice, session):
                    shown[number] = text
                    yield [_side(title, text) for title, text in zip(SIDES, shown, strict=True)]
            except ClientLeftError:
                return
            except (ApiError, MarsError) as error:
                shown[number] = str(error)
                yield [_side(title, text) for title, text in zip(SIDES, shown, strict=True)]
                return

    def turn(self, tau: float, block_size: float, exact: bool, request: gr.Request) -> None:
        """A knob moved: the answer that streams follows at its next forward."""
        generation = self.running.get(request.session_hash or "")
        if generation is not None:
            generation.choose(**self._chosen(tau, block_size, exact))

    def stop(self, request: gr.Request) -> None:
        generation = self.running.get(request.session_hash or "")
        if generation is not None:
            generation.leave()

    def _chosen(self, tau: float, block_size: float, exact: bool) -> dict[str, Any]:
        if self.server.knob.trained_block_size is None:
            return {}
        return {"rule": "probability", "tau": float(tau), "block_size": int(block_size), "exact": bool(exact)}

    async def _stream(
        self, messages: list[dict[str, str]], chosen: dict[str, Any], session: str | None
    ) -> AsyncIterator[Text]:
        server = self.server
        budget = min(MAX_PAGE_TOKENS, server.options.limits.new_tokens)
        body = ChatRequest.model_validate(
            {"model": server.options.model_name, "messages": messages, "max_tokens": budget, "mars": chosen}
        )
        jobs = await server.prepare(server.preparation.chat, body)
        generation = await server.runner.submit(jobs)
        if session is not None:
            self.running[session] = generation
        text = Text()
        try:
            async for piece in generation.pieces():
                text.take(piece)
                yield text
        finally:
            generation.leave()
            if session is not None and self.running.get(session) is generation:
                del self.running[session]


def _problem(sentence: str) -> str:
    return f'<div class="mars"><p class="problem" role="alert">{html.escape(sentence)}</p></div>'


def _log(inner: str) -> str:
    return f'<div class="mars" role="log" aria-live="polite" aria-label="Conversation">{inner}</div>'


def _said(turns: list[dict[str, str]]) -> str:
    return "".join(_turn(turn["role"], html.escape(turn["content"])) for turn in turns)


def _turn(role: str, inner: str) -> str:
    who = {"user": "You", "assistant": "Model"}[role]
    return f'<div class="turn {role}"><span class="who">{who}</span>{inner}</div>'


def _side(title: str, text: Text | str | None) -> str:
    if isinstance(text, str):
        inner, numbers = _problem(text), ""
    else:
        shown = text or Text()
        inner, numbers = shown.html(), shown.numbers()
    return f'<div class="mars"><span class="who">{title}</span>{numbers}<div class="turn">{inner}</div></div>'

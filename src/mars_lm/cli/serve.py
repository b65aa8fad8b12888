"""`mars serve`: a checkpoint behind OpenAI's API."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mars_lm.cli import options
from mars_lm.cli.terminal import Terminal
from mars_lm.errors import MarsError
from mars_lm.settings import decoding_settings

if TYPE_CHECKING:
    from mars_lm.serving.app import Server

ADMIN_KEY_VARIABLE = "MARS_ADMIN_KEY"

_NETWORK, _LIMITS, _LOAD = "Network and keys", "Limits", "Load controller"


def serve(
    context: typer.Context,
    model: options.Model = None,
    adapter: options.Adapter = None,
    dtype: options.Dtype = "auto",
    exact: options.Exact = None,
    tau: options.Tau = None,
    rule: options.DraftRule = None,
    block_size: options.BlockSize = None,
    adaptive: options.Adaptive = None,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0, max=2.0, help="Of requests that name none; 0 is greedy.", rich_help_panel="Decoding"
        ),
    ] = 0.0,
    model_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="What clients call the model.", show_default="the model's own name"
        ),
    ] = None,
    engine: Annotated[
        Literal["mars", "vllm"],
        typer.Option(help="vllm: vLLM's own server with our decoding; its flags go behind ours."),
    ] = "mars",
    ui: Annotated[bool, typer.Option("--ui", help="A page at / (needs the extra 'ui').")] = False,
    host: Annotated[
        str, typer.Option(help="The address to listen at.", rich_help_panel=_NETWORK)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, rich_help_panel=_NETWORK)] = 8000,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Clients need one of its keys, one a line.", rich_help_panel=_NETWORK
        ),
    ] = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"The key for `mars knob`; or the variable {ADMIN_KEY_VARIABLE}. Without: no knob.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN", help="Let web pages of this origin use the server.", rich_help_panel=_NETWORK
        ),
    ] = None,
    log_prompts: Annotated[
        bool,
        typer.Option("--log-prompts", help="Write prompts and answers to the log.", rich_help_panel=_NETWORK),
    ] = False,
    rows: Annotated[int, typer.Option(min=1, help="Answers decoded together.", rich_help_panel=_LIMITS)] = 16,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="TOKENS",
            help="Longest prompt and answer together.",
            show_default="the model's context, as far as memory goes",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    max_prompt: Annotated[
        int | None,
        typer.Option(min=1, metavar="TOKENS", help="Longest prompt.", rich_help_panel=_LIMITS),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="Most tokens of an answer, also where none is asked for.",
            rich_help_panel=_LIMITS,
        ),
    ] = 2048,
    max_body: Annotated[
        int, typer.Option(min=1024, metavar="BYTES", help="Largest body.", rich_help_panel=_LIMITS)
    ] = 1 << 20,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Open connections.", rich_help_panel=_LIMITS)
    ] = 512,
    queue: Annotated[
        int,
        typer.Option(min=0, help="Answers that may wait for a row; more get a 429.", rich_help_panel=_LIMITS),
    ] = 64,
    request_seconds: Annotated[
        float, typer.Option(min=1, help="Time per request, waiting included.", rich_help_panel=_LIMITS)
    ] = 300.0,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="Time to finish requests at the end.", rich_help_panel=_LIMITS)
    ] = 30.0,
    tau_range: Annotated[
        str | None,
        typer.Option(
            metavar="LOW:HIGH",
            help="Turn the default tau between these: low when busy, high when quiet.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    target_queue: Annotated[
        int,
        typer.Option(min=1, help="Waiting answers at which tau is at its low.", rich_help_panel=_LOAD),
    ] = 8,
) -> None:
    """Put a model behind OpenAI's API on this machine.

    Listens at 127.0.0.1 unless --host names another address. SIGTERM or Ctrl-C: finish what runs, then end.
    """
    named = options.asked(exact=exact, tau=tau, rule=rule, block_size=block_size, adaptive=adaptive)
    if engine == "vllm":
        _serve_with_vllm(context, model, adapter, named)
        return
    if context.args:
        context.fail(f"No such option or argument: {context.args[0]}")
    terminal = Terminal()
    _require_extra("serve", "fastapi", "uvicorn", "prometheus_client")
    if ui:
        _require_extra("ui", "gradio")
    from mars_lm.serving.keys import Keys
    from mars_lm.serving.knob import LoadController
    from mars_lm.serving.requests import Limits, ServerOptions

    # A wrong option must not cost the loading of a model.
    controller = None if tau_range is None else LoadController(*_bounds(tau_range), target_queue)
    for file in (api_keys, admin_key_file):
        if file is not None:
            Keys.read(file)
    server_options = ServerOptions(
        model_name=model_name or _name(model, adapter),
        limits=Limits(
            body_bytes=max_body,
            prompt_tokens=max_prompt,
            new_tokens=max_new_tokens,
            queue=queue,
            seconds=request_seconds,
            connections=max_connections,
        ),
        temperature=temperature,
        api_keys=api_keys,
        admin_key=admin_key_file or os.environ.get(ADMIN_KEY_VARIABLE) or None,
        cors_origins=tuple(cors_origin or ()),
        log_prompts=log_prompts,
        drain_seconds=drain_seconds,
        page=ui,
    )
    checkpoint = options.load_checkpoint(model, adapter, dtype, terminal=terminal)
    from mars_lm.decoding import Engine
    from mars_lm.serving.app import Server
    from mars_lm.serving.knob import FIELDS, Defaults, Knob
    from mars_lm.serving.server import serve as run

    settings = decoding_settings(checkpoint.mars, named)
    defaults = Defaults(**{field: getattr(settings, field) for field in FIELDS})
    if controller is not None and checkpoint.mars is None:
        raise MarsError("--tau-range needs a MARS checkpoint: this model yields one token per forward.")
    decoder = Engine(checkpoint, max_rows=rows, max_length=max_length)
    trained = None if checkpoint.mars is None else checkpoint.mars.block_size
    knob = Knob(defaults, trained, controller=controller)
    server = Server(checkpoint, decoder, knob, server_options)
    _announce(terminal, server, host, port)
    run(server, host, port)


# What `--engine vllm` takes of our options, and what the others that have a counterpart are called there.
_OURS_WITH_VLLM = {"model", "adapter", "exact", "tau", "rule", "block_size", "adaptive", "engine", "context"}
_VLLM_FLAGS = {
    "dtype": "--dtype",
    "host": "--host",
    "port": "--port",
    "model_name": "--served-model-name",
    "rows": "--max-num-seqs",
    "max_length": "--max-model-len",
}


def _serve_with_vllm(
    context: typer.Context, model: str | None, adapter: str | None, named: dict[str, Any]
) -> None:
    from mars_lm.vllm import launch

    passed_on = []
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        given = source is not None and source.name != "DEFAULT"
        if name in _VLLM_FLAGS and (given or name == "host"):  # vLLM alone would listen at every address
            passed_on += [_VLLM_FLAGS[name], str(value)]
        elif given and name not in _OURS_WITH_VLLM:
            flag = "--" + name.replace("_", "-")
            raise MarsError(f"{flag} belongs to our own engine: give vLLM's own flags with --engine vllm.")
    launch.run(model, adapter, named, [*passed_on, *context.args])


def _announce(terminal: Terminal, server: Server, host: str, port: int) -> None:
    open_to_all = server.options.api_keys is None and host not in ("127.0.0.1", "localhost", "::1")
    shown = f"[{host}]" if ":" in host else host
    terminal.note(
        f"{server.options.model_name} at http://{shown}:{port}/v1, {server.engine.max_rows} rows of "
        f"{server.engine.max_length} tokens"
    )
    if open_to_all:
        terminal.note(f"Anyone who reaches {host} can use this server: --api-keys FILE asks for a key.")


def _name(model: str | None, adapter: str | None) -> str:
    if model is None and adapter is None:
        return "smollm2-135m-instruct-mars"
    return Path(str(adapter or model)).name.removesuffix(".gguf")


def _bounds(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    try:
        return float(low), float(high)
    except ValueError:
        raise MarsError(f"--tau-range is {text!r}, expected LOW:HIGH, such as 0.6:1.0.") from None


def _require_extra(extra: str, *modules: Any) -> None:
    from importlib.util import find_spec

    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise MarsError(
            f"{missing[0]} is not installed; the extra '{extra}' brings it: pip install 'mars-lm[{extra}]'."
        )

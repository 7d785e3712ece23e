"""`holdfast mcp`: the Model Context Protocol over the standard streams."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import Annotated

import typer

from ..errors import InvalidArgument
from ..extras import required
from ..kernel.url import parse
from ..mcp.bound import bound_claim
from ..mcp.configuration import http_configuration, stdio_configuration
from .command import Answer, Namespace, Url, flag, option, session_ids
from .output import json_line


def mcp(
    url: Url = None,
    namespace: Namespace = None,
    session: Annotated[
        str | None,
        option(
            "SESSION",
            "The session that the client acts for; created if it does not exist.",
            offers=session_ids,
            show_default="$AGENT_SESSION_ID",
        ),
    ] = None,
    config: Annotated[
        bool, flag("--config", "Print the configuration to paste into a client.")
    ] = False,
) -> Answer:
    """Serve shared state, effects and checkpoints to an MCP client over stdin and stdout.

    The client reaches the tree of one session and nothing else. Messages go to stderr. The URL may
    be that of a server, whose token is in $HOLDFAST_TOKEN.
    """
    if config:
        return _configuration(url, namespace, session)
    claim = bound_claim(session)
    with required("MCP", "mcp"):
        from ..mcp.stdio import serve_stdio
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    # A thread waits for input, and Ctrl-C for the thread; a kill loses nothing that was answered.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    asyncio.run(serve_stdio(claim, url=url, namespace=namespace))
    # The client reads stdout: not even a farewell is printed there.
    raise typer.Exit


def _configuration(url: str | None, namespace: str | None, session: str | None) -> Answer:
    session = session or os.environ.get("AGENT_SESSION_ID")
    place = url or os.environ.get("HOLDFAST_URL") or ""
    if place.startswith(("http://", "https://")):
        data = http_configuration(place.rstrip("/"), session)
    elif session is None:
        raise InvalidArgument("--session ID is required: the session that the client acts for")
    else:
        # A password is left for the user to fill in.
        data = stdio_configuration(parse(url, namespace).shown, session)
    return Answer(data, json_line(data, indent=2))

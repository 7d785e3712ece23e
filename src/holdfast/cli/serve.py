"""`holdfast serve`: a server over a store."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated, Any

from ..errors import InvalidArgument
from ..extras import required
from ..kernel.url import RemoteTarget, parse
from .command import Answer, DatabaseUrl, Namespace, Tools, flag, named_tools, option
from .output import json_line, with_place

PORT = 8317


def require_server() -> None:
    """Raise MissingPackage if a package that the server needs is not installed."""
    with required("the server", "server"):
        from ..server import serve  # noqa: F401


def serve(
    url: DatabaseUrl = None,
    namespace: Namespace = None,
    host: Annotated[
        str, option("ADDRESS", "Where to listen; localhost is 127.0.0.1 and ::1.")
    ] = "localhost",
    port: Annotated[int, option("PORT", "The port; 0 picks a free one.")] = PORT,
    uds: Annotated[str | None, option("PATH", "Listen on a Unix socket instead.")] = None,
    base_path: Annotated[str, option("/PATH", "The prefix of every URL.")] = "",
    certfile: Annotated[str | None, option("FILE", "Certificate for TLS.")] = None,
    keyfile: Annotated[str | None, option("FILE", "Its private key.")] = None,
    allow_host: Annotated[
        list[str] | None, option("NAME", "A host name of the server; repeatable.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, option("ORIGIN", "An origin whose pages may use it; repeatable.")
    ] = None,
    insecure: Annotated[
        bool, flag("--insecure", "Allow other machines to connect without TLS.")
    ] = False,
    read_only: Annotated[bool, flag("--read-only", "Refuse every change.")] = False,
    work_days: Annotated[float, option("N", "Remove work items finished this long ago.")] = 30,
    limit: Annotated[
        list[str] | None, option("NAME=N", "A limit that `GET /limits` shows; repeatable.")
    ] = None,
    tools: Tools = None,
    as_json: Annotated[bool, flag("--json", "Print the address and a login link as JSON.")] = False,
) -> Answer:
    """Serve a store over HTTP until a signal arrives: REST, WebSockets and the dashboard.

    Every request needs a token. The first start creates one and writes it to a file that only
    you can read; `holdfast tokens` creates more.
    """
    require_server()
    from ..effects.tools import by_name
    from ..server.options import Options, limits_of
    from ..server.serve import Address, Serving
    from ..server.sign_in import SignIn
    from ..server.start import as_data, as_text, start_token

    address = Address(
        host=host, port=port, uds=uds, certfile=certfile, keyfile=keyfile, is_insecure=insecure
    )
    if base_path and not (base_path.startswith("/") and not base_path.endswith("/")):
        raise InvalidArgument("--base-path must begin with a slash and not end with one")
    limits, store_limits = limits_of(limit or ())
    options = Options(
        limits=limits,
        hosts=frozenset(allow_host or ()),
        origins=frozenset(allow_origin or ()),
        base_path=base_path,
        is_read_only=read_only,
        work_days=work_days,
        tools=by_name(named_tools(tools)),
    )
    if isinstance(parse(url, namespace), RemoteTarget):
        raise InvalidArgument("--url is the address of a server; name the database to serve")
    place: dict[str, Any] = {"url": url, "namespace": namespace, "limits": store_limits}
    token = start_token(place, is_read_only=read_only)
    if token.secret is not None:
        options = replace(options, sign_in=SignIn.with_secret(token.secret))
    serving = Serving(place, address, options)

    def ready() -> None:
        if as_json:
            text = json_line(as_data(serving, token))
        else:
            text = as_text(serving, token, is_terminal=sys.stdout.isatty())
            text = with_place(text, url, namespace)
        print(text, flush=True)

    serving.run(ready)
    return Answer({"stopped": True}, "Stopped.")

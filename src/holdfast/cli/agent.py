"""`holdfast agent`: serve an agent, ask one, and come back for its answer."""

from __future__ import annotations

import contextlib
import shlex
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlsplit

from ..arguments import shown
from ..checkpoints.diff import printable
from ..errors import InvalidArgument
from ..kernel.url import guarded
from ..mesh import Mesh, Service
from ..peers import PeerCall
from ..peers.asks import delivery_id
from ..store import Store
from . import INTERRUPTED, output
from .command import (
    Answer,
    Commands,
    Namespace,
    Tools,
    Url,
    argument,
    cause,
    flag,
    imported,
    named_tools,
    option,
    read_json,
    takes_nothing,
)
from .peers import call_data
from .worker import log_to_stderr, serve

app = Commands("Serve an agent, ask one, and get its answer.")
# As an error of the store that says that something is not as it was expected to be.
UNANSWERED = 4
# So many of the things that a request waits for are named.
NAMED_MAX = 3

Transport = Annotated[
    str | None,
    option(
        "URL",
        "The transport for requests: database, or nats://host:port of a NATS server, with "
        "options such as ?prefix=NAME.",
        show_default="database",
    ),
]
Timeout = Annotated[
    float | None,
    option("SECONDS", "How long to wait for the answer.", "--timeout", show_default="no limit"),
]


@app.command()
def run(
    agent: Annotated[
        str, argument("MODULE:AGENT", "A Service of holdfast.mesh, or a function returning it.")
    ],
    url: Url = None,
    namespace: Namespace = None,
    transport: Transport = None,
    instances: Annotated[int, option("N", "How many sessions run at once.")] = 4,
    lease_seconds: Annotated[
        float,
        option(
            "SECONDS",
            "Lease length: how long until another process takes over the sessions of one that died."
            " A tool call in progress has a lease of its own, set in its @tool.",
            "--lease",
        ),
    ] = 30,
    drain_seconds: Annotated[
        float,
        option("SECONDS", "How long running sessions have to finish after SIGTERM.", "--drain"),
    ] = 30,
    tools: Tools = None,
    until_empty: Annotated[
        bool, flag("--until-empty", "Exit when nothing is ready or running.")
    ] = False,
) -> Answer:
    """Serve an agent until a signal arrives; run it on as many machines as you like.

    On SIGTERM or Ctrl-C it takes no more requests and lets running ones finish; a second signal
    releases them at once, to the other instances. --tools verify effects that another process left.
    """
    service = load(agent)
    log_to_stderr()
    options: dict[str, Any] = {
        "instances": instances,
        "lease_seconds": lease_seconds,
        "drain_seconds": drain_seconds,
        "tools": named_tools(tools),
    }
    place = {"url": url, "namespace": namespace, "migrate": False}
    what = f"agent {service.name}"
    with opened(transport) as carrier:
        make = partial(service.worker, transport=carrier, **options)
        return serve(place, make, what, until_empty, service.is_async)


@app.command(mode="write")
def request(
    store: Store,
    agent: Annotated[str, argument("AGENT", "The agent's name.")],
    input: Annotated[str | None, argument("[INPUT]", "The input, as JSON; - reads stdin.")] = None,
    request_id: Annotated[
        str | None,
        option("ID", "The same id is the same request.", "--id", show_default="generated"),
    ] = None,
    user: Annotated[str | None, option("NAME", "The user it is for.")] = None,
    transport: Transport = None,
    deadline_seconds: Annotated[
        float | None,
        option(
            "SECONDS",
            "Answer the request with `timeout`, and cancel it, if it takes longer than this.",
            "--deadline",
            show_default="never",
        ),
    ] = None,
    wait_seconds: Timeout = None,
    as_json: Annotated[bool, flag("--json", "Print JSON, progress too, on stderr.")] = False,
) -> Answer:
    """Ask an agent, show its progress, and print its answer.

    Ctrl-C stops waiting and leaves the request running; `holdfast agent wait` waits for it again.
    """
    value = None if input is None else read_json(input, "INPUT")
    id = request_id or str(uuid.uuid4())
    timeout: Any = "never" if deadline_seconds is None else deadline_seconds
    given: dict[str, Any] = {"request_id": id, "user": user, "timeout_seconds": timeout}
    with opened(transport) as carrier, Mesh(store, carrier) as mesh:
        ask = partial(mesh.request, agent, value, **given)
        return _waited(store, id, ask, transport, wait_seconds, as_json)


@app.command(mode="write")
def wait(
    store: Store,
    ask_id: Annotated[str, argument("REQUEST", "The id of a request.")],
    transport: Transport = None,
    wait_seconds: Timeout = None,
    as_json: Annotated[bool, flag("--json", "Print JSON, progress too, on stderr.")] = False,
) -> Answer:
    """Wait for the answer to a request that was made before, from any machine."""
    with opened(transport) as carrier, Mesh(store, carrier) as mesh:
        return _waited(store, ask_id, partial(mesh.wait, ask_id), transport, wait_seconds, as_json)


def _waited(
    store: Store,
    id: str,
    ask: Callable[..., PeerCall],
    transport: str | None,
    wait_seconds: float | None,
    as_json: bool,
) -> Answer:
    """Wait with progress on stderr, and return the answer or how to come back for it."""
    try:
        call = ask(wait_seconds=wait_seconds, on_progress=lambda note: _tell(note, as_json))
    except KeyboardInterrupt:
        told = f"The request continues; `{_come_back(id, transport)}` waits for its answer."
        return Answer({"id": id, "state": "open"}, f"\n{told}", INTERRUPTED)
    if call.answer is None:
        lines = [*_why_unanswered(store, call, transport)]
        lines += ["Wait for the answer again:", f"  `{_come_back(id, transport)}`"]
        return Answer(call_data(call), "\n".join(lines), UNANSWERED)
    return Answer(call_data(call), lambda: _shown(call), 0 if call.state == "ok" else 1)


def _why_unanswered(store: Store, call: PeerCall, transport: str | None) -> Iterator[str]:
    """Yield what a call waits for, and what to do about it.

    Only listings are read, which a token limited to the tree of the call may read too.
    """
    waiting = store.work.list(session=call.id, status="pending")
    if any(item.id == delivery_id(call.id) and item.attempts == 0 for item in waiting):
        yield printable(f"No instance of agent {call.agent} has taken the request.") + (
            " Serve the agent:"
        )
        yield f"  `holdfast agent run MODULE:AGENT{_carried(transport)}`"
        return
    reasons = {why: commands for why, commands in _stops(store, call.root_id) if commands}
    if not reasons:
        yield "There is no answer yet."
    for why, commands in reasons.items():
        yield f"There is no answer yet: {why}."
        yield from (f"  `holdfast {command}`" for command in commands[:NAMED_MAX])


def _stops(store: Store, root_id: str) -> Iterator[tuple[str, list[str]]]:
    """Yield what may stop a tree until a person acts, with the commands that show each."""
    questions = store.pauses(root=root_id, reason="approval", state="waiting", limit=NAMED_MAX)
    yield "a person must decide first", [f"approvals show {each.number}" for each in questions]
    pending = store.work.list(root=root_id, status="pending")
    parked = [item for item in pending if item.waits_for == "review"]
    effects = dict.fromkeys(item.waits_for_effect for item in parked if item.waits_for_effect)
    yield (
        "the outcome of an effect is unknown, and must be resolved first",
        [f"effects show {id}" for id in effects],
    )
    yield (
        "its work waits for a person's review",
        [f"work why {item.number}" for item in parked if not item.waits_for_effect],
    )


def _come_back(id: str, transport: str | None) -> str:
    """Return the command that waits for a request."""
    return f"holdfast agent wait {shlex.quote(id)}{_carried(transport)}"


def _carried(transport: str | None) -> str:
    """Return the option that names a transport; a URL with credentials is not repeated."""
    if transport is None:
        return ""
    return f" --transport {shlex.quote('URL' if '@' in transport else transport)}"


def _tell(note: Any, as_json: bool) -> None:
    line = {"progress": note} if as_json or not isinstance(note, str) else note
    text = printable(line) if isinstance(line, str) else output.json_line(line)
    # Who reads no progress still gets the answer.
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _shown(call: PeerCall) -> Iterator[Any]:
    assert call.answer is not None
    if call.state != "ok":
        yield f"{call.agent}: {call.state}"
    if isinstance(call.answer.result, str):
        yield output.text_lines(call.answer.result)
    else:
        yield output.json_lines(call.answer.result)
    for each in call.answer.artifacts:
        where = "" if each.uri is None else f" at {each.uri}"
        yield printable(f"artifact {each.name} ({each.media_type}){where}")


@contextlib.contextmanager
def opened(transport: str | None) -> Iterator[Any]:
    """Yield what --transport names; None for the database."""
    if transport in {None, "database"}:
        yield None
        return
    if urlsplit(transport).scheme not in {"nats", "tls"}:
        named = shown(guarded(str(transport)))
        raise InvalidArgument(f"--transport must be database or nats://host:port, not {named}")
    from ..mesh.nats import Nats

    with contextlib.closing(Nats.at(str(transport))) as carrier:
        yield carrier


def load(name: str) -> Service:
    """Return the service that a name like `module:agent` stands for."""
    if ":" not in name:
        raise InvalidArgument(f"{shown(name)} must be MODULE:AGENT, like travel.agents:planner")
    try:
        found = imported(name)
        if not isinstance(found, Service) and callable(found) and takes_nothing(found):
            found = found()
    except Exception as error:
        raise InvalidArgument(f"{shown(name)} cannot be loaded: {cause(error)}") from error
    if not isinstance(found, Service):
        raise InvalidArgument(
            f"{shown(name)} must be a Service of holdfast.mesh, or a function without parameters "
            f"that returns one, not a {type(found).__name__}"
        )
    return found

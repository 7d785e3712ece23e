"""The courier of one process: it sends the outbox, and receives what a transport delivers.

It works on its own threads with a sync store, whether the handlers are sync or async. All its state
is in the store: if it dies, another one continues. An acknowledgement, and the receipt that ends
the sending at the other end, follow the commit; if either is lost, the message arrives again.
"""

from __future__ import annotations

import functools
import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from ..arguments import require_text, require_text_or_none, require_whole, shown
from ..errors import CorruptRecord, HoldfastError, InvalidArgument, StoreClosed, StoreError
from ..kernel.flow import is_async
from ..kernel.operation import Call, operation
from ..kernel.threads import Thread
from ..leases import lease_milliseconds, uptime_seconds
from ..peers.delivery import (
    Incoming,
    reject,
    take_answer,
    take_cancel,
    take_progress,
    take_request,
)
from ..peers.outbox import agent_address, cancel_token, route_of, store_address, topic_of
from ..peers.sending import Outgoing, confirm, next_due, postpone, refuse, take_due
from ..store import Store, StoreHandle
from ..worker.inbox import Delivered, Intake
from .transports import Delivery, Message, Transport, TransportError, Undeliverable

SENT_PER_PASS = 20
RECEIVED_PER_PASS = 20
SEND_LEASE_SECONDS = 30.0
POLL_SECONDS = 1.0
RECEIVE_SECONDS = 1.0
STOP_SECONDS_MAX = 2.0
FULL_SECONDS = 0.05
BACKOFF_SECONDS = 0.2
BACKOFF_SECONDS_MAX = 30.0
RESENDS_DOUBLED_MAX = 5
# The id of a receipt holds those of a message and of a store.
ID_CHARACTERS_MAX = 1_000

log = logging.getLogger("holdfast.mesh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identified:
    """The argument of a credentials hook: a message to be sent, or a session that resumes."""

    kind: str
    """`request`, `answer`, `progress`, `cancel`, or `resume`."""
    agent: str | None
    """The agent that is asked; for `resume`, the one that resumes."""
    ask_id: str | None
    session_id: str | None
    root_id: str | None
    user: str | None


H = TypeVar("H", bound=StoreHandle[Any])
Credentials: TypeAlias = Callable[[Identified], Mapping[str, str]]


def routed(store: H, transport: Transport) -> H:
    """Return a store whose sessions ask through a transport."""
    if not isinstance(store, StoreHandle):
        raise InvalidArgument(f"a transport needs a store, not {type(store).__name__}")
    if store.runtime.is_remote:
        raise InvalidArgument(
            "a transport needs a store that is opened directly on its database; through a server, "
            "requests to peers go through the database"
        )
    return type(store)(replace(store.runtime, transport=transport.name))


def require_credentials(credentials: Credentials | None) -> Credentials | None:
    """Return a credentials hook, after checking that it is a plain function."""
    if credentials is None:
        return None
    if not callable(credentials) or is_async(credentials):
        raise InvalidArgument(f"credentials must be a plain function, not {shown(credentials)}")
    return credentials


def minted(credentials: Credentials | None, identified: Identified) -> dict[str, str]:
    """Return the headers that a hook returns, checked.

    Of what it raises only the type is told: its message may contain a secret, and the error of an
    attempt to resume is stored and logged.
    """
    if credentials is None:
        return {}
    try:
        headers = credentials(identified)
    except Exception as error:
        raise HoldfastError(f"the credentials hook raised {type(error).__name__}") from None
    if not isinstance(headers, Mapping) or not all(
        isinstance(part, str) for pair in headers.items() for part in pair
    ):
        raise InvalidArgument("a credentials hook must return a mapping of names to text")
    return dict(headers)


def require_envelope(message: Message) -> None:
    """Raise InvalidArgument for a message that no store can have sent."""
    require_text("id", message.id, ID_CHARACTERS_MAX)
    require_text("ask", message.ask_id)
    require_text("store", message.store_id)
    require_whole("number", message.number, 0)
    require_text_or_none("token", message.token)


class Courier:
    """Sends for the instances of an agent, or for a mesh, and receives for their store."""

    def __init__(
        self, transport: Transport, agent: str | None, credentials: Credentials | None
    ) -> None:
        self._transport = transport
        self._agent = agent
        self._credentials = credentials
        self._route = route_of(transport.name, agent)
        self._topic = topic_of(self._route)
        self._stopping = threading.Event()
        self._threads: list[Thread] = []
        self._lease_ms = lease_milliseconds(SEND_LEASE_SECONDS)

    @property
    def is_open(self) -> bool:
        """Whether it is sending and receiving."""
        return bool(self._threads)

    def start(self, intake: Intake) -> None:
        """Start sending, and pass incoming requests to a worker."""
        self._lease_ms = intake.claim.lease_ms
        self.open(intake.store, intake)

    def open(self, store: Store, intake: Intake | None = None) -> None:
        """Start sending, and receive messages addressed to the store."""
        self._store = store
        self._stopping = threading.Event()
        loops = [(self._send_due, "sender"), (self._take_replies, "replies")]
        if intake is not None:
            loops.append((lambda: self._take_requests(intake), "requests"))
        for step, name in loops:
            repeated = functools.partial(self._repeat, step, self._stopping)
            self._threads.append(Thread(repeated, f"holdfast-{name}"))
            self._threads[-1].start()

    @functools.cached_property
    def _store_id(self) -> str:
        return self._store.store_id()

    def stop(self) -> None:
        """Finish what is in progress and stop; the rest is left to other couriers.

        A transport that does not respond is not waited for: the messages that it was given or has
        delivered are sent or delivered again.
        """
        self._stopping.set()
        if self._threads:
            self._store.runtime.signals.ring_here(self._topic)
        ends_at = uptime_seconds() + STOP_SECONDS_MAX
        for thread in self._threads:
            thread.join(max(0.0, ends_at - uptime_seconds()))
        if any(thread.is_alive() for thread in self._threads):
            log.warning(
                "the mesh is closed while %s does not respond; messages that it holds are "
                "redelivered, and another %s sends those in the outbox",
                self._transport.name,
                "mesh of the store" if self._agent is None else f"instance of {self._agent}",
            )
        self._threads.clear()

    def _repeat(self, step: Callable[[], None], stopping: threading.Event) -> None:
        pause = BACKOFF_SECONDS
        while not stopping.is_set():
            try:
                step()
            except StoreClosed:
                log.debug("the store is closed")
                return
            except Exception as error:
                is_known = isinstance(error, HoldfastError)
                log.warning("the mesh will try again: %s", error, exc_info=not is_known)
                stopping.wait(random.uniform(pause / 2, pause))
                pause = min(pause * 2, BACKOFF_SECONDS_MAX)
            else:
                pause = BACKOFF_SECONDS

    def _run(self, asked: operation[..., Any], *arguments: Any) -> Any:
        runtime = self._store.runtime
        return runtime.driver.run(Call(asked, runtime, arguments))

    # Sending

    def _send_due(self) -> None:
        signals = self._store.runtime.signals
        seen = signals.count(self._topic)
        due_seconds = self._run(next_due, self._route)
        if due_seconds is None or due_seconds > 0:
            poll_seconds = signals.poll_seconds(self._topic, POLL_SECONDS)
            wait_seconds = poll_seconds if due_seconds is None else min(due_seconds, poll_seconds)
            if not self._stopping.is_set():
                signals.wait(self._topic, seen, wait_seconds)
            return
        is_reached = True
        for outgoing in self._run(take_due, self._route, SENT_PER_PASS, self._lease_ms):
            is_reached = self._send(outgoing, is_reached)

    def _send(self, outgoing: Outgoing, is_reached: bool) -> bool:
        """Send a message, and schedule a resend in case nobody confirms it.

        After a message that the transport did not accept, the others are not tried, and False is
        returned.
        """
        doubled = 2 ** min(outgoing.attempts - 1, RESENDS_DOUBLED_MAX)
        try:
            if not is_reached:
                raise TransportError("the transport did not accept an earlier message")
            self._transport.send(outgoing.address, self._message(outgoing))
        except Undeliverable as error:
            log.warning("%s to %s: %s", outgoing.kind, outgoing.address, error)
            self._run(refuse, outgoing, str(error))
            return True
        except Exception as error:
            told = error if isinstance(error, HoldfastError) else type(error).__name__
            log.warning("%s to %s is sent again: %s", outgoing.kind, outgoing.address, told)
            is_reached = not isinstance(error, TransportError)
            delay_seconds = min(BACKOFF_SECONDS * doubled, BACKOFF_SECONDS_MAX)
        else:
            delay_seconds = self._transport.resend_seconds * doubled
        delay_ms = int(delay_seconds * random.uniform(1.0, 1.2) * 1000)
        self._run(postpone, outgoing.number, outgoing.attempts, delay_ms)
        return is_reached

    def _message(self, outgoing: Outgoing) -> Message:
        identified = Identified(
            kind=outgoing.kind,
            agent=outgoing.agent,
            ask_id=outgoing.ask_id,
            session_id=outgoing.session_id,
            root_id=outgoing.root_id,
            user=outgoing.user,
        )
        return Message(
            kind=outgoing.kind,
            id=f"{self._store_id} {outgoing.number}",
            store_id=self._store_id,
            ask_id=outgoing.ask_id,
            number=outgoing.number,
            user=outgoing.user if outgoing.kind == "request" else None,
            token=outgoing.token,
            body=outgoing.body,
            headers=minted(self._credentials, identified),
        )

    # Receiving

    def _take_replies(self) -> None:
        self._take_each(self._receive(store_address(self._store_id), RECEIVED_PER_PASS), None)

    def _take_requests(self, intake: Intake) -> None:
        assert self._agent is not None
        room = intake.room()
        if room <= 0:
            self._stopping.wait(FULL_SECONDS)
            return
        address = agent_address(self._agent)
        self._take_each(self._receive(address, min(room, RECEIVED_PER_PASS)), intake)

    def _receive(self, address: str, limit: int) -> Sequence[Delivery]:
        return self._transport.receive(address, limit, RECEIVE_SECONDS)

    def _take_each(self, deliveries: Sequence[Delivery], intake: Intake | None) -> None:
        """Process messages; one that fails does not hold up the others."""
        failures: list[Exception] = []
        for each in deliveries:
            try:
                self._take(each, intake)
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _take(self, delivery: Delivery, intake: Intake | None) -> None:
        """Process a message, then acknowledge and confirm it; or have it redelivered."""
        if self._stopping.is_set():
            delivery.nack()
            return
        message, is_running, is_confirmed = delivery.message, False, True
        try:
            require_envelope(message)
            is_running = self._apply(delivery, intake)
        except StoreError:
            delivery.nack(BACKOFF_SECONDS)
            raise
        except (InvalidArgument, CorruptRecord) as error:
            is_confirmed = self._reject(message, error)
        except Exception as error:
            # Not confirmed, so that its sender, if it is one of ours, sends it again later.
            self._log_drop(message, error)
            is_confirmed = False
        if not is_running:
            delivery.ack()
        if is_confirmed and message.kind != "receipt" and message.store_id != self._store_id:
            self._confirm(message)

    def _apply(self, delivery: Delivery, intake: Intake | None) -> bool:
        """Apply a message; True if it started an item, whose end acknowledges the message."""
        message = delivery.message
        if message.kind == "receipt":
            self._run(confirm, message.number, message.ask_id, message.store_id)
            return False
        incoming = self._incoming(message, self._store.runtime.codec.decode(message.body))
        if message.kind == "answer":
            self._run(take_answer, incoming)
        elif message.kind == "progress":
            self._run(take_progress, incoming)
        elif message.kind == "cancel":
            self._run(take_cancel, incoming, None if intake is None else self._agent)
        elif intake is not None:
            return self._begin(delivery, incoming, intake)
        return False

    def _begin(self, delivery: Delivery, incoming: Incoming, intake: Intake) -> bool:
        asked_at = uptime_seconds()
        row = self._run(take_request, incoming, self._agent, intake.claim)
        if row is not None:
            intake.accept(Delivered(row, delivery, asked_at))
        return row is not None

    def _reject(self, message: Message, error: HoldfastError) -> bool:
        """Answer the call of a message that cannot be processed with an error; False if it cannot.

        A message that could not have been sent by a store is not answered.
        """
        self._log_drop(message, error)
        told = f"The {message.kind} cannot be processed: {error}"
        try:
            require_envelope(message)
            self._run(reject, self._incoming(message, {}), message.kind, self._agent, told)
        except StoreError:
            raise
        except Exception:
            return False
        return True

    def _log_drop(self, message: Message, error: Exception) -> None:
        """Log a message that is not delivered again, without its content: that may be forged."""
        log.error(
            "%s of ask %s cannot be processed and is dropped: %s",
            message.kind,
            shown(message.ask_id),
            type(error).__name__,
        )

    def _incoming(self, message: Message, body: Any) -> Incoming:
        token = message.token
        if message.kind == "request":
            body = {"input": body, "user": message.user}
        elif token is not None:
            token = cancel_token(token)
        return Incoming(
            transport=self._transport.name,
            store_id=message.store_id,
            ask_id=message.ask_id,
            number=message.number,
            token=token,
            body=body if isinstance(body, dict) else {},
        )

    def _confirm(self, message: Message) -> None:
        """Confirm to the sender that its message is durable; if that is lost, it sends again."""
        receipt = Message(
            kind="receipt",
            id=f"{message.id} {self._store_id}",
            store_id=self._store_id,
            ask_id=message.ask_id,
            number=message.number,
        )
        try:
            self._transport.send(store_address(message.store_id), receipt)
        except TransportError as error:
            log.info("%s of ask %s is not confirmed: %s", message.kind, message.ask_id, error)

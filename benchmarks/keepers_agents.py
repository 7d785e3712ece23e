"""The sessions of OpenAI's Agents SDK and of Google's ADK, which keep messages and no versions.

Both are asynchronous. Neither can load an older state or fork; a compaction of an OpenAI session is
a `clear_session` and an `add_items`, two transactions between which the transcript is gone; ADK's
adds an event and keeps the others, so it costs a save.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import uuid
from typing import Any

from .keepers import TRANSCRIPT, Keeper, Message, Place, Work, compacted

PRAGMAS = ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL", "PRAGMA foreign_keys=ON")
APP, USER = "bench", "somebody"


def engine_of(place: Place) -> Any:
    """Return an engine with the settings of Holdfast's own connections."""
    import sqlalchemy
    from sqlalchemy.ext.asyncio import create_async_engine

    if place.path is None:
        url = sqlalchemy.make_url(place.dsn).set(drivername="postgresql+asyncpg")
        settings = {"server_settings": {"search_path": place.schema}}
        return create_async_engine(url, connect_args=settings)
    engine = create_async_engine(f"sqlite+aiosqlite:///{place.path}")

    @sqlalchemy.event.listens_for(engine.sync_engine, "connect")
    def connected(connection: Any, _: object) -> None:
        cursor = connection.cursor()
        for pragma in PRAGMAS:
            cursor.execute(pragma)
        cursor.close()

    return engine


class OpenAiKeeper(Keeper):
    """`SQLiteSession`, or `SQLAlchemySession` on either database."""

    can_load_last = can_compact = True

    def __init__(
        self, name: str, place: Place, runner: asyncio.Runner, *, sqlalchemy: bool
    ) -> None:
        super().__init__(name, place)
        self.runner = runner
        self._sqlalchemy = sqlalchemy
        self._opened: list[Any] = []

    def open(self) -> None:
        """Open the session; `SQLiteSession` sets WAL itself and leaves synchronous at FULL."""
        os.environ.setdefault("OPENAI_AGENTS_DISABLE_TRACING", "1")
        self._engine = engine_of(self.place) if self._sqlalchemy else None
        self._session = self._open(TRANSCRIPT)

    def _open(self, session_id: str) -> Any:
        if self._engine is not None:
            from agents.extensions.memory import (  # type: ignore[import-not-found]
                SQLAlchemySession,
            )

            return SQLAlchemySession(session_id, engine=self._engine, create_tables=True)
        from agents import SQLiteSession  # type: ignore[import-not-found]

        session = SQLiteSession(session_id, self.place.path)
        self._opened.append(session)
        return session

    def close(self) -> None:
        """Close every connection."""
        if self._engine is not None:
            self.done(self._engine.dispose)
        while self._opened:
            self._opened.pop().close()

    def native(self, message: Message) -> Any:
        """Return a message as the SDK has it: without the usage."""
        return {key: value for key, value in message.items() if key != "usage"}

    async def save(self) -> None:
        """Add the newest message."""
        await self._session.add_items(self.history[-1:])

    async def load(self) -> Any:
        """Get all messages."""
        return await self._session.get_items()

    async def load_last(self, count: int) -> Any:
        """Get the newest messages."""
        return await self._session.get_items(limit=count)

    def begin_compaction(self, history: list[Any]) -> Work:
        """Clear the session and add what stays."""
        session = self._open(str(uuid.uuid4()))
        self.done(lambda: session.add_items(history))
        shorter = compacted(self, history)

        async def compact() -> None:
            await session.clear_session()
            await session.add_items(shorter)

        return compact


class AdkKeeper(Keeper):
    """`DatabaseSessionService` on either database, or `SqliteSessionService`."""

    can_load_last = True

    def __init__(
        self, name: str, place: Place, runner: asyncio.Runner, *, sqlalchemy: bool
    ) -> None:
        super().__init__(name, place)
        self.runner = runner
        self._sqlalchemy = sqlalchemy
        self._session: Any = None

    def open(self) -> None:
        """Open the service; a file is put into WAL mode, which it keeps."""
        self._engine = engine_of(self.place) if self._sqlalchemy else None
        if self._engine is not None:
            from google.adk.sessions import (  # type: ignore[import-not-found]
                DatabaseSessionService,
            )

            self._service = DatabaseSessionService(db_engine=self._engine)
        else:
            from google.adk.sessions.sqlite_session_service import (  # type: ignore[import-not-found]
                SqliteSessionService,
            )

            with sqlite3.connect(str(self.place.path)) as connection:
                connection.execute("PRAGMA journal_mode=WAL").fetchall()
            connection.close()
            self._service = SqliteSessionService(str(self.place.path))
        if self._session is None:
            self._session = self.done(
                lambda: self._service.create_session(
                    app_name=APP, user_id=USER, session_id=TRANSCRIPT
                )
            )

    def close(self) -> None:
        """Close every connection; the other service opens one for each call."""
        if self._engine is not None:
            self.done(self._engine.dispose)

    def native(self, message: Message) -> Any:
        """Return a message as an event."""
        from google.adk.events import Event  # type: ignore[import-not-found]
        from google.genai import types  # type: ignore[import-not-found]

        role = "model" if message["role"] == "assistant" else "user"
        content = types.Content(role=role, parts=[types.Part(text=message["content"])])
        return Event(author=role, invocation_id=message["id"], content=content)

    async def save(self) -> None:
        """Append an event; the session object notices if somebody else did before."""
        await self._service.append_event(self._session, self.history[-1])

    async def load(self) -> Any:
        """Get the session with all events."""
        return (await self._get(None)).events

    async def load_last(self, count: int) -> Any:
        """Get the session with its newest events."""
        from google.adk.sessions.base_session_service import (  # type: ignore[import-not-found]
            GetSessionConfig,
        )

        return (await self._get(GetSessionConfig(num_recent_events=count))).events

    async def _get(self, config: Any) -> Any:
        return await self._service.get_session(
            app_name=APP, user_id=USER, session_id=TRANSCRIPT, config=config
        )

"""Artifacts: named outputs of sessions, which are sent with their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arguments import require_text, require_whole
from ..checkpoints.read import CheckpointReads
from ..codec import Codec
from ..errors import InvalidArgument
from ..feed import emit
from ..kernel.operation import Op, Query, Row, defer, rows
from ..sessions.access import lock_and_read_with, require_writable
from ..sessions.handle import SessionHandle
from .asks import SELECT_ANSWERS
from .records import Artifact, answer_of, artifact_context, opened

URI_CHARACTERS_MAX = 1_000
VERSION_MAX = 2**28 - 1

NEWEST_VERSION = """
SELECT session_id, name, version, media_type, uri, data, is_returned, item_id, fence, made_version,
    is_abandoned
FROM hf_artifacts
WHERE session_number = :session_number AND name = :name ORDER BY version DESC LIMIT 1
"""
ADD_ARTIFACT = """
INSERT INTO hf_artifacts (
    session_number, session_id, name, version, media_type, uri, data, is_returned, item_id, fence,
    made_version, created_at
) VALUES (
    :session_number, :session_id, :name, :version, :media_type, CAST(:uri AS TEXT),
    CAST(:data AS BLOB), :is_returned, CAST(:item_id AS TEXT), CAST(:fence AS INTEGER),
    :made_version, :now
)
"""
# What an earlier attempt at the item has added since the last turn.
REMOVE_REPLACED = """
DELETE FROM hf_artifacts
WHERE session_number = :session_number AND name = :name AND item_id = :item_id AND fence <> :fence
    AND made_version >= :since AND is_abandoned = 0
RETURNING version
"""
ADOPT = """
UPDATE hf_artifacts SET fence = :fence
WHERE session_number = :session_number AND name = :name AND version = :version
"""
LIST_ARTIFACTS = """
SELECT session_id, name, version, media_type, uri, data, is_returned FROM hf_artifacts
WHERE session_number = :session_number AND is_abandoned = 0 ORDER BY number
"""
ASKS_OF_SESSION = f"""
{SELECT_ANSWERS} WHERE session_number = :session_number AND is_abandoned = 0 ORDER BY number
"""
HAS_MADE = """
SELECT EXISTS (SELECT 1 FROM hf_artifacts WHERE session_number = :session_number) AS artifacts,
    EXISTS (SELECT 1 FROM hf_asks WHERE session_number = :session_number) AS asks
"""
ABANDON = """
UPDATE {table} SET is_abandoned = 1
WHERE session_number = :session_number AND {version} >= :version AND is_abandoned = 0
"""
ABANDON_ARTIFACTS = ABANDON.format(table="hf_artifacts", version="made_version")
ABANDON_ASKS = ABANDON.format(table="hf_asks", version="asked_version")


def check_artifact(artifact: Artifact) -> None:
    """Raise InvalidArgument if an artifact cannot be stored."""
    require_text("name", artifact.name)
    require_text("media_type", artifact.media_type)
    require_whole("version", artifact.version, 1, VERSION_MAX)
    if (artifact.data is None) == (artifact.uri is None):
        raise InvalidArgument("an artifact must have either data or a uri")
    if artifact.uri is not None:
        require_text("uri", artifact.uri, URI_CHARACTERS_MAX)


def add_artifact(
    session: SessionHandle[Any],
    name: str,
    media_type: str,
    data: Any,
    uri: str | None,
    *,
    returned: bool,
) -> Op[Artifact]:
    """Add the next version of an artifact to a session that may be written.

    An artifact equal to its newest version is not added again, and one that an earlier attempt at
    the same work item added since the last turn is replaced, so that a retry duplicates nothing.
    """
    check_artifact(Artifact(name=name, media_type=media_type, data=data, uri=uri))
    codec = session.runtime.codec
    body = None if data is None else codec.encode(data, name="data")
    here = {"session_number": session.number, "name": name}
    look = Query(NEWEST_VERSION, here)
    found, named = yield from lock_and_read_with(session.runtime, session._place, look)
    row = require_writable(session.runtime, session._place, found)
    attempt = _attempt_of(session)
    version = 1
    for newest in named:
        is_redone = (newest["item_id"], newest["is_abandoned"]) == (attempt["item_id"], 0)
        is_redone &= newest["fence"] not in {None, attempt["fence"]}
        version = newest["version"] + 1
        known = artifact_of(codec, newest)
        is_same = (known.media_type, known.uri, known.returned) == (media_type, uri, returned)
        is_same &= not newest["is_abandoned"]
        is_same &= (None if known.data is None else codec.encode(known.data)) == body
        if is_redone:
            if is_same:
                yield from defer(ADOPT, **here, version=known.version, fence=attempt["fence"])
            since = yield from _last_turn(session)
            removed = yield from rows(REMOVE_REPLACED, **here, **attempt, since=since)
            version = min((each["version"] for each in removed), default=version)
        if is_same:
            return known
    where = artifact_context(session.id, name, version)
    yield from defer(
        ADD_ARTIFACT,
        **here,
        **attempt,
        session_id=session.id,
        version=version,
        media_type=media_type,
        uri=uri,
        data=None if body is None else codec.seal(body, context=where),
        is_returned=int(returned),
        made_version=row["version"],
    )
    told: dict[str, Any] = {"name": name, "version": version, "media_type": media_type}
    yield from emit(codec, session.root_id, session.id, "artifact_added", told)
    return Artifact(**told, data=data, uri=uri, returned=returned)


def _attempt_of(session: SessionHandle[Any]) -> dict[str, Any]:
    """Return the work item for which a session is written, and the fence of the attempt."""
    guard = session.guard
    if guard is None or guard.noun != "work item":
        return {"item_id": None, "fence": None}
    return {"item_id": guard.id, "fence": guard.fence}


def _last_turn(session: SessionHandle[Any]) -> Op[int]:
    """Return the version of a session's last turn; 0 if it has none."""
    where = (session.id, session.number, session.root_id)
    history: CheckpointReads[Any] = CheckpointReads(session.runtime, *where)
    turns = yield from CheckpointReads.history(history, kind="turn", limit=1)
    return turns[0].version if turns else 0


def abandon(session_number: int, version: int) -> Op[None]:
    """Abandon what a session has added and asked since the version that it is rewound to."""
    given = {"session_number": session_number, "version": version}
    [made] = yield from rows(HAS_MADE, session_number=session_number)
    if made["artifacts"]:
        yield from defer(ABANDON_ARTIFACTS, **given)
    if made["asks"]:
        yield from defer(ABANDON_ASKS, **given)


def artifacts_of(codec: Codec, session_number: int) -> Op[list[Artifact]]:
    """Return the artifacts of a session, in the order in which they were added."""
    found = yield from rows(LIST_ARTIFACTS, session_number=session_number)
    return [artifact_of(codec, row) for row in found]


def outgoing_looks(session_number: int) -> list[Query]:
    """Return the queries whose rows `outgoing` needs."""
    given = {"session_number": session_number}
    return [Query(LIST_ARTIFACTS, given), Query(ASKS_OF_SESSION, given)]


def outgoing(codec: Codec, made: Sequence[Row], asks: Sequence[Row]) -> list[Artifact]:
    """Return what is sent with a session's answer: its own artifacts, then those of its peers."""
    own = (artifact_of(codec, row) for row in made)
    answers = (answer_of(codec, row) for row in asks)
    theirs = [each for answer in answers if answer is not None for each in answer.artifacts]
    return [*(each for each in own if each.returned), *theirs]


def artifact_of(codec: Codec, row: Row) -> Artifact:
    """Return an artifact's row as a record."""
    where = artifact_context(row["session_id"], row["name"], row["version"])
    names = ("name", "version", "media_type", "uri")
    return Artifact(
        **{name: row[name] for name in names},
        data=opened(codec, row["data"], where),
        returned=bool(row["is_returned"]),
    )

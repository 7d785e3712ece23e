"""Artifacts: named outputs of sessions, which go out with their answers."""

from __future__ import annotations

from typing import Any

from ..arguments import require_text, require_whole
from ..codec import Codec
from ..errors import InvalidArgument
from ..feed import emit
from ..kernel.operation import Op, Row, one, rows
from ..sessions.access import lock_and_read, require_writable
from ..sessions.handle import SessionHandle
from .asks import SELECT_ASKS
from .records import Artifact, answer_of, artifact_context, opened

URI_CHARACTERS_MAX = 1_000
VERSION_MAX = 2**28 - 1

NEWEST_VERSION = """
SELECT session_id, name, version, media_type, uri, data, is_returned FROM hf_artifacts
WHERE session_number = :session_number AND name = :name ORDER BY version DESC LIMIT 1
"""
ADD_ARTIFACT = """
INSERT INTO hf_artifacts (
    session_number, session_id, name, version, media_type, uri, data, is_returned, created_at
) VALUES (
    :session_number, :session_id, :name, :version, :media_type, CAST(:uri AS TEXT),
    CAST(:data AS BLOB), :is_returned, :now
)
"""
LIST_ARTIFACTS = """
SELECT session_id, name, version, media_type, uri, data, is_returned FROM hf_artifacts
WHERE session_number = :session_number ORDER BY number
"""
ASKS_OF_SESSION = f"""
{SELECT_ASKS} WHERE session_number = :session_number AND coalesce(state, '') <> 'open'
ORDER BY number
"""


def check_artifact(artifact: Artifact) -> None:
    """Raise InvalidArgument if an artifact cannot be stored."""
    require_text("name", artifact.name)
    require_text("media_type", artifact.media_type)
    require_whole("version", artifact.version, 1, VERSION_MAX)
    if (artifact.data is None) == (artifact.uri is None):
        raise InvalidArgument("an artifact has either data or a uri")
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

    What is equal to its newest version is not added again, so that a retry repeats nothing.
    """
    check_artifact(Artifact(name=name, media_type=media_type, data=data, uri=uri))
    codec = session.runtime.codec
    body = None if data is None else codec.encode(data, name="data")
    place = session._place
    require_writable(session.runtime, place, (yield from lock_and_read(session.runtime, place)))
    found = yield from one(NEWEST_VERSION, session_number=session.number, name=name)
    if found is not None:
        newest = _artifact(codec, found)
        kept = None if newest.data is None else codec.encode(newest.data)
        is_same = (newest.media_type, newest.uri, newest.returned) == (media_type, uri, returned)
        if is_same and kept == body:
            return newest
    version: int = 1 if found is None else found["version"] + 1
    where = artifact_context(session.id, name, version)
    yield from rows(
        ADD_ARTIFACT,
        session_number=session.number,
        session_id=session.id,
        name=name,
        version=version,
        media_type=media_type,
        uri=uri,
        data=None if body is None else codec.seal(body, context=where),
        is_returned=int(returned),
    )
    told: dict[str, Any] = {"name": name, "version": version, "media_type": media_type}
    yield from emit(codec, session.root_id, session.id, "artifact_added", told)
    return Artifact(**told, data=data, uri=uri, returned=returned)


def artifacts_of(codec: Codec, session_number: int) -> Op[list[Artifact]]:
    """Return the artifacts of a session, in the order in which they were added."""
    found = yield from rows(LIST_ARTIFACTS, session_number=session_number)
    return [_artifact(codec, row) for row in found]


def outgoing(codec: Codec, session_number: int) -> Op[list[Artifact]]:
    """Return what is sent with a session's answer: its own artifacts, then those of its peers."""
    own = yield from artifacts_of(codec, session_number)
    found = yield from rows(ASKS_OF_SESSION, session_number=session_number)
    answers = [answer_of(codec, row) for row in found]
    theirs = [each for answer in answers if answer is not None for each in answer.artifacts]
    return [*(each for each in own if each.returned), *theirs]


def _artifact(codec: Codec, row: Row) -> Artifact:
    where = artifact_context(row["session_id"], row["name"], row["version"])
    names = ("name", "version", "media_type", "uri")
    return Artifact(
        **{name: row[name] for name in names},
        data=opened(codec, row["data"], where),
        returned=bool(row["is_returned"]),
    )

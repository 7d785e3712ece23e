"""The queries of retention on sessions: long ones, forks, and trees that have not ended."""

from __future__ import annotations

# The condition that a tree has not ended; `root_id` is the expression for its root.
OPEN_TREE = """EXISTS (
    SELECT 1 FROM hf_sessions o
    WHERE o.root_id = {root_id} AND o.status IN ('active', 'waiting')
)"""

# A session has at most as many checkpoints as versions, a fork those from its fork point on, so
# this excludes most sessions.
LIST_LONG_SESSIONS = """
SELECT number, id, root_id FROM hf_sessions
WHERE number > :after AND version - coalesce(origin_version, 1) >= :keep
    AND (CAST(:only AS TEXT) IS NULL OR id = :only)
ORDER BY number LIMIT :limit
"""
# Forks of a session, forks of these, and so on, each with the version that it began with.
FORKS = """
WITH RECURSIVE forks (member, origin_number, origin_version) AS (
    SELECT number, origin_number, origin_version FROM hf_sessions WHERE origin_number = :number
    UNION SELECT s.number, s.origin_number, s.origin_version
    FROM hf_sessions s JOIN forks ON s.origin_number = forks.member
)
"""
FORK_POINTS = "SELECT s.origin_version FROM hf_sessions s WHERE s.origin_number = :number"

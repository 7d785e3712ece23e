"""What retention asks of sessions: which are long, who was forked from whom, which trees ended."""

from __future__ import annotations

# The condition, of a root's id, that somebody may still write to its tree.
OPEN_TREE = """EXISTS (
    SELECT 1 FROM hf_sessions o
    WHERE o.root_id = {root_id} AND o.status IN ('active', 'waiting')
)"""

# A session has at most as many checkpoints as versions, so most are left out here.
LIST_LONG_SESSIONS = """
SELECT number, id, root_id FROM hf_sessions
WHERE number > :after AND version > :keep AND (CAST(:only AS TEXT) IS NULL OR id = :only)
ORDER BY number LIMIT :limit
"""
LIST_FORKS = """
WITH RECURSIVE forks (member) AS (
    SELECT number FROM hf_sessions WHERE origin_number = :number
    UNION SELECT s.number FROM hf_sessions s JOIN forks ON s.origin_number = forks.member
)
SELECT member FROM forks
"""

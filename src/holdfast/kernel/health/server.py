"""What must hold on a PostgreSQL server."""

from __future__ import annotations

from ...clock import SystemClock
from ...records import Finding
from ...words import plural
from ..driver import Runner
from ..operation import Call, Op, Row, one, query, rows
from .contents import guarded

SERVER = """
SELECT CAST(current_setting('server_version_num') AS INTEGER) AS version_number,
    current_setting('server_version') AS version,
    current_setting('server_encoding') AS encoding,
    current_setting('fsync') AS fsync,
    current_setting('full_page_writes') AS full_page_writes,
    current_setting('synchronous_commit') AS synchronous_commit,
    current_setting('autovacuum') AS autovacuum,
    current_setting('default_transaction_read_only') AS read_only,
    pg_is_in_recovery() AS is_standby,
    CAST(current_setting('max_connections') AS INTEGER) AS connections_max,
    (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS connections
"""
TIME = "SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT) AS now_ms"
# A snapshot this old keeps every later dead row of the whole database from being removed.
OLD_TRANSACTIONS = """
SELECT pid, coalesce(state, 'unknown') AS state, coalesce(application_name, '') AS application,
    CAST(extract(epoch FROM now() - xact_start) AS BIGINT) AS seconds
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
    AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL OR state LIKE 'idle in transaction%')
    AND xact_start < now() - make_interval(secs => CAST(:seconds AS INTEGER))
ORDER BY xact_start
"""
DEAD_ROWS = """
SELECT relname AS name, n_live_tup AS live, n_dead_tup AS dead FROM pg_stat_user_tables
WHERE schemaname = :schema AND relname LIKE 'hf!_%' ESCAPE '!' ORDER BY n_dead_tup DESC
"""
VERSION_NUMBER_MIN = 140_000
TRANSACTION_SECONDS_MAX = 300
DEAD_ROWS_MIN = 10_000
SKEW_MS_MAX = 1_000
SHOWN_MAX = 5


class ServerOps:
    """Reads what the checks compare."""

    @query
    def server(self) -> Op[Row]:
        """Return the server's settings."""
        return (yield from one(SERVER)) or {}

    @query
    def now_ms(self) -> Op[int]:
        """Return the server's time at this moment."""
        row = yield from one(TIME)
        return 0 if row is None else int(row["now_ms"])

    @query
    def old_transactions(self, seconds: int) -> Op[list[Row]]:
        """Return the transactions that have been open for longer than this."""
        return (yield from rows(OLD_TRANSACTIONS, seconds=seconds))

    @query
    def dead_rows(self, schema: str) -> Op[list[Row]]:
        """Return each table with its live and dead rows."""
        return (yield from rows(DEAD_ROWS, schema=schema))


def server_findings(driver: Runner, schema: str) -> list[Finding]:
    """Look at the server."""
    row = driver.run(Call(ServerOps.server, ServerOps()))
    return [
        version_finding(row),
        encoding_finding(row),
        *durability_findings(row),
        writable_finding(row),
        connections_finding(row),
        *guarded("old transactions", lambda: [transactions_finding(driver)]),
        *guarded("dead rows", lambda: dead_row_findings(driver, schema, row)),
        *guarded("clock", lambda: [clock_finding(driver)]),
    ]


def version_finding(row: Row) -> Finding:
    """Refuse servers that are too old."""
    message = f"PostgreSQL {row['version']}."
    if row["version_number"] < VERSION_NUMBER_MIN:
        return Finding("server version", "problem", message, "Holdfast needs 14 or newer.")
    return Finding("server version", "ok", message)


def encoding_finding(row: Row) -> Finding:
    """Refuse databases that cannot hold every text."""
    message = f"The database is encoded in {row['encoding']}."
    if row["encoding"] != "UTF8":
        return Finding("encoding", "problem", message, "Create a database with ENCODING 'UTF8'.")
    return Finding("encoding", "ok", message)


def durability_findings(row: Row) -> list[Finding]:
    """Look for settings that let acknowledged commits be lost."""
    found = []
    for name in ("fsync", "full_page_writes"):
        if row[name] == "off":
            message = f"{name} is off: a crash of the machine can damage the whole database."
            found.append(Finding(name, "problem", message, f"Set {name} = on and reload."))
        else:
            found.append(Finding(name, "ok", f"{name} is {row[name]}."))
    name, value = "synchronous_commit", row["synchronous_commit"]
    if value == "off":
        message = "synchronous_commit is off. Holdfast turns it on in its own transactions; those "
        message += "joined by within() can be lost in a crash of the server."
        found.append(Finding(name, "warning", message, f"Set {name} = on."))
    else:
        found.append(Finding(name, "ok", f"{name} is {value}."))
    return found


def writable_finding(row: Row) -> Finding:
    """Look whether the server takes writes at all."""
    advice = "Name the primary server in the URL."
    if row["is_standby"]:
        return Finding("writable", "problem", "The server is a read-only standby.", advice)
    if row["read_only"] == "on":
        message = "default_transaction_read_only is on: nothing can be written."
        return Finding("writable", "problem", message, "Turn it off for this role and database.")
    return Finding("writable", "ok", "The server takes writes.")


def connections_finding(row: Row) -> Finding:
    """Look at how many connections are left."""
    used, most = row["connections"], row["connections_max"]
    message = f"{used} of {most} connections are in use."
    if used >= most * 0.8:
        advice = "Raise max_connections, or put a pooler in front (add ?prepare=off if it is old)."
        return Finding("connections", "warning", message, advice)
    return Finding("connections", "ok", message)


def transactions_finding(driver: Runner) -> Finding:
    """Look for transactions that nobody ends."""
    found = driver.run(Call(ServerOps.old_transactions, ServerOps(), (TRANSACTION_SECONDS_MAX,)))
    if not found:
        message = f"No transaction is older than {TRANSACTION_SECONDS_MAX // 60} minutes."
        return Finding("old transactions", "ok", message)
    shown = "; ".join(
        f"process {row['pid']} {row['application']} {row['state']} for {row['seconds']:,} s"
        for row in found[:SHOWN_MAX]
    )
    message = f"{plural(len(found), 'transaction')} open for long: {shown}."
    advice = "Dead rows stay while they last: end them, or pg_terminate_backend(process)."
    return Finding("old transactions", "warning", message, advice)


def dead_row_findings(driver: Runner, schema: str, server: Row) -> list[Finding]:
    """Look for tables that vacuum does not keep up with."""
    tables = driver.run(Call(ServerOps.dead_rows, ServerOps(), (schema,)))
    found = [
        Finding(
            "dead rows",
            "warning",
            f"{row['name']} has {row['dead']:,} dead rows beside {row['live']:,} live ones.",
            "Look for old transactions, then run VACUUM on the table.",
        )
        for row in tables[:SHOWN_MAX]
        if row["dead"] > max(DEAD_ROWS_MIN, row["live"] // 2)
    ]
    if server["autovacuum"] == "off":
        message = "autovacuum is off: tables only grow."
        found.append(Finding("dead rows", "warning", message, "Set autovacuum = on and reload."))
    return found or [Finding("dead rows", "ok", "Vacuum keeps up with the tables.")]


def clock_finding(driver: Runner) -> Finding:
    """Compare this machine's clock with the server's, which decides about leases and deadlines."""
    clock = SystemClock()
    before = clock.now_ms()
    there = driver.run(Call(ServerOps.now_ms, ServerOps()))
    after = clock.now_ms()
    skew_ms = there - (before + after) // 2
    if abs(skew_ms) > SKEW_MS_MAX + (after - before):
        direction = "ahead of" if skew_ms > 0 else "behind"
        message = f"The server's clock is {abs(skew_ms) / 1000:.1f} s {direction} this machine's."
        advice = "The server's clock decides; set both by NTP so that times can be compared."
        return Finding("clock", "warning", message, advice)
    return Finding("clock", "ok", f"The server's clock is within {SKEW_MS_MAX / 1000:g} s of ours.")

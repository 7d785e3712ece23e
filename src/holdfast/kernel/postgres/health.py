"""Checks of a PostgreSQL server."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...clock import SystemClock
from ...formatting import plural
from ...records import Finding
from ..driver import Runner
from ..operation import Call, Query, Row, read

READ_SERVER = """
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
READ_TIME = "SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT) AS now_ms"
# An old snapshot keeps vacuum from removing any row of the database that died since.
LIST_OLD_TRANSACTIONS = """
SELECT pid, coalesce(state, 'unknown') AS state, coalesce(application_name, '') AS application,
    CAST(extract(epoch FROM now() - xact_start) AS BIGINT) AS seconds
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
    AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL OR state LIKE 'idle in transaction%')
    AND xact_start < now() - make_interval(secs => CAST(:seconds AS INTEGER))
ORDER BY xact_start
"""
LIST_PREPARED = """
SELECT gid AS name, CAST(extract(epoch FROM now() - prepared) AS BIGINT) AS seconds
FROM pg_prepared_xacts
WHERE database = current_database()
    AND prepared < now() - make_interval(secs => CAST(:seconds AS INTEGER))
ORDER BY prepared
"""
# A slot without a reader keeps dead rows for ever.
LIST_IDLE_SLOTS = """
SELECT slot_name AS name,
    CASE WHEN age(catalog_xmin) > coalesce(age(xmin), 0) THEN age(catalog_xmin) ELSE age(xmin) END
        AS transactions
FROM pg_replication_slots
WHERE NOT active AND (xmin IS NOT NULL OR catalog_xmin IS NOT NULL)
ORDER BY slot_name
"""
# With hot_standby_feedback, a snapshot on a standby keeps the rows that die on its primary.
LIST_STANDBYS = """
SELECT application_name AS name, age(backend_xmin) AS transactions FROM pg_stat_replication
WHERE age(backend_xmin) > CAST(:transactions AS INTEGER)
UNION ALL SELECT slot_name, age(xmin) FROM pg_replication_slots
WHERE active AND age(xmin) > CAST(:transactions AS INTEGER)
ORDER BY 2 DESC, 1
"""
COUNT_DEAD_ROWS = """
SELECT relname AS name, n_live_tup AS live, n_dead_tup AS dead FROM pg_stat_user_tables
WHERE schemaname = :schema AND relname LIKE 'hf!_%' ESCAPE '!' ORDER BY n_dead_tup DESC
"""
VERSION_NUMBER_MIN = 140_000
TRANSACTION_SECONDS_MAX = 300
STANDBY_TRANSACTIONS_MAX = 100_000
DEAD_ROWS_MIN = 10_000
SKEW_MS_MAX = 1_000
SHOWN_MAX = 5


def server_checks(driver: Runner, schema: str) -> dict[str, Callable[[], list[Finding]]]:
    """Return the checks of the server, by name."""
    [row] = _rows(driver, READ_SERVER)
    return {
        "server": lambda: setting_findings(row),
        "old transactions": lambda: [transactions_finding(driver)],
        "prepared transactions": lambda: [
            prepared_finding(_rows(driver, LIST_PREPARED, seconds=TRANSACTION_SECONDS_MAX))
        ],
        "replication slots": lambda: [slots_finding(_rows(driver, LIST_IDLE_SLOTS))],
        "standbys": lambda: [standbys_finding(driver)],
        "dead rows": lambda: dead_row_findings(driver, schema, row),
        "clock": lambda: [clock_finding(driver)],
    }


def setting_findings(row: Row) -> list[Finding]:
    """Check the version, and settings by which commits can be lost or refused."""
    is_old = row["version_number"] < VERSION_NUMBER_MIN
    is_utf8 = row["encoding"] == "UTF8"
    return [
        Finding.of(
            "server version",
            f"PostgreSQL {row['version']}.",
            problem="Holdfast needs 14 or newer." if is_old else "",
        ),
        Finding.of(
            "encoding",
            f"The database is encoded in {row['encoding']}.",
            problem="" if is_utf8 else "Create a database with ENCODING 'UTF8'.",
        ),
        *durability_findings(row),
        writable_finding(row),
        connections_finding(row),
    ]


def durability_findings(row: Row) -> list[Finding]:
    """Check for settings with which acknowledged commits can be lost."""
    found = []
    for name in ("fsync", "full_page_writes"):
        if row[name] == "off":
            message = f"{name} is off: a crash of the machine can damage the whole database."
            found.append(Finding.of(name, message, problem=f"Set {name} = on and reload."))
        else:
            found.append(Finding.of(name, f"{name} is {row[name]}."))
    name, value = "synchronous_commit", row["synchronous_commit"]
    if value == "off":
        message = "synchronous_commit is off. Holdfast turns it on in its own transactions; those "
        message += "joined by within() can be lost in a crash of the server."
        return [*found, Finding.of(name, message, warning=f"Set {name} = on.")]
    return [*found, Finding.of(name, f"{name} is {value}.")]


def writable_finding(row: Row) -> Finding:
    """Check whether the server accepts writes."""
    if row["is_standby"]:
        message, advice = (
            "The server is a read-only standby.",
            "Name the primary server in the URL.",
        )
    elif row["read_only"] == "on":
        message = "default_transaction_read_only is on: nothing can be written."
        advice = "Turn it off for this role and database."
    else:
        message, advice = "The server accepts writes.", ""
    return Finding.of("writable", message, problem=advice)


def connections_finding(row: Row) -> Finding:
    """Check how many connections are left."""
    used, most = row["connections"], row["connections_max"]
    advice = "Raise max_connections, or put a pooler in front (add ?prepare=off if it is old)."
    message = f"{used} of {most} connections are in use."
    return Finding.of("connections", message, warning=advice if used >= most * 0.8 else "")


def transactions_finding(driver: Runner) -> Finding:
    """Look for transactions that have been open too long."""
    found = _rows(driver, LIST_OLD_TRANSACTIONS, seconds=TRANSACTION_SECONDS_MAX)
    if not found:
        message = f"No transaction is older than {TRANSACTION_SECONDS_MAX // 60} minutes."
        return Finding.of("old transactions", message)
    shown = "; ".join(
        f"process {row['pid']} {row['application']} {row['state']} for {row['seconds']:,} s"
        for row in found[:SHOWN_MAX]
    )
    message = f"{plural(len(found), 'transaction')} open for too long: {shown}."
    advice = "Dead rows cannot be removed meanwhile: end them, or pg_terminate_backend(process)."
    return Finding.of("old transactions", message, warning=advice)


def prepared_finding(found: Sequence[Row]) -> Finding:
    """Look for transactions that were prepared and neither committed nor rolled back."""
    name = "prepared transactions"
    if not found:
        return Finding.of(name, "None was left prepared.")
    shown = "; ".join(f"{row['name']!r} for {row['seconds']:,} s" for row in found[:SHOWN_MAX])
    message = f"{plural(len(found), 'transaction')} prepared too long ago: {shown}."
    advice = "Dead rows cannot be removed meanwhile: COMMIT PREPARED or ROLLBACK PREPARED each."
    return Finding.of(name, message, warning=advice)


def slots_finding(found: Sequence[Row]) -> Finding:
    """Look for replication slots without a reader that keep dead rows from being removed."""
    if not found:
        return Finding.of("replication slots", "None without a reader holds back dead rows.")
    message = f"{plural(len(found), 'replication slot')} without a reader: {_behind(found)}."
    advice = "Dead rows cannot be removed: start its reader, or pg_drop_replication_slot(name)."
    return Finding.of("replication slots", message, warning=advice)


def standbys_finding(driver: Runner) -> Finding:
    """Look for standbys whose old snapshots keep dead rows from being removed here."""
    found = _rows(driver, LIST_STANDBYS, transactions=STANDBY_TRANSACTIONS_MAX)
    if not found:
        return Finding.of("standbys", "None holds back dead rows.")
    message = f"{plural(len(found), 'standby')} with an old snapshot: {_behind(found)}."
    advice = "Dead rows cannot be removed meanwhile: end its query, or hot_standby_feedback there."
    return Finding.of("standbys", message, warning=advice)


def _behind(found: Sequence[Row]) -> str:
    return "; ".join(
        f"{row['name']!r}, {row['transactions']:,} transactions behind" for row in found[:SHOWN_MAX]
    )


def dead_row_findings(driver: Runner, schema: str, server: Row) -> list[Finding]:
    """Look for tables that vacuum does not keep up with."""
    tables = _rows(driver, COUNT_DEAD_ROWS, schema=schema)
    found = [
        Finding.of(
            "dead rows",
            f"{row['name']} has {row['dead']:,} dead rows beside {row['live']:,} live.",
            warning="Look for old transactions, then run VACUUM on the table.",
        )
        for row in tables[:SHOWN_MAX]
        if row["dead"] > max(DEAD_ROWS_MIN, row["live"] // 2)
    ]
    if server["autovacuum"] == "off":
        message = "autovacuum is off: dead rows are never removed."
        found.append(Finding.of("dead rows", message, warning="Set autovacuum = on and reload."))
    return found or [Finding.of("dead rows", "Vacuum keeps up with the tables.")]


def clock_finding(driver: Runner) -> Finding:
    """Compare this machine's clock with the server's, which decides leases and deadlines."""
    clock = SystemClock()
    before = clock.now_ms()
    [there] = _rows(driver, READ_TIME)
    after = clock.now_ms()
    skew_ms = there["now_ms"] - (before + after) // 2
    if abs(skew_ms) > SKEW_MS_MAX + (after - before):
        direction = "ahead of" if skew_ms > 0 else "behind"
        message = f"The server's clock is {abs(skew_ms) / 1000:.1f} s {direction} this machine's."
        advice = "The server's clock decides; set both by NTP so that times can be compared."
        return Finding.of("clock", message, warning=advice)
    return Finding.of("clock", f"The server's clock is within {SKEW_MS_MAX / 1000:g} s of ours.")


def _rows(driver: Runner, sql: str, **parameters: object) -> list[Row]:
    return driver.run(Call(read, None, (Query(sql, parameters),)))

"""`holdfast audit`: what was decided, by whom, and whether the trail is whole."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from ..errors import CorruptStore
from ..formatting import plural
from ..store import Store
from . import output
from .command import After, Answer, Commands, Limit, option, page
from .tokens import token_names

app = Commands("Show the audit trail, and verify that nobody changed it.")


@app.command("list", mode="read")
def list_records(
    store: Store,
    after: After = 0,
    limit: Limit = 100,
) -> Answer:
    """List what was decided, oldest first."""
    found = store.audit.list(after=after, limit=limit)
    names = token_names(store)
    columns: output.Columns = {
        "number": "number",
        "at": "created_at",
        "who": "actor",
        "action": "action",
        "subject": lambda record: names.get(record.subject, record.subject),
        "reason": "reason",
        "count": "count",
    }
    return page(
        "records", found, output.data, columns, limit=limit,
        drop=("count", "at"), shorten="subject", empty="Nothing has been decided yet.",
    )  # fmt: skip


@app.command(mode="read")
def verify(
    store: Store,
    head: Annotated[
        str | None, option("HEAD", "What `audit head` printed earlier.", show_default=False)
    ] = None,
) -> Answer:
    """Verify that no record was edited, removed, reordered or added by hand."""
    found = store.audit.verify(head)
    if not found.problems:
        chained = f"{plural(found.records, 'record')}, chained without a break."
        return Answer(asdict(found), f"{chained}\nHead: {found.head}")
    shown = "\n".join(["The audit trail was changed:", *(f"  {each}" for each in found.problems)])
    return Answer(asdict(found), shown, exit_code=CorruptStore.exit_code)


@app.command(mode="read")
def head(store: Store) -> Answer:
    """Print the number and digest of the last record, to be kept outside the store."""
    last = store.audit.head()
    return Answer({"head": last}, last)

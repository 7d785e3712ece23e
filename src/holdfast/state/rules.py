"""Rules of keys: a JSON Schema that every value must match, and a named reducer.

A rule belongs to the name of a key and stays when the key is deleted. It has no version and is not
part of the state's history: a restore writes old values under the current rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..arguments import require_one_of, shown
from ..codec import Codec
from ..dataclass import dataclass
from ..errors import InvalidArgument, LimitExceeded, NotFound
from ..feed.events import event
from ..kernel.operation import Op, Query, Row, Runtime, batch, rows
from ..kernel.sql import given, given_keys
from ..sessions.rows import require_root
from .records import KeyRule
from .schemas import Schemas, require_schema
from .values import MISSING, Mutation, Operation, checked

if TYPE_CHECKING:
    from .write import StateWrite

Reducer = Literal["last", "sum", "min", "max", "append", "add", "merge"]
REDUCERS: dict[Reducer, Operation] = {
    "last": "set",
    "sum": "increment",
    "min": "min",
    "max": "max",
    "append": "append",
    "add": "add",
    "merge": "merge",
}
assert tuple(REDUCERS) == get_args(Reducer)

# Fragment: given keys of a tree. Behind an OFFSET, PostgreSQL does not see that they are of one
# tree, and looks for each in the index; else it would read all keys of a tree it takes for small.
GIVEN_KEYS = f"""(root_id, key) IN (
    SELECT CAST(:root_id AS TEXT), given_key FROM {given_keys("keys")} AS given /*pg OFFSET 0 */
)"""  # noqa: S608
RULE_COLUMNS = "key, json_schema, reducer, updated_by, updated_at"
LIST_RULES = f"""
SELECT {RULE_COLUMNS} FROM hf_state_rules WHERE root_id = :root_id ORDER BY key
"""  # noqa: S608
READ_RULES = f"""
SELECT {RULE_COLUMNS} FROM hf_state_rules WHERE {GIVEN_KEYS}
"""  # noqa: S608
HAS_RULES = "EXISTS (SELECT 1 FROM hf_state_rules r WHERE r.root_id = {root_id})"
COUNT_RULES = "SELECT count(*) AS count FROM hf_state_rules WHERE root_id = :root_id"
WRITE_RULE = """
INSERT INTO hf_state_rules (root_id, key, json_schema, reducer, updated_by, updated_at)
VALUES (:root_id, :key, :json_schema, :reducer, :updated_by, :now)
ON CONFLICT (root_id, key) DO UPDATE SET json_schema = excluded.json_schema,
    reducer = excluded.reducer, updated_by = excluded.updated_by, updated_at = excluded.updated_at
"""
REMOVE_RULE = "DELETE FROM hf_state_rules WHERE root_id = :root_id AND key = :key"


def rule_context(root_id: str, key: str) -> tuple[str, ...]:
    """Return the context that the encrypted schema of a key is bound to."""
    return "hf_state_rules", root_id, key


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of a key, with its schema encoded."""

    schema: bytes | None = None
    reducer: Reducer | None = None

    def require_fit(self, runtime: Runtime, key: str, value: Any) -> None:
        """Raise InvalidValue unless the value matches the schema, if there is one."""
        if self.schema is not None:
            Schemas.of(runtime).require_fit(self.schema, key, value)


NO_RULE = Rule()


def require_rule(codec: Codec, key: str, schema: object, reducer: object) -> Rule:
    """Return a valid rule, or raise InvalidArgument."""
    if schema is None and reducer is None:
        raise InvalidArgument("a rule needs a schema, a reducer, or both")
    body = None
    if schema is not None:
        body = codec.encode(schema, name="schema")
        require_schema(key, schema)
    name = None if reducer is None else require_one_of("reducer", reducer, get_args(Reducer))
    return Rule(body, name)


def resolved(mutation: Mutation, rule: Rule) -> Mutation:
    """Return the mutation that the key's reducer stands for; others are returned unchanged."""
    if mutation.operation != "reduce":
        return mutation
    key, reducer = mutation.key, rule.reducer
    if reducer is None:
        raise NotFound(
            f"{key!r} has no reducer; `holdfast state set-rule` gives it one; nothing was changed",
            key=key,
        )
    try:
        return checked(
            Mutation(
                operation=REDUCERS[reducer],
                key=key,
                argument=mutation.argument,
                if_version=mutation.if_version,
            )
        )
    except InvalidArgument as error:
        raise InvalidArgument(f"the reducer of {shown(key)} is {reducer}: {error}") from error


def read_rules(codec: Codec, root_id: str, keys: Iterable[str] | None) -> Op[dict[str, Rule]]:
    """Return the rules of some keys, or of all."""
    wanted = {} if keys is None else {"keys": given(keys)}
    found = yield from rows(READ_RULES if wanted else LIST_RULES, root_id=root_id, **wanted)
    return {row["key"]: Rule(_schema(codec, root_id, row), row["reducer"]) for row in found}


def list_rules(codec: Codec, root_id: str) -> Op[list[KeyRule]]:
    """Return the rules of a tree, sorted by key."""
    found = yield from rows(LIST_RULES, root_id=root_id)
    if not found:
        yield from require_root(root_id)
    return [_record(codec, root_id, row) for row in found]


def _record(codec: Codec, root_id: str, row: Row) -> KeyRule:
    body = _schema(codec, root_id, row)
    return KeyRule(
        key=row["key"],
        schema=None if body is None else codec.decode(body),
        reducer=row["reducer"],
        updated_by=row["updated_by"],
        updated_at=row["updated_at"],
    )


def _schema(codec: Codec, root_id: str, row: Row) -> bytes | None:
    if row["json_schema"] is None:
        return None
    return codec.unseal(row["json_schema"], context=rule_context(root_id, row["key"]))


def set_rule(state: StateWrite, key: str, rule: Rule) -> Op[None]:
    """Set the rule of a key, which its value must match; an equal one is not written again."""
    yield from state.begin([key])
    if (value := state.value(key)) is not MISSING:
        rule.require_fit(state.runtime, key, value)
    if state.rule(key) == rule:
        return
    root_id = state.place.root_id
    _, [counted] = yield from batch(
        _writing(state, key, rule), Query(COUNT_RULES, {"root_id": root_id})
    )
    most = state.runtime.codec.limits.keys_per_root
    if counted["count"] > most:
        raise LimitExceeded(
            f"the state of {root_id} would have rules for {counted['count']:,} keys; the limit is "
            f"{most:,} (Limits.keys_per_root); nothing was changed",
            limit=most,
            actual=counted["count"],
        )
    data = {"key": key, "has_schema": rule.schema is not None, "reducer": rule.reducer}
    yield event(state.runtime.codec, root_id, state.place.session_id, "state_rule_set", data)


def delete_rule(state: StateWrite, key: str) -> Op[None]:
    """Remove the rule of a key, or raise NotFound. Its value stays."""
    yield from state.begin([key])
    root_id = state.place.root_id
    if state.rule(key) == NO_RULE:
        raise NotFound(f"{key!r} has no rule in the state of {root_id}", key=key)
    yield from rows(REMOVE_RULE, root_id=root_id, key=key)
    yield event(
        state.runtime.codec, root_id, state.place.session_id, "state_rule_deleted", {"key": key}
    )


def copy_rules(state: StateWrite, rules: Mapping[str, Rule]) -> Op[None]:
    """Write rules to a tree that has none."""
    yield from batch(*(_writing(state, key, rule) for key, rule in rules.items()))


def _writing(state: StateWrite, key: str, rule: Rule) -> Query:
    root_id, sealed = state.place.root_id, None
    if rule.schema is not None:
        sealed = state.runtime.codec.seal(rule.schema, context=rule_context(root_id, key))
    return Query(
        WRITE_RULE,
        {
            "root_id": root_id,
            "key": key,
            "json_schema": sealed,
            "reducer": rule.reducer,
            "updated_by": state.place.session_id,
        },
    )

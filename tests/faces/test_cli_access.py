"""Tokens and the audit trail on the command line, on both databases."""

from __future__ import annotations

from typing import Any

import holdfast
from tests.faces.test_cli_sessions import ISO, Run, data, lines, quick

__all__ = ["quick"]


def test_a_token_is_made_with_its_secret_once(place: dict[str, Any], quick: Run) -> None:
    with holdfast.open(**place) as store:
        store.session("root-session")
    said = lines(quick("tokens", "create", "ci"))
    assert said[0].startswith("hf_")
    assert "not shown again" in " ".join(said)
    # Here, too, the beginning of its id is enough.
    options = ("--permission=write", "--session=root-ses", "--expires-in=60", "--json")
    made = data(quick("tokens", "create", "tree", *options))
    assert (made["permission"], made["root_id"]) == ("write", "root-session")
    assert ISO.fullmatch(made["expires_at"])
    with holdfast.open(**place) as store:
        for secret, name in ((said[0], "ci"), (made["secret"], "tree")):
            token = store.tokens.find(secret)
            assert token is not None
            assert token.name == name
    listed = quick("tokens", "list", "--json")
    assert "hf_" not in listed.stdout
    found = data(listed)["tokens"]
    assert [(each["name"], each["state"]) for each in found] == [
        ("ci", "usable"),
        ("tree", "usable"),
    ]
    table = lines(quick("tokens", "list"))
    assert table[1].split()[:5] == ["1", "ci", "read", "-", "usable"]
    with holdfast.open(**place) as store:
        tree = store.tokens.find(made["secret"])
        assert tree is not None
        acting = store.on_behalf_of(tree)
        acting.tokens.create("helper", session="root-session", expires_in_seconds=9)
    assert lines(quick("tokens", "list"))[3].split()[5] == "tree"
    again = quick("tokens", "create", "ci")
    assert (again.returncode, "revoke it first" in again.stderr) == (4, True)
    wrong = quick("tokens", "create", "x", "--permission=root")
    assert (wrong.returncode, "--permission must be one of" in wrong.stderr) == (2, True)


def test_a_token_is_revoked(place: dict[str, Any], quick: Run) -> None:
    with holdfast.open(**place) as store:
        secret = store.tokens.create("ci").secret
    assert quick("tokens", "revoke", "ci").returncode == 2
    said = lines(quick("tokens", "revoke", "ci", "--yes"))
    assert said == ["Token 'ci' is refused from now on."]
    with holdfast.open(**place) as store:
        assert store.tokens.find(secret) is None
    assert data(quick("tokens", "list", "--json"))["tokens"][0]["state"] == "revoked"
    assert quick("tokens", "revoke", "nobody", "--yes").returncode == 3


def test_the_audit_trail_is_listed_and_verified(place: dict[str, Any], quick: Run) -> None:
    with holdfast.open(**place) as store:
        token = store.tokens.create("ops", permission="admin")
        store.on_behalf_of(token).session("gone").delete()
        head = store.audit.head()
        store.audit.refused("wrong token", count=3)
    found = data(quick("audit", "list", "--json"))
    assert [(each["actor"], each["action"], each["count"]) for each in found["records"]] == [
        ("local", "token_created", 1),
        ("ops", "session_deleted", 1),
        ("local", "refused", 3),
    ]
    assert lines(quick("audit", "list"))[1].split()[2:5] == ["local", "token_created", "ops"]
    assert "There may be more: --after 2" in quick("audit", "list", "--limit=2").stdout
    assert lines(quick("audit", "list", "--after=2"))[1].split()[0] == "3"
    verified = quick("audit", "verify", "--head", head)
    assert (verified.returncode, lines(verified)[0]) == (0, "3 records, chained without a break.")
    newest = lines(quick("audit", "head"))[0]
    assert newest.startswith("3:")
    assert data(quick("audit", "head", "--json")) == {"head": newest}
    wrong = quick("audit", "verify", "--head", f"3:{head.partition(':')[2]}")
    assert wrong.returncode == 7
    assert "record 3 does not have the digest that was recorded" in wrong.stdout
    assert quick("audit", "verify", "--head=x").returncode == 2

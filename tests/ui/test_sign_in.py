"""Signing in with a browser: codes, cookies, forms, and what a foreign page cannot do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.server import access, sign_in
from holdfast.server.options import Options, ServerLimits
from holdfast.server.routes import ENDPOINTS
from tests.server.serving import Served, error, serving

HTML = {"accept": "text/html,*/*"}
PAGES = [
    each for each in ENDPOINTS if each.is_page and each.permission is not None and not each.body
]
FORMS = [each for each in ENDPOINTS if each.is_page and each.body and each.permission is not None]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = Options(limits=ServerLimits(wrong_tokens_per_minute=3))
    path = tmp_path_factory.mktemp("ui") / "store.db"
    with serving(options, url=f"sqlite:///{path}") as served:
        yield served


def options_of(served: Served) -> Options:
    return served.api.context.options


def token_id(served: Served) -> str:
    async def first() -> str:
        return (await served.store.tokens.list())[0].id

    return served.runner.run(first())


def cookie(served: Served) -> dict[str, str]:
    """Return the header of a browser that is signed in."""
    signing = options_of(served).sign_in
    return {"cookie": f"{signing.cookie_name}={signing.cookie(token_id(served))}"}


def csrf(served: Served, headers: dict[str, str]) -> str:
    return options_of(served).sign_in.form_token(headers["cookie"])


def ask(served: Served, path: str, **headers: str) -> Any:
    served.client.cookies.clear()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return served.get(path, token=None, headers=HTML | named)


def send(served: Served, path: str, form: dict[str, str], **headers: str) -> Any:
    served.client.cookies.clear()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return served.post(path, token=None, data=form, headers=HTML | named)


def test_a_code_signs_in_once_and_for_a_minute(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    signing = options_of(served).sign_in
    place = f"/ui/login?code={signing.new_code(token_id(served))}"
    answer = ask(served, place)
    assert answer.status_code == 200
    [given] = answer.headers.get_list("set-cookie")
    value, *flags = given.split("; ")
    assert flags == ["Path=/ui", "Max-Age=43200", "HttpOnly", "SameSite=Strict"]
    assert ask(served, "/ui/", cookie=value).status_code == 200
    again = ask(served, place)
    assert (again.status_code, "set-cookie" in again.headers) == (401, False)
    assert "used already" in again.text
    monkeypatch.setattr(sign_in, "CODE_SECONDS", 0.0)
    late = signing.new_code(token_id(served))
    assert ask(served, f"/ui/login?code={late}").status_code == 401


def test_a_token_signs_in_and_wrong_ones_are_slowed_down(served: Served) -> None:
    headers: dict[str, str] = {"cookie": ""}
    form = {"csrf": csrf(served, headers), "next": "/ui/sessions?status=failed"}
    right = send(served, "/ui/login", {**form, "token": f" {served.secrets['all']}\n"})
    assert (right.status_code, right.headers["location"]) == (303, "/ui/sessions?status=failed")
    for _ in range(3):
        wrong = send(served, "/ui/login", {**form, "token": "hf_wrong"})
        assert (wrong.status_code, "set-cookie" in wrong.headers) == (401, False)
        assert "unknown, revoked or expired" in wrong.text
    odd = send(served, "/ui/login", {**form, "token": "hf é\n"})
    assert (odd.status_code, "set-cookie" in odd.headers) == (401, False)
    braked = send(served, "/ui/login", {**form, "token": "hf_other"})
    assert "too many wrong tokens" in braked.text
    assert "set-cookie" not in braked.headers


@pytest.mark.parametrize("path", ["/ui/login", "/ui/theme"])
def test_a_form_with_many_fields_is_refused_before_they_are_read(served: Served, path: str) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    for fields in (101, 1_000_000):
        flood = "&".join(["a=1"] * fields)
        refused = served.request("POST", path, content=flood, headers=headers)
        assert error(refused) == (400, "malformed")
        assert refused.json()["detail"] == "the form has more than 100 fields"


@pytest.mark.parametrize(
    "place",
    [
        "//evil.example",
        "https://evil.example",
        "/ui/\\evil",
        "/ui//evil",
        "/sessions",
        "/ui/\n",
        "",
    ],
)
def test_nobody_is_sent_to_another_server(served: Served, place: str) -> None:
    form = {"csrf": csrf(served, {"cookie": ""}), "next": place, "token": served.secrets["all"]}
    assert send(served, "/ui/login", form).headers["location"] == "/ui/"


def test_a_cookie_is_for_pages_alone_and_cannot_be_made_up(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = cookie(served)
    assert ask(served, "/ui/", **mine).status_code == 200
    assert error(served.get("/sessions", token=None, headers=mine)) == (401, "unauthorized")
    name, _, value = mine["cookie"].partition("=")
    id, expires, signature = value.split(".")
    for wrong in (
        f"{id}.{int(expires) + 1}.{signature}",
        f"{id}x.{expires}.{signature}",
        f"{id}.{expires}.{signature[:-1]}{'1' if signature[-1] == '0' else '0'}",
        f"{id}.{expires}.",
        "..",
        "",
    ):
        answer = ask(served, "/ui/", cookie=f"{name}={wrong}")
        assert (answer.status_code, answer.headers["location"]) == (
            303,
            "/ui/login?next=%2Fui%2F",
        ), wrong
    monkeypatch.setattr(sign_in, "wall_ms", lambda: int(expires) * 1_000)
    assert ask(served, "/ui/", **mine).status_code == 303


def test_a_revoked_token_signs_its_browsers_out(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "REMEMBERED_SECONDS", 0.0)
    make, revoke = served.store.tokens.create, served.store.tokens.revoke

    async def made() -> str:
        return (await make("soon")).id

    async def revoked() -> None:
        await revoke("soon")

    signing = options_of(served).sign_in
    mine = {"cookie": f"{signing.cookie_name}={signing.cookie(served.runner.run(made()))}"}
    assert ask(served, "/ui/", **mine).status_code == 200
    served.runner.run(revoked())
    assert ask(served, "/ui/", **mine).status_code == 303


def test_a_cookie_outlives_a_start_with_the_same_secret() -> None:
    first, again = sign_in.SignIn.with_secret("hf_a"), sign_in.SignIn.with_secret("hf_a")
    cookies = f"{first.cookie_name}={first.cookie('t1')}"
    assert again.token_id(f"other=1; {cookies}") == "t1"
    assert sign_in.SignIn.with_secret("hf_b").token_id(cookies) is None
    assert sign_in.SignIn().cookie_name != sign_in.SignIn().cookie_name


@pytest.mark.parametrize("endpoint", PAGES, ids=lambda each: each.path)
def test_a_foreign_page_cannot_have_the_cookie_used(served: Served, endpoint: Any) -> None:
    path = endpoint.path.format(id="one", version="1", key="k")
    mine = cookie(served)
    for site in ("cross-site", "same-site"):
        answer = ask(served, path, sec_fetch_site=site, **mine)
        assert (answer.status_code, "login" in answer.headers["location"]) == (303, True)
    assert ask(served, path, origin="http://evil.example", **mine).status_code == 403
    assert ask(served, path, host="evil.example", **mine).status_code == 421
    # One who comes from elsewhere finds the way from our own page.
    login = ask(served, "/ui/login?next=/ui/sessions", sec_fetch_site="cross-site")
    assert 'href="/ui/sessions"' in login.text


@pytest.mark.parametrize("endpoint", FORMS, ids=lambda each: each.path)
def test_every_form_needs_the_token_of_its_page(served: Served, endpoint: Any) -> None:
    path = endpoint.path.format(id="one", version="1", key="k")
    run = served.runner.run

    async def prepare() -> None:
        await (await served.store.session("one")).save({"c": 1})

    run(prepare())
    mine = cookie(served)
    for given in ({}, {"csrf": "x"}, {"csrf": csrf(served, {"cookie": ""})}):
        refused = send(served, path, given, **mine)
        assert refused.status_code == 403, given
        assert "not come from a page" in refused.text
    foreign = send(served, path, {"csrf": csrf(served, mine)}, origin="null", **mine)
    assert foreign.status_code == 403
    as_json = served.post(path, json={"csrf": csrf(served, mine)}, headers=mine, token=None)
    assert error(as_json) == (415, "unsupported_media_type")


def test_signing_out_and_the_theme(served: Served) -> None:
    mine = cookie(served)
    form = {"csrf": csrf(served, mine)}
    answer = send(served, "/ui/theme", {**form, "theme": "dark", "next": "/ui/sessions"}, **mine)
    assert answer.headers["location"] == "/ui/sessions"
    theme = answer.headers["set-cookie"].partition(";")[0]
    page = ask(served, "/ui/", cookie=f"{mine['cookie']}; {theme}").text
    assert 'data-theme="dark"' in page
    assert 'data-theme="system"' in ask(served, "/ui/", **mine).text
    out = send(served, "/ui/logout", form, **mine)
    assert re.match(r"holdfast_\w+=; Path=/ui; Max-Age=0; ", out.headers["set-cookie"])


def test_a_server_with_tls_keeps_its_cookie_to_tls() -> None:
    told = sign_in.set_cookie("c", "v", "/base", is_secure=True)
    assert told == "c=v; Path=/base/ui; Max-Age=43200; HttpOnly; SameSite=Strict; Secure"


def test_people_are_sent_to_the_dashboard(served: Served) -> None:
    for path in ("/", "/ui"):
        assert ask(served, path).headers["location"] == "/ui/"

"""Secrets of common shapes are found, and nearly nothing else is taken for one."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import string
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.effects.requests import derive_key
from holdfast.errors import InvalidArgument
from holdfast.redaction import NoRedaction, Redaction, Redactor

SEED = 20261115
SOURCES = Path(__file__).parents[2] / "src" / "holdfast"
ALNUM = string.ascii_letters + string.digits
URL_SAFE = ALNUM + "_-"
BASE64 = ALNUM + "+/"
HEX = "0123456789abcdef"

redactor = Redactor()


def text_of(dice: random.Random, characters: str, length: int) -> str:
    return "".join(dice.choices(characters, k=length))


def with_check_digit(digits: str) -> str:
    total = sum(
        int(digit) if place % 2 else sum(divmod(2 * int(digit), 10))
        for place, digit in enumerate(reversed(digits))
    )
    return digits + str(-total % 10)


def card(dice: random.Random) -> str:
    prefix, length = dice.choice(
        [("4", 16), ("51", 16), ("2720", 16), ("37", 15), ("6011", 16), ("3530", 16), ("36", 14),
         ("4", 13), ("6240", 19)]
    )  # fmt: skip
    number = with_check_digit(prefix + text_of(dice, string.digits, length - 1 - len(prefix)))
    separator = dice.choice(["", " ", "-"])
    groups = (4, 6, 5) if length == 15 else (4, 6, 4) if length == 14 else (4, 4, 4, 4, 3)
    if length == 13 or not separator:
        return number
    parts, at = [], 0
    for group in groups:
        parts.append(number[at : at + group])
        at += group
    return separator.join(part for part in parts if part)


def jwt(dice: random.Random) -> str:
    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    body = {"sub": text_of(dice, string.digits, 8), "exp": dice.randrange(10**9, 2 * 10**9)}
    head = {"alg": dice.choice(["HS256", "RS256"]), "typ": "JWT"}
    return f"{part(head)}.{part(body)}.{text_of(dice, URL_SAFE, dice.choice([43, 86, 342]))}"


def pem(dice: random.Random) -> str:
    label = dice.choice(["", "RSA ", "EC ", "OPENSSH ", "ENCRYPTED "])
    lines = [text_of(dice, BASE64, 64) for _ in range(dice.randrange(3, 20))]
    newline = dice.choice(["\n", "\r\n", "\\n"])
    return newline.join(
        [f"-----BEGIN {label}PRIVATE KEY-----", *lines, f"-----END {label}PRIVATE KEY-----"]
    )


def password(dice: random.Random) -> str:
    return text_of(dice, ALNUM + "!#^*_-+~", dice.randrange(8, 24)) + dice.choice(string.digits)


def basic(dice: random.Random) -> str:
    return base64.b64encode(f"user{dice.randrange(99)}:{password(dice)}".encode()).decode()


Shape = Callable[[random.Random], tuple[str, str]]


def shape(secret: Callable[[random.Random], str], *frames: str) -> Shape:
    """Return a maker of (text, the secret in it); a frame has `@` where the secret stands."""

    def make(dice: random.Random) -> tuple[str, str]:
        found = secret(dice)
        return dice.choice(frames).replace("@", found), found

    return make


def alone(prefix: str, characters: str, length: int) -> Shape:
    def secret(dice: random.Random) -> str:
        return prefix + text_of(dice, characters, length)

    return shape(
        secret,
        "@",
        "Use @ for this.",
        'client = Client("@")',
        '{"a": "@", "b": 1}',
        "X=@\nY=2",
        "first line\\n@\\nlast line",
        "https://example.com/?x=@&y=1",
        "(@)",
    )


def free(characters: str, length: int) -> Callable[[random.Random], str]:
    return lambda dice: text_of(dice, characters, length - 1) + dice.choice(string.digits)


SHAPES: dict[str, Shape] = {
    "aws access key id": alone("AKIA", string.ascii_uppercase + "234567", 16),
    "aws session key id": alone("ASIA", string.ascii_uppercase + "234567", 16),
    "aws secret": shape(
        free(BASE64, 40),
        "aws_secret_access_key = @",
        'AWS_SECRET_ACCESS_KEY="@"',
        '{"SecretAccessKey": "@"}',
        "AKIAIOSFODNN7EXAMPLE,@",
        "export AWS_SECRET_ACCESS_KEY=@",
    ),
    "gcp api key": alone("AIza", URL_SAFE, 35),
    "google client secret": alone("GOCSPX-", URL_SAFE, 28),
    "azure storage": shape(
        lambda dice: text_of(dice, BASE64, 86) + "==",
        "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=@;EndpointSuffix=core.windows.net",
        "Endpoint=sb://a.servicebus.windows.net/;SharedAccessKeyName=r;SharedAccessKey=@",
    ),
    "azure client secret": shape(
        lambda dice: text_of(dice, ALNUM, 3) + "8Q~" + text_of(dice, ALNUM + "_.~-", 33) + "a",
        "@", "the secret @ here", '"@"',
    ),
    "azure key": shape(
        lambda dice: text_of(dice, ALNUM, 52) + "JQQJ99" + text_of(dice, ALNUM, 26), "@", "use @ ok"
    ),
    "azure signature": shape(
        free(ALNUM, 48), "https://a.blob.core.windows.net/c/b?sv=2024-01-01&sig=@&se=2026-01-01"
    ),
    "github": alone("ghp_", ALNUM, 36),
    "github fine-grained": alone("github_pat_", ALNUM, 82),
    "github server": alone("ghs_", ALNUM, 36),
    "gitlab": alone("glpat-", URL_SAFE, 20),
    "slack": alone("xoxb-", string.digits, 40),
    "slack user": alone("xoxp-123456789012-123456789012-", HEX, 32),
    "slack webhook": shape(
        lambda dice: "T00000000/B00000000/" + text_of(dice, ALNUM, 24),
        "https://hooks.slack.com/services/@",
    ),
    "stripe": alone("sk_live_", ALNUM, 24),
    "stripe test": alone("sk_test_", ALNUM, 99),
    "stripe webhook": alone("whsec_", ALNUM, 32),
    "openai": alone("sk-proj-", URL_SAFE, 120),
    "openai old": alone("sk-", ALNUM, 48),
    "anthropic": alone("sk-ant-api03-", URL_SAFE, 95),
    "huggingface": alone("hf_", ALNUM, 34),
    "npm": alone("npm_", ALNUM, 36),
    "pypi": alone("pypi-AgEIcHlwaS5vcmc", URL_SAFE, 150),
    "sendgrid": shape(
        lambda dice: f"SG.{text_of(dice, URL_SAFE, 22)}.{text_of(dice, URL_SAFE, 43)}",
        "@", "key: @",
    ),
    "vault": alone("hvs.", URL_SAFE, 90),
    "databricks": alone("dapi", HEX, 32),
    "bearer": shape(
        free(URL_SAFE, 40),
        "Authorization: Bearer @",
        "curl -H 'Authorization: Bearer @' https://example.com",
        "authorization: bearer @\r\nHost: example.com",
        '{"headers": {"Authorization": "Bearer @"}}',
        "sent with Bearer @ in the header",
    ),
    "basic": shape(
        basic,
        "Authorization: Basic @",
        "Proxy-Authorization: Basic @\nAccept: */*",
        "sent basic @ as credentials",
    ),
    "curl user": shape(password, "curl -u admin:@ https://example.com", "curl --user 'me:@' x"),
    "private key": shape(pem, "@", "key:\n@\n", '{"k": "@"}', "two\n@\nand more"),
    "jwt": shape(jwt, "@", "the token @ is old", "https://example.com/?t=@", '{"t": "@"}', "t=@;"),
    "card": shape(card, "@", "card @ please", "pay with @, thanks", '{"n": "@"}', "12,@,05/27"),
    "url password": shape(
        free(ALNUM + "!*^_.~", 14),
        "postgresql://app:@@db.example.com:5432/app".replace("@@", "@\0"),
        "redis://:@\0cache:6379/0",
        "see https://me:@\0example.com/path for it",
    ),
    "password assignment": shape(
        password,
        "password=@",
        "PASSWORD=@\nUSER=a",
        'password = "@"',
        "db_password: '@'",
        "host=a user=b password=@ dbname=c",
        "Server=a;User Id=b;Password=@;",
        "login?user=a&password=@&next=1",
        "mysql --user=a --password @ --host b",
        "<password>@</password>",
        '"{\\"password\\": \\"@\\"}"',
        'dbPassword="@"',
        "my password is @",
    ),
    "token assignment": shape(
        free(ALNUM, 24),
        "token=@",
        "access_token: @",
        'refreshToken = "@"',
        "https://example.com/?access_token=@&a=1",
        '{"token": "@"}',
        "--auth-token @",
        "CI_JOB_TOKEN=@",
    ),
    "api key assignment": shape(
        free(ALNUM, 32),
        "api_key: @",
        "API_KEY=@",
        'apiKey: "@",',
        "x-api-key: @",
        "https://example.com/v1?api_key=@",
        "client_secret=@&grant_type=code",
        "API key: @",
    ),
    "cookie": shape(
        free(ALNUM, 32),
        "Cookie: theme=dark; sessionid=@",
        "Set-Cookie: sid=@; Path=/; HttpOnly",
        "PHPSESSID=@",
        "JSESSIONID=@; path=/",
    ),
}  # fmt: skip


def planted(dice: random.Random, name: str) -> tuple[str, str]:
    text, secret = SHAPES[name](dice)
    return text.replace("\0", "@"), secret


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_found(name: str) -> None:
    dice = random.Random(f"{SEED}{name}")
    for _ in range(60):
        text, secret = planted(dice, name)
        assert secret not in redactor.redact(text), text
        assert redactor.redact(text) != text


def test_99_of_100_secrets_in_500_messages_are_found() -> None:
    dice = random.Random(SEED)
    missed = []
    for number in range(500):
        name = list(SHAPES)[number % len(SHAPES)]
        text, secret = planted(dice, name)
        message = f"{prose(dice)} {dice.choice([' ', chr(10)])}{text}\n{prose(dice)}"
        value = {"messages": [{"role": "user", "content": message}], "n": 1}
        if secret in json.dumps(redactor.redact(value)).replace("\\\\", "\\"):
            missed.append(f"{name}: {text}")
    assert len(SHAPES) >= 20
    assert len(missed) <= 5, missed


WORDS = re.findall(
    r"\w+",
    "the a of to and in is that for it as was with be by on not he his but at are this have from "
    "or had an they which one you were her all she there would their we him been has when who will "
    "token tokens key keys password secret session cookie authorization basic bearer credentials "
    "please rotate your password before Monday the primary key of this table model agent budget",
)


def prose(dice: random.Random) -> str:
    words = dice.choices(WORDS, k=dice.randrange(3, 40))
    marks = dice.choices(["", "", "", "", ",", ":", ".", ";", " -"], k=len(words))
    return " ".join(word + mark for word, mark in zip(words, marks, strict=True)).capitalize() + "."


def lines_of_code() -> list[str]:
    lines = [line for path in SOURCES.glob("**/*.py") for line in path.read_text().splitlines()]
    return [line for line in lines if line.strip()]


CODE = [
    "def login(user: str, password: str, *, token: str | None = None) -> Session:",
    "login(user=user, password=password, token=self.token)",
    'password = os.environ["DB_PASSWORD"]',
    "token = tokens[index] if index < len(tokens) else None",
    'api_key = os.getenv("OPENAI_API_KEY")',
    'api_key="${API_KEY}" password="<your password>" token={{ token }}',
    "max_tokens=4096, prompt_tokens=1200, completion_tokens=80, token_count: 17",
    "PRIMARY KEY (id), FOREIGN KEY (session_id) REFERENCES sessions (id)",
    "interface Login { user: string; password: string; token?: string }",
    "const token = await getToken(); if (token === null) return;",
    "idempotency_key: call_7f3, partition_key=eu-west-1a, sort_key = created_at",
    "for key, value in mapping.items(): result[key] = value",
    "PWD=/home/app/project OLDPWD=/home/app",
    "next_page_token=CAUQAA pad_token_id: 50256 eos_token='</s>'",
    ".sk-estimator-doc-link.fitted span { display: block }",
    'type="password" name="password" autocomplete="current-password"',
    "secret: optional, password: required, token: string",
    "git clone https://github.com/example/project.git && cd project",
    "http://localhost:8080/@scope/package?x=1#a:b@c",
    "Basic knowledge of bearer authentication is required.",
    "if token == expected_token: return True",
    "self._token: str = token",
    "class Token(NamedTuple): kind: str; value: str",
]


def benign(dice: random.Random, code: list[str]) -> str:
    makers: list[Callable[[], str]] = [
        lambda: prose(dice),
        lambda: prose(dice),
        lambda: dice.choice(code),
        lambda: dice.choice(CODE),
        lambda: str(uuid.UUID(int=dice.getrandbits(128))),
        lambda: f"session_id={uuid.UUID(int=dice.getrandbits(128))} took {dice.random()} s",
        lambda: hashlib.new(dice.choice(["md5", "sha1", "sha256"]), dice.randbytes(8)).hexdigest(),
        lambda: "sha512-" + base64.b64encode(dice.randbytes(64)).decode(),
        lambda: base64.b64encode(dice.randbytes(dice.randrange(30, 3000))).decode(),
        lambda: "data:image/png;base64," + base64.b64encode(dice.randbytes(900)).decode(),
        lambda: str(dice.randrange(10 ** dice.randrange(1, 20))),
        lambda: json.dumps([dice.random() * 10**9, -dice.random(), dice.randrange(10**12)]),
        lambda: f"order {dice.randrange(10**9, 10**11)} shipped, ref ORD-{dice.randrange(10**12)}",
        lambda: f"2026-11-{dice.randrange(10, 28)}T10:{dice.randrange(10, 59)}:00.{dice.random()}Z",
        lambda: str(1_760_000_000_000_000 + dice.randrange(10**12)),
        lambda: f"+49 {dice.randrange(100, 999)} {dice.randrange(10**7, 10**8)}",
        lambda: f"{dice.choice(WORDS)}.{dice.choice(WORDS)}@example.com wrote: {prose(dice)}",
        lambda: f"/usr/lib/python3.11/site-packages/{text_of(dice, string.ascii_lowercase, 25)}.py",
        lambda: f"https://example.com/{text_of(dice, URL_SAFE, 30)}?page=7&sort=key#a:b@c",
        lambda: json.dumps({"usage": {"max_tokens": dice.randrange(9999), "token_type": "Bearer"}}),
        lambda: text_of(dice, URL_SAFE, dice.randrange(10, 60)),
        lambda: "call_" + text_of(dice, ALNUM, 24),
        lambda: f"{dice.uniform(-90, 90)}, {dice.uniform(-180, 180)}",
    ]  # fmt: skip
    return dice.choice(makers)()


def test_at_most_1_of_100_benign_texts_is_changed() -> None:
    dice = random.Random(SEED)
    code = lines_of_code()
    texts = [benign(dice, code) for _ in range(10_000)]
    wrong = [text for text in texts if redactor.redact(text) is not text]
    assert len(wrong) <= 100, wrong[:20]


def test_no_usual_line_of_code_is_changed() -> None:
    assert [line for line in CODE if redactor.redact(line) is not line] == []


SECRET_KEYS = [
    "password", "Password", "passwd", "db_password", "dbPassword", "DB_PASSWORD", "userpassword",
    "secret", "client_secret", "clientSecret", "token", "access_token", "accessToken",
    "refresh-token", "api_key", "apiKey", "apikey", "X-Api-Key", "aws_secret_access_key",
    "authorization", "Authorization", "Proxy-Authorization", "cookie", "Set-Cookie", "cookies",
    "private_key", "privateKey", "ssh_key", "signing_key", "credentials", "passphrase", "pwd",
    "card_number", "cvv", "password2",
]  # fmt: skip
HARMLESS_KEYS = [
    "tokens", "tokens_used", "max_tokens", "prompt_tokens", "token_count", "token_type",
    "next_page_token", "eos_token", "key", "keys", "primary_key", "idempotency_key", "public_key",
    "session_id", "password_length", "secret_name", "author", "passed", "keyboard", "monkey",
    "cookie_policy", "tokenizer", "secretary", "compass", "authorized", "card",
]  # fmt: skip


@pytest.mark.parametrize("key", SECRET_KEYS)
def test_what_stands_under_the_name_of_a_secret_is_one(key: str) -> None:
    found = redactor.redact({"a": [{key: "plain words"}]})
    assert found["a"][0][key].startswith("[redacted:")
    assert redactor.redact({key: {"deep": ["one", {"two": "plain"}]}})[key]["deep"] != ["one"]
    assert "plain" not in str(redactor.redact({key: {"deep": ["one", {"two": "plain"}]}}))


@pytest.mark.parametrize("key", HARMLESS_KEYS)
def test_a_name_is_compared_by_whole_words(key: str) -> None:
    value = {key: "plain words", "n": {key: 4096}}
    assert redactor.redact(value) is value


def test_what_cannot_be_a_secret_stays_under_any_name() -> None:
    value = {"password": None, "secret": True, "token": 50256, "cookie": "", "PWD": "/home/app"}
    assert redactor.redact(value) is value
    schema = {"properties": {"password": {"type": "string", "description": "At least 12."}}}
    assert redactor.redact(schema) is schema
    chosen = {"token": " understanding", "logprob": -0.25}
    assert redactor.redact(chosen) is chosen


def test_the_kind_tells_what_was_there_and_the_rest_stays() -> None:
    assert (
        redactor.redact("pay with 4111 1111 1111 1111, please")
        == "pay with [redacted:card], please"
    )
    assert redactor.redact({"password": "hunter2", "user": "ann"}) == {
        "password": "[redacted:password]",
        "user": "ann",
    }
    url = "postgresql://app:s3cret@db:5432/app"
    assert redactor.redact(url) == "postgresql://app:[redacted:url_password]@db:5432/app"
    assert redactor.redact({"pin": 4111111111111111}) == {"pin": "[redacted:card]"}
    assert redactor.redact({"password": 12345678}) == {"password": "[redacted:password]"}


def test_a_secret_in_a_key_is_found_and_no_entry_is_lost() -> None:
    value = {"ghp_" + "a1" * 18: 1, "ghp_" + "b2" * 18: 2}
    found = redactor.redact(value)
    assert sorted(found.values()) == [1, 2]
    assert "a1a1" not in str(found)


def test_what_has_no_secret_is_the_very_same_object() -> None:
    value = {"a": [1, 2.5, None, {"b": "some words"}], "c": "é→", "d": {}}
    assert redactor.redact(value) is value


def test_only_what_changed_is_copied_and_the_value_itself_is_not_changed() -> None:
    value: dict[str, Any] = {"kept": ["a"], "changed": ["token=abcdefgh12345678"]}
    found = redactor.redact(value)
    assert found["kept"] is value["kept"]
    assert found["changed"] == ["token=[redacted:token]"]
    assert value["changed"] == ["token=abcdefgh12345678"]


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_redacted_has_nothing_more_to_redact(name: str) -> None:
    dice = random.Random(f"again{name}")
    for _ in range(10):
        once = redactor.redact({"text": planted(dice, name)[0]})
        assert redactor.redact(once) == once


def test_our_own_keys_are_no_secrets() -> None:
    key = derive_key(b"salt", "a key", 1)
    value = {"sent": f"with Idempotency-Key: {key}", "key": key, "idempotency_key": key}
    assert redactor.redact(value) is value


def test_addresses_are_secrets_only_on_demand() -> None:
    text = "write to ann.b+c@mail.example.com, or not"
    assert redactor.redact(text) is text
    assert Redactor(emails=True).redact(text) == "write to [redacted:email], or not"


def test_further_patterns_have_a_kind_of_their_own() -> None:
    found = Redactor(extra={"badge": r"EMP-[0-9]{6}"}).redact(["EMP-123456 came", "EMP-1"])
    assert found == ["[redacted:badge] came", "EMP-1"]
    with pytest.raises(InvalidArgument, match="lower-case word"):
        Redactor(extra={"Not a word": "x"})


@pytest.mark.parametrize("key", [b"short", "a text of many characters", 12])
def test_a_key_must_be_hard_to_guess(key: Any) -> None:
    with pytest.raises(InvalidArgument, match="at least 16"):
        Redactor(key=key)
    assert Redactor(key=bytes(16)).key == bytes(16)


def test_no_redaction_leaves_everything() -> None:
    nothing: Redaction = NoRedaction()
    value = {"password": "hunter2"}
    assert nothing.redact(value) is value


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(plain_values)
def test_any_value_can_be_walked(value: Any) -> None:
    assert type(redactor.redact(value)) in (type(value), str)


def test_a_text_with_a_lone_surrogate_is_walked_and_left_to_the_codec_to_refuse() -> None:
    text = "\ud800 password=hunter2"
    assert redactor.redact(text) == "\ud800 password=[redacted:password]"


def test_a_value_that_holds_itself_ends() -> None:
    ring: list[Any] = ["token=abcdefgh12345678"]
    ring.append(ring)
    assert redactor.redact(ring)[0] == "token=[redacted:token]"
    many: list[Any] = ["x"]
    for _ in range(60):
        many = [many, many]
    assert redactor.redact(many) is many


HOSTILE = [
    "a", "-", "=", " ", "\\", '"', "é", "0", "1 ", "1111 ", "4-", "eyJ", "-eyJ", "eyJ.", "sk-",
    "sk-proj-", "AKIA", "a@", "a@a.", "://", "://a:", "://a:@", "password", "password=",
    'password="', "password='\\", 'password=\\"', "password: ", "password is ", "token=a(",
    "token=", "token = {", "--token ", "--a-", "key>", "<password>", "Bearer ", "basic ",
    "curl -u a:", "Cookie: ", "Authorization: ", "-----BEGIN PRIVATE KEY-----", "-----BEGIN ",
    "glpat-......................", "xoxb-", "SG.", "hooks.slack.com/", "?sig=", "JQQJ9", "+ASt",
    "8Q~", "api key ", "\n password: a",
]  # fmt: skip


@pytest.mark.parametrize("piece", HOSTILE)
def test_long_hostile_text_is_done(piece: str) -> None:
    """With backtracking over all of it, none of these would ever end."""
    everything = Redactor(emails=True)
    text = piece * (100_000 // len(piece))
    for hostile in (text, f"x{text}!"):
        assert isinstance(everything.redact(hostile), str)


@pytest.mark.parametrize("piece", ["a", "0", "a1+/", "-eyJ", "a@", "://a:", "token=a(", "1111 "])
def test_a_megabyte_is_done(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    assert isinstance(Redactor(emails=True).redact(text), str)

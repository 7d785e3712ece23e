"""Templates: everything printed is escaped, and characters that turn or hide text are shown."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
from markupsafe import Markup

from ... import __version__
from ...access import Token
from ...checkpoints.diff import brief
from ...clock import iso
from ...formatting import ago, plural, size
from .files import STATIC
from .forms import Refused

# Controls except tab and line feed, characters that change the direction of text, and invisible
# ones except those that join letters and emoji or select their form.
_COMMANDING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e"
    "\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff]"
)
VALUE_CHARACTERS = 64_000
NAVIGATION = (
    ("", "Overview"),
    ("sessions", "Sessions"),
    ("in-doubt", "In doubt"),
    ("pauses", "Pauses"),
    ("work", "Work"),
    ("spend", "Spend"),
    ("events", "Events"),
    ("conflicts", "Conflicts"),
    ("explorations", "Explorations"),
    ("storage", "Storage"),
)


@dataclass(frozen=True, slots=True)
class Commands:
    """How to get what a page shows from a shell: the path in the API, and a command line."""

    path: str
    line: str | None = None

    @classmethod
    def of(cls, path: str, noun: str, verb: str, *words: str, **options: object) -> Commands:
        """Return them for a command; options that are None or False are left out."""
        return cls(path, command_line(noun, verb, *words, **options))


@dataclass(slots=True)
class Frame:
    """What surrounds a page, and the links on it."""

    base_path: str
    place: str
    """The page's own address."""
    origin: str
    theme: str
    form_token: str
    is_read_only: bool = False
    is_signed_out: bool = False
    token: Token | None = None
    live: str | None = None
    poll_ms: int = 0
    refused: Refused | None = None
    is_refusal_shown: bool = False
    """Whether a form of the page has said why it was refused."""
    refusal: str = ""
    """Why a form was refused that is no longer on the page."""
    commands: Commands | None = None
    json_place: str | None = None
    next_place: str | None = None
    first_place: str | None = None
    now_ms: int = 0

    def refused_at(self, form: str, field: str | None = None) -> str:
        """Return what is wrong with a form, or with a field of it."""
        refused = self.refused
        if refused is None or (refused.form, refused.field) != (form, field):
            return ""
        self.is_refusal_shown = True
        return refused.words

    def typed(self, form: str, field: str, value: object = "") -> object:
        """Return what a person has typed into a field, if its form was refused; else the value."""
        refused = self.refused
        return value if refused is None or refused.form != form else refused.values.get(field, "")

    @property
    def may_write(self) -> bool:
        """Whether forms that change something are shown."""
        allowed = self.token is not None and self.token.permission != "read"
        return allowed and not self.is_read_only

    @property
    def may_approve(self) -> bool:
        """Whether forms for decisions of people are shown."""
        if self.token is None or self.token.root_id is not None or self.is_read_only:
            return False
        return self.token.permission in {"approve", "admin"}

    @property
    def navigation(self) -> tuple[tuple[str, str], ...]:
        """The pages in the navigation; a token limited to a tree gets none that show all trees."""
        is_limited = self.token is not None and self.token.root_id is not None
        return (("sessions", "Sessions"),) if is_limited else NAVIGATION

    def link(self, *parts: object, **query: object) -> str:
        """Return the address of a page; each part is one of its path."""
        return f"{self.base_path}{api_path(f'/ui{_joined(parts)}', **query)}"

    def static(self, name: str) -> str:
        """Return the address of a file."""
        return f"{self.base_path}{STATIC.place(name)}"

    @property
    def curl(self) -> str:
        """The command that gets the same from the API, quoted for a shell."""
        assert self.commands is not None
        return self._curl(self.commands.path)

    def post(self, *parts: object, **body: object) -> str:
        """Return the command that sends JSON to an address of the API; no body sends nothing."""
        sent = ["--json", json.dumps(body, ensure_ascii=False)] if body else ["-X", "POST"]
        return self._curl(_joined(parts), *sent)

    def put(self, *parts: object, version: int, **body: object) -> str:
        """Return the command that sets a key, if it is still at a version."""
        condition = ["If-Match", str(version)] if version else ["If-None-Match", "*"]
        sent = ["-X", "PUT", "-H", f"{condition[0]}: {condition[1]}"]
        return self._curl(_joined(parts), *sent, "--json", json.dumps(body, ensure_ascii=False))

    def send(self, *parts: object, **fields: object) -> str:
        """Return the command that sends a form of a page, if the API has no route for it."""
        sent = [word for name, value in fields.items() for word in ("-d", f"{name}={value}")]
        return self._curl(f"/ui{_joined(parts)}", *(sent or ["-X", "POST"]))

    def _curl(self, path: str, *words: str) -> str:
        place = f"{self.origin}{self.base_path}{path}"
        return f'curl -H "Authorization: Bearer $TOKEN" {shlex.join([*words, place])}'

    def is_at(self, part: str) -> bool:
        """Whether the page is in a part of the navigation."""
        here = self.place.partition("?")[0].removeprefix(f"{self.base_path}/ui/")
        return here.partition("/")[0] == part


def command_line(noun: str, verb: str, *words: object, **options: object) -> str:
    """Return a command without its program; a word that begins with a dash is not an option."""
    told = [str(word) for word in words]
    if any(word.startswith("-") and word != "-" for word in told):
        told.insert(0, "--")
    for name, value in reversed(options.items()):
        for each in value if isinstance(value, tuple) else (value,):
            if each is not None and each is not False:
                told[:0] = [f"--{name.replace('_', '-')}", *([] if each is True else [str(each)])]
    return " ".join(map(_word, (noun, verb, *told)))


def _word(text: str) -> str:
    """Return a word quoted for a shell; characters that pages show by number are escaped."""
    if not _COMMANDING.search(text):
        return shlex.quote(text)
    plain = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{_COMMANDING.sub(_numbered, plain)}'"


def _numbered(found: re.Match[str]) -> str:
    return f"\\U{ord(found[0]):08x}"


def _joined(parts: Iterable[object]) -> str:
    return "".join(f"/{quote(str(part), safe='')}" for part in parts)


def api_path(path: str, **query: object) -> str:
    """Return an address of the API; parameters without a value are left out."""
    told = {name: value for name, value in query.items() if value not in {None, ""}}
    return path + (f"?{urlencode(told)}" if told else "")


def render(template: str, frame: Frame, **given: Any) -> str:
    """Return a page as text."""
    known = {"frame": frame, "link": frame.link, "release": __version__}
    page = _environment().get_template(template)
    text = page.render(known | given)
    if frame.refused is not None and not frame.is_refusal_shown:
        # The field is not visible, or a change in the meantime removed the form from the page.
        frame.refusal = frame.refused.words
        text = page.render(known | given)
    return text


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printed,
    )
    environment.filters |= {
        "brief": brief,
        "iso": iso,
        "ago": ago,
        "size": size,
        "plural": plural,
        "pretty": pretty,
        "compact": compact,
        "cut": cut,
    }
    environment.globals["command_line"] = command_line
    return environment


def _printed(value: object) -> object:
    """Return what is printed for a value; deceptive characters are shown by their number."""
    if value is None:
        return ""
    if isinstance(value, Markup):
        return Markup(_COMMANDING.sub(_shown, value))
    if isinstance(value, str):
        return _COMMANDING.sub(_shown, value)
    return value


def _shown(found: re.Match[str]) -> str:
    # As JSON escapes them, so that a value edited on a page means the same when it is sent.
    return json.dumps(found[0])[1:-1]


def pretty(value: Any, most: int = VALUE_CHARACTERS) -> str:
    """Return a value as JSON over several lines, or its beginning."""
    return _encoded(json.JSONEncoder(ensure_ascii=False, indent=2, default=str), value, most)


def compact(value: Any, most: int = VALUE_CHARACTERS) -> str:
    """Return a value as JSON in one line, or its beginning."""
    return _encoded(json.JSONEncoder(ensure_ascii=False, default=str), value, most)


def _encoded(encoder: json.JSONEncoder, value: Any, most: int) -> str:
    """Encode only as much of a value as is shown, because it may be large."""
    if isinstance(value, str):
        return cut(encoder.encode(value), most)
    parts, length = [], 0
    for part in encoder.iterencode(value):
        parts.append(part)
        length += len(part)
        if length > most:
            return f"{''.join(parts)[:most]}\n… this is the beginning"
    return "".join(parts)


def cut(text: str, most: int = VALUE_CHARACTERS) -> str:
    """Return at most this much of a text, and its full length if it was cut."""
    if len(text) <= most:
        return text
    return f"{text[:most]}\n… {len(text):,} characters in all"

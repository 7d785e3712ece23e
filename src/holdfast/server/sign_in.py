"""Signing in with a browser: single-use codes, signed cookies, and form tokens.

A cookie names a token of the store and the time at which the cookie expires; it holds no secret.
The signing key is derived from the secret of the first start, so that browsers stay signed in when
the server is restarted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie

from ..clock import wall_ms

COOKIE_SECONDS = 12 * 3_600
CODE_SECONDS = 60.0
CODES_MAX = 100
PLACE = "/ui"


@dataclass(slots=True)
class SignIn:
    """Creates cookies for browsers, and finds the token that a cookie stands for."""

    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    _codes: dict[str, tuple[float, str]] = field(default_factory=dict, repr=False)

    @classmethod
    def with_secret(cls, secret: str) -> SignIn:
        """Return an instance whose cookies stay valid as long as this secret is used."""
        return cls(hashlib.sha256(f"holdfast cookies {secret}".encode()).digest())

    @property
    def cookie_name(self) -> str:
        """The cookie's name; browsers share cookies between servers on different ports."""
        return f"holdfast_{self._signature('name')[:12]}"

    def new_code(self, token_id: str) -> str:
        """Return a code that signs in one browser, once, within a minute."""
        while len(self._codes) >= CODES_MAX:
            del self._codes[next(iter(self._codes))]
        code = secrets.token_urlsafe(32)
        self._codes[code] = (time.monotonic() + CODE_SECONDS, token_id)
        return code

    def use_code(self, code: str) -> str | None:
        """Consume a code and return the id of its token; None if it is unknown or too old."""
        expires, token_id = self._codes.pop(code, (0.0, ""))
        return token_id if expires > time.monotonic() else None

    def cookie(self, token_id: str) -> str:
        """Return the cookie's value for a browser that has presented the token."""
        claim = f"{token_id}.{wall_ms() // 1_000 + COOKIE_SECONDS}"
        return f"{claim}.{self._signature('cookie', claim)}"

    def value_of(self, cookies: str | None) -> str | None:
        """Return the value of the server's own cookie among those that a browser sent."""
        try:
            found = SimpleCookie(cookies or "").get(self.cookie_name)
        except CookieError:
            return None
        return None if found is None else found.value

    def token_id(self, cookies: str | None) -> str | None:
        """Return the id of the token that a browser's cookie names; None if it is not valid."""
        claim, _, signature = (self.value_of(cookies) or "").rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._signature("cookie", claim).encode()):
            return None
        token_id, _, expires = claim.rpartition(".")
        return token_id if int(expires) > wall_ms() // 1_000 else None

    def form_token(self, cookies: str | None) -> str:
        """Return the token that forms include, to prove that they come from this server."""
        return self._signature("form", self.value_of(cookies) or "")

    def is_form_token(self, given: str, cookies: str | None) -> bool:
        """Whether a form comes from a page of the browser that has this cookie."""
        return hmac.compare_digest(given.encode(), self.form_token(cookies).encode())

    def _signature(self, *parts: str) -> str:
        return hmac.new(self.key, "\n".join(parts).encode(), hashlib.sha256).hexdigest()


def set_cookie(name: str, value: str, base_path: str, *, is_secure: bool) -> str:
    """Return the header that sets a cookie, or removes it if the value is empty."""
    lasts = COOKIE_SECONDS if value else 0
    flags = "; Secure" if is_secure else ""
    path = f"{base_path}{PLACE}"
    return f"{name}={value}; Path={path}; Max-Age={lasts}; HttpOnly; SameSite=Strict{flags}"

"""The rules for readers of the page: the token, and the Host and Origin headers.

Every page has a token, also one on a loopback address: each user of a host can connect to that, and
a run directory that only its owner may open must not be readable through the owner's page. A
browser sends the cookies of a site to whatever address the site's name leads to at that moment (DNS
rebinding), so the Host header is checked as well.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

_MOST_CHARS = 512  # of a token or header; the rest is ignored


@dataclass(frozen=True)
class Access:
    """The rules of one server.

    ``names`` are further names under which browsers may reach it.
    """

    host: str
    port: int
    names: tuple[str, ...] = ()
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    @property
    def cookie(self) -> str:
        """The cookie's name. Cookies do not know ports, so the name has it."""
        return f"rankcall-{self.port}"

    @property
    def cookie_value(self) -> str:
        """The cookie's value: not the token itself, but a value that follows from it alone."""
        return hmac.new(self.token.encode(), b"rankcall cookie", hashlib.sha256).hexdigest()

    def link(self) -> str:
        """Return the page's address. The part after # is never sent, so no log has the token."""
        host = self.host
        if host in ("0.0.0.0", "::", ""):
            host = socket.gethostname()
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}/#token={self.token}"

    def is_token(self, given: str) -> bool:
        """Compare a token in constant time."""
        return _equal(given, self.token)

    def is_known_host(self, header: str) -> bool:
        """Return whether the Host header names this server."""
        name = _host_name(header)
        if name is None:
            return False
        if name in ("localhost", self.host.lower(), *map(str.lower, self.names), *_own_names()):
            return True
        try:
            ipaddress.ip_address(name)  # an address has no name that could lead elsewhere
        except ValueError:
            return False
        return True

    def may_read(self, authorization: str, cookies: str) -> bool:
        """Return whether a request's headers carry the token, or the cookie that was set for it."""
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "bearer" and self.is_token(given.strip()):
            return True
        jar = SimpleCookie()
        try:
            jar.load(cookies[: 16 * _MOST_CHARS])
        except CookieError:
            return False
        return self.cookie in jar and _equal(jar[self.cookie].value, self.cookie_value)

    def is_same_origin(self, origin: str, host: str) -> bool:
        """Return whether a POST comes from the page itself: Origin and Host name one server."""
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower() != ""


def _equal(given: str, wanted: str) -> bool:
    short = given[:_MOST_CHARS].encode("utf-8", "replace")
    return hmac.compare_digest(short, wanted.encode())


def _host_name(header: str) -> str | None:
    """Return the name in a Host header, without the port; None if the header is damaged."""
    if not header or len(header) > _MOST_CHARS or any(char in header for char in "@/\\ ?#"):
        return None
    try:
        parts = urlsplit(f"//{header}")
        _ = parts.port
    except ValueError:
        return None
    return parts.hostname


def _own_names() -> tuple[str, ...]:
    name = socket.gethostname().lower()
    return name, name.partition(".")[0]

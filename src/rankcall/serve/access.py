"""The rules for readers of the page: addresses, tokens, and the Host and Origin headers.

A page on a loopback address needs no token: only processes of this host can connect to it. Any
other address needs the token that is made at start. A browser sends the cookies of a site to
whatever address the site's name leads to at that moment (DNS rebinding), so the Host header is
checked as well.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

_LOCAL_NAMES = ("localhost",)
_MOST_CHARS = 512  # of a token or header; the rest is ignored


def is_loopback(address: str) -> bool:
    """Return whether only processes of this host can connect to an address."""
    if address in _LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Access:
    """The rules of one server.

    ``names`` are further names under which browsers may reach it. ``token`` is empty on a loopback
    address.
    """

    host: str
    port: int
    names: tuple[str, ...] = ()
    token: str = field(default="", repr=False)

    @classmethod
    def of(cls, host: str, port: int, names: Iterable[str] = ()) -> Access:
        """Return the rules for an address, with a new token if it needs one."""
        token = "" if is_loopback(host) else secrets.token_urlsafe(32)
        return cls(host, port, tuple(name.lower() for name in names), token)

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
        return f"http://{host}:{self.port}/" + (f"#token={self.token}" if self.token else "")

    def is_token(self, given: str) -> bool:
        """Compare a token in constant time."""
        return bool(self.token) and _equal(given, self.token)

    def is_known_host(self, header: str) -> bool:
        """Return whether the Host header names this server."""
        name = _host_name(header)
        if name is None:
            return False
        if not self.token:
            return is_loopback(name) or name in self.names
        if name in (*_LOCAL_NAMES, self.host.lower(), *self.names, *_own_names()):
            return True
        try:
            ipaddress.ip_address(name)  # an address has no name that could lead elsewhere
        except ValueError:
            return False
        return True

    def may_read(self, authorization: str, cookies: str) -> bool:
        """Return whether a request's headers carry the token, or the cookie that was set for it."""
        if not self.token:
            return True
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

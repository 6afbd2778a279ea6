"""Who may ask: requests of this machine's browser to this page, and of nobody who only pretends."""

import ipaddress
import secrets
import socket
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from etude.dashboard.parsing import dumps

LOCAL = frozenset(["localhost", "127.0.0.1", "::1"])
COOKIE = "etude_dashboard"
_READING = ("GET", "HEAD")
_CSP = (
    "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def refusal(status: int, why: str) -> Response:
    """Return an error as JSON."""
    return Response(dumps({"error": why}), status, media_type="application/json")


def new_token() -> str:
    """Return a secret that nobody guesses."""
    return secrets.token_urlsafe(24)


def is_local(host: str) -> bool:
    """Whether only this machine reaches an address.

    >>> is_local("127.0.0.1"), is_local("localhost"), is_local("0.0.0.0")
    (True, True, False)
    """
    address = _address(host)
    return host in LOCAL or (address is not None and address.is_loopback)


class Guard:
    """Refuses requests for other hosts (DNS rebinding), from other origins, and without the token if there is one."""

    def __init__(self, app: ASGIApp, host: str = "127.0.0.1", token: str | None = None) -> None:
        self.app, self.host, self.token = app, host, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request or refuse it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                if scope["path"].startswith("/api/"):
                    headers["Cache-Control"] = "no-store"
            await send(message)

        answer = self.refuse(scope) or self._check_token(scope)
        await (answer or self.app)(scope, receive, send_safely)

    def refuse(self, scope: Scope) -> Response | None:
        """Return an error for a request of another origin or host."""
        headers = Headers(scope=scope)
        host = headers.getlist("host")
        if len(host) != 1 or not self._is_ours(host[0]):
            return refusal(403, "this host name is not served; open the address that `etude dashboard` printed")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host[0].lower():
            return refusal(403, "requests of other origins are refused")
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and scope["path"].startswith("/api/"):
            return refusal(403, "requests of other sites are refused")
        if scope["method"] not in _READING:
            kind = headers.get("content-type", "").split(";")[0].strip().lower()
            if kind != "application/json":
                return refusal(415, "send JSON, with Content-Type: application/json")
        return None

    def _is_ours(self, given: str) -> bool:
        name = _host_name(given)
        if name is None:
            return False
        if is_local(name) or name == self.host.lower():
            return True
        if self.host in ("0.0.0.0", "::"):  # the token protects: names of this machine, and addresses
            return _address(name) is not None or name == socket.gethostname().lower()
        return False

    def _check_token(self, scope: Scope) -> Response | None:
        if self.token is None:
            return None
        headers = Headers(scope=scope)
        if _is_same(_cookie(headers), self.token) or _is_same(headers.get("authorization"), f"Bearer {self.token}"):
            return None
        query: list[tuple[str, str]] = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == "token"]
        if len(given) != 1 or not _is_same(given[0], self.token):
            return refusal(403, "a token is needed; open the address with ?token= that `etude dashboard` printed")
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        # "//host" would be another site
        answer = RedirectResponse(f"/{scope['path'].lstrip('/')}{'?' if rest else ''}{rest}", 303)
        answer.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
        return answer


def _host_name(given: str) -> str | None:
    """Return the host of a Host header without its port; None if it is not one."""
    try:
        parts = urlsplit(f"//{given}")
        port = parts.port
    except ValueError:
        return None
    is_plain = parts.netloc == given and not (parts.path or parts.query or parts.fragment or "@" in given)
    return parts.hostname if is_plain and (port is None or port > 0) else None


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _cookie(headers: Headers) -> str | None:
    try:
        found: Any = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return found.value if found is not None else None


def _is_same(given: str | None, secret: str) -> bool:
    return given is not None and secrets.compare_digest(given.encode(), secret.encode())

"""Who is let in: whoever has the token; and the headers that every answer carries."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE = "asyncrl_monitor"
HEADERS = {
    # Plotly sets styles of its own; scripts come from this server alone, and none is inline.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' "
    "'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
REFUSED = b"asyncrl monitor: open the URL that it printed, with its token\n"


class Gate:
    """Lets a request through to `app` if it carries the token.

    As `?token=` (a page is then sent on without it, and keeps it as a cookie), as that cookie,
    or as `Authorization: Bearer`.
    """

    def __init__(self, app: App, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for key, value in query if key == "token"]
        if given and self._right(given[-1]):
            if scope["path"] == "/":
                rest = urlencode([item for item in query if item[0] != "token"])
                await self._send_on(scope, send, f"/?{rest}" if rest else "/")
                return
        elif given or not any(map(self._right, self._carried(scope))):
            await _answer(send, 401, REFUSED)
            return

        async def dressed(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                present = list(message.get("headers", ()))
                message["headers"] = present + _headers(present)
            await send(message)

        await self._app(scope, receive, dressed)

    def _right(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self._token)

    def _name(self, scope: Scope) -> str:
        """Cookies do not tell ports apart."""
        return f"{COOKIE}_{(scope.get('server') or ('', 0))[1]}"

    def _carried(self, scope: Scope) -> list[str]:
        tokens = []
        for key, value in scope["headers"]:
            text = value.decode("latin-1")
            if key == b"authorization" and text.startswith("Bearer "):
                tokens.append(text.removeprefix("Bearer "))
            elif key == b"cookie":
                try:
                    cookie = SimpleCookie(text).get(self._name(scope))
                except CookieError:
                    continue
                tokens += [cookie.value] if cookie else []
        return tokens

    async def _send_on(self, scope: Scope, send: Send, where: str) -> None:
        cookie = f"{self._name(scope)}={self._token.decode()}; Path=/; HttpOnly; SameSite=Lax"
        await _answer(send, 303, b"", {"location": where, "set-cookie": cookie})


def _headers(present: Any = ()) -> list[tuple[bytes, bytes]]:
    have = {key.lower() for key, _ in present}
    wanted = HEADERS | {"cache-control": "no-store"}
    return [(k.encode(), v.encode()) for k, v in wanted.items() if k.encode() not in have]


async def _answer(send: Send, status: int, body: bytes, more: dict[str, str] | None = None) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *_headers()]
    headers += [(k.encode(), v.encode()) for k, v in (more or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

"""Who may speak on the data plane: CURVE keys, and the gate of a socket that binds.

    client ──handshake──► a socket that binds ──its public key──► Gate: known?  yes ──► let in
                                   └── handshakes that failed ──► Gate: counted, logged

A run has two pairs of keys: one for all sockets that bind, one for all that connect. Its roles
trust each other. What this covers and what it does not: docs/security.md.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import zmq
from zmq.auth import Authenticator, load_certificate
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from asyncrl.errors import ConfigError

log = logging.getLogger(__name__)

MAX_CONTROL_BYTES = 64 << 20
"""Longest frame of a record, an announcement or a weights request; who sends a longer one is
disconnected."""

SERVER_PUBLIC, SERVER_SECRET, CLIENT_SECRET = "server.key", "server.key_secret", "client.key_secret"
"""Files of a folder of keys; a client needs the first and the last."""

_DOMAIN = "asyncrl"
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_WHY: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "its key is not known",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it has no key, or takes another server's for ours",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it has no key, or left before it said who it is",
}


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of a run, 40 characters (Z85) each. May be pickled; its repr holds no secret.

    >>> new_keys().client()
    Keys()
    """

    server_public: bytes = field(repr=False)
    client_public: bytes = field(repr=False)
    client_secret: bytes = field(repr=False)
    server_secret: bytes | None = field(default=None, repr=False)
    """None: good to connect with, not to bind."""

    def client(self) -> Keys:
        """What a client outside the run needs."""
        return Keys(self.server_public, self.client_public, self.client_secret)


def new_keys() -> Keys:
    """Keys for one run.

    Raises:
        ConfigError: this machine's libzmq has no CURVE.
    """
    _need_curve()
    server, client = zmq.curve_keypair(), zmq.curve_keypair()
    return Keys(server[0], *client, server[1])


def write_keys(folder: Path) -> Keys:
    """Make new keys and write them into `folder`, readable by their owner alone.

    The files have the format of ZeroMQ's certificates (ZPL), which other languages read too.

    Raises:
        ConfigError: there are keys already, or the folder cannot be written.
    """
    keys = new_keys()
    assert keys.server_secret is not None
    files = {
        SERVER_PUBLIC: (keys.server_public, None),
        SERVER_SECRET: (keys.server_public, keys.server_secret),
        CLIENT_SECRET: (keys.client_public, keys.client_secret),
    }
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if there := [name for name in files if os.path.lexists(folder / name)]:
            raise FileExistsError(0, "", str(folder / there[0]))
        for name, (public, secret) in files.items():
            fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(fd, "w", encoding="ascii") as file:
                file.write(_certificate(public, secret))
    except FileExistsError as e:
        raise ConfigError(
            f"{e.filename} exists already and is never overwritten: name another folder, or "
            "remove the keys in this one"
        ) from None
    except OSError as e:
        raise ConfigError(f"{folder}: keys cannot be written: {e.strerror}") from e
    return keys


def load_keys(folder: Path, *, client_only: bool = True) -> Keys:
    """The keys that `write_keys` left in `folder`: all, or those that a client needs.

    Raises:
        ConfigError: a file is missing, cannot be read, is no certificate, or a secret can be read
            by others.
    """
    _need_curve()
    server_public, _ = _read(folder / SERVER_PUBLIC, secret=False)
    client_public, client_secret = _read(folder / CLIENT_SECRET)
    assert client_secret is not None
    if client_only:
        return Keys(server_public, client_public, client_secret)
    held, server_secret = _read(folder / SERVER_SECRET)
    if held != server_public:
        raise ConfigError(
            f"{folder}: {SERVER_PUBLIC} and {SERVER_SECRET} are not of one pair: make new keys "
            "with `asyncrl keys FOLDER`"
        )
    return Keys(server_public, client_public, client_secret, server_secret)


def secure_client(socket: zmq.Socket[Any], keys: Keys | None) -> None:
    """Prepare a socket that is to connect; without keys it stays as it is.

    Raises:
        ConfigError: this machine's libzmq has no CURVE.
    """
    if keys is None:
        return
    _need_curve()
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)


def secure_server(socket: zmq.Socket[Any], keys: Keys | None) -> Gate:
    """Prepare a socket that is to bind, asyncio's or not; without keys it stays as it is.

    Only one socket of a context can be guarded.

    Raises:
        ConfigError: this machine's libzmq has no CURVE, or the keys are a client's.
    """
    return Gate(socket, keys)


class Gate:
    """Lets in who has the run's client key, and counts who is refused (`secure_server`).

    Its thread waits for handshakes and ends with the socket's context: nobody has to close it.
    """

    def __init__(self, socket: zmq.Socket[Any], keys: Keys | None) -> None:
        self.refused = 0
        """Connections whose handshake failed; who tries again counts again."""
        if keys is None:
            return
        _need_curve()
        if keys.server_secret is None:
            raise ConfigError(
                f"these are a client's keys: a socket that binds needs {SERVER_SECRET} too "
                "(`asyncrl keys FOLDER` makes it)"
            )
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret)
        # Without a domain, and without enforcing it, nobody would be asked for a client's key.
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._client_public = keys.client_public
        self._authenticator = Authenticator(socket.context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, self)
        where = f"inproc://refused-{id(self)}"
        socket.monitor(where, _REFUSED)
        self._monitor = socket.context.socket(zmq.PAIR, socket_class=zmq.Socket)
        self._monitor.connect(where)
        threading.Thread(target=self._run, name="gate", daemon=True).start()

    def metrics(self) -> dict[str, float]:
        """`wire/unauthenticated`, unless it is 0."""
        return {"wire/unauthenticated": float(self.refused)} if self.refused else {}

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this public key is let in (asked by pyzmq's authenticator)."""
        return key == self._client_public

    def _run(self) -> None:
        loop, asked = asyncio.new_event_loop(), self._authenticator.zap_socket
        poller = zmq.Poller()
        poller.register(asked, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if asked in ready:
                    self._judge(loop, asked.recv_multipart())
                if self._monitor in ready:
                    self._count(int(recv_monitor_message(self._monitor)["event"]))
        except zmq.ContextTerminated:
            pass
        finally:
            self._authenticator.stop()
            self._monitor.close(linger=0)
            loop.close()

    def _judge(self, loop: asyncio.AbstractEventLoop, question: list[bytes]) -> None:
        try:
            loop.run_until_complete(self._authenticator.handle_zap_message(question))
        except zmq.ContextTerminated:
            raise
        except Exception:  # without an answer all later handshakes would wait for ever
            log.exception("a handshake could not be judged: it is refused")
            no = [b"1.0", question[1], b"500", b"", b"", b""]
            self._authenticator.zap_socket.send_multipart(no)

    def _count(self, event: int) -> None:
        self.refused += 1
        if str(self.refused).strip("0") == "1":  # 1, 10, 100: a stubborn client fills no log
            log.warning(
                "refused a connection, %d so far: %s", self.refused, _WHY.get(event, str(event))
            )


def _need_curve() -> None:
    if not zmq.has("curve"):
        raise ConfigError(
            "security.curve=true: the libzmq of this machine has no CURVE: install pyzmq from a "
            "wheel (pip install --force-reinstall --only-binary pyzmq pyzmq), or turn it off"
        )


def _certificate(public: bytes, secret: bytes | None) -> str:
    lines = ["metadata", "curve", f'    public-key = "{public.decode()}"']
    if secret is not None:
        lines.append(f'    secret-key = "{secret.decode()}"')
    return "\n".join(lines) + "\n"


def _read(path: Path, secret: bool = True) -> tuple[bytes, bytes | None]:
    """A certificate's public and secret key."""

    def refuse(why: str, fix: str = "make new keys with `asyncrl keys FOLDER`") -> NoReturn:
        raise ConfigError(f"security.keys: {path} {why}: {fix}")

    try:
        mode = path.stat().st_mode
        public, private = load_certificate(path)
    except FileNotFoundError:
        refuse("does not exist")
    except OSError as e:
        refuse(f"cannot be read ({e.strerror})", "name a folder that can be read")
    except ValueError:
        refuse("holds no public key")
    if not secret:
        private = None
    elif private is None:
        refuse("holds no secret key")
    elif mode & 0o077:
        refuse("can be read or changed by others", f"chmod 600 {path}")
    try:
        good = len(z85.decode(public)) == 32
        good &= private is None or zmq.curve_public(private) == public
    except (KeyError, ValueError, zmq.ZMQError):
        good = False
    if not good:
        refuse("holds no pair of keys" if secret else "holds no key")
    return public, private

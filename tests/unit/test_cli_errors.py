"""The command line against what is no server, a server that breaks off, and arguments that are none: one line, no trace."""

import socket
import threading

import pytest
from typer.testing import CliRunner

from server.__main__ import app


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch):
    """A peer that answers the next request with these bytes and hangs up; gives what it was asked."""
    asked: list[bytes] = []
    listening = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("REKINDLE_URL", f"http://127.0.0.1:{listening.getsockname()[1]}")
    monkeypatch.setenv("REKINDLE_API_KEY", "rk_key")
    monkeypatch.setenv("no_proxy", "*")

    def answer(raw: bytes) -> list[bytes]:
        def serve() -> None:
            peer, _ = listening.accept()
            with peer:
                asked.append(peer.recv(65536))
                peer.sendall(raw)
        threading.Thread(target=serve, daemon=True).start()
        return asked

    yield answer
    listening.close()


def run(*words: str) -> str:
    """What it says; it must end with status 1 and without a trace."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.output
    assert "Traceback" not in result.output and result.output.count("\n") == 1
    return result.output


@pytest.mark.parametrize(("raw", "says"), [
    (b"", "without response"), (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "IncompleteRead"), (b"SSH-2.0-none\r\n", "SSH"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n<ok>", "like a Rekindle server"), (b"HTTP/1.1 502 Bad\r\nContent-Length: 4\r\n\r\noops", "502"),
])
def test_a_peer_that_does_not_answer_like_a_server_is_named(answering, raw: bytes, says: str) -> None:
    """Nothing, half an answer, another protocol, another server, a proxy's error."""
    answering(raw)
    assert says in run("sessions", "ls")


@pytest.mark.parametrize("url", ["ftp//x y", "http://127.0.0.1:1", "http://127.0.0.1:notaport", ""])
def test_an_address_where_nobody_is(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Refused, or no address at all."""
    monkeypatch.setenv("REKINDLE_URL", url)
    monkeypatch.setenv("REKINDLE_API_KEY", "rk_key")
    run("sessions", "ls")


def test_a_key_that_can_be_none_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line break in the key, say: refused before anything is sent, without the key."""
    monkeypatch.setenv("REKINDLE_API_KEY", "rk_secret\nnext")
    assert "rk_secret" not in run("sessions", "ls")


@pytest.mark.parametrize("session_id", ["s_1/../s_2", "s 1", "?x=1", "ü"])
def test_an_id_never_becomes_another_path(answering, session_id: str) -> None:
    """Whatever the id, the request names one session."""
    asked = answering(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")
    run("sessions", "rm", session_id)
    path = asked[0].split()[1].decode()
    assert path.startswith("/v1/sessions/") and path.count("/") == 3 and "?" not in path

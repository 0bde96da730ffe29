"""The server: who is refused, what is answered, and what ends a run."""

import asyncio
import http.client
import json
import logging
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

import clearhead as ch
from clearhead.core.errors import BadValue
from clearhead.models.report import report
from clearhead.views.serve import Reader
from tests.cli.test_cli import run as run
from tests.views.serve.models import save_gpt2, words

pytest.importorskip("uvicorn")
from starlette.testclient import TestClient

from clearhead.views.serve import server
from clearhead.views.serve.refusal import HEADERS
from tests.fresh_process import run_program

TOKEN = "a-token"
HOST = "http://127.0.0.1:8000"
TEXT = "Once upon a time there was a quiet queen. She danced."


class Waits(Reader):
    """A storyteller that waits after every attention call until it may go on."""

    def __init__(self):
        super().__init__()
        self.calls, self.go = 0, threading.Event()

    def report(self, text, edits=None, on_progress=None):
        def wait(done, total):
            self.calls += 1
            on_progress(done, total)
            if done:
                assert self.go.wait(20)
                on_progress(done, total)

        return super().report(text, edits, wait)


@pytest.fixture(scope="module")
def client():
    return TestClient(server.app(Reader(), "<p>the page</p>", TOKEN, 8000), base_url=HOST)


def ask(client, path, request, **keywords):
    """The status, the lines before the last, and the last."""
    answer = client.post(f"/{TOKEN}/{path}", json=request, **keywords)
    *before, last = map(json.loads, answer.text.splitlines())
    return answer.status_code, before, last


def test_the_page_is_shown_and_kept_by_nobody(client):
    answer = client.get(f"/{TOKEN}/")
    assert (answer.status_code, answer.text) == (200, "<p>the page</p>")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["/", "/another/", "/a-tokem/", "//", "/é/", f"/{TOKEN[:-1]}/"])
def test_without_the_token_nothing_is_answered(client, path):
    answer = client.post(f"{path}compute", json={"text": TEXT})
    assert answer.status_code == 403
    assert answer.json()["error"]["hint"].startswith("open that address")
    page = client.get(path)
    assert page.status_code == 403
    assert page.headers["content-type"] == "text/plain; charset=utf-8"  # shown, not downloaded
    assert "Hint: open that address" in page.text


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example:8000"},
        {"host": "127.0.0.1:8001"},
        {"host": "127.0.0.1"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://127.0.0.1:8000"},
        {"origin": "http://127.0.0.1:8001"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
def test_who_comes_from_elsewhere_is_refused(client, headers):
    assert client.get(f"/{TOKEN}/", headers=headers).status_code == 403
    assert ask(client, "compute", {"text": TEXT}, headers=headers)[0] == 403


def test_a_browser_on_the_page_is_answered(client):
    headers = {"origin": HOST, "sec-fetch-site": "same-origin"}
    assert ask(client, "compute", {"text": TEXT}, headers=headers)[0] == 200


def test_other_paths_and_methods(client):
    elsewhere = client.get(f"/{TOKEN}/elsewhere")
    assert elsewhere.status_code == 404
    assert elsewhere.text.startswith("The server has no GET at this path.\nRule: a browser loads")
    assert client.post(f"/{TOKEN}/elsewhere").json()["error"]["gave"]
    for method in ("GET", "PUT", "OPTIONS"):
        refused = client.request(method, f"/{TOKEN}/compute")
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        assert refused.text.startswith(f"The server has no {method} at this path.\n")


def test_a_refusal_is_a_text_whatever_it_shows(client):
    refused = client.get(f"/{TOKEN}/", headers={"host": "<script>alert(1)</script>"})
    assert refused.status_code == 403 and "<script>" in refused.text
    assert refused.headers["content-type"].startswith("text/plain")
    assert refused.headers["x-content-type-options"] == "nosniff"


def test_a_text_is_answered_with_progress_and_a_snapshot(client):
    status, before, last = ask(client, "compute", {"text": TEXT})
    assert (status, before) == (200, [{"progress": [n, 2]} for n in (0, 1, 2)])
    found = last["snapshot"]
    assert found["text"] == TEXT and found["unknown"] == []
    assert [len(found["guesses"]), len(found["guesses"][0])] == [len(found["tokens"]), 6]
    assert [layer["size"]["h"] for layer in found["layers"]] == [8, 8]


def test_edits_are_those_of_intervene(client):
    import base64

    edits = {"off": [[0, 7], [0, 2]], "temperature": 2, "mask": "causal & window(3, 0)"}
    _, _, last = ask(client, "compute", {"text": TEXT, "edits": edits})
    layer = last["snapshot"]["layers"][1]
    step = next(step for step in layer["steps"] if step["name"] == "weights")
    raw = bytearray(base64.b64decode(step["data"]))
    found = torch.frombuffer(raw, dtype=torch.float32).reshape(step["stored"])

    teller = Reader().model
    wanted = [
        ch.edits.keep_only(ch.causal & ch.window(3, 0)),
        ch.edits.temperature(2),
        ch.edits.ablate(layers=[0], heads=[2, 7]),
    ]
    with ch.intervene(teller.model, wanted), torch.no_grad():
        with ch.watch(teller.model, exact_rows=range(step["stored"][-1]), stats=["max"]) as seen:
            teller.model(torch.tensor([teller.encode(TEXT).ids]))
    assert torch.allclose(found, seen[1].exact_rows[0], atol=1e-6)
    assert float(found[:, 5, :2].abs().max()) == 0.0  # farther than the window


def test_scale_soft_cap_and_dropout(client):
    plain = Reader().report(TEXT).layers[0].trace
    edits = {"scale": 0.25, "softcap": 3, "dropout": 0.5, "seed": 11}
    trace = Reader().report(TEXT, edits).layers[0].trace
    assert {"capped", "dropped"} <= set(trace.names) - set(plain.names)
    scores = plain["scores"].double()
    distance = (plain["biased"] - plain["scaled"]).double()
    logits = 3 * torch.tanh(0.25 * scores / 3) + distance
    rule = torch.ones(scores.shape[-2:]).tril().bool()
    weights = logits.masked_fill(~rule, -torch.inf).softmax(-1)
    assert torch.allclose(trace["weights"].double(), weights, atol=1e-6)
    dropped = trace["dropped"].double()
    kept = dropped != 0
    assert torch.allclose(dropped[kept], 2 * weights[kept], atol=1e-6)
    assert 0.3 < kept[weights > 0].double().mean() < 0.7


def test_a_tile_is_the_exact_weights(client):
    part = {"layer": 1, "head": 3, "queries": [4, 6], "keys": [0, 2]}
    _, _, last = ask(client, "tile", {"text": TEXT, **part})
    step = last["layer"]["steps"][0]
    assert step["stored"] == [1, 3, 3]
    assert last["layer"]["first"] == {"h": 3, "q": 4, "k": 0}


WRONG = {
    "no object": ([], "The server got a list."),
    "no text": ({}, "The text is None."),
    "empty": ({"text": ""}, "The text is empty."),
    "blank": ({"text": " \n"}, "The text is empty."),
    "too long": ({"text": "a " * 110_000}, "The text has 220,000 letters."),
    "longer than the model reads": ({"text": "a " * 3000}, None),
    "another kind of text": ({"text": [1]}, "The text is a list."),
    "unknown edit": ({"text": TEXT, "edits": {"heat": 2}}, "edits are ['heat']."),
    "no edits": ({"text": TEXT, "edits": 3}, "edits are an int."),
    "temperature": ({"text": TEXT, "edits": {"temperature": 0}}, "temperature=0."),
    "words": ({"text": TEXT, "edits": {"scale": "2"}}, "scale='2'."),
    "NaN": ({"text": TEXT, "edits": {"softcap": float("nan")}}, "softcap=nan."),
    "dropout": ({"text": TEXT, "edits": {"dropout": 1}}, "dropout=1."),
    "seed": ({"text": TEXT, "edits": {"seed": -1}}, "seed=-1."),
    "mask": ({"text": TEXT, "edits": {"mask": "__import__('os')"}}, None),
    "mask, long": ({"text": TEXT, "edits": {"mask": "~" * 5000}}, "The mask is a str of 5,000"),
    "head": ({"text": TEXT, "edits": {"off": [[0, 8]]}}, "ablate(layers=[0], heads=[8]) names"),
    "layer": ({"text": TEXT, "edits": {"off": [[2, 0]]}}, "ablate(layers=[2], heads=[0]) never"),
    "pair": ({"text": TEXT, "edits": {"off": [7]}}, "off has '7'."),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_computed_is_told_in_three_parts(client, what):
    request, gave = WRONG[what]
    body = json.dumps(request)
    answer = client.post(f"/{TOKEN}/compute", content=body)
    error = json.loads(answer.text.splitlines()[-1])["error"]
    assert all(error[part] for part in ("gave", "rule", "hint"))
    assert gave is None or error["gave"].startswith(gave)


@pytest.mark.parametrize(
    "part",
    [
        {"layer": 2, "head": 0, "queries": [0, 1], "keys": [0, 1]},
        {"layer": 0, "head": 8, "queries": [0, 1], "keys": [0, 1]},
        {"layer": 0, "head": 0, "queries": [0, 99], "keys": [0, 1]},
        {"layer": 0, "head": 0, "queries": "0-1", "keys": [0, 1]},
        {"layer": 0, "head": 0, "queries": [1.5, 2], "keys": [0, 1]},
        {"head": 0, "queries": [0, 1], "keys": [0, 1]},
    ],
    ids=str,
)
def test_a_tile_that_is_not_there(client, part):
    _, _, last = ask(client, "tile", {"text": TEXT, **part})
    assert set(last["error"]) == {"gave", "rule", "hint"}


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_request(client, body):
    answer = client.post(f"/{TOKEN}/compute", content=body)
    assert answer.status_code == 400 and answer.json()["error"]["gave"].startswith("The request")


def test_a_body_that_is_too_large_is_not_read_to_its_end(client):
    sent = 0

    def parts():
        nonlocal sent
        for _ in range(100):
            sent += 1
            yield b" " * 100_000

    answer = client.post(f"/{TOKEN}/compute", content=parts())
    assert answer.status_code == 413
    assert answer.json()["error"]["gave"] == "The request has more than 1,600,000 bytes."


def test_hostile_text_stays_text(client):
    text = "</script><script>alert(1)</script> \u202e \u2028 {{data}} \x00 \ud83d"
    body = json.dumps({"text": text})
    answer = client.post(f"/{TOKEN}/compute", content=body)
    last = answer.text.splitlines()[-1]
    assert "<" not in last and last.isascii()
    assert json.loads(last)["snapshot"]["text"] == text


# ---- over a socket ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def served():
    """The port of a server that runs in this process."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        running = server.server_of(server.app(Reader(), "<p>the page</p>", TOKEN, port))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        yield port
        running.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def logged(caplog):
    """What the server logs, which it prints in a terminal."""
    uvicorn = logging.getLogger("uvicorn.error")  # it does not propagate
    uvicorn.addHandler(caplog.handler)
    yield caplog
    uvicorn.removeHandler(caplog.handler)


def exchange(port, *parts):
    """Everything that the server sends, while these parts are sent a moment apart."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        for part in parts:
            connection.sendall(part.replace("PORT", str(port)).encode("latin1"))
            time.sleep(0.05 * (len(parts) > 1))
        with suppress(ConnectionResetError):  # what was sent after the response is not read
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


HEAD = "HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\nConnection: close\r\n"
POST = f"POST /{TOKEN}/compute {HEAD}"
ODD = {
    "GET *": (f"GET * {HEAD}\r\n",),
    "OPTIONS *": (f"OPTIONS * {HEAD}\r\n",),
    "CONNECT": (f"CONNECT 127.0.0.1:PORT {HEAD}\r\n",),
    "absolute": (f"GET http://elsewhere.example/ {HEAD}\r\n",),
    "HEAD": (f"HEAD / {HEAD}\r\n",),
    "PUT": (f"PUT /{TOKEN}/ {HEAD}\r\n",),
    "percent": (f"GET /%ff%zz%00/ {HEAD}\r\n",),
    "bytes in the path": (f"GET /\xff {HEAD}\r\n",),
    "bytes in the host": ("GET / HTTP/1.1\r\nHost: \xff\r\nConnection: close\r\n\r\n",),
    "no host": ("GET / HTTP/1.1\r\n\r\n",),
    "two hosts": (f"GET /{TOKEN}/ {HEAD}Host: evil.example\r\n\r\n",),
    "TLS": ("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",),
    "a long header": (f"GET /{TOKEN}/ {HEAD}X: {'x' * 70_000}",),
    "a length": (f"{POST}Content-Length: -1\r\n\r\n",),
    "a broken chunk": (f"{POST}Transfer-Encoding: chunked\r\n\r\n1\r\n{{\r\nzz\r\n",),
    "broken after a refusal": (
        f"POST / {HEAD}Transfer-Encoding: chunked\r\n\r\n1\r\n{{\r\n", "zz\r\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_odd_requests_are_refused_and_nothing_is_logged(served, logged, what):
    """Those that are HTTP by the application, and any other by the library of the server."""
    head, _, body = exchange(served, *ODD[what]).partition("\r\n\r\n")
    assert re.match(r"HTTP/1.1 4\d\d ", head)
    if "Invalid HTTP request" not in body:
        for name, value in HEADERS.items():
            assert f"{name}: {value}".lower() in head.lower()
        assert what == "HEAD" or "clearhead serve printed" in body
    assert TOKEN not in body and not logged.records


@pytest.mark.parametrize("sent", ["the head", "half a body", "a body"])
def test_a_client_that_leaves_is_not_logged(served, logged, sent):
    body = json.dumps({"text": TEXT})
    request = f"{POST.replace('PORT', str(served))}Content-Length: {len(body)}\r\n\r\n"
    request += body[: {"the head": 0, "half a body": 9, "a body": None}[sent]]
    for linger in (0, 1):  # closed with a reset, and without
        connection = socket.create_connection(("127.0.0.1", served), timeout=20)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, linger))
        connection.sendall(request.encode())
        time.sleep(0.05)
        connection.close()
    time.sleep(0.1)
    assert exchange(served, f"GET /{TOKEN}/ {HEAD}\r\n").endswith("<p>the page</p>")
    assert not logged.records


# ---- runs that go on -------------------------------------------------------------------


def scope_of(path, body):
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "POST",
        "path": f"/{TOKEN}/{path}", "raw_path": b"", "query_string": b"", "root_path": "",
        "headers": [(b"host", b"127.0.0.1:8000")], "scheme": "http", "http_version": "1.1",
    }  # fmt: skip


class Visitor:
    """One request, which may go away."""

    def __init__(self, served, request):
        self.sent, self.left = [], asyncio.Event()
        self._body = [json.dumps(request).encode()]
        self.task = asyncio.create_task(
            served(scope_of("compute", request), self.receive, self.send)
        )

    async def receive(self):
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def lines(self):
        body = b"".join(m.get("body", b"") for m in self.sent)
        return [json.loads(line) for line in body.splitlines()]


def run_in_a_thread(visit):
    """This thread may run the loop of the browser that tests of pages share."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, visit).result()


async def until(holds):
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came")


def test_who_goes_away_ends_the_run_and_the_next_is_answered():
    async def visit():
        reader = Waits()
        served = server.app(reader, "", TOKEN, 8000)
        first = Visitor(served, {"text": TEXT})
        await until(lambda: reader.calls == 2)  # it waits within the first layer
        second = Visitor(served, {"text": "He slept."})
        await asyncio.sleep(0.05)
        assert reader.calls == 2 and not second.lines  # one run at a time
        first.left.set()
        await first.task
        reader.go.set()
        await second.task
        return reader, first, second

    reader, first, second = run_in_a_thread(visit())
    assert all("progress" in line for line in first.lines)
    assert second.lines[-1]["snapshot"]["text"] == "He slept."
    assert reader.calls == 2 + 3  # of the first run one layer, of the second all


def test_who_goes_away_while_waiting_is_never_computed():
    async def visit():
        reader = Waits()
        served = server.app(reader, "", TOKEN, 8000)
        first = Visitor(served, {"text": TEXT})
        await until(lambda: reader.calls == 2)
        second = Visitor(served, {"text": "He slept."})
        await asyncio.sleep(0.05)
        second.left.set()
        await second.task
        reader.go.set()
        await first.task
        return reader.calls, first.lines[-1]

    calls, last = run_in_a_thread(visit())
    assert calls == 3 and "snapshot" in last


def test_too_many_requests_are_refused():
    async def visit():
        reader = Waits()
        served = server.app(reader, "", TOKEN, 8000)
        first = [Visitor(served, {"text": TEXT})]
        await until(lambda: reader.calls == 2)
        others = [Visitor(served, {"text": TEXT}) for _ in range(server.MOST_REQUESTS)]
        await until(lambda: others[-1].lines)
        refused = others.pop()
        for visitor in first + others:
            visitor.left.set()
        reader.go.set()
        await asyncio.gather(*(visitor.task for visitor in [*first, *others, refused]))
        return refused.status, refused.lines

    status, [line] = run_in_a_thread(visit())
    assert status == 503 and line["error"]["rule"] == "the model runs on one text at a time."


def test_a_model_that_fails_is_told_and_the_server_goes_on(monkeypatch):
    reader = Reader()
    client = TestClient(server.app(reader, "", TOKEN, 8000), base_url=HOST)
    with monkeypatch.context() as broken:
        broken.setattr(reader.model, "annotate", lambda *_: 1 / 0)
        _, _, last = ask(client, "compute", {"text": TEXT})
    assert last["error"]["gave"] == "The model failed: ZeroDivisionError: division by zero."
    assert "snapshot" in ask(client, "compute", {"text": TEXT})[2]


# ---- checkpoints -----------------------------------------------------------------------


def test_a_checkpoint_at_a_length_of_maps(tmp_path):
    pytest.importorskip("transformers")
    from clearhead.views.serve.server import app

    folder = save_gpt2(tmp_path / "gpt2", longest=600)
    client = TestClient(app(Reader(folder), "", TOKEN, 8000), base_url=HOST)
    status, before, last = ask(client, "compute", {"text": words(577)})
    assert (status, len(before)) == (200, 3)
    found = last["snapshot"]
    assert found["guesses"] is None and len(found["tokens"]) == 577
    assert [layer["size"]["q"] for layer in found["layers"]] == [577, 577]
    expected = report(folder, words(577))
    assert found["heads"][4]["entropy"] == pytest.approx(expected[1, 1].entropy, abs=1e-6)
    part = {"layer": 1, "head": 2, "queries": [500, 530], "keys": [3, 10]}
    _, _, last = ask(client, "tile", {"text": words(577), **part, "edits": {"off": [[0, 0]]}})
    assert last["layer"]["steps"][0]["stored"] == [1, 31, 8]
    _, _, last = ask(client, "compute", {"text": words(601)})
    assert last["error"]["gave"] == "The text has 601 tokens."


@pytest.mark.slow
def test_2048_tokens_through_12_layers(tmp_path):
    pytest.importorskip("transformers")
    folder = save_gpt2(tmp_path / "gpt2", layers=12, heads=12, longest=2048)
    client = TestClient(server.app(Reader(folder), "", TOKEN, 8000), base_url=HOST)
    status, before, last = ask(client, "compute", {"text": words(2048)})
    assert (status, before) == (200, [{"progress": [n, 12]} for n in range(13)])
    assert len(last["snapshot"]["heads"]) == 144
    assert len(json.dumps(last)) < 4_500_000


def test_a_damaged_checkpoint(tmp_path):
    pytest.importorskip("transformers")
    folder = save_gpt2(tmp_path / "gpt2")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(BadValue, match="cannot be loaded"):
        Reader(folder)


# ---- from a shell ----------------------------------------------------------------------


COMMAND = "import sys; from clearhead_cli import main; sys.exit(main())"


def test_it_starts_answers_and_ends():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", COMMAND, "serve", TEXT]
    with subprocess.Popen(command, text=True, **pipes) as started:
        try:
            address = started.stdout.readline().strip()
            host, path = re.fullmatch(r"http://(127.0.0.1:\d+)(/[\w-]{32}/)", address).groups()
            connection = http.client.HTTPConnection(host, timeout=30)
            connection.request("GET", path)
            page = connection.getresponse().read().decode()
            assert "connect-src 'self'" in page and "quiet" in page
            connection.request("POST", f"{path}compute", json.dumps({"text": "He slept."}))
            lines = connection.getresponse().read().splitlines()
            assert json.loads(lines[-1])["snapshot"]["tokens"] == ["He", "slept", "."]
            connection.close()
            with socket.create_connection(host.split(":"), timeout=30) as waits:
                waits.sendall(f"POST {path}compute HTTP/1.1\r\nHost: {host}\r\n".encode())
                waits.sendall(b"Content-Length: 99\r\n\r\n{")
                time.sleep(0.1)
                started.send_signal(signal.SIGINT)
                _, err = started.communicate(timeout=30)
        finally:
            started.kill()
    assert started.returncode == 0
    assert "Ctrl-C ends it" in err and err.endswith("ended\n") and "Traceback" not in err


def test_a_port_that_is_taken_and_a_model_that_is_not_there(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        done = run_program(COMMAND, "serve", "--port", taken)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Error: Port {taken} is not available")
    done = run_program(COMMAND, "serve", "--model", tmp_path)
    assert done.returncode == 2 and "is not a checkpoint folder" in done.stderr


def test_without_its_libraries_it_says_what_to_install(run, monkeypatch):
    monkeypatch.delitem(sys.modules, "clearhead.views.serve.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delattr("clearhead.views.serve.server")
    code, _, err = run("serve", "a text")
    assert code == 2 and "pip install 'starlette>=0.45' 'uvicorn>=0.32'" in err

"""The dashboard as a process: who may ask it, how fast it tells news, how it begins and ends."""

import json
import signal
import socket
import subprocess
import sys
import time

import pytest
from dashboard_runs import make_run, train, write


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    (root / "secret.txt").write_text("the secret")
    runs = root / "runs"
    make_run(runs / "a", [train(1, loss=1.0)])
    (runs / "a" / "notes.txt").write_text("the secret")
    return runs


@pytest.fixture
def served(serve, root):
    return serve(root, "--port", "0")


def test_only_this_page_may_ask(served):
    here = f"127.0.0.1:{served.port}"
    for host in (here, f"localhost:{served.port}", "localhost", f"[::1]:{served.port}"):
        assert served.ask("/api/runs", host)[0] == 200
    for host in (
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "localhost@evil.example",
        "",
        "a b",
        "[::1",
    ):
        status, answer = served.ask("/api/runs", host or " ")
        assert status in (400, 403), host
        assert '"id"' not in answer
    assert served.ask("/api/runs", Origin=f"http://{here}")[0] == 200
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{served.port + 1}", "http://localhost"):
        assert served.ask("/api/runs", Origin=origin)[0] == 403, origin
    assert served.ask("/api/runs", Sec_Fetch_Site="cross-site")[0] == 403
    # two Host headers, where a proxy and a server might look at different ones
    status, answer = served.ask("/api/runs", host=f"{here}\r\nHost: evil.example")
    assert status in (400, 403)
    # a form of another site can send text, but not JSON
    body = json.dumps({"run": "a", "tags": ["x"]}).encode()
    assert served.ask("/api/tags", method="POST", body=body, Content_Type="text/plain")[0] == 415
    assert served.ask("/api/tags", method="POST", body=body, Content_Type="application/json")[0] == 200
    foreign = {"Content_Type": "application/json", "Origin": "http://evil.example"}
    assert served.ask("/api/tags", method="POST", body=body, **foreign)[0] == 403


def test_no_file_outside_the_page_is_served(served):
    for path in (
        "/../secret.txt",
        "/static/../../secret.txt",
        "/static/..%2f..%2f..%2f..%2f..%2f..%2f..%2fetc/passwd",
        "/static/%2e%2e/%2e%2e/server.py",
        "/static//etc/passwd",
        "/static/..\\..\\server.py",
        "/static/%00",
        "/static/",
        "/static",
        "//etc/passwd",
        "/api/run?run=../secret.txt",
        "/api/run?run=a/../a",
        "/api/run?run=/etc",
        "/api/run?run=a%00",
        "/api/media?run=a&name=../notes.txt",
        "/a/notes.txt",
    ):
        status, answer = served.ask(path)
        assert status in (307, 400, 404), path
        assert "the secret" not in answer
        assert "root:" not in answer
        assert "import" not in answer


def test_many_runs_may_be_named_in_one_request(served):
    status, answer = served.ask("/api/series?name=loss" + "&run=a" * 20_000)
    assert status == 200
    assert answer.count('"run":"a"') == 1


def test_answers_carry_the_headers_that_protect(served):
    for path in ("/api/runs", "/nothing"):
        _, answer = served.ask(path)
        head = answer.split("\r\n\r\n")[0].lower()
        assert "content-security-policy: default-src 'self'" in head
        assert "x-content-type-options: nosniff" in head
        assert "unsafe" not in head
    assert "cache-control: no-store" in served.ask("/api/runs")[1].lower()


def test_other_addresses_need_the_token(serve, root):
    served = serve(root, "--port", "0", "--host", "0.0.0.0")
    assert served.token is not None
    assert len(served.token) >= 32
    for path in (
        "/",
        "/api/runs",
        "/static/x.js",
        "/api/runs?token=wrong",
        f"/api/runs?token={served.token}&token=a",
    ):
        assert served.ask(path)[0] == 403, path
    status, answer = served.ask(f"/?token={served.token}&x=1")
    head = answer.lower()
    assert status == 303
    assert "location: /?x=1\r\n" in head
    assert "httponly" in head
    assert "samesite=strict" in head
    cookie = next(line.split(": ", 1)[1] for line in answer.split("\r\n") if line.lower().startswith("set-cookie"))
    assert served.ask("/api/runs", Cookie=cookie.split(";")[0])[0] == 200
    assert served.ask("/api/runs", Cookie="etude_dashboard=wrong")[0] == 403
    assert served.ask("/api/runs", Authorization=f"Bearer {served.token}")[0] == 200
    assert served.ask("/api/runs", "evil.example", Authorization=f"Bearer {served.token}")[0] == 403
    status, answer = served.ask(f"//evil.example/?token={served.token}")
    assert "location: //" not in answer.lower()


def test_a_token_on_a_machine_of_several_people(serve, root):
    served = serve(root, "--port", "0", "--token")
    assert served.ask("/api/runs")[0] == 403
    assert served.ask("/api/runs", Authorization=f"Bearer {served.token}")[0] == 200


def test_a_new_record_arrives_within_a_second(serve, tmp_path):
    folder = make_run(tmp_path / "runs" / "live", [train(1, loss=1.0)], state=None)
    served = serve(tmp_path / "runs", "--port", "0")
    series = json.loads(served.ask("/api/series?run=live&name=loss&x=time")[1].split("\r\n\r\n", 1)[1])["series"][0]
    with served.connect() as connection, connection.makefile("rb") as stream:
        connection.sendall(
            f"GET /api/stream?run=live&after={series['cursor']} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        )
        while b"event: runs" not in stream.readline():
            pass
        for step in (2, 3):
            begin = time.monotonic()
            write(folder / "metrics.jsonl", [train(step, loss=float(step))], "a")
            write(folder / "events.jsonl", [{"kind": "warning", "step": step, "time": 1.0, "message": "m"}], "a")
            kinds = {}
            while not {"points", "event"} <= kinds.keys():
                line = stream.readline()
                if line.startswith(b"event: "):
                    kinds[line[7:].strip().decode()] = json.loads(stream.readline()[6:])
            assert time.monotonic() - begin < 1
            assert kinds["points"]["records"] == [train(step, loss=float(step))]
            assert kinds["points"]["elapsed"] == [step - 1]
            assert kinds["event"]["record"]["step"] == step
        # a page that is open does not keep the server alive
        begin = time.monotonic()
        code, errors = served.end()
    assert (code, errors) == (0, "")
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_without_a_traceback(served, number):
    assert served.ask("/api/runs")[0] == 200
    assert served.end(number) == (0, "")


def test_a_port_that_is_taken(serve, root):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "etude", "dashboard", str(root), "--no-open", "--port", str(port)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert found.stderr.count("\n") == 1
    assert str(port) in found.stderr
    # without --port the next free one is taken
    first, second = serve(root), serve(root)
    assert first.port != second.port


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nothing"], "nothing"),
        ([".", "--webhook", "ftp://x"], "ftp://x"),
        ([".", "--webhook", "file:///etc/passwd"], "file:"),
        ([".", "--host", "no.such.host.invalid"], "no.such.host.invalid"),
    ],
)
def test_mistakes_are_one_line(tmp_path, arguments, word):
    command = [sys.executable, "-m", "etude", "dashboard", "--no-open", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (found.returncode, found.stderr.count("\n")) == (2, 1), found.stderr
    assert word in found.stderr


def test_it_needs_no_torch(root):
    code = (
        "import sys; from etude.dashboard.server import make_app; from starlette.testclient import TestClient\n"
        f"client = TestClient(make_app({str(root)!r}), base_url='http://localhost')\n"
        "assert client.get('/api/runs').json()['runs']\n"
        "assert client.get('/api/series?run=a&name=loss').json()['series'][0]['count'] == 1\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_package_is_one_line_that_names_the_extra(tmp_path):
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError('no', name='uvicorn')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['etude', 'dashboard', '.']\n"
        "from etude.cli.main import main; main()"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert found.stderr == "etude: the dashboard needs uvicorn: pip install 'etude[dashboard]'\n"

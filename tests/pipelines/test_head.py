"""The local head: addresses, owners, and the guardian that leaves nothing behind. Ray itself is a stand-in here but for one slow test."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from pipelines import head

# A stand-in for `ray start`: a child, and one that has left the session.
STAND_IN = "import subprocess,sys,time; nap=[sys.executable,'-c','import time; time.sleep(600)']; subprocess.Popen(nap); subprocess.Popen(nap, start_new_session=True); time.sleep(600)"


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def guardian(tmp_path, sleeper):
    """A guardian over the stand-in, owned by `sleeper`: (its process, its root, its folder)."""
    root, folder = tmp_path / "root", head._folder()
    record = {"folder": str(folder), "url": "http://127.0.0.1:1", "owners": [head.identity(psutil.Process(sleeper.pid))]}
    (root / ".strata").mkdir(parents=True)
    (root / ".strata" / "head.json").write_text(json.dumps(record))
    code = f"from pathlib import Path; from pipelines import head; head._command = lambda *a: [{sys.executable!r}, '-c', {STAND_IN!r}]; head.guard(Path({str(root)!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=head.CODE, env=head.environment(folder), start_new_session=True)
    until(lambda: len(head.members(folder)) == 5)  # the guardian, its heir, the stand-in and its two
    yield process, root, folder
    process.kill()
    process.wait()
    head.sweep(folder)


def children(process):
    """Of a guardian: (its heir, Ray), each as a psutil.Process."""
    heir, ray = sorted(psutil.Process(process.pid).children(), key=lambda child: child.cmdline()[-1] == STAND_IN)
    assert heir.cmdline() == psutil.Process(process.pid).cmdline() and ray.cmdline()[-1] == STAND_IN
    return heir, ray


def test_the_guardian_ends_everything_when_the_owner_is_killed(guardian, sleeper):
    process, root, folder = guardian
    sleeper.kill()  # not waited for: a zombie owns nothing
    assert process.wait(timeout=10) == 0
    assert not head.members(folder) and not folder.exists()
    assert not (root / ".strata" / "head.json").exists()


def test_the_guardian_ends_everything_when_it_is_asked_to(guardian):
    process, root, folder = guardian
    process.terminate()
    assert process.wait(timeout=10) == 0
    assert not head.members(folder) and not folder.exists()


def test_the_guardian_ends_everything_when_ray_dies(guardian):
    process, root, folder = guardian
    children(process)[1].kill()
    assert process.wait(timeout=10) == 0
    assert not head.members(folder) and not folder.exists()


def test_the_heir_ends_everything_when_the_guardian_is_killed(guardian):
    process, root, folder = guardian
    _, ray = children(process)
    process.send_signal(signal.SIGSTOP)  # or it would see Ray's end and do its work
    ray.kill()
    process.kill()
    until(lambda: not head.members(folder) and not folder.exists())
    assert head.current(root) is None


def test_ray_dies_with_a_killed_guardian_and_heir_and_the_next_head_clears_the_rest(guardian, monkeypatch):
    process, root, folder = guardian
    heir, ray = children(process)
    heir.kill()
    process.kill()
    process.wait()
    until(lambda: not ray.is_running() or ray.status() == psutil.STATUS_ZOMBIE)
    assert head.current(root) is None
    started = []
    monkeypatch.setattr(head, "_start", lambda root, record: started.append(record) or head.Address(record["url"], True))
    head.ensure(root)
    assert not head.members(folder) and not folder.exists()
    assert started[0]["owners"] == [head.identity(head.caller())]
    head.sweep(Path(started[0]["folder"]))


def test_a_second_owner_keeps_the_head(guardian, sleeper):
    process, root, folder = guardian
    assert head.ensure(root, psutil.Process()).url == "http://127.0.0.1:1"
    sleeper.kill()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    assert [who["pid"] for who in head.load(root / ".strata" / "head.json")["owners"]] == [sleeper.pid, os.getpid()]


def test_a_damaged_head_file_counts_as_none(tmp_path, monkeypatch):
    (tmp_path / ".strata").mkdir()
    (tmp_path / ".strata" / "head.json").write_text('{"folder": ')
    monkeypatch.setattr(head, "_start", lambda root, record: head.Address(record["url"], True))
    assert head.current(tmp_path) is None
    assert head.ensure(tmp_path).local
    head.sweep(Path(head.load(tmp_path / ".strata" / "head.json")["folder"]))


def test_what_ray_says_is_passed_on_when_it_does_not_start(tmp_path, monkeypatch):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no Ray today\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(RuntimeError, match="(?s)--no-ray.*no Ray today"):
        head.ensure(tmp_path)
    assert not Path(head.load(tmp_path / ".strata" / "head.json")["folder"]).exists()


def test_the_folder_is_private_and_its_path_short():
    folder = head._folder()
    try:
        assert len(str(folder)) <= head.LONGEST_FOLDER
        assert folder.stat().st_mode & 0o077 == 0 and (folder / "token").stat().st_mode & 0o077 == 0
        assert len((folder / "token").read_text()) == 64
    finally:
        head.sweep(folder)


def test_the_caller_is_the_nearest_dvc(tmp_path):
    script = tmp_path / "dvc"
    script.write_text("import subprocess, sys; sys.exit(subprocess.run(['sh', '-c', sys.argv[1] + '; exit $?']).returncode)")
    inner = f"{sys.executable} -c 'from pipelines import head; print(head.caller().pid)'"
    process = subprocess.Popen([sys.executable, str(script), inner], cwd=head.CODE, stdout=subprocess.PIPE, text=True)
    assert int(process.communicate(timeout=30)[0]) == process.pid


# Addresses


@pytest.fixture
def cluster(monkeypatch):
    """A Jobs API that answers for its version, to those who have the token where one is set: (host:port, set the token)."""

    class Handler(BaseHTTPRequestHandler):
        token = None

        def do_GET(self):
            allowed = self.token is None or self.headers.get("Authorization") == f"Bearer {self.token}"
            self.send_response(200 if allowed else 401)
            self.end_headers()
            self.wfile.write(json.dumps({"session_name": "session_1"}).encode() if allowed else b"no")

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    yield f"127.0.0.1:{server.server_port}", lambda token: setattr(Handler, "token", token)
    server.shutdown()


@pytest.mark.parametrize("form", ["http://{}", "http://{}/", "{}"])
def test_forms_of_ray_address(cluster, monkeypatch, form):
    monkeypatch.setenv("RAY_ADDRESS", form.format(cluster[0]))
    address = head.address_from_environment()
    assert address == head.Address(f"http://{cluster[0]}") and address.session() == "session_1" and not address.local


def test_no_ray_address(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert head.address_from_environment() is None


@pytest.mark.parametrize(
    "given, words",
    [
        ("ray://head.example:10001", "set RAY_ADDRESS=http://head.example:8265"),
        ("head.example", "is no Ray address"),
        ("ftp://head.example:21", "is no Ray address"),
        ("http://127.0.0.1:1", "No Ray cluster answers at RAY_ADDRESS=http://127.0.0.1:1"),
        ("127.0.0.1:1", "No Ray cluster answers"),
    ],
)
def test_wrong_addresses_are_refused(monkeypatch, given, words):
    monkeypatch.setenv("RAY_ADDRESS", given)
    with pytest.raises(ValueError, match=words):
        head.address_from_environment()


def test_a_cluster_that_wants_a_token(cluster, monkeypatch, tmp_path):
    where, set_token = cluster
    set_token("secret")
    monkeypatch.setenv("RAY_ADDRESS", where)
    with pytest.raises(ValueError, match="wants a token"):
        head.address_from_environment()
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert head.address_from_environment().session() == "session_1"


@pytest.mark.slow
def test_a_real_head_ends_with_its_guardian(tmp_path, sleeper):
    """kill -9 of the guardian as soon as Ray answers, which still starts then: nothing is left."""
    address = head.ensure(tmp_path, psutil.Process(sleeper.pid))
    folder = address.token.parent
    assert folder.stat().st_mode & 0o077 == 0 and (folder / "token").stat().st_mode & 0o077 == 0
    assert head.Address(address.url, True).headers == {} and pytest.raises(ValueError, head.Address(address.url).session)
    listening = {
        item.laddr.ip for process in head.members(folder) for item in process.net_connections("tcp") if item.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, listening
    os.kill(head.load(folder / "guardian.json")["pid"], signal.SIGKILL)
    until(lambda: not head.members(folder) and not folder.exists(), seconds=20)
    assert head.current(tmp_path) is None

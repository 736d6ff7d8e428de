"""One Ray head on loopback for one `dvc repro`: started by its first stage, ended when its owners are gone.

    <root>/.strata/head.json        where it is and whose it is: {"folder", "url", "owners": [{"pid", "started"}]}
    <folder>/                       its private temporary folder (mode 0700): token, guardian.json, log
           r/                       Ray's own files; Ray opens this one to everybody

A small guardian process, in a session of its own, starts `ray start --head --block`, watches the owners, and ends
every process of the head and its folder after the last owner ended, however it ended. If it is killed itself, its
heir, a copy of it that waits for nothing else, does the same. What outlives both is ended by the next head.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pipelines import nodes
from pipelines.processes import identity, runs
from stages.artifact import write_atomically

CODE = Path(__file__).resolve().parents[1]  # the folder that holds the floors
MARK = "STRATA_HEAD"  # environment variable of every process of a head: its folder
START_SECONDS = 90.0
END_SECONDS = 3.0  # for Ray's own orderly end: nothing of ours needs it
OBJECT_STORE_BYTES = 100_000_000  # specs and outcomes travel through Ray, data never does
LONGEST_FOLDER = 40  # of 107 characters of a socket's path, Ray takes 65

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Address:
    """A Ray cluster's Jobs API. local: our own head, which ends with its owners. token: a file with its access token."""

    url: str
    local: bool = False
    token: Path | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What a request to it must carry. A cluster's token comes from Ray's own variables."""
        token = os.environ.get("RAY_AUTH_TOKEN", "")
        file = self.token or os.environ.get("RAY_AUTH_TOKEN_PATH")
        if file and (self.token or not token):
            token = Path(file).read_text().strip()
        return {"Authorization": f"Bearer {token}"} if token else {}

    def session(self, timeout: float = 2.0) -> str | None:
        """The name of the Ray session that answers there now, or None. It changes when a head is started again."""
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{self.url}/api/version", headers=self.headers), timeout=timeout) as answer:
                return json.loads(answer.read())["session_name"]
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                raise ValueError(
                    f"The Ray cluster at {self.url} wants a token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to a file that holds it."
                ) from error
            return None
        except (OSError, ValueError, KeyError, TypeError):
            return None


# Addresses


def address_from_environment() -> Address | None:
    """The cluster that RAY_ADDRESS names, or None where it is not set.

    Forms: http(s)://host:port (the Jobs API), host:port (the Jobs API's or the cluster's own), auto (this node's cluster).
    ValueError for any other form, or where nothing answers.
    """
    given = os.environ.get("RAY_ADDRESS", "").strip().rstrip("/")
    if not given:
        return None
    scheme, _, rest = given.rpartition("://")
    host, _, port = rest.partition(":")
    if scheme == "ray":
        raise ValueError(
            f"RAY_ADDRESS={given} is the Ray Client's form, found where the Jobs API is wanted; set RAY_ADDRESS=http://{host}:8265."
        )
    if given != "auto" and (scheme not in ("", "http", "https") or not host or "/" in rest or (not scheme and not port.isdigit())):
        raise ValueError(f"RAY_ADDRESS={given} is no Ray address; set http://host:8265, host:port, or auto on a node of the cluster.")
    if given == "auto" or not scheme and Address(f"http://{given}").session() is None:
        return Address(_dashboard(given))
    address = Address(given if scheme else f"http://{given}")
    if address.session(timeout=10) is None:
        raise ValueError(
            f"No Ray cluster answers at RAY_ADDRESS={given}; start it, correct the address, or unset RAY_ADDRESS to work on this machine."
        )
    return address


def _dashboard(cluster: str) -> str:
    """The Jobs API of the cluster at `cluster`: "auto", or host:port of its control store."""
    refusal = f"No Ray cluster answers at RAY_ADDRESS={cluster}; give its Jobs API as http://host:8265, or unset RAY_ADDRESS to work on this machine."
    if cluster != "auto":
        host, _, port = cluster.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=3).close()
        except OSError as error:
            raise ValueError(refusal) from error
    from ray.dashboard.utils import ray_address_to_api_server_url

    try:
        return ray_address_to_api_server_url(cluster)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(refusal) from error


# Processes


def caller() -> psutil.Process:
    """The nearest ancestor that is DVC; else this process."""
    for process in psutil.Process().parents():
        try:
            words = [process.name(), *(Path(word).name for word in process.cmdline()[:3])]
        except psutil.Error:
            continue
        if "dvc" in words:
            return process
    return psutil.Process()


def _belongs(process: psutil.Process, folder: str) -> bool:
    """By its command, its environment, or, for Ray's workers, which overwrite both, by the log files that they hold open."""
    try:
        return (
            any(folder in word for word in process.cmdline())
            or process.environ().get(MARK) == folder
            or any(file.path.startswith(folder) for file in process.open_files())
        )
    except psutil.Error:
        return False


def members(folder: Path) -> set[psutil.Process]:
    """The running processes of the head in `folder` with all that they started, but this one."""
    found = {process for process in psutil.process_iter() if process.pid != os.getpid() and _belongs(process, str(folder))}
    for process in list(found):
        with suppress(psutil.Error):
            found.update(child for child in process.children(recursive=True) if child.pid != os.getpid())
    return found


def sweep(folder: Path) -> None:
    """Kill what is left of the head in `folder`, with all it started, and remove the folder. This process is spared."""
    while found := members(folder):
        for process in found:
            _kill(process)
        psutil.wait_procs(found, timeout=1)
    shutil.rmtree(folder, ignore_errors=True)


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.Error):  # it may be faster
        process.kill()


# The head


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, no other process of this machine is inside for the same path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _files(root: Path) -> tuple[Path, Path]:
    return root / ".strata" / "head.json", root / ".strata" / "head.lock"


def load(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def current(root: Path) -> Address | None:
    """The head of `root` if one runs, without starting one."""
    record = load(_files(root)[0])
    folder = Path(record.get("folder", "/nonexistent"))
    return Address(record["url"], True, folder / "token") if runs(load(folder / "guardian.json")) else None


def ensure(root: Path, owner: psutil.Process | None = None) -> Address:
    """The address of the head of `root`, started if there is none.

    It lives at least as long as `owner`; if none is given, as DVC and this process, which may outlive a killed DVC to see
    work saved. Several processes may ask at once: one starts it. RuntimeError, with Ray's last words, where it does not come up.
    """
    owners = [identity(process) for process in ({caller(), psutil.Process()} if owner is None else {owner})]
    path, lock = _files(root)
    with locked(lock):
        record, address = load(path), current(root)
        if address is None:
            if record.get("folder"):
                sweep(Path(record["folder"]))
            record = {"folder": str(_folder()), "url": f"http://127.0.0.1:{_free_ports(1)[0]}", "owners": []}
        if new := [who for who in owners if who not in record["owners"]]:
            record["owners"] = [who for who in record["owners"] if runs(who)] + new
            write_atomically(path, json.dumps(record))
        if address is None:
            address = _start(root, record)
    return address


def _folder() -> Path:
    parent = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="strata-", dir=parent if len(parent) < LONGEST_FOLDER - 16 else "/tmp"))
    descriptor = os.open(folder / "token", os.O_WRONLY | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    return folder


def _start(root: Path, record: dict[str, Any]) -> Address:
    folder = Path(record["folder"])
    address = Address(record["url"], True, folder / "token")
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", "pipelines.head", str(root.absolute())]
        guardian = subprocess.Popen(
            command, cwd=CODE, env=environment(folder), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    deadline = time.monotonic() + START_SECONDS
    while address.session() is None:
        if guardian.poll() is not None or time.monotonic() > deadline:
            words = (folder / "log").read_text(errors="replace")[-2000:] if folder.exists() else ""
            _kill(psutil.Process(guardian.pid)) if guardian.poll() is None else None
            sweep(folder)
            raise RuntimeError(f"Ray did not start on this machine; --no-ray runs without it. It said:\n{words}")
        time.sleep(0.1)
    return address


def environment(folder: Path) -> dict[str, str]:
    """The environment of every process of a head: loopback only, a private token, no calls home, this code."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    path = os.pathsep.join([str(CODE), *filter(None, [inherited.get("PYTHONPATH")])])
    return inherited | {
        MARK: str(folder),
        "PYTHONPATH": path,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # what keeps every port on loopback
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for item in sockets:
        item.bind(("127.0.0.1", 0))
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports


def _command(folder: Path, url: str) -> list[str]:
    control, client, agent, metrics = _free_ports(4)
    return [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats", "--no-monitor", "--include-log-monitor=false",
        "--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", f"--dashboard-port={url.rsplit(':', 1)[1]}", f"--port={control}",
        f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}", f"--metrics-export-port={metrics}",
        f"--num-cpus={nodes.cpus()}", f"--object-store-memory={OBJECT_STORE_BYTES}", f"--temp-dir={folder / 'r'}",
    ]  # fmt: skip


# The guardian


def _process_control(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def guard(root: Path) -> None:
    """Start Ray, wait until it or the last owner is gone, end all of it. The guardian process's whole life."""
    path, lock = _files(root)
    folder = Path(os.environ[MARK])
    _process_control(PR_SET_CHILD_SUBREAPER, 1)  # whatever Ray leaves behind becomes our child
    write_atomically(folder / "guardian.json", json.dumps(identity(psutil.Process())))
    _leave_heir(folder)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    ray = subprocess.Popen(_command(folder, load(path)["url"]), preexec_fn=lambda: _process_control(PR_SET_PDEATHSIG, signal.SIGTERM))
    while ray.poll() is None and not asked:
        if not _owned(path, folder):
            with locked(lock):  # an owner may have come this moment
                if not _owned(path, folder):
                    break
        time.sleep(0.25)
    with locked(lock):
        if load(path).get("folder") == str(folder):
            path.unlink()
        _end(ray, folder)


def _leave_heir(folder: Path) -> None:
    """Fork a process that ends the head in `folder` once this one was killed; an end in order ends the heir first.

    The kernel tells Ray of our death too, but a Ray that still starts, or has much to do, can leave processes behind.
    """
    waits, held = os.pipe()  # closed on exec: nobody else holds the end that our death closes
    if os.fork():
        os.close(waits)
        return
    os.setsid()
    os.close(held)
    os.read(waits, 1)
    deadline = time.monotonic() + END_SECONDS
    while members(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    sweep(folder)
    sys.exit()


def _owned(path: Path, folder: Path) -> bool:
    record = load(path)
    return record.get("folder") == str(folder) and any(runs(who) for who in record["owners"])


def _end(ray: subprocess.Popen[bytes], folder: Path) -> None:
    ray.terminate()
    with suppress(subprocess.TimeoutExpired):
        ray.wait(timeout=END_SECONDS)
    while children := psutil.Process().children(recursive=True):
        for child in children:
            _kill(child)
        psutil.wait_procs(children, timeout=1)
    sweep(folder)


if __name__ == "__main__":
    guard(Path(sys.argv[1]))

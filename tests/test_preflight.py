"""Checks before tritonserver starts, the server's folder, and child processes that never outlive their parent."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridtrt.model_repo import preflight
from hybridtrt.model_repo.child import Child, children, is_live
from hybridtrt.model_repo.preflight import ServeError, claim_ports
from hybridtrt.model_repo.processes import ServeOptions
from hybridtrt.model_repo.state import State


def test_numpy_2_is_refused():
    preflight.check_numpy("1.26.4")
    with pytest.raises(ServeError, match=r"numpy 2\.1\.0 is too new"):
        preflight.check_numpy("2.1.0")


def test_another_interpreter_under_the_name_python3_is_refused(tmp_path):
    preflight.check_interpreter()
    for name in ("python3", "python3.99"):
        (tmp_path / name).touch()
    with pytest.raises(ServeError, match="run in a virtual environment"):
        preflight.check_interpreter(str(tmp_path / "python3.99"))


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_a_grace_that_is_no_time_is_refused(tmp_path, seconds):
    with pytest.raises(ServeError, match=rf"drain_seconds={seconds} is not in 0\.\.86400"):
        ServeOptions(tmp_path, drain_seconds=seconds)


def test_ports():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=f"grpc_port={port} cannot be used: Address already in use"):
            claim_ports({"http_port": 0, "grpc_port": port})
    claimed = claim_ports({"http_port": 0, "grpc_port": 0, "metrics_port": 0})
    assert len(set(claimed.values())) == 3
    with pytest.raises(ServeError, match="http_port=70000 is not a port"):
        claim_ports({"http_port": 70000})
    with pytest.raises(ServeError, match=r"grpc_port=[0-9]+ cannot be used: it is http_port too"):
        claim_ports({"http_port": port, "grpc_port": port})


def test_too_little_shared_memory_is_named(tmp_path):
    preflight.check_shm()
    with pytest.raises(ServeError, match="MiB free, 1099511627776 MiB are needed"):
        preflight.check_shm(tmp_path, 1 << 60)


def test_a_missing_library_of_the_stub_is_named(tmp_path):
    stub = preflight.find_triton().stub
    lonely = tmp_path / "stub"
    lonely.write_bytes(stub.read_bytes())
    lonely.chmod(0o755)
    with pytest.raises(ServeError, match=r"needs libcudart.*, which is not there"):
        preflight.check_stub(lonely, {})


def test_options_are_checked():
    with pytest.raises(ServeError, match="nowhere is not an engine folder"):
        ServeOptions(Path("nowhere"))


def test_the_state_folder_is_exclusive_and_cleans_up_after_a_crash(tmp_path):
    state = State(tmp_path / "state")
    with pytest.raises(ServeError, match="another server uses"):
        State(tmp_path / "state")
    left = Path("/dev/shm") / f"{state.shm_prefix}left"
    left.touch()
    state._lock.close()  # as if the process had been killed
    state = State(tmp_path / "state")
    assert not left.exists()
    state.close()
    assert state.shm_prefix not in "".join(os.listdir("/dev/shm"))


def test_a_state_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ServeError, match="cannot be used: "):
        State(tmp_path / "file/state")


def test_a_child_that_ignores_sigterm_is_killed_with_its_children(tmp_path):
    child = Child("stubborn", ["bash", "-c", "trap '' TERM; echo started; sleep 1000 & sleep 1000"], tmp_path / "log")
    until(lambda: len(children(child.pid, "sleep")) == 2)
    offspring = children(child.pid, "sleep")
    child.terminate(0.1)
    assert child.ended == "was killed by SIGKILL"
    until(lambda: not any(is_live(pid) for pid in offspring))
    assert child.complaint() == ""


def test_a_child_says_how_it_ended(tmp_path):
    child = Child("short", ["bash", "-c", "echo 'error: no luck'; echo bye; exit 3"], tmp_path / "log")
    until(lambda: child.ended)
    assert (child.ended, child.complaint()) == ("exited with status 3", "no luck")
    again = Child("short", ["bash", "-c", "echo; echo 'E1129 bad'"], tmp_path / "log")
    until(lambda: again.ended)
    assert (again.ended, again.complaint()) == ("exited with status 0", "E1129 bad")


def test_children_do_not_outlive_a_parent_that_is_killed(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from hybridtrt.model_repo.child import Child;"
        f"print(Child('sleep', ['sleep', '1000'], Path({str(tmp_path / 'log')!r})).pid, flush=True); time.sleep(1000)"
    )
    parent = subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    until(lambda: "sleep" in Path(f"/proc/{child}/cmdline").read_text())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not is_live(child))


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)

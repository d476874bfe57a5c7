"""A cluster of this machine alone, and addresses at which nobody answers."""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
from pathlib import Path

import pytest

from tests.processes import free_port, on_ranks
from verl_lightning.launch import driver
from verl_lightning.ray import local
from verl_lightning.ray.cluster import connect, connect_like


def addresses_of_a_cluster(home):
    """Where its processes listen, of a second process too, the token's rights, and who hears SIGTERM."""
    os.environ["HOME"] = home
    os.environ.pop("RAY_AUTH_MODE", None)
    os.environ["RAY_ADDRESS"] = "local"  # another one may run here
    import psutil
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    connect()
    actor = ray.remote(num_cpus=0)(Other).remote()
    ray.get(actor.join.remote(ray.get_runtime_context().gcs_address))
    found = {
        connection.laddr.ip
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    ray.shutdown()
    mode = stat.S_IMODE(Path(home, ".ray/auth_token").stat().st_mode)
    return found, mode, signal.getsignal(signal.SIGTERM) == handler


class Other:
    """An actor, which listens too."""

    def join(self, address):
        connect_like(address)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="starts a Ray cluster")
def test_a_cluster_of_this_machine_is_closed_to_others(tmp_path):
    [(addresses, mode, keeps_handler)] = on_ranks(1, addresses_of_a_cluster, str(tmp_path))

    assert addresses
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert mode == 0o600
    assert keeps_handler


def test_a_token_that_others_can_read_is_closed_to_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("token")
    (tmp_path / ".ray/auth_token").chmod(0o644)

    local.protect_token()

    assert stat.S_IMODE((tmp_path / ".ray/auth_token").stat().st_mode) == 0o600
    assert (tmp_path / ".ray/auth_token").read_text() == "token"


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_an_address_at_which_nobody_answers_is_refused_at_once(monkeypatch, prefix):
    address = f"{prefix}127.0.0.1:{free_port()}"
    with pytest.raises(
        ConnectionError, match=rf"no Ray cluster answers at {address} .*, where `--address` looks for one"
    ):
        connect(address)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConnectionError, match=rf"no Ray cluster answers at {address} .*, where `RAY_ADDRESS` looks"):
        connect()


def test_a_cluster_that_has_died_is_not_looked_for(monkeypatch):
    """Ray keeps the address of the last one that was started by `ray start`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        monkeypatch.setattr(local.compat, "address_on_this_machine", lambda wanted: f"{host}:{port}")
        assert local.running_address() == f"{host}:{port}"
    assert local.running_address() is None


def test_a_missing_configuration_is_refused_before_a_cluster_starts(monkeypatch, capfd):
    monkeypatch.setattr(driver, "connect", lambda address: pytest.fail("it looks for a cluster"))

    with pytest.raises(SystemExit, match="2"):
        driver.main(["--num-workers", "1", "--config", "missing.yaml"])
    assert "`--config missing.yaml` is neither a file nor a shipped configuration" in capfd.readouterr().err

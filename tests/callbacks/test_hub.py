"""A model that is sent to a hub: one of this machine, which answers as the Hugging Face hub does."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from tests.runs import make_chats, make_sft, make_trainer
from verl_lightning.callbacks import HFCheckpoint

PREFIX = "/api/models/me/tiny"


class Hub(BaseHTTPRequestHandler):
    """Makes repositories and takes commits."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server = self.server
        server.asked.append((self.path, self.headers["Authorization"]))
        if server.refuses and self.path.startswith(server.refuses):
            self.answer(403, {"error": "no"})
        elif self.path == "/api/repos/create":
            server.repository = json.loads(body)
            self.answer(200, {"url": f"{server.address}/me/tiny"})
        elif self.path == f"{PREFIX}/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            self.answer(200, {"files": files})
        elif self.path == f"{PREFIX}/commit/main":
            lines = [json.loads(line) for line in body.splitlines()]
            server.files = {line["value"]["path"]: line["value"]["content"] for line in lines if line["key"] == "file"}
            self.answer(200, {"success": True, "commitUrl": f"{server.address}/me/tiny/commit/1", "commitOid": "1"})

    def do_GET(self) -> None:
        self.answer(404, {})

    def answer(self, status: int, content: dict) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(monkeypatch) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.files, server.refuses = [], {}, ""
    server.address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def train(tmp_path, folder, file):
    """One step of SFT."""
    trainer = make_trainer(tmp_path, HFCheckpoint(push_to_hub="me/tiny"), max_steps=1, enable_checkpointing=True)
    trainer.fit(make_sft(folder), datamodule=make_chats(file))


def test_the_last_folder_is_sent_whole(hub, tmp_path, tiny_folder, chat_file):
    train(tmp_path, tiny_folder, chat_file)

    assert hub.repository["name"] == "tiny"
    assert hub.repository.get("visibility", hub.repository.get("private")) in ("private", True)
    sent = {name: base64.b64decode(content) for name, content in hub.files.items()}
    assert sent == {path.name: path.read_bytes() for path in (tmp_path / "hf/last").iterdir()}
    assert {token for _, token in hub.asked} == {"Bearer hf_secret"}


def test_a_hub_that_takes_nothing_is_told_before_training(hub, tmp_path, tiny_folder, chat_file):
    hub.refuses = "/api/repos"
    with pytest.raises(MisconfigurationException, match=r"push_to_hub='me/tiny'\)`: .*403.*hf auth login"):
        train(tmp_path, tiny_folder, chat_file)
    assert not (tmp_path / "hf").exists()


def test_a_hub_that_fails_at_the_end_leaves_the_folder(hub, tmp_path, tiny_folder, chat_file):
    hub.refuses = PREFIX
    with pytest.warns(UserWarning, match=r"could not be sent to `me/tiny` .*`hf upload me/tiny .*hf/last`"):
        train(tmp_path, tiny_folder, chat_file)
    assert (tmp_path / "hf/last/model.safetensors").exists()

"""The hub out of reach, in offline mode or behind a network that fails now and then, with a server of our own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets.config
import pytest
import torch
from huggingface_hub import close_session, constants

from chai_eval import hub as hub_module
from chai_eval.errors import RunError
from chai_eval.hub import check_hub, hub, unreachable
from chai_eval.models import load, load_model, model_settings

ROOT = Path(__file__).parents[1]
COMMIT = "0" * 40


class Server(ThreadingHTTPServer):
    """Answers every request with `status`, and notes what was asked for."""

    status = 404

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: list[str] = []


class Answer(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        assert isinstance(self.server, Server)
        self.server.asked.append(self.path)
        self.send_response(self.server.status)
        self.end_headers()

    do_GET = do_HEAD  # noqa: N815 - the name that the server looks for

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield one
        one.shutdown()


def at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Let the hub be somewhere else, and its client not be in offline mode."""
    close_session()
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> str:
    """An endpoint where nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
    at(monkeypatch, endpoint)
    return endpoint


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A model that the hub's cache on this machine holds."""
    folder = tmp_path / "cache" / "models--someone--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    model, tokenizer = load_model("tiny_llama_random", device="cpu")
    model.save_pretrained(folder / "snapshots" / COMMIT)
    tokenizer.save_pretrained(folder / "snapshots" / COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return "someone/tiny"


@pytest.mark.parametrize("status", [200, 404, 503])
def test_a_hub_that_answers_is_reached_whatever_it_says(
    status: int, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.status = status
    at(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    assert unreachable() is None
    assert len(server.asked) == 1


def test_a_hub_that_refuses_is_out_of_reach_and_so_is_one_without_an_address(
    nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert nowhere in (unreachable() or "")
    at(monkeypatch, "http://no-such-host.invalid")
    assert "http://no-such-host.invalid" in (unreachable() or "")


def test_a_hub_that_keeps_silent_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "PATIENCE", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "gives no answer within 0.1 s" in (unreachable() or "")


def test_a_name_that_is_looked_up_for_ever_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "PATIENCE", 0.1)
    at(monkeypatch, "http://hub.example")
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: ended.wait(60) and [])
    said = unreachable()
    ended.set()
    assert said is not None
    assert said.startswith("http://hub.example gives no answer")


def test_offline_mode_asks_nobody(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "offline mode is on" in (unreachable() or "")
    assert server.asked == []


def test_out_of_reach_the_client_is_in_offline_mode_only_as_long_as_it_loads(
    nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with hub():
        assert (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE) == (True, True)
    with pytest.raises(ConnectionError, match=nowhere), hub():
        raise OSError("not in the cache")
    with pytest.raises(ValueError, match="another"), hub():
        raise ValueError("another")
    assert (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE) == (False, False)
    with hub(asked=False):
        assert not constants.HF_HUB_OFFLINE


def test_a_model_in_the_cache_is_loaded_where_the_hub_is_out_of_reach(nowhere: str, cached: str) -> None:
    check_hub(model_settings("local", path=cached))
    model, tokenizer = load_model("local", path=cached, device="cpu")
    original, _ = load_model("tiny_llama_random", device="cpu")
    tokens = tokenizer("the same", return_tensors="pt").input_ids
    assert torch.equal(model(tokens).logits, original(tokens).logits)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": "someone/else"}, r"model\.path: someone/else can't be loaded from the hub .*model\.weights=random"),
        ({"path": "someone/tiny", "revision": "v2"}, r"model\.path: someone/tiny can't be loaded from the hub"),
        ({"path": "someone/tiny", "tokenizer": "gpt2"}, r"model\.tokenizer: gpt2 can't be loaded .*builtin, needs no"),
    ],
)
def test_what_only_the_hub_has_is_refused_at_once_and_no_try_is_repeated(
    changes: dict[str, str], said: str, nowhere: str, cached: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = model_settings("local", **changes)
    for refused in (check_hub, load):
        with pytest.raises(RunError, match=said) as raised:
            refused(settings)
        assert nowhere in str(raised.value)
        assert "\n" not in str(raised.value)
    assert "Retrying" not in caplog.text


@pytest.mark.parametrize("name", ["tiny_llama_random", "smollm2_mha"])
def test_what_needs_no_hub_doesnt_ask_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "unreachable", lambda: pytest.fail("asked"))
    check_hub(model_settings(name))
    check_hub(model_settings("local", path=str(tmp_path), tokenizer=str(tmp_path)))
    check_hub(model_settings("llama7b", weights="random"))


def test_a_network_that_fails_now_and_then_is_tried_again(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    server.status = 503
    at(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    with pytest.raises(RunError, match=r"^model\.path: someone/else can't be loaded from the hub"):
        load_model("local", path="someone/else", device="cpu")
    assert server.asked.count("/someone/else/resolve/main/config.json") > 2


@pytest.mark.parametrize("typed", ["path=someone/else", "tokenizer=someone/else"])
def test_the_line_stands_alone_on_the_real_command_line(typed: str, tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if "OFFLINE" not in name and "proxy" not in name.lower()}
    given = [typed, *([] if typed.startswith("path") else ["model=tiny_llama_random"])]
    done = subprocess.run(
        [sys.executable, "-m", "chai_eval", *given, "task=piqa", f"results_dir={tmp_path}"],
        env={**kept, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"model.{typed.partition('=')[0]}: someone/else can't be loaded from the hub (")
    assert done.stderr.count("\n") == 1
    shutil.rmtree(tmp_path / "home", ignore_errors=True)
    assert list(tmp_path.iterdir()) == []

"""Which engines a trainer connects to; a refusal is one line that names the engine and the reason."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from examples.tiny_model import config
from sglang_april import PROTOCOL
from trainer_bridge.handshake import EngineInfo, HandshakeError, check_colocated, check_engine, shake_hands
from trainer_bridge.megatron.shapes import ModelShape

SHAPE = ModelShape.of(config("qwen3"))
MODEL = {
    "architecture": "Qwen3ForCausalLM",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tp_size": 2,
}


def state(hooks: dict[str, Any] | None = None, **model: Any) -> dict[str, Any]:
    known = {"april": "9.9", "protocol": PROTOCOL, "sglang": "0.5.17", "hooks": ["…"]}
    return {
        "policy_version": 3,
        "gpus": ["a", "b"],
        "http": {"hooks": known if hooks is None else hooks, "model": {**MODEL, **model}},
    }


def test_matching_engine_is_accepted() -> None:
    assert check_engine("http://e", state(), SHAPE) == EngineInfo("http://e", 2, 3, "0.5.17", ("a", "b"))


@pytest.mark.parametrize(
    ("reported", "reason"),
    [
        (state({}), "without sglang-april's hooks"),
        (state({"april": "9.9", "protocol": PROTOCOL + 1, "sglang": "0.5.17"}), "has protocol 3, the trainer 2"),
        (state(architecture="LlamaForCausalLM"), "architecture LlamaForCausalLM, the trainer's model has Qwen3"),
        (state(hidden_size=256), "hidden_size 256, the trainer's model has 128"),
        (state(num_key_value_heads=4), "num_key_value_heads 4"),
        (state(vocab_size=1024), "vocab_size 1024"),
        ({"policy_version": 0, "http": {"hooks": {"protocol": PROTOCOL, "sglang": "0"}}}, "architecture None"),
    ],
)
def test_engine_that_does_not_match_is_refused_with_the_reason(reported: dict[str, Any], reason: str) -> None:
    with pytest.raises(HandshakeError, match=reason) as refused:
        check_engine("http://e", reported, SHAPE)
    assert "http://e" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("gpus", "saver", "refused"), [(["a"], False, True), (["a"], True, False), ([], False, False)])
def test_colocated_engine_needs_the_memory_saver_on_gpus(gpus: list[str], saver: bool, refused: bool) -> None:
    """Without it, SGLang answers a release and keeps the memory, so the trainer would run out of it."""
    reported = {**state(memory_saver=saver), "gpus": gpus}
    if refused:
        with pytest.raises(HandshakeError, match=r"^colocate: the engine at http://e .*--enable-memory-saver$"):
            check_colocated("http://e", reported)
    else:
        check_colocated("http://e", reported)


class StockServer(BaseHTTPRequestHandler):
    """SGLang without the plugin has no /april/state."""

    def do_GET(self) -> None:
        body = json.dumps({"detail": "Not Found"}).encode()
        self.send_response(404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def stock() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), StockServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_engine_without_the_plugin_is_refused(stock: str) -> None:
    with pytest.raises(HandshakeError, match="the server runs SGLang without sglang-april"):
        shake_hands(stock, SHAPE)


def test_unreachable_engine_is_named() -> None:
    with pytest.raises(HandshakeError, match=r"no engine answers at http://127\.0\.0\.1:9"):
        shake_hands("http://127.0.0.1:9", SHAPE)

"""The frontend that `http/` uses, on top of SGLang's TokenizerManager, and the service attached to it."""

import functools
import logging
import sys
import uuid
from typing import Any

from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_april import config
from sglang_april.adapter.core.attach_request import AuditRequest
from sglang_april.adapter.core.encoded_params import encode_params
from sglang_april.adapter.core.envelope import AprilOutput, AprilReq
from sglang_april.adapter.core.hooks_attached import PassableLock
from sglang_april.adapter.core.proximal import RESCORE
from sglang_april.adapter.hooking import hook_report
from sglang_april.adapter.shapes.installed import shape
from sglang_april.http.frontend import ServerInfo
from sglang_april.http.routes import add_routes
from sglang_april.http.service import AprilService
from sglang_april.metrics import Metrics

log = logging.getLogger("sglang_april")

LOWEST_PRIORITY = 2**30
HTTP_SERVER = "sglang.srt.entrypoints.http_server"


class SGLangFrontend:
    """`http.frontend.Frontend` for a TokenizerManager."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self.lock = manager.model_update_lock
        self._audit_key = f"audit {uuid.uuid4().hex}"

    def server_info(self) -> ServerInfo:
        """Available once the schedulers have reported, which is before the first request."""
        manager, args = self._manager, shape.resolved(self._manager.server_args)
        return ServerInfo(
            vocab_size=manager.model_config.vocab_size,
            context_len=manager.context_len - manager.num_reserved_tokens,
            max_input_len=min(manager.max_req_input_len or manager.context_len, manager.context_len),
            has_tokenizer=manager.tokenizer is not None,
            priority=args.enable_priority_scheduling,
            overlap=not args.disable_overlap_schedule,
            grammar=args.grammar_backend != "none" and not args.skip_tokenizer_init,
            dtype=str(manager.model_config.dtype).removeprefix("torch."),
            preferred=manager.preferred_sampling_params or None,
            model=_model(manager),
        )

    def listen(self) -> None:
        """SGLang starts its loop with the first request."""
        self._manager.auto_create_handle_loop()

    async def send(self, payload: bytes) -> None:
        """Send to the scheduler, after starting SGLang's loop that reads its replies."""
        self.listen()
        await self._manager._async_dispatch_to_scheduler(AprilReq(payload=payload))

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """As `TokenizerManager._tokenize_texts` does; that method would block the event loop."""
        tokenizer = self._manager.tokenizer
        if getattr(tokenizer, "is_fast", False):
            return tokenizer(texts)["input_ids"]
        return [tokenizer.encode(text) for text in texts]

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> list[int]:
        """Apply the model's own template, or the one given by --chat-template."""
        tokenizer = self._manager.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the model has no chat template: give text or input_ids, or launch with --chat-template")
        try:
            return tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        except Exception as error:
            raise ValueError(f"the chat template rejects it: {error}") from error

    def encode_params(self, params: dict[str, Any]) -> bytes:
        """Build, normalise and verify the parameters as for SGLang's own requests."""
        manager = self._manager
        try:
            sampling = manager.sampling_params_class(**params)
            sampling.normalize(manager.tokenizer)
            sampling.verify(manager.model_config.vocab_size)
        except Exception as error:
            raise ValueError(str(error) or type(error).__name__) from error
        return encode_params(sampling)

    async def rescore(self, rid: str, ids: list[int], start: int, temperature: float) -> list[float]:
        """Send one of SGLang's own requests, with the lowest priority and without metrics or logs.

        SGLang matches no cached prefix beyond `logprob_start_len`, and below it only KV of the same cache key, which
        other requests cannot know.
        """
        params: dict[str, Any] = {"max_new_tokens": 1}
        if temperature != 1:
            params["custom_params"] = {RESCORE: temperature}
        request = AuditRequest(
            rid=rid,
            input_ids=ids,
            sampling_params=params,
            return_logprob=True,
            logprob_start_len=start,
            extra_key=self._audit_key,
            priority=self._lowest_priority(),
            log_metrics=False,
            no_logs=True,
        )
        try:
            answers = [answer async for answer in self._manager.generate_request(request)]
        except Exception as error:
            raise ValueError(str(error) or type(error).__name__) from error
        meta = answers[-1]["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            raise ValueError(meta["finish_reason"].get("message", "aborted"))
        return [logprob for logprob, *_ in meta["input_token_logprobs"][1:]]

    def _lowest_priority(self) -> int | None:
        args = shape.resolved(self._manager.server_args)
        if not args.enable_priority_scheduling:
            return None
        return LOWEST_PRIORITY if args.schedule_low_priority_values_first else -LOWEST_PRIORITY

    def abort(self, rid: str) -> None:
        """Abort it as a client's `/abort_request` does."""
        self._manager.abort_request(rid)

    def decode(self, ids: list[int], skip_special_tokens: bool, spaces_between_special_tokens: bool) -> str | None:
        """Decode with the options that SGLang's detokenizer uses."""
        tokenizer = self._manager.tokenizer
        if tokenizer is None:
            return None
        if not getattr(tokenizer, "is_fast", False):
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return tokenizer.decode(
            ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )


def _model(manager: TokenizerManager) -> dict[str, Any]:
    """What trainers check: the model's shape, by the names of a Hugging Face configuration, and how it is served."""
    args = shape.resolved(manager.server_args)
    config = manager.model_config.hf_text_config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {
        "architecture": (config.architectures or [None])[0],
        "vocab_size": manager.model_config.vocab_size,
        **{name: getattr(config, name, None) for name in names},
        "tp_size": args.tp_size,
        "memory_saver": args.enable_memory_saver,
    }


def attach(manager: TokenizerManager) -> AprilService:
    """Give a TokenizerManager the service, as `manager.april` and, where SGLang serves HTTP, as routes under /april."""
    args = shape.resolved(manager.server_args)
    manager.model_update_lock = PassableLock()
    metrics = Metrics(args.served_model_name)
    service = AprilService(SGLangFrontend(manager), config.load(), metrics)
    service.hook_report = hook_report()
    manager.april = service
    manager._result_dispatcher._mapping[AprilOutput] = functools.partial(_receive_event, service)
    manager._result_dispatcher._mro_cache.clear()
    http_server = sys.modules.get(HTTP_SERVER)
    if http_server is not None:
        _attach_routes(http_server.app, service)
    return service


def _receive_event(service: AprilService, message: AprilOutput) -> None:
    """Called in SGLang's loop of the HTTP process, which ends the server if this raises."""
    try:
        service.receive(message.payload)
    except Exception as error:
        log.critical("sglang-april: the server ends, because the HTTP process raised %r in receive_event.", error)
        raise


def _attach_routes(app: Any, service: AprilService) -> None:
    first = not hasattr(app.state, "april")
    app.state.april = service
    if first:
        add_routes(app, admin=auth_level(AuthLevel.ADMIN_OPTIONAL))

"""Step 1 (request): from a checked body to the message to the scheduler. Runs in a worker thread."""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from sglang_april.api import messages
from sglang_april.api.errors import RequestError, bad
from sglang_april.api.requests import ExtendBody, PromptBody, RolloutBody, SamplingBody
from sglang_april.config import AprilConfig
from sglang_april.http.completed_groups import PromptRecord
from sglang_april.http.frontend import Frontend, ServerInfo
from sglang_april.http.validation import GRAMMARS

PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class Params:
    """One distinct set of sampling parameters of a request."""

    number: int
    given: dict[str, Any]

    def get(self, name: str, default: Any) -> Any:
        """A parameter, where null and absent both mean the default."""
        value = self.given.get(name)
        return default if value is None else value


@dataclass(frozen=True)
class BuiltPrompts:
    """The prompts of one request: for the scheduler with their distinct parameters, and for the HTTP process."""

    prompts: list[messages.Prompt]
    params: list[bytes]
    records: list[PromptRecord]


class RequestBuilder:
    """Turns the prompts of one request into what the scheduler is sent and what the vault keeps.

    `run` owns them; `defaults` are the round's sampling parameters.
    """

    def __init__(self, engine: Frontend, run: str, defaults: SamplingBody | None) -> None:
        self._engine = engine
        self._facts: ServerInfo = engine.facts()
        self._run = run
        self._defaults = defaults
        self._params: dict[bytes, Params] = {}
        self._encoded: list[bytes] = []

    def prompts(self, given: list[PromptBody]) -> BuiltPrompts:
        """The prompts of a request, or Refused naming the field."""
        if self._defaults is not None:
            self._intern(None, "")
        ids = self._token_ids(given)
        prompts = [self._prompt(p, raw, f"prompts[{i}]") for i, (p, raw) in enumerate(zip(given, ids, strict=True))]
        return BuiltPrompts(prompts, self._encoded, [PromptRecord.of(self._run, prompt) for prompt in prompts])

    def _token_ids(self, prompts: list[PromptBody]) -> list[bytes]:
        """int32 ids of every prompt; all texts are tokenised together."""
        ids = [prompt.input_ids if isinstance(prompt.input_ids, bytes) else b"" for prompt in prompts]
        texts = [(i, prompt.text) for i, prompt in enumerate(prompts) if prompt.text is not None]
        if texts:
            self._need_tokenizer(f"prompts[{texts[0][0]}].text")
            try:
                tokenised = self._engine.tokenize([text for _, text in texts])
            except ValueError as error:
                raise bad("prompts", f"could not be tokenised: {error}") from None
            for (i, _), tokens in zip(texts, tokenised, strict=True):
                ids[i] = np.asarray(tokens, dtype="<i4").tobytes()
        for i, prompt in enumerate(prompts):
            if prompt.messages is not None:
                self._need_tokenizer(f"prompts[{i}].messages")
                try:
                    tokens = self._engine.apply_chat_template(prompt.messages)
                except ValueError as error:
                    raise bad(f"prompts[{i}].messages", str(error)) from None
                ids[i] = np.asarray(tokens, dtype="<i4").tobytes()
        return ids

    def _need_tokenizer(self, field: str) -> None:
        if not self._facts.has_tokenizer:
            raise bad(field, "the server runs without a tokenizer: give input_ids")

    def _prompt(self, prompt: PromptBody, raw: bytes, at: str) -> messages.Prompt:
        source = "text" if prompt.text is not None else "messages" if prompt.messages is not None else "input_ids"
        params = self._intern(prompt.sampling_params, at)
        lengths = _lengths(prompt.sampling_params)
        if lengths and min(lengths) < (least := params.get("min_new_tokens", 0)):
            raise bad(f"{at}.sampling_params.max_new_tokens", f"{min(lengths)} is less than min_new_tokens, {least}")
        self._check_length(raw, params, f"{at}.{source}", _where("max_new_tokens", prompt.sampling_params, at))
        if prompt.priority is not None and not self._facts.priority:
            raise bad(f"{at}.priority", "the server does not schedule by priority (--enable-priority-scheduling)")
        metadata = b"" if prompt.metadata is None else msgspec.msgpack.encode(prompt.metadata)
        return messages.Prompt(
            id=prompt.id,
            input_ids=raw,
            n=prompt.n,
            params=params.number,
            seed=_seed(prompt.sampling_params, _seed(self._defaults, 0)),
            top_logprobs_num=prompt.top_logprobs_num,
            priority=prompt.priority,
            metadata=metadata,
            max_new_tokens=lengths,
            skip_special_tokens=params.get("skip_special_tokens", True),
            spaces_between_special_tokens=params.get("spaces_between_special_tokens", True),
            no_stop_trim=params.get("no_stop_trim", False),
            truncates=_truncates(params),
        )

    def _check_length(self, raw: bytes, params: Params, field: str, new_field: str) -> None:
        ids = np.frombuffer(raw, "<i4")
        facts = self._facts
        if not ids.size:
            raise bad(field, "has no tokens")
        wrong = np.flatnonzero((ids < 0) | (ids >= facts.vocab_size))
        if wrong.size:
            first = int(wrong[0])
            raise bad(f"{field}[{first}]", f"{int(ids[first])} is not in the vocabulary of {facts.vocab_size} tokens")
        if ids.size >= facts.max_input_len:
            raise bad(field, f"has {ids.size} tokens, and the server takes fewer than {facts.max_input_len}")
        new = params.given.get("max_new_tokens")
        if new is not None and ids.size + new > facts.context_len:
            reason = f"{ids.size} prompt tokens and {new} new ones exceed the context of {facts.context_len}"
            raise bad(new_field, reason)

    def _intern(self, own: SamplingBody | None, at: str) -> Params:
        """The merged parameters of a prompt, checked and encoded once per distinct set. The seed is not among them."""
        merged = dict(self._facts.preferred or {})
        for level in (self._defaults, own):
            if level is not None:
                merged |= level.given()
        merged.pop("sampling_seed", None)
        if lengths := _lengths(own):
            merged["max_new_tokens"] = max(lengths)
        key = msgspec.msgpack.encode(merged, order="sorted")
        known = self._params.get(key)
        if known is not None:
            return known
        try:
            self._check_params(merged)
            self._encoded.append(self._engine.encode_params(merged))
        except RequestError as refused:
            raise bad(_where(refused.field, own, at), refused.reason) from None
        except ValueError as error:
            raise bad(_where(_blamed(merged, str(error)), own, at), str(error)) from None
        params = self._params[key] = Params(len(self._encoded) - 1, merged)
        return params

    def _check_params(self, merged: dict[str, Any]) -> None:
        """Raise Refused with the bare name of a parameter that this server or another parameter rules out."""
        facts = self._facts
        if facts.overlap:
            for name, neutral in PENALTIES.items():
                if merged.get(name) not in (None, neutral):
                    raise bad(
                        name, "penalties need --disable-overlap-schedule: in the overlap loop they lag by a token"
                    )
        grammars = [name for name in GRAMMARS if merged.get(name)]
        if len(grammars) > 1:
            raise bad(grammars[1], f"only one grammar may be set, and {grammars[0]} is")
        if grammars and not facts.grammar:
            raise bad(grammars[0], "the server runs without a grammar backend")
        for name in ("stop_token_ids", "logit_bias"):
            for token in map(int, merged.get(name) or ()):
                if token >= facts.vocab_size:
                    raise bad(name, f"{token} is not in the vocabulary of {facts.vocab_size} tokens")
        least, most = merged.get("min_new_tokens") or 0, merged.get("max_new_tokens")
        if most is not None and least > most:
            raise bad("min_new_tokens", f"{least} is more than max_new_tokens, {most}")


def round_spec(body: RolloutBody, round_id: str, fingerprint: str, config: AprilConfig) -> messages.RoundSpec:
    """The round that a request asks for. Fields that the body leaves out get the server's launch defaults.

    Every field that `RoundSpec` and `RolloutBody` have in common is copied.
    """
    fields = {name: getattr(body, name) for name in messages.RoundSpec.__struct_fields__ if hasattr(body, name)}
    fields |= {name: getattr(config, name) for name, value in fields.items() if value is UNSET}
    if body.concurrency is None:
        fields["concurrency"] = config.concurrency
    sampling = b"" if body.sampling_params is None else msgspec.msgpack.encode(body.sampling_params)
    return messages.RoundSpec(**{**fields, "round_id": round_id}, sampling_defaults=sampling, fingerprint=fingerprint)


def open_round(
    seq: int, spec: messages.RoundSpec, body: RolloutBody, config: AprilConfig, engine: Frontend
) -> tuple[messages.OpenRound, list[PromptRecord]]:
    """The command that opens a round, and its prompts as the HTTP process stores them.

    Raises:
        RequestError: a prompt, a parameter or the tier cannot be served; the error names the field.
    """
    if body.tier == "disk" and config.disk_dir is None:
        raise bad("tier", "disk needs a server with --april-disk-dir")
    built = RequestBuilder(engine, body.run, body.sampling_params).prompts(body.prompts)
    return messages.OpenRound(seq, spec, built.prompts, built.params), built.records


def extend_round(
    seq: int, spec: messages.RoundSpec, body: ExtendBody, engine: Frontend
) -> tuple[messages.ExtendRound, list[PromptRecord]]:
    """The same for an `extend`; its prompts get the sampling defaults of the round.

    Raises:
        RequestError: as for `open_round`.
    """
    defaults = msgspec.msgpack.decode(spec.sampling_defaults, type=SamplingBody) if spec.sampling_defaults else None
    built = RequestBuilder(engine, spec.run, defaults).prompts(body.prompts)
    return messages.ExtendRound(seq, spec.round_id, body.quota_add, built.prompts, built.params), built.records


def _lengths(params: SamplingBody | None) -> list[int] | None:
    """`max_new_tokens` of each sample, where the prompt gives a list."""
    lengths = None if params is None else params.max_new_tokens
    return lengths if isinstance(lengths, list) else None


def _seed(params: SamplingBody | None, otherwise: int) -> int:
    seed = UNSET if params is None else params.sampling_seed
    return otherwise if seed is UNSET or seed is None else seed


def _truncates(params: Params) -> bool:
    if params.get("temperature", 1.0) < 1e-6:
        return False
    return params.get("top_p", 1.0) < 1 or params.get("min_p", 0.0) > 0 or params.get("top_k", -1) not in (-1, 1 << 30)


def _where(name: str, own: SamplingBody | None, at: str) -> str:
    """The field that set a sampling parameter: the prompt's if it gave it, else the round's."""
    given = own is not None and (not name or getattr(own, name, UNSET) is not UNSET)
    return ".".join(step for step in (at if given else "", "sampling_params", name) if step)


def _blamed(merged: dict[str, Any], message: str) -> str:
    """The parameter that an error of SGLang's is about, if it names one."""
    return max((name for name in merged if name in message), key=len, default="")

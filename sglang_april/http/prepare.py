"""Prepare a request: from a checked body to the command for the scheduler. Runs in a worker thread."""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from sglang_april.api import messages
from sglang_april.api.errors import RequestError, bad
from sglang_april.api.requests import ExtendBody, PromptBody, RolloutBody, SamplingBody
from sglang_april.config import AprilConfig
from sglang_april.http.frontend import Frontend, ServerInfo
from sglang_april.http.validation import GRAMMARS

MAX_TOP_LOGPROBS = 60_000_000
"""Maximum of one sample: each takes 15 bytes as msgpack, and SQLite limits a row of the journal to 10^9 bytes."""
GREEDY = 1e-6
"""SGLang draws greedily below this temperature, from logits that it does not divide."""
PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
PENALTIES_LAG = "penalties need --disable-overlap-schedule: in the overlap loop they are one token late"


@dataclass(frozen=True)
class Params:
    """One distinct set of sampling parameters of a request."""

    number: int
    given: dict[str, Any]

    def get(self, name: str, default: Any) -> Any:
        """A parameter, where null and absent both mean the default."""
        value = self.given.get(name)
        return default if value is None else value


class RequestBuilder:
    """Builds the prompts of one request; `defaults` are the sampling parameters of the round."""

    def __init__(self, engine: Frontend, defaults: SamplingBody | None) -> None:
        self._engine = engine
        self._server: ServerInfo = engine.server_info()
        self._defaults = defaults
        self._interned: dict[bytes, Params] = {}
        self.params: list[bytes] = []
        """Distinct sampling parameters of the prompts, each an encoded `SamplingParams`."""

    def prompts(self, given: list[PromptBody]) -> list[messages.Prompt]:
        """The prompts of a request for the scheduler; their parameters are added to `params`.

        Raises:
            RequestError: it names the field.
        """
        if self._defaults is not None:
            self._intern(None, "")
        ids = self._token_ids(given)
        return [self._prompt(p, raw, f"prompts[{i}]") for i, (p, raw) in enumerate(zip(given, ids, strict=True))]

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
        if not self._server.has_tokenizer:
            raise bad(field, "the server has no tokenizer; use input_ids")

    def _prompt(self, prompt: PromptBody, raw: bytes, at: str) -> messages.Prompt:
        source = "text" if prompt.text is not None else "messages" if prompt.messages is not None else "input_ids"
        params = self._intern(prompt.sampling_params, at)
        lengths = _lengths(prompt.sampling_params)
        if lengths and min(lengths) < (least := params.get("min_new_tokens", 0)):
            raise bad(f"{at}.sampling_params.max_new_tokens", f"{min(lengths)} is less than min_new_tokens, {least}")
        self._check_length(raw, params, f"{at}.{source}", _where("max_new_tokens", prompt.sampling_params, at))
        self._check_top_logprobs(prompt, raw, params, f"{at}.top_logprobs_num")
        if prompt.priority is not None and not self._server.priority:
            raise bad(f"{at}.priority", "requires a server with --enable-priority-scheduling")
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
            rescore=rescore(params),
        )

    def _check_length(self, raw: bytes, params: Params, field: str, new_field: str) -> None:
        ids = np.frombuffer(raw, "<i4")
        server = self._server
        if not ids.size:
            raise bad(field, "has no tokens")
        wrong = np.flatnonzero((ids < 0) | (ids >= server.vocab_size))
        if wrong.size:
            first = int(wrong[0])
            raise bad(f"{field}[{first}]", f"{int(ids[first])} is not in the vocabulary of {server.vocab_size} tokens")
        if ids.size >= server.max_input_len:
            raise bad(field, f"has {ids.size} tokens, and the server accepts fewer than {server.max_input_len}")
        new = params.given.get("max_new_tokens")
        if new is not None and ids.size + new > server.context_len:
            reason = f"{ids.size} prompt tokens and {new} new ones exceed the context of {server.context_len}"
            raise bad(new_field, reason)

    def _check_top_logprobs(self, prompt: PromptBody, raw: bytes, params: Params, field: str) -> None:
        """Refuse more top logprobs than there are tokens, with which SGLang's scheduler would end.

        Those of a sample must fit into a row of the journal, also without a journal.
        """
        if prompt.top_logprobs_num > (vocab := self._server.vocab_size):
            raise bad(field, f"{prompt.top_logprobs_num} is more than the vocabulary of {vocab} tokens")
        tokens = params.get("max_new_tokens", self._server.context_len - len(raw) // 4)
        if prompt.top_logprobs_num * tokens > MAX_TOP_LOGPROBS:
            reason = f"{prompt.top_logprobs_num} for each of {tokens} new tokens are more than {MAX_TOP_LOGPROBS}"
            raise bad(field, reason)

    def _intern(self, own: SamplingBody | None, at: str) -> Params:
        """The merged parameters of a prompt without its seed, checked and encoded once per distinct set."""
        merged = dict(self._server.preferred or {})
        for level in (self._defaults, own):
            if level is not None:
                merged |= level.given()
        merged.pop("sampling_seed", None)
        if lengths := _lengths(own):
            merged["max_new_tokens"] = max(lengths)
        key = msgspec.msgpack.encode(merged, order="sorted")
        known = self._interned.get(key)
        if known is not None:
            return known
        try:
            self._check_params(merged)
            self.params.append(self._engine.encode_params(merged))
        except RequestError as refused:
            raise bad(_where(refused.field, own, at), refused.reason) from None
        except ValueError as error:
            raise bad(_where(_blamed(merged, str(error)), own, at), str(error)) from None
        params = self._interned[key] = Params(len(self.params) - 1, merged)
        return params

    def _check_params(self, merged: dict[str, Any]) -> None:
        """Check the parameters against this server and against each other.

        Raises:
            RequestError: it names the bare parameter.
        """
        server = self._server
        if server.overlap:
            for name, neutral in PENALTIES.items():
                if merged.get(name) not in (None, neutral):
                    raise bad(name, PENALTIES_LAG)
        grammars = [name for name in GRAMMARS if merged.get(name)]
        if len(grammars) > 1:
            raise bad(grammars[1], f"only one grammar may be set, and {grammars[0]} is")
        if grammars and not server.grammar:
            raise bad(grammars[0], "the server has no grammar backend")
        for name in ("stop_token_ids", "logit_bias"):
            for token in map(int, merged.get(name) or ()):
                if token >= server.vocab_size:
                    raise bad(name, f"{token} is not in the vocabulary of {server.vocab_size} tokens")
        if merged.get("beam_width") not in (None, 1):
            raise bad("beam_width", "rollouts are sampled, not searched")
        least, most = merged.get("min_new_tokens") or 0, merged.get("max_new_tokens")
        if most is not None and least > most:
            raise bad("min_new_tokens", f"{least} is more than max_new_tokens, {most}")


def round_spec(body: RolloutBody, round_id: str, fingerprint: str, config: AprilConfig) -> messages.RoundSpec:
    """The round that a request asks for. Fields that the body leaves out get the server's launch defaults.

    Every field that `RoundSpec` and `RolloutBody` have in common is copied.
    """
    fields = {name: getattr(body, name) for name in messages.RoundSpec.__struct_fields__ if hasattr(body, name)}
    fields |= {name: getattr(config, name) for name, value in fields.items() if value is UNSET}
    fields["n"] = body.n or 1
    fields["trajectories"] = body.trajectories or body.quota_unit == "trajectory"
    if body.concurrency is None:
        fields["concurrency"] = config.concurrency
    sampling = b"" if body.sampling_params is None else msgspec.msgpack.encode(body.sampling_params)
    return messages.RoundSpec(**{**fields, "round_id": round_id}, sampling_defaults=sampling, fingerprint=fingerprint)


def open_round(
    seq: int, spec: messages.RoundSpec, body: RolloutBody, config: AprilConfig, engine: Frontend
) -> messages.OpenRound:
    """The command that opens a round.

    Raises:
        RequestError: a prompt, a parameter or the tier cannot be served; the error names the field.
    """
    if body.tier == "disk" and config.disk_dir is None:
        raise bad("tier", "disk requires a server with --april-disk-dir")
    builder = RequestBuilder(engine, body.sampling_params)
    return messages.OpenRound(seq, spec, builder.prompts(body.prompts), builder.params)


def extend_round(
    seq: int, spec: messages.RoundSpec, body: ExtendBody, fingerprint: str, engine: Frontend
) -> messages.ExtendRound:
    """The command of an `extend`; its prompts get the sampling defaults of the round.

    Raises:
        RequestError: as for `open_round`.
    """
    defaults = msgspec.msgpack.decode(spec.sampling_defaults, type=SamplingBody) if spec.sampling_defaults else None
    builder = RequestBuilder(engine, defaults)
    prompts = builder.prompts(body.prompts)
    return messages.ExtendRound(
        seq, spec.round_id, body.quota_add, prompts, builder.params, body.idempotency_key, fingerprint
    )


def _lengths(params: SamplingBody | None) -> list[int] | None:
    """`max_new_tokens` of each sample, where the prompt gives a list."""
    lengths = None if params is None else params.max_new_tokens
    return lengths if isinstance(lengths, list) else None


def _seed(params: SamplingBody | None, otherwise: int) -> int:
    seed = UNSET if params is None else params.sampling_seed
    return otherwise if seed is UNSET or seed is None else seed


def _truncates(params: Params) -> bool:
    if params.get("temperature", 1.0) < GREEDY:
        return False
    return params.get("top_p", 1.0) < 1 or params.get("min_p", 0.0) > 0 or params.get("top_k", -1) not in (-1, 1 << 30)


def rescore(params: Params) -> float | str:
    """The temperature by which logits are divided, or what else changes the distribution (`Prompt.rescore`)."""
    changes = [name for name, neutral in PENALTIES.items() if params.get(name, neutral) != neutral]
    changes += [name for name in (*GRAMMARS, "min_new_tokens", "logit_bias") if params.get(name, None)]
    temperature = params.get("temperature", 1.0)
    return changes[0] if changes else float(temperature) if temperature >= GREEDY else 1.0


def _where(name: str, own: SamplingBody | None, at: str) -> str:
    """The field that set a sampling parameter: the prompt's if it gave it, else the round's."""
    given = own is not None and (not name or getattr(own, name, UNSET) is not UNSET)
    return ".".join(step for step in (at if given else "", "sampling_params", name) if step)


def _blamed(merged: dict[str, Any], message: str) -> str:
    """The parameter that an error message of SGLang names, or an empty string."""
    return max((name for name in merged if name in message), key=len, default="")

"""Input logprobs of the audit's requests, at the temperature of the sample, beside rows of other requests."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_april.adapter.v0_5_17 import proximal
from sglang_april.adapter.v0_5_17.proximal import RESCORE, rescored_rows

HIDDEN, VOCAB = 4, 11


class Processor:
    """Logits are a linear function of the states."""

    def __init__(self) -> None:
        self.weight = torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(0))

    def _get_logits(self, states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return states @ self.weight


@pytest.mark.parametrize("chunk", [2, 512])
def test_rows_of_the_audit_are_scaled_and_others_are_not(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows: one of another request, one of the audit whose first two tokens need no logprob, one without any."""
    monkeypatch.setattr(proximal, "CHUNK_ROWS", chunk)
    monkeypatch.setattr(proximal.LogitsMetadata, "from_forward_batch", lambda _: None)
    generator = torch.Generator().manual_seed(1)
    processor, begins, lengths = Processor(), [1, 2, 3], [4, 7, 3]
    states = torch.randn(sum(lengths), HIDDEN, generator=generator)
    count = sum(lengths) - sum(begins)
    targets = torch.randint(VOCAB, (count,), generator=generator)
    batch = SimpleNamespace(
        extend_logprob_start_lens_cpu=begins,
        extend_seq_lens_cpu=lengths,
        extend_input_logprob_token_ids_gpu=targets,
    )
    logprobs = torch.zeros(count)
    proximal._apply_temperatures(logprobs, processor, states, None, batch, [None, 0.5, 0.7])
    assert logprobs[:3].tolist() == [0.0] * 3
    expected = (states[6:11] @ processor.weight / 0.5).log_softmax(-1).gather(1, targets[3:, None]).squeeze(1)
    torch.testing.assert_close(logprobs[3:], expected)


@pytest.mark.parametrize("value", [None, "0.5", 0, 0.0, -1.0, True, float("inf"), float("nan"), [0.5], {"a": 1}])
def test_what_a_client_may_send_under_this_key_is_ignored(value: Any) -> None:
    """`custom_params` is a field of `/generate`: a wrong value must not end the server."""

    def rows(*given: Any) -> Any:
        reqs = [SimpleNamespace(sampling_params=SimpleNamespace(custom_params=params)) for params in given]
        return rescored_rows(SimpleNamespace(reqs=reqs))

    assert rows({RESCORE: value}, None, {}) is None
    assert rows({RESCORE: value}, {RESCORE: 0.5}) == [None, 0.5]

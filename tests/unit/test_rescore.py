"""Input logprobs of the audit's requests, at the temperature of the sample, beside rows of other requests."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_april.adapter.core import proximal
from sglang_april.adapter.core.proximal import RESCORE, rescored_rows

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


class Multicast:
    """SGLang's gather of logits on NVSwitch, with two threads as ranks: each has a buffer that both write to."""

    def __init__(self) -> None:
        self.buffers = [torch.empty(64, 2 * VOCAB) for _ in range(2)]
        self.barrier = threading.Barrier(2, timeout=20)

    def gather(self, rank: int, shard: torch.Tensor, skip_entry_sync: bool) -> torch.Tensor:
        """Returns a view: logits of both ranks, float [rows, 2 * VOCAB]."""
        if not skip_entry_sync:
            self.barrier.wait()
        for buffer in self.buffers:
            buffer[: len(shard), rank * VOCAB : (rank + 1) * VOCAB] = shard
        self.barrier.wait()
        return self.buffers[rank][: len(shard)]


class RankProcessor(Processor):
    """One rank's logits processor; rank 1 is slow between a gather and the next kernel."""

    def __init__(self, multicast: Multicast, rank: int) -> None:
        super().__init__()
        self.multicast, self.rank = multicast, rank
        self._logits_gatherer = SimpleNamespace(_skip_entry_sync=True)

    def _get_logits(self, states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        skips = self._logits_gatherer._skip_entry_sync
        view = self.multicast.gather(self.rank, states @ self.weight * (1 + self.rank), skips)
        if self.rank:
            time.sleep(0.05)
        return view


def test_a_fast_rank_does_not_overwrite_what_a_slow_one_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several gathers in one forward, before and after SGLang's own."""
    monkeypatch.setattr(proximal, "CHUNK_ROWS", 2)
    monkeypatch.setattr(proximal.LogitsMetadata, "from_forward_batch", lambda _: None)
    monkeypatch.setattr(proximal, "ForwardBatch", SimpleNamespace)
    states = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(8)
    multicast = Multicast()

    def forward(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        def stock(processor: Any, *_: Any) -> Any:
            sampled.append(processor._get_logits(states[-1:]).clone())
            return SimpleNamespace(input_token_logprobs=torch.zeros(8))

        sampled: list[torch.Tensor] = []
        processor = RankProcessor(multicast, rank)
        batch = SimpleNamespace(
            sampling_info=SimpleNamespace(april=SimpleNamespace(proximal=None, rescored=[0.5])),
            forward_mode=SimpleNamespace(is_extend=lambda: True),
            extend_logprob_start_lens_cpu=[0],
            extend_seq_lens_cpu=[8],
            extend_input_logprob_token_ids_gpu=targets,
        )
        result = proximal.with_proximal(stock, processor, targets, states, None, batch)
        assert processor._logits_gatherer._skip_entry_sync, "SGLang's own setting is back"
        return result.input_token_logprobs, sampled[0]

    with ThreadPoolExecutor(2) as ranks:
        logprobs, sampled = zip(*ranks.map(forward, range(2)), strict=True)
    logits = torch.cat([states @ Processor().weight, 2 * (states @ Processor().weight)], dim=1)
    expected = (logits / 0.5).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    for rank in range(2):
        torch.testing.assert_close(logprobs[rank], expected)
        torch.testing.assert_close(sampled[rank], logits[-1:])


@pytest.mark.parametrize("value", [None, "0.5", 0, 0.0, -1.0, True, float("inf"), float("nan"), [0.5], {"a": 1}])
def test_what_a_client_may_send_under_this_key_is_ignored(value: Any) -> None:
    """`custom_params` is a field of `/generate`: a wrong value must not end the server."""

    def rows(*given: Any) -> Any:
        reqs = [SimpleNamespace(sampling_params=SimpleNamespace(custom_params=params)) for params in given]
        return rescored_rows(SimpleNamespace(reqs=reqs))

    assert rows({RESCORE: value}, None, {}) is None
    assert rows({RESCORE: value}, {RESCORE: 0.5}) == [None, 0.5]

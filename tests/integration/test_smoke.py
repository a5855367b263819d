"""A smoke test: one round ends by its quota, and the next finishes its partials."""

from tests.support.server import Server


def test_quota_stops_and_next_round_finishes(server: Server, run: str) -> None:
    params = {"temperature": 1.0, "ignore_eos": True}
    prompts = [
        {"id": str(i), "input_ids": [5 + i, 6, 7, 8], "sampling_params": {**params, "max_new_tokens": 4 + 8 * i}}
        for i in range(6)
    ]
    first = server.rollout(run=run, prompts=prompts, quota=2)
    assert first["end_reason"] == "quota"
    assert [g["id"] for g in first["finished"]] == ["0", "1"]
    assert first["carried"]["samples"] == 4
    rest = server.drain(run)
    assert sorted(g["id"] for g in rest) == ["2", "3", "4", "5"]
    assert [len(g["samples"][0]["output_ids"]) for g in sorted(rest, key=lambda g: g["id"])] == [20, 28, 36, 44]

"""Push targets without a server: SGLang's weight calls, handled by a process over a pipe."""

import multiprocessing
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from trainer_bridge.push.push_target import WeightCallError


class Receiver:
    """What `DistributedTransport` uses of a `PushTarget`."""

    def __init__(self, name: str) -> None:
        self.url, self.info = "http://127.0.0.1:1", SimpleNamespace(tp_size=1)
        self._pipe, child_end = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=serve, args=(child_end, name), daemon=True)
        self._process.start()
        child_end.close()

    def weight_call(self, path: str, body: dict[str, Any]) -> None:
        self._pipe.send((path, body))
        if error := self._pipe.recv():
            raise WeightCallError(error)

    def refuse(self, refuses: bool) -> None:
        """Whether it refuses to join and to receive; it refuses before the broadcast."""
        self.weight_call("/refuse", {"refuses": refuses})

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def serve(pipe: Connection, name: str) -> None:
    """Join, receive each bucket by one broadcast, and leave, as SGLang's model runner does."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    groups: dict[str, Any] = {}
    refuses = False

    def answer(path: str, body: dict[str, Any]) -> None:
        nonlocal refuses
        if path == "/refuse":
            refuses = body["refuses"]
        elif path == "/destroy_weights_update_group":
            dist.destroy_process_group(groups.pop(body["group_name"]))
        elif refuses:
            raise RuntimeError(f"{name} refuses")
        elif path == "/init_weights_update_group":
            size, rank = body["world_size"], body["rank_offset"]
            store = dist.TCPStore(body["master_address"], body["master_port"], size, is_master=False)
            group, _ = distributed_c10d._new_process_group_helper(
                size,
                rank,
                [],
                dist.Backend("gloo"),
                dist.PrefixStore(body["group_name"], store),
                group_name=body["group_name"],
                timeout=timedelta(minutes=30),
            )
            distributed_c10d._world.pg_group_ranks[group] = {r: r for r in range(size)}
            groups[body["group_name"]] = group
        else:
            bucket = torch.empty(body["shapes"][0], dtype=torch.float32)
            dist.broadcast(bucket, src=0, group=groups[body["group_name"]], async_op=True).wait()
            assert float(bucket.sum()) == bucket.numel()

    while True:
        try:
            answer(*pipe.recv())
            pipe.send("")
        except EOFError:
            return
        except Exception as error:  # noqa: BLE001 - sent to the caller
            pipe.send(f"{name}: {error!r}")

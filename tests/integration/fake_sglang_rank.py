"""One rank of the fake SGLang server, in a process of its own: it joins groups and receives as SGLang's source has it.

    python fake_sglang_rank.py TP_RANK FOLDER SERVER_PID     # a command a line in, an answer a line out, both JSON

`init`: rendezvous at tcp://, a prefix of the group's name, torch's own helper, rank_offset + tp_rank. `update`: one
broadcast from rank 0 for each name, in order; what came lies in FOLDER then. `destroy`: leaves. No line of SGLang runs.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.distributed.distributed_c10d
from safetensors.torch import save_file
from torch.distributed.rendezvous import rendezvous

dist: Any = torch.distributed
c10d: Any = torch.distributed.distributed_c10d

torch.set_num_threads(1)
TP_RANK, FOLDER, SERVER = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
GROUPS: dict[str, Any] = {}


def end_with_the_server() -> None:
    """Torch waits half an hour for a group that does not come, and sees no closed pipe meanwhile."""
    while os.getppid() == SERVER:
        time.sleep(0.5)
    os._exit(1)


def init(order: Any) -> dict[str, Any]:
    name, rank = order["group_name"], order["rank_offset"] + TP_RANK
    url = f"tcp://{order['master_address']}:{order['master_port']}"
    try:
        store, rank, world = next(rendezvous(url, rank, order["world_size"], timeout=c10d.default_pg_timeout))
        store.set_timeout(c10d.default_pg_timeout)
        GROUPS[name], _ = c10d._new_process_group_helper(
            world,
            rank,
            [],
            c10d.Backend(order["backend"]),
            dist.PrefixStore(name, store),
            group_name=name,
            timeout=c10d.default_pg_timeout,
        )
    except Exception as error:
        return {"success": False, "message": f"Failed to initialize custom process group: {error}."}
    c10d._world.pg_group_ranks[GROUPS[name]] = {i: i for i in range(world)}
    return {"success": True, "message": "Succeeded to initialize custom process group."}


def update(order: Any) -> dict[str, Any]:
    received, path = {}, FOLDER / f"rank-{TP_RANK}.safetensors"
    try:
        for name, dtype, shape in zip(order["names"], order["dtypes"], order["shapes"], strict=True):
            if len(received) == order["dies_after"]:
                os._exit(9)
            received[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(received[name], src=0, group=GROUPS[order["group_name"]])
    except Exception as error:
        return {"success": False, "message": f"Failed to receive weights: {error}"}
    save_file(received, path)
    return {"success": True, "message": str(path)}


def destroy(order: Any) -> dict[str, Any]:
    if order["group_name"] not in GROUPS:
        return {"success": False, "message": "The group to be destroyed does not exist."}
    dist.destroy_process_group(GROUPS.pop(order["group_name"]))
    return {"success": True, "message": "Succeeded to destroy custom process group."}


threading.Thread(target=end_with_the_server, daemon=True).start()
for line in sys.stdin:
    order = json.loads(line)
    print(json.dumps({"init": init, "update": update, "destroy": destroy}[order.pop("do")](order)), flush=True)

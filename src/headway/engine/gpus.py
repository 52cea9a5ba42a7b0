"""GPUs as servers of other environments are told of them."""

import os
from collections.abc import Sequence
from itertools import pairwise

_PARALLEL = {
    *("--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
    *("--pipeline-parallel-size", "-pp", "--pp-size", "--pp"),
    *("--data-parallel-size", "-dp", "--dp-size", "--dp"),
}
"""Options of vLLM and SGLang of which each multiplies the GPUs that one server takes."""


def num_gpus(server_args: Sequence[str]) -> int:
    """How many GPUs a server with these arguments takes. Raises ValueError where one of them is no number."""
    words = [word for argument in server_args for word in argument.split("=", 1)]
    num = 1
    for option, value in pairwise(words):
        if option in _PARALLEL:
            num *= int(value)
    return num


def visible_gpus(device: str) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of a server that is to compute on `device`, such as `cuda:1,2`; nothing for `cuda` or `cpu`.

    Numbers count the GPUs that this process sees, which may itself see only some.
    """
    kind, _, numbers = device.partition(":")
    if kind != "cuda" or not numbers:
        return {}
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = ours.split(",") if ours else None
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[int(n)] if names else n for n in numbers.split(","))}

"""Pack a folder of golden JSON files into one small `cases.npz`: every array once, scalars in a JSON index.

Usage: python tests/golden/pack.py FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


def pack(folder: Path, target: Path) -> None:
    """Write all `*.json` of `folder` to `target`; lists become named arrays, equal ones are kept once."""
    arrays: dict[str, np.ndarray] = {}
    names: dict[bytes, str] = {}

    def store(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: store(item) for key, item in value.items()}
        if not isinstance(value, list):
            return value
        array = np.asarray(value)
        array = array.astype(np.int32 if array.dtype.kind == "i" else np.float64)
        key = str(array.shape).encode() + array.dtype.str.encode() + array.tobytes()
        name = names.setdefault(key, f"a{len(names)}")
        arrays[name] = array
        return {"array": name}

    index = [
        {**case, "inputs": store(case["inputs"]), "expected": store(case["expected"])}
        for path in sorted(folder.glob("*.json"))
        for case in json.loads(path.read_text())
    ]
    np.savez_compressed(target, allow_pickle=False, index=np.array(json.dumps(index)), **arrays)
    print(f"{len(index)} cases, {len(arrays)} arrays, {target.stat().st_size} bytes -> {target}")


if __name__ == "__main__":
    pack(Path(sys.argv[1]), Path(__file__).with_name("cases.npz"))

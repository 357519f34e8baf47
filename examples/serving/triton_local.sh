#!/usr/bin/env bash
# A Triton server on this machine without a container, for trying a repository out on the CPU:
#   make .venv-triton/.installed && .venv-triton/bin/pip install --no-deps .
#   examples/serving/triton_local.sh REPOSITORY [option of tritonserver ...]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
repository=$1
shift
python=$root/.venv-triton/bin/python
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
libraries=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))')
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
server=$packages/pytriton/tritonserver
backends=$root/.venv-triton/backends
mkdir -p "$backends/python"
cp "$server"/backends/python/{libtriton_python.so,triton_python_backend_utils.py} "$backends/python"
cp "$server/python_backend_stubs/$version/triton_python_backend_stub" "$backends/python"
export PATH=$root/.venv-triton/bin:$PATH LD_LIBRARY_PATH=$packages/nvidia_pytriton.libs:$libraries
exec "$server/bin/tritonserver" --model-repository="$repository" --backend-directory="$backends" \
    --http-address=127.0.0.1 --grpc-address=127.0.0.1 --metrics-address=127.0.0.1 \
    --exit-timeout-secs=10 "$@"

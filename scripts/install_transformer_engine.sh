#!/bin/sh
# Installs Transformer Engine beside an installed torch (docs/transformer_engine.md).
#
#   scripts/install_transformer_engine.sh               build what needs building, install
#   scripts/install_transformer_engine.sh --build-only  leave wheels in $WHEELS, install nothing
#   scripts/install_transformer_engine.sh --offline     install from $WHEELS, no network and no compiler
#
# Its torch extension is published as source alone and must be compiled against the torch it will run with: about
# five minutes on two cores, no GPU needed. Everything else comes as wheels (277 MB for CUDA 13).
#
#   PYTHON   interpreter that has torch                      default: python3
#   WHEELS   folder that keeps the wheels                    default: te_wheels
#   TARGET   folder to install into, as `pip --target`       default: the interpreter's own site-packages
#   VERSION  of Transformer Engine                           default: 2.20.2
#   ARCHS    compute capabilities, as torch writes them      default: 9.0
#   JOBS     compiler processes, 1-2 GB of memory each       default: 2
#   CUDA_HOME  toolkit with bin/nvcc, of torch's CUDA major  default: /usr/local/cuda, or where nvcc on PATH lies
set -eu

# A function, read whole before it runs: the compilation takes minutes, and this file may change meanwhile.
main() {
    PYTHON=${PYTHON:-python3} WHEELS=${WHEELS:-te_wheels} VERSION=${VERSION:-2.20.2} ARCHS=${ARCHS:-9.0} JOBS=${JOBS:-2}
    BUILD=1 INSTALL=1
    case "${1:-}" in
        "") ;;
        --build-only) INSTALL= ;;
        --offline) BUILD= ;;
        *) sed -n '2,18s/^# \{0,1\}//p' "$0"; exit 2 ;;
    esac

    fail() { echo "install_transformer_engine.sh: $*" >&2; exit 1; }

    CUDA_OF_TORCH=$("$PYTHON" -c 'import torch; print(torch.version.cuda or "")') \
        || fail "$PYTHON has no torch. Install torch first, or name another interpreter: PYTHON=/path/to/python"
    MAJOR=${CUDA_OF_TORCH%%.*}
    case "$MAJOR" in
        12 | 13) ;;
        *) fail "torch of $PYTHON is built for CUDA '$CUDA_OF_TORCH'; Transformer Engine wants 12 or 13. Install a CUDA build of torch" ;;
    esac

    if [ "$BUILD" ]; then
        mkdir -p "$WHEELS"
        WHEELS=$(cd "$WHEELS" && pwd)
        if ! ls "$WHEELS"/transformer_engine_torch-"$VERSION"-*.whl >/dev/null 2>&1; then
            if [ -z "${CUDA_HOME:-}" ]; then
                if [ -x /usr/local/cuda/bin/nvcc ]; then
                    CUDA_HOME=/usr/local/cuda
                elif command -v nvcc >/dev/null; then
                    CUDA_HOME=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
                fi
            fi
            [ -x "${CUDA_HOME:-}/bin/nvcc" ] \
                || fail "no nvcc in CUDA_HOME='${CUDA_HOME:-}'. Install the CUDA $CUDA_OF_TORCH toolkit and set CUDA_HOME to it"
            RELEASE=$("$CUDA_HOME/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
            [ "${RELEASE%%.*}" = "$MAJOR" ] \
                || fail "$CUDA_HOME/bin/nvcc is CUDA $RELEASE; torch wants $CUDA_OF_TORCH. Set CUDA_HOME to a toolkit of that major version"
            SITE=$("$PYTHON" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
            TOOLS=$(mktemp -d)
            trap 'rm -rf "$TOOLS"' EXIT
            "$PYTHON" -m pip install -q --no-deps --target "$TOOLS" setuptools wheel ninja pybind11 cmake packaging
            echo "compiling transformer_engine_torch $VERSION for $ARCHS against torch's CUDA $CUDA_OF_TORCH with $JOBS jobs"
            CUDA_HOME=$CUDA_HOME PATH=$CUDA_HOME/bin:$TOOLS/bin:$PATH PYTHONPATH=$TOOLS \
                CPATH=$SITE/nvidia/cudnn/include:$SITE/nvidia/cu$MAJOR/include:$SITE/nvidia/nccl/include${CPATH:+:$CPATH} \
                NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=$JOBS \
                NVTE_CUDA_ARCHS=$(echo "$ARCHS" | tr -d .) TORCH_CUDA_ARCH_LIST=$ARCHS \
                "$PYTHON" -m pip wheel --no-build-isolation --no-deps -w "$WHEELS" transformer_engine_torch=="$VERSION"
        fi
        "$PYTHON" -m pip download -q --no-deps --only-binary=:all: -d "$WHEELS" \
            transformer_engine=="$VERSION" transformer_engine_cu"$MAJOR"=="$VERSION" nvdlfw-inspect nvidia-cudnn-frontend \
            einops packaging onnx onnxscript onnx-ir ml-dtypes protobuf
        "$PYTHON" -m pip download -q --only-binary=:all: -d "$WHEELS" pydantic importlib-metadata
        ls "$WHEELS"
    fi

    if [ "$INSTALL" ]; then
        "$PYTHON" -m pip install -q --no-index --no-deps --no-compile ${TARGET:+--target "$TARGET"} "$WHEELS"/*.whl
        PYTHONPATH=${TARGET:-}${PYTHONPATH:+:$PYTHONPATH} "$PYTHON" -c \
            'import torch, transformer_engine.pytorch as te, transformer_engine; print("transformer_engine", transformer_engine.__version__, "torch", torch.__version__)'
    fi
}

main "$@"

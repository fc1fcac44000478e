#!/bin/sh
# Fetches what the GPU acceptance needs beside torch and transformers into build/gpu-packages, about
# 29 MB, for a machine without internet. Copy that folder there with the working tree:
#
#     sh bench/gpu_wheels.sh
#
# PYTHON_VERSION names another version of Python than 3.12, without a dot.
set -eu
into=$(dirname "$0")/../build/gpu-packages
platforms=""
for minor in 17 24 27 28 31 34 35 39; do
	platforms="$platforms --platform manylinux_2_${minor}_x86_64"
done
fetch() {
	# shellcheck disable=SC2086 - the options are words of their own
	"${PYTHON:-python3}" -m pip install --quiet --upgrade --only-binary=:all: --implementation cp \
		--python-version "${PYTHON_VERSION:-312}" $platforms --platform manylinux2014_x86_64 \
		--target "$into" "$@"
}
fetch 'pydantic>=2.11,<3' 'llguidance>=1.9.1,<2' prometheus-client platformdirs
fetch --no-deps 'peft>=0.19,<1' psutil  # its other requirements are torch and transformers
ls "$into"

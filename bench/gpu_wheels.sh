#!/bin/sh
# Fetches what the GPU acceptance needs beside torch and transformers, as wheels for a machine
# without internet, about 6 MB:
#
#     sh bench/gpu_wheels.sh build/gpu-wheels            # here, for Python 3.12 there
#     python -m pip install --no-index --find-links build/gpu-wheels \
#         pydantic llguidance prometheus-client platformdirs    # there
#
# PYTHON_VERSION names another version of Python, without a dot.
set -eu
into=${1:?name the folder for the wheels}
platforms=""
for minor in 17 24 27 28 31 34 35 39; do
	platforms="$platforms --platform manylinux_2_${minor}_x86_64"
done
# shellcheck disable=SC2086 - the options are words of their own
"${PYTHON:-python3}" -m pip download --quiet --only-binary=:all: --implementation cp \
	--python-version "${PYTHON_VERSION:-312}" $platforms --platform manylinux2014_x86_64 \
	--dest "$into" \
	'pydantic>=2.11,<3' 'llguidance>=1.9.1,<2' prometheus-client platformdirs
ls -s "$into"

# Sourced by the GPU scripts: what a bare machine lacks is read from the wheels of the folder in $1.
python=${PYTHON:-python3}
extra=$(mktemp -d)
trap 'rm -rf "$extra"' EXIT
for wheel in "$1"/*.whl; do
  [ ! -e "$wheel" ] || "$python" -m zipfile -e "$wheel" "$extra"
done
export PYTHONPATH="$PWD:$extra${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

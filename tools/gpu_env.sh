# Sourced by the GPU scripts: adds the packages in the wheels of the folder $1 to PYTHONPATH.
python=${PYTHON:-python3}
extra=$(mktemp -d)
trap 'rm -rf "$extra"' EXIT
for wheel in "$1"/*.whl; do
  [ ! -e "$wheel" ] || "$python" -m zipfile -e "$wheel" "$extra"
done
export PYTHONPATH="$PWD:$extra${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

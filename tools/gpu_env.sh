# Sourced by the GPU scripts: adds the packages in the wheels of the folder $1 (empty: none) to PYTHONPATH.
python=${PYTHON:-python3}
extra=$(mktemp -d)
trap 'rm -rf "$extra"' EXIT
if [ -n "$1" ]; then
  compgen -G "$1/*.whl" > /dev/null || { echo "there are no wheels in $1; name the folder that has them" >&2; exit 2; }
  for wheel in "$1"/*.whl; do
    "$python" -m zipfile -e "$wheel" "$extra" || { echo "$wheel cannot be unpacked" >&2; exit 2; }
  done
fi
export PYTHONPATH="$PWD:$extra${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

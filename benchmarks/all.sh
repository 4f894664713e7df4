#!/bin/sh
# Every benchmark of docs/speed.md and docs/large.md in turn, on an otherwise idle machine: what each prints, its tables
# among it, goes to FOLDER/NAME.md, its figures to FOLDER/NAME.json.
#
#     benchmarks/all.sh FOLDER        (below the project's own folder; or: make benchmarks)
#
# PYTHON=... chooses the interpreter. A benchmark that fails is named at the end and does not stop the others.

set -u
cd "$(dirname "$0")/.." || exit 1
into=${1:?a folder for the tables, as in: benchmarks/all.sh speed}
python=${PYTHON:-python}
export OMP_NUM_THREADS=1
mkdir -p "$into" || exit 1
failed=

measured() { # name, file, options
    name=$1 file=$2
    shift 2
    started=$(date +%s)
    "$python" "benchmarks/$file" "$@" --json "$into/$name.json" >"$into/$name.md" 2>"$into/$name.log" || failed="$failed $name"
    echo "$name: $(($(date +%s) - started)) s"
}

measured engine-images engine.py --only W1 --rounds 8
measured engine-lenet5 engine.py --only W2 --rounds 8
measured engine-mlp engine.py --only W3 --rounds 14 --steps loop,compiled
measured engine-linear engine.py --only W4 --rounds 14 --steps loop,compiled
measured where where.py
measured where-compiled where.py --steps compiled
measured features features.py --rounds 3 --clients 2
measured evaluation evaluation.py
measured methods methods.py --clients 2 --samples 100 --turns 3 --where
measured server server.py
measured fedpac fedpac.py
measured fedsimsup fedsimsup.py --rounds 300 --measured 50
measured startup startup.py --turns 3
measured bf16 bf16.py --rounds 10
measured scale scale.py --rounds 20
measured splits splits.py --rows 1000000 --clients 100000
for later in checkpoint reception; do
    [ ! -e "benchmarks/$later.py" ] || measured "$later" "$later.py"
done

[ -z "$failed" ] || { echo "failed:$failed (see $into/*.log)"; exit 1; }

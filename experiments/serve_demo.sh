#!/usr/bin/env bash
# A population on one machine, from a config to a report: `make serve-demo` runs it.
#
#   experiments/serve_demo.sh COMMAND PRETRAINED FOLDER [secure]
#
# COMMAND is tff-dpftrl, PRETRAINED a folder of `tff-dpftrl pretrain`, which is made if it is
# missing, and FOLDER where tasks, store and report go. Run again, it goes on where it was.
# With `secure`, devices sum their reports themselves, in two groups a round, and one in ten of
# them drops out (SECURE=1 of make).
set -euo pipefail
command=$1 pretrained=$2 folder=$3
made=() served=() devices=()
if [ "${4:-}" = secure ]; then
  made=(--secure-aggregation --secagg-bits 20 --devices-per-aggregator 33)
  served=(--secure-aggregation)
  devices=(--drop-outs 0.1)
fi
task=$folder/tasks/nwp store=$folder/store
server='' fleet=''

finish() { # Ends what still runs, devices first.
  for process in $fleet $server; do
    kill -INT "$process" 2>/dev/null || true
    wait "$process" || true
  done
}
trap finish EXIT
trap 'exit 130' INT TERM

[ -e "$pretrained/model.npz" ] ||
  "$command" pretrain --config quickstart --output "$pretrained"
[ -e "$task" ] ||
  "$command" task new --config next_word --initial-weights "$pretrained" --output "$task" \
    "${made[@]}"

touch "$folder/starting" # Older files are of a server that was killed, or of one that still runs.
"$command" serve --population keyboard --task "$task" --store "$store" --round-seconds 5 --until-done \
  "${served[@]}" &
server=$!
until [ "$store/server/endpoint.json" -nt "$folder/starting" ]; do
  kill -0 "$server" 2>/dev/null || { wait "$server" && status=0 || status=$?; server=''; exit "$status"; }
  sleep 0.2
done

# Ctrl-C is for this script, which ends the fleet itself.
"$command" fleet --server-folder "$store/server" --population keyboard --data docs --devices 300 \
  --straggler-seconds 3 "${devices[@]}" &
fleet=$!
wait "$server" && status=0 || status=$?
server=''
kill -INT "$fleet" 2>/dev/null || true # It ends with a table of its sessions.
wait "$fleet" || true
fleet=''
[ "$status" = 0 ] || exit "$status"

"$command" task report "$task" --store "$store"

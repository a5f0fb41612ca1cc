#!/usr/bin/env bash
# usage: step.sh WORDS COMMAND...   Prints WORDS, a dot every few seconds while COMMAND runs, and its time.
# What COMMAND prints is shown only where it fails.
set -u
words=$1; shift
log=$(mktemp)
printf '  %-44s ' "$words"
(while sleep 10; do printf .; done) & dots=$!
trap 'kill "$dots" 2>/dev/null; rm -f "$log"' EXIT
began=$(date +%s)
"$@" >"$log" 2>&1
status=$?
kill "$dots" 2>/dev/null
if [ "$status" -eq 0 ]; then
    printf ' %s s\n' $(($(date +%s) - began))
else
    printf ' failed\n'; cat "$log"
fi
exit "$status"
